"""RolloutGeneration: fills in completions before a step is trained or validated, and owns the engine."""

from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any, ClassVar

import lightning as L

from lit_rl.algorithms.base import RLModule
from lit_rl.batch import RolloutBatch
from lit_rl.callbacks.engine_check import EngineCheck
from lit_rl.callbacks.lookahead import Lookahead
from lit_rl.data.following import following_ids
from lit_rl.distributed import world_size
from lit_rl.errors import ConfigError
from lit_rl.hooks import emit
from lit_rl.models.image_check import ROWS, check_images
from lit_rl.models.load import end_token_ids
from lit_rl.models.roles import named_base_tensors
from lit_rl.models.sharding import gathered
from lit_rl.rollout.conversation import Conversations
from lit_rl.rollout.engine import RolloutEngine
from lit_rl.rollout.environment import Environment
from lit_rl.rollout.hf import HFEngine
from lit_rl.rollout.sampling import Sampling
from lit_rl.rollout.scoring import Scores
from lit_rl.seeding import derived_seed


@dataclass(frozen=True)
class ValSampling:
    """How validation completions are drawn; null is as in training (source: verl `rollout.val_kwargs`).

    Args:
        n: completions per prompt.
        temperature: 0 is greedy.
        top_p: as in `algo.sampling`.
        top_k: as in `algo.sampling`.
        min_p: as in `algo.sampling`.
        max_completion_length: as in `algo.sampling`.
        repetition_penalty: as in `algo.sampling`.
        ignore_eos: as in `algo.sampling`.
        stop_token_ids: as in `algo.sampling`.
        stop: as in `algo.sampling`.
        guided_decoding_regex: as in `algo.sampling`.
        generation_kwargs: as in `algo.sampling`.

    Raises:
        ConfigError: n is below 1, or several equal greedy completions are asked for.
    """

    key: ClassVar[str] = "rollout.val_kwargs"

    n: int = 1
    temperature: float | None = 0.0
    top_p: float | None = 1.0
    top_k: int | None = 0
    min_p: float | None = None
    max_completion_length: int | None = None
    repetition_penalty: float | None = None
    ignore_eos: bool | None = None
    stop_token_ids: list[int] | None = None
    stop: list[str] | None = None
    guided_decoding_regex: str | None = None
    generation_kwargs: dict[str, Any] | None = None

    def __post_init__(self) -> None:
        if self.n < 1:
            raise ConfigError(f"{self.key}.n must be >= 1 (found {self.n!r}).")
        if self.temperature == 0 and self.n > 1:
            raise ConfigError(
                f"{self.key}.n must be 1 when {self.key}.temperature is 0 (found {self.n}): greedy "
                f"completions of one prompt are all equal; set a temperature above 0."
            )

    def over(self, training: Sampling) -> Sampling:
        """The training settings with everything replaced that is not null here."""
        own = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "n"}
        return replace(training, **{name: value for name, value in own.items() if value is not None})


class RolloutGeneration(L.Callback):
    """Writes the completions of each training and validation batch with the current policy.

    Weights go to the engine before a generation and only when the policy has changed since. A batch that
    already carries completions is left alone.

    Args:
        engine: writes completions; None is `HFEngine`.
        val_kwargs: how validation completions are drawn.
        calculate_log_probs: keep the engine's log-probabilities, for `algo.rollout_correction` and the metric
            `rollout_is/kl`; else they are dropped.
        check_every_n_steps: steps between checks of the engine against the policy; 0 is off.
        max_logp_gap: see `EngineCheck`.
        environment: answers the policy's turns; None: a completion is one turn.
        max_staleness: 1: write the completions of the next step while this step trains, with the policy as it
            was before; for engines on servers, with `algo.rollout_correction.rollout_is`. The first step
            after a start or a resume is of the policy itself. 0 is off.

    Raises:
        ConfigError: a value is out of range.
    """

    def __init__(
        self,
        engine: RolloutEngine | None = None,
        val_kwargs: ValSampling | None = None,
        calculate_log_probs: bool = False,
        check_every_n_steps: int = 50,
        max_logp_gap: float = 0.1,
        max_staleness: int = 0,
        environment: Environment | None = None,
    ) -> None:
        if max_staleness not in (0, 1):
            raise ConfigError(f"rollout.max_staleness must be 0 or 1 (found {max_staleness!r}).")
        self.engine = engine or HFEngine()
        self.check = EngineCheck(check_every_n_steps, max_logp_gap)
        self.calculate_log_probs = calculate_log_probs
        self.val_kwargs = val_kwargs or ValSampling()
        self.environment = environment
        self.max_staleness, self.lookahead = max_staleness, Lookahead()
        self._is_bound = False

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        assert isinstance(pl_module, RLModule)
        if pl_module.sampling.temperature == 0:
            raise ConfigError(
                "algo.sampling.temperature must be > 0 (found 0): greedy completions have no log-probability "
                "to learn from; for greedy validation set rollout.val_kwargs.temperature=0."
            )
        if _has_images(trainer) and not self.engine.reads_images:
            raise ConfigError(
                "data.image_key: the data have a column of images, and rollout.engine is a "
                f"{type(self.engine).__name__}, which gets text alone; use rollout=hf, or set "
                "data.image_key=null to train on the text alone."
            )
        if _has_images(trainer) and self.environment is not None:
            raise ConfigError(
                "rollout.environment and a column of images (data.image_key) exclude each other: turns after "
                "the first would not see them; set one of them to null."
            )

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        assert isinstance(pl_module, RLModule)
        if _has_images(trainer):
            prompts = trainer.datamodule.first_rows(ROWS).to(pl_module.device)  # type: ignore[attr-defined]
            with gathered(pl_module.policy):
                check_images(pl_module.policy, prompts)

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: RolloutBatch, batch_idx: int
    ) -> None:
        assert isinstance(pl_module, RLModule)
        if batch.completion_ids is not None:
            return
        self._announce(pl_module, batch)
        with pl_module.clock("generate"):
            written = self.lookahead.take(batch)
            rollout = written or self.generate(
                pl_module, batch, pl_module.sampling, pl_module.num_generations, purpose="train"
            )
            if self.max_staleness:
                self.look_ahead(trainer, pl_module)
        pl_module.set_rollout(
            rollout, more=partial(self.generate, pl_module), score=partial(self.score, pl_module)
        )
        micro_steps = pl_module.batch.micro_steps(len(rollout), world_size())
        emit(
            pl_module,
            "on_generation_batch_built",
            generate_every=micro_steps * pl_module.num_iterations,
            steps_per_generation=micro_steps,
            rollout=rollout,
        )

    def on_validation_batch_start(
        self,
        trainer: L.Trainer,
        pl_module: L.LightningModule,
        batch: RolloutBatch,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        assert isinstance(pl_module, RLModule)
        if batch.completion_ids is not None:
            return
        with pl_module.clock("validate"):
            sampling = self.val_kwargs.over(pl_module.sampling)
            rollout = self.generate(pl_module, batch, sampling, self.val_kwargs.n, purpose="validate")
        pl_module.set_rollout(rollout)

    def generate(
        self,
        pl_module: RLModule,
        prompts: RolloutBatch,
        sampling: Sampling,
        num_generations: int,
        purpose: str,
    ) -> RolloutBatch:
        """Completions for these prompts by the current policy.

        Args:
            pl_module: holds policy, chat template and seed.
            prompts: P rows without completions.
            sampling: how to draw.
            num_generations: G.
            purpose: keeps the noise of training and validation apart.
        """
        self.make_current(pl_module)
        write = partial(
            self.engine.generate,
            seed=derived_seed(pl_module.seed, purpose),
            step=pl_module.step,
            on_progress=self._progress(pl_module.trainer),
        )
        if self.environment is not None:
            write = partial(self.conversations(pl_module, self.environment), write=write)
        with gathered(*([pl_module.policy] if self.engine.writes_with_policy else [])):
            rollout = write(prompts.to(pl_module.device), num_generations=num_generations, sampling=sampling)
        self.engine.sleep()
        is_checked = purpose == "train" and self.check.is_due(pl_module.step)
        if self.calculate_log_probs or is_checked:
            return rollout
        return replace(rollout, rollout_logps=None)

    def conversations(self, pl_module: RLModule, environment: Environment) -> Conversations:
        """What has the policy and the environment write in turn."""
        chat, positions = pl_module.chat, _positions(pl_module)
        lengths = [length for length in (positions, self._max_tokens(pl_module)) if length is not None]
        ends = end_token_ids(pl_module.policy, chat.tokenizer)
        return Conversations(
            environment,
            chat=chat,
            following=partial(following_ids, chat, ends),
            prompt_key=pl_module.trainer.datamodule.prompt_key,  # type: ignore[attr-defined]
            room=min(lengths, default=None),
        )

    def tool_schemas(self) -> list[dict[str, Any]]:
        """Of the environment, for the chat template; the datamodule asks."""
        return [] if self.environment is None else self.environment.tool_schemas()

    def look_ahead(self, trainer: L.Trainer, pl_module: RLModule) -> None:
        """Begin to write the next step's completions with the current policy."""
        step = pl_module.step + 1
        prompts = None if step == trainer.max_steps else trainer.train_dataloader.ahead()  # type: ignore[union-attr]
        if prompts is None:
            return
        self.make_current(pl_module)
        write = partial(
            self.engine.generate,
            prompts.to(pl_module.device),
            num_generations=pl_module.num_generations,
            sampling=pl_module.sampling,
            seed=derived_seed(pl_module.seed, "train"),
            step=step,
        )
        self.lookahead.start(prompts, write)

    def score(self, pl_module: RLModule, rows: RolloutBatch, topk: int) -> Scores:
        """What the engine says of given completions with the current weights, at temperature 1.

        Args:
            pl_module: holds the policy.
            rows: B rows with completions.
            topk: K, most likely tokens beside the completions' own.
        """
        self.make_current(pl_module)
        scores = self.engine.score(rows, topk=topk)
        self.engine.sleep()
        return scores

    def make_current(self, pl_module: RLModule) -> None:
        """Wake the engine and give it the policy's weights, unless it has them. Collective."""
        with gathered(pl_module.policy):
            self.bind(pl_module)
            if self.engine.policy_version != pl_module.policy_version:
                self.lookahead.wait()
                self.engine.wake_weights()
                self.engine.sync_weights(named_base_tensors(pl_module.policy), pl_module.policy_version)
        self.engine.wake()

    def on_rollout_scored(
        self, trainer: L.Trainer, pl_module: L.LightningModule, *, rollout: RolloutBatch
    ) -> None:
        assert isinstance(pl_module, RLModule)
        if not trainer.training:
            return
        if rollout.policy_version is not None and rollout.completion_len is not None:
            stale = rollout.completion_len[rollout.policy_version != pl_module.policy_version].sum()
            pl_module.sums.add("rollout/stale_tokens", stale, 1.0 / world_size())
            if self.max_staleness and bool(stale):
                return  # a gap is expected, and corrected
        if rollout.rollout_logps is None or not self.check.is_due(pl_module.step):
            return
        self.check(pl_module, rollout)
        if not self.calculate_log_probs:
            rollout.rollout_logps = None

    def bind(self, pl_module: RLModule) -> None:
        """Connect the engine with the policy, once."""
        if self._is_bound:
            return
        chat = pl_module.chat
        self.engine.bind(
            pl_module.policy,
            end_token_ids=end_token_ids(pl_module.policy, chat.tokenizer),
            pad_token_id=chat.pad_token_id,
            decode=chat.decode,
            tokenizer=chat.tokenizer,
            max_tokens=self._max_tokens(pl_module),
        )
        self.engine.policy_version = -1  # whatever it held before
        self._is_bound = True

    def _max_tokens(self, pl_module: RLModule) -> int | None:
        """Tokens of the longest prompt and the longest completion of training and validation.

        Where it reads the teacher's prompts as well, of those, as far as the model has positions, and one
        token that scoring writes.
        """
        if pl_module.chat.max_prompt_length is None:
            return None
        own = pl_module.sampling.max_completion_length
        validated = self.val_kwargs.over(pl_module.sampling).effective().max_completion_length
        turns = 1 if self.environment is None else 2  # a later turn may begin where another has long ended
        written = pl_module.chat.max_prompt_length + turns * max(own, validated)
        other = pl_module.longest_other_prompt
        room = _positions(pl_module)
        if not other:
            return written if self.environment is None else min(written, room or written)
        return max(written, min(other + own + 1, room or other + own + 1))

    @staticmethod
    def _announce(pl_module: RLModule, prompts: RolloutBatch) -> None:
        data, tokenizer = pl_module.trainer.datamodule, pl_module.chat.tokenizer  # type: ignore[attr-defined]
        ids = [
            row[len(row) - n :]
            for row, n in zip(prompts.prompt_ids.tolist(), prompts.prompt_len.tolist(), strict=True)
        ]
        emit(
            pl_module,
            "on_generation_prompts_selected",
            generation_prompts=prompts.columns[data.prompt_key],
            generation_prompt_text=[str(tokenizer.decode(row)) for row in ids],
        )

    def teardown(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        self.lookahead.close()
        self.engine.close()
        self._is_bound = False

    @staticmethod
    def _progress(trainer: L.Trainer) -> Any:
        for callback in trainer.callbacks:  # type: ignore[attr-defined]
            report = getattr(callback, "generation_progress", None)
            if callable(report):
                return report
        return None


def _positions(pl_module: RLModule) -> int | None:
    """Positions that the policy has; None where its configuration has no limit."""
    config: Any = pl_module.policy.config.get_text_config(decoder=True)  # type: ignore[operator, union-attr]
    return getattr(config, "max_position_embeddings", None)


def _has_images(trainer: L.Trainer) -> bool:
    return getattr(trainer.datamodule, "has_images", False)  # type: ignore[attr-defined]
