"""One row in verl's schema from one raw row, by source."""

from collections.abc import Callable
from typing import Any

from lit_rl.errors import DataError

Row = dict[str, Any]
RowMaker = Callable[[Row, str, int, str], Row]
"""(raw row, split, index, where) -> row; raises a DataError that says where."""

GSM8K_INSTRUCTION = (
    'Reason step by step. Put the final answer alone on the last line in the form "#### <number>".'
)
MATH_INSTRUCTION = "Reason step by step and put the final answer in \\boxed{}."
CHOICE_SYSTEM = """\
Given a question and four options, please select the right answer. Respond in the following format:
<reasoning>
...
</reasoning>
<answer>
...
</answer>

For the answer, only output the letter corresponding to the correct option (A, B, C, or D), and nothing \
else. Do not restate the answer text. For example, if the answer is "A", just output:
<answer>
A
</answer>"""
HUB = {
    "gsm8k": {split: [f"hf://datasets/openai/gsm8k/main/{split}-*.parquet"] for split in ("train", "test")},
    "math": {
        split: [f"hf://datasets/DigitalLearningGmbH/MATH-lighteval/data/{split}-*.parquet"]
        for split in ("train", "test")
    },
}
"""Where a source lies when no files are given."""


def gsm8k(raw: Row, split: str, index: int, where: str) -> Row:
    """A question of GSM8K; its number stands after `####`."""
    raw = raw if "question" in raw else raw.get("extra_info") or {}
    question, answer = _text(raw, "question", where), _text(raw, "answer", where)
    _, marker, number = answer.rpartition("####")
    if not marker:
        raise DataError(f"{where}, column 'answer' must hold '#### number' (found {answer[-40:]!r}).")
    truth = number.strip().replace(",", "")
    more = {"question": question, "answer": answer}
    prompt = [_user(f"{question}\n\n{GSM8K_INSTRUCTION}")]
    return _row("openai/gsm8k", prompt, "math", truth, split, index, more)


def math(raw: Row, split: str, index: int, where: str) -> Row:
    """A problem of MATH; its answer stands in the last `\\boxed{}` of the solution."""
    problem, solution = _text(raw, "problem", where), _text(raw, "solution", where)
    truth = _boxed(solution)
    if truth is None:
        raise DataError(f"{where}, column 'solution' must hold \\boxed{{}} (found {solution[-40:]!r}).")
    more = {"level": str(raw.get("level")), "type": str(raw.get("type"))}
    prompt = [_user(f"{problem}\n\n{MATH_INSTRUCTION}")]
    return _row("DigitalLearningGmbH/MATH-lighteval", prompt, "math", truth, split, index, more)


def sciknoweval(raw: Row, split: str, index: int, where: str) -> Row:
    """A question of SciKnowEval with options A to D."""
    question, key = _text(raw, "question", where), _text(raw, "answerKey", where)
    choices = raw.get("choices") or {}
    labels, texts = choices.get("label") or [], choices.get("text") or []
    if key not in labels or len(labels) != len(texts):
        raise DataError(f"{where}, column 'choices' must hold the option {key!r} (found {choices!r}).")
    options = "\n".join(f"{label}: {text}" for label, text in zip(labels, texts, strict=True))
    prompt = [
        {"role": "system", "content": CHOICE_SYSTEM},
        _user(f"{question}\n\n{options}\nPlease reason step by step."),
    ]
    domain = _text(raw, "domain", where).lower()
    return _row(f"sciknoweval/{domain}", prompt, "science", key, split, index, {"kind": "mcq"})


def columns(prompt: str, answer: str | None, source: str) -> RowMaker:
    """A maker for rows of one's own; further columns stay as they are.

    Args:
        prompt: column with text or messages.
        answer: column with the reference answer; None where there is none.
        source: becomes `data_source` where the rows have none.
    """

    def made(raw: Row, split: str, index: int, where: str) -> Row:
        asked = raw.get(prompt)
        if not asked or not isinstance(asked, str | list):
            raise DataError(f"{where}, column {prompt!r} must be text or messages (found {asked!r}).")
        truth = None if answer is None else raw.get(answer)
        if answer is not None and truth is None:
            raise DataError(f"{where}, column {answer!r} must hold the reference answer (found None).")
        kept = {name: value for name, value in raw.items() if name not in (prompt, answer)}
        row = _row(source, [_user(asked)] if isinstance(asked, str) else asked, "", truth, split, index, {})
        if answer is None:
            del row["reward_model"]
        return {**row, **kept}

    return made


MAKERS: dict[str, RowMaker] = {"gsm8k": gsm8k, "math": math, "sciknoweval": sciknoweval}


def _row(source: str, prompt: list[Row], ability: str, truth: Any, split: str, index: int, more: Row) -> Row:
    return {
        "data_source": source,
        "prompt": prompt,
        "ability": ability,
        "reward_model": {"style": "rule", "ground_truth": truth},
        "extra_info": {"split": split, "index": index, **more},
    }


def _user(text: str) -> Row:
    return {"role": "user", "content": text}


def _text(raw: Row, column: str, where: str) -> str:
    value = raw.get(column)
    if not isinstance(value, str) or not value:
        raise DataError(f"{where}, column {column!r} must be text (found {value!r}).")
    return value


def _boxed(text: str) -> str | None:
    """What stands in the last `\\boxed{...}`, braces inside it included; None where none is closed."""
    start = text.rfind("\\boxed{")
    depth = 0
    for place in range(start + len("\\boxed"), len(text)) if start >= 0 else ():
        depth += {"{": 1, "}": -1}.get(text[place], 0)
        if depth == 0:
            return text[start + len("\\boxed{") : place]
    return None
