"""Every documented parameter of TRL and verl with our key, its default and the test that shows its effect.

python tests/conf/coverage.py       writes lit_rl/migrate/README.md anew
"""

import re
import sys
from functools import cache
from pathlib import Path
from typing import Any

import yaml

sys.path.append(str(Path(__file__).resolve().parents[1]))  # of what the tests share

import test_every_key as every_key

from lit_rl.configuration import page
from lit_rl.configuration.compose import Source
from lit_rl.configuration.tree import ABSENT, at
from lit_rl.migrate.rows import Row, rows

ROOT = Path(__file__).resolve().parents[2]
SOURCE = Source(ROOT / "conf")
PAGE = ROOT / "lit_rl" / "migrate" / "README.md"
TITLES = {
    "trl_grpo": "TRL: GRPOConfig and GRPOTrainer",
    "verl": "verl: PPO and GRPO, evaluation, SFT",
    "trl_sdpo": "TRL: SDPOConfig, SDPOTrainer and the example script",
}
COLUMNS = """| theirs | ours | default | unit, meaning | how | test |
| --- | --- | --- | --- | --- | --- |
"""
HEAD = """# Coming from TRL or verl

Written by `python tests/conf/coverage.py`; do not edit. `python -m lit_rl.migrate trl ARGS.json` and
`... verl CONFIG.yaml` convert by this table and say for each key what became of it. *Not yet* is what does
not exist here today. A key of a whole group has the default of the group.

"""


def text() -> str:
    """The whole page."""
    counts = [row for row in rows() if status(row) == "not yet"]
    parts = [
        HEAD,
        f"{len(rows())} parameters; {len(without())} without meaning here; {len(counts)} not yet.\n",
    ]
    for source, title in TITLES.items():
        parts.append(f"\n## {title}\n\n{COLUMNS}")
        parts += [line(row) for row in rows() if row.source == source]
    return "".join(parts)


def without() -> list[Row]:
    """Parameters that have no meaning here."""
    return [row for row in rows() if row.how == "no-meaning"]


def status(row: Row) -> str:
    """there, not yet, or no meaning."""
    if row.how == "no-meaning":
        return "no meaning"
    known = {key.rstrip(".") for key in keys()}
    is_group = any(key.startswith(f"{row.key}.") for key in known) or (SOURCE.folder / row.key).is_dir()
    is_entry = row.how == "extension-point" and any(row.key.startswith(f"{key}.") for key in known)
    is_entry |= row.section.startswith("evaluation.") and at(evaluation(), row.key) is not ABSENT
    is_listed = row.key.startswith("callbacks.") and callback(row.key).is_file()
    return "there" if row.key in known or is_group or is_entry or is_listed else "not yet"


@cache
def evaluation() -> dict[str, Any]:
    """Keys of `python -m lit_rl.evaluate`."""
    return yaml.safe_load((SOURCE.folder / "evaluate.yaml").read_text())


def callback(key: str) -> Path:
    return SOURCE.folder / "callbacks" / f"{key.split('.')[1]}.yaml"


def line(row: Row) -> str:
    """A row of the table."""
    note = escaped(row.note)
    found = status(row)
    if found == "no meaning":
        return f"| `{row.name}` | none | | | no meaning: {note} | |\n"
    how = f"{row.how}{': ' if note else ''}{note}"
    if found == "not yet":
        return f"| `{row.name}` | `{row.key}` | | | **not yet**; {how} | |\n"
    cells = [f"`{row.name}`", f"`{row.key}`", default(row.key), meaning(row.key), how, test(row.key)]
    return f"| {' | '.join(cells)} |\n"


@cache
def keys() -> dict[str, page.Row]:
    """Every key of ours with its defaults."""
    return page.described(SOURCE)


def default(key: str) -> str:
    """Our default, of the first choice that has the key."""
    row = keys().get(key)
    if row is None:
        return ""
    value = next(iter(row.defaults.values()))
    words = {None: "null", True: "true", False: "false"}
    text = words[value] if value is None or isinstance(value, bool) else str(value)
    return f"`{escaped(text)}`" if text else "empty"


def meaning(key: str) -> str:
    """Unit and meaning of our key."""
    row = keys().get(key)
    return escaped(row.meaning) if row else "a group" if "." not in key else ""


def escaped(text: str) -> str:
    """Text for a cell."""
    return text.replace("\n", "\\n").replace("|", "\\|")


def test(key: str) -> str:
    """Where the effect of a key is shown."""
    if key in every_key.INFORMATIONAL:
        return f"{every_key.INFORMATIONAL[key]}"
    if key in tried():
        return "`tests/conf/test_every_key.py`"
    leaf = key.rpartition(".")[2]
    files = [name for name, words in words_of_tests().items() if leaf in words]
    return f"`{files[0]}`" if files else "`tests/conf/test_configs.py`"


@cache
def tried() -> set[str]:
    """Keys that the test of every key changes."""
    return {key for algo in every_key.ALGORITHMS for key in every_key.keys(algo)}


@cache
def words_of_tests() -> dict[str, set[str]]:
    """Words of each test file, the folder of callbacks and engines first."""
    files = sorted((ROOT / "tests").rglob("test_*.py"), key=lambda file: (file.parent.name == "conf", file))
    return {str(f.relative_to(ROOT)): set(re.findall(r"\w+", f.read_text())) for f in files}


if __name__ == "__main__":
    PAGE.write_text(text())
    print(f"Wrote {PAGE}")
