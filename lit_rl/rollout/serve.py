"""Starts a vLLM server that takes weight updates: `python -m lit_rl.rollout.serve MODEL --port 8000`.

Further arguments go to vLLM. The control routes have no password: without `--host` the server listens on this
host only, and an address that others reach is for a network where everybody may command the server.
"""

import argparse
import os
import sys

from lit_rl.rollout.leftovers import remove_leftovers
from lit_rl.rollout.vllm_guard import reads_in_chunks


def command(model: str, port: int, dtype: str, rest: list[str], host: str = "127.0.0.1") -> list[str]:
    """The command line of vLLM's own server.

    Args:
        model: folder or hub id of the policy that will be trained.
        port: to listen on.
        dtype: of weights and activations.
        rest: further arguments of vLLM.
        host: address to listen on.
    """
    return [
        *(sys.executable, "-m", "vllm.entrypoints.openai.api_server"),
        *("--model", model, "--host", host, "--port", str(port), "--dtype", dtype),
        *("--logprobs-mode", "processed_logprobs", "--max-logprobs", "-1", "--generation-config", "vllm"),
        "--enable-scale-out",
        *("--worker-extension-cls", "lit_rl.rollout.vllm_worker.WeightUpdate", "--enforce-eager"),
        *([] if reads_in_chunks() else ["--no-enable-chunked-prefill"]),
        *rest,
    ]


def main() -> None:
    """Replace this process by the server."""
    parser = argparse.ArgumentParser(prog="lit_rl.rollout.serve", description=__doc__)
    parser.add_argument("model", help="folder or hub id of the policy that will be trained")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on; there is no password")
    parser.add_argument("--dtype", default="auto", help="of weights and activations")
    arguments, rest = parser.parse_known_args()
    remove_leftovers()
    environment = {**os.environ, "VLLM_SERVER_DEV_MODE": "1", "VLLM_NO_USAGE_STATS": "1"}
    line = command(arguments.model, arguments.port, arguments.dtype, rest, arguments.host)
    print(" ".join(line), flush=True)
    os.execve(line[0], line, environment)


if __name__ == "__main__":
    main()
