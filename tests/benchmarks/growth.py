"""How a step grows in time and memory: with prompt, completion, group, vocabulary and model.

    python tests/benchmarks/growth.py --out outputs/growth

Writes `growth.md` (a table) and `growth.png`. One thing grows at a time, from a small Llama of random
weights with 2 prompts. Seconds are CPU seconds of one thread, the least of three. Memory is that of tensors
beside the weights, by `lit_rl.memory`: on a GPU it is the same.
"""

import argparse
import logging
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
from matplotlib.figure import Figure
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from lit_rl.batch import RolloutBatch
from lit_rl.memory import TensorMemory
from lit_rl.models.kernels import Kernels
from lit_rl.models.score import rows_of, score
from lit_rl.rollout.hf import HFEngine
from lit_rl.rollout.sampling import Sampling

PROMPTS, REPEATS = 2, 3


@dataclass(frozen=True)
class Size:
    """What grows: S, T, G, V, and the layers of a model with hidden states of 128."""

    prompt: int = 128
    completion: int = 32
    group: int = 8
    vocabulary: int = 2000
    layers: int = 4


GROWTH = {
    "prompt": (64, 128, 256, 512, 1024),
    "completion": (16, 32, 64, 128),
    "group": (4, 8, 16, 32),
    "vocabulary": (1000, 2000, 8000, 32000),
    "layers": (2, 4, 8, 16),
}
PARTS = ("decode_s", "update_s", "decode_mb", "update_mb")


def model_of(size: Size) -> nn.Module:
    """A policy with shared prompts, from a seed."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=size.vocabulary,
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=size.layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=4096,
        tie_word_embeddings=True,
    )
    model = LlamaForCausalLM(config)
    Kernels().apply_(model)
    return model.train()


def measured(size: Size) -> dict[str, float]:
    """CPU seconds and megabytes of decoding and of a forward and backward pass."""
    model, engine = model_of(size), HFEngine()
    engine.bind(model, end_token_ids=[], pad_token_id=0, decode=lambda ids: "")
    ids = torch.randint(1, size.vocabulary, (PROMPTS, size.prompt))
    prompts = RolloutBatch(ids, torch.full((PROMPTS,), size.prompt), torch.arange(PROMPTS))
    sampling = Sampling(max_completion_length=size.completion, ignore_eos=True)

    def decode() -> RolloutBatch:
        return engine.generate(prompts, num_generations=size.group, sampling=sampling, seed=0, step=0)

    rollout = decode()

    def update() -> None:
        model.zero_grad()
        score(model, rows_of(rollout), with_entropy=True).logps.sum().backward()

    return {
        "decode_s": seconds(decode),
        "update_s": seconds(update),
        "decode_mb": megabytes(decode),
        "update_mb": megabytes(update),
    }


def seconds(work: Callable[[], object]) -> float:
    def once() -> float:
        start = time.process_time()
        work()
        return time.process_time() - start

    return min(once() for _ in range(REPEATS))


def megabytes(work: Callable[[], object]) -> float:
    with TensorMemory() as memory:
        work()
    return memory.peak / 1e6


def table(results: dict[str, list[tuple[int, dict[str, float]]]]) -> str:
    """Markdown."""
    start = ", ".join(f"{name} {value}" for name, value in asdict(Size()).items())
    lines = [f"From {start}, {PROMPTS} prompts.", ""]
    lines += ["| what grows | to | decode, s | update, s | decode, MB | update, MB |", "| --- " * 6 + "|"]
    for name, points in results.items():
        for value, found in points:
            cells = [f"{found[part]:.2f}" if part.endswith("_s") else f"{found[part]:.0f}" for part in PARTS]
            lines.append(f"| {name} | {value} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def picture(results: dict[str, list[tuple[int, dict[str, float]]]]) -> Figure:
    """A column for each thing that grows: time above, memory below."""
    figure = Figure(figsize=(3 * len(results), 5), layout="constrained")
    axes = figure.subplots(2, len(results), squeeze=False)
    for column, (name, points) in enumerate(results.items()):
        values = [value for value, _ in points]
        for row, (unit, label) in enumerate((("_s", "CPU seconds"), ("_mb", "MB of tensors"))):
            for part in (part for part in PARTS if part.endswith(unit)):
                axes[row, column].plot(
                    values, [found[part] for _, found in points], marker="o", label=part.removesuffix(unit)
                )
            axes[row, column].set(xlabel=name, ylabel=label if column == 0 else "", ylim=(0, None))
    axes[0, 0].legend()
    return figure


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--only", nargs="+", default=list(GROWTH), choices=GROWTH)
    args = parser.parse_args()
    torch.set_num_threads(1)
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
    args.out.mkdir(parents=True, exist_ok=True)
    results: dict[str, list[tuple[int, dict[str, float]]]] = {}
    for name in args.only:
        results[name] = [(value, measured(replace(Size(), **{name: value}))) for value in GROWTH[name]]
        (args.out / "growth.md").write_text(table(results))
        picture(results).savefig(args.out / "growth.png", dpi=80)
    print(table(results))


if __name__ == "__main__":
    main()
