"""A run's dumped rollouts: scored again they give the run's own rewards, bit for bit."""

import subprocess
import sys
from pathlib import Path

import pytest

from lit_rl.errors import DataError
from lit_rl.rescore import dumped_steps, main

CLONE = Path(__file__).resolve().parents[1]


@pytest.mark.slow
@pytest.mark.parametrize("form", ["jsonl", "parquet"])
def test_a_dump_scored_again_is_the_same_and_another_reward_is_not(tmp_path: Path, form: str) -> None:
    subprocess.run(
        [
            *(sys.executable, "train.py", "algo=sdpo", f"run_dir={tmp_path}", "logger=none"),
            *("callbacks=[default,rollout_dump]", f"callbacks.rollout_dump.format={form}"),
            *("data.train_batch_size=4", "trainer.max_steps=2", "trainer.val_check_interval=0"),
            "checkpoint.save_freq=-1",
        ],
        cwd=CLONE,
        check=True,
        capture_output=True,
    )
    same = main([str(tmp_path)], CLONE / "conf")
    assert [done.step for done in same] == [1, 2]
    assert all(done.old == done.new and done.differ == 0 for done in same)
    steps = dict(dumped_steps(tmp_path / "rollouts"))
    assert [len(rows) for rows in steps.values()] == [32, 32]
    row = steps[1][0]
    assert row["policy_version"] == 0 and steps[2][0]["policy_version"] == 1
    assert row["prompt_ids"] and row["completion_ids"][-1] != 0
    assert {"prompt", "data_source", "reward_model"} <= set(row["columns"])
    taught = [row for rows in steps.values() for row in rows if row["teacher_prompt"]]
    assert taught and all("Correct solution" in row["teacher_prompt"] for row in taught)
    score = tmp_path / "score.py"
    score.write_text(
        "def compute_score(data_source, solution_str, ground_truth, extra_info=None):\n    return 7\n"
    )
    other = main([str(tmp_path), f"reward.custom_reward_function.path={score}"], CLONE / "conf")
    assert all(done.new == 7.0 for done in other)
    assert main([str(tmp_path), "--show"], CLONE / "conf") == []


@pytest.mark.slow
@pytest.mark.parametrize("algo", ["grpo", "remax", "reinforce_plus_plus"])
def test_the_run_s_estimator_gives_its_advantages_bit_for_bit_and_another_one_others(
    tmp_path: Path, algo: str
) -> None:
    subprocess.run(
        [
            *(sys.executable, "train.py", f"algo={algo}", f"run_dir={tmp_path}", "logger=none"),
            *("callbacks=[default,rollout_dump]", "data.train_batch_size=4", "trainer.max_steps=2"),
            *("trainer.val_check_interval=0", "checkpoint.save_freq=-1"),
        ],
        cwd=CLONE,
        check=True,
        capture_output=True,
    )
    same = main([str(tmp_path)], CLONE / "conf")
    assert [(done.differ, done.advantages_differ) for done in same] == [(0, 0), (0, 0)]
    other = main([str(tmp_path), "--estimator", "opo"], CLONE / "conf")
    assert all(done.differ == 0 and done.advantages_differ > 0 for done in other)


def test_a_folder_without_dumps_says_how_to_make_them(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"callbacks=\[default,rollout_dump\]"):
        list(dumped_steps(tmp_path))
