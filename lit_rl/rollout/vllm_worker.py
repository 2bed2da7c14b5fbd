"""What lit_rl adds to a vLLM worker: taking over the policy's weights. Imported inside the worker only."""

from collections.abc import Callable, Iterable
from contextlib import closing
from pathlib import Path
from typing import Any

from torch import Tensor

from lit_rl.rollout import weight_group
from lit_rl.rollout.weight_group import Report


class WeightUpdate:
    """Mixed into vLLM's Worker by `worker_extension_cls`; in process and in a server alike.

    vLLM packs weights on load and joins q, k, v and gate, up. So every update goes through its layerwise
    reload and brings all weights of the model.

    vLLM's own weight transfer engines are not used: their update is four calls with a state between them, has
    no time limit, and raises where one of several workers fails, which leaves the answers of the others in
    the queue, to be taken for those of the next call.
    """

    model_runner: Any
    model_config: Any
    vllm_config: Any
    device: Any
    rank: int

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

    def describe_worker(self, file: str, text: str) -> dict[str, Any]:
        """What decides how weights travel.

        Args:
            file: that the trainer has written.
            text: what it has written into it.
        """
        path = Path(file)
        return {
            "device": self.device.type,
            "shares_files": path.is_file() and path.read_text() == text,
            "engines": self.vllm_config.parallel_config.data_parallel_size,
        }

    def update_policy_from_file(self, path: str) -> Report:
        """Load the weights of a safetensors file; the form that an HTTP call can ask for."""
        from safetensors.torch import load_file

        return _reported(lambda: self.update_policy(load_file(path).items()))

    def update_policy_from_group(self, meeting: str) -> Report:
        """Load the weights that the trainer sends to the workers of this server."""

        def update() -> None:
            with closing(weight_group.received(meeting, self.rank)) as weights:
                self.update_policy(weights)

        return _reported(update)


def _reported(update: Callable[[], None]) -> Report:
    """What goes wrong in an update, said instead of raised; see `WeightUpdate`."""
    try:
        update()
    except ConnectionError as error:
        return {"lost": str(error)}
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"}
    return {}
