import pyarrow.parquet as pq
import pytest

from lit_rl.assets.arithmetic import PRONE_SHARE, Question, questions, row, splits
from lit_rl.assets.measure import FOLDER


@pytest.mark.parametrize(
    ("sign", "a", "b", "skill", "answer", "slip"),
    [
        ("+", 47, 38, "add", "85", "75"),
        ("+", 41, 38, "add", "79", "79"),
        ("+", 72, 51, "add", "123", "123"),
        ("-", 83, 47, "sub", "36", "46"),
        ("-", 87, 43, "sub", "44", "44"),
        ("+", 57, 68, "hard", "125", "115"),
    ],
)
def test_a_slip_drops_the_carry_or_forgets_the_borrow(sign, a, b, skill, answer, slip) -> None:
    question = Question(sign, a, b)
    assert (question.skill, question.answer, question.slip) == (skill, answer, slip)
    assert question.is_prone is (answer != slip)


def test_the_skills_part_all_sums_and_differences() -> None:
    found = {skill: questions(skill) for skill in ("add", "sub", "hard")}
    assert len(found["add"]) + len(found["hard"]) == 90 * 90
    assert len(found["sub"]) == 90 * 89 // 2
    assert all(q.skill == skill for skill, members in found.items() for q in members)


def test_splits_are_disjoint_and_have_their_share_of_questions_with_a_slip() -> None:
    drawn = splits()
    everything = [q for members in drawn.values() for q in members]
    assert len(set(everything)) == len(everything)
    for split in ("train", "val"):
        for skill in ("add", "sub"):
            members = [q for q in drawn[split] if q.skill == skill]
            assert len(members) == {"train": 1000, "val": 256}[split]
            assert sum(q.is_prone for q in members) == round(PRONE_SHARE * len(members))
    assert all(q.skill == "hard" for q in drawn["hard"])


def test_draws_depend_on_the_seed_alone() -> None:
    assert splits(3) == splits(3)
    assert splits(3) != splits(4)


@pytest.mark.parametrize("split", ["train", "val"])
def test_the_shipped_files_are_what_the_code_draws(split) -> None:
    shipped = pq.read_table(FOLDER / f"{split}.parquet").to_pylist()
    assert shipped == [row(q, split, i) for i, q in enumerate(splits()[split])]


def test_the_shipped_discovery_questions_are_candidates() -> None:
    shipped = [cell[0]["content"] for cell in pq.read_table(FOLDER / "hard.parquet")["prompt"].to_pylist()]
    assert set(shipped) <= {q.text for q in splits()["hard"]}
    assert len(shipped) >= 30
