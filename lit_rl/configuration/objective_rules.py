"""Rules of what a policy gradient is made of: advantages, KL, reference and rollout correction."""

from lit_rl.configuration.settings import Settings
from lit_rl.objectives.advantage import GROUP_RELATIVE

ESTIMATOR = "algo.advantage.adv_estimator"
SCALED = ("grpo", "rloo", "reinforce_plus_plus", "reinforce_plus_plus_baseline")
WITH_EPSILON = ("grpo", "grpo_passk", "rloo")
DISCOUNTED = ("gae", "reinforce_plus_plus", "reward")
WEIGHT = "algo.distillation.distillation_weight"
IN_REWARD = "algo.kl.use_kl_in_reward"
CORRECTION = "algo.rollout_correction"


def groups_of_one(settings: Settings) -> str | None:
    """Rule 4."""
    estimator, size = settings.get(ESTIMATOR), settings.get("algo.num_generations", 2)
    has_policy_term = settings.get(WEIGHT, 0.0) < 1
    if size >= 2 or estimator not in GROUP_RELATIVE or not has_policy_term:
        return None
    return (
        f"algo.num_generations (found {size}) must be at least 2 for {ESTIMATOR} {estimator!r}: a group of "
        f"one has nothing to be compared with."
    )


def discount(settings: Settings) -> str | None:
    """Rule 9."""
    if settings.get(ESTIMATOR) in DISCOUNTED:
        return None
    return settings.idle(["algo.advantage.gamma"], f"{ESTIMATOR} {' or '.join(DISCOUNTED)}")


def scaling(settings: Settings) -> str | None:
    """Rule 10: estimators that have a scale, and its epsilon."""
    estimator, scale = settings.get(ESTIMATOR, "grpo"), settings.get("algo.advantage.scale_rewards", "group")
    if estimator not in SCALED:
        keys = ["algo.advantage.scale_rewards"]
        if (message := settings.idle(keys, f"{ESTIMATOR} {' or '.join(SCALED)}")) is not None:
            return message
    keys = ["algo.advantage.std_epsilon"]
    if estimator not in WITH_EPSILON:
        return settings.idle(keys, f"{ESTIMATOR} {' or '.join(WITH_EPSILON)}")
    if scale in ("none", False) and estimator != "grpo_passk":
        return settings.idle(keys, "algo.advantage.scale_rewards other than none")
    return None


def refills(settings: Settings) -> str | None:
    """Groups of equal rewards teach nothing only where the estimator compares inside the group."""
    key = "algo.dynamic_sampling.max_refills"
    if settings.get(WEIGHT, 0.0) == 1.0:
        return settings.idle([key], f"{WEIGHT} below 1 (found 1.0): a teacher needs no spread")
    comparing = (*GROUP_RELATIVE, "gpg")
    if settings.get(ESTIMATOR, "grpo") not in comparing or settings.get("algo.num_generations", 2) < 2:
        return settings.idle([key], f"{ESTIMATOR} {' or '.join(comparing)}, and groups of at least 2")
    return None


def no_estimator(settings: Settings) -> str | None:
    """Rules 10 and 13: without an estimator there is no policy term."""
    if settings.get(ESTIMATOR) != "none":
        return None
    weight = settings.get(WEIGHT, 0.0)
    if weight != 1.0:
        return f"{ESTIMATOR} 'none' needs {WEIGHT} 1.0 (found {weight}): nothing else would be learned from."
    return settings.idle([IN_REWARD], f"{ESTIMATOR} other than none")


def one_kl(settings: Settings) -> str | None:
    """Rule 11."""
    beta = settings.get("algo.kl.beta", 0.0)
    if beta == 0 or not settings.get(IN_REWARD):
        return None
    return (
        f"algo.kl.beta (found {beta}) and {IN_REWARD} (found True) exclude each other: the penalty is in the "
        f"loss or in the reward; set algo.kl.beta=0, or {IN_REWARD}=false."
    )


def kl_estimator(settings: Settings) -> str | None:
    """Rule 12."""
    if settings.get("algo.kl.beta", 0.0) > 0:
        return None
    return settings.idle(["algo.kl.kl_loss_type"], "algo.kl.beta above 0")


def kl_in_reward(settings: Settings) -> str | None:
    """Rule 13."""
    if not settings.get(IN_REWARD):
        keys = ["algo.kl.kl_penalty", *settings.set_below("algo.kl.kl_ctrl")]
        return settings.idle(keys, f"{IN_REWARD}=true")
    if settings.get("algo.kl.kl_ctrl.type") == "adaptive":
        return None
    keys = ["algo.kl.kl_ctrl.horizon", "algo.kl.kl_ctrl.target_kl"]
    return settings.idle(keys, "algo.kl.kl_ctrl.type=adaptive (found 'fixed')")


def reference(settings: Settings) -> str | None:
    """Rule 14."""
    beta, block = settings.get("algo.kl.beta", 0.0), "algo.ref"
    if beta == 0 and not settings.get(IN_REWARD):
        needs = f"algo.kl.beta above 0 (found {beta!r}), or {IN_REWARD}=true"
        if settings.get("callbacks.reference_sync") is not None:
            return f"callbacks.reference_sync needs a reference: {needs}."
        return settings.idle(settings.set_below(block), f"a reference: {needs}")
    on_cpu = settings.get("trainer.accelerator") == "cpu"
    if on_cpu and settings.is_set(f"{block}.param_offload"):
        return settings.idle([f"{block}.param_offload"], "a GPU (found trainer.accelerator=cpu)")
    if settings.get(f"{block}.path") is None:
        return settings.idle([f"{block}.trust_remote_code"], f"{block}.path (found null)")
    return None


def correction_off(settings: Settings) -> str | None:
    """Rule 16."""
    if settings.get(f"{CORRECTION}.rollout_is", True):
        return None
    keys = settings.set_below(CORRECTION, without=("rollout_is",))
    return settings.idle(keys, f"{CORRECTION}.rollout_is=true")


def correction_on(settings: Settings) -> str | None:
    """Rule 15: engine and trainer must report the probability of the same distribution."""
    if not settings.get(f"{CORRECTION}.rollout_is"):
        return None
    if not settings.get("rollout.calculate_log_probs"):
        return (
            f"{CORRECTION}.rollout_is (found True) needs rollout.calculate_log_probs=true (found False): the "
            f"ratio is to the probability that the engine reports."
        )
    off = {"top_p": (None, 1.0), "top_k": (None, 0, -1), "min_p": (None, 0.0)}
    cut = [
        f"algo.sampling.{name} (found {settings.shown(f'algo.sampling.{name}')})"
        for name, values in off.items()
        if settings.get(f"algo.sampling.{name}") not in values
    ]
    if not cut:
        return None
    return (
        f"{CORRECTION}.rollout_is needs {' and '.join(cut)} off: completions drawn from a part of the "
        f"vocabulary have other probabilities than the ones that the ratio compares."
    )
