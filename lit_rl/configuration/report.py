"""What a user sees when something is the user's to mend: the message, not the stack."""

import sys
import traceback

from lit_rl.configuration.launched import rank_in_words
from lit_rl.errors import ConfigError, DataError, StorageError

MAX_LINES = 15
TITLES = {ConfigError: "Configuration error", DataError: "Data error", StorageError: "Storage error"}
UserError = ConfigError | DataError | StorageError


def user_error(error: BaseException | None) -> UserError | None:
    """The error of ours in a chain of causes; None when it is not the user's."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        if isinstance(error, UserError):
            return error
        seen.add(id(error))
        error = error.__cause__ or error.__context__
    return None


def print_user_error(error: UserError, *, full_trace: bool) -> None:
    """Write the message to stderr, in at most MAX_LINES lines, with the traceback only if asked for."""
    if full_trace:
        traceback.print_exception(error)
        return
    lines = [line for line in str(error).splitlines() if line.strip()]
    room = MAX_LINES - 3
    if len(lines) > room:
        lines = [*lines[:room], f"... and {len(lines) - room} more lines"]
    title = TITLES.get(type(error), "Error")
    print(f"{title}{rank_in_words()}", *(f"  {line}" for line in lines), sep="\n", file=sys.stderr)
    print("(full_trace=true shows where it was raised.)", file=sys.stderr, flush=True)
