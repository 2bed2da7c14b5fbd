"""Rules of self-distillation: weight, teacher and reprompt."""

from lit_rl.configuration.settings import Settings

WEIGHT = "algo.distillation.distillation_weight"


def policy_term_off(settings: Settings) -> str | None:
    """Rule 19: weight 1 leaves out the policy loss and everything it is made of."""
    if settings.get(WEIGHT) != 1.0:
        return None
    needs = f"{WEIGHT} below 1 (found 1.0, which leaves the policy term out)"
    loss = settings.choices.get("policy_loss", "clipped")
    if loss != "clipped":
        return f"policy_loss={loss} has no effect here; it needs {needs}."
    keys = [
        *settings.set_below("algo.kl"),
        *settings.set_below("algo.policy_loss"),
        *settings.set_below("algo.advantage", without=("adv_estimator",)),
    ]
    return settings.idle(keys, needs)


def distillation_off(settings: Settings) -> str | None:
    """Rule 20: weight 0 leaves out the teacher."""
    weight = settings.get(WEIGHT)
    if weight == 0.0:
        keys = [
            *settings.set_below("algo.distillation", without=("distillation_weight",)),
            *settings.set_below("algo.teacher"),
            *settings.set_below("algo.reprompt"),
        ]
        return settings.idle(keys, f"{WEIGHT} above 0 (found 0.0, which leaves the teacher out)")
    if weight == 1.0:
        return settings.idle(["algo.distillation.rows"], f"{WEIGHT} below 1 (found 1.0)")
    return None


def teacher_kind(settings: Settings) -> str | None:
    """Rule 21."""
    kind = settings.get("algo.teacher.teacher_model_kind", "ema")
    if kind != "ema":
        keys = ["algo.teacher.teacher_update_rate", "algo.teacher.teacher_sync_steps"]
        message = settings.idle(keys, f"algo.teacher.teacher_model_kind=ema (found {kind!r})")
        if message is not None:
            return message
    if kind != "trust_region":
        return settings.idle(
            ["algo.teacher.trust_region_mix"],
            f"algo.teacher.teacher_model_kind=trust_region (found {kind!r})",
        )
    return None


def demonstrations(settings: Settings) -> str | None:
    """Rules 23 and 24."""
    block = "algo.reprompt"
    uses_successes = settings.get(f"{block}.use_successful_as_teacher", True)
    if not uses_successes:
        names = (
            "dont_reprompt_on_self_success",
            "success_reward_threshold",
            "demonstration",
            "remove_thinking_from_demonstration",
            "solution_template",
        )
        keys = [f"{block}.{name}" for name in names]
        message = settings.idle(keys, f"{block}.use_successful_as_teacher=true")
        if message is not None:
            return message
    only_without = f"{block}.environment_feedback_only_without_solution"
    if not (uses_successes and settings.get(f"{block}.include_environment_feedback")):
        return settings.idle(
            [only_without],
            f"{block}.use_successful_as_teacher and {block}.include_environment_feedback both true",
        )
    return None


def feedback(settings: Settings) -> str | None:
    """Rule 25."""
    key = "algo.reprompt.include_environment_feedback"
    if settings.get(key, False):
        return None
    keys = ["algo.reprompt.feedback_template", "data.privileged_context_key"]
    return settings.idle(keys, f"{key}=true")


def length_of_reprompt(settings: Settings) -> str | None:
    """Rule 26."""
    longest, prompt = settings.get("algo.reprompt.max_reprompt_len"), settings.get("data.max_prompt_length")
    if longest is None or prompt is None or longest >= prompt:
        return None
    return (
        f"algo.reprompt.max_reprompt_len (found {longest}) must be at least data.max_prompt_length (found "
        f"{prompt}): the teacher's prompt holds the student's."
    )


def routing(settings: Settings) -> str | None:
    """Weights by pass rate need groups, and a gate needs its meter."""
    size = settings.get("algo.num_generations", 2)
    if size < 2:
        needs = f"algo.num_generations of at least 2 (found {size}; the share of successes is 0 or 1)"
        if (message := settings.idle(["algo.distillation.prompt_weight"], needs)) is not None:
            return message
    if settings.get("callbacks.teacher_gap") is None:
        return settings.idle(
            ["algo.distillation.gate"], "the callback that measures: callbacks=[default,teacher_gap]"
        )
    return None


def meter_has_validation_rows(settings: Settings) -> str | None:
    """The teacher gap is measured on validation rows."""
    if settings.get("callbacks.teacher_gap") is None or settings.get("data.val_files") is not None:
        return None
    return "callbacks.teacher_gap needs validation rows (found data.val_files None); give data.val_files."


def needs_sdpo(settings: Settings) -> str | None:
    """Rule 43: callbacks that belong to self-distillation."""
    if "algo.distillation" in settings:
        return None
    if settings.get("callbacks.teacher_gap") is not None:
        return f"callbacks.teacher_gap needs algo=sdpo (found {settings['algo._target_']})."
    return None
