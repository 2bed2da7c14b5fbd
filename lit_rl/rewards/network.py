"""Networks that score token rows: a sequence classifier of transformers, or a class of yours."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import (
    AutoConfig,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    PreTrainedTokenizerBase,
)

from lit_rl.errors import ConfigError
from lit_rl.paths import ModelFiles, resolve_model_path
from lit_rl.rewards.custom import from_file
from lit_rl.rewards.model import KEY


class RewardNetwork(ABC):
    """What scores token rows. Yours is built as `Mine(path, tokenizer=..., trust_remote_code=...)`.

    Attributes:
        model: moved to the device and back.
        tokenizer: its chat template, if it has one, renders prompts that are messages.
    """

    model: Any
    tokenizer: PreTrainedTokenizerBase

    @abstractmethod
    def scores(self, rows: Sequence[Sequence[int]], device: torch.device) -> Tensor:
        """(N,) float. Scores of N rows of ids, not padded and none empty, without gradient.

        Args:
            rows: of different lengths.
            device: where the model is.
        """

    @property
    def max_length(self) -> int | None:
        """Tokens that a row may have; None is not known."""
        return None


class SequenceClassifier(RewardNetwork):
    """`AutoModelForSequenceClassification` with one label, read at the last token of the row.

    Args:
        path: a folder or a hub id; in the dtype it was saved in.
        tokenizer: likewise; None is that of the path.
        trust_remote_code: run code that comes with either.

    Raises:
        ConfigError: there is no such classifier, it lacks weights, or it has more than one label.
    """

    def __init__(self, path: str, *, tokenizer: str | None = None, trust_remote_code: bool = False) -> None:
        files = resolve_model_path(path, key=f"{KEY}.path")
        config = _read(AutoConfig, files, "path", trust_remote_code=trust_remote_code)
        if config.num_labels != 1:
            raise ConfigError(
                f"{KEY}.path must hold a classifier with one label (found {config.num_labels} in {path!r})."
            )
        self.model, told = _read(
            AutoModelForSequenceClassification,
            files,
            "path",
            config=config,
            trust_remote_code=trust_remote_code,
            output_loading_info=True,
        )
        if lacking := sorted(told["missing_keys"]):
            raise ConfigError(
                f"{KEY}.path must hold a trained classifier (found {path!r} without the weights "
                f"{', '.join(lacking[:3])}); a language model has none."
            )
        self.model.requires_grad_(False).eval()
        own = files if tokenizer is None else resolve_model_path(tokenizer, key=f"{KEY}.tokenizer")
        name = "path" if tokenizer is None else "tokenizer"
        self.tokenizer = _read(AutoTokenizer, own, name, trust_remote_code=trust_remote_code)

    @property
    def max_length(self) -> int | None:
        """Positions of the model."""
        return getattr(self.model.config.get_text_config(), "max_position_embeddings", None)

    @torch.no_grad()
    def scores(self, rows: Sequence[Sequence[int]], device: torch.device) -> Tensor:
        """(N,) float32 scores.

        transformers takes for the last token the last one that is not the padding id, which a text may hold
        itself (padding is often the end token). So padding here is an id that no row has, on the right.
        """
        config: Any = self.model.config.get_text_config()
        used = {token for row in rows for token in row}
        filler = next((token for token in range(config.vocab_size) if token not in used), None)
        if filler is None and len(rows) > 1:
            return torch.cat([self.scores([row], device) for row in rows])
        width = max(len(row) for row in rows)
        ids = torch.tensor([[*row, *[filler] * (width - len(row))] for row in rows], device=device)
        lengths = torch.tensor([len(row) for row in rows], device=device)
        mask = torch.arange(width, device=device) < lengths[:, None]
        before, config.pad_token_id = config.pad_token_id, filler
        try:
            logits = self.model(input_ids=ids, attention_mask=mask.long()).logits
        finally:
            config.pad_token_id = before
        return logits[:, 0].float()


def network(
    path: str,
    *,
    tokenizer: str | None,
    trust_remote_code: bool,
    file: str | None = None,
    name: str | None = None,
) -> RewardNetwork:
    """The network of a path.

    Args:
        path: weights.
        tokenizer: see `SequenceClassifier`.
        trust_remote_code: see there.
        file: Python file with a class to build instead.
        name: of the class.

    Raises:
        ConfigError: it cannot be built.
    """
    kind: Any = SequenceClassifier
    if file is not None:
        kind = from_file(file, str(name), f"{KEY}.custom_cls", "class")
        if not (isinstance(kind, type) and issubclass(kind, RewardNetwork)):
            raise ConfigError(
                f"{KEY}.custom_cls.name must be a class of lit_rl.rewards.network.RewardNetwork "
                f"(found {name!r} in {file})."
            )
    return kind(path, tokenizer=tokenizer, trust_remote_code=trust_remote_code)


def _read(kind: Any, files: ModelFiles, name: str, **arguments: Any) -> Any:
    """`kind.from_pretrained(...)`, with what transformers raises turned into a message that names the key."""
    try:
        return kind.from_pretrained(files.folder_or_id, **arguments)
    except (OSError, ValueError) as error:
        if "trust_remote_code" in str(error):
            raise ConfigError(
                f"model.trust_remote_code must be true to run the code that comes with "
                f"{files.folder_or_id!r} (found false); read that code first."
            ) from error
        first = (str(error).strip().splitlines() or [type(error).__name__])[0]
        shown = Path(files.folder_or_id).name
        raise ConfigError(f"{KEY}.{name} {shown!r} cannot be loaded: {first}") from error
