"""VLLMServer: completions by vLLM servers over HTTP; `python -m lit_rl.rollout.serve` starts one."""

import uuid
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from lit_rl.errors import ConfigError
from lit_rl.rollout import weight_group
from lit_rl.rollout.completions import Completion
from lit_rl.rollout.sampling import Sampling
from lit_rl.rollout.scoring import Entry, reported
from lit_rl.rollout.servers import ServerEngine
from lit_rl.rollout.vllm_request import is_policy_distribution, request_settings, scoring_settings

WAYS = ("auto", "nccl", "gloo", "file")
"""What `rollout.engine.weight_sync` may be."""
_PROBE = "run"  # beside the weights: the mark of this run, for a server that sees these files to read


class VLLMServer(ServerEngine):
    """Writes and scores with one or several vLLM servers, on this host or others; `ServerEngine` says how.

    Memory share, devices and context of a server are arguments of the command that starts it.

    Args:
        base_url: address or addresses; wins over host and port.
        host: of one server; 0.0.0.0 is this host.
        port: of one server.
        server_timeout: seconds without any server before ConnectionError.
        max_num_seqs: requests open at once, over all servers.
        group_port: of the trainer, where the workers of a server on another host meet it for a transfer.
        weight_sync: how weights travel: "file", through shared memory, to servers that see this host's files;
            "nccl" or "gloo", over a process group, to GPUs or through memory; "auto" finds out for each
            server, "file" before "nccl" before "gloo".

    Raises:
        ConfigError: a value is out of range.
    """

    choice = "vllm_server"
    start_command = "python -m lit_rl.rollout.serve MODEL"

    def __init__(
        self,
        base_url: str | list[str] | None = None,
        host: str = "0.0.0.0",
        port: int = 8000,
        server_timeout: float = 240.0,
        max_num_seqs: int = 256,
        group_port: int = 51216,
        weight_sync: str = "auto",
    ) -> None:
        if weight_sync not in WAYS:
            raise ConfigError(
                f"rollout.engine.weight_sync must be one of {', '.join(WAYS)} (found {weight_sync!r})."
            )
        if not 1 <= group_port <= 65535:
            raise ConfigError(f"rollout.engine.group_port must be in 1..65535 (found {group_port!r}).")
        super().__init__(base_url, host, port, server_timeout, max_num_seqs)
        self.group_port, self.weight_sync = group_port, weight_sync
        self.ways: dict[str, str] = {}

    def settings(self, sampling: Sampling) -> dict[str, Any]:
        settings = request_settings(sampling, self.end_token_ids)
        if sampling.guided_decoding_regex is not None:
            settings["structured_outputs"] = {"regex": sampling.guided_decoding_regex}
        return settings

    def answer(
        self, url: str, ids: list[int], settings: dict[str, Any], seed: int, logps: bool
    ) -> Completion:
        choice = self._generated(url, ids, {**settings, "seed": seed})["choices"][0]
        tokens = list(choice["token_ids"])
        values = None
        if logps:
            values = []
            for token, entry in zip(tokens, choice["logprobs"]["content"], strict=True):
                assert entry["token_id"] == token, "the first entry of a position is the sampled token"
                values.append(entry["logprob"])
        return Completion(tokens, values, choice["finish_reason"])

    def entries(self, url: str, ids: list[int], start: int, topk: int) -> list[list[Entry]]:
        reply = self._generated(url, ids, scoring_settings(topk))
        return [reported(position) for position in reply["prompt_logprobs"][start:]]

    def has_logps(self, sampling: Sampling) -> bool:
        return is_policy_distribution(sampling)

    def _generated(self, url: str, ids: list[int], settings: dict[str, Any]) -> dict[str, Any]:
        reply = self.post(url, "/inference/v1/generate", {"token_ids": ids, "sampling_params": settings})
        self.check_label(url, (span["version"] for span in reply["choices"][0].get("weight_versions") or []))
        return reply

    def check_room(self, url: str, max_tokens: int) -> None:
        room = self.read(url, "/v1/models")["data"][0]["max_model_len"]
        if room < max_tokens:
            raise ConfigError(
                f"rollout.engine.base_url: the server at {url} must hold the {max_tokens} tokens of this "
                f"run's longest prompt and completion (found --max-model-len {room}); start it with "
                f"`{self.start_command} --max-model-len {max_tokens}`."
            )

    def prepare(self, policy: nn.Module, folder: Path) -> None:
        """Nothing: the server has the model's configuration."""

    def write(self, named_tensors: Iterable[tuple[str, Tensor]], folder: Path) -> str:
        (folder / _PROBE).write_text(self._run)
        return str(written(named_tensors, folder / "weights.safetensors"))

    def load(self, url: str, weights: str, label: str) -> None:
        # What a transfer that breaks off leaves is neither version; its answers must not count.
        self.post(url, "/update_weight_version", {"new_version": f"{label} incomplete"})
        workers = self.ask_workers(url, "describe_worker", str(Path(weights).with_name(_PROBE)), self._run)
        way = self.ways[url] = self._way(url, workers)
        if way == "file":
            reports = self.ask_workers(url, "update_policy_from_file", weights)
        else:
            reports = self._by_group(url, weights, len(workers), way)
        for report in reports:
            if "lost" in report:
                raise ConnectionError(report["lost"])
            if "error" in report:
                raise RuntimeError(f"{url} did not take the weights: {report['error']}.")
        self.post(url, "/reset_prefix_cache", {})
        self.post(url, "/update_weight_version", {"new_version": label})

    def ask_workers(self, url: str, method: str, *arguments: str) -> list[dict[str, Any]]:
        """What each worker of a server answers."""
        body = {"method": method, "args": arguments}
        return list(self.post(url, "/collective_rpc", body)["results"])

    def _way(self, url: str, workers: list[dict[str, Any]]) -> str:
        """How weights travel to a server.

        Raises:
            ConfigError: not as `weight_sync` says.
        """
        has_gpus = torch.cuda.is_available() and all(worker["device"] == "cuda" for worker in workers)
        sees_files, engines = all(worker["shares_files"] for worker in workers), workers[0]["engines"]
        obstacles = {
            "file": "" if sees_files else "it does not see this host's files",
            "nccl": "" if has_gpus else "trainer and server are not both on CUDA",
            "gloo": "",
        }
        if engines > 1:
            several = f"it has {engines} data parallel engines; start as many servers instead"
            obstacles |= dict.fromkeys(("nccl", "gloo"), several)
        wanted = [way for way in ("file", "nccl", "gloo") if self.weight_sync in ("auto", way)]
        for way in wanted:
            if not obstacles[way]:
                return way
        raise ConfigError(
            f"rollout.engine.weight_sync (found {self.weight_sync!r}) does not reach the server at {url}: "
            f"{'; '.join(f'{way}: {obstacles[way]}' for way in wanted)}."
        )

    def _by_group(self, url: str, weights: str, workers: int, backend: str) -> list[dict[str, Any]]:
        """Send what the file holds to the workers of a server."""
        address = httpx.URL(url)
        return weight_group.send(
            load_file(weights),
            partial(self.ask_workers, url, "update_policy_from_group"),
            server=(address.host, address.port or (443 if address.scheme == "https" else 80)),
            port=self.group_port,
            workers=workers,
            backend=backend,
            token=uuid.uuid4().hex,
            seconds=self.server_timeout,
        )

    def how_weights_travel(self) -> str:
        ways = [self.ways.get(url, "not yet sent") for url in self.servers]
        port = "" if {*ways} <= {"file"} else f" (group port {self.group_port})"
        return f"weights by {', '.join(ways)}{port}"


def written(named_tensors: Iterable[tuple[str, Tensor]], file: Path) -> Path:
    """The weights in one safetensors file, tied ones under each name; whole or not at all."""
    tensors = {name: tensor.detach().cpu().clone().contiguous() for name, tensor in named_tensors}
    unfinished = file.with_suffix(".tmp")
    save_file(tensors, unfinished, metadata={"format": "pt"})
    return unfinished.replace(file)
