"""One request to vLLM: our sampling settings under the names of its SamplingParams, in process or by HTTP."""

from typing import Any

from lit_rl.errors import ConfigError
from lit_rl.rollout.sampling import Sampling
from lit_rl.seeding import derived_seed

EXTRAS = (
    "presence_penalty",
    "frequency_penalty",
    "min_tokens",
    "logit_bias",
    "allowed_token_ids",
    "bad_words",
    "thinking_token_budget",
    "extra_args",
)
"""What generation_kwargs may hold beyond the keys that have a field; the rest is set by lit_rl."""


def request_settings(sampling: Sampling, end_token_ids: list[int]) -> dict[str, Any]:
    """Fields of SamplingParams, all that matter set: neither vLLM's defaults nor the model's own leak in.

    The model's end ids go in as `stop_token_ids`, with vLLM's own end handling off, so that the ids that end
    a completion are the same for every engine.

    Args:
        sampling: how to draw, `generation_kwargs` already folded; what is left there is passed on.
        end_token_ids: every id that ends a completion.

    Raises:
        ConfigError: an entry of generation_kwargs that vLLM does not have, or that is set here.
    """
    for name, value in sampling.generation_kwargs.items():
        if name not in EXTRAS:
            raise ConfigError(
                f"{sampling.key}.generation_kwargs.{name} is not supported with vLLM (found {value!r}); "
                f"beside the keys of {sampling.key} there are {', '.join(EXTRAS)}."
            )
    ends = [] if sampling.ignore_eos else end_token_ids
    return {
        "n": 1,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": max(sampling.top_k, 0),
        "min_p": sampling.min_p or 0.0,
        "repetition_penalty": sampling.repetition_penalty,
        "max_tokens": sampling.max_completion_length,
        "stop_token_ids": sorted({*ends, *sampling.stop_token_ids}),
        "stop": list(sampling.stop),
        "ignore_eos": True,
        "detokenize": bool(sampling.stop),
        "skip_special_tokens": False,
        "logprobs": 0,
        **sampling.generation_kwargs,
    }


def scoring_settings(topk: int) -> dict[str, Any]:
    """Fields of SamplingParams that have the tokens of the prompt itself scored.

    Args:
        topk: most likely tokens reported beside the prompt's own.
    """
    return {"max_tokens": 1, "temperature": 1.0, "prompt_logprobs": topk, "detokenize": False}


def request_seed(seed: int, step: int, prompt_row: int, generation: int) -> int:
    """The seed of one completion, in [0, 2**63): from (seed, step, prompt row, generation) and nothing else.

    Args:
        seed: of the run and the purpose.
        step: iterations done before this one.
        prompt_row: data row.
        generation: index within the group.
    """
    return derived_seed(seed, step, prompt_row, generation) % 2**63


def is_policy_distribution(sampling: Sampling) -> bool:
    """Whether vLLM's processed log-probabilities are those of logits / temperature over the whole vocabulary.

    With a cut, a penalty or a grammar it reports the probability after it.
    """
    return (
        sampling.top_p == 1
        and sampling.top_k <= 0
        and not sampling.min_p
        and sampling.repetition_penalty == 1
        and sampling.guided_decoding_regex is None
        and not sampling.generation_kwargs
    )
