"""Images of rows as a vision-language model reads them: tensors of each row, brought together for a pass.

A row's tensors are those of the model's processor for its prompt alone. Rows of one prompt share them; a pass
puts those of its rows one after another, in the order of the rows, as these models take them.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn


class ImageTensors(dict[str, Tensor]):
    """Of one row, by the names of the model's arguments, such as `pixel_values` (images or patches first).

    Those whose name ends in `token_type_ids` are (prompt_len,) long, one number per prompt token. Between
    processes they travel by value: torch would keep a file open for each tensor.
    """

    def __reduce__(self) -> Any:
        return _of_arrays, ({name: tensor.numpy() for name, tensor in self.items()},)


def _of_arrays(arrays: dict[str, Any]) -> ImageTensors:
    return ImageTensors({name: torch.from_numpy(array) for name, array in arrays.items()})


RowImages = Sequence[ImageTensors | None]
"""Of B rows; None for a row without images."""


def has_images(images: RowImages | None) -> bool:
    """Whether any row has some."""
    return images is not None and any(own is not None for own in images)


def is_per_token(name: str) -> bool:
    """Whether a tensor of this name has a number for each token instead of something for each image."""
    return name.endswith("token_type_ids")


def image_inputs(images: RowImages | None, prompt_len: Tensor, width: int, *, side: str) -> ImageTensors:
    """What a pass over these rows takes beside their ids; empty where no row has an image.

    Args:
        images: of B rows.
        prompt_len: (B,) long.
        width: tokens that the pass reads of each row; those beyond the prompt are no image's.
        side: "left" where padding stands before the prompts, "right" where it stands behind.
    """
    rows = [own for own in images or [] if own is not None]
    if not rows or images is None:
        return ImageTensors()
    out = ImageTensors()
    for name in dict.fromkeys(name for own in rows for name in own):
        if is_per_token(name):
            out[name] = _per_token(images, name, prompt_len.tolist(), width, side)
        else:
            out[name] = _below_each_other([own[name] for own in rows if name in own])
    return out


def around_other_ids(
    images: ImageTensors | None, ids: Sequence[int], others: Sequence[int]
) -> ImageTensors | None:
    """The images of a prompt as those of another prompt that shows the same ones.

    Args:
        images: of the prompt.
        ids: of the prompt.
        others: ids of the other one.
    """
    if images is None:
        return None
    out = ImageTensors(images)
    for name in filter(is_per_token, images):
        kinds = {i: kind for i, kind in zip(ids, images[name].tolist(), strict=True) if kind}
        out[name] = torch.tensor([kinds.get(i, 0) for i in others])
    return out


def inputs_for(model: nn.Module, inputs: ImageTensors) -> ImageTensors:
    """The same on the model's device, numbers that are no counts in its dtype."""
    if not inputs:
        return inputs
    parameter = next(p for p in model.parameters() if p.is_floating_point())
    return ImageTensors(
        (name, value.to(parameter.device, parameter.dtype if value.is_floating_point() else value.dtype))
        for name, value in inputs.items()
    )


def image_token_id(model: Any) -> int | None:
    """The id that stands for a part of an image in a prompt; None for a model of text."""
    return getattr(model.config, "image_token_id", None)


@contextmanager
def plain_text(model: Any, ids: Tensor, is_written: Tensor) -> Iterator[Tensor]:
    """Read ids in which the model may have written its image token itself, which is no place of an image.

    Yields the ids with another id there; inside, the embedding still gives the image token's own row, as it
    does while the model writes.

    Args:
        model: a transformers model.
        ids: (B, L) long.
        is_written: (B, L) bool, false in prompts.
    """
    token = image_token_id(model)
    is_plain = is_written & (ids == (-1 if token is None else token))
    if token is None or not bool(is_plain.any()):
        yield ids
        return
    embedding = model.get_input_embeddings()
    own = embedding(torch.tensor([token], device=ids.device))

    def put_back(module: nn.Module, inputs: Any, output: Tensor) -> Tensor:
        return torch.where(is_plain[..., None], own.to(output.dtype), output)

    handle = embedding.register_forward_hook(put_back)
    try:
        yield ids.masked_fill(is_plain, 0 if token else 1)
    finally:
        handle.remove()


def _per_token(images: RowImages, name: str, lengths: list[int], width: int, side: str) -> Tensor:
    out = torch.zeros(len(images), width, dtype=torch.long)
    for row, (own, length) in enumerate(zip(images, lengths, strict=True)):
        if own is not None and name in own:
            start = width - length if side == "left" else 0
            out[row, start : start + length] = own[name]
    return out


def _below_each_other(parts: list[Tensor]) -> Tensor:
    """One after another; sizes beyond the first are filled up with zeros, as processors do it."""
    sizes = [max(column) for column in zip(*(part.shape[1:] for part in parts), strict=True)]
    padded = []
    for part in parts:
        missing = [size - own for size, own in zip(sizes, part.shape[1:], strict=True)]
        fill = [number for after in reversed(missing) for number in (0, after)]
        padded.append(nn.functional.pad(part, fill) if any(missing) else part)
    return torch.cat(padded)
