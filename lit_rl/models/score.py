"""Log-probabilities of completions under a model. The only place that knows how rows are laid out for it.

Each row is moved to the left edge: prompt, completion, then padding. Under causal attention no real token
sees the padding behind it, and positions count from 0, so neither an attention mask nor position ids are
needed: the fast causal kernels run, and padding widths, batch mates and row order cannot matter. Only the
positions that predict a completion token reach the output head.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lit_rl.batch import RolloutBatch, length_mask
from lit_rl.errors import ConfigError
from lit_rl.functional.logps import Head, logits, token_logps
from lit_rl.images import RowImages, has_images, image_inputs, inputs_for, plain_text
from lit_rl.models.flat_attention import flat_pass, flat_rows_of
from lit_rl.models.sharding import is_sharded, ready_
from lit_rl.models.weights import base_of, effective_weight


class Rows(NamedTuple):
    """Prompts and completions of B rows; what stands at padding is never read.

    Attributes:
        prompt_ids: (B, S) long, left-padded.
        prompt_len: (B,) long, at least 1 where there is a completion.
        completion_ids: (B, T) long, right-padded.
        completion_len: (B,) long.
        images: B times those of the prompt, or None.
    """

    prompt_ids: Tensor
    prompt_len: Tensor
    completion_ids: Tensor
    completion_len: Tensor
    images: RowImages | None = None

    def to(self, device: torch.device | str) -> "Rows":
        """Ids and lengths on the device; images go there piece by piece."""
        ids, lengths, completions, counts, images = self
        return Rows(ids.to(device), lengths.to(device), completions.to(device), counts.to(device), images)


def rows_of(batch: RolloutBatch) -> Rows:
    """The completions of a batch under its own prompts."""
    assert batch.completion_ids is not None and batch.completion_len is not None
    return Rows(batch.prompt_ids, batch.prompt_len, batch.completion_ids, batch.completion_len, batch.images)


class TokenScores(NamedTuple):
    """What `score` returns; 0 at padding.

    Attributes:
        logps: (B, T) float32 or better. Log-probability of each completion token.
        entropy: (B, T), in nats, of the distribution it was drawn from; None unless asked for.
    """

    logps: Tensor
    entropy: Tensor | None


def score(
    model: nn.Module,
    rows: Rows,
    *,
    temperature: float = 1.0,
    with_entropy: bool = False,
    entropy_gradient: bool = False,
    chunk_tokens: int | None = None,
) -> TokenScores:
    """Log-probability of every completion token, equal to `log_softmax(model(...).logits / temperature)`.

    Differentiable in the model's parameters, adapters included.

    Args:
        model: a Hugging Face causal language model, or a PEFT model around one.
        rows: prompts and completions.
        temperature: > 0. The logits are divided by it.
        with_entropy: also return entropies.
        entropy_gradient: let gradients through them, as an entropy in a loss needs.
        chunk_tokens: positions whose logits exist at once; None is as many as `logps.BLOCK_BYTES` hold.
    """
    is_token = length_mask(rows.completion_len, rows.completion_ids.shape[1])  # (B, T)
    flat_logps, flat_entropy = token_logps(
        completion_hidden(model, rows),
        head_of(model),
        rows.completion_ids[is_token],
        temperature=temperature,
        chunk_tokens=chunk_tokens,
        with_entropy=with_entropy,
        entropy_gradient=entropy_gradient,
    )
    entropy = None if flat_entropy is None else _scattered(flat_entropy, is_token)
    return TokenScores(_scattered(flat_logps, is_token), entropy)


def completion_hidden(model: nn.Module, rows: Rows) -> Tensor:
    """Last hidden state at the position that predicts each completion token.

    Args:
        model: a Hugging Face causal language model, or a PEFT model around one.
        rows: prompts and completions; on the CPU where the model is on the meta device.

    Returns:
        (N, H), N = completion_len.sum(): row by row, in each row by position.
    """
    width = _longest(rows)
    if width == 0:
        weight = head_of(model).weight
        return weight.new_zeros(0, weight.shape[1])
    ready_(base_of(model))
    body, device = _body(model), base_of(model).device
    flat = None if has_images(rows.images) else flat_rows_of(model, *rows[:4])
    if flat is not None:
        flat = flat.to(device)
        with flat_pass(flat) as inputs:
            hidden = body(**inputs, use_cache=False, return_dict=True).last_hidden_state
        return hidden[0].index_select(0, flat.predicts)
    ids = _left_edged(rows, width)
    if has_images(rows.images):
        hidden = _hidden_with_images(model, rows, ids.to(device))
    else:
        hidden = body(input_ids=ids.to(device), use_cache=False, return_dict=True).last_hidden_state
    steps = torch.arange(rows.completion_ids.shape[1], device=ids.device)
    is_token = steps < rows.completion_len[:, None]  # (B, T)
    starts = torch.arange(len(ids), device=ids.device) * width + rows.prompt_len - 1
    positions = (starts[:, None] + steps)[is_token]  # (N,)
    return hidden.flatten(0, 1).index_select(0, positions.to(device))


def _hidden_with_images(model: nn.Module, rows: Rows, ids: Tensor) -> Tensor:
    """(B, L, H) last hidden states of left-edged rows; the padding behind them is no image's place."""
    base, width = base_of(model), ids.shape[1]
    inputs = image_inputs(rows.images, rows.prompt_len, width, side="right")
    is_written = torch.arange(width, device=ids.device) >= rows.prompt_len.to(ids.device)[:, None]
    with plain_text(base, ids, is_written) as read:
        return (
            _body(model)(input_ids=read, **inputs_for(base, inputs), use_cache=False, return_dict=True)
        ).last_hidden_state


def head_of(model: nn.Module) -> Head:
    """The model's output head, with what its architecture does to the logits; differentiable.

    Read from the configuration: `logit_scale` (Cohere), `logits_scaling` (Granite), `lm_head_multiplier`
    (Falcon-H1) and `final_logit_softcapping` (Gemma). `check_head` finds out whether that is all.
    """
    base = base_of(model)
    layer = base.get_output_embeddings()
    if layer is None:
        raise ConfigError(f"model.path must lead to a causal language model (found {type(base).__name__}).")
    inner = getattr(layer, "base_layer", layer)
    config = base.config.get_text_config()
    multiplier = 1.0
    for name, power in _MULTIPLIERS.items():
        value = getattr(config, name, None)
        multiplier *= 1.0 if value is None else float(value) ** power
    softcap = getattr(config, "final_logit_softcapping", None)
    return Head(effective_weight(layer).to(inner.weight.dtype), inner.bias, multiplier, softcap)


def lasting_head_of(model: nn.Module) -> Head:
    """`head_of` without gradient, to be used when the model's weights are at rest or cut again."""
    head = head_of(model)
    copied = [None if t is None else t.detach() for t in (head.weight, head.bias)]
    if is_sharded(model):  # whose whole weights are freed
        copied = [None if t is None else t.clone() for t in copied]
    return Head(copied[0], copied[1], head.multiplier, head.softcap)  # type: ignore[arg-type]


@torch.no_grad()
def check_head(model: nn.Module) -> None:
    """Compare `head_of` with the model's own logits on a few tokens.

    Raises:
        ConfigError: the architecture does something else to its logits, so scores would be wrong.
    """
    base = base_of(model)
    training = [module for module in base.modules() if module.training]
    base.eval()
    try:
        ids = torch.arange(8, device=base.device).remainder(base.config.get_text_config().vocab_size)[None]
        own = base(input_ids=ids, use_cache=False).logits[0].float()
        hidden = _body(model)(input_ids=ids, use_cache=False, return_dict=True).last_hidden_state[0]
        ours = logits(hidden, head_of(model)).float()
    finally:
        for module in training:
            module.training = True
    tolerance = 1e-4 if base.dtype in (torch.float32, torch.float64) else 3e-2
    if own.shape != ours.shape or not torch.allclose(
        own, ours, rtol=tolerance, atol=tolerance * own.abs().max().item()
    ):
        raise ConfigError(
            f"model.path must lead to an architecture whose logits are a linear head with scale and softcap "
            f"(found {type(base).__name__}, whose logits differ); scores would be wrong, use another model."
        )


_MULTIPLIERS = {"logit_scale": 1, "logits_scaling": -1, "lm_head_multiplier": 1}


def _body(model: nn.Module) -> Any:
    """The decoder without its head; calling it bypasses the head, adapters inside stay active."""
    base = base_of(model)
    return getattr(base, base.base_model_prefix)


def _longest(rows: Rows) -> int:
    """Tokens of the longest row. The one host sync of a pass."""
    total = rows.prompt_len + rows.completion_len
    has_no_prompt = (rows.prompt_len < 1) & (rows.completion_len > 0)
    if len(total) == 0:
        return 0
    longest, missing = torch.stack([total.max(), has_no_prompt.any().long()]).tolist()
    assert not missing, "a completion without a prompt has no position that predicts its first token"
    return longest


def _left_edged(rows: Rows, width: int) -> Tensor:
    """(B, width) ids: each row's prompt and completion from column 0 on, then 0."""
    ids = torch.cat([rows.prompt_ids, rows.completion_ids], dim=1)
    steps = torch.arange(width, device=ids.device)
    columns = rows.prompt_ids.shape[1] - rows.prompt_len[:, None] + steps  # (B, width)
    is_real = steps < (rows.prompt_len + rows.completion_len)[:, None]
    return ids.gather(1, columns.clamp(max=ids.shape[1] - 1)).where(is_real, 0)


def _scattered(flat: Tensor, is_token: Tensor) -> Tensor:
    """(B, T) with the N values at the true places, row by row, and 0 elsewhere."""
    return flat.new_zeros(is_token.shape).masked_scatter(is_token, flat)
