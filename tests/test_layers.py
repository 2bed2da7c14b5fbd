"""Imports point one way: functional, then parts, objectives, algorithms, callbacks, entry points."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]

LAYERS = {
    "lit_rl.functional": 0,
    "lit_rl.allocator": 0,
    "lit_rl.batch": 0,
    "lit_rl.curves": 0,
    "lit_rl.distributed": 0,
    "lit_rl.errors": 0,
    "lit_rl.images": 0,
    "lit_rl.memory": 0,
    "lit_rl.metrics": 0,
    "lit_rl.paths": 0,
    "lit_rl.seeding": 0,
    "lit_rl.time_limit": 0,
    "lit_rl.timing": 0,
    "lit_rl.user_code": 0,
    "lit_rl.checkpoint": 1,
    "lit_rl.model_card": 2,
    "lit_rl.discovery": 1,
    "lit_rl.data": 1,
    "lit_rl.hub": 1,
    "lit_rl.models": 1,
    "lit_rl.rewards": 1,
    "lit_rl.rollout": 1,
    "lit_rl.schedule": 1,
    "lit_rl.hooks": 2,
    "lit_rl.objectives": 2,
    "lit_rl.algorithms": 3,
    "lit_rl.configuration": 3,
    "lit_rl.export": 3,
    "lit_rl.tasks": 3,
    "lit_rl.evaluate": 3,
    "lit_rl.rescore": 3,
    "lit_rl.assets": 3,
    "lit_rl.callbacks": 4,
    "lit_rl.cli": 3,
    "lit_rl.migrate": 3,
    "train": 5,
}
OPTIONAL = {
    "vllm",
    "gguf",
    "wandb",
    "mlflow",
    "swanlab",
    "deepspeed",
    "liger_kernel",
    "bitsandbytes",
    "torchao",
}


def modules() -> dict[str, Path]:
    found = {"train": ROOT / "train.py"}
    for folder, name in (("lit_rl", "lit_rl"), ("callbacks", "lit_rl.callbacks")):
        for path in (ROOT / folder).rglob("*.py"):
            parts = [name, *path.relative_to(ROOT / folder).with_suffix("").parts]
            found[".".join(p for p in parts if p != "__init__")] = path
    return found


def part(module: str) -> str:
    """The entry of LAYERS that a module belongs to."""
    known = [name for name in LAYERS if module == name or module.startswith(name + ".")]
    assert known, f"{module} has no layer"
    return max(known, key=len)


def imports(path: Path, *, at_top: bool = False) -> list[str]:
    tree = ast.parse(path.read_text())
    nodes = tree.body if at_top else list(ast.walk(tree))
    out = []
    for node in nodes:
        if isinstance(node, ast.Import):
            out += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            out += [f"{node.module}.{alias.name}" for alias in node.names]
    return out


MODULES = modules()


@pytest.mark.parametrize("module", sorted(set(MODULES) - {"lit_rl"}))
def test_imports_point_down(module: str) -> None:
    mine = part(module)
    for name in imports(MODULES[module]):
        if name.split(".")[0] != "lit_rl":
            continue
        while name not in MODULES and "." in name:
            name = name.rpartition(".")[0]
        if name == "lit_rl":
            continue
        theirs = part(name)
        is_own = theirs == mine or LAYERS[mine] != 1
        is_level = LAYERS[theirs] == LAYERS[mine] and is_own
        assert LAYERS[theirs] < LAYERS[mine] or is_level, f"{module} -> {name}"


def test_functional_imports_torch_and_nothing_else() -> None:
    allowed = {"torch", "math", "collections", "typing", "dataclasses", "itertools", "functools", "lit_rl"}
    for module, path in MODULES.items():
        if module.startswith("lit_rl.functional"):
            assert {name.split(".")[0] for name in imports(path)} <= allowed, module


def test_extras_are_imported_where_they_are_used() -> None:
    for module, path in MODULES.items():
        assert not OPTIONAL & {name.split(".")[0] for name in imports(path, at_top=True)}, module


def test_the_package_imports_without_extras() -> None:
    assert not imports(ROOT / "lit_rl" / "__init__.py")
