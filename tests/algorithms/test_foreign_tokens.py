"""Tokens of an environment are attended to and trained on by nobody.

Two policies' worth of evidence, through the real `training_step`, in float64, for every loss:

- Two ids that the model cannot tell apart when it reads them, and tells apart when it writes them. Which of
  them the environment wrote changes every probability of an environment's token and nothing else, so the
  step must not move by a bit. With the mask left out (planted) it does.
- What is stored at the environment's positions (the engine's log-probabilities) is never read.
"""

from dataclasses import replace
from functools import partial
from typing import Any

import invariance_cases
import pytest
import torch
from invariance_cases import CASES, Case
from stored_rollouts import constant_rate, fit, rows_with_prompts
from tiny_parts import VOCABULARY
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from lit_rl.algorithms.reporting import add_rollout_metrics
from lit_rl.batch import RolloutBatch, length_mask
from lit_rl.data.chat import Chat
from lit_rl.metrics import MetricSums
from lit_rl.models.critic import ValueModel
from lit_rl.objectives.advantage import ESTIMATORS, Advantage, ScoredRows
from lit_rl.objectives.batch_plan import BatchPlan
from lit_rl.rollout.conversation import Conversation

TWINS = (60, 61)
BRIEF = (
    *(
        "sft",
        "clipped_dapo",
        "gspo_grpo",
        "clip_cov_dapo",
        "geo_mean",
        "kl_in_reward_reward",
        "masked_sequence",
    ),
    *("estimator_reinforce_plus_plus", "estimator_opo", "kl_full", "ppo_dapo", "sdpo_full_active_tokens"),
    *("sdpo_sampled_active_rows", "sdpo_mixed", "truncated_dapo"),
)


class Alike(nn.Embedding):
    """Reads the second twin as the first, in every copy of the model."""

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return super().forward(ids.where(ids != TWINS[1], TWINS[0]))


def reading_alike(model: Any) -> Any:
    """The model with another table for what it reads."""
    table = Alike(*model.get_input_embeddings().weight.shape, dtype=torch.float64)
    torch.nn.init.normal_(table.weight, std=0.2)
    model.set_input_embeddings(table)
    return model


def twin_policy() -> LlamaForCausalLM:
    """Reads the twins alike and writes them with different probabilities."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=1,
        num_attention_heads=2,
        initializer_range=0.2,
        tie_word_embeddings=False,
        pad_token_id=0,
    )
    return reading_alike(LlamaForCausalLM(config).double())


def reading_alike_critic(model: ValueModel) -> ValueModel:
    reading_alike(model.backbone)
    return model


def conversation_rows(foreign_id: int, *, is_masked: bool = True, junk: float = 0.0) -> RolloutBatch:
    """Rows of nine tokens at most, in most of them two of an environment, one after another or apart."""
    batch = rows_with_prompts(T=9)
    batch.rewards[:] = torch.tensor([1, 0, 1, 0, 0, 0, 0, 0, 1, 0.5, 0, 0])
    foreign = torch.zeros(batch.completion_ids.shape, dtype=torch.bool)
    for row, length in enumerate(batch.completion_len.tolist()):
        if length > 4:
            foreign[row, [1, 2] if row % 2 else [1, 3]] = True
    batch.completion_ids[foreign] = foreign_id
    batch.rollout_logps[[0, 8]] = -8.0  # so that a veto leaves some
    if is_masked:
        batch.foreign_mask, batch.completion_mask = foreign, batch.token_mask & ~foreign
        batch.rollout_logps[foreign] = junk
    return batch


def step(case: Case, batch: RolloutBatch, chat: Chat) -> torch.Tensor:
    """What the steps of one batch add to all weights."""
    module = case.build(
        policy=twin_policy(),
        batch=BatchPlan(micro_batch_size=5),
        max_grad_norm=0.0,
        optimizer=partial(torch.optim.SGD, lr=1.0),
        scheduler=constant_rate,
    )
    trained = [p for p in module.parameters() if p.requires_grad]
    before = [p.detach().clone() for p in trained]
    fit(module, [batch], chat)
    return torch.cat([(a - b.detach()).flatten() for a, b in zip(before, trained, strict=True)])


def cases() -> list:
    return [pytest.param(name, marks=[] if name in BRIEF else pytest.mark.slow) for name in CASES]


@pytest.mark.parametrize("name", cases())
def test_no_loss_reads_what_an_environment_wrote(
    name: str, chat: Chat, monkeypatch: pytest.MonkeyPatch
) -> None:
    usual = invariance_cases.value_model
    monkeypatch.setattr(invariance_cases, "value_model", lambda: reading_alike_critic(usual()))
    one, other = (conversation_rows(twin, junk=junk) for twin, junk in zip(TWINS, (0.0, 40.0), strict=True))
    found = step(CASES[name], one, chat)
    assert found.abs().max() > 1e-7, "the step moved nothing"
    assert torch.equal(found, step(CASES[name], other, chat))
    planted = step(CASES[name], conversation_rows(TWINS[0], is_masked=False), chat)
    assert (planted - found).abs().max() > 1e-6, "without the mask it is trained on"


def squeezed(rows: ScoredRows, foreign: torch.Tensor) -> tuple[ScoredRows, torch.Tensor]:
    """The same rows as if the environment's tokens were not there; and where each token has come from."""
    size, width = rows.mask.shape
    own = [(~foreign[b, : rows.lengths[b]]).nonzero()[:, 0] for b in range(size)]
    place = torch.zeros(size, width, dtype=torch.long)
    penalty = torch.zeros(size, width)
    lengths = torch.tensor([len(places) for places in own])
    for b, places in enumerate(own):
        place[b, : len(places)], penalty[b, : len(places)] = places, rows.penalty[b, places]
    mask = length_mask(lengths, width)
    return ScoredRows(rows.rewards, lengths, mask, penalty, rows.baselines, lengths), place


def scored_rows() -> tuple[ScoredRows, torch.Tensor]:
    batch = conversation_rows(60)
    generator = torch.Generator().manual_seed(0)
    penalty = torch.rand(batch.completion_mask.shape, generator=generator) * batch.completion_mask
    rows = ScoredRows(
        batch.rewards.float(),
        batch.completion_len,
        batch.completion_mask,
        penalty,
        batch.baselines.float(),
        batch.written_mask.sum(1),
    )
    return rows, batch.foreign_mask


@pytest.mark.parametrize("name", [name for name in ESTIMATORS if name != "none"])
def test_credit_is_that_of_the_policy_s_tokens_alone(name: str) -> None:
    rows, foreign = scored_rows()
    short, place = squeezed(rows, foreign)
    advantage = Advantage(adv_estimator=name, gamma=0.9)  # type: ignore[arg-type]
    found, wanted = advantage(rows, 4), advantage(short, 4)
    if found.dim() == 2:
        assert not found[foreign].any()
        found = found.gather(1, place) * short.mask
    assert torch.allclose(found, wanted, atol=1e-6) and wanted.abs().max() > 0.1


def test_so_it_is_against_a_critic() -> None:
    rows, foreign = scored_rows()
    short, place = squeezed(rows, foreign)
    values = torch.randn(rows.mask.shape, generator=torch.Generator().manual_seed(2))
    advantage = Advantage(adv_estimator="gae", gamma=0.9, lam=0.8)
    junk = torch.where(foreign, torch.full_like(values, 1e6), values)
    for found, wanted in zip(
        advantage.gae(rows, junk), advantage.gae(short, values.gather(1, place) * short.mask), strict=True
    ):
        assert not found[foreign].any()
        assert torch.allclose(found.gather(1, place) * short.mask, wanted, atol=1e-5)


def test_lengths_count_all_tokens_and_say_whose() -> None:
    batch, sums = conversation_rows(60), MetricSums()
    batch.conversations = [Conversation([], None, None, 2)] * len(batch)
    add_rollout_metrics(sums, batch)
    found = sums.reduce()
    foreign = int(batch.foreign_mask.sum())
    assert found["rollout/tokens"] == int(batch.completion_len.sum())
    assert found["rollout/foreign_tokens"] == foreign > 0 and found["rollout/turns"] == 2
    assert found["rollout/loss_tokens"] == found["rollout/tokens"] - foreign


def test_rows_keep_their_conversations_when_they_are_picked_and_replaced() -> None:
    batch = conversation_rows(60)
    batch.conversations = [Conversation([], float(row), None, 1) for row in range(len(batch))]
    picked = replace(batch).select([5, 2])
    assert [talk.reward for talk in picked.conversations] == [5.0, 2.0]
    batch.put_([0, 1], picked)
    assert [talk.reward for talk in batch.conversations[:3]] == [5.0, 2.0, 2.0]
    assert torch.equal(batch.foreign_mask[:2], picked.foreign_mask)
