"""Gathers the settings from all their sources and checks them completely before anything starts.

Guarantee: what `load` returns is known, well-typed, in range and free of contradictions, and for each
setting it says where the value came from. Anything else is a ConfigError that lists every problem at
once: the setting's path, its source, the value, what is allowed and what to do.

Later sources win: defaults < TOML file < HOLDFAST_* environment < command line < keywords. A value that
is overridden is checked all the same, because a mistake in a file stays a mistake.
"""

from __future__ import annotations

import difflib
import logging
import os
import re
import reprlib
import signal
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from urllib.parse import urlsplit

import msgspec
import xxhash

from holdfast.base import FORMAT_VARIABLE as LOG_FORMAT
from holdfast.base import VERBOSITY_VARIABLE as VERBOSITY
from holdfast.base import Verbosity, is_verbosity, lines, read_regular
from holdfast.config.fields import (
    ALERT_COMMAND,
    ALERT_URL,
    ASYNC_SAVE,
    CKPT_FORMAT,
    EXIT_SIGNAL,
    FAILURE_CAUSES,
    FRESH_PARTS,
    HEALTH_COMMAND,
    INJECTION_RANKS,
    KEEP_LAST,
    LOCAL_DIR,
    LOCAL_NEED,
    LOCAL_TYPE,
    NEEDS,
    PROBATION_STEPS,
    REMOTE_ROOT,
    REMOVED,
    RESUME_FROM,
    SECRET,
    SECTION_TIMEOUTS,
    Field,
    in_other_systems,
    mask,
    masked,
    without_switch,
    wrong_address,
)
from holdfast.config.sections import (
    DEFERRED,
    DEFERRED_ALLOWS,
    DEFERRED_REFUSES,
    HealthSettings,
    SlurmSettings,
    StopSettings,
    ValidationSettings,
    parse_ranks,
    parse_signals,
)
from holdfast.config.settings import (
    FIELDS,
    OTHER_FORMATS,
    CheckpointSettings,
    ControlSettings,
    JournalSettings,
    LaunchSettings,
    MonitorSettings,
    RunSettings,
    Settings,
    parse_failure_causes,
    parse_fresh_parts,
    parse_section_timeouts,
)
from holdfast.errors import ConfigError

__all__ = [
    "FIELDS",
    "CheckpointSettings",
    "ControlSettings",
    "Effective",
    "Field",
    "HealthSettings",
    "JournalSettings",
    "LaunchSettings",
    "MonitorSettings",
    "RunSettings",
    "Settings",
    "SlurmSettings",
    "StopSettings",
    "ValidationSettings",
    "digest",
    "idle",
    "load",
    "parse_assignments",
]

log = logging.getLogger("holdfast")

ENVIRONMENT_PREFIX = "HOLDFAST_"
COMMAND_LINE = "command line"
NOT_SETTINGS = frozenset(
    {
        "HOLDFAST_LAUNCH",
        "HOLDFAST_RESTART",
        "HOLDFAST_AGENT",
        "HOLDFAST_OUTLIVES",
        "HOLDFAST_PROGRESS",
        VERBOSITY,
        LOG_FORMAT,
    }
)
"""Names with the prefix that are not settings: what the launcher hands over, how much is printed and how."""
ALERT_PREFIX = "HOLDFAST_ALERT_"
"""Begins the names that an alert command finds in its environment; the command may well call `holdfast`."""

FILE_LIMIT = 64 * 1024
LINE_LIMIT = 4096
"""No path is longer, and tomllib's time grows with the square of the number of parts in a dotted key."""
PROBLEMS_SHOWN = 50
_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.\-]*:/|[^/]*://")
"""What begins like a URL; pathlib would take one of its slashes away."""


_COMMANDS = (ALERT_COMMAND, HEALTH_COMMAND)
"""Settings for a shell, which itself expands what we refuse in others."""
_SECTIONS = frozenset(field.section for field in FIELDS.values())


class Effective(msgspec.Struct, frozen=True, kw_only=True):
    """Settings, and where each of them came from."""

    settings: Settings
    sources: dict[str, str]
    """Dotted key → "default", "file <path>", "environment <NAME>", "command line" or "keyword"."""


class _RefusedError(Exception):
    """A value cannot be used; the text says what to write instead."""


def _show(value: object) -> str:
    """A value for a message: short, whatever somebody put into the file."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int) and value.bit_length() > 256:
        return f"a whole number of {value.bit_length()} bits"
    short = reprlib.Repr()
    short.maxstring = short.maxother = 120
    return short.repr(value)


def _from_text(field: Field, text: str) -> object:
    """The value that text from the environment or the command line stands for, or else the text itself."""
    if field.kind is bool:
        return {"true": True, "1": True, "false": False, "0": False}.get(text, text)
    if field.kind is int and re.fullmatch(r"[+-]?[0-9]{1,18}", text):
        return int(text)
    if field.kind is float and re.fullmatch(r"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?", text):
        return float(text)
    return text


def _check(field: Field, value: object) -> object:
    """The value as the setting holds it. Raises _RefusedError with a suggestion."""
    if field.kind is str and isinstance(value, os.PathLike):
        value = os.fspath(value)
    if field.key == EXIT_SIGNAL:
        value = _signal_names(value)
    try:
        checked: object = msgspec.convert(value, field.annotation)
    except (msgspec.ValidationError, UnicodeEncodeError):
        raise _RefusedError(_suggestion(field, value)) from None
    if isinstance(checked, str):
        _check_text(field, checked)
    if field.key == KEEP_LAST and checked == 1:
        raise _RefusedError("one checkpoint may turn out to be bad: write 2, or 0 to keep all")
    if field.key == PROBATION_STEPS and checked in (1, 2, 3):
        raise _RefusedError("bad state shows after more steps than that: write 4 or more, or 0 for none")
    return checked


def _signal_names(value: object) -> object:
    """`signal.SIGTERM`, or several such, as the text that names them; anything else as it is."""
    several = value if isinstance(value, list | tuple) else [value]
    if several and all(isinstance(one, signal.Signals | str) for one in several):
        return ",".join(one.name if isinstance(one, signal.Signals) else str(one) for one in several)
    return value


def _suggestion(field: Field, value: object) -> str:
    """What to write instead of a value of the wrong type or out of range."""
    if field.kind is bool:
        words = {"yes": "true", "on": "true", "1": "true", "no": "false", "off": "false", "0": "false"}
        meant = str(value).lower() if isinstance(value, str | int) else ""
        if words.get(meant, meant) in ("true", "false"):
            return f"write {words.get(meant, meant)}"
    elif field.key == CKPT_FORMAT and isinstance(value, str) and value in OTHER_FORMATS:
        return f"{OTHER_FORMATS[value]}; use {_show(field.default)}"
    elif isinstance(value, str) and (field.key, value) in REMOVED:
        return REMOVED[field.key, value]
    elif field.words and isinstance(value, str) and value.strip().lower() in field.words:
        return f'write "{value.strip().lower()}"'
    elif isinstance(value, str):
        if field.word and value.strip().lower() == field.word:
            return f'write "{field.word}"'
        if _from_text(field, value) is not value:
            return f"write {value} without quotes"
    elif field.key == EXIT_SIGNAL and type(value) is int and value in set(signal.Signals):
        return f'write "{signal.Signals(value).name}"'
    elif field.kind is str and isinstance(value, int | float) and not isinstance(value, bool):
        return "write it in quotes"
    return f"the default is {_show(field.default)}"


def _check_text(field: Field, value: str) -> None:
    """Check what the type of a path, or of resume_from, does not express."""
    if value and not value.strip():
        raise _RefusedError(f"the default is {_show(field.default)}")
    if "\0" in value or not _is_utf8(value):
        raise _RefusedError("use a path of valid UTF-8 without a zero character")
    if field.key == ALERT_URL and value and not re.fullmatch(r"https?://[!-~]+", value):
        raise _RefusedError("write http:// or https://, a host and a path, without spaces")
    if field.is_path and _URL.match(value):
        raise _RefusedError(_no_url(field))
    if field.key == ALERT_URL and value:
        try:
            _ = urlsplit(value).port
        except ValueError as why:
            raise _RefusedError(f"it is not a URL: {why}") from None
    if field.key == REMOTE_ROOT and value and (wrong := wrong_address(value)):
        raise _RefusedError(wrong)
    if value.startswith(("~", "$")) and field.key not in _COMMANDS:
        raise _RefusedError("~ and $NAME are not expanded: write it out, or put ./ before a real name")
    parse = {
        SECTION_TIMEOUTS: parse_section_timeouts,
        FAILURE_CAUSES: parse_failure_causes,
        FRESH_PARTS: parse_fresh_parts,
        INJECTION_RANKS: parse_ranks,
        EXIT_SIGNAL: parse_signals,
    }.get(field.key)
    if parse is not None:
        try:
            parse(value)
        except ValueError as why:
            raise _RefusedError(str(why)) from None
    if field.key == RESUME_FROM:
        word = value.strip().lower()
        if word in ("auto", "fresh") and value != word:
            raise _RefusedError(f'write "{word}", or put ./ before a path')
        if re.fullmatch(r"[+-]?[0-9]+", value) and not re.fullmatch(r"[0-9]{1,12}", value):
            raise _RefusedError("a step number has no sign and at most 12 digits; put ./ before a path")


def _no_url(field: Field) -> str:
    """Why a URL is refused where a directory is wanted: one would be made here, under that very name."""
    other = ""
    if field.key == "checkpoint.root":
        other = f"; {REMOTE_ROOT} takes a URL, and gets a verified copy of every checkpoint"
    return (
        f"this is a URL, and here only a path will do{other}; put ./ before a path that really has this name"
    )


def _is_utf8(value: str) -> bool:
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def _closest(name: str, spellings: Mapping[str, str]) -> str:
    """The known spelling that `name` was probably meant to be. `spellings` maps keys to spellings."""
    wanted = name[:80].lower()
    folded = {spelling.lower(): spelling for spelling in spellings.values()}
    close = difflib.get_close_matches(wanted, folded, n=1, cutoff=0.75)
    if not close:  # the right name in the wrong section, or without one
        leaf = re.split(r"\W", wanted)[-1]
        leaves = {key.rpartition(".")[2]: spelling for key, spelling in spellings.items()}
        close_leaf = difflib.get_close_matches(leaf, leaves, n=1, cutoff=0.75)
        if close_leaf:
            return leaves[close_leaf[0]]
        close = difflib.get_close_matches(wanted, folded, n=1, cutoff=0.6)
    return folded[close[0]] if close else ""


def resembles_a_setting(variable: str) -> bool:
    """Whether an unknown HOLDFAST_* variable was probably meant to be one; others have such names too."""
    wanted = variable.removeprefix(ENVIRONMENT_PREFIX).lower()
    if "_" in wanted and in_other_systems(variable, _SECTIONS):
        return True
    whole = [field.keyword for field in FIELDS.values()]
    alone = [field.name for field in FIELDS.values()]
    return (
        wanted.partition("_")[0] in _SECTIONS
        or bool(difflib.get_close_matches(wanted, whole, n=1, cutoff=0.75))
        or bool(difflib.get_close_matches(wanted, alone, n=1, cutoff=0.8))
    )


def _gives_away(field: Field, written: str) -> bool:
    return field.key in SECRET or mask(written) != written


class _Collector:
    """Collects values in the order of precedence, and every problem on the way."""

    def __init__(self) -> None:
        self.values: dict[str, object] = {key: field.default for key, field in FIELDS.items()}
        self.sources: dict[str, str] = dict.fromkeys(FIELDS, "default")
        self.bad: set[str] = set()
        self.problems: list[str] = []

    def take(self, field: Field, written: object, source: str, *, text: bool = False) -> None:
        """Take one value. With `text`, `written` is text that stands for a value of the setting's type."""
        if source == COMMAND_LINE and isinstance(written, str) and written and _gives_away(field, written):
            self.bad.add(field.key)
            self.problems.append(
                f"{field.key} ({source}): a secret on a command line is seen by everybody on the machine and "
                f"kept in the run's records; write it into the file of --config, or set {field.environment}"
            )
            return
        value = _from_text(field, written) if text and isinstance(written, str) else written
        try:
            self.values[field.key] = _check(field, value)
            self.sources[field.key] = source
        except _RefusedError as why:
            self.bad.add(field.key)
            self.problems.append(
                f"{field.key} = {_show(masked(field.key, written))} ({source}): "
                f"allowed is {field.allowed}; {why}"
            )

    def unknown(self, name: str, value: object, source: str, spellings: Mapping[str, str]) -> None:
        few = len(self.problems) < PROBLEMS_SHOWN
        known = in_other_systems(name, _SECTIONS) if few and not isinstance(value, dict) else ""
        closest = _closest(name, spellings) if few and not known else ""
        advice = f"did you mean {closest}?" if closest else "`holdfast config show` lists all settings"
        advice = f"here {known}" if known else advice
        shown = _name(name) if isinstance(value, dict) else f"{_name(name)} = {_show(value)}"
        self.problems.append(f"{shown} ({source}): there is no such setting; {advice}")

    def contradictions(self) -> None:
        """Find pairs of values that are each allowed but make no sense together."""
        ttl, timeout = self.values["control.lease_ttl"], self.values["control.decision_timeout"]
        assert isinstance(ttl, float)
        assert isinstance(timeout, float)
        if timeout <= ttl and not self.bad & {"control.lease_ttl", "control.decision_timeout"}:
            self.problems.append(
                f"{self._both('control.decision_timeout', 'control.lease_ttl')}: the timeout must be "
                "greater, because ranks wait for a decision while rank 0 may wait for an old lease to lapse; "
                f"raise control.decision_timeout above {ttl:g} or lower control.lease_ttl"
            )
        resume_from = self.values[RESUME_FROM]
        if (
            self.values["checkpoint.force"]
            and resume_from == "auto"
            and not self.bad & {"checkpoint.force", RESUME_FROM}
        ):
            self.problems.append(
                f"{self._both('checkpoint.force', RESUME_FROM)}: force is for what resume_from names; set "
                "checkpoint.resume_from to a step, a path or fresh, or leave checkpoint.force false"
            )

        if self.values[LOCAL_TYPE] == "local" and not self.bad & {LOCAL_TYPE, LOCAL_DIR, ASYNC_SAVE}:
            if not self.values[LOCAL_DIR]:
                self.problems.append(
                    f"{self._both(LOCAL_TYPE, LOCAL_DIR)}: local copies need a directory on each node; set "
                    f"{LOCAL_DIR}, for example to /dev/shm/holdfast"
                )
            if not self.values[ASYNC_SAVE]:
                self.problems.append(
                    f"{self._both(LOCAL_TYPE, ASYNC_SAVE)}: local copies are made by the writer process, "
                    f"which only asynchronous saves have; set {ASYNC_SAVE} to true"
                )

        if given := [key for key in without_switch(LOCAL_NEED, self.sources) if key not in self.bad]:
            shown = ", ".join(f"{key} = {_show(self.values[key])} ({self.sources[key]})" for key in given)
            self.problems.append(
                f"{shown}: nothing reads this while {LOCAL_TYPE} is none, its default, so no local copies "
                f'are made; set {LOCAL_NEED.fix}, or say "none" to keep this for later'
            )

        for key in ("checkpoint.keep_every_steps", "checkpoint.keep_every_hours"):
            if self.values[key] and self.values[KEEP_LAST] == 0 and not self.bad & {key, KEEP_LAST}:
                self.problems.append(
                    f"{self._both(key, KEEP_LAST)}: nothing is deleted while keep_last is 0, so there is "
                    f"nothing to except; set {KEEP_LAST} to 2 or more, or leave {key} at 0"
                )

        for key, refused in DEFERRED_REFUSES.items():
            if self.values[DEFERRED] and self.values[key] in refused and not self.bad & {key, DEFERRED}:
                self.problems.append(
                    f"{self._both(DEFERRED, key)}: deferred checks find a bad step after the optimizer used "
                    "it, when it can only be rolled back or stop the run; set "
                    f"{DEFERRED} to false, or {key} to {DEFERRED_ALLOWS[key]}"
                )

    def _both(self, one: str, other: str) -> str:
        return " with ".join(
            f"{key} = {_show(self.values[key])} ({self.sources[key]})" for key in (one, other)
        )


def _name(name: str) -> str:
    """A name for a message, bounded and on one line."""
    return name if len(name) <= 80 and name.isprintable() else reprlib.repr(name)


def _take_file(into: _Collector, file: Path | str) -> None:
    source = f"file {file}"
    try:
        # Links are followed, because mounted configuration is often a link; the target must be a plain file.
        text = read_regular(Path(os.path.realpath(file)), FILE_LIMIT).decode("utf-8-sig")
        if too_long := [n for n, line in enumerate(text.split("\n"), 1) if len(line) > LINE_LIMIT]:
            raise ValueError(f"more than {LINE_LIMIT} characters (at line {too_long[0]})")
        tree = tomllib.loads(text)
    except OSError as error:
        into.problems.append(f"{source}: cannot be read: {error.strerror or error}; check the path")
        return
    except UnicodeDecodeError as error:
        line = bytes(error.object[: error.start]).count(b"\n") + 1
        into.problems.append(f"{source}, line {line}: is not UTF-8 text; a settings file is TOML")
        return
    except RecursionError:
        into.problems.append(f"{source}: is nested too deeply; settings are [section] and key = value")
        return
    except ValueError as error:  # not only TOML's own: a number too long, a path with a zero in it
        into.problems.append(f"{source}: is not valid TOML: {error}; correct it there")
        return
    keys = {key: key for key in FIELDS}
    for section, table in tree.items():
        if section not in _SECTIONS:
            if isinstance(table, dict):
                into.unknown(f"[{section}]", table, source, {name: f"[{name}]" for name in _SECTIONS})
            else:
                into.unknown(section, table, source, keys)
        elif not isinstance(table, dict):
            into.problems.append(
                f"{section} = {_show(table)} ({source}): allowed is a section; write [{section}] on a "
                "line of its own and its settings below"
            )
        else:
            for name, value in table.items():
                key = f"{section}.{name}"
                if field := FIELDS.get(key):
                    into.take(field, value, source)
                else:
                    into.unknown(key, value, source, keys)


def load(
    file: Path | str | None = None,
    *,
    environ: Mapping[str, str] = os.environ,
    command_line: Mapping[str, str] | None = None,
    keywords: Mapping[str, object] | None = None,
) -> Effective:
    """Gather the settings from all sources, or raise one ConfigError that lists every problem.

    `command_line` maps dotted keys to text, `keywords` maps `section_name` to Python values.
    """
    into = _Collector()
    if file is not None:
        _take_file(into, file)
    if not is_verbosity(asked := environ.get(VERBOSITY, "")):
        allowed = ", ".join(Verbosity)
        into.problems.append(f"{VERBOSITY} = {_show(asked)} (environment): allowed is {allowed}")
    if not lines.is_format(asked := environ.get(LOG_FORMAT, "")):
        allowed = ", ".join(lines.LogFormat)
        into.problems.append(f"{LOG_FORMAT} = {_show(asked)} (environment): allowed is {allowed}")
    by_environment = {field.environment: field for field in FIELDS.values()}
    for name in sorted(environ):
        ours = name.startswith(ENVIRONMENT_PREFIX) and not name.startswith(ALERT_PREFIX)
        if ours and name not in NOT_SETTINGS:
            if field := by_environment.get(name):
                into.take(field, environ[name], f"environment {name}", text=True)
            elif resembles_a_setting(name):
                into.unknown(
                    name, environ[name], "environment", {f.key: f.environment for f in FIELDS.values()}
                )
            elif not environ.get("HOLDFAST_LAUNCH"):  # under a launcher, that has said so
                log.warning("holdfast: %s in the environment is not a setting; it is ignored", _name(name))
    for key, text in (command_line or {}).items():
        if field := FIELDS.get(key):
            into.take(field, text, COMMAND_LINE, text=True)
        else:
            into.unknown(key, text, COMMAND_LINE, {known: known for known in FIELDS})
    by_keyword = {field.keyword: field for field in FIELDS.values()}
    for name, value in (keywords or {}).items():
        if field := by_keyword.get(name):
            into.take(field, value, "keyword")
        else:
            into.unknown(name, value, "keyword", {f.key: f.keyword for f in FIELDS.values()})
    into.contradictions()
    if into.problems:
        raise ConfigError(_message(into.problems))
    tree: dict[str, dict[str, object]] = {}
    for field in FIELDS.values():
        tree.setdefault(field.section, {})[field.name] = into.values[field.key]
    return Effective(settings=msgspec.convert(tree, Settings), sources=into.sources)


def idle(effective: Effective) -> list[str]:
    """Settings that somebody gave but nothing reads, because nobody touched what switches them on."""
    return [
        f"{', '.join(_shown(effective, key) for key in given)}: nothing reads this without {need.fix}"
        for need in NEEDS
        if (given := without_switch(need, effective.sources))
    ]


def _shown(effective: Effective, key: str) -> str:
    return f"{key} = {_show(effective.settings.get(key))} ({effective.sources[key]})"


def _message(problems: list[str]) -> str:
    lines = problems[:PROBLEMS_SHOWN]
    if len(problems) > len(lines):
        lines.append(f"… and {len(problems) - len(lines)} more")
    count = "1 problem" if len(problems) == 1 else f"{len(problems)} problems"
    return "\n  ".join([f"{count} in the settings; nothing was started:", *lines])


def parse_assignments(assignments: Iterable[str]) -> dict[str, str]:
    """`["section.key=value", …]`, as given to --set, for `load`'s `command_line`. The last one wins."""
    found: dict[str, str] = {}
    problems: list[str] = []
    for assignment in assignments:
        key, equals, value = assignment.partition("=")
        if equals and key:
            found[key] = value
        else:
            problems.append(f"{_name(assignment)} (command line): allowed is section.key=value")
    if problems:
        raise ConfigError(_message(problems))
    return found


def digest(settings: Settings) -> str:
    """xxh3-128 over canonical JSON: equal for equal settings, wherever they came from."""
    return xxhash.xxh3_128_hexdigest(msgspec.json.encode(settings, order="sorted"))
