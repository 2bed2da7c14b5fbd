"""Attention over flat rows, as attention functions of transformers that wrap its own.

`set_layout_` switches a model over. A pass inside `flat_pass(rows)` attends along the rows' layout; every
other pass is what it was. Masks are evaluated from the architecture's own mask functions at the tokens'
positions in their rows, so windows and chunks are followed; what cannot be followed is found out by comparing
with the plain form on a few tokens, and such a model stays as it was.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedConfig
from transformers.masking_utils import causal_mask_function, eager_mask, sdpa_mask

from lit_rl.functional.precision import product_dtype
from lit_rl.models.origins import with_origin
from lit_rl.models.shared_prefix import FlatRows, flat_rows, unpadded_rows
from lit_rl.models.weights import base_of

SHARED, UNPADDED = "shared", "unpadded"
_PREFIX = "lit_rl_"
_MASKS: dict[str, Callable[..., Any]] = {"sdpa": sdpa_mask, "eager": eager_mask}
_running: ContextVar[FlatRows | None] = ContextVar("flat rows of the pass that runs", default=None)


def shares_prefixes(model: nn.Module) -> bool:
    """Whether rows with the same prompt share it in the model's passes."""
    return _implementation(model).startswith(f"{_PREFIX}{SHARED}_")


def flat_rows_of(model: nn.Module, *rows: Tensor) -> FlatRows | None:
    """The rows in the layout that the model is switched to; None where they stay side by side.

    Args:
        model: a Hugging Face causal language model, or a PEFT model around one.
        rows: as `flat_rows` takes them.
    """
    if shares_prefixes(model):
        return flat_rows(*rows)
    return unpadded_rows(*rows) if _implementation(model).startswith(f"{_PREFIX}{UNPADDED}_") else None


@contextmanager
def flat_pass(rows: FlatRows) -> Iterator[dict[str, Any]]:
    """Run the model on these rows inside: yields the inputs that it takes.

    Layers keep the layout with their mask, so that gradient checkpointing may run them again later.
    """
    token = _running.set(rows)
    try:
        # With a mask given, transformers does not search the positions for packed sequences of its own.
        yield {
            "input_ids": rows.ids,
            "position_ids": rows.positions,
            "attention_mask": torch.ones_like(rows.ids),
        }
    finally:
        _running.reset(token)


def set_layout_(model: nn.Module, layout: str | None) -> None:
    """Wrap the model's attention function, or unwrap it.

    Args:
        model: a Hugging Face causal language model, or a PEFT model around one.
        layout: `SHARED`, `UNPADDED`, or None for rows side by side.

    Raises:
        ValueError: its attention is neither sdpa nor eager.
    """
    own = _implementation(model)
    for name in (SHARED, UNPADDED):
        own = own.removeprefix(f"{_PREFIX}{name}_")
    if own not in _MASKS:
        raise ValueError(f"attention {own!r} takes no mask of this kind")
    base_of(model).set_attn_implementation(own if layout is None else f"{_PREFIX}{layout}_{own}")


def _implementation(model: nn.Module) -> str:
    return str(base_of(model).config.get_text_config()._attn_implementation)


@dataclass(frozen=True, eq=False)
class _FlatMask:
    """What stands in for the attention mask: the layout, and which keys each place sees.

    Attributes:
        rows: the layout.
        prompts: (1, 1, S, S), or None for plain causal attention.
        bundles: (K, 1, Q, S + Q): a bundle's keys are its prompt and then itself.
        folded: (K, 1, R * Q, S + Q), to be added to the scores, for R heads that share keys as queries of one
            head; None without gradient. All layers keep this one; of a bool mask each would keep numbers.
    """

    rows: FlatRows
    prompts: Tensor | None
    bundles: Tensor
    folded: Tensor | None = None


def _mask(name: str) -> Callable[..., Any]:
    own = _MASKS[name]

    def mask(*args: Any, mask_function: Callable = causal_mask_function, **kwargs: Any) -> Any:
        rows = _running.get()
        if rows is None:
            return own(*args, mask_function=mask_function, **kwargs)
        if kwargs.get("use_vmap"):
            raise NotImplementedError("a mask that is no function of positions")
        device = rows.ids.device
        steps = torch.arange(rows.prompts.token.shape[1], device=device)
        zero = torch.zeros((), dtype=torch.long, device=device)
        prompts = mask_function(zero, zero, steps[:, None], steps).expand(len(steps), -1)[None, None]
        bundles = _bundle_mask(rows, mask_function, zero)
        if name == "eager":
            return _FlatMask(rows, *(_additive(seen, kwargs["dtype"]) for seen in (prompts, bundles)))
        folded = None
        if torch.is_grad_enabled():
            numbers = _in_numbers(bundles, product_dtype(kwargs["dtype"], device.type))
            folded = numbers.repeat(1, 1, _heads_per_key(kwargs["config"]), 1)
        return _FlatMask(rows, None if mask_function is causal_mask_function else prompts, bundles, folded)

    return mask


def _heads_per_key(config: PreTrainedConfig) -> int:
    heads = config.num_attention_heads
    return heads // (getattr(config, "num_key_value_heads", None) or heads)


def _in_numbers(seen: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.zeros(seen.shape, dtype=dtype, device=seen.device).masked_fill_(~seen, -torch.inf)


def _additive(seen: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.zeros(seen.shape, dtype=dtype, device=seen.device).masked_fill_(
        ~seen, torch.finfo(dtype).min
    )


def _bundle_mask(rows: FlatRows, mask_function: Callable, zero: Tensor) -> Tensor:
    """(K, 1, Q, S + Q) bool."""
    width = rows.prompts.token.shape[1]
    steps = torch.arange(width, device=zero.device).expand(len(rows.bundle_prompt), -1)  # (K, S)
    queries, keys = rows.bundle_position, torch.cat([steps, rows.bundle_position], 1)
    seen = mask_function(zero, zero, queries[:, :, None], keys[:, None])  # (K, Q, S + Q)
    of_prompt = steps < rows.prompt_len[rows.bundle_prompt, None]
    of_row = rows.bundle_row[:, :, None] == rows.bundle_row[:, None]
    seen = seen & torch.cat([of_prompt[:, None].expand(-1, queries.shape[1], -1), of_row], 2)
    seen[:, :, 0] |= ~rows.bundles.is_token  # padding must see something, or it is NaN
    return seen[:, None]


def _attention(name: str) -> Callable[..., tuple[Tensor, Tensor | None]]:
    def attention(
        module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor | None]:
        own = AttentionInterface().get(name) or sys.modules[type(module).__module__].eager_attention_forward
        if not isinstance(attention_mask, _FlatMask):
            if _running.get() is not None:
                raise NotImplementedError("attention without the mask that was made for it")
            if name == "sdpa" and query.shape[2] == 1 and _is_foldable(query, key, attention_mask, kwargs):
                folded = _folded(query, key, value, attention_mask, kwargs.get("scaling"))
                return _unfolded(folded, query.shape[1]), None
            return own(module, query, key, value, attention_mask, **kwargs)
        return _flat(own, module, (query, key, value), attention_mask, kwargs), None

    return attention


def _is_foldable(query: Tensor, key: Tensor, mask: Tensor | None, kwargs: dict[str, Any]) -> bool:
    """Whether heads that share keys see the same ones, the mask is of all their queries, and all is plain."""
    is_plain = all(kwargs.get(name) in (None, 0.0) for name in ("position_bias", "softcap", "dropout"))
    queries = query.shape[1] // key.shape[1] * query.shape[2]
    is_for_all = mask is None or (mask.shape[1] == 1 and mask.shape[2] in (1, queries))
    return is_plain and is_for_all


def _folded(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scaling: float | None) -> Tensor:
    """(B, key heads, R * Q, dim): heads that share keys as queries of one, so that no key is copied for each.

    Args:
        query: (B, heads, Q, dim).
        key, value: (B, key heads, L, dim).
        mask: (B, 1, R * Q, L) or to be expanded to it, or None where every key is seen.
        scaling: of the products.
    """
    queries = query.reshape(len(query), key.shape[1], -1, query.shape[-1])
    return nn.functional.scaled_dot_product_attention(queries, key, value, attn_mask=mask, scale=scaling)


def _unfolded(answers: Tensor, heads: int) -> Tensor:
    """(B, key heads, R * Q, dim) -> (B, Q, heads, dim)."""
    rows, key_heads, count, dim = answers.shape
    return answers.reshape(rows, heads, count * key_heads // heads, dim).transpose(1, 2)


def _flat(
    own: Callable[..., Any], module: nn.Module, states: tuple[Tensor, ...], mask: _FlatMask, kwargs: dict
) -> Tensor:
    """(1, N, heads, dim): the model's attention on prompts, then on bundles."""
    rows, heads = mask.rows, states[0].shape[1]
    flat = [x[0].transpose(0, 1) for x in states]  # (N, heads, dim) each
    own_prompts = (rows.prompts.spread(x).transpose(1, 2) for x in flat)  # (P, heads, S, dim)
    # Of views, attention would keep the bundles' tokens too for its backward pass.
    query, key, value = (x.clone() if rows.bundles.size else x for x in own_prompts)
    answers, is_folded = [own(module, query, key, value, mask.prompts, **kwargs)[0]], False
    if rows.bundles.size:
        queries, *inner = (rows.bundles.spread(x).transpose(1, 2) for x in flat)  # (K, heads, Q, dim)
        keys, values = (
            torch.cat([of_prompt.index_select(0, rows.bundle_prompt), of_rows], 2)
            for of_prompt, of_rows in zip((key, value), inner, strict=True)
        )
        is_folded = mask.folded is not None and _is_foldable(queries, keys, mask.folded, kwargs)
        if is_folded:
            answers.append(_folded(queries, keys, values, mask.folded, kwargs.get("scaling")))
        else:
            answers.append(own(module, queries, keys, values, mask.bundles, **kwargs)[0])

    def joined(of_prompts: Tensor, *of_bundles: Tensor) -> Tensor:
        spread = (_unfolded(x, heads) if is_folded else x for x in of_bundles)
        return torch.cat([rows.prompts.collected(of_prompts), *map(rows.bundles.collected, spread)])

    return with_origin(joined(*answers), joined, *answers)[None]


for _layout, _name in product((SHARED, UNPADDED), _MASKS):
    AttentionInterface.register(f"{_PREFIX}{_layout}_{_name}", _attention(_name))
    AttentionMaskInterface.register(f"{_PREFIX}{_layout}_{_name}", _mask(_name))
