"""The table of documented parameters: TRL GRPO and SDPO, verl PPO, evaluation and SFT."""

import csv
from dataclasses import dataclass
from functools import cache
from pathlib import Path

FILE = Path(__file__).with_name("parameters.csv")


@dataclass(frozen=True)
class Row:
    """A documented parameter.

    Attributes:
        source: trl_grpo, trl_sdpo or verl.
        section: of its document.
        name: as it is written there.
        key: ours; empty where it has no meaning here.
        how: native (same name), renamed, computed, extension-point (free-form) or no-meaning.
        default: theirs, as text.
        note: what to know.
    """

    source: str
    section: str
    name: str
    key: str
    how: str
    default: str
    note: str

    @property
    def is_group(self) -> bool:
        """Whether it is a heading above others."""
        return self.note.startswith("group") and not self.note.startswith("group choice")


@cache
def rows() -> tuple[Row, ...]:
    """Every row, in the order of the documents."""
    with FILE.open(newline="") as lines:
        return tuple(Row(**line) for line in csv.DictReader(lines))


def by_name(source: str, sections: str = "") -> dict[str, Row]:
    """Rows of a source by name, without leading dashes; the first of equal names.

    Args:
        source: trl_grpo, trl_sdpo or verl.
        sections: start of the sections' names; sections of other documents are left out.
    """
    found: dict[str, Row] = {}
    for row in rows():
        own = row.section.partition(".")[0] if row.section.startswith(("sft.", "evaluation.")) else ""
        if row.source == source and own == sections:
            found.setdefault(row.name.lstrip("-"), row)
    return found
