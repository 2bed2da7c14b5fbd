"""Tokens per second of each rollout engine, as a table.

    python tests/benchmarks/engines.py
    python tests/benchmarks/engines.py --models embedded --engines hf vllm --generations 8 --repeats 1

Needs an environment with vLLM. Each engine has a process of its own, weights of the model as they are, in
float32 unless told otherwise; every completion goes on to `--tokens` whatever it says. Seconds are those of
the fastest of `--repeats` rollouts after one that does not count, with the sync of the weights timed apart.
"""

import argparse
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any
from urllib.request import urlopen

SMOLLM2 = "HuggingFaceTB/SmolLM2-135M-Instruct"
ENGINES = ("hf", "vllm", "vllm_server")


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", nargs="+", default=["embedded", SMOLLM2], help="as model.path")
    parser.add_argument("--engines", nargs="+", default=list(ENGINES), choices=ENGINES)
    parser.add_argument("--generations", nargs="+", type=int, default=[1, 8], help="per prompt")
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--prompt-length", type=int, default=48)
    parser.add_argument("--tokens", type=int, default=32, help="of each completion")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--one", nargs=2, metavar=("MODEL", "ENGINE"), help=argparse.SUPPRESS)
    return parser.parse_args()


def started(model: Any, args: argparse.Namespace, folder: Path) -> tuple[subprocess.Popen, str]:
    """A server of this model, and its address."""
    model.save_pretrained(folder)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    room = str(args.prompt_length + args.tokens + 1)
    line = [sys.executable, "-m", "lit_rl.rollout.serve", str(folder), "--port", str(port)]
    line += ["--dtype", args.dtype, "--skip-tokenizer-init", "--max-model-len", room]
    log = (folder / "server.log").open("wb")
    server = subprocess.Popen(line, stdout=log, stderr=log, start_new_session=True)
    url = f"http://127.0.0.1:{port}"
    while True:
        assert server.poll() is None, (folder / "server.log").read_text()[-3000:]
        try:
            with urlopen(f"{url}/health", timeout=2):
                return server, url
        except OSError:
            time.sleep(0.5)


def measured(name: str, kind: str, args: argparse.Namespace) -> list[dict[str, Any]]:
    """The rows of one engine, in this process."""
    import torch

    from lit_rl import load_policy
    from lit_rl.batch import RolloutBatch
    from lit_rl.models.roles import named_base_tensors
    from lit_rl.rollout.engine import RolloutEngine
    from lit_rl.rollout.hf import HFEngine
    from lit_rl.rollout.sampling import Sampling
    from lit_rl.rollout.vllm_colocate import VLLMColocate
    from lit_rl.rollout.vllm_server import VLLMServer

    torch.set_num_threads(args.threads)
    model = load_policy(name, dtype=args.dtype)
    generator = torch.Generator().manual_seed(0)
    shape = (args.prompts, args.prompt_length)
    ids = torch.randint(5, model.config.vocab_size, shape, generator=generator)
    prompts = RolloutBatch(ids, torch.full((args.prompts,), shape[1]), torch.arange(args.prompts))
    sampling = Sampling(max_completion_length=args.tokens, ignore_eos=True)
    server, rows = None, []
    with tempfile.TemporaryDirectory() as folder:
        try:
            begin = time.perf_counter()
            engine: RolloutEngine = HFEngine()
            if kind == "vllm":
                engine = VLLMColocate(max_num_seqs=256, gpu_memory_utilization=0.1)
            elif kind == "vllm_server":
                server, url = started(model, args, Path(folder))
                engine = VLLMServer(base_url=url)
            room = args.prompt_length + args.tokens
            engine.bind(model, end_token_ids=[], pad_token_id=0, decode=str, max_tokens=room)
            start = time.perf_counter() - begin
            for count in args.generations:
                engine.sync_weights(named_base_tensors(model), len(rows) * 2)
                begin = time.perf_counter()
                engine.sync_weights(named_base_tensors(model), len(rows) * 2 + 1)
                sync = time.perf_counter() - begin
                seconds = []
                for step in range(args.repeats + 1):
                    begin = time.perf_counter()
                    engine.generate(prompts, num_generations=count, sampling=sampling, seed=0, step=step)
                    seconds.append(time.perf_counter() - begin)
                rate = args.prompts * count * args.tokens / min(seconds[1:])
                rows.append(
                    {"model": name, "engine": kind, "generations": count, "rate": rate}
                    | {"sync": sync, "start": start}
                )
            engine.close()
        except RuntimeError:
            if server is not None:
                print((Path(folder) / "server.log").read_text()[-3000:], file=sys.stderr)
            raise
        finally:
            if server is not None:
                os.killpg(server.pid, signal.SIGKILL)
                server.wait()
    return rows


def main() -> None:
    args = parsed()
    if args.one:
        print("ROWS " + json.dumps(measured(*args.one, args)), flush=True)
        os._exit(0)  # what vLLM leaves running ends here
    print(
        f"{args.prompts} prompts of {args.prompt_length} tokens, {args.tokens} tokens per completion, "
        f"{args.dtype}, {args.threads} threads, best of {args.repeats}\n"
    )
    print("| model | engine | completions per prompt | tokens/s | s to sync | s to start |")
    print("| --- | --- | --- | --- | --- | --- |", flush=True)
    environment = {**os.environ, "OMP_NUM_THREADS": str(args.threads), "VLLM_CPU_KVCACHE_SPACE": "1"}
    for name in args.models:
        for kind in args.engines:
            line = [sys.executable, *sys.argv, "--one", name, kind]
            done = subprocess.run(line, env=environment, capture_output=True, text=True)
            found = [text for text in done.stdout.splitlines() if text.startswith("ROWS ")]
            if done.returncode or not found:
                raise SystemExit(f"{name}, {kind}: {done.stdout[-1000:]}{done.stderr[-3000:]}")
            for row in json.loads(found[0].removeprefix("ROWS ")):
                print(
                    f"| {row['model']} | {row['engine']} | {row['generations']} | {row['rate']:.0f} | "
                    f"{row['sync']:.2f} | {row['start']:.1f} |",
                    flush=True,
                )


if __name__ == "__main__":
    main()
