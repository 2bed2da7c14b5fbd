"""SDPO: what the teacher gets to see, when it is asked, and where the gradient goes."""

from collections.abc import Callable
from typing import Any

import lightning as L
import pytest
import torch

from lit_rl.algorithms.sdpo import SDPO
from lit_rl.batch import RolloutBatch
from lit_rl.hooks import RLCallback
from lit_rl.models.score import Rows, score
from lit_rl.objectives.batch_plan import BatchPlan
from lit_rl.objectives.distillation import Distillation
from lit_rl.objectives.reprompt import Reprompt
from lit_rl.objectives.teacher import Teacher
from lit_rl.rollout.sampling import Sampling


class Listener(RLCallback):
    """Keeps every payload."""

    def __init__(self) -> None:
        self.heard: list[tuple[str, dict[str, Any]]] = []

    def payloads(self, event: str) -> list[dict[str, Any]]:
        return [payload for name, payload in self.heard if name == event]

    def on_teacher_context_built(self, trainer: L.Trainer, pl_module: Any, **payload: Any) -> None:
        self.heard.append(("on_teacher_context_built", payload))

    def on_self_distillation_batch_prepared(self, trainer: L.Trainer, pl_module: Any, **payload: Any) -> None:
        self.heard.append(("on_self_distillation_batch_prepared", payload))

    def on_update_end(self, trainer: L.Trainer, pl_module: Any, **payload: Any) -> None:
        self.heard.append(("on_update_end", payload))


@pytest.fixture
def sdpo(tiny_policy: Callable, plain_sgd: dict) -> Callable[..., SDPO]:
    def build(**settings: Any) -> SDPO:
        base = {"sampling": Sampling(max_completion_length=6), "num_generations": 4, **plain_sgd}
        return SDPO(policy=tiny_policy(), **{**base, **settings})

    return build


def mixed(with_prompts: Callable) -> RolloutBatch:
    """Group 0: rows 1 and 3 succeed; group 1: none; group 2: row 8 alone."""
    batch = with_prompts()
    batch.rewards = torch.zeros(12)
    batch.rewards[[1, 3, 8]] = 1.0
    return batch


def test_the_documented_events_bring_the_documented_payload(
    sdpo: Callable, train: Callable, with_prompts: Callable
) -> None:
    listener, batch = Listener(), mixed(with_prompts)
    train(sdpo(num_iterations=2), [batch], [listener])
    assert [name for name, _ in listener.heard] == [
        "on_teacher_context_built",
        "on_self_distillation_batch_prepared",
        "on_update_end",
    ]
    built = listener.payloads("on_teacher_context_built")[0]
    mask = built["self_distillation_mask"]
    assert mask.tolist() == [True] * 4 + [False] * 4 + [False, True, True, True]
    ids, attention = built["teacher_input_ids"], built["teacher_attention_mask"]
    assert ids.shape == attention.shape and built["completion_mask"].shape == batch.completion_ids.shape
    ends = ids[:, -batch.completion_ids.shape[1] :]
    assert torch.equal(ends, batch.completion_ids), "the teacher scores the student's own completion"
    own_length = (batch.prompt_len + batch.completion_len)[~mask]
    assert torch.equal(attention[~mask].sum(1), own_length), "a row without a teacher keeps its prompt"
    prepared = listener.payloads("on_self_distillation_batch_prepared")[0]
    assert torch.equal(prepared["prompt_ids"], batch.prompt_ids)
    assert torch.equal(prepared["completion_ids"], batch.completion_ids)
    assert prepared["old_per_token_logps"].shape == batch.completion_ids.shape


def test_on_policy_there_are_no_old_log_probabilities(
    sdpo: Callable, train: Callable, with_prompts: Callable
) -> None:
    listener = Listener()
    train(sdpo(), [mixed(with_prompts)], [listener])
    assert listener.payloads("on_self_distillation_batch_prepared")[0]["old_per_token_logps"] is None


def test_the_diagnostics_count_contexts(sdpo: Callable, train: Callable, with_prompts: Callable) -> None:
    listener = Listener()
    train(sdpo(), [mixed(with_prompts)], [listener])
    metrics = listener.payloads("on_update_end")[0]["metrics"]
    assert metrics["sdpo/success_group_frac"] == pytest.approx(2 / 3)
    assert metrics["sdpo/reprompted_frac"] == pytest.approx(7 / 12)
    assert metrics["sdpo/demonstration_frac"] == pytest.approx(7 / 12)


def test_rows_without_a_teacher_add_nothing(
    sdpo: Callable, train: Callable, tiny_policy: Callable, with_prompts: Callable
) -> None:
    batch = mixed(with_prompts)
    batch.rewards[:] = 0.0
    module = train(sdpo(), [batch])
    for a, b in zip(module.policy.parameters(), tiny_policy().parameters(), strict=True):
        assert torch.equal(a, b)
    assert module.trainer.global_step == 1


@pytest.mark.field("sdpo/2")
@pytest.mark.field("sdpo/4")
def test_the_teacher_moves_once_per_sync_whatever_the_cut(
    sdpo: Callable, train: Callable, tiny_policy: Callable, with_prompts: Callable
) -> None:
    teacher = Teacher(teacher_update_rate=0.25, teacher_sync_steps=2)
    plan = BatchPlan(optimizer_batch_size=6, micro_batch_size=2)
    batches = [mixed(with_prompts) for _ in range(3)]
    module = train(sdpo(teacher=teacher, batch=plan, max_grad_norm=0.01, num_iterations=2), batches[:2])
    start = dict(tiny_policy().named_parameters())
    now = dict(module.policy.named_parameters())
    for name, average in module.teacher.state_dict().items():
        torch.testing.assert_close(average, 0.75 * start[name].detach() + 0.25 * now[name].detach())


@pytest.mark.parametrize("kind", ["base", "live"])
def test_base_stays_and_live_follows(
    kind: str, sdpo: Callable, train: Callable, tiny_policy: Callable, with_prompts: Callable
) -> None:
    module = train(sdpo(teacher=Teacher(teacher_model_kind=kind)), [mixed(with_prompts)])
    expected = tiny_policy() if kind == "base" else module.policy
    with module.teacher.model() as model:
        for a, b in zip(model.parameters(), expected.parameters(), strict=True):
            assert torch.equal(a, b)
    assert module.stateful == {}


@pytest.mark.field("sdpo/5")
@pytest.mark.parametrize(
    "distillation",
    [
        Distillation(distillation_mode="full_logits", distillation_alpha=0.5),
        Distillation(distillation_mode="topk_logits", distillation_topk=3, distillation_add_tail=True),
    ],
)
def test_a_teacher_that_sees_the_same_prompt_has_nothing_to_teach(
    distillation: Distillation, sdpo: Callable, train: Callable, with_prompts: Callable, chat: Any
) -> None:
    batch = mixed(with_prompts)
    ids = [chat.ids(prompt) for prompt in batch.columns["prompt"]]
    batch.prompt_ids = torch.tensor(ids)
    batch.prompt_len = torch.full((12,), len(ids[0]))
    listener = Listener()
    same = Reprompt(reprompt_template="{prompt}")
    train(sdpo(distillation=distillation, reprompt=same), [batch], [listener])
    metrics = listener.payloads("on_update_end")[0]["metrics"]
    assert abs(metrics["train/distillation_loss"]) < 1e-6 and metrics["train/grad_norm"] < 1e-4
    assert metrics["sdpo/reprompted_frac"] > 0


def test_weight_zero_is_grpo_and_asks_no_teacher(
    sdpo: Callable, train: Callable, tiny_policy: Callable, plain_sgd: dict, with_prompts: Callable
) -> None:
    from lit_rl.algorithms.grpo import GRPO

    sampling = Sampling(max_completion_length=6)
    listener = Listener()
    ours = train(sdpo(distillation=Distillation(distillation_weight=0.0)), [mixed(with_prompts)], [listener])
    theirs = GRPO(policy=tiny_policy(), sampling=sampling, num_generations=4, **plain_sgd)
    train(theirs, [mixed(with_prompts)])
    for a, b in zip(ours.policy.parameters(), theirs.policy.parameters(), strict=True):
        assert torch.equal(a, b)
    assert ours.teacher is None and not listener.payloads("on_teacher_context_built")


@pytest.mark.field("sdpo/8")
def test_the_gradient_is_that_of_finite_differences(
    tiny_policy: Callable, plain_sgd: dict, train: Callable, with_prompts: Callable, chat: Any
) -> None:
    """One step of full-logits reverse KL at rate 1 against the loss measured around the start."""
    settings = {
        "sampling": Sampling(max_completion_length=6),
        "num_generations": 4,
        "max_grad_norm": 0.0,
        "teacher": Teacher(teacher_model_kind="base"),
        "distillation": Distillation(distillation_mode="full_logits"),
        **plain_sgd,
    }
    module = train(SDPO(policy=tiny_policy(dtype=torch.float64), **settings), [mixed(with_prompts)])
    start = tiny_policy(dtype=torch.float64)
    rollout = module.last_rollout
    keep = rollout.self_distillation_mask
    completions = (rollout.completion_ids[keep], rollout.completion_len[keep])
    student_rows = Rows(rollout.prompt_ids[keep], rollout.prompt_len[keep], *completions)
    teacher_rows = Rows(rollout.teacher_prompt_ids[keep], rollout.teacher_prompt_len[keep], *completions)

    def loss(policy: torch.nn.Module) -> float:
        from lit_rl.functional.logps import logits
        from lit_rl.models.score import completion_hidden, head_of

        with torch.no_grad():
            p = logits(completion_hidden(policy, student_rows), head_of(policy)).log_softmax(-1)
            q = logits(completion_hidden(start, teacher_rows), head_of(start)).log_softmax(-1)
            return float((p.exp() * (p - q)).sum(-1).mean())

    assert score(start, student_rows).logps.isfinite().all()
    name = "model.layers.1.mlp.down_proj.weight"
    weight, moved = start.get_parameter(name), module.policy.get_parameter(name)
    for index in [(0, 0), (3, 7), (10, 20)]:
        # Llama's norms compute in float32, so the probe must be wide.
        probe, gradient = tiny_policy(dtype=torch.float64), (weight - moved)[index].item()
        values = []
        for sign in (1, -1):
            with torch.no_grad():
                probe.get_parameter(name)[index] = weight[index] + sign * 3e-3
            values.append(loss(probe))
        assert gradient == pytest.approx((values[0] - values[1]) / 6e-3, rel=1e-2, abs=2e-5)
