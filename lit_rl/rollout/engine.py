"""RolloutEngine: what every engine offers. Token ids in, token ids out; no text round trip."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor, nn

from lit_rl.batch import RolloutBatch
from lit_rl.rollout.sampling import Sampling
from lit_rl.rollout.scoring import Scores


class RolloutEngine(ABC):
    """Writes completions with the weights of a stated policy version."""

    policy_version: int = -1
    """Version of the weights the engine holds; -1 before the first sync."""
    writes_with_policy: bool = False
    """Whether it reads the policy's own weights while it writes; known after `bind`."""
    reads_images: bool = False
    """Whether prompts may hold images."""

    @abstractmethod
    def bind(
        self,
        policy: nn.Module,
        *,
        end_token_ids: list[int],
        pad_token_id: int,
        decode: Callable[[list[int]], str],
        tokenizer: Any = None,
        max_tokens: int | None = None,
    ) -> None:
        """Get ready to write with this policy.

        Args:
            policy: the training model; engines that share its memory keep it, others read its configuration.
            end_token_ids: every id that ends a completion.
            pad_token_id: fills positions that do not exist.
            decode: ids to text, for stop strings.
            tokenizer: for engines that look at text themselves.
            max_tokens: of prompt and completion together, at most; None when there is no limit but the
                model's.
        """

    @abstractmethod
    def sync_weights(self, named_tensors: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Take over weights.

        Args:
            named_tensors: the policy's weights under the base model's names, adapters merged.
            version: becomes `policy_version`.
        """

    @abstractmethod
    def generate(
        self,
        prompts: RolloutBatch,
        *,
        num_generations: int,
        sampling: Sampling,
        seed: int,
        step: int,
        on_progress: Callable[[int, int], None] | None = None,
    ) -> RolloutBatch:
        """Write completions.

        The noise of a completion depends on (seed, step, prompt row, generation index) and on nothing else
        (rulings.md 3), so it is the same on any rank and in any batch.

        Args:
            prompts: P rows without completions.
            num_generations: G.
            sampling: how to draw; temperature 0 is greedy.
            seed: of the run and the purpose (training or validation).
            step: iterations done before this one.
            on_progress: called with (rows finished, rows in all) now and then.

        Returns:
            P * G rows with completion_ids, completion_len, completion_mask, finish_reason, policy_version and
            rollout_logps (at the sampling temperature over the whole vocabulary) filled.
        """

    @abstractmethod
    def score(self, rows: RolloutBatch, *, topk: int = 0) -> Scores:
        """Log-probabilities of given completions with the weights of the last sync, at temperature 1.

        Args:
            rows: B rows with completions; the prompts need not be those they were written for.
            topk: K, how many of the most likely tokens are reported beside the completion's own.
        """

    def sleep(self) -> None:  # noqa: B027
        """Give memory back while the trainer updates, where the engine can."""

    def wake_weights(self) -> None:  # noqa: B027
        """Undo `sleep` for the weights alone; they can be replaced before the cache takes its room."""

    def wake(self) -> None:  # noqa: B027
        """Undo `sleep`, ready to write."""

    def close(self) -> None:  # noqa: B027
        """Free what the engine holds."""
