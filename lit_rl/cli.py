"""`lit-rl fit|validate|test|predict`: Lightning's CLI over train.py's classes, yaml files and checks.

    lit-rl fit --config algo/grpo.yaml --model.num_generations 4 --trainer.max_steps 10
    lit-rl fit --config mine.yaml --print_config
    lit-rl fit algo=sdpo optim.lr=1e-5

A word with dashes is in LightningCLI's spelling (`--model` is the algorithm, `--model.policy` the language
model), one without is in that of train.py. Both become one configuration, which is checked as train.py does,
and then handed to `lightning.pytorch.cli.LightningCLI`, which builds it.
"""

import importlib
import importlib.util
import pkgutil
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from lit_rl.configuration.class_paths import our_key, to_class_paths
from lit_rl.configuration.compose import Source
from lit_rl.configuration.job import Job, checked, quoted
from lit_rl.configuration.launched import handed_over, process_rank
from lit_rl.configuration.report import print_user_error, user_error
from lit_rl.configuration.words import HEADER, choice_of, file_words, literal
from lit_rl.errors import ConfigError

USER_ERROR = 2
TASKS = {"fit": "fit", "validate": "validate", "test": "test", "predict": "generate"}
USAGE = """usage: lit-rl {fit,validate,test,predict} [--config FILE ...] [--KEY VALUE ...] [key=value ...]

  --config FILE      a yaml file, or a shipped one such as algo/grpo.yaml; several, later ones win
  --model NAME       the algorithm: GRPO, SDPO, ..., or a class path; its arguments are --model.ARGUMENT
  --data NAME        the datamodule; --data.ARGUMENT
  --trainer.ARGUMENT of lightning.Trainer
  --ckpt_path PATH   start from this checkpoint
  --print_config     print the whole configuration and stop; --config reads it again
  --help             after a subcommand: every argument; --model.help GRPO those of one class"""


def main(arguments: Sequence[str] | None = None) -> int:
    """The console script. Exit code 0, or 2 for a user's error, which is printed without traceback."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    try:
        given = handed_over()
        if given is not None:
            run(checked(shipped(), given))
            return 0
        if not words or words[0] not in TASKS:
            return _usage(words)
        if any(word.split("=")[0].endswith("help") for word in words[1:]):
            return _help(words)
        is_print = "--print_config" in words
        overrides = to_overrides(words[1:])
        if words[0] != "fit":
            overrides.append(f"task={TASKS[words[0]]}")
        job = checked(shipped(), overrides)
        if is_print:
            print(printed(job), end="")
        else:
            run(job)
    except Exception as error:
        mistake = user_error(error)
        if mistake is None:
            raise
        print_user_error(mistake, full_trace="full_trace=true" in words)
        return USER_ERROR
    return 0


def run(job: Job) -> dict[str, float]:
    """Let LightningCLI build the parts, then do the task as train.py does; returns the last metrics."""
    from lit_rl import tasks
    from lit_rl.configuration.memory_page import memory_page
    from lit_rl.configuration.plan import plan

    tree = job.tree
    tasks.prepare_process(
        seed=tree["seed"],
        log_level=tree["log_level"],
        float32_matmul_precision=tree["float32_matmul_precision"],
        rank=process_rank(),
    )
    cli = lightning_cli(to_class_paths(tree))
    rows = cli.datamodule.num_rows()
    total_steps = cli.datamodule.total_steps(tree["trainer"]["max_steps"])
    if process_rank() == 0:
        print(plan(job.settings, rows, total_steps), flush=True)
    if tree["plan"]:
        if process_rank() == 0:
            print(memory_page(job.settings, tree, cli.datamodule))
        return {}
    with job.started():
        return tasks.run(
            tree["task"],
            cli.trainer,
            cli.model,
            cli.datamodule,
            total_steps=total_steps,
            steps_per_data_epoch=rows["train"] / tree["data"]["train_batch_size"],
            val_before_train=tree["val_before_train"],
        )


def lightning_cli(args: Any, name: str = "lit-rl") -> Any:
    """LightningCLI over our classes: any algorithm, any datamodule, optimizers as their arguments.

    Args:
        args: a document as `to_class_paths` makes it, or words.
        name: shown in its help.
    """
    from lightning.pytorch.cli import LightningCLI

    from lit_rl.algorithms.base import RLModule
    from lit_rl.data.base import RowDataModule

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "LightningCLI's args parameter")
        return LightningCLI(
            RLModule,
            RowDataModule,
            run=False,
            args=args,
            subclass_mode_model=True,
            subclass_mode_data=True,
            auto_configure_optimizers=False,
            save_config_callback=None,
            parser_kwargs={"prog": name},
        )


def shipped() -> Source:
    """The yaml files that come with the package. They lie beside it, so that nothing of them is imported."""
    spec = importlib.util.find_spec("lit_rl.conf")
    assert spec is not None and spec.submodule_search_locations
    return Source(Path(next(iter(spec.submodule_search_locations))).resolve())


def printed(job: Job) -> str:
    """The configuration in LightningCLI's form, with the choices in a comment on top."""
    choices = [f"{group}={choice}" for group, choice in job.composition.choices.items() if "@" not in group]
    lists = ("callbacks", "logger")
    words = [word for word in choices if word.split("=")[0] not in ("preset", "experiment", "debug", *lists)]
    words += [word for word in job.arguments if word.lstrip("+").partition("=")[0].split(".")[0] in lists]
    root = {k: v for k, v in job.tree.items() if not isinstance(v, dict) and k not in ("seed", "run_dir")}
    words += [f"{key}={literal(value)}" for key, value in root.items() if job.settings.is_set(key)]
    header = f"{HEADER}{yaml.safe_dump(words, default_flow_style=True, width=10**6).strip()}\n"
    return header + yaml.safe_dump(to_class_paths(job.tree), sort_keys=False, allow_unicode=True)


def to_overrides(words: Sequence[str]) -> list[str]:
    """The words of the command line as train.py spells them.

    Raises:
        ConfigError: a word is no key, or a key has no value.
    """
    out: list[str] = []
    rest = [word for word in words if word != "--print_config"]
    while rest:
        word = rest.pop(0)
        if not word.startswith("--"):
            if "=" not in word:
                raise ConfigError(f"{word!r} is neither --key value nor key=value.")
            out.append(word)
            continue
        key, equals, text = word[2:].partition("=")
        if not equals:
            if not rest:
                raise ConfigError(f"--{key} needs a value.")
            text = rest.pop(0)
        out += _override(key, text, out)
    return out


def _override(key: str, text: str, before: list[str]) -> list[str]:
    source = shipped()
    match key:
        case "config" | "c":
            return file_words(text, source, before)
        case "ckpt_path":
            path = quoted(text)
            return ["checkpoint.resume_mode=resume_path", f"checkpoint.resume_from_path={path}"]
        case "model" | "data" | "model.class_path" | "data.class_path":
            return [f"{our_key(key.split('.')[0])}={_choice(our_key(key.split('.')[0]), text, source)}"]
    return [f"{our_key(key)}={literal(yaml.safe_load(text))}"]


def _choice(group: str, name: str, source: Source) -> str:
    """The shipped choice for a class path or a class name; the name itself where there is none."""
    if "." in name:
        return choice_of(group, name, source) or name
    for file in sorted(
        (source.folder / group).glob("*.yaml"), key=lambda f: (f.stem != name.lower(), f.stem)
    ):
        if f".{name}\n" in file.read_text():
            return file.stem
    return name


def _usage(words: list[str]) -> int:
    print(USAGE)
    is_asked = not words or words[0] in ("-h", "--help")
    if not is_asked:
        print(f"\n{words[0]!r} is not one of {', '.join(TASKS)}.", file=sys.stderr)
    return 0 if is_asked else USER_ERROR


def _help(words: list[str]) -> int:
    """LightningCLI's own help, from signatures and docstrings."""
    import lit_rl.algorithms
    import lit_rl.data

    for package in (lit_rl.algorithms, lit_rl.data):  # so that short class names are known
        for module in pkgutil.iter_modules(package.__path__, f"{package.__name__}."):
            importlib.import_module(module.name)
    try:
        lightning_cli(words[1:], name=f"lit-rl {words[0]}")
    except SystemExit as stop:
        return int(stop.code or 0)
    return 0


if __name__ == "__main__":
    sys.exit(main())
