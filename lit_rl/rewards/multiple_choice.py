"""Multiple choice: the letter in the last `<answer> </answer>`, as SciKnowEval's prompts ask for it."""

import re

from lit_rl.rewards.reward import AN_ANSWER, NO_ANSWER, Reward, RewardResult, Sample

_BLOCK = re.compile(r"<answer>([^<]*)</answer>", re.IGNORECASE)
_LETTER = re.compile(r"\s*\(?([A-Za-z])\)?[.:]?\s*")


class MultipleChoice(Reward):
    """1 when the last `<answer>` block holds the reference letter and nothing else, otherwise 0.

    Case does not matter, nor does a bracket or full stop at the letter. Without such a block, or with more
    than a letter in it, the score is 0 and the feedback says what is missing.
    """

    def score(self, sample: Sample) -> RewardResult:
        """Score and feedback of the sample."""
        letter = choice(sample.answer)
        if letter is None:
            hint = "Your answer must be one letter inside <answer> </answer>; there was none."
            return RewardResult(0.0, hint, NO_ANSWER)
        if letter == str(sample.ground_truth).strip().upper():
            return RewardResult(1.0, None, AN_ANSWER)
        return RewardResult(0.0, f"Your answer was {letter}, which is wrong.", AN_ANSWER)

    def answer(self, sample: Sample) -> str | None:
        """The chosen letter."""
        return choice(sample.answer)


def choice(text: str) -> str | None:
    """The chosen letter, upper case; None where the last answer block is no single letter.

    Args:
        text: the completion.
    """
    blocks = _BLOCK.findall(text)
    match = _LETTER.fullmatch(blocks[-1]) if blocks else None
    return match[1].upper() if match else None
