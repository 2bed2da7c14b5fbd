"""Values that must not be written anywhere."""

import re
from typing import Any

MASK = "***"
_SECRET = re.compile(r"(^|_)(token|password|passwd|secret|api_?key|access_?key|credentials?)$", re.IGNORECASE)


def is_secret(key: str) -> bool:
    """Whether the last part of the dotted key names a secret: hub_token does, max_tokens does not."""
    return _SECRET.search(key.rsplit(".", 1)[-1]) is not None


def masked(key: str, value: Any) -> Any:
    """The value, or a mask when the key, or a key within the value, names a secret; null stays null."""
    if is_secret(key):
        return value if value is None else MASK
    if isinstance(value, dict):
        return {name: masked(str(name), below) for name, below in value.items()}
    if isinstance(value, list):
        return [masked(key, item) for item in value]
    return value
