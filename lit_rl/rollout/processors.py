"""From logits to tokens: the processors that sampling settings ask for, and the draw itself.

The processors are transformers' own classes, in the order of its `generate`. The log-probability of a token
is taken before any of them, at the sampling temperature over the whole vocabulary.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import (
    EpsilonLogitsWarper,
    EtaLogitsWarper,
    LogitsProcessor,
    MinNewTokensLengthLogitsProcessor,
    MinPLogitsWarper,
    NoBadWordsLogitsProcessor,
    NoRepeatNGramLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SuppressTokensAtBeginLogitsProcessor,
    SuppressTokensLogitsProcessor,
    TopKLogitsWarper,
    TopPLogitsWarper,
    TypicalLogitsWarper,
)

from lit_rl.errors import ConfigError
from lit_rl.rollout.noise import block_sums, inverse_cdf
from lit_rl.rollout.sampling import Sampling

OFF: dict[str, tuple[Any, ...]] = {
    "no_repeat_ngram_size": (None, 0),
    "bad_words_ids": (None, []),
    "min_new_tokens": (None, 0),
    "suppress_tokens": (None, []),
    "begin_suppress_tokens": (None, []),
    "typical_p": (None, 1.0),
    "epsilon_cutoff": (None, 0.0),
    "eta_cutoff": (None, 0.0),
}
"""What generation_kwargs may hold beyond the keys that have a field, with the values that mean off."""

_CHUNK_ELEMENTS = 2**25
"""Logits processed at once; bounds the float64 temporaries to 256 MiB."""


@dataclass(frozen=True)
class Draw:
    """Turns the logits of one position into one token per row.

    Attributes:
        temperature: divides the logits; 0 is greedy.
        penalties: processors of the logits, before the temperature.
        warpers: processors of the tempered logits; not used when greedy.
    """

    temperature: float
    penalties: list[LogitsProcessor]
    warpers: list[LogitsProcessor]

    @property
    def needs_history(self) -> bool:
        """True where a processor may look at the tokens so far."""
        return bool(self.penalties or self.warpers)

    def __call__(
        self, logits: Tensor, numbers: Tensor | None, history: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """One token for each row.

        Args:
            logits: (B, V) float.
            numbers: (B,) float64 in [0, 1), the noise; None when greedy.
            history: (B, L) long. The tokens so far, V at padding, which processors take for no token; None
                where `needs_history` is false.

        Returns:
            (B,) long tokens, and (B,) float32 log-probabilities; NaN where the logits are not finite.
        """
        size = max(1, _CHUNK_ELEMENTS // logits.shape[-1])
        parts = [
            self._tokens(
                logits[i : i + size],
                None if numbers is None else numbers[i : i + size],
                None if history is None else history[i : i + size],
            )
            for i in range(0, len(logits), size)
        ]
        tokens, logps = zip(*parts, strict=True)
        return torch.cat(tokens), torch.cat(logps)

    def _tokens(
        self, logits: Tensor, numbers: Tensor | None, history: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        logits = logits if logits.dtype == torch.float64 else logits.float()
        tempered = logits if self.temperature in (0.0, 1.0) else logits / self.temperature
        greatest = tempered.amax(-1, keepdim=True)
        weights = (tempered - greatest).exp_()  # (B, V), unnormalised probabilities
        sums = block_sums(weights)
        log_total = sums.sum(-1, keepdim=True).log()
        if numbers is None:
            tokens = _processed(self.penalties, history, logits).argmax(-1)
        elif self.needs_history:
            scores = _processed(self.penalties, history, logits) / self.temperature
            scores = _processed(self.warpers, history, scores)
            tokens = inverse_cdf((scores - scores.amax(-1, keepdim=True)).exp_(), numbers)
        else:
            tokens = inverse_cdf(weights, numbers, sums)
        logps = tempered.gather(-1, tokens[:, None]) - greatest - log_total
        return tokens, logps[:, 0].float()


def _processed(processors: list[LogitsProcessor], history: Tensor | None, scores: Tensor) -> Tensor:
    for processor in processors:
        scores = processor(history, scores)
    return scores


def draw_of(sampling: Sampling, *, prompt_width: int, end_ids: list[int], device: torch.device | str) -> Draw:
    """The draw that the settings ask for.

    Args:
        sampling: `Sampling.effective()`: what has a field of its own is read from the field.
        prompt_width: S, the columns of the prompts.
        end_ids: ids that `min_new_tokens` holds back.
        device: of the logits.

    Raises:
        ConfigError: generation_kwargs holds an entry that this engine cannot follow, or a value that its
            processor refuses.
    """
    extras = _extras(sampling)
    name = str(device)

    def made(key: str, value: Any, build: Callable[[Any], LogitsProcessor]) -> list[LogitsProcessor]:
        try:
            return [build(value)]
        except (ValueError, TypeError) as error:
            raise ConfigError(f"{sampling.key}.{key} cannot be used (found {value!r}): {error}") from error

    def extra(key: str, build: Callable[[Any], LogitsProcessor]) -> list[LogitsProcessor]:
        return made(f"generation_kwargs.{key}", extras[key], build) if key in extras else []

    penalties = [
        *(
            made("repetition_penalty", float(sampling.repetition_penalty), RepetitionPenaltyLogitsProcessor)
            if sampling.repetition_penalty != 1
            else []
        ),
        *extra("no_repeat_ngram_size", NoRepeatNGramLogitsProcessor),
        *extra("bad_words_ids", lambda v: NoBadWordsLogitsProcessor(v, eos_token_id=end_ids or None)),
        *extra("min_new_tokens", lambda v: MinNewTokensLengthLogitsProcessor(prompt_width, v, end_ids, name)),
        *extra("suppress_tokens", lambda v: SuppressTokensLogitsProcessor(v, name)),
        *extra(
            "begin_suppress_tokens", lambda v: SuppressTokensAtBeginLogitsProcessor(v, prompt_width, name)
        ),
    ]
    warpers = [
        *(made("top_k", sampling.top_k, TopKLogitsWarper) if sampling.top_k > 0 else []),
        *(made("top_p", sampling.top_p, TopPLogitsWarper) if sampling.top_p < 1 else []),
        *(made("min_p", sampling.min_p, MinPLogitsWarper) if sampling.min_p else []),
        *extra("typical_p", TypicalLogitsWarper),
        *extra("epsilon_cutoff", EpsilonLogitsWarper),
        *extra("eta_cutoff", lambda v: EtaLogitsWarper(v, device=name)),
    ]
    return Draw(sampling.temperature, penalties, warpers)


def _extras(sampling: Sampling) -> dict[str, Any]:
    """generation_kwargs without what is off."""
    unknown = [key for key in sampling.generation_kwargs if key not in OFF]
    if unknown:
        raise ConfigError(
            f"{sampling.key}.generation_kwargs.{unknown[0]} is not supported with rollout=hf "
            f"(found {sampling.generation_kwargs[unknown[0]]!r}); supported are temperature, top_p, top_k, "
            f"min_p, repetition_penalty, max_new_tokens, {', '.join(OFF)}."
        )
    return {key: value for key, value in sampling.generation_kwargs.items() if value not in OFF[key]}
