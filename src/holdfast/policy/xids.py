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


class Xid(msgspec.Struct, frozen=True):
    meaning: str
    kind: XidClass
    proof: bool = False
    """Whether recovery takes it for broken hardware by itself: memory errors beyond correction, failed row
    remapping, NVLink, off the bus, a dead controller. A program's bug causes some others too, some follow
    from its end, and the rest leave open whether the device is to blame."""

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

_COPY = Xid("an exception in a copy engine", _A)
_VIDEO = Xid("an exception in a video engine", _A)
_LINK = Xid("an error in the hardware of NVLink", _D)
_SETTINGS = Xid("the device's power controller could not reach its own settings", _D)

XIDS: dict[int, Xid] = {
    8: Xid("the device stopped working on a channel", _A),
    13: Xid("an exception in a compute engine, often an access out of bounds", _A),
    31: Xid("an access to memory that is not mapped", _A),
    32: Xid("an invalid or corrupted command buffer", _A),
    38: Xid("an error of the driver's firmware", _R),
    **dict.fromkeys((39, 40, 41, 70, 71, 72, 75, 76, 77, 85), _COPY),
    **dict.fromkeys((42, 47, 65, 68, 73, 82, 83, 84, 86, 88, 89), _VIDEO),
    43: Xid("a program's work was stopped after its own error", _A),
    44: Xid("a fault while contexts were switched", _A),
    45: Xid("a program's work was cleaned up, because it ended or failed", _N),
    46: Xid("the device stopped answering the driver", _R),
    48: Xid("a memory error that ECC could not correct", _R, proof=True),
    54: Xid("the device's own power cable is not connected", _H),
    59: Xid("an error of the device's internal controller", _R),
    61: Xid("the device's internal controller stopped at a breakpoint", _R),
    62: Xid("the device's internal controller halted", _R, proof=True),
    63: Xid("a bad row or page of memory was noted; it is replaced at the next reset", _N),
    64: Xid("a bad row or page of memory could not be replaced", _H, proof=True),
    66: Xid("an illegal access by the driver", _A),
    69: Xid("a wrong use of a compute engine by a program", _A),
    74: Xid("an error of NVLink: this device, the other end, or what is between them", _D, proof=True),
    78: Xid("a virtual device could not start", _R),
    79: Xid("the device has fallen off the bus: it cannot be reached any more", _D, proof=True),
    92: Xid("many memory errors that ECC corrected", _N),
    94: Xid(
        "a memory error beyond correction, contained: only the program that met it fails", _R, proof=True
    ),
    95: Xid(
        "a memory error beyond correction, not contained: every program on the device is affected",
        _R,
        proof=True,
    ),
    109: Xid("a context switch did not end in time", _R),
    110: Xid("a security fault", _D),
    119: Xid("the device's system processor did not answer the driver in time", _R, proof=True),
    120: Xid("the device's system processor failed", _R, proof=True),
    121: Xid("an error on the link between the device and its host processor", _N),
    **dict.fromkeys((122, 123, 124), _SETTINGS),
    125: Xid("the device's store of its own facts cannot be read", _D),
    137: Xid("an illegal access through NVLink by a program", _A),
    140: Xid("memory errors that were not recovered from", _R, proof=True),
    143: Xid("the device could not be initialised", _D),
    **dict.fromkeys(range(144, 151), _LINK),
    154: Xid("the driver says which action would bring the device back", _N),
    156: Xid("a part of the device was retired", _N),
    157: Xid("a bad part of the device could not be retired", _H),
    158: Xid("the device did not answer in time and cannot go on", _D),
    160: Xid("a channel of memory was retired", _N),
    161: Xid("a bad channel of memory could not be retired", _H),
    167: Xid("the device's bus did not answer in time and cannot go on", _D),
    171: Xid("an error in the device's memory that ECC could not correct", _R),
    172: Xid("an error in the device's internal memory that ECC could not correct", _R),
    173: Xid("the link between the device and its host processor failed", _D),
}


def accuses_device(number: int) -> bool:
    """Whether it means that the device must not be used as it is."""
    found = XIDS.get(number)
    return found is not None and found.kind in (XidClass.RESET, XidClass.DRAIN, XidClass.HARDWARE)


def proves_broken(number: int) -> bool:
    found = XIDS.get(number)
    return found is not None and found.proof
