"""Runs of train.py on two processes with trainer=fsdp and on one: `python tests/fsdp_runs.py FOLDER`.

A program of its own, since it forks: `test_fsdp.py` looks at what it leaves.
"""

import os
import shutil
import sys
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from forked_runs import Run, import_all

TWO = ("trainer=fsdp", "trainer.devices=2")
COMMON = (
    "data.train_batch_size=4",
    "algo.num_generations=4",
    "algo.sampling.max_completion_length=12",
    "algo.batch.optimizer_batch_size=8",
)
GRPO = ("algo=grpo", *COMMON, "algo.batch.micro_batch_size=null", "algo.batch.micro_batch_tokens=90")
CASES = {
    "grpo": GRPO,
    "sdpo": (
        *("algo=sdpo", *COMMON, "algo.batch.micro_batch_size=3", "algo.kl.beta=0.1"),
        *("algo.distillation.distillation_weight=0.5", "algo.teacher.teacher_update_rate=0.5"),
        *(
            "algo.teacher.teacher_sync_steps=1",
            "optim=sgd",
            "optim.lr=0.03",
            "optim.momentum=0.9",
            "optim.fused=false",
        ),
    ),
    "ppo": (
        *("algo=ppo", *COMMON, "algo.batch.micro_batch_size=3", "algo.critic.critic_warmup=1"),
        *("algo.critic.optim.lr=1e-4", "algo.critic.micro_batch_size=4"),
    ),
    "lora": (*GRPO, "model.lora.lora_rank=2", "optim.lr=1e-3"),
}
HF = "checkpoint.save_contents=[model,optimizer,extra,hf_model]"
FURTHER = {
    "grpo": (HF,),
    "small_units": ("model.fsdp_config.min_num_params=30000",),
    "named_units": ("model.fsdp_config.transformer_layer_cls_to_wrap=[LlamaMLP,LlamaAttention]",),
    "two_copies": ("model.fsdp_config.fsdp_size=1",),
}


def main(folder: Path, names: list[str]) -> None:
    import_all()
    for ranks in ("one", "two"):
        (folder / ranks).mkdir(parents=True, exist_ok=True)
    for name, words in CASES.items():
        if name in names:
            Run(folder / "one" / name, words).finish()
            Run(folder / "two" / name, (*words, *TWO, *FURTHER.get(name, ())), num_processes=2).finish()
    for name in set(FURTHER) - set(CASES):
        if name in names:
            Run(folder / "two" / name, (*GRPO, *TWO, *FURTHER[name]), num_processes=2).finish()
    if "resumed" in names:
        for there, here, words in (("one", "two", TWO), ("two", "one", ())):
            begun = folder / here / "resumed"
            shutil.copytree(folder / there / "grpo", begun)
            shutil.rmtree(begun / "checkpoints/step_00000004")
            (begun / "summary.json").unlink()
            Run(begun, (*GRPO, *words), num_processes=2 if words else 1).finish()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:] or [*CASES, *FURTHER, "resumed"])
