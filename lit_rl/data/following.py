"""What a chat template writes behind a turn of the assistant, as ids, without the turns before it."""

from typing import Any

from lit_rl.data.chat import Chat, Messages
from lit_rl.errors import ConfigError, DataError

_PLACE = "\ufdd2"  # stands for the assistant's turn; no text holds it


def following_ids(
    chat: Chat, end_token_ids: list[int], messages: Messages, is_text: bool, last_id: int
) -> list[int]:
    """The ids between a turn of the policy and its next one: what is left of its end, messages, header.

    Contents are taken for plain text, whatever is spelled in them. Where the policy wrote an end token
    itself, the template's own end marker is left out.

    Args:
        chat: has the template.
        end_token_ids: every id that ends a turn.
        messages: with role and content.
        is_text: the prompt is a string, so that contents follow without a template.
        last_id: of the policy's turn.

    Raises:
        ConfigError: the template refuses the messages or drops the assistant's.
        DataError: a message is none.
    """
    contents = [_content(message) for message in messages]
    plain = [{**m, "content": chat.verbatim(text)} for m, text in zip(messages, contents, strict=True)]
    if is_text:
        return chat.tokens("".join(message["content"] for message in plain))
    opening: Messages = [{"role": "user", "content": "x"}, {"role": "assistant", "content": _PLACE}]
    behind = _behind(chat, [*opening, *plain], header=True)
    if last_id in end_token_ids:
        closing = _behind(chat, opening, header=False)
        ends = [chat.spelling(end) for end in end_token_ids]
        written = min((closing.index(end) + len(end) for end in ends if end in closing), default=0)
        behind = behind.removeprefix(closing[:written])
    return chat.tokens(behind)


def _behind(chat: Chat, messages: Messages, *, header: bool) -> str:
    """What the template writes behind the place."""
    roles = [message["role"] for message in messages[2:]]
    try:
        text = chat.template_text(messages, add_generation_prompt=header)
    except ConfigError:
        raise
    except Exception as error:  # templates raise what they like
        raise ConfigError(
            f"rollout.environment: the chat template does not take messages of the roles {roles} behind one "
            f"of the assistant ({error}); give its messages a role that it has, such as 'user'."
        ) from error
    if text.count(_PLACE) != 1:
        raise ConfigError(
            "rollout.environment: the chat template does not render a turn of the assistant inside a "
            "conversation as it was written; use another template."
        )
    return text.partition(_PLACE)[2]


def _content(message: Any) -> str:
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise DataError(f"rollout.environment: a message must have role and content (found {message!r}).")
    content = message.get("content")
    if not isinstance(content, str):
        raise DataError(f"rollout.environment: a message must have a text 'content' (found {content!r}).")
    return content
