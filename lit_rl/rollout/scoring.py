"""Scores of given tokens: what an engine says about completions of somebody else, at temperature 1."""

import math
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lit_rl.batch import RolloutBatch, length_mask, padded
from lit_rl.images import image_inputs, inputs_for, plain_text


class Scores(NamedTuple):
    """Log-probabilities over the whole vocabulary at temperature 1, in float32; 0 where no token is.

    Attributes:
        logps: (B, T) of the completions' own tokens.
        top_ids: (B, T, K) long. The K most likely tokens of each position, the most likely first.
        top_logps: (B, T, K) of those.
    """

    logps: Tensor
    top_ids: Tensor
    top_logps: Tensor


EngineScore = Callable[[RolloutBatch, int], Scores]
"""(rows, K) -> what the engine says of their completions."""

Entry = tuple[int, float, int]
"""What a server reports for one token at one position: its id, its log-probability, its rank from 1."""


def scores_of(rows: RolloutBatch, entries: Sequence[Sequence[Sequence[Entry]]], topk: int) -> Scores:
    """What was reported, as tensors.

    Args:
        rows: B rows with completions.
        entries: for each row and each of its completion tokens what the engine reported there: the token
            itself, in any place, and the `topk` most likely.
        topk: K, may be 0.

    Raises:
        RuntimeError: a token is not among its entries, fewer than K are, or a value is not finite.
    """
    assert rows.completion_ids is not None
    shape = rows.completion_ids.shape
    logps, ids = torch.zeros(shape), torch.zeros((*shape, topk), dtype=torch.long)
    top = torch.zeros((*shape, topk))
    for row, (positions, tokens) in enumerate(zip(entries, completions_of(rows), strict=True)):
        data_row, length = int(rows.prompt_row[row]), len(tokens)
        found = [
            _of_position(position, token, topk, f"data row {data_row} at token {at}")
            for at, (position, token) in enumerate(zip(positions, tokens, strict=True))
        ]
        logps[row, :length] = torch.tensor([own for own, _ in found])
        ids[row, :length] = torch.tensor([[id_ for id_, _, _ in best] for _, best in found], dtype=torch.long)
        top[row, :length] = torch.tensor([[logp for _, logp, _ in best] for _, best in found])
    device = rows.prompt_ids.device
    return Scores(logps.to(device), ids.to(device), top.to(device))


def _of_position(found: Sequence[Entry], token: int, topk: int, where: str) -> tuple[float, list[Entry]]:
    """The token's own log-probability, and the most likely entries, the most likely first."""
    best = sorted((entry for entry in found if entry[2] <= topk), key=lambda entry: entry[2])
    own = [logp for id_, logp, _ in found if id_ == token]
    if not own or len(best) != topk:
        raise RuntimeError(
            f"the engine reported {len(best)} of the {topk} most likely tokens and {len(own)} times the "
            f"token itself for {where}; it must report all of them."
        )
    if not all(math.isfinite(logp) for logp in (own[0], *(logp for _, logp, _ in best))):
        raise RuntimeError(f"the engine's log-probability of {where} is not a finite number.")
    return own[0], best


def reported(position: dict[Any, Any]) -> list[Entry]:
    """vLLM's entries of one position, from its objects or from the JSON of them."""
    return [
        (int(id_), entry["logprob"], entry["rank"])
        if isinstance(entry, dict)
        else (int(id_), entry.logprob, entry.rank)
        for id_, entry in position.items()
    ]


def sequences_of(rows: RolloutBatch) -> list[list[int]]:
    """Prompt and completion of each row, without padding."""
    prompts = zip(rows.prompt_ids.tolist(), rows.prompt_len.tolist(), strict=True)
    return [
        ids[len(ids) - length :] + completion
        for (ids, length), completion in zip(prompts, completions_of(rows), strict=True)
    ]


def completions_of(rows: RolloutBatch) -> list[list[int]]:
    """The completion of each row, without padding."""
    assert rows.completion_ids is not None and rows.completion_len is not None
    lengths = rows.completion_len.tolist()
    return [ids[:length] for ids, length in zip(rows.completion_ids.tolist(), lengths, strict=True)]


@torch.no_grad()
def model_scores(model: Any, rows: RolloutBatch, topk: int) -> Scores:
    """The same by a transformers model.

    Args:
        model: in eval mode.
        rows: B rows with completions.
        topk: K, may be 0.
    """
    assert rows.completion_ids is not None
    device = next(model.parameters()).device
    ids, lengths = padded(sequences_of(rows), "right")
    exists = length_mask(lengths, ids.shape[1])
    ids, exists = ids.to(device), exists.to(device)
    seen = inputs_for(model, image_inputs(rows.images, rows.prompt_len, ids.shape[1], side="right"))
    is_written = torch.arange(ids.shape[1], device=device) >= rows.prompt_len.to(device)[:, None]
    with plain_text(model, ids, is_written) if seen else nullcontext(ids) as read:
        logits = model(input_ids=read, attention_mask=exists.long(), use_cache=False, **seen).logits
    steps = torch.arange(rows.completion_ids.shape[1])
    before = (rows.prompt_len.cpu()[:, None] - 1 + steps).clamp(max=ids.shape[1] - 1).to(device)  # (B, T)
    every = logits.gather(1, before[..., None].expand(-1, -1, logits.shape[-1])).float().log_softmax(-1)
    top = every.topk(topk, dim=-1) if topk else (every[..., :0], before[..., None][..., :0])
    own = every.gather(-1, rows.completion_ids.to(device)[..., None])[..., 0]
    is_token = rows.token_mask.to(device)
    whole = is_token[..., None]
    out = (own.where(is_token, 0), top[1].where(whole, 0), top[0].where(whole, 0))
    return Scores(*(tensor.to(rows.prompt_ids.device) for tensor in out))
