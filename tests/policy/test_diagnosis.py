"""What ended an attempt: the root cause among all that was seen, its kind, and where it was."""

from __future__ import annotations

import errno
import signal
import socket
import traceback
from random import Random

import msgspec
import pytest
import torch
import torch.distributed as dist
from botocore.exceptions import EndpointConnectionError, NoCredentialsError, ReadTimeoutError
from hypothesis import given
from hypothesis import strategies as st

from holdfast.config.settings import FAILURE_CAUSES, parse_failure_causes
from holdfast.config.sources import load
from holdfast.errors import ConfigError, ExitCode
from holdfast.policy.diagnosis import diagnose, is_symptom, root_cause
from holdfast.policy.evidence import (
    KERNEL_OOM,
    DeviceError,
    Evidence,
    Hang,
    Loss,
    LostNode,
    Raised,
    WorkerEnd,
    told_by_traceback,
)
from holdfast.policy.signs import ERRNOS, OWN_CLASSES, SIGNS, TYPES, Cause, adapter_in, sign_in
from holdfast.train.crash import chain_of
from kit.harness import REPO

GLOO = "RuntimeError: [gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:14766."
RESET = "RuntimeError: [gloo/transport/tcp/pair.cc:537] Read error: Connection reset by peer."
NCCL = "DistBackendError: NCCL error ... ncclRemoteError: A call failed possibly due to a network error"
ECC = "RuntimeError: CUDA error: uncorrectable ECC error encountered"
ILLEGAL = "torch.AcceleratorError: CUDA error: an illegal memory access was encountered"


# -- root cause -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("symptom", [GLOO, RESET, NCCL])
def test_a_death_by_signal_outranks_the_symptoms_that_were_seen_first(symptom: str) -> None:
    killed = WorkerEnd(rank=3, exit_code=-signal.SIGKILL, at=11.0)
    symptoms = [WorkerEnd(rank=rank, exit_code=1, at=10.0, message=symptom) for rank in (0, 1, 2)]
    assert root_cause([*symptoms, killed]) is killed


def test_a_real_exception_outranks_earlier_symptoms_and_a_silent_abort() -> None:
    real = WorkerEnd(rank=2, exit_code=1, at=12.0, message="ValueError: bad sample")
    abort = WorkerEnd(rank=1, exit_code=-signal.SIGABRT, at=10.0)
    lost = WorkerEnd(rank=0, exit_code=1, at=9.0, message=GLOO)
    undecided = WorkerEnd(rank=4, exit_code=ExitCode.DECISION_TIMEOUT, at=8.0)
    assert root_cause([lost, abort, real, undecided]) is real
    assert root_cause([lost, abort, undecided]) is abort
    assert root_cause([lost, undecided]) is undecided


def test_a_restart_in_place_that_was_given_up_is_never_the_cause() -> None:
    """All that are left end with 33, long before or after what they followed from is seen."""
    told = "HandedOverError: 1 ranks are left that can train, and 2 are needed; rank 1: ValueError: bad"
    handed = [WorkerEnd(rank=rank, exit_code=ExitCode.HANDED_OVER, at=1.0, message=told) for rank in (0, 2)]
    killed = WorkerEnd(rank=1, exit_code=-signal.SIGKILL, at=9.0)
    aborted = WorkerEnd(rank=3, exit_code=-signal.SIGABRT, at=9.5)
    assert root_cause([*handed, killed]) is killed
    assert root_cause([*handed, aborted]) is aborted
    hang = Hang(rank=1, section="step", node="a", at=9.0)
    assert diagnose(Evidence(ends=handed, hangs=[hang])).cause is Cause.HANG
    alone = diagnose(Evidence(ends=handed, world_size=2))
    assert (alone.cause, alone.culprit_node) == (Cause.UNKNOWN, "")


def test_among_equals_the_earliest_counts() -> None:
    first = WorkerEnd(rank=5, exit_code=1, at=1.0, message="ValueError: a")
    second = WorkerEnd(rank=0, exit_code=-signal.SIGSEGV, at=2.0)
    assert root_cause([second, first]) is first


# -- one worker's end --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("exit_code", "message", "cause"),
    [
        (-signal.SIGTERM, "", Cause.PREEMPTION),
        (-signal.SIGUSR1, "", Cause.PREEMPTION),
        (143, "", Cause.PREEMPTION),
        (-signal.SIGKILL, "", Cause.INFRASTRUCTURE),
        (137, "", Cause.INFRASTRUCTURE),
        (-signal.SIGKILL, KERNEL_OOM, Cause.JOB),
        (-signal.SIGSEGV, "", Cause.UNKNOWN),
        (1, "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB", Cause.JOB),
        (1, "MemoryError: ", Cause.JOB),
        (1, "ValueError: bad sample", Cause.JOB),
        (1, "FloatingPointError: the loss is nan", Cause.JOB),
        (2, "", Cause.JOB),
        (1, GLOO, Cause.INFRASTRUCTURE),
        (1, NCCL, Cause.INFRASTRUCTURE),
        (1, "OSError: [Errno 28] No space left on device: '/data/x'", Cause.INFRASTRUCTURE),
        (1, "OSError: [Errno 116] Stale file handle", Cause.INFRASTRUCTURE),
        (1, ECC, Cause.DEVICE),
        (1, ILLEGAL, Cause.UNKNOWN),
        (1, "RuntimeError: CUDA error: device-side assert triggered", Cause.JOB),
        (-signal.SIGABRT, "Watchdog caught collective operation timeout: WorkNCCL(...)", Cause.HANG),
        (1, "CheckpointError: shard __0_0.distcp: digest differs", Cause.CHECKPOINT),
        (1, "ValueError: Caught ValueError in DataLoader worker process 0. … ValueError: x", Cause.DATA),
        (1, "RuntimeError: DataLoader worker (pid 7) is killed by signal: Killed.", Cause.INFRASTRUCTURE),
        (1, "RuntimeError: DataLoader worker (pid 7) … might be out of shared memory", Cause.JOB),
        (ExitCode.RERUN_WANTED, "", Cause.DEVICE),
        (ExitCode.VALIDATION_FAILED, "", Cause.JOB),
        (ExitCode.NO_VALID_RUNG, "", Cause.CHECKPOINT),
        (ExitCode.LEASE_LOST, "", Cause.INFRASTRUCTURE),
        (ExitCode.DECISION_TIMEOUT, "", Cause.INFRASTRUCTURE),
        (ExitCode.SAVE_FAILED, "", Cause.INFRASTRUCTURE),
        (ExitCode.CONTROL_UNUSABLE, "", Cause.INFRASTRUCTURE),
        (ExitCode.HANDED_OVER, "HandedOverError: … ValueError: bad sample", Cause.UNKNOWN),
        (0, "", Cause.UNKNOWN),
    ],
)
def test_each_end_has_its_cause(exit_code: int, message: str, cause: Cause) -> None:
    assert diagnose(Evidence(ends=[WorkerEnd(rank=0, exit_code=exit_code, message=message)])).cause == cause


def test_the_class_of_an_error_counts_where_its_message_leaves_it_out() -> None:
    bare = WorkerEnd(rank=0, exit_code=1, message="shard __0_0.distcp: digest differs")
    assert diagnose(Evidence(ends=[bare])).cause == Cause.UNKNOWN
    told = [Raised(types=["holdfast.errors.CheckpointError"], message=bare.message)]
    assert cause_of(told, bare.message) == Cause.CHECKPOINT
    assert cause_of([Raised(types=["MemoryError"])]) == Cause.JOB


def cause_of(errors: list[Raised], message: str = "", exit_code: int = 1, **more: object) -> Cause:
    end = WorkerEnd(rank=0, exit_code=exit_code, message=message, errors=errors)
    return diagnose(msgspec.structs.replace(Evidence(ends=[end]), **more)).cause


def raised(error: BaseException) -> list[Raised]:
    """As the crash hook of a worker writes it down, and as it is read again."""
    return msgspec.json.decode(msgspec.json.encode(chain_of(error)), type=list[Raised])


def caused(outer: BaseException, inner: BaseException, *, explicit: bool = True) -> BaseException:
    try:
        try:
            raise inner
        except type(inner):
            if explicit:
                raise outer from inner
            raise outer  # noqa: B904 - it is about just that
    except type(outer) as error:
        return error


IBV = (
    "NCCL error in: /pytorch/torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp:2251, unhandled system error "
    "(run with NCCL_DEBUG=INFO for details), NCCL version 2.21.5\nncclSystemError: System call (e.g. socket, "
    "malloc) or external library call failed or device error. \nLast error:\nCall to ibv_modify_qp failed "
    "with error Connection timed out"
)


class SpeechlessError(OSError):
    """A library's own, which does not say what it has."""

    def __str__(self) -> str:
        return "cannot read the shard"


KILLED = RuntimeError("DataLoader worker (pid 7) is killed by signal: Killed. ")


@pytest.mark.parametrize(
    ("error", "cause"),
    [
        (dist.DistBackendError(IBV), Cause.INFRASTRUCTURE),
        (dist.DistBackendError("of a kind that nobody has met"), Cause.INFRASTRUCTURE),
        (dist.DistBackendError("NCCL error in: x.cpp:1, invalid usage, NCCL version 2"), Cause.JOB),
        (dist.DistBackendError("NCCL communicator was aborted on rank 1."), Cause.INFRASTRUCTURE),
        (dist.DistNetworkError("whatever"), Cause.INFRASTRUCTURE),
        (dist.DistStoreError("whatever"), Cause.INFRASTRUCTURE),
        (torch.OutOfMemoryError("whatever"), Cause.JOB),
        (torch.AcceleratorError("CUDA error: uncorrectable ECC error encountered"), Cause.DEVICE),
        (torch.AcceleratorError("CUDA error: device-side assert triggered"), Cause.JOB),
        (torch.AcceleratorError("whatever"), Cause.UNKNOWN),
        (OSError(errno.ETIMEDOUT, "Connection timed out"), Cause.INFRASTRUCTURE),
        (OSError(errno.EIO, "Input/output error", "/data/x"), Cause.INFRASTRUCTURE),
        (SpeechlessError(errno.EIO, "x"), Cause.INFRASTRUCTURE),
        (FileNotFoundError(errno.ENOENT, "No such file or directory", "cfg.yaml"), Cause.JOB),
        (PermissionError(errno.EACCES, "Permission denied", "/x"), Cause.JOB),
        (socket.gaierror(-3, "Temporary failure in name resolution"), Cause.INFRASTRUCTURE),
        (ConnectionError("whatever"), Cause.INFRASTRUCTURE),
        (EndpointConnectionError(endpoint_url="https://x"), Cause.INFRASTRUCTURE),
        (ReadTimeoutError(endpoint_url="https://x"), Cause.INFRASTRUCTURE),
        (NoCredentialsError(), Cause.UNKNOWN),
        (RuntimeError("No CUDA GPUs are available"), Cause.INFRASTRUCTURE),
        (RuntimeError("bad"), Cause.UNKNOWN),
        (RuntimeError("can't start new thread"), Cause.INFRASTRUCTURE),
        (BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable"), Cause.INFRASTRUCTURE),
        (RuntimeError("Trying to backward through the graph a second time (or directly access"), Cause.JOB),
        (caused(RuntimeError("bad"), ValueError("bad")), Cause.UNKNOWN),
        (ZeroDivisionError("division by zero"), Cause.JOB),
        (FileNotFoundError(errno.ENOENT, "No such file or directory"), Cause.JOB),
        (RecursionError("maximum recursion depth exceeded"), Cause.JOB),
        (ValueError("bad"), Cause.JOB),
        (KeyError("lr"), Cause.JOB),
        (
            caused(RuntimeError("DataLoader worker (pid(s) 7) exited unexpectedly"), KILLED),
            Cause.INFRASTRUCTURE,
        ),
        (RuntimeError("DataLoader worker (pid(s) 7) exited unexpectedly"), Cause.UNKNOWN),
        (caused(ValueError("bad batch"), OSError(errno.ESTALE, "Stale")), Cause.INFRASTRUCTURE),
        (caused(ValueError("bad"), OSError(errno.ESTALE, "Stale"), explicit=False), Cause.INFRASTRUCTURE),
        (caused(torch.OutOfMemoryError("x"), ConnectionError("x")), Cause.JOB),
        (caused(ValueError("bad batch"), KeyError("x")), Cause.JOB),
        (ExceptionGroup("loading failed", [ValueError("x"), TimeoutError("x")]), Cause.INFRASTRUCTURE),
    ],
)
def test_what_an_exception_is_decides_and_then_what_it_says(error: BaseException, cause: Cause) -> None:
    try:
        raise error
    except BaseException:  # noqa: BLE001 - with a traceback now
        found = raised(error)
    assert cause_of(found, f"{type(error).__name__}: {error}") is cause
    shown = "[rank1]: " + "[rank1]: ".join(
        "".join(traceback.format_exception(error)).splitlines(keepends=True)
    )
    if not isinstance(error, ExceptionGroup | ReadTimeoutError | SpeechlessError):
        told = told_by_traceback(f"epoch 1\n{shown}")
        assert [one.types[0] for one in told] == [one.types[0] for one in found], shown
        assert cause_of(told) is cause, "as a traceback tells it"


def test_a_chain_is_bounded_whatever_it_looks_like() -> None:
    class UnspeakableError(Exception):
        def __str__(self) -> str:
            raise ValueError("no words")

    error: BaseException = UnspeakableError()
    error.__cause__ = error
    (one,) = raised(error)
    assert one.message == "(its text cannot be had: ValueError)"
    for _ in range(100):
        error = caused(ValueError("x" * 10_000), error)
    assert len(msgspec.json.encode(raised(error))) < 40_000


def test_what_led_to_the_error_makes_it_a_symptom_too() -> None:
    lost = WorkerEnd(rank=0, exit_code=1, at=1.0, errors=raised(caused(ValueError("x"), RuntimeError(GLOO))))
    real = WorkerEnd(rank=1, exit_code=1, at=2.0, message="KeyError: 'lr'", errors=raised(KeyError("lr")))
    assert diagnose(Evidence(ends=[lost, real])).message == "KeyError: 'lr'"


def test_each_text_is_found_by_its_own_row_and_is_in_the_docs() -> None:
    page = (REPO / "docs" / "guides" / "recovery.md").read_text()
    for row in SIGNS:
        assert sign_in(row.example) is row, row.example
        assert f"| {row.cause} | `{row.example}` |" in page, row.example
        end = WorkerEnd(rank=0, node="b", device="3", exit_code=1, message=row.example)
        found = diagnose(Evidence(ends=[end]))
        assert found.cause is row.cause, row.example
        placed = row.here and not row.symptom and row.cause in ("infrastructure", "device", "hang", "unknown")
        assert (found.culprit_node == "b", found.named) == (placed, row.hardware), row.example
        assert is_symptom(1, row.example) is row.symptom, row.example
    assert all(f"`{name}`" in page for name in TYPES)
    assert all(name in page for name in ERRNOS.values())
    assert all(f"`{name}`" in page for name in OWN_CLASSES)


HANGS = next(one for one in SIGNS if one.cause is Cause.HANG)


def test_what_nothing_matches_is_unknown_and_its_last_words_do_not_make_it_another_failure() -> None:
    for code in (1, 3, -signal.SIGSEGV, -signal.SIGABRT):
        end = WorkerEnd(rank=0, exit_code=code, message="37%|###   | 12/32", stderr_file="rank_0.err")
        found = diagnose(Evidence(ends=[end]))
        assert (found.cause, found.message, found.exit_code) == (Cause.UNKNOWN, "", code)
    watchdog = WorkerEnd(rank=0, exit_code=-signal.SIGABRT, message=HANGS.example, stderr_file="rank_0.err")
    assert diagnose(Evidence(ends=[watchdog])).cause is Cause.HANG


def test_the_configuration_adds_texts_that_come_before_the_others() -> None:
    added = parse_failure_causes("infrastructure: lustre.*evicted\n\njob: out of memory: .*\nhang: bad")
    error = [
        Raised(types=["ValueError"], message="x"),
        Raised(types=["OSError"], message="Lustre: A was evicted"),
    ]
    assert cause_of(error, "ValueError: x", causes=added) is Cause.INFRASTRUCTURE
    assert cause_of(raised(dist.DistNetworkError("bad")), causes=added) is Cause.HANG
    assert cause_of([], "ValueError: bad", exit_code=-signal.SIGKILL, causes=added) is Cause.INFRASTRUCTURE
    assert cause_of([], "ValueError: bad", exit_code=ExitCode.RERUN_WANTED, causes=added) is Cause.DEVICE
    assert set(FAILURE_CAUSES) == set(Cause)


@pytest.mark.parametrize("text", ["weather: rain", "infrastructure", "job: (", "job:", "job: .*", "Job: x"])
def test_a_text_that_cannot_be_used_is_refused_with_the_setting_s_name(text: str) -> None:
    with pytest.raises(ConfigError, match=r"launch\.failure_causes"):
        load(environ={"HOLDFAST_LAUNCH_FAILURE_CAUSES": text})


# -- who left first ----------------------------------------------------------------------------------------


def test_a_rank_that_left_with_0_is_the_cause_if_its_peers_only_lost_it() -> None:
    left = WorkerEnd(rank=1, node="b", exit_code=0, left=True, at=10.0)
    lost = [symptom(rank, at=9.9) for rank in (0, 2)]  # seen a moment sooner than the end that they follow
    found = diagnose(Evidence(ends=[left, *lost], world_size=3))
    assert (found.cause, found.root_rank, found.exit_code) == (Cause.JOB, 1, 0)
    assert found.message == "rank 1 left with exit code 0 before its peers"
    assert found.culprit_node == "", "a script that leaves accuses no node"
    aborted = WorkerEnd(rank=0, exit_code=-signal.SIGABRT, at=600.0)
    assert diagnose(Evidence(ends=[left, aborted])).root_rank == 1
    for waits in ({"missing": [1]}, {"silent": [1, 2]}):  # who has left cannot testify
        hang = msgspec.structs.replace(Hang(rank=0, at=300.0, section="step"), **waits)
        assert diagnose(Evidence(ends=[left], hangs=[hang])).root_rank == 1


def test_a_rank_that_was_done_is_not_blamed_for_what_happens_to_the_others() -> None:
    left = WorkerEnd(rank=2, node="c", exit_code=0, left=True, at=1.0)
    found = diagnose(Evidence(ends=[left, killed(), symptom()]))
    assert (found.cause, found.root_rank, found.culprit_node) == (Cause.INFRASTRUCTURE, 1, "b")
    gone = LostNode(node="b", how=Loss.CLOSED, at=9.0)
    found = diagnose(Evidence(ends=[left, symptom()], lost=[gone]))
    assert (found.cause, found.root_rank) == (Cause.INFRASTRUCTURE, None)
    found = diagnose(Evidence(ends=[left], hangs=[Hang(rank=0, at=9.0, section="saving")]))
    assert (found.cause, found.section) == (Cause.HANG, "saving"), "nobody waits for it"
    error = msgspec.structs.replace(killed(), exit_code=1, message="ValueError: x")
    assert diagnose(Evidence(ends=[left, error])).message == "ValueError: x"
    assert diagnose(Evidence(ends=[left])).cause is Cause.UNKNOWN, "all ended well"
    unclear = WorkerEnd(rank=2, node="c", exit_code=0, at=1.0)
    found = diagnose(Evidence(ends=[unclear, symptom()]))
    assert (found.cause, found.culprit_node) == (Cause.UNKNOWN, "c"), "how it ended is not known"


# -- a whole incident ----------------------------------------------------------------------------------------


def killed(rank: int = 1, node: str = "b", at: float = 10.0) -> WorkerEnd:
    return WorkerEnd(rank=rank, node=node, device="3", exit_code=-signal.SIGKILL, at=at)


def symptom(rank: int = 0, node: str = "a", at: float = 9.0) -> WorkerEnd:
    return WorkerEnd(rank=rank, node=node, exit_code=1, at=at, message=GLOO)


def test_nothing_seen_is_unknown() -> None:
    assert diagnose(Evidence()) == diagnose(Evidence(devices=[DeviceError(node="a", xid=43)]))
    assert diagnose(Evidence()).cause == Cause.UNKNOWN


@pytest.mark.parametrize(
    ("how", "cause", "culprit"),
    [
        (Loss.CLOSED, Cause.INFRASTRUCTURE, "b"),
        (Loss.SILENT, Cause.INFRASTRUCTURE, "b"),
        (Loss.REFUSED, Cause.INFRASTRUCTURE, "b"),
        (Loss.LEFT, Cause.PREEMPTION, ""),
    ],
)
def test_a_lost_node_explains_the_peers_that_failed_before_it_was_missed(
    how: Loss, cause: Cause, culprit: str
) -> None:
    found = diagnose(Evidence(ends=[symptom()], lost=[LostNode(node="b", how=how, at=25.0)]))
    assert (found.cause, found.culprit_node) == (cause, culprit)


def test_a_worker_that_failed_first_is_not_blamed_on_the_node_that_left_later() -> None:
    failed = WorkerEnd(rank=0, node="a", exit_code=1, at=5.0, message="ValueError: x")
    found = diagnose(Evidence(ends=[failed], lost=[LostNode(node="b", how=Loss.CLOSED, at=6.0)]))
    assert (found.cause, found.culprit_node, found.message) == (Cause.JOB, "", "ValueError: x")


def test_a_hang_after_the_loop_accuses_neither_what_was_loaded_nor_a_node() -> None:
    """The run had reached its end: an older checkpoint, or another node, would only repeat its last steps."""
    after = Hang(rank=1, node="b", device="1", exiting=True)
    found = diagnose(Evidence(hangs=[after], rung="step_00000008-a", steps=0))
    assert (found.cause, found.steps, found.culprit_node) == (Cause.HANG, None, "")
    within = msgspec.structs.replace(after, exiting=False)
    for hangs in ([within], [within, after]):
        assert diagnose(Evidence(hangs=hangs, rung="step_00000008-a", steps=0)).steps == 0


def test_a_hang_accuses_those_that_are_missing_and_else_nobody_but_who_hangs_alone() -> None:
    waits = Hang(rank=0, node="a", section="step", at=5.0, missing=[3], missing_nodes=["b"])
    also = Hang(rank=1, node="a", section="step", at=4.0, missing=[3], missing_nodes=["b"])
    abort = WorkerEnd(rank=2, node="c", exit_code=-signal.SIGABRT, at=1.0)
    found = diagnose(Evidence(hangs=[waits, also], ends=[abort, symptom()]))
    assert (found.cause, found.section, found.culprit_node) == (Cause.HANG, "step", "b")
    several = msgspec.structs.replace(also, missing_nodes=["b", "c"])
    assert diagnose(Evidence(hangs=[waits, several])).culprit_node == ""
    alone = Hang(rank=3, node="b", device="1", section="setup")
    found = diagnose(Evidence(hangs=[alone]))
    assert (found.culprit_node, found.culprit_device) == ("b", "1")
    both = [alone, Hang(rank=1, node="a", section="setup")]
    assert diagnose(Evidence(hangs=both)).culprit_node == "", "two that hang, and nobody knows who began"
    lost = msgspec.structs.replace(alone, missing=[0])
    assert diagnose(Evidence(hangs=[lost])).culprit_node == "", "it waits for others, wherever they are"


@pytest.mark.parametrize("xid", [48, 62, 64, 74, 79, 94, 95, 119, 120, 140])
def test_broken_hardware_outranks_what_was_seen_before(xid: int) -> None:
    broken = DeviceError(node="b", device="GPU-7", xid=xid, at=99.0)
    found = diagnose(Evidence(ends=[killed(), symptom()], devices=[broken]))
    assert (found.cause, found.culprit_node, found.culprit_device) == (Cause.DEVICE, "b", "GPU-7")
    assert found.named
    unnamed = diagnose(Evidence(devices=[DeviceError(node="b", uncorrectable=True)]))
    assert (unnamed.cause, unnamed.named) == (Cause.DEVICE, False)


@pytest.mark.parametrize("xid", [13, 31, 43, 45])
def test_what_a_program_can_cause_accuses_no_device(xid: int) -> None:
    said = DeviceError(node="b", device="3", xid=xid, at=1.0)
    failed = WorkerEnd(rank=1, node="b", device="3", exit_code=1, at=2.0, message=ILLEGAL)
    found = diagnose(Evidence(ends=[failed], devices=[said]))
    assert (found.cause, found.named) == (Cause.UNKNOWN, False)


def test_a_number_that_accuses_nobody_outweighs_the_words_beside_it() -> None:
    """The driver calls errors that ECC did correct an ECC error as well."""
    words = "XID 92 on 0000:3b:00: many memory errors that ECC corrected (High single-bit ECC error rate)"
    said = DeviceError(node="b", device="3", xid=92, message=words, at=1.0)
    assert diagnose(Evidence(ends=[killed()], devices=[said])).cause is Cause.INFRASTRUCTURE
    assert diagnose(Evidence(devices=[DeviceError(message=words)])).cause is Cause.DEVICE, "words alone count"


def test_a_worker_names_its_own_device_when_the_message_is_the_hardwares() -> None:
    failed = WorkerEnd(rank=1, node="b", device="3", exit_code=1, message=ECC)
    found = diagnose(Evidence(ends=[failed, symptom()]))
    assert (found.cause, found.culprit_node, found.culprit_device, found.named) == (
        Cause.DEVICE,
        "b",
        "3",
        True,
    )


def test_only_a_cause_that_has_a_place_accuses_one() -> None:
    assert diagnose(Evidence(ends=[killed()])).culprit_node == "b"
    assert diagnose(Evidence(ends=[symptom()])).culprit_node == "", (
        "who lost a peer is not the one that failed"
    )
    error = msgspec.structs.replace(killed(), exit_code=1, message="ValueError: x")
    assert diagnose(Evidence(ends=[error])).culprit_node == ""


def test_ranks_that_fail_alike_are_known_also_if_some_were_stopped_first() -> None:
    def alike(told: list[str], world: int, **more: object) -> bool:
        ends = [WorkerEnd(rank=rank, exit_code=1, message=text) for rank, text in enumerate(told)]
        return diagnose(msgspec.structs.replace(Evidence(ends=ends, world_size=world), **more)).alike

    assert alike(["ValueError: <A at 0x7f01>", "ValueError: <A at 0x7f99>", "ValueError: <A at 0x7>"], 4)
    assert not alike(["ValueError: x", "ValueError: x"], 4), "half of them say nothing"
    assert not alike(["ValueError: x"] * 3 + ["KeyError: y"], 4)
    assert not alike([""] * 4, 4), "without a message nothing is known to be alike"
    assert not alike(["ModuleNotFoundError: No module named 'apex'"], 4), "the others say nothing of it"
    assert alike(["ModuleNotFoundError: No module named 'apex'"] * 4, 4)
    assert alike(["ModuleNotFoundError: No module named 'apex'"], 1)
    assert not alike(["ValueError: x"] * 4, 4, lost=[LostNode(node="b", how=Loss.CLOSED)])


def test_an_import_error_of_one_rank_is_that_rank_s_or_its_node_s() -> None:
    told = "ModuleNotFoundError: No module named 'nope'"
    mine = WorkerEnd(rank=1, node="b", exit_code=1, message=told, errors=raised(ModuleNotFoundError("nope")))
    found = diagnose(Evidence(ends=[mine], world_size=2))
    assert (found.cause, found.culprit_node, found.alike) == (Cause.UNKNOWN, "b", False)
    other = msgspec.structs.replace(mine, rank=0, node="a")
    found = diagnose(Evidence(ends=[mine, other], world_size=2))
    assert (found.cause, found.culprit_node, found.alike) == (Cause.JOB, "", True)
    refused = WorkerEnd(rank=1, exit_code=2)
    assert not diagnose(Evidence(ends=[refused], world_size=4)).alike


def test_what_was_loaded_goes_with_the_diagnosis() -> None:
    found = diagnose(Evidence(ends=[killed()], rung="step_120-a", steps=3))
    assert (found.rung, found.steps) == ("step_120-a", 3)


messages = st.sampled_from(["", GLOO, NCCL, "ValueError: x", "CUDA out of memory", ECC, ILLEGAL]) | st.text(
    max_size=40
)
times = st.floats(0, 3)
names = st.sampled_from(["", "a", "b"])
ends = st.builds(
    WorkerEnd,
    rank=st.integers(0, 7),
    exit_code=st.sampled_from([-15, -9, -6, 1, 2, 16, 17, 18, 21, 137]) | st.integers(-200, 400),
    at=times,
    node=names,
    device=names,
    message=messages,
    errors=st.lists(
        st.builds(
            Raised,
            types=st.lists(st.sampled_from(["ValueError", *TYPES]), max_size=2),
            message=messages,
            errno=st.none() | st.integers(-3, 130),
        ),
        max_size=3,
    ),
    stderr_file=st.sampled_from(["", "rank_0.err"]),
    left=st.booleans(),
)
evidence = st.builds(
    Evidence,
    ends=st.lists(ends, max_size=5, unique_by=lambda end: end.rank),
    hangs=st.lists(
        st.builds(
            Hang,
            rank=st.integers(0, 7),
            at=times,
            node=names,
            missing=st.lists(st.integers(0, 7), max_size=2),
            missing_nodes=st.lists(names, max_size=2),
        ),
        max_size=3,
    ),
    lost=st.lists(st.builds(LostNode, node=names, how=st.sampled_from(Loss), at=times), max_size=3),
    devices=st.lists(
        st.builds(DeviceError, node=names, xid=st.none() | st.integers(0, 150), at=times, message=messages),
        max_size=3,
    ),
    world_size=st.integers(0, 8),
)


@given(evidence, st.randoms())
def test_every_incident_is_diagnosed_whatever_order_its_evidence_came_in(
    seen: Evidence, random: Random
) -> None:
    def shuffled(items: list[object]) -> list[object]:
        return random.sample(items, len(items))

    other = Evidence(
        ends=shuffled(list(seen.ends)),  # type: ignore[arg-type]
        hangs=shuffled(list(seen.hangs)),  # type: ignore[arg-type]
        lost=shuffled(list(seen.lost)),  # type: ignore[arg-type]
        devices=shuffled(list(seen.devices)),  # type: ignore[arg-type]
        world_size=seen.world_size,
    )
    found = diagnose(seen)
    assert found == diagnose(other)
    assert found.cause in set(Cause)
    assert msgspec.json.decode(msgspec.json.encode(seen), type=Evidence) == seen
    if seen.ends:
        assert root_cause(seen.ends) == root_cause(other.ends)


def test_a_failure_record_is_evidence_with_its_place() -> None:
    from holdfast.record.attempts import FailureRecord

    record = FailureRecord(rank=1, node="b", pid=7, exit_code=-9, at=2.0, message=KERNEL_OOM)
    assert record.kernel_oom
    found = diagnose(Evidence(ends=[record]))
    assert (found.cause, found.root_rank, found.message) == (Cause.JOB, 1, KERNEL_OOM)
    told = msgspec.json.encode(record)
    assert msgspec.json.decode(told, type=FailureRecord) == record
    assert not {"heard", "kernel_oom"} & set(msgspec.json.decode(told)), "what follows from it is not kept"


# -- a network adapter ---------------------------------------------------------------------------------------

COMPLETION = (
    "NET/IB: Got completion from peer 10.0.0.7<54862> with status=12 opcode=0 len=0 vendor err 129 (mlx5_3:1)"
)


@pytest.mark.parametrize(
    ("text", "name"),
    [
        (COMPLETION, "mlx5_3:1"),
        ("ibv_poll_cq error on mlx5_3:1", "mlx5_3:1"),
        ("Call to ibv_modify_qp failed with 110 Connection timed out, on dev mlx5_bond_0:1", "mlx5_bond_0:1"),
        ("NET/IB : mlx5_bond_0 Got async event: port error", "mlx5_bond_0"),
        ("ibv_post_send failed on bnxt_re0", "bnxt_re0"),
        ("NET/OFI error on rdmap0s6-rdm", "rdmap0s6"),
        ("NET/OFI error on efa0", "efa0"),
        ("Transport retry count exceeded on mlx5_0:1/IB (synd 0x15)", "mlx5_0:1"),
        ("connection reset by peer on eth0", "eth0"),
        ("[ib0] broken pipe", "ib0"),
        ("connection reset by peer [10.0.0.7]:5123", ""),
        ("ValueError: method0 of /data/eth0/x.bin", ""),
    ],
)
def test_the_adapter_in_a_message_is_found(text: str, name: str) -> None:
    assert adapter_in(text) == name


@pytest.mark.parametrize(
    "end",
    [
        WorkerEnd(rank=1, exit_code=1, node="b", message=f"ValueError: {COMPLETION}"),
        WorkerEnd(rank=1, exit_code=1, node="b", message="OSError: ibv_poll_cq error on mlx5_3:1"),
        WorkerEnd(
            rank=1,
            exit_code=-6,
            node="b",
            message="Watchdog caught collective operation timeout",
            errors=[
                Raised(types=["RuntimeError"], message="Watchdog caught collective operation timeout"),
                Raised(types=["ValueError"], message=COMPLETION),
            ],
        ),
    ],
)
def test_an_adapter_that_fails_is_infrastructure_whatever_follows_from_it(end: WorkerEnd) -> None:
    """The ranks that wait for it hang, and a library may wrap it in any class."""
    hang = Hang(rank=0, at=0.0, node="a", section="step", missing=[1], missing_nodes=["b"])
    found = diagnose(Evidence(ends=[end], hangs=[hang], rung="step_00000040-a", steps=1))
    assert (found.cause, found.culprit_node) == (Cause.INFRASTRUCTURE, "b")
