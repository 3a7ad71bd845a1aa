"""What is known of each setting, read off the classes of the tree in `settings.py`: its type, range, default,
description, and the names it has in files, in the environment and as a keyword; and the largest values that
numbers in the tree may have.
"""

from __future__ import annotations

import json
import re
import typing
from types import UnionType
from typing import Literal

import msgspec
from msgspec import Meta

LARGEST_COUNT = 10**12 - 1
"""Twelve digits, as many as a checkpoint's name holds for its step."""
LONGEST_WAIT = 31_536_000.0
"""A year in seconds. Every wait has a deadline, and longer ones overflow the platform's timers."""

EXIT_SIGNAL = "stop.exit_signal"
INJECTION_RANKS = "validation.error_injection_ranks"
INJECTION_DEVICE = "validation.error_injection_device"
RESUME_FROM = "checkpoint.resume_from"
LOCAL_TYPE = "checkpoint.non_persistent_ckpt_type"
LOCAL_DIR = "checkpoint.non_persistent_local_ckpt_dir"
ASYNC_SAVE = "checkpoint.async_save"
KEEP_LAST = "checkpoint.keep_last"
REMOTE_ROOT = "checkpoint.remote_root"
NODE_NAME = "launch.node_name"
ALERT_COMMAND = "launch.alert_command"
HEALTH_COMMAND = "health.command"
ALERT_URL = "launch.alert_url"
ASSIGN = "inprocess.assign"
FRESH_PARTS = "checkpoint.fresh_parts"
CKPT_FORMAT = "checkpoint.ckpt_format"
SECTION_TIMEOUTS = "monitor.rank_section_timeouts"
FAILURE_CAUSES = "launch.failure_causes"
PROBATION_STEPS = "validation.probation_steps"

_TEXTS = {
    RESUME_FROM: 'text: "auto", "fresh", a step number, a path or a URL',
    REMOTE_ROOT: "text: a URL as s3://bucket/prefix or file:///path, or empty",
    NODE_NAME: "text: a name, or empty",
    ASSIGN: "text: package.module:function, or empty",
    ALERT_COMMAND: "text: a command for /bin/sh, or empty",
    HEALTH_COMMAND: "text: a command for /bin/sh, or empty",
    EXIT_SIGNAL: "text: signals as SIGTERM,SIGUSR1",
    ALERT_URL: "text: an http:// or https:// URL, or empty",
    FAILURE_CAUSES: "text: lines of a cause, a colon and a regular expression, or empty",
    SECTION_TIMEOUTS: "text: sections with their seconds, as setup:600,step:180, or empty",
    FRESH_PARTS: "text: parts as optimizer,data, or empty",
    INJECTION_RANKS: "text: ranks as 0,3, or empty",
    INJECTION_DEVICE: "text: a device, or node/device, or empty",
}
"""What a text may be where it is no path."""


SECRET = frozenset({ALERT_URL})
"""Settings whose value lets whoever knows it do something: a webhook's address is all that it asks for."""
HIDDEN = "•••"
_STEP = re.compile(r"[0-9]{1,12}")
_CREDENTIALS = re.compile(
    r"(?P<before>\b[a-z][a-z0-9+.-]*://)[^/\s@]+(?=@)"
    r"|(?P<name>\b(?:authorization:\s*(?:bearer|basic|token)|bearer)\s+)[^\s'\"]+"
    r"|(?P<key>[\w-]*(?:token|secret|passw(?:or)?d|api[_-]?key|access[_-]?key)=)[^\s'\"&;]+",
    re.IGNORECASE,
)


def is_step(text: str) -> bool:
    """Whether `resume_from` names a step, and not a path."""
    return _STEP.fullmatch(text) is not None


def mask(text: str) -> str:
    """A text as it may be shown: without the credentials that are recognised as such."""
    return _CREDENTIALS.sub(lambda found: f"{found['before'] or found['name'] or found['key']}{HIDDEN}", text)


def masked(key: str, value: object) -> object:
    """The value of a setting as it may be shown."""
    if not isinstance(value, str) or not value:
        return value
    if key not in SECRET:
        return mask(value)
    scheme, separator, rest = value.partition("://")
    host = re.split(r"[/?#]", rest, maxsplit=1)[0].rpartition("@")[2]
    return f"{scheme}://{host}/{HIDDEN}" if separator and host else HIDDEN


class Field(msgspec.Struct, frozen=True, kw_only=True):
    """What is known of one setting, read off the classes of the tree."""

    section: str
    name: str
    kind: type
    annotation: object
    """The type with its bounds, as msgspec checks it."""
    bounds: Meta
    default: object
    description: str
    """What it does and when to change it."""
    word: str = ""
    """The one word that a number may be instead."""
    words: tuple[str, ...] = ()
    """The words that a text may be, where it is one of a few."""

    @property
    def key(self) -> str:
        return f"{self.section}.{self.name}"

    @property
    def environment(self) -> str:
        return f"HOLDFAST_{self.section}_{self.name}".upper()

    @property
    def keyword(self) -> str:
        return f"{self.section}_{self.name}"

    @property
    def is_path(self) -> bool:
        """Whether it names a file or a directory of this machine."""
        return self.kind is str and not self.words and self.key not in _TEXTS

    @property
    def allowed(self) -> str:
        """What the value may be, in words."""
        if self.key in _TEXTS:
            return _TEXTS[self.key]
        if self.key == KEEP_LAST:
            return f"a whole number, 0 or 2 or more, at most {self.bounds.le:.0f}"
        if self.key == PROBATION_STEPS:
            return f"a whole number, 0 or 4 or more, at most {self.bounds.le:.0f}"
        if self.words:
            return f"text: {', '.join(json.dumps(word) for word in self.words)}"
        if self.kind is str:
            return "text: a path, not empty" if self.bounds.min_length else "text: a path, or empty"
        if self.kind is bool:
            return "true or false"
        number = "a whole number" if self.kind is int else "a number"
        low, more_than = self.bounds.ge, self.bounds.gt
        lowest = f"{low:g} or more" if low is not None else f"more than {more_than:g}"
        allowed = f"{number}, {lowest}, at most {self.bounds.le:.0f}"
        return f'{allowed}, or "{self.word}"' if self.word else allowed


def read_fields(tree: type) -> dict[str, Field]:
    """Every setting of a tree of sections by its dotted key, in the order of the classes."""
    found: dict[str, Field] = {}
    for section, cls in typing.get_type_hints(tree).items():
        annotations = typing.get_type_hints(cls, include_extras=True)
        for field in msgspec.structs.fields(cls):
            kind, *notes = typing.get_args(annotations[field.name])
            word, words = "", ()
            if typing.get_origin(kind) is Literal:
                kind, words = str, typing.get_args(kind)
            if typing.get_origin(kind) in (UnionType, typing.Union):  # a number, or one word instead
                number, literal = typing.get_args(kind)
                kind, *bounds = typing.get_args(number)
                notes, word = [*bounds, *notes], typing.get_args(literal)[0]
            entry = Field(
                section=section,
                name=field.name,
                kind=kind,
                annotation=annotations[field.name],
                bounds=next((note for note in notes if isinstance(note, Meta)), Meta()),
                default=field.default,
                description=next(note for note in notes if isinstance(note, str)),
                word=word,
                words=words,
            )
            found[entry.key] = entry
    return found
