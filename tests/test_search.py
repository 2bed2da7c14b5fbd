"""python train.py experiment=sdpo_test_time, on the embedded hard questions."""

import importlib.util
import json
from pathlib import Path

import pytest

from lit_rl.callbacks import test_time_search
from lit_rl.configuration.compose import Source
from lit_rl.configuration.job import checked
from lit_rl.errors import ConfigError

ROOT = Path(__file__).resolve().parents[1]
QUESTIONS = 3


def run(folder: Path, *words: str) -> dict[str, float]:
    """What the command line does, in this process."""
    spec = importlib.util.spec_from_file_location("train_under_test", ROOT / "train.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    line = ["experiment=sdpo_test_time", f"run_dir={folder}", "seed=1", *words]
    return module.run(checked(Source(ROOT / "conf"), line))


@pytest.mark.slow
def test_a_search_finds_reports_and_goes_on_where_it_was(tmp_path: Path) -> None:
    few = (f"data.train_max_samples={QUESTIONS}", "callbacks.test_time_search.max_attempts=64")
    shares = run(tmp_path, *few)
    saved = json.loads((tmp_path / "discovery.json").read_text())
    assert [one["row"] for one in saved["series"]] == list(range(QUESTIONS))
    for one in saved["series"]:
        assert set(one["attempts"]) == {"sdpo", "best_of_k", "multi_turn"} and one["drawn"] == 256
        assert all(n is None or 1 <= n <= 64 for n in one["attempts"].values())
        assert (one["found"] is None) == (one["attempts"]["sdpo"] is None)
    assert sum(one["attempts"]["sdpo"] is not None for one in saved["series"]) >= QUESTIONS - 1
    assert saved["table"][-1]["k"] == 64 and len(saved["verdict"]) == 3
    assert shares["discovery/sdpo"] == saved["table"][-1]["sdpo"]["mean"]
    assert "SDPO at test time" in (tmp_path / "discovery.md").read_text()
    assert (tmp_path / "discovery.png").exists()

    interrupted = {**saved, "series": [saved["series"][0], saved["series"][2]]}
    (tmp_path / "discovery.json").write_text(json.dumps(interrupted))
    run(tmp_path, *few)
    again = json.loads((tmp_path / "discovery.json").read_text())
    key = lambda one: one["row"]  # noqa: E731
    assert sorted(again["series"], key=key) == saved["series"], "a series depends on no other"


@pytest.mark.slow
def test_a_question_on_the_command_line_ends_at_its_first_success(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = ("data.question='57+38=?'", "data.ground_truth=95", "data.source=lit_rl/arithmetic")
    run(tmp_path, *asked, "callbacks.test_time_search.baselines=[]")
    (one,) = json.loads((tmp_path / "discovery.json").read_text())["series"]
    assert one["found"] == "95" and 1 <= one["attempts"]["sdpo"] <= 64 and set(one["attempts"]) == {"sdpo"}
    assert "found '95'" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"baselines": ["luck"]}, r"baselines must be a list out of .*found \['luck'\]"),
        ({"baselines": ["best_of_k", "best_of_k"]}, "baselines must be a list out of"),
        ({"max_attempts": 0}, r"max_attempts must be >= 1 \(found 0\)"),
        ({"pass_rate_samples": -1}, r"pass_rate_samples must be >= 0 \(found -1\)"),
    ],
)
def test_settings_that_cannot_work_are_refused_by_name(settings: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        test_time_search.TestTimeSearch(**settings)
