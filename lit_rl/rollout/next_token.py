"""The logits of the next token under any causal LM of transformers, and the mode a model decodes in."""

import inspect
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache

from lit_rl.errors import ConfigError
from lit_rl.images import ImageTensors, inputs_for
from lit_rl.rollout.cache import RoomyLayer, decoding_cache, rows_in, storage_bytes


class NextToken:
    """A model with the cache of what it has read; to be used inside `reading`.

    Args:
        model: a `...ForCausalLM`, with or without LoRA layers in it.
        cache_implementation: see `decoding_cache`.

    Raises:
        ConfigError: the model's forward takes no key-value cache or no attention mask.
    """

    def __init__(self, model: nn.Module, cache_implementation: str | None = None) -> None:
        accepted = set(inspect.signature(model.forward).parameters)
        cache_names = [name for name in ("cache", "past_key_values") if name in accepted]
        if not cache_names or "attention_mask" not in accepted:
            raise ConfigError(
                f"model.path holds a {type(model).__name__}, whose forward takes no key-value cache or no "
                "attention mask; rollout=hf cannot write with it, choose another rollout."
            )
        self._model = model
        self._implementation = cache_implementation
        self._cache_name = cache_names[0]
        self._takes_positions = "position_ids" in accepted
        self._takes_logits_to_keep = "logits_to_keep" in accepted

    @contextmanager
    def reading(self, max_length: int) -> Iterator[None]:
        """Begin with nothing read, for at most so many tokens per row; the cache is freed at the end."""
        self._max_length = max_length
        self._cache = self._empty()
        self._mask_width = max_length if self._implementation == "static" else 0
        self._shift: Tensor | None = None  # (B, 1) of positions behind images
        try:
            yield
        finally:
            del self._cache

    def _empty(self) -> Cache:
        config = self._model.config.get_text_config(decoder=True)  # type: ignore[operator, union-attr]
        return decoding_cache(config, self._implementation, self._max_length)

    @property
    def can_join(self) -> bool:
        """Whether rows can begin beside others that have gone on already."""
        return all(isinstance(layer, RoomyLayer) for layer in self._cache.layers)

    def join(
        self,
        ids: Tensor,
        positions: Tensor,
        mask: Tensor,
        prompt_of: Tensor,
        images: ImageTensors | None = None,
    ) -> Tensor:
        """Read prompts for rows that begin: (N, V) logits.

        They stand below the rows that the cache holds, which needs `can_join`, and end in the same column.

        Args:
            ids: (P, S) long, left-padded.
            positions: (P, S) long.
            mask: (P, S) bool, false at padding.
            prompt_of: (N,) long. The prompt of each row.
            images: of the prompts, possibly none; None for data without images.
        """
        held, self._cache = self._cache, self._empty()
        held_shift, self._shift = self._shift, None
        if images is None:
            logits = self(ids, positions, mask)[prompt_of]
        else:
            logits = self._read(ids, positions, mask, images)[prompt_of]
        self.keep(prompt_of)
        if rows_in(held):
            if held_shift is not None and self._shift is not None:
                self._shift = torch.cat([held_shift, self._shift])
            for above, below in zip(held.layers, self._cache.layers, strict=True):
                above.join(below)  # type: ignore[union-attr]
            self._cache = held
        return logits

    def __call__(
        self, ids: Tensor, positions: Tensor, mask: Tensor, seen: ImageTensors | None = None
    ) -> Tensor:
        """Read tokens: (B, V) logits after the last one.

        Args:
            ids: (B, n) long.
            positions: (B, n) long.
            mask: (B, tokens read before + n) bool, false at padding.
            seen: beside them, as the model takes it.
        """
        inputs: dict[str, Any] = {self._cache_name: self._cache, **(seen or {})}
        if self._takes_positions:
            inputs["position_ids"] = positions if self._shift is None else positions + self._shift
        return self._last(ids, self._fitting(mask, ids.shape[1]), inputs).logits[:, -1]

    def _last(self, ids: Tensor, mask: Tensor | None, inputs: dict[str, Any]) -> Any:
        """The model's output, with logits of the last column where it takes that wish."""
        if self._takes_logits_to_keep:  # an index: a slice can make the head copy its weights for each row
            inputs["logits_to_keep"] = torch.tensor([ids.shape[1] - 1], device=ids.device)
        return self._model(input_ids=ids, attention_mask=mask, use_cache=True, **inputs)

    def _read(self, ids: Tensor, positions: Tensor, mask: Tensor, images: ImageTensors) -> Tensor:
        """As `__call__`, for prompts with images.

        A model that counts positions through images in its own way (multimodal rotary embeddings) does so
        here; what is read later is shifted by as much as it leaves behind.
        """
        inner: Any = getattr(self._model, "model", None)
        seen = inputs_for(self._model, images)
        if not images or not hasattr(inner, "get_rope_index"):
            self._shift = torch.zeros_like(ids[:, :1])
            return self(ids, positions, mask, seen)
        inputs: dict[str, Any] = {**seen, self._cache_name: self._cache}
        out = self._last(ids, mask.long(), inputs)
        self._shift = inner.rope_deltas.to(ids)
        return out.logits[:, -1]

    def _fitting(self, mask: Tensor, new: int) -> Tensor | None:
        """The mask in the width that the kind of model wants."""
        is_linear = self._cache.is_linear
        if all(is_linear):  # state-space models: padding matters only where it is read
            return mask if mask.shape[1] == new else None
        if self._mask_width and not self._takes_positions and not any(is_linear):
            # Positions come from the mask (ALiBi), which must then be as wide as the keys of a static cache.
            return nn.functional.pad(mask, (0, self._mask_width - mask.shape[1]))
        return mask

    def skip(self, tokens: int) -> int:
        """Go on as if so many tokens more had been read, whatever they were: what they take in memory.

        Returns:
            Bytes of the cache, the room that layers have ahead of their tokens included.
        """
        layers: list[Any] = self._cache.layers
        for layer in layers:
            held = [x for name in ("keys", "values") if isinstance(x := getattr(layer, name, None), Tensor)]
            if len(held) == 2:
                layer.update(*(x.new_empty((*x.shape[:-2], tokens, x.shape[-1])) for x in held))
        return sum(storage_bytes(layer) for layer in layers)

    def trimmed(self, mask: Tensor) -> Tensor:
        """Forget the first columns of the cache that hold no row's token: the mask (B, W) without them."""
        unused = int(mask.any(0).int().argmax()) if self.can_join and len(mask) else 0
        if unused:
            for layer in self._cache.layers:
                layer.forget_first(unused)  # type: ignore[union-attr]
        return mask[:, unused:]

    def keep(self, rows: Tensor) -> None:
        """Go on with these rows of the cache, in this order; a row may come several times."""
        self._cache.reorder_cache(rows)  # type: ignore[arg-type]
        if self._shift is not None:
            self._shift = self._shift[rows]


@contextmanager
def decoding(model: nn.Module) -> Iterator[None]:
    """Evaluation mode, no gradients, nothing compiled (a cache has a new size at every token), no gradient
    checkpointing (it turns caches off); undone at the end."""
    modules = list(model.modules())
    was_training = [module.training for module in modules]
    checkpointed = [module for module in modules if getattr(module, "gradient_checkpointing", False)]
    try:
        model.eval()
        for module in checkpointed:
            module.gradient_checkpointing = False  # type: ignore[assignment]
        is_compiled = any(module._compiled_call_impl is not None for module in modules)
        stance = torch.compiler.set_stance("force_eager") if is_compiled else nullcontext()
        with torch.no_grad(), stance:
            yield
    finally:
        for module, flag in zip(modules, was_training, strict=True):
            module.training = flag
        for module in checkpointed:
            module.gradient_checkpointing = True  # type: ignore[assignment]
