"""Kernels: what changes the speed and memory of forward passes, and nothing else."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import torch
from lightning.pytorch.utilities import rank_zero_info
from torch import nn

from lit_rl.models.flat_attention import set_flat_attention_
from lit_rl.models.score import Rows, completion_hidden
from lit_rl.models.weights import base_of


@dataclass(frozen=True)
class Kernels:
    """How forward passes are computed.

    Args:
        share_prefix: compute a prompt once for all its rows in a micro-batch, forward and backward. Where an
            architecture does not allow it, its rows are computed one by one, and a line says so.
    """

    key: ClassVar[str] = "model.kernels"

    share_prefix: bool = True

    def apply_(self, model: nn.Module) -> None:
        """Switch the model over.

        Args:
            model: a Hugging Face causal language model, or a PEFT model around one.
        """
        if self.share_prefix and (reason := share_prefixes_(model)) is not None:
            rank_zero_info(
                f"{self.key}.share_prefix: prompts are computed once per row, since {reason}; "
                f"{self.key}.share_prefix=false silences this."
            )


def share_prefixes_(model: nn.Module) -> str | None:
    """Let `score` compute a prompt once for its rows, if that gives what rows by themselves give.

    Args:
        model: a Hugging Face causal language model, or a PEFT model around one. Left as it was if not.

    Returns:
        None, or why this model cannot.
    """
    if any(_dropouts(model)):
        return "dropout is on, and rows would share its noise"
    if base_of(model).device.type == "meta":  # no numbers to compare
        set_flat_attention_(model, True)
        return None
    rows = _sample_rows(base_of(model).config.get_text_config().vocab_size, base_of(model).device)
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        with torch.no_grad():
            alone = completion_hidden(model, rows).float()
            set_flat_attention_(model, True)
            together = completion_hidden(model, rows).float()
    except (NotImplementedError, TypeError, ValueError, AttributeError, KeyError, RuntimeError) as error:
        reason = f"{type(base_of(model)).__name__} does not take flat rows ({error})"
    else:
        tolerance = (
            1e-4 if base_of(model).dtype in (torch.float32, torch.float64) else 5e-2
        ) * alone.abs().max()
        if torch.allclose(together, alone, rtol=0, atol=float(tolerance)):
            return None
        reason = f"{type(base_of(model)).__name__} computes something else over flat rows"
    finally:
        for module in training:
            module.training = True
    set_flat_attention_(model, False)
    return reason


def _sample_rows(vocabulary: int, device: torch.device) -> Rows:
    """Two prompts and five ragged rows."""
    prompts = torch.arange(1, 13).remainder(vocabulary).expand(5, -1).clone()
    prompts[3:] = prompts[3:].flip(1)
    completions = torch.arange(5, 30).mul(7).remainder(vocabulary).view(5, 5)
    lengths = (torch.tensor([12, 12, 12, 9, 9]), completions, torch.tensor([5, 1, 3, 2, 4]))
    return Rows(prompts.to(device), *(tensor.to(device) for tensor in lengths))


def _dropouts(model: nn.Module) -> Iterator[float]:
    """Every rate of dropout in modules and configuration."""
    for module in model.modules():
        if isinstance(module, nn.modules.dropout._DropoutNd):
            yield module.p
    for name, value in vars(base_of(model).config.get_text_config()).items():
        if isinstance(value, float) and any(word in name for word in DROPOUT_NAMES):
            yield value


DROPOUT_NAMES = ("dropout", "pdrop", "layerdrop")
"""Parts of the names under which configurations keep rates of dropout."""
