"""Arithmetic: the completion is the right number, as the embedded task wants it."""

import re

from lit_rl.rewards.reward import AN_ANSWER, NO_ANSWER, Reward, RewardResult, Sample


class Arithmetic(Reward):
    """1 when the completion is the reference number and nothing else, otherwise 0 and one line on what is
    wrong. Of a conversation the last turn counts.

    White space around the number does not matter. The line names the attempt, because SDPO's feedback
    template does not show it.
    """

    def score(self, sample: Sample) -> RewardResult:
        """Score and feedback of the sample."""
        remark = feedback(sample.answer, str(sample.ground_truth))
        has_answer = self.answer(sample) is not None
        return RewardResult(0.0 if remark else 1.0, remark, AN_ANSWER if has_answer else NO_ANSWER)

    def answer(self, sample: Sample) -> str | None:
        """The attempt, when it is a number."""
        text = sample.answer.strip()
        return text if re.fullmatch(r"[0-9]{1,6}", text) else None


def feedback(text: str, answer: str) -> str | None:
    """One line on what is wrong with an attempt; None when it is right.

    Args:
        text: the attempt.
        answer: the right number, digits.
    """
    text = text.strip()
    if text == answer:
        return None
    if not re.fullmatch(r"[0-9]{1,6}", text):
        return f"{text[:8]} is not a number."
    if text[-1] != answer[-1]:
        return f"{text}: the last digit is wrong."
    return f"{text} is too {'low' if int(text) < int(answer) else 'high'}."
