"""TRL's GRPOConfig, SDPOConfig and RLOOConfig: batch arithmetic, periods, and what is computed."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from lit_rl.errors import ConfigError
from lit_rl.migrate import sharing
from lit_rl.migrate.draft import DIFFERS, NOT_YET, TAKEN, UNKNOWN, WITHOUT, Draft
from lit_rl.migrate.rows import Row, by_name

BATCH = (
    *("per_device_train_batch_size", "per_device_batch_size", "gradient_accumulation_steps"),
    *("generation_batch_size", "steps_per_generation", "num_processes"),
)
PERIODS = {
    "max_steps": "trainer.max_steps",
    "logging_steps": "trainer.log_every_n_steps",
    "eval_steps": "trainer.val_check_interval",
    "save_steps": "checkpoint.save_freq",
    "warmup_steps": "schedule.lr_warmup_steps",
    "ref_model_sync_steps": "callbacks.reference_sync.ref_model_sync_steps",
    "teacher_sync_steps": "algo.teacher.teacher_sync_steps",
}
STRATEGY_OF = {
    "logging_steps": "logging_strategy",
    "eval_steps": "eval_strategy",
    "save_steps": "save_strategy",
}
SHAPES = ("constant", "linear", "cosine", "inverse_square_root", "wsd")
LOGGERS = ("tensorboard", "wandb", "mlflow", "swanlab")


@dataclass(frozen=True)
class Sizes:
    """W processes, G rows per prompt, P prompts per step, M and m rows, U optimizer steps per step."""

    W: int
    G: int
    P: int
    M: int
    m: int
    U: int


def sizes_of(args: dict[str, Any], devices: int) -> Sizes:
    """The sizes that the arguments mean.

    Raises:
        ConfigError: a generation batch does not hold whole prompts.
    """
    per_device = args.get("per_device_batch_size", 8)
    m, a = args.get("per_device_train_batch_size", per_device), args.get("gradient_accumulation_steps", 1)
    W, G = args.get("num_processes", devices), args.get("num_generations") or 8
    rows = args.get("generation_batch_size") or m * W * (args.get("steps_per_generation") or a)
    if rows % G or rows % (m * W * a):
        raise ConfigError(
            f"generation_batch_size ({rows} rows) must hold whole prompts of num_generations={G} rows and "
            f"whole optimizer batches of per_device_train_batch_size * processes * "
            f"gradient_accumulation_steps = {m} * {W} * {a} rows; TRL refuses this too."
        )
    M = m * W * a
    return Sizes(W=W, G=G, P=rows // G, M=M, m=m, U=args.get("num_iterations", 1) * rows // M)


def from_trl(args: dict[str, Any], name: str = "", *, algo: str | None = None, devices: int = 1) -> Draft:
    """The draft of an experiment.

    Args:
        args: fields of the Config, and options of a script.
        name: of the Config class or script.
        algo: grpo, sdpo or rloo; None finds out.
        devices: processes, where the arguments do not say.
    """
    sdpo, grpo = by_name("trl_sdpo"), by_name("trl_grpo")
    algo = algo or _algorithm(args, name, sdpo, grpo)
    table = {**grpo, **sdpo} if algo == "sdpo" else {**sdpo, **grpo}
    draft = Draft()
    draft.choose("class", name or algo, "algo", algo)
    sizes = sizes_of(args, devices)
    if any(key in args for key in BATCH):
        _take_batch(draft, args, sizes)
    for key, value in args.items():
        row = table.get(key)
        if row is None:
            draft.say(key, value, UNKNOWN, "and not documented; take it out, or set its counterpart by hand.")
        elif key in PERIODS:
            _take_period(draft, key, value, sizes, args)
        elif key in COMPUTED:
            COMPUTED[key](draft, key, value, args, sizes)
        elif row.how == "no-meaning":
            draft.say(key, value, WITHOUT, f"here: {row.note}.")
        elif key not in BATCH:
            draft.take(key, value, row.key, value, row)
    return draft


def _algorithm(args: dict[str, Any], name: str, sdpo: dict[str, Row], grpo: dict[str, Row]) -> str:
    for word in ("sdpo", "rloo", "grpo"):
        if word in name.lower():
            return word
    own = ("algo.distillation.", "algo.teacher.", "algo.reprompt.")
    return "sdpo" if any(k in sdpo and sdpo[k].key.startswith(own) for k in args if k not in grpo) else "grpo"


def _take_batch(draft: Draft, args: dict[str, Any], sizes: Sizes) -> None:
    given = {key: args[key] for key in BATCH if key in args}
    names, found = ", ".join(given), list(given.values())
    draft.take(names, found, "data.train_batch_size", sizes.P)
    draft.take(names, found, "algo.batch.micro_batch_size", sizes.m)
    whole = sizes.M == sizes.P * sizes.G
    draft.take(names, found, "algo.batch.optimizer_batch_size", None if whole else sizes.M)
    if sizes.W > 1:
        draft.choose(names, found, "trainer", "ddp")
        draft.take(names, found, "trainer.devices", sizes.W)


def _take_period(draft: Draft, key: str, value: Any, sizes: Sizes, args: dict[str, Any]) -> None:
    """Optimizer steps become iterations; a share of the run stays to be worked out."""
    ours, strategy = PERIODS[key], _plain(args.get(STRATEGY_OF.get(key, ""), "steps"))
    if strategy != "steps":
        draft.say(key, value, DIFFERS, f"so that it has no effect: {STRATEGY_OF[key]} is {strategy!r}.")
    elif key == "warmup_steps" and 0 < value < 1:
        draft.take(key, value, "schedule.lr_warmup_steps_ratio", value)
    elif value is None or value <= 0:
        off = {"max_steps": -1, "warmup_steps": 0}.get(key)
        if off is None:
            draft.say(key, value, TAKEN, f"nothing: {ours} keeps its default.")
        else:
            draft.take(key, value, ours, off if key == "max_steps" else -1)
    elif value < 1:
        draft.say(key, value, DIFFERS, f"as a share of the run: set {ours} to that share of the run's steps.")
    else:
        draft.take(key, value, ours, math.ceil(value / sizes.U))


# --------------------------------------------------------------------------------------- computed from others


def _plain(value: Any) -> str:
    """The word of an enumeration; yaml reads `no` as false."""
    return "no" if value is False else str(getattr(value, "value", value))


Computed = Callable[[Draft, str, Any, dict[str, Any], Sizes], None]


def _choice(group: str, table: dict[Any, str | None]) -> Computed:
    def take(draft: Draft, key: str, value: Any, args: dict[str, Any], sizes: Sizes) -> None:
        choice = table.get(value, str(value))
        if choice is None:
            draft.say(key, value, TAKEN, f"nothing: {group} keeps its choice.")
        else:
            draft.choose(key, value, group, choice)

    return take


def _word(ours: str, table: dict[Any, Any]) -> Computed:
    """A key whose values have other names here; one that is not in the table stays to be set."""

    def take(draft: Draft, key: str, value: Any, args: dict[str, Any], sizes: Sizes) -> None:
        if value not in table:
            draft.say(key, value, NOT_YET, f"{ours} has nothing for it.")
        elif table[value] is None:
            draft.say(key, value, TAKEN, f"nothing: {ours} keeps its default.")
        else:
            draft.take(key, value, ours, table[value])

    return take


def _listed(name: str, when: Any = True) -> Computed:
    def take(draft: Draft, key: str, value: Any, args: dict[str, Any], sizes: Sizes) -> None:
        if value == when:
            draft.add(key, value, "callbacks", ["default", name])
        else:
            draft.say(key, value, TAKEN, f"nothing: callbacks.{name} is not listed.")

    return take


def _note(verdict: str, text: str) -> Computed:
    return lambda draft, key, value, args, sizes: draft.say(key, value, verdict, text)


def _vllm(draft: Draft, key: str, value: Any, args: dict[str, Any], sizes: Sizes) -> None:
    is_server = args.get("vllm_mode") == "server" or str(args.get("vllm_device", "auto")) not in (
        "auto",
        "None",
    )
    on = args.get("use_vllm", False)
    draft.choose(key, value, "rollout", ("vllm_server" if is_server else "vllm") if on else "hf")


def _loggers(draft: Draft, key: str, value: Any, args: dict[str, Any], sizes: Sizes) -> None:
    names = [value] if isinstance(value, str) else list(value or ["none"])
    if "all" in names:
        draft.say(key, value, DIFFERS, "so: logger=[default], tensorboard and csv.")
    elif names != ["none"]:
        draft.add(key, value, "logger", [*names, "csv"])
    else:
        draft.add(key, value, "logger", ["none"])


def _optimizer(draft: Draft, key: str, value: Any, args: dict[str, Any], sizes: Sizes) -> None:
    name = _plain(value)
    if name.startswith("adamw_torch") and name in ("adamw_torch", "adamw_torch_fused"):
        draft.choose(key, value, "optim", "adamw")
        draft.take(key, value, "optim.fused", name.endswith("fused"))
    else:
        draft.choose(key, value, "optim", name)


def _betas(draft: Draft, key: str, value: Any, args: dict[str, Any], sizes: Sizes) -> None:
    draft.take(key, value, "optim.betas", [args.get("adam_beta1", 0.9), args.get("adam_beta2", 0.999)])


def _schedule(draft: Draft, key: str, value: Any, args: dict[str, Any], sizes: Sizes) -> None:
    name = _plain(value).removesuffix("_with_warmup")
    if name in SHAPES:
        draft.take(key, value, "schedule.lr_scheduler_type", name)
    else:
        draft.say(key, value, NOT_YET, f"the shapes are {', '.join(SHAPES)}; others by schedule._target_.")


def _entries(node: str) -> Computed:
    """Free arguments of the optimizer or the schedule."""

    def take(draft: Draft, key: str, value: Any, args: dict[str, Any], sizes: Sizes) -> None:
        if isinstance(value, str):
            value = dict(part.split("=", 1) for part in value.replace(" ", "").split(",") if part)
        for name, below in (value or {}).items():
            draft.take(f"{key}.{name}", below, f"{node}.{name}", below)
        if not value:
            draft.say(key, value, TAKEN, "nothing: no further arguments.")

    return take


def _tokens(draft: Draft, key: str, value: Any, args: dict[str, Any], sizes: Sizes) -> None:
    if value or args.get("loss_type", "dapo") != "dapo":
        draft.say(key, value, TAKEN, "always so: the divisor is of the whole optimizer batch.")
    else:
        draft.take(key, value, "algo.policy_loss.loss_type", "bnpo")


def _precision(draft: Draft, key: str, value: Any, args: dict[str, Any], sizes: Sizes) -> None:
    if value:
        draft.take(key, value, "trainer.precision", "bf16-mixed" if key == "bf16" else "16-mixed")
    else:
        draft.say(key, value, TAKEN, "nothing: trainer.precision keeps its default.")


def _validation(draft: Draft, key: str, value: Any, args: dict[str, Any], sizes: Sizes) -> None:
    match _plain(value):
        case "no":
            draft.take(key, value, "trainer.limit_val_batches", 0)
            draft.take(key, value, "val_before_train", False)
        case "steps":
            draft.say(key, value, TAKEN, "trainer.val_check_interval, which counts steps.")
        case _:
            draft.say(key, value, DIFFERS, "so: set trainer.val_check_interval to the steps of a data epoch.")


def _saving(draft: Draft, key: str, value: Any, args: dict[str, Any], sizes: Sizes) -> None:
    match _plain(value):
        case "no":
            draft.take(key, value, "checkpoint.save_freq", -1)
            draft.say(key, value, DIFFERS, "so: the last step is always saved.")
        case "steps":
            draft.say(key, value, TAKEN, "checkpoint.save_freq, which counts steps.")
        case "best":
            draft.take(key, value, "checkpoint.monitor", args.get("metric_for_best_model") or "val/accuracy")
        case _:
            draft.say(key, value, DIFFERS, "so: set checkpoint.save_freq to the steps of a data epoch.")


def _val_rows(draft: Draft, key: str, value: Any, args: dict[str, Any], sizes: Sizes) -> None:
    n = args.get("num_generations_eval") or sizes.G
    draft.take(key, value, "data.val_batch_size", max(1, value * sizes.W // n))


def _val_generations(draft: Draft, key: str, value: Any, args: dict[str, Any], sizes: Sizes) -> None:
    n = value or sizes.G
    draft.take(key, value, "rollout.val_kwargs.n", n)
    if n > 1:
        draft.take(key, value, "rollout.val_kwargs.temperature", args.get("temperature", 1.0))


def _resume(draft: Draft, key: str, value: Any, args: dict[str, Any], sizes: Sizes) -> None:
    if isinstance(value, str):
        draft.take(key, value, "checkpoint.resume_mode", "resume_path")
        draft.take(key, value, "checkpoint.resume_from_path", value)
    else:
        draft.take(key, value, "checkpoint.resume_mode", "auto" if value else "disable")


def _dataset(draft: Draft, key: str, value: Any, args: dict[str, Any], sizes: Sizes) -> None:
    draft.choose(
        key, value, "data", "gsm8k" if str(args.get("dataset_name")).endswith("gsm8k") else "parquet"
    )
    draft.say(key, value, DIFFERS, "so: give data.train_files=FILE.parquet (and data.val_files).")


def _peft(draft: Draft, key: str, value: Any, args: dict[str, Any], sizes: Sizes) -> None:
    if value:
        draft.take(key, value, "model.lora.lora_rank", args.get("lora_r", 16))
    else:
        draft.say(key, value, TAKEN, "nothing: model.lora.lora_rank is 0.")


def _feedback(draft: Draft, key: str, value: Any, args: dict[str, Any], sizes: Sizes) -> None:
    draft.take(key, value, "data.privileged_context_key", value)
    draft.take(key, value, "algo.reprompt.include_environment_feedback", True)


def _model(draft: Draft, key: str, value: Any, args: dict[str, Any], sizes: Sizes) -> None:
    draft.choose(key, value, "model", "hf")
    draft.take(key, value, "model.path", value)


def _scaling(draft: Draft, key: str, value: Any, args: dict[str, Any], sizes: Sizes) -> None:
    draft.take(key, value, "algo.advantage.scale_rewards", {True: "group", False: "none"}.get(value, value))


def _completions(draft: Draft, key: str, value: Any, args: dict[str, Any], sizes: Sizes) -> None:
    if value:
        draft.say(key, value, TAKEN, "callbacks.log_completions, which is on.")
    else:
        draft.take(key, value, "callbacks.log_completions", None)


def _full_eval(draft: Draft, key: str, value: Any, args: dict[str, Any], sizes: Sizes) -> None:
    if value:
        draft.take(key, value, "rollout.engine.dtype", "bfloat16" if key.startswith("bf16") else "float16")
    else:
        draft.say(key, value, TAKEN, "nothing: rollout.engine.dtype keeps its default.")


def _teacher_server(draft: Draft, key: str, value: Any, args: dict[str, Any], sizes: Sizes) -> None:
    draft.take(key, value, "algo.teacher.use_teacher_server", value, by_name("trl_sdpo")[key])


TASKS = {"train": "fit", "eval": None, "predict": "generate"}
COMPUTED: dict[str, Computed] = {
    "use_vllm": _vllm,
    "vllm_mode": _note(TAKEN, "with use_vllm."),
    "vllm_device": _note(TAKEN, "with use_vllm."),
    "sync_ref_model": _listed("reference_sync"),
    "push_to_hub": _listed("push_to_hub"),
    "skip_memory_metrics": _listed("memory", when=False),
    "log_completions": _completions,
    "report_to": _loggers,
    "optim": _optimizer,
    "optim_args": _entries("optim"),
    "lr_scheduler_kwargs": _entries("schedule"),
    "lr_scheduler_type": _schedule,
    "adam_beta1": _betas,
    "adam_beta2": _betas,
    "average_tokens_across_devices": _tokens,
    "bf16": _precision,
    "fp16": _precision,
    "bf16_full_eval": _full_eval,
    "fp16_full_eval": _full_eval,
    "tf32": _word("float32_matmul_precision", {True: "high", False: "highest", None: None}),
    "logging_strategy": _word("trainer.log_every_n_steps", {"steps": None, "no": None}),
    "logging_first_step": _word("trainer.log_every_n_steps", {True: 1, False: None}),
    "log_level": _word(
        "log_level", {"passive": None, **{n: n for n in ("debug", "info", "warning", "error")}}
    ),
    "disable_tqdm": _word("trainer.enable_progress_bar", {True: False, False: True, None: None}),
    "eval_strategy": _validation,
    "per_device_eval_batch_size": _val_rows,
    "num_generations_eval": _val_generations,
    "save_only_model": _word("checkpoint.save_contents", {True: ["model"], False: None}),
    "save_strategy": _saving,
    "greater_is_better": _word("checkpoint.mode", {True: "max", False: "min", None: None}),
    "ignore_data_skip": _word("checkpoint.load_contents", {True: ["model", "optimizer"], False: None}),
    "restore_callback_states_from_checkpoint": _word("checkpoint.load_contents", {True: None, False: None}),
    "use_cpu": _word("trainer.accelerator", {True: "cpu", False: None}),
    "train_sampling_strategy": _word("data.shuffle", {"random": True, "sequential": False}),
    **sharing.TRL,
    "deepspeed": _choice("trainer", {None: None}),
    "debug": _word("trainer.detect_anomaly", {"": None, None: None, "underflow_overflow": True}),
    **{f"do_{name}": _word("task", {True: task, False: None}) for name, task in TASKS.items()},
    "resume_from_checkpoint": _resume,
    "train.resume_from_checkpoint": _resume,
    "dataset_name": _dataset,
    "dataset_config": _note(TAKEN, "with dataset_name."),
    "use_peft": _peft,
    "feedback_column": _feedback,
    "model_name_or_path": _model,
    "SDPOTrainer.model": _model,
    "GRPOTrainer.model": _model,
    "scale_rewards": _scaling,
    "use_teacher_server": _teacher_server,
}
