"""The policy's LoRA adapters as vLLM takes them: a folder per version, over base weights sent once."""

from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from lit_rl.errors import ConfigError

_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)
_KEY = "rollout.engine.lora_as_adapter"


class AdapterFolder:
    """Writes the policy's adapters for vLLM; about a hundredth of the model moves.

    Args:
        policy: a PEFT model of which nothing but LoRA matrices trains.
        folder: for the files.

    Raises:
        ConfigError: the policy is no such model, or of a rank or kind that vLLM does not take.
    """

    def __init__(self, policy: Any, folder: Path) -> None:
        configs = list(getattr(policy, "peft_config", {}).values())
        if len(configs) != 1:
            raise ConfigError(f"{_KEY} needs LoRA adapters, model.lora.lora_rank above 0 (found none).")
        others = [n for n, p in policy.named_parameters() if p.requires_grad and ".lora_" not in n]
        largest = max([configs[0].r, *configs[0].rank_pattern.values()])
        if others or configs[0].use_dora or largest > _RANKS[-1]:
            what = f"{others[0]} trains" if others else "DoRA" if configs[0].use_dora else f"rank {largest}"
            raise ConfigError(
                f"{_KEY} must be false where adapters are more than LoRA matrices of at most rank "
                f"{_RANKS[-1]} (found {what}): vLLM takes no others; the merged weights are sent then."
            )
        self._policy, self._folder, self._count = policy, folder, 0
        self.arguments = {"enable_lora": True, "max_lora_rank": next(r for r in _RANKS if r >= largest)}

    def without(self) -> AbstractContextManager[None]:
        """A context in which the policy's weights are those of the base."""
        return self._policy.disable_adapter()

    def request(self) -> Any:
        """The adapters as they are now, under a name and number that vLLM has not seen.

        With a number that it knows, vLLM would go on with the old ones.
        """
        from vllm.lora.request import LoRARequest

        self._count += 1
        place = self._folder / f"adapter_{self._count % 2}"  # the one before may still be read
        self._policy.save_pretrained(str(place), save_embedding_layers=False)
        return LoRARequest(f"policy_{self._count}", self._count, str(place))
