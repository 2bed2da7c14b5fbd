"""A real vLLM server process: contract of an engine, a server that is lost and comes back, none at all."""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from urllib.request import urlopen

import pytest
import torch

from lit_rl.errors import ConfigError
from lit_rl.models.roles import named_base_tensors
from lit_rl.rollout.serve import command
from lit_rl.rollout.vllm_server import VLLMServer

from .test_vllm import PROMPTS, SHAPE, _by_transformers, perturbed
from .tiny import (
    END,
    PAD,
    bound,
    completions,
    generate,
    llama,
    numbers_as_text,
    plain_logps,
    prompts_of,
)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Server:
    """A server process on a port that stays the same over restarts."""

    def __init__(self, folder: Path, before: Sequence[str] = (), after: Sequence[str] = ()) -> None:
        self.folder, self.port, self.before, self.after = folder, free_port(), before, after
        self.url = f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        environment = {**os.environ, "VLLM_SERVER_DEV_MODE": "1", "VLLM_CPU_KVCACHE_SPACE": "1"}
        rest = ["--skip-tokenizer-init", "--max-model-len", "128", "--max-num-seqs", "64"]
        log = (self.folder / "server.log").open("ab")
        self.process = subprocess.Popen(
            [*self.before, *command(str(self.folder), self.port, "float32", [*rest, *self.after])],
            env=environment,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )

    def wait(self) -> None:
        for _ in range(600):
            try:
                with urlopen(f"{self.url}/health", timeout=2) as answer:
                    if answer.status == 200:
                        return
            except OSError:
                pass
            assert self.process.poll() is None, (self.folder / "server.log").read_text()[-3000:]
            time.sleep(0.5)
        raise AssertionError("the server did not start")

    def kill(self) -> None:
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


def bound_to(urls: list[str], model, **settings) -> VLLMServer:
    engine = VLLMServer(base_url=urls, **settings)
    engine.bind(model, end_token_ids=[END], pad_token_id=PAD, decode=numbers_as_text)
    return engine


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("policy")
    llama(**SHAPE).save_pretrained(folder)
    server = Server(folder)
    server.start()
    try:
        server.wait()
        yield server
    finally:
        server.kill()


@pytest.mark.vllm
@pytest.mark.parametrize("way", ["file", "gloo"])
def test_a_server_writes_with_what_was_synced_last(server: Server, way: str) -> None:
    model = llama(seed=5, **SHAPE)
    engine = bound_to([server.url], model, weight_sync=way, group_port=free_port())
    for version in range(1, 3):
        perturbed(model, version)
        engine.sync_weights(named_base_tensors(model), version)
        greedy = generate(engine, PROMPTS, temperature=0.0, ignore_eos=True)
        assert completions(greedy) == completions(_by_transformers(model)), version
        drawn = generate(engine, PROMPTS, G=4, temperature=0.7)
        assert drawn.policy_version.unique().tolist() == [version]
        expected = plain_logps(model, drawn, temperature=0.7)
        torch.testing.assert_close(drawn.rollout_logps, expected, atol=1e-4, rtol=0)
    again = generate(engine, PROMPTS, G=4, temperature=0.7)
    assert completions(again) == completions(drawn)
    engine.close()


@pytest.mark.vllm
def test_a_server_scores_given_tokens(server: Server) -> None:
    model = perturbed(llama(seed=5, **SHAPE), 9)
    engine = bound_to([server.url], model)
    engine.sync_weights(named_base_tensors(model), 3)
    rows = generate(engine, PROMPTS, G=2)
    other = prompts_of(PROMPTS[::-1]).repeat(2)
    rows.prompt_ids, rows.prompt_len = other.prompt_ids, other.prompt_len
    for topk in (0, 25):
        found, expected = engine.score(rows, topk=topk), bound(model).score(rows, topk=topk)
        torch.testing.assert_close(found.logps, expected.logps, atol=1e-4, rtol=0)
        torch.testing.assert_close(found.top_logps, expected.top_logps, atol=1e-4, rtol=0)
    engine.close()


@pytest.mark.vllm
def test_a_context_that_is_too_short_is_refused(server: Server) -> None:
    engine = VLLMServer(base_url=server.url)
    with pytest.raises(ConfigError, match=r"hold the 129 tokens .*--max-model-len 128.*--max-model-len 129"):
        engine.bind(llama(), end_token_ids=[END], pad_token_id=PAD, decode=numbers_as_text, max_tokens=129)


@pytest.mark.vllm
def test_a_server_that_was_lost_comes_back_with_the_current_weights(server: Server) -> None:
    """It restarts with the weights of its folder; no completion of theirs may count."""
    model = perturbed(llama(seed=6, **SHAPE), 3)
    ways = {"group_port": free_port(), "server_timeout": 300.0}
    engines = [bound_to([server.url], model, weight_sync=way, **ways) for way in ("file", "gloo")]
    for engine in engines:
        engine.sync_weights(named_base_tensors(model), 7)
    server.kill()
    server.start()
    with pytest.warns(UserWarning, match="is lost"):
        rows = [generate(engine, PROMPTS, temperature=0.0, ignore_eos=True) for engine in engines]
    for engine, greedy in zip(engines, rows, strict=True):
        assert completions(greedy) == completions(_by_transformers(model))
        assert greedy.policy_version.unique().tolist() == [7]
        engine.close()


def test_no_server_is_a_connection_error_that_names_the_address() -> None:
    url = f"http://127.0.0.1:{free_port()}"
    with pytest.raises(ConnectionError, match=url):
        bound_to([url], llama(), server_timeout=0.2)


def test_the_server_command_makes_weights_updatable() -> None:
    line = command("folder", 8000, "auto", ["--max-model-len", "64"])
    assert line[0] == sys.executable and line[-2:] == ["--max-model-len", "64"]
    assert "lit_rl.rollout.vllm_worker.WeightUpdate" in line
    assert ("--no-enable-chunked-prefill" in line) is not torch.cuda.is_available()  # see test_vllm.py
