"""SGLangServer: completions by SGLang servers over their native HTTP API (version 0.5).

Start one per address, with the model that will be trained:

    python -m sglang.launch_server --model-path MODEL --port 30000 --enable-deterministic-inference

`--enable-deterministic-inference` makes draws follow the seeds of the requests; `--context-length N` bounds
prompt and completion.
"""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from lit_rl.errors import ConfigError
from lit_rl.rollout.completions import Completion
from lit_rl.rollout.sampling import Sampling
from lit_rl.rollout.scoring import Entry
from lit_rl.rollout.servers import ServerEngine
from lit_rl.rollout.vllm_server import written
from lit_rl.rollout.weights import base_of

EXTRAS = ("frequency_penalty", "presence_penalty", "min_new_tokens", "logit_bias", "custom_params")
"""What generation_kwargs may hold beyond the keys that have a field."""


class SGLangServer(ServerEngine):
    """Writes and scores with one or several SGLang servers on this host; `ServerEngine` says how.

    Weights are written as a model folder in shared memory, which the servers read. Log-probabilities are
    SGLang's: at the temperature, before top-k, top-p and min-p.

    Args:
        base_url: address or addresses; wins over host and port.
        host: of one server; 0.0.0.0 is this host.
        port: of one server.
        server_timeout: seconds without any server before ConnectionError.
        max_num_seqs: requests open at once, over all servers.

    Raises:
        ConfigError: a value is out of range.
    """

    choice = "sglang"
    start_command = "python -m sglang.launch_server --model-path MODEL"

    def __init__(
        self,
        base_url: str | list[str] | None = None,
        host: str = "0.0.0.0",
        port: int = 30000,
        server_timeout: float = 240.0,
        max_num_seqs: int = 256,
    ) -> None:
        super().__init__(base_url, host, port, server_timeout, max_num_seqs)

    def settings(self, sampling: Sampling) -> dict[str, Any]:
        for name, value in sampling.generation_kwargs.items():
            if name not in EXTRAS:
                raise ConfigError(
                    f"{sampling.key}.generation_kwargs.{name} is not supported with rollout=sglang (found "
                    f"{value!r}); beside the keys of {sampling.key} there are {', '.join(EXTRAS)}."
                )
        ends = [] if sampling.ignore_eos else self.end_token_ids
        return {
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k if sampling.top_k > 0 else -1,
            "min_p": sampling.min_p or 0.0,
            "repetition_penalty": sampling.repetition_penalty,
            "max_new_tokens": sampling.max_completion_length,
            "stop_token_ids": sorted({*ends, *sampling.stop_token_ids}),
            "stop": list(sampling.stop),
            "ignore_eos": True,
            "skip_special_tokens": False,
            "no_stop_trim": True,
            "regex": sampling.guided_decoding_regex,
            **sampling.generation_kwargs,
        }

    def answer(
        self, url: str, ids: list[int], settings: dict[str, Any], seed: int, logps: bool
    ) -> Completion:
        meta = self._generated(url, ids, {**settings, "sampling_seed": seed % 2**31}, {})
        pairs = [(int(entry[1]), entry[0]) for entry in meta["output_token_logprobs"]]
        values = [logp for _, logp in pairs] if logps else None
        return Completion([token for token, _ in pairs], values, str(meta["finish_reason"]["type"]))

    def entries(self, url: str, ids: list[int], start: int, topk: int) -> list[list[Entry]]:
        settings = {"max_new_tokens": 1, "temperature": 1.0}
        meta = self._generated(url, ids, settings, {"logprob_start_len": 0, "top_logprobs_num": topk})
        tops = meta["input_top_logprobs"][start:] if topk else [[]] * (len(ids) - start)
        out = []
        for own, top in zip(meta["input_token_logprobs"][start:], tops, strict=True):
            best = [(int(entry[1]), entry[0], place) for place, entry in enumerate(top, 1)]
            out.append([*best, (int(own[1]), own[0], topk + 1)])
        return out

    def has_logps(self, sampling: Sampling) -> bool:
        is_plain = sampling.repetition_penalty == 1 and not sampling.generation_kwargs
        return is_plain and sampling.guided_decoding_regex is None

    def _generated(
        self, url: str, ids: list[int], settings: dict[str, Any], asked: dict[str, Any]
    ) -> dict[str, Any]:
        body = {"input_ids": ids, "sampling_params": settings, "return_logprob": True, **asked}
        meta = self.post(url, "/generate", body)["meta_info"]
        self.check_label(url, [str(meta["weight_version"])])
        return meta

    def prepare(self, policy: nn.Module, folder: Path) -> None:
        base = base_of(policy)
        base.config.architectures = base.config.architectures or [type(base).__name__]
        base.config.save_pretrained(folder)

    def write(self, named_tensors: Iterable[tuple[str, Tensor]], folder: Path) -> str:
        return str(written(named_tensors, folder / "model.safetensors").parent)

    def load(self, url: str, weights: str, label: str) -> None:
        body = {"model_path": weights, "load_format": "safetensors", "weight_version": label}
        reply = self.post(url, "/update_weights_from_disk", {**body, "flush_cache": True})
        if not reply["success"]:
            raise RuntimeError(f"{url} did not take the weights: {reply['message']!r}.")
