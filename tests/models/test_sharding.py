"""Units of a sharded model, and a model that is not sharded. Whole runs: tests/test_fsdp.py."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from lit_rl.algorithms.sharded import even, idle
from lit_rl.batch import RolloutBatch
from lit_rl.errors import ConfigError
from lit_rl.models import sharding
from lit_rl.models.critic import ValueModel
from lit_rl.models.load import LoRA, load_policy
from lit_rl.models.sharding import Sharding, gathered, is_sharded, like, own_part, sharding_of, whole
from lit_rl.models.weights import base_of


@pytest.fixture(scope="module")
def model() -> nn.Module:
    return load_policy(fsdp_config=Sharding(min_num_params=7))


def kinds(model: nn.Module, settings: Sharding) -> list[str]:
    return [type(unit).__name__ for unit in sharding._units(model, settings)]


def test_decoder_layers_are_units_unless_others_are_named(model: nn.Module) -> None:
    layers = base_of(model).config.num_hidden_layers
    assert kinds(model, Sharding()) == ["LlamaDecoderLayer"] * layers
    named = kinds(model, Sharding(transformer_layer_cls_to_wrap=["LlamaMLP", "LlamaDecoderLayer"]))
    assert named == ["LlamaMLP", "LlamaDecoderLayer"] * layers, "inner ones first"


def test_an_unknown_layer_class_is_refused_with_those_that_there_are(model: nn.Module) -> None:
    with pytest.raises(ConfigError, match=r"transformer_layer_cls_to_wrap .*'GPT2Block'.* LlamaDecoderLayer"):
        kinds(model, Sharding(transformer_layer_cls_to_wrap=["LlamaMLP", "GPT2Block"]))


def test_units_by_size_hold_enough_parameters_each_counted_once(model: nn.Module) -> None:
    size = 30_000
    units = sharding._units(model, Sharding(min_num_params=size))
    taken: set[int] = set()
    for unit in units:
        own = {id(p): p.numel() for p in unit.parameters() if id(p) not in taken}
        assert sum(own.values()) >= size
        taken |= own.keys()
    assert len(units) > base_of(model).config.num_hidden_layers


@pytest.mark.parametrize("settings", [Sharding(), Sharding(min_num_params=1)])
def test_embeddings_and_head_are_in_no_unit_but_the_whole(model: nn.Module, settings: Sharding) -> None:
    """They may be one tensor, and the head is read outside of any forward."""
    ends = {
        id(base_of(model).get_input_embeddings().weight),
        id(base_of(model).get_output_embeddings().weight),
    }
    for unit in sharding._units(model, settings):
        assert ends.isdisjoint(id(p) for p in unit.parameters())


def test_settings_reach_adapters_and_critics(model: nn.Module) -> None:
    assert sharding_of(model).min_num_params == 7
    settings = Sharding(fsdp_size=2)
    assert sharding_of(load_policy(lora=LoRA(lora_rank=2), fsdp_config=settings)) == settings
    assert sharding_of(ValueModel(load_policy(fsdp_config=settings))) == settings


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"min_num_params": -1}, "min_num_params"),
        ({"fsdp_size": 0}, "fsdp_size"),
        ({"min_num_params": 1, "transformer_layer_cls_to_wrap": ["A"]}, "transformer_layer_cls_to_wrap"),
    ],
)
def test_values_out_of_range_are_refused(changes: dict, key: str) -> None:
    with pytest.raises(ConfigError, match=f"model.fsdp_config.{key}"):
        replace(Sharding(), **changes)


def test_a_sequence_is_not_shared() -> None:
    with pytest.raises(ConfigError, match=r"ulysses_sequence_parallel_size must be 1 \(found 2\)"):
        load_policy(ulysses_sequence_parallel_size=2)


def test_a_whole_model_stays_as_it_is(model: nn.Module) -> None:
    weight = next(model.parameters())
    with gathered(model, model):
        assert next(model.parameters()) is weight
    assert not is_sharded(model)
    assert own_part(weight) is weight and like(weight, weight) is weight
    assert whole({"a": [weight, 1]})["a"][0] is weight


def test_an_idle_micro_batch_counts_no_token(model: nn.Module) -> None:
    batch = RolloutBatch(
        prompt_ids=torch.ones(2, 3, dtype=torch.long),
        prompt_len=torch.tensor([3, 2]),
        prompt_row=torch.arange(2),
        completion_ids=torch.ones(2, 4, dtype=torch.long),
        completion_len=torch.tensor([4, 1]),
        completion_mask=torch.ones(2, 4, dtype=torch.bool),
        self_distillation_mask=torch.ones(2, dtype=torch.bool),
    )
    row = idle(batch)
    assert len(row) == 1 and row.completion_mask is not None and row.self_distillation_mask is not None
    assert not row.completion_mask.any() and not row.self_distillation_mask.any()
    assert batch.completion_mask is not None and batch.completion_mask.all(), "the batch is as it was"
    assert even([batch], model) == [batch]
