"""What ended an attempt: the root cause among all that was seen, its kind, and where it was."""

from __future__ import annotations

import signal
from dataclasses import dataclass
from random import Random

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.exit_codes import ExitCode
from holdfast.policy.classify import (
    KERNEL_OOM,
    Cause,
    diagnose,
    end_of,
    root_cause,
)
from holdfast.policy.evidence import DeviceError, Evidence, Hang, Loss, LostNode, WorkerEnd

GLOO = "RuntimeError: [gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:14766."
RESET = "RuntimeError: [gloo/transport/tcp/pair.cc:537] Read error: Connection reset by peer."
NCCL = "DistBackendError: NCCL error ... ncclRemoteError: A call failed possibly due to a network error"
ECC = "RuntimeError: CUDA error: uncorrectable ECC error encountered"
ILLEGAL = "torch.AcceleratorError: CUDA error: an illegal memory access was encountered"


@dataclass(frozen=True)
class Failure:
    rank: int
    exit_code: int
    at: float
    message: str = ""


# -- root cause -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("symptom", [GLOO, RESET, NCCL])
def test_a_death_by_signal_outranks_the_symptoms_that_were_seen_first(symptom: str) -> None:
    killed = Failure(rank=3, exit_code=-signal.SIGKILL, at=11.0)
    symptoms = [Failure(rank=rank, exit_code=1, at=10.0, message=symptom) for rank in (0, 1, 2)]
    assert root_cause([*symptoms, killed]) is killed


def test_a_real_exception_outranks_earlier_symptoms_and_a_silent_abort() -> None:
    real = Failure(rank=2, exit_code=1, at=12.0, message="ValueError: bad sample")
    abort = Failure(rank=1, exit_code=-signal.SIGABRT, at=10.0)
    lost = Failure(rank=0, exit_code=1, at=9.0, message=GLOO)
    undecided = Failure(rank=4, exit_code=ExitCode.DECISION_TIMEOUT, at=8.0)
    assert root_cause([lost, abort, real, undecided]) is real
    assert root_cause([lost, abort, undecided]) is abort
    assert root_cause([lost, undecided]) is undecided


def test_a_restart_in_place_that_was_given_up_is_never_the_cause() -> None:
    """All that are left end with 33, long before or after what they followed from is seen."""
    told = "HandedOverError: 1 ranks are left that can train, and 2 are needed; rank 1: ValueError: bad"
    handed = [Failure(rank, ExitCode.HANDED_OVER, at=1.0, message=told) for rank in (0, 2)]
    killed = Failure(rank=1, exit_code=-signal.SIGKILL, at=9.0)
    aborted = Failure(rank=3, exit_code=-signal.SIGABRT, at=9.5)
    assert root_cause([*handed, killed]) is killed
    assert root_cause([*handed, aborted]) is aborted
    hang = Hang(rank=1, section="step", node="a", at=9.0)
    assert diagnose(Evidence(ends=[end_of(one) for one in handed], hangs=[hang])).cause is Cause.HANG
    alone = diagnose(Evidence(ends=[end_of(one) for one in handed], world_size=2))
    assert (alone.cause, alone.culprit_node) == (Cause.UNKNOWN, "")


def test_among_equals_the_earliest_counts() -> None:
    first = Failure(rank=5, exit_code=1, at=1.0, message="ValueError: a")
    second = Failure(rank=0, exit_code=-signal.SIGSEGV, at=2.0)
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
    assert (
        diagnose(Evidence(ends=[end_of(Failure(rank=0, exit_code=exit_code, at=0.0, message=message))])).cause
        == cause
    )


def test_the_class_of_an_error_counts_where_its_message_leaves_it_out() -> None:
    bare = WorkerEnd(rank=0, exit_code=1, message="shard __0_0.distcp: digest differs")
    assert diagnose(Evidence(ends=[bare])).cause == Cause.JOB
    told = msgspec.structs.replace(bare, error_class="CheckpointError")
    assert diagnose(Evidence(ends=[told])).cause == Cause.CHECKPOINT
    assert (
        diagnose(Evidence(ends=[WorkerEnd(rank=0, exit_code=1, error_class="MemoryError")])).cause
        == Cause.JOB
    )


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
    assert alike(["ModuleNotFoundError: No module named 'apex'"], 4), "every rank would meet it"
    assert not alike(["ValueError: x"] * 4, 4, lost=[LostNode(node="b", how=Loss.CLOSED)])


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
    error_class=st.sampled_from(["", "ValueError", "CheckpointError"]),
    kernel_oom=st.booleans(),
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


def test_a_failure_record_becomes_evidence_with_its_place() -> None:
    from holdfast.control.attempts import FailureRecord

    record = FailureRecord(rank=1, node="b", pid=7, exit_code=-9, at=2.0, message=KERNEL_OOM)
    assert end_of(record) == WorkerEnd(
        rank=1, node="b", exit_code=-9, at=2.0, message=KERNEL_OOM, kernel_oom=True
    )
