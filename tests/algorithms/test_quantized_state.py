"""Optimizers of other packages: their states go through a checkpoint and come back bit for bit."""

import json
from collections.abc import Callable

import pytest
import torch

from lit_rl.algorithms.quantized_state import packed, unpacked
from lit_rl.checkpoint import decode_tree, encode_tree
from lit_rl.errors import DataError


def through_a_file(tree):
    structure, tensors = encode_tree(tree)
    return decode_tree(json.loads(json.dumps(structure)), {name: t.clone() for name, t in tensors.items()})


def parameters() -> list[torch.nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return [torch.nn.Parameter(torch.randn(*shape, generator=generator)) for shape in ((64, 128), (64,))]


def steps(optimizer: torch.optim.Optimizer, values: list[torch.nn.Parameter], count: int) -> None:
    for _ in range(count):
        sum(value.square().sum() for value in values).backward()  # type: ignore[union-attr]
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize(
    "path", ["torchao.optim.AdamW8bit", "bitsandbytes.optim.AdamW8bit", "torch.optim.AdamW"]
)
def test_an_optimizer_goes_on_where_it_was_saved(path: str) -> None:
    module, _, name = path.rpartition(".")
    make: Callable = getattr(pytest.importorskip(module), name)
    straight = parameters()
    optimizer = make(straight, lr=1e-2)
    steps(optimizer, straight, 2)
    state = through_a_file(packed(optimizer.state_dict()))
    again = [torch.nn.Parameter(value.detach().clone()) for value in straight]
    resumed = make(again, lr=1e-2)
    resumed.load_state_dict(unpacked(state))
    steps(optimizer, straight, 3)
    steps(resumed, again, 3)
    assert all(torch.equal(a, b) for a, b in zip(straight, again, strict=True))


def test_plain_states_stay_as_they_are() -> None:
    state = {
        "state": {0: {"step": torch.tensor(1.0), "exp_avg": torch.ones(2)}},
        "param_groups": [{"lr": 0.1}],
    }
    assert str(packed(state)) == str(unpacked(state)) == str(state)


def test_a_class_of_another_package_is_not_made() -> None:
    with pytest.raises(DataError, match=r"os\.path"):
        unpacked({"class_of_parts": "os.path", "parts": {}, "context": [], "size": [], "stride": []})
