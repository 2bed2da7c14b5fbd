import pickle

import pytest
from byte_tokenizer import TEMPLATE, byte_tokenizer

from lit_rl.data.chat import Chat
from lit_rl.errors import ConfigError, DataError

USER = {"role": "user", "content": "2+2?"}
ANSWER = {"role": "assistant", "content": "four"}
WHERE = "train.parquet, row 3, column 'prompt'"

# As Qwen: earlier turns lose their thoughts, the switch adds empty ones, a line break follows the end.
THINKING = (
    "{% set last = namespace(user=0) %}"
    "{% for m in messages %}{% if m.role == 'user' %}{% set last.user = loop.index0 %}{% endif %}{% endfor %}"
    "{% for m in messages %}<|{{ m.role }}|>"
    "{% if m.role == 'assistant' and loop.index0 < last.user %}{{ m.content.split('</think>')[-1] }}"
    "{% else %}{{ m.content }}{% endif %}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>"
    "{% if enable_thinking is defined and not enable_thinking %}<think></think>{% endif %}{% endif %}"
)


def shown(chat: Chat, ids: list[int]) -> str:
    return chat.tokenizer.decode(ids)


def supervised_text(chat: Chat, messages: list[dict]) -> list[str]:
    """The supervised stretches of a conversation."""
    row = chat.supervised(messages, WHERE)
    stretches: list[list[int]] = [[]]
    for token, counts in zip(row.completion_ids, row.completion_mask, strict=True):
        if counts:
            stretches[-1].append(token)
        elif stretches[-1]:
            stretches.append([])
    return [shown(chat, stretch) for stretch in stretches if stretch]


def test_messages_get_the_template_and_the_generation_header() -> None:
    chat = Chat(byte_tokenizer())
    assert shown(chat, chat.ids([USER])) == "<|user|>2+2?<|end|><|assistant|>"
    assert chat.prompt_ids([USER], WHERE) == chat.ids([USER])


def test_a_string_is_tokenized_as_it_stands_after_the_start_token() -> None:
    plain, with_start = Chat(byte_tokenizer()), Chat(byte_tokenizer(bos="<|start|>"))
    assert shown(plain, plain.prompt_ids("2+2=", WHERE)) == "2+2="
    assert shown(with_start, with_start.prompt_ids("2+2=", WHERE)) == "<|start|>2+2="
    assert shown(with_start, with_start.ids([USER])) == "<|user|>2+2?<|end|><|assistant|>"


def test_a_string_needs_no_template_and_messages_do() -> None:
    chat = Chat(byte_tokenizer(template=None))
    assert chat.prompt_ids("2+2=", WHERE)
    with pytest.raises(ConfigError, match=r"data\.tokenizer must have a chat template"):
        chat.prompt_ids([USER], WHERE)


@pytest.mark.field("data/1")
def test_no_tools_means_no_tools_in_prompt_and_supervised_row() -> None:
    template = "{% if tools is not none %}TOOLS{% endif %}" + TEMPLATE
    chat = Chat(byte_tokenizer(template))
    prompt = chat.prompt_ids([USER], WHERE)
    assert "TOOLS" not in shown(chat, prompt)
    assert chat.supervised([USER, ANSWER], WHERE).prompt_ids == prompt


def test_fields_of_a_message_that_are_none_are_not_shown_to_the_template() -> None:
    template = "{% for m in messages %}{% if 'name' in m %}NAME{% endif %}{{ m.content }}{% endfor %}"
    chat = Chat(byte_tokenizer(template))
    assert shown(chat, chat.ids([{**USER, "name": None}])) == "2+2?"


def test_template_arguments_reach_every_rendering() -> None:
    chat = Chat(byte_tokenizer("{{ tone }}" + TEMPLATE), chat_template_kwargs={"tone": "kind"})
    assert shown(chat, chat.ids([USER])).startswith("kind<|user|>")
    assert shown(chat, chat.supervised([USER, ANSWER], WHERE).prompt_ids).startswith("kind<|user|>")
    with pytest.raises(
        ConfigError, match=r"data\.chat_template_kwargs must not hold 'add_generation_prompt'"
    ):
        Chat(byte_tokenizer(), chat_template_kwargs={"add_generation_prompt": False})


@pytest.mark.field("gen/5")
@pytest.mark.parametrize(
    ("truncation", "kept"),
    [
        ("left", "hij<|end|><|assistant|>"),
        ("right", "<|user|>abc<|assistant|>"),
        ("middle", "<|user|>aj<|end|><|assistant|>"),
    ],
)
def test_the_generation_header_survives_every_cut(truncation: str, kept: str) -> None:
    chat = Chat(byte_tokenizer(), max_prompt_length=5, truncation=truncation)
    ids = chat.prompt_ids([{"role": "user", "content": "abcdefghij"}], WHERE)
    assert len(ids) == 5
    assert shown(chat, ids) == kept


def test_a_header_of_several_tokens_survives_whole() -> None:
    chat = Chat(byte_tokenizer(THINKING), max_prompt_length=20, truncation="right")
    chat.chat_template_kwargs = {"enable_thinking": False}
    ids = chat.prompt_ids([{"role": "user", "content": "abcdefghij"}], WHERE)
    assert shown(chat, ids) == "<|user|>abc<|assistant|><think></think>"


def test_a_limit_that_leaves_no_room_beside_the_header_is_refused() -> None:
    chat = Chat(byte_tokenizer(), max_prompt_length=1)
    with pytest.raises(
        ConfigError, match=r"data\.max_prompt_length must exceed the 1 tokens .*header \(found 1\)"
    ):
        chat.prompt_ids([USER], WHERE)


def test_a_string_is_cut_on_the_side_that_is_asked_for() -> None:
    cuts = {
        side: Chat(byte_tokenizer(), max_prompt_length=4, truncation=side)
        for side in ("left", "right", "middle")
    }
    kept = {side: shown(chat, chat.prompt_ids("abcdefgh", WHERE)) for side, chat in cuts.items()}
    assert kept == {"left": "efgh", "right": "abcd", "middle": "abgh"}


@pytest.mark.field("gen/5")
def test_with_error_an_overlong_prompt_is_refused_with_its_place() -> None:
    chat = Chat(byte_tokenizer(), max_prompt_length=6, truncation="error")
    with pytest.raises(
        DataError, match=r"^train\.parquet, row 3, column 'prompt': the prompt has 7 tokens, and data"
    ):
        chat.prompt_ids([USER], WHERE)
    assert len(Chat(byte_tokenizer(), max_prompt_length=7, truncation="error").prompt_ids([USER], WHERE)) == 7


@pytest.mark.parametrize(
    "prompt", [None, "", [], {}, 3, [None], [{"role": "user"}], [{"role": "user", "content": None}]]
)
def test_a_prompt_that_cannot_be_rendered_is_refused_with_its_place(prompt: object) -> None:
    with pytest.raises(DataError, match=r"^train\.parquet, row 3, column 'prompt'"):
        Chat(byte_tokenizer()).prompt_ids(prompt, WHERE)  # type: ignore[arg-type]


def test_what_a_template_raises_is_told_with_its_place() -> None:
    chat = Chat(byte_tokenizer("{{ raise_exception('roles must alternate') }}"))
    with pytest.raises(
        DataError, match=r"row 3, column 'prompt': the chat template failed \(roles must alternate\)"
    ):
        chat.prompt_ids([USER], WHERE)


@pytest.mark.field("data/3")
def test_exactly_the_answer_and_its_end_token_are_supervised() -> None:
    chat = Chat(byte_tokenizer())
    row = chat.supervised([USER, ANSWER], WHERE)
    assert row.prompt_ids == chat.ids([USER])
    assert shown(chat, row.completion_ids) == "four<|end|>"
    assert all(row.completion_mask) and len(row.completion_mask) == len(row.completion_ids)


@pytest.mark.field("data/3")
def test_every_assistant_turn_is_supervised_and_nothing_between() -> None:
    chat = Chat(byte_tokenizer(TEMPLATE.replace("<|end|>", "<|end|>\n", 1)))
    messages = [USER, ANSWER, {"role": "user", "content": "3+3?"}, {"role": "assistant", "content": "six"}]
    row = chat.supervised(messages, WHERE)
    assert supervised_text(chat, messages) == ["four<|end|>", "six<|end|>"]
    assert shown(chat, row.completion_ids) == "four<|end|>\n<|user|>3+3?<|end|>\n<|assistant|>six<|end|>\n"


def test_without_an_end_marker_a_turn_ends_with_its_text() -> None:
    chat = Chat(
        byte_tokenizer(
            "{% for m in messages %}{{ m.role[0] }}:{{ m.content }};{% endfor %}"
            "{% if add_generation_prompt %}a:{% endif %}"
        )
    )
    assert supervised_text(chat, [USER, ANSWER, USER, ANSWER]) == ["four;", "four;"]


@pytest.mark.field("data/4")
def test_thoughts_of_the_last_turn_are_supervised_verbatim() -> None:
    chat = Chat(byte_tokenizer(THINKING))
    thought = {"role": "assistant", "content": "<think>hm\n</think>four"}
    assert supervised_text(chat, [USER, thought]) == ["<think>hm\n</think>four<|end|>"]
    assert supervised_text(chat, [USER, thought, USER, thought]) == [
        "four<|end|>",
        "<think>hm\n</think>four<|end|>",
    ]


@pytest.mark.field("data/3")
@pytest.mark.field("data/4")
def test_an_answer_that_does_not_follow_its_header_is_refused_with_its_row() -> None:
    chat = Chat(byte_tokenizer(THINKING), chat_template_kwargs={"enable_thinking": False})
    assert shown(chat, chat.ids([USER])).endswith("<|assistant|><think></think>")
    with pytest.raises(DataError, match=r"row 3, column 'prompt': message 1 does not follow its prompt"):
        chat.supervised([USER, ANSWER], WHERE)


@pytest.mark.parametrize(
    ("messages", "words"),
    [
        ([USER], "must hold a message of the role assistant"),
        ([ANSWER, USER], "must not begin with a message of the role assistant"),
        (None, "must be text or a list of messages"),
    ],
)
def test_a_conversation_without_prompt_or_answer_is_refused(messages: list[dict], words: str) -> None:
    with pytest.raises(DataError, match=rf"^train\.parquet, row 3, column 'prompt' {words}"):
        Chat(byte_tokenizer()).supervised(messages, WHERE)


def test_decoding_leaves_out_special_tokens() -> None:
    chat = Chat(byte_tokenizer())
    assert chat.decode(chat.ids([USER])) == "2+2?"


def test_padding_falls_back_to_the_end_token_and_adds_none() -> None:
    with_pad, without = byte_tokenizer(), byte_tokenizer(pad=None)
    assert Chat(with_pad).pad_token_id == with_pad.pad_token_id
    size = len(without)
    assert Chat(without).pad_token_id == without.eos_token_id
    assert without.pad_token_id is None and len(without) == size


def test_a_chat_travels_to_a_loader_worker() -> None:
    chat = Chat(byte_tokenizer(), max_prompt_length=5, truncation="middle")
    again = pickle.loads(pickle.dumps(chat))
    assert again.prompt_ids([USER], WHERE) == chat.prompt_ids([USER], WHERE)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"max_prompt_length": 0}, r"data\.max_prompt_length must be null or >= 1 \(found 0\)"),
        (
            {"truncation": "top"},
            r"data\.truncation must be one of error, left, right, middle \(found 'top'\)",
        ),
    ],
)
def test_settings_out_of_range_are_refused(settings: dict, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        Chat(byte_tokenizer(), **settings)
