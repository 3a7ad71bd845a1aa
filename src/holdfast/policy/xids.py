"""What the numbers mean by which NVIDIA's driver reports errors in the kernel log ("Xid").

Facts from NVIDIA's public catalogue of Xid errors, in our words, for the data-centre devices. A number that
is not here is told as it is: it accuses nobody.
"""

from __future__ import annotations

from enum import StrEnum

import msgspec


class XidClass(StrEnum):
    APPLICATION = "application"
    """A program's own bug causes it as well; starting again is enough."""
    NOTICE = "notice"
    """Says what was done about something else."""
    RESET = "reset"
    """The device must be reset before it is used again."""
    DRAIN = "drain"
    """The node must be taken out of service: a reset alone does not cure it, or touches its other devices."""
    HARDWARE = "hardware"
    """Something is broken that has to be replaced or looked at by a person."""


class Xid(msgspec.Struct, frozen=True, kw_only=True):
    number: int
    meaning: str
    kind: XidClass

    @property
    def for_node(self) -> str:
        """What it means for the node."""
        return _FOR_NODE[self.kind]


_FOR_NODE = {
    XidClass.APPLICATION: "nothing, unless it comes back on this device with other programs",
    XidClass.NOTICE: "nothing by itself; look at the errors before it",
    XidClass.RESET: "end what uses the device, then reset it (`nvidia-smi -r -i N`) or reboot",
    XidClass.DRAIN: "drain it and reboot; if it comes back, have the hardware looked at",
    XidClass.HARDWARE: "drain it and have the hardware looked at",
}

_A, _N, _R, _D, _H = (
    XidClass.APPLICATION,
    XidClass.NOTICE,
    XidClass.RESET,
    XidClass.DRAIN,
    XidClass.HARDWARE,
)

_COPY = ("an exception in a copy engine", _A)
_VIDEO = ("an exception in a video engine", _A)
_LINK = ("an error in the hardware of NVLink", _D)
_SETTINGS = ("the device's power controller could not reach its own settings", _D)

_TABLE: dict[int, tuple[str, XidClass]] = {
    8: ("the device stopped working on a channel", _A),
    13: ("an exception in a compute engine, often an access out of bounds", _A),
    31: ("an access to memory that is not mapped", _A),
    32: ("an invalid or corrupted command buffer", _A),
    38: ("an error of the driver's firmware", _R),
    **dict.fromkeys((39, 40, 41, 70, 71, 72, 75, 76, 77, 85), _COPY),
    **dict.fromkeys((42, 47, 65, 68, 73, 82, 83, 84, 86, 88, 89), _VIDEO),
    43: ("a program's work was stopped after its own error", _A),
    44: ("a fault while contexts were switched", _A),
    45: ("a program's work was cleaned up, because it ended or failed", _N),
    46: ("the device stopped answering the driver", _R),
    48: ("a memory error that ECC could not correct", _R),
    54: ("the device's own power cable is not connected", _H),
    59: ("an error of the device's internal controller", _R),
    61: ("the device's internal controller stopped at a breakpoint", _R),
    62: ("the device's internal controller halted", _R),
    63: ("a bad row or page of memory was noted; it is replaced at the next reset", _N),
    64: ("a bad row or page of memory could not be replaced", _H),
    66: ("an illegal access by the driver", _A),
    69: ("a wrong use of a compute engine by a program", _A),
    74: ("an error of NVLink: this device, the other end, or what is between them", _D),
    78: ("a virtual device could not start", _R),
    79: ("the device has fallen off the bus: it cannot be reached any more", _D),
    92: ("many memory errors that ECC corrected", _N),
    94: ("a memory error beyond correction, contained: only the program that met it fails", _R),
    95: ("a memory error beyond correction, not contained: every program on the device is affected", _R),
    109: ("a context switch did not end in time", _R),
    110: ("a security fault", _D),
    119: ("the device's system processor did not answer the driver in time", _R),
    120: ("the device's system processor failed", _R),
    121: ("an error on the link between the device and its host processor", _N),
    **dict.fromkeys((122, 123, 124), _SETTINGS),
    125: ("the device's store of its own facts cannot be read", _D),
    137: ("an illegal access through NVLink by a program", _A),
    140: ("memory errors that were not recovered from", _R),
    143: ("the device could not be initialised", _D),
    **dict.fromkeys(range(144, 151), _LINK),
    154: ("the driver says which action would bring the device back", _N),
    156: ("a part of the device was retired", _N),
    157: ("a bad part of the device could not be retired", _H),
    158: ("the device did not answer in time and cannot go on", _D),
    160: ("a channel of memory was retired", _N),
    161: ("a bad channel of memory could not be retired", _H),
    167: ("the device's bus did not answer in time and cannot go on", _D),
    171: ("an error in the device's memory that ECC could not correct", _R),
    172: ("an error in the device's internal memory that ECC could not correct", _R),
    173: ("the link between the device and its host processor failed", _D),
}


def meaning_of(number: int) -> Xid | None:
    """None if it is not one of those in the table."""
    found = _TABLE.get(number)
    return Xid(number=number, meaning=found[0], kind=found[1]) if found is not None else None


def known() -> list[Xid]:
    return [Xid(number=number, meaning=text, kind=kind) for number, (text, kind) in sorted(_TABLE.items())]


def accuses_device(number: int) -> bool:
    """Whether it means that the device must not be used as it is."""
    found = meaning_of(number)
    return found is not None and found.kind in (XidClass.RESET, XidClass.DRAIN, XidClass.HARDWARE)
