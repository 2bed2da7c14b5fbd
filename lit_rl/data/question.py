"""QuestionDataModule: one question from the command line, or a file of questions, one at a time."""

import copy
from typing import Any, Self

from lit_rl.data.prompts import PromptDataModule


class QuestionDataModule(PromptDataModule):
    """Questions to find a first success on; `only` gives each of them a datamodule of its own.

    Args:
        question: text of the one question; null takes the rows of `train_files`.
        ground_truth: its reference answer.
        source: its data source, which names the built-in verifier.
        base: the arguments of `PromptDataModule`.
    """

    def __init__(
        self,
        *,
        question: str | None = None,
        ground_truth: str | None = None,
        source: str = "lit_rl/question",
        **base: Any,
    ) -> None:
        super().__init__(**base)
        if question is not None:
            row = {
                self.prompt_key: [{"role": "user", "content": question}],
                self.data_source_key: source,
                self.reward_model_key: {"style": "rule", "ground_truth": ground_truth},
            }
            self.train_files = [row]

    def only(self, index: int) -> Self:
        """The same settings and tokenizer over one training row.

        Args:
            index: of the row, among those that are used.
        """
        _ = self.chat  # loaded once for all
        one = copy.copy(self)
        rows = [row for block in self._blocks("train") for row in block.rows]
        one.train_files = [self._opened("train")[rows[index]]]
        one.train_max_samples, one._rows, one._used, one._column_orders = -1, {}, {}, None
        return one
