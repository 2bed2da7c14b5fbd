"""Averages move the right way, at the right rate, and arrive."""

import pytest
import torch

from lit_rl.functional.ema import lerp_


@pytest.mark.field("sdpo/2")
def test_the_rate_is_the_share_of_the_source() -> None:
    teacher, student = torch.zeros(1, dtype=torch.float64), torch.ones(1, dtype=torch.float64)
    lerp_([teacher], [student], 0.05)
    assert teacher.item() == pytest.approx(0.05)
    lerp_([teacher], [student], 0.05)
    lerp_([teacher], [student], 0.05)
    assert teacher.item() == pytest.approx(0.142625)
    reference = torch.zeros(1)
    lerp_([reference], [torch.ones(1)], 0.6)
    assert reference.item() == pytest.approx(0.6)


@pytest.mark.field("sdpo/2")
def test_rate_zero_keeps_and_rate_one_copies() -> None:
    start, source = torch.tensor([0.1, -3.7e5]), torch.tensor([1e-30, 2.5])
    average = start.clone()
    lerp_([average], [source], 0.0)
    assert torch.equal(average, start)
    lerp_([average], [source], 1.0)
    assert torch.equal(average, source)


@pytest.mark.field("sdpo/3")
def test_a_float32_average_reaches_a_bfloat16_student() -> None:
    student, teacher = torch.tensor([1.0078125], dtype=torch.bfloat16), torch.tensor([1.0])
    for _ in range(200):
        lerp_([teacher], [student], 0.05)
    assert teacher.dtype == torch.float32
    assert teacher.item() == pytest.approx(1.0078125, abs=1e-4)


@pytest.mark.field("sdpo/3")
def test_small_rates_are_not_lost_in_float32() -> None:
    teacher = torch.ones(1)
    for _ in range(2000):
        lerp_([teacher], [torch.tensor([1.01])], 0.001)
    assert teacher.item() == pytest.approx(1.01 - 0.01 * 0.999**2000, abs=1e-4)


def test_a_bfloat16_average_is_still_computed_in_float32() -> None:
    average = torch.tensor([-256.0], dtype=torch.bfloat16)
    lerp_([average], [torch.tensor([257.9])], 0.5)  # the source in bfloat16 would be 258
    assert average.dtype == torch.bfloat16
    assert average.item() == pytest.approx(0.95, rel=4e-3)


def test_the_source_keeps_its_gradient_and_the_average_has_none() -> None:
    average, source = torch.zeros(2), torch.ones(2, requires_grad=True)
    lerp_([average], [source], 0.5)
    assert not average.requires_grad and source.requires_grad


def test_lists_of_different_length_are_refused() -> None:
    with pytest.raises(ValueError, match="zip"):
        lerp_([torch.zeros(1)], [], 0.5)
