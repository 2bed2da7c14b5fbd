"""One step of staleness: the next rollout is under way while this one trains, and every row says so."""

from collections.abc import Iterator
from typing import Any

import lightning as L
import pytest
import torch
from rollout.sglang_stand_in import StandInSGLang

from lit_rl import GRPO, PromptDataModule, Sampling, load_policy
from lit_rl.callbacks.rollout import RolloutGeneration
from lit_rl.hooks import RLCallback
from lit_rl.objectives.rollout_correction import RolloutCorrection
from lit_rl.rollout.sglang import SGLangServer

ROWS = [{"prompt": f"{a}+{a + 1}="} for a in range(10, 30)]


class Story(RLCallback):
    """What happened, in order; the rows and the metrics of each step."""

    def __init__(self, server: StandInSGLang) -> None:
        self.server = server
        self.rows: list[Any] = []
        self.metrics: list[dict[str, float]] = []
        self.served_before_update: list[int] = []

    def on_rollout_scored(self, trainer: Any, pl_module: Any, *, rollout: Any, **payload: Any) -> None:
        self.rows.append(rollout)
        if trainer.global_step < 3:
            for callback in trainer.callbacks:
                if isinstance(callback, RolloutGeneration):
                    callback.lookahead.wait()
        self.served_before_update.append(len(self.server.served))

    def on_update_end(self, trainer: Any, pl_module: Any, *, step: int, metrics: Any, **payload: Any) -> None:
        self.metrics.append(dict(metrics))


@pytest.fixture
def server() -> Iterator[StandInSGLang]:
    server = StandInSGLang()
    yield server
    server.stop()


def by_place(completions: list[str], **columns: Any) -> list[float]:
    return [float(i % 2) for i in range(len(completions))]


def told(server: StandInSGLang, staleness: int, steps: int = 4, **settings: Any) -> Story:
    """The story of a run."""
    L.seed_everything(3, verbose=False)
    model = GRPO(
        policy=load_policy("embedded"),
        reward=[by_place],
        num_generations=4,
        sampling=Sampling(max_completion_length=3),
        rollout_correction=RolloutCorrection(rollout_is=True, rollout_is_threshold=2.0),
    )
    server.served.clear()
    story = Story(server)
    rollout = RolloutGeneration(
        SGLangServer(base_url=server.url),
        calculate_log_probs=True,
        check_every_n_steps=1,
        max_logp_gap=1e-3,
        max_staleness=staleness,
    )
    data = PromptDataModule(train_files=ROWS, val_files=ROWS[:2], train_batch_size=2, max_prompt_length=32)
    L.Trainer(
        accelerator="cpu",
        max_steps=steps,
        callbacks=[rollout, story],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
        **{"limit_val_batches": 0} | settings,
    ).fit(model, datamodule=data)
    story.weights = torch.cat([p.detach().flatten() for p in model.policy.parameters()])
    return story


def test_rows_are_one_update_old_from_the_second_step_on(server: StandInSGLang) -> None:
    story = told(server, 1)
    versions = [rows.policy_version.unique().tolist() for rows in story.rows]
    assert versions == [[0], [0], [1], [2]]
    stale = [metrics["rollout/stale_tokens"] for metrics in story.metrics]
    assert stale[0] == 0 and stale[1:] == [metrics["rollout/tokens"] for metrics in story.metrics[1:]]
    assert story.served_before_update == [16, 24, 32, 32], "the next step's rows, before this one's update"
    assert story.metrics[0]["rollout_is/max_ratio"] == pytest.approx(1.0, abs=1e-3)
    assert abs(story.metrics[2]["rollout_is/max_ratio"] - 1) > 1e-6, "the correction has something to do"


def test_the_prompts_and_draws_are_those_of_a_run_without(server: StandInSGLang) -> None:
    ahead, usual = told(server, 1), told(server, 0)
    for a, b in zip(ahead.rows, usual.rows, strict=True):
        assert torch.equal(a.prompt_row, b.prompt_row) and torch.equal(a.prompt_ids, b.prompt_ids)
    for step in (0,):
        assert torch.equal(ahead.rows[step].completion_ids, usual.rows[step].completion_ids)
    assert [rows.policy_version.unique().item() for rows in usual.rows] == [0, 1, 2, 3]


def test_the_same_run_twice_is_the_same(server: StandInSGLang) -> None:
    first, second = told(server, 1, steps=3), told(server, 1, steps=3)
    assert torch.equal(first.weights, second.weights)


def test_validation_in_between_is_by_the_current_policy(server: StandInSGLang) -> None:
    told(server, 1, steps=2, limit_val_batches=1, val_check_interval=1, check_val_every_n_epoch=None)
    assert server.version.endswith("-2")
