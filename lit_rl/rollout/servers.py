"""ServerEngine: what the engines behind HTTP share. Several servers, lost ones, retries, current weights."""

import os
import tempfile
import time
import uuid
from abc import abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Lock
from typing import Any, ClassVar, TypeVar

import httpx
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from torch import Tensor, nn

from lit_rl.batch import RolloutBatch
from lit_rl.distributed import gather_objects, rank
from lit_rl.errors import ConfigError
from lit_rl.rollout.completions import Completion, filled
from lit_rl.rollout.engine import RolloutEngine
from lit_rl.rollout.sampling import Sampling
from lit_rl.rollout.scoring import Entry, Scores, scores_of, sequences_of
from lit_rl.rollout.vllm_request import request_seed

_KEY = "rollout.engine"
_AWAY = (502, 503, 504)  # a server that is starting, stopping, or behind a proxy

T = TypeVar("T")


class StaleWeights(RuntimeError):
    """An answer was computed with other weights than those of the last sync."""


class ServerEngine(RolloutEngine):
    """Writes and scores with one or several servers.

    Each completion is one request; the completions of a prompt go to one server, so that its prefix cache
    serves the group. A server that is lost is left out until it answers again, and its requests go to the
    others. Weights travel as the engine says. Every answer names the version of the weights that computed it,
    marked with this run: a server that was restarted, missed an update, or serves another run as well, is
    brought up to date before its rows count.

    Args:
        base_url: address or addresses; wins over host and port.
        host: of one server; 0.0.0.0 is this host.
        port: of one server.
        server_timeout: seconds without any server before ConnectionError.
        max_num_seqs: requests open at once, over all servers.

    Raises:
        ConfigError: a value is out of range.
    """

    choice: ClassVar[str]
    """The word on the command line."""
    start_command: ClassVar[str]
    """What starts a server."""

    def __init__(
        self,
        base_url: str | list[str] | None,
        host: str,
        port: int,
        server_timeout: float,
        max_num_seqs: int,
    ) -> None:
        if server_timeout <= 0 or max_num_seqs < 1:
            raise ConfigError(
                f"{_KEY}.server_timeout must be > 0 (found {server_timeout!r}) and {_KEY}.max_num_seqs >= 1 "
                f"(found {max_num_seqs!r})."
            )
        here = "127.0.0.1" if host == "0.0.0.0" else host
        urls = [base_url] if isinstance(base_url, str) else base_url or [f"http://{here}:{port}"]
        self.servers = [url.rstrip("/") for url in urls]
        self.server_timeout, self.max_num_seqs = server_timeout, max_num_seqs
        self._lost: set[str] = set()
        self._updates: Counter[str] = Counter()
        self._update_lock = Lock()
        self._weights: str | None = None
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._announced: set[str] = set()

    # ------------------------------------------------------------------- what differs from server to server

    @abstractmethod
    def settings(self, sampling: Sampling) -> dict[str, Any]:
        """The sampling settings of a request, without its seed."""

    @abstractmethod
    def answer(
        self, url: str, ids: list[int], settings: dict[str, Any], seed: int, logps: bool
    ) -> Completion:
        """One completion of a prompt.

        Raises:
            StaleWeights: by other weights than those of the last sync.
        """

    @abstractmethod
    def entries(self, url: str, ids: list[int], start: int, topk: int) -> list[list[Entry]]:
        """What the server reports for each token of `ids` from `start` on.

        Raises:
            StaleWeights: by other weights than those of the last sync.
        """

    @abstractmethod
    def has_logps(self, sampling: Sampling) -> bool:
        """Whether the reported log-probabilities are the policy's, at the temperature alone."""

    @abstractmethod
    def prepare(self, policy: nn.Module, folder: Path) -> None:
        """What a server needs to read the weights, beside them."""

    @abstractmethod
    def write(self, named_tensors: Iterable[tuple[str, Tensor]], folder: Path) -> str:
        """The weights in the folder, whole or not at all; what a server is told to read."""

    @abstractmethod
    def load(self, url: str, weights: str, label: str) -> None:
        """Have a server take over the weights, forget what it computed with others, and take the label.

        Raises:
            httpx.TransportError or ConnectionError: the server is lost, for now.
        """

    def how_weights_travel(self) -> str:
        """For the settings that are printed once."""
        return "weights by file"

    def check_room(self, url: str, max_tokens: int) -> None:
        """Refuse a server whose context is shorter than what this run can send it."""

    # ------------------------------------------------------------------------------------------- the engine

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
            ConfigError: a server's context is too short.
        """
        self.end_token_ids, self.pad_token_id = list(end_token_ids), pad_token_id
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
                        f"{_KEY}.base_url: no server for rollout={self.choice} answers at {url} after "
                        f"{self.server_timeout:g} s; start one with `{self.start_command}`, or raise "
                        f"{_KEY}.server_timeout."
                    )
                time.sleep(0.5)
            if max_tokens is not None:
                self.check_room(url, max_tokens)
        shared = Path("/dev/shm")
        self._folder = tempfile.TemporaryDirectory(
            prefix="lit_rl_weights_", dir=shared if os.access(shared, os.W_OK) else None
        )
        if rank() == 0:
            self.prepare(policy, Path(self._folder.name))
        self._run = gather_objects(uuid.uuid4().hex[:8])[0]

    def sync_weights(self, named_tensors: Iterable[tuple[str, Tensor]], version: int) -> None:
        """See `RolloutEngine.sync_weights`. The main process writes and sends; the others wait for it.

        Raises:
            ConnectionError: no server took the weights.
        """
        assert self._folder is not None
        self.policy_version = -1
        own = self.write(named_tensors, Path(self._folder.name)) if rank() == 0 else None
        self._weights = gather_objects(own)[0]
        if rank() == 0:
            self._update_all(self.label_of(version))
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
        settings, has_logps = self.settings(sampling), self.has_logps(sampling)
        self._announce(sampling, settings)
        rows = prompts.repeat(num_generations)
        whole = rows.prompt_ids.tolist()

        def completion(row: int, url: str) -> Completion:
            ids = whole[row][len(whole[row]) - int(rows.prompt_len[row]) :]
            own = request_seed(seed, step, int(rows.prompt_row[row]), row % num_generations)
            return self.answer(url, ids, settings, own, has_logps)

        groups = [row // num_generations for row in range(len(rows))]
        completions = self._answers(completion, groups, on_progress)
        return filled(rows, completions, pad_token_id=self.pad_token_id, policy_version=self.policy_version)

    def score(self, rows: RolloutBatch, *, topk: int = 0) -> Scores:
        """See `RolloutEngine.score`.

        Raises:
            ConnectionError: no server answers for `server_timeout` seconds.
            RuntimeError: a server leaves a token out, or reports a value that is not finite.
        """
        sequences, starts = sequences_of(rows), rows.prompt_len.tolist()

        def entries(row: int, url: str) -> list[list[Entry]]:
            return self.entries(url, sequences[row], starts[row], topk)

        return scores_of(rows, self._answers(entries, range(len(rows))), topk)

    def close(self) -> None:
        if self._folder is not None:
            self._folder.cleanup()
            self._http.close()
            self._folder = None

    # ---------------------------------------------------------------------------------------------- requests

    def _answers(
        self,
        ask: Callable[[int, str], T],
        groups: Sequence[int],
        on_progress: Callable[[int, int], None] | None = None,
    ) -> list[T]:
        """`ask(row, url)` for each row at once, rows of one group of the same server if it is there."""
        with ThreadPoolExecutor(max_workers=max(1, min(self.max_num_seqs, len(groups)))) as pool:
            pending = [pool.submit(self._answer, ask, row, group) for row, group in enumerate(groups)]
            found = []
            for future in pending:
                found.append(future.result())
                if on_progress is not None:
                    on_progress(len(found), len(groups))
        return found

    def _answer(self, ask: Callable[[int, str], T], row: int, group: int) -> T:
        """One answer, from the group's server or from another while that one is lost."""
        deadline = time.monotonic() + self.server_timeout
        why: Exception | None = None
        while True:
            for url in self._in_order(group):
                seen = self._updates[url]
                try:
                    answer = ask(row, url)
                except StaleWeights as error:
                    why = error
                    self._bring_up_to_date(url, seen)
                except httpx.TransportError as error:
                    why = error
                    self._note_lost(url, error)
                else:
                    self._lost.discard(url)
                    return answer
            if time.monotonic() > deadline:
                servers = ", ".join(self.servers)
                raise ConnectionError(
                    f"{_KEY}.base_url: none of {servers} answers for {self.server_timeout:g} s; the last "
                    f"said: {why}"
                )
            time.sleep(0.5)

    def _in_order(self, group: int) -> list[str]:
        """The group's own server first; lost ones last, so that one that came back is found."""
        first = (group + rank()) % len(self.servers)
        turned = self.servers[first:] + self.servers[:first]
        return sorted(turned, key=lambda url: url in self._lost)

    def post(self, url: str, route: str, body: dict[str, Any]) -> Any:
        """The JSON that a server answers.

        Raises:
            httpx.TransportError: it does not answer, or is not ready.
            RuntimeError: it refuses.
        """
        response = self._http.post(url + route, json=body)
        is_away = response.status_code in _AWAY
        if is_away or (response.status_code == 500 and not self._is_healthy(url)):
            raise httpx.RemoteProtocolError(f"{url}{route} answered {response.status_code}")
        if response.status_code != 200:
            raise RuntimeError(
                f"{url}{route} answered {response.status_code}: {response.text[:300]!r}; a server is started "
                f"with `{self.start_command}`."
            )
        is_json = response.headers.get("content-type", "").startswith("application/json")
        return response.json() if is_json and response.content else {}

    def read(self, url: str, route: str) -> Any:
        """The JSON at a route."""
        return self._http.get(url + route).json()

    # ----------------------------------------------------------------------------------------------- weights

    def label_of(self, version: int) -> str:
        """What a server that holds this version of this run says it holds."""
        return f"{self._run}-{version}"

    def check_label(self, url: str, labels: Iterable[str]) -> None:
        """Refuse an answer that was not computed with the weights of the last sync alone.

        Raises:
            StaleWeights: another label, several, or none.
        """
        found, label = set(labels), self.label_of(self.policy_version)
        if found != {label}:
            raise StaleWeights(f"{url} computed with {sorted(found)} instead of {label}.")

    def _update_all(self, label: str) -> None:
        """Send the weights to every server, and again until one has them or the time is up."""
        deadline = time.monotonic() + self.server_timeout
        while True:
            why = [failure for url in self.servers if (failure := self._update(url, label))]
            if len(why) < len(self.servers):
                return
            if time.monotonic() > deadline:
                raise ConnectionError(
                    f"{_KEY}.base_url: none of {', '.join(self.servers)} took the weights within "
                    f"{self.server_timeout:g} s: {'; '.join(why)}"
                )
            time.sleep(0.5)

    def _update(self, url: str, label: str) -> str:
        """Send the weights; why the server is lost, or nothing."""
        assert self._weights is not None
        try:
            self.load(url, self._weights, label)
        except (httpx.TransportError, ConnectionError) as error:
            self._note_lost(url, error)
            return f"{type(error).__name__}: {error}"
        self._updates[url] += 1
        self._lost.discard(url)
        return ""

    def _bring_up_to_date(self, url: str, seen: int) -> None:
        """Send the weights again, once for all requests that found them old.

        Args:
            url: the server.
            seen: updates it had taken when the request was sent.
        """
        with self._update_lock:
            if self._updates[url] == seen:
                self._update(url, self.label_of(self.policy_version))

    def _is_healthy(self, url: str) -> bool:
        try:
            return self._http.get(f"{url}/health", timeout=5.0).status_code == 200
        except httpx.TransportError:
            return False

    def _note_lost(self, url: str, error: Exception) -> None:
        if url not in self._lost:
            self._lost.add(url)
            rank_zero_warn(
                f"the rollout server {url} is lost ({type(error).__name__}: {error}); the others take over."
            )

    def _announce(self, sampling: Sampling, settings: dict[str, Any]) -> None:
        """Say once what rollouts are drawn with, whatever the model's own defaults are."""
        ends = settings["stop_token_ids"]
        where = f"rollout={self.choice} at {', '.join(self.servers)}; {self.how_weights_travel()}"
        if sampling.is_new_to(self._announced):
            rank_zero_info(f"{where}; {sampling}; end ids {ends}")
