"""Prepacked linear layers against the layers themselves."""

import pytest
import torch
from torch import nn

from lit_rl.batch import RolloutBatch
from lit_rl.models.origins import keep_origins_
from lit_rl.rollout import hf
from lit_rl.rollout import prepacked as module
from lit_rl.rollout.prepacked import prepacked, prepacked_bytes
from lit_rl.rollout.sampling import Sampling
from tests.rollout.tiny import llama

pytestmark = [
    pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="this build of torch has no oneDNN"),
    pytest.mark.filterwarnings("ignore:TF32 acceleration:UserWarning"),  # of turning oneDNN off
]
LARGE = {
    "hidden_size": 320,
    "intermediate_size": 640,
    "num_attention_heads": 5,
    "num_key_value_heads": 5,
    "initializer_range": 0.06,
}


def net(dtype: torch.dtype = torch.float32) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(320, 400), nn.Linear(400, 320, bias=False), nn.Linear(320, 8)).to(dtype)


@pytest.mark.parametrize("shape", [(1, 1, 320), (3, 1, 320), (40, 320), (2, 70, 320)])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.bfloat16, 1e-2)])
@torch.no_grad()
def test_the_layers_compute_what_they_did(shape, dtype, tolerance) -> None:
    layers, hidden = net(dtype), torch.randn(shape).to(dtype)
    expected = layers(hidden)
    with prepacked(layers):
        found = layers(hidden)
    assert found.dtype == dtype
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)


def test_only_large_layers_of_the_plain_kind_change_and_all_are_as_before_afterwards() -> None:
    class Own(nn.Linear):
        pass

    layers = nn.ModuleList([*net(), Own(400, 400), nn.Linear(400, 400)])
    layers[4].forward = lambda hidden: hidden  # type: ignore[method-assign]
    own = layers[4].forward
    with pytest.raises(KeyError), prepacked(layers):
        assert ["forward" in layer.__dict__ for layer in layers] == [True, True, False, False, True]
        assert layers[4].forward is own
        raise KeyError
    assert [name for name, layer in enumerate(layers) if "forward" in layer.__dict__] == [4]


def test_so_do_layers_that_differ_in_what_they_keep_for_gradients() -> None:
    layers = net()
    keep_origins_(layers)
    own = [layer.forward for layer in layers]
    with prepacked(layers):
        assert [layer.forward == forward for layer, forward in zip(layers, own, strict=True)] == [
            False,
            False,
            True,
        ]
    assert [layer.forward for layer in layers] == own


def test_nothing_changes_where_onednn_is_off() -> None:
    layers = net()
    with torch.backends.mkldnn.flags(enabled=False):
        assert prepacked_bytes(layers, torch.float32) == 0
        with prepacked(layers):
            assert not any("forward" in layer.__dict__ for layer in layers)


def test_the_plan_counts_the_large_layers_in_the_dtype_that_decodes() -> None:
    assert prepacked_bytes(net(), torch.float32) == 4 * (320 * 400 + 400 * 320)
    assert prepacked_bytes(net(), torch.float16) == 0


def written(engine: hf.HFEngine, step: int = 0) -> RolloutBatch:
    prompts = RolloutBatch(torch.arange(3, 15).view(2, 6), torch.tensor([6, 4]), torch.arange(2))
    sampling = Sampling(max_completion_length=8, ignore_eos=True)
    return engine.generate(prompts, num_generations=3, sampling=sampling, seed=0, step=step)


def bound(model: nn.Module) -> hf.HFEngine:
    engine = hf.HFEngine()
    engine.bind(model, end_token_ids=[], pad_token_id=0, decode=str)
    return engine


def plainly_written(model: nn.Module) -> RolloutBatch:
    with torch.backends.mkldnn.flags(enabled=False):
        return written(bound(model))


def test_an_engine_writes_the_same_completions(monkeypatch: pytest.MonkeyPatch) -> None:
    model, product, seen = llama(**LARGE), module._product, []
    monkeypatch.setattr(module, "_product", lambda *inputs: seen.append(0) or product(*inputs))
    found, calls = written(bound(model)), len(seen)
    expected = plainly_written(model)
    assert calls >= 8 * 2 * 7 and len(seen) == calls, (
        "every token through every layer, and none when it is off"
    )
    assert torch.equal(found.completion_ids, expected.completion_ids)
    torch.testing.assert_close(found.rollout_logps, expected.rollout_logps, rtol=1e-5, atol=1e-5)


def test_weights_that_changed_since_the_last_generation_are_seen() -> None:
    model = llama(**LARGE)
    engine = bound(model)
    before = written(engine)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.5)
    after = written(engine)
    assert not torch.equal(before.completion_ids, after.completion_ids)
    other = llama(**LARGE)
    other.load_state_dict(model.state_dict())
    assert torch.equal(after.completion_ids, plainly_written(other).completion_ids)
