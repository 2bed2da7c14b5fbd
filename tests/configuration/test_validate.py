"""Names, types and ranges, on small trees with the real root and stand-in constructors."""

from copy import deepcopy
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import pytest

from lit_rl.configuration import validate as module
from lit_rl.configuration.validate import validate
from lit_rl.errors import ConfigError

HERE = __name__


@dataclass(frozen=True)
class Limits:
    """Stands in for a settings block."""

    key: ClassVar[str] = "model.limits"

    low: float = 0.0
    kind: Literal["hard", "soft"] = "hard"

    def __post_init__(self) -> None:
        if self.low < 0:
            raise ConfigError(f"{self.key}.low must be >= 0 (found {self.low!r}).")


class Model:
    """Stands in for a constructor with a block, a free-form key and one argument that must be given."""

    def __init__(
        self, *, path: str, limits: Limits | None = None, options: dict[str, Any] | None = None, rank: int = 0
    ) -> None:
        raise AssertionError("validate builds settings blocks only")


class Algo:
    """Stands in for an algorithm."""

    def __init__(self, *, policy: Model, limits: Limits | None = None) -> None:
        raise AssertionError("validate builds settings blocks only")


@pytest.fixture(autouse=True)
def _no_rules(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "RULES", [])


def tree() -> dict[str, Any]:
    return {
        "seed": 1,
        "model": {
            "_target_": f"{HERE}.Model",
            "path": "x",
            "limits": {"_target_": f"{HERE}.Limits", "low": 1.0, "kind": "hard"},
            "options": {},
            "rank": 0,
        },
        "algo": {
            "_target_": f"{HERE}.Algo",
            "policy": "${model}",
            "limits": {"_target_": f"{HERE}.Limits"},
        },
        "callbacks": {"off": None},
    }


def refusal(**changes: Any) -> str:
    """The message after setting dotted keys (`__` for the dot)."""
    changed = deepcopy(tree())
    for name, value in changes.items():
        *place, leaf = name.split("__")
        node = changed
        for part in place:
            node = node[part]
        node[leaf] = value
    with pytest.raises(ConfigError) as caught:
        validate(changed, tree())
    return str(caught.value)


def test_a_right_tree_passes_and_nothing_is_set() -> None:
    settings = validate(tree(), tree())
    assert settings["algo.policy"]["path"] == "x"
    assert not settings.is_set("model.limits.low")


@pytest.mark.parametrize(
    ("key", "value", "parts"),
    [
        ("model__limits__lov", 3, ["model.limits.lov", "3", "model.limits.low", "kind"]),
        ("model__pathh", "y", ["model.pathh", "'y'", "model.path"]),
        ("sead", 1, ["sead", "seed"]),
        ("model__limits__low", "abc", ["model.limits.low", "a number", "'abc'"]),
        ("model__limits__low", True, ["model.limits.low", "a number", "True"]),
        ("model__rank", 1.5, ["model.rank", "an integer", "1.5"]),
        ("model__limits__kind", "medium", ["model.limits.kind", "hard, soft", "'medium'"]),
        ("model__limits__low", -1.0, ["model.limits.low", ">= 0", "-1.0"]),
        ("algo__limits__low", -1.0, ["algo.limits.low", ">= 0"]),
        ("model__path", "???", ["model.path", "must be given"]),
        ("model__limits", 3, ["model.limits", "Limits", "3"]),
        ("algo__policy", "${algo}", ["algo.policy", "Model"]),
        ("seed", -1, ["seed", "-1"]),
        ("callbacks__off", 3, ["callbacks.off", "block"]),
        ("model___target_", "nowhere.Model", ["model._target_", "nowhere.Model"]),
    ],
)
def test_a_wrong_key_or_value_is_named_with_what_is_allowed(key: str, value: Any, parts: list[str]) -> None:
    message = refusal(**{key: value})
    for part in parts:
        assert part in message
    assert len(message.splitlines()) == 1


def test_several_mistakes_are_told_at_once() -> None:
    message = refusal(model__rank="x", seed="y", model__limits__kind="z")
    assert [line.split()[0] for line in message.splitlines()] == ["seed", "model.limits.kind", "model.rank"]


def test_what_must_be_given_is_asked_for() -> None:
    changed = tree()
    del changed["model"]["path"]
    with pytest.raises(ConfigError, match=r"model\.path must be given"):
        validate(changed, tree())


def test_free_form_keys_take_any_name() -> None:
    changed = tree()
    changed["model"]["options"] = {"anything": {"at": "all"}}
    assert validate(changed, tree())["model.options"] == {"anything": {"at": "all"}}


@pytest.mark.field("cfg/7")
def test_numbers_in_quotes_become_numbers() -> None:
    changed = tree()
    changed["model"]["limits"]["low"] = "1e-6"
    assert validate(changed, tree())["model.limits.low"] == 1e-6


def test_a_block_needs_no_target_where_the_argument_says_its_class() -> None:
    changed = tree()
    del changed["model"]["limits"]["_target_"]
    assert validate(changed, tree()).tree["model"]["limits"]["_target_"] == f"{HERE}.Limits"
    changed["model"]["limits"]["lov"] = 1
    with pytest.raises(ConfigError, match=r"model\.limits\.low"):
        validate(changed, tree())


def test_a_value_is_set_when_it_differs_from_class_default_and_baseline() -> None:
    changed, baseline = tree(), tree()
    changed["model"]["limits"].update(low=2.0, kind="soft")
    baseline["model"]["limits"]["kind"] = "soft"
    settings = validate(changed, baseline)
    assert settings.set_below("model") == ["model.limits.low"]
    changed["model"]["limits"]["low"] = 0.0  # the class default, though not the preset
    assert validate(changed, baseline).set_below("model") == []


@pytest.mark.field("sec/3")
def test_secrets_are_masked_in_messages() -> None:
    assert "hunter2" not in refusal(model__api_key="hunter2")
