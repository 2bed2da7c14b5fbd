"""The groups callbacks, checkpoint and logger: they compose, build, and name no key that a class lacks."""

import inspect
from pathlib import Path

import lightning as L
import pytest
from hydra.utils import get_class, instantiate


def test_the_groups_of_callbacks_compose_and_build(composed, tmp_path):
    config = composed("+checkpoint=default", "+callbacks=[default,reference_sync]", f"run_dir={tmp_path}")
    built = {name: instantiate(node, _convert_="all") for name, node in config.callbacks.items() if node}
    assert list(built) == [
        "checkpoint",
        "log_completions",
        "diagnostics",
        "progress",
        "summary",
        "curves",
        "reference_sync",
    ]
    assert all(isinstance(callback, L.Callback) for callback in built.values())
    assert built["checkpoint"].folder == tmp_path / "checkpoints"


def test_hf_model_in_save_contents_needs_no_second_key(composed):
    config = composed("+checkpoint=default", "checkpoint.save_contents=[model,optimizer,extra,hf_model]")
    callback = instantiate(config.checkpoint, _convert_="all")
    assert callback.save_contents == ("model", "optimizer", "extra", "hf_model")
    assert callback.load_contents == ("model", "optimizer", "extra")


@pytest.mark.parametrize(
    ("choice", "names"),
    [
        ("[default]", ["tensorboard", "csv"]),
        ("[tensorboard]", ["tensorboard"]),
        ("[csv,console]", ["csv", "console"]),
        ("[none]", []),
    ],
)
def test_the_groups_of_loggers_compose_and_build(composed, tmp_path, choice, names):
    config = composed(f"+logger={choice}", f"run_dir={tmp_path}")
    nodes = config.get("logger") or {}
    loggers = {name: instantiate(node, _convert_="all") for name, node in nodes.items()}
    assert list(loggers) == names
    for name in {"tensorboard", "csv"} & set(names):
        assert Path(loggers[name].log_dir) == tmp_path / name


def test_every_key_of_a_yaml_is_an_argument_of_its_class(composed):
    config = composed("+checkpoint=default", "+callbacks=[default,reference_sync]")
    for node in [config.checkpoint, *(n for n in config.callbacks.values() if "_target_" in n)]:
        arguments = set(inspect.signature(get_class(node["_target_"])).parameters)
        assert set(node) - {"_target_"} == arguments
