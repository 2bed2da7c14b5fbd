"""Recorded inputs and outputs of other implementations: ours gives the same values and gradients.

The folder is LIT_RL_GOLDEN_DIR, by default `data` beside this file, a small part of the whole. Each file says
where its numbers come from and their tolerance. What is not compared stands in `left_out.py` with its reason.
"""

import json
import os
from pathlib import Path
from typing import Any

import pytest
from adapter import ADAPTERS, run
from binding import binding
from compare import differences
from left_out import CASES, KEYS, OTHER_PARTS, case_reason, key_reason

FOLDER = Path(os.environ.get("LIT_RL_GOLDEN_DIR", Path(__file__).parent / "data"))
FILES = sorted(FOLDER.glob("*.json"))


def failures(kind: str, case: dict[str, Any], tolerance: dict[str, float]) -> list[str]:
    ours, lines = run(kind, case), []
    for key, value in case["expected"].items():
        if key_reason(kind, key) is not None:
            continue
        if key not in ours:
            lines.append(
                f"{case['id']}: {key} is absent and not on the list of reasons ({ours.get('raises')})"
            )
            continue
        wanted = binding(kind, case, key, value)
        found = ours[key][: len(wanted)] if kind == "lr_schedules" else ours[key]
        lines += [f"{case['id']}: {line}" for line in differences(key, found, wanted, **tolerance)]
    return lines


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_recorded_cases(file: Path, counts: dict[str, tuple[int, int]]) -> None:
    recorded, kind = json.loads(file.read_text()), file.stem
    assert kind in ADAPTERS or kind in OTHER_PARTS, f"{kind} has neither an adapter nor a reason"
    compared = [case for case in recorded["cases"] if case_reason(kind, case) is None]
    lines = []
    for case in compared:
        lines += failures(kind, case, case.get("tolerance", recorded["tolerance"]))
    counts[kind] = (len(compared), len(recorded["cases"]) - len(compared))
    assert not lines, "\n".join(lines[:20])


def test_there_are_cases() -> None:
    assert FILES, f"no recorded cases in {FOLDER}"


def test_every_reason_is_a_sentence() -> None:
    reasons = [rule.reason for rule in (*CASES, *KEYS)] + list(OTHER_PARTS.values())
    assert all(reason[0].isupper() and reason.endswith(".") for reason in reasons)


def test_a_wrong_value_fails() -> None:
    assert list(differences("loss", 1.0, 1.1, rtol=1e-6, atol=1e-8))
    assert list(differences("loss", float("nan"), 1.0, rtol=1e-6, atol=1e-8))
    assert list(differences("grad", [[1.0, 2.0]], [[1.0], [2.0]], rtol=1e-6, atol=1e-8))
    assert not list(differences("loss", 1.0, 1.0 + 1e-9, rtol=1e-6, atol=1e-8))
