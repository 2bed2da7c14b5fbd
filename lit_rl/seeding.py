"""Seeds without state: every random draw is a function of the run's seed and of what it is for.

A resumed run re-derives its seeds, so no generator state is ever stored.
"""

import hashlib

import torch


def derived_seed(*parts: int | str) -> int:
    """A 63-bit seed that depends on every part and on their order.

    Args:
        parts: what the draw is for, for example `(seed, "data", epoch)`.
    """
    digest = hashlib.blake2b(repr(parts).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def derived_generator(*parts: int | str) -> torch.Generator:
    """A CPU generator seeded with `derived_seed(*parts)`."""
    return torch.Generator().manual_seed(derived_seed(*parts))
