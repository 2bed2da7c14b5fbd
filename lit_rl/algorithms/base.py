"""RLModule: one step of every algorithm, read top to bottom in `training_step`."""

import os
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import lightning as L
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from lit_rl.algorithms import arguments, reporting
from lit_rl.algorithms.iteration import rl_iteration
from lit_rl.algorithms.rewarding import fill_rewards_, take_out_
from lit_rl.algorithms.samples import samples_of
from lit_rl.algorithms.sharded import even, shard_networks_
from lit_rl.algorithms.state import Stateful, add_state, take_state
from lit_rl.algorithms.updates import Network, add_update_metrics, as_list, step_
from lit_rl.algorithms.validation import ValidationScores
from lit_rl.batch import RolloutBatch
from lit_rl.data.chat import Chat
from lit_rl.data.named import VALIDATION_SET
from lit_rl.distributed import all_sum_, world_size
from lit_rl.errors import ConfigError
from lit_rl.functional.masking import Totals, totals_of
from lit_rl.hooks import emit
from lit_rl.metrics import MetricSums
from lit_rl.models.flat_attention import shares_prefixes
from lit_rl.models.parameters import logps_dtype
from lit_rl.models.roles import Role
from lit_rl.models.score import TokenScores, check_head, rows_of, score
from lit_rl.models.scorer import Scorer
from lit_rl.models.sharding import gathered
from lit_rl.objectives.batch_plan import BatchPlan
from lit_rl.rewards.base import Sample
from lit_rl.rollout.sampling import Sampling
from lit_rl.rollout.scoring import EngineScore
from lit_rl.seeding import derived_generator
from lit_rl.timing import Clock

Generate = Callable[[RolloutBatch, Sampling, int, str], RolloutBatch]
"""(prompts, sampling, completions per prompt, purpose) -> rows with completions."""


class RLModule(L.LightningModule):
    """The step: take a rollout, score it, prepare it, assign credit, update, sync.

    A dataloader batch is one iteration. Subclasses override `prepare`, `assign_credit`, `loss` and `sync`;
    `training_step` is final. Any batch that carries completions can be trained on: without them,
    `RolloutGeneration` has to fill them in.

    Args:
        policy: the model that is trained.
        optimizer: from parameter groups to an optimizer, or one; None is AdamW at 5e-5.
        scheduler: from (optimizer, total_steps) to a schedule in iterations, or one; None is `WarmupDecay`.
        reward: scores completions: a sum, or in Python functions; None for algorithms that need no reward.
        sampling: how completions are drawn; every log-probability is taken at its temperature.
        batch: how the rows of a step are cut.
        num_generations: G, completions per prompt.
        num_iterations: passes over the rows of a step.
        mask_truncated_completions: rows cut at the length limit enter no loss and no divisor.
        max_grad_norm: cap of the gradient norm per optimizer step; 0 is off.
        on_nonfinite: a NaN or infinite gradient: "error" stops, "skip" leaves that update out and counts it.

    Raises:
        ConfigError: a value is out of range.
    """

    def __init__(
        self,
        *,
        policy: nn.Module,
        optimizer: arguments.OptimizerLike = None,
        scheduler: arguments.SchedulerLike = None,
        reward: arguments.RewardLike = None,
        sampling: Sampling | None = None,
        batch: BatchPlan | None = None,
        num_generations: int = 8,
        num_iterations: int = 1,
        mask_truncated_completions: bool = False,
        max_grad_norm: float = 1.0,
        on_nonfinite: str = "error",
    ) -> None:
        super().__init__()
        for name, value, low in (
            ("num_generations", num_generations, 1),
            ("num_iterations", num_iterations, 1),
            ("max_grad_norm", max_grad_norm, 0),
        ):
            if value < low:
                raise ConfigError(f"algo.{name} must be >= {low} (found {value!r}).")
        if on_nonfinite not in ("error", "skip"):
            raise ConfigError(f"algo.on_nonfinite must be 'error' or 'skip' (found {on_nonfinite!r}).")
        self.automatic_optimization = False
        self.policy, self.optimizer, self.scheduler = policy, optimizer, scheduler
        self.reward = arguments.reward_sum(reward)
        self.sampling = (sampling or Sampling()).effective()
        self.batch = batch or BatchPlan()
        self.num_generations, self.num_iterations = num_generations, num_iterations
        self.mask_truncated_completions = mask_truncated_completions
        self.max_grad_norm, self.on_nonfinite = max_grad_norm, on_nonfinite
        self.has_entropy_term = False  # in the loss, so that it needs gradients
        self.ref: Role | None = None
        self.ref_moves = False  # a callback that will mix it says so in its own setup
        self.teacher: Scorer | None = None
        self.optimizer_steps = 0
        self.clock = Clock()
        self.sums = MetricSums()
        self.metrics: dict[str, float] = {}
        self.last_rollout: RolloutBatch | None = None
        self.validation = ValidationScores()
        self._rollout: RolloutBatch | None = None
        self.more: Generate | None = None
        self.engine_score: EngineScore | None = None
        self.longest_other_prompt = 0  # tokens, of prompts beside those of the data that the engine reads
        self._is_built = False

    # ---------------------------------------------------------------------------------------------- the step

    def training_step(self, batch: RolloutBatch, batch_idx: int) -> dict[str, Any]:
        """One iteration; the whole algorithm in reading order."""
        self.sums = MetricSums(self.device)
        with rl_iteration(self):
            rollout = self.take_rollout(batch)
            with self.clock("score"):
                self.score_rewards(rollout)
                self.prepare(rollout)
                self.assign_credit(rollout)
            with self.clock("update"):
                for rows in self.optimizer_batches(rollout):
                    totals = self.totals(rows)
                    micro_batches = self.micro_batches(rows)
                    losses = [self.backward_locally(self.loss(piece, totals)) for piece in micro_batches]
                    self.update_weights(torch.stack(losses).sum())
                self.sync()
        self.report(rollout)
        return {"loss": torch.tensor(self.metrics["train/loss"]), "metrics": self.metrics}

    def prepare(self, rollout: RolloutBatch) -> None:
        """Fill in what the loss compares with. Without gradient.

        Old log-probabilities are only needed when a second update will find the policy moved; for the first
        one they are the current ones.
        """
        if self.batch.optimizer_steps(len(rollout), self.num_iterations, world_size()) > 1:
            rollout.old_logps = self.logps(self.policy, rollout)

    def assign_credit(self, rollout: RolloutBatch) -> None:
        """Turn rewards into `rollout.advantages`."""

    def loss(self, micro_batch: RolloutBatch, totals: Totals) -> Tensor:
        """This micro-batch's share of the loss of the whole optimizer batch.

        Args:
            micro_batch: rows with everything `prepare` and `assign_credit` filled in.
            totals: tokens and rows of the optimizer batch over all ranks.

        Returns:
            Scalar; the sum over micro-batches and ranks is the loss.
        """
        raise NotImplementedError

    def sync(self) -> None:
        """What follows the policy at the end of a step, such as a teacher."""

    # ------------------------------------------------------------------------------------- parts of the step

    def set_rollout(
        self, rollout: RolloutBatch, more: Generate | None = None, score: EngineScore | None = None
    ) -> None:
        """Hand over this step's completions, and ways to more and to scores; `RolloutGeneration` does."""
        self._rollout, self.more, self.engine_score = rollout, more, score

    def take_rollout(self, batch: RolloutBatch) -> RolloutBatch:
        """This step's completions: handed over, or in the batch itself.

        Raises:
            ConfigError: neither, so no callback generates.
        """
        rollout, self._rollout = self._rollout, None
        if rollout is None and batch.completion_ids is not None:
            rollout = batch
        if rollout is None:
            raise ConfigError(
                "The batch carries no completions and none were generated: add the callback "
                "RolloutGeneration (callbacks.rollout=${rollout}), or train on data that has completions."
            )
        return rollout.to(self.device)

    def score_rewards(self, rollout: RolloutBatch) -> None:
        """Fill in rewards and feedback, and take rows out of the loss that must not count."""
        if self.reward is not None:
            fill_rewards_(self, rollout)
            self.complete(rollout)
            emit(self, "on_rollout_scored", rollout=rollout)
        take_out_(rollout, truncated=self.mask_truncated_completions)

    def complete(self, rollout: RolloutBatch) -> None:
        """What rewards make necessary: other prompts, or completions to compare with. Collective."""

    def samples(self, rollout: RolloutBatch) -> list[Sample]:
        """The rows as reward functions see them."""
        return samples_of(rollout, self.chat, self.trainer.datamodule)  # type: ignore[attr-defined]

    def score(self, model: nn.Module, rows: RolloutBatch, *, with_entropy: bool = False) -> TokenScores:
        """Log-probabilities of the completions under a model, at the sampling temperature."""
        return score(
            model,
            rows_of(rows),
            temperature=self.sampling.temperature,
            with_entropy=with_entropy,
            entropy_gradient=self.has_entropy_term,
        )

    @torch.no_grad()
    def logps(self, model: nn.Module, rollout: RolloutBatch) -> Tensor:
        """(B, T) log-probabilities without gradient, in score micro-batches."""
        assert rollout.completion_ids is not None
        out = torch.zeros(rollout.completion_ids.shape, dtype=logps_dtype(model), device=self.device)
        with gathered(model):
            for index in self.batch.score_batches(rollout, is_sharing=shares_prefixes(model)):
                out[index] = self.score(model, rollout.select(index)).logps.to(out.dtype)
        return out

    def optimizer_batches(self, rollout: RolloutBatch):
        """The optimizer batches of every pass over the rows of this rank."""
        for iteration in range(self.num_iterations):
            generator = derived_generator(self.seed, self.step, "shuffle", iteration)
            for index in self.batch.optimizer_batches(
                len(rollout), num_ranks=world_size(), generator=generator
            ):
                yield rollout.select(index)

    def totals(self, rows: RolloutBatch) -> Totals:
        """What the loss of this optimizer batch is divided by, over all ranks. Collective."""
        assert rows.completion_mask is not None
        return self.global_totals(rows.completion_mask)

    def global_totals(self, mask: Tensor) -> Totals:
        """Tokens and rows that the mask counts, over all ranks. Collective.

        Args:
            mask: (B, T) bool.
        """
        local = totals_of(mask, self.sampling.max_completion_length)
        tokens, rows = all_sum_(torch.stack([local.tokens, local.rows]))
        return Totals(tokens=tokens, rows=rows, max_completion_length=local.max_completion_length)

    def rows_in_loss(self, rows: RolloutBatch) -> RolloutBatch:
        """The rows worth a forward pass; at least one, so that every rank has a loss."""
        return rows

    def micro_batches(self, rows: RolloutBatch) -> list[RolloutBatch]:
        """The rows of an optimizer batch in the pieces that pass forward and backward together."""
        pieces = self.batch.micro_batches(self.rows_in_loss(rows), is_sharing=shares_prefixes(self.policy))
        return even(list(pieces), self.policy)

    def backward_locally(self, loss: Tensor) -> Tensor:
        """Add to the gradients of this rank; returns the loss. `update_weights` brings the ranks together."""
        wrapper = self.trainer.model
        no_sync = wrapper.no_sync() if isinstance(wrapper, DistributedDataParallel) else nullcontext()
        with no_sync:
            self.manual_backward(loss)
        return loss.detach()

    def networks(self) -> list[Network]:
        """What is trained, the policy first; each has its optimizer and schedule, in this order."""
        return [Network("policy", self.policy, as_list(self.optimizers())[0], self.max_grad_norm)]

    def update_weights(self, loss: Tensor) -> None:
        """Bring gradients together, clip them, step; the loss is this rank's share. Collective.

        Raises:
            FloatingPointError: loss or gradient are not finite and `on_nonfinite` is "error".
        """
        networks = self.networks()
        done = step_(networks, loss)
        if not done.is_finite and self.on_nonfinite == "error":
            raise FloatingPointError(done.complaint(self.step + 1))
        self.optimizer_steps += int(done.is_finite and networks[0].learns)
        add_update_metrics(self.sums, networks, done)

    def report(self, rollout: RolloutBatch) -> None:
        """Bring the step's metrics together, step the schedule, tell the callbacks. Collective."""
        reporting.add_rollout_metrics(self.sums, rollout)
        reporting.add_reward_metrics(self.sums, rollout)
        reporting.add_phase_metrics(self.sums, self.clock)
        self.metrics = self.sums.reduce()
        seconds = sum(self.metrics[f"time/{phase}"] for phase in reporting.PHASES)
        self.metrics["rollout/tokens_per_second"] = self.metrics["rollout/tokens"] / max(seconds, 1e-9)
        for network in self.networks():
            self.metrics[f"{network.prefix}lr"] = network.optimizer.param_groups[0]["lr"]
        self.metrics["train/optimizer_steps"] = float(self.optimizer_steps)
        with warnings.catch_warnings():  # an update that was left out steps no optimizer
            warnings.filterwarnings("ignore", "Detected call of `lr_scheduler.step")
            for schedule in as_list(self.lr_schedulers()):
                schedule.step()
        self.last_rollout = rollout
        self.log_dict(self.metrics, logger=False)
        if self.step % self.trainer.log_every_n_steps == 0:  # type: ignore[attr-defined]
            for logger in self.loggers:  # now, so that a checkpoint of this step never precedes its row
                logger.log_metrics(self.metrics, step=self.step - 1)
        emit(self, "on_update_end", step=self.step, metrics=self.metrics)

    def validation_step(self, batch: RolloutBatch, batch_idx: int) -> None:
        """Score the validation completions that `RolloutGeneration` wrote, each row once."""
        with self.clock("validate"):
            rollout = self.take_rollout(batch)
            if not self.validation.is_scored:
                self.validation.rollouts.append(rollout)
                return
            if self.reward is None:
                raise ConfigError(
                    "Validation needs a reward; set trainer.val_check_interval=0 to run without."
                )
            own = self.trainer.datamodule.data_source_key  # type: ignore[attr-defined]
            sources = rollout.columns.get(VALIDATION_SET, rollout.columns.get(own))
            self.validation.add(rollout, self.samples(rollout), sources, self.reward)

    def on_validation_epoch_end(self) -> None:
        """Log accuracy per data source over all ranks. Collective."""
        self.log_dict(self.validation.compute(self.seed), sync_dist=True)
        self.validation.reset()

    # ------------------------------------------------------------------------------------------------- setup

    @property
    def step(self) -> int:
        """Iterations done, the running one not included."""
        return self.trainer.global_step

    @property
    def policy_version(self) -> int:
        """Changes whenever the policy's weights do."""
        return self.optimizer_steps

    @property
    def seed(self) -> int:
        """Seed of the run, as `lightning.seed_everything` set it (42 if nobody did)."""
        return int(os.environ.get("PL_GLOBAL_SEED", "42"))

    @property
    def chat(self) -> Chat:
        """Tokenizer and chat template, from the datamodule."""
        return self.trainer.datamodule.chat  # type: ignore[attr-defined]

    @property
    def reward_names(self) -> list[str]:
        """One name per column of `rewards_per_func`."""
        return self.reward.names if self.reward is not None else []

    @property
    def stateful(self) -> dict[str, Stateful]:
        """Moving parts outside the policy's parameters, by attribute; a checkpoint holds each of them."""
        roles = {"ref": self.ref, "teacher": self.teacher}
        return {name: role for name, role in roles.items() if role is not None and role.is_moving}

    def setup(self, stage: str) -> None:
        """Build what needs the initial policy. A checkpoint is read later, so copies start from there."""
        arguments.check_trainer(self.trainer)
        if self.reward is not None:
            self.reward.to_(self.trainer.strategy.root_device)
        if self.reward is not None and stage == "fit":
            self.reward.check_columns(self.trainer.datamodule.column_names())  # type: ignore[attr-defined]
        if self._is_built:
            return
        self._is_built = True
        check_head(self.policy)
        self.policy.train()
        self.build_roles()

    def build_roles(self) -> None:
        """Make the frozen and averaged copies that this algorithm needs."""

    def configure_model(self) -> None:
        shard_networks_(self)

    def on_fit_start(self) -> None:
        for role in filter(None, (self.ref, self.teacher)):
            role.to_(self.device)

    def configure_optimizers(self) -> Any:
        """The optimizer over decayed and undecayed parameters, and its schedule in iterations."""
        return self.scheduled(arguments.optimizer_of(self.optimizer, self.policy), self.scheduler)

    def scheduled(self, optimizer: Any, scheduler: arguments.SchedulerLike) -> dict[str, Any]:
        """An optimizer and its schedule over the run, as Lightning takes them."""
        # Lightning's estimated_stepping_batches would make the loaders here, before a checkpoint's place in
        # the data is read, and a resumed run would begin them anew.
        total_steps = self.trainer.datamodule.total_steps(self.trainer.max_steps)  # type: ignore[attr-defined]
        schedule = arguments.schedule_of(scheduler, optimizer, total_steps)
        return {"optimizer": optimizer, "lr_scheduler": schedule}

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        add_state(self, checkpoint)

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        take_state(self, checkpoint)
