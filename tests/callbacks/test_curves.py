"""Curves: a picture with the panels that have numbers, over resumes too."""

from lit_rl.callbacks.checkpoint_contents import CheckpointContents
from lit_rl.callbacks.curves import Curves


def test_a_picture_is_drawn_at_the_end(train, fake_module, tmp_path):
    train(fake_module(), [Curves(str(tmp_path / "r"))], steps=3, val_check_interval=1)
    assert (tmp_path / "r" / "curves.png").read_bytes().startswith(b"\x89PNG")


def test_each_step_is_one_point_and_validation_has_its_own(train, fake_module, tmp_path):
    module, callback = fake_module(lambda step: {"rollout/reward": step / 10}), Curves(str(tmp_path))
    train(module, [callback], steps=4, val_check_interval=2)
    assert callback.history["rollout/reward"] == [(1, 0.1), (2, 0.2), (3, 0.3), (4, 0.4)]
    assert callback.history["val/accuracy"] == [(2, 0.5), (4, 0.5)]
    assert "train/kl" not in callback.history


def test_a_second_validation_of_a_step_takes_the_place_of_the_first():
    callback = Curves("r")
    callback._add(4, {"val/accuracy": 0.5})
    callback._add(4, {"val/accuracy": 0.75})
    assert callback.history["val/accuracy"] == [(4, 0.75)]


def test_a_resumed_run_draws_the_steps_before(train, fake_module, tmp_path):
    train(fake_module(), [Curves(str(tmp_path)), CheckpointContents(str(tmp_path / "c"))], steps=2)
    callback = Curves(str(tmp_path))
    train(
        fake_module(),
        [callback, CheckpointContents(str(tmp_path / "d"))],
        4,
        tmp_path / "c" / "step_00000002",
    )
    assert [step for step, _ in callback.history["rollout/reward"]] == [1, 2, 3, 4]


def test_without_training_there_is_no_picture(tmp_path):
    callback = Curves(str(tmp_path))
    callback._add(0, {"val/accuracy": 0.5})
    callback.teardown(None, None, "validate")  # type: ignore[arg-type]
    assert list(tmp_path.iterdir()) == []
