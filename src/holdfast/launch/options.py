"""The command line of `holdfast run`: torchrun's own, with a few additions.

torchrun's parser is taken from torch itself, so that its flags, their spellings, their `PET_*` variables and
their defaults are those of the installed torch. Only these differ: an absent `--max-restarts` means the
setting launch.max_restarts, `--shutdown-timeout` (and TORCH_ELASTIC_SHUTDOWN_TIMEOUT) is another spelling of
launch.stop_grace, one node without rendezvous flags gets a free port instead of a fixed one, and a key of
`--rdzv-conf` that nobody would read is refused. What ft_launcher calls a thing that exists here is taken.
"""

from __future__ import annotations

import os
import shutil
import uuid
from argparse import SUPPRESS, ArgumentParser, Namespace
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
from torch.distributed.argparse_util import check_env
from torch.distributed.run import get_args_parser, parse_min_max_nnodes

from holdfast.base import LogFormat, read_regular
from holdfast.config import FILE_LIMIT, FT_LAUNCHER, Effective, Settings, load, parse_assignments
from holdfast.errors import ConfigError, UsageError
from holdfast.record import check_timeouts

BACKENDS = ("c10d", "static")

SHUTDOWN_VARIABLE = "TORCH_ELASTIC_SHUTDOWN_TIMEOUT"

_RDZV_READ = {
    "c10d": ("join_timeout", "last_call_timeout", "read_timeout", "is_host"),
    "static": ("timeout",),
}
"""Keys of `--rdzv-conf` that are read, by backend."""
_RDZV_REPLACED = {
    "timeout": "use join_timeout",
    "close_timeout": "nothing waits for it",
    "heartbeat_timeout": "use launch.node_timeout",
    "keep_alive_interval": "use launch.node_timeout",
    "keep_alive_max_attempt": "use launch.node_timeout",
}
"""Keys of torch's c10d rendezvous that have no effect here, and what takes their place."""
_BOOLEANS = ("1", "true", "t", "yes", "y", "0", "false", "f", "no", "n")
"""As torch reads them, in upper or lower case."""

_FT_SETTINGS = {
    "initial_rank_heartbeat_timeout": "monitor.initial_rank_heartbeat_timeout",
    "rank_heartbeat_timeout": "monitor.rank_heartbeat_timeout",
    "rank_section_timeouts": "monitor.rank_section_timeouts",
    "rank_out_of_section_timeout": "monitor.rank_out_of_section_timeout",
}
"""Parameters of nvidia-resiliency-ext's ft_launcher that mean the same as a setting here: taken for it."""


class Options(msgspec.Struct, frozen=True):
    args: Namespace
    """As torch.distributed.run.config_from_args takes it."""
    effective: Effective
    config: str
    """Absolute path of the settings file, or empty."""
    command_line: dict[str, str]
    notes: list[str] = []
    """What was given and has no effect here, to be told once."""

    @property
    def settings(self) -> Settings:
        return self.effective.settings


def make_parser() -> ArgumentParser:
    parser = get_args_parser()
    parser.prog = "holdfast run"
    parser.description = (
        "Starts a training script on this node like torchrun, restarts it after failures within a budget "
        "that outlives the launch, and says why. All other flags are torchrun's."
    )
    ours = parser.add_argument_group("holdfast")
    ours.add_argument("--run-dir", metavar="DIR", help="control directory of the run (setting run.dir)")
    ours.add_argument("--config", metavar="FILE", help="settings file (TOML)")
    ours.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", help="a setting, e.g. launch.stop_grace=60"
    )
    ours.add_argument(
        "--preload", action="append", default=[], metavar="MODULE",
        help="import this module once, before the workers are forked; repeatable",
    )  # fmt: skip
    ours.add_argument(
        "--no-preload", "--no_preload", action=check_env,
        help="start every worker as a new interpreter instead of forking it from one that has imported torch",
    )  # fmt: skip
    ours.add_argument(
        "--log-format", choices=[str(one) for one in LogFormat], metavar="FORMAT",
        help="how Holdfast writes its own lines: text, or json, an object a line (else HOLDFAST_LOG_FORMAT)",
    )  # fmt: skip
    for name, key in _FT_SETTINGS.items():
        dashed = name.replace("_", "-")
        for spellings, told in (
            ([f"--ft-{dashed}", f"--ft-{name}"], f"setting {key}; None means no limit"),
            ([f"--ft-param-{dashed}", f"--ft-param-{name}", f"--ft_param_{name}"], SUPPRESS),
        ):
            ours.add_argument(*spellings, dest=f"ft_{name}", metavar="VALUE", help=told)
    ours.add_argument(
        "--ft-cfg-path", "--ft-cfg_path", "--fault-tol-cfg-path", dest="ft_cfg_path", metavar="FILE",
        help="take those settings from the `fault_tolerance` section of a YAML file of ft_launcher",
    )  # fmt: skip
    # Shown first: what is ours is what a user of torchrun does not know yet.
    parser._action_groups.remove(ours)
    parser._action_groups.insert(0, ours)
    for action in list(parser._actions):
        if action.dest == "print_completion":  # torchrun's, from torch 2.15 on: it completes `torchrun` alone
            parser._remove_action(action)
            for spelling in action.option_strings:
                del parser._option_string_actions[spelling]
        if action.dest == "max_restarts":
            if "PET_MAX_RESTARTS" not in os.environ:
                action.default = None  # torchrun's 0 must not hide the setting
            action.help = "Restarts without progress, over all launches (setting launch.max_restarts)."
    return parser


def parse(argv: Sequence[str]) -> Options:
    """Read the command line and the settings. Exits with 2 or raises an error with that code."""
    parser = make_parser()
    end = _find_script(parser, argv) + 1
    args, unknown = parser.parse_known_args(list(argv[:end]))
    args.training_script_args = list(argv[end:])
    for flag in unknown:
        if answer := _answer_ft_flag(flag):
            raise UsageError(answer)
    if unknown:
        parser.error(f"unrecognized arguments: {' '.join(unknown)}")
    command_line = parse_assignments(args.set)
    for name, key in _FT_SETTINGS.items():
        if getattr(args, f"ft_{name}") is not None:
            command_line.setdefault(key, _without_none(getattr(args, f"ft_{name}")))
    notes: list[str] = []
    if args.ft_cfg_path is not None:
        found, notes = _read_ft_file(Path(args.ft_cfg_path))
        command_line = {**found, **command_line}
    if args.run_dir is not None:
        command_line["run.dir"] = args.run_dir
    if args.max_restarts is not None:
        command_line["launch.max_restarts"] = str(args.max_restarts)
    if getattr(args, "shutdown_timeout", None) is not None:
        command_line["launch.stop_grace"] = str(args.shutdown_timeout)
    config = str(Path(args.config).absolute()) if args.config else ""
    effective = load(config or None, command_line=command_line)
    if effective.sources["launch.stop_grace"] == "default" and SHUTDOWN_VARIABLE in os.environ:
        command_line["launch.stop_grace"] = _shutdown_timeout(os.environ[SHUTDOWN_VARIABLE])
        effective = load(config or None, command_line=command_line)
    check_timeouts(effective, os.environ)
    settings = effective.settings
    args.max_restarts = settings.launch.max_restarts
    _choose_rendezvous(parser, args)
    notes += _check_rdzv_conf(args.rdzv_backend, args.rdzv_conf)
    _check_nodes(args, settings)
    _check_script(args)
    return Options(args, effective, config, command_line, notes)


def script_of(argv: Sequence[str], directory: str) -> str:
    """What a command line, given in this directory, runs; empty if that is not clear.

    A script by its path, from there if it lies inside: the directory may be mounted elsewhere the next time.
    """
    parser = make_parser()
    place = _find_script(parser, argv)
    if place >= len(argv):
        return ""
    try:
        args, _ = parser.parse_known_args(list(argv[: place + 1]))
    except SystemExit:  # a command line of another release
        return ""
    if args.module or args.no_python:
        return f"{'-m' if args.module else 'program'} {args.training_script}"
    path, here = Path(directory, args.training_script).resolve(), Path(directory).resolve()
    return str(path.relative_to(here) if path.is_relative_to(here) else path)


def _find_script(parser: ArgumentParser, argv: Sequence[str]) -> int:
    """Where the script is; what follows is its own.

    argparse also looks at what follows: it refuses a script's `--log` because it could mean --log-dir or
    --logs-specs, and each flag added here would make that worse.
    """
    position = 0
    while position < len(argv) and argv[position].startswith("-") and argv[position] != "-":
        name, equals, _ = argv[position].partition("=")
        meant = [
            action
            for action in parser._actions
            if name in action.option_strings
            or (name.startswith("--") and any(known.startswith(name) for known in action.option_strings))
        ]
        takes_value = bool(meant) and meant[0].nargs != 0 and not equals
        position += 2 if takes_value else 1
    return position


def _shutdown_timeout(given: str) -> str:
    if not given.strip().isdecimal():
        raise UsageError(
            f"{SHUTDOWN_VARIABLE}={given!r:.80} is not a number of whole seconds, as torchrun reads it. "
            "Correct or unset it; here it is the setting launch.stop_grace"
        )
    return given.strip()


# --- ft_launcher's words ------------------------------------------------------------------------------------


def _answer_ft_flag(flag: str) -> str:
    """What takes the place of a flag of ft_launcher; empty if it is none."""
    given = flag.partition("=")[0]
    name = given.removeprefix("--").replace("-", "_")
    for prefix in ("ft_param_", "ft_"):
        if name.startswith(prefix):
            name = name.removeprefix(prefix)
            break
    else:
        if name == "ignore_missing_fault_tol_cfg":
            name = "ignore_missing_cfg"
        if name not in ("restart_policy", "workers_stop_timeout", "term_timeout", "ignore_missing_cfg"):
            return ""
    return f"{given} is a flag of ft_launcher; {_instead(name)}"


def _instead(name: str) -> str:
    ours = FT_LAUNCHER.get(name)
    return f"use {ours}" if ours else "there is no such setting here; `holdfast config show` lists all"


def _without_none(text: str) -> str:
    """ft_launcher writes None (or null, or nothing) for no limit, also of a section; here it is 0."""
    parts = []
    for part in text.split(","):
        name, colon, seconds = part.rpartition(":")
        parts.append(f"{name}{colon}0" if seconds.strip().lower() in ("none", "null", "") else part)
    return ",".join(parts)


def _read_ft_file(path: Path) -> tuple[dict[str, str], list[str]]:
    """The settings that a YAML file of ft_launcher gives, and what of it has no effect here."""
    try:
        import yaml  # type: ignore[import-untyped]
    except ImportError:
        raise UsageError(
            f"--ft-cfg-path {path}: a file in YAML is read with PyYAML, which is not installed. Run "
            "`pip install pyyaml`, or write the four timeouts into a TOML file for --config: "
            + ", ".join(_FT_SETTINGS.values())
        ) from None
    try:
        text = read_regular(Path(os.path.realpath(path)), FILE_LIMIT).decode("utf-8-sig")
        section = _find_ft_section(yaml.safe_load(text))
    except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:
        raise UsageError(f"--ft-cfg-path {path} cannot be read: {' '.join(str(error).split())}") from error
    if section is None:
        raise UsageError(f"--ft-cfg-path {path}: there is no section `fault_tolerance` in it")
    found: dict[str, str] = {}
    left: list[str] = []
    for name, value in section.items():
        if name not in _FT_SETTINGS:
            left.append(f"{name} ({_instead(str(name))})")
        elif isinstance(value, Mapping):
            found[_FT_SETTINGS[name]] = ",".join(f"{one}:{_seconds(value[one])}" for one in value)
        else:
            found[_FT_SETTINGS[name]] = _seconds(value)
    notes = [f"of {path} these have no effect here: {', '.join(left)}"] if left else []
    return found, notes


def _find_ft_section(tree: Any) -> Mapping[Any, Any] | None:
    """The first section of that name, wherever it stands, as ft_launcher looks for it."""
    if isinstance(tree, Mapping):
        if isinstance(found := tree.get("fault_tolerance"), Mapping):
            return found
        tree = list(tree.values())
    for one in tree if isinstance(tree, list) else ():
        if (inner := _find_ft_section(one)) is not None:
            return inner
    return None


def _seconds(value: object) -> str:
    return "0" if value is None else _without_none(str(value))


# --- torchrun's ---------------------------------------------------------------------------------------------


def _check_rdzv_conf(backend: str, given: str) -> list[str]:
    """Refuse what nobody would read; torch takes it silently, and what was meant does not happen."""
    notes = []
    for part in given.split(",") if given.strip() else ():
        key, equals, value = (piece.strip() for piece in part.partition("="))
        if backend == "c10d" and (key, value.lower()) == ("store_type", "tcp"):
            continue
        if backend == "c10d" and key in _RDZV_REPLACED:
            notes.append(f"--rdzv-conf {key} has no effect here: {_RDZV_REPLACED[key]}")
            continue
        if not equals or key not in _RDZV_READ[backend]:
            raise UsageError(
                f"--rdzv-conf {part.strip()!r:.120}: the {backend} rendezvous reads "
                f"{', '.join(f'{name}=…' for name in _RDZV_READ[backend])} only"
            )
        right = value.lower() in _BOOLEANS if key == "is_host" else value.isdecimal()
        if not right:
            what = "true or false" if key == "is_host" else "a number of whole seconds"
            raise UsageError(f"--rdzv-conf {key}={value!r:.80} is not {what}")
    return notes


def _choose_rendezvous(parser: ArgumentParser, args: Namespace) -> None:
    try:
        _, max_nodes = parse_min_max_nnodes(args.nnodes)
    except (ValueError, RuntimeError) as error:
        raise UsageError(f"--nnodes {args.nnodes}: {error}. Write N or MIN:MAX") from error
    port_given = "PET_MASTER_PORT" in os.environ or args.master_port != parser.get_default("master_port")
    alone = args.rdzv_backend == "static" and not args.rdzv_endpoint and not port_given and max_nodes == 1
    if args.standalone or alone:
        args.rdzv_backend, args.rdzv_endpoint, args.rdzv_id = "c10d", "localhost:0", str(uuid.uuid4())
    if args.rdzv_backend not in BACKENDS:
        raise UsageError(
            f"--rdzv-backend {args.rdzv_backend}: only {' and '.join(BACKENDS)} are supported, because "
            "decisions need a c10d store. Use --rdzv-backend c10d"
        )
    if args.master_port is None:
        args.master_port = 29500


def _check_nodes(args: Namespace, settings: Settings) -> None:
    """A node that is cut off must end its workers before another group may take the run over."""
    timeout, lease = settings.launch.node_timeout, settings.control.lease_ttl
    if parse_min_max_nnodes(args.nnodes)[1] > 1 and timeout >= lease:
        raise ConfigError(
            f"launch.node_timeout = {timeout:g} with control.lease_ttl = {lease:g}: a node that is cut off "
            "would still train when another group takes the run over; the right order is "
            "launch.node_timeout < control.lease_ttl"
        )


def _check_script(args: Namespace) -> None:
    """Refuse what cannot start before anything is created; no restart could cure it."""
    script = args.training_script
    if args.no_python and not args.run_path:
        if shutil.which(script) is None:
            raise UsageError(f"cannot execute {script}: no such program, or not executable")
    elif not args.module and not Path(script).exists():
        raise UsageError(f"there is no script {script} in {Path.cwd()}")
