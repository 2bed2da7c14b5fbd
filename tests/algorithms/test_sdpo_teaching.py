"""SDPO: which teacher scores, what the losses mix to, and whose feedback reaches whom."""

from collections.abc import Callable
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn

from lit_rl.algorithms.grpo import GRPO
from lit_rl.algorithms.samples import samples_of
from lit_rl.algorithms.sdpo import SDPO
from lit_rl.algorithms.student_scores import StudentScores
from lit_rl.algorithms.teacher_context import teacher_contexts
from lit_rl.batch import RolloutBatch
from lit_rl.objectives.batch_plan import BatchPlan
from lit_rl.objectives.distillation import Distillation
from lit_rl.objectives.kl import KL
from lit_rl.objectives.reprompt import Reprompt
from lit_rl.objectives.teacher import Teacher
from lit_rl.rollout.noise import uniforms
from lit_rl.rollout.sampling import Sampling

FULL = Distillation(distillation_mode="full_logits", distillation_alpha=0.5, chunk_tokens=4)
TOP = Distillation(distillation_mode="topk_logits", distillation_topk=5, distillation_add_tail=True)


@pytest.fixture
def common(plain_sgd: dict) -> dict[str, Any]:
    """Arguments of a module: short completions, groups of four, unclipped SGD at rate 1."""
    sampling = Sampling(max_completion_length=6)
    return {"sampling": sampling, "num_generations": 4, "max_grad_norm": 0.0, **plain_sgd}


def mixed(with_prompts: Callable) -> RolloutBatch:
    """Group 0: rows 1 and 3 succeed; group 1: none; group 2: row 8 alone."""
    batch = with_prompts()
    batch.rewards = torch.zeros(12)
    batch.rewards[[1, 3, 8]] = 1.0
    return batch


class Moved(L.Callback):
    """Moves the policy before the step, after reference and teacher were made."""

    def on_train_batch_start(self, trainer: L.Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        move_(pl_module.policy)


@torch.no_grad()
def move_(policy: nn.Module) -> None:
    generator = torch.Generator().manual_seed(7)
    for parameter in policy.parameters():
        parameter += 0.02 * torch.randn(parameter.shape, generator=generator)


def change(policy: nn.Module, start: nn.Module) -> Tensor:
    """Minus the gradient of the step, flat."""
    pairs = zip(policy.parameters(), start.parameters(), strict=True)
    return torch.cat([(a - b).detach().flatten() for a, b in pairs])


@pytest.mark.parametrize("distillation", [Distillation(), FULL, TOP])
@pytest.mark.parametrize("beta", [0.0, 3.0])
def test_the_loss_is_the_convex_mixture_and_beta_is_in_its_policy_part(
    distillation: Distillation,
    beta: float,
    tiny_policy: Callable,
    train: Callable,
    with_prompts: Callable,
    common: dict,
) -> None:
    start = tiny_policy()
    move_(start)

    def step(module: Any) -> Tensor:
        train(module, [mixed(with_prompts)], [Moved()])
        return change(module.policy, start)

    def settings(weight: float) -> Distillation:
        return Distillation(**{**vars(distillation), "distillation_weight": weight})

    kl = KL(beta=beta)
    alone = step(SDPO(policy=tiny_policy(), distillation=settings(1.0), **common))
    policy = step(GRPO(policy=tiny_policy(), kl=kl, **common))
    both = SDPO(policy=tiny_policy(), distillation=settings(0.3), kl=kl, **common)
    torch.testing.assert_close(step(both), 0.3 * alone + 0.7 * policy, rtol=1e-4, atol=1e-6)
    assert (both.metrics.get("train/kl", 0.0) > 0) == (beta > 0)


def test_beta_changes_the_policy_part(
    tiny_policy: Callable, train: Callable, with_prompts: Callable, common: dict
) -> None:
    weight = Distillation(distillation_weight=0.5)
    weights = []
    for beta in (0.0, 3.0):
        module = SDPO(policy=tiny_policy(), distillation=weight, kl=KL(beta=beta), **common)
        train(module, [mixed(with_prompts)], [Moved()])
        weights.append(torch.cat([p.detach().flatten() for p in module.policy.parameters()]))
    assert (weights[0] - weights[1]).abs().max() > 1e-4


@pytest.mark.parametrize("distillation", [Distillation(), FULL, TOP])
@pytest.mark.parametrize(("mix", "same_as"), [(0.0, "base"), (1.0, "live")])
def test_at_its_ends_the_trust_region_is_the_initial_or_the_current_policy(
    distillation: Distillation,
    mix: float,
    same_as: Any,
    tiny_policy: Callable,
    train: Callable,
    with_prompts: Callable,
    common: dict,
) -> None:
    ends = []
    for teacher in (
        Teacher(teacher_model_kind="trust_region", trust_region_mix=mix),
        Teacher(teacher_model_kind=same_as),
        Teacher(teacher_model_kind="trust_region", trust_region_mix=0.5),
    ):
        module = SDPO(policy=tiny_policy(), distillation=distillation, teacher=teacher, **common)
        train(module, [mixed(with_prompts)], [Moved()])
        assert module.stateful == {}, "nothing of it moves by itself"
        ends.append(torch.cat([p.detach().flatten() for p in module.policy.parameters()]))
    torch.testing.assert_close(ends[0], ends[1], rtol=1e-5, atol=1e-6)
    assert (ends[2] - ends[1]).abs().max() > 1e-4


class Recorded(SDPO):
    """Keeps what each micro-batch's teacher reads beside what its student wrote."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.pairs: list[tuple[str, list[int]]] = []

    def student_scores(self, rows: RolloutBatch) -> StudentScores:
        assert rows.completion_ids is not None and rows.completion_len is not None
        for i in range(len(rows)):
            prompt = self.chat.tokenizer.decode(rows.teacher_prompt_ids[i].tolist())  # type: ignore[index]
            self.pairs.append((prompt, rows.completion_ids[i, : rows.completion_len[i]].tolist()))
        return super().student_scores(rows)


@pytest.mark.parametrize("distillation", [Distillation(), FULL])
def test_the_rewards_text_reaches_the_teacher_of_that_completion_through_every_shuffle(
    distillation: Distillation, tiny_policy: Callable, train: Callable, with_prompts: Callable, common: dict
) -> None:
    batch = mixed(with_prompts)
    batch.feedback = [f"row{i:02}" for i in range(12)]
    batch.columns["privileged_context"] = ["from the column"] * 12
    reprompt = Reprompt(include_environment_feedback=True, feedback_source="reward_and_column")
    plan = BatchPlan(optimizer_batch_size=6, micro_batch_size=2, shuffle=True)
    module = Recorded(
        policy=tiny_policy(),
        distillation=distillation,
        reprompt=reprompt,
        batch=plan,
        num_iterations=2,
        **common,
    )
    train(module, [batch])
    own = [
        ids[:n] for ids, n in zip(batch.completion_ids.tolist(), batch.completion_len.tolist(), strict=True)
    ]
    assert len(module.pairs) == 24
    for prompt, completion in module.pairs:
        row = int(prompt.split("row")[1][:2])
        assert completion == own[row] and f"row{row:02}\nfrom the column" in prompt
    order = [int(prompt.split("row")[1][:2]) for prompt, _ in module.pairs]
    assert order != sorted(order), "the rows were shuffled"


@pytest.mark.field("sdpo/9")
@pytest.mark.parametrize("demonstration", ["first", "shortest", "random"])
def test_contexts_are_those_of_the_group_on_whichever_rank_it_lies(
    demonstration: Any, with_prompts: Callable, chat: Any
) -> None:
    batch = with_prompts(P=4, G=4)
    batch.rewards = torch.tensor([1.0, 1, 1, 0] * 4)
    batch.feedback = None
    data = type("Columns", (), {"prompt_key": "prompt", "data_source_key": "s", "reward_model_key": "r"})
    reprompt = Reprompt(demonstration=demonstration)

    def prompts(rows: RolloutBatch) -> list:
        generations = [i % 4 for i in range(len(rows))]
        numbers = uniforms(3, 5, rows.prompt_row.tolist(), generations, 1)[:, 0].tolist()
        samples = samples_of(rows, chat, data)
        key = {"feedback_key": "privileged_context", "numbers": numbers}
        return teacher_contexts(rows, samples, reprompt, chat, **key).prompts

    whole = prompts(batch)
    halves = [prompts(batch.select(slice(0, 8))), prompts(batch.select(slice(8, 16)))]
    assert [*halves[0], *halves[1]] == whole
    assert prompts(batch.select([*range(8, 12), *range(0, 4)])) == [*whole[8:12], *whole[0:4]]


def test_a_column_of_any_type_can_be_the_feedback(with_prompts: Callable, chat: Any) -> None:
    batch = with_prompts(P=1, G=4)
    batch.rewards, batch.feedback = torch.zeros(4), None
    batch.columns["errors"] = ["a text", {"line": 3, "kind": ["é"]}, 7, None]
    data = type("Columns", (), {"prompt_key": "prompt", "data_source_key": "s", "reward_model_key": "r"})
    reprompt = Reprompt(include_environment_feedback=True)
    found = teacher_contexts(
        batch, samples_of(batch, chat, data), reprompt, chat, feedback_key="errors", numbers=[0.0] * 4
    )
    assert found.feedback == ["a text", '{"line": 3, "kind": ["é"]}', "7", None]


@pytest.mark.parametrize("rows", [slice(0, 4), slice(0, 12)])
def test_a_success_may_be_left_without_a_teacher(
    rows: slice, tiny_policy: Callable, train: Callable, with_prompts: Callable, common: dict
) -> None:
    batch = mixed(with_prompts).select(rows)
    batch.rewards = batch.rewards.clone()
    module = SDPO(policy=tiny_policy(), reprompt=Reprompt(skip_successful_rows=True), **common)
    train(module, [batch])
    taught = module.last_rollout.self_distillation_mask
    assert not (taught & (batch.rewards >= 1)).any() and taught[[0, 2]].all()


@pytest.mark.field("sdpo/11")
@pytest.mark.parametrize("distillation", [Distillation(), FULL])
def test_an_empty_completion_counts_in_no_loss_and_in_one_metric(
    distillation: Distillation, tiny_policy: Callable, train: Callable, with_prompts: Callable, common: dict
) -> None:
    def after(is_empty: bool) -> SDPO:
        batch = mixed(with_prompts)
        if is_empty:
            batch.completion_len[2] = 0
        batch.completion_mask[2] = False
        module = SDPO(policy=tiny_policy(), distillation=distillation, **common)
        train(module, [batch])
        return module

    empty, masked = after(True), after(False)
    assert empty.metrics["train/loss"] == pytest.approx(masked.metrics["train/loss"], rel=1e-5)
    assert empty.metrics["rollout/empty_frac"] == pytest.approx(1 / 12)
    for a, b in zip(empty.policy.parameters(), masked.policy.parameters(), strict=True):
        assert bool(a.isfinite().all())
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


@pytest.mark.field("sdpo/4")
def test_the_number_of_the_teachers_moves_is_a_metric(
    tiny_policy: Callable, train: Callable, with_prompts: Callable, common: dict
) -> None:
    """One update of the four is left out as not finite; the teacher moves once per sync all the same."""

    class Broken(SDPO):
        calls = 0

        def distillation_term(self, *arguments: Any) -> Tensor:
            self.calls += 1
            loss = super().distillation_term(*arguments)
            return loss * torch.nan if self.calls == 1 else loss

    plan = BatchPlan(optimizer_batch_size=6, micro_batch_size=3)
    module = Broken(
        policy=tiny_policy(),
        batch=plan,
        num_iterations=2,
        on_nonfinite="skip",
        teacher=Teacher(teacher_sync_steps=1),
        **common,
    )
    train(module, [mixed(with_prompts)])
    assert module.metrics["train/optimizer_steps"] == 3 and module.metrics["sdpo/teacher_moves"] == 1


@pytest.mark.field("sdpo/7")
@pytest.mark.parametrize("distillation", [Distillation(), FULL, Distillation(distillation_weight=0.5)])
def test_what_a_collapse_shows_in_is_logged_in_each_step(
    distillation: Distillation, tiny_policy: Callable, train: Callable, with_prompts: Callable, common: dict
) -> None:
    batch = mixed(with_prompts)
    module = SDPO(policy=tiny_policy(), distillation=distillation, **common)
    train(module, [batch])
    found = module.metrics
    assert found["train/entropy"] > 0 and found["rollout/completion_len"] > 0
    assert found["sdpo/reprompted_frac"] == pytest.approx(7 / 12) and found["sdpo/divergence"] != 0
    assert found["sdpo/success_frac"] == pytest.approx(3 / 12) and found["sdpo/empty_batch_frac"] == 0
    assert found["sdpo/cut_frac"] == found["sdpo/too_long_frac"] == 0
    assert found["sdpo/teacher_prompt_len"] > batch.prompt_len.float().mean()
    assert "sdpo/feedback_available_frac" not in found, "feedback is off"


def test_ratios_over_the_cap_are_counted(
    tiny_policy: Callable, train: Callable, with_prompts: Callable, common: dict
) -> None:
    found = []
    for cap in (2.0, 0.5):
        settings = Distillation(distillation_is_clip=cap)
        module = SDPO(policy=tiny_policy(), distillation=settings, num_iterations=2, **common)
        train(module, [mixed(with_prompts)])
        found.append(module.metrics["sdpo/importance_capped_frac"])
    assert found[0] < 0.5 < found[1]
