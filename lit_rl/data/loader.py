"""RunLoader: a sized loader whose place in the run is one number; and torch's own loader settings."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, ClassVar, Protocol

import torch
from torch.utils.data import DataLoader, Dataset

from lit_rl.batch import RolloutBatch
from lit_rl.errors import ConfigError, DataError


@dataclass(frozen=True)
class LoaderOptions:
    """Arguments of torch's DataLoader, under their names there.

    Args:
        num_workers: processes that read and tokenize; 0 does it in the training process.
        pin_memory: copy batches into pinned memory; only where there is a CUDA device.
        persistent_workers: keep the validation workers between two validations.
        prefetch_factor: batches that each worker prepares ahead; null is torch's 2.
        multiprocessing_context: fork, spawn or forkserver; null is the platform's.
        in_order: hand out batches in the order of the steps. False is not reproducible and resumes inexactly.

    Raises:
        ConfigError: a value is out of range, or has no effect without workers.
    """

    key: ClassVar[str] = "data.loader"

    num_workers: int = 0
    pin_memory: bool = True
    persistent_workers: bool = False
    prefetch_factor: int | None = None
    multiprocessing_context: str | None = None
    in_order: bool = True

    def __post_init__(self) -> None:
        if self.num_workers < 0:
            raise ConfigError(f"{self.key}.num_workers must be >= 0 (found {self.num_workers!r}).")
        if self.prefetch_factor is not None and self.prefetch_factor < 1:
            raise ConfigError(
                f"{self.key}.prefetch_factor must be null or >= 1 (found {self.prefetch_factor!r})."
            )
        if self.multiprocessing_context not in (None, "fork", "spawn", "forkserver"):
            raise ConfigError(
                f"{self.key}.multiprocessing_context must be null, fork, spawn or forkserver "
                f"(found {self.multiprocessing_context!r})."
            )
        if self.num_workers == 0:
            for name in ("persistent_workers", "prefetch_factor", "multiprocessing_context", "in_order"):
                if getattr(self, name) != getattr(LoaderOptions, name):
                    raise ConfigError(
                        f"{self.key}.{name} (found {getattr(self, name)!r}) has no effect with "
                        f"{self.key}.num_workers=0; set that to 1 or more, or leave it out."
                    )


class Batches(Protocol):
    """Row indices of each batch, the same on every pass."""

    def __len__(self) -> int: ...

    def __iter__(self) -> Iterator[list[int]]: ...


class RunLoader:
    """Batches of one run, resumable at any of them.

    The order has no state, so the state is the number of batches handed out; it does not depend on the number
    of workers or ranks. Sized, so Lightning fetches no batch ahead.

    Args:
        batches: row indices of each batch.
        collate: rows of one batch by index -> RolloutBatch; runs in the workers.
        options: torch's loader settings.
        identity: what the order depends on, by dotted key; a saved place is refused where it differs.
    """

    def __init__(
        self,
        batches: Batches,
        collate: Callable[[Sequence[int]], RolloutBatch],
        *,
        options: LoaderOptions,
        identity: dict[str, Any],
    ) -> None:
        self._batches = _From(batches)
        self._identity, self._collate = identity, collate
        self._served = 0
        self._loader: DataLoader[int] = DataLoader(
            _Indices(),
            batch_sampler=self._batches,
            collate_fn=_ErrorsAsValues(collate),
            num_workers=options.num_workers,
            pin_memory=options.pin_memory and torch.cuda.is_available(),
            persistent_workers=options.persistent_workers,
            prefetch_factor=options.prefetch_factor,
            multiprocessing_context=options.multiprocessing_context,
            in_order=options.in_order,
            generator=torch.Generator(),  # torch seeds workers from it; the global generator stays untouched
        )

    def __len__(self) -> int:
        return len(self._batches.batches)

    def __iter__(self) -> Iterator[RolloutBatch]:
        self._served = self._batches.start
        batches = iter(self._loader)
        self._batches.start = 0
        for batch in batches:
            if isinstance(batch, DataError):
                raise batch
            self._served += 1
            yield batch

    def ahead(self) -> RolloutBatch | None:
        """The batch after the last one handed out, which is not handed out by this; None after the last."""
        indices = next(islice(iter(self._batches.batches), self._served, None), None)
        return None if indices is None else self._collate(indices)

    def state_dict(self) -> dict[str, Any]:
        """Batches handed out, and what their order depends on."""
        return {"batches": self._served, **self._identity}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """The next pass starts after the batches that were handed out.

        Raises:
            ConfigError: the place was saved with another order.
        """
        for name, value in self._identity.items():
            if state[name] != value:
                raise ConfigError(
                    f"{name} must be what the checkpoint was written with, {state[name]!r} (found "
                    f"{value!r}); set it back, or start a new run from the weights."
                )
        self._batches.start = self._served = state["batches"]


class _From:
    """Batches from number `start` on. Torch copies the start when it makes an iterator."""

    def __init__(self, batches: Batches) -> None:
        self.batches, self.start = batches, 0

    def __iter__(self) -> Iterator[list[int]]:
        return islice(iter(self.batches), self.start, None)


class _Indices(Dataset[int]):
    """A dataset whose items are their own indices: the collate function reads the rows, a batch at a time."""

    def __getitem__(self, index: int) -> int:
        return index


class _ErrorsAsValues:
    """Hands an error of the data over as a value; raised in a worker, torch would bury it in a traceback."""

    def __init__(self, collate: Callable[[Sequence[int]], RolloutBatch]) -> None:
        self._collate = collate

    def __call__(self, indices: Sequence[int]) -> RolloutBatch | DataError:
        try:
            return self._collate(indices)
        except DataError as error:
            return error
