import math

import pytest
import torch
from torch import Tensor
from transformers import (
    EpsilonLogitsWarper,
    LogitsProcessorList,
    MinPLogitsWarper,
    NoRepeatNGramLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    TypicalLogitsWarper,
)

from lit_rl.errors import ConfigError
from lit_rl.rollout.processors import Draw, draw_of
from lit_rl.rollout.sampling import Sampling

V = 12


def draw(**settings) -> Draw:
    return draw_of(Sampling(**settings).effective(), prompt_width=3, end_ids=[1], device="cpu")


def table(logits: Tensor, history: Tensor, used: Draw, grid: int = 4000) -> Tensor:
    """(V,) shares of the tokens at equally spaced numbers: the distribution itself, to 1 / grid."""
    numbers = (torch.arange(grid, dtype=torch.float64) + 0.5) / grid
    tokens, _ = used(logits.expand(grid, -1), numbers, history.expand(grid, -1))
    return torch.bincount(tokens, minlength=V) / grid


LOGITS = torch.randn(V, generator=torch.Generator().manual_seed(3)) * 2
HISTORY = torch.tensor([V, 4, 7, 4, 2])  # one column of padding


def test_temperature_tempers_the_distribution_and_the_log_probability() -> None:
    used = draw(temperature=0.5)
    expected = (LOGITS / 0.5).softmax(-1)
    torch.testing.assert_close(table(LOGITS, HISTORY, used), expected, atol=3e-4, rtol=0)
    tokens, logps = used(LOGITS.expand(9, -1), torch.rand(9, dtype=torch.float64), None)
    torch.testing.assert_close(logps, expected.log()[tokens])


@pytest.mark.field("num/9")
def test_the_log_probability_is_at_the_sampling_temperature() -> None:
    tokens, logps = draw(temperature=0.5)(
        torch.tensor([[2.0, 1.0, 0.0]]), torch.zeros(1, dtype=torch.float64), None
    )
    assert tokens.tolist() == [0]
    assert logps.item() == pytest.approx(-0.1429, abs=1e-4)


@pytest.mark.field("num/10")
def test_greedy_takes_the_top_token_and_untempered_log_probabilities() -> None:
    tokens, logps = draw(temperature=0.0)(LOGITS[None], None, None)
    assert tokens.tolist() == [int(LOGITS.argmax())]
    torch.testing.assert_close(logps, LOGITS.log_softmax(-1)[tokens])


@pytest.mark.field("num/11")
def test_the_log_probability_is_over_the_whole_vocabulary_whatever_is_cut() -> None:
    logits = torch.tensor([[0.5, 0.3, 0.2]]).log()
    tokens, logps = draw(top_k=2)(logits, torch.zeros(1, dtype=torch.float64), torch.tensor([[3, 3]]))
    assert tokens.tolist() == [0]
    assert logps.exp().item() == pytest.approx(0.5)


@pytest.mark.parametrize(
    ("settings", "reference"),
    [
        ({"top_k": 3}, [TopKLogitsWarper(3)]),
        ({"top_k": -1, "top_p": 0.6}, [TopPLogitsWarper(0.6)]),
        ({"min_p": 0.2}, [MinPLogitsWarper(0.2)]),
        ({"top_k": 5, "top_p": 0.8}, [TopKLogitsWarper(5), TopPLogitsWarper(0.8)]),
        ({"top_p": 0.9, "min_p": 0.1}, [TopPLogitsWarper(0.9), MinPLogitsWarper(0.1)]),
        ({"generation_kwargs": {"typical_p": 0.5}}, [TypicalLogitsWarper(0.5)]),
        ({"generation_kwargs": {"epsilon_cutoff": 0.05}}, [EpsilonLogitsWarper(0.05)]),
    ],
)
def test_cuts_give_the_distribution_of_the_processors_of_transformers(
    settings: dict, reference: list
) -> None:
    chain = LogitsProcessorList([TemperatureLogitsWarper(1.3), *reference])
    expected = chain(HISTORY[None], LOGITS[None])[0].softmax(-1)
    drawn = table(LOGITS, HISTORY, draw(temperature=1.3, **settings))
    torch.testing.assert_close(drawn, expected, atol=3e-4, rtol=0)
    assert not drawn[expected == 0].any()
    assert (expected == 0).any()


def test_repetition_penalty_counts_prompt_and_completion_but_not_padding() -> None:
    drawn = table(LOGITS, HISTORY, draw(repetition_penalty=1.7))
    unpadded = HISTORY[1:][None]
    expected = RepetitionPenaltyLogitsProcessor(1.7)(unpadded, LOGITS[None])[0].softmax(-1)
    torch.testing.assert_close(drawn, expected, atol=3e-4, rtol=0)
    assert not torch.allclose(expected, LOGITS.softmax(-1), atol=1e-2)


def test_ngrams_are_not_repeated_and_padding_is_no_ngram() -> None:
    history = torch.tensor([[V, V, 4, 7, 4], [V, V, V, V, 7]])
    used = draw(temperature=0.0, generation_kwargs={"no_repeat_ngram_size": 2})
    logits = torch.zeros(2, V)
    logits[:, 7], logits[:, 3] = 2.0, 1.0
    assert used(logits, None, history)[0].tolist() == [3, 7]
    unpadded = NoRepeatNGramLogitsProcessor(2)(history[:1, 2:], logits[:1])
    assert unpadded.argmax().item() == 3


def test_tokens_can_be_suppressed_at_the_beginning_or_throughout() -> None:
    logits = torch.arange(V).float()[None]
    used = draw(
        temperature=0.0,
        generation_kwargs={
            "begin_suppress_tokens": [11],
            "suppress_tokens": [10],
            "bad_words_ids": [[9], [8, 11]],
        },
    )
    first, later, after_8 = (torch.tensor([row]) for row in ([2, 3, 4], [2, 3, 4, 5], [2, 3, 4, 8]))
    assert [used(logits, None, history)[0].item() for history in (first, later, after_8)] == [8, 11, 8]


def test_no_end_before_the_least_number_of_tokens() -> None:
    logits = torch.zeros(1, V)
    logits[0, 1], logits[0, 5] = 3.0, 2.0
    used = draw(temperature=0.0, generation_kwargs={"min_new_tokens": 2})
    histories = [torch.full((1, 3 + n), 4) for n in range(3)]
    assert [used(logits, None, history)[0].item() for history in histories] == [5, 5, 1]


def test_values_that_mean_off_ask_for_no_processor() -> None:
    off = {"typical_p": 1.0, "eta_cutoff": 0.0, "no_repeat_ngram_size": 0, "suppress_tokens": None}
    assert not draw(min_p=0.0, top_k=-1, generation_kwargs=off).needs_history


def test_a_large_batch_is_drawn_in_pieces_with_the_same_result(monkeypatch: pytest.MonkeyPatch) -> None:
    logits = torch.randn(7, V, generator=torch.Generator().manual_seed(0))
    numbers = torch.rand(7, dtype=torch.float64)
    history = torch.randint(0, V, (7, 4))
    used = draw(top_p=0.9, repetition_penalty=1.2)
    whole = used(logits, numbers, history)
    monkeypatch.setattr("lit_rl.rollout.processors._CHUNK_ELEMENTS", 2 * V)
    pieces = used(logits, numbers, history)
    assert torch.equal(whole[0], pieces[0])
    torch.testing.assert_close(whole[1], pieces[1])


def test_logits_that_are_not_finite_show_in_the_log_probability() -> None:
    logits = torch.zeros(2, V)
    logits[1, 3] = math.nan
    logps = draw()(logits, torch.rand(2, dtype=torch.float64), None)[1]
    assert logps.isfinite().tolist() == [True, False]


def test_half_precision_logits_are_drawn_from_in_float32() -> None:
    numbers = torch.rand(4, dtype=torch.float64)
    half = LOGITS.bfloat16().expand(4, -1)
    tokens, logps = draw()(half, numbers, None)
    expected, expected_logps = draw()(half.float(), numbers, None)
    assert torch.equal(tokens, expected)
    assert torch.equal(logps, expected_logps)
    assert logps.dtype == torch.float32


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        (
            {"num_beams": 4},
            r"algo.sampling.generation_kwargs.num_beams is not supported .*found 4.*suppress_tokens",
        ),
        ({"typical_p": 3.0}, r"algo.sampling.generation_kwargs.typical_p cannot be used \(found 3.0\)"),
        ({"eta_cutoff": -1.0}, r"generation_kwargs.eta_cutoff cannot be used"),
        ({"min_new_tokens": -2}, r"generation_kwargs.min_new_tokens cannot be used"),
    ],
)
def test_generation_kwargs_that_cannot_be_followed_are_refused(kwargs: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        draw(generation_kwargs=kwargs)
