"""Every field of the documented SDPOConfig has a key with the documented default, or a reason beside it.

`sdpo_config.csv` lists the fields in the document's order: default, our key, the choice that brings the key,
our default where it is another one, and why. "not built" is a key that does not exist yet.
"""

import ast
import csv
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from lit_rl.configuration.compose import Source, compose
from lit_rl.configuration.tree import ABSENT, at

ROOT = Path(__file__).resolve().parents[2]
WITH_ANY_MODEL = ("algo=sdpo", "model=hf", "model.path=x", "data=parquet", "data.train_files=x.parquet")
with Path(__file__).with_name("sdpo_config.csv").open() as file:
    FIELDS = list(csv.DictReader(file))
NAMES = [field["field"] for field in FIELDS]


@cache
def tree(choice: str) -> dict[str, Any]:
    return compose(Source(ROOT / "conf"), [*WITH_ANY_MODEL, *([choice] if choice else [])]).tree


@pytest.mark.parametrize("field", FIELDS, ids=NAMES)
def test_a_field_has_its_documented_default_or_a_reason(field: dict[str, str]) -> None:
    if not field["key"]:
        assert field["why"], "no key and no reason"
        return
    found = at(tree(field["choice"]), field["key"])
    if found is ABSENT:
        assert field["why"] == "not built"
    elif field["ours"] in ("a group", "a folder"):
        assert isinstance(found, dict if field["ours"] == "a group" else str)
    elif field["ours"]:
        assert field["why"] and found == ast.literal_eval(field["ours"])
    else:
        documented = ast.literal_eval(field["default"])
        assert found == documented and isinstance(found, bool) == isinstance(documented, bool)


def test_what_makes_sdpo_is_all_built() -> None:
    first = NAMES.index("num_iterations")
    assert all(field["key"] and field["why"] != "not built" for field in FIELDS[first:])


def test_the_list_is_the_documents(shared_folder: Path) -> None:
    with (shared_folder / "spec" / "parameters.csv").open() as file:
        rows = [row for row in csv.DictReader(file) if row["section"] == "SDPOConfig"]
    assert [row["name"] for row in rows] == NAMES
    for field, row in zip(FIELDS, rows, strict=True):
        try:
            documented = ast.literal_eval(row["default"])
        except (SyntaxError, ValueError):
            documented = row["default"]
        assert ast.literal_eval(field["default"]) == documented, field["field"]


def test_the_authors_settings_are_one_word() -> None:
    paper = compose(Source(ROOT / "conf"), ["experiment=sdpo_paper"]).tree["algo"]
    expected = {
        "distillation.distillation_weight": 1.0,
        "distillation.distillation_alpha": 0.5,
        "distillation.distillation_mode": "topk_logits",
        "distillation.distillation_topk": 100,
        "distillation.distillation_add_tail": True,
        "distillation.distillation_is_clip": 2.0,
        "distillation.distillation_divisor": "active_tokens",
        "teacher.teacher_model_kind": "ema",
        "teacher.teacher_update_rate": 0.05,
        "reprompt.success_reward_threshold": 0.5,
        "reprompt.include_environment_feedback": True,
        "reprompt.environment_feedback_only_without_solution": True,
        "reprompt.remove_thinking_from_demonstration": True,
        "reprompt.dont_reprompt_on_self_success": True,
        "reprompt.max_reprompt_len": 10240,
        "advantage.scale_rewards": "none",
    }
    assert {key: at(paper, key) for key in expected} == expected
