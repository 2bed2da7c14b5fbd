"""Exact match: the completion is the reference answer, letter by letter."""

from lit_rl.rewards.reward import AN_ANSWER, NO_ANSWER, Reward, RewardResult, Sample

SHOWN = 80
"""Characters of an attempt that feedback repeats."""


class ExactMatch(Reward):
    """1 when completion and reference are the same text, white space around them aside; otherwise 0.

    Of a conversation the last turn counts.

    Args:
        ignore_case: upper and lower case are the same.
    """

    def __init__(self, ignore_case: bool = False) -> None:
        self.ignore_case = ignore_case

    def score(self, sample: Sample) -> RewardResult:
        """Score and feedback of the sample."""
        attempt, answer = sample.answer.strip(), str(sample.ground_truth).strip()
        same = attempt.casefold() == answer.casefold() if self.ignore_case else attempt == answer
        found = AN_ANSWER if attempt else NO_ANSWER
        if same:
            return RewardResult(1.0, None, found)
        if not attempt:
            return RewardResult(0.0, "Your answer was empty.", found)
        return RewardResult(0.0, f"Your answer was {attempt[:SHOWN]}, which is wrong.", found)

    def answer(self, sample: Sample) -> str | None:
        """The whole text."""
        text = sample.answer.strip()
        return (text.casefold() if self.ignore_case else text) or None
