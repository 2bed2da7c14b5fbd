"""PushToHub against a stand-in for the hub on this machine, since a test must not upload anywhere else."""

import io
import json

import huggingface_hub
import lightning as L
import pytest
import torch
from safetensors.torch import load
from stand_in_hub import StandInHub
from transformers import AutoModelForCausalLM, AutoTokenizer

from lit_rl.callbacks.checkpoint_contents import CheckpointContents
from lit_rl.callbacks.push_to_hub import PushToHub
from lit_rl.errors import ConfigError, StorageError
from lit_rl.hub import push
from lit_rl.models.load import load_policy

CONFIG = "model: {path: embedded}\ndata: {train_files: rows.parquet, val_files: null}\nexperiment_name: m\n"


@pytest.fixture
def hub(monkeypatch):
    stand_in = StandInHub()
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", stand_in.url)
    monkeypatch.setattr(huggingface_hub.hf_api, "ENDPOINT", stand_in.url, raising=False)
    yield stand_in
    stand_in.close()


@pytest.fixture(scope="module")
def tiny_policy():
    return load_policy()


@pytest.fixture
def module(fake_module, tiny_policy, tmp_path):
    """The fake module around the embedded model, one of whose weights moves by 1 each step."""
    (tmp_path / "config.yaml").write_text(CONFIG)

    class WithPolicy(fake_module):
        def __init__(self):
            super().__init__()
            self.policy = tiny_policy
            self.policy.requires_grad_(False)
            self.scale.requires_grad_(True).data.fill_(0)
            self.tokenizer = AutoTokenizer.from_pretrained(tiny_policy.config.name_or_path)
            self.chat = type("Chat", (), {"tokenizer": self.tokenizer, "processor": None})

        @property
        def scale(self):
            return self.policy.model.norm.weight

        def training_step(self, batch, batch_idx):
            optimizer = self.optimizers()
            self.manual_backward(-self.scale.sum())
            optimizer.step()
            optimizer.zero_grad()
            self.optimizer_steps += 1

        def configure_optimizers(self):
            return torch.optim.SGD([self.scale], lr=1.0)

    built = WithPolicy()
    built.policy.in_features = 3  # the width of the fake loader's batches
    built.teacher = None
    return built


def scale_in(content: bytes) -> float:
    return load(content)["model.norm.weight"][0].item()


def run(train, module, tmp_path, *others, steps=2, **settings):
    """Train with a save at each step; every save is pushed unless told otherwise."""
    pushing = PushToHub(str(tmp_path / "mine"), **{"hub_always_push": True, **settings})
    train(module, [CheckpointContents(str(tmp_path / "c"), save_freq=1), pushing, *others], steps=steps)
    return pushing


def test_each_save_is_a_commit_with_the_weights_of_that_step(train, module, tmp_path, hub):
    run(train, module, tmp_path, hub_token="hf_secret", hub_private_repo=True)
    assert [c[2] for c in hub.commits] == ["Step 1", "Step 2", "End of training"]
    assert {c[:2] for c in hub.commits} == {("someone/mine", "main")}
    asked = hub.created[0]  # clients before huggingface_hub 2.4 say private, later ones visibility
    assert asked.get("private") is True or asked.get("visibility") == "private"
    assert "Bearer hf_secret" in hub.tokens
    files = hub.files["someone/mine", "main"]
    assert scale_in(files["model.safetensors"]) == 2.0
    assert {"config.json", "README.md", "tokenizer.json", "generation_config.json"} <= files.keys()
    saved = json.loads((tmp_path / "c/step_00000002/manifest.json").read_text())
    assert "hf_secret" not in json.dumps(saved)


def test_what_was_pushed_is_read_by_transformers(train, module, tmp_path, hub):
    run(train, module, tmp_path, steps=1, hub_strategy="end")
    out = tmp_path / "pulled"
    out.mkdir()
    for name, content in hub.files["someone/mine", "main"].items():
        (out / name).write_bytes(content)
    assert [c[2] for c in hub.commits] == ["End of training"]
    ids = torch.tensor([[5, 6, 7]])
    with torch.no_grad():
        pulled = AutoModelForCausalLM.from_pretrained(out)(ids).logits
        assert torch.equal(pulled, module.policy.eval()(ids).logits)


@pytest.mark.parametrize(
    ("strategy", "places"),
    [
        ("every_save", set()),
        ("checkpoint", {"last-checkpoint"}),
        ("all_checkpoints", {"step_00000001", "step_00000002"}),
    ],
)
def test_checkpoints_are_uploaded_as_the_strategy_says(train, module, tmp_path, hub, strategy, places):
    run(train, module, tmp_path, hub_strategy=strategy, hub_revision="dev", hub_model_id="org/name")
    files = hub.files["org/name", "dev"]
    assert {name.partition("/")[0] for name in files if name.endswith("manifest.json")} == places
    if strategy == "checkpoint":
        assert json.loads(files["last-checkpoint/manifest.json"])["step"] == 2


def test_the_card_carries_what_is_given(train, module, tmp_path, hub):
    settings = {"model_card_kwargs": {"license": "mit", "tags": ["mine"]}, "commit_message": "Done"}
    run(train, module, tmp_path, steps=1, **settings)
    card = hub.files["someone/mine", "main"]["README.md"].decode()
    assert "license: mit" in card and "- mine" in card and hub.commits[-1][2] == "Done"


def test_a_hub_that_refuses_ends_the_run_when_it_waits_for_the_upload(train, module, tmp_path, hub):
    hub.refuse = True
    with pytest.raises(StorageError, match="cannot be pushed to the hub"):
        run(train, module, tmp_path, hub_strategy="end")


def test_and_is_only_reported_when_it_does_not(train, module, tmp_path, hub, capsys):
    hub.refuse = True
    pushing = run(train, module, tmp_path, hub_strategy="end", blocking=False)
    pushing._background.close()
    assert "Not pushed: 'mine' cannot be pushed to the hub" in capsys.readouterr().out


@pytest.mark.parametrize("always", [True, False])
def test_a_push_waits_for_the_one_before_or_is_left_out(train, module, tmp_path, hub, always):
    hub.hold.clear()

    class LetGo(L.Callback):
        def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
            if trainer.global_step == (1 if always else 2):
                hub.hold.set()

    run(train, module, tmp_path, LetGo(), steps=3, hub_always_push=always)
    pushed = [commit[2] for commit in hub.commits]
    assert pushed[0] == "Step 1" and pushed[-1] == "End of training"
    assert ("Step 2" in pushed) == always


def test_an_unknown_strategy_is_refused():
    with pytest.raises(ConfigError, match=r"callbacks\.push_to_hub\.hub_strategy must be one of"):
        PushToHub("run", hub_strategy="sometimes")


def test_a_folder_can_be_pushed_by_itself(tmp_path, hub):
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "README.md").write_text("---\nlicense: mit\n---\n")
    assert push(tmp_path / "model", "mine") == "someone/mine"
    assert io.BytesIO(hub.files["someone/mine", "main"]["README.md"]).read().startswith(b"---")
