"""load_policy: from `model.*` to the model that trains."""

import importlib
import importlib.util
import json
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, GenerationConfig, PreTrainedConfig

from lit_rl.errors import ConfigError
from lit_rl.models.families import auto_class
from lit_rl.models.kernels import DROPOUT_NAMES, Kernels
from lit_rl.models.lora import LoRA, with_adapters, with_trained_adapter
from lit_rl.models.offload import offload_activations_
from lit_rl.models.parameters import freeze_routers_, trainable_parameters
from lit_rl.models.settings import CONFIG_DEDICATED, DTYPES, check_names, check_settings
from lit_rl.models.sharding import Sharding, set_sharding_
from lit_rl.models.weights import base_of
from lit_rl.paths import ModelFiles, resolve_model_path


def load_policy(
    path: str = "embedded",
    dtype: str = "float32",
    attn_implementation: str | None = None,
    model_config: dict[str, Any] | None = None,
    model_init_kwargs: dict[str, Any] | None = None,
    trust_remote_code: bool = False,
    external_lib: str | list[str] | None = None,
    disable_dropout: bool = True,
    freeze_moe_router: bool = False,
    neftune_noise_alpha: float | None = None,
    gradient_checkpointing: bool = False,
    gradient_checkpointing_kwargs: dict[str, Any] | None = None,
    enable_activation_offload: bool = False,
    lora: LoRA | None = None,
    kernels: Kernels | None = None,
    fsdp_config: Sharding | None = None,
    ulysses_sequence_parallel_size: int = 1,
) -> nn.Module:
    """A language model ready to train, of text or of images and text, or a PEFT model around one.

    In train mode (gradient checkpointing works only there). Sampling settings that the checkpoint brings
    (temperature, top_k, repetition_penalty, ...) are dropped; its begin, end and padding ids stay. Inside
    `with torch.device("meta")` no weights are read: the same model, without numbers in it.

    Args:
        path: "embedded", a folder (of a model, or of a LoRA adapter that goes on training), a .gguf file
            (dequantized), or a hub id.
        dtype: of the parameters: "auto" (as saved), "float32", "bfloat16", "float16" or "float64".
        attn_implementation: "eager", "sdpa", "flash_attention_2", or null for transformers' choice.
        model_config: entries written over the model's configuration; a nested mapping goes into a nested one.
        model_init_kwargs: further arguments of `from_pretrained`.
        trust_remote_code: run code that comes with the model.
        external_lib: package, or packages, imported first, for example to register architectures.
        disable_dropout: zero all dropout, so that scoring twice gives the same and the first ratio is 1.
        freeze_moe_router: no gradient for the routers of a mixture of experts.
        neftune_noise_alpha: size of uniform noise on the embeddings, which SFT adds while it trains; null is
            none.
        gradient_checkpointing: recompute activations in the backward pass.
        gradient_checkpointing_kwargs: arguments of torch.utils.checkpoint; use_reentrant is false unless set.
        enable_activation_offload: keep what the backward pass needs in CPU memory; a GPU.
        lora: adapters; null or rank 0 trains all weights.
        kernels: how forward passes are computed.
        fsdp_config: how trainer=fsdp cuts the weights; noted only.
        ulysses_sequence_parallel_size: processes that share a sequence; only 1 is built.

    Raises:
        ConfigError: a setting cannot work, or the model cannot be found or read.
    """
    lora = lora or LoRA()
    check_settings(
        dtype=dtype,
        attn_implementation=attn_implementation,
        model_init_kwargs=model_init_kwargs or {},
        gradient_checkpointing=gradient_checkpointing,
        gradient_checkpointing_kwargs=gradient_checkpointing_kwargs or {},
        enable_activation_offload=enable_activation_offload,
    )
    _check_own(lora, disable_dropout, neftune_noise_alpha, ulysses_sequence_parallel_size)
    _import_packages(external_lib)
    init_kwargs = dict(model_init_kwargs or {})
    files, adapter = _files_of(path, init_kwargs.get("revision"), lora)
    config = _configuration(files, model_config or {}, trust_remote_code, init_kwargs)
    if disable_dropout:
        _zero_configured_dropout_(config)
    model = _read(
        files,
        config=config,
        dtype=dtype if dtype == "auto" else DTYPES[dtype],
        attn_implementation=attn_implementation,
        trust_remote_code=trust_remote_code,
        **init_kwargs,
    )
    _neutralise_(model)
    if adapter is not None:
        model = with_trained_adapter(model, adapter)
    elif lora.lora_rank:
        model = with_adapters(model, lora)
    if disable_dropout:
        _zero_dropout_(model)
    if freeze_moe_router:
        freeze_routers_(model)
    base_of(model).neftune_noise_alpha = neftune_noise_alpha
    if gradient_checkpointing:
        _checkpoint_gradients_(model, gradient_checkpointing_kwargs or {})
    if enable_activation_offload:
        offload_activations_(model)
    trainable_parameters(model)
    (kernels or Kernels()).apply_(model)
    set_sharding_(model, fsdp_config or Sharding())
    return model.train()


def _check_own(
    lora: LoRA, disable_dropout: bool, neftune_noise_alpha: float | None, ulysses_sequence_parallel_size: int
) -> None:
    """What transformers does not know of."""
    if lora.lora_dropout and disable_dropout:
        raise ConfigError(
            "model.lora.lora_dropout has no effect with model.disable_dropout=true (found "
            f"{lora.lora_dropout!r}); set model.disable_dropout=false or model.lora.lora_dropout=0."
        )
    if neftune_noise_alpha is not None and not neftune_noise_alpha > 0:
        raise ConfigError(f"model.neftune_noise_alpha must be null or > 0 (found {neftune_noise_alpha!r}).")
    if ulysses_sequence_parallel_size != 1:
        raise ConfigError(
            f"model.ulysses_sequence_parallel_size must be 1 (found {ulysses_sequence_parallel_size!r}): "
            "sequence parallelism is not built."
        )


def end_token_ids(model: nn.Module, tokenizer: Any) -> list[int]:
    """Every id that ends a completion: what tokenizer, model and generation configuration declare, in order.

    Args:
        model: a Hugging Face or PEFT model.
        tokenizer: its tokenizer.
    """
    base = base_of(model)
    generation = getattr(base, "generation_config", None)  # classifiers have none
    declared = [
        tokenizer.eos_token_id,
        base.config.get_text_config().eos_token_id,
        generation.eos_token_id if generation is not None else None,
    ]
    ids = {int(i) for entry in declared if entry is not None for i in _as_list(entry)}
    return sorted(ids)


def _as_list(entry: Any) -> list[Any]:
    return list(entry) if isinstance(entry, list | tuple) else [entry]


def _import_packages(external_lib: str | list[str] | None) -> None:
    for name in _as_list(external_lib) if external_lib is not None else []:
        try:
            importlib.import_module(name)
        except ImportError as error:
            raise ConfigError(
                f"model.external_lib must name packages that can be imported (found {name!r}): {error}."
            ) from error


def _files_of(path: str, revision: str | None, lora: LoRA) -> tuple[ModelFiles, str | None]:
    """The model's files, and the folder of the adapter that goes over it, if the path is one."""
    files = resolve_model_path(path, revision=revision)
    adapter = Path(files.folder_or_id) / "adapter_config.json"
    if not adapter.is_file():
        return files, None
    if lora.lora_rank:
        raise ConfigError(
            "model.lora.lora_rank must be 0 when model.path is an adapter, which goes on training (found "
            f"{lora.lora_rank!r} and {path!r}); to put new adapters on it, merge it into its base model."
        )
    base_path = json.loads(adapter.read_text())["base_model_name_or_path"]
    if not base_path:
        raise ConfigError(f"model.path {path!r} is an adapter that names no base model; merge it into one.")
    return resolve_model_path(
        base_path, key=f"base_model_name_or_path in {str(adapter)!r}"
    ), files.folder_or_id


def _configuration(
    files: ModelFiles, overrides: dict[str, Any], trust_remote_code: bool, init_kwargs: dict[str, Any]
) -> PreTrainedConfig:
    if files.gguf_file is not None and importlib.util.find_spec("gguf") is None:
        raise ConfigError(
            f"model.path {files.gguf_file!r} needs the package gguf, which is not installed; "
            "install lit-rl[gguf]."
        )
    where = {k: v for k, v in init_kwargs.items() if k in ("revision", "token", "cache_dir", "subfolder")}
    config = _reading(AutoConfig.from_pretrained, files, trust_remote_code=trust_remote_code, **where)
    _overwrite_(config, overrides, "model.model_config")
    return config


def _overwrite_(config: PreTrainedConfig, overrides: dict[str, Any], key: str) -> None:
    check_names(overrides, key, {*config.to_dict(), *config.attribute_map}, CONFIG_DEDICATED)
    for name, value in overrides.items():
        inner = getattr(config, name, None)
        if isinstance(inner, PreTrainedConfig) and isinstance(value, dict):
            _overwrite_(inner, value, f"{key}.{name}")
            continue
        try:
            setattr(config, name, value)
        except (TypeError, ValueError) as error:
            raise ConfigError(
                f"{key}.{name} cannot be {value!r} in a {type(config).__name__}: {error}"
            ) from error


def _read(files: ModelFiles, **arguments: Any) -> Any:
    if torch.get_default_device().type == "meta":
        return _skeleton(**arguments)
    model = _reading(auto_class(arguments["config"]).from_pretrained, files, **arguments)
    if files.gguf_file is not None:
        _forget_quantization_(model)
    return model


def _skeleton(
    *,
    config: PreTrainedConfig,
    dtype: Any,
    attn_implementation: str | None,
    trust_remote_code: bool,
    **_: Any,
) -> Any:
    return auto_class(config).from_config(
        config,
        dtype=config.dtype if dtype == "auto" else dtype,
        attn_implementation=attn_implementation,
        trust_remote_code=trust_remote_code,
    )


def _reading(read: Any, files: ModelFiles, **arguments: Any) -> Any:
    """`read(...)`, with what transformers raises turned into one message that names the key."""
    gguf = {} if files.gguf_file is None else {"gguf_file": files.gguf_file}
    try:
        return read(files.folder_or_id, **gguf, **arguments)
    except (OSError, ValueError) as error:
        if "trust_remote_code" in str(error):
            raise ConfigError(
                "model.trust_remote_code must be true to run the code that comes with "
                f"{files.folder_or_id!r} (found false); read that code first."
            ) from error
        if not files.is_local and isinstance(error, OSError):
            raise ConfigError(
                f"model.path {files.folder_or_id!r} is neither a folder nor in the local hub cache, and "
                f"cannot be fetched: {_first_line(error)}; give a folder, a cached id or 'embedded'."
            ) from error
        raise ConfigError(
            f"model.path {files.folder_or_id!r} cannot be loaded: {_first_line(error)}"
        ) from error


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def _forget_quantization_(model: Any) -> None:
    """Dequantized weights are plain weights: without the mark they train, save and load like any other."""
    del model.config.quantization_config
    for name in ("hf_quantizer", "is_quantized", "quantization_method"):
        model.__dict__.pop(name, None)


def _neutralise_(model: Any) -> None:
    """Keep the special ids of the generation configuration and nothing else."""
    given = model.generation_config
    model.generation_config = GenerationConfig(
        bos_token_id=given.bos_token_id, eos_token_id=given.eos_token_id, pad_token_id=given.pad_token_id
    )


def _zero_configured_dropout_(config: PreTrainedConfig) -> None:
    for name, value in list(vars(config).items()):
        if isinstance(value, PreTrainedConfig):
            _zero_configured_dropout_(value)
        elif isinstance(value, float) and any(word in name for word in DROPOUT_NAMES):
            setattr(config, name, 0.0)


def _zero_dropout_(model: nn.Module) -> None:
    for module in model.modules():
        if isinstance(module, nn.modules.dropout._DropoutNd):
            module.p = 0.0


def _checkpoint_gradients_(model: Any, arguments: dict[str, Any]) -> None:
    base = base_of(model)
    if not base.supports_gradient_checkpointing:
        raise ConfigError(
            f"model.gradient_checkpointing must be false for {type(base).__name__}, which cannot do it "
            "(found true)."
        )
    base.activation_checkpointing_enable({"use_reentrant": False, **arguments})
    if (
        base is not model
    ):  # a reentrant checkpoint needs an input with a gradient, and below adapters all is frozen
        base.enable_input_require_grads()
