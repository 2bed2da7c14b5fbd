"""conf/model/*.yaml offer every key of load_policy, at its default, and instantiate."""

import inspect
from dataclasses import fields

import pytest
from hydra import compose, initialize_config_module
from hydra.utils import instantiate
from omegaconf import OmegaConf

from lit_rl.models.load import Kernels, LoRA, Sharding, load_policy
from lit_rl.paths import SMOLLM2

PATHS = {"tiny": "embedded", "hf": "???", "smollm2_135m": SMOLLM2}


def composed(name, overrides=()):
    with initialize_config_module("lit_rl.conf", version_base="1.3"):
        return compose(f"model/{name}", overrides=list(overrides)).model


@pytest.mark.parametrize("name", PATHS)
def test_each_choice_holds_every_key_at_its_default(name):
    node = OmegaConf.to_container(composed(name))
    assert node.pop("_target_") == "lit_rl.models.load.load_policy"
    assert node.pop("path") == PATHS[name]
    for key, block in (("lora", LoRA), ("kernels", Kernels), ("fsdp_config", Sharding)):
        inner = node.pop(key)
        assert inner.pop("_target_") == f"lit_rl.models.load.{block.__name__}"
        assert inner == {f.name: getattr(block(), f.name) for f in fields(block)}
    parameters = dict(inspect.signature(load_policy).parameters)
    for name in ("path", "lora", "kernels", "fsdp_config"):
        del parameters[name]
    assert node.keys() == parameters.keys()
    for key, parameter in parameters.items():
        assert node[key] == ({} if "dict" in str(parameter.annotation) else parameter.default), key


def test_the_default_choice_is_the_embedded_model():
    policy = instantiate(composed("tiny"), _convert_="all")
    assert type(policy).__name__ == "LlamaForCausalLM" and policy.training


def test_lora_is_one_word_away():
    node = composed("tiny", ["model.lora.lora_rank=2", "model.lora.target_modules=[q_proj]"])
    assert any("lora_A" in name for name, _ in instantiate(node, _convert_="all").named_parameters())
