"""Whole runs with an environment: rewards, feedback, validation, answers, tools in the prompt."""

import json
from pathlib import Path
from typing import Any

import lightning as L
import pyarrow.parquet as pq
import pytest
import torch
from conversing import Retry

from lit_rl import GRPO, SDPO, PromptDataModule, RewardSum, Sampling, load_policy, tasks
from lit_rl.callbacks.rollout import RolloutGeneration
from lit_rl.callbacks.rollout_dump import RolloutDump
from lit_rl.data.chat import load_tokenizer
from lit_rl.errors import ConfigError
from lit_rl.hooks import RLCallback
from lit_rl.objectives.reprompt import Reprompt
from lit_rl.rescore import dumped_steps, rescored
from lit_rl.rewards.by_source import BySource
from lit_rl.rewards.environment import EnvironmentReward
from lit_rl.rollout.environment import Environment
from lit_rl.rollout.tools import ToolEnvironment

pytestmark = pytest.mark.filterwarnings("ignore:No reward function")


class Kept(RLCallback):
    """The rows and metrics of each step."""

    def __init__(self) -> None:
        self.rows: list[Any] = []
        self.metrics: list[dict[str, float]] = []

    def on_update_end(self, trainer: Any, pl_module: Any, *, step: int, metrics: Any, **_: Any) -> None:
        self.rows.append(pl_module.last_rollout)
        self.metrics.append(dict(metrics))


def trainer_of(folder: Path, environment: Environment, *callbacks: Any, **settings: Any) -> L.Trainer:
    rollout = RolloutGeneration(environment=environment, check_every_n_steps=1, max_logp_gap=1e-4)
    return L.Trainer(
        accelerator="cpu",
        callbacks=[rollout, *callbacks],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
        default_root_dir=folder,
        **{"max_steps": 2, "limit_val_batches": 0, **settings},
    )


def module_of(reward: Any = None, kind: Any = GRPO, **settings: Any) -> GRPO:
    return kind(
        policy=load_policy("embedded"),
        reward=RewardSum({"environment": EnvironmentReward()}) if reward is None else reward,
        num_generations=4,
        sampling=Sampling(max_completion_length=24),
        **settings,
    )


def data(**settings: Any) -> PromptDataModule:
    return PromptDataModule(
        **{"train_batch_size": 4, "val_max_samples": 8, "max_prompt_length": 40, **settings}
    )


def test_the_environment_s_reward_is_a_column_and_trains(tmp_path: Path) -> None:
    L.seed_everything(1, verbose=False)
    module, kept = module_of(), Kept()
    before = torch.cat([p.detach().flatten().clone() for p in module.policy.parameters()])
    trainer_of(tmp_path, Retry(), kept).fit(module, datamodule=data())
    for rows in kept.rows:
        given = [talk.reward for talk in rows.conversations]
        own = rows.rewards_per_func[:, 0].tolist()
        assert all(a == b or (a is None and b != b) for a, b in zip(given, own, strict=True))
        lost = rows.rewards.isnan()
        assert not rows.completion_mask[lost].any(), "no reward, no part in the loss"
    rewards = torch.cat([rows.rewards for rows in kept.rows])
    assert {0.0, 1.0} <= set(rewards[~rewards.isnan()].tolist()) and bool(rewards.isnan().any())
    assert all(metrics["rollout/turns"] > 1 for metrics in kept.metrics)
    assert all(metrics["rollout/logp_gap_max"] < 1e-4 for metrics in kept.metrics)
    after = torch.cat([p.detach().flatten() for p in module.policy.parameters()])
    assert not torch.equal(before, after)


def test_reward_functions_see_the_whole_conversation(tmp_path: Path) -> None:
    seen: list[Any] = []

    def by_trl(prompts: list, completions: list, completion_ids: list, **columns: Any) -> list[float]:
        seen.extend(zip(completions, completion_ids, strict=True))
        return [float(i % 2) for i in range(len(completions))]

    def by_verl(data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None) -> float:
        seen.append(solution_str)
        return 0.0

    reward = RewardSum.of([by_trl, by_verl])
    reward.functions["right"] = BySource()
    reward = RewardSum(reward.functions)
    kept = Kept()
    trainer_of(tmp_path, Retry(), kept, max_steps=1).fit(module_of(reward), datamodule=data())
    (rows,) = kept.rows
    messages, texts = seen[: len(rows)], seen[len(rows) :]
    for b, (completion, ids) in enumerate(messages):
        assert completion == rows.conversations[b].messages
        assert ids == rows.completion_ids[b, : int(rows.completion_len[b])].tolist()
        assert texts[b] == "".join(message["content"] for message in completion)
        answer = rows.columns["reward_model"][b]["ground_truth"]
        assert rows.rewards_per_func[b, 2] == float(completion[-1]["content"] == answer), "of the last turn"
        assert (rows.feedback[b] or "").startswith(rows.conversations[b].feedback or "")


def test_a_teacher_is_shown_the_environment_s_feedback(tmp_path: Path) -> None:
    kept = Kept()
    settings = {"reprompt": Reprompt(include_environment_feedback=True, use_successful_as_teacher=False)}
    trainer_of(tmp_path, Retry(), kept).fit(module_of(kind=SDPO, **settings), datamodule=data())
    rows = kept.rows[0]
    taught = rows.self_distillation_mask.nonzero()[:, 0].tolist()
    assert taught == [b for b, talk in enumerate(rows.conversations) if talk.feedback]
    decode = load_tokenizer("embedded").decode
    width = rows.teacher_prompt_ids.shape[1]
    for b in taught:
        shown = decode(rows.teacher_prompt_ids[b, width - int(rows.teacher_prompt_len[b]) :].tolist())
        assert rows.conversations[b].feedback in shown


def test_validation_and_answers_are_conversations_too(tmp_path: Path) -> None:
    reward = RewardSum({"by_source": BySource()})
    settings = {"limit_val_batches": 1.0, "max_steps": -1, "max_epochs": 1}
    alone = tasks.answer(
        trainer_of(tmp_path, Retry(), **settings), module_of(reward), data(val_max_samples=64), is_scored=True
    )
    rows = pq.read_table(tmp_path / "responses.parquet").to_pylist()
    assert len(rows) == 64 and sum("wrong" in row["responses"][0] for row in rows) > 10
    assert alone["val/completion_len"] > 6
    trainer = trainer_of(tmp_path / "unscored", Retry(), **settings)
    tasks.answer(trainer, module_of(reward), data(val_max_samples=64), is_scored=False)
    again = pq.read_table(tmp_path / "unscored" / "responses.parquet").to_pylist()
    assert [row["responses"] for row in again] == [row["responses"] for row in rows]


def test_dumped_conversations_score_the_same_again(tmp_path: Path) -> None:
    kept, dump = Kept(), RolloutDump(str(tmp_path / "rollouts"))
    reward = RewardSum({"environment": EnvironmentReward(), "by_source": BySource()})
    trainer_of(tmp_path, Retry(), kept, dump).fit(module_of(reward), datamodule=data())
    keys = {"prompt_key": "prompt", "data_source_key": "data_source", "reward_model_key": "reward_model"}
    for (_, rows), live in zip(dumped_steps(tmp_path / "rollouts"), kept.rows, strict=True):
        assert rescored(rows, reward, keys) == pytest.approx(live.rewards.tolist(), nan_ok=True)
        for b, row in enumerate(rows):
            assert row["foreign"] == live.foreign_mask[b].nonzero()[:, 0].tolist()
            assert row["messages"] == json.loads(json.dumps(live.conversations[b].messages))


def search(query: str) -> str:
    """Looks something up.

    Args:
        query: what is looked up
    """
    return query


LISTING = (
    "{% if tools is defined and tools %}{% for t in tools %}{{ t.function.name }} {% endfor %}{% endif %}"
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def test_the_template_is_shown_the_tools_before_prompts_are_measured(tmp_path: Path) -> None:
    tokenizer = load_tokenizer("embedded")
    tokenizer.chat_template = LISTING
    own = data(tokenizer=tokenizer, filter_overlong_prompts=True, max_prompt_length=16)
    with pytest.raises(Exception, match="none of the"):
        trainer_of(tmp_path, ToolEnvironment([search])).fit(module_of(), datamodule=own)
    own = data(tokenizer=tokenizer, chat_template_kwargs={"tools": [1]})
    with pytest.raises(ConfigError, match=r"data\.chat_template_kwargs\.tools"):
        trainer_of(tmp_path, ToolEnvironment([search])).fit(module_of(), datamodule=own)
    kept, own = Kept(), data(tokenizer=tokenizer, filter_overlong_prompts=True)
    trainer_of(tmp_path, ToolEnvironment([search]), kept, max_steps=1).fit(
        module_of([lambda completions, **_: [0.0] * len(completions)]), datamodule=own
    )
    assert tokenizer.decode(kept.rows[0].prompt_ids[0]).startswith("search <|user|>")
