"""Conversations: whose ids are whose, when they end, and that nothing depends on the rows beside them."""

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from lit_rl import load_policy
from lit_rl.batch import RolloutBatch, padded
from lit_rl.data.chat import Chat, load_tokenizer
from lit_rl.data.following import following_ids
from lit_rl.errors import ConfigError, DataError
from lit_rl.rollout.conversation import Conversations
from lit_rl.rollout.environment import Environment, Turn
from lit_rl.rollout.hf import HFEngine
from lit_rl.rollout.sampling import Sampling

from .tiny import plain_logps

QUESTIONS = ["47+38=?", "12+11=?", "83-47=?", "29+54=?"]


@dataclass
class Retry(Environment):
    """Says "wrong" until the answer is right."""

    max_turns: int | None = 3
    step_timeout: float | None = None
    said: list[str] = field(default_factory=list)

    def reset(self, row: dict[str, Any]) -> None:
        question = row["prompt"] if isinstance(row["prompt"], str) else row["prompt"][0]["content"]
        self.answer = str(eval(question[:-2]))

    def step(self, completion: str) -> Turn:
        self.said.append(completion)
        if completion == self.answer:
            return Turn(done=True, reward=1.0)
        return Turn([{"role": "user", "content": "wrong"}], reward=-0.25, feedback=f"not {completion}")


@dataclass
class ScriptedEngine:
    """Writes what the script says, turn by turn, and remembers what it was asked."""

    script: list[list[list[int]]]
    asked: list[RolloutBatch] = field(default_factory=list)
    limits: list[int] = field(default_factory=list)

    def generate(
        self, prompts: RolloutBatch, *, num_generations: int, sampling: Sampling, **_: Any
    ) -> RolloutBatch:
        self.asked.append(prompts)
        self.limits.append(sampling.max_completion_length)
        rows = prompts.repeat(num_generations)
        written = [ids[: sampling.max_completion_length] for ids in self.script[len(self.asked) - 1]]
        rows.completion_ids, rows.completion_len = padded(written, "right")
        rows.finish_reason = ["stop"] * len(rows)
        rows.policy_version = torch.zeros(len(rows), dtype=torch.long)
        return rows


def prompts_of(chat: Chat, questions: list[Any], rows: list[int] | None = None) -> RolloutBatch:
    said = [q if q == "say" else [{"role": "user", "content": q}] for q in questions]
    ids, lengths = padded([chat.ids(prompt) for prompt in said], "left")
    numbers = torch.tensor(rows or list(range(len(said))))
    return RolloutBatch(ids, lengths, numbers, columns={"prompt": said})


def conversations(chat: Chat, environment: Environment | None = None, **settings: Any) -> Conversations:
    end = chat.tokenizer.eos_token_id
    return Conversations(
        environment or Retry(),
        chat=chat,
        following=partial(following_ids, chat, [end]),
        prompt_key="prompt",
        **settings,
    )


@pytest.fixture(scope="module")
def chat() -> Chat:
    return Chat(load_tokenizer("embedded"))


@pytest.fixture(scope="module")
def engine(chat: Chat) -> HFEngine:
    engine = HFEngine()
    engine.bind(load_policy("embedded"), end_token_ids=[1], pad_token_id=0, decode=chat.decode)
    engine.sync_weights([], 0)
    return engine


def written(
    engine: Any, chat: Chat, questions: Any = None, G: int = 2, rows: Any = None, **settings: Any
) -> RolloutBatch:
    sampling = Sampling(**{"max_completion_length": 40, "temperature": 0.9, **settings.pop("sampling", {})})
    prompts = prompts_of(chat, questions or QUESTIONS, rows)
    write = partial(engine.generate, seed=3, step=1)
    return conversations(chat, **settings)(prompts, write, num_generations=G, sampling=sampling)


def completion(rows: RolloutBatch, b: int) -> list[int]:
    return rows.completion_ids[b, : int(rows.completion_len[b])].tolist()


def test_rows_end_at_different_turns_and_the_mask_marks_the_policy_s_tokens(
    engine: HFEngine, chat: Chat
) -> None:
    rows = written(engine, chat, G=4)
    turns = [talk.turns for talk in rows.conversations]
    assert {1, 3} <= set(turns), "some are right at once, some never"
    wrong = chat.tokenizer.encode("<|user|>wrong<|end|><|assistant|>")
    for b, talk in enumerate(rows.conversations):
        ids, own = completion(rows, b), rows.completion_mask[b].tolist()
        foreign = [token for token, is_own in zip(ids, own, strict=False) if not is_own]
        assert foreign == wrong * (talk.turns - 1) and own[len(ids) - 1]
        roles = ["assistant", "user"] * (talk.turns - 1) + ["assistant"]
        assert [message["role"] for message in talk.messages] == roles
        is_right = talk.messages[-1]["content"] == str(eval(QUESTIONS[b // 4][:-2]))
        assert talk.reward == is_right - 0.25 * (talk.turns - is_right)
        assert rows.finish_reason[b] == ("stop" if is_right else "length")
        assert (talk.feedback or "").count("not ") == talk.turns - is_right
    assert torch.equal(rows.foreign_mask, rows.token_mask & ~rows.completion_mask)
    assert torch.equal(rows.written_mask, rows.completion_mask)
    assert not rows.rollout_logps[rows.foreign_mask].any()


def test_log_probabilities_are_those_of_one_plain_pass_over_all_ids(engine: HFEngine, chat: Chat) -> None:
    rows = written(engine, chat, G=4)
    plain = plain_logps(engine._model, rows, temperature=0.9)
    gap = (plain - rows.rollout_logps)[rows.completion_mask]
    assert len(gap) > 50 and gap.abs().max() < 2e-5


def test_nothing_depends_on_the_rows_beside(engine: HFEngine, chat: Chat) -> None:
    together = written(engine, chat)
    for p, question in enumerate(QUESTIONS):
        alone = written(engine, chat, [question], rows=[p])
        for g in range(2):
            assert completion(alone, g) == completion(together, 2 * p + g)
            assert alone.conversations[g] == together.conversations[2 * p + g]


def test_an_engine_of_little_room_writes_the_same_in_parts(engine: HFEngine, chat: Chat) -> None:
    asked: list[int] = []

    def write(prompts: RolloutBatch, *, num_generations: int, sampling: Sampling) -> RolloutBatch:
        asked.append(int(prompts.prompt_len.max()) + sampling.max_completion_length)
        return engine.generate(prompts, num_generations=num_generations, sampling=sampling, seed=3, step=1)

    sampling, prompts = Sampling(max_completion_length=40, temperature=0.9), prompts_of(chat, QUESTIONS)
    room = int(prompts.prompt_len.max()) + 40
    rows = conversations(chat, room=room)(prompts, write, num_generations=2, sampling=sampling)
    usual = written(engine, chat)
    assert torch.equal(rows.completion_ids, usual.completion_ids)
    assert max(asked) <= room and len(asked) > 3


def test_every_turn_has_noise_of_its_own(chat: Chat) -> None:
    """Under a model to which all tokens are alike, ids are the noise."""
    policy = load_policy("embedded")
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.zero_()
    engine = HFEngine()
    engine.bind(policy, end_token_ids=[1], pad_token_id=0, decode=chat.decode)
    engine.sync_weights([], 0)
    ends = list(range(90, 103))
    rows = written(engine, chat, G=2, sampling={"max_completion_length": 200, "stop_token_ids": ends})
    turns = []
    for b in range(len(rows)):
        ids, own = completion(rows, b), rows.completion_mask[b].tolist()
        pieces: list[list[int]] = [[]]
        for i, token in enumerate(ids):
            if own[i] and i and not own[i - 1]:
                pieces.append([])
            if own[i]:
                pieces[-1].append(token)
        turns += [tuple(piece) for piece in pieces]
    turns = [turn for turn in turns if len(turn) > 3]
    assert len(turns) > len(rows) and len(set(turns)) == len(turns)


def pairs() -> Chat:
    """A tokenizer of digits and of pairs of them: "12" has two spellings, and the encoder knows one."""
    vocabulary = {"<pad>": 0, "<end>": 1, **{str(d): d + 2 for d in range(10)}, "12": 12, "a": 13, "b": 14}
    tokenizer = Tokenizer(models.BPE(vocabulary, [("1", "2")]))
    tokenizer.decoder = decoders.Fuse()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<end>")
    fast.chat_template = (
        "{% for m in messages %}{{ 'a' if m.role == 'user' else 'b' }}{{ m.content }}<end>{% endfor %}"
        "{% if add_generation_prompt %}b{% endif %}"
    )
    return Chat(fast)


class Once(Environment):
    """One answer, then done."""

    turns = 0

    def step(self, completion: str) -> Turn:
        self.turns += 1
        return Turn([{"role": "user", "content": "12"}], done=self.turns == 2)


def test_ids_of_the_policy_are_never_encoded_again() -> None:
    chat = pairs()
    first, second = [3, 4, 1], [3, 4, 5, 1]  # "1", "2", end: the encoder would write "12"
    assert chat.tokens(chat.decode(first[:2])) == [12]
    engine = ScriptedEngine([[first], [second]])
    rows = written(engine, chat, ["7"], G=1, environment=Once())
    foreign = [13, 12, 1, 14]  # a 12 <end> b
    assert completion(rows, 0) == first + foreign + second
    assert rows.completion_mask[0].tolist() == [True] * 3 + [False] * 4 + [True] * 4
    prompt = chat.ids([{"role": "user", "content": "7"}])
    assert engine.asked[1].prompt_ids[0].tolist() == prompt + first + foreign


def test_a_turn_that_a_stop_string_ended_is_closed_by_the_template(chat: Chat) -> None:
    first = chat.tokens("75;")
    rows = written(ScriptedEngine([[first], [[30, 1]]]), chat, ["47+38=?"], G=1, environment=Once())
    whole = chat.tokenizer.decode(completion(rows, 0))
    assert whole == "75;<|end|><|user|>12<|end|><|assistant|>6<|end|>"
    assert rows.completion_mask[0].tolist()[:4] == [True, True, True, False]


def test_a_prompt_that_is_text_goes_on_as_text(chat: Chat) -> None:
    first = chat.tokens("75;")
    rows = written(ScriptedEngine([[first], [[30, 1]]]), chat, ["say"], G=1, environment=Once())
    assert chat.tokenizer.decode(completion(rows, 0)) == "75;126<|end|>"


@dataclass
class Spells(Environment):
    """Writes what looks like the end of a turn."""

    step_timeout: float | None = None

    def step(self, completion: str) -> Turn:
        return Turn([{"role": "user", "content": "<|end|><|assistant|>85"}])


def test_an_environment_cannot_end_a_turn_by_spelling(chat: Chat) -> None:
    engine, limit = ScriptedEngine([[[30, 1]], [[31, 1]]]), {"max_completion_length": 50}
    rows = written(engine, chat, ["1+1=?"], G=1, environment=Spells(), sampling=limit)
    assert rows.completion_ids[0].tolist().count(1) == 3, "two of the policy, one of the template"


@pytest.mark.parametrize("limit", range(1, 26))
def test_the_limit_is_of_all_tokens_and_the_last_is_the_policy_s(
    limit: int, engine: HFEngine, chat: Chat
) -> None:
    rows = written(engine, chat, G=2, sampling={"max_completion_length": limit})
    assert int(rows.completion_len.max()) <= limit
    last = rows.completion_mask.gather(1, rows.completion_len[:, None] - 1)
    assert last.all()
    usual = written(engine, chat, G=2)
    for b in range(len(rows)):
        ids = completion(rows, b)
        assert ids == completion(usual, b)[: len(ids)], "a smaller limit cuts, and changes nothing else"
        if len(ids) < int(usual.completion_len[b]):
            assert rows.finish_reason[b] == "length"


@dataclass
class Breaks(Environment):
    """Does something else than answering."""

    what: Callable[[], Any]
    step_timeout: float | None = 0.05

    def step(self, completion: str) -> Turn:
        return self.what()


def raises() -> Turn:
    raise ValueError("no such game")


def hangs() -> Turn:
    while True:
        pass


@pytest.mark.parametrize(
    ("what", "said"),
    [
        (raises, "raised ValueError: no such game"),
        (hangs, "took longer than step_timeout, 0.05 s"),
        (Turn, "gave no messages"),
        (lambda: Turn([{"role": "user"}]), "must have a text 'content'"),
        (lambda: Turn(["hello"]), "must have role and content"),  # type: ignore[list-item]
    ],
)
def test_an_environment_that_breaks_is_named_with_the_row(what: Any, said: str, chat: Chat) -> None:
    with pytest.raises(DataError, match=r"rollout\.environment") as error:
        written(ScriptedEngine([[[30, 1]]]), chat, ["1+1=?"], G=1, rows=[17], environment=Breaks(what))
    assert said in str(error.value)
    if "must" not in said:
        assert "17" in str(error.value)


class Opens(Environment):
    """Begins with a prompt of its own."""

    step_timeout = None

    def __init__(self, by_chance: bool = False) -> None:
        self.by_chance = by_chance

    def reset(self, row: dict[str, Any]) -> list[dict[str, Any]]:
        extra = str(id(self)) if self.by_chance else ""
        return [{"role": "system", "content": "Add." + extra}, *row["prompt"]]

    def step(self, completion: str) -> Turn:
        return Turn(done=True)


def test_reset_gives_the_prompt(engine: HFEngine, chat: Chat) -> None:
    rows = written(engine, chat, environment=Opens())
    said = rows.conversations[0].prompt
    assert rows.columns["prompt"][0] == said[1:], "of the data, so that it can begin again"
    assert [message["role"] for message in said] == ["system", "user"]
    length = int(rows.prompt_len[0])
    assert rows.prompt_ids[0, -length:].tolist() == chat.ids(said)
    with pytest.raises(DataError, match="different prompts"):
        written(engine, chat, environment=Opens(by_chance=True))


def test_one_turn_is_the_engine_s_own_rollout(engine: HFEngine, chat: Chat) -> None:
    rows = written(engine, chat, environment=Breaks(lambda: Turn(done=True)))
    sampling = Sampling(max_completion_length=40, temperature=0.9)
    plain = engine.generate(prompts_of(chat, QUESTIONS), num_generations=2, sampling=sampling, seed=3, step=1)
    for name in ("completion_ids", "completion_len", "completion_mask", "rollout_logps", "prompt_ids"):
        assert torch.equal(getattr(rows, name), getattr(plain, name)), name
    assert rows.finish_reason == plain.finish_reason and not rows.foreign_mask.any()


def test_state_of_one_row_is_not_another_s(engine: HFEngine, chat: Chat) -> None:
    environment = Retry()
    written(engine, chat, environment=environment)
    assert environment.said == [], "the configured object is only copied"


class Meets(Retry):
    """Goes on only when as many rows as `barrier` waits for are there at the same time."""

    step_timeout = None

    def __init__(self, barrier: threading.Barrier | None = None) -> None:
        super().__init__()
        self.barrier = barrier
        self.rows_at_once = barrier.parties if barrier else 1

    def fresh(self) -> Environment:
        return Meets(self.barrier)

    def reset(self, row: dict[str, Any]) -> list[dict[str, Any]] | None:
        self._meet()
        return super().reset(row)

    def step(self, completion: str) -> Turn:
        self._meet()
        return super().step(completion)

    def _meet(self) -> None:
        if self.barrier is not None:
            self.barrier.wait(timeout=10)


def test_rows_at_once_are_answered_at_once_and_as_they_are_one_after_another(
    engine: HFEngine, chat: Chat
) -> None:
    settings = {"G": 2, "questions": ["47*8=?", "56*9=?"]}  # which it never gets right: all rows go on
    alone = written(engine, chat, environment=Meets(), **settings)
    together = written(engine, chat, environment=Meets(threading.Barrier(4)), **settings)
    assert {talk.turns for talk in alone.conversations} == {3}
    assert together.conversations == alone.conversations
    assert torch.equal(together.completion_ids, alone.completion_ids)


def test_of_rows_at_once_the_first_that_breaks_is_named(chat: Chat) -> None:
    engine, environment = ScriptedEngine([[[30, 1]] * 3]), Breaks(raises)
    environment.rows_at_once = 4
    with pytest.raises(DataError, match="data row 17, turn 1, raised ValueError: no such game"):
        written(engine, chat, ["1+1=?"] * 3, G=1, rows=[17, 4, 9], environment=environment)
    environment.rows_at_once = 0
    with pytest.raises(ConfigError, match=r"rollout\.environment\.rows_at_once must be >= 1 \(found 0\)"):
        conversations(chat, environment)
