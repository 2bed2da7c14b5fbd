"""Kernels: what changes the speed and memory of forward passes, and nothing else."""

import importlib.util
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from lightning.pytorch.utilities import rank_zero_info
from torch import nn
from transformers.modeling_layers import GradientCheckpointingLayer

from lit_rl.errors import ConfigError
from lit_rl.models.families import is_vision_language
from lit_rl.models.flat_attention import SHARED, UNPADDED, set_layout_
from lit_rl.models.fused import fuse_
from lit_rl.models.score import Rows, completion_hidden
from lit_rl.models.weights import base_of


@dataclass(frozen=True)
class Kernels:
    """How forward passes are computed.

    Args:
        share_prefix: compute a prompt once for all its rows in a micro-batch, forward and backward. Where an
            architecture does not allow it, its rows are computed one by one, and a line says so.
        use_remove_padding: instead of that, compute the rows of a micro-batch one after another, without
            padding, each with its own prompt. Source: verl.
        use_fused_kernels: norms and gated layers keep only their inputs for the backward pass, and linear
            layers behind norms and attention nothing of their own, as if each was one kernel with what is
            before it; log-probabilities and entropy always do. Source: verl.
        impl_backend: "torch", on any device. Liger's kernels are what there is in Triton: `use_liger_kernel`.
        use_liger_kernel: Liger's fused norms, rotary embeddings and gated layers; a GPU and the package
            liger-kernel.
        liger_kernel_config: which of them, by the names of Liger's own functions, such as `rms_norm`; null is
            all.
        torch_compile: compile each decoder layer for passes that score and train; decoding is not compiled.
        torch_compile_backend: null is torch's inductor.
        torch_compile_mode: null, or "default", "reduce-overhead", "max-autotune",
            "max-autotune-no-cudagraphs".

    Raises:
        ConfigError: Liger's kernels cannot run here, or a backend or mode that torch does not know.
    """

    key: ClassVar[str] = "model.kernels"

    share_prefix: bool = True
    use_remove_padding: bool = False
    use_fused_kernels: bool = False
    impl_backend: Literal["torch", "triton"] = "torch"
    use_liger_kernel: bool = False
    liger_kernel_config: dict[str, bool] | None = None
    torch_compile: bool = False
    torch_compile_backend: str | None = None
    torch_compile_mode: str | None = None

    def __post_init__(self) -> None:
        if self.impl_backend != "torch":
            raise ConfigError(
                f"{self.key}.impl_backend must be 'torch' (found {self.impl_backend!r}); for kernels in "
                f"Triton set {self.key}.use_liger_kernel=true instead of {self.key}.use_fused_kernels."
            )
        for other in ("use_liger_kernel", "torch_compile"):
            if self.use_fused_kernels and getattr(self, other):
                raise ConfigError(
                    f"{self.key}.use_fused_kernels must be false with {self.key}.{other} (found True): both "
                    "fuse the same layers."
                )
        if self.use_liger_kernel:
            self._check_liger()
        known = {
            "torch_compile_backend": torch.compiler.list_backends(exclude_tags=())
            if self.torch_compile
            else [],
            "torch_compile_mode": list(MODES),
        }
        for name, legal in known.items():
            value = getattr(self, name)
            if value is not None and value not in legal and self.torch_compile:
                raise ConfigError(
                    f"{self.key}.{name} must be null or one of {', '.join(legal)} (found {value!r})."
                )

    def _check_liger(self) -> None:
        if not torch.cuda.is_available():
            raise ConfigError(
                f"{self.key}.use_liger_kernel must be false without a GPU (found True, and no GPU is "
                "visible): Liger's kernels are written in Triton."
            )
        if importlib.util.find_spec("liger_kernel") is None:
            raise ConfigError(
                f"{self.key}.use_liger_kernel needs the package liger-kernel, which is not installed."
            )

    def apply_(self, model: nn.Module) -> None:
        """Switch the model over.

        Args:
            model: a Hugging Face causal language model, or a PEFT model around one.
        """
        if self.use_liger_kernel:
            _use_liger_(base_of(model), self.liger_kernel_config or {})
        if self.use_fused_kernels and not fuse_(model):
            raise ConfigError(
                f"{self.key}.use_fused_kernels must be false for {type(base_of(model)).__name__} "
                "(found True): none of its norms and gated layers is of a known form."
            )
        if self.share_prefix and (reason := lay_out_(model, SHARED)) is not None:
            rank_zero_info(
                f"{self.key}.share_prefix: prompts are computed once per row, since {reason}; "
                f"{self.key}.share_prefix=false silences this."
            )
        if self.use_remove_padding and (reason := lay_out_(model, UNPADDED)) is not None:
            raise ConfigError(
                f"{self.key}.use_remove_padding must be false for this model (found True): {reason}."
            )
        if self.torch_compile and base_of(model).device.type != "meta":
            compile_layers_(model, self.torch_compile_backend or "inductor", self.torch_compile_mode)


MODES = ("default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs")


def _use_liger_(model: nn.Module, config: dict[str, bool]) -> None:
    """Liger's layers in the place of the model's; the head is ours, so none of its losses."""
    from liger_kernel.transformers import _apply_liger_kernel_to_instance

    off = {"cross_entropy": False, "fused_linear_cross_entropy": False}
    _apply_liger_kernel_to_instance(model=model, **{**off, **config})


def compile_layers_(model: nn.Module, backend: str, mode: str | None) -> None:
    """Compile each decoder layer by itself, with sizes that may change; copies of the model are not compiled.

    Args:
        model: a Hugging Face causal language model, or a PEFT model around one.
        backend: a name that torch.compile knows.
        mode: of torch.compile.

    Raises:
        ConfigError: the architecture has no layers of transformers' own kind.
    """
    layers = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
    if not layers:
        raise ConfigError(
            f"{Kernels.key}.torch_compile must be false for {type(base_of(model)).__name__}, whose layers "
            "are none of transformers' decoder layers (found True)."
        )
    for layer in layers:
        layer.compile(backend=backend, mode=mode, dynamic=True)


def lay_out_(model: nn.Module, layout: str) -> str | None:
    """Let `score` compute rows in this layout, if that gives what rows side by side give.

    Args:
        model: a Hugging Face causal language model, or a PEFT model around one. Left as it was if not.
        layout: `SHARED` or `UNPADDED`.

    Returns:
        None, or why this model cannot.
    """
    if is_vision_language(base_of(model).config):
        return f"{type(base_of(model)).__name__} reads images, whose places flat rows do not keep"
    if layout == SHARED and any(_dropouts(model)):
        return "dropout is on, and rows would share its noise"
    if base_of(model).device.type == "meta":  # no numbers to compare
        set_layout_(model, layout)
        return None
    rows = _sample_rows(base_of(model).config.get_text_config().vocab_size, base_of(model).device)
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        with torch.no_grad():
            alone = completion_hidden(model, rows).float()
            set_layout_(model, layout)
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
    set_layout_(model, None)
    return reason


def _sample_rows(vocabulary: int, device: torch.device) -> Rows:
    """Two prompts and five ragged rows."""
    prompts = torch.arange(1, 13).remainder(vocabulary).expand(5, -1).clone()
    prompts[3:] = prompts[3:].flip(1)
    completions = torch.arange(5, 30).mul(7).remainder(vocabulary).view(5, 5)
    lengths = torch.tensor([12, 12, 12, 9, 9])
    return Rows(prompts, lengths, completions, torch.tensor([5, 1, 3, 2, 4])).to(device)


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
