"""All settings: one typed tree.

The classes below are the only place where a setting's type, range, default and description are written.
Loading (sources.py), `holdfast config show` and docs/reference/configuration.md all read them from here.
Building these classes by hand checks nothing; `holdfast.config.sources.load` does.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from holdfast.config.fields import LARGEST_COUNT, LONGEST_WAIT, Field, is_step, read_fields
from holdfast.config.sections import (
    HealthSettings,
    InProcessSettings,
    SlurmSettings,
    StopSettings,
    StragglerSettings,
    ValidationSettings,
)

_SECTION = re.compile(r"[A-Za-z_][A-Za-z0-9_.-]{0,63}")
_SECONDS = re.compile(r"[0-9]{1,9}(\.[0-9]{1,9})?")

OTHER_FORMATS = {
    "torch": "one file written by one rank cannot be saved asynchronously, nor resharded",
    "zarr": "it cannot be saved asynchronously, and PyTorch no longer reads it",
    "torch_dcp": "this is the same DCP directory under another name",
    "fsdp_dtensor": "this is a DCP directory too",
}
"""Formats that users of other systems may name, and why not to name them here."""


class RunSettings(msgspec.Struct, frozen=True, kw_only=True):
    """The run as a whole."""

    dir: Annotated[
        str,
        Meta(min_length=1),
        "Control directory of the run: its durable memory. Give each run its own; on several nodes it must "
        "be a directory that all of them see.",
    ] = "holdfast-run"


class CheckpointSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Saving and resuming."""

    root: Annotated[
        str,
        "Directory of the checkpoints; empty means `checkpoints` inside run.dir. Set it when checkpoints "
        "belong on different storage than the run's own records.",
    ] = ""
    remote_root: Annotated[
        str,
        "URL of an object store (or `file://`) that gets a verified copy of every checkpoint; empty means "
        "none. Set it when the checkpoint root can be lost with its machine.",
    ] = ""
    read_back: Annotated[
        bool,
        "Read each committed checkpoint back once, while training continues and at the lowest priority, "
        "and compare every digest; retention then keeps what was read back. Turn it off when the storage "
        "has no bandwidth to spare.",
    ] = True
    read_back_rate: Annotated[
        float,
        Meta(ge=0, le=1_000_000),
        "Megabytes a second that reading back takes at most; 0 means no limit. Lower it when it disturbs "
        "other work, raise it when checkpoints are saved faster than they are read.",
    ] = 200.0
    remote_retry_seconds: Annotated[
        float,
        Meta(gt=0, le=LONGEST_WAIT),
        "Seconds for which one request to remote_root is retried before a copy counts as failed. Raise it "
        "when the store has longer outages.",
    ] = 120.0
    interval: Annotated[
        Annotated[int, Meta(ge=0, le=LARGEST_COUNT)] | Literal["auto"],
        "Steps between scheduled saves; 0 means none, `auto` chooses from measured costs and failures. Lower "
        "it when repeating that many steps costs more than saving.",
    ] = 100
    mtbf_hours: Annotated[
        float,
        Meta(ge=0, le=LONGEST_WAIT),
        "Mean hours between failures of the whole job, for choosing and judging the interval; 0 means that "
        "it is observed. Set it when you know it better than this run can have observed it.",
    ] = 0.0
    save_at_end: Annotated[
        bool,
        "Save once more after the last step. Turn it off when the final state is kept in another way.",
    ] = True
    resume_from: Annotated[
        str,
        Meta(min_length=1),
        "Where the run begins: `auto` takes the best rung of the ladder, `fresh` starts from nothing, a "
        "step number, a path or a URL names one checkpoint. It is applied once: later launches with the "
        "same value continue from where the run is. Change it to go back or to branch off.",
    ] = "auto"
    force: Annotated[
        bool,
        "Apply resume_from although it was applied before, and accept the checkpoint that it names even if "
        "that is suspect or condemned. Set it for one start only, after reading the evidence in the journal.",
    ] = False
    fresh_parts: Annotated[
        str,
        "Parts that begin anew when the run begins with what resume_from names: names given to `track`, or "
        "names that only the checkpoint has, and `data` for the position in the data, as in "
        "`optimizer,data`; empty means that every part must be in both. Set it to begin from weights "
        "alone, or with other data.",
    ] = ""
    names: Annotated[
        str,
        "The function that says which tracked name a stored one stands for, as package.module:function, when "
        "the run begins with another project's checkpoint; it answers None for what is to be left out. "
        "Empty: "
        "names are taken as they are, or with one prefix more or less. Set it where neither fits.",
    ] = ""
    data_position: Annotated[
        Literal["exact", "trusted"],
        "`exact` refuses a loader whose position cannot be restored exactly; `trusted` only reports it. "
        "Set it to `trusted` when the order or the contents of the data need not be repeated.",
    ] = "exact"
    max_failed_saves: Annotated[
        int,
        Meta(ge=1, le=LARGEST_COUNT),
        "Failed saves in a row after which the run stops instead of training on unprotected. Raise it when "
        "the storage is known to have short outages.",
    ] = 3
    timeout: Annotated[
        float,
        Meta(gt=0, le=LONGEST_WAIT),
        "Seconds that one save or load may take on the slowest rank before the others stop waiting. Raise it "
        "when a checkpoint takes longer than that to write or read.",
    ] = 1800.0
    async_save: Annotated[
        bool,
        "Write checkpoints in a separate process while training continues; training waits only until the "
        "state is copied. Turn it on when the hosts have memory for one or two copies of their ranks' "
        "state.",
    ] = False
    when_busy: Annotated[
        Literal["queue", "skip", "wait"],
        "What to do when a save is due while the previous one is still being written: `queue` copies it "
        "into a second staging buffer, `skip` leaves it out, `wait` holds training up until the other is "
        "done. Use `skip` or `wait` when memory is short: they need one buffer.",
    ] = "queue"
    snapshot: Annotated[
        Literal["auto", "clone", "overlap", "block"],
        "How an asynchronous save copies the state off a CUDA device: `clone` copies it within the device "
        "first, `overlap` copies it to the host during the next step, `block` holds training up for the "
        "copy; `auto` chooses from free memory, copy time and step time. Change it to override that choice. "
        "State in host memory is always copied while training waits.",
    ] = "auto"
    ckpt_format: Annotated[
        Literal["torch_dist"],
        "How checkpoints are stored: `torch_dist` is a sharded DCP directory, the only format that can be "
        "saved asynchronously. There is no reason to change it.",
    ] = "torch_dist"
    handover_timeout: Annotated[
        float,
        Meta(ge=0, le=LONGEST_WAIT),
        "Seconds that a new attempt waits for the previous attempt's writer to commit what was already "
        "staged. Raise it when writing a checkpoint takes longer and repeating the steps since the "
        "previous one costs more. At most 0.8 of the time that others wait for a decision is used.",
    ] = 120.0
    keep_last: Annotated[
        int,
        Meta(ge=0, le=LARGEST_COUNT),
        "How many of the newest sound checkpoints to keep; older ones are deleted after each save. 0 keeps "
        "all, and 1 is refused, because one may turn out to be bad. Set it when the storage is limited.",
    ] = 0
    keep_every_steps: Annotated[
        int,
        Meta(ge=0, le=LARGEST_COUNT),
        "Also keep the first checkpoint at or after each multiple of this many steps; 0 means none. Set it "
        "to keep a coarse history.",
    ] = 0
    keep_every_hours: Annotated[
        float,
        Meta(ge=0, le=LONGEST_WAIT),
        "Also keep the first checkpoint of each period of this many hours; 0 means none. Set it to keep a "
        "coarse history by time.",
    ] = 0.0
    non_persistent_ckpt_type: Annotated[
        Literal["none", "local"],
        "`local` also keeps the newest checkpoints on the nodes themselves, with replicas on their peers: "
        "they are quick to save and to resume from, but are lost with the nodes. Set it to save more often "
        "than the checkpoint root allows; it needs async_save.",
    ] = "none"
    non_persistent_local_ckpt_dir: Annotated[
        str,
        "Directory on each node for its local copies: in memory (`/dev/shm/…`), where a save copies nothing "
        "after staging, or on a disk. Must be set with `local`, and must not be shared by nodes.",
    ] = ""
    non_persistent_local_ckpt_algo: Annotated[
        Literal["fully_parallel"],
        "Who stores what: with `fully_parallel` each rank stores its own share, and state that ranks hold "
        "alike is stored once. There is no reason to change it.",
    ] = "fully_parallel"
    non_persistent_save_interval: Annotated[
        Annotated[int, Meta(ge=0, le=LARGEST_COUNT)] | Literal["auto"],
        "Steps between saves to the local tier, or `auto` to choose that from what they cost, down to every "
        "step; 0 means only those that go to the checkpoint root as well. Set it lower than "
        "checkpoint.interval, or to `auto` to lose a step or two at a fault.",
    ] = 0
    non_persistent_save_share: Annotated[
        float,
        Meta(gt=0, le=0.5),
        "With checkpoint.non_persistent_save_interval = `auto`: the share of training's time that saves to "
        "the local tier may cost. Raise it where a lost step costs more than steps that are a little slower.",
    ] = 0.01
    non_persistent_keep_last: Annotated[
        int,
        Meta(ge=2, le=64),
        "How many checkpoints the local tier keeps. Each additional one takes as much of a node's memory "
        "as its ranks' state, and as much again for every replica that it holds.",
    ] = 2
    non_persistent_max_bytes: Annotated[
        int,
        Meta(ge=0, le=LARGEST_COUNT * 1000),
        "Bytes that local copies and replicas may take on a node; 0 means all that is free. Set it when "
        "other things need that memory later; what does not fit is not saved locally, and the journal says "
        "so.",
    ] = 0
    replication_factor: Annotated[
        int,
        Meta(ge=1, le=64),
        "On how many nodes each local copy is stored, including its own; 1 means no replicas. Raise it to "
        "survive the loss of more nodes at once without falling back to the checkpoint root.",
    ] = 2
    replication_jump: Annotated[
        int,
        Meta(ge=0, le=LARGEST_COUNT),
        "Distance in ranks from one holder of a replica to the next; 0 means the ranks of a node. Set it "
        "to a multiple of that number to put replicas into another rack.",
    ] = 0
    replication_timeout: Annotated[
        float,
        Meta(gt=0, le=LONGEST_WAIT),
        "Seconds that the replicas of one save may take before they count as failed; training never waits "
        "for them. Raise it when the network is slow.",
    ] = 120.0


class ControlSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Who may act, and how long the group waits for a decision."""

    lease_ttl: Annotated[
        float,
        Meta(ge=2, le=LONGEST_WAIT),
        "Seconds without a sign of life after which another attempt may take over the run. Raise it when the "
        "control directory's storage stalls for longer.",
    ] = 30.0
    decision_timeout: Annotated[
        float,
        Meta(gt=0, le=LONGEST_WAIT),
        "Seconds a rank waits for a decision of the group before it exits with code 21. Raise it when "
        "verifying checkpoints at a start takes longer.",
    ] = 300.0


class LaunchSettings(msgspec.Struct, frozen=True, kw_only=True):
    """What `holdfast run` does with its workers."""

    max_restarts: Annotated[
        int,
        Meta(ge=0, le=LARGEST_COUNT),
        "Restarts without progress before the run stops with code 22; 0 means no restart. Raise it on "
        "machines that fail often.",
    ] = 3
    node_name: Annotated[
        str,
        "Name of this node in the journal, in exclusions and among its peers; empty means Slurm's name for "
        "it (SLURMD_NODENAME), or otherwise its host name. Set it when several agents share a host, or "
        "when host names change with every start.",
    ] = ""
    node_timeout: Annotated[
        float,
        Meta(ge=1, le=LONGEST_WAIT),
        "Seconds of silence after which a node counts as lost; the loss of a node whose connection closes "
        "is noticed at once. Raise it when the network has longer temporary outages; it must be less than "
        "control.lease_ttl.",
    ] = 15.0
    stop_grace: Annotated[
        float,
        Meta(ge=0, le=LONGEST_WAIT),
        "Seconds between asking workers to stop and killing them. Make it longer than one save takes.",
    ] = 30.0
    max_pause: Annotated[
        float,
        Meta(ge=0, le=LONGEST_WAIT),
        "Seconds for which a failed run whose recovery an operator paused waits to be resumed; then it "
        "stops with code 29. Raise it when nobody may be able to look for longer than that, lower it when "
        "idle machines cost more than a new launch.",
    ] = 86_400.0
    failure_causes: Annotated[
        str,
        "Messages of failures and their causes, one per line as `cause: regular expression`, matched "
        "before Holdfast's own; empty means none. Set it when failures of your storage, network or "
        "scheduler are mistaken for the job's.",
    ] = ""
    print_saves: Annotated[
        bool,
        "Whether a line is printed for each event of a save: scheduled, committed, replicated, drained, "
        "verified; at most 120 lines a minute. Turn it off where the log is for other things.",
    ] = True
    alert_command: Annotated[
        str,
        "Command that is run at every incident, stop and exclusion, with JSON on its standard input; empty "
        "means none. Set it to notify people; the command must end within 10 seconds.",
    ] = ""
    alert_url: Annotated[
        str,
        "URL to which the same JSON is posted; empty means none. Set it where a chat or paging service "
        "accepts such posts.",
    ] = ""


class MonitorSettings(msgspec.Struct, frozen=True, kw_only=True):
    """How `holdfast run` finds ranks that hang."""

    enable_ft_package: Annotated[
        bool,
        "Whether Holdfast looks for ranks that hang at all. Turn it off for a run that another program "
        "watches; switch off single limits with 0.",
    ] = True
    initial_rank_heartbeat_timeout: Annotated[
        float,
        Meta(ge=0, le=LONGEST_WAIT),
        "Seconds without a sign of life after which a rank counts as hung, until it has completed a step of "
        "the attempt; 0 switches it off. Raise it when loading and compiling before that takes longer.",
    ] = 1800.0
    rank_heartbeat_timeout: Annotated[
        float,
        Meta(ge=0, le=LONGEST_WAIT),
        "The same afterwards, in a section that has no limit of its own; 0 switches it off. Raise it when "
        "such a section is longer than this without a `run.beat()`.",
    ] = 300.0
    rank_section_timeouts: Annotated[
        str,
        "Seconds that a rank may spend in a section after its first step (`setup` and `loading` also "
        "before); 0 means no limit. Sections inside it count as well if they have no limit of their own "
        "and this setting is given. List all sections that should have a limit; raise a limit that healthy "
        "runs come near.",
    ] = "setup:600,step:180,checkpointing:420"
    rank_out_of_section_timeout: Annotated[
        float,
        Meta(ge=0, le=LONGEST_WAIT),
        "Seconds that a rank may be in no section after its first step; 0 switches it off. Raise it when the "
        "loop does long work between steps, or name that work with `run.section`.",
    ] = 300.0
    rank_exit_timeout: Annotated[
        float,
        Meta(ge=0, le=LONGEST_WAIT),
        "Seconds without a sign of life that a rank may take from the end of its loop to the end of its "
        "process, in no section or in one without a limit; 0 switches it off. Raise it when the script does "
        "longer work after the loop, or give signs with `run.beat()`.",
    ] = 3600.0
    calc_ft_timeouts: Annotated[
        bool,
        "Learn the limits of sections from measured times, for the attempts after this one. Turn it on to "
        "find hangs sooner, once the run is steady.",
    ] = False
    import_ft_state: Annotated[
        str,
        "An ft_state.json of nvidia-resiliency-ext whose calculated timeouts are taken over; empty means "
        "none. Set it when a run comes from there.",
    ] = ""
    simulate_fault: Annotated[
        bool,
        "Let one rank fail on purpose, once, in the first attempt of a launch. Set it to rehearse recovery.",
    ] = False
    simulated_fault_type: Annotated[
        Literal["random", "rank_hung", "rank_killed"],
        "What happens to that rank: it stops (SIGSTOP), is killed (SIGKILL), or either. Set it to rehearse "
        "one of them.",
    ] = "random"
    simulated_fault_rank: Annotated[
        Annotated[int, Meta(ge=0, le=LARGEST_COUNT)] | Literal["any"],
        "The rank that fails; `any` picks one. Set it to rehearse the loss of a particular rank.",
    ] = "any"
    simulated_fault_base_delay: Annotated[
        float,
        Meta(ge=0, le=LONGEST_WAIT),
        "Seconds from the first completed step to the fault; up to a fifth of it is added at random. Raise "
        "it so that a checkpoint is saved before the fault.",
    ] = 0.0


def parse_fresh_parts(text: str) -> list[str]:
    """`"optimizer,data"` as a list. ValueError says what is wrong."""
    found = [part.strip() for part in text.split(",")] if text.strip() else []
    for part in found:
        if not part.isidentifier():
            raise ValueError(f"{part[:80]!r} is not the name of a tracked part, or data")
    return found


def parse_section_timeouts(text: str) -> dict[str, float]:
    """`"setup:600,step:180"` as a mapping. ValueError says what is wrong."""
    found: dict[str, float] = {}
    for part in text.split(",") if text.strip() else ():
        name, colon, seconds = (piece.strip() for piece in part.partition(":"))
        if not colon or not _SECTION.fullmatch(name):
            raise ValueError(f"{part.strip()[:80]!r} is not a section's name, a colon and seconds")
        if not _SECONDS.fullmatch(seconds) or float(seconds) > LONGEST_WAIT:
            raise ValueError(f"{seconds[:80]!r} for {name} is not a number from 0 to {LONGEST_WAIT:.0f}")
        if name in found:
            raise ValueError(f"{name} is given twice")
        found[name] = float(seconds)
    return found


FAILURE_CAUSES = ("preemption", "infrastructure", "device", "job", "data", "checkpoint", "hang", "unknown")
"""The causes a failure may have: the values of `policy.signs.Cause`."""


def parse_failure_causes(text: str) -> list[tuple[str, str]]:
    """Causes with the patterns of their messages, in order. Raises ValueError with what is wrong."""
    found = []
    for line in filter(None, map(str.strip, text.splitlines())):
        cause, colon, pattern = (piece.strip() for piece in line.partition(":"))
        if not colon or cause not in FAILURE_CAUSES:
            raise ValueError(
                f"{line[:80]!r} does not begin with one of {', '.join(FAILURE_CAUSES)} and a colon"
            )
        try:
            empty = re.compile(pattern, re.IGNORECASE).search("") is not None
        except (re.error, RecursionError, OverflowError) as error:
            raise ValueError(f"{pattern[:80]!r} is not a regular expression: {error}") from None
        if empty:
            raise ValueError(f"{pattern[:80]!r} matches every message")
        found.append((cause, pattern))
    return found


class JournalSettings(msgspec.Struct, frozen=True, kw_only=True):
    """The record of events and decisions."""

    step_flush: Annotated[
        float,
        Meta(ge=0, le=LONGEST_WAIT),
        "Seconds that finished steps may wait before they are written to the journal; 0 writes each at once. "
        "Raise it when steps are very short or the storage is slow.",
    ] = 1.0


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """The whole tree. The attributes are the sections of the TOML file."""

    run: RunSettings = msgspec.field(default_factory=RunSettings)
    checkpoint: CheckpointSettings = msgspec.field(default_factory=CheckpointSettings)
    control: ControlSettings = msgspec.field(default_factory=ControlSettings)
    launch: LaunchSettings = msgspec.field(default_factory=LaunchSettings)
    monitor: MonitorSettings = msgspec.field(default_factory=MonitorSettings)
    validation: ValidationSettings = msgspec.field(default_factory=ValidationSettings)
    stop: StopSettings = msgspec.field(default_factory=StopSettings)
    slurm: SlurmSettings = msgspec.field(default_factory=SlurmSettings)
    health: HealthSettings = msgspec.field(default_factory=HealthSettings)
    straggler: StragglerSettings = msgspec.field(default_factory=StragglerSettings)
    inprocess: InProcessSettings = msgspec.field(default_factory=InProcessSettings)
    journal: JournalSettings = msgspec.field(default_factory=JournalSettings)

    def absolute(self, base: Path | None = None) -> Settings:
        """The same settings with every path absolute: from `base`, or else from the current directory."""
        named = self.checkpoint.resume_from
        plain = named in ("auto", "fresh") or is_step(named) or "://" in named
        return msgspec.structs.replace(
            self,
            run=msgspec.structs.replace(self.run, dir=_absolute(self.run.dir, base)),
            checkpoint=msgspec.structs.replace(
                self.checkpoint,
                root=_absolute(self.checkpoint.root, base),
                resume_from=named if plain else _absolute(named, base),
                non_persistent_local_ckpt_dir=_absolute(self.checkpoint.non_persistent_local_ckpt_dir, base),
            ),
            stop=msgspec.structs.replace(self.stop, stop_file=_absolute(self.stop.stop_file, base)),
            monitor=msgspec.structs.replace(
                self.monitor, import_ft_state=_absolute(self.monitor.import_ft_state, base)
            ),
        )

    def checkpoint_root(self) -> Path:
        """Where the checkpoints lie."""
        return Path(self.checkpoint.root) if self.checkpoint.root else Path(self.run.dir) / "checkpoints"

    def stop_file(self) -> Path:
        """The file whose appearance asks for a stop."""
        return Path(self.stop.stop_file) if self.stop.stop_file else Path(self.run.dir) / "stop"

    def handover(self) -> float:
        """Seconds to wait for the last attempt's writer; less than other ranks wait for the outcome."""
        patience = self.control.decision_timeout - self.control.lease_ttl
        return max(0.0, min(self.checkpoint.handover_timeout, 0.8 * patience))

    def get(self, key: str) -> object:
        """The value of a dotted key of FIELDS."""
        section, _, name = key.partition(".")
        return getattr(getattr(self, section), name)


def _absolute(path: str, base: Path | None) -> str:
    if not path or Path(path).is_absolute():
        return path
    return str(base / path if base is not None else Path(path).absolute())


FIELDS: Mapping[str, Field] = read_fields(Settings)
"""Every setting by its dotted key, in the order of the classes."""
