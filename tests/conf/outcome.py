"""Run a command line in this process and record everything it does that a user could notice."""

import csv
import hashlib
import importlib.util
import io
import json
import logging
import os
import re
import shutil
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch.utils.data import DataLoader
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaModel

from lit_rl.configuration.compose import Source
from lit_rl.configuration.job import checked
from lit_rl.configuration.report import user_error

ROOT = Path(__file__).resolve().parents[2]
SOURCE = Source(ROOT / "conf")
LOGGERS = ("lit_rl", "lightning.pytorch.profilers")
_NOISE = re.compile(r"Loading weights|it/s|s/it|\d+\.\d+ ?s\b|tokens/s|seconds")
_TIMES = re.compile(
    r"time/|memory/|checkpoint/bytes|per_second|seconds|rss|created|written|sha256|versions|fingerprint"
)

Outcome = dict[str, Any]


def outcome(
    overrides: Sequence[str], folder: Path, *, resumed_from: Path | None = None, keep: Path | None = None
) -> Outcome:
    """What a run does: weights, metrics, files, printed lines, passes through the model, settings of torch.

    A refusal is an outcome too: its message.

    Args:
        overrides: the command line without `run_dir`.
        folder: of the run; removed afterwards.
        resumed_from: a finished run that is copied there first.
        keep: where the folder goes instead.
    """
    if resumed_from is not None:
        shutil.copytree(resumed_from, folder)
    out, err = io.StringIO(), io.StringIO()
    passes: Counter[str] = Counter()
    process: dict[str, Any] = {}
    records: list[str] = []
    error = ""
    with redirect_stdout(out), redirect_stderr(err), _watched(passes, process, records):
        try:
            _run([*overrides, f"run_dir={folder}"])
        except Exception as raised:
            mistake = user_error(raised)
            error = f"{type(mistake or raised).__name__}: {mistake or raised}"
    found = {
        "error": error.replace(str(folder), ""),
        "printed": [_plain(line, folder) for line in _after_plan(out.getvalue()) if not _NOISE.search(line)],
        "logged": [_plain(line, folder) for line in records if not _NOISE.search(line)],
        "passes": dict(sorted(passes.items())),
        "process": process,
        "files": _files(folder),
    }
    if keep is not None:
        shutil.move(folder, keep)
    shutil.rmtree(folder, ignore_errors=True)
    return found


def _run(overrides: list[str]) -> None:
    spec = importlib.util.spec_from_file_location("train_under_test", ROOT / "train.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.run(checked(SOURCE, overrides))


class _Records(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


@contextmanager
def _watched(passes: Counter[str], process: dict[str, Any], records: list[str]) -> Iterator[None]:
    """Count passes by shape; note loaders, what is logged, and torch's switches while they are in force."""
    process.update(anomaly=False, loaders=[])
    handler = _Records()
    precision = torch.get_float32_matmul_precision()
    with ExitStack() as stack:
        for kind in (LlamaModel, LlamaMLP):
            stack.enter_context(patch.object(kind, "forward", _counted(kind, passes, process)))
        stack.enter_context(
            patch.object(DataLoader, "__init__", _noted(DataLoader.__init__, process["loaders"]))
        )
        warned = stack.enter_context(warnings.catch_warnings(record=True))
        warnings.simplefilter("always")
        for name in LOGGERS:
            logging.getLogger(name).addHandler(handler)
        try:
            yield
        finally:
            for name in LOGGERS:
                logging.getLogger(name).removeHandler(handler)
            records += [*handler.lines, *sorted({str(warning.message) for warning in warned})]
            process["precision"] = torch.get_float32_matmul_precision()
            torch.set_float32_matmul_precision(precision)
            torch.use_deterministic_algorithms(False)
            torch.autograd.set_detect_anomaly(False)


def _counted(kind: type, passes: Counter[str], process: dict[str, Any]) -> Any:
    """The class's forward that also counts itself by shape of the ids, kind of cache, and gradient."""
    original = kind.forward  # type: ignore[attr-defined]

    def forward(self: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        ids = kwargs.get("input_ids")
        cache = next((kwargs[name] for name in ("cache", "past_key_values") if name in kwargs), None)
        layers = getattr(cache, "layers", None) or [None]
        shape = None if ids is None else tuple(ids.shape)
        passes[f"{kind.__name__} {shape} {type(layers[0]).__name__} {torch.is_grad_enabled()}"] += 1
        process["deterministic"] = torch.are_deterministic_algorithms_enabled()
        process["anomaly"] |= torch.is_anomaly_enabled()
        return original(self, *args, **kwargs)

    return forward


def _noted(original: Any, built: list[dict[str, str]]) -> Any:
    """The loader's constructor that also notes its settings."""
    names = ("num_workers", "pin_memory", "prefetch_factor", "persistent_workers", "in_order")

    def init(self: DataLoader, *args: Any, **kwargs: Any) -> None:
        built.append({name: str(kwargs.get(name)) for name in (*names, "multiprocessing_context")})
        original(self, *args, **kwargs)

    return init


def _after_plan(text: str) -> list[str]:
    """Printed lines without the plan, which repeats what was set."""
    lines = text.splitlines()
    heads = [i for i, line in enumerate(lines) if line.startswith("set ")]
    if not heads:
        return lines
    rest = lines[heads[0] + 1 :]
    return [line for line in rest if not line.startswith(" " * 12)]


def _plain(line: str, folder: Path) -> str:
    return line.replace(str(folder), "RUN").rstrip()


def _files(folder: Path) -> dict[str, str]:
    """Every file with a digest of what it says, times left out; the configuration itself is not an effect."""
    found = {}
    for path in sorted(p for p in folder.rglob("*") if p.is_file()):
        name = str(path.relative_to(folder))
        if path.name in ("config.yaml", ".lock"):
            continue
        if "tfevents" in name:
            name = f"{path.parent.relative_to(folder)}/events"
        found[name] = _digest(path, folder)
    return found


def _digest(path: Path, folder: Path) -> str:
    if (
        path.name in ("optimizer.json", "state.json")
        or path.suffix in (".png", ".pt")
        or "tfevents" in path.name
    ):
        return "written"
    if path.suffix == ".csv":
        with path.open(newline="") as lines:
            rows = [{k: v for k, v in row.items() if not _TIMES.search(k)} for row in csv.DictReader(lines)]
        return _sha(json.dumps(rows))
    if path.suffix in (".json", ".jsonl"):
        parsed = (
            [json.loads(line) for line in path.read_text().splitlines()]
            if path.suffix == ".jsonl"
            else [json.loads(path.read_text())]
        )
        return _sha(json.dumps(_timeless(parsed)).replace(str(folder), "RUN"))
    return _sha(path.read_bytes())


def _timeless(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: _timeless(v) for k, v in value.items() if not _TIMES.search(str(k)) and k != "files"}
    return [_timeless(item) for item in value] if isinstance(value, list) else value


def _sha(data: str | bytes) -> str:
    return hashlib.sha256(data.encode() if isinstance(data, str) else data).hexdigest()[:16]


def differences(before: Outcome, after: Outcome) -> list[str]:
    """What two outcomes differ in, by name."""
    found = [name for name in before if name != "files" and before[name] != after[name]]
    names = {*before["files"], *after["files"]}
    return found + [n for n in sorted(names) if before["files"].get(n) != after["files"].get(n)]


os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
