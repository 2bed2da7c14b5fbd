"""The policy as a folder that `from_pretrained` and other programs read."""

import copy
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForTokenClassification, GenerationConfig

from lit_rl.errors import ConfigError
from lit_rl.models.critic import ValueModel
from lit_rl.models.load import end_token_ids
from lit_rl.models.weights import dense_copy, has_adapters


def save_hf(
    policy: nn.Module, tokenizer: Any, folder: str | Path, *, merge: bool = True, processor: Any = None
) -> None:
    """Write weights (safetensors), configuration, tokenizer with chat template, and end ids.

    The generation configuration holds the special ids alone: sampling settings of a run are not the model's.
    In a distributed run call it on one rank.

    Args:
        policy: a Hugging Face or PEFT model; it stays as it is.
        tokenizer: its tokenizer.
        folder: created when missing.
        merge: with adapters: add them to the weights; false writes the adapter alone.
        processor: of a vision-language model, written with the tokenizer in it.
    """
    if has_adapters(policy) and not merge:
        policy.save_pretrained(str(folder))  # type: ignore[operator]
    else:
        model: Any = dense_copy(policy) if has_adapters(policy) else policy
        model.save_pretrained(str(folder))
    special_ids = GenerationConfig(
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=end_token_ids(policy, tokenizer),
        pad_token_id=tokenizer.pad_token_id,
    )
    special_ids.save_pretrained(str(folder))
    (processor or tokenizer).save_pretrained(str(folder))


@torch.no_grad()
def token_classifier(critic: ValueModel) -> Any:
    """The critic as a token classifier with one label, which transformers reads; adapters are added.

    Its logit at a position is the value of the token that comes next.

    Raises:
        ConfigError: transformers has no token classifier of this architecture.
    """
    dense = dense_copy(critic.backbone)
    config = copy.deepcopy(dense.config)
    config.num_labels, config.classifier_dropout = 1, 0.0
    try:
        model: Any = AutoModelForTokenClassification.from_config(config, dtype=critic.head.weight.dtype)
    except ValueError as error:
        raise ConfigError(
            f"A critic of type {config.model_type!r} cannot be exported: transformers has no token "
            "classifier of it."
        ) from error
    getattr(model, model.base_model_prefix).load_state_dict(
        getattr(dense, dense.base_model_prefix).state_dict()
    )
    model.score.load_state_dict(critic.head.state_dict())
    return model.eval()
