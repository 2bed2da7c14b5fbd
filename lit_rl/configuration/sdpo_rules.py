"""Rules of self-distillation: weight, teacher and reprompt."""

from lit_rl.configuration.batch_rules import rows_per_optimizer_step, rows_per_step
from lit_rl.configuration.objective_rules import groups_of_one
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


def compared(settings: Settings) -> str | None:
    """What the way of comparing, or the number of updates, leaves without effect."""
    block = "algo.distillation"
    mode = settings.get(f"{block}.distillation_mode")
    if mode == "sampled_token":
        needs = f"{block}.distillation_mode topk_logits or full_logits (found 'sampled_token')"
        message = settings.idle([f"{block}.chunk_tokens"], needs)
        if message is not None:
            return message
    clip = settings.get(f"{block}.distillation_is_clip")
    is_on_policy = rows_per_optimizer_step(settings) >= rows_per_step(settings)
    if mode is None or not is_on_policy or settings.get("algo.num_iterations") != 1:
        return None
    if clip is not None and clip < 1:
        return None  # caps a ratio of 1 too
    return settings.idle(
        [f"{block}.distillation_is_clip"],
        "several updates per step, algo.num_iterations above 1 or a smaller algo.batch.optimizer_batch_size "
        "(with one update the ratio is 1)",
    )


def teacher_kind(settings: Settings) -> str | None:
    """Rule 21."""
    kind = settings.get("algo.teacher.teacher_model_kind", "ema")
    if kind != "ema":
        keys = ["algo.teacher.teacher_update_rate", "algo.teacher.teacher_sync_steps"]
        message = settings.idle(keys, f"algo.teacher.teacher_model_kind=ema (found {kind!r})")
        if message is not None:
            return message
    elif settings.get("algo.teacher.teacher_update_rate") == 0:
        needs = "algo.teacher.teacher_update_rate above 0 (found 0, which keeps the teacher as it is)"
        return settings.idle(["algo.teacher.teacher_sync_steps"], needs)
    if kind != "trust_region":
        return settings.idle(
            ["algo.teacher.trust_region_mix"],
            f"algo.teacher.teacher_model_kind=trust_region (found {kind!r})",
        )
    return None


def teacher_server(settings: Settings) -> str | None:
    """Rule 22: the server holds the current policy, and returns no whole vocabulary."""
    key = "algo.teacher.use_teacher_server"
    if not settings.get(key, False):
        return None
    weight, mode = settings.get(WEIGHT), settings.get("algo.distillation.distillation_mode")
    if weight != 1.0:
        return f"{key} needs {WEIGHT} 1.0 (found {weight!r}): a policy term needs the student's logits here."
    if mode == "full_logits":
        return (
            f"{key} needs algo.distillation.distillation_mode sampled_token or topk_logits (found {mode!r}): "
            "the server does not return a whole vocabulary."
        )
    engine = settings.choices.get("rollout")
    if engine != "vllm_server":
        return f"{key} needs rollout=vllm_server (found {engine!r}); without it the teacher is scored here."
    temperature = settings.get("algo.sampling.temperature", 1.0)
    if temperature != 1.0:
        return (
            f"{key} needs algo.sampling.temperature 1.0 (found {temperature!r}): the server scores given "
            "tokens at temperature 1."
        )
    return None


def demonstrations(settings: Settings) -> str | None:
    """Rules 23 and 24."""
    block = "algo.reprompt"
    skips = settings.get(f"{block}.skip_successful_rows", False)
    if not settings.get(f"{block}.use_successful_as_teacher", True):
        names = [
            "dont_reprompt_on_self_success",
            "demonstration",
            "remove_thinking_from_demonstration",
            "solution_template",
            "environment_feedback_only_without_solution",
            *([] if skips else ["success_reward_threshold"]),
        ]
        return settings.idle([f"{block}.{n}" for n in names], f"{block}.use_successful_as_teacher=true")
    if skips:
        needs = f"{block}.skip_successful_rows=false (found True: a success has no teacher at all)"
        return settings.idle([f"{block}.dont_reprompt_on_self_success"], needs)
    return None


def candidates(settings: Settings) -> str | None:
    """A group has to be large enough for a demonstration, and for a choice among several."""
    block, size = "algo.reprompt", settings.get("algo.num_generations", 1)
    if f"{block}.demonstration" not in settings or settings.get(WEIGHT) == 0.0:
        return None
    if not settings[f"{block}.use_successful_as_teacher"]:
        return None
    others = size - int(settings[f"{block}.dont_reprompt_on_self_success"])
    if groups_of_one(settings) is not None:
        return None  # said already
    if others < 1 and not settings[f"{block}.include_environment_feedback"]:
        return (
            f"algo.num_generations (found {size}) must be at least 2 where {block}.use_successful_as_teacher "
            f"is the teacher's only source and {block}.dont_reprompt_on_self_success is true: a group of one "
            "has no other row to show."
        )
    if others < 2:
        needs = f"two rows to choose from (algo.num_generations found {size})"
        return settings.idle([f"{block}.demonstration"], needs)
    return None


def feedback(settings: Settings) -> str | None:
    """Rules 23 and 25."""
    block, source = "algo.reprompt", settings.get("algo.reprompt.feedback_source")
    key = f"{block}.include_environment_feedback"
    if not settings.get(key, False):
        names = ("feedback_template", "feedback_source", "environment_feedback_only_without_solution")
        return settings.idle([*(f"{block}.{n}" for n in names), "data.privileged_context_key"], f"{key}=true")
    if source == "reward":
        needs = f"{block}.feedback_source with the column in it (found 'reward')"
        return settings.idle(["data.privileged_context_key"], needs)
    return None


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
