"""Arithmetic: right number or not."""

import re


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
