"""The page of every key, conf/README.md: `python -m lit_rl.configuration.page conf` writes it anew.

Keys and defaults come from the yaml files, types and meanings from the constructors. Where a constructor is
not ours, the meaning stands beside the key in the yaml file.
"""

import inspect
import re
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hydra import compose as hydra_compose
from omegaconf import OmegaConf

from lit_rl.configuration.compose import Source
from lit_rl.configuration.root import Run
from lit_rl.configuration.signature import described as type_in_words
from lit_rl.configuration.signature import resolved, signature
from lit_rl.configuration.tree import NODE_KEYS, at, joined, link
from lit_rl.configuration.validate import block_class

GROUPS = (
    (
        "data",
        ("arithmetic", "gsm8k", "math", "sciknoweval", "parquet", "reasoning_gym", "question", "chat_sft"),
    ),
    ("model", ("tiny", "smollm2_135m", "hf")),
    ("reward", ("by_source", "soft_overlong", "random", "reward_model", "judge", "code", "environment")),
    (
        "algo",
        (
            "sdpo",
            "grpo",
            "dr_grpo",
            "dapo",
            "gspo",
            "cispo",
            "rloo",
            "remax",
            "opo",
            "gpg",
            "grpo_passk",
            "reinforce_plus_plus",
            "reinforce_plus_plus_baseline",
            "ppo",
            "sft",
        ),
    ),
    ("policy_loss", ("clipped", "gpg", "cispo", "sapo", "geo_mean", "clip_cov", "kl_cov")),
    ("optim", ("adamw", "adam", "sgd", "adamw_torchao", "adamw_bnb")),
    ("schedule", ("default",)),
    ("rollout", ("hf", "vllm", "vllm_server", "sglang")),
    ("checkpoint", ("default",)),
    (
        "callbacks",
        (
            "default",
            "reference_sync",
            "rollout_dump",
            "memory",
            "teacher_gap",
            "collapse_alarm",
            "push_to_hub",
            "test_time_search",
            "from_file",
        ),
    ),
    ("logger", ("default", "tensorboard", "csv", "console", "wandb", "mlflow", "swanlab", "none")),
    ("trainer", ("cpu", "gpu", "ddp", "fsdp")),
)
NODE_OF = {"policy_loss": "algo.policy_loss"}  # where a group's files land, if not under its name
HEAD = """# Every key

Written by `python -m lit_rl.configuration.page conf` from the yaml files and the constructors' docstrings;
do not edit.

`python train.py group=choice key=value`. Read from low to high: group files, the `algo` preset, the preset
of the embedded run, `experiment`, `debug`, the command line. A group is a constructor's arguments; where
`${...}` stands as a default, the key follows another one unless it is set. An unknown key, a wrong type, a
value out of range, and an option without effect in the combination are errors before a model is loaded.

A *step* is one iteration (generate, score, update) in every key; *rows* are completions.
"""


@dataclass
class Row:
    """One key: its defaults by choice, its type and meaning."""

    defaults: dict[str, Any] = field(default_factory=dict)
    kind: str = ""
    meaning: str = ""


def page(source: Source) -> str:
    """The whole page as Markdown."""
    parts = [HEAD, "## Without a group\n", _table(_root_rows(source), ("train",))]
    for group, choices in GROUPS:
        rows = _group_rows(source, group, choices)
        listed = ", ".join(f"`{choice}`" for choice in choices)
        first = "" if group in ("callbacks", "logger") else " (the first is the default)"
        parts += [f"## `{group}`\n", f"Choices: {listed}{first}.\n", _table(rows, choices)]
    parts += ["## What the presets set\n", _presets(source)]
    return "\n".join(parts)


def described(source: Source) -> dict[str, Row]:
    """Every key of the page with its defaults, type and meaning."""
    found = _root_rows(source)
    for group, choices in GROUPS:
        found.update(_group_rows(source, group, choices))
    return found


def keys(source: Source) -> set[str]:
    """Every key of the page."""
    return set(described(source))


def _alone(source: Source, name: str) -> dict[str, Any]:
    with source.opened():
        plain: Any = OmegaConf.to_container(hydra_compose(name), resolve=False)
    return plain


def _root_rows(source: Source) -> dict[str, Row]:
    meanings, parameters = arguments(Run), signature(Run).parameters
    raw: Any = OmegaConf.to_container(OmegaConf.load(source.folder / f"{source.name}.yaml"), resolve=False)
    return {
        name: Row({"train": raw[name]}, type_in_words(parameter.annotation), meanings[name])
        for name, parameter in parameters.items()
    }


def _group_rows(source: Source, group: str, choices: tuple[str, ...]) -> dict[str, Row]:
    rows: dict[str, Row] = {}
    comments = _comments(source.folder / group)
    for choice in choices:
        key = NODE_OF.get(group, group)
        node = at(_alone(source, f"{group}/{choice}"), key) or {}
        _collect(rows, node, key, choice, comments)
        if group == "algo":
            _add_critic_optim(source, rows, choice)
    return rows


def _add_critic_optim(source: Source, rows: dict[str, Row], choice: str) -> None:
    """Keys that an algorithm takes from conf/critic, one file for each choice of `optim`."""
    comments = _comments(source.folder / "optim")
    for path in sorted((source.folder / "critic").glob(f"{choice}_*.yaml")):
        node = at(_alone(source, f"critic/{path.stem}"), "algo.critic.optim")
        _collect(rows, node, "algo.critic.optim", choice, comments)


def _collect(
    rows: dict[str, Row],
    node: dict[str, Any],
    key: str,
    choice: str,
    comments: dict[str, str],
    implied: Any = None,
) -> None:
    path = str(node.get("_target_", ""))
    target: Any = resolved(path) if path.startswith("lit_rl.") else None if path else implied
    is_ours = target is not None and target.__module__.startswith("lit_rl.")
    accepted = signature(target).parameters if is_ours else {}
    meanings = arguments(target) if is_ours else {}
    for name, value in node.items():
        here = joined(key, name)
        is_off = value is None and key in ("callbacks", "logger")
        follows = link(value) or "."  # a whole node, or the folder of the run: told in their own place
        if name in NODE_KEYS or is_off or ("." not in follows and follows != "seed"):
            continue
        if isinstance(value, dict) and (value or key in ("callbacks", "logger")):
            block = block_class(accepted[name].annotation) if name in accepted else None
            _collect(rows, value, here, choice, comments, implied=block)
            continue
        row = rows.setdefault(here, Row())
        row.defaults[choice] = value
        row.kind = row.kind or (type_in_words(accepted[name].annotation) if name in accepted else "")
        row.meaning = row.meaning or meanings.get(name) or comments.get(name, "")


def _comments(folder: Path) -> dict[str, str]:
    """What stands beside a key in the yaml files of a group, by the key's last name."""
    found: dict[str, str] = {}
    for path in sorted(folder.rglob("*.yaml")):
        for name, text in re.findall(r"^\s*(\w+):[^#\n]*#\s*(.+)$", path.read_text(), re.MULTILINE):
            found.setdefault(name, text.strip())
    return found


def arguments(target: Any) -> dict[str, str]:
    """The `Args:` of a class and its bases, or of a function, by name."""
    found: dict[str, str] = {}
    for owner in [target] if not isinstance(target, type) else target.__mro__:
        if getattr(owner, "__module__", "").startswith("lit_rl."):
            found = {**_args_section(inspect.cleandoc(owner.__doc__ or "")), **found}
    return found


def _args_section(text: str) -> dict[str, str]:
    match = re.search(r"^Args:\n((?:[ \t]+.*\n?|\n)+)", text, re.MULTILINE)
    if match is None:
        return {}
    entries = re.findall(r"^ {4}([\w, ]+): (.*(?:\n {8}.*)*)", match.group(1), re.MULTILINE)
    return {
        name.strip(): re.sub(r"\s+", " ", meaning).strip()
        for names, meaning in entries
        for name in names.split(",")
    }


def _table(rows: dict[str, Row], choices: tuple[str, ...]) -> str:
    lines = ["| key | default | type | meaning |", "| --- | --- | --- | --- |"]
    for key, row in rows.items():
        lines.append(f"| `{key}` | {_defaults(row, choices)} | {_cell(row.kind)} | {_cell(row.meaning)} |")
    return "\n".join(lines) + "\n"


def _defaults(row: Row, choices: tuple[str, ...]) -> str:
    first, value = next(iter(row.defaults.items()))
    by_value: dict[str, list[str]] = {}
    for choice, other in row.defaults.items():
        if other != value:
            by_value.setdefault(_code(other), []).append(choice)
    others = [f"{', '.join(names)}: {code}" for code, names in by_value.items()]
    only = "" if len(row.defaults) == len(choices) or first == "train" else _only(row, choices)
    return "; ".join([_code(value), *others]) + only


def _only(row: Row, choices: tuple[str, ...]) -> str:
    if choices[0] == "default":
        return ""
    missing = [choice for choice in choices if choice not in row.defaults]
    if len(missing) < len(row.defaults):
        return f" (not {', '.join(missing)})"
    return f" ({', '.join(row.defaults)})"


def _code(value: Any) -> str:
    words = {None: "null", True: "true", False: "false"}
    text = (
        words[value]
        if value is None or isinstance(value, bool)
        else repr(value)
        if value == ""
        else str(value)
    )
    return f"`{_cell(text if len(text) <= 60 else text[:57] + '...')}`"


def _cell(text: str) -> str:
    return text.replace("\n", "\\n").replace("|", "\\|")


def _presets(source: Source) -> str:
    lines = ["| file | key | value |", "| --- | --- | --- |"]
    names = [f"algo/{choice}" for choice in dict(GROUPS)["algo"]]
    names += sorted(f"preset/{path.stem}" for path in (source.folder / "preset").glob("*.yaml"))
    told: list[Any] = []
    for name in names:
        content = _flat(_alone(source, name))
        if content in told:  # a preset that only names another one
            continue
        told.append(content)
        for key, value in content:
            if not (name.startswith("algo/") and key.startswith("algo.")):
                lines.append(f"| `{name}` | `{key}` | {_code(value)} |")
    return "\n".join(lines) + "\n"


def _flat(tree: dict[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    out: list[tuple[str, Any]] = []
    for name, value in tree.items():
        if isinstance(value, dict) and value:
            out += _flat(value, joined(prefix, name))
        elif name not in NODE_KEYS:
            out.append((joined(prefix, name), value))
    return out


if __name__ == "__main__":
    folder = Path(sys.argv[1]).resolve()
    (folder / "README.md").write_text(page(Source(folder)))
    print(f"Wrote {folder / 'README.md'}")
