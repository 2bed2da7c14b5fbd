"""Learning-rate multipliers and weight decay as functions of the step; numbers in, numbers out."""

import math
from collections.abc import Callable


def lr_multiplier(
    step: float,
    *,
    lr_scheduler_type: str,
    total_steps: int,
    warmup_steps: int = 0,
    warmup_init_ratio: float = 0.0,
    min_ratio: float = 0.0,
    num_cycles: float = 0.5,
    decay_steps: int | None = None,
    wsd_decay_style: str = "exponential",
    wsd_decay_steps: int | None = None,
) -> float:
    """Share of the peak rate at a step: linear warm-up, then the named shape, then the minimum.

    With w the warm-up and r = (step - w) / decay in [0, 1], the shapes are shares of what lies above the
    minimum:

        constant              1, also after the end
        linear                1 - r
        cosine                (1 + cos(2 pi num_cycles r)) / 2
        inverse_square_root   sqrt(max(w, 1) / step), not below the minimum; not scaled to end at it
        wsd                   1, then over the last wsd_decay_steps the decay style: constant (none), linear,
                              cosine, exponential 2 * 0.5^s - 1, minus_sqrt 1 - sqrt(s)

    Sources: cosine, arXiv 1608.03983; inverse square root, arXiv 1706.03762; WSD, arXiv 2404.06395.

    Args:
        step: >= 0. The peak is reached at step = warmup_steps. Counting the first update as step 1 keeps it
            off the rate at step 0.
        lr_scheduler_type: one of the names above.
        total_steps: steps of the run.
        warmup_steps: steps of the warm-up.
        warmup_init_ratio: the share at step 0.
        min_ratio: the share at the end (step = total_steps) and after it.
        num_cycles: waves of the cosine, 0.5 = one fall.
        decay_steps: steps from the end of the warm-up to the minimum, None = the rest of the run.
        wsd_decay_style: shape of wsd's last phase.
        wsd_decay_steps: its steps, None = a tenth of the run.

    Returns:
        the multiplier, in [min_ratio, 1] after the warm-up.

    Raises:
        ValueError: a name is none of the above.
    """
    if lr_scheduler_type not in ("constant", "linear", "cosine", "inverse_square_root", "wsd"):
        raise ValueError(
            "lr_scheduler_type must be constant, linear, cosine, inverse_square_root or wsd "
            f"(found {lr_scheduler_type!r})."
        )
    if step < warmup_steps:
        return warmup_init_ratio + (1 - warmup_init_ratio) * step / warmup_steps
    if lr_scheduler_type == "constant" or (lr_scheduler_type, wsd_decay_style) == ("wsd", "constant"):
        return 1.0
    decay = total_steps - warmup_steps if decay_steps is None else decay_steps
    since = step - warmup_steps
    if since <= 0:
        return 1.0
    if lr_scheduler_type == "inverse_square_root":
        return min_ratio if since > decay else max(min_ratio, math.sqrt(max(warmup_steps, 1) / step))
    if lr_scheduler_type == "wsd":
        last = max(total_steps // 10, 1) if wsd_decay_steps is None else wsd_decay_steps
        last = min(last, decay)
        shape, progress = _falling(wsd_decay_style, num_cycles), (since - (decay - last)) / max(last, 1)
    else:
        shape, progress = _falling(lr_scheduler_type, num_cycles), since / max(decay, 1)
    if since >= decay:
        return min_ratio
    return min_ratio + (1 - min_ratio) * shape(min(max(progress, 0.0), 1.0))


def _falling(style: str, num_cycles: float) -> Callable[[float], float]:
    shapes: dict[str, Callable[[float], float]] = {
        "linear": lambda r: 1 - r,
        "cosine": lambda r: 0.5 * (1 + math.cos(2 * math.pi * num_cycles * r)),
        "exponential": lambda r: 2 * 0.5**r - 1,
        "minus_sqrt": lambda r: 1 - math.sqrt(r),
    }
    if style not in shapes:
        raise ValueError(f"the decay style must be one of {', '.join(shapes)} (found {style!r}).")
    return shapes[style]


def weight_decay(step: float, *, style: str, start: float, end: float, total_steps: int) -> float:
    """Weight decay at a step, growing from start to end: constant, linear or cosine. Source: Megatron-LM.

    Args:
        step: >= 0.
        style: "constant" (start, always), "linear" or "cosine".
        start: at step 0.
        end: at total_steps and after it.
        total_steps: steps of the growth.

    Raises:
        ValueError: the style is none of the above.
    """
    if style not in ("constant", "linear", "cosine"):
        raise ValueError(f"style must be constant, linear or cosine (found {style!r}).")
    if style == "constant":
        return start
    progress = 1.0 if step >= total_steps else step / total_steps
    share = progress if style == "linear" else 0.5 * (1 - math.cos(math.pi * progress))
    return start + (end - start) * share
