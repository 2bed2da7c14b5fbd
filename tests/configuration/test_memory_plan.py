"""The memory plan against what a run then holds."""

from pathlib import Path
from typing import Any

import pytest

from lit_rl.configuration import memory_page
from lit_rl.configuration.build import built, built_all, built_trainer
from lit_rl.configuration.compose import Source
from lit_rl.configuration.job import checked
from lit_rl.configuration.memory import Memory, memory_of
from lit_rl.memory import TensorMemory, parameter_bytes

CONF = Path(__file__).resolve().parents[2] / "conf"
SHORT = (
    "trainer.max_steps=2",
    "trainer.enable_progress_bar=false",
    "trainer.val_check_interval=0",
    "algo.sampling.ignore_eos=true",
    "checkpoint.save_freq=-1",
    "checkpoint.save_contents=[model]",
    "logger=none",
    "callbacks.curves=null",
    "data.train_batch_size=4",
)
CASES = {  # a reference's KL, or a teacher for all, keeps every row in the update
    "reference": ("algo=grpo",),
    "averaged teacher": ("algo=sdpo", "algo.reprompt.success_reward_threshold=0"),
}
FURTHER = {
    "one row at a time": ("algo=grpo", "algo.batch.micro_batch_size=1"),
    "two passes": ("algo=grpo", "algo.num_iterations=2"),
    "long completions": ("algo=grpo", "algo.sampling.max_completion_length=48"),
    "logits": (*CASES["averaged teacher"], "algo.distillation.distillation_mode=full_logits"),
    "top entries": (
        *CASES["averaged teacher"],
        "algo.distillation.distillation_mode=topk_logits",
        "algo.distillation.distillation_topk=20",
    ),
    "fused kernels": (*CASES["averaged teacher"], "model.kernels.use_fused_kernels=true"),
    "checkpointing": ("algo=grpo", "model.gradient_checkpointing=true"),
    "adapters": ("algo=grpo", "model.lora.lora_rank=4"),
    "rows by themselves": ("algo=grpo", "model.kernels.share_prefix=false"),
    "critic": ("algo=ppo", "algo.critic.critic_warmup=0"),
    "decoding copy": ("algo=grpo", "rollout.engine.dtype=bfloat16"),
}


def planned_and_measured(overrides: tuple[str, ...], folder: Path) -> tuple[Memory, int]:
    """The plan, and the bytes of all tensors that the same run held at once."""
    job = checked(Source(CONF), [*overrides, f"run_dir={folder}"])
    tree = job.tree
    datamodule = built(tree["data"])
    plan = memory_of(tree, datamodule)
    module: Any = built(tree["algo"], reward=built(tree["reward"]), policy=built(tree["model"]))
    with TensorMemory() as measured:
        callbacks = built_all(tree["callbacks"])
        trainer = built_trainer(tree["trainer"], callbacks=callbacks, logger=[], default_root_dir=folder)
        trainer.fit(module, datamodule=built(tree["data"]))
    networks = (module.policy, getattr(module, "critic", None))
    return plan, sum(parameter_bytes(network) for network in networks if network is not None) + measured.peak


def check(case: tuple[str, ...], folder: Path) -> None:
    plan, measured = planned_and_measured((*SHORT, *case), folder)
    assert 0.85 * measured < plan.total < 1.15 * measured, f"{plan}: {plan.total / measured:.3f}"


@pytest.mark.parametrize("case", CASES)
def test_the_plan_is_within_15_percent_of_what_the_run_holds(case: str, tmp_path: Path) -> None:
    check(CASES[case], tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("case", FURTHER)
def test_so_it_is_with_copies_other_losses_and_other_passes(case: str, tmp_path: Path) -> None:
    check(FURTHER[case], tmp_path)


def test_the_page_says_what_would_take_less(monkeypatch: pytest.MonkeyPatch) -> None:
    job = checked(Source(CONF), ["algo=grpo", "algo.kl.beta=0", "trainer.val_check_interval=0"])
    monkeypatch.setattr(memory_page, "free_bytes", lambda tree: 50_000_000)
    page = memory_page.memory_page(job.settings, job.tree, built(job.tree["data"]))
    assert "weights 4.51 MB" in page and "keys and values" in page and "it does not fit" in page
    assert "with one change: algo.batch.micro_batch_size=1 " in page
    assert "model.gradient_checkpointing=true " in page


def test_a_teacher_on_the_server_reads_nothing_here() -> None:
    def scoring(*overrides: str) -> int:
        live = ("algo=sdpo", "algo.teacher.teacher_model_kind=live", "rollout=vllm_server")
        tree = checked(Source(CONF), [*live, *overrides]).tree
        return memory_of(tree, built(tree["data"])).phases["scoring"]

    on_server = scoring("algo.teacher.use_teacher_server=true", "algo.distillation.distillation_topk=null")
    assert on_server < 0.7 * scoring()


def test_what_cannot_be_known_is_said() -> None:
    job = checked(Source(CONF), ["algo=grpo", "model=hf", "model.path=some/where", "data.tokenizer=embedded"])
    page = memory_page.memory_page(job.settings, job.tree, built(job.tree["data"]))
    assert "not known before the run: model.path 'some/where' is not on this machine yet" in page


@pytest.mark.slow
def test_so_it_is_with_a_real_model(tmp_path: Path) -> None:
    check(
        (
            "algo=grpo",
            "model=smollm2_135m",
            "data.max_prompt_length=64",
            "data.train_batch_size=1",
            "algo.num_generations=4",
            "algo.sampling.max_completion_length=12",
        ),
        tmp_path,
    )
