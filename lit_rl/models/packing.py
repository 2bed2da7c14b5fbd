"""Rows of different conversations one after another in one sequence, so that less of a pass is padding.

Positions start anew at each row, from which transformers knows that rows do not see each other.
"""

from typing import NamedTuple

import torch
from torch import Tensor, nn

from lit_rl.batch import length_mask
from lit_rl.errors import ConfigError
from lit_rl.models.score import Rows, completion_hidden
from lit_rl.models.weights import base_of


class Packed(NamedTuple):
    """B rows in K sequences.

    Attributes:
        ids, positions: (K, L) long; a sequence ends in padding that is a row of its own.
        starts: (B,) long. Where each row begins, counted through the sequences.
    """

    ids: Tensor
    positions: Tensor
    starts: Tensor


def packed(rows: Rows) -> Packed:
    """Lay out rows in sequences as long as the longest row: each goes to the first that has room.

    Longer rows first (first fit decreasing), which needs at most a fifth more sequences than the best way,
    plus one.
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
    ids = torch.zeros(len(room) * width, dtype=torch.long)
    positions = torch.zeros_like(ids)
    for row, start in enumerate(starts):
        prompt, done = int(rows.prompt_len[row]), int(rows.completion_len[row])
        own = [rows.prompt_ids[row, rows.prompt_ids.shape[1] - prompt :], rows.completion_ids[row, :done]]
        ids[start : start + lengths[row]] = torch.cat(own).cpu()
        positions[start : start + lengths[row]] = torch.arange(lengths[row])
    for k, left in enumerate(room):
        positions[(k + 1) * width - left : (k + 1) * width] = torch.arange(left)
    return Packed(ids.view(-1, width), positions.view(-1, width), torch.tensor(starts))


def packed_hidden(model: nn.Module, rows: Rows) -> Tensor:
    """`completion_hidden` of the rows, computed on packed sequences: (N, H) row by row."""
    if not int((rows.prompt_len + rows.completion_len).max()):
        return completion_hidden(model, rows)
    base, layout = base_of(model), packed(rows)
    body = getattr(base, base.base_model_prefix)
    hidden = body(
        input_ids=layout.ids.to(base.device),
        position_ids=layout.positions.to(base.device),
        use_cache=False,
        return_dict=True,
    ).last_hidden_state
    lengths = rows.completion_len.cpu()
    steps = torch.arange(int(lengths.max()))
    predicts = (layout.starts + rows.prompt_len.cpu() - 1)[:, None] + steps
    places = predicts[length_mask(lengths, len(steps))]
    return hidden.flatten(0, 1).index_select(0, places.to(hidden.device))


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
        alone = completion_hidden(model, Rows(*(x.to(base.device) for x in rows)))
        together = packed_hidden(model, rows)
    finally:
        for module in was_training:
            module.training = True
    tolerance = (1e-4 if base.dtype in (torch.float32, torch.float64) else 3e-2) * alone.abs().max().item()
    if not torch.allclose(alone.float(), together.float(), rtol=0, atol=tolerance):
        raise ConfigError(
            f"algo.packing needs an architecture that keeps the rows of a sequence apart (found "
            f"{type(base).__name__}, which does not); set algo.packing=false."
        )
