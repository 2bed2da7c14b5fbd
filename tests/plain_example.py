"""The example of the README: GRPO from plain Python, as it stands there."""

import lightning as L

from lit_rl import GRPO, PromptDataModule, Sampling, load_policy
from lit_rl.callbacks.rollout import RolloutGeneration


def has_a_one(completions: list[str], **columns: list) -> list[float]:
    return [float("1" in text) for text in completions]


rows = [{"prompt": f"{a}+{b}="} for a in range(10, 20) for b in range(10, 20)]
data = PromptDataModule(train_files=rows, val_files={"all": rows, "hard": "embedded/hard"}, total_epochs=0.2)
module = GRPO(policy=load_policy("embedded"), reward=[has_a_one], sampling=Sampling(max_completion_length=4))
trainer = L.Trainer(max_epochs=1, callbacks=[RolloutGeneration()], log_every_n_steps=1)
trainer.fit(module, datamodule=data)
