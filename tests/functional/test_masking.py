"""Masked statistics and the one place where a loss becomes a scalar."""

import pytest
import torch
from torch import Tensor

from lit_rl.functional.masking import (
    Totals,
    aggregate,
    clamped_frac,
    masked_mean,
    masked_sum,
    masked_var,
    masked_whiten,
    totals_of,
)

MODES = ["token_mean", "seq_mean_token_mean", "seq_mean_token_sum", "seq_mean_token_sum_norm"]


def ragged(seed: int = 0, b: int = 6, t: int = 5) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(seed)
    lengths = torch.tensor([5, 3, 0, 1, 4, 2])[:b]
    return torch.randn(b, t, generator=g, dtype=torch.float64), torch.arange(t) < lengths[:, None]


def test_the_four_modes_by_hand() -> None:
    # rows [1, 2, 3] and [4, -, -]: tokens 4, rows 2, longest completion allowed 8
    values, mask = torch.tensor([[1.0, 2.0, 3.0], [4.0, 9.0, 9.0]]), torch.tensor([[1, 1, 1], [1, 0, 0]])
    totals = totals_of(mask, 8)
    expected = dict(zip(MODES, [10 / 4, (2 + 4) / 2, (6 + 4) / 2, 10 / (2 * 8)], strict=True))
    for mode, value in expected.items():
        assert aggregate(values, mask, mode=mode, totals=totals).item() == value


@pytest.mark.field("num/1")
def test_masked_completions_leave_the_denominator() -> None:
    # two completions of 4 tokens, advantage 1, ratio 1; the second is masked
    loss = -torch.ones(2, 4)
    mask = torch.tensor([[1, 1, 1, 1], [0, 0, 0, 0]])
    totals = totals_of(mask, 4)
    assert totals.tokens == 4 and totals.rows == 1
    assert aggregate(loss, mask, mode="token_mean", totals=totals).item() == -1.0


@pytest.mark.field("num/2")
@pytest.mark.parametrize("mode", MODES)
def test_an_all_masked_batch_is_zero_with_zero_gradients(mode: str) -> None:
    weight = torch.ones(4, 3, requires_grad=True)
    per_token = weight * torch.tensor(torch.inf)  # what stands under the mask is never read
    mask = torch.zeros(4, 3, dtype=torch.bool)
    finite = aggregate(weight * 2, mask, mode=mode, totals=totals_of(mask, 3))
    finite.backward()
    assert finite.item() == 0.0 and weight.grad is not None and not weight.grad.any()
    assert aggregate(per_token, mask, mode=mode, totals=totals_of(mask, 3)).item() == 0.0


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("cut", [(1, 5), (2, 2, 2), (3, 1, 2), (1, 1, 1, 1, 1, 1)])
def test_micro_batches_give_the_full_batch_loss_and_gradient(mode: str, cut: tuple[int, ...]) -> None:
    values, mask = ragged()
    totals = totals_of(mask, 7)
    whole = values.clone().requires_grad_()
    aggregate(whole, mask, mode=mode, totals=totals).backward()
    parts = values.clone().requires_grad_()
    loss = sum(
        aggregate(v, m, mode=mode, totals=totals)
        for v, m in zip(parts.split(list(cut)), mask.split(list(cut)), strict=True)
    )
    assert isinstance(loss, Tensor)
    loss.backward()
    assert whole.grad is not None and parts.grad is not None
    torch.testing.assert_close(parts.grad, whole.grad, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("mode", MODES)
def test_totals_of_shards_add_up_to_those_of_the_whole(mode: str) -> None:
    values, mask = ragged()
    shards = [totals_of(m, 7) for m in mask.split(3)]
    added = Totals(shards[0].tokens + shards[1].tokens, shards[0].rows + shards[1].rows, 7)
    whole = aggregate(values, mask, mode=mode, totals=totals_of(mask, 7))
    split = [
        aggregate(v, m, mode=mode, totals=added) for v, m in zip(values.split(3), mask.split(3), strict=True)
    ]
    torch.testing.assert_close(split[0] + split[1], whole)


@pytest.mark.parametrize("mode", MODES)
def test_padding_and_the_order_of_rows_change_nothing(mode: str) -> None:
    values, mask = ragged()
    loss = aggregate(values, mask, mode=mode, totals=totals_of(mask, 7))
    junk = torch.full((6, 4), torch.nan, dtype=torch.float64)
    wide, wide_mask = torch.cat([values, junk], 1), torch.cat([mask, torch.zeros(6, 4).bool()], 1)
    torch.testing.assert_close(aggregate(wide, wide_mask, mode=mode, totals=totals_of(wide_mask, 7)), loss)
    order = torch.tensor([3, 0, 5, 1, 4, 2])
    torch.testing.assert_close(
        aggregate(values[order], mask[order], mode=mode, totals=totals_of(mask, 7)), loss
    )


@pytest.mark.parametrize("mode", MODES)
def test_a_value_per_row_stands_for_each_of_its_tokens(mode: str) -> None:
    values, mask = ragged()
    totals = totals_of(mask, 7)
    spread = aggregate(values[:, :1].expand(6, 5), mask, mode=mode, totals=totals)
    torch.testing.assert_close(aggregate(values[:, :1], mask, mode=mode, totals=totals), spread)


def test_half_precision_is_summed_in_float32() -> None:
    values = torch.full((1, 4096), 1.0, dtype=torch.bfloat16)
    mask = torch.ones(1, 4096)
    assert masked_sum(values, mask).item() == 4096  # bfloat16 stops counting at 256
    assert aggregate(values, mask, mode="token_mean", totals=totals_of(mask, 1)).dtype == torch.float32


def test_an_unknown_mode_is_refused() -> None:
    with pytest.raises(ValueError, match="mode must be"):
        aggregate(torch.zeros(1, 1), torch.ones(1, 1), mode="mean", totals=totals_of(torch.ones(1, 1), 1))


def test_masked_statistics_are_those_of_the_kept_values() -> None:
    values, mask = ragged()
    kept = values[mask]
    torch.testing.assert_close(masked_mean(values, mask), kept.mean())
    torch.testing.assert_close(masked_var(values, mask), kept.var())
    torch.testing.assert_close(masked_var(values, mask, unbiased=False), kept.var(unbiased=False))
    whitened = masked_whiten(values, mask)
    assert not whitened[~mask].any()
    torch.testing.assert_close(whitened[mask], (kept - kept.mean()) / (kept.var() + 1e-8).sqrt())


def test_the_variance_survives_a_large_mean() -> None:
    values = torch.tensor([[10000.0, 10001.0, 10002.0]])  # float32: the one-pass form loses it
    assert masked_var(values, torch.ones(1, 3)).item() == pytest.approx(1.0, rel=1e-6)


@pytest.mark.parametrize("count", [0, 1])
def test_fewer_than_two_values_whiten_to_zero(count: int) -> None:
    mask = torch.arange(4)[None] < count
    whitened = masked_whiten(torch.tensor([[3.0, 1.0, 2.0, 5.0]]), mask)
    assert not whitened.any()


def test_the_clamped_share_counts_both_sides() -> None:
    values = torch.tensor([[-20.0, 20.0, 0.0, 5.0, 20.0]])
    assert clamped_frac(values, torch.tensor([[1, 1, 1, 1, 0]]), bound=20.0).item() == 0.5
