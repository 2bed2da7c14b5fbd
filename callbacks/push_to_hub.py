"""PushToHub: uploads the policy, and checkpoints, to a hub while a run goes on."""

import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L

from lit_rl.callbacks.checkpoint_resume import say
from lit_rl.checkpoint.background import Background
from lit_rl.checkpoint.codec import read_tree
from lit_rl.checkpoint.folder import read_manifest
from lit_rl.errors import ConfigError
from lit_rl.export import load_weights, run_configuration
from lit_rl.hooks import RLCallback
from lit_rl.hub import push
from lit_rl.model_card import write_card
from lit_rl.models.roles import save_hf
from lit_rl.models.weights import shared_copy

STRATEGIES = ("end", "every_save", "checkpoint", "all_checkpoints")


class PushToHub(RLCallback):
    """Uploads after saving: the model with its tokenizer and card at the root of the repository.

    The weights are those of the checkpoint, also when it is saved asynchronously; uploads run beside
    training, on rank 0. Which hub: `HF_ENDPOINT`. Source: Transformers `push_to_hub`, `hub_strategy`.

    Args:
        run_dir: its last name is the repository's, unless one is given.
        hub_model_id: `name` or `owner/name` of the repository; None = after `run_dir`.
        hub_token: secret; None = `HF_TOKEN` or the stored login. Never logged.
        hub_private_repo: whether a new repository is private; None = the owner's default.
        hub_revision: branch; None = main.
        hub_strategy: "end" the model that the run ends with, "every_save" also that of each checkpoint,
            "checkpoint" also the newest checkpoint itself as `last-checkpoint`, "all_checkpoints" each of
            them under its name.
        hub_always_push: wait for the upload before and push; false = leave a push out while one is running,
            but for the last.
        blocking: training ends when the last upload has, and a failed one is an error; false = it goes on
            beside what follows, and an error is only printed.
        commit_message: of the last upload; earlier ones name their step.
        model_card_kwargs: metadata of the card, such as license, language, tags.

    Raises:
        ConfigError: unknown strategy.
    """

    def __init__(
        self,
        run_dir: str,
        *,
        hub_model_id: str | None = None,
        hub_token: str | None = None,
        hub_private_repo: bool | None = None,
        hub_revision: str | None = None,
        hub_strategy: str = "every_save",
        hub_always_push: bool = False,
        blocking: bool = True,
        commit_message: str = "End of training",
        model_card_kwargs: dict[str, Any] | None = None,
    ) -> None:
        if hub_strategy not in STRATEGIES:
            raise ConfigError(
                f"callbacks.push_to_hub.hub_strategy must be one of {STRATEGIES} (found {hub_strategy!r})."
            )
        self.repo = hub_model_id or Path(run_dir).resolve().name
        self.hub_strategy, self.hub_always_push = hub_strategy, hub_always_push
        self.blocking, self.commit_message = blocking, commit_message
        self.model_card_kwargs = dict(model_card_kwargs or {})
        self._to = {"token": hub_token, "private": hub_private_repo, "revision": hub_revision}
        self._background = Background("push_to_hub")
        self._last: Path | None = None

    def on_checkpoint_saved(
        self, trainer: L.Trainer, pl_module: L.LightningModule, *, folder: Path, step: int, **payload: Any
    ) -> None:
        if not trainer.is_global_zero or not folder.name.startswith("step_"):
            return
        self._last = folder
        self._background.check()
        if self.hub_strategy != "end" and (self.hub_always_push or self._background.is_idle):
            self._start(pl_module, folder, f"Step {step}", from_file=True)

    def on_fit_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Push what the run ends with, which may be the best weights instead of the last."""
        if self._last is not None:
            self._start(pl_module, self._last, self.commit_message, from_file=False)
            if self.blocking:
                self._background.wait()

    def _start(self, pl_module: Any, folder: Path, message: str, *, from_file: bool) -> None:
        """Upload beside training; what the thread needs of the module and the folder is taken now."""
        policy, chat = shared_copy(pl_module.policy), pl_module.chat
        work = tempfile.TemporaryDirectory(prefix=".push-", dir=folder.parent)
        kept = Path(work.name) / folder.name
        shutil.copytree(folder, kept, copy_function=os.link)  # the checkpoint may be removed meanwhile

        def job() -> None:
            with work:
                if from_file:
                    load_weights(policy, read_tree(kept, "model"), "policy.")
                self._push(policy, chat, kept, Path(work.name) / "model", message)

        self._background.start(job if self.blocking else lambda: _reported(job))

    def _push(self, policy: Any, chat: Any, folder: Path, out: Path, message: str) -> None:
        manifest = read_manifest(folder)
        assert manifest is not None
        save_hf(policy, chat.tokenizer, out, processor=chat.processor)
        text, config = run_configuration(folder)
        write_card(
            out,
            part="policy",
            manifest=manifest,
            state=read_tree(folder, "state"),
            config_text=text,
            config=config,
            fields=self.model_card_kwargs,
        )
        name = push(out, self.repo, message=message, **self._to)  # type: ignore[arg-type]
        places = {"checkpoint": "last-checkpoint", "all_checkpoints": folder.name}
        if (place := places.get(self.hub_strategy)) is not None:
            push(folder, self.repo, message=message, path_in_repo=place, **self._to)  # type: ignore[arg-type]
        say(f"Pushed {folder.name} to {name}.")

    def on_exception(
        self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException
    ) -> None:
        _reported(self._background.close)

    def teardown(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        if stage == "fit" and self.blocking:
            self._background.close()


def _reported(job: Callable[[], None]) -> None:
    """Do it; an error is printed, since another one comes first or nobody waits."""
    try:
        job()
    except Exception as error:
        say(f"Not pushed: {error}")
