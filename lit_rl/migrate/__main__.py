"""`python -m lit_rl.migrate trl ARGS.json -o conf/experiment/mine.yaml`; `... verl CONFIG.yaml -o ...`."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from lit_rl.cli import shipped
from lit_rl.configuration.report import print_user_error
from lit_rl.errors import ConfigError
from lit_rl.migrate.draft import Draft, written
from lit_rl.migrate.sources import read
from lit_rl.migrate.trl import from_trl
from lit_rl.migrate.verl import from_verl


def converted(library: str, file: Path, *, algo: str | None = None, devices: int = 1) -> Draft:
    """The draft for a file.

    Args:
        library: trl or verl.
        file: json, yaml, a command line (.sh) or a Python call (.py).
        algo: TRL: grpo, sdpo or rloo; None finds out.
        devices: TRL: processes, where the file does not say.
    """
    found, name = read(file)
    if library == "trl":
        return from_trl(found, name, algo=algo, devices=devices)
    return from_verl(found)


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the experiment and print the report. Exit code 0, 1 when a key has no answer, 2 for a mistake."""
    parser = argparse.ArgumentParser(prog="python -m lit_rl.migrate", description=__doc__)
    parser.add_argument("library", choices=["trl", "verl"])
    parser.add_argument("file", type=Path, help="json, yaml, a command line (.sh) or a Python call (.py)")
    parser.add_argument("-o", "--output", type=Path, help="experiment to write; standard output without it")
    parser.add_argument("--algo", choices=["grpo", "sdpo", "rloo"], help="trl: which Config it is")
    parser.add_argument("--devices", type=int, default=1, help="trl: processes, where the file does not say")
    given = parser.parse_args(arguments)
    try:
        draft = converted(given.library, given.file, algo=given.algo, devices=given.devices)
        text = written(draft.finish(shipped()), given.file.name)
    except ConfigError as error:
        print_user_error(error, full_trace=False)
        return 2
    if given.output is None:
        print(text)
    else:
        given.output.parent.mkdir(parents=True, exist_ok=True)
        given.output.write_text(text)
    print(*draft.lines, sep="\n", file=sys.stderr)
    return 0 if draft.is_complete else 1


if __name__ == "__main__":
    sys.exit(main())
