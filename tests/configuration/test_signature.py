"""Values against types."""

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Literal

import pytest
import torch

from lit_rl.configuration.signature import Misfit, described, fitted, resolved, signature


@pytest.mark.parametrize(
    ("value", "annotation", "want"),
    [
        (3, int, 3),
        (3, float, 3.0),
        ("1e-6", float, 1e-6),
        ("1e-6", float | None, 1e-6),
        ("1e-6", float | torch.Tensor, 1e-6),
        (None, float | None, None),
        (1, int | float, 1),
        (1.0, int | float, 1.0),
        ("1e-6", str | float, "1e-6"),
        (391, str | None, "391"),
        (True, bool, True),
        ("grpo", Literal["grpo", "none"], "grpo"),
        ([1, 2], list[int], [1, 2]),
        ([0.9, 0.999], tuple[float, float], [0.9, 0.999]),
        ({"a": 1}, dict[str, Any], {"a": 1}),
        ("x", str | list[str] | None, "x"),
        (["x"], str | list[str] | None, ["x"]),
        ([1], Iterable[int] | None, [1]),
        (object, Any, object),
    ],
)
def test_a_value_that_fits_comes_back_as_the_type_wants_it(value: Any, annotation: Any, want: Any) -> None:
    got = fitted(value, annotation)
    assert got == want
    assert type(got) is type(want)


@pytest.mark.parametrize(
    ("value", "annotation"),
    [
        (True, int),
        (True, float),
        (1, bool),
        (0.5, int),
        ("abc", float),
        ("1e-6", int),
        (None, float),
        ("gropo", Literal["grpo", "none"]),
        (1, Literal[True]),
        ("ab", list[str]),
        ([1.5], list[int]),
        ([1], dict[str, Any]),
        ([0.9], tuple[float, float]),
        (True, str),
        ("adam", Callable[..., Any]),
        ("x", torch.nn.Module),
        (3, Path),
    ],
)
def test_a_value_that_does_not_fit_is_refused(value: Any, annotation: Any) -> None:
    with pytest.raises(Misfit):
        fitted(value, annotation)


@pytest.mark.parametrize(
    ("annotation", "words"),
    [
        (float | None, "a number or null"),
        (Literal["a", "b"], "one of a, b"),
        (list[str], "a list of strings"),
        (bool, "true or false"),
        (torch.nn.Module, "a block whose _target_ makes a Module"),
    ],
)
def test_types_are_said_in_words(annotation: Any, words: str) -> None:
    assert described(annotation) == words


def test_the_arguments_of_a_base_class_are_arguments_of_ours() -> None:
    accepted = signature(resolved("lit_rl.algorithms.grpo.GRPO"))
    assert not accepted.is_open
    assert {"policy", "num_generations", "kl"} <= set(accepted.parameters)


def test_ddp_takes_the_arguments_of_the_wrapper_it_makes() -> None:
    accepted = signature(resolved("lightning.pytorch.strategies.DDPStrategy"))
    assert "find_unused_parameters" in accepted.parameters
    assert not accepted.is_open


@pytest.mark.parametrize("path", ["lit_rl.nowhere.X", "lit_rl.errors.Nothing", "no_such_package.X"])
def test_a_path_that_leads_nowhere_is_an_import_error(path: str) -> None:
    with pytest.raises(ImportError):
        resolved(path)


def test_a_package_that_is_not_there_is_named() -> None:
    with pytest.raises(ImportError, match="the package no_such_package is not installed"):
        resolved("no_such_package.optim.AdamW")
