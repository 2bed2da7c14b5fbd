"""What a constructor accepts: parameters, types, defaults, and whether a plain value fits a type."""

import collections.abc
import dataclasses
import importlib
import importlib.util
import inspect
import os
import re
import types
import typing
from collections.abc import Callable
from typing import Any, Literal, Union

from lit_rl.configuration.tree import ABSENT

_NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?")
# Constructors that hand their `**kwargs` to another one.
RECEIVERS = {
    "lightning.pytorch.strategies.ddp.DDPStrategy": "torch.nn.parallel.DistributedDataParallel",
}


class Misfit(Exception):
    """A value does not fit a type; the text says what is allowed."""


@dataclasses.dataclass(frozen=True)
class Parameter:
    """An argument of a constructor.

    Attributes:
        annotation: its type; Any where none is declared.
        default: its default; ABSENT where it must be given.
    """

    annotation: Any
    default: Any


@dataclasses.dataclass(frozen=True)
class Signature:
    """What can be passed to a constructor by name.

    Attributes:
        target: the class or function.
        parameters: by name, in order.
        is_open: names beyond these are accepted too.
    """

    target: Callable[..., Any]
    parameters: dict[str, Parameter]
    is_open: bool

    @property
    def result(self) -> Any:
        """The type of what it returns; Any where that is not declared."""
        if isinstance(self.target, type):
            return self.target
        return _hints(self.target).get("return", Any)


def resolved(path: str) -> Callable[..., Any]:
    """The class or function at a dotted path.

    Raises:
        ImportError: there is none, or a package it needs is missing.
    """
    parts = path.split(".")
    for depth in range(len(parts) - 1, 0, -1):
        module = ".".join(parts[:depth])
        try:
            found: Any = importlib.import_module(module)
        except ModuleNotFoundError as error:
            if error.name is not None and (module == error.name or module.startswith(error.name + ".")):
                continue  # that part of the path is a class, or wrong
            raise
        for part in parts[depth:]:
            found = getattr(found, part, None)
        if callable(found):
            return found
        break
    if importlib.util.find_spec(parts[0]) is None:
        raise ImportError(f"the package {parts[0]} is not installed; pip install {parts[0]}")
    raise ImportError(f"there is no class or function {path}")


def signature(target: Callable[..., Any]) -> Signature:
    """Parameters of a class or function, those that `**kwargs` hands on to a base or receiver included."""
    parameters: dict[str, Parameter] = {}
    functions = _constructors(target)
    is_open = False
    for function in functions:
        own, is_open = _parameters(function)
        parameters = {**own, **parameters}
        if not is_open:
            break
    receiver = RECEIVERS.get(f"{target.__module__}.{getattr(target, '__qualname__', '')}")
    if receiver is not None:
        own, is_open = _parameters(vars(resolved(receiver))["__init__"])
        parameters = {**{name: p for name, p in own.items() if p.default is not ABSENT}, **parameters}
    return Signature(target, parameters, is_open)


def _constructors(target: Callable[..., Any]) -> list[Callable[..., Any]]:
    if not isinstance(target, type):
        return [target]
    own = target.__module__.startswith("lit_rl.")
    owners = [cls for cls in target.__mro__ if "__init__" in vars(cls) and cls is not object]
    chain: list[Callable[..., Any]] = [vars(cls)["__init__"] for cls in (owners if own else owners[:1])]
    if not chain:  # written in C, such as datetime.timedelta
        chain.append(target)
    return chain


def _parameters(function: Callable[..., Any]) -> tuple[dict[str, Parameter], bool]:
    try:
        found = inspect.signature(function).parameters
    except ValueError:
        return {}, True
    hints = _hints(function)
    out: dict[str, Parameter] = {}
    is_open = False
    for name, parameter in found.items():
        if parameter.kind is parameter.VAR_KEYWORD:
            is_open = True
        elif parameter.kind is not parameter.VAR_POSITIONAL and name != "self":
            default = ABSENT if parameter.default is parameter.empty else parameter.default
            out[name] = Parameter(hints.get(name, Any), _plain_default(default))
    return out, is_open


def _plain_default(default: Any) -> Any:
    factory = type(default).__name__ == "_HAS_DEFAULT_FACTORY_CLASS"
    return ABSENT if factory else default


def field_defaults(target: Callable[..., Any]) -> dict[str, Any]:
    """Defaults that a dataclass makes anew for each object, by field."""
    if not dataclasses.is_dataclass(target):
        return {}
    return {
        f.name: f.default_factory()
        for f in dataclasses.fields(target)
        if f.default_factory is not dataclasses.MISSING
    }


def _hints(function: Callable[..., Any]) -> dict[str, Any]:
    function = inspect.unwrap(function)
    try:
        return typing.get_type_hints(function)
    except (NameError, TypeError, AttributeError):
        return {}


# ------------------------------------------------------------------------------------------------------ types


def fitted(value: Any, annotation: Any) -> Any:
    """The value as the type wants it: integers and number-like strings become floats where only floats fit.

    Args:
        value: a plain value: number, string, bool, None, list or dictionary; no node.
        annotation: a type as `typing.get_type_hints` gives it.

    Raises:
        Misfit: it does not fit; the text says what does.
    """
    origin, args = typing.get_origin(annotation), typing.get_args(annotation)
    if annotation is typing.Annotated or origin is typing.Annotated:
        return fitted(value, args[0])
    if origin in (Union, types.UnionType):
        return _fitted_union(value, annotation, args)
    if origin is Literal:
        return _checked(any(value == arg and type(value) is type(arg) for arg in args), value, annotation)
    if annotation is None or annotation is type(None):
        return _checked(value is None, value, annotation)
    if annotation in _SCALARS:
        return _SCALARS[annotation](value)
    container = origin or annotation
    if container in (tuple, list, set) or _is_abstract(container, collections.abc.Iterable, str):
        return _fitted_list(value, annotation, container, args)
    if container is dict or _is_abstract(container, collections.abc.Mapping):
        _checked(isinstance(value, dict), value, annotation)
        return {name: fitted(below, args[1]) for name, below in value.items()} if len(args) == 2 else value
    if container is collections.abc.Callable or isinstance(container, type):
        raise Misfit(described(annotation))
    return value  # Any, type variables and whatever else cannot be checked


def _is_abstract(container: Any, kind: type, without: type | None = None) -> bool:
    if not isinstance(container, type) or container.__module__ not in ("collections.abc", "typing"):
        return False
    return (
        container is not collections.abc.Callable and issubclass(container, kind) and container is not without
    )


def _checked(is_legal: bool, value: Any, annotation: Any) -> Any:
    if not is_legal:
        raise Misfit(described(annotation))
    return value


def _fitted_union(value: Any, annotation: Any, args: tuple[Any, ...]) -> Any:
    exact = [arg for arg in args if arg in _EXACT and type(value) is _EXACT[arg]]
    for arg in (*exact, *args):
        try:
            return fitted(value, arg)
        except Misfit:
            continue
    raise Misfit(described(annotation))


def _fitted_list(value: Any, annotation: Any, container: Any, args: tuple[Any, ...]) -> Any:
    _checked(isinstance(value, (list, tuple)), value, annotation)
    if container is tuple and args and args[-1] is not Ellipsis:
        _checked(len(value) == len(args), value, annotation)
        return [fitted(item, arg) for item, arg in zip(value, args, strict=True)]
    return [fitted(item, args[0]) for item in value] if args else list(value)


def _bool(value: Any) -> Any:
    return _checked(isinstance(value, bool), value, bool)


def _int(value: Any) -> Any:
    return _checked(isinstance(value, int) and not isinstance(value, bool), value, int)


def _float(value: Any) -> Any:
    if isinstance(value, str) and _NUMBER.fullmatch(value.strip()):
        return float(value)
    _checked(isinstance(value, (int, float)) and not isinstance(value, bool), value, float)
    return float(value)


def _str(value: Any) -> Any:
    """Whole numbers are taken for their text: a shell strips the quotes of `data.ground_truth='391'`."""
    if isinstance(value, int) and not isinstance(value, bool):
        return str(value)
    return _checked(isinstance(value, str), value, str)


_SCALARS: dict[Any, Callable[[Any], Any]] = {
    bool: _bool,
    int: _int,
    float: _float,
    str: _str,
    os.PathLike: _str,
    Any: lambda value: value,
    object: lambda value: value,
}
_EXACT: dict[Any, type] = {bool: bool, int: int, float: float, str: str, type(None): type(None)}
_WORDS = {
    bool: "true or false",
    int: "an integer",
    float: "a number",
    str: "a string",
    None: "null",
    type(None): "null",
    os.PathLike: "a path",
}


def described(annotation: Any) -> str:
    """What a type allows, in words."""
    origin, args = typing.get_origin(annotation), typing.get_args(annotation)
    if annotation in _WORDS:
        return _WORDS[annotation]
    if origin in (Union, types.UnionType):
        return " or ".join(dict.fromkeys(described(arg) for arg in args))
    if origin is Literal:
        names = ", ".join(_spelled(arg) for arg in args)
        return names if len(args) == 1 else f"one of {names}"
    container = origin or annotation
    if container in (list, tuple, set) or _is_abstract(container, collections.abc.Iterable, str):
        of = [arg for arg in args if arg is not Ellipsis]
        return "a list" + (f" of {' and '.join(dict.fromkeys(_plural(arg) for arg in of))}" if of else "")
    if container is dict:
        return "a map"
    if container is collections.abc.Callable:
        return "a block with _target_ and _partial_: true"
    if isinstance(container, type):
        return f"a block whose _target_ makes a {container.__name__}"
    return "anything"


def _spelled(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _plural(annotation: Any) -> str:
    words = {int: "integers", float: "numbers", str: "strings", bool: "true or false"}
    return words.get(annotation, described(annotation))
