"""Chat: messages to token ids, for rollout, validation, supervised rows and teacher alike.

The one place that renders: whatever measures a prompt measures the ids that are generated from.
"""

import re
from typing import Any, NamedTuple

from transformers import AutoTokenizer, PreTrainedTokenizerBase

from lit_rl.errors import ConfigError, DataError
from lit_rl.paths import resolve_model_path

Messages = list[dict[str, Any]]

TRUNCATIONS = ("error", "left", "right", "middle")
_OURS = (
    "add_generation_prompt",
    "continue_final_message",
    "tokenize",
    "return_dict",
    "return_tensors",
    "conversation",
)
# Characters that no text holds stand around the index of a spelling in a text that is to stay plain.
_OPEN, _CLOSE = "\ufdd0", "\ufdd1"
_MARKED = re.compile(f"{_OPEN}(\\d+){_CLOSE}")


class Supervised(NamedTuple):
    """One row of supervised training.

    Attributes:
        prompt_ids: everything before the first assistant content, the generation header included.
        completion_ids: the rest of the conversation.
        completion_mask: as long as completion_ids; true at assistant content and its end token.
    """

    prompt_ids: list[int]
    completion_ids: list[int]
    completion_mask: list[bool]


class Chat:
    """Renders prompts with one tokenizer and its chat template.

    A prompt that is a string is tokenized as it stands, without template, after the tokenizer's start token
    if it has one. Messages go through the template with the generation header; fields of a message that are
    None are left out, and the template sees tools only when `chat_template_kwargs` names some.

    Args:
        tokenizer: a transformers tokenizer.
        chat_template_kwargs: further variables of the template.
        max_prompt_length: tokens of the rendered prompt; None is no limit.
        truncation: what befalls a longer prompt. "error": refused; "left", "right": cut on that side;
            "middle": head and tail stay. The generation header survives every cut.

    Raises:
        ConfigError: a setting is out of range, or repeats what the library sets itself.
    """

    processor: Any = None
    """What reads images beside the text, of a model that does."""

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        *,
        chat_template_kwargs: dict[str, Any] | None = None,
        max_prompt_length: int | None = None,
        truncation: str = "left",
    ) -> None:
        check_length_policy(max_prompt_length, truncation)
        self.tokenizer = tokenizer
        self.chat_template_kwargs = dict(chat_template_kwargs or {})
        self.max_prompt_length, self.truncation = max_prompt_length, truncation
        for name in _OURS:
            if name in self.chat_template_kwargs:
                raise ConfigError(
                    f"data.chat_template_kwargs must not hold {name!r}, which is always set; remove it."
                )
        self._specials = [_OPEN, *sorted(self.spellings(), key=len, reverse=True)]
        self._spelled = re.compile("|".join(re.escape(token) for token in self._specials))
        empty = self.tokens("", add_special_tokens=True)
        self._start = empty[:1] if empty[:1] == [tokenizer.bos_token_id] else []

    @property
    def pad_token_id(self) -> int:
        """The id at positions that do not exist, never read; the end token where there is no pad token."""
        for token_id in (self.tokenizer.pad_token_id, self.tokenizer.eos_token_id):
            if token_id is not None:
                return int(token_id)
        return 0

    def spellings(self) -> list[str]:
        """What a text would mean something by: the special tokens."""
        return [str(token) for token in self.tokenizer.added_tokens_decoder.values() if token.special]

    def decode(self, ids: list[int]) -> str:
        """Text without special tokens."""
        return str(self.tokenizer.decode(ids, skip_special_tokens=True))

    def spelling(self, token_id: int) -> str:
        """A token as it stands in a rendered text."""
        return str(self.tokenizer.decode([token_id]))

    def verbatim(self, text: str) -> str:
        """The text, marked so that `ids` takes what is spelled like a special token in it for plain text.

        For text by a model or an environment inside a prompt: it must not end a turn or open one.
        """
        return self._spelled.sub(lambda found: f"{_OPEN}{self._specials.index(found[0])}{_CLOSE}", text)

    def ids(self, prompt: str | Messages) -> list[int]:
        """The whole prompt, generation header included, whatever its length.

        Raises:
            ConfigError: messages, and the tokenizer has no chat template.
        """
        if isinstance(prompt, str):
            return self._start + self.tokens(prompt)
        return self.tokens(self.template_text(prompt, add_generation_prompt=True))

    def text(self, prompt: str | Messages) -> str:
        """The prompt as the template renders it, generation header included; a string as it stands."""
        return prompt if isinstance(prompt, str) else self.template_text(prompt, add_generation_prompt=True)

    def prompt_ids(self, prompt: str | Messages, where: str) -> list[int]:
        """The ids that are generated from and trained on: `ids`, cut to `max_prompt_length`.

        Args:
            prompt: a string, or messages with role and content.
            where: file, row and column, for messages.

        Raises:
            DataError: the prompt is none, cannot be rendered, or is too long with truncation "error".
        """
        return self.cut(self.rendered(prompt, where), prompt, where)

    def rendered(self, prompt: str | Messages, where: str) -> list[int]:
        """`ids` of a prompt that is data, whatever its length.

        Raises:
            DataError: the prompt is none, or cannot be rendered.
        """
        if not isinstance(prompt, str):
            check_messages(prompt, where)
            return self._turns(prompt, where, add_generation_prompt=True)
        if not prompt.strip():
            raise DataError(f"{where} must be text or messages (found {prompt!r}, which is empty).")
        return self.ids(prompt)

    def cut(self, ids: list[int], prompt: str | Messages, where: str) -> list[int]:
        """At most `max_prompt_length` of the prompt's rendered ids.

        Raises:
            DataError: there are more, with truncation "error".
            ConfigError: the generation header alone is too long.
        """
        limit = self.max_prompt_length
        if limit is None or len(ids) <= limit:
            return ids
        if self.truncation == "error":
            raise DataError(
                f"{where}: the prompt has {len(ids)} tokens, and data.max_prompt_length is {limit}; raise "
                "it, cut with data.truncation=left (or right, middle), or drop such rows with "
                "data.filter_overlong_prompts=true."
            )
        header = len(ids) - self._header_start(prompt, ids)
        if header >= limit:
            raise ConfigError(
                f"data.max_prompt_length must exceed the {header} tokens of the template's generation header "
                f"(found {limit})."
            )
        return _cut(ids, limit, header, self.truncation)

    def supervised(self, messages: Messages, where: str) -> Supervised:
        """A conversation as prompt and completion, with what is supervised marked.

        Each assistant turn must start where the rendering of the turns before it, with the generation header,
        ends: then the row trains what a rollout would have to write. The turn ends at the template's end
        marker.

        Args:
            messages: with role and content, at least one of them of the assistant.
            where: file, row and column, for messages.

        Raises:
            DataError: no assistant turn, or one that does not follow its own prompt.
        """
        check_messages(messages, where)
        turns = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
        if not turns:
            raise DataError(f"{where} must hold a message of the role assistant (found none).")
        full = self._turns(messages, where)
        mask = [False] * len(full)
        starts = [self._turn_start(messages, i, full, where) for i in turns]
        for start, i in zip(starts, turns, strict=True):
            end = self._turn_end(messages[: i + 1], start, full, where)
            mask[start:end] = [True] * (end - start)
        first = starts[0]
        return Supervised(full[:first], full[first:], mask[first:])

    def _turns(self, messages: Messages, where: str, *, add_generation_prompt: bool = False) -> list[int]:
        try:
            return self.tokens(self.template_text(messages, add_generation_prompt=add_generation_prompt))
        except ConfigError:
            raise
        except Exception as error:  # templates raise what they like
            raise DataError(f"{where}: the chat template failed ({error}).") from error

    def _turn_start(self, messages: Messages, turn: int, full: list[int], where: str) -> int:
        """Where the turn's content begins in the whole conversation."""
        if turn == 0:
            raise DataError(
                f"{where} must not begin with a message of the role assistant; there is no prompt."
            )
        prefix = self._turns(messages[:turn], where, add_generation_prompt=True)
        if full[: len(prefix)] != prefix:
            at = _common_prefix(prefix, full)
            raise DataError(
                f"{where}: message {turn} does not follow its prompt: the prompt ends in "
                f"{self.tokenizer.decode(prefix[at:])!r} where the whole conversation has "
                f"{self.tokenizer.decode(full[at : len(prefix)])!r}; the template renders earlier turns or "
                "the generation header differently (see data.chat_template_kwargs)."
            )
        return len(prefix)

    def _turn_end(self, messages: Messages, start: int, full: list[int], where: str) -> int:
        """One past the end marker of the turn that begins at `start`, the last of `messages`.

        The marker is the last special token of the turn as rendered last; what a template puts behind it,
        such as a line break, is not for the model to write. Without a marker the turn ends with its text.
        """
        alone = self._turns(messages, where)
        special = set(self.tokenizer.all_special_ids)
        markers = [token for token in alone[start:] if token in special]
        if markers and markers[-1] in full[start:]:
            return full.index(markers[-1], start) + 1
        if not markers and full[: len(alone)] == alone:
            return len(alone)
        raise DataError(
            f"{where}: no end of message {len(messages) - 1} is to be found in the whole conversation."
        )

    def _header_start(self, prompt: str | Messages, ids: list[int]) -> int:
        """Where the part begins that the template adds for generation."""
        if isinstance(prompt, str):
            return len(ids)
        return _common_prefix(self.tokens(self.template_text(prompt, add_generation_prompt=False)), ids)

    def template_text(self, messages: Messages, *, add_generation_prompt: bool) -> str:
        """What the chat template makes of the messages.

        Raises:
            ConfigError: there is no template.
        """
        if not self.tokenizer.chat_template:
            raise ConfigError(
                "data.tokenizer must have a chat template for prompts that are messages (found none); give "
                "the tokenizer of an instruction-tuned model, or prompts that are strings."
            )
        filled = [
            {name: value for name, value in message.items() if value is not None} for message in messages
        ]
        return str(
            self.tokenizer.apply_chat_template(
                filled,
                tokenize=False,
                add_generation_prompt=add_generation_prompt,
                **self.chat_template_kwargs,
            )
        )

    def tokens(self, text: str, *, add_special_tokens: bool = False) -> list[int]:
        """The ids of a text, alone and without a template; see `verbatim`."""
        parts = _MARKED.split(text)  # plain text, index of a spelling, plain text, ...
        ids = list(self.tokenizer(parts[0], add_special_tokens=add_special_tokens)["input_ids"])
        for index, plain in zip(parts[1::2], parts[2::2], strict=True):
            spelling = self._specials[int(index)]
            ids += self.tokenizer(spelling, add_special_tokens=False, split_special_tokens=True)["input_ids"]
            ids += self.tokenizer(plain, add_special_tokens=False)["input_ids"] if plain else []
        return ids


def load_tokenizer(path: str, *, trust_remote_code: bool = False) -> PreTrainedTokenizerBase:
    """The tokenizer of a model path.

    Args:
        path: as `model.path`: `embedded`, a folder, a hub id or a .gguf file.
        trust_remote_code: run Python code that comes with the tokenizer.

    Raises:
        ConfigError: there is no tokenizer.
    """
    files = resolve_model_path(path, key="data.tokenizer")
    extra = {} if files.gguf_file is None else {"gguf_file": files.gguf_file}
    try:
        return AutoTokenizer.from_pretrained(files.folder_or_id, trust_remote_code=trust_remote_code, **extra)
    except (OSError, ValueError) as error:
        raise ConfigError(f"data.tokenizer must name a tokenizer (found {path!r}): {error}") from error


def plain_text(prompt: str | Messages) -> str:
    """The contents of the messages, a line break between two; a string as it stands."""
    return prompt if isinstance(prompt, str) else "\n".join(_content_text(m["content"]) for m in prompt)


def _content_text(content: str | list[dict[str, Any]]) -> str:
    return content if isinstance(content, str) else " ".join(part.get("text") or "" for part in content)


def as_messages(prompt: str | Messages) -> Messages:
    """The prompt as messages; a string is what the user says."""
    return [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt


def check_length_policy(max_prompt_length: int | None, truncation: str) -> None:
    """Raise a ConfigError unless both are legal."""
    if max_prompt_length is not None and max_prompt_length < 1:
        raise ConfigError(f"data.max_prompt_length must be null or >= 1 (found {max_prompt_length!r}).")
    if truncation not in TRUNCATIONS:
        raise ConfigError(f"data.truncation must be one of {', '.join(TRUNCATIONS)} (found {truncation!r}).")


def check_messages(messages: Any, where: str, *, may_have_parts: bool = False) -> None:
    """Raise a DataError unless this is a list of messages with role and content.

    Args:
        messages: to be looked at.
        where: file, row and column.
        may_have_parts: a content may be a list of texts and images.
    """
    if not isinstance(messages, list) or not messages:
        raise DataError(f"{where} must be text or a list of messages (found {_shown(messages)}).")
    for i, message in enumerate(messages):
        if not isinstance(message, dict):
            raise DataError(f"{where}, message {i} must have role and content (found {_shown(message)}).")
        if may_have_parts and isinstance(message.get("content"), list):
            _check_parts(message["content"], f"{where}, message {i}")
            message = {**message, "content": ""}
        for name in ("role", "content"):
            if not isinstance(message.get(name), str):
                raise DataError(
                    f"{where}, message {i} must have a text {name!r} (found {_shown(message.get(name))})."
                )
    if not any(_says_something(message["content"]) for message in messages):
        raise DataError(f"{where} must hold a message that says something (found {_shown(messages)}).")


def _says_something(content: str | list[dict[str, Any]]) -> bool:
    if isinstance(content, str):
        return bool(content.strip())
    return any(part["type"] == "image" or part["text"].strip() for part in content)


def _check_parts(parts: list[Any], where: str) -> None:
    for part in parts:
        kind = part.get("type") if isinstance(part, dict) else None
        if kind == "text" and isinstance(part.get("text"), str):
            continue
        if kind != "image" or any(value is not None for name, value in part.items() if name != "type"):
            raise DataError(
                f"{where} must have parts of the type text, with a text, or image, with nothing else: the "
                f"images are in the column of data.image_key (found {_shown(part)})."
            )


def _cut(ids: list[int], limit: int, header: int, side: str) -> list[int]:
    """`limit` of the ids; the last `header` of them stay."""
    if side == "left":
        return ids[-limit:]
    body, end = ids[: len(ids) - header], ids[len(ids) - header :]
    keep = limit - header
    head = keep if side == "right" else keep // 2
    tail = keep - head
    return body[:head] + body[len(body) - tail :] + end


def _common_prefix(a: list[int], b: list[int]) -> int:
    """Number of leading ids that are equal."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
