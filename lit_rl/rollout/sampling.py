"""Sampling: the settings a completion is drawn with; also the class of `rollout.val_kwargs`."""

from dataclasses import MISSING, dataclass, field, fields, replace
from typing import Any, ClassVar, Self

from lit_rl.errors import ConfigError

FOLDED = {
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "repetition_penalty": "repetition_penalty",
    "max_new_tokens": "max_completion_length",
    "max_tokens": "max_completion_length",
    "ignore_eos": "ignore_eos",
    "stop_token_ids": "stop_token_ids",
    "stop": "stop",
}
"""Entries of generation_kwargs that say the same as a field, by either engine's spelling."""


@dataclass(frozen=True)
class Sampling:
    """How completions are drawn (source: TRL GRPOConfig and SDPOConfig, verl `rollout.*`).

    Args:
        temperature: divides the logits; every log-probability is taken at it. 0 is greedy (validation).
        top_p: nucleus mass, in (0, 1]; 1 keeps everything.
        top_k: most likely tokens kept; 0 or -1 keeps everything.
        min_p: least probability relative to the most likely token, in [0, 1]; null keeps everything.
        max_completion_length: tokens per completion, the end token included; the constant of
            `loss_type=dr_grpo`.
        repetition_penalty: above 1 favours tokens that are not in prompt and completion yet; 1 is off.
        ignore_eos: go on past end tokens to the limit.
        stop_token_ids: further end ids; those that model and tokenizer declare always count.
        stop: strings that end a completion.
        guided_decoding_regex: completions must match it; not with `rollout=hf`.
        generation_kwargs: entries of GenerationConfig (hf) or SamplingParams (vLLM); they win over the keys
            above.

    Raises:
        ConfigError: a value is out of range.
    """

    key: ClassVar[str] = "algo.sampling"

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float | None = None
    max_completion_length: int = 256
    repetition_penalty: float = 1.0
    ignore_eos: bool = False
    stop_token_ids: list[int] = field(default_factory=list)
    stop: list[str] = field(default_factory=list)
    guided_decoding_regex: str | None = None
    generation_kwargs: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        checks = [
            ("temperature", self.temperature >= 0, "must be >= 0"),
            ("top_p", 0 < self.top_p <= 1, "must be in (0, 1]"),
            ("top_k", self.top_k >= -1, "must be >= 1, or 0 or -1 for off"),
            ("min_p", self.min_p is None or 0 <= self.min_p <= 1, "must be null or in [0, 1]"),
            ("max_completion_length", self.max_completion_length >= 1, "must be >= 1"),
            ("repetition_penalty", self.repetition_penalty > 0, "must be > 0"),
            (
                "stop",
                not isinstance(self.stop, str) and "" not in self.stop,
                "must be a list of non-empty strings",
            ),
        ]
        for name, is_legal, rule in checks:
            if not is_legal:
                raise ConfigError(f"{self.key}.{name} {rule} (found {getattr(self, name)!r}).")

    def is_new_to(self, told: set[str]) -> bool:
        """Whether these settings, lengths aside, are not in the set; they are afterwards."""
        text = repr(replace(self, max_completion_length=1))
        is_new = text not in told
        told.add(text)
        return is_new

    def greedy(self) -> Self:
        """The same lengths and ends, with the most likely token each time."""
        return replace(self, temperature=0.0, top_p=1.0, top_k=0, min_p=None)

    def effective(self) -> Self:
        """The same settings, with entries of generation_kwargs that have a field of their own moved into it.

        Null in generation_kwargs means the neutral default. What has no field stays in generation_kwargs.

        Raises:
            ConfigError: an entry of generation_kwargs is out of range.
        """
        moved = {FOLDED[k]: v for k, v in self.generation_kwargs.items() if k in FOLDED}
        rest = {k: v for k, v in self.generation_kwargs.items() if k not in FOLDED}
        moved = {name: _neutral(name) if value is None else value for name, value in moved.items()}
        try:
            return replace(self, **moved, generation_kwargs=rest)
        except ConfigError as error:
            raise ConfigError(f"{self.key}.generation_kwargs: {error}") from error


def _neutral(name: str) -> Any:
    declared = next(f for f in fields(Sampling) if f.name == name)
    return declared.default if declared.default_factory is MISSING else declared.default_factory()
