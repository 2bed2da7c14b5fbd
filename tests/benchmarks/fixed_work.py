"""Fixed work for a step, and a split of its time and memory: what both sides of `step.py` share.

The same prompts every step, completions that run to the limit, rewards by place in the group: two runs of a
shape process the same number of tokens, whoever trains. This measures cost, not learning.
"""

import contextlib
import functools
import json
import os
import resource
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

PHASES = (
    "gen.prefill",
    "gen.decode",
    "gen.sample+cache",
    "reward",
    "teacher_context",
    "old_logprob",
    "forward",
    "teacher_forward",
    "loss",
    "backward",
    "optimizer",
    "teacher_sync",
)


@dataclass(frozen=True)
class Shape:
    """The work of a step.

    Attributes:
        algo: grpo or sdpo.
        prompts: P.
        generations: G.
        micro_batch: rows per forward and backward on the other side; ours may take all of them.
        prompt_tokens: prompts are lengthened to this many tokens by worked examples; None leaves them.
        max_completion: tokens of every completion.
        mode: what SDPO compares.
    """

    algo: str
    prompts: int = 1
    generations: int = 8
    micro_batch: int = 8
    prompt_tokens: int | None = None
    max_completion: int = 64
    mode: str = "sampled_token"


SHAPES = {
    "grpo_short": Shape("grpo", prompts=2),
    "grpo_long": Shape("grpo", prompt_tokens=1024, micro_batch=1),
    "sdpo_sampled_token": Shape("sdpo"),
    "sdpo_full_logits": Shape("sdpo", mode="full_logits"),
    "sdpo_topk_logits": Shape("sdpo", mode="topk_logits"),
    # Too little to say anything about speed: whether the scripts run, and whether the losses agree.
    "grpo_smoke": Shape("grpo", generations=4, micro_batch=4, max_completion=4),
    "sdpo_smoke": Shape("sdpo", generations=4, micro_batch=4, max_completion=4),
}
MEASURED = tuple(name for name in SHAPES if not name.endswith("smoke"))
TOPK = 100
FIRST_ROW = 4  # of GSM8K's training split; rows 4 to 7 have 57 to 137 tokens
SUCCESSES = 2  # the first rows of each group


def questions(data: Path, shape: Shape, tokenizer: Any) -> list[dict[str, Any]]:
    """The P prompts of a shape: `prompt` (messages) and `answer`.

    Args:
        data: GSM8K's training split as parquet, with `extra_info.question` and `extra_info.answer`.
        shape: the work.
        tokenizer: with a chat template.
    """
    import pyarrow.parquet as parquet

    rows = [row["extra_info"] for row in parquet.read_table(data).to_pylist()]

    def chat(question: str, context: str = "") -> list[dict[str, str]]:
        return [{"role": "user", "content": context + question}]

    def length(messages: list[dict[str, str]]) -> int:
        rendered = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)
        return len(rendered["input_ids"])

    picked = []
    for row in rows[FIRST_ROW : FIRST_ROW + shape.prompts]:
        messages = chat(row["question"])
        if shape.prompt_tokens:
            examples = "".join(f"Question: {r['question']}\nAnswer: {r['answer']}\n\n" for r in rows[-40:])
            ids = tokenizer(examples, add_special_tokens=False)["input_ids"]
            keep = shape.prompt_tokens - length(messages)
            while length(chat(row["question"], tokenizer.decode(ids[:keep]))) > shape.prompt_tokens:
                keep -= 1
            messages = chat(row["question"], tokenizer.decode(ids[:keep]))
        picked.append({"prompt": messages, "answer": row["answer"]})
    return picked


def rewards(rows: int, generations: int) -> list[float]:
    """1 for the first rows of each group, 0 for the others."""
    return [float(i % generations < SUCCESSES) for i in range(rows)]


def status_bytes(key: str) -> int:
    """A memory figure of this process from the kernel; 0 where the kernel does not tell."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith(f"{key}:"):
                return int(line.split()[1]) * 1024
    return 0


def reset_peak() -> None:
    """Start the resident peak anew; the one behind getrusage goes with it."""
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


class Phases:
    """Splits each step's wall and CPU seconds and peak resident memory over phases.

    A phase's figures leave out the phases inside it, so that they add up to the step.
    """

    def __init__(self) -> None:
        self.steps: list[dict[str, Any]] = []
        self.counts: dict[str, int] = {}
        self._stack: list[str] = []
        self._peak_before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        self.begin_step()

    def begin_step(self) -> None:
        """Forget what ran since the last step."""
        self._wall: dict[str, float] = defaultdict(float)
        self._cpu: dict[str, float] = defaultdict(float)
        self._peak: dict[str, int] = defaultdict(int)
        self._mark = self._begin = (time.perf_counter(), time.process_time())
        reset_peak()

    def end_step(self) -> None:
        """Keep the step's figures and begin another."""
        self._book()
        begin, now = self._begin, self._mark
        self.steps.append(
            {
                "wall_s": now[0] - begin[0],
                "cpu_s": now[1] - begin[1],
                "phases_wall_s": dict(self._wall),
                "phases_cpu_s": dict(self._cpu),
                "phases_peak_rss_bytes": dict(self._peak),
                "counts": self.counts,
            }
        )
        self.counts = {}
        self.begin_step()

    def _book(self) -> None:
        now = (time.perf_counter(), time.process_time())
        phase = self._stack[-1] if self._stack else "other"
        self._wall[phase] += now[0] - self._mark[0]
        self._cpu[phase] += now[1] - self._mark[1]
        self._peak[phase] = max(self._peak[phase], status_bytes("VmHWM"))
        reset_peak()
        self._mark = (time.perf_counter(), time.process_time())

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Book what runs inside on this phase."""
        self._book()
        self._stack.append(name)
        try:
            yield
        finally:
            self._book()
            self._stack.pop()

    def is_in(self, name: str) -> bool:
        """Whether this phase is the innermost one."""
        return bool(self._stack) and self._stack[-1] == name

    def patch(
        self, owner: Any, method: str, name: str | Callable[..., str | None], after: Any = None
    ) -> None:
        """Time `owner.method`.

        Args:
            owner: object, class or module.
            method: its attribute.
            name: a phase, or a function of the call's arguments that gives one, or None for no phase.
            after: called with the result and the call's arguments.
        """
        inner = getattr(owner, method)

        @functools.wraps(inner)
        def timed(*args: Any, **kwargs: Any) -> Any:
            label = name(*args, **kwargs) if callable(name) else name
            with self.phase(label) if label else contextlib.nullcontext():
                result = inner(*args, **kwargs)
            if after is not None:
                after(result, *args, **kwargs)
            return result

        setattr(owner, method, timed)

    def peak_rss(self) -> int:
        """The largest resident size over all steps."""
        peaks = [value for step in self.steps for value in step["phases_peak_rss_bytes"].values()]
        return max(self._peak_before, *peaks)


def report(
    side: str, shape: Shape, phases: Phases, *, warmup: int, parameters: int, **extra: Any
) -> dict[str, Any]:
    """Medians over the steps after the warm-up, phase by phase."""
    import torch
    import transformers

    kept = phases.steps[warmup:]

    def median(key: str) -> float:
        return statistics.median(step[key] for step in kept)

    def by_phase(key: str, pick: Callable[[list], float]) -> dict[str, float]:
        names = [phase for phase in (*PHASES, "other") if any(phase in step[key] for step in kept)]
        return {phase: pick([step[key].get(phase, 0) for step in kept]) for phase in names}

    return {
        "side": side,
        "shape": asdict(shape),
        "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
        "threads": torch.get_num_threads(),
        "load_average": os.getloadavg(),
        "steps_kept": len(kept),
        "counts_per_step": kept[0]["counts"],
        "step_cpu_s": median("cpu_s"),
        "step_cpu_s_all": [step["cpu_s"] for step in phases.steps],
        "step_wall_s": median("wall_s"),
        "step_wall_s_all": [step["wall_s"] for step in phases.steps],
        "phases_cpu_s": by_phase("phases_cpu_s", statistics.median),
        "phases_wall_s": by_phase("phases_wall_s", statistics.median),
        "peak_rss_bytes": phases.peak_rss(),
        "floor_bytes": floor(shape, parameters),
        "phases_peak_rss_bytes": by_phase("phases_peak_rss_bytes", max),
        **extra,
    }


def floor(shape: Shape, parameters: int) -> int:
    """Bytes that training in float32 holds whatever the batch is.

    Weights, gradients, the two moments of AdamW, and the averaged teacher of SDPO.
    """
    return parameters * 4 * (4 + (shape.algo == "sdpo"))


def floor_flops(shape: Shape, counts: dict[str, int], model: Any) -> float:
    """Multiplications and additions of a step that reads each prompt and teacher's context once.

    2 per weight and token forward, 4 backward; the head on completions only; attention to what a token sees.

    Args:
        shape: the work.
        counts: of a step; completions of the same length.
        model: a Hugging Face causal language model.
    """
    config = model.config
    head = config.vocab_size * config.hidden_size
    body = sum(p.numel() for p in model.parameters()) - head * (1 if config.tie_word_embeddings else 2)
    width = config.num_hidden_layers * config.hidden_size
    rows, written = counts["rows"], counts["generated_tokens"]

    def forward(prompts: int, prompt_tokens: float) -> float:
        length, own = prompt_tokens / prompts, written / rows - 1
        seen = prompts * length * (length + 1) / 2 + rows * own * (length + (own + 1) / 2)
        return 2 * body * (prompt_tokens + rows * own) + 2 * head * written + 4 * width * seen

    once = forward(shape.prompts, counts["prompt_tokens"] / shape.generations)
    flops = 4 * once  # written; forward and backward, which counts twice
    if "teacher_contexts" in counts:
        flops += forward(counts["teacher_contexts"], counts["teacher_context_tokens"])
    return flops


def matmul_rate(dtype: Any) -> float:
    """Floating point operations per CPU second in a product of 2048 by 2048 matrices, the best of seven."""
    import torch

    left, right = torch.randn(2, 2048, 2048).to(dtype)
    seconds = []
    for _ in range(7):
        start = time.process_time()
        left @ right
        seconds.append(time.process_time() - start)
    return 2 * 2048**3 / min(seconds)


def write(result: dict[str, Any], out: Path) -> None:
    """The report as JSON."""
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(result, indent=1) + "\n")
