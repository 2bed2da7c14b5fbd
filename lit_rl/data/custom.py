"""CustomClass: your own dataset class, by file path and name."""

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

from torch.utils.data import Dataset

from lit_rl.errors import ConfigError
from lit_rl.user_code import module_of


@dataclass(frozen=True)
class CustomClass:
    """A map-style torch Dataset whose items are rows: dicts of columns, the prompt's among them.

    Its constructor gets, of the following, what it names: `data_files`, the list of local paths behind
    `data.train_files` or `data.val_files`, and `tokenizer`. (Source: verl `data.custom_cls`.)

    Args:
        path: Python file with the class; null reads parquet files.
        name: of the class in it.

    Raises:
        ConfigError: one is given without the other.
    """

    key: ClassVar[str] = "data.custom_cls"

    path: str | None = None
    name: str | None = None

    def __post_init__(self) -> None:
        if (self.path is None) != (self.name is None):
            raise ConfigError(
                f"{self.key}.path (found {self.path!r}) and {self.key}.name (found {self.name!r}) come "
                "together."
            )

    def dataset(self, data_files: list[str], tokenizer: Callable[[], Any]) -> Any:
        """An object of the class.

        Args:
            data_files: local paths.
            tokenizer: makes the tokenizer, if the class wants it.

        Raises:
            ConfigError: there is no such class, it is no map-style Dataset, or it wants further arguments.
        """
        made = self._class()
        offered: dict[str, Callable[[], Any]] = {"data_files": lambda: data_files, "tokenizer": tokenizer}
        wanted = inspect.signature(made).parameters
        for name, parameter in wanted.items():
            is_needed = parameter.default is parameter.empty and parameter.kind not in (
                parameter.VAR_KEYWORD,
                parameter.VAR_POSITIONAL,
            )
            if is_needed and name not in offered:
                raise ConfigError(
                    f"{self.key}.name must be a class that is made from {' and '.join(offered)} (found "
                    f"{self.name!r}, which also wants {name!r}); give that argument a default."
                )
        return made(**{name: value() for name, value in offered.items() if name in wanted})

    def _class(self) -> Callable[..., Any]:
        assert self.path is not None and self.name is not None
        found = getattr(module_of(self.path, f"{self.key}.path"), self.name, None)
        if not (isinstance(found, type) and issubclass(found, Dataset)):
            raise ConfigError(
                f"{self.key}.name must be a subclass of torch.utils.data.Dataset in {self.path} (found "
                f"{self.name!r}, which is {'not there' if found is None else 'none'})."
            )
        if not all(hasattr(found, method) for method in ("__len__", "__getitem__")):
            raise ConfigError(
                f"{self.key}.name must be a class with __len__ and __getitem__ (found {self.name!r}); an "
                "iterable one cannot be resumed at a row."
            )
        return found
