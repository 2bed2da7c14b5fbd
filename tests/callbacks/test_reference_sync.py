"""ReferenceSync: when it moves the reference, by how much, and what it refuses."""

import pytest
import torch

from lit_rl.callbacks.reference_sync import ReferenceSync
from lit_rl.errors import ConfigError
from lit_rl.models.roles import MovingReference


class Recorder(MovingReference):
    """Notes each move."""

    def __init__(self, policy) -> None:
        super().__init__(policy)
        self.moves: list[float] = []

    def mix_(self, alpha: float) -> None:
        self.moves.append(alpha)
        super().mix_(alpha)


def test_the_reference_moves_every_n_steps_and_only_then(train, fake_module):
    module = fake_module()
    module.ref = Recorder(module.policy)
    train(module, [ReferenceSync(0.6, 2)], steps=5)
    assert module.ref.moves == [0.6, 0.6]


def test_one_move_is_alpha_policy_plus_the_rest_of_the_reference(train, fake_module):
    # policy 1 and reference 0 at alpha 0.6 give 0.6
    module = fake_module()
    torch.nn.init.zeros_(module.policy.weight)
    module.ref = MovingReference(module.policy)
    torch.nn.init.ones_(module.policy.weight)
    module.trainer_step = None
    ReferenceSync(0.6, 1).on_update_end(None, module, step=1, metrics={})
    with module.ref.model() as reference:
        assert torch.equal(reference.weight, torch.full((1, 3), 0.6))
        assert not reference.weight.requires_grad


def test_a_moved_reference_is_moving_and_a_still_one_is_not(train, fake_module):
    module = fake_module()
    module.ref = MovingReference(module.policy)
    assert not module.ref.is_moving
    ReferenceSync(0.5, 1).on_update_end(None, module, step=1, metrics={})
    assert module.ref.is_moving


@pytest.mark.field("cfg/2")
def test_without_a_reference_it_is_refused(train, fake_module):
    with pytest.raises(ConfigError, match=r"callbacks\.reference_sync needs a reference.*algo\.kl\.beta"):
        train(fake_module(), [ReferenceSync()])


def test_the_module_is_told_before_it_makes_its_reference(train, fake_module):
    module, callback = fake_module(), ReferenceSync()
    callback.setup(None, module, "fit")
    assert module.ref_moves


@pytest.mark.field("cfg/2")
@pytest.mark.parametrize(
    ("alpha", "steps", "name"),
    [
        (1.5, 1, "ref_model_mixup_alpha"),
        (-0.1, 1, "ref_model_mixup_alpha"),
        (float("nan"), 1, "ref_model_mixup_alpha"),
        (0.5, 0, "ref_model_sync_steps"),
        (0.5, -1, "ref_model_sync_steps"),
    ],
)
def test_values_out_of_range_are_refused_by_name(alpha, steps, name):
    with pytest.raises(ConfigError, match=rf"callbacks\.reference_sync\.{name}"):
        ReferenceSync(alpha, steps)
