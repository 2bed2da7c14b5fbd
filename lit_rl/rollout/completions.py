"""What an engine outside the training model reports, and how it becomes a RolloutBatch."""

import math
from dataclasses import replace
from typing import NamedTuple

import torch

from lit_rl.batch import RolloutBatch, length_mask, padded


class Completion(NamedTuple):
    """One completion as an engine reported it.

    Attributes:
        ids: sampled tokens, the end token included.
        logps: as many log-probabilities of them; None where the engine's are not those of the policy.
        finish_reason: "stop" or "length".
    """

    ids: list[int]
    logps: list[float] | None
    finish_reason: str


def filled(
    rows: RolloutBatch, completions: list[Completion], *, pad_token_id: int, policy_version: int
) -> RolloutBatch:
    """The rows with their completions.

    Args:
        rows: B rows without completions.
        completions: B of them, in the order of the rows; log-probabilities in all or in none.
        pad_token_id: fills positions that do not exist.
        policy_version: of the weights that wrote them.

    Raises:
        RuntimeError: a row without tokens, for another reason than "stop" or "length", or with a
            log-probability missing or not finite.
    """
    for row, completion in enumerate(completions):
        _check(int(rows.prompt_row[row]), completion)
    device = rows.prompt_ids.device
    ids, lengths = padded([completion.ids for completion in completions], "right", pad_token_id)
    logps = None
    if all(completion.logps is not None for completion in completions):
        logps = torch.zeros(ids.shape)
        logps[length_mask(lengths, ids.shape[1])] = torch.tensor(
            [value for completion in completions for value in completion.logps or []]
        )
    return replace(
        rows,
        completion_ids=ids.to(device),
        completion_len=lengths.to(device),
        completion_mask=length_mask(lengths, ids.shape[1]).to(device),
        finish_reason=[completion.finish_reason for completion in completions],
        policy_version=torch.full((len(rows),), policy_version, device=device),
        rollout_logps=None if logps is None else logps.to(device),
    )


def _check(data_row: int, completion: Completion) -> None:
    if not completion.ids or completion.finish_reason not in ("stop", "length"):
        raise RuntimeError(
            f"the engine returned {len(completion.ids)} tokens with finish reason "
            f"{completion.finish_reason!r} for data row {data_row}; a completion has at least one and ends "
            "by 'stop' or 'length'."
        )
    if completion.logps is None:
        return
    assert len(completion.logps) == len(completion.ids)
    for token, value in enumerate(completion.logps):
        if value is None or not math.isfinite(value):
            raise RuntimeError(
                f"the engine's log-probability of data row {data_row} at token {token} is {value!r}; it must "
                "be a finite number."
            )
