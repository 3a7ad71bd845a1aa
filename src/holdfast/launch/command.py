"""`holdfast run` from the command line to its exit code.

What torch.distributed.launcher.api.launch_agent does for torchrun, with an agent of our own: build the
rendezvous, the worker spec and the agent, run it, and end with a documented code and a short summary.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import shutil
import sys
import tempfile
import uuid
from collections import deque
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from torch.distributed import DistError
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
from torch.distributed.run import config_from_args

from holdfast.base import FORMAT_VARIABLE as LOG_FORMAT
from holdfast.base import PATIENCE, Aside, Bounded, get_addr_and_port, is_table_full, log_format
from holdfast.checkpoint.choose import highest_committed_step
from holdfast.cluster import current_job, devices_here, node_name
from holdfast.errors import NOT_ALERTED, ControlError, ExitCode, HoldfastError, UsageError
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
from holdfast.launch.options import Options, parse, script_of
from holdfast.launch.terminal import SavesTold, next_step, say
from holdfast.launch.workers import RUN_PATH, Keeper, Orphans, PreloadedParent, Starter
from holdfast.record import (
    LAUNCHER_ENDED,
    VARIABLE,
    ControlDirectory,
    attempt_numbers,
    digest_of,
    limits_of,
    newest_launches,
    run_secret,
)
from holdfast.restart import entry
from holdfast.stop import refuse_stop_file

MOST_TOLD = 100
"""Words for the journal that are kept while its file system does not answer."""


def main(argv: Sequence[str], parent: PreloadedParent | None = None) -> int:
    """Run a script and return the exit code. Errors raised on purpose go to the caller.

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
        for name in (VARIABLE, entry.VARIABLE):  # of an outer launch: our workers are not its workers
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
            keeper=Keeper(options.settings.checkpoint.timeout, [*scratch, own]),
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
    """From the first meeting to the exit code, which is told to whoever wants to be alerted."""
    itself = True
    """Whether this node found the end out for itself; others that find it out too are not told of it."""
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
        if not (isinstance(error, StoreLostError) and context.last_words):  # else its account is told already
            say(f"{'stopped' if isinstance(error, EndedByStorageError) else 'error'}: {error}")
        code, why = tell.ended(int(error.exit_code), str(error)), str(error)
    except (RendezvousError, DistError) as error:
        code, why = _explain_rendezvous(error, config, context)
        tell.ended(code, why)
    except Exception as error:
        if is_table_full(error):  # told by the caller, in one line; to alert somebody may need a process, too
            with contextlib.suppress(RuntimeError, OSError):
                why = f"no more processes or threads can be started: {error}"
                _alert(context, config, int(ExitCode.NO_CAPACITY), why, itself=True)
        else:
            _alert(context, config, int(ExitCode.FAILED), f"a defect of the launcher: {error!r}", itself=True)
        raise
    _alert(context, config, code, why, itself=itself)
    return code


def _alert(context: LaunchContext, config: LaunchConfig, code: int, why: str, *, itself: bool) -> None:
    """By the node that led; where each finds the end out for itself, by the first of them."""
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
    """The default run directory is one script's only; nobody chose to share it."""
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
        f"restarts and exclusions are not those of {ours}. Give this one a directory of its own, such as "
        f"--run-dir {path}-{Path(options.args.training_script).stem}; or this one by name, if it is to go on "
        f"there: --run-dir {path}"
    )


def _keep_together(context: LaunchContext) -> None:
    """From now on nothing that this process starts can get away from it, nor outlive it but for a while."""
    if not context.orphans.become_reaper():
        say("warning: this kernel does not let the launcher adopt what workers leave behind")
    try:
        context.orphans.own(context.keeper.start())
    except OSError as error:
        say(f"warning: no keeper could be started ({error}); a killed launcher may leave processes behind")


class _Teller:
    """Tells what a person should know of the launcher itself: on the terminal, and in the journal."""

    def __init__(self, control: ControlDirectory, node: str) -> None:
        self._control = control
        self._node = node
        self._aside = Aside("telling", MOST_TOLD)
        self._unsaid: deque[str] = deque(maxlen=MOST_TOLD)

    def __call__(self, text: str) -> None:
        say(f"warning: {text}")
        self.quietly(text)

    def ended(self, code: int, why: str) -> int:
        """No decision tells of this end, which concerns this node only as far as it knows."""
        self.quietly(f"{LAUNCHER_ENDED}{self._node} ended with code {code}: {why}")
        return code

    def quietly(self, text: str) -> None:
        self._aside.do(lambda: self._journal(text))

    def _journal(self, text: str) -> None:
        """What cannot be written now is written with the next word."""
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
    """The code to end with, and why, which is said here."""
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
    """What keeps every node out, where that is the run's storage and not a lack of nodes; else empty."""
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

    Error files are kept in the run's directory; torchrun would leave an empty directory behind per launch.
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
