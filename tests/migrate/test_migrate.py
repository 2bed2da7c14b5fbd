"""Coming from TRL and verl: every documented parameter has an answer, and what is converted runs."""

import ast
import json
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import yaml

from lit_rl import cli
from lit_rl.configuration.compose import Source, compose
from lit_rl.configuration.job import checked
from lit_rl.configuration.tree import at
from lit_rl.errors import ConfigError
from lit_rl.migrate.__main__ import converted, main
from lit_rl.migrate.draft import NOT_YET, UNKNOWN, WITHOUT, Draft, written
from lit_rl.migrate.rows import by_name, rows
from lit_rl.migrate.trl import COMPUTED as TRL_COMPUTED
from lit_rl.migrate.trl import from_trl, sizes_of
from lit_rl.migrate.verl import COMPUTED as VERL_COMPUTED
from lit_rl.migrate.verl import from_verl

HERE = Path(__file__).parent
SOURCE = Source(HERE.parents[1] / "conf")
TINY = ["model=tiny", "data=arithmetic", "rollout=hf", "trainer=cpu", "logger=[csv]", "debug=fast"]
TINY += ["model.path=embedded", "model.dtype=float32", "model.attn_implementation=null"]
TINY += ["trainer.precision=32-true", "trainer.devices=1", "data.max_prompt_length=64"]
TINY += ["data.train_files=embedded", "data.val_files=embedded", "callbacks.curves=null"]
DOCUMENTS = {
    "sdpo.sh": ("trl", ["model.lora.target_modules=all-linear", "algo.batch.optimizer_batch_size=null"]),
    "sdpo.py.txt": ("trl", ["algo.distillation.distillation_topk=8"]),
    "verl_sft.yaml": ("verl", []),
}


def literal(text: str) -> Any:
    """A default of the table as a value."""
    words = {"null": None, "true": True, "false": False}
    try:
        return words.get(text.lower(), text) if text.lower() in words else ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text


def verdicts(draft: Draft) -> dict[str, str]:
    return {line.key: line.verdict for line in draft.lines}


def test_every_documented_parameter_is_in_the_table_and_few_have_no_meaning() -> None:
    assert Counter(row.source for row in rows()) == {"trl_grpo": 27, "verl": 232, "trl_sdpo": 207}
    assert sum(row.how == "no-meaning" for row in rows()) <= 25
    assert all(row.key for row in rows() if row.how != "no-meaning")


def test_the_table_is_that_of_the_specification(shared_folder: Path) -> None:
    import csv

    with (shared_folder / "spec" / "mapping.csv").open(newline="") as lines:
        theirs = [(line["name"], line["lit_rl_key"], line["how"]) for line in csv.DictReader(lines)]
    assert [(row.name, row.key, row.how) for row in rows()] == theirs


def test_no_answer_is_for_a_parameter_that_is_not_documented() -> None:
    assert TRL_COMPUTED.keys() <= by_name("trl_sdpo").keys() | by_name("trl_grpo").keys()
    assert VERL_COMPUTED.keys() <= by_name("verl").keys()


@pytest.mark.parametrize("source", ["trl_grpo", "trl_sdpo"])
def test_the_defaults_of_a_config_class_convert(source: str) -> None:
    """A whole `Config.to_dict()`; every key gets a verdict, none is unknown."""
    names = {row.name: row for row in rows() if row.source == source and row.section not in OUTSIDE_OF_CONFIG}
    args = {name: literal(row.default) for name, row in names.items()}
    draft = from_trl({k: v for k, v in args.items() if v is not ...}, algo=source.removeprefix("trl_"))
    draft.finish(SOURCE)
    found = verdicts(draft)
    assert UNKNOWN not in found.values()
    batch = next((key for key in found if key.startswith("per_device")), "")
    assert {*args} - {*found} - {*batch.split(", ")} == set()
    without = {row.name for row in names.values() if row.how == "no-meaning"}
    assert {key for key, verdict in found.items() if verdict == WITHOUT} == without


OUTSIDE_OF_CONFIG = (
    "referenced_only",
    "SDPOTrainer",
    "SDPOTrainer.train",
    "SDPOTrainer.save_model",
    "SDPOTrainer.push_to_hub",
    "dataset_columns",
    "example_script",
    "vllm_server_launch",
)


@pytest.mark.parametrize(
    "file", ["verl_ppo.yaml", "verl_ppo_megatron.yaml", "verl_sft.yaml", "verl_evaluation.yaml"]
)
def test_the_documented_yaml_of_verl_converts_unchanged(file: str) -> None:
    draft = converted("verl", HERE / file)
    out = draft.finish(SOURCE)
    assert UNKNOWN not in verdicts(draft).values()
    unanswered = [line for line in draft.lines if line.verdict == NOT_YET]
    for line in unanswered:  # only what does not exist here
        assert str(line).endswith("does not exist."), line
    if file == "verl_evaluation.yaml":
        assert written(out, file).startswith(
            "python -m lit_rl.evaluate data.path=math_Qwen2-7B-Instruct.parquet"
        )


def test_numbers_of_verl_are_rows_and_iterations() -> None:
    document = {
        "data": {"train_batch_size": 128, "max_response_length": 64},
        "algorithm": {"adv_estimator": "grpo"},
        "actor_rollout_ref": {
            "model": {"path": "m"},
            "actor": {
                "ppo_mini_batch_size": 64,
                "use_dynamic_bsz": True,
                "ppo_max_token_len_per_gpu": 16384,
                "use_kl_loss": True,
                "kl_loss_coef": 0.001,
                "kl_loss_type": "kl",
                "optim": {"lr": 1e-6},
            },
            "rollout": {"name": "hf", "n": 5, "top_k": -1},
        },
    }
    out = from_verl(document).finish(SOURCE)
    assert out["data"]["train_batch_size"] == 128
    assert out["algo"]["batch"] == {
        "optimizer_batch_size": 320,
        "micro_batch_tokens": 16384,
        "micro_batch_size": None,
    }
    assert out["algo"]["num_generations"] == 5
    assert out["algo"]["kl"] == {"beta": 0.001, "kl_loss_type": "kl+"}
    assert {"override /algo": "grpo"} in out["defaults"]


def test_numbers_of_trl_are_prompts_rows_and_iterations() -> None:
    sizes = sizes_of(
        {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 2, "generation_batch_size": 32}, 1
    )
    assert (sizes.P, sizes.M, sizes.m, sizes.U) == (4, 2, 1, 16)
    assert sizes_of({}, 1).P == 1 and sizes_of({}, 1).M == 8
    args = {
        "per_device_train_batch_size": 4,
        "gradient_accumulation_steps": 4,
        "num_iterations": 2,
        "max_steps": 25,
    }
    out = from_trl({**args, "save_steps": 10, "warmup_steps": 0.1}, "GRPOConfig", devices=2).finish(SOURCE)
    assert out["data"]["train_batch_size"] == 4
    assert out["trainer"] == {"max_steps": 13} and out["checkpoint"]["save_freq"] == 5
    assert out["schedule"]["lr_warmup_steps_ratio"] == 0.1
    with pytest.raises(ConfigError, match="whole prompts"):
        sizes_of({"per_device_train_batch_size": 3}, 1)


def test_what_shares_a_model_out_is_taken_and_what_is_not_built_is_named() -> None:
    args = {
        "fsdp": "full_shard offload",
        "fsdp_config": {"fsdp_min_num_params": 1000, "use_orig_params": True, "version": 2},
        "parallelism_config": {"dp_replicate_size": 2, "dp_shard_size": 4, "tp_size": 2, "sp_size": 1},
        "ds3_gather_for_generation": True,
    }
    draft = from_trl(args, "GRPOConfig")
    out, found = draft.finish(SOURCE), verdicts(draft)
    assert {"override /trainer": "fsdp"} in out["defaults"]
    assert out["model"]["fsdp_config"] == {"min_num_params": 1000, "param_offload": True, "fsdp_size": 4}
    assert out["trainer"]["strategy"] == {"data_parallel_size": 8}
    not_built = {key for key, verdict in found.items() if verdict == NOT_YET}
    assert not_built == {"fsdp_config.use_orig_params", "parallelism_config.tp_size"}
    document = {"actor_rollout_ref": {"actor": {"ulysses_sequence_parallel_size": 2, "strategy": "fsdp2"}}}
    draft = from_verl(document)
    assert {"override /trainer": "fsdp"} in draft.finish(SOURCE)["defaults"]
    assert [line.key for line in draft.lines if line.verdict == NOT_YET] == [
        "actor_rollout_ref.actor.ulysses_sequence_parallel_size"
    ]


def test_what_cannot_be_taken_is_named_and_ends_with_an_exit_code(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "args.json"
    file.write_text(json.dumps({"learning_rate": 1e-5, "learning_rat": 1e-5, "torch_compile": True}))
    assert main(["trl", str(file), "--algo", "grpo", "-o", str(tmp_path / "mine.yaml")]) == 1
    report = capsys.readouterr().err
    assert "learning_rat (1e-05): unknown" in report
    assert yaml.safe_load((tmp_path / "mine.yaml").read_text())["optim"] == {"lr": 1e-5}
    file.write_text(json.dumps({"learning_rate": 1e-5, "use_cache": False}))
    assert main(["trl", str(file), "--algo", "grpo"]) == 0
    assert "use_cache (False): no meaning here: training passes never cache" in capsys.readouterr().err


def words(file: str, tmp_path: Path) -> list[str]:
    """The command line of a converted document at embedded sizes."""
    library, own = DOCUMENTS[file]
    output = tmp_path / "mine.yaml"
    main([library, str(HERE / file), "-o", str(output)])
    chats = HERE.parent / "conf" / "chats_8.parquet"
    sft = [*(word for word in TINY if word.startswith(("model", "trainer", "logger", "debug", "callbacks")))]
    sft += [f"data.train_files={chats}", "optim.fused=true"]
    small = sft if "sft" in file else TINY
    return cli.to_overrides(["--config", str(output), *small, *own, f"run_dir={tmp_path / 'run'}"])


@pytest.mark.parametrize("file", DOCUMENTS)
def test_a_converted_document_passes_the_check(file: str, tmp_path: Path) -> None:
    job = checked(SOURCE, words(file, tmp_path))
    if file == "sdpo.sh":
        assert job.tree["algo"]["distillation"]["distillation_weight"] == 0.5
        assert job.tree["model"]["lora"]["lora_rank"] == 16


@pytest.mark.slow
@pytest.mark.parametrize("file", DOCUMENTS)
def test_a_converted_document_runs(file: str, tmp_path: Path) -> None:
    assert cli.main(["fit", *words(file, tmp_path)]) == 0
    assert (tmp_path / "run" / "summary.json").is_file()


def test_an_experiment_of_conf_is_what_hydra_reads(tmp_path: Path) -> None:
    """Written into a folder `experiment` on the search path, as `-o conf/experiment/mine.yaml` does."""
    output = tmp_path / "experiment" / "mine.yaml"
    main(["trl", str(HERE / "sdpo.sh"), "-o", str(output)])
    found = compose(
        SOURCE, [f"hydra.searchpath=[file://{tmp_path}]", "experiment=mine", "data.train_files=a"]
    )
    assert at(found.tree, "algo.batch.optimizer_batch_size") == 2
    assert at(found.tree, "trainer.val_check_interval") == 63


@pytest.mark.slow
def test_the_module_is_a_command(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "lit_rl.migrate", "trl", str(HERE / "sdpo.sh")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0 and "distillation_weight: 0.5" in done.stdout
