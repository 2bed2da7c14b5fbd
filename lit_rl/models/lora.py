"""LoRA: the settings, and how adapters get onto a model. The only file that imports peft, when needed."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar

from torch import nn

from lit_rl.errors import ConfigError
from lit_rl.models.families import is_vision_language, parts_beside_the_language
from lit_rl.models.settings import check_names
from lit_rl.models.weights import base_of, is_adapted

_DEDICATED = {
    "r": "model.lora.lora_rank",
    "lora_alpha": "model.lora.lora_alpha",
    "lora_dropout": "model.lora.lora_dropout",
    "target_modules": "model.lora.target_modules",
    "task_type": "model.lora",
    "peft_type": "model.lora",
    "inference_mode": "model.lora",
}
# The reference is the model with its adapters off, so the base model must stay as it was; teachers, engines
# and exports add the adapters up, so the policy's weights must be base + scaling * B A.
_REQUIRED: dict[str, tuple[Any, ...]] = {
    "bias": ("none",),
    "init_lora_weights": (True, "gaussian"),
    "lora_bias": (False,),
    "use_dora": (False,),
    "use_qalora": (False,),
    "use_bdlora": (False, None),
    "modules_to_save": (None, []),
    "target_parameters": (None, []),
    "trainable_token_indices": (None, []),
    "layer_replication": (None, []),
    "alora_invocation_tokens": (None, []),
    "arrow_config": (None,),
    "kasa_config": (None,),
    "monteclora_config": (None,),
    "velora_config": (None,),
}


@dataclass(frozen=True)
class LoRA:
    """Low-rank adapters: weight + lora_alpha / lora_rank * B A, with B = 0 at the start (arXiv 2106.09685).

    Args:
        lora_rank: rank of the adapters; 0 trains all weights, without adapters.
        lora_alpha: scale of the adapters; divided by the rank.
        lora_dropout: dropout in front of the adapters, in [0, 1); needs model.disable_dropout=false.
        target_modules: names of the layers that get adapters, a list or separated by commas; "all-linear" is
            every linear layer but the output head, in a vision-language model those of its language alone.
        peft_kwargs: further entries of peft's LoraConfig.

    Raises:
        ConfigError: a value is out of range, has no effect, or breaks what the rest of the package relies on.
    """

    key: ClassVar[str] = "model.lora"

    lora_rank: int = 0
    lora_alpha: int = 16
    lora_dropout: float = 0.0
    target_modules: str | list[str] = "all-linear"
    peft_kwargs: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        checks = [
            ("lora_rank", self.lora_rank >= 0, "must be >= 0"),
            ("lora_alpha", self.lora_alpha > 0, "must be > 0"),
            ("lora_dropout", 0 <= self.lora_dropout < 1, "must be in [0, 1)"),
            ("target_modules", bool(self.target_names), "must be 'all-linear' or name at least one layer"),
        ]
        for name, is_legal, rule in checks:
            if not is_legal:
                raise ConfigError(f"{self.key}.{name} {rule} (found {getattr(self, name)!r}).")
        if self.lora_rank == 0:
            self._refuse_settings_without_effect()
        elif self.peft_kwargs:
            from peft import LoraConfig

            names = [f.name for f in fields(LoraConfig)]
            check_names(self.peft_kwargs, f"{self.key}.peft_kwargs", names, _DEDICATED)
            check_adapter_kind(self.peft_kwargs, f"{self.key}.peft_kwargs")

    @property
    def target_names(self) -> str | list[str]:
        """`target_modules` as peft takes it: "all-linear" or a list."""
        if self.target_modules == "all-linear":
            return "all-linear"
        given = self.target_modules
        names = given.split(",") if isinstance(given, str) else given
        return [name.strip() for name in names if name.strip()]

    def _refuse_settings_without_effect(self) -> None:
        for f in fields(self):
            default = {} if f.name == "peft_kwargs" else f.default
            if f.name != "lora_rank" and getattr(self, f.name) != default:
                raise ConfigError(
                    f"{self.key}.{f.name} has no effect with {self.key}.lora_rank=0 (found "
                    f"{getattr(self, f.name)!r}); set lora_rank >= 1."
                )


def check_adapter_kind(settings: Mapping[str, Any], key: str) -> None:
    """Refuse kinds of LoRA whose policy is not base + scaling * B A, or whose base model changes.

    Args:
        settings: entries of a LoraConfig, or a whole one.
        key: what they were found under, for the message.

    Raises:
        ConfigError: an entry has a value that is not supported.
    """
    for name, allowed in _REQUIRED.items():
        if name in settings and settings[name] not in allowed:
            values = " or ".join(repr(value) for value in allowed)
            raise ConfigError(f"{key}.{name} must be {values} (found {settings[name]!r}); leave it out.")


def with_adapters(model: nn.Module, lora: LoRA) -> Any:
    """The model under fresh adapters, which change nothing yet; all other parameters are frozen.

    Raises:
        ConfigError: target_modules match no layer, or a tied weight.
    """
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(
        task_type="CAUSAL_LM",
        r=lora.lora_rank,
        lora_alpha=lora.lora_alpha,
        lora_dropout=lora.lora_dropout,
        target_modules=lora.target_names,
        **{**_left_out(model, lora), **lora.peft_kwargs},
    )
    try:
        policy = get_peft_model(model, config)
    except ValueError as error:
        raise ConfigError(f"model.lora cannot be put on this model (found {lora!r}): {error}") from error
    _check_tied(policy)
    return policy


def _left_out(model: Any, lora: LoRA) -> dict[str, str]:
    """What "all-linear" leaves out, as peft's pattern: through what a vision-language model sees."""
    if lora.target_names != "all-linear" or not is_vision_language(model.config):
        return {}
    names = "|".join(re.escape(name) for name in parts_beside_the_language(model))
    return {"exclude_modules": rf"({names})(\..*)?"}


def with_trained_adapter(model: nn.Module, folder: str) -> Any:
    """The model under the adapter of a folder, which goes on training.

    Raises:
        ConfigError: the adapter is not LoRA, or of a kind that is not supported.
    """
    from peft import PeftConfig, PeftModel

    config = PeftConfig.from_pretrained(folder)
    if config.peft_type != "LORA":
        raise ConfigError(f"model.path must hold a LoRA adapter (found {config.peft_type!r} in {folder!r}).")
    trained = {**vars(config), "init_lora_weights": True}  # the start is in the folder, however it was drawn
    check_adapter_kind(trained, f"model.path {folder!r}: adapter_config")
    policy = PeftModel.from_pretrained(model, folder, is_trainable=True)
    _check_tied(policy)
    return policy


def _check_tied(policy: nn.Module) -> None:
    base = base_of(policy)
    if not base.config.get_text_config().tie_word_embeddings:
        return
    for name, layer in (("embedding", base.get_input_embeddings()), ("head", base.get_output_embeddings())):
        if is_adapted(layer):
            raise ConfigError(
                f"model.lora.target_modules must leave out the {name} of a model with tied embeddings: an "
                "adapter on one of the two unties them; take the name out."
            )
