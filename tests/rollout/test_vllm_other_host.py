"""Weights to a vLLM server that does not see the trainer's files, with two tensor parallel workers.

The server runs with a shared memory of its own where the system permits that, as on another host.
"""

import os
import signal
import socket
import subprocess
import time
import warnings
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import cache, partial
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn

from lit_rl.errors import ConfigError
from lit_rl.models.roles import named_base_tensors
from lit_rl.rollout.vllm_server import written
from lit_rl.rollout.weight_group import send

from .test_vllm import PROMPTS, SHAPE, _by_transformers, perturbed
from .test_vllm_server import Server, bound_to, free_port
from .tiny import completions, generate, llama, plain_logps

pytestmark = pytest.mark.vllm

OWN_MEMORY = ["unshare", "--mount", "sh", "-c", 'mount -t tmpfs tmpfs /dev/shm && exec "$@"', "sh"]


@cache
def is_hidden() -> bool:
    return subprocess.run([*OWN_MEMORY, "true"], capture_output=True).returncode == 0


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("policy")
    llama(**SHAPE).save_pretrained(folder)
    unbound = ["env", "VLLM_CPU_OMP_THREADS_BIND=nobind", "OMP_NUM_THREADS=1"]
    server = Server(
        folder,
        before=[*unbound, *(OWN_MEMORY if is_hidden() else ())],
        after=["--tensor-parallel-size", "2"],
    )
    server.start()
    try:
        server.wait()
        yield server
    finally:
        server.kill()


def engine_of(server: Server, model: nn.Module, **settings):
    settings = {"weight_sync": "auto" if is_hidden() else "gloo", "group_port": free_port()} | settings
    return bound_to([server.url], model, **settings)


def is_written_by(engine, model: nn.Module) -> bool:
    greedy = generate(engine, PROMPTS, temperature=0.0, ignore_eos=True)
    return completions(greedy) == completions(_by_transformers(model))


def test_it_writes_with_what_was_synced_last(server: Server) -> None:
    model = llama(seed=5, **SHAPE)
    engine = engine_of(server, model)
    for version in range(1, 3):
        perturbed(model, version)
        engine.sync_weights(named_base_tensors(model), version)
        assert is_written_by(engine, model), version
        drawn = generate(engine, PROMPTS, G=4, temperature=0.7)
        assert drawn.policy_version.unique().tolist() == [version]
        expected = plain_logps(model, drawn, temperature=0.7)
        torch.testing.assert_close(drawn.rollout_logps, expected, atol=1e-4, rtol=0)
    assert engine.how_weights_travel() == f"weights by gloo (group port {engine.group_port})"


def test_adapters_arrive_merged(server: Server) -> None:
    model = llama(seed=5, **SHAPE)
    policy = get_peft_model(model, LoraConfig(r=2, lora_alpha=8, target_modules=["q_proj", "down_proj"]))
    for name, parameter in policy.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter, std=0.3)
    engine = engine_of(server, policy)
    engine.sync_weights(named_base_tensors(policy), 20)
    assert is_written_by(engine, policy)


def test_a_way_that_does_not_lead_there_is_refused(server: Server) -> None:
    model = llama(seed=5, **SHAPE)
    for way, why in {"file": "does not see this host's files", "nccl": "not both on CUDA"}.items():
        if way == "nccl" or is_hidden():
            engine = engine_of(server, model, weight_sync=way)
            with pytest.raises(ConfigError, match=rf"weight_sync .found '{way}'.*{why}"):
                engine.sync_weights(named_base_tensors(model), 1)


def test_a_port_that_another_program_holds_is_named_in_time(server: Server) -> None:
    model = llama(seed=5, **SHAPE)
    engine = engine_of(server, model, server_timeout=4.0)
    with socket.create_server(("127.0.0.1", engine.group_port)):
        start = time.monotonic()
        text = rf"took the weights within 4 s: .*group_port .found {engine.group_port}. cannot be opened"
        with pytest.warns(UserWarning, match="is lost"), pytest.raises(ConnectionError, match=text):
            engine.sync_weights(named_base_tensors(model), 1)
        assert time.monotonic() - start < 20.0
    engine = engine_of(server, model, group_port=engine.group_port)
    engine.sync_weights(named_base_tensors(model), 1)
    assert is_written_by(engine, model)


def test_two_trainers_at_once_each_get_their_own(server: Server) -> None:
    """They share server and port; what the other one sent never counts."""
    models = [perturbed(llama(seed=seed, **SHAPE), seed) for seed in (7, 8)]
    port = free_port()
    engines = [engine_of(server, model, group_port=port) for model in models]
    with ThreadPoolExecutor(2) as pool, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # who comes second finds the port in use and tries again
        list(pool.map(lambda e, m: e.sync_weights(named_base_tensors(m), 1), engines, models))
    for _ in range(2):
        for engine, model in zip(engines, models, strict=True):
            assert is_written_by(engine, model)


def test_a_server_that_stands_still_is_given_up_in_time_and_taken_back(server: Server) -> None:
    model = perturbed(llama(seed=9, **SHAPE), 1)
    engine = engine_of(server, model, server_timeout=2.0)
    os.killpg(server.process.pid, signal.SIGSTOP)
    try:
        start = time.monotonic()
        with pytest.warns(UserWarning, match="is lost"), pytest.raises(ConnectionError, match="Timeout"):
            engine.sync_weights(named_base_tensors(model), 1)
        assert time.monotonic() - start < 20.0
    finally:
        os.killpg(server.process.pid, signal.SIGCONT)
    engine = engine_of(server, model)
    engine.sync_weights(named_base_tensors(model), 2)
    assert is_written_by(engine, model)


def test_weights_that_do_not_fit_are_an_error_and_what_they_left_never_counts(
    server: Server, tmp_path: Path
) -> None:
    model = perturbed(llama(seed=10, **SHAPE), 1)
    engine = engine_of(server, model)
    engine.sync_weights(named_base_tensors(model), 1)
    other = dict(named_base_tensors(perturbed(llama(seed=11, **SHAPE), 2)))
    (tmp_path / "run").write_text("of nobody")
    wrong = written([*other.items(), ("model.unheard_of.weight", torch.ones(1))], tmp_path / "weights")
    with pytest.raises(RuntimeError, match=r"did not take the weights: .*unheard_of"):
        engine.load(server.url, str(wrong), engine.label_of(1))
    assert is_written_by(engine, model)


def test_a_trainer_that_dies_in_a_transfer_leaves_no_server_waiting(server: Server) -> None:
    class Dying(dict[str, torch.Tensor]):
        def __getitem__(self, name: str) -> torch.Tensor:
            if name == "model.layers.1.mlp.up_proj.weight":
                raise InterruptedError("killed")
            return super().__getitem__(name)

    model = perturbed(llama(seed=12, **SHAPE), 1)
    engine = engine_of(server, model)
    engine.sync_weights(named_base_tensors(model), 1)
    start = time.monotonic()
    with pytest.raises(InterruptedError, match="killed"):
        send(
            Dying(named_base_tensors(model)),
            partial(engine.ask_workers, server.url, "update_policy_from_group"),
            server=("127.0.0.1", server.port),
            port=free_port(),
            workers=2,
            backend="gloo",
            token="t",
            seconds=60.0,
            bucket=1,
        )
    assert time.monotonic() - start < 20.0
    engine.sync_weights(named_base_tensors(model), 2)
    assert is_written_by(engine, model)
