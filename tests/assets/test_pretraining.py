from itertools import islice

import pyarrow.parquet as pq
import pytest

from lit_rl.assets import pretraining
from lit_rl.assets.arithmetic import Question, splits
from lit_rl.assets.pretraining import (
    BALANCE,
    LEARN,
    PLAIN_ROWS,
    ROWS_PER_STEP,
    STAGES,
    Stage,
    reprompt,
    turns,
    write_chats,
)

STEPS = 20


def short(stage: Stage, steps: int = STEPS) -> Stage:
    return stage._replace(steps=steps)


@pytest.fixture(scope="module", params=STAGES, ids=lambda stage: stage.name)
def stage(request: pytest.FixtureRequest) -> Stage:
    return short(request.param)


@pytest.fixture(scope="module")
def rows(stage: Stage) -> list[tuple[str, str]]:
    return list(turns(stage))


def asked(text: str) -> Question:
    body = text.split("=?")[0]
    sign = "+" if "+" in body else "-"
    a, b = body.split(sign)
    return Question(sign, int(a), int(b))


def test_a_step_is_a_block_of_plain_turns_then_turns_with_context(rows) -> None:
    assert len(rows) == STEPS * ROWS_PER_STEP
    for step in range(STEPS):
        block = rows[step * ROWS_PER_STEP : (step + 1) * ROWS_PER_STEP]
        assert all(text.endswith("=?") for text, _ in block[:PLAIN_ROWS])
        assert not any(text.endswith("=?") for text, _ in block[PLAIN_ROWS:])


def test_validation_and_discovery_questions_are_never_seen(rows) -> None:
    kept_out = {q for split in ("val", "hard") for q in splits()[split]}
    assert not kept_out & {asked(text) for text, _ in rows}


def test_there_are_no_slips_in_the_clean_part_and_many_after_it(rows, stage: Stage) -> None:
    first = int(stage.clean_share * STEPS) * ROWS_PER_STEP
    wrong = [answer != asked(text).answer for text, answer in rows]
    assert not any(wrong[:first])
    assert sum(wrong[first:]) > 0.2 * len(wrong[first:])


def test_an_answer_is_the_shown_solution_or_right_after_feedback_or_else_right_or_the_slip(rows) -> None:
    for text, answer in rows:
        question = asked(text)
        shown = text.partition("Correct solution:\n\n")[2].partition("\n\n")[0]
        if shown:
            assert answer == shown
        else:
            assert answer in ({question.answer} if "feedback" in text else {question.answer, question.slip})


def test_only_the_second_stage_shows_wrong_solutions() -> None:
    for stage in STAGES:
        wrong = [
            answer != asked(text).answer for text, answer in turns(short(stage)) if "Correct solution" in text
        ]
        assert any(wrong) == (stage is BALANCE)


def test_the_same_rows_come_again_and_a_longer_run_only_moves_the_slips(rows, stage: Stage) -> None:
    assert list(islice(turns(stage), 500)) == rows[:500]
    first = int(stage.clean_share * STEPS) * ROWS_PER_STEP
    assert list(islice(turns(short(stage, 2 * STEPS)), first)) == rows[:first]


def test_the_stages_draw_differently_and_the_second_has_more_templates_with_nothing_in_them() -> None:
    drawn = [list(turns(short(stage))) for stage in (LEARN, BALANCE)]
    assert drawn[0][:20] != drawn[1][:20]
    empty = [sum("=?\n\nCorrectly" in text for text, _ in rows) for rows in drawn]
    assert empty[1] > 2 * empty[0]


def test_a_reprompt_is_sdpos_default_template() -> None:
    assert reprompt("1+2=?", solution="3", remark="4 is too high.") == (
        "1+2=?\nCorrect solution:\n\n3\n\n"
        "\nThe following is feedback from your unsuccessful earlier attempt:\n\n4 is too high.\n\n"
        "\n\nCorrectly solve the original question.\n"
    )
    assert reprompt("1+2=?") == "1+2=?\n\nCorrectly solve the original question.\n"


def test_the_file_holds_chats_in_order(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(pretraining, "ROWS_PER_STEP", 4)
    write_chats(tmp_path / "chats.parquet", short(LEARN, 2))
    chats = pq.read_table(tmp_path / "chats.parquet")["messages"].to_pylist()
    assert [(chat[0]["content"], chat[1]["content"]) for chat in chats] == list(turns(short(LEARN, 2)))
    assert [message["role"] for message in chats[0]] == ["user", "assistant"]
