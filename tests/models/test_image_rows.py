"""Rows with images through the models: exact, the same in any batch, with gradients, and never dropped."""

from dataclasses import replace

import pytest
import tiny_vlm
import torch
from torch.nn.utils import parameters_to_vector

from lit_rl.batch import RolloutBatch, padded
from lit_rl.errors import ConfigError
from lit_rl.models.image_check import check_images
from lit_rl.models.kernels import Kernels
from lit_rl.models.load import load_policy
from lit_rl.models.lora import LoRA, with_adapters
from lit_rl.models.score import check_head, rows_of, score
from lit_rl.models.weights import base_of, named_base_tensors
from lit_rl.objectives.batch_plan import BatchPlan

FAMILIES = pytest.mark.parametrize("family", tiny_vlm.FAMILIES)


def rows(family: str, *, copies: int = 2, images_written: bool = False) -> RolloutBatch:
    """Each prompt so many times, with ragged completions.

    Args:
        family: of tiny_vlm.FAMILIES.
        copies: G.
        images_written: the policy itself wrote its image token into every completion.
    """
    prompts = tiny_vlm.prompts(family)
    batch = prompts.repeat(copies)
    token = tiny_vlm.FAMILIES[family]().config.image_token_id
    written = [[20 + i, token if images_written else 30, *range(40, 40 + i)] for i in range(len(batch))]
    batch.completion_ids, batch.completion_len = padded(written, "right")
    return batch


@FAMILIES
def test_logps_are_those_of_transformers(family: str) -> None:
    model, batch = tiny_vlm.FAMILIES[family](), rows(family)
    check_head(model)
    assert batch.completion_ids is not None and batch.completion_len is not None
    with torch.no_grad():
        ours = score(model, rows_of(batch)).logps
        for b in range(len(batch)):
            done, start = int(batch.completion_len[b]), int(batch.prompt_len[b]) - 1
            every = model(**tiny_vlm.plain_inputs(batch, b)).logits[0, start : start + done].log_softmax(-1)
            expected = every.gather(1, batch.completion_ids[b, :done, None])[:, 0]
            torch.testing.assert_close(ours[b, :done], expected, rtol=1e-6, atol=1e-6)


@FAMILIES
@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize("images_written", [False, True])
def test_any_cut_gives_the_same_gradient(family: str, size: int, images_written: bool) -> None:
    model, batch = tiny_vlm.FAMILIES[family]().double(), rows(family, images_written=images_written)

    def gradient(rows_per_piece: int) -> torch.Tensor:
        model.zero_grad()
        for piece in BatchPlan(micro_batch_size=rows_per_piece).micro_batches(batch):
            (
                score(model, rows_of(piece)).logps * torch.arange(1, 9)[: piece.completion_ids.shape[1]]
            ).sum().backward()
        return parameters_to_vector([p.grad if p.grad is not None else p * 0 for p in model.parameters()])

    whole = gradient(len(batch))
    tolerance = 1e-6 if family == "gemma" else 1e-10  # whose norms compute in float32 whatever the weights
    atol = tolerance * float(whole.detach().abs().max())
    torch.testing.assert_close(gradient(size), whole, rtol=0, atol=atol)
    seeing = {name for name, p in model.named_parameters() if p.grad is not None and p.grad.any()}
    assert any("vision" in name or "visual" in name for name in seeing)


@FAMILIES
def test_the_pixels_decide(family: str) -> None:
    """Red where images are dropped, or those of another row are read."""
    model, batch = tiny_vlm.FAMILIES[family](), rows(family)
    assert batch.images is not None
    other = [
        None if own is None else {**own, "pixel_values": own["pixel_values"].flip(-1)} for own in batch.images
    ]
    with torch.no_grad():
        own = score(model, rows_of(batch)).logps
        for changed in (other, [None] * len(batch)):
            moved = score(model, rows_of(replace(batch, images=changed))).logps
            is_moved = (moved - own).abs().amax(1) > 1e-3
            assert is_moved.tolist() == [images is not None for images in batch.images]


@FAMILIES
def test_an_image_token_that_the_policy_writes_is_a_token_like_any_other(family: str) -> None:
    """As it was read when it was written: by its embedding, at the next position."""
    model, batch = tiny_vlm.FAMILIES[family](), rows(family, images_written=True)
    token, width = model.config.image_token_id, batch.prompt_ids.shape[1]
    assert batch.completion_ids is not None and batch.images is not None
    with torch.no_grad():
        ours = score(model, rows_of(batch)).logps
        for b in (0, 2, 4):
            prompt = batch.prompt_ids[b, width - int(batch.prompt_len[b]) :]
            inputs = tiny_vlm.plain_inputs(replace(batch, completion_ids=None), b)
            out = model(**inputs, use_cache=True)
            first = out.logits[0, -1].log_softmax(-1)[batch.completion_ids[b, 0]]
            assert abs(float(first - ours[b, 0])) < 1e-5
            deltas = getattr(model.model, "rope_deltas", None)
            shift = 0 if deltas is None or batch.images[b] is None else int(deltas[0])
            cache = out.cache if "cache" in out else out.past_key_values
            for t in (1, 2):
                position = torch.tensor([[len(prompt) + t - 1 + shift]])
                out = model(
                    input_ids=batch.completion_ids[b : b + 1, t - 1 : t], past_key_values=cache,
                    position_ids=position, use_cache=True,
                )  # fmt: skip
                if t < int(batch.completion_len[b]):
                    logp = out.logits[0, -1].log_softmax(-1)[batch.completion_ids[b, t]]
                    assert abs(float(logp - ours[b, t])) < 1e-5
        assert batch.completion_ids[0, 1] == token


def test_repeating_a_prompt_shares_its_pixels() -> None:
    prompts = tiny_vlm.prompts("llava")
    many = prompts.repeat(4).select([5, 0, 3]).to("cpu")
    assert many.images is not None and prompts.images is not None
    where = [0 if own is None else own["pixel_values"].data_ptr() for own in prompts.images]
    assert [own["pixel_values"].data_ptr() for own in many.images if own] == [where[1], where[0], where[0]]


def test_rows_written_over_others_bring_their_images() -> None:
    mine, theirs = rows("llava"), rows("llava").select([2, 3, 4, 5])
    mine.put_([0, 1, 4, 5], theirs)
    assert mine.images is not None and theirs.images is not None
    assert [mine.images[i] is theirs.images[k] for k, i in enumerate((0, 1, 4, 5))] == [True] * 4


@FAMILIES
def test_the_check_before_training_passes(family: str) -> None:
    check_images(tiny_vlm.FAMILIES[family](), tiny_vlm.prompts(family))


def test_a_model_that_mixes_rows_is_found_out(tiny_policy) -> None:
    prompts = tiny_vlm.prompts("llava")
    with pytest.raises(ConfigError, match="LlamaForCausalLM, which reads text alone"):
        check_images(tiny_policy(), prompts)
    model = tiny_vlm.llava()
    own = model.model.get_image_features

    def of_the_first(*args, **kwargs):
        out = own(*args, **kwargs)
        out.pooler_output = [out.pooler_output[0]] * len(out.pooler_output)
        return out

    model.model.get_image_features = of_the_first
    with pytest.raises(ConfigError, match="something else where rows with images stand side by side"):
        check_images(model, prompts)
    assert prompts.images is not None and prompts.images[0] is not None
    del prompts.images[0]["pixel_values"]
    with pytest.raises(ConfigError, match="LlavaForConditionalGeneration does not take the images"):
        check_images(tiny_vlm.llava(), prompts)


def test_a_vision_language_model_loads_as_one(tmp_path) -> None:
    policy = load_policy(tiny_vlm.save_llava(tmp_path), lora=LoRA(lora_rank=2))
    adapted = {name for name, p in policy.named_parameters() if p.requires_grad}
    assert adapted and all(".language_model." in name for name in adapted)
    assert any("gate_proj" in name for name in adapted)
    assert type(base_of(policy)).__name__ == "LlavaForConditionalGeneration"
    own = dict(tiny_vlm.llava().named_parameters())
    assert {name for name, _ in named_base_tensors(policy)} == set(own)
    assert all(torch.equal(tensor, own[name]) for name, tensor in named_base_tensors(policy))


def test_adapters_on_the_language_see_images() -> None:
    policy, batch = with_adapters(tiny_vlm.llava(), LoRA(lora_rank=2)), rows("llava")
    score(policy, rows_of(batch)).logps.sum().backward()
    assert any(p.grad is not None and p.grad.any() for p in policy.parameters())


@FAMILIES
def test_layers_that_are_computed_again_give_the_same_gradient(family: str) -> None:
    batch, gradients = rows(family), []
    for again in (False, True):
        model = tiny_vlm.FAMILIES[family]().double().train()
        if again:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        score(model, rows_of(batch)).logps.sum().backward()
        gradients.append(parameters_to_vector([p.grad for p in model.parameters() if p.grad is not None]))
    torch.testing.assert_close(gradients[1], gradients[0], rtol=1e-10, atol=1e-10)


def test_flat_rows_are_not_taken(tmp_path) -> None:
    model = tiny_vlm.llava()
    Kernels().apply_(model)
    assert not model.config.get_text_config()._attn_implementation.startswith("lit_rl")
    with pytest.raises(
        ConfigError, match=r"model\.kernels\.use_remove_padding must be false .* reads images"
    ):
        Kernels(share_prefix=False, use_remove_padding=True).apply_(model)
