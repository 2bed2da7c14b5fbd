"""Switches of speed and memory: scores and gradients are what they are without."""

import copy

import pytest
import torch
from torch import Tensor, nn
from transformers import GPT2Config, GPT2LMHeadModel

from lit_rl.errors import ConfigError
from lit_rl.models.kernels import Kernels
from lit_rl.models.load import load_policy
from lit_rl.models.lora import LoRA
from lit_rl.models.offload import offload_activations_
from lit_rl.models.origins import keep_origins_, with_origin
from lit_rl.models.score import Rows, score
from lit_rl.rollout.next_token import decoding

SIZES = [(2, 4, 10, 6), (3, 2, 12, 5), (4, 3, 9, 7)]  # P, G, S, T; torch compiles sizes of 1 apart


def rows_of(prompts: int, group: int, prompt_tokens: int, tokens: int) -> Rows:
    rows, g = prompts * group, torch.Generator().manual_seed(0)
    numbers = torch.arange(rows)[:, None] // group + torch.arange(prompt_tokens)
    lengths = torch.randint(1, tokens + 1, (rows,), generator=g)
    completions = torch.randint(1, 40, (rows, tokens), generator=g)
    return Rows(numbers % 40 + 1, torch.full((rows,), prompt_tokens), completions, lengths)


def scored(model: nn.Module, rows: Rows) -> tuple[Tensor, Tensor]:
    """Log-probabilities, and the gradient of a weighted sum of them."""
    model.zero_grad()
    logps = score(model, rows).logps
    (logps * torch.linspace(-1, 1, logps.numel()).view_as(logps)).sum().backward()
    gradients = [parameter.grad.flatten() for parameter in model.parameters() if parameter.grad is not None]
    return logps.detach(), torch.cat(gradients)


def frames() -> int:
    """What torch has compiled in this process."""
    return torch._dynamo.utils.counters["stats"]["unique_graphs"]


@pytest.mark.slow
@pytest.mark.parametrize("share_prefix", [True, False])
def test_compiled_layers_give_the_scores_and_gradients_of_plain_ones(share_prefix: bool) -> None:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    kernels = Kernels(share_prefix, torch_compile=True, torch_compile_backend="aot_eager")
    plain, compiled = load_policy(kernels=Kernels(share_prefix)), load_policy(kernels=kernels)
    for sizes in SIZES:
        rows = rows_of(*sizes)
        for found, wanted in zip(scored(compiled, rows), scored(plain, rows), strict=True):
            torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-6)
    assert frames() == 1  # one graph for all layers and sizes
    with decoding(compiled):
        compiled(input_ids=torch.arange(1, 5)[None], use_cache=True)
    assert frames() == 1
    twin = copy.deepcopy(compiled)
    assert all(module._compiled_call_impl is None for module in twin.modules())


def test_a_backend_or_mode_that_torch_does_not_know_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"torch_compile_backend must be null or one of .*inductor"):
        Kernels(torch_compile=True, torch_compile_backend="fast")
    with pytest.raises(ConfigError, match=r"torch_compile_mode must be .*max-autotune.* \(found 'fast'\)"):
        Kernels(torch_compile=True, torch_compile_mode="fast")


@pytest.mark.skipif(torch.cuda.is_available(), reason="with a GPU it depends on the package")
def test_liger_and_offload_are_refused_without_a_gpu() -> None:
    with pytest.raises(ConfigError, match="use_liger_kernel must be false without a GPU"):
        Kernels(use_liger_kernel=True)
    with pytest.raises(ConfigError, match="enable_activation_offload must be false without a GPU"):
        load_policy(enable_activation_offload=True)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_offloaded_activations_give_the_same_gradients(device: str) -> None:
    plain, offloaded = load_policy().to(device), load_policy().to(device)
    offload_activations_(offloaded)
    rows = rows_of(*SIZES[0]).to(device)
    for found, wanted in zip(scored(offloaded, rows), scored(plain, rows), strict=True):
        assert torch.equal(found, wanted)


def test_only_the_decoder_saves_outside() -> None:
    """An error inside it leaves no hook behind."""
    model = load_policy()
    offload_activations_(model)
    with pytest.raises(IndexError):
        model(input_ids=torch.tensor([[10**6]]))
    weight = nn.Parameter(torch.ones(3))
    saved = (weight * 2).exp()
    assert saved.grad_fn is not None and saved.grad_fn._saved_result is not None
    assert torch.autograd.grad(saved.sum(), weight)[0].shape == (3,)


def test_checkpointing_gives_the_same_gradients() -> None:
    rows = rows_of(*SIZES[0])
    checkpointed, plain = load_policy(gradient_checkpointing=True), load_policy()
    for found, wanted in zip(scored(checkpointed, rows), scored(plain, rows), strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-6, atol=1e-7)


def saved_bytes(model: nn.Module, rows: Rows) -> int:
    """Of what a forward pass keeps for the backward pass, the weights apart."""
    weights = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    kept: dict[int, Tensor] = {}

    def keep(tensor: Tensor) -> Tensor:
        if tensor.untyped_storage().data_ptr() not in weights:
            kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        score(model, rows)
    return sum(tensor.untyped_storage().nbytes() for tensor in kept.values())


@pytest.mark.parametrize(
    ("lora", "share"), [(None, 0.65), (LoRA(lora_rank=4), 0.7), (LoRA(lora_rank=4, lora_dropout=0.5), 0.8)]
)
def test_fused_layers_give_the_same_gradients_and_keep_less(lora: LoRA | None, share: float) -> None:
    rows, sides = rows_of(*SIZES[0]), []
    for is_fused in (True, False):
        torch.manual_seed(0)
        kernels = Kernels(share_prefix=lora is None, use_fused_kernels=is_fused)
        sides.append(load_policy(kernels=kernels, lora=lora, disable_dropout=False).train())
    for weights in zip(*(model.parameters() for model in sides), strict=True):
        if weights[0].requires_grad and lora is not None:  # one of two factors begins at zero
            weights[1].data.normal_(generator=torch.Generator().manual_seed(1))
            weights[0].data.copy_(weights[1].data)
    found, wanted = (scored_with_noise(model, rows) for model in sides)
    for ours, plain in zip(found, wanted, strict=True):
        torch.testing.assert_close(ours, plain, rtol=1e-6, atol=1e-7)
    fused, plain = (saved_bytes(model, rows) for model in sides)
    assert fused < share * plain


@pytest.mark.parametrize("is_checkpointed", [False, True])
@pytest.mark.parametrize("is_cast", [False, True])
def test_so_do_they_under_autocast_and_checkpointing(is_cast: bool, is_checkpointed: bool) -> None:
    rows, found = rows_of(*SIZES[0]), []
    for is_fused in (True, False):
        kernels = Kernels(use_fused_kernels=is_fused)
        model = load_policy(kernels=kernels, gradient_checkpointing=is_checkpointed)
        with torch.autocast("cpu", torch.bfloat16, enabled=is_cast):
            found.append((*scored(model, rows), saved_bytes(model, rows)))
    for ours, plain in zip(found[0][:2], found[1][:2], strict=True):
        torch.testing.assert_close(ours, plain, rtol=1e-6, atol=1e-7)
    assert found[0][2] <= (1.0 if is_checkpointed else 0.65) * found[1][2]


def test_linear_layers_keep_what_their_inputs_are_made_of() -> None:
    """A norm's input and the results of attention; prompts without what stands beside them."""
    model, rows = load_policy(kernels=Kernels(use_fused_kernels=True)), rows_of(*SIZES[0])
    width, tokens = model.config.hidden_size, 2 * 10 + int((rows.completion_len - 1).sum())
    kept: dict[int, Tensor] = {}

    def keep(tensor: Tensor) -> Tensor:
        return kept.setdefault(tensor.untyped_storage().data_ptr(), tensor)

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        score(model, rows)
    numbers = [tensor.untyped_storage().nbytes() // tensor.element_size() for tensor in kept.values()]
    assert numbers.count(width * tokens) == 2 * model.config.num_hidden_layers + 1  # inputs of norms


def test_a_value_that_is_computed_again_is_computed_once_for_all_its_readers() -> None:
    calls = []

    def doubled(source: Tensor) -> Tensor:
        calls.append(source)
        return 2 * source

    readers, source = nn.ModuleList(nn.Linear(3, 3) for _ in range(3)), torch.ones(2, 3, requires_grad=True)
    keep_origins_(readers)
    for step in (1, 2):
        value = with_origin(2 * source, doubled, source)
        loss = sum(reader(value[None]).sum() for reader in readers) + readers[0](value[:1]).sum()
        torch.autograd.backward(loss)
        assert len(calls) == step
    weight = readers[0].weight
    assert weight.grad is not None and weight.grad.eq(2 * (2 * 2 + 2)).all()


def scored_with_noise(model: nn.Module, rows: Rows) -> tuple[Tensor, Tensor]:
    """As `scored`, with the same dropout each time."""
    torch.manual_seed(7)
    return scored(model, rows)


def test_fused_layers_of_a_copy_are_its_own() -> None:
    model = load_policy(kernels=Kernels(use_fused_kernels=True))
    twin = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter.zero_()
    rows = rows_of(*SIZES[0])
    assert not torch.equal(score(model, rows).logps, score(twin, rows).logps)


def test_fused_layers_are_refused_where_they_cannot_be() -> None:
    with pytest.raises(ConfigError, match=r"impl_backend must be 'torch' \(found 'triton'\)"):
        Kernels(use_fused_kernels=True, impl_backend="triton")
    with pytest.raises(ConfigError, match=r"use_fused_kernels must be false with .*torch_compile"):
        Kernels(use_fused_kernels=True, torch_compile=True)
    with pytest.raises(ConfigError, match=r"must be false for GPT2LMHeadModel \(found True\)"):
        Kernels(use_fused_kernels=True).apply_(GPT2LMHeadModel(GPT2Config(n_layer=1, n_head=2, n_embd=8)))
