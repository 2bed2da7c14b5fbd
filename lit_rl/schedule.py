"""WarmupDecay: the learning rate, and the weight decay, as functions of the iteration."""

from typing import Any, Literal

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from lit_rl.errors import ConfigError
from lit_rl.functional.schedules import lr_multiplier, weight_decay

Shape = Literal["constant", "linear", "cosine", "inverse_square_root", "wsd"]
Decay = Literal["constant", "exponential", "cosine", "linear", "minus_sqrt"]


class WarmupDecay(LRScheduler):
    """Linear warm-up to the optimizer's rate, then the named shape down to the minimum.

    Stepped once per iteration. Iteration i, counted from 0, runs at schedule(i + 1), so that none runs at the
    rate of step 0. Source: verl `actor.optim.*` and `optim.*`, TRL `lr_scheduler_type`; Megatron-LM for the
    decay of wsd and for weight decay that grows.

    Args:
        optimizer: its rate is the peak, its weight decay the start.
        total_steps: iterations of the run.
        lr_scheduler_type: shape after the warm-up.
        lr_warmup_steps: iterations of warm-up; -1 takes the ratio.
        lr_warmup_steps_ratio: warm-up as a share of the run, in [0, 1].
        lr_warmup_init: rate at the start of the warm-up.
        min_lr: lowest rate after the warm-up; not for constant.
        min_lr_ratio: lowest rate as a share of the peak; either this or `min_lr`.
        num_cycles: waves of the cosine; 0.5 falls once.
        lr_decay_steps: iterations from the end of the warm-up to the minimum; null is the rest of the run.
        lr_wsd_decay_style: shape of wsd's last phase.
        lr_wsd_decay_steps: its iterations; null is a tenth of the run.
        weight_decay_incr_style: growth of the weight decay over the run.
        end_weight_decay: weight decay at the end, where it grows.

    Raises:
        ConfigError: a value is out of range, or the phases are longer than the run.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        total_steps: int,
        *,
        lr_scheduler_type: Shape = "linear",
        lr_warmup_steps: int = -1,
        lr_warmup_steps_ratio: float = 0.0,
        lr_warmup_init: float = 0.0,
        min_lr: float = 0.0,
        min_lr_ratio: float = 0.0,
        num_cycles: float = 0.5,
        lr_decay_steps: int | None = None,
        lr_wsd_decay_style: Decay = "exponential",
        lr_wsd_decay_steps: int | None = None,
        weight_decay_incr_style: Literal["constant", "linear", "cosine"] = "constant",
        end_weight_decay: float | None = None,
    ) -> None:
        self.settings: dict[str, Any] = {
            "total_steps": total_steps,
            "lr_scheduler_type": lr_scheduler_type,
            "warmup_steps": _warmup_steps(lr_warmup_steps, lr_warmup_steps_ratio, total_steps),
            "lr_warmup_init": lr_warmup_init,
            "min_lr": min_lr,
            "min_lr_ratio": min_lr_ratio,
            "num_cycles": num_cycles,
            "decay_steps": lr_decay_steps,
            "wsd_decay_style": lr_wsd_decay_style,
            "wsd_decay_steps": lr_wsd_decay_steps,
            "weight_decay_incr_style": weight_decay_incr_style,
            "end_weight_decay": end_weight_decay,
        }
        _check_ranges(self.settings, lr_warmup_steps_ratio)
        _check_growth(weight_decay_incr_style, end_weight_decay)
        self.start_weight_decays = [float(group.get("weight_decay", 0.0)) for group in optimizer.param_groups]
        super().__init__(optimizer)

    def get_lr(self) -> list[float | Tensor]:
        """The rate of each parameter group in the coming iteration."""
        self._set_weight_decay()
        return [self._rate(float(peak)) for peak in self.base_lrs]

    def _rate(self, peak: float) -> float:
        own = self.settings
        floor = own["min_lr"] / peak if own["min_lr"] and peak else own["min_lr_ratio"]
        return peak * lr_multiplier(
            self.last_epoch + 1,
            lr_scheduler_type=own["lr_scheduler_type"],
            total_steps=own["total_steps"] + 1,  # the floor follows the last iteration: none runs at rate 0
            warmup_steps=own["warmup_steps"],
            warmup_init_ratio=own["lr_warmup_init"] / peak if peak else 0.0,
            min_ratio=floor,
            num_cycles=own["num_cycles"],
            decay_steps=own["decay_steps"],
            wsd_decay_style=own["wsd_decay_style"],
            wsd_decay_steps=own["wsd_decay_steps"],
        )

    def _set_weight_decay(self) -> None:
        """Groups without weight decay, such as norms and biases, stay without."""
        own = self.settings
        if own["weight_decay_incr_style"] == "constant":
            return
        for group, start in zip(self.optimizer.param_groups, self.start_weight_decays, strict=True):
            if start > 0 or group is self.optimizer.param_groups[0]:
                group["weight_decay"] = weight_decay(
                    self.last_epoch + 1,
                    style=own["weight_decay_incr_style"],
                    start=start,
                    end=own["end_weight_decay"],
                    total_steps=own["total_steps"],
                )

    def state_dict(self) -> dict[str, Any]:
        """Plain values: the position, the peaks and the settings."""
        return {
            "last_epoch": self.last_epoch,
            "base_lrs": [float(lr) for lr in self.base_lrs],
            "start_weight_decays": list(self.start_weight_decays),
            "settings": dict(self.settings),
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on where the state was saved; whatever it leaves out stays as it was constructed."""
        self.last_epoch = state_dict["last_epoch"]
        self._step_count = self.last_epoch + 1
        self.base_lrs = list(state_dict.get("base_lrs", self.base_lrs))
        self.start_weight_decays = list(state_dict.get("start_weight_decays", self.start_weight_decays))
        self.settings = dict(state_dict.get("settings", self.settings))
        for group, decay in zip(self.optimizer.param_groups, self.start_weight_decays, strict=True):
            group["weight_decay"] = decay
        for group, rate in zip(self.optimizer.param_groups, self.get_lr(), strict=True):
            group["lr"] = rate
        self._last_lr = [group["lr"] for group in self.optimizer.param_groups]


def _warmup_steps(steps: int, ratio: float, total_steps: int) -> int:
    return steps if steps >= 0 else int(ratio * total_steps)


def _check_ranges(settings: dict[str, Any], ratio: float) -> None:
    decay, total = settings["decay_steps"], settings["total_steps"]
    checks = [
        ("lr_warmup_steps_ratio", ratio, 0 <= ratio <= 1, "must be in [0, 1]"),
        ("lr_warmup_init", settings["lr_warmup_init"], settings["lr_warmup_init"] >= 0, "must be >= 0"),
        ("min_lr", settings["min_lr"], settings["min_lr"] >= 0, "must be >= 0"),
        ("min_lr_ratio", settings["min_lr_ratio"], 0 <= settings["min_lr_ratio"] <= 1, "must be in [0, 1]"),
        ("num_cycles", settings["num_cycles"], settings["num_cycles"] > 0, "must be > 0"),
        ("lr_decay_steps", decay, decay is None or decay >= 1, "must be null or >= 1"),
    ]
    for name, found, is_legal, rule in checks:
        if not is_legal:
            raise ConfigError(f"schedule.{name} {rule} (found {found!r}).")
    if settings["warmup_steps"] + (decay or 0) > total:
        raise ConfigError(
            f"schedule.lr_warmup_steps or its ratio ({settings['warmup_steps']} steps) and lr_decay_steps "
            f"(found {decay}) must together be at most the {total} steps of the run; lower one, or raise "
            "trainer.max_steps."
        )


def _check_growth(style: str, end: float | None) -> None:
    if style != "constant" and end is None:
        raise ConfigError(
            f"schedule.end_weight_decay must be set when schedule.weight_decay_incr_style is {style!r} "
            "(found None)."
        )
    if end is not None and end < 0:
        raise ConfigError(f"schedule.end_weight_decay must be null or >= 0 (found {end!r}).")
