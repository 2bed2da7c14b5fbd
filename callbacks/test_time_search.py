"""TestTimeSearch: SDPO on one question until its first success, and the search over many questions."""

import copy
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import torch
from torch import Tensor

from lit_rl.algorithms.base import RLModule
from lit_rl.batch import RolloutBatch
from lit_rl.callbacks.search_baselines import best_of_k, first, multi_turn, successes
from lit_rl.data.question import QuestionDataModule
from lit_rl.discovery import BEST_OF_K, MULTI_TURN, SDPO, Journal, Series, draw, markdown, table, verdict
from lit_rl.errors import ConfigError
from lit_rl.hooks import RLCallback
from lit_rl.seeding import derived_seed


class TestTimeSearch(RLCallback):
    """Lets SDPO attempt, score and distil on one question, and ends at the first success or the budget.

    Every training starts from the same weights: policy, teacher and whatever else moves are put back to how
    the first training found them, so that nothing learned on one question helps with another and the stored
    model stays as it is. A step is a round of algo.num_generations attempts. Before the first round, the
    baselines are run with those weights. Source: Huebotter et al., Reinforcement Learning via
    Self-Distillation, arXiv 2601.20802, test-time self-distillation.

    Args:
        max_attempts: budget of each method on a question, a multiple of algo.num_generations.
        baselines: what else is run: best_of_k (independent samples) and multi_turn (algo.num_generations
            dialogues in which the model sees its attempts and the feedback on them).
        num_seeds: repetitions of each question.
        max_dialogue_len: tokens of a dialogue of multi_turn; its oldest turns are left out.
        pass_rate_samples: further samples for each series, which estimate the pass rate p that best of k is
            checked against, 1 - (1 - p)^k; 0 leaves the check out.

    Raises:
        ConfigError: a value is out of range.
    """

    def __init__(
        self,
        max_attempts: int = 256,
        baselines: list[str] = [BEST_OF_K, MULTI_TURN],  # noqa: B006 (never changed)
        num_seeds: int = 1,
        max_dialogue_len: int = 10240,
        pass_rate_samples: int = 256,
    ) -> None:
        for name, value, low in (
            ("max_attempts", max_attempts, 1),
            ("num_seeds", num_seeds, 1),
            ("max_dialogue_len", max_dialogue_len, 1),
            ("pass_rate_samples", pass_rate_samples, 0),
        ):
            if value < low:
                raise ConfigError(f"callbacks.test_time_search.{name} must be >= {low} (found {value!r}).")
        if not {*baselines} <= {BEST_OF_K, MULTI_TURN} or len({*baselines}) < len(baselines):
            raise ConfigError(
                f"callbacks.test_time_search.baselines must be a list out of {[BEST_OF_K, MULTI_TURN]} "
                f"(found {baselines!r})."
            )
        self.max_attempts, self.baselines = max_attempts, list(baselines)
        self.num_seeds, self.max_dialogue_len = num_seeds, max_dialogue_len
        self.pass_rate_samples = pass_rate_samples
        self.attempts: dict[str, int | None] = {}
        self.found: str | None = None
        self.pass_count = (0, 0)
        self._made = 0
        self._start: tuple[dict[str, Tensor], dict[str, Any]] | None = None

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        module: Any = pl_module
        if MULTI_TURN in self.baselines:
            module.longest_other_prompt = max(module.longest_other_prompt, self.max_dialogue_len)

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.attempts, self.found, self.pass_count, self._made = {SDPO: None}, None, (0, 0), 0
        if self._start is None:
            self._start = _state(pl_module)
        else:
            _put_back(pl_module, *self._start)

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: RolloutBatch, batch_idx: int
    ) -> None:
        if trainer.global_step > 0 or not self.baselines:
            return
        module: Any = pl_module
        if BEST_OF_K in self.baselines:
            self.attempts[BEST_OF_K] = best_of_k(trainer, module, batch, self.max_attempts)
            if self.pass_rate_samples:
                right = successes(trainer, module, batch, self.pass_rate_samples)
                self.pass_count = (right, self.pass_rate_samples)
        if MULTI_TURN in self.baselines:
            self.attempts[MULTI_TURN] = multi_turn(
                trainer, module, batch, self.max_attempts, self.max_dialogue_len
            )

    def on_rollout_scored(
        self, trainer: L.Trainer, pl_module: L.LightningModule, *, rollout: RolloutBatch, **payload: Any
    ) -> None:
        module: Any = pl_module
        assert rollout.rewards is not None
        place = first(module.reprompt.is_success(rollout.rewards).tolist())
        if place is not None:
            self.attempts[SDPO] = self._made + place
            self.found = module.samples(rollout)[place - 1].completion
            trainer.should_stop = True
        self._made += len(rollout)


def search(
    new_trainer: Callable[[int], L.Trainer],
    module: RLModule,
    datamodule: QuestionDataModule,
    *,
    folder: Path,
    seed: int,
    settings: dict[str, Any],
) -> dict[str, float]:
    """Look for a first success on every question, with each seed, and report.

    A series is a training of its own: a new trainer, optimizer and schedule over one row. Its noise depends
    on `seed`, the number of the repetition and the question only. Finished series are kept in
    `discovery.json`, so that the same call goes on where it was interrupted; an unfinished one begins anew.

    Args:
        new_trainer: from a number of steps to a trainer whose callbacks hold a `TestTimeSearch`.
        module: SDPO.
        datamodule: the questions.
        folder: takes `discovery.json`, `discovery.md` and `discovery.png`.
        seed: of the run.
        settings: what the series depend on.

    Returns:
        `discovery/METHOD`, the share found within the budget.
    """
    journal, lines = Journal(folder, settings), logging.getLogger("lightning.pytorch")
    level = lines.level
    lines.setLevel(logging.WARNING)  # no lines of the trainer for each of hundreds of series
    trainer = new_trainer(1)
    seeker = next(c for c in trainer.callbacks if isinstance(c, TestTimeSearch))  # type: ignore[attr-defined]
    num_questions = datamodule.num_rows()["train"]
    steps = seeker.max_attempts // module.num_generations
    try:
        for number in range(seeker.num_seeds):
            for row in range(num_questions):
                if journal.has(number, row):
                    continue
                L.seed_everything(derived_seed(seed, "search", number, row) % 2**32, verbose=False)
                new_trainer(steps).fit(module, datamodule=datamodule.only(row))
                right, drawn = seeker.pass_count
                journal.add(Series(number, row, dict(seeker.attempts), seeker.found, right, drawn))
                print(_line(journal.series[-1], num_questions, seeker.num_seeds), flush=True)
    finally:
        lines.setLevel(level)
    wanted = [one for one in journal.series if one.seed < seeker.num_seeds]
    return _report(wanted, seeker.max_attempts, journal, folder)


def _report(series: list[Series], max_attempts: int, journal: Journal, folder: Path) -> dict[str, float]:
    rows = table(series, max_attempts)
    sentences = verdict(series, rows)
    text = markdown(series, rows, sentences)
    journal.write({"table": rows, "verdict": sentences})
    (folder / "discovery.md").write_text(text, "utf-8")
    draw(series, max_attempts, folder / "discovery.png")
    print(f"\n{text}", flush=True)
    return {f"discovery/{method}": rows[-1][method]["mean"] for method in series[0].attempts}


def _line(series: Series, num_questions: int, num_seeds: int) -> str:
    made = ", ".join(f"{name} {n if n is not None else 'none'}" for name, n in series.attempts.items())
    found = f", found {series.found!r}" if series.found is not None else ""
    seed = f", seed {series.seed + 1} of {num_seeds}" if num_seeds > 1 else ""
    return f"question {series.row + 1} of {num_questions}{seed}: first success at attempt {made}{found}"


def _state(module: Any) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Copies of the weights that train and of every moving part."""
    weights = {name: p.detach().clone() for name, p in module.policy.named_parameters() if p.requires_grad}
    return weights, {name: copy.deepcopy(part.state_dict()) for name, part in module.stateful.items()}


@torch.no_grad()
def _put_back(module: Any, weights: dict[str, Tensor], parts: dict[str, Any]) -> None:
    for name, parameter in module.policy.named_parameters():
        if name in weights:
            parameter.copy_(weights[name])
    for name, part in module.stateful.items():
        part.load_state_dict(copy.deepcopy(parts[name]))
    module.optimizer_steps = 0
