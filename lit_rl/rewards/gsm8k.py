"""GSM8K: the number after the last `####`, compared as a number; and verl's rules, compared as text."""

import re
from decimal import Decimal

from lit_rl.errors import ConfigError
from lit_rl.rewards.reward import AN_ANSWER, NO_ANSWER, Reward, RewardResult, Sample

MARKER = "####"
METHODS = ("strict", "flexible", "verl_strict", "verl_flexible")
VERL_TAIL = 300
"""Characters at the end of a completion that verl reads."""

_DIGITS = r"[0-9][0-9,]*(?:\.[0-9]+)?|\.[0-9]+"
_MARKED = re.compile(rf"\s*([-+\u2212]?)\s*\\?\$?\s*([-\u2212]?)({_DIGITS})(?![0-9]*(?:[/:^]|[-eE][0-9]))")
_ANYWHERE = re.compile(rf"((?<![\w)\]}}])[-\u2212])?\\?\$?({_DIGITS})")


class GSM8K(Reward):
    """1 for the right final number, `format_score` for a wrong one in the right form, 0 for none.

    Args:
        method: "strict" reads the number right after the last `####` of the whole completion; "flexible"
            falls back to the last number anywhere. Thousands commas, `$`, a trailing full stop and
            trailing zeros do not matter. "verl_strict" and "verl_flexible" follow verl's scorer to the
            letter: only the last 300 characters, text compared with text.
        format_score: score of a number that is wrong.

    Raises:
        ConfigError: an unknown method.
    """

    def __init__(self, method: str = "strict", format_score: float = 0.0) -> None:
        if method not in METHODS:
            raise ConfigError(f"The method of GSM8K must be one of {', '.join(METHODS)} (found {method!r}).")
        self.method, self.format_score = method, format_score

    def score(self, sample: Sample) -> RewardResult:
        """Score and feedback of the sample."""
        attempt, is_right = self._judged(sample.answer, str(sample.ground_truth))
        if attempt is None:
            return RewardResult(0.0, f"There was no number after {MARKER} in your answer.", NO_ANSWER)
        if is_right:
            return RewardResult(1.0, None, AN_ANSWER)
        return RewardResult(self.format_score, f"Your answer was {attempt}, which is wrong.", AN_ANSWER)

    def answer(self, sample: Sample) -> str | None:
        """The number that is compared, in one spelling."""
        return self._judged(sample.answer, str(sample.ground_truth))[0]

    def _judged(self, text: str, truth: str) -> tuple[str | None, bool]:
        if self.method.startswith("verl"):
            found = verl_answer(text, is_strict=self.method == "verl_strict")
            return found, found == truth
        number = marked_number(text)
        if number is None and self.method == "flexible":
            number = last_number(text)
        reference = marked_number(truth) if MARKER in truth else last_number(truth)
        return None if number is None else f"{number:f}", number is not None and number == reference


def marked_number(text: str) -> Decimal | None:
    """The number right after the last `####`; None where there is none.

    A fraction, a time, a range or a power after the marker is no number.
    """
    _, marker, tail = text.rpartition(MARKER)
    match = _MARKED.match(tail) if marker else None
    return _decimal(match[3], bool(match[1] in ("-", "\u2212")) != bool(match[2])) if match else None


def last_number(text: str) -> Decimal | None:
    """The last number anywhere in the text; None where there is none."""
    found = _ANYWHERE.findall(text)
    return _decimal(found[-1][1], bool(found[-1][0])) if found else None


def verl_answer(text: str, *, is_strict: bool) -> str | None:
    """What verl's scorer extracts, quirks included (source: verl `utils/reward_score/gsm8k.py`, 0.8).

    Args:
        text: the completion.
        is_strict: one space and the number must follow the marker; otherwise the last run of digits, dots
            and commas.
    """
    number = r"(-?[0-9.,]+)"
    found = re.findall(rf"#### {number}" if is_strict else number, text[-VERL_TAIL:])
    if not found:
        return None
    if is_strict:
        return found[-1].replace(",", "")
    return next((run for run in reversed(found) if run != "."), found[0])


def _decimal(digits: str, is_negative: bool) -> Decimal:
    value = Decimal(digits.replace(",", ""))
    return -value if is_negative else value
