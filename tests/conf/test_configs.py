"""The yaml files: each composes and passes the check, defaults are the classes', the page knows every key."""

import re
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from hydra import compose as hydra_compose
from omegaconf import OmegaConf

from lit_rl.configuration import page
from lit_rl.configuration.build import built, built_all
from lit_rl.configuration.compose import Composition, Source, compose
from lit_rl.configuration.job import checked
from lit_rl.configuration.run_rules import LOGGER_PACKAGES
from lit_rl.configuration.signature import field_defaults, resolved, signature
from lit_rl.configuration.trainer_rules import FIXED
from lit_rl.configuration.tree import ABSENT, NODE_KEYS, joined, leaves, link
from lit_rl.configuration.validate import validate
from lit_rl.errors import ConfigError

CONF = Path(__file__).resolve().parents[2] / "conf"
SOURCE = Source(CONF)
GROUPS = (
    "data",
    "model",
    "reward",
    "optim",
    "schedule",
    "rollout",
    "checkpoint",
    "callbacks",
    "logger",
    "trainer",
    "policy_loss",
)
NEEDS = {  # what a choice cannot do without
    "data=parquet": ["data.train_files=rows.parquet"],
    "data=gsm8k": ["data.train_files=rows.parquet"],
    "data=sciknoweval": ["data.train_files=rows.parquet"],
    "data=reasoning_gym": ["data.task=chain_sum"],
    "data=chat_sft": ["algo=sft", "data.train_files=rows.parquet"],
    "model=hf": ["model.path=embedded"],
    "reward=reward_model": ["reward.reward_model.path=embedded"],
    "reward=judge": [
        "reward.reward_funcs.judge.base_url=http://localhost:8000/v1",
        "reward.reward_funcs.judge.model=any",
    ],
    "reward=environment": ["experiment=calculator"],
    "algo=sft": ["data=chat_sft", "data.train_files=rows.parquet"],
    "callbacks=test_time_search": ["algo=sdpo", "experiment=sdpo_test_time"],
    "data=question": ["algo=sdpo", "experiment=sdpo_test_time"],
    "callbacks=teacher_gap": ["algo=sdpo", "callbacks=[default,teacher_gap]"],
    "callbacks=rollout_dump": ["callbacks=[default,rollout_dump]"],
    "callbacks=push_to_hub": ["callbacks=[default,push_to_hub]"],
    "callbacks=from_file": [
        "callbacks=[default,from_file]",
        f"callbacks.from_file.path={Path(__file__).parents[1] / 'callbacks' / 'plugin_example.py'}",
        "callbacks.from_file.name=TeacherContextLog",
        "+callbacks.from_file.arguments.path=teacher.jsonl",
    ],
    "callbacks=reference_sync": ["callbacks=[default,reference_sync]", "algo.kl.beta=0.1"],
}
# Where a yaml file differs from its class on purpose: the presets of an algorithm, and file names.
ON_PURPOSE = {
    "reward.reward_model.enable": "reward_model: the choice itself",
    "reward.reward_model.path": "reward_model: must be given",
    "reward.reward_funcs.judge.base_url": "must be given",
    "reward.reward_funcs.judge.model": "must be given",
    "reward.reward_weights": "random: the true verifier is only logged; soft_overlong: its penalty",
    "data.train_files": "must be given, but for the embedded rows",
    "data.val_files": "as train_files",
    "callbacks.from_file.path": "must be given",
    "callbacks.from_file.name": "must be given",
    "algo.sampling.temperature": "grpo: TRL's GRPO document",
    "algo.policy_loss.loss_type": "averages as the paper of the algorithm does",
    "algo.policy_loss.epsilon_high": "dapo: clip-higher",
    "algo.policy_loss.importance_sampling_level": "gspo: its definition",
    "algo.advantage.adv_estimator": "rloo, reinforce_plus_plus, ppo: their definition",
    "algo.num_generations": "ppo: verl's document",
    "algo.batch.optimizer_batch_size": "ppo: verl's document",
    "algo.sampling.max_completion_length": "ppo: verl's document",
    "algo.advantage.scale_rewards": "as the paper of the algorithm does",
    "algo.mask_truncated_completions": "dapo: cut completions are left out",
    "algo.dynamic_sampling.max_refills": "dapo: its dynamic sampling",
    "algo.kl.beta": "grpo: TRL's GRPO document",
    "model.path": "the choice itself",
    "checkpoint.default_local_dir": "in the folder of the run",
}
PACKAGES = {"adamw_torchao": "torchao", "adamw_bnb": "bitsandbytes"}  # that need not be there
WITHOUT_ROLLOUTS = {"num_generations", "mask_truncated_completions", "sampling", "reward"}
NAMES_OF_THE_RUN = ("project", "name", "run_name", "experiment_name")  # of loggers
OUR_OWN = {  # keys beyond the specification, and why
    "reward.reward_model.custom_cls.path": "a reward model of yours",
    "reward.reward_model.custom_cls.name": "a reward model of yours",
    "reward.reward_model.trust_remote_code": "follows model.trust_remote_code",
    "callbacks.from_file.path": "a plug-in by file path",
    "callbacks.from_file.name": "a plug-in by file path",
    "callbacks.from_file.arguments": "a plug-in by file path",
    "rollout.engine.engine_kwargs": "vllm: in the specification under free-form keys",
    "rollout.engine.lora_as_adapter": "vllm: send adapters instead of merged weights",
    "data.source": "data=question: which built-in verifier",
    "data.train_size": "data=reasoning_gym: questions that are made",
    "data.val_size": "data=reasoning_gym: questions that are made",
    "callbacks.test_time_search.num_seeds": "repetitions of each question",
    "callbacks.test_time_search.max_dialogue_len": "multi_turn: what fits into the context",
    "callbacks.test_time_search.pass_rate_samples": "cost of the check of best of k",
    "callbacks.collapse_alarm.window": "steps averaged",
    "callbacks.collapse_alarm.drop": "fall that counts",
    "callbacks.collapse_alarm.max_rollbacks": "an end to rolling back",
    "algo.distillation.gate": "sdpo: off while the teacher is no better",
    "callbacks.teacher_gap.num_prompts": "cost of a measurement",
    "algo.ref.trust_remote_code": "algo.ref.path may lead to a model that brings code",
    "algo.reprompt.skip_successful_rows": "the literal reading of dont_reprompt_on_self_success",
    "algo.reprompt.feedback_source": "whose feedback, where reward and column both have some",
    "algo.policy_loss.ratio_cap": "cispo: the bound as TRL reads it",
    "algo.policy_loss.tau_pos": "sapo: the gate of its paper",
    "algo.policy_loss.tau_neg": "sapo: the gate of its paper",
    "algo.policy_loss.cov_ratio": "clip_cov, kl_cov: settings of their paper",
    "algo.policy_loss.cov_low": "clip_cov: settings of its paper",
    "algo.policy_loss.cov_high": "clip_cov: settings of its paper",
    "algo.policy_loss.kl_coef": "kl_cov: settings of its paper",
    "algo.critic.max_grad_norm": "ppo: the critic's gradient is capped by itself",
}


UNBUILT = {name for name in ("reasoning_gym",) if find_spec(name) is None}  # as a choice is called
MISSING = {name for name in LOGGER_PACKAGES if find_spec(name) is None}


def choices(group: str) -> list[str]:
    return sorted(path.stem for path in (CONF / group).glob("*.yaml"))


@cache
def composed(group: str, choice: str) -> Composition:
    return compose(SOURCE, line(group, choice))


@cache
def alone(group: str, choice: str) -> Any:
    """What the file of a choice says by itself."""
    with SOURCE.opened():
        return OmegaConf.to_container(hydra_compose(f"{group}/{choice}"), resolve=False)


def line(group: str, choice: str) -> list[str]:
    """A command line that makes this choice."""
    if group == "experiment":
        return [f"experiment={choice}"]
    word = f"{group}=[{choice}]" if group == "logger" else f"{group}={choice}"
    needs = NEEDS.get(f"{group}={choice}", [])
    algo = [] if any(need.startswith("algo=") for need in needs) or group == "algo" else ["algo=grpo"]
    return [*algo, *([] if any(need.startswith(f"{group}=") for need in needs) else [word]), *needs]


EVERY = [(group, choice) for group in (*GROUPS, "algo", "experiment", "debug") for choice in choices(group)]


@pytest.mark.field("cfg/6")
@pytest.mark.parametrize(("group", "choice"), EVERY)
def test_every_choice_composes_and_passes_the_check(group: str, choice: str) -> None:
    composition = composed(group, choice)
    package = PACKAGES.get(choice)
    if choice in MISSING:
        with pytest.raises(ConfigError, match=f"needs the package {choice}"):
            validate(composition.tree, composition.baseline, composition.choices)
    elif package is not None and find_spec(package) is None:
        with pytest.raises(ConfigError, match=rf"optim\._target_ .*the package {package} is not installed"):
            validate(composition.tree, composition.baseline, composition.choices)
    elif choice == "gpu" and not torch.cuda.is_available():
        with pytest.raises(ConfigError, match="needs a GPU"):
            validate(composition.tree, composition.baseline, composition.choices)
    elif choice == "vllm" and find_spec("vllm") is None:
        with pytest.raises(ConfigError, match="needs the package vllm"):
            validate(composition.tree, composition.baseline, composition.choices)
    else:
        validate(composition.tree, composition.baseline, composition.choices)


@pytest.mark.parametrize("group", ["callbacks", "logger", "trainer", "optim", "schedule", "reward", "data"])
def test_every_choice_of_a_cheap_group_can_be_built(group: str, tmp_path: Path) -> None:
    missing = {choice for choice, package in PACKAGES.items() if find_spec(package) is None}
    for choice in set(choices(group)) - {"gpu"} - MISSING - UNBUILT - missing:
        job = checked(SOURCE, [*line(group, choice), f"run_dir={tmp_path}"])
        node = job.tree[group]
        parts = built_all(node) if group in ("callbacks", "logger") else [built(node)]
        assert all(part is not None for part in parts)


def nodes(tree: dict[str, Any], key: str = "") -> list[tuple[str, dict[str, Any]]]:
    """Every node with a constructor of ours, by dotted key."""
    found = []
    for name, value in tree.items():
        if isinstance(value, dict):
            here = joined(key, name)
            if str(value.get("_target_", "")).startswith("lit_rl."):
                found.append((here, value))
            found += nodes(value, here)
    return found


@pytest.mark.parametrize(("group", "choice"), [(g, c) for g, c in EVERY if g in (*GROUPS, "algo")])
def test_defaults_in_yaml_are_those_of_the_class(group: str, choice: str) -> None:
    for key, node in nodes(alone(group, choice)):
        target = resolved(node["_target_"])
        defaults = {name: p.default for name, p in signature(target).parameters.items()}
        defaults.update(field_defaults(target))
        for name, value in node.items():
            here = joined(key, name)
            is_told = (
                name in NODE_KEYS or isinstance(value, dict) or (isinstance(value, str) and "${" in value)
            )
            if is_told or here in ON_PURPOSE or (key.split(".")[0] == "data" and choice == "chat_sft"):
                continue
            default = defaults.get(name, ABSENT)
            own = list(default) if isinstance(default, tuple) else default
            assert value == own or (own is None and value in ([], {})), f"{here}: {value!r}, class {own!r}"


def test_every_argument_of_our_classes_has_its_key() -> None:
    """A key that is missing in yaml could only be set with a plus sign."""
    built_elsewhere = {"optimizer", "scheduler", "policy", "total_steps", "root_dir", "run_dir", "save_dir"}
    built_elsewhere.add("optim")  # of the critic: conf/critic
    missing = []
    for group, choice in [(g, c) for g, c in EVERY if g in (*GROUPS, "algo")]:
        for key, node in nodes(alone(group, choice)):
            names = signature(resolved(node["_target_"])).parameters
            given = {*node, *built_elsewhere, *(WITHOUT_ROLLOUTS if choice == "sft" else ())}
            missing += [joined(key, name) for name in names if name not in given]
    assert sorted(set(missing) - {"logger.csv.flush_logs_every_n_steps"}) == []


@pytest.mark.parametrize("optim", choices("optim"))
def test_every_key_of_model_optim_and_schedule_is_the_critic_s_too(optim: str) -> None:
    """And follows the policy's."""
    tree = compose(SOURCE, ["algo=ppo", f"optim={optim}"]).raw
    for name in ("model", "optim", "schedule"):
        own = tree["algo"]["critic"][name]
        following = {key: value for key, value in leaves(own) if value != f"${{{name}.{key}}}"}
        assert dict(leaves(own)).keys() == dict(leaves(tree[name])).keys()
        assert following.keys() <= {"lr"}, "but for the rate of the embedded run"


def test_the_page_is_up_to_date() -> None:
    """Write it anew with `python -m lit_rl.configuration.page conf`."""
    assert (CONF / "README.md").read_text() == page.page(SOURCE)


def test_the_page_knows_every_choice() -> None:
    for group, listed in page.GROUPS:
        assert sorted(listed) == choices(group)


def test_no_key_exists_that_is_not_on_the_page() -> None:
    known = page.keys(SOURCE)
    for group, choice in EVERY:
        for key, value in leaves(composed(group, choice).tree):
            is_whole = link(value) is not None or key in ("logger", "callbacks")
            is_off = value is None and key.startswith(("callbacks.", "logger."))
            is_folder = key.rpartition(".")[2] in ("run_dir", "root_dir", "save_dir")
            is_folder |= group == "logger" and key.rpartition(".")[2] in NAMES_OF_THE_RUN
            is_entry = any(key.startswith(f"{name}.") for name in known)
            assert key in known or is_whole or is_off or is_folder or is_entry, key


def test_every_key_of_ours_is_a_key_of_the_specification(shared_folder: Path) -> None:
    text = (shared_folder / "spec" / "config.md").read_text()
    fixed = {f"trainer.{name}" for name in FIXED} | OUR_OWN.keys()
    listed = set(re.findall(r"`([a-z_]+(?:\.[a-z_0-9]+)+)`", text)) | set(
        re.findall(r"`([a-z_0-9]+)` = ", text)
    )
    listed |= {
        f"rollout.val_kwargs.{key.rsplit('.', 1)[1]}" for key in listed if key.startswith("algo.sampling.")
    }
    mirrored = ("model.", "schedule.")
    listed |= {f"algo.critic.{key}" for key in listed if key.startswith(mirrored)}
    open_nodes = ("optim.", "logger.", "reward.reward_funcs.", "rollout.engine.", "algo.critic.optim.")
    unknown = [
        key for key in page.keys(SOURCE) if key not in listed | fixed and not key.startswith(open_nodes)
    ]
    assert unknown == []
