"""EngineCheck: a gap between engine and policy is measured, warned about, and stops the run."""

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch.optim.lr_scheduler import LambdaLR

from lit_rl.algorithms.grpo import GRPO
from lit_rl.batch import RolloutBatch
from lit_rl.callbacks.engine_check import EngineCheck
from lit_rl.errors import ConfigError


@pytest.fixture
def module(tiny_policy: Callable) -> GRPO:
    return GRPO(
        policy=tiny_policy(dtype=torch.float64),
        optimizer=partial(torch.optim.SGD, lr=1.0),
        scheduler=lambda optimizer, total_steps: LambdaLR(optimizer, lambda _: 1.0),
    )


def reported(module: GRPO, make_batch: Callable, shift: float) -> RolloutBatch:
    """Rows whose engine reported the policy's log-probabilities, shifted."""
    batch: RolloutBatch = make_batch()
    batch.rollout_logps = module.logps(module.policy, batch) + shift
    return batch


@pytest.mark.field("vllm/8")
def test_a_shifted_engine_warns_and_stops_at_the_second_check(module: GRPO, make_batch: Callable) -> None:
    check = EngineCheck(every_n_steps=1, max_gap=0.1)
    batch = reported(module, make_batch, 0.3)
    with pytest.warns(UserWarning, match=r"differ from the policy's by 0\.3 per token"):
        check(module, batch)
    measured = module.sums.reduce()
    assert measured["rollout/logp_gap_mean"] == pytest.approx(0.3, abs=1e-6)
    assert measured["rollout/logp_gap_max"] == pytest.approx(0.3, abs=1e-6)
    with pytest.raises(RuntimeError, match="second check in a row"):
        check(module, batch)


@pytest.mark.field("vllm/8")
def test_an_engine_that_agrees_is_quiet_and_forgets_an_earlier_warning(
    module: GRPO, make_batch: Callable, recwarn: pytest.WarningsRecorder
) -> None:
    check = EngineCheck(every_n_steps=1, max_gap=0.1)
    check(module, reported(module, make_batch, 0.0))
    assert not recwarn and module.sums.reduce()["rollout/logp_gap_max"] < 1e-4
    for shift in (0.3, 0.0, 0.3):
        check(module, reported(module, make_batch, shift))


def test_checks_come_every_n_steps_or_never() -> None:
    assert [step for step in range(7) if EngineCheck(3, 0.1).is_due(step)] == [0, 3, 6]
    assert not any(EngineCheck(0, 0.1).is_due(step) for step in range(7))


@pytest.mark.parametrize("settings", [(-1, 0.1), (1, 0.0)])
def test_settings_out_of_range_are_refused(settings: tuple) -> None:
    with pytest.raises(ConfigError, match=r"rollout\.(check_every_n_steps|max_logp_gap)"):
        EngineCheck(*settings)
