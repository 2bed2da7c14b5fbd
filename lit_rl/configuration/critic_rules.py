"""Rules of the critic: it goes with gae, and its model, optim and schedule obey the rules of the policy's."""

import re
from typing import Any

from lit_rl.configuration import algorithm_rules, batch_rules, run_rules, sharding_rules, trainer_rules
from lit_rl.configuration.settings import Settings
from lit_rl.configuration.tree import ABSENT, at

CRITIC = "algo.critic"
ESTIMATOR = "algo.advantage.adv_estimator"
MIRRORED = ("model", "optim", "schedule")
MIRRORED_RULES = (
    algorithm_rules.model_switches,
    algorithm_rules.repeated_keys,
    trainer_rules.true_precision,
    trainer_rules.flash_attention,
    trainer_rules.activation_offload,
    sharding_rules.fsdp_config,
    sharding_rules.sequence_parallel,
    sharding_rules.without_fsdp,
    run_rules.warm_up,
    run_rules.shape_of_schedule,
    run_rules.optimizer_and_schedule,
)
_KEY = re.compile(rf"(?<![\w./])({'|'.join(MIRRORED)})(?=\.[a-z]| cannot)")


def estimator_with_critic(settings: Settings) -> str | None:
    """Rule 9: gae and a critic need each other, and lam needs gae."""
    estimator, has_critic = settings.get(ESTIMATOR), CRITIC in settings
    if (estimator == "gae") == has_critic:
        return None if has_critic else settings.idle(["algo.advantage.lam"], f"{ESTIMATOR} gae (algo=ppo)")
    if has_critic:
        return (
            f"{ESTIMATOR} (found {estimator!r}) must be 'gae' with algo=ppo: no other estimator uses the "
            "critic; for one without, take algo=grpo."
        )
    return f"{ESTIMATOR} 'gae' needs algo=ppo: no other algorithm has a critic."


def micro_batch_of_critic(settings: Settings) -> str | None:
    """Rule 2, for the critic."""
    key = f"{CRITIC}.micro_batch_size"
    size, share = (
        settings.get(key),
        batch_rules.rows_per_optimizer_step(settings) // batch_rules.ranks(settings),
    )
    if size is None or size <= share:
        return None
    return f"{key} (found {size}) must be at most {share}, a rank's rows of an optimizer batch."


def critic_like_policy(settings: Settings) -> str | None:
    """The first breach of a rule of `model`, `optim` or `schedule` by the critic's own keys."""
    if CRITIC not in settings:
        return None
    critic = _in_place_of_the_policy(settings)
    for rule in MIRRORED_RULES:
        if rule(settings) is None and (message := rule(critic)) is not None:
            return _KEY.sub(rf"{CRITIC}.\1", message)
    return None


def _in_place_of_the_policy(settings: Settings) -> Settings:
    """Settings whose model, optim and schedule are the critic's."""
    prefix, defaults = f"{CRITIC}.", dict(settings.defaults)
    defaults.update((k.removeprefix(prefix), v) for k, v in settings.defaults.items() if k.startswith(prefix))
    tree, baseline = (_with_critic(tree) for tree in (settings.tree, settings.baseline))
    return Settings(tree, baseline, defaults, settings.choices)


def _with_critic(tree: dict[str, Any]) -> dict[str, Any]:
    own = {name: at(tree, f"{CRITIC}.{name}") for name in MIRRORED}
    return {**tree, **{name: node for name, node in own.items() if node is not ABSENT}}
