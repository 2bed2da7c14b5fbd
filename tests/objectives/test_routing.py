"""Which rows are distilled: weights by pass rate, and gates."""

import pytest
import torch

from lit_rl.objectives.routing import PromptGate, RunGate, pass_rate_weights


def test_weights_follow_the_pass_rate_and_have_mean_one() -> None:
    """Groups of 4 with 2, 1, 0 and 4 successes: sqrt(pq) = 1/2, sqrt(3)/4, 0, 0, with mean 0.2333."""
    is_success = torch.tensor([1, 1, 0, 0] + [0, 0, 0, 1] + [0] * 4 + [1] * 4, dtype=torch.bool)
    weights = pass_rate_weights(is_success, 4)
    raw = torch.tensor([0.5, 3**0.5 / 4, 0.0, 0.0])
    assert torch.allclose(weights, (raw / raw.mean()).repeat_interleave(4))
    assert weights.view(4, 4)[:, 0].mean() == pytest.approx(1.0)


def test_groups_of_equal_outcomes_alone_leave_nothing() -> None:
    weights = pass_rate_weights(torch.tensor([True, True, False, False]), 2)
    assert weights.tolist() == [0.0] * 4


def test_a_run_gate_closes_at_a_gap_of_zero_and_comes_back_from_its_state() -> None:
    gate, rows = RunGate(), torch.tensor([4, 4, 9])
    assert gate.is_open(rows).all(), "nothing was measured yet"
    for gap, is_open in ((0.0, False), (-0.1, False), (0.1, True)):
        gate.gap = gap
        assert gate.is_open(rows).tolist() == [is_open] * 3
    other = RunGate()
    other.load_state_dict({**gate.state_dict(), "gap": -0.5})
    assert not other.is_open(rows).any() and other.is_moving


def test_a_prompt_gate_answers_for_each_prompt() -> None:
    gate = PromptGate()
    gate.gaps = {4: 0.0, 9: 0.25}
    assert gate.is_open(torch.tensor([4, 9, 9, 7])).tolist() == [False, True, True, True]
    assert not gate.is_moving
