"""What can be said about `model.*` before any weights are read: types, ranges, conflicts, unknown names."""

import difflib
import importlib.util
import inspect
from collections.abc import Iterable, Mapping
from typing import Any

import torch
import torch.utils.checkpoint

from lit_rl.errors import ConfigError

DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float64": torch.float64,
}
ATTENTIONS = ("eager", "sdpa", "flash_attention_2")

_INIT_DEDICATED = {
    "pretrained_model_name_or_path": "model.path",
    "gguf_file": "model.path",
    "config": "model.model_config",
    "dtype": "model.dtype",
    "torch_dtype": "model.dtype",
    "attn_implementation": "model.attn_implementation",
    "trust_remote_code": "model.trust_remote_code",
}
_INIT_FURTHER = (  # taken out of from_pretrained's **kwargs by transformers
    "device_map",
    "experts_implementation",
    "kernel_config",
    "key_mapping",
    "max_memory",
    "offload_buffers",
    "offload_folder",
    "proxies",
    "quantization_config",
    "subfolder",
    "use_kernels",
    "variant",
)
CONFIG_DEDICATED = {
    "dtype": "model.dtype",
    "torch_dtype": "model.dtype",
    "attn_implementation": "model.attn_implementation",
    "_attn_implementation": "model.attn_implementation",
    "quantization_config": "model.model_init_kwargs.quantization_config",
}


def check_names(
    given: Mapping[str, Any], key: str, legal: Iterable[str], dedicated: Mapping[str, str]
) -> None:
    """Refuse entries of a free-form key that its receiver does not know or that have a key of their own.

    Args:
        given: the entries.
        key: full dotted key of the block.
        legal: names that the receiver takes.
        dedicated: names that are set elsewhere, with the key that sets them.

    Raises:
        ConfigError: an entry is not legal.
    """
    names = sorted(set(legal) - set(dedicated))
    for name in given:
        if name in dedicated:
            raise ConfigError(
                f"{key}.{name} has a key of its own (found {given[name]!r}); set {dedicated[name]}."
            )
        if name not in names:
            close = difflib.get_close_matches(name, names, n=1)
            hint = f"did you mean {close[0]!r}?" if close else f"allowed are {', '.join(names)}."
            raise ConfigError(f"{key}.{name} is not known to its receiver (found {given[name]!r}); {hint}")


def check_settings(
    *,
    dtype: str,
    attn_implementation: str | None,
    model_init_kwargs: Mapping[str, Any],
    gradient_checkpointing: bool,
    gradient_checkpointing_kwargs: Mapping[str, Any],
    enable_activation_offload: bool = False,
) -> None:
    """Refuse values of `load_policy` that cannot work, without reading a file.

    Raises:
        ConfigError: a value is not legal, or a combination cannot work here.
    """
    if dtype != "auto" and dtype not in DTYPES:
        raise ConfigError(f"model.dtype must be 'auto' or one of {', '.join(DTYPES)} (found {dtype!r}).")
    if attn_implementation is not None and attn_implementation not in ATTENTIONS:
        raise ConfigError(
            f"model.attn_implementation must be null or one of {', '.join(ATTENTIONS)} "
            f"(found {attn_implementation!r})."
        )
    if attn_implementation == "flash_attention_2":
        _check_flash_attention(dtype)
    if enable_activation_offload and not torch.cuda.is_available():
        raise ConfigError(
            "model.enable_activation_offload must be false without a GPU (found True, and no GPU is "
            "visible): activations are in CPU memory already."
        )
    _check_init_kwargs(model_init_kwargs)
    if gradient_checkpointing_kwargs and not gradient_checkpointing:
        raise ConfigError(
            "model.gradient_checkpointing_kwargs has no effect with model.gradient_checkpointing=false "
            f"(found {dict(gradient_checkpointing_kwargs)!r}); set it to true."
        )
    check_names(
        gradient_checkpointing_kwargs,
        "model.gradient_checkpointing_kwargs",
        _keywords(torch.utils.checkpoint.checkpoint) - {"function"},
        {},
    )


def _check_flash_attention(dtype: str) -> None:
    needs = [
        (torch.cuda.is_available(), "a GPU, and none is visible"),
        (
            importlib.util.find_spec("flash_attn") is not None,
            "the package flash-attn, which is not installed",
        ),
        (dtype in ("auto", "bfloat16", "float16"), f"model.dtype bfloat16 or float16 (found {dtype!r})"),
    ]
    for is_met, need in needs:
        if not is_met:
            raise ConfigError(
                f"model.attn_implementation 'flash_attention_2' needs {need}; use 'sdpa', or null for "
                "transformers' choice."
            )


def _check_init_kwargs(model_init_kwargs: Mapping[str, Any]) -> None:
    if not model_init_kwargs:
        return
    from transformers import PreTrainedModel

    legal = _keywords(PreTrainedModel.from_pretrained).union(_INIT_FURTHER)
    check_names(model_init_kwargs, "model.model_init_kwargs", legal, _INIT_DEDICATED)


def _keywords(function: Any) -> set[str]:
    kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return {name for name, p in inspect.signature(function).parameters.items() if p.kind in kinds}
