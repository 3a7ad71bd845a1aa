"""The command line of `holdfast run`: torchrun's own, with a few additions.

torchrun's parser is taken from torch itself, so that its flags, their spellings, their `PET_*` variables and
their defaults are those of the installed torch. Only these differ: an absent `--max-restarts` means the
setting launch.max_restarts, `--shutdown-timeout` is another spelling of launch.stop_grace, and one node
without rendezvous flags gets a free port instead of a fixed one.
"""

from __future__ import annotations

import os
import shutil
import uuid
from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from pathlib import Path

import msgspec
from torch.distributed.argparse_util import check_env
from torch.distributed.run import get_args_parser, parse_min_max_nnodes

from holdfast.config import Effective, Settings, load, parse_assignments
from holdfast.control.limits import check_timeouts
from holdfast.errors import ConfigError, UsageError

BACKENDS = ("c10d", "static")

_FT_FLAGS = {
    "cfg_path": "--config FILE",
    "rank_termination_signal": "launch.stop_grace (SIGTERM first, SIGKILL after the grace)",
    "workers_stop_timeout": "launch.stop_grace",
    "restart_policy": "launch.max_restarts (any failed rank restarts the whole group)",
    "max_no_progress_cycles": "launch.max_restarts (counted without progress)",
    "log_level": "the LOGLEVEL variable",
}
"""Flags of nvidia-resiliency-ext's ft_launcher, without their `--ft-`, and what takes their place here."""


_FT_SETTINGS = {
    "initial_rank_heartbeat_timeout": "monitor.initial_rank_heartbeat_timeout",
    "rank_heartbeat_timeout": "monitor.rank_heartbeat_timeout",
    "rank_section_timeouts": "monitor.rank_section_timeouts",
    "rank_out_of_section_timeout": "monitor.rank_out_of_section_timeout",
}
"""Those that mean the same as a setting here, and are taken for it."""


class Options(msgspec.Struct, frozen=True):
    args: Namespace
    """As torch.distributed.run.config_from_args takes it."""
    effective: Effective
    config: str
    """Absolute path of the settings file, or empty."""
    command_line: dict[str, str]

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
    for name, key in _FT_SETTINGS.items():
        spellings = (f"--ft-{name.replace('_', '-')}", f"--ft-{name}")
        ours.add_argument(*spellings, dest=f"ft_{name}", metavar="VALUE", help=f"setting {key}")
    # Shown first: what is ours is what a user of torchrun does not know yet.
    parser._action_groups.remove(ours)
    parser._action_groups.insert(0, ours)
    for action in parser._actions:
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
        if flag.replace("_", "-").startswith("--ft-"):
            raise UsageError(_refuse_ft_flag(flag))
    if unknown:
        parser.error(f"unrecognized arguments: {' '.join(unknown)}")
    command_line = parse_assignments(args.set)
    for name, key in _FT_SETTINGS.items():
        if getattr(args, f"ft_{name}") is not None:
            command_line.setdefault(key, getattr(args, f"ft_{name}"))
    if args.run_dir is not None:
        command_line["run.dir"] = args.run_dir
    if args.max_restarts is not None:
        command_line["launch.max_restarts"] = str(args.max_restarts)
    if getattr(args, "shutdown_timeout", None) is not None:
        command_line["launch.stop_grace"] = str(args.shutdown_timeout)
    config = str(Path(args.config).absolute()) if args.config else ""
    effective = load(config or None, command_line=command_line)
    check_timeouts(effective, os.environ)
    settings = effective.settings
    args.max_restarts = settings.launch.max_restarts
    _choose_rendezvous(parser, args)
    _check_nodes(args, settings)
    _check_script(args)
    return Options(args, effective, config, command_line)


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


def _refuse_ft_flag(flag: str) -> str:
    name = flag.partition("=")[0]
    ours = _FT_FLAGS.get(name[len("--ft-") :].replace("-", "_"))
    instead = f"use {ours}" if ours else "there is no such setting here; `holdfast config show` lists all"
    return f"{name} is a flag of ft_launcher; {instead}"


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
