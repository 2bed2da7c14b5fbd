"""RewardModel: a network as one more reward function."""

import importlib
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from lit_rl.errors import ConfigError
from lit_rl.paths import resolve_model_path
from lit_rl.rewards.reward import Reward, RewardResult, Sample

if TYPE_CHECKING:
    from lit_rl.rewards.network import RewardNetwork  # brings transformers' models

NAME = "reward_model"
KEY = "reward.reward_model"


@dataclass(frozen=True)
class RewardModel:
    """A reward model (source: verl `reward_model.*`).

    Args:
        enable: score with it too, as the last function of the sum, under the name `reward_model`.
        path: a sequence classifier with one label: a folder or a hub id.
        external_lib: package, or packages, imported first.
        input_tokenizer: tokenizer of the policy. Where it or its template differ from the reward model's,
            prompts are rendered anew by the reward model's; else the tokens of the rollout are scored as they
            are. null: they are the same.
        tokenizer: tokenizer of the reward model; null is that of its path.
        micro_batch_size: rows per forward pass.
        max_length: tokens per row, the last ones; null is what the model can take.
        custom_cls: `path` of a Python file and `name` of a class in it, of
            `lit_rl.rewards.network.RewardNetwork`, instead of a sequence classifier.
        fsdp_config: `param_offload`: weights rest in CPU memory and come to the device only to score.
        trust_remote_code: run code that comes with the reward model.

    Raises:
        ConfigError: a value is out of range, or a part is missing.
    """

    key: ClassVar[str] = KEY

    enable: bool = False
    path: str | None = None
    external_lib: str | list[str] | None = None
    input_tokenizer: str | None = None
    tokenizer: str | None = None
    micro_batch_size: int = 16
    max_length: int | None = None
    custom_cls: dict[str, Any] = field(default_factory=dict)
    fsdp_config: dict[str, Any] = field(default_factory=dict)
    trust_remote_code: bool = False

    def __post_init__(self) -> None:
        if self.micro_batch_size < 1:
            raise ConfigError(f"{KEY}.micro_batch_size must be >= 1 (found {self.micro_batch_size!r}).")
        if self.max_length is not None and self.max_length < 1:
            raise ConfigError(f"{KEY}.max_length must be null or >= 1 (found {self.max_length!r}).")
        _check_entries("custom_cls", self.custom_cls, ("path", "name"))
        _check_entries("fsdp_config", self.fsdp_config, ("param_offload",))
        path, name = self.custom_cls.get("path"), self.custom_cls.get("name")
        if (path is None) != (name is None):
            raise ConfigError(
                f"{KEY}.custom_cls.path (found {path!r}) and {KEY}.custom_cls.name (found {name!r}) come "
                "together."
            )
        if self.enable and self.path is None:
            raise ConfigError(f"{KEY}.enable needs {KEY}.path (found null).")

    def reward(self) -> "ModelReward":
        """The reward function; nothing is loaded before it is called."""
        return ModelReward(self)


class ModelReward(Reward):
    """Scores of a reward model, read at the last token of prompt and completion.

    Metric `truncated_frac`: rows of which the beginning was cut away.

    Args:
        settings: with a path.
    """

    runs_alone = True

    def __init__(self, settings: RewardModel) -> None:
        self.settings = settings
        self.device = torch.device("cpu")
        self._network: RewardNetwork | None = None
        self._is_alike = False

    def __call__(self, samples: list[Sample]) -> list[RewardResult]:
        """One result per sample. Raises FloatingPointError where the network gives no finite number."""
        scorer = self.network
        limit = self.settings.max_length or scorer.max_length
        whole = [self.ids(sample) for sample in samples]
        rows = [ids[-limit:] if limit is not None else ids for ids in whole]
        scores = self._scores(scorer, rows)
        if bad := [score for score in scores if not math.isfinite(score)]:
            raise FloatingPointError(f"the reward model gave {bad[0]}")
        return [
            RewardResult(score, None, {"truncated_frac": float(len(row) < len(ids))})
            for score, row, ids in zip(scores, rows, whole, strict=True)
        ]

    def score(self, sample: Sample) -> RewardResult:
        """The result of the sample alone."""
        return self([sample])[0]

    def ids(self, sample: Sample) -> list[int]:
        """The row that is scored: the rollout's tokens, or prompt and completion rendered anew.

        Messages are rendered by the reward model's template. A prompt that is text is followed by the
        completion, with the special tokens that the reward model's tokenizer puts around a text.
        """
        tokenizer = self.network.tokenizer
        if self._is_alike and sample.prompt_ids:
            return [*sample.prompt_ids, *sample.completion_ids]
        if isinstance(sample.prompt, str):
            return list(tokenizer(sample.prompt + sample.completion)["input_ids"])
        if not tokenizer.chat_template:
            raise ConfigError(
                f"{KEY}.tokenizer must have a chat template for prompts that are messages (found none)."
            )
        turns = [
            *sample.prompt,
            *(sample.messages or [{"role": "assistant", "content": sample.completion}]),
        ]
        filled = [{name: value for name, value in turn.items() if value is not None} for turn in turns]
        text = str(tokenizer.apply_chat_template(filled, tokenize=False))
        return list(tokenizer(text, add_special_tokens=False)["input_ids"])

    @property
    def network(self) -> "RewardNetwork":
        """The network, loaded on first use."""
        if self._network is None:
            from lit_rl.rewards.network import network

            settings, own = self.settings, self.settings.custom_cls
            _import_packages(settings.external_lib)
            assert settings.path is not None
            self._network = network(
                settings.path,
                tokenizer=settings.tokenizer,
                trust_remote_code=settings.trust_remote_code,
                file=own.get("path"),
                name=own.get("name"),
            )
            self._is_alike = self._is_policy_s(self._network.tokenizer)
            if not self._is_offloaded:
                self._network.model.to(self.device)
        return self._network

    @property
    def _is_offloaded(self) -> bool:
        return bool(self.settings.fsdp_config.get("param_offload"))

    def to_(self, device: torch.device) -> None:
        """Score on this device."""
        self.device = device
        if self._network is not None and not self._is_offloaded:
            self._network.model.to(device)

    def _is_policy_s(self, own: Any) -> bool:
        """Whether the policy's tokens mean the same to the reward model's tokenizer."""
        from transformers import AutoTokenizer

        if self.settings.input_tokenizer is None:
            return True
        files = resolve_model_path(self.settings.input_tokenizer, key=f"{KEY}.input_tokenizer")
        gguf = {} if files.gguf_file is None else {"gguf_file": files.gguf_file}
        trust = self.settings.trust_remote_code
        other = AutoTokenizer.from_pretrained(files.folder_or_id, trust_remote_code=trust, **gguf)
        return other.get_vocab() == own.get_vocab() and other.chat_template == own.chat_template

    def _scores(self, scorer: "RewardNetwork", rows: Sequence[list[int]]) -> list[float]:
        """Scores in the order of the rows, which are taken by length."""
        size, out = self.settings.micro_batch_size, [0.0] * len(rows)
        order = sorted(range(len(rows)), key=lambda row: len(rows[row]))
        if self._is_offloaded:
            scorer.model.to(self.device)
        for start in range(0, len(order), size):
            index = order[start : start + size]
            scores = scorer.scores([rows[row] for row in index], self.device).tolist()
            for row, score in zip(index, scores, strict=True):
                out[row] = score
        if self._is_offloaded:
            scorer.model.to("cpu")
        return out


def _check_entries(name: str, given: dict[str, Any], legal: tuple[str, ...]) -> None:
    if unknown := sorted(set(given) - set(legal)):
        raise ConfigError(f"{KEY}.{name} has no key {unknown[0]!r}; it has {' and '.join(legal)}.")


def _import_packages(external_lib: str | list[str] | None) -> None:
    for name in [external_lib] if isinstance(external_lib, str) else external_lib or []:
        try:
            importlib.import_module(name)
        except ImportError as error:
            raise ConfigError(
                f"{KEY}.external_lib must name packages that can be imported (found {name!r}): {error}."
            ) from error
