"""SDPO with the teacher on the rollout engine: the same step as with the policy as its own teacher here."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from lit_rl.algorithms.sdpo import SDPO
from lit_rl.batch import RolloutBatch
from lit_rl.errors import ConfigError
from lit_rl.objectives.batch_plan import BatchPlan
from lit_rl.objectives.distillation import Distillation
from lit_rl.objectives.reprompt import Reprompt
from lit_rl.objectives.teacher import Teacher
from lit_rl.rollout.hf import HFEngine
from lit_rl.rollout.sampling import Sampling

SERVED = Teacher(teacher_model_kind="live", use_teacher_server=True)
LIVE = Teacher(teacher_model_kind="live")


@pytest.fixture
def sdpo(tiny_policy: Callable, plain_sgd: dict) -> Callable[..., SDPO]:
    def build(teacher: Teacher, asked: list[RolloutBatch] | None = None, **settings: Any) -> SDPO:
        module = SDPO(
            policy=tiny_policy(),
            teacher=teacher,
            sampling=Sampling(max_completion_length=6),
            num_generations=4,
            **plain_sgd,
            **settings,
        )
        engine = HFEngine()
        engine.bind(module.policy, end_token_ids=[], pad_token_id=0, decode=str)

        def score(rows: RolloutBatch, topk: int) -> Any:
            if asked is not None:
                asked.append(rows)
            return engine.score(rows, topk=topk)

        module.engine_score = score
        return module

    return build


def mixed(with_prompts: Callable) -> RolloutBatch:
    """Group 0: rows 1 and 3 succeed; group 1: none; group 2: row 8 alone."""
    batch = with_prompts()
    batch.rewards = torch.zeros(12)
    batch.rewards[[1, 3, 8]] = 1.0
    return batch


def every_entry(policy: Any) -> int:
    return policy.get_output_embeddings().weight.shape[0]


@pytest.mark.parametrize("micro_batch_size", [2, 12])
@pytest.mark.parametrize("mode", ["sampled_token", "topk_logits"])
def test_a_step_equals_that_of_the_local_teacher(
    mode: str, micro_batch_size: int, sdpo: Callable, train: Callable, with_prompts: Callable, tiny_policy
) -> None:
    """Over all entries of the vocabulary, whose are the top ones does not matter."""
    topk = every_entry(tiny_policy()) if mode == "topk_logits" else None
    settings = {
        "distillation": Distillation(distillation_mode=mode, distillation_topk=topk),
        "batch": BatchPlan(micro_batch_size=micro_batch_size),
    }
    served = train(sdpo(SERVED, **settings), [mixed(with_prompts)])
    local = train(sdpo(LIVE, **settings), [mixed(with_prompts)])
    assert served.teacher is None
    start = tiny_policy()
    for a, b, c in zip(*(m.parameters() for m in (served.policy, local.policy, start)), strict=True):
        torch.testing.assert_close(a, b, atol=2e-6, rtol=1e-5)
        assert not torch.equal(a, c)
    for name in ("train/distillation_loss", "sdpo/divergence", "train/entropy"):
        assert served.metrics[name] == pytest.approx(local.metrics[name], abs=1e-5)


def test_it_is_asked_once_per_step_for_the_rows_that_have_a_teacher(
    sdpo: Callable, train: Callable, with_prompts: Callable
) -> None:
    asked: list[RolloutBatch] = []
    batch = mixed(with_prompts)
    module = train(
        sdpo(SERVED, asked, num_iterations=2, batch=BatchPlan(optimizer_batch_size=6, micro_batch_size=2)),
        [batch],
    )
    assert [len(rows) for rows in asked] == [7] and module.optimizer_steps == 4
    assert int(asked[0].prompt_len.min()) > int(batch.prompt_len.max()), "the teacher's prompts"


def test_without_an_engine_it_says_what_is_missing(
    sdpo: Callable, train: Callable, with_prompts: Callable
) -> None:
    module = sdpo(SERVED)
    module.engine_score = None
    with pytest.raises(ConfigError, match=r"use_teacher_server .*RolloutGeneration"):
        train(module, [mixed(with_prompts)])


def test_the_engines_context_counts_the_reprompt(sdpo: Callable) -> None:
    reprompt = Reprompt(max_reprompt_len=321)
    assert sdpo(SERVED, reprompt=reprompt).longest_other_prompt == 321
    assert sdpo(LIVE, reprompt=reprompt).longest_other_prompt == 0


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"distillation": Distillation(distillation_weight=0.5)}, "distillation_weight"),
        ({"distillation": Distillation(distillation_mode="full_logits")}, "distillation_mode"),
        ({"sampling": Sampling(temperature=0.7)}, "temperature"),
    ],
)
def test_what_a_server_cannot_score_is_refused(settings: dict, named: str, tiny_policy: Callable) -> None:
    with pytest.raises(ConfigError, match=rf"algo\.teacher\.use_teacher_server needs algo\..*{named}"):
        SDPO(policy=tiny_policy(), teacher=SERVED, **settings)


def test_the_server_holds_no_other_teacher() -> None:
    with pytest.raises(ConfigError, match=r"use_teacher_server needs .*teacher_model_kind 'live'"):
        Teacher(use_teacher_server=True)
