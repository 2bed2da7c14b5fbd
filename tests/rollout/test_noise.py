import pytest
import torch

from lit_rl.rollout.noise import inverse_cdf, uniforms


def test_numbers_depend_on_every_part_and_not_on_neighbours() -> None:
    table = uniforms(1, 2, [5, 5, 9], [0, 1, 0], 8)
    alone = uniforms(1, 2, [9], [0], 8)
    assert torch.equal(table[2:], alone)
    others = [uniforms(*parts, 8) for parts in ((2, 2, [9], [0]), (1, 3, [9], [0]), (1, 2, [9], [1]))]
    assert all(not torch.equal(alone, other) for other in [*others, table[:1], table[1:2]])


def test_a_shorter_limit_draws_the_first_numbers_of_a_longer_one() -> None:
    assert torch.equal(uniforms(0, 0, [3], [1], 3), uniforms(0, 0, [3], [1], 200)[:, :3])


def test_a_token_is_the_first_whose_cumulative_weight_exceeds_the_number() -> None:
    weights = torch.tensor([[2.0, 0.0, 1.0, 1.0]]).expand(6, 4)  # cumulative 0.5, 0.5, 0.75, 1
    numbers = torch.tensor([0.0, 0.49, 0.5, 0.74, 0.75, 1 - 2**-53], dtype=torch.float64)
    assert inverse_cdf(weights, numbers).tolist() == [0, 0, 2, 2, 3, 3]


def test_zero_weights_at_both_ends_are_never_chosen() -> None:
    weights = torch.tensor([[0.0, 0.0, 1e-30, 3e-30, 0.0, 0.0]]).expand(2, 6)
    numbers = torch.tensor([0.0, 1 - 2**-53], dtype=torch.float64)
    assert inverse_cdf(weights, numbers).tolist() == [2, 3]


def test_a_number_of_one_does_not_reach_past_the_last_weight() -> None:
    weights = torch.tensor([[1.0, 3.0, 0.0]])
    assert inverse_cdf(weights, torch.ones(1, dtype=torch.float64)).tolist() == [1]


def test_rare_tokens_of_a_large_vocabulary_keep_their_share() -> None:
    # 2**20 equal tokens: a float32 sum of 1/2**20 would still be exact, of 1/3-sized weights it would not.
    weights = torch.full((1, 2**20), 1 / 3)
    numbers = (torch.arange(2**20, dtype=torch.float64)[-1000:] + 0.5) / 2**20
    assert inverse_cdf(weights.expand(10, -1), numbers[:10]).tolist() == list(
        range(2**20 - 1000, 2**20 - 990)
    )


@pytest.mark.parametrize("vocabulary", [3, 255, 256, 257, 5000])
def test_tokens_are_those_of_one_cumulative_sum_whatever_the_blocks(vocabulary: int) -> None:
    generator = torch.Generator().manual_seed(vocabulary)
    weights = torch.randint(0, 4, (64, vocabulary), generator=generator).float()  # sums are exact
    weights[:, -1] += 1
    numbers = torch.rand(64, generator=generator, dtype=torch.float64)
    numbers[0], numbers[1] = 0.0, 1 - 2**-40
    cumulative = weights.cumsum(-1, dtype=torch.float64)
    wanted = torch.searchsorted(cumulative, numbers[:, None] * cumulative[:, -1:], right=True)[:, 0]
    assert torch.equal(inverse_cdf(weights, numbers), wanted)
