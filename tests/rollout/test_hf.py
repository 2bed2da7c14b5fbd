"""What the engine promises, on a model with rotary and on one with learned positions."""

import weakref
from collections import Counter

import pytest
import torch
from torch import nn
from transformers import GenerationConfig, PreTrainedModel

from lit_rl.rollout.hf import HFEngine
from lit_rl.rollout.sampling import Sampling

from .tiny import (
    END,
    PAD,
    RAGGED,
    VOCABULARY,
    bound,
    completions,
    generate,
    gpt2,
    llama,
    numbers_as_text,
    plain_logps,
    prompts_of,
)


def written_one_by_one(model: PreTrainedModel, **settings) -> list[list[int]]:
    """What transformers' own generate writes for each prompt alone, without padding."""
    config = GenerationConfig(
        do_sample=False, max_new_tokens=12, eos_token_id=END, pad_token_id=PAD, **settings
    )
    model.eval()
    return [
        model.generate(torch.tensor([row]), generation_config=config)[0, len(row) :].tolist()
        for row in RAGGED
    ]


@pytest.mark.field("gen/1")
@pytest.mark.parametrize("cache", [None, "dynamic", "static"])
def test_greedy_equals_the_generate_of_transformers(model: PreTrainedModel, cache: str | None) -> None:
    written = completions(generate(bound(model, cache_implementation=cache), temperature=0.0))
    assert written == written_one_by_one(model)


def test_greedy_with_processors_equals_the_generate_of_transformers(model: PreTrainedModel) -> None:
    extras = {"no_repeat_ngram_size": 2, "min_new_tokens": 9, "suppress_tokens": [7, 9]}
    rows = generate(bound(model), temperature=0.0, repetition_penalty=1.4, generation_kwargs=extras)
    assert completions(rows) == written_one_by_one(model, repetition_penalty=1.4, **extras)


@pytest.mark.field("gen/1")
@pytest.mark.parametrize("temperature", [0.5, 1.0, 1.5])
def test_log_probabilities_are_those_of_a_plain_forward(model: PreTrainedModel, temperature: float) -> None:
    rows = generate(bound(model), G=4, temperature=temperature, top_k=20)
    torch.testing.assert_close(rows.rollout_logps, plain_logps(model, rows, temperature), atol=1e-5, rtol=0)


@pytest.mark.field("num/10")
def test_greedy_log_probabilities_are_untempered_and_finite(model: PreTrainedModel) -> None:
    rows = generate(bound(model), temperature=0.0)
    torch.testing.assert_close(rows.rollout_logps, plain_logps(model, rows), atol=1e-5, rtol=0)


def test_a_group_read_once_equals_its_rows_read_each(model: PreTrainedModel) -> None:
    together = generate(bound(model), G=3)
    apart = generate(bound(model, max_num_seqs=1), G=3)
    assert completions(together) == completions(apart)
    torch.testing.assert_close(together.rollout_logps, apart.rollout_logps, atol=1e-5, rtol=0)


@pytest.mark.parametrize("max_num_seqs", [1, 2, 4, 5, 11, 12, 100])
def test_rows_do_not_depend_on_how_many_are_written_at_once(
    model: PreTrainedModel, max_num_seqs: int
) -> None:
    few, all_at_once = (generate(bound(model, max_num_seqs=most), G=4) for most in (max_num_seqs, 1024))
    assert completions(few) == completions(all_at_once)
    assert few.finish_reason == all_at_once.finish_reason
    torch.testing.assert_close(few.rollout_logps, all_at_once.rollout_logps, atol=1e-5, rtol=0)


@pytest.mark.parametrize(
    "settings",
    [
        {"repetition_penalty": 1.5, "generation_kwargs": {"min_new_tokens": 3, "begin_suppress_tokens": [5]}},
        {"stop": ["7", "21"]},
    ],
)
def test_rows_that_wait_see_their_own_history_only(model: PreTrainedModel, settings: dict) -> None:
    few, all_at_once = (
        completions(generate(bound(model, max_num_seqs=most), G=8, **settings)) for most in (5, 1024)
    )
    assert few == all_at_once


def passes_of(model: PreTrainedModel, **settings) -> list[tuple[int, int]]:
    """Rows and tokens of each forward pass while 64 completions are written."""
    shapes: list[tuple[int, int]] = []
    hook = model.register_forward_pre_hook(
        lambda _, args, kwargs: shapes.append(tuple(kwargs["input_ids"].shape)), with_kwargs=True
    )
    settings_of_rows = {"max_completion_length": 40, "stop_token_ids": [4, 5, 6]}
    rows = generate(bound(model, **settings), RAGGED[:1], G=64, **settings_of_rows)
    hook.remove()
    assert rows.completion_len.min() < 5
    assert rows.completion_len.max() > 30
    return shapes


def test_waiting_rows_begin_where_others_have_ended() -> None:
    torch.manual_seed(3)
    in_turn, kept_full = (
        passes_of(llama(), max_num_seqs=8, cache_implementation=cache) for cache in ("static", None)
    )
    assert max(rows for rows, _ in kept_full) <= 8
    assert len(kept_full) < 0.7 * len(in_turn)  # a static cache cannot take rows in


def test_rows_depend_on_the_prompt_row_and_not_on_order_or_neighbours(model: PreTrainedModel) -> None:
    engine = bound(model)
    whole = completions(generate(engine, prompts_of(RAGGED, [30, 10, 20]), G=2))
    turned = completions(generate(engine, prompts_of(RAGGED[::-1], [20, 10, 30]), G=2))
    alone = completions(generate(engine, prompts_of(RAGGED[1:2], [10]), G=2))
    assert turned == whole[4:] + whole[2:4] + whole[:2]
    assert alone == whole[2:4]


def test_more_padding_changes_nothing() -> None:
    prompts = prompts_of(RAGGED)
    wider = prompts_of(RAGGED)
    wider.prompt_ids = nn.functional.pad(wider.prompt_ids, (9, 0), value=-1)
    engine = bound(llama())
    narrow_rows, wide_rows = generate(engine, prompts, G=2), generate(engine, wider, G=2)
    assert completions(narrow_rows) == completions(wide_rows)
    assert torch.equal(narrow_rows.rollout_logps, wide_rows.rollout_logps)


def test_padding_is_no_repetition(model: PreTrainedModel) -> None:
    engine = bound(model)
    # No token twice, so that nearly every token is used, whatever id stands for padding.
    settings = {
        "ignore_eos": True,
        "max_completion_length": 25,
        "generation_kwargs": {"no_repeat_ngram_size": 1},
    }
    beside_longer = completions(generate(engine, RAGGED, G=8, **settings))[:8]
    alone = completions(generate(engine, RAGGED[:1], G=8, **settings))
    assert beside_longer == alone
    assert {token for row in alone for token in row} == set(range(VOCABULARY)) - set(RAGGED[0])


@pytest.mark.field("vllm/7")
def test_seed_step_and_generation_make_the_rows_and_nothing_else_does() -> None:
    engine = bound(llama())
    first = completions(generate(engine, G=8, seed=1, step=5))
    torch.manual_seed(123)
    torch.rand(7)
    assert completions(generate(engine, G=8, seed=1, step=5)) == first
    assert completions(generate(bound(llama()), G=8, seed=1, step=5)) == first
    assert completions(generate(engine, G=8, seed=2, step=5)) != first
    assert completions(generate(engine, G=8, seed=1, step=6)) != first
    assert len({tuple(row) for row in first[:8]}) > 1
    assert completions(generate(engine, G=3, seed=1, step=5))[:3] == first[:3]


def test_generation_leaves_the_global_random_state_alone() -> None:
    engine = bound(llama())
    state = torch.get_rng_state()
    generate(engine, G=2)
    assert torch.equal(torch.get_rng_state(), state)


def test_sampled_frequencies_match_the_distribution() -> None:
    model = gpt2()
    rows = generate(bound(model), [[5, 9, 3]], G=20_000, max_completion_length=1, temperature=1.2)
    counts = Counter(row[0] for row in completions(rows))
    with torch.no_grad():
        expected = (model(torch.tensor([[5, 9, 3]])).logits[0, -1] / 1.2).softmax(-1)
    drawn = torch.tensor([counts[token] for token in range(VOCABULARY)])
    chi_square = ((drawn - 20_000 * expected) ** 2 / (20_000 * expected)).sum().item()
    assert chi_square < 80  # 39 degrees of freedom: exceeded with probability 1e-4


def test_rows_have_everything_a_step_needs() -> None:
    prompts = prompts_of(RAGGED, [4, 5, 6])
    prompts.columns = {"answer": ["a", "b", "c"]}
    engine = bound(llama())
    engine.sync_weights([], 7)
    rows = generate(engine, prompts, G=10)
    written = completions(rows)
    width = max(map(len, written))
    assert rows.num_generations == 10
    assert rows.prompt_row.tolist() == [4] * 10 + [5] * 10 + [6] * 10
    assert rows.columns["answer"] == ["a"] * 10 + ["b"] * 10 + ["c"] * 10
    assert torch.equal(rows.prompt_ids[::10], prompts.prompt_ids)
    assert rows.completion_ids.shape == rows.rollout_logps.shape == rows.completion_mask.shape == (30, width)
    assert torch.equal(rows.completion_mask, rows.token_mask)
    assert rows.completion_ids[~rows.token_mask].eq(PAD).all()
    assert rows.rollout_logps[~rows.token_mask].eq(0).all()
    assert rows.rollout_logps.dtype == torch.float32
    assert rows.policy_version.tolist() == [7] * 30
    for row, reason in zip(written, rows.finish_reason, strict=True):
        assert END not in row[:-1]
        assert reason == ("stop" if row[-1] == END else "length")
        assert reason == "stop" or len(row) == 12
    assert {"stop", "length"} <= set(rows.finish_reason)


def test_an_end_at_the_limit_is_a_stop() -> None:
    rows = generate(bound(llama()), G=30, max_completion_length=3)
    at_limit = [
        reason
        for row, reason in zip(completions(rows), rows.finish_reason, strict=True)
        if len(row) == 3 and row[-1] == END
    ]
    assert at_limit
    assert set(at_limit) == {"stop"}


@pytest.mark.field("gen/7")
def test_every_end_id_ends_a_completion(
    caplog: pytest.LogCaptureFixture,
) -> None:
    model = llama()
    engine = HFEngine()
    engine.bind(model, end_token_ids=[END, 5], pad_token_id=PAD, decode=numbers_as_text)
    with caplog.at_level("INFO"):
        rows = generate(engine, G=20, stop_token_ids=[8])
    last = Counter(
        row[-1] for row, r in zip(completions(rows), rows.finish_reason, strict=True) if r == "stop"
    )
    assert set(last) == {END, 5, 8}
    assert all(not {END, 5, 8} & set(row[:-1]) for row in completions(rows))
    assert "end ids [1, 5, 8]" in caplog.text


def test_ignore_eos_goes_on_to_the_limit_and_past_declared_ends_only() -> None:
    engine = bound(llama())
    rows = generate(engine, G=10, ignore_eos=True)
    assert rows.completion_len.tolist() == [12] * 30
    assert set(rows.finish_reason) == {"length"}
    assert any(END in row for row in completions(rows))
    stopped = generate(engine, G=10, ignore_eos=True, stop_token_ids=[8])
    assert {
        row[-1] for row, r in zip(completions(stopped), stopped.finish_reason, strict=True) if r == "stop"
    } == {8}


def test_the_token_that_completes_a_stop_string_is_the_last() -> None:
    engine = bound(llama())
    free = completions(generate(engine, G=20, ignore_eos=True))
    cut = generate(engine, G=20, ignore_eos=True, stop=["7 3", "8"])

    def expected(row: list[int]) -> list[int]:
        for n in range(1, len(row) + 1):
            if any(s in numbers_as_text(row[:n]) for s in ("7 3", "8")):
                return row[:n]
        return row

    assert completions(cut) == [expected(row) for row in free]
    assert len({len(row) for row in completions(cut)}) > 3


def test_dropping_finished_rows_leaves_the_others_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = bound(llama())
    dropped = generate(engine, G=16, max_completion_length=40)
    monkeypatch.setattr("lit_rl.rollout.decode._DROP_AT", 2.0)
    kept = generate(engine, G=16, max_completion_length=40)
    assert completions(dropped) == completions(kept)
    assert len(set(dropped.completion_len.tolist())) > 5
    torch.testing.assert_close(dropped.rollout_logps, kept.rollout_logps, atol=1e-5, rtol=0)


@pytest.mark.field("gen/2")
def test_the_models_own_generation_defaults_do_not_leak(caplog: pytest.LogCaptureFixture) -> None:
    model = llama()
    expected = completions(generate(bound(model), G=4))
    model.generation_config = GenerationConfig(
        repetition_penalty=1.3, top_k=2, top_p=0.5, temperature=0.1, max_new_tokens=2, eos_token_id=9
    )
    engine = bound(model)
    caplog.clear()
    with caplog.at_level("INFO"):
        rows = generate(engine, G=4)
        generate(engine, G=4)
    assert completions(rows) == expected
    torch.testing.assert_close(rows.rollout_logps, plain_logps(model, rows), atol=1e-5, rtol=0)
    assert caplog.text.count("temperature=1.0, top_p=1.0, top_k=0") == 1


@pytest.mark.field("gen/3")
def test_ids_are_never_made_into_text_and_back() -> None:
    def decode(ids: list[int]) -> str:
        raise AssertionError("text was asked for")

    engine = HFEngine()
    engine.bind(llama(), end_token_ids=[END], pad_token_id=PAD, decode=decode)
    rows = generate(engine, G=4)
    prompts = prompts_of(RAGGED).repeat(4)
    assert torch.equal(rows.prompt_ids, prompts.prompt_ids)
    torch.testing.assert_close(rows.rollout_logps, plain_logps(llama(), rows), atol=1e-5, rtol=0)


@pytest.mark.field("gen/4")
@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing.*:FutureWarning")
def test_gradient_checkpointing_is_off_while_decoding_and_on_again_after() -> None:
    model = llama().train()
    engine = bound(model)
    plain = completions(generate(engine, temperature=0.0, max_completion_length=128))
    model.gradient_checkpointing_enable()
    read = Counter[int]()
    hook = model.model.register_forward_pre_hook(
        lambda module, args, kwargs: read.update([kwargs["input_ids"].shape[1]]), with_kwargs=True
    )
    assert completions(generate(engine, temperature=0.0, max_completion_length=128)) == plain
    hook.remove()
    assert read == {11: 1, 1: max(map(len, plain)) - 1}  # the cache is in use: each token is read once
    assert all(layer.gradient_checkpointing and layer.training for layer in model.model.layers)

    calls = []
    for layer in model.model.layers:
        checkpoint = layer._gradient_checkpointing_func
        layer._gradient_checkpointing_func = lambda *a, f=checkpoint, **k: calls.append(1) or f(*a, **k)
    model(torch.tensor([[3, 4]]), use_cache=False).logits.sum().backward()
    assert len(calls) == 2


@pytest.mark.field("num/8")
def test_dropout_is_off_while_decoding() -> None:
    model = gpt2(dropout=0.5).train()
    rows = generate(bound(model), G=4)
    assert all(module.training for module in model.modules())
    torch.testing.assert_close(rows.rollout_logps, plain_logps(model, rows), atol=1e-5, rtol=0)


@pytest.mark.field("mem/3")
def test_the_generation_batch_is_bounded_on_its_own() -> None:
    model = llama()
    widths = []
    hook = model.model.register_forward_pre_hook(
        lambda module, args, kwargs: widths.append(len(kwargs["input_ids"])), with_kwargs=True
    )
    rows = generate(bound(model, max_num_seqs=4), G=8)
    hook.remove()
    assert len(rows) == 24
    assert max(widths) == 4


@pytest.mark.field("mem/2")
def test_logits_are_computed_for_the_last_position_only(model: PreTrainedModel) -> None:
    shapes = set()
    model.get_output_embeddings().register_forward_hook(lambda m, a, out: shapes.add(tuple(out.shape[1:])))
    generate(bound(model), G=2)
    assert shapes == {(1, VOCABULARY)}


@pytest.mark.field("mem/5")
def test_nothing_written_requires_a_gradient_or_keeps_the_cache_alive() -> None:
    model = llama().train()
    caches = []
    model.model.register_forward_pre_hook(
        lambda module, args, kwargs: caches.append(weakref.ref(kwargs["cache"])), with_kwargs=True
    )
    engine = bound(model)
    rows = generate(engine, G=2)
    assert not rows.rollout_logps.requires_grad
    assert caches
    assert all(cache() is None for cache in caches)


def test_progress_is_reported_up_to_the_last_row() -> None:
    seen: list[tuple[int, int]] = []
    bound(llama(), max_num_seqs=8).generate(
        prompts_of(RAGGED),
        num_generations=4,
        sampling=Sampling(max_completion_length=20),
        seed=0,
        step=0,
        on_progress=lambda done, total: seen.append((done, total)),
    )
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)
    assert {total for _, total in seen} == {12}
    assert seen[-1] == (12, 12)
    assert len(seen) > 3
