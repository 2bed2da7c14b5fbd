"""Whole runs of train.py on a tiny vision-language model and rows with pictures."""

import csv
import json
import shutil
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import tiny_vlm
import torch
from outcome import Outcome, outcome
from transformers import AutoModelForImageTextToText, AutoProcessor

from lit_rl.export import export

SCORE = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    return {"score": float(len(solution_str) % 2), "feedback": f"no <image> in {solution_str}"}
"""
SMALL = (
    "debug=fast",
    "data=parquet",
    "data.val_files=null",
    "trainer.val_check_interval=0",
    "trainer.max_steps=2",
    "algo.sampling.max_completion_length=4",
    "optim.lr=1e-3",
    "callbacks.curves=null",
    "logger=[csv]",
)
ALGORITHMS = {
    "grpo": ("algo=grpo", "algo.kl.beta=0.1"),
    "sdpo": ("algo=sdpo", "algo.reprompt.include_environment_feedback=true"),
    "sdpo_logits": ("algo=sdpo", "algo.distillation.distillation_mode=full_logits"),
    "ppo": ("algo=ppo",),
}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("images")
    tiny_vlm.save_llava(folder / "model")
    rows = tiny_vlm.image_rows(8, every=2)
    tiny_vlm.write_rows(rows, folder / "rows.parquet")
    mirrored = [{**row, "images": row["images"][::-1]} for row in tiny_vlm.image_rows(8, every=2)]
    for row in mirrored:
        for image in row["images"]:
            image["bytes"] = tiny_vlm.png(tiny_vlm.picture(99))
    tiny_vlm.write_rows(mirrored, folder / "others.parquet")
    (folder / "score.py").write_text(SCORE)
    return folder


def settings(place: Path, *overrides: str, rows: str = "rows") -> list[str]:
    return [
        *SMALL,
        f"model.path={place / 'model'}",
        f"data.train_files={place / rows}.parquet",
        f"reward.custom_reward_function.path={place / 'score.py'}",
        *overrides,
    ]


def weights(found: Outcome) -> str:
    assert found["error"] == ""
    return next(value for name, value in found["files"].items() if name.endswith("model.safetensors"))


@pytest.mark.parametrize("algo", ALGORITHMS)
def test_iterations_run_and_depend_on_the_pictures(algo: str, place: Path, tmp_path: Path) -> None:
    own, others = (
        outcome(settings(place, *ALGORITHMS[algo], rows=rows), tmp_path / "run", keep=tmp_path / rows)
        for rows in ("rows", "others")
    )
    assert weights(own) != weights(others)
    with (tmp_path / "rows" / "csv" / "metrics.csv").open() as lines:
        rows = list(csv.DictReader(lines))
    assert all(float(row["train/grad_norm"]) > 0 for row in rows if row["train/grad_norm"])
    if algo == "sdpo":
        assert max(float(row["sdpo/feedback_used_frac"] or 0) for row in rows) == 1


def test_a_resumed_run_ends_as_the_uninterrupted_one(place: Path, tmp_path: Path) -> None:
    command = settings(
        place,
        *ALGORITHMS["sdpo"],
        "trainer.max_steps=4",
        "checkpoint.save_freq=1",
        "checkpoint.max_to_keep=null",
    )
    whole, half = tmp_path / "whole", tmp_path / "half"
    assert outcome(command, tmp_path / "run", keep=whole)["error"] == ""
    shutil.copytree(whole, half)
    for step in (3, 4):
        shutil.rmtree(half / "checkpoints" / f"step_0000000{step}")
    resumed = outcome(command, tmp_path / "run", resumed_from=half, keep=tmp_path / "resumed")
    assert resumed["error"] == "" and any("step_00000002" in line for line in resumed["printed"])
    last = "checkpoints/step_00000004"
    for file in sorted((whole / last).rglob("*.safetensors")):
        name = file.relative_to(whole)
        assert file.read_bytes() == (tmp_path / "resumed" / name).read_bytes(), name


def test_what_is_saved_loads_in_transformers_with_its_processor(place: Path, tmp_path: Path) -> None:
    contents = "checkpoint.save_contents=[model,optimizer,extra,hf_model]"
    lora = ("model.lora.lora_rank=2", "callbacks=[default,rollout_dump]")
    command = settings(place, "algo=grpo", contents, *lora)
    assert outcome(command, tmp_path / "run", keep=tmp_path / "kept")["error"] == ""
    folder = tmp_path / "kept" / "checkpoints" / "step_00000002" / "hf"
    model, processor = (
        AutoModelForImageTextToText.from_pretrained(folder),
        AutoProcessor.from_pretrained(folder),
    )
    inputs = processor(text=["<image>a"], images=[[tiny_vlm.picture(1)]], return_tensors="pt")
    with torch.no_grad():
        moved = model(**inputs).logits - tiny_vlm.llava()(**inputs).logits
    assert 0 < float(moved.abs().max()) < 1
    export(folder.parent, tmp_path / "exported")
    again = AutoModelForImageTextToText.from_pretrained(tmp_path / "exported")
    assert all(torch.equal(a, b) for a, b in zip(again.parameters(), model.parameters(), strict=True))
    assert AutoProcessor.from_pretrained(tmp_path / "exported").image_token == "<image>"
    dumped = next((tmp_path / "kept").rglob("step_00000001.jsonl")).read_text().splitlines()
    assert all("images" not in json.loads(line)["columns"] for line in dumped)


def test_responses_are_written_with_their_pictures(place: Path, tmp_path: Path) -> None:
    validated = (f"data.val_files={place / 'rows.parquet'}", "trainer.val_check_interval=1")
    command = settings(place, "algo=grpo", "task=generate", *validated)
    assert outcome(command, tmp_path / "run", keep=tmp_path / "kept")["error"] == ""
    rows = pq.read_table(tmp_path / "kept" / "responses.parquet").to_pylist()
    assert len(rows[0]["responses"]) == 1 and rows[0]["images"][0]["bytes"].startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["model.path=embedded"], "ConfigError: data.image_key: the data have a column of images"),
        (
            ["model.kernels.use_remove_padding=true", "model.kernels.share_prefix=false"],
            "ConfigError: model.kernels.use_remove_padding must be false",
        ),
        (["data.tokenizer=embedded"], "ConfigError: data.image_key: the data have a column of images"),
        (
            [
                "rollout.environment={_target_: lit_rl.rollout.tools.ToolEnvironment, role: user, "
                "tools: [lit_rl.assets.calculator.calculator]}"
            ],
            "ConfigError: rollout.environment and a column of images (data.image_key) exclude each other",
        ),
        (
            ["rollout=sglang"],
            "ConfigError: data.image_key: the data have a column of images, and rollout.engine is a SGLang",
        ),
    ],
)
def test_what_cannot_see_is_refused(overrides: list[str], words: str, place: Path, tmp_path: Path) -> None:
    found = outcome(settings(place, "algo=grpo", *overrides), tmp_path / "run")
    assert found["error"].startswith(words)
