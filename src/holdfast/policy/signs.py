"""The texts, classes and numbers of errors by which a cause is recognised, and the words for causes. Pure.

Every text comes with a message as it really occurs; a test classifies each of these, and compares the tables
with docs/guides/recovery.md. Anything that is not here is unknown, whatever it is.
"""

from __future__ import annotations

import builtins
import errno
import re
from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import NamedTuple

import msgspec

from holdfast.policy.evidence import Raised
from holdfast.policy.timeouts import CHECKPOINTING, LOADING, SETUP, STEP

# What the numbers mean with which NVIDIA's driver reports errors in the kernel log ("Xid").
#
# Facts in our words, for the data-centre devices from Ampere on, from two public sources:
#
# * SOURCE, NVIDIA's catalogue of Xids (release 610). `says` is its immediate action, and our class is derived
#   from that. Where the catalogue has no action for a number, or one that does not bear our class out, `says`
#   is empty: then the class is *unproven*, is reported as such, and accuses nobody.
# * NAMES, the driver's own header, which gives the meaning of numbers that the catalogue calls unused.
#
# A number that is not here is reported as it is, and accuses nobody either.


SOURCE = "https://docs.nvidia.com/deploy/xid-errors/analyzing-xid-catalog.html"
NAMES = "https://github.com/NVIDIA/open-gpu-kernel-modules, src/common/sdk/nvidia/inc/nverror.h"


class XidClass(StrEnum):
    APPLICATION = "application"
    """A program's own bug can cause it too; starting again is enough."""
    NOTICE = "notice"
    """It reports what was done about something else."""
    RESET = "reset"
    """The device must be reset before it is used again."""
    DRAIN = "drain"
    """The node must be taken out of service: a reset alone does not cure it, or affects its other devices."""
    HARDWARE = "hardware"
    """Something is broken that must be replaced, or looked at by a person."""


class Xid(msgspec.Struct, frozen=True):
    meaning: str
    kind: XidClass
    says: str = ""
    """What to do at once, according to NVIDIA's catalogue; empty if it does not bear `kind` out."""
    proof: bool = False
    """Whether recovery takes it alone as proof of broken hardware: memory errors beyond correction, failed
    row remapping, NVLink, off the bus, a dead controller. Of the others, some can be caused by a program's
    bug, some follow from its end, and the rest leave open whether the device is to blame."""

    @property
    def unproven(self) -> bool:
        """Whether no public source says what to do about it."""
        return not self.says

    @property
    def for_node(self) -> str:
        """What it means for the node, in words."""
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
    """Whether an Xid means that the device must not be used as it is."""
    found = XIDS.get(number)
    grave = (XidClass.RESET, XidClass.DRAIN, XidClass.HARDWARE)
    return found is not None and not found.unproven and found.kind in grave


def proves_broken(number: int) -> bool:
    found = XIDS.get(number)
    return found is not None and found.proof


class Cause(StrEnum):
    PREEMPTION = "preemption"
    """Somebody asked the worker to end: a scheduler, an operator."""
    INFRASTRUCTURE = "infrastructure"
    """Something around the job broke: a node, the network, storage, a kill from outside."""
    DEVICE = "device"
    JOB = "job"
    """The job's own doing: an exception, out of memory, divergence."""
    DATA = "data"
    CHECKPOINT = "checkpoint"
    HANG = "hang"
    UNKNOWN = "unknown"


LOADER_KILLED = "is killed by signal: Killed"
"""What torch says about a process that loads data when somebody sent it SIGKILL."""


class Sign(NamedTuple):
    """A text by which a cause is recognised."""

    cause: Cause
    pattern: str
    """Looked for in the exception's class and message, or in a line of standard error, ignoring case."""
    example: str
    """A message as it really occurs; a test checks that this row is the one that matches it."""
    symptom: bool = False
    """Whether it only says that a peer was lost."""
    hardware: bool = False
    """Whether it is the device's own word, which accuses that very device."""
    here: bool = True
    """Whether the node that it was seen on may be at fault."""
    fabric: bool = False
    """Whether it is the word of a network adapter or its library, from which hangs and timeouts follow."""


SIGNS: tuple[Sign, ...] = (
    # memory: the same job will need as much again
    Sign(
        Cause.JOB,
        r"out of memory|outofmemoryerror",
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.",
    ),
    Sign(
        Cause.JOB,
        r"can(no|')t allocate memory|\bmemoryerror\b",
        "RuntimeError: [enforce fail at alloc_cpu.cpp:121] . DefaultCPUAllocator: can't allocate memory",
    ),
    Sign(
        Cause.JOB,
        r"(out of|insufficient) shared memory",
        "RuntimeError: DataLoader worker (pid 7) is killed by signal: Bus error. It is possible that "
        "dataloader's workers are out of shared memory.",
    ),
    Sign(
        Cause.JOB,
        r"device-side assert triggered",
        "torch.AcceleratorError: CUDA error: device-side assert triggered",
    ),
    # the fabric: before what only follows from it
    Sign(
        Cause.INFRASTRUCTURE,
        r"call to ibv_\w+ failed",
        "misc/ibvwrap.cc:291 NCCL WARN Call to ibv_modify_qp failed with 110 Connection timed out, on dev "
        "mlx5_bond_1:1, curr state INIT, next state RTR",
        fabric=True,
    ),
    Sign(
        Cause.INFRASTRUCTURE,
        r"\bibv_\w+\b.*\b(error|failed|failure|timed out)",
        "RuntimeError: ibv_poll_cq error on mlx5_3:1: transport retry counter exceeded",
        fabric=True,
    ),
    Sign(
        Cause.INFRASTRUCTURE,
        r"net/ib\w* ?: ?([\w.:]+ ?:? )?got (completion|async)",
        "NCCL WARN NET/IB : Got completion from peer 10.0.0.7<54862> with status=12 opcode=0 len=0 vendor "
        "err 129 (Recv)",
        fabric=True,
    ),
    Sign(
        Cause.INFRASTRUCTURE,
        r"net/ofi .*(error|failed)|\blibfabric\b.*(error|failed)",
        "NCCL WARN NET/OFI Request 0x7f5c completed with error. RC: 113. Error: unresponsive receiver",
        fabric=True,
    ),
    Sign(
        Cause.INFRASTRUCTURE,
        r"transport retry count exceeded",
        "ib_mlx5_log.c:143  Transport retry count exceeded on mlx5_0:1/IB (synd 0x15 vend 0x81 hw_synd 0/0)",
        fabric=True,
    ),
    # collectives that did not end
    Sign(
        Cause.HANG,
        r"watchdog caught collective operation timeout",
        "[Rank 1] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=5, OpType=ALLREDUCE, "
        "Timeout(ms)=600000) ran for 600069 milliseconds before timing out.",
    ),
    Sign(
        Cause.HANG,
        r"timed out waiting .*ms for",
        "RuntimeError: [../third_party/gloo/gloo/transport/tcp/unbound_buffer.cc:81] Timed out waiting "
        "1800000ms for recv operation to complete",
    ),
    # a peer that is gone: another rank has to say why
    Sign(
        Cause.INFRASTRUCTURE,
        r"connection closed by (remote )?peer|connection reset by peer|connection was likely closed",
        "RuntimeError: [gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:14766",
        symptom=True,
    ),
    Sign(
        Cause.INFRASTRUCTURE,
        r"application timeout caused pair closure",
        "RuntimeError: [../third_party/gloo/gloo/transport/tcp/unbound_buffer.cc:78] Application timeout "
        "caused pair closure",
        symptom=True,
    ),
    Sign(
        Cause.INFRASTRUCTURE,
        r"broken pipe|connection refused|socket timeout",
        "torch.distributed.DistNetworkError: The client socket has failed to connect to node-a:29500 (errno: "
        "111 - Connection refused).",
        symptom=True,
    ),
    Sign(
        Cause.INFRASTRUCTURE,
        r"ncclremoteerror|nccl remote error|remote process exited|a remote peer",
        "torch.distributed.DistBackendError: NCCL error in: NCCLUtils.hpp:268, remote process exited or "
        "there was a network error, NCCL version 2.21.5",
        symptom=True,
    ),
    Sign(
        Cause.INFRASTRUCTURE,
        r"nccl communicator was aborted",
        "torch.distributed.DistBackendError: NCCL communicator was aborted on rank 1.",
        symptom=True,
    ),
    Sign(
        Cause.INFRASTRUCTURE,
        r"recvvalue failed|sendbytes failed|recvbytes|distnetworkerror|diststoreerror",
        "torch.distributed.DistStoreError: Timed out after 601 seconds waiting for clients. 1/2 clients "
        "joined.",
        symptom=True,
    ),
    Sign(
        Cause.INFRASTRUCTURE,
        r"decisiontimeouterror",
        "DecisionTimeoutError: no decision about resume within 300 s",
        symptom=True,
    ),
    # the device's own word
    Sign(
        Cause.DEVICE,
        r"uncorrectable ecc|ecc error",
        "torch.AcceleratorError: CUDA error: uncorrectable ECC error encountered",
        hardware=True,
    ),
    Sign(
        Cause.DEVICE,
        r"hardware stack error",
        "torch.AcceleratorError: CUDA error: hardware stack error",
        hardware=True,
    ),
    Sign(
        Cause.DEVICE,
        r"fallen off the bus|gpu is lost",
        "Unable to determine the device handle for GPU 0000:3B:00.0: GPU is lost.  Reboot the system to "
        "recover this GPU",
        hardware=True,
    ),
    Sign(
        Cause.DEVICE,
        r"nvlink error",
        "RuntimeError: CUDA error: uncorrectable NVLink error detected during the execution",
        hardware=True,
    ),
    Sign(
        Cause.DEVICE,
        r"device\(s\) is/are busy or unavailable",
        "RuntimeError: CUDA error: CUDA-capable device(s) is/are busy or unavailable",
        hardware=True,
    ),
    Sign(
        Cause.DEVICE,
        r"no cuda-capable device is detected",
        "RuntimeError: CUDA error: no CUDA-capable device is detected",
        hardware=True,
    ),
    # the machine
    Sign(
        Cause.INFRASTRUCTURE,
        r"no cuda gpus are available|no nvidia driver on your system|no hip gpus are available",
        "RuntimeError: No CUDA GPUs are available",
    ),
    Sign(
        Cause.INFRASTRUCTURE,
        r"system not yet initialized|cudagetdevicecount\(\)|driver/library version mismatch",
        "RuntimeError: Unexpected error from cudaGetDeviceCount(). Did you run some cuda functions before "
        "calling NumCudaDevices() that might have already set an error? Error 802: system not yet "
        "initialized",
    ),
    Sign(
        Cause.INFRASTRUCTURE,
        r"can't start new thread|resource temporarily unavailable",
        "RuntimeError: can't start new thread",
    ),
    Sign(
        Cause.INFRASTRUCTURE,
        r"gloo connectfullmesh failed",
        "RuntimeError: Gloo connectFullMesh failed with [../third_party/gloo/gloo/transport/tcp/pair.cc:144] "
        "no error",
    ),
    Sign(
        Cause.INFRASTRUCTURE,
        r"ncclsystemerror|unhandled system error",
        "torch.distributed.DistBackendError: NCCL error in: ProcessGroupNCCL.cpp:2251, unhandled system "
        "error (run with NCCL_DEBUG=INFO for details), NCCL version 2.21.5",
    ),
    Sign(
        Cause.JOB,
        r"ncclinvalidusage|ncclinvalidargument|nccl.*invalid (usage|argument)",
        "torch.distributed.DistBackendError: NCCL error in: ProcessGroupNCCL.cpp:2251, invalid usage (run "
        "with NCCL_WARN=INFO for details), NCCL version 2.21.5",
    ),
    # what broken hardware and a wrong program both cause
    Sign(
        Cause.UNKNOWN,
        r"nccl.*unhandled cuda error|ncclunhandledcudaerror|ncclinternalerror|nccl.*internal error",
        "torch.distributed.DistBackendError: NCCL error in: ProcessGroupNCCL.cpp:1333, unhandled cuda error, "
        "NCCL version 2.18.1",
    ),
    Sign(
        Cause.UNKNOWN,
        r"cuda error: |unspecified launch failure|\bxid\b",
        "torch.AcceleratorError: CUDA error: an illegal memory access was encountered",
    ),
    Sign(
        Cause.UNKNOWN,
        r"cudnn_status_\w+|cublas_status_\w+|hip error",
        "RuntimeError: cuDNN error: CUDNN_STATUS_EXECUTION_FAILED",
    ),
    # checkpoints
    Sign(
        Cause.CHECKPOINT,
        r"^(\w+\.)*(CheckpointError|NoValidRungError)\b",
        "CheckpointError: shard __0_0.distcp: digest differs",
    ),
    # storage
    Sign(
        Cause.INFRASTRUCTURE,
        r"no space left on device|input/output error|stale file handle|transport endpoint is not connected"
        r"|remote i/o error|disk quota exceeded|read-only file system",
        "OSError: [Errno 116] Stale file handle: '/data/shard-00017.tar'",
    ),
    Sign(
        Cause.INFRASTRUCTURE,
        r"pytorchstreamwriter failed writing file|iostream error",
        "RuntimeError: PytorchStreamWriter failed writing file data/3: file write failed",
    ),
    # stores and services elsewhere
    Sign(
        Cause.INFRASTRUCTURE,
        r"could not connect to the endpoint url|(read|connect) timeout on endpoint url"
        r"|before we received a valid response from endpoint url",
        'botocore.exceptions.EndpointConnectionError: Could not connect to the endpoint URL: "https://data.s3'
        '.amazonaws.com/train/0"',
        here=False,
    ),
    Sign(
        Cause.INFRASTRUCTURE,
        r"an error occurred \((slowdown|serviceunavailable|internalerror|requesttimeout|50[0-4])\)",
        "botocore.exceptions.ClientError: An error occurred (SlowDown) when calling the GetObject operation "
        "(reached max retries: 4): Please reduce your request rate.",
        here=False,
    ),
    Sign(
        Cause.INFRASTRUCTURE,
        r"connectionpool\(host=.*(max retries exceeded|read timed out)",
        "requests.exceptions.ConnectionError: HTTPSConnectionPool(host='huggingface.co', port=443): Max "
        "retries exceeded with url: /api/models/gpt2",
        here=False,
    ),
    Sign(
        Cause.INFRASTRUCTURE,
        r"temporary failure in name resolution|name or service not known",
        "socket.gaierror: [Errno -3] Temporary failure in name resolution",
        here=False,
    ),
    Sign(
        Cause.INFRASTRUCTURE,
        r"\b50[0-4] server error|http error 50[0-4]|statuscode\.unavailable"
        r"|timeout of .* exceeded, last exception",
        "requests.exceptions.HTTPError: 503 Server Error: Service Unavailable for url: https://huggingface.co/",
        here=False,
    ),
    Sign(
        Cause.INFRASTRUCTURE,
        r"server disconnected|cannot connect to host",
        "aiohttp.client_exceptions.ServerDisconnectedError: Server disconnected",
        here=False,
    ),
    # processes that load data
    Sign(
        Cause.INFRASTRUCTURE,
        r"dataloader worker .*killed by signal: killed",
        "RuntimeError: DataLoader worker (pid 7) is killed by signal: Killed.",
    ),
    Sign(
        Cause.UNKNOWN,
        r"dataloader worker .*(exited unexpectedly|killed by signal)",
        "RuntimeError: DataLoader worker (pid(s) 7) exited unexpectedly",
    ),
    # the system's error numbers, where nothing is left of an OSError but its text
    Sign(
        Cause.INFRASTRUCTURE,
        r"\[errno ({errnos})\]",
        "OSError: Caught OSError in DataLoader worker process 0. … OSError: [Errno 110] Connection timed out",
    ),
    Sign(
        Cause.DATA,
        r"caught \w+ in dataloader worker process",
        "ValueError: Caught ValueError in DataLoader worker process 0.",
    ),
    # torch's own words for a program that cannot work
    Sign(
        Cause.JOB,
        r"shapes cannot be multiplied|must match the (existing )?size|is invalid for input of size"
        r"|sizes of tensors must match"
        r"|expected all tensors to be on the same device|error\(s\) in loading state_dict"
        r"|must have the same dtype",
        "RuntimeError: mat1 and mat2 shapes cannot be multiplied (1x4 and 5x2)",
    ),
    Sign(
        Cause.JOB,
        r"does not require grad|backward through the graph a second time|modified by an inplace operation"
        r"|expected to have finished reduction|mark a variable ready only once"
        r"|leaf variable that requires grad",
        "RuntimeError: element 0 of tensors does not require grad and does not have a grad_fn",
    ),
    Sign(
        Cause.UNKNOWN,
        r"\[(enforce fail at )?[^\]\s]*\.(cc|cpp|cu|h|hpp):\d+\]",
        "RuntimeError: [../third_party/gloo/gloo/transport/tcp/pair.cc:446] op.preamble.length <= op.nbytes. "
        "8 vs 4",
    ),
)
"""Every text by which a cause is recognised, in the order in which they are looked for."""

ERRNOS: Mapping[int, str] = {
    number: errno.errorcode[number]
    for number in (
        errno.EIO, errno.ENXIO, errno.ENODEV, errno.ENFILE, errno.ENOSPC, errno.EROFS, errno.ENOLINK,
        errno.ECOMM, errno.EPROTO, errno.EADDRINUSE, errno.EADDRNOTAVAIL, errno.ENETDOWN, errno.ENETUNREACH,
        errno.ENETRESET, errno.ECONNABORTED, errno.ECONNRESET, errno.ENOTCONN, errno.ESHUTDOWN,
        errno.ETIMEDOUT, errno.ECONNREFUSED, errno.EHOSTDOWN, errno.EHOSTUNREACH, errno.ESTALE,
        errno.EREMOTEIO, errno.EDQUOT, errno.EKEYEXPIRED,
    )
}  # fmt: skip
"""Numbers of an OSError that come from a disk, a network, a mount or a machine, and not from a program.
ENOENT, EACCES and the like are mostly the script's own."""


class KnownClass(NamedTuple):
    """What the class of an exception says about the cause."""

    cause: Cause
    refined: bool = False
    """Whether a text of `SIGNS` in its message may know better."""
    here: bool = True


TYPES: Mapping[str, KnownClass] = {
    "torch.OutOfMemoryError": KnownClass(Cause.JOB),
    "torch.cuda.OutOfMemoryError": KnownClass(Cause.JOB),
    "MemoryError": KnownClass(Cause.JOB),
    "torch.distributed.DistNetworkError": KnownClass(Cause.INFRASTRUCTURE),
    "torch.distributed.DistStoreError": KnownClass(Cause.INFRASTRUCTURE),
    "torch.distributed.DistBackendError": KnownClass(Cause.INFRASTRUCTURE, refined=True),
    "torch.AcceleratorError": KnownClass(Cause.UNKNOWN, refined=True),
    "ConnectionError": KnownClass(Cause.INFRASTRUCTURE, here=False),
    "TimeoutError": KnownClass(Cause.INFRASTRUCTURE, refined=True, here=False),
    "socket.gaierror": KnownClass(Cause.INFRASTRUCTURE, here=False),
    "botocore.exceptions.HTTPClientError": KnownClass(Cause.INFRASTRUCTURE, here=False),
    "botocore.exceptions.ConnectionError": KnownClass(Cause.INFRASTRUCTURE, here=False),
    "botocore.exceptions.EndpointConnectionError": KnownClass(Cause.INFRASTRUCTURE, here=False),
    "requests.exceptions.ConnectionError": KnownClass(Cause.INFRASTRUCTURE, here=False),
    "requests.exceptions.Timeout": KnownClass(Cause.INFRASTRUCTURE, here=False),
    "urllib3.exceptions.HTTPError": KnownClass(Cause.INFRASTRUCTURE, here=False),
    "httpx.TransportError": KnownClass(Cause.INFRASTRUCTURE, here=False),
    "aiohttp.client_exceptions.ClientConnectionError": KnownClass(Cause.INFRASTRUCTURE, here=False),
    "azure.core.exceptions.ServiceRequestError": KnownClass(Cause.INFRASTRUCTURE, here=False),
    "azure.core.exceptions.ServiceResponseError": KnownClass(Cause.INFRASTRUCTURE, here=False),
    "google.api_core.exceptions.ServerError": KnownClass(Cause.INFRASTRUCTURE, here=False),
    "google.api_core.exceptions.RetryError": KnownClass(Cause.INFRASTRUCTURE, here=False),
    "google.api_core.exceptions.TooManyRequests": KnownClass(Cause.INFRASTRUCTURE, here=False),
}
"""Classes of exceptions that say what was wrong, whatever their message. So do those derived from them."""

OWN_CLASSES = frozenset({
    "ArithmeticError", "AssertionError", "AttributeError", "FileExistsError", "FileNotFoundError",
    "ImportError", "IsADirectoryError", "LookupError", "NameError", "NotADirectoryError",
    "NotImplementedError", "PermissionError", "RecursionError", "StopIteration", "SyntaxError", "TypeError",
    "ValueError", "Warning",
})  # fmt: skip
"""Python's classes for what a program does wrong, if nothing else is known; and those derived from them.
RuntimeError is not one of them: torch, and much of what is written in C++, raises it for everything."""

_PATTERNS = tuple(
    re.compile(one.pattern.replace("{errnos}", "|".join(map(str, ERRNOS))), re.IGNORECASE) for one in SIGNS
)
_SYMPTOM_PATTERNS = tuple(pattern for one, pattern in zip(SIGNS, _PATTERNS, strict=True) if one.symptom)
_HARDWARE_PATTERNS = tuple(pattern for one, pattern in zip(SIGNS, _PATTERNS, strict=True) if one.hardware)


class Found(NamedTuple):
    """What was found out about the end of one worker."""

    cause: Cause
    here: bool = True
    hardware: bool = False
    told: bool = True
    """Whether it was decided by anything that was said."""


def is_own(raised: Raised) -> bool:
    """Whether its class says that the program itself is at fault."""
    names = raised.types or [raised.message.partition(":")[0]]
    kind = getattr(builtins, names[0], None)  # a traceback shows only the class itself
    above = [base.__name__ for base in kind.__mro__] if isinstance(kind, type) else []
    return not OWN_CLASSES.isdisjoint([*names, *above])


def in_words(raised: Raised) -> str:
    """The exception as Python shows it."""
    return f"{raised.types[0]}: {raised.message}" if raised.types else raised.message


def sign_in(text: str) -> Sign | None:
    """The first row whose pattern occurs in the text."""
    return next((row for row, pattern in zip(SIGNS, _PATTERNS, strict=True) if pattern.search(text)), None)


def is_of_lost_peer(text: str) -> bool:
    """Whether any part of the text says that a peer was lost."""
    return any(pattern.search(text) for pattern in _SYMPTOM_PATTERNS)


def is_of_hardware(text: str) -> bool:
    return any(pattern.search(text) for pattern in _HARDWARE_PATTERNS)


def is_of_fabric(text: str) -> bool:
    """Whether the first thing that the text reports is about a network adapter."""
    sign = sign_in(text)
    return sign is not None and sign.fabric


_ADAPTERS = (
    re.compile(
        r"(?<![\w/.-])(?:mlx[45]_(?:bond_)?\d+|bnxt_re_?(?:bond_?)?\d+|efa_?\d+|rdmap\w+|irdma_?\d+|hfi1_\d+)"
        r"(?::\d{1,3}(?!\d))?"
    ),
    re.compile(r"(?<![\w/.-])(?:eth|ib|bond|hsn|eno|ens|enp)\d\w*(?![\w.])"),
)
"""Names of RDMA devices, with their port, and of plain interfaces."""


def adapter_in(text: str) -> str:
    """The network adapter that a message names (`mlx5_3:1`, `bnxt_re0`, `eth0`); empty if it names none."""
    found = next((match for one in _ADAPTERS if (match := one.search(text)) is not None), None)
    return found.group() if found is not None else ""


def adapter_to_check(texts: Sequence[str], node: str) -> str:
    """What to do about an adapter that these texts of one rank complain about; empty if they do not."""
    complaints = [text for text in texts if is_of_fabric(text) or is_of_lost_peer(text)]
    name = next((found for text in complaints if (found := adapter_in(text))), "")
    return f"check the network adapter {name}{f' on {node}' if node else ''}" if name else ""


def found_in(raised: Raised) -> Found | None:
    """What one exception says: by its class, its errno, then its text. None if it says nothing."""
    known = next((TYPES[name] for name in raised.types if name in TYPES), None)
    if known is not None and not known.refined:
        return Found(known.cause, known.here)
    if raised.errno in ERRNOS:
        return Found(Cause.INFRASTRUCTURE)
    sign = sign_in(in_words(raised))
    if sign is not None:
        return Found(sign.cause, sign.here, sign.hardware)
    return Found(known.cause, known.here) if known is not None else None


# What may be done after an attempt failed. Pure.


class Action(StrEnum):
    RESTART = "restart"
    """As before, with spares in the place of nodes that are gone."""
    ROTATE = "rotate"
    """Each rank on another device."""
    EXCLUDE = "exclude"
    """Without the device or node that is at fault, on a spare in its place."""
    LOWER_RUNG = "lower_rung"
    """From an older checkpoint."""
    SHRINK = "shrink"
    """With fewer nodes."""
    WAIT = "wait"
    """Then decide again."""
    REQUEUE = "requeue"
    """End, and let the scheduler start the job again."""
    STOP = "stop"

    @property
    def goes_on(self) -> bool:
        """Whether another attempt follows at once."""
        return self not in (Action.WAIT, Action.REQUEUE, Action.STOP)


# The terms of the design in plain English, for what people read. Pure.


_ACTIVITIES = {
    STEP: "in its training step",
    SETUP: "while it set up",
    LOADING: "while it loaded its state",
    CHECKPOINTING: "while it saved",
}
_ORIGINS = {
    Cause.PREEMPTION: "a preemption",
    Cause.INFRASTRUCTURE: "a fault of the machines or the network",
    Cause.DEVICE: "a fault of a device",
    Cause.JOB: "an error of the training script",
    Cause.DATA: "bad data",
    Cause.CHECKPOINT: "a fault of what was loaded",
    Cause.HANG: "a rank that stood still",
    Cause.UNKNOWN: "a failure of unknown cause",
}
_DEEDS = {
    Action.RESTART: "restart",
    Action.ROTATE: "restart on other devices",
    Action.EXCLUDE: "restart without what is at fault",
    Action.LOWER_RUNG: "restart from an older checkpoint",
    Action.SHRINK: "restart with fewer nodes",
    Action.WAIT: "wait for nodes",
    Action.REQUEUE: "give the job back to its scheduler",
    Action.STOP: "stop",
}


def activity(section: str, exiting: bool = False) -> str:
    """What a rank was doing, by the section that it was in; an empty name means none."""
    if exiting:
        return f"after its loop, in {section!r}" if section else "between the end of its loop and its exit"
    return _ACTIVITIES.get(section, f"in {section!r}") if section else "between its steps"


def a_collective(name: str) -> str:
    """`an all_reduce`, `a barrier`; `a collective` if its name is not known."""
    name = name or "collective"
    return f"{'an' if name[0].lower() in 'aeiou' else 'a'} {name}"


def origin(cause: str) -> str:
    """What an incident came from, in words, by the class of its cause."""
    return _ORIGINS[Cause(cause)] if cause in set(Cause) else f"a failure ({cause})"


def deed(action: str) -> str:
    """What was decided, in words. An action of another release is shown by its own name."""
    return _DEEDS[Action(action)] if action in set(Action) else action
