"""Rules of rewards and data."""

from lit_rl.configuration.settings import Settings


def reward_functions(settings: Settings) -> str | None:
    """Rule 33."""
    weights, functions = settings.get("reward.reward_weights"), settings.get("reward.reward_funcs")
    own = settings.get("reward.custom_reward_function.path")
    names = set(functions or ())
    count = len(names - {"by_source"}) + 1 if own is not None else len(names)
    count += bool(settings.get("reward.reward_model.enable"))
    if weights is not None and len(weights) != count:
        return f"reward.reward_weights (found {len(weights)}) needs one for each of the {count} function(s)."
    if own is None:
        key = "reward.custom_reward_function.name"
        if (message := settings.idle([key], "reward.custom_reward_function.path")) is not None:
            return message
    if settings.get("reward.reward_manager") != "prime":
        return settings.idle(["reward.num_workers"], "reward.reward_manager=prime")
    return None


def reward_model(settings: Settings) -> str | None:
    """Rule 34."""
    block = "reward.reward_model"
    if settings.get(f"{block}.enable"):
        return None
    return settings.idle(settings.set_below(block, without=("enable",)), f"{block}.enable=true")


def unused_columns(settings: Settings) -> str | None:
    """Rule 35."""
    if settings.get("data.remove_unused_columns") and settings.get(
        "algo.reprompt.include_environment_feedback"
    ):
        return (
            "data.remove_unused_columns and algo.reprompt.include_environment_feedback exclude each other: "
            "the column with the feedback would be gone."
        )
    return None


def data_switches(settings: Settings) -> str | None:
    """Rule 36."""
    if not settings.get("data.filter_overlong_prompts"):
        key = "data.filter_overlong_prompts_workers"
        if (message := settings.idle([key], "data.filter_overlong_prompts=true")) is not None:
            return message
    path, name = settings.get("data.custom_cls.path"), settings.get("data.custom_cls.name")
    if (path is None) != (name is None):
        return (
            f"data.custom_cls.path (found {path!r}) and data.custom_cls.name (found {name!r}) come together."
        )
    if not settings.get("data.shuffle", True):
        return settings.idle(["data.seed"], "data.shuffle=true")
    return None


def overlong_prompts(settings: Settings) -> str | None:
    if settings.get("data.max_prompt_length", 1) is not None:
        return None
    return settings.idle(["data.truncation", "data.filter_overlong_prompts"], "data.max_prompt_length")


def loader_workers(settings: Settings) -> str | None:
    """Rule 37."""
    if settings.get("data.loader.num_workers", 0) > 0:
        return None
    names = ("persistent_workers", "prefetch_factor", "multiprocessing_context", "in_order")
    return settings.idle([f"data.loader.{name}" for name in names], "data.loader.num_workers above 0")
