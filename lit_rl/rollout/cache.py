"""Key-value caches for decoding: transformers' own, with room where a layer would copy at each token."""

from typing import Any

from torch import Tensor
from transformers import DynamicCache, PreTrainedConfig, StaticCache
from transformers.cache_utils import Cache, DynamicLayer

from lit_rl.errors import ConfigError

CACHES = (None, "dynamic", "static")
"""What `rollout.engine.cache_implementation` may be; null is dynamic."""

_LEAST_ROOM = 32
"""Tokens that a layer grows by at least."""


class RoomyLayer(DynamicLayer):
    """A full-attention layer that writes new tokens in place instead of copying all keys and values for each.

    `keys` and `values` are views of longer tensors, which grow by half when they are full.

    Args:
        max_length: tokens that a row will ever hold; no room is made beyond until it is needed.
    """

    def __init__(self, max_length: int) -> None:
        super().__init__()
        self._max_length = max_length
        self._room: tuple[Tensor, Tensor] | None = None

    def update(self, key_states: Tensor, value_states: Tensor, *args, **kwargs) -> tuple[Tensor, Tensor]:
        """Append tokens: (B, heads, n, dim) each. Returns all keys and values."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        have = self.get_seq_length()
        if have == 0:
            self.keys, self.values = key_states, value_states
            return self.keys, self.values
        need = have + key_states.shape[-2]
        if self._room is None or self._room[0].shape[-2] < need:
            self._room = (self._roomy(self.keys, need), self._roomy(self.values, need))
        keys, values = self._room
        keys[:, :, have:need] = key_states
        values[:, :, have:need] = value_states
        self.keys, self.values = keys[:, :, :need], values[:, :, :need]
        return self.keys, self.values

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Keep these rows, in this order; a row may come several times."""
        self._room = None
        super().reorder_cache(beam_idx)  # type: ignore[arg-type]

    def forget_first(self, tokens: int) -> None:
        """Drop that many tokens at the beginning of all rows."""
        assert self.keys is not None and self.values is not None
        self._room = None
        self.keys, self.values = self.keys[:, :, tokens:], self.values[:, :, tokens:]

    def join(self, below: "RoomyLayer") -> None:
        """Take the rows of another layer in, below its own.

        The tokens of all rows end together; what comes before shorter ones is zero, and to be masked.
        """
        assert self.keys is not None and self.values is not None
        assert below.keys is not None and below.values is not None
        self._room = None
        self.keys = _stacked(self.keys, below.keys)
        self.values = _stacked(self.values, below.values)

    def _roomy(self, held: Tensor | None, need: int) -> Tensor:
        assert held is not None
        length = need + max(_LEAST_ROOM, need // 2)
        if need <= self._max_length:
            length = min(self._max_length, length)
        room = held.new_empty((*held.shape[:-2], length, held.shape[-1]))
        room[:, :, : held.shape[-2]] = held
        return room


def _stacked(above: Tensor, below: Tensor) -> Tensor:
    """Rows below rows, (B, heads, W, dim) and (B', heads, W', dim), with zeros before the shorter ones."""
    rows, width = len(above), max(above.shape[2], below.shape[2])
    both = above.new_zeros(rows + len(below), above.shape[1], width, above.shape[3])
    both[:rows, :, width - above.shape[2] :] = above
    both[rows:, :, width - below.shape[2] :] = below
    return both


def rows_in(cache: Cache) -> int:
    """Rows that the cache holds tokens of."""
    keys = [getattr(layer, "keys", None) for layer in cache.layers]
    return max((len(held) for held in keys if isinstance(held, Tensor)), default=0)


def decoding_cache(config: PreTrainedConfig, implementation: str | None, max_length: int) -> Cache:
    """An empty cache.

    Args:
        config: of the model.
        implementation: one of `CACHES`.
        max_length: prompt and completion tokens that it will hold at most.
    """
    if implementation == "static":
        return StaticCache(config=config, max_cache_len=max_length)
    cache = DynamicCache(config=config)
    # Sliding, linear and other kinds of layers have their own bookkeeping and stay as they are.
    cache.layers = [
        RoomyLayer(max_length) if type(layer) is DynamicLayer else layer for layer in cache.layers
    ]
    return cache


def storage_bytes(layer: Any) -> int:
    """Bytes behind the keys and values of a layer; 0 for a layer that keeps none."""
    held = [getattr(layer, name, None) for name in ("keys", "values")]
    return sum(tensor.untyped_storage().nbytes() for tensor in held if isinstance(tensor, Tensor))


def check_cache_implementation(implementation: str | None) -> None:
    """Refuse what `decoding_cache` does not know.

    Raises:
        ConfigError: it is none of `CACHES`.
    """
    if implementation not in CACHES:
        raise ConfigError(
            f"rollout.engine.cache_implementation must be null, 'dynamic' (the same) or 'static' "
            f"(found {implementation!r})."
        )
