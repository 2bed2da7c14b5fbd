"""`python -m lit_rl.data.prepare SOURCE`: see the package."""

import argparse
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from lit_rl.data import prepare
from lit_rl.data.parquet import CACHE_DIR
from lit_rl.data.prepare.files import raw_rows, write
from lit_rl.data.prepare.rows import HUB, MAKERS, RowMaker, columns
from lit_rl.data.reasoning_gym import Questions
from lit_rl.errors import ConfigError, DataError

GYM = "reasoning_gym"


def prepared(given: argparse.Namespace) -> dict[str, int]:
    """Write the files; rows by path.

    Raises:
        ConfigError: an unknown source, or one without files.
        DataError: a file or a row cannot be used.
    """
    source, _, task = given.source.partition(":")
    folder = given.out or Path(CACHE_DIR).expanduser() / source / task
    if source == GYM:
        sizes = {"train": given.rows, "test": given.test_rows}
        return {
            str(folder / f"{split}.parquet"): write(
                iter(Questions(task, split, size, given.seed)), folder / f"{split}.parquet"
            )
            for split, size in sizes.items()
        }
    if source == "jsonl":
        make: RowMaker | None = columns(given.prompt, given.answer, given.data_source)
    else:
        make = MAKERS.get(source)
    if make is None:
        known = ", ".join([*MAKERS, "jsonl", f"{GYM}:TASK"])
        raise ConfigError(f"The source must be one of {known} (found {given.source!r}).")
    files = {"train": given.train, "test": given.test}
    if not any(files.values()):
        if source not in HUB:
            raise ConfigError(f"The source {source} needs files: --train FILE, --test FILE.")
        files = HUB[source]
    return {
        str(folder / f"{split}.parquet"): write(_rows(make, paths, split), folder / f"{split}.parquet")
        for split, paths in files.items()
        if paths
    }


def _rows(make: RowMaker, paths: list[str], split: str) -> Iterator[dict[str, Any]]:
    for index, (raw, where) in enumerate(raw_rows(paths, f"--{split}")):
        yield make(raw, split, index, where)


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the files and print where they are. Exit code 0, or 2 for a mistake of the user or the data."""
    parser = argparse.ArgumentParser(
        prog="python -m lit_rl.data.prepare",
        description=prepare.__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("source", help="gsm8k, math, sciknoweval, jsonl, or reasoning_gym:TASK")
    parser.add_argument("--train", nargs="+", default=[], metavar="FILE", help="raw files, globs or URLs")
    parser.add_argument("--test", nargs="+", default=[], metavar="FILE", help="likewise")
    parser.add_argument("--out", type=Path, help=f"folder; without it, {CACHE_DIR}/SOURCE")
    parser.add_argument("--prompt", default="prompt", help="jsonl: column of text or messages")
    parser.add_argument("--answer", help="jsonl: column of the reference answer")
    parser.add_argument("--data-source", default="lit_rl/question", help="jsonl: names the verifier")
    parser.add_argument("--rows", type=int, default=2000, help="reasoning_gym: training rows")
    parser.add_argument("--test-rows", type=int, default=200, help="reasoning_gym: test rows")
    parser.add_argument("--seed", type=int, default=42, help="reasoning_gym: of the questions")
    try:
        written = prepared(parser.parse_args(arguments))
    except (ConfigError, DataError) as error:
        print(error, file=sys.stderr)
        return 2
    for path, rows in written.items():
        print(f"{path}: {rows} rows")
    return 0


if __name__ == "__main__":
    sys.exit(main())
