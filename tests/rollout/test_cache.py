import pytest
import torch
from transformers import DynamicCache
from transformers.cache_utils import DynamicSlidingWindowLayer

from lit_rl.errors import ConfigError
from lit_rl.rollout.cache import RoomyLayer, check_cache_implementation, decoding_cache

from .tiny import llama


def test_a_layer_with_room_holds_what_a_dynamic_one_holds() -> None:
    config = llama().config
    roomy, plain = decoding_cache(config, None, 200), DynamicCache(config=config)
    generator = torch.Generator().manual_seed(0)
    rows = 2
    for step in range(90):
        new = torch.rand(2, rows, 2, 5 if step == 0 else 1, 8, generator=generator)
        for cache in (roomy, plain):
            cache.update(new[0], new[1], 0)
        if step in (0, 40):
            index = torch.tensor([1, 1, 0])
            rows = 3
            roomy.reorder_cache(index)
            plain.reorder_cache(index)
        assert torch.equal(roomy.layers[0].keys, plain.layers[0].keys)
        assert torch.equal(roomy.layers[0].values, plain.layers[0].values)
        assert roomy.get_seq_length() == plain.get_seq_length()


def test_tokens_are_written_in_place_and_no_room_is_made_beyond_the_limit() -> None:
    layer = RoomyLayer(max_length=50)
    token = torch.zeros(1, 1, 1, 4)
    layer.update(token.expand(1, 1, 10, 4), token.expand(1, 1, 10, 4))
    addresses = set()
    for _ in range(40):
        layer.update(token, token)
        addresses.add(layer.keys.data_ptr())
    assert len(addresses) == 2  # room for 43, then for all 50
    assert layer.keys.untyped_storage().nbytes() == 50 * 4 * 4


def test_sliding_layers_keep_their_own_bookkeeping() -> None:
    config = llama(sliding_window=4).config
    config.layer_types = ["sliding_attention", "full_attention"]
    layers = decoding_cache(config, None, 100).layers
    assert [type(layer) for layer in layers] == [DynamicSlidingWindowLayer, RoomyLayer]


def test_unknown_caches_are_refused_with_what_is_allowed() -> None:
    with pytest.raises(ConfigError, match=r"cache_implementation must be null, .* \(found 'quantized'\)"):
        check_cache_implementation("quantized")
