"""Comparison of nested recorded values with ours."""

from collections.abc import Iterator
from typing import Any

import torch

METRIC_ATOL = 1e-6  # peers average fractions in float32


def differences(name: str, ours: Any, expected: Any, *, rtol: float, atol: float) -> Iterator[str]:
    """One line for each recorded value that ours does not meet; what ours lacks in `metrics` is skipped."""
    if isinstance(expected, dict):
        if not isinstance(ours, dict):
            yield f"{name}: found {type(ours).__name__}, expected a mapping"
            return
        for key in expected:
            if key in ours:
                yield from differences(f"{name}.{key}", ours[key], expected[key], rtol=rtol, atol=atol)
            elif name != "metrics":
                yield f"{name}.{key}: absent"
    elif isinstance(ours, list) and ours and not all(isinstance(x, int | float) for x in ours):
        if len(ours) != len(expected):
            yield f"{name}: {len(ours)} entries, expected {len(expected)}"
            return
        for i, (a, b) in enumerate(zip(ours, expected, strict=True)):
            yield from differences(f"{name}[{i}]", a, b, rtol=rtol, atol=atol)
    elif expected is None or isinstance(expected, str) or ours is None:
        if ours != expected:
            yield f"{name}: found {ours!r}, expected {expected!r}"
    else:
        yield from _numeric(name, ours, expected, rtol=rtol, atol=atol)


def _numeric(name: str, ours: Any, expected: Any, *, rtol: float, atol: float) -> Iterator[str]:
    found = (
        ours.detach().to(torch.float64)
        if isinstance(ours, torch.Tensor)
        else torch.tensor(ours, dtype=torch.float64)
    )
    wanted = torch.tensor(expected, dtype=torch.float64)
    if found.shape != wanted.shape:
        yield f"{name}: shape {tuple(found.shape)}, expected {tuple(wanted.shape)}"
        return
    atol = max(atol, METRIC_ATOL) if name.startswith("metrics") else atol
    excess = (found - wanted).abs() - (atol + rtol * wanted.abs())
    if wanted.numel() and not bool((excess <= 0).all()):  # a NaN of ours fails too
        worst = int(excess.nan_to_num(nan=torch.inf).argmax())
        yield f"{name}: {found.flatten()[worst].item():.9g}, expected {wanted.flatten()[worst].item():.9g}"
