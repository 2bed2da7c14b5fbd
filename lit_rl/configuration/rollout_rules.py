"""Rules of the rollout engine."""

import ast
from functools import cache
from importlib.util import find_spec
from pathlib import Path

from lit_rl.configuration.settings import Settings
from lit_rl.errors import ConfigError
from lit_rl.rollout import processors, sglang, vllm_request
from lit_rl.rollout.sampling import FOLDED, Sampling

CUTS = {"top_p": 1.0, "top_k": 0, "min_p": None, "repetition_penalty": 1.0, "guided_decoding_regex": None}
"""Settings that change the distribution, and off."""
REPORTED_AFTER = {
    "vllm": tuple(CUTS),
    "vllm_server": tuple(CUTS),
    "sglang": ("repetition_penalty", "guided_decoding_regex"),
}
"""Which of them an engine's log-probabilities come after."""
EXTRAS = {
    "hf": tuple(processors.OFF),
    "vllm": vllm_request.EXTRAS,
    "vllm_server": vllm_request.EXTRAS,
    "sglang": sglang.EXTRAS,
}
"""What generation_kwargs may hold beside what has a key, by engine."""


def engine_package(settings: Settings) -> str | None:
    """The package of the engine, known before anything is loaded."""
    if settings.choices.get("rollout") == "vllm" and find_spec("vllm") is None:
        return (
            "rollout=vllm needs the package vllm, which is not installed: `pip install 'lit_rl[vllm]'` on a "
            "GPU, or on a CPU see README; or use rollout=hf."
        )
    return None


def engine_log_probs(settings: Settings) -> str | None:
    """An engine has no log-probabilities of the policy where sampling changes the distribution first."""
    engine = settings.choices.get("rollout", "hf")
    if engine not in REPORTED_AFTER or not settings.get("rollout.calculate_log_probs"):
        return None
    keys = [
        f"algo.sampling.{name}"
        for name in REPORTED_AFTER[engine]
        if settings.get(f"algo.sampling.{name}", CUTS[name])
        not in (CUTS[name], -1 if name == "top_k" else CUTS[name])
    ]
    if settings.get("algo.sampling.generation_kwargs"):
        keys.append("algo.sampling.generation_kwargs")
    if not keys:
        return None
    cut = " and ".join(f"{key} (found {settings.shown(key)})" for key in keys)
    return (
        f"rollout.calculate_log_probs (found True) needs {cut} off with rollout={engine}, which reports "
        "probabilities after them."
    )


def generation_kwargs(settings: Settings) -> str | None:
    """Entries that the chosen engine cannot follow, or that are out of range."""
    engine = settings.choices.get("rollout")
    if engine not in EXTRAS:
        return None
    legal = (*EXTRAS[engine], *FOLDED)
    for block in ("algo.sampling", "rollout.val_kwargs"):
        entries = settings.get(f"{block}.generation_kwargs") or {}
        try:
            Sampling(generation_kwargs=entries).effective()
        except ConfigError as error:
            return str(error).replace("algo.sampling", block)
        for name in entries:
            if name not in legal:
                return (
                    f"{block}.generation_kwargs.{name} (found "
                    f"{settings.shown(f'{block}.generation_kwargs.{name}')}) is not supported with "
                    f"rollout={engine}; supported are {', '.join(legal)}."
                )
    return None


def engine_kwargs(settings: Settings) -> str | None:
    """Entries of engine_kwargs are arguments of vLLM that have no key of their own."""
    key = "rollout.engine.engine_kwargs"
    if settings.choices.get("rollout") != "vllm" or not settings.get(key):
        return None
    legal = vllm_arguments()
    for name in settings[key]:
        where = f"{key}.{name} (found {settings.shown(f'{key}.{name}')})"
        if f"rollout.engine.{name}" in settings:
            return f"{where} repeats rollout.engine.{name}; set that."
        if legal and name not in legal:
            return f"{where} is no argument of the installed vLLM's EngineArgs."
    return None


@cache
def vllm_arguments() -> frozenset[str]:
    """Fields of the installed vLLM's EngineArgs, read without importing it; none where it is not there."""
    spec = find_spec("vllm")
    places = list(spec.submodule_search_locations or ()) if spec is not None else []
    for place in places:
        source = (Path(place) / "engine" / "arg_utils.py").read_text()
        for node in ast.parse(source).body:
            if isinstance(node, ast.ClassDef) and node.name == "EngineArgs":
                fields = [item.target for item in node.body if isinstance(item, ast.AnnAssign)]
                return frozenset(field.id for field in fields if isinstance(field, ast.Name))
    return frozenset()


def context_length(settings: Settings) -> str | None:
    """Rule 26: the engine's context holds the longest prompt and completion."""
    room, prompt = settings.get("rollout.engine.max_model_len"), settings.get("data.max_prompt_length")
    if room is None or prompt is None:
        return None
    lengths = {
        key: value
        for key in ("algo.sampling.max_completion_length", "rollout.val_kwargs.max_completion_length")
        if (value := settings.get(key)) is not None
    }
    key = max(lengths, key=lambda name: lengths[name])
    if settings.get("rollout.environment") is not None and room < prompt + 2 * lengths[key]:
        return (
            f"rollout.engine.max_model_len (found {room}) must be at least data.max_prompt_length + 2 * "
            f"{key} (found {prompt} + 2 * {lengths[key]}) with rollout.environment: a short conversation is "
            "written beside a long one."
        )
    if room >= prompt + lengths[key]:
        return None
    return (
        f"rollout.engine.max_model_len (found {room}) must be at least data.max_prompt_length + {key} (found "
        f"{prompt} + {lengths[key]}): the engine holds both."
    )


def staleness(settings: Settings) -> str | None:
    """Rule 17."""
    key, needed = "rollout.max_staleness", "algo.rollout_correction.rollout_is"
    steps = settings.get(key, 0)
    if steps not in (0, 1):
        return f"{key} must be 0 or 1 (found {steps!r})."
    if not steps:
        return None
    engine = settings.choices.get("rollout")
    if engine not in ("vllm_server", "sglang"):
        return (
            f"{key} (found 1) needs rollout=vllm_server or sglang (found {engine!r}): an engine in "
            "this process writes while it does not train."
        )
    if not settings.get(needed):
        return f"{key} (found 1) needs {needed}=true: the completions are of the policy before the update."
    return None


def environment(settings: Settings) -> str | None:
    """What a conversation cannot be combined with."""
    key = "rollout.environment"
    if settings.get(key) is None:
        uses = [
            f"reward.reward_funcs.{name}"
            for name, function in (settings.get("reward.reward_funcs") or {}).items()
            if isinstance(function, dict) and str(function.get("_target_")).endswith(".EnvironmentReward")
        ]
        return f"{uses[0]} needs {key} (found None), which gives the reward." if uses else None
    needs = {
        "rollout.max_staleness": (0, "the environment answers in the trainer's process"),
        "algo.sampling.ignore_eos": (False, "no turn would end before the limit"),
        "rollout.val_kwargs.ignore_eos": (False, "no turn would end before the limit"),
        "rollout.engine.tensor_parallel_size": (1, "ranks that share an engine would wait for each other"),
    }
    for name, (value, why) in needs.items():
        if settings.get(name) not in (None, value):
            return f"{name} (found {settings.shown(name)}) must be {value} with {key}: {why}."
    if settings.get("callbacks.teacher_gap") is not None:
        return (
            f"callbacks.teacher_gap must be off with {key}: it has single turns written with other prompts."
        )
    if settings["task"] == "search":
        return f"{key} has no effect with task=search, whose questions have one turn; leave it null."
    return None


def adapters(settings: Settings) -> str | None:
    """Adapters are sent by themselves where there are some."""
    if settings.get("model.lora.lora_rank", 0) > 0:
        return None
    return settings.idle(["rollout.engine.lora_as_adapter"], "model.lora.lora_rank above 0 (found 0)")


def tensor_parallel(settings: Settings) -> str | None:
    """An engine in process has its shards in the processes of the run."""
    size, devices = settings.get("rollout.engine.tensor_parallel_size", 1), settings["trainer.devices"]
    nodes = settings.get("trainer.num_nodes", 1)
    if settings.choices.get("rollout") != "vllm" or size == 1 or not isinstance(devices, int):
        return None
    if size > devices or (devices * nodes) % size:
        return (
            f"rollout.engine.tensor_parallel_size (found {size}) must divide trainer.devices (found "
            f"{devices}): an engine in process has its parts in the processes of the run; or start a server "
            "of that size and use rollout=vllm_server."
        )
    return None


def group_port(settings: Settings) -> str | None:
    """Weights that travel as files need no port."""
    key = "rollout.engine.weight_sync"
    if settings.get(key) != "file":
        return None
    return settings.idle(["rollout.engine.group_port"], f"{key}=auto, nccl or gloo (found 'file')")
