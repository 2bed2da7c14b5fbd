"""Models of text, and vision-language models: which is which, and what of the latter is language."""

from typing import Any

from torch import nn
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, PreTrainedConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING


def is_vision_language(config: PreTrainedConfig) -> bool:
    """Whether a model of this configuration reads images beside text."""
    return type(config) in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING and hasattr(config, "vision_config")


def auto_class(config: PreTrainedConfig) -> Any:
    """What loads a model that writes text."""
    return AutoModelForImageTextToText if is_vision_language(config) else AutoModelForCausalLM


def parts_beside_the_language(model: Any) -> list[str]:
    """Names of the modules through which a vision-language model sees: everything in it but its language.

    Args:
        model: a transformers model.
    """
    decoder = model.get_decoder()
    name = next(name for name, module in model.named_modules() if module is decoder)
    above, _, own = name.rpartition(".")
    inside: nn.Module = model.get_submodule(above)
    return [f"{above}.{other}" if above else other for other, _ in inside.named_children() if other != own]
