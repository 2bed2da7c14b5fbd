"""ImageChat: prompts with images, through the processor of a vision-language model."""

import importlib.util
from typing import Any, NamedTuple

from torch.nn.functional import pad
from transformers import AutoProcessor, PreTrainedTokenizerBase, ProcessorMixin

from lit_rl.data.chat import Chat, Messages, check_messages
from lit_rl.data.images import PLACE, images_of, places_in, with_parts, with_places
from lit_rl.errors import ConfigError, DataError
from lit_rl.images import ImageTensors, is_per_token
from lit_rl.paths import resolve_model_path


class ImagePrompt(NamedTuple):
    """A prompt as a vision-language model reads it.

    Attributes:
        ids: of the prompt, with as many image tokens as its images take.
        images: their tensors; None where there is no image.
    """

    ids: list[int]
    images: ImageTensors | None


class ImageChat(Chat):
    """A `Chat` whose prompts may hold images.

    An image has its place in the prompt: `<image>` in text, or a part `{"type": "image"}` of a message. The
    ids are those of the model's own processor, called with the row alone. Such a prompt is never cut.

    Args:
        processor: of a vision-language model.
        settings: the other arguments of `Chat`.
    """

    def __init__(self, processor: ProcessorMixin, **settings: Any) -> None:
        self.processor = processor
        super().__init__(self.processor.tokenizer, **settings)
        if self.processor.chat_template:
            self.tokenizer.chat_template = self.processor.chat_template

    def spellings(self) -> list[str]:
        return [*super().spellings(), PLACE, self.processor.image_token]

    def ids(self, prompt: str | Messages) -> list[int]:
        """See `Chat.ids`.

        Raises:
            ConfigError: the prompt has a place for an image, and this caller has none to put there.
        """
        if places_in(prompt):
            raise ConfigError(
                "data.image_key: a prompt with images is rendered by something that reads text alone; set "
                "data.image_key=null, or leave out what asked for it."
            )
        return super().ids(prompt)

    def whole(self, prompt: Any, value: Any, where: str, image_where: str) -> ImagePrompt:
        """A row's prompt with its images, whatever its length.

        Args:
            prompt: a string, or messages with role and content.
            value: the images, see `images_of`.
            where, image_where: file, row and column of either, for messages.

        Raises:
            DataError: one of them cannot be read, or there are more places than images, or fewer.
        """
        if not isinstance(prompt, str):
            check_messages(prompt, where, may_have_parts=True)
        images, places = images_of(value, image_where), places_in(prompt)
        if len(images) != places:
            raise DataError(
                f"{where} has {places} places for images ({PLACE} in text, or parts of the type image), and "
                f"{image_where} holds {len(images)}; there must be as many."
            )
        if not images:
            return ImagePrompt(self.rendered(with_places(prompt), where), None)
        out = self._processed(self._rendered_text(prompt, places, where), images, where)
        start = self._start if isinstance(prompt, str) else []
        ids = [*start, *out.pop("input_ids")[0].tolist()]
        tensors = ImageTensors(
            (name, pad(value[0].long(), (len(start), 0)) if is_per_token(name) else value)
            for name, value in out.items()
            if name != "attention_mask"
        )
        return ImagePrompt(ids, tensors)

    def _rendered_text(self, prompt: str | Messages, places: int, where: str) -> str:
        token = self.processor.image_token
        if isinstance(prompt, str):
            return prompt.replace(PLACE, token)
        try:
            text = self.template_text(prompt, add_generation_prompt=True)
        except ConfigError:
            raise
        except Exception as error:  # templates raise what they like
            raise DataError(f"{where}: the chat template failed ({error}).") from error
        if text.count(token) != places:
            raise DataError(
                f"{where}: the chat template writes {text.count(token)} times {token!r} for {places} images; "
                "it must write each once, and no text may spell it."
            )
        return text

    def _processed(self, text: str, images: list[Any], where: str) -> dict[str, Any]:
        try:
            return dict(
                self.processor(text=[text], images=[images], add_special_tokens=False, return_tensors="pt")
            )
        except ImportError as error:
            raise ConfigError(f"data.image_key: {type(self.processor).__name__} needs {error}.") from error
        except (ValueError, TypeError, RuntimeError) as error:
            raise DataError(
                f"{where}: {type(self.processor).__name__} cannot read the images ({error})."
            ) from error

    def template_text(self, messages: Messages, *, add_generation_prompt: bool) -> str:
        return super().template_text(with_parts(messages), add_generation_prompt=add_generation_prompt)


class ShownImages:
    """What renders other prompts around the images of one row, for a teacher; the images come but once.

    Args:
        chat: of the data.
        prompt: the row's own, with contents that are strings.
        value: its images.
        ids: of that prompt, as they were read.

    Raises:
        ConfigError: the processor writes images in a way that depends on the text around them.
    """

    def __init__(self, chat: ImageChat, prompt: Any, value: Any, ids: list[int]) -> None:
        self.chat, self.tokenizer, self.verbatim = chat, chat.tokenizer, chat.verbatim
        token = chat.processor.image_token
        self._images = [
            chat._processed(token, [image], "an image alone")["input_ids"][0].tolist()
            for image in images_of(value, "an image")
        ]
        if self.ids(prompt) != ids:
            raise ConfigError(
                f"data.image_key: {type(chat.processor).__name__} does not write an image into a prompt as "
                "it writes it alone, so that a teacher's prompt cannot hold it; set "
                "algo.distillation.distillation_weight=0, or use another model."
            )

    def ids(self, prompt: str | Messages) -> list[int]:
        """The prompt with the row's images at its places, in their order."""
        chat, token = self.chat, self.chat.processor.image_token
        is_text = isinstance(prompt, str)
        text = prompt.replace(PLACE, token) if isinstance(prompt, str) else chat.text(prompt)
        texts = text.split(token)
        ids = [*(chat._start if is_text else []), *chat.tokens(texts[0])]
        for image, following in zip(self._images, texts[1:], strict=True):
            ids += image + (chat.tokens(following) if following else [])
        return ids


def load_processor(path: str | PreTrainedTokenizerBase, *, trust_remote_code: bool = False) -> Any:
    """The processor of a vision-language model; images are read by PIL where torchvision is missing.

    Args:
        path: as `model.path`.
        trust_remote_code: run Python code that comes with it.

    Raises:
        ConfigError: the model reads text alone, or a package is missing.
    """
    if not isinstance(path, str):
        raise ConfigError(
            "data.image_key needs the path of a vision-language model in data.tokenizer (found a "
            f"{type(path).__name__}); set data.image_key=null to train on the text alone."
        )
    files = resolve_model_path(path, key="data.tokenizer")
    try:
        found = AutoProcessor.from_pretrained(files.folder_or_id, trust_remote_code=trust_remote_code)
    except (OSError, ValueError, ImportError, AttributeError) as error:
        raise ConfigError(
            f"data.image_key: the processor of {path!r} cannot be loaded: {_why(error)}"
        ) from error
    if getattr(found, "image_processor", None) is None or getattr(found, "image_token", None) is None:
        raise ConfigError(
            f"data.image_key: the data have a column of images, and model.path {path!r} reads text alone; "
            "use a vision-language model, or set data.image_key=null to train on the text alone."
        )
    return found


def _why(error: Exception) -> str:
    missing = [name for name in ("PIL", "torchvision") if importlib.util.find_spec(name) is None]
    first = (str(error).strip().splitlines() or [type(error).__name__])[0]
    return (
        f"{first.rstrip('.')}; not installed: {', '.join(missing)}." if missing else f"{first.rstrip('.')}."
    )
