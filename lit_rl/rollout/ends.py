"""End strings: which token completes one."""

from collections.abc import Callable

import torch
from torch import Tensor


class StopStrings:
    """Finds the rows whose text holds one of the strings.

    Only the last tokens of a row are decoded, as many as the longest string needs, so that the cost of a
    token does not grow with the completion.

    Args:
        strings: the end strings, none of them empty.
        decode: ids to text.
    """

    def __init__(self, strings: list[str], decode: Callable[[list[int]], str]) -> None:
        self._strings = strings
        self._decode = decode
        # 4 more, because a decoded tail can begin with a split character or a stripped space.
        self._characters = max(map(len, strings), default=0) + 4

    def __bool__(self) -> bool:
        return bool(self._strings)

    def are_complete(self, completion_ids: Tensor, is_open: Tensor) -> Tensor:
        """(B,) bool, true for rows whose text holds one of the strings.

        Args:
            completion_ids: (B, t) long. Open rows held no string before their last token.
            is_open: (B,) bool. The other rows are not looked at and give false.
        """
        rows = completion_ids.cpu()
        found = [
            is_row_open and self._holds(row) for row, is_row_open in zip(rows, is_open.tolist(), strict=True)
        ]
        return torch.tensor(found, device=completion_ids.device)

    def _holds(self, row: Tensor) -> bool:
        tail = row[-self._characters :]
        text = self._decode(tail.tolist())
        if len(text) < self._characters and len(tail) < len(row):
            text = self._decode(row.tolist())  # some tokens have no text of their own: the tail was too short
        return any(string in text for string in self._strings)
