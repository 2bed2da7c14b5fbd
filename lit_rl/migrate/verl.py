"""verl's yaml files (PPO and GRPO, SFT, evaluation): sizes in rows, switches, and what is computed."""

from collections.abc import Callable
from typing import Any

from lit_rl.migrate import sharing
from lit_rl.migrate.draft import DIFFERS, NOT_YET, TAKEN, UNKNOWN, WITHOUT, Draft, flat
from lit_rl.migrate.rows import Row, by_name

ACTOR, ROLLOUT, REF = "actor_rollout_ref.actor.", "actor_rollout_ref.rollout.", "actor_rollout_ref.ref."
ESTIMATORS = {"gae": "ppo", "reward": "grpo", "none": "sdpo"}
LOAD_FORMATS = {"auto": "auto", "hf": "auto", "dtensor": "auto", "megatron": "auto"}
Computed = Callable[[Draft, str, Any, dict[str, Any]], None]


def kind_of(document: dict[str, Any]) -> str:
    """ppo, sft or evaluation: which of verl's files this is."""
    if "actor_rollout_ref" in document or "algorithm" in document:
        return "ppo"
    data = document.get("data") or {}
    if isinstance(data, dict) and ("response_key" in data or "path" in data):
        return "evaluation"
    return "sft" if {"model", "optim"} & document.keys() else "ppo"


def from_verl(document: dict[str, Any], kind: str | None = None) -> Draft:
    """The draft of an experiment.

    Args:
        document: nested, with interpolations resolved.
        kind: ppo, sft or evaluation; None finds out.
    """
    kind = kind or kind_of(document)
    table = by_name("verl") if kind == "ppo" else {**by_name("verl"), **by_name("verl", kind)}
    maps = {name for name, row in table.items() if row.how == "extension-point" and not row.is_group}
    args = flat(document, maps)
    draft = Draft(entry="evaluate" if kind == "evaluation" else "train")
    if kind == "sft":
        draft.choose("file", "sft", "algo", "sft")
        draft.choose("file", "sft", "data", "chat_sft")
    elif kind == "ppo" and "algorithm.adv_estimator" not in args:
        draft.choose("file", "ppo", "algo", "ppo")
    for key, value in args.items():
        row = table.get(key)
        if key.startswith("critic.") and kind == "ppo":
            _critic(draft, key, value, table)
        elif row is None:
            draft.say(key, value, UNKNOWN, "and not documented; take it out, or set its counterpart by hand.")
        elif key in COMPUTED and (kind == "ppo" or not key.startswith("optim.")):
            COMPUTED[key](draft, key, value, args)
        elif (kind, key) in OF_KIND:
            OF_KIND[kind, key](draft, key, value, args)
        elif row.how == "no-meaning":
            draft.say(key, value, WITHOUT, f"here: {row.note}.")
        elif row.is_group and not value:
            draft.say(key, value, TAKEN, "nothing: an empty block.")
        else:
            draft.take(key, value, row.key, value, row)
    if kind == "ppo":
        draft.take("loss_agg_mode", "token-mean, as always there", "algo.policy_loss.loss_type", "dapo")
    if kind == "ppo" and args.get("actor_rollout_ref.rollout.n", 1) == 1:
        draft.take("actor_rollout_ref.rollout.n", 1, "algo.num_generations", 1)
    return draft


def _critic(draft: Draft, key: str, value: Any, table: dict[str, Row]) -> None:
    """The critic's block mirrors the actor's: model and optim by their keys, sizes follow the policy's."""
    name = key.removeprefix("critic.")
    actor = table.get(f"actor_rollout_ref.{name}" if name.startswith("model.") else f"{ACTOR}{name}")
    is_own = name != "model.use_remove_padding"
    if name in ("cliprange_value", "critic_warmup", "value_loss_coef"):
        draft.take(key, value, f"algo.critic.{name}", value)
    elif is_own and actor is not None and actor.key.startswith(("model.", "optim.")):
        draft.take(key, value, f"algo.critic.{actor.key}", value, actor)
    elif actor is not None:
        draft.say(key, value, DIFFERS, "so: it follows the policy's.")
    else:
        draft.say(key, value, UNKNOWN, "and not documented; take it out, or set its counterpart by hand.")


def _ranks(args: dict[str, Any]) -> int:
    return int(args.get("trainer.nnodes", 1)) * int(args.get("trainer.n_gpus_per_node", 1))


def _to(ours: str, table: dict[Any, Any]) -> Computed:
    """Other words for a value; None leaves the default, a missing one is not yet."""

    def take(draft: Draft, key: str, value: Any, args: dict[str, Any]) -> None:
        if value not in table:
            draft.say(key, value, NOT_YET, f"{ours} has nothing for it.")
        elif table[value] is None:
            draft.say(key, value, TAKEN, f"nothing: {ours} keeps its default.")
        else:
            draft.take(key, value, ours, table[value])

    return take


def _group(group: str, names: dict[Any, str] | None = None) -> Computed:
    return lambda draft, key, value, args: draft.choose(
        key, value, group, (names or {}).get(value, str(value))
    )


def _mini_batch(draft: Draft, key: str, value: Any, args: dict[str, Any]) -> None:
    G = args.get(f"{ROLLOUT}n", 1)
    is_whole = value >= args.get("data.train_batch_size", value)
    draft.take(key, value, "algo.batch.optimizer_batch_size", None if is_whole else value * G)


def _per_rank(ours: str) -> Computed:
    def take(draft: Draft, key: str, value: Any, args: dict[str, Any]) -> None:
        if value is None:
            draft.say(key, value, TAKEN, "nothing: the size per GPU counts.")
        else:
            draft.take(key, value, ours, max(1, value // _ranks(args)))

    return take


def _dynamic(prefix: str, ours: str, switch: str, tokens: str) -> dict[str, Computed]:
    """Packing by tokens: one switch and one size there, one size that is or is not null here."""

    def size(draft: Draft, key: str, value: Any, args: dict[str, Any]) -> None:
        if args.get(f"{prefix}{switch}", False):
            draft.take(key, value, f"{ours}_tokens", value)
            draft.take(key, value, f"{ours}_size", None)
        else:
            draft.say(key, value, TAKEN, f"nothing: {switch} is off.")

    def on(draft: Draft, key: str, value: Any, args: dict[str, Any]) -> None:
        draft.say(key, value, TAKEN, f"{ours}_tokens is {'set' if value else 'null'}.")

    return {f"{prefix}{switch}": on, f"{prefix}{tokens}": size}


def _rows_per_gpu(draft: Draft, key: str, value: Any, args: dict[str, Any]) -> None:
    is_packed = args.get(f"{ACTOR}use_dynamic_bsz", False)
    if is_packed or value is None:
        draft.say(key, value, TAKEN, "nothing: the size in tokens counts.")
    else:
        draft.take(key, value, "algo.batch.micro_batch_size", value)


def _score_size(draft: Draft, key: str, value: Any, args: dict[str, Any]) -> None:
    """One size for old, ref and teacher: the smaller of those given."""
    prefix = key.rpartition(".")[0] + "."
    name = "log_prob_micro_batch_size_per_gpu"
    given = [args[f"{p}{name}"] for p in (REF, ROLLOUT) if args.get(f"{p}{name}") is not None]
    if args.get(f"{prefix}log_prob_use_dynamic_bsz", False) or not given:
        draft.say(key, value, TAKEN, "nothing: the size in tokens counts.")
    else:
        draft.take(key, value, "algo.batch.score_micro_batch_size", min(given))


def _kl_loss(draft: Draft, key: str, value: Any, args: dict[str, Any]) -> None:
    on = args.get(f"{ACTOR}use_kl_loss", False)
    draft.take(key, value, "algo.kl.beta", args.get(f"{ACTOR}kl_loss_coef", 0.001) if on else 0.0)


def _kl_type(draft: Draft, key: str, value: Any, args: dict[str, Any]) -> None:
    if not args.get(f"{ACTOR}use_kl_loss", False):
        draft.say(key, value, TAKEN, "nothing: use_kl_loss is off.")
    elif value == "kl":
        draft.take(key, value, "algo.kl.kl_loss_type", "kl+")
        draft.say(
            key, value, DIFFERS, "so: the gradient of kl alone is zero in expectation; kl+ has the true one."
        )
    else:
        draft.take(key, value, "algo.kl.kl_loss_type", value)


def _in_reward(ours: str) -> Computed:
    """Settings of the KL in the reward, which are without effect, and refused, where it is off."""

    def take(draft: Draft, key: str, value: Any, args: dict[str, Any]) -> None:
        is_adaptive = args.get("algorithm.kl_ctrl.type", "fixed") == "adaptive"
        is_read = args.get("algorithm.use_kl_in_reward", False) and (
            is_adaptive or not key.endswith(("horizon", "target_kl"))
        )
        if is_read:
            draft.take(key, value, ours, value)
        else:
            draft.say(key, value, TAKEN, "nothing: it has no effect there.")

    return take


def _estimator(draft: Draft, key: str, value: Any, args: dict[str, Any]) -> None:
    draft.choose(key, value, "algo", ESTIMATORS.get(value, value))
    if value in ("reward", "none"):
        draft.take(key, value, "algo.advantage.adv_estimator", value)


def _correction(name: str) -> Computed:
    """One key for two places; the switch is on where either is."""

    def take(draft: Draft, key: str, value: Any, args: dict[str, Any]) -> None:
        on = args.get(f"{ACTOR}rollout_is", False) or args.get("algorithm.rollout_is", False)
        both = [args[p + name] for p in (ACTOR, "algorithm.") if p + name in args]
        if len(both) == 2 and both[0] != both[1]:
            draft.say(key, value, NOT_YET, f"the actor's and the algorithm's {name} differ; make them equal.")
        elif name != "rollout_is" and not on:
            draft.say(key, value, TAKEN, "nothing: rollout_is is off.")
        elif value == "veto":
            draft.take(key, value, "algo.rollout_correction.rollout_is_mode", "none")
        else:
            draft.take(key, value, f"algo.rollout_correction.{name}", value)

    return take


def _follows(other: str) -> Computed:
    def take(draft: Draft, key: str, value: Any, args: dict[str, Any]) -> None:
        same = value == args.get(other, value)
        text = f"nothing: it follows {other}." if same else f"it differs from {other} ({args[other]!r})."
        draft.say(key, value, TAKEN if same else NOT_YET, text)

    return take


def _run_length(draft: Draft, key: str, value: Any, args: dict[str, Any]) -> None:
    if value is None or value < 0:
        draft.say(key, value, TAKEN, "nothing: the run's own length counts.")
    else:
        draft.take(key, value, "trainer.max_steps", value)


def _top_k(ours: str) -> Computed:
    return lambda draft, key, value, args: draft.take(key, value, ours, 0 if value == -1 else value)


def _do_sample(draft: Draft, key: str, value: Any, args: dict[str, Any]) -> None:
    is_val = ".val_kwargs." in key
    if value:
        draft.say(key, value, TAKEN, "nothing: the temperature says so.")
    elif is_val:
        draft.take(key, value, "rollout.val_kwargs.temperature", 0.0)
    else:
        draft.say(key, value, NOT_YET, "greedy completions have no log-probability to learn from.")


def _model(draft: Draft, key: str, value: Any, args: dict[str, Any]) -> None:
    draft.choose(key, value, "model", "hf")
    draft.take(key, value, "model.path", value)


def _files(draft: Draft, key: str, value: Any, args: dict[str, Any]) -> None:
    if "data" not in draft.choices:
        draft.choose(key, value, "data", "parquet")
    draft.take(key, value, key, value)


def _loggers(draft: Draft, key: str, value: Any, args: dict[str, Any]) -> None:
    names = [value] if isinstance(value, str) else list(value)
    draft.add(key, value, "logger", [*names, "csv"])


def _tests(draft: Draft, key: str, value: Any, args: dict[str, Any]) -> None:
    if value is None or value <= 0:
        draft.take(key, value, "trainer.limit_val_batches", 0)
        draft.take(key, value, "val_before_train", False)
    else:
        draft.take(key, value, "trainer.val_check_interval", value)


def _kept(draft: Draft, key: str, value: Any, args: dict[str, Any]) -> None:
    draft.take(key, value, "checkpoint.max_to_keep", 1 if value else None)


def _server(draft: Draft, key: str, value: Any, args: dict[str, Any]) -> None:
    if value is None:
        draft.say(key, value, TAKEN, "nothing: the chosen engine.")
    else:
        draft.say(key, value, DIFFERS, "so: name your engine class by rollout.engine._target_=module.Class.")


def _engine_arguments(draft: Draft, key: str, value: Any, args: dict[str, Any]) -> None:
    engine = key.rpartition(".")[2]
    if str(args.get(f"{ROLLOUT}name", "vllm")).startswith(engine):
        draft.take(key, value, "rollout.engine.engine_kwargs", value, by_name("verl")[key])
    else:
        draft.say(key, value, TAKEN, "nothing: another engine is chosen.")


def _optimizer_class(draft: Draft, key: str, value: Any, args: dict[str, Any]) -> None:
    package = str(args.get("optim.optimizer_impl", "torch.optim"))
    suffix = {"torch.optim": "", "torchao.optim": "_torchao", "bitsandbytes.optim": "_bnb"}.get(package, "")
    draft.choose(key, value, "optim", str(args.get("optim.optimizer", "AdamW")).lower() + suffix)


def _further(draft: Draft, key: str, value: Any, args: dict[str, Any]) -> None:
    for name, below in (value or {}).items():
        draft.take(f"{key}.{name}", below, f"optim.{name}", below)
    if not value:
        draft.say(key, value, TAKEN, "nothing: no further arguments.")


def _reward_model(draft: Draft, key: str, value: Any, args: dict[str, Any]) -> None:
    row = by_name("verl")[key]
    if args.get("reward_model.enable", False):
        draft.take(key, value, row.key, value, row)
    else:
        draft.say(key, value, TAKEN, "nothing: reward_model.enable is off.")


def _data_seed(draft: Draft, key: str, value: Any, args: dict[str, Any]) -> None:
    if value is None:
        draft.say(key, value, TAKEN, "nothing: the row order is a function of seed.")
    else:
        draft.take(key, value, "seed", value)


def _with_reference(draft: Draft, key: str, value: Any, args: dict[str, Any]) -> None:
    row = by_name("verl")[key]
    if args.get(f"{ACTOR}use_kl_loss", False) or args.get("algorithm.use_kl_in_reward", False):
        draft.take(key, value, row.key, value, row)
    else:
        draft.say(key, value, TAKEN, "nothing: there is no reference.")


COMPUTED: dict[str, Computed] = {
    "data.train_files": _files,
    "data.val_files": _files,
    "data.tokenizer": _to("data.tokenizer", {None: None}),
    "actor_rollout_ref.hybrid_engine": lambda draft, key, value, args: draft.say(
        key, value, TAKEN if value else NOT_YET, "the engine shares the devices."
    ),
    "actor_rollout_ref.model.path": _model,
    "actor_rollout_ref.model.use_remove_padding": _to(
        "model.kernels.share_prefix", {True: None, False: None}
    ),
    f"{ACTOR}strategy": _group("trainer", {"fsdp2": "fsdp"}),
    f"{ACTOR}ppo_mini_batch_size": _mini_batch,
    f"{ACTOR}ppo_micro_batch_size": _per_rank("algo.batch.micro_batch_size"),
    f"{ACTOR}ppo_micro_batch_size_per_gpu": _rows_per_gpu,
    **_dynamic(ACTOR, "algo.batch.micro_batch", "use_dynamic_bsz", "ppo_max_token_len_per_gpu"),
    f"{ACTOR}use_kl_loss": _kl_loss,
    f"{ACTOR}kl_loss_coef": _kl_loss,
    f"{ACTOR}kl_loss_type": _kl_type,
    f"{ACTOR}data_loader_seed": _data_seed,
    f"{ACTOR}optim.total_training_steps": _run_length,
    f"{REF}fsdp_config.param_offload": _with_reference,
    f"{ROLLOUT}name": _group("rollout"),
    f"{ROLLOUT}top_k": _top_k("algo.sampling.top_k"),
    f"{ROLLOUT}val_kwargs.top_k": _top_k("rollout.val_kwargs.top_k"),
    f"{ROLLOUT}prompt_length": _follows("data.max_prompt_length"),
    f"{ROLLOUT}response_length": _follows("data.max_response_length"),
    f"{ROLLOUT}load_format": lambda draft, key, value, args: draft.take(
        key, value, "rollout.engine.load_format", LOAD_FORMATS.get(value, "dummy")
    ),
    f"{ROLLOUT}do_sample": _do_sample,
    f"{ROLLOUT}val_kwargs.do_sample": _do_sample,
    f"{ROLLOUT}engine_kwargs.vllm": _engine_arguments,
    f"{ROLLOUT}engine_kwargs.sglang": _engine_arguments,
    f"{ROLLOUT}agent.custom_async_server.path": _server,
    f"{ROLLOUT}agent.custom_async_server.name": _server,
    "algorithm.adv_estimator": _estimator,
    "algorithm.kl_penalty": _in_reward("algo.kl.kl_penalty"),
    **{f"algorithm.kl_ctrl.{n}": _in_reward(f"algo.kl.kl_ctrl.{n}") for n in ("type", "kl_coef", "horizon")},
    "algorithm.kl_ctrl.target_kl": _in_reward("algo.kl.kl_ctrl.target_kl"),
    "optim.optimizer": _group("optim"),
    "optim.total_training_steps": _run_length,
    "trainer.logger": _loggers,
    "trainer.test_freq": _tests,
    "trainer.remove_previous_ckpt_in_save": _kept,
    **sharing.VERL,
}
COMPUTED |= {
    f"{prefix}{name}": function
    for prefix in (REF, ROLLOUT)
    for name, function in {
        "log_prob_micro_batch_size": _per_rank("algo.batch.score_micro_batch_size"),
        "log_prob_micro_batch_size_per_gpu": _score_size,
    }.items()
}
for _prefix in (REF, ROLLOUT):
    COMPUTED |= _dynamic(
        _prefix, "algo.batch.score_micro_batch", "log_prob_use_dynamic_bsz", "log_prob_max_token_len_per_gpu"
    )
_CORRECTION = ("", "_threshold", "_threshold_lower", "_level", "_mode", "_veto_threshold")
COMPUTED |= {
    f"{p}rollout_is{n}": _correction(f"rollout_is{n}") for p in (ACTOR, "algorithm.") for n in _CORRECTION
}
COMPUTED |= {name: _reward_model for name in by_name("verl") if name.startswith("reward_model.")}
OF_KIND: dict[tuple[str, str], Computed] = {
    ("sft", "optim.optimizer"): _optimizer_class,
    ("sft", "optim.optimizer_impl"): _optimizer_class,
    ("sft", "optim.override_optimizer_config"): _further,
    ("sft", "model.partial_pretrain"): _model,
    ("sft", "model.fsdp_config.model_dtype"): _to("model.dtype", {"fp32": "float32", "bf16": "bfloat16"}),
    ("sft", "model.fsdp_config.cpu_offload"): sharing.offload,
    ("sft", "model.fsdp_config.offload_params"): sharing.offload,
}
