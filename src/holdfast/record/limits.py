"""Time limits: the learned ones, as kept; those of a rank, from the settings; and whether all of them fit."""

from __future__ import annotations

import math
import re
import time
from collections.abc import Mapping
from pathlib import Path

import msgspec

from holdfast.base import make_dirs, read_regular, replace_atomic
from holdfast.config import ALERT_URL, SECTION_TIMEOUTS, Effective, parse_section_timeouts
from holdfast.errors import ConfigError, ControlError
from holdfast.policy import (
    STEP,
    Learned,
    Limits,
    RestartTimeouts,
    Timeouts,
    Value,
    apply,
    contradictions,
    longest_of,
    out_of_order,
)
from holdfast.record.directory import MAX_RECORD_BYTES, ControlDirectory, list_names

# Learned time limits, kept in the control directory: one file per node, replaced in one step.
#
# ```
# timeouts/<node>.json         what the node's agent learned last, and in which attempt
# hello.json                   that ranks of this command say hello to their agent, and how late
# ```
# They only help: a file that cannot be read is reported and left out, and the configured limits apply.


RECENT_ATTEMPTS = 10
"""A node that has been absent for this many attempts no longer counts."""
_UNSAFE = re.compile(r"[^0-9A-Za-z_.-]")


class LearnedRecord(msgspec.Struct, frozen=True, kw_only=True):
    node: str
    attempt: int
    at: float
    learned: Learned


def store_learned(control: ControlDirectory, node: str, attempt: int, learned: Learned) -> None:
    """Keep what this node has learned up to now. Raises OSError."""
    record = LearnedRecord(node=node, attempt=attempt, at=time.time(), learned=learned)
    folder = control.path / "timeouts"
    make_dirs(folder)
    name = _UNSAFE.sub("_", node)[:100] or "_"
    replace_atomic(folder / f"{name}.json", msgspec.json.encode(record) + b"\n")


def read_learned(control: ControlDirectory) -> tuple[Learned, list[str]]:
    """What the nodes learned, the longest of each limit, and which files could not be read."""
    records: list[LearnedRecord] = []
    problems: list[str] = []
    folder = control.path / "timeouts"
    try:
        names = sorted(list_names(folder))
    except ControlError as error:
        return Learned(), [str(error)]
    for name in names:
        if name.startswith(".") or not name.endswith(".json"):
            continue
        try:
            record = msgspec.json.decode(read_regular(folder / name, MAX_RECORD_BYTES), type=LearnedRecord)
        except (OSError, msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
            problems.append(f"learned timeouts in {folder / name} are left out: {error}")
            continue
        records.append(record)
    newest = max((record.attempt for record in records), default=0)
    recent = [record.learned for record in records if record.attempt > newest - RECENT_ATTEMPTS]
    return longest_of(recent), problems


# --- who says hello -----------------------------------------------------------------------------------------

HELLO = "hello.json"


class HelloRecord(msgspec.Struct, frozen=True, kw_only=True):
    """The fact that ranks of a command said hello: so will those of its other attempts and on other nodes."""

    command: str
    """A digest of the script and its arguments. With other arguments it may act as a script without `Run`."""
    initial: float = 0.0
    """The initial limit that these ranks asked for, in seconds; 0 means off."""
    longest: float = 0.0
    """The longest time from the start of the workers to a rank's hello, in seconds."""


def store_hello(control: ControlDirectory, record: HelloRecord) -> None:
    """Keep this in place of what was kept before. Raises OSError."""
    replace_atomic(control.path / HELLO, msgspec.json.encode(record) + b"\n")


def read_hello(control: ControlDirectory, command: str) -> HelloRecord | None:
    """What is known about this command; None if nothing is, or it cannot be read."""
    try:
        raw = read_regular(control.path / HELLO, MAX_RECORD_BYTES)
        record = msgspec.json.decode(raw, type=HelloRecord)
    except (OSError, msgspec.DecodeError, RecursionError, UnicodeDecodeError):
        return None
    return record if record.command == command else None


# --- the file of another system -----------------------------------------------------------------------------


class _Heartbeat(msgspec.Struct):
    initial: float | None = None
    subsequent: float | None = None


class _Sections(msgspec.Struct):
    section: dict[str, float | None] = {}
    out_of_section: float | None = None
    calculated_sections: list[str] = []
    is_out_of_section_calculated: bool = False


class _Current(_Heartbeat):
    """With both at the top (older releases), or an object for each."""

    heartbeat: _Heartbeat | None = None
    section: _Sections | None = None


class _FtState(msgspec.Struct):
    current_timeouts: _Current


def read_ft_state(path: Path) -> Learned:
    """The timeouts that nvidia-resiliency-ext calculated and left in an `ft_state.json`.

    Timeouts of sections that it did not calculate only repeat its configuration, and are left out.
    """
    try:
        state = msgspec.json.decode(read_regular(path, MAX_RECORD_BYTES), type=_FtState)
    except (OSError, msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        reason = error.strerror or error if isinstance(error, OSError) else error
        raise ConfigError(
            f"monitor.import_ft_state = {str(path)!r}: cannot be used: {reason}. It must name an "
            "ft_state.json of nvidia-resiliency-ext, or be empty"
        ) from error
    current = state.current_timeouts
    beats = current.heartbeat or current
    sections = current.section or _Sections()
    return Learned(
        initial=_usable(beats.initial),
        heartbeat=_usable(beats.subsequent),
        sections={
            name: seconds
            for name in sections.calculated_sections
            if (seconds := _usable(sections.section.get(name)))
        },
        out_of_section=_usable(sections.out_of_section) if sections.is_out_of_section_calculated else 0.0,
    )


def _usable(seconds: float | None) -> float:
    return seconds if seconds is not None and math.isfinite(seconds) and seconds > 0 else 0.0


NCCL_WATCHDOG = "TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC"
NCCL_WATCHDOG_DEFAULT = 480.0
NCCL_TIMEOUT_DEFAULT = 600.0
"""torch's defaults in seconds: for the watchdog itself, and for a collective."""
NCCL_MONITORING = "TORCH_NCCL_ENABLE_MONITORING"
_OFF = frozenset({"0", "n", "no", "f", "false"})
"""The values by which torch takes a switch in the environment to be off, in upper or lower case."""
_NAMES = {
    "initial": "monitor.initial_rank_heartbeat_timeout",
    "heartbeat": "monitor.rank_heartbeat_timeout",
    "sections": SECTION_TIMEOUTS,
    "out_of_section": "monitor.rank_out_of_section_timeout",
    "exiting": "monitor.rank_exit_timeout",
}
"""The settings of the limits, by their names in `Limits`."""
_OF_LAUNCHER = ("launch.", "health.gate", "health.command", "health.max_uncorrected_errors")
"""Settings that `holdfast run` reads before there are ranks."""
_READ_WITHOUT = frozenset({"launch.max_restarts", "launch.node_name"})
"""Those that a rank without the launcher uses too: its node's name, and its own bound on starts."""


def limits_of(effective: Effective) -> Limits:
    """The limits that the settings ask for, tightened by an ft_state.json if they name one."""
    chosen = effective.settings.monitor
    if not chosen.enable_ft_package:
        return Limits(initial=0.0, heartbeat=0.0, out_of_section=0.0, exiting=0.0)
    given = [name for name, key in _NAMES.items() if effective.sources[key] != "default"]
    sections = parse_section_timeouts(chosen.rank_section_timeouts)
    limits = Limits(
        initial=chosen.initial_rank_heartbeat_timeout,
        heartbeat=chosen.rank_heartbeat_timeout,
        sections=sections,
        out_of_section=chosen.rank_out_of_section_timeout,
        exiting=chosen.rank_exit_timeout,
        whole=sections if "sections" in given else {},
        given=given,
    )
    return apply(read_ft_state(Path(chosen.import_ft_state)), limits) if chosen.import_ft_state else limits


def check_timeouts(effective: Effective, environ: Mapping[str, str]) -> None:
    """Refuse timeouts if one would hide another. For a run that `holdfast run` watches."""
    found = contradictions(
        Timeouts(
            initial=_value(effective, _NAMES["initial"]),
            heartbeat=_value(effective, _NAMES["heartbeat"]),
            sections=_sections(effective),
            save=_value(effective, "checkpoint.timeout"),
            stop_grace=_value(effective, "launch.stop_grace"),
            decision=_value(effective, "control.decision_timeout"),
            collective_watchdog=_watchdog(environ),
        )
    )
    if effective.settings.inprocess.enabled:
        found += restart_order(effective, environ, watched=True)
    if found:
        count = "1 contradiction" if len(found) == 1 else f"{len(found)} contradictions"
        raise ConfigError("\n  ".join([f"{count} among the timeouts; nothing was started:", *found]))


def restart_order(
    effective: Effective,
    environ: Mapping[str, str],
    *,
    watched: bool,
    nccl: bool | None = None,
    group_timeout: float | None = None,
) -> list[str]:
    """Which timeouts of in-process restart are out of order, in words.

    `watched`: whether `holdfast run` watches the ranks. `nccl`: whether they use NCCL; None if not known, and
    then only what the environment says about it counts. `group_timeout`: that of their process group.
    """
    watchdog = collective = None
    if nccl is not False and not switched_off(environ, NCCL_MONITORING):
        watchdog = _watchdog(environ)
        if watchdog is None and nccl:
            default = f"{NCCL_WATCHDOG} = {NCCL_WATCHDOG_DEFAULT:g} (torch's default)"
            watchdog = Value(NCCL_WATCHDOG_DEFAULT, default)
    if nccl:
        seconds = NCCL_TIMEOUT_DEFAULT if group_timeout is None else group_timeout
        source = "torch's default" if group_timeout is None else "as given"
        collective = Value(seconds, f"the process group's timeout = {seconds:g} ({source})")
    return out_of_order(
        RestartTimeouts(
            soft=_value(effective, "inprocess.soft_timeout"),
            hard=_value(effective, "inprocess.hard_timeout"),
            barrier=_value(effective, "inprocess.barrier_timeout"),
            interval=_value(effective, "inprocess.heartbeat_interval"),
            silence=_value(effective, "inprocess.heartbeat_timeout"),
            shutdown=_value(effective, "stop.shutdown_timeout_sec"),
            step=_sections(effective).get(STEP) if watched else None,
            heartbeat=_value(effective, _NAMES["heartbeat"]) if watched else None,
            watchdog=watchdog,
            collective=collective,
        )
    )


def switched_off(environ: Mapping[str, str], name: str) -> bool:
    """Whether one of torch's switches is explicitly off; an unset one is not."""
    return environ.get(name, "").strip().lower() in _OFF


def _value(effective: Effective, key: str) -> Value:
    seconds, source = effective.settings.get(key), effective.sources[key]
    assert isinstance(seconds, float)
    return Value(seconds, f"{key} = {seconds:g} ({source})", source != "default")


def _sections(effective: Effective) -> dict[str, Value]:
    source = effective.sources[SECTION_TIMEOUTS]
    given = parse_section_timeouts(effective.settings.monitor.rank_section_timeouts)
    return {
        name: Value(seconds, f"{name}:{seconds:g} in {SECTION_TIMEOUTS} ({source})")
        for name, seconds in given.items()
    }


def _watchdog(environ: Mapping[str, str]) -> Value | None:
    seconds = _number(environ.get(NCCL_WATCHDOG, ""))
    return Value(seconds, f"{NCCL_WATCHDOG} = {seconds:g} (environment)") if seconds else None


def refuse_without_launcher(effective: Effective, *, kept: bool = False) -> list[str]:
    """Settings that only `holdfast run` can honour, given to a script that it did not start, are an error.

    Returns, in words, settings of the launcher itself that come from the environment or from a file: a site
    may set them for everything that runs there, and one file may serve a script however it is started.
    `kept`: a keeper of in-process restart honours the initial limit.
    """
    honoured = {_NAMES["initial"]} if kept else set()
    given = [key for key in _given(effective, "monitor.") if key not in honoured]
    of_launcher = _given(effective, *_OF_LAUNCHER)
    everywhere = [key for key in of_launcher if effective.sources[key].startswith(("environment ", "file "))]
    given += [key for key in of_launcher if key not in everywhere and key not in _READ_WITHOUT]
    if given:
        shown = "\n  ".join(_shown(effective, key) for key in given)
        raise ConfigError(
            f"these settings need the launcher, and this script was not started by it:\n  {shown}\n"
            "Start it with `holdfast run`, which reads them, or take these settings away"
        )
    return [
        f"{_shown(effective, key)} does nothing here: only `holdfast run` reads it"
        for key in everywhere
        if key not in _READ_WITHOUT
    ]


def refuse_unknown_to_launcher(effective: Effective, config: str) -> None:
    """Settings that `holdfast run` reads before it starts the script cannot be given in the script.

    `config`: the settings file that `holdfast run` was given, if any.
    """
    given = [
        key
        for key in _given(effective, *_OF_LAUNCHER)
        if effective.sources[key] == "keyword" or (effective.sources[key].startswith("file ") and not config)
    ]
    if given:
        shown = "\n  ".join(_shown(effective, key) for key in given)
        raise ConfigError(
            f"`holdfast run` started this script without knowing these settings, which it reads itself:\n"
            f"  {shown}\nGive them to it: with --config FILE, --set KEY=VALUE or in the environment"
        )


def _given(effective: Effective, *prefixes: str) -> list[str]:
    """The settings in these sections that somebody set."""
    return [
        key for key, source in effective.sources.items() if key.startswith(prefixes) and source != "default"
    ]


def _shown(effective: Effective, key: str) -> str:
    value = "…" if key == ALERT_URL else effective.settings.get(key)  # such URLs are secrets
    return f"{key} = {msgspec.json.encode(value).decode()} ({effective.sources[key]})"


UNPROTECTED = (
    "not started by `holdfast run`: a hang is not found, and a failed rank is not restarted "
    "(checkpoints and resuming work all the same)"
)


def _number(text: str) -> float | None:
    try:
        found = float(text)
    except ValueError:
        return None
    return found if math.isfinite(found) and found > 0 else None
