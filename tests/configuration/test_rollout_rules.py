"""Rules of the rollout engines: what one cannot follow is refused before a model is loaded."""

from importlib.util import find_spec
from pathlib import Path

import pytest

from lit_rl.configuration.build import built

SERVED = (
    "algo=sdpo rollout=vllm_server algo.teacher.teacher_model_kind=live algo.teacher.use_teacher_server=true"
)
TALKS = "experiment=calculator"
CASES = [
    (
        'algo=grpo algo.sampling.generation_kwargs={"num_beams":4}',
        ["algo.sampling.generation_kwargs.num_beams (found 4)", "rollout=hf", "no_repeat_ngram_size"],
    ),
    (
        'algo=grpo rollout=vllm_server algo.sampling.generation_kwargs={"typical_p":0.5}',
        ["algo.sampling.generation_kwargs.typical_p (found 0.5)", "rollout=vllm_server", "min_tokens"],
    ),
    (
        'algo=grpo rollout=sglang algo.sampling.generation_kwargs={"min_tokens":2}',
        ["algo.sampling.generation_kwargs.min_tokens", "rollout=sglang", "min_new_tokens"],
    ),
    (
        'algo=grpo rollout.val_kwargs.generation_kwargs={"top_p":2}',
        ["rollout.val_kwargs.generation_kwargs", "top_p", "found 2"],
    ),
    (
        "algo=grpo rollout=vllm_server rollout.calculate_log_probs=true algo.sampling.top_k=5",
        ["rollout.calculate_log_probs", "algo.sampling.top_k (found 5)", "rollout=vllm_server"],
    ),
    (
        "algo=grpo rollout=sglang rollout.calculate_log_probs=true algo.sampling.repetition_penalty=1.1",
        ["rollout.calculate_log_probs", "algo.sampling.repetition_penalty (found 1.1)", "rollout=sglang"],
    ),
    (
        "algo=grpo rollout=vllm_server rollout.calculate_log_probs=true "
        'algo.sampling.generation_kwargs={"presence_penalty":1}',
        ["rollout.calculate_log_probs", "algo.sampling.generation_kwargs"],
    ),
    (
        "algo=grpo rollout.val_kwargs.guided_decoding_regex=a",
        ["rollout.val_kwargs.guided_decoding_regex", "rollout=hf"],
    ),
    ("algo=grpo rollout.max_staleness=1", ["rollout.max_staleness", "rollout=vllm_server or sglang"]),
    ("algo=grpo rollout.max_staleness=2", ["rollout.max_staleness", "0 or 1", "found 2"]),
    (
        "algo=grpo rollout=sglang rollout.max_staleness=1",
        ["rollout.max_staleness", "algo.rollout_correction.rollout_is=true"],
    ),
    (
        f"{TALKS} rollout=sglang rollout.max_staleness=1 rollout.calculate_log_probs=true "
        "algo.rollout_correction.rollout_is=true algo.rollout_correction.rollout_is_threshold=2",
        ["rollout.max_staleness (found 1)", "rollout.environment"],
    ),
    (f"{TALKS} algo.sampling.ignore_eos=true", ["algo.sampling.ignore_eos", "rollout.environment"]),
    (f"{TALKS} rollout.val_kwargs.ignore_eos=true", ["rollout.val_kwargs.ignore_eos", "rollout.environment"]),
    ("algo=grpo reward=environment", ["reward.reward_funcs.environment", "rollout.environment (found None)"]),
    (
        f"{TALKS} algo=sdpo callbacks=[default,teacher_gap]",
        ["callbacks.teacher_gap", "rollout.environment"],
    ),
    ("algo=grpo rollout.environment=3", ["rollout.environment must be", "found 3"]),
    (f"{TALKS} rollout.environment.turns=3", ["rollout.environment.turns is not a key", "max_turns"]),
    (f"{SERVED} algo.sampling.temperature=0.9", ["use_teacher_server", "algo.sampling.temperature 1.0"]),
    (f"{SERVED} algo.teacher.teacher_model_kind=ema", ["use_teacher_server", "teacher_model_kind 'live'"]),
    (
        f"{SERVED} algo.distillation.distillation_weight=0.5",
        ["use_teacher_server", "distillation_weight 1.0 (found 0.5)"],
    ),
    (
        f"{SERVED} algo.distillation.distillation_mode=full_logits",
        ["use_teacher_server", "distillation_mode sampled_token or topk_logits"],
    ),
    (
        "algo=grpo rollout=vllm_server rollout.engine.weight_sync=file rollout.engine.group_port=51217",
        ["rollout.engine.group_port (found 51217)", "weight_sync=auto, nccl or gloo (found 'file')"],
    ),
    (f"{SERVED} rollout=hf", ["use_teacher_server", "rollout=vllm_server (found 'hf')"]),
    (f"{SERVED} rollout=sglang", ["use_teacher_server", "rollout=vllm_server (found 'sglang')"]),
]
IN_PROCESS = [
    ("rollout.engine.max_model_len=50", ["rollout.engine.max_model_len (found 50)", "64 + 8"]),
    (
        "rollout.engine.max_model_len=80 rollout.val_kwargs.max_completion_length=20",
        ["rollout.val_kwargs.max_completion_length", "64 + 20"],
    ),
    ("rollout.engine.lora_as_adapter=true", ["rollout.engine.lora_as_adapter", "model.lora.lora_rank"]),
    (
        "rollout.engine.tensor_parallel_size=2",
        ["rollout.engine.tensor_parallel_size (found 2)", "trainer.devices (found 1)"],
    ),
    (
        'rollout.engine.engine_kwargs={"max_num_seqs":3}',
        ["rollout.engine.engine_kwargs.max_num_seqs (found 3)", "repeats rollout.engine.max_num_seqs"],
    ),
]


@pytest.mark.parametrize(("line", "parts"), CASES, ids=lambda v: v if isinstance(v, str) else "")
def test_a_breach_is_refused_and_names_every_key(refusal, line: str, parts: list[str]) -> None:
    message = refusal(line)
    for part in parts:
        assert part in message
    assert len(message.splitlines()) == 1


@pytest.mark.parametrize(("line", "parts"), IN_PROCESS, ids=lambda v: v if isinstance(v, str) else "")
def test_a_breach_of_an_engine_in_process_is_refused(refusal, line: str, parts: list[str]) -> None:
    message = refusal(f"algo=grpo rollout=vllm {line}")
    for part in parts:
        assert part in message


@pytest.mark.vllm
def test_an_argument_that_vllm_does_not_have_is_refused(refusal, accepted) -> None:
    assert find_spec("vllm") is not None
    assert "max_logits" in refusal('algo=grpo rollout=vllm rollout.engine.engine_kwargs={"max_logits":3}')
    legal = 'rollout.engine.engine_kwargs={"block_size":32} rollout.engine.max_model_len=72'
    accepted(f"algo=grpo rollout=vllm {legal}")


@pytest.mark.parametrize(
    "line",
    [
        SERVED,
        f"{SERVED} algo.distillation.distillation_mode=topk_logits algo.distillation.distillation_topk=20",
        "algo=grpo rollout=sglang rollout.calculate_log_probs=true algo.sampling.top_k=5",
        "algo=grpo rollout=sglang rollout.calculate_log_probs=true rollout.max_staleness=1 "
        "algo.rollout_correction.rollout_is=true algo.rollout_correction.rollout_is_threshold=2",
        "algo=grpo rollout=vllm_server algo.sampling.guided_decoding_regex='[0-9]+'",
        'algo=grpo rollout=sglang algo.sampling.generation_kwargs={"max_new_tokens":4,"min_new_tokens":2}',
        'algo=grpo rollout=vllm_server algo.sampling.generation_kwargs={"max_tokens":4,"min_tokens":2}',
        'algo=grpo algo.sampling.generation_kwargs={"no_repeat_ngram_size":2}',
    ],
)
def test_what_is_legal_passes(accepted, line: str) -> None:
    accepted(line)


OWN_ENGINE = """
from lit_rl.rollout.hf import HFEngine


class Mine(HFEngine):
    def __init__(self, flavour="plain", dtype="auto", max_num_seqs=1024, cache_implementation=None,
                 ds3_gather_for_generation=True):
        super().__init__(dtype, max_num_seqs, cache_implementation)
        self.flavour = flavour
"""


def test_an_engine_of_ones_own_is_named_by_its_path(
    accepted, refusal, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "my_engines.py").write_text(OWN_ENGINE)
    monkeypatch.syspath_prepend(tmp_path)
    line = "algo=grpo rollout.engine._target_=my_engines.Mine rollout.engine.flavour"
    settings = accepted(f"{line}=sweet")
    callback = built(settings.tree["rollout"])
    assert type(callback.engine).__name__ == "Mine" and callback.engine.flavour == "sweet"
    assert "rollout.engine.colour is not a key" in refusal(line.replace("flavour", "colour=red"))
