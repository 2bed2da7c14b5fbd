"""When a completion ends: end ids, end strings, and the limit."""

from collections.abc import Callable

from torch import Tensor


class StopStrings:
    """Finds the token that completes one of the strings.

    Only the last tokens of a row are decoded, as many as the longest string needs, so the cost of a token does not
    grow with the completion.

    Args:
        strings: the end strings, none of them empty.
        decode: ids to text.
    """

    def __init__(self, strings: list[str], decode: Callable[[list[int]], str]) -> None:
        self._strings = strings
        self._decode = decode
        # The first characters of a decoded tail are unreliable (a split character, a stripped space), hence 4 more.
        self._characters = max(map(len, strings), default=0) + 4

    def __bool__(self) -> bool:
        return bool(self._strings)

    def is_complete(self, completion_ids: Tensor) -> list[bool]:
        """True for the rows whose text now holds one of the strings.

        Args:
            completion_ids: (B, t) long. Rows that did not hold one before their last token.
        """
        tails = completion_ids[:, -self._characters :].tolist()
        return [self._holds(tail, row) for tail, row in zip(tails, completion_ids, strict=True)]

    def _holds(self, tail: list[int], row: Tensor) -> bool:
        text = self._decode(tail)
        if len(text) < self._characters and len(tail) < len(row):
            text = self._decode(row.tolist())  # tokens without text of their own: the tail was too short
        return any(string in text for string in self._strings)
