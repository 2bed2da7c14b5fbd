"""What lit_rl adds to a vLLM worker: taking over the policy's weights. Imported inside the worker only."""

from collections.abc import Iterable
from typing import Any

from torch import Tensor


class WeightUpdate:
    """Mixed into vLLM's Worker by `worker_extension_cls`; in process and in a server alike.

    vLLM packs weights on load and joins q, k, v and gate, up. So every update goes through its layerwise
    reload and brings all weights of the model.
    """

    model_runner: Any
    model_config: Any
    vllm_config: Any

    def update_policy(self, named_tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Load these weights.

        Args:
            named_tensors: every weight under the Hugging Face name, tied ones under each.
        """
        from vllm.config import set_current_vllm_config
        from vllm.model_executor.model_loader.reload import (
            finalize_layerwise_reload,
            initialize_layerwise_reload,
        )

        model = self.model_runner.get_model()
        with set_current_vllm_config(self.vllm_config):
            initialize_layerwise_reload(model)
            try:
                model.load_weights(iter(named_tensors))
            finally:
                finalize_layerwise_reload(model, self.model_config)
            head: Any = getattr(model, "lm_head", None)
            if hasattr(head, "cpu_linear"):
                # On a CPU a tied head keeps a packed copy of its own, which a reload leaves as it was.
                head.quant_method.process_weights_after_loading(head)

    def update_policy_from_file(self, path: str) -> None:
        """Load the weights of a safetensors file; the form that an HTTP call can ask for."""
        from safetensors.torch import load_file

        self.update_policy(load_file(path).items())
