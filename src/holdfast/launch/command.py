"""`holdfast run` from the command line to its exit code.

Does what torch.distributed.launcher.api.launch_agent does for torchrun, with an agent of our own: build the
rendezvous, the worker spec and the agent, run it, and end with a documented code and a short summary.

The command line is torchrun's own, with a few additions. Its parser is taken from torch itself, so that its
flags, their spellings, their `PET_*` variables and their defaults are those of the installed torch. Only
these differ: an absent `--max-restarts` means the setting launch.max_restarts, `--shutdown-timeout` (and
TORCH_ELASTIC_SHUTDOWN_TIMEOUT) is another spelling of launch.stop_grace, one node without rendezvous flags
gets a free port instead of a fixed one, and a key of `--rdzv-conf` that nobody would read is refused.
ft_launcher's names for things that exist here are accepted.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import shutil
import sys
import tempfile
import uuid
from argparse import SUPPRESS, ArgumentParser, Namespace
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
from torch.distributed import DistError
from torch.distributed.argparse_util import check_env
from torch.distributed.elastic.agent.server.api import WorkerSpec
from torch.distributed.elastic.metrics import initialize_metrics
from torch.distributed.elastic.metrics.api import MetricsConfig
from torch.distributed.elastic.rendezvous import (
    RendezvousClosedError,
    RendezvousError,
    RendezvousHandler,
    RendezvousParameters,
    RendezvousTimeoutError,
)
from torch.distributed.elastic.rendezvous import registry as rendezvous_registry
from torch.distributed.launcher.api import LaunchConfig
from torch.distributed.run import config_from_args, get_args_parser, parse_min_max_nnodes

from holdfast.base import FORMAT_VARIABLE as LOG_FORMAT
from holdfast.base import (
    PATIENCE,
    Aside,
    Bounded,
    LogFormat,
    get_addr_and_port,
    is_table_full,
    log_format,
    read_regular,
)
from holdfast.checkpoint.choose import highest_committed_step
from holdfast.cluster import current_job, devices_here, node_name
from holdfast.config import FILE_LIMIT, FT_LAUNCHER, Effective, Settings, load, parse_assignments
from holdfast.errors import NOT_ALERTED, ConfigError, ControlError, ExitCode, HoldfastError, UsageError
from holdfast.health import last_words
from holdfast.journal import JournalWriter
from holdfast.journal.events import Warned
from holdfast.launch.agent import HoldfastAgent
from holdfast.launch.alert import Alerts, first_to_tell
from holdfast.launch.context import Interrupted, LaunchContext, LaunchSignals, Scheduler, keep_launch
from holdfast.launch.gate import Gate
from holdfast.launch.incident import EndedByStorageError, find_trouble, least_space, shared_places
from holdfast.launch.monitor import Learner, Monitor
from holdfast.launch.nodes import (
    Endpoints,
    Leadership,
    MeetingHandler,
    StopRun,
    StoreLostError,
    parse_endpoints,
    usable_devices,
    why_unfit,
)
from holdfast.launch.terminal import SavesTold, next_step, say
from holdfast.launch.workers import RUN_PATH, OrphanKeeper, Orphans, PreloadedParent, Starter
from holdfast.record import (
    LAUNCHER_ENDED,
    VARIABLE,
    ControlDirectory,
    attempt_numbers,
    check_timeouts,
    digest_of,
    limits_of,
    newest_launches,
    run_secret,
)
from holdfast.restart import entry
from holdfast.stop import refuse_stop_file

# --- from the command line to the exit code -----------------------------------------------------------------

BACKENDS = ("c10d", "static")

SHUTDOWN_VARIABLE = "TORCH_ELASTIC_SHUTDOWN_TIMEOUT"

_RDZV_READ = {
    "c10d": ("join_timeout", "last_call_timeout", "read_timeout", "is_host"),
    "static": ("timeout",),
}
"""The keys of `--rdzv-conf` that are read, by backend."""
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
"""Parameters of nvidia-resiliency-ext's ft_launcher, and the settings here that mean the same."""


class Options(msgspec.Struct, frozen=True):
    args: Namespace
    """As torch.distributed.run.config_from_args expects it."""
    effective: Effective
    config: str
    """Absolute path of the settings file, or empty."""
    command_line: dict[str, str]
    notes: list[str] = []
    """What was given but has no effect here, to be said once."""

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
        help="format of Holdfast's own lines: text, or json, one object a line (else HOLDFAST_LOG_FORMAT)",
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
    # Shown first: our own flags are what a user of torchrun does not know yet.
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

    A script is named by its path, relative to the directory if it lies inside: the directory may be mounted
    elsewhere the next time.
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
    """The script's position; what follows it belongs to the script.

    argparse would also look at what follows: it refuses a script's `--log` because it could mean --log-dir or
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
            "Correct or unset it; here it means the setting launch.stop_grace"
        )
    return given.strip()


# --- ft_launcher's words ------------------------------------------------------------------------------------


def _answer_ft_flag(flag: str) -> str:
    """What takes the place of a flag of ft_launcher; empty if the flag is not one of ft_launcher's."""
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
    """The settings that a YAML file of ft_launcher gives, and which of its keys have no effect here."""
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
        raise UsageError(f"--ft-cfg-path {path}: it has no section `fault_tolerance`")
    found: dict[str, str] = {}
    left: list[str] = []
    for name, value in section.items():
        if name not in _FT_SETTINGS:
            left.append(f"{name} ({_instead(str(name))})")
        elif isinstance(value, Mapping):
            found[_FT_SETTINGS[name]] = ",".join(f"{one}:{_seconds(value[one])}" for one in value)
        else:
            found[_FT_SETTINGS[name]] = _seconds(value)
    notes = [f"these keys of {path} have no effect here: {', '.join(left)}"] if left else []
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
    """Refuse keys that nobody would read; torch accepts them silently, and what was meant does not happen."""
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


MOST_TOLD = 100
"""How many messages for the journal are kept while its file system does not answer."""


def main(argv: Sequence[str], parent: PreloadedParent | None = None) -> int:
    """Run a script and return the exit code. Errors raised on purpose reach the caller.

    `parent`: a preloaded parent that was started ahead of time; the caller ends it.
    """
    options = parse(argv)
    os.environ[LOG_FORMAT] = options.args.log_format or log_format(os.environ)  # the workers inherit it
    for note in options.notes:
        say(f"note: {note}")
    _refuse_anothers_run(options, argv)
    refuse_stop_file(options.settings.stop_file())
    private = tempfile.TemporaryDirectory(prefix="holdfast_", ignore_cleanup_errors=True)
    with _scratch_logs(options) as scratch, private as own:
        config, command = _configure(options)
        for name in (VARIABLE, entry.VARIABLE):  # an outer launch's: our workers are not its workers
            os.environ.pop(name, None)
        signals = LaunchSignals(getattr(config, "signals_to_handle", "SIGTERM,SIGINT,SIGHUP,SIGQUIT"))
        signals.install()
        starter = Starter(
            modules=options.args.preload,
            parent=parent,
            enabled=not options.args.no_preload,
            notes=Path(own),
            say=say,
        )
        starter.expect(command, numa=getattr(config, "numa_options", None) is not None)
        control, created = ControlDirectory.open_or_create(Path(options.settings.run.dir))
        control.set_room_aside()
        tell = _Teller(control, node_name(options.settings.launch.node_name))
        monitor = Monitor(Path(own), limits_of(options.effective), tell)
        ttl, handover = options.settings.control.lease_ttl, options.settings.handover()
        leadership = Leadership(control, ttl, handover, tell)
        context = LaunchContext(
            control=control,
            created=created,
            settings=options.settings,
            config=options.config,
            command_line=options.command_line,
            restarts_chosen=options.effective.sources["launch.max_restarts"] != "default",
            launch=uuid.uuid4().hex[:12],
            min_nodes=config.min_nodes,
            max_nodes=config.max_nodes,
            started_with=digest_of(
                options.args.training_script,
                options.args.training_script_args,
                options.settings,
                module=options.args.module,
            ),
            alerts=Alerts(
                options.settings.launch, run=control.run_id, run_dir=control.path, warn=tell.quietly
            ),
            signals=signals,
            scheduler=Scheduler(control, options.settings, current_job()),
            gate=Gate(options.settings, control, say=say, alone=config.max_nodes == 1),
            leadership=leadership,
            orphans=Orphans(options.settings.checkpoint.timeout),
            keeper=OrphanKeeper(options.settings.checkpoint.timeout, [*scratch, own]),
            starter=starter,
            monitor=monitor,
            learner=Learner(control, tell, command),
            saves=SavesTold(
                control.journal,
                lambda text: say(text, attempt=context.saves.attempt),
                enabled=options.settings.launch.print_saves,
            ),
        )
        _keep_together(context)
        keep_launch(context, argv, config.nproc_per_node, tell)
        try:
            code = _live(config, command, context, tell)
            if code == ExitCode.OK:
                context.saves.finished(str(control.path))
            return code
        finally:
            context.saves.close()
            context.alerts.close()
            starter.close()
            monitor.close()
            leadership.release()
            context.scheduler.part(say)


def _live(config: LaunchConfig, command: Sequence[str], context: LaunchContext, tell: _Teller) -> int:
    """From the first meeting to the exit code, which an alert reports."""
    itself = True
    """Whether this node found out about the end for itself; other nodes may find out too, unknown to it."""
    try:
        code = _run(config, command, context)
        why, itself = context.last_words, False
    except Interrupted:
        code, why, itself = int(ExitCode.STOPPED), "a signal asked for it", False
    except StopRun as stop:
        then = stop.then or next_step(stop.code)
        say(f"stopped: {stop}\n  next: {then}" if stop.code else str(stop))
        code, why, itself = stop.code, str(stop), stop.code == ExitCode.CONTROL_UNUSABLE
    except HoldfastError as error:
        if not (isinstance(error, StoreLostError) and context.last_words):  # then its account is out already
            say(f"{'stopped' if isinstance(error, EndedByStorageError) else 'error'}: {error}")
        code, why = tell.ended(int(error.exit_code), str(error)), str(error)
    except (RendezvousError, DistError) as error:
        code, why = _explain_rendezvous(error, config, context)
        tell.ended(code, why)
    except Exception as error:
        if is_table_full(error):  # the caller says so, in one line; an alert may need a process, too
            with contextlib.suppress(RuntimeError, OSError):
                why = f"no more processes or threads can be started: {error}"
                _alert(context, config, int(ExitCode.NO_CAPACITY), why, itself=True)
        else:
            _alert(context, config, int(ExitCode.FAILED), f"a defect in the launcher: {error!r}", itself=True)
        raise
    _alert(context, config, code, why, itself=itself)
    return code


def _alert(context: LaunchContext, config: LaunchConfig, code: int, why: str, *, itself: bool) -> None:
    """Alert from the node that led; if each node finds out about the end for itself, from the first one."""
    if code in NOT_ALERTED:
        return
    if context.max_nodes > 1:
        folder = context.control.path / "alerts"
        if not (first_to_tell(folder, f"{config.run_id} {code}") if itself else context.leads):
            return
    newest = Bounded(lambda: max(attempt_numbers(context.control), default=0), "newest-attempt")
    attempt = 0
    if newest.ended(PATIENCE):
        with contextlib.suppress(ControlError, OSError):
            attempt = newest.result()
    context.alerts.ended(code, why.partition("\n")[0], attempt)


def _refuse_anothers_run(options: Options, argv: Sequence[str]) -> None:
    """The default run directory belongs to one script only; nobody chose to share it."""
    path = Path(options.settings.run.dir)
    if options.effective.sources["run.dir"] != "default" or not (path / "run.json").exists():
        return
    before = next(reversed(newest_launches(ControlDirectory.open(path))), None)
    theirs = script_of(before.argv, before.directory) if before is not None else ""
    ours = script_of(argv, str(Path.cwd()))
    if before is None or not theirs or theirs == ours:
        return
    raise UsageError(
        f"{path.absolute()}, the default run directory here, holds the run of {theirs}: its checkpoints, "
        f"restarts and exclusions are not those of {ours}. Give this script a directory of its own, such as "
        f"--run-dir {path}-{Path(options.args.training_script).stem}; or name this directory, if the script "
        f"is to go on there: --run-dir {path}"
    )


def _keep_together(context: LaunchContext) -> None:
    """From now on, nothing that this process starts can escape it, or outlive it for more than a while."""
    if not context.orphans.become_reaper():
        say("warning: this kernel does not let the launcher adopt what workers leave behind")
    try:
        context.orphans.own(context.keeper.start())
    except OSError as error:
        say(f"warning: no keeper could be started ({error}); a killed launcher may leave processes behind")


class _Teller:
    """Says what a person should know about the launcher itself: on the terminal, and in the journal."""

    def __init__(self, control: ControlDirectory, node: str) -> None:
        self._control = control
        self._node = node
        self._aside = Aside("telling", MOST_TOLD)
        self._unsaid: deque[str] = deque(maxlen=MOST_TOLD)

    def __call__(self, text: str) -> None:
        say(f"warning: {text}")
        self.quietly(text)

    def ended(self, code: int, why: str) -> int:
        """No decision reports this end, which concerns only this node as far as this node knows."""
        self.quietly(f"{LAUNCHER_ENDED}{self._node} ended with code {code}: {why}")
        return code

    def quietly(self, text: str) -> None:
        self._aside.do(lambda: self._journal(text))

    def _journal(self, text: str) -> None:
        """What cannot be written now is written with the next message."""
        self._unsaid.append(text)
        try:
            attempt = max(attempt_numbers(self._control), default=0)
        except ControlError:
            return
        with contextlib.closing(JournalWriter(self._control.journal, "launcher", attempt)) as journal:
            while self._unsaid:
                journal.write(Warned(message=self._unsaid[0]))
                if journal.lost:
                    return
                self._unsaid.popleft()


def _configure(options: Options) -> tuple[LaunchConfig, list[str]]:
    """torch's launch configuration, and the command of a worker."""
    try:
        config, entrypoint, arguments = config_from_args(options.args)
    except (ValueError, AssertionError, RuntimeError, OSError) as error:
        raise UsageError(str(error)) from error
    if callable(entrypoint):  # --run-path
        return config, [sys.executable, "-u", RUN_PATH, *arguments]
    return config, [entrypoint, *arguments]


def _run(config: LaunchConfig, command: Sequence[str], context: LaunchContext) -> int:
    parameters = RendezvousParameters(
        backend=config.rdzv_backend,
        endpoint=config.rdzv_endpoint,
        run_id=config.run_id,
        min_nodes=config.min_nodes,
        max_nodes=config.max_nodes,
        local_addr=config.local_addr,
        **config.rdzv_configs,
    )
    try:
        master_addr, master_port = get_addr_and_port(parameters)
    except ValueError as error:
        raise UsageError(str(error)) from error
    if getattr(config, "signals_to_handle", None):
        os.environ["TORCHELASTIC_SIGNALS_TO_HANDLE"] = config.signals_to_handle
    with context.signals.interruptible():
        handler = _make_handler(parameters, config, context)
    program, *arguments = command
    wanted: dict[str, Any] = {
        "role": config.role,
        "local_world_size": config.nproc_per_node,
        "entrypoint": program,
        "args": tuple(arguments),
        "rdzv_handler": handler,
        "max_restarts": config.max_restarts,
        "monitor_interval": config.monitor_interval,
        "master_addr": master_addr,
        "master_port": master_port,
        "local_addr": config.local_addr,
    }
    known = {field.name for field in dataclasses.fields(WorkerSpec)}
    for name in (  # present in some releases of torch only
        "event_log_handler",
        "numa_options",
        "duplicate_stdout_filters",
        "duplicate_stderr_filters",
        "virtual_local_rank",
    ):
        if name in known and hasattr(config, name):
            wanted[name] = getattr(config, name)
    agent = HoldfastAgent(
        WorkerSpec(**wanted),
        logs_specs=config.logs_specs,
        start_method=config.start_method,
        log_line_prefix_template=config.log_line_prefix_template,
        context=context,
    )
    initialize_metrics(MetricsConfig(config.metrics_cfg))
    try:
        agent.run()
        return agent.exit_code
    finally:
        # A node that was told to stop leaves the rendezvous open: the others may go on without it.
        if context.signals.received is None:
            with contextlib.suppress(RendezvousError, DistError):
                handler.shutdown()


def _make_handler(
    parameters: RendezvousParameters, config: LaunchConfig, context: LaunchContext
) -> RendezvousHandler:
    """The meeting of the nodes; with a static rendezvous, whose ranks are fixed, torch's."""
    if parameters.backend == "static":
        return rendezvous_registry.get_rendezvous_handler(parameters)
    launch = context.settings.launch
    name = node_name(launch.node_name)
    endpoints = Endpoints(
        parse_endpoints(parameters.endpoint),
        is_host=parameters.get_as_bool("is_host"),
        timeout=float(parameters.get_as_int("read_timeout", 60) or 60),
        alone=parameters.max_nodes == 1,
    )
    return MeetingHandler(
        endpoints,
        parameters.run_id,
        run=context.control.run_id,
        secret=run_secret(context.control),
        node=name,
        slots=config.nproc_per_node,
        role=config.role,
        min_nodes=parameters.min_nodes,
        max_nodes=parameters.max_nodes,
        join_timeout=float(parameters.get_as_int("join_timeout", 600) or 600),
        last_call=float(parameters.get_as_int("last_call_timeout", 30) or 0),
        node_timeout=launch.node_timeout,
        devices=lambda: usable_devices(devices_here(), name, context.exclusions()),
        unfit=lambda: (
            why_unfit(devices_here(), name, config.nproc_per_node, context.exclusions())
            or context.gate.why_unfit()
        ),
        say=say,
    )


def _explain_rendezvous(error: Exception, config: LaunchConfig, context: LaunchContext) -> tuple[int, str]:
    """The code to end with, and the reason, which is printed here."""
    if isinstance(error, RendezvousTimeoutError) and (told := _storage_in_the_way(context)):
        say(f"stopped: {told}")
        return int(ExitCode.STORAGE_FAILED), told
    if isinstance(error, RendezvousTimeoutError):
        code, what = (
            ExitCode.NO_CAPACITY,
            f"fewer than {config.min_nodes} nodes joined the run {config.run_id} in time: {error}",
        )
    elif isinstance(error, RendezvousClosedError):
        code, what = ExitCode.FAILED, f"another node has ended the run {config.run_id}"
    else:
        code = ExitCode.DECISION_TIMEOUT
        what = f"the nodes of the run {config.run_id} cannot reach each other any more: {error}"
    say(f"stopped: {what}\n  next: {next_step(code)}")
    return int(code), what


def _storage_in_the_way(context: LaunchContext) -> str:
    """What keeps every node out, if that is the run's storage and not a lack of nodes; else empty."""
    settings, control = context.settings, context.control
    look = Bounded(lambda: find_trouble(shared_places(settings), least_space(settings)), "storage")
    trouble = look.result() if look.ended(PATIENCE) else None
    if trouble is None:
        return ""
    saved = Bounded(lambda: highest_committed_step(settings.checkpoint_root(), control), "saved-steps")
    return last_words(trouble, saved=saved.result() if saved.ended(PATIENCE) else None, last=None)


@contextlib.contextmanager
def _scratch_logs(options: Options) -> Iterator[list[str]]:
    """Give torch a log directory and remove it again, unless somebody asked for the logs in it.

    Yields what is to be removed.

    Error files are kept in the run's directory; torchrun would leave an empty directory behind for each
    launch.
    """
    args = options.args
    if args.log_dir is not None or args.redirects != "0" or args.tee != "0":
        yield []
        return
    args.log_dir = tempfile.mkdtemp(prefix="holdfast_")
    try:
        yield [args.log_dir]
    finally:
        shutil.rmtree(args.log_dir, ignore_errors=True)
