"""Whether a model reads images beside each other as it reads them alone."""

import torch
from torch import nn

from lit_rl.batch import RolloutBatch
from lit_rl.errors import ConfigError
from lit_rl.images import has_images
from lit_rl.models.families import is_vision_language
from lit_rl.models.score import Rows, completion_hidden
from lit_rl.models.weights import base_of

ROWS = 4
"""Prompts that are looked at."""


@torch.no_grad()
def check_images(model: nn.Module, prompts: RolloutBatch) -> None:
    """Compare a few prompts with images side by side with the same ones alone.

    Args:
        model: the policy.
        prompts: a few rows of the data.

    Raises:
        ConfigError: the model reads text alone, does not take what the processor makes of the images, or lets
            rows depend on the rows beside them.
    """
    base = base_of(model)
    name = type(base).__name__
    if not is_vision_language(base.config):
        raise ConfigError(
            f"data.image_key: the data have a column of images, and model.path leads to a {name}, which "
            "reads text alone; use a vision-language model, or set data.image_key=null to train on the text "
            "alone."
        )
    if not has_images(prompts.images):
        return
    rows = _rows(prompts.select(slice(0, ROWS)))
    training = [module for module in base.modules() if module.training]
    base.eval()
    try:
        together = completion_hidden(model, rows).float()
        alone = torch.cat([completion_hidden(model, _row(rows, b)) for b in range(len(rows.prompt_len))])
    except (NotImplementedError, TypeError, ValueError, AttributeError, KeyError, RuntimeError) as error:
        raise ConfigError(
            f"data.image_key: {name} does not take the images of its processor ({error}); use another model."
        ) from error
    finally:
        for module in training:
            module.training = True
    tolerance = 1e-4 if base.dtype in (torch.float32, torch.float64) else 5e-2
    if not torch.allclose(together, alone.float(), rtol=0, atol=float(tolerance * together.abs().max())):
        raise ConfigError(
            f"data.image_key: {name} computes something else where rows with images stand side by side; use "
            "another model."
        )


def _rows(prompts: RolloutBatch) -> Rows:
    """Ragged completions of low ids."""
    device, count = prompts.prompt_ids.device, len(prompts)
    ids = torch.arange(count * 3, device=device).view(count, 3) % 7
    lengths = 1 + torch.arange(count, device=device) % 3
    return Rows(prompts.prompt_ids, prompts.prompt_len, ids, lengths, prompts.images)


def _row(rows: Rows, b: int) -> Rows:
    ids, lengths, completions, counts, images = rows
    one = slice(b, b + 1)
    return Rows(ids[one], lengths[one], completions[one], counts[one], images and images[one])
