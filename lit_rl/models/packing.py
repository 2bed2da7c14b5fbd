"""Supervised rows laid out for a pass: each alone, or several one after another in one sequence.

Where rows share a sequence less of a pass is padding. Positions start anew at each row, from which
transformers knows that rows do not see each other.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lit_rl.batch import length_mask
from lit_rl.errors import ConfigError
from lit_rl.models.score import Rows, completion_hidden
from lit_rl.models.weights import base_of


class Packed(NamedTuple):
    """B rows in K sequences.

    Attributes:
        ids, positions: (K, L) long; a sequence ends in padding.
        starts: (B,) long. Where each row begins, counted through the sequences.
        lengths: B tokens of each row.
    """

    ids: Tensor
    positions: Tensor
    starts: Tensor
    lengths: list[int]


def packed(rows: Rows) -> Packed:
    """Lay out rows in sequences as long as the longest row: each goes to the first that has room.

    Longer rows first (first fit decreasing), which needs at most 11/9 of the fewest sequences, plus one.
    """
    lengths = (rows.prompt_len + rows.completion_len).tolist()
    width = max(lengths)
    room: list[int] = []
    starts = [0] * len(lengths)
    for row in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        fitting = (k for k, left in enumerate(room) if left >= lengths[row])
        k = next(fitting, len(room))
        if k == len(room):
            room.append(width)
        starts[row] = k * width + width - room[k]
        room[k] -= lengths[row]
    return _filled(rows, lengths, starts, len(room))


def alone(rows: Rows) -> Packed:
    """Each row in a sequence of its own, from its left edge on."""
    lengths = (rows.prompt_len + rows.completion_len).tolist()
    return _filled(rows, lengths, [row * max(lengths) for row in range(len(lengths))], len(lengths))


def _filled(rows: Rows, lengths: list[int], starts: list[int], count: int) -> Packed:
    width = max(lengths)
    ids = torch.zeros(count * width, dtype=torch.long)
    positions = torch.arange(width).repeat(count)
    for row, (start, length) in enumerate(zip(starts, lengths, strict=True)):
        prompt, done = int(rows.prompt_len[row]), int(rows.completion_len[row])
        own = [rows.prompt_ids[row, rows.prompt_ids.shape[1] - prompt :], rows.completion_ids[row, :done]]
        ids[start : start + length] = torch.cat(own).cpu()
        end = -(-(start + 1) // width) * width  # what follows in the sequence counts on, until a row begins
        positions[start:end] = torch.arange(end - start)
    return Packed(ids.view(-1, width), positions.view(-1, width), torch.tensor(starts), lengths)


def laid_out_hidden(
    model: nn.Module, rows: Rows, layout: Packed, noise: list[Tensor] | None = None
) -> Tensor:
    """`completion_hidden` of the rows, computed on a layout of them: (N, H) row by row.

    Args:
        model: a Hugging Face causal language model, or a PEFT model around one.
        rows: prompts and completions.
        layout: of these rows.
        noise: for each row (length, H), added to its token embeddings.
    """
    base = base_of(model)
    body, ids = getattr(base, base.base_model_prefix), layout.ids.to(base.device)
    inputs = {"input_ids": ids} if noise is None else {"inputs_embeds": _noisy(base, ids, layout, noise)}
    hidden = body(
        **inputs, position_ids=layout.positions.to(base.device), use_cache=False, return_dict=True
    ).last_hidden_state
    lengths = rows.completion_len.cpu()
    steps = torch.arange(int(lengths.max()))
    predicts = (layout.starts + rows.prompt_len.cpu() - 1)[:, None] + steps
    places = predicts[length_mask(lengths, len(steps))]
    return hidden.flatten(0, 1).index_select(0, places.to(hidden.device))


def _noisy(base: Any, ids: Tensor, layout: Packed, noise: list[Tensor]) -> Tensor:
    embedded = base.get_input_embeddings()(ids)
    added = torch.zeros(embedded.shape[0] * embedded.shape[1], embedded.shape[2])
    for start, length, own in zip(layout.starts.tolist(), layout.lengths, noise, strict=True):
        added[start : start + length] = own
    return embedded + added.view(embedded.shape).to(embedded)


@torch.no_grad()
def check_packing(model: nn.Module) -> None:
    """Compare packed rows with rows alone on a few tokens; not on the meta device, where there are none.

    Raises:
        ConfigError: rows of one sequence see each other in this architecture.
    """
    base = base_of(model)
    if base.device.type == "meta":
        return
    ids = (torch.arange(18) * 7 % base.config.get_text_config().vocab_size).view(3, 6)
    rows = Rows(ids[:, :3], torch.tensor([3, 2, 1]), ids[:, 3:], torch.tensor([3, 1, 2]))
    was_training = [module for module in base.modules() if module.training]
    base.eval()
    try:
        apart = completion_hidden(model, rows.to(base.device))
        together = laid_out_hidden(model, rows, packed(rows))
    finally:
        for module in was_training:
            module.training = True
    tolerance = (1e-4 if base.dtype in (torch.float32, torch.float64) else 3e-2) * apart.abs().max().item()
    if not torch.allclose(apart.float(), together.float(), rtol=0, atol=tolerance):
        raise ConfigError(
            f"algo.packing needs an architecture that keeps the rows of a sequence apart (found "
            f"{type(base).__name__}, which does not); set algo.packing=false."
        )
