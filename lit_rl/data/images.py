"""The images of a row, in every form that data sets keep them in, and their places in the prompt."""

import base64
import binascii
import io
import os
from typing import Any

from lit_rl.data.chat import Messages
from lit_rl.errors import ConfigError, DataError

PLACE = "<image>"
"""Stands for an image in a prompt that is a string, or in a message whose content is one (source: verl)."""

_DATA_URL = "data:image/"


def images_of(value: Any, where: str) -> list[Any]:
    """The images of one row, as RGB images of PIL.

    Args:
        value: an image, or a list of them: of PIL, its bytes, a mapping with `bytes` or `path` (as `datasets`
            and verl write them), a path, or a data URL; None is none.
        where: file, row and column, for messages.

    Raises:
        ConfigError: the package pillow is missing.
        DataError: one of them is something else, or cannot be read.
    """
    values = value if isinstance(value, list | tuple) else [] if value is None else [value]
    images = [_image(own, f"{where}, image {i}") for i, own in enumerate(values)]
    return images


def with_parts(messages: Messages) -> Messages:
    """The messages with contents of parts, as the templates of vision-language models read them.

    `<image>` in a content that is a string becomes a part of its own. Fields that are None are left out.
    """
    return [{**message, "content": _parts(message.get("content"))} for message in messages]


def with_places(prompt: str | Messages) -> str | Messages:
    """The prompt with contents that are strings, in which `<image>` stands for the parts that are images."""
    if isinstance(prompt, str):
        return prompt
    return [{**message, "content": _placed(message["content"])} for message in prompt]


def places_in(prompt: str | Messages) -> int:
    """Images that the prompt has a place for."""
    if isinstance(prompt, str):
        return prompt.count(PLACE)
    return sum(part["type"] == "image" for message in with_parts(prompt) for part in message["content"])


def _parts(content: Any) -> list[dict[str, Any]]:
    if not isinstance(content, str):
        return [{k: v for k, v in part.items() if v is not None} for part in content]
    texts = content.split(PLACE)
    parts: list[dict[str, Any]] = [{"type": "text", "text": texts[0]}]
    for text in texts[1:]:
        parts += [{"type": "image"}, {"type": "text", "text": text}]
    return [part for part in parts if part.get("text") != ""] or parts[:1]


def _placed(content: Any) -> str:
    if isinstance(content, str):
        return content
    return "".join(PLACE if part["type"] == "image" else part["text"] for part in content)


def _image(value: Any, where: str) -> Any:
    try:
        from PIL import Image
    except ImportError as error:
        raise ConfigError("data.image_key needs the package pillow, which is not installed.") from error
    if isinstance(value, Image.Image):
        return value.convert("RGB")
    source = _file(value, where)
    try:
        with Image.open(source) as image:
            return image.convert("RGB")
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        raise DataError(f"{where} cannot be read as an image ({error}).") from error


def _file(value: Any, where: str) -> Any:
    """What PIL opens: a path, or bytes as a file."""
    if isinstance(value, dict):
        known = [value.get(name) for name in ("bytes", "path") if value.get(name) is not None]
        value = known[0] if known else value
    if isinstance(value, bytes | bytearray):
        return io.BytesIO(value)
    if isinstance(value, str) and value.startswith(_DATA_URL):
        try:
            return io.BytesIO(base64.b64decode(value.partition(",")[2], validate=True))
        except binascii.Error as error:
            raise DataError(f"{where} is a data URL that holds no base64 ({error}).") from error
    if isinstance(value, str | os.PathLike) and str(value) and "://" not in str(value):
        return os.path.expanduser(str(value).removeprefix("file:"))
    shown = repr(value)
    raise DataError(
        f"{where} must be an image of PIL, its bytes, a mapping with bytes or path, a path, or a data URL "
        f"(found {shown if len(shown) <= 60 else shown[:57] + '...'})."
    )
