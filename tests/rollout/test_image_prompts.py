"""HFEngine on prompts with images: transformers' own greedy completions, and the same in any batch."""

import pytest
import tiny_vlm
import torch

from lit_rl.batch import RolloutBatch
from lit_rl.models.score import rows_of, score
from lit_rl.rollout.hf import HFEngine
from lit_rl.rollout.sampling import Sampling

FAMILIES = pytest.mark.parametrize("family", tiny_vlm.FAMILIES)
LIMIT = 9


def engine(model, **settings) -> HFEngine:
    own = HFEngine(**settings)
    own.bind(model, end_token_ids=[1], pad_token_id=0, decode=str)
    own.sync_weights([], 0)
    return own


def written(
    model, prompts: RolloutBatch, *, temperature: float = 0.0, count: int = 1, **settings
) -> RolloutBatch:
    sampling = Sampling(temperature=temperature, max_completion_length=LIMIT)
    own = engine(model, **settings)
    return own.generate(prompts, num_generations=count, sampling=sampling, seed=1, step=0)


@FAMILIES
@pytest.mark.parametrize("cache", [None, "static"])
def test_greedy_completions_are_those_of_transformers(family: str, cache: str | None) -> None:
    model, prompts = tiny_vlm.FAMILIES[family](), tiny_vlm.prompts(family)
    found = written(model, prompts, cache_implementation=cache)
    assert found.completion_ids is not None and found.completion_len is not None
    for b in range(len(prompts)):
        inputs = tiny_vlm.plain_inputs(prompts, b)
        expected = model.generate(**inputs, max_new_tokens=LIMIT, do_sample=False, pad_token_id=0)
        new = expected[0, inputs["input_ids"].shape[1] :].tolist()
        assert found.completion_ids[b, : int(found.completion_len[b])].tolist() == new


@FAMILIES
@pytest.mark.parametrize("rows", [2, 3, 64])
def test_rows_beside_a_row_change_nothing(family: str, rows: int) -> None:
    """With few rows at once, others begin where some have ended."""
    model, prompts = tiny_vlm.FAMILIES[family](), tiny_vlm.prompts(family)
    together = written(model, prompts, temperature=1.0, count=4, max_num_seqs=rows)
    alone = [written(model, prompts.select([b]), temperature=1.0, count=4) for b in range(3)]
    assert together.completion_ids is not None and together.completion_len is not None
    for i in range(12):
        one, length = alone[i // 4], int(together.completion_len[i])
        assert one.completion_ids is not None and one.completion_len is not None
        assert int(one.completion_len[i % 4]) == length
        assert torch.equal(one.completion_ids[i % 4, :length], together.completion_ids[i, :length])


@FAMILIES
def test_what_the_engine_reports_is_what_training_computes(family: str) -> None:
    model = tiny_vlm.FAMILIES[family]()
    found = written(model, tiny_vlm.prompts(family), temperature=1.0, count=8)
    with torch.no_grad():
        logps = score(model, rows_of(found)).logps
    assert found.rollout_logps is not None
    torch.testing.assert_close(logps, found.rollout_logps, rtol=0, atol=2e-5)
    scores = engine(model, max_num_seqs=5).score(found, topk=2)
    torch.testing.assert_close(scores.logps, logps, rtol=0, atol=2e-5)


def test_a_prompt_is_seen_once_for_all_its_completions() -> None:
    model, seen = tiny_vlm.llava(), []
    model.model.vision_tower.register_forward_hook(lambda module, args, out: seen.append(len(args[0])))
    written(model, tiny_vlm.prompts("llava"), temperature=1.0, count=8)
    assert seen == [3]
