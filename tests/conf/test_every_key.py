"""No silent key: another legal value of each key changes what a run does, or is refused."""

import shutil
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import mutations
import pytest
from outcome import SOURCE, Outcome, differences, outcome
from tiny_parts import tiny_reward_model

from lit_rl.configuration.compose import compose
from lit_rl.configuration.tree import leaves, link

RUN = (
    "debug=fast",
    "data.train_batch_size=4",
    "trainer.max_steps=3",
    "trainer.val_check_interval=2",
    "checkpoint.save_freq=2",
    "logger=[csv]",
    "callbacks.log_completions.log_val_generations=4",
    "callbacks.curves=null",
    "trainer.enable_progress_bar=false",
)
PPO = (  # as short as can be: only the critic's keys are left to show
    "debug=fast",
    "data.train_batch_size=4",
    "algo.num_generations=2",
    "algo.critic.critic_warmup=0",
    "trainer.max_steps=2",
    "trainer.val_check_interval=0",
    "checkpoint.save_freq=2",
    "logger=[csv]",
    "callbacks.curves=null",
    "callbacks.log_completions=null",
    "trainer.enable_progress_bar=false",
)
CHATS = Path(__file__).with_name("chats_8.parquet")
SFT = [word for word in RUN if "log_completions" not in word]
ALGORITHMS = {
    "grpo": ("algo=grpo", *RUN),
    "sdpo": ("algo=sdpo", *RUN),
    "sft": ("algo=sft", "data=chat_sft", f"data.train_files={CHATS}", f"data.val_files={CHATS}", *SFT),
    "cispo": ("algo=grpo", "policy_loss=cispo", *RUN),
    "clip_cov": ("algo=grpo", "policy_loss=clip_cov", *RUN),
    "kl_cov": ("algo=grpo", "policy_loss=kl_cov", *RUN),
    "meters": ("algo=sdpo", "callbacks=[default,teacher_gap,collapse_alarm,memory]", *RUN),
    "search": (
        "experiment=sdpo_test_time",
        "data.question='57+68=?'",
        "data.ground_truth=125",
        "data.source=lit_rl/arithmetic",
        "callbacks.test_time_search.max_attempts=16",
        "callbacks.test_time_search.pass_rate_samples=8",
    ),
    "sapo": ("algo=grpo", "policy_loss=sapo", *RUN),
    "ppo": ("algo=ppo", *PPO),
}
if find_spec("reasoning_gym") is not None:
    ALGORITHMS["gym"] = ("algo=grpo", "data=reasoning_gym", "data.task=chain_sum", *RUN)
PARTS = (
    "algo",
    "model",
    "data",
    "reward",
    "rollout",
    "checkpoint",
    "optim",
    "schedule",
    "callbacks",
    "trainer",
    "",
)
# Keys that change nothing a run writes or prints here, and why that is right.
INFORMATIONAL = {
    "logger": "logger=none; a group, not a key",
    "project_name": "a name for trackers; the plan prints it",
    "experiment_name": "a name for trackers; the plan prints it",
    "full_trace": "only shows more of an error (tests/test_train_errors.py)",
    "model.trust_remote_code": "matters to models that bring code (tests of models)",
    "algo.critic.model.trust_remote_code": "as model.trust_remote_code",
    "algo.critic.model.kernels.share_prefix": "as model.kernels.share_prefix",
    "data.trust_remote_code": "matters to tokenizers that bring code (tests of data)",
    "data.chat_template_kwargs": "the embedded template reads no variable (tests of data)",
    "data.on_bad_row": "the embedded rows are all good (tests of data)",
    "data.cache_dir": "where copies lie of files that are not here (tests of data)",
    "data.filter_overlong_prompts_workers": "the same rows, found by more processes",
    "algo.on_nonfinite": "no gradient of this run is NaN (tests of algorithms)",
    "checkpoint.save_on_signal": "no signal comes (tests of callbacks)",
    "checkpoint.async_save": "the same files, written beside training (tests of callbacks)",
    "algo.reprompt.remove_thinking_from_demonstration": "no think blocks here (tests of objectives)",
    "callbacks.collapse_alarm.action": "no collapse in three steps (tests of callbacks)",
    "callbacks.collapse_alarm.window": "likewise",
    "callbacks.collapse_alarm.drop": "likewise",
    "algo.distillation.chunk_tokens": "memory only: how many logits exist at once",
    "rollout.max_logp_gap": "the embedded run's engine agrees (tests of callbacks)",
    "reward.reward_manager": "the same rewards, by processes (tests of rewards)",
    "reward.num_workers": "the same rewards, by more processes (tests of rewards)",
    "reward.reward_model.micro_batch_size": "memory only (tests of rewards)",
    "reward.reward_model.fsdp_config.param_offload": "where weights rest; there is one device here",
    "reward.reward_model.trust_remote_code": "as model.trust_remote_code",
    "reward.timeout": "no call of this run takes long (tests of rewards)",
    "model.kernels.share_prefix": "speed and memory only (tests/models/test_shared_prefix.py)",
    "model.kernels.use_remove_padding": "speed and memory only (tests/models/test_shared_prefix.py)",
    "algo.critic.model.kernels.use_remove_padding": "as model.kernels.use_remove_padding",
    "model.kernels.use_fused_kernels": "speed and memory only (tests/models/test_kernels.py)",
    "algo.critic.model.kernels.use_fused_kernels": "as model.kernels.use_fused_kernels",
    "model.kernels.torch_compile": "speed and memory only (tests/models/test_kernels.py)",
    "algo.critic.model.kernels.torch_compile": "as model.kernels.torch_compile",
    "logger.csv.root_dir": "the folder of the run",
    "data.loader.pin_memory": "only where there is a CUDA device",
    "reward.reward_funcs.by_source.sources": "no row has another source (tests of rewards)",
}


FAILS_WITHOUT = (  # keys without which their context fails
    "reward.on_error",
    "data.custom_cls.path",
    "data.custom_cls.name",
    "reward.reward_model.enable",
    "reward.reward_model.custom_cls.path",
    "checkpoint.resume_from_path",
    "algo.batch.micro_batch_tokens",
    "algo.distillation.distillation_topk",
    "schedule.weight_decay_incr_style",
    "algo.critic.schedule.weight_decay_incr_style",
)


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("every_key")
    (path / "rewards.py").write_text(mutations.REWARDS)
    (path / "networks.py").write_text(mutations.NETWORKS)
    tiny_reward_model(path / "reward_model")
    tiny_reward_model(path / "other_reward_model", template=mutations.OTHER_TEMPLATE)
    return path


@cache
def keys(algo: str) -> dict[str, Any]:
    """Every key and its value; what follows another node is left out."""
    tree = compose(SOURCE, ALGORITHMS[algo]).tree
    return {key: value for key, value in leaves(tree) if link(value) is None}


@cache
def before(overrides: tuple[str, ...], folder: Path, resumed: bool) -> Outcome:
    """What the run does with the key left alone."""
    return outcome(overrides, folder / "run", resumed_from=finished(folder) if resumed else None)


@cache
def finished(folder: Path) -> Path:
    """A finished run to resume."""
    kept = folder / "finished"
    outcome(ALGORITHMS["grpo"], folder / "first", keep=kept)
    return kept


def effect(algo: str, key: str, value: Any, folder: Path) -> list[str]:
    """What changing this key changes."""
    mutation = mutations.table(folder).get(key) or mutations.by_type(key, value)
    context = (*ALGORITHMS[algo], *mutation.context)
    start = before(context, folder, mutation.resumed)
    assert not start["error"] or key in FAILS_WITHOUT, f"{context}: {start['error']}"
    resumed = finished(folder) if mutation.resumed else None
    plus = "+" if value == {} else ""  # Hydra adds to a map with a plus sign
    changed = outcome([*context, f"{plus}{key}={mutation.value}"], folder / "run", resumed_from=resumed)
    return differences(start, changed)


def own_keys(algo: str, part: str) -> dict[str, Any]:
    """Keys of a part of the tree that no algorithm before this one has shown."""
    names = list(ALGORITHMS)
    seen = {key for name in names[: names.index(algo)] for key in keys(name)}
    return {
        key: value
        for key, value in keys(algo).items()
        if key not in seen and (key.startswith(f"{part}.") if part else "." not in key)
    }


@pytest.mark.slow
@pytest.mark.field("cfg/3")
@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("algo", ALGORITHMS)
def test_every_key_changes_something_or_is_refused(algo: str, part: str, folder: Path) -> None:
    silent = []
    for key, value in own_keys(algo, part).items():
        is_off = value is None and key.startswith(("callbacks.", "logger."))
        if key in INFORMATIONAL or is_off or key.rpartition(".")[2] in ("run_dir", "root_dir"):
            continue
        if not effect(algo, key, value, folder):
            silent.append(key)
    shutil.rmtree(folder / "elsewhere", ignore_errors=True)
    assert silent == []


@pytest.mark.slow
def test_the_same_command_twice_does_the_same(folder: Path) -> None:
    """Else every key would seem to have an effect."""
    for command in ALGORITHMS.values():
        assert differences(outcome(command, folder / "run"), outcome(command, folder / "run")) == []
