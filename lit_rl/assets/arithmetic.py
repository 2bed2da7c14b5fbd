"""The embedded task: two-digit sums and differences, cut into training, validation and discovery questions.

Three skills, one chat turn each, answered by bare digits:

    add   47+38=?   the slip drops the carry        75 instead of 85
    sub   83-47=?   the slip forgets the borrow     46 instead of 36
    hard  57+68=?   a carry out of the ones and a sum of at least 100; the slip drops that carry, 115 for 125

`hard` questions are in no training or validation file; they are for discovery at test time. All draws are
seeded, and the splits are disjoint by operand pair.
"""

import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from lit_rl.seeding import derived_seed

SEED = 0
PRONE_SHARE = 0.68
"""Share of training and validation questions that have a slip; it sets the accuracy training starts from."""
TRAIN_PER_SKILL, VAL_PER_SKILL, HARD_CANDIDATES = 1000, 256, 128

_SCHEMA = pa.schema(
    [
        ("data_source", pa.string()),
        ("prompt", pa.list_(pa.struct([("role", pa.string()), ("content", pa.string())]))),
        ("ability", pa.string()),
        ("reward_model", pa.struct([("style", pa.string()), ("ground_truth", pa.string())])),
        ("extra_info", pa.struct([("split", pa.string()), ("index", pa.int64()), ("skill", pa.string())])),
    ]
)


@dataclass(frozen=True)
class Question:
    """One sum or difference of two operands in 10..99."""

    sign: str
    a: int
    b: int

    @property
    def skill(self) -> str:
        """add, sub or hard."""
        if self.sign == "-":
            return "sub"
        return "hard" if self.is_prone and self.a + self.b >= 100 else "add"

    @property
    def text(self) -> str:
        return f"{self.a}{self.sign}{self.b}=?"

    @property
    def answer(self) -> str:
        return str(self.a - self.b if self.sign == "-" else self.a + self.b)

    @property
    def is_prone(self) -> bool:
        """True where the ones carry or borrow, so that there is a slip."""
        ones_a, ones_b = self.a % 10, self.b % 10
        return ones_a < ones_b if self.sign == "-" else ones_a + ones_b >= 10

    @property
    def slip(self) -> str:
        """The systematic wrong answer; the right one where nothing carries or borrows."""
        if not self.is_prone:
            return self.answer
        return str(int(self.answer) + (10 if self.sign == "-" else -10))


def questions(skill: str) -> list[Question]:
    """Every question of a skill, in the order of its operands."""
    sign = "-" if skill == "sub" else "+"
    pairs = (Question(sign, a, b) for a in range(10, 100) for b in range(10, 100))
    return [q for q in pairs if q.skill == skill and (sign == "+" or q.a > q.b)]


def splits(seed: int = SEED) -> dict[str, list[Question]]:
    """The questions of "train", "val" and "hard" (candidates), disjoint, each in a seeded order.

    Args:
        seed: of every draw.
    """
    out: dict[str, list[Question]] = {"train": [], "val": [], "hard": []}
    for skill in ("add", "sub"):
        for is_prone, share in ((True, PRONE_SHARE), (False, 1 - PRONE_SHARE)):
            pool = [q for q in questions(skill) if q.is_prone is is_prone]
            random.Random(derived_seed(seed, "arithmetic", skill, int(is_prone))).shuffle(pool)
            num_val, num_train = round(VAL_PER_SKILL * share), round(TRAIN_PER_SKILL * share)
            out["val"] += pool[:num_val]
            out["train"] += pool[num_val : num_val + num_train]
    out["hard"] = random.Random(derived_seed(seed, "arithmetic", "hard")).sample(
        questions("hard"), HARD_CANDIDATES
    )
    for name in ("train", "val"):
        random.Random(derived_seed(seed, "arithmetic", "order", name)).shuffle(out[name])
    return out


def row(question: Question, split: str, index: int) -> dict[str, Any]:
    """A data row in verl's schema; the source is `lit_rl/arithmetic_<skill>`."""
    return {
        "data_source": f"lit_rl/arithmetic_{question.skill}",
        "prompt": [{"role": "user", "content": question.text}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": question.answer},
        "extra_info": {"split": split, "index": index, "skill": question.skill},
    }


def write_split(path: Path, split: str, chosen: list[Question]) -> None:
    """Write questions as one parquet file."""
    rows = [row(question, split, index) for index, question in enumerate(chosen)]
    pq.write_table(pa.Table.from_pylist(rows, schema=_SCHEMA), path)
