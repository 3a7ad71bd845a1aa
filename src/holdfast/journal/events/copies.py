"""Events of the copies of a checkpoint: on nodes, on peers and in the remote; made, checked, given up."""

from __future__ import annotations

from holdfast.base import Rendered, duration, plural, printable, size
from holdfast.journal import Event, because
from holdfast.journal.events.saves import format_save_line


class CopyDrained(Event, tag="copy_drained"):
    """A committed checkpoint now has a copy in the remote, complete and confirmed."""

    checkpoint: str
    step: int
    remote: str
    bytes: int
    seconds: float
    repeated: int = 0
    """Requests that had to be made again."""
    read_back: int = 0
    """Files whose bytes the store could not confirm by a checksum of its own."""
    waiting: int = 0
    """Checkpoints still waiting to be copied."""

    def render(self) -> Rendered:
        behind = f"; {plural(self.waiting, 'checkpoint')} waiting" if self.waiting else ""
        again = f", {plural(self.repeated, 'request')} repeated" if self.repeated else ""
        text = f"copied to {printable(self.remote)}: {printable(self.checkpoint)}, {self._took}"
        return Rendered(f"{text}{again}{behind}", "saved")

    def save_line(self) -> str:
        return format_save_line(
            "drained", self.step, self.checkpoint, f"to {printable(self.remote)}", self._took
        )

    @property
    def _took(self) -> str:
        return f"{size(self.bytes)} in {duration(self.seconds)}"


class DrainFailed(Event, tag="drain_failed"):
    """A checkpoint could not be copied to the remote; the local one is untouched."""

    checkpoint: str
    step: int
    remote: str
    error: str

    def render(self) -> Rendered:
        what = f"not copied to {printable(self.remote)}: {printable(self.checkpoint)}"
        return Rendered(f"{what}: {printable(self.error)}", "fault")

    def save_line(self) -> str:
        why = f"to {printable(self.remote)}: {printable(self.error)}"
        return format_save_line("not drained", self.step, self.checkpoint, why)


class CopyDeleted(Event, tag="copy_deleted"):
    """The remote copy of a checkpoint that retention had deleted is gone too."""

    checkpoint: str
    remote: str
    objects: int

    def render(self) -> Rendered:
        return Rendered(f"deleted from {printable(self.remote)}: {printable(self.checkpoint)}", "plain")


class CopyFetched(Event, tag="copy_fetched"):
    """A resume fetched a checkpoint from the remote, verified, because the local one could not be used."""

    checkpoint: str
    step: int
    remote: str
    bytes: int
    seconds: float
    because: list[str]
    quarantine: str = ""
    """Where the bad local directory went."""

    def render(self) -> Rendered:
        details = because(self.because)
        if self.quarantine:
            details.append(f"the bad local copy is kept in {printable(self.quarantine)}")
        text = f"fetched from {printable(self.remote)}: {printable(self.checkpoint)}, {size(self.bytes)}"
        return Rendered(f"{text} in {duration(self.seconds)}", "good", details)


class CopyReplicated(Event, tag="copy_replicated"):
    """Rank 0's shards are now on a peer too, verified there. Other ranks' are not journalled one by one."""

    checkpoint: str
    step: int
    rank: int
    node: str
    """The peer that holds it."""
    seconds: float
    """How long sending took."""

    def render(self) -> Rendered:
        what = f"rank {self.rank}'s part of {printable(self.checkpoint)}"
        text = f"replica on {printable(self.node)} of {what}, after {duration(self.seconds)}"
        return Rendered(text, "plain")

    def save_line(self) -> str:
        where = f"rank {self.rank}'s part on {printable(self.node)} in {duration(self.seconds)}"
        return format_save_line("replicated", self.step, self.checkpoint, where)


class ReplicaFailed(Event, tag="replica_failed"):
    """A rank's shards could not be copied to a peer; its own copy is untouched, and training goes on."""

    checkpoint: str
    step: int
    rank: int
    node: str
    """The peer that should have held it."""
    error: str

    def render(self) -> Rendered:
        what = f"rank {self.rank}'s part of {printable(self.checkpoint)}"
        return Rendered(f"no replica on {printable(self.node)} of {what}", "warning", [printable(self.error)])

    def save_line(self) -> str:
        why = f"rank {self.rank}'s part on {printable(self.node)}: {printable(self.error)}"
        return format_save_line("not replicated", self.step, self.checkpoint, why)


class CopyReadBack(Event, tag="copy_read_back"):
    """A committed checkpoint was read from the checkpoint root, alongside training: every byte is right."""

    checkpoint: str
    step: int
    bytes: int
    seconds: float

    def render(self) -> Rendered:
        text = f"read back: {printable(self.checkpoint)}, {self._took}"
        return Rendered(f"{text}, every byte is right", "plain")

    def save_line(self) -> str:
        return format_save_line("verified", self.step, self.checkpoint, "read back", self._took)

    @property
    def _took(self) -> str:
        return f"{size(self.bytes)} in {duration(self.seconds)}"


class CopyQuarantined(Event, tag="copy_quarantined"):
    """A copy whose bytes are wrong: it is never read again. Says nothing about the checkpoint."""

    checkpoint: str
    node: str
    kind: str
    """own, replica or global."""
    reasons: list[str]

    def render(self) -> Rendered:
        kind = f"{printable(self.kind)} copy on {printable(self.node)}"
        text = f"quarantined: {kind} of {printable(self.checkpoint)}"
        return Rendered(text, "fault", [printable(item) for item in self.reasons])


class CopyReplaced(Event, tag="copy_replaced"):
    """After a resume, a lost or bad copy of its checkpoint was made again, and verified."""

    checkpoint: str
    step: int
    rank: int
    """The rank whose shards it holds, as numbered when they were saved."""
    node: str
    kind: str
    """own or replica."""
    sources: list[str]
    """Where the bytes came from: own, peer, global."""
    bytes: int
    seconds: float

    def render(self) -> Rendered:
        what = f"{printable(self.kind)} copy on {printable(self.node)} of rank {self.rank}'s part"
        took = f"{size(self.bytes)} from {printable(' and '.join(self.sources))}"
        text = f"replaced: {what} of {printable(self.checkpoint)}, {took} in {duration(self.seconds)}"
        return Rendered(text, "good")


class CopiesDropped(Event, tag="copies_dropped"):
    """Local copies that a node gave up for newer ones, or for want of memory."""

    node: str
    checkpoints: list[str]
    reasons: list[str]
    """One for each."""
    bytes: int

    def render(self) -> Rendered:
        pairs = zip(self.checkpoints, self.reasons, strict=False)
        details = [f"{printable(name)}: {printable(why)}" for name, why in pairs]
        what = f"its copies of {plural(len(self.checkpoints), 'checkpoint')}"
        return Rendered(f"{printable(self.node)} gave up {what}, {size(self.bytes)}", "plain", details)


class StorageAlarm(Event, tag="storage_alarm"):
    """Two checkpoints in a row could not be used, so the storage itself was tested before going on."""

    checkpoints: list[str]
    place: str
    probe: str
    """What the test showed; empty if nothing was wrong with the storage."""

    def render(self) -> Rendered:
        showed = printable(self.probe) or "it took and gave back what was written"
        details = [f"could not be used: {printable(name)}" for name in self.checkpoints]
        return Rendered(f"storage alarm: {printable(self.place)} was tried: {showed}", "fault", details)
