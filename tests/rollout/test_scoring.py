"""Scores of given tokens: the right entry of each position, or an error that names it."""

import pytest
import torch

from lit_rl.rollout.scoring import reported, scores_of

from .tiny import RAGGED, bound, generate, llama, plain_logps, prompts_of


def two_tokens():
    """One row with the completion [4, 9]."""
    rows = prompts_of([[5, 6]], [17])
    rows.completion_ids, rows.completion_len = torch.tensor([[4, 9]]), torch.tensor([2])
    return rows


@pytest.mark.field("vllm/4")
def test_the_tokens_own_entry_counts_wherever_it_stands() -> None:
    entries = [[[(9, -0.1, 1), (4, -3.0, 5)], [(9, -0.5, 1), (7, -1.5, 2)]]]
    scores = scores_of(two_tokens(), entries, topk=1)
    assert scores.logps.tolist() == [[-3.0, -0.5]]
    assert scores.top_ids.tolist() == [[[9], [9]]]
    torch.testing.assert_close(scores.top_logps, torch.tensor([[[-0.1], [-0.5]]]))


@pytest.mark.field("vllm/4")
@pytest.mark.parametrize(
    ("second", "message"),
    [
        ([(9, float("nan"), 1)], "data row 17 at token 1 is not a finite number"),
        ([(7, -0.5, 1)], "0 times the token itself for data row 17 at token 1"),
        ([(9, -0.5, 2)], "0 of the 1 most likely tokens"),
    ],
)
def test_a_missing_or_broken_value_is_an_error_that_names_it(second: list, message: str) -> None:
    with pytest.raises(RuntimeError, match=message):
        scores_of(two_tokens(), [[[(4, -1.0, 1)], second]], topk=1)


def test_entries_come_as_objects_or_as_json() -> None:
    class Logprob:
        logprob, rank = -0.5, 2

    assert reported({7: Logprob()}) == reported({"7": {"logprob": -0.5, "rank": 2}}) == [(7, -0.5, 2)]


def test_the_training_model_scores_as_it_writes() -> None:
    model = llama()
    engine = bound(model, max_num_seqs=4)
    rows = generate(engine, RAGGED, G=3)
    scores = engine.score(rows, topk=2)
    torch.testing.assert_close(scores.logps, plain_logps(model, rows), atol=1e-5, rtol=0)
    best = scores.top_logps[..., 0]
    assert (best >= scores.logps - 1e-6).all() and (best >= scores.top_logps[..., 1]).all()
    is_best = (scores.top_ids[..., 0] == rows.completion_ids) & rows.token_mask
    assert is_best.any() and torch.equal(best[is_best], scores.logps[is_best])
