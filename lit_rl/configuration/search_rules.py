"""Rules of the search at test time."""

from lit_rl.configuration import batch_rules
from lit_rl.configuration.settings import Settings

CALLBACK = "callbacks.test_time_search"
PER_RUN = ("checkpoint", "log_completions", "progress", "summary", "curves", "teacher_gap", "collapse_alarm")


def search_and_its_callback(settings: Settings) -> str | None:
    """Task and callback need each other."""
    has_callback = settings.get(CALLBACK) is not None
    if (settings["task"] == "search") == has_callback:
        return None
    return (
        f"task=search (found {settings['task']!r}) and {CALLBACK} (found {'on' if has_callback else 'off'}) "
        f"come together; experiment=sdpo_test_time sets both."
    )


def search_needs(settings: Settings) -> str | None:
    """Rule 43: one question at a time, in one process, with a teacher that feedback reaches."""
    if settings.get(CALLBACK) is None:
        return None
    size, limit = settings.get("algo.num_generations", 1), settings[f"{CALLBACK}.max_attempts"]
    weight, feedback = "algo.distillation.distillation_weight", "algo.reprompt.include_environment_feedback"
    needs = [
        ("algo.distillation" in settings, "algo=sdpo"),
        (settings.get(weight, 1.0) > 0, f"{weight} above 0 (found {settings.get(weight)})"),
        (
            settings.get(feedback, True),
            f"{feedback}=true (found False): before the first success there is nothing else to learn from",
        ),
        (
            settings["data.train_batch_size"] == 1,
            f"data.train_batch_size=1 (found {settings['data.train_batch_size']})",
        ),
        ("data.question" in settings, "data=question (data.train_files takes parquet files too)"),
        (batch_rules.ranks(settings) == 1, "one process (trainer.devices=1, trainer.num_nodes=1)"),
        (
            limit % size == 0,
            f"{CALLBACK}.max_attempts (found {limit}) to be a multiple of algo.num_generations ({size})",
        ),
    ]
    missing = [what for is_met, what in needs if not is_met]
    return f"{CALLBACK} needs {'; '.join(missing)}." if missing else None


def without_effect_in_search(settings: Settings) -> str | None:
    """What belongs to a run that trains on many rows and validates."""
    if settings.get(CALLBACK) is None:
        return None
    idle = [f"callbacks.{name}" for name in PER_RUN if settings.get(f"callbacks.{name}") is not None]
    if idle:
        return f"{' and '.join(idle)} have no effect with task=search; leave them out of callbacks."
    if settings.get("logger"):
        return f"logger (found {sorted(settings['logger'])}) has no effect with task=search; set logger=none."
    keys = [
        "data.shuffle",
        "data.seed",
        "data.total_epochs",
        "data.val_files",
        "data.val_max_samples",
        "data.val_batch_size",
        "trainer.max_steps",
        "trainer.log_every_n_steps",
        "algo.distillation.prompt_weight",
        "algo.distillation.gate",
        *settings.set_below("checkpoint"),
        *settings.set_below("rollout.val_kwargs"),
    ]
    return settings.idle(keys, "a run over many rows: task=fit (found 'search')")


def pass_rate_of_best_of_k(settings: Settings) -> str | None:
    """The pass rate is what best of k is checked against."""
    if settings.get(CALLBACK) is None or "best_of_k" in settings[f"{CALLBACK}.baselines"]:
        return None
    return settings.idle([f"{CALLBACK}.pass_rate_samples"], f"{CALLBACK}.baselines with best_of_k")


def dialogues(settings: Settings) -> str | None:
    """The length of a dialogue."""
    if settings.get(CALLBACK) is None or "multi_turn" in settings[f"{CALLBACK}.baselines"]:
        return None
    return settings.idle([f"{CALLBACK}.max_dialogue_len"], f"{CALLBACK}.baselines with multi_turn")


def one_question(settings: Settings) -> str | None:
    """The question of the command line, its answer and its files."""
    if "data.question" not in settings:
        return None
    if settings["data.question"] is None:
        return settings.idle(["data.ground_truth", "data.source"], "data.question")
    if settings["data.ground_truth"] is None and settings.get("reward.custom_reward_function.path") is None:
        return (
            "data.question needs data.ground_truth (found None), or a verifier that knows it: "
            "reward.custom_reward_function.path."
        )
    keys = ["data.train_files", "data.train_max_samples"]
    return settings.idle(keys, f"data.question=null (found {settings.shown('data.question')})")
