"""The errors that are the user's to mend. Anything else that is raised is a fault of ours."""


class ConfigError(ValueError):
    """A setting, or a combination of settings, cannot work.

    The message holds the full dotted key, the value found, what is allowed, and what to do.
    """


class DataError(ValueError):
    """A row of the data, or what a reward function returned, cannot be used.

    The message holds the file, the row and the column, what was found, and what is allowed.
    """


class StorageError(OSError):
    """A folder, here or remote, cannot be written or read: full, read-only, gone.

    The message holds the folder, the cause, what is left intact, and what to do.
    """
