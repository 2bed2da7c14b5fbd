"""Mathematics: the final expression, compared as mathematics by the package math-verify."""

from typing import Any

from lit_rl.errors import ConfigError
from lit_rl.rewards.reward import AN_ANSWER, NO_ANSWER, Reward, RewardResult, Sample


class Math(Reward):
    """1 when the final answer equals the reference as an expression, otherwise 0.

    The answer is the last `\\boxed{...}`, else the last formula or number. `1/2`, `0.5` and `\\frac{1}{2}`
    are the same, sets and intervals are compared as such. Needs the extra `math`.

    Args:
        precision: significant digits where numbers are compared.

    """

    def __init__(self, precision: int = 6) -> None:
        self.precision = precision

    def score(self, sample: Sample) -> RewardResult:
        """Score and feedback of the sample. Raises ConfigError where math-verify is not installed."""
        verify = _package().verify
        reference = _parsed(f"${sample.ground_truth}$") or _parsed(str(sample.ground_truth))
        attempt = _parsed(_final(sample.answer))
        if not attempt:
            return RewardResult(0.0, "There was no answer in \\boxed{}.", NO_ANSWER)
        # Limits of time come from reward.timeout: the package's own need the main thread.
        is_right = verify(reference, attempt, float_rounding=self.precision, timeout_seconds=None)
        if is_right:
            return RewardResult(1.0, None, AN_ANSWER)
        return RewardResult(0.0, f"Your answer was {attempt[-1]}, which is wrong.", AN_ANSWER)

    def answer(self, sample: Sample) -> str | None:
        """The final expression, in one spelling."""
        attempt = _parsed(_final(sample.answer))
        return str(attempt[0]) if attempt else None


def _final(text: str) -> str:
    """From the last box on: the package would read several boxes as one tuple."""
    return text[max(text.rfind("\\boxed"), 0) :]


def _parsed(text: str) -> list[Any]:
    return _package().parse(text, parsing_timeout=None)


def _package() -> Any:
    try:
        import math_verify
    except ImportError as error:
        raise ConfigError(
            "The verifier of mathematics needs the package math-verify: `pip install 'lit_rl[math]'`."
        ) from error
    return math_verify
