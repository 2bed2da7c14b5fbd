"""What stands behind a turn is what the template would write there, whatever the turn held."""

from typing import Any

import pytest

from lit_rl.data.chat import Chat, load_tokenizer
from lit_rl.data.following import following_ids
from lit_rl.errors import ConfigError

CHATML = (  # answers of tools inside a turn of the user, as some templates have it
    "{% for m in messages %}"
    "{% if m.role == 'tool' %}<|user|>\n<tool_response>{{ m.content }}</tool_response><|end|>\n"
    "{% else %}<|{{ m.role }}|>\n{{ m.content }}<|end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)
NO_END = (
    "{% for m in messages %}[{{ m.role }}] {{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}[assistant] {% endif %}"
)
ASKED = [{"role": "user", "content": "37*24=?"}]
TOOL = [{"role": "tool", "content": "888"}]
USER = [{"role": "user", "content": "888"}]


def chat_of(template: str | None = None) -> Chat:
    tokenizer = load_tokenizer("embedded")
    tokenizer.chat_template = template or tokenizer.chat_template
    return Chat(tokenizer)


@pytest.mark.parametrize(
    ("template", "messages"), [(None, USER), (CHATML, USER), (CHATML, TOOL * 2), (NO_END, TOOL)]
)
def test_a_conversation_written_in_turns_is_the_rendered_one(template: str | None, messages: Any) -> None:
    """The embedded tokenizer writes each character alone, so that there is one spelling to compare with."""
    chat = chat_of(template)
    end = chat.tokenizer.eos_token_id
    has_end = template is not NO_END
    said = chat.tokens("call") + ([end] if has_end else [])
    found = chat.ids(ASKED) + said + following_ids(chat, [end], messages, False, said[-1])
    assert found == chat.ids([*ASKED, {"role": "assistant", "content": "call"}, *messages])


def test_an_end_that_the_policy_did_not_write_is_written_for_it() -> None:
    chat = chat_of(CHATML)
    end, last = chat.tokenizer.eos_token_id, chat.tokens("l")[0]
    assert following_ids(chat, [end], USER, False, last) == [
        end,
        *following_ids(chat, [end], USER, False, end),
    ]


def test_another_end_token_stands_for_the_template_s() -> None:
    chat = chat_of()
    other, end = 0, chat.tokenizer.eos_token_id
    assert following_ids(chat, [other, end], USER, False, other) == following_ids(
        chat, [end], USER, False, end
    )


def test_a_template_without_the_role_is_refused_with_another_in_the_message() -> None:
    with pytest.raises(ConfigError, match=r"roles \['tool'\].*such as 'user'"):
        following_ids(chat_of(), [1], TOOL, False, 1)


def test_a_template_that_drops_turns_is_refused() -> None:
    with pytest.raises(ConfigError, match="does not render a turn of the assistant"):
        following_ids(chat_of("{{ messages[-1].content }}"), [1], USER, False, 1)
