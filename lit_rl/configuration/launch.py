"""From the command line to a job: check first, then let Hydra run it, and end with the right exit code."""

import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import yaml
from hydra._internal.utils import get_args_parser
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import OmegaConf

from lit_rl.configuration.compose import Source, overridden, sweep_jobs
from lit_rl.configuration.job import Job, checked, quoted
from lit_rl.configuration.launched import handed_over
from lit_rl.configuration.report import print_user_error, user_error
from lit_rl.configuration.secrets import masked

USER_ERROR = 2
_JOBS: dict[tuple[str, ...], Job] = {}


def launch(main: Callable[[], Any], conf: Path) -> int:
    """Check what the command line asks for, then run it.

    Args:
        main: the function that `hydra.main` made.
        conf: the folder of yaml files.

    Returns:
        Exit code: 0, or 2 for a user's error, which is printed without traceback. Other errors are raised.
    """
    arguments = handed_over()
    if arguments is not None:
        sys.argv[1:] = arguments
    os.environ["HYDRA_FULL_ERROR"] = "1"  # errors come to us as they are
    if get_args_parser().parse_args().help:
        print(help_page(conf))
        return 0
    try:
        check_command_line(conf)
        main()
    except Exception as error:
        mistake = user_error(error)
        if mistake is None:
            raise
        print_user_error(mistake, full_trace=_wants_trace(sys.argv[1:]))
        return USER_ERROR
    return 0


def help_page(conf: Path) -> str:
    """The template of `train.yaml` with the groups that are for users, each one's default first."""
    config = yaml.safe_load((conf / "train.yaml").read_text())
    defaults: dict[str, Any] = {}
    for entry in config["defaults"]:
        defaults.update(entry if isinstance(entry, dict) else {})
    chosen_by_others = ("preset", "critic")
    folders = sorted(
        path.name for path in conf.iterdir() if any(path.glob("*.yaml")) and path.name not in chosen_by_others
    )
    lines = []
    for group in dict.fromkeys([*(name for name in defaults if name in folders), *folders]):
        default = defaults.get(group)
        first = [default] if isinstance(default, str) else default or []
        others = sorted(path.stem for path in (conf / group).glob("*.yaml") if path.stem not in first)
        lines.append(f"  {group:<12} {', '.join([*first, *others])}")
    return config["hydra"]["help"]["template"].replace("$APP_CONFIG_GROUPS", "\n".join(lines))


def run_current(run: Callable[[Job], Any], conf: Path) -> Any:
    """Run Hydra's current job; a user's error is printed here, before Hydra adds its own lines to it.

    Args:
        run: what to do with the job.
        conf: the folder of yaml files.
    """
    try:
        return run(current_job(conf))
    except Exception as error:
        mistake = user_error(error)
        if mistake is None:
            raise
        print_user_error(mistake, full_trace=_wants_trace(sys.argv[1:]))
        raise SystemExit(USER_ERROR) from None


def check_command_line(conf: Path) -> None:
    """Check the job, or every job of a sweep, before Hydra starts. Writes nothing.

    Raises:
        ConfigError: a job is wrong.
    """
    args = get_args_parser().parse_args()
    if args.help or args.hydra_help or args.cfg or args.info or args.shell_completion:
        return
    source, flags = _source(conf, args), _flags(args)
    overrides = [*_search_path(args), *args.overrides]
    if not (args.multirun or overridden(overrides, "hydra.mode") == "MULTIRUN"):
        job = checked(source, overrides, flags)
        _JOBS[tuple(args.overrides)] = job
    elif overridden(overrides, "hydra/sweeper") in (None, "basic"):
        for job_overrides in sweep_jobs(source, overrides):
            checked(source, job_overrides, flags)


def current_job(conf: Path) -> Job:
    """The job that Hydra is running; in a sweep its folder is `run_dir` and its number.

    Raises:
        ConfigError: it is wrong, which the command line's check has not seen.
    """
    hydra = HydraConfig.get()
    overrides = list(OmegaConf.to_container(hydra.overrides.task))  # type: ignore[arg-type]
    args = get_args_parser().parse_args()
    known = _JOBS.pop(tuple(overrides), None)
    if known is not None:
        return known
    searched = [text for text in hydra.overrides.hydra if text.startswith("hydra.searchpath")]
    overrides = [*(searched or _search_path(args)), *overrides]
    if hydra.mode == RunMode.MULTIRUN:
        _mask_sweep_file(Path(hydra.sweep.dir))
        print(f"Job {hydra.job.num}:", *(_masked_override(text) for text in overrides), flush=True)
        overrides.append(f"run_dir={quoted(str(Path(hydra.sweep.dir) / hydra.sweep.subdir))}")
    return checked(_source(conf, args), overrides, _flags(args))


def _source(conf: Path, args: Any) -> Source:
    return Source(conf.resolve(), (args.config_name or "train").removesuffix(".yaml"))


def _flags(args: Any) -> list[str]:
    return ["--config-name", args.config_name] if args.config_name else []


def _search_path(args: Any) -> list[str]:
    """Hydra's --config-dir as an override, which the compose API and further ranks understand."""
    if not args.config_dir:
        return []
    return [f"hydra.searchpath=[{quoted('file://' + os.path.abspath(args.config_dir))}]"]


def _mask_sweep_file(folder: Path) -> None:
    """Hydra keeps the sweep's command line in multirun.yaml as it is: mask the secrets in it."""
    path = folder / "multirun.yaml"
    if not path.exists():
        return
    config = OmegaConf.load(path)
    plain: Any = OmegaConf.to_container(config, resolve=False)
    overrides = plain.get("hydra", {}).get("overrides", {})
    overrides["task"] = [_masked_override(text) for text in overrides.get("task", [])]
    plain.get("hydra", {}).get("job", {}).pop("override_dirname", None)
    path.write_text(OmegaConf.to_yaml(OmegaConf.create(masked("", plain))))


def _masked_override(text: str) -> str:
    key, equals, value = text.partition("=")
    return f"{key}{equals}{masked(key.lstrip('+'), value)}" if equals else text


def _wants_trace(arguments: Sequence[str]) -> bool:
    return (overridden(arguments, "full_trace") or "").lower() in ("true", "1", "yes", "on")
