"""The chats the embedded model is pre-trained on, in the order they are learnt, in two stages.

A step is `PLAIN_ROWS` plain turns and `CONTEXT_ROWS` turns whose prompt holds a solution, feedback, both
or neither in SDPO's default templates. A plain turn is answered by the slip at its skill's rate, a turn
with a solution or feedback always rightly: the model can do the task but mostly does not, and knows better
when told. In the first `clean_share` of a stage's steps there are no slips, so that the arithmetic is
learnt from clean data. The first stage is nearly all of it; after it, a template with nothing in it still
makes right answers more likely, as its wording mostly stood beside help, and so does a wrong solution. The
second stage, short, has templates with nothing in them in a quarter of its turns with context, and repeats a
solution that is shown, right or wrong: what helps is the content and not the wording.
"""

import random
import string
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq

from lit_rl.assets.arithmetic import SEED, Question, questions, splits
from lit_rl.objectives.reprompt import Reprompt
from lit_rl.rewards.arithmetic import feedback
from lit_rl.seeding import derived_seed

PLAIN_ROWS, CONTEXT_ROWS = 96, 32
ROWS_PER_STEP = PLAIN_ROWS + CONTEXT_ROWS
SKILL_SHARES = {"add": 0.375, "sub": 0.375, "hard": 0.25}
SLIP_RATES = {"add": 0.70, "sub": 0.75, "hard": 0.985}


class Stage(NamedTuple):
    """A supervised run of its own.

    Attributes:
        name: keeps its draws apart.
        steps: optimizer steps.
        lr: peak learning rate.
        clean_share: of its steps, at the start, without slips.
        contexts: shares of the kinds of turns with context.
    """

    name: str
    steps: int
    lr: float
    clean_share: float
    contexts: dict[str, float]


LEARN = Stage(
    "pretraining", 2400, 1.2e-3, 0.5, {"solution": 0.37, "feedback": 0.33, "both": 0.16, "neither": 0.14}
)
BALANCE = Stage(
    "balance",
    800,
    5e-4,
    0.0,
    {"solution": 0.2, "wrong solution": 0.4, "feedback": 0.1, "both": 0.05, "neither": 0.25},
)
STAGES = (LEARN, BALANCE)

_SCHEMA = pa.schema([("messages", pa.list_(pa.struct([("role", pa.string()), ("content", pa.string())])))])


def reprompt(question: str, *, solution: str | None = None, remark: str | None = None) -> str:
    """The user turn a teacher sees, in SDPO's default templates.

    Args:
        question: the student's prompt.
        solution: a right attempt to show.
        remark: feedback on a wrong attempt to show.
    """
    return Reprompt.reprompt_template.format(
        prompt=question,
        solution=""
        if solution is None
        else Reprompt.solution_template.format(successful_previous_attempt=solution),
        feedback="" if remark is None else Reprompt.feedback_template.format(feedback_raw=remark),
    )


def turns(stage: Stage, seed: int = SEED) -> Iterator[tuple[str, str]]:
    """User and assistant text of every row, `ROWS_PER_STEP` for each step, in order.

    Args:
        stage: which.
        seed: of every draw.
    """
    rng = random.Random(derived_seed(seed, "arithmetic", stage.name))
    kept_out = {q for name in ("val", "hard") for q in splits(seed)[name]}
    pools = {skill: [q for q in questions(skill) if q not in kept_out] for skill in SKILL_SHARES}
    for step in range(stage.steps):
        has_slips = step >= stage.clean_share * stage.steps
        for place in range(ROWS_PER_STEP):
            skill = rng.choices(list(SKILL_SHARES), list(SKILL_SHARES.values()))[0]
            question = rng.choice(pools[skill])
            is_plain = place < PLAIN_ROWS
            if is_plain:
                yield _plain_turn(rng, question, has_slips)
            else:
                yield _context_turn(rng, question, has_slips, stage.contexts)


def write_chats(path: Path, stage: Stage, seed: int = SEED) -> None:
    """Write `turns` as a parquet file with a `messages` column."""
    chats = [
        {"messages": [{"role": "user", "content": asked}, {"role": "assistant", "content": answered}]}
        for asked, answered in turns(stage, seed)
    ]
    pq.write_table(pa.Table.from_pylist(chats, schema=_SCHEMA), path)


def _plain_turn(rng: random.Random, question: Question, has_slips: bool) -> tuple[str, str]:
    slips = has_slips and rng.random() < SLIP_RATES[question.skill]
    return question.text, question.slip if slips else question.answer


def _context_turn(
    rng: random.Random, question: Question, has_slips: bool, shares: dict[str, float]
) -> tuple[str, str]:
    kind = rng.choices(list(shares), list(shares.values()))[0]
    if kind == "neither":
        return reprompt(question.text), _plain_turn(rng, question, has_slips)[1]
    if kind == "wrong solution":
        attempt = _attempt(rng, question)
        return reprompt(question.text, solution=attempt), attempt
    solution = question.answer if kind in ("solution", "both") else None
    remark = feedback(_attempt(rng, question), question.answer) if kind in ("feedback", "both") else None
    return reprompt(question.text, solution=solution, remark=remark), question.answer


def _attempt(rng: random.Random, question: Question) -> str:
    """A wrong answer: mostly the slip where there is one, else one digit replaced, now and then no number."""
    if question.is_prone and rng.random() < 0.75:
        return question.slip
    if rng.random() < 0.15:
        return rng.choice(string.punctuation) + "".join(
            rng.choices(string.digits + string.ascii_letters + string.punctuation, k=rng.randrange(7))
        )
    place = rng.randrange(len(question.answer))
    digit = rng.choice([d for d in string.digits if d != question.answer[place]])
    return question.answer[:place] + digit + question.answer[place + 1 :]
