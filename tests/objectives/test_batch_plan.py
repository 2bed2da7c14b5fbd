import pytest
import torch

from lit_rl.batch import RolloutBatch
from lit_rl.errors import ConfigError
from lit_rl.objectives.batch_plan import BatchPlan


def test_the_worked_example_of_the_batch_arithmetic() -> None:
    # P = 4, G = 8, M = 16, m = 2, I = 2, W = 2: 16 rows per rank, K = 2, U = 4, A = 4.
    plan = BatchPlan(optimizer_batch_size=16, micro_batch_size=2)
    assert plan.optimizer_steps(16, num_iterations=2, num_ranks=2) == 4
    assert [len(part) for part in plan.optimizer_batches(16, num_ranks=2)] == [8, 8]
    assert plan.micro_steps(16, num_ranks=2) == 8


@pytest.mark.parametrize("plan", [BatchPlan(micro_batch_size=5), BatchPlan(None, None, 20)])
def test_every_row_is_in_one_micro_batch(plan: BatchPlan, make_batch) -> None:
    batch: RolloutBatch = make_batch()
    batch.prompt_row = torch.arange(len(batch))
    rows = torch.cat([piece.prompt_row for piece in plan.micro_batches(batch)])
    assert sorted(rows.tolist()) == list(range(len(batch)))


def test_a_token_budget_holds_unless_one_row_exceeds_it(make_batch) -> None:
    batch: RolloutBatch = make_batch()
    for piece in BatchPlan(None, None, 20).micro_batches(batch):
        longest = int((piece.prompt_len + piece.completion_len).max())
        assert len(piece) == 1 or len(piece) * longest <= 20


def test_padding_counts_in_a_token_budget(make_batch) -> None:
    """One long row beside many short ones would be a piece as wide as the long row."""
    batch: RolloutBatch = make_batch(P=1, G=8)
    batch.prompt_len = torch.tensor([40, 2, 2, 2, 2, 2, 2, 2])
    batch.completion_len = torch.ones(8, dtype=torch.long)
    pieces = list(BatchPlan(None, None, 54).micro_batches(batch))
    assert [len(piece) for piece in pieces] == [1, 7]


def test_a_shared_prompt_counts_once_and_its_rows_stay_together() -> None:
    lens, counts = torch.tensor([10] * 8), torch.tensor([4, 1, 3, 2, 5, 5, 1, 1])
    prompts = torch.arange(2).repeat(4)[:, None] + torch.arange(10)  # rows of two prompts, by turns
    batch = RolloutBatch(prompts, lens, torch.arange(8), completion_len=counts, completion_ids=prompts[:, :5])
    alone = [piece.prompt_row.tolist() for piece in BatchPlan(None, None, 30).micro_batches(batch)]
    assert max(map(len, alone)) == 2
    shared = [
        piece.prompt_row.tolist() for piece in BatchPlan(None, None, 25).micro_batches(batch, is_sharing=True)
    ]
    # 10 + 5 + 4 + 3 + 1 = 23 tokens, then 10 + 5 + 2 + 1 + 1 = 19
    assert shared == [[4, 0, 2, 6], [5, 3, 1, 7]]


def test_shuffle_permutes_by_the_generator() -> None:
    plan = BatchPlan(shuffle=True, optimizer_batch_size=4)
    draws = [
        torch.cat(list(plan.optimizer_batches(12, generator=torch.Generator().manual_seed(s))))
        for s in (1, 1, 2)
    ]
    assert draws[0].tolist() == draws[1].tolist() != draws[2].tolist()
    assert sorted(draws[0].tolist()) == list(range(12))


@pytest.mark.parametrize(
    "settings",
    [
        {"micro_batch_size": None},
        {"micro_batch_tokens": 64},
        {"optimizer_batch_size": 0},
        {"score_micro_batch_size": 1, "score_micro_batch_tokens": 9},
    ],
)
def test_sizes_that_cannot_work_are_refused(settings: dict) -> None:
    with pytest.raises(ConfigError, match=r"algo\.batch\."):
        BatchPlan(**settings)
