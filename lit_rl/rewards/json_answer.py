"""JSONAnswer: a tool call or another JSON value, compared with the reference."""

import json
from typing import Any

from lit_rl.rewards.reward import AN_ANSWER, NO_ANSWER, Reward, RewardResult, Sample


class JSONAnswer(Reward):
    """The share of the reference that the completion's last JSON value has right.

    A reference that is an object is compared field by field, nested ones too, and extra fields count against
    the completion; any other is right as a whole or not at all. Text around the value does not matter.
    """

    def score(self, sample: Sample) -> RewardResult:
        """Score and feedback of the sample."""
        reference = sample.ground_truth
        if isinstance(reference, str):
            reference = json.loads(reference)
        found = last_json(sample.answer)
        if found is _NOTHING:
            return RewardResult(0.0, "There was no JSON value in your answer.", NO_ANSWER)
        right, asked = _leaves(reference), _leaves(found)
        wrong = sorted(
            path for path in {**right, **asked} if right.get(path, _NOTHING) != asked.get(path, _NOTHING)
        )
        total = len({**right, **asked})
        if not wrong:
            return RewardResult(1.0, None, AN_ANSWER)
        shown = ", ".join(path or "the value" for path in wrong[:5])
        return RewardResult(1 - len(wrong) / total, f"Wrong in your JSON: {shown}.", AN_ANSWER)

    def answer(self, sample: Sample) -> str | None:
        """The value, in one spelling."""
        found = last_json(sample.answer)
        return None if found is _NOTHING else json.dumps(found, sort_keys=True)


_NOTHING: Any = object()


def last_json(text: str) -> Any:
    """The last outermost JSON object or list in a text; a marker that equals nothing where there is none."""
    decoder, found, place = json.JSONDecoder(), _NOTHING, 0
    while place < len(text):
        if text[place] in "{[":
            try:
                found, place = decoder.raw_decode(text, place)
                continue
            except json.JSONDecodeError:
                pass
        place += 1
    return found


def _leaves(value: Any, path: str = "") -> dict[str, Any]:
    """Values by dotted path; lists are values."""
    if not isinstance(value, dict) or not value:
        return {path: value}
    leaves: dict[str, Any] = {}
    for name, entry in value.items():
        leaves.update(_leaves(entry, f"{path}.{name}" if path else str(name)))
    return leaves
