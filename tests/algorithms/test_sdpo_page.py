"""SDPO.md computes what it says, and its metrics are those of a step."""

import doctest
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from lit_rl.algorithms.sdpo import SDPO
from lit_rl.objectives.distillation import Distillation
from lit_rl.objectives.reprompt import Reprompt
from lit_rl.rollout.sampling import Sampling

PAGE = Path(__file__).resolve().parents[2] / "lit_rl/algorithms/SDPO.md"


@pytest.mark.field("sdpo/2")
def test_the_worked_example_gives_the_numbers_of_the_page() -> None:
    failed, examples = doctest.testfile(str(PAGE), module_relative=False, encoding="utf-8")
    assert failed == 0 and examples > 25


def test_every_metric_of_the_page_is_one_of_a_step_and_every_metric_of_sdpo_is_on_the_page(
    tiny_policy: Callable, train: Callable, with_prompts: Callable, plain_sgd: dict
) -> None:
    batch = with_prompts()
    batch.rewards = torch.tensor([0.0, 1, 0, 0] * 3)
    batch.feedback = ["no"] * 12
    module = SDPO(
        policy=tiny_policy(),
        sampling=Sampling(max_completion_length=6),
        num_generations=4,
        distillation=Distillation(distillation_weight=0.5),
        reprompt=Reprompt(include_environment_feedback=True),
        **plain_sgd,
    )
    train(module, [batch])
    table = PAGE.read_text().split("| metric |")[1].split("\n\n")[0]
    named = {name for line in table.splitlines() for name in re.findall(r"`([\w/<>]+)`", line.split("|")[1])}
    assert named - module.metrics.keys() == {"reward/<function>"}
    assert {name for name in module.metrics if name.startswith("sdpo/")} <= named
