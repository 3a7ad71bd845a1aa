"""What the numbers mean by which NVIDIA's driver reports errors in the kernel log ("Xid").

Facts in our words, for the data-centre devices from Ampere on, from two public sources:

* SOURCE, NVIDIA's catalogue of Xids (release 610). `says` is its immediate action, from which our class is
  taken. Where the catalogue has no action for a number, or one that does not bear our class out, `says` is
  empty: then the class is *unproven*, is told as such, and accuses nobody.
* NAMES, the driver's own header, from which the meaning of a number is taken that the catalogue calls unused.

A number that is not here is told as it is: it accuses nobody either.
"""

from __future__ import annotations

from enum import StrEnum

import msgspec

SOURCE = "https://docs.nvidia.com/deploy/xid-errors/analyzing-xid-catalog.html"
NAMES = "https://github.com/NVIDIA/open-gpu-kernel-modules, src/common/sdk/nvidia/inc/nverror.h"


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
    says: str = ""
    """What NVIDIA's catalogue says is to be done at once; empty if it does not bear `kind` out."""
    proof: bool = False
    """Whether recovery takes it for broken hardware by itself: memory errors beyond correction, failed row
    remapping, NVLink, off the bus, a dead controller. A program's bug causes some others too, some follow
    from its end, and the rest leave open whether the device is to blame."""

    @property
    def unproven(self) -> bool:
        """Whether no public source says what is to be done about it."""
        return not self.says

    @property
    def for_node(self) -> str:
        """What it means for the node."""
        if self.unproven:
            return f"unproven; perhaps {_FOR_NODE[self.kind]}"
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

_APP, _IGNORE, _RESET, _REBOOT = "RESTART_APP", "IGNORE", "RESET_GPU", "RESTART_BM"

_COPY = Xid("an exception in a copy engine", _A, _APP)
_VIDEO = Xid("an exception in a video engine", _A, _APP)
_OLD_VIDEO = Xid("an exception in a video engine", _A)
_LINK = Xid("an error in the hardware of NVLink", _D, "WORKFLOW_NVLINK5_ERR")
_SETTINGS = Xid("the device's power controller could not reach its own settings", _D)

XIDS: dict[int, Xid] = {
    8: Xid("the device stopped working on a channel", _A, _APP),
    13: Xid("an exception in a compute engine, often an access out of bounds", _A, _APP),
    31: Xid("an access to memory that is not mapped", _A, _APP),
    32: Xid("an invalid or corrupted command buffer", _A, _APP),
    38: Xid("an error of the driver's firmware", _N, _IGNORE),
    **dict.fromkeys((39, 40, 41, 70, 71, 72, 75, 76, 77, 85), _COPY),
    **dict.fromkeys((42, 47, 65, 73), _OLD_VIDEO),
    **dict.fromkeys((68, 82, 83, 84, 86, 88, 89), _VIDEO),
    43: Xid("a program's work was stopped after its own error", _A, _IGNORE),
    44: Xid("a fault while contexts were switched", _A, _IGNORE),
    45: Xid("a program's work was cleaned up, because it ended or failed", _N, "WORKFLOW_XID_45"),
    46: Xid("the device stopped answering the driver", _R, _RESET),
    48: Xid("a memory error that ECC could not correct", _R, "WORKFLOW_XID_48", proof=True),
    54: Xid("the device's own power cable is not connected", _H, "CHECK_MECHANICALS"),
    59: Xid("an error of the device's internal controller", _R),
    61: Xid("the device's internal controller stopped at a breakpoint", _R),
    62: Xid("the device's internal controller halted", _R, _RESET, proof=True),
    63: Xid("a bad row or page of memory was noted; it is replaced at the next reset", _N, _IGNORE),
    64: Xid("a bad row or page of memory could not be replaced", _H, f"{_RESET}, then CONTACT_SUPPORT", True),
    66: Xid("an illegal access by the driver", _A, _IGNORE),
    69: Xid("a wrong use of a compute engine by a program", _A, _APP),
    74: Xid(
        "an error of NVLink: this device, the other end, or what is between them",
        _D,
        "WORKFLOW_NVLINK_ERR",
        proof=True,
    ),
    78: Xid("a virtual device could not start", _N, "UPDATE_SWFW"),
    79: Xid("the device has fallen off the bus: it cannot be reached any more", _D, _REBOOT, proof=True),
    92: Xid("many memory errors that ECC corrected", _N, _IGNORE),
    94: Xid(
        "a memory error beyond correction, contained: only the program that met it fails",
        _R,
        f"{_APP}, and {_RESET} when convenient",
        proof=True,
    ),
    95: Xid(
        "a memory error beyond correction, not contained: every program on the device is affected",
        _R,
        _RESET,
        proof=True,
    ),
    109: Xid("a context switch did not end in time", _R, _RESET),
    110: Xid("a security fault", _R, _RESET),
    119: Xid("the device's system processor did not answer the driver in time", _R, _RESET, proof=True),
    120: Xid("the device's system processor failed", _R, _RESET, proof=True),
    121: Xid("an error on the link between the device and its host processor", _N, _IGNORE),
    **dict.fromkeys((122, 123, 124), _SETTINGS),
    125: Xid("the device's store of its own facts cannot be read", _D),
    137: Xid("an illegal access through NVLink by a program", _A, _IGNORE),
    140: Xid("memory errors that were not recovered from", _R, _RESET, proof=True),
    143: Xid("the device could not be initialised", _R, _RESET),
    **dict.fromkeys(range(144, 151), _LINK),
    154: Xid("the driver says which action would bring the device back", _N, "XID_154"),
    156: Xid("a part of the device was retired", _R, _RESET),
    157: Xid("a bad part of the device could not be retired", _H),
    158: Xid("the device did not answer in time and cannot go on", _R, _RESET),
    160: Xid("a channel of memory was retired", _N, _IGNORE),
    161: Xid("a bad channel of memory could not be retired", _H),
    167: Xid("the device's bus did not answer in time and cannot go on", _D),
    171: Xid("an error in the device's memory that ECC could not correct", _R),
    172: Xid("an error in the device's internal memory that ECC could not correct", _R),
    173: Xid("the link between the device and its host processor failed", _D),
}


def accuses_device(number: int) -> bool:
    """Whether it means that the device must not be used as it is."""
    found = XIDS.get(number)
    grave = (XidClass.RESET, XidClass.DRAIN, XidClass.HARDWARE)
    return found is not None and not found.unproven and found.kind in grave


def proves_broken(number: int) -> bool:
    found = XIDS.get(number)
    return found is not None and found.proof
