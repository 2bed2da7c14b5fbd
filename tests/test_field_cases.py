"""Every field case is a test."""

import re
from pathlib import Path

HERE = Path(__file__).parent
IDS = (HERE / "field_cases.txt").read_text().split()


def marked() -> set[str]:
    """Ids that some test carries."""
    found: set[str] = set()
    for file in HERE.rglob("test_*.py"):
        for arguments in re.findall(r"mark\.field\(([^)]*)\)", file.read_text()):
            found |= set(re.findall(r'"([a-z]+/\d+)"', arguments))
    return found


def test_each_case_is_a_test() -> None:
    assert len(IDS) == len(set(IDS)) == 92
    assert marked() == set(IDS)


def test_the_list_is_that_of_the_collection(shared_folder: Path) -> None:
    text = (shared_folder / "field" / "cases.md").read_text()
    assert re.findall(r"^\*\*([a-z]+/\d+) ", text, re.M) == IDS
