"""VLLMServer: completions by vLLM servers over HTTP; `python -m lit_rl.rollout.serve` starts one."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import Tensor, nn

from lit_rl.errors import ConfigError
from lit_rl.rollout.completions import Completion
from lit_rl.rollout.sampling import Sampling
from lit_rl.rollout.scoring import Entry, reported
from lit_rl.rollout.servers import ServerEngine
from lit_rl.rollout.vllm_request import is_policy_distribution, request_settings, scoring_settings


class VLLMServer(ServerEngine):
    """Writes and scores with one or several vLLM servers on this host; `ServerEngine` says how.

    Memory share, devices and context of a server are arguments of the command that starts it.

    Args:
        base_url: address or addresses; wins over host and port.
        host: of one server; 0.0.0.0 is this host.
        port: of one server.
        server_timeout: seconds without any server before ConnectionError.
        max_num_seqs: requests open at once, over all servers.
        weight_sync: "file", through shared memory on this host; "auto" is the same.

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
        weight_sync: str = "auto",
    ) -> None:
        if weight_sync not in ("auto", "file"):
            raise ConfigError(
                f"rollout.engine.weight_sync must be 'auto' or 'file' (found {weight_sync!r}); 'nccl' is not "
                "built."
            )
        super().__init__(base_url, host, port, server_timeout, max_num_seqs)

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
        return str(written(named_tensors, folder / "weights.safetensors"))

    def load(self, url: str, weights: str, label: str) -> None:
        self.post(url, "/collective_rpc", {"method": "update_policy_from_file", "args": [weights]})
        self.post(url, "/reset_prefix_cache", {})
        self.post(url, "/update_weight_version", {"new_version": label})


def written(named_tensors: Iterable[tuple[str, Tensor]], file: Path) -> Path:
    """The weights in one safetensors file, tied ones under each name; whole or not at all."""
    tensors = {name: tensor.detach().cpu().clone().contiguous() for name, tensor in named_tensors}
    unfinished = file.with_suffix(".tmp")
    save_file(tensors, unfinished, metadata={"format": "pt"})
    return unfinished.replace(file)
