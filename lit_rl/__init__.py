"""lit_rl: a PyTorch Lightning and Hydra recipe for RL post-training of language models.

The names below are loaded when they are first used, so that `import lit_rl` imports nothing.
"""

_WHERE = {
    "GRPO": "lit_rl.algorithms.grpo",
    "PPO": "lit_rl.algorithms.ppo",
    "SDPO": "lit_rl.algorithms.sdpo",
    "SFT": "lit_rl.algorithms.sft",
    "Critic": "lit_rl.objectives.value",
    "PromptDataModule": "lit_rl.data.prompts",
    "SFTDataModule": "lit_rl.data.sft",
    "Reward": "lit_rl.rewards.reward",
    "RewardSum": "lit_rl.rewards.base",
    "Sampling": "lit_rl.rollout.sampling",
    "load_critic": "lit_rl.models.critic",
    "load_policy": "lit_rl.models.load",
}
__all__ = [*_WHERE]


def __getattr__(name: str) -> object:
    if name not in _WHERE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(__import__(_WHERE[name], fromlist=[name]), name)


def __dir__() -> list[str]:
    return [*globals(), *_WHERE]
