"""PromptReader: the prompt of a row, with its images where the data have some."""

from dataclasses import dataclass
from typing import Any

from lit_rl.data.chat import Chat
from lit_rl.data.image_chat import ImageChat, ImagePrompt
from lit_rl.errors import DataError


@dataclass(frozen=True)
class PromptReader:
    """Reads the prompt of a row, with its images where the data have some.

    Args:
        chat: renders and cuts; an `ImageChat` where there is a column of images.
        prompt_key: column of the prompt.
        image_key: column of the images, or None.
    """

    chat: Chat
    prompt_key: str
    image_key: str | None = None

    def __call__(self, row: dict[str, Any], where: str) -> ImagePrompt:
        """The ids that are generated from, and what is read beside them.

        Args:
            row: of the data.
            where: file and row.

        Raises:
            DataError: they cannot be read, or are too long to be used.
        """
        return self.limited(self.whole(row, where), row, where)

    def whole(self, row: dict[str, Any], where: str) -> ImagePrompt:
        """The same, whatever its length."""
        prompt, at = row[self.prompt_key], f"{where}, column {self.prompt_key!r}"
        if self.image_key is None:
            return ImagePrompt(self.chat.rendered(prompt, at), None)
        assert isinstance(self.chat, ImageChat)
        images = row.get(self.image_key)
        return self.chat.whole(prompt, images, at, f"{where}, column {self.image_key!r}")

    def limited(self, found: ImagePrompt, row: dict[str, Any], where: str) -> ImagePrompt:
        """What was found, cut to `data.max_prompt_length` where it holds no image."""
        at = f"{where}, column {self.prompt_key!r}"
        if found.images is None:
            return ImagePrompt(self.chat.cut(found.ids, row[self.prompt_key], at), None)
        limit = self.chat.max_prompt_length
        if limit is not None and len(found.ids) > limit:
            raise DataError(
                f"{at}: the prompt has {len(found.ids)} tokens with its images, and data.max_prompt_length "
                f"is {limit}; a prompt with images is not cut: raise it, or drop such rows with "
                "data.filter_overlong_prompts=true."
            )
        return found
