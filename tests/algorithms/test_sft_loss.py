"""SFT against plain transformers, and what changes memory but never the loss."""

from collections.abc import Callable

import pytest
import torch
from stored_rollouts import embedded_chat
from torch.nn import functional as F
from transformers import LlamaForCausalLM

from lit_rl.algorithms.sft import SFT
from lit_rl.batch import RolloutBatch
from lit_rl.data.sft import SFTDataModule
from lit_rl.errors import ConfigError
from lit_rl.models.packing import check_packing, packed
from lit_rl.models.score import rows_of
from lit_rl.objectives.batch_plan import BatchPlan

CHATS = [
    ["12+13=?", "25", "and 25+1=?", "26"],
    ["7+1=?", "8"],
    ["What is 100-1?", "99 it is, as 99+1=100"],
    ["1+1=?", "2", "2+2=?", "4", "4+4=?", "8"],
    ["5-5=?", "0"],
    ["6-6=?", "0"],
]


@pytest.fixture(scope="module")
def batch() -> RolloutBatch:
    """Six conversations of one to three turns, as the datamodule makes them."""
    rows = [
        {"messages": [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(chat)]}
        for chat in CHATS
    ]
    data = SFTDataModule(
        train_files=rows, train_batch_size=6, shuffle=False, tokenizer=embedded_chat().tokenizer
    )
    data.setup("fit")
    return next(iter(data.train_dataloader()))


def loss_of(module: SFT, batch: RolloutBatch) -> torch.Tensor:
    """The loss of the batch as one optimizer batch, its gradient in the policy."""
    module.policy.zero_grad()
    totals = module.totals(batch)
    loss = sum((module.loss(piece, totals) for piece in module.micro_batches(batch)), torch.zeros(()))
    loss.backward()
    return loss.detach()


def gradient(module: SFT) -> torch.Tensor:
    return torch.cat([p.grad.flatten() for p in module.policy.parameters() if p.grad is not None])


def labels_of(batch: RolloutBatch) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Right-padded ids, attention mask and labels, built one row at a time."""
    ids, labels = [], []
    for b in range(len(batch)):
        prompt = batch.prompt_ids[b, batch.prompt_ids.shape[1] - int(batch.prompt_len[b]) :]
        completion = batch.completion_ids[b, : int(batch.completion_len[b])]
        counts = batch.completion_mask[b, : int(batch.completion_len[b])]
        ids.append(torch.cat([prompt, completion]))
        labels.append(torch.cat([torch.full_like(prompt, -100), completion.where(counts, -100)]))
    pad = torch.nn.utils.rnn.pad_sequence
    mask = pad([torch.ones_like(row) for row in ids], batch_first=True)
    return pad(ids, batch_first=True), mask, pad(labels, batch_first=True, padding_value=-100)


@pytest.mark.parametrize("packing", [False, True])
def test_the_loss_is_that_of_plain_transformers(
    packing: bool, batch: RolloutBatch, tiny_policy: Callable[..., LlamaForCausalLM]
) -> None:
    module = SFT(policy=tiny_policy(), packing=packing, batch=BatchPlan(micro_batch_size=4))
    ours, theirs = loss_of(module, batch), tiny_policy()
    ids, mask, labels = labels_of(batch)
    assert (labels != -100).sum() == batch.completion_mask.sum() == 40
    reference = theirs(input_ids=ids, attention_mask=mask, labels=labels).loss
    reference.backward()
    torch.testing.assert_close(ours, reference.detach(), rtol=1e-6, atol=1e-6)
    for (name, mine), other in zip(module.policy.named_parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, other.grad, rtol=1e-4, atol=1e-6, msg=name)


@pytest.mark.parametrize("packing", [False, True])
def test_label_smoothing_is_that_of_torch(
    packing: bool, batch: RolloutBatch, tiny_policy: Callable[..., LlamaForCausalLM]
) -> None:
    module = SFT(policy=tiny_policy(), packing=packing, label_smoothing_factor=0.1)
    ids, mask, labels = labels_of(batch)
    scores = tiny_policy()(input_ids=ids, attention_mask=mask).logits[:, :-1].flatten(0, 1)
    reference = F.cross_entropy(scores, labels[:, 1:].flatten(), label_smoothing=0.1)
    torch.testing.assert_close(loss_of(module, batch), reference.detach(), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("size", [1, 2, 3, 6])
def test_packing_changes_neither_loss_nor_gradient_whatever_the_micro_batch(
    size: int, batch: RolloutBatch, tiny_policy: Callable[..., LlamaForCausalLM]
) -> None:
    plain = SFT(policy=tiny_policy())
    module = SFT(policy=tiny_policy(), packing=True, batch=BatchPlan(micro_batch_size=size))
    torch.testing.assert_close(loss_of(module, batch), loss_of(plain, batch), rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(gradient(module), gradient(plain), rtol=1e-4, atol=1e-6)


def test_packed_rows_fill_fewer_sequences_and_keep_their_tokens(batch: RolloutBatch) -> None:
    rows = rows_of(batch)
    layout = packed(rows)
    lengths = (rows.prompt_len + rows.completion_len).tolist()
    assert layout.ids.shape[1] == max(lengths) and len(layout.ids) < len(batch)
    flat, positions = layout.ids.flatten(), layout.positions.flatten()
    taken: set[int] = set()
    ids, _, _ = labels_of(batch)
    for b, (start, length) in enumerate(zip(layout.starts.tolist(), lengths, strict=True)):
        assert flat[start : start + length].equal(ids[b, :length])
        assert positions[start : start + length].tolist() == list(range(length))
        assert start // layout.ids.shape[1] == (start + length - 1) // layout.ids.shape[1]
        assert not taken & set(range(start, start + length))
        taken |= set(range(start, start + length))


def test_a_model_that_lets_packed_rows_see_each_other_is_refused(
    tiny_policy: Callable[..., LlamaForCausalLM],
) -> None:
    policy = tiny_policy()
    check_packing(policy)
    body = policy.model
    forward = body.forward
    body.forward = lambda **inputs: forward(**{k: v for k, v in inputs.items() if k != "position_ids"})
    with pytest.raises(ConfigError, match=r"algo\.packing needs an architecture that keeps the rows"):
        check_packing(policy)


@pytest.mark.parametrize("value", [-0.1, 1.0])
def test_a_smoothing_out_of_range_is_refused(
    value: float, tiny_policy: Callable[..., LlamaForCausalLM]
) -> None:
    with pytest.raises(
        ConfigError, match=rf"algo\.label_smoothing_factor must be in \[0, 1\) \(found {value}\)"
    ):
        SFT(policy=tiny_policy(), label_smoothing_factor=value)


def test_noise_on_embeddings_is_a_row_s_own_whatever_the_cut_and_the_layout(
    batch: RolloutBatch, tiny_policy: Callable[..., LlamaForCausalLM], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(SFT, "step", 3)

    def loss(alpha: float | None, packing: bool, size: int) -> float:
        module = SFT(policy=tiny_policy(), packing=packing, batch=BatchPlan(micro_batch_size=size))
        module.policy.neftune_noise_alpha = alpha
        return loss_of(module, batch).item()

    noisy = loss(5.0, False, 6)
    assert abs(noisy - loss(None, False, 6)) > 1e-5
    for packing, size in ((True, 6), (True, 2), (False, 1)):
        assert loss(5.0, packing, size) == pytest.approx(noisy, rel=1e-6)
    monkeypatch.setattr(SFT, "step", 4)
    assert abs(loss(5.0, False, 6) - noisy) > 1e-6


def test_noise_is_of_the_size_of_its_paper(
    batch: RolloutBatch, tiny_policy: Callable[..., LlamaForCausalLM], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(SFT, "step", 0)
    module = SFT(policy=tiny_policy())
    module.policy.neftune_noise_alpha = 5.0
    (noise,) = module._noise(batch.select([2]), [30])
    width = module.policy.config.hidden_size
    bound = 5.0 / (30 * width) ** 0.5
    assert noise.shape == (30, width) and noise.abs().max() <= bound
    assert noise.square().mean().sqrt().item() == pytest.approx(bound / 3**0.5, rel=0.1)
