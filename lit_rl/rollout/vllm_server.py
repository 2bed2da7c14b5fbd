"""VLLMServer: completions by vLLM servers over HTTP; `python -m lit_rl.rollout.serve` starts one."""

import os
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Lock
from typing import Any

import httpx
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from safetensors.torch import save_file
from torch import Tensor, nn

from lit_rl.batch import RolloutBatch
from lit_rl.distributed import gather_objects, rank
from lit_rl.errors import ConfigError
from lit_rl.rollout.completions import Completion, filled
from lit_rl.rollout.engine import RolloutEngine
from lit_rl.rollout.sampling import Sampling
from lit_rl.rollout.vllm_request import is_policy_distribution, request_seed, request_settings

_KEY = "rollout.engine"


class StaleWeights(RuntimeError):
    """A completion was written with other weights than those of the last sync."""


class VLLMServer(RolloutEngine):
    """Writes with one or several vLLM servers on this host.

    Each completion is one request; the completions of a prompt go to one server, so that its prefix cache
    serves the group. A server that is lost is left out until it answers again, and its requests go to the
    others. Weights travel as one file in shared memory. Every completion names the version of the weights
    that wrote it: a server that was restarted, or missed an update, is brought up to date before its rows
    count.

    Args:
        base_url: address or addresses; wins over host and port.
        host: of one server.
        port: of one server.
        server_timeout: seconds without any server before ConnectionError.
        max_num_seqs: requests open at once, over all servers.
        weight_sync: "file", through shared memory on this host; "auto" is the same.

    Raises:
        ConfigError: a value is out of range.
    """

    def __init__(
        self,
        base_url: str | list[str] | None = None,
        host: str = "127.0.0.1",
        port: int = 8000,
        server_timeout: float = 240.0,
        max_num_seqs: int = 256,
        weight_sync: str = "auto",
    ) -> None:
        if weight_sync not in ("auto", "file"):
            raise ConfigError(
                f"{_KEY}.weight_sync must be 'auto' or 'file' (found {weight_sync!r}); 'nccl' is not built."
            )
        if server_timeout <= 0 or max_num_seqs < 1:
            raise ConfigError(
                f"{_KEY}.server_timeout must be > 0 (found {server_timeout!r}) and {_KEY}.max_num_seqs >= 1 "
                f"(found {max_num_seqs!r})."
            )
        urls = [base_url] if isinstance(base_url, str) else base_url or [f"http://{host}:{port}"]
        self.servers = [url.rstrip("/") for url in urls]
        self.server_timeout, self.max_num_seqs = server_timeout, max_num_seqs
        self._lost: set[str] = set()
        self._updates: Counter[str] = Counter()
        self._update_lock = Lock()
        self._file: str | None = None
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._announced: set[str] = set()

    def bind(
        self,
        policy: nn.Module,
        *,
        end_token_ids: list[int],
        pad_token_id: int,
        decode: Callable[[list[int]], str],
        tokenizer: Any = None,
        max_tokens: int | None = None,
    ) -> None:
        """See `RolloutEngine.bind`. Waits for every server.

        Raises:
            ConnectionError: a server does not answer within `server_timeout`.
        """
        self._end_token_ids, self._pad_token_id = list(end_token_ids), pad_token_id
        self._http = httpx.Client(
            timeout=httpx.Timeout(self.server_timeout, connect=5.0),
            limits=httpx.Limits(max_connections=self.max_num_seqs + 1),
            trust_env=False,
        )
        deadline = time.monotonic() + self.server_timeout
        for url in self.servers:
            while not self._is_healthy(url):
                if time.monotonic() > deadline:
                    raise ConnectionError(
                        f"{_KEY}.base_url: no vLLM server answers at {url} after {self.server_timeout:g} s; "
                        f"start one with `python -m lit_rl.rollout.serve`, or raise {_KEY}.server_timeout."
                    )
                time.sleep(0.5)
        shared = Path("/dev/shm")
        self._folder = tempfile.TemporaryDirectory(
            prefix="lit_rl_weights_", dir=shared if os.access(shared, os.W_OK) else None
        )

    def sync_weights(self, named_tensors: Iterable[tuple[str, Tensor]], version: int) -> None:
        """See `RolloutEngine.sync_weights`. The main process writes and sends; the others wait for it.

        Raises:
            ConnectionError: no server took the weights.
        """
        self.policy_version = -1
        file = self._write(named_tensors) if rank() == 0 else None
        self._file = gather_objects(file)[0]
        if rank() == 0:
            self._lost = {url for url in self.servers if not self._updated(url, version)}
            if len(self._lost) == len(self.servers):
                raise ConnectionError(f"{_KEY}.base_url: none of {', '.join(self.servers)} took the weights.")
        gather_objects(None)  # nobody asks before the servers have the weights
        self.policy_version = version

    def generate(
        self,
        prompts: RolloutBatch,
        *,
        num_generations: int,
        sampling: Sampling,
        seed: int,
        step: int,
        on_progress: Callable[[int, int], None] | None = None,
    ) -> RolloutBatch:
        """See `RolloutEngine.generate`. Without log-probabilities when sampling cuts or changes the policy's
        distribution.

        Raises:
            ConnectionError: no server answers for `server_timeout` seconds.
            RuntimeError: a completion that is empty, aborted, or has a log-probability that is not finite.
        """
        sampling = sampling.effective()
        self._announce(sampling)
        rows = prompts.repeat(num_generations)
        settings = request_settings(sampling, self._end_token_ids)
        if sampling.guided_decoding_regex is not None:
            settings["structured_outputs"] = {"regex": sampling.guided_decoding_regex}
        bodies = []
        for row, ids in enumerate(rows.prompt_ids.tolist()):
            own = request_seed(seed, step, int(rows.prompt_row[row]), row % num_generations)
            bodies.append(
                {
                    "token_ids": ids[len(ids) - int(rows.prompt_len[row]) :],
                    "sampling_params": {**settings, "seed": own},
                }
            )
        has_logps = is_policy_distribution(sampling)
        with ThreadPoolExecutor(max_workers=min(self.max_num_seqs, len(rows))) as pool:
            pending = [
                pool.submit(self._completion, body, row // num_generations, has_logps)
                for row, body in enumerate(bodies)
            ]
            completions = []
            for future in pending:
                completions.append(future.result())
                if on_progress is not None:
                    on_progress(len(completions), len(rows))
        return filled(rows, completions, pad_token_id=self._pad_token_id, policy_version=self.policy_version)

    def close(self) -> None:
        if self._folder is not None:
            self._folder.cleanup()
            self._http.close()
            self._folder = None

    # ---------------------------------------------------------------------------------------------- requests

    def _completion(self, body: dict[str, Any], prompt: int, has_logps: bool) -> Completion:
        """One completion, from the prompt's server or from another while that one is lost."""
        deadline = time.monotonic() + self.server_timeout
        while True:
            for url in self._in_order(prompt):
                seen = self._updates[url]
                try:
                    return self._answer(url, body, has_logps)
                except StaleWeights:
                    self._bring_up_to_date(url, seen)
                except httpx.TransportError as error:
                    self._note_lost(url, error)
            if time.monotonic() > deadline:
                servers = ", ".join(self.servers)
                raise ConnectionError(
                    f"{_KEY}.base_url: none of {servers} answers for {self.server_timeout:g} s."
                )
            time.sleep(0.5)

    def _in_order(self, prompt: int) -> list[str]:
        """The prompt's own server first; lost ones last, so that one that came back is found."""
        first = prompt % len(self.servers)
        turned = self.servers[first:] + self.servers[:first]
        return sorted(turned, key=lambda url: url in self._lost)

    def _answer(self, url: str, body: dict[str, Any], has_logps: bool) -> Completion:
        reply = self._post(url, "/inference/v1/generate", body)
        choice = reply["choices"][0]
        versions = {span["version"] for span in choice.get("weight_versions") or []}
        if versions != {str(self.policy_version)}:
            raise StaleWeights(f"{url} wrote with version {sorted(versions)}, not {self.policy_version}.")
        self._lost.discard(url)
        ids = list(choice["token_ids"])
        logps = None
        if has_logps:
            logps = []
            for token, entry in zip(ids, choice["logprobs"]["content"], strict=True):
                assert entry["token_id"] == token, "the first entry of a position is the sampled token"
                logps.append(entry["logprob"])
        return Completion(ids, logps, choice["finish_reason"])

    def _post(self, url: str, route: str, body: dict[str, Any]) -> dict[str, Any]:
        response = self._http.post(url + route, json=body)
        if response.status_code != 200:
            raise RuntimeError(
                f"{url}{route} answered {response.status_code}: {response.text[:300]!r}; start the server "
                "with `python -m lit_rl.rollout.serve`."
            )
        return response.json() if response.content else {}

    # ----------------------------------------------------------------------------------------------- weights

    def _write(self, named_tensors: Iterable[tuple[str, Tensor]]) -> str:
        """The weights as one file, whole or not at all; its path."""
        assert self._folder is not None
        file = Path(self._folder.name) / "weights.safetensors"
        tensors = {name: tensor.detach().cpu().clone().contiguous() for name, tensor in named_tensors}
        save_file(tensors, file.with_suffix(".tmp"))
        file.with_suffix(".tmp").replace(file)
        return str(file)

    def _updated(self, url: str, version: int) -> bool:
        """Send the weights; False when the server does not answer."""
        try:
            self._post(url, "/collective_rpc", {"method": "update_policy_from_file", "args": [self._file]})
            self._post(url, "/reset_prefix_cache", {})
            self._post(url, "/update_weight_version", {"new_version": str(version)})
        except httpx.TransportError as error:
            self._note_lost(url, error)
            return False
        self._updates[url] += 1
        return True

    def _bring_up_to_date(self, url: str, seen: int) -> None:
        """Send the weights again, once for all requests that found them old.

        Args:
            url: the server.
            seen: updates it had taken when the request was sent.
        """
        with self._update_lock:
            if self._updates[url] == seen:
                self._updated(url, self.policy_version)

    def _is_healthy(self, url: str) -> bool:
        try:
            return self._http.get(f"{url}/health", timeout=5.0).status_code == 200
        except httpx.TransportError:
            return False

    def _note_lost(self, url: str, error: Exception) -> None:
        if url not in self._lost:
            self._lost.add(url)
            rank_zero_warn(
                f"the rollout server {url} is lost ({type(error).__name__}); the others take over."
            )

    def _announce(self, sampling: Sampling) -> None:
        """Say once what rollouts are drawn with, whatever the model's own defaults are."""
        ends = request_settings(sampling, self._end_token_ids)["stop_token_ids"]
        text = f"rollout=vllm_server at {', '.join(self.servers)}; {sampling}; end ids {ends}"
        if text not in self._announced:
            self._announced.add(text)
            rank_zero_info(text)
