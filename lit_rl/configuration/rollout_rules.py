"""Rules of the rollout engine."""

from importlib.util import find_spec

from lit_rl.configuration.settings import Settings

CUTS = {"top_p": 1.0, "top_k": 0, "min_p": None, "repetition_penalty": 1.0, "guided_decoding_regex": None}
"""Settings under which vLLM reports the probabilities of another distribution than the policy's, and off."""


def engine_package(settings: Settings) -> str | None:
    """The package of the engine, known before anything is loaded."""
    if settings.choices.get("rollout") == "vllm" and find_spec("vllm") is None:
        return (
            "rollout=vllm needs the package vllm, which is not installed: `pip install 'lit_rl[vllm]'` on a "
            "GPU, or on a CPU see README; or use rollout=hf."
        )
    return None


def engine_log_probs(settings: Settings) -> str | None:
    """vLLM has no log-probabilities of the policy where sampling changes the distribution."""
    if settings.choices.get("rollout") != "vllm" or not settings.get("rollout.calculate_log_probs"):
        return None
    cut = [
        f"algo.sampling.{name} (found {settings.shown(f'algo.sampling.{name}')})"
        for name, off in CUTS.items()
        if settings.get(f"algo.sampling.{name}", off) not in (off, -1 if name == "top_k" else off)
    ]
    if not cut:
        return None
    return (
        f"rollout.calculate_log_probs (found True) needs {' and '.join(cut)} off with rollout=vllm, which "
        "reports probabilities after them."
    )
