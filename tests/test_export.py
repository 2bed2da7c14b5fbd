"""python -m lit_rl.export: what a run held in memory is what transformers reads from the folder."""

import importlib.util
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
import yaml
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoModelForTokenClassification, AutoTokenizer

from lit_rl.configuration.compose import Source
from lit_rl.configuration.job import checked
from lit_rl.export import main
from lit_rl.models.score import Rows

ROOT = Path(__file__).resolve().parents[1]
IDS = torch.tensor([[5, 6, 7, 8, 9, 10]])
RUN = (
    "debug=fast",
    "trainer.max_steps=2",
    "optim.lr=1e-2",
    "callbacks.capture._target_=test_export.Capture",
    "trainer.enable_progress_bar=false",
    "logger=none",
)
CASES = {
    "sdpo": ("algo=sdpo",),
    "lora": ("algo=grpo", "model.lora.lora_rank=2", "checkpoint.save_contents=[model,extra]"),
    "ppo": ("algo=ppo",),
}


class Capture(L.Callback):
    """What the models compute when a run ends."""

    seen: dict[str, torch.Tensor] = {}  # noqa: RUF012 (read by the test that runs it)

    @torch.no_grad()
    def on_fit_end(self, trainer: L.Trainer, pl_module: Any) -> None:
        pl_module.policy.eval()
        Capture.seen = {"policy": pl_module.policy(IDS).logits}
        if pl_module.teacher is not None:
            with pl_module.teacher.model() as teacher:
                Capture.seen["teacher"] = teacher(IDS).logits
        if hasattr(pl_module, "critic"):
            rows = Rows(IDS[:, :1], torch.tensor([1]), IDS[:, 1:], torch.tensor([IDS.shape[1] - 1]))
            Capture.seen["critic"] = pl_module.critic(rows)


def trained(name: str, folder: Path) -> Path:
    """A checkpoint of a run in this process."""
    spec = importlib.util.spec_from_file_location("train_under_test", ROOT / "train.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    words = [("+" if word.startswith("callbacks.capture") else "") + word for word in RUN]
    module.run(checked(Source(ROOT / "conf"), [*CASES[name], *words, f"run_dir={folder}"]))
    return folder / "checkpoints" / "step_00000002"


@pytest.mark.slow
@pytest.mark.field("ckpt/7")
@torch.no_grad()
def test_policy_and_teacher_of_a_full_run(tmp_path: Path) -> None:
    checkpoint = trained("sdpo", tmp_path / "run")
    for part in ("policy", "teacher"):
        assert main([str(checkpoint), str(tmp_path / part), "--part", part]) == 0
        model = AutoModelForCausalLM.from_pretrained(tmp_path / part)
        assert torch.equal(model(IDS).logits, Capture.seen[part]), part
    assert not torch.equal(Capture.seen["policy"], Capture.seen["teacher"])
    out = tmp_path / "policy"
    tokenizer = AutoTokenizer.from_pretrained(out)
    assert tokenizer.chat_template and (out / "generation_config.json").exists()
    assert {p.suffix for p in out.iterdir()} <= {".json", ".jinja", ".safetensors", ".md", ".png"}
    card = (out / "README.md").read_text()
    metadata = yaml.safe_load(card.split("---")[1])
    assert metadata["library_name"] == "transformers" and "sdpo" in metadata["tags"]
    for words in ("by **SDPO** for 2 steps", "`embedded`", "curves.png", "python ", "algo:", "distillation"):
        assert words in card
    assert (out / "curves.png").exists() and "| lit_rl/arithmetic" in card
    assert main([str(checkpoint), str(out)]) == 2, "a folder with something in it is left alone"


@pytest.mark.slow
@pytest.mark.field("ckpt/6")
@pytest.mark.field("ckpt/7")
@torch.no_grad()
def test_a_lora_run_merged_and_as_adapter(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    checkpoint = trained("lora", tmp_path / "run")
    size = (checkpoint / "model.safetensors").stat().st_size
    assert size < 0.2 * (ROOT / "lit_rl/assets/tiny/model.safetensors").stat().st_size
    assert main([str(checkpoint), str(tmp_path / "merged")]) == 0
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    torch.testing.assert_close(merged(IDS).logits, Capture.seen["policy"], rtol=1e-5, atol=1e-5)
    assert main([str(checkpoint), str(tmp_path / "adapter"), "--adapter"]) == 0
    base = AutoModelForCausalLM.from_pretrained(ROOT / "lit_rl/assets/tiny")
    adapted = PeftModel.from_pretrained(base, tmp_path / "adapter")
    assert torch.equal(adapted(IDS).logits, Capture.seen["policy"])
    assert main([str(checkpoint), str(tmp_path / "teacher"), "--part", "teacher"]) == 2
    assert "--part must be one that the checkpoint holds, ['policy']" in capsys.readouterr().err


@pytest.mark.slow
@torch.no_grad()
def test_the_critic_is_a_token_classifier(tmp_path: Path) -> None:
    checkpoint = trained("ppo", tmp_path / "run")
    assert main([str(checkpoint), str(tmp_path / "critic"), "--part", "critic"]) == 0
    model = AutoModelForTokenClassification.from_pretrained(tmp_path / "critic")
    values = model(IDS).logits[0, :-1, 0]
    torch.testing.assert_close(values, Capture.seen["critic"][0], rtol=1e-5, atol=1e-6)
    assert values.abs().max() > 0


def test_what_is_no_checkpoint_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(tmp_path / "none"), str(tmp_path / "out")]) == 2
    assert "is not a checkpoint folder" in capsys.readouterr().err
