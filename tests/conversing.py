"""An environment for whole runs on the embedded questions."""

from typing import Any

from lit_rl.rollout.environment import Environment, Turn


class Retry(Environment):
    """Says "wrong" until the answer is right; half the reward for a second try, none for differences."""

    max_turns = 2

    def reset(self, row: dict[str, Any]) -> None:
        self.answer, self.worth = row["reward_model"]["ground_truth"], 1.0
        self.is_counted = "-" not in row["prompt"][0]["content"]

    def step(self, completion: str) -> Turn:
        worth, self.worth = self.worth, 0.5
        is_right = completion == self.answer
        reward = worth * is_right if self.is_counted else None
        if is_right:
            return Turn(done=True, reward=reward)
        return Turn([{"role": "user", "content": "wrong"}], reward=reward, feedback=f"not {completion[:8]}")
