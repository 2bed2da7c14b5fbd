"""Train a language model by reinforcement learning: `python train.py algo=grpo`, `python train.py --help`.

Composes the configuration, checks it, builds its parts, fits. What happens in a step stands in
`lit_rl/algorithms/base.py`; every key in `conf/README.md`.
"""

import sys
from pathlib import Path
from typing import Any

import hydra
from omegaconf import DictConfig

from lit_rl.configuration.job import Job
from lit_rl.configuration.launch import launch, run_current

CONF = Path(__file__).parent / "conf"


def run(job: Job) -> dict[str, float]:
    """Build the parts, the cheap ones first and the model last, do the task, return the last metrics."""
    from lit_rl import tasks
    from lit_rl.configuration.build import built, built_all, built_trainer
    from lit_rl.configuration.launched import process_rank
    from lit_rl.configuration.memory_page import memory_page
    from lit_rl.configuration.plan import plan

    tree = job.tree
    tasks.prepare_process(
        seed=tree["seed"],
        log_level=tree["log_level"],
        float32_matmul_precision=tree["float32_matmul_precision"],
        rank=process_rank(),
    )
    datamodule = built(tree["data"])
    reward = {"reward": built(tree["reward"])} if "reward" in tree["algo"] else {}
    callbacks, loggers = built_all(tree["callbacks"]), built_all(tree["logger"])

    def new_trainer(max_steps: int) -> Any:
        node = {**tree["trainer"], "max_steps": max_steps}
        return built_trainer(node, callbacks=callbacks, logger=loggers, default_root_dir=tree["run_dir"])

    trainer = new_trainer(tree["trainer"]["max_steps"])
    rows = datamodule.num_rows()
    total_steps = datamodule.total_steps(tree["trainer"]["max_steps"])
    if process_rank() == 0:
        print(plan(job.settings, rows, total_steps), flush=True)
    if tree["plan"]:
        if process_rank() == 0:
            print(memory_page(job.settings, tree, datamodule))
        return {}
    module = built(tree["algo"], **reward, policy=built(tree["model"]))
    with job.started():
        if tree["task"] == "search":
            from lit_rl.callbacks.test_time_search import search

            return search(
                new_trainer,
                module,
                datamodule,
                folder=job.folder,
                seed=tree["seed"],
                settings={"fingerprint": job.fingerprint("callbacks.test_time_search.num_seeds")},
            )
        return tasks.run(
            tree["task"],
            trainer,
            module,
            datamodule,
            total_steps=total_steps,
            steps_per_data_epoch=rows["train"] / tree["data"]["train_batch_size"],
            val_before_train=tree["val_before_train"],
        )


@hydra.main(version_base="1.3", config_path="conf", config_name="train")
def main(config: DictConfig) -> None:
    """What Hydra calls for each job."""
    run_current(run, CONF)


if __name__ == "__main__":
    sys.exit(launch(main, CONF))
