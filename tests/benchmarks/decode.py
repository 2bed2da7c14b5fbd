"""Time of a rollout by phase: reading prompts, decoding, drawing tokens, the rest.

    python tests/benchmarks/decode.py
    python tests/benchmarks/decode.py --model PATH --prompts 2 --generations 8 --prompt-length 96 --tokens 32

Without a path: a random model of 1.1 million parameters, 16 prompts of 10, 8 completions of 6 tokens each.
PATH is a folder of transformers, a model id, or a .gguf file. On a busy machine trust CPU time.
"""

import argparse
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, PreTrainedModel

from lit_rl.batch import RolloutBatch
from lit_rl.rollout.hf import HFEngine
from lit_rl.rollout.next_token import NextToken
from lit_rl.rollout.processors import Draw
from lit_rl.rollout.sampling import Sampling

Times = dict[str, list[float]]


def loaded(path: str | None) -> PreTrainedModel:
    if path is None:
        torch.manual_seed(0)
        return LlamaForCausalLM(
            LlamaConfig(
                vocab_size=104,
                hidden_size=192,
                intermediate_size=384,
                num_hidden_layers=3,
                num_attention_heads=3,
                num_key_value_heads=3,
                max_position_embeddings=1024,
                tie_word_embeddings=True,
            )
        )
    if path.endswith(".gguf"):
        file = Path(path)
        return AutoModelForCausalLM.from_pretrained(str(file.parent), gguf_file=file.name)
    return AutoModelForCausalLM.from_pretrained(path)


def prompts_of(args: argparse.Namespace, vocabulary: int) -> RolloutBatch:
    generator = torch.Generator().manual_seed(0)
    shape = (args.prompts, args.prompt_length)
    lengths = torch.full((args.prompts,), args.prompt_length)
    if args.ragged:
        lengths = torch.randint(
            args.prompt_length // 2, args.prompt_length + 1, lengths.shape, generator=generator
        )
        lengths[0] = args.prompt_length
    ids = torch.randint(2, vocabulary, shape, generator=generator)
    return RolloutBatch(ids, lengths, torch.arange(args.prompts))


def timed(times: Times, phase_of: Callable[..., str], function: Callable) -> Callable:
    """The function, with CPU and wall seconds of each call added to its phase."""

    def call(*args):
        wall, cpu = time.perf_counter(), time.process_time()
        result = function(*args)
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        entry = times[phase_of(*args)]
        entry[0] += time.perf_counter() - wall
        entry[1] += time.process_time() - cpu
        return result

    return call


def measured(engine: HFEngine, prompts: RolloutBatch, args: argparse.Namespace, step: int) -> Times:
    """Seconds of one rollout by phase."""
    times: Times = defaultdict(lambda: [0.0, 0.0])
    originals = NextToken.__call__, NextToken.keep, Draw.__call__
    phase = lambda model, ids, *rest: "prefill" if ids.shape[1] > 1 else "decode"  # noqa: E731
    NextToken.__call__ = timed(times, phase, originals[0])  # type: ignore[method-assign]
    NextToken.keep = timed(times, lambda *rest: "cache", originals[1])  # type: ignore[method-assign]
    Draw.__call__ = timed(times, lambda *rest: "sampling", originals[2])  # type: ignore[method-assign]
    sampling = Sampling(max_completion_length=args.tokens, ignore_eos=True, top_p=args.top_p)
    whole = timed(times, lambda *rest: "whole", lambda: engine.generate(
        prompts, num_generations=args.generations, sampling=sampling, seed=0, step=step
    ))  # fmt: skip
    try:
        whole()
    finally:
        NextToken.__call__, NextToken.keep, Draw.__call__ = originals  # type: ignore[method-assign]
    parts = [times[name] for name in ("prefill", "decode", "cache", "sampling")]
    times["rest"] = [times["whole"][i] - sum(part[i] for part in parts) for i in (0, 1)]
    return times


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default=None)
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--generations", type=int, default=8)
    parser.add_argument("--prompt-length", type=int, default=10)
    parser.add_argument("--tokens", type=int, default=6)
    parser.add_argument("--top-p", type=float, default=1.0)
    parser.add_argument("--ragged", action="store_true", help="prompts of different lengths")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--cache", default=None)
    parser.add_argument("--max-num-seqs", type=int, default=1024)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--device", default="cpu")
    args = parser.parse_args()

    torch.set_num_threads(args.threads)
    model = loaded(args.model).to(args.device)
    engine = HFEngine(args.dtype, args.max_num_seqs, args.cache)
    engine.bind(model, end_token_ids=[], pad_token_id=0, decode=str)
    prompts = prompts_of(args, model.config.get_text_config().vocab_size)
    measured(engine, prompts, args, 0)
    runs = [measured(engine, prompts, args, step) for step in range(args.repeats)]
    best = min(runs, key=lambda times: times["whole"][1])
    tokens = args.prompts * args.generations * args.tokens
    print(f"{sum(p.numel() for p in model.parameters()) / 1e6:.1f}M parameters, {args.prompts} prompts of "
          f"{args.prompt_length}, {args.generations} x {args.tokens} tokens each, {args.threads} thread(s), "
          f"best of {args.repeats}")  # fmt: skip
    print(f"{'phase':10} {'wall ms':>10} {'CPU ms':>10}")
    for name in ("prefill", "decode", "cache", "sampling", "rest", "whole"):
        print(f"{name:10} {best[name][0] * 1e3:10.1f} {best[name][1] * 1e3:10.1f}")
    wall, cpu = best["whole"]
    print(f"{tokens / wall:.0f} tokens/s by the wall clock, {tokens / cpu:.0f} by CPU time")


if __name__ == "__main__":
    main()
