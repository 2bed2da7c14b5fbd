"""A model out of a checkpoint, as a folder for transformers, vLLM or a hub.

    python -m lit_rl.export outputs/mine/checkpoints/step_00000240 exported
    python -m lit_rl.export outputs/mine/checkpoints/best exported --part teacher
    python -m lit_rl.export s3://bucket/runs/mine/step_00000240 adapter --adapter

The folder holds weights (safetensors), configuration, tokenizer with chat template, and a model card with the
run's configuration, data, command and curves. Needs no GPU, and nothing of the run but the checkpoint.
"""

import argparse
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import yaml
from torch import Tensor, nn

from lit_rl.checkpoint import verify
from lit_rl.checkpoint.codec import read_tree
from lit_rl.checkpoint.remote import RemoteFolder
from lit_rl.configuration.build import built
from lit_rl.configuration.report import print_user_error
from lit_rl.configuration.tree import expanded
from lit_rl.data.chat import load_tokenizer
from lit_rl.data.image_chat import load_processor
from lit_rl.errors import ConfigError, DataError, StorageError
from lit_rl.model_card import write_card
from lit_rl.models.export import save_hf, token_classifier
from lit_rl.models.families import is_vision_language
from lit_rl.models.weights import base_of, dense_copy, has_adapters

PARTS = ("policy", "teacher", "ref", "critic")


def export(
    checkpoint: Path,
    out: Path,
    *,
    part: str = "policy",
    adapter: bool = False,
    model_path: str | None = None,
    card_fields: dict[str, Any] | None = None,
) -> None:
    """Write one model of a checkpoint.

    Args:
        checkpoint: a folder.
        out: the folder to write; may exist if it is empty.
        part: policy, teacher, ref or critic.
        adapter: the LoRA adapter alone, instead of adding it to the weights.
        model_path: where the initial weights are now; None = where the run had them.
        card_fields: more metadata of the card.

    Raises:
        DataError: the checkpoint is damaged.
        ConfigError: it holds no such part, or lacks the run's configuration.
    """
    if out.exists() and any(out.iterdir()):
        raise ConfigError(f"OUT must be an empty folder, or none (found {str(out)!r}).")
    manifest = verify(checkpoint)
    text, config = run_configuration(checkpoint)
    if model_path is not None:
        config["model"]["path"] = model_path
    if "model" not in manifest["contents"]:
        raise ConfigError(f"{checkpoint} holds no model (it holds {manifest['contents']}).")
    weights, state = read_tree(checkpoint, "model"), read_tree(checkpoint, "state")
    if part == "critic":
        model = critic_of(config, weights)
    else:
        policy = built(config["model"])
        load_weights(policy, weights, "policy.")
        model = part_of(policy, part, state, manifest)
    if adapter and not has_adapters(model):
        raise ConfigError(f"--adapter needs a {part} with LoRA adapters; this one has none.")
    source = config["data"]["tokenizer"]
    trust = config["data"]["trust_remote_code"]
    tokenizer, processor = load_tokenizer(source, trust_remote_code=trust), None
    if is_vision_language(base_of(model).config):
        processor = load_processor(source, trust_remote_code=trust)
    save_hf(model, tokenizer, out, merge=not adapter, processor=processor)
    write_card(
        out,
        part=part,
        manifest=manifest,
        state=state,
        config_text=text,
        config=config,
        fields=card_fields,
    )


def run_configuration(checkpoint: Path) -> tuple[str, dict[str, Any]]:
    """The run's configuration in a checkpoint, as text and with links replaced.

    Raises:
        ConfigError: the checkpoint was written without one, by a script.
    """
    file = checkpoint / "config.yaml"
    if not file.is_file():
        raise ConfigError(f"{checkpoint} holds no config.yaml, so that its model cannot be built again.")
    text = file.read_text("utf-8")
    return text, expanded(yaml.safe_load(text))


@torch.no_grad()
def load_weights(model: nn.Module, weights: Mapping[str, Tensor], prefix: str) -> None:
    """Put a checkpoint's weights into a model; what the file leaves out stays as its path has it.

    Args:
        model: built with the run's settings.
        weights: "model" of the checkpoint.
        prefix: what the names of this model's weights begin with; others are another network's.

    Raises:
        DataError: a weight is of another model, or one that moved is missing.
    """
    own = {name.removeprefix(prefix): t for name, t in weights.items() if name.startswith(prefix)}
    missing, unexpected = model.load_state_dict(own, strict=False)
    moving = {name for name, p in model.named_parameters() if p.requires_grad}  # tied weights once
    lost = set(missing) & moving
    if unexpected or lost:
        raise DataError(
            f"The checkpoint is of another model: {sorted(unexpected)[:3]} only there, {sorted(lost)[:3]} "
            f"only in {type(model).__name__}."
        )


def critic_of(config: dict[str, Any], weights: Mapping[str, Tensor]) -> Any:
    """The critic as a token classifier.

    Raises:
        ConfigError: the run had none.
    """
    if "critic" not in config["algo"]:
        raise ConfigError("--part=critic needs a checkpoint of algo=ppo; this one's algorithm has no critic.")
    critic = built(config["algo"]["critic"]["model"])
    load_weights(critic, weights, "critic.")
    return token_classifier(critic)


@torch.no_grad()
def part_of(policy: nn.Module, part: str, state: dict[str, Any], manifest: dict[str, Any]) -> nn.Module:
    """The policy, or the teacher or reference that has moved away from it.

    Raises:
        ConfigError: the checkpoint holds none.
    """
    if part == "policy":
        return policy
    roles = {name: role for name, role in state["lit_rl"]["roles"].items() if role}
    if part not in roles:
        raise ConfigError(
            f"--part must be one that the checkpoint holds, {['policy', *roles]} (found {part!r}); one that "
            "never moves is the model in model.path."
        )
    model = dense_copy(policy)
    mine = dict(model.named_parameters())
    for name, tensor in roles[part].items():
        mine[name].copy_(tensor)
    return model


def fetched(path: str, folder: str) -> Path:
    """The checkpoint at a path; one at a URL is brought into a folder."""
    if "://" not in path:
        return Path(path)
    above, _, name = path.rstrip("/").rpartition("/")
    return RemoteFolder(above, key="CKPT").fetch(name, Path(folder))


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; 0, or 2 for a user's error."""
    parser = argparse.ArgumentParser(prog="python -m lit_rl.export", description=__doc__.splitlines()[0])
    parser.add_argument("checkpoint", metavar="CKPT", help="a checkpoint's folder or URL")
    parser.add_argument("out", metavar="OUT", type=Path, help="the folder to write")
    parser.add_argument("--part", choices=PARTS, default="policy", help="which model (default: policy)")
    parser.add_argument("--adapter", action="store_true", help="the LoRA adapter alone, not merged")
    parser.add_argument("--model", metavar="PATH", help="where the initial weights are now, if they moved")
    parser.add_argument("--push", metavar="REPO", help="also upload the folder to this hub repository")
    parser.add_argument("--private", action="store_true", help="with --push: make a new repository private")
    given = parser.parse_args(arguments)
    try:
        with tempfile.TemporaryDirectory() as folder:
            checkpoint = fetched(given.checkpoint, folder)
            export(checkpoint, given.out, part=given.part, adapter=given.adapter, model_path=given.model)
        print(f"Wrote {given.out}.")
        if given.push:
            from lit_rl.hub import push

            print(f"Pushed to {push(given.out, given.push, private=given.private or None)}.")
    except (ConfigError, DataError, StorageError) as error:
        print_user_error(error, full_trace=False)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
