"""The gate: a node whose checks fail is kept out, by real agents, and what devices report decides."""

from __future__ import annotations

import functools
import resource
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from holdfast.config.sources import load
from holdfast.errors import ExitCode
from holdfast.health.judgements import CheckResult, HealthStatus
from holdfast.journal import events
from holdfast.journal.events import HealthFailed
from holdfast.launch import gate as gate_module
from holdfast.launch.gate import Gate
from holdfast.launch.nodes.attempt import StopRun
from holdfast.policy.diagnosis import diagnose
from holdfast.policy.evidence import DeviceError, Evidence, WorkerEnd
from holdfast.policy.signs import Cause
from holdfast.record.attempts import device_errors_of, record_device_errors
from holdfast.record.directory import ControlDirectory
from holdfast.record.operator import exclude, excluded
from kit.harness import REPO, finish, holdfast, job, wait_until
from kit.nodes.machines import SECOND, inside_mounts, nvidia_smi
from kit.nodes.nodes import STEP, cluster
from kit.runs import journalled

XID_RANK = str(REPO / "tests" / "scripts" / "launch" / "xid_rank.py")


def few_files(command: list[str]) -> list[str]:
    return ["prlimit", "--nofile=100:4096", *command]


# --- real agents --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("gate", ["refuse", pytest.param("warn", marks=pytest.mark.drill)])
def test_a_node_with_a_tiny_file_limit(tmp_path: Path, gate: str) -> None:
    """Scenario 25: a failing probe keeps the node out; with `warn` it is told, and takes part."""
    command = holdfast(
        "run", "--run-dir", "run", "--no-preload", "--set", f"health.gate={gate}", "--set",
        "launch.node_name=only", STEP, "ok", "log",
    )  # fmt: skip
    result = finish(few_files(command), cwd=tmp_path, timeout=120)
    (failed,) = journalled(tmp_path, HealthFailed)
    assert (failed.node, failed.status, failed.kept_out) == ("only", "critical", gate == "refuse")
    assert "open files: a limit of 100, at most 4096" in failed.problems[0]
    if gate == "warn":
        assert result.code == 0, result.text
        assert "warning: health of only: open files: a limit of 100" in result.err
        assert (tmp_path / "log").exists()
        return
    assert result.code == ExitCode.NO_CAPACITY, result.text
    assert "only does not take part: its health checks failed: open files" in result.err
    assert "`ulimit -n 1024` or more" in result.err
    assert "holdfast doctor" in result.err
    assert not (tmp_path / "log").exists()
    assert not journalled(tmp_path, events.AttemptStarted)


def test_a_node_of_a_slurm_job_has_slurms_name_everywhere(tmp_path: Path) -> None:
    """By which alone it can be drained: in the journal, in what the launch leaves, and in words."""
    command = holdfast("run", "--run-dir", "run", "--no-preload", STEP, "ok", "log")
    result = finish(few_files(command), cwd=tmp_path, env={"SLURMD_NODENAME": "n7"}, timeout=120)
    assert result.code == ExitCode.NO_CAPACITY, result.text
    assert "n7 does not take part" in result.err
    assert [one.node for one in journalled(tmp_path, HealthFailed)] == ["n7"]
    assert [path.name for path in (tmp_path / "run" / "launches").iterdir()] == ["n7.json"]


@pytest.mark.usefixtures("mount_namespaces")
@pytest.mark.parametrize("kind", ["full", pytest.param("read-only", marks=pytest.mark.drill)])
def test_a_node_whose_checkpoint_root_takes_nothing(tmp_path: Path, kind: str) -> None:
    """Scenario 25: a real file system that is full, or mounted read-only."""
    (tmp_path / "root").mkdir()
    option = "ro,size=1m" if kind == "read-only" else "size=64k"
    setup = f"mount -t tmpfs -o {option} tmpfs root"
    if kind == "full":
        setup += " && (head -c 1m /dev/zero > root/filler 2>/dev/null; true)"
    command = holdfast(
        "run", "--run-dir", "run", "--no-preload", "--set", "checkpoint.root=root", STEP, "ok", "log"
    )
    result = finish(inside_mounts(setup, command), cwd=tmp_path, timeout=120)
    assert result.code == ExitCode.NO_CAPACITY, result.text
    wanted = "Read-only file system" if kind == "read-only" else "No space left on device"
    assert "storage of the checkpoint root: cannot write: " + wanted in result.err, result.text
    assert not (tmp_path / "log").exists()
    assert not list(tmp_path.rglob(".holdfast-probe*"))


@pytest.mark.drill
def test_a_node_that_is_kept_out_is_parked_and_joins_once_it_is_well(tmp_path: Path) -> None:
    """Scenario 25: the others see why it does not come; nothing runs on it until what failed is mended."""
    with cluster(tmp_path, "2") as group:
        group.start("a", acts="ok")
        group.start("b", acts="ok", wrap=few_files)
        group.said("b", "waiting: its health checks failed: open files")
        assert group.begun(1) == 0
        resource.prlimit(group.agents["b"].pid, resource.RLIMIT_NOFILE, (4096, 4096))
        for name in "ab":
            ended = group.agents[name].wait(120)
            assert ended.code == 0, ended.text
        assert group.begun(1) == 2
        assert "b is healthy again" in group.agents["b"].output().err
    assert [one.node for one in journalled(tmp_path, HealthFailed)] == ["b"]


@pytest.mark.usefixtures("mount_namespaces")
@pytest.mark.parametrize("xid", [79, pytest.param(31, marks=pytest.mark.drill)])
def test_an_xid_during_the_attempt_accuses_the_device(tmp_path: Path, xid: int) -> None:
    """A10: the driver's own words are evidence. XID 79 is the hardware's; 31 a program's bug causes too."""
    smi = nvidia_smi(tmp_path / "bin", [{}, SECOND])
    log = tmp_path / "kmsg"
    log.write_text("3,1,1000000,-;NVRM: Xid (PCI:0000:5e:00): 79, an old one, of the other device\n")
    command = holdfast(
        "run", "--run-dir", "run", "--no-preload", "--set", "launch.node_name=here",
        "--set", "health.gate=warn",  # a torch that was built for CUDA cannot compute on made-up devices
        XID_RANK, str(log), "log", str(xid),
    )  # fmt: skip
    with_log = inside_mounts(f"mount --bind {log} /dev/kmsg", command)
    result = finish(with_log, cwd=tmp_path, env=smi | {"CUDA_VISIBLE_DEVICES": "0,1"}, timeout=150)
    assert result.code == 0, result.text
    control = ControlDirectory.open(tmp_path / "run")
    (error,) = device_errors_of(control, 1)
    assert (error.node, error.device, error.xid) == ("here", "0", xid)
    (decision,) = journalled(control.path.parent, events.DecisionMade)
    assert any(f"XID {xid}" in text for text in decision.evidence), decision.evidence
    begun = (tmp_path / "log").read_text().split()
    if xid == 79:
        assert decision.details["cause"] == "device"
        assert [(one.node, one.device) for one in excluded(control)] == [("here", "0")]
        assert begun == ["1", "0,1", "2", "1"]
    else:
        assert decision.details["cause"] == "unknown", "the rank exits without a word"
        assert not excluded(control)


DIES_ONCE = """
import os, pathlib, time
if not pathlib.Path("pid").exists():
    pathlib.Path("pid.new").write_text(str(os.getpid()))
    os.rename("pid.new", "pid")
    while not pathlib.Path("go").exists():
        time.sleep(0.01)
    os.kill(os.getpid(), 9)
pathlib.Path("again").write_text(str(time.time()))
"""


@pytest.mark.drill
def test_workers_start_only_when_the_dead_one_s_memory_is_free(tmp_path: Path) -> None:
    """A real agent, and a driver that lists the killed worker for a while."""
    smi = nvidia_smi(tmp_path / "bin", [{}, SECOND])
    (tmp_path / "script.py").write_text(DIES_ONCE)
    command = holdfast(
        "run", "--run-dir", "run", "--no-preload", "--set", "launch.node_name=here",
        "--set", "health.gate=warn", "script.py",
    )  # fmt: skip
    with job(command, cwd=tmp_path, env=smi | {"CUDA_VISIBLE_DEVICES": "0,1"}) as running:
        wait_until((tmp_path / "pid").exists, 60, "the worker is there")
        pid = int((tmp_path / "pid").read_text())
        nvidia_smi(tmp_path / "bin", [{}, SECOND | FULL], held=[("GPU-bbbb", pid, "72704")])
        (tmp_path / "go").touch()
        told = f"waiting for memory of devices: pid {pid} holds 71.0 GiB of GPU-bbbb"
        wait_until(lambda: told in running.output().err, 60, "the agent waits")
        assert not (tmp_path / "again").exists()
        nvidia_smi(tmp_path / "bin", [{}, SECOND])
        ended = running.wait(60)
    assert ended.code == 0, ended.text
    assert "the devices' memory is free after" in ended.err


# --- its parts ----------------------------------------------------------------------------------------------


BAD = CheckResult(name="open files", status=HealthStatus.CRITICAL, found="a limit of 8", fix="raise it")
ODD = CheckResult(name="shared memory", status=HealthStatus.WARNING, found="64 MiB", fix="--shm-size")
DARK = CheckResult(name="kernel log", status=HealthStatus.UNKNOWN, found="cannot be read")


class Looking:
    def __init__(self, *results: CheckResult) -> None:
        self.results: list[CheckResult] = list(results)
        self.times = 0

    def __call__(self) -> list[CheckResult]:
        self.times += 1
        return self.results


def make_gate(
    tmp_path: Path, look: Any, mode: str = "refuse", *, alone: bool = False
) -> tuple[Gate, list[str]]:
    control, _ = ControlDirectory.open_or_create(tmp_path / "run")
    settings = load(keywords={"run_dir": str(tmp_path / "run"), "health_gate": mode}).settings
    said: list[str] = []
    return Gate(settings, control, say=said.append, alone=alone, look=look), said


def test_an_answer_holds_for_a_while_and_not_after_a_failure(tmp_path: Path) -> None:
    look = Looking()
    gate, _ = make_gate(tmp_path, look)
    assert gate.why_unfit() == gate.why_unfit() == ""
    assert look.times == 1
    gate.keep_device_errors(1)
    gate.why_unfit()
    assert look.times == 2


def test_a_node_that_is_kept_out_is_looked_at_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gate_module, "AGAIN", 0.0)
    look = Looking(BAD)
    gate, said = make_gate(tmp_path, look)
    assert "a limit of 8" in gate.why_unfit()
    assert gate.why_unfit()
    look.results = []
    assert gate.why_unfit() == ""
    assert said == [f"{gate.node} is healthy again"]
    assert len(journalled(tmp_path, HealthFailed)) == 1, "told once, not at every look"


def test_only_what_is_critical_keeps_a_node_out(tmp_path: Path) -> None:
    """What could not be looked at says nothing about the node."""
    gate, said = make_gate(tmp_path, Looking(ODD, DARK))
    assert gate.why_unfit() == ""
    assert [text for text in said if "kernel log" in text] == []
    assert any("shared memory" in text for text in said)


def test_a_gate_that_is_off_looks_at_nothing(tmp_path: Path) -> None:
    look = Looking(BAD)
    gate, said = make_gate(tmp_path, look, "off")
    assert gate.why_unfit() == ""
    gate.insist()
    assert (look.times, said) == (0, [])


def test_a_fault_of_the_gate_itself_lets_the_node_take_part(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Principle 7: never worse than without it."""

    def broken() -> list[CheckResult]:
        raise RuntimeError("a bug")

    gate, said = make_gate(tmp_path, broken)
    assert gate.why_unfit() == ""
    assert "a bug" in said[0]
    monkeypatch.setattr(gate, "_has_devices", broken)
    gate.begin("here")
    gate.keep_device_errors(1)
    assert len(said) == 3


def test_a_gate_that_cannot_journal_a_bad_node_keeps_it_out_all_the_same(tmp_path: Path) -> None:
    gate, said = make_gate(tmp_path, Looking(BAD))
    (tmp_path / "run" / "attempts").write_text("no directory")
    assert "a limit of 8" in gate.why_unfit()
    assert "attempts" in said[0]


def test_a_node_alone_ends_at_once_but_waits_between_attempts(tmp_path: Path) -> None:
    """At the start somebody sits there; between attempts storage may come back by itself."""
    gate, _ = make_gate(tmp_path, Looking(BAD), alone=True)
    with pytest.raises(StopRun) as stop:
        gate.why_unfit()
    assert stop.value.code == ExitCode.NO_CAPACITY
    gate.begin("here")
    assert "a limit of 8" in gate.why_unfit()
    with pytest.raises(StopRun):
        gate.insist()


@pytest.fixture
def made_up_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    """Devices that only a made-up nvidia-smi knows: a torch built for CUDA cannot compute on them."""
    monkeypatch.setattr(gate_module, "check_compute", lambda *_, **__: [])


@pytest.mark.usefixtures("made_up_devices")
def test_a_rise_of_uncorrectable_errors_is_evidence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    control, _ = ControlDirectory.open_or_create(tmp_path / "run")
    settings = load(keywords={"run_dir": str(tmp_path / "run")}).settings
    (tmp_path / "kmsg").write_text("")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-aaaa,GPU-bbbb")
    uncorrected = "ecc.errors.uncorrected.volatile.total"
    for name, value in nvidia_smi(tmp_path / "bin", [{uncorrected: "2"}, SECOND]).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("holdfast.health.gpu._installed", lambda _: False)
    gate = Gate(settings, control, say=print, kernel_log=tmp_path / "kmsg")
    assert gate.why_unfit() == ""
    gate.begin("here")
    assert gate.device_errors() == []
    nvidia_smi(tmp_path / "bin", [{uncorrected: "3"}, SECOND])
    (error,) = gate.device_errors()
    assert (error.node, error.device, error.uncorrectable) == ("here", "GPU-aaaa", True)
    (tmp_path / "bin" / "nvidia-smi").write_text("#!/bin/sh\nexit 1\n")
    gate.forget()
    assert gate.why_unfit() == "", "what was just asked is not asked again"
    gate.forget()
    assert "gpu" in gate.why_unfit(), "and the look after that is a new one"


def test_a_device_that_fell_off_the_bus_is_named_though_nobody_lists_it_any_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    control, _ = ControlDirectory.open_or_create(tmp_path / "run")
    settings = load(keywords={"run_dir": str(tmp_path / "run")}).settings
    log = tmp_path / "kmsg"
    log.write_text("")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    for name, value in nvidia_smi(tmp_path / "bin", [{}, SECOND]).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("holdfast.health.gpu._installed", lambda _: False)
    gate = Gate(settings, control, say=print, kernel_log=log)
    gate.why_unfit()
    gate.begin("here")
    log.write_text("3,1,1000000,-;NVRM: Xid (PCI:0000:5e:00): 79, GPU has fallen off the bus.\n")
    nvidia_smi(tmp_path / "bin", [{}])
    (error,) = gate.device_errors()
    assert (error.device, error.xid) == ("1", 79)
    assert "fallen off the bus" in error.message


@pytest.mark.usefixtures("made_up_devices")
def test_an_excluded_device_does_not_keep_its_node_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Recovery takes the device out; the node goes on with the others."""
    control, _ = ControlDirectory.open_or_create(tmp_path / "run")
    names = {"run_dir": str(tmp_path / "run"), "launch_node_name": "here"}
    settings = load(keywords=names).settings
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    broken = {"GPU-bbbb": ("No", "Yes")}
    for name, value in nvidia_smi(tmp_path / "bin", [{}, SECOND], remapped=broken).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("holdfast.health.gpu._installed", lambda _: False)
    gate = Gate(settings, control, say=print)
    assert "gpu 1 memory errors" in gate.why_unfit()
    exclude(control, "here", "1", "its memory is bad", "recovery", 1)
    gate.forget()
    assert gate.why_unfit() == ""
    nvidia_smi(tmp_path / "bin", [{}])  # it falls off the bus, too
    gate.forget()
    assert gate.why_unfit() == ""


def test_device_errors_are_kept_per_node_and_bounded(tmp_path: Path) -> None:
    control, _ = ControlDirectory.open_or_create(tmp_path / "run")
    assert device_errors_of(control, 3) == []
    record_device_errors(control, 3, "a/b", [DeviceError(node="a/b", xid=79)] * 500)
    record_device_errors(control, 3, "c", [DeviceError(node="c", xid=48)])
    record_device_errors(control, 3, "c", [DeviceError(node="c", xid=95)])  # the first word counts
    found = device_errors_of(control, 3)
    assert [error.xid for error in found if error.node == "c"] == [48]
    assert sum(error.node == "a/b" for error in found) == 50
    (tmp_path / "run" / "attempts" / "000003" / "devices" / "c.json").write_text("{")
    assert {error.node for error in device_errors_of(control, 3)} == {"a/b"}, (
        "one that is damaged costs itself"
    )


def test_the_gate_takes_less_than_a_second(tmp_path: Path) -> None:
    """The quick checks, in sum, on this machine without GPUs; the best of three, as others use it too."""
    control, _ = ControlDirectory.open_or_create(tmp_path / "run")
    settings = load(keywords={"run_dir": str(tmp_path / "run")}).settings
    took = []
    for _ in range(3):
        gate = Gate(settings, control, say=print)
        began = time.monotonic()
        assert gate.why_unfit() == ""
        took.append(time.monotonic() - began)
    assert min(took) < 1.0, took
    assert not list(tmp_path.rglob(".holdfast-probe*"))


# --- device memory that the dead still hold -----------------------------------------------------------------


@pytest.fixture
def remembering(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> tuple[Gate, list[str], Callable[..., dict[str, str]]]:
    """A gate on a node with two devices, what it said, and what changes who holds their memory."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    monkeypatch.setattr("holdfast.health.gpu._installed", lambda _: False)
    monkeypatch.setattr(gate_module, "check_compute", lambda *_, **__: [])
    monkeypatch.setattr(gate_module, "MEMORY_LOOK", 0.01)
    settle = functools.partial(nvidia_smi, tmp_path / "bin")
    for name, value in settle([{}, SECOND]).items():
        monkeypatch.setenv(name, value)
    control, _ = ControlDirectory.open_or_create(tmp_path / "run")
    settings = load(keywords={"run_dir": str(tmp_path / "run")}).settings
    said: list[str] = []
    (tmp_path / "kmsg").write_text("")
    gate = Gate(settings, control, say=said.append, kernel_log=tmp_path / "kmsg")
    gate.begin("here")
    return gate, said, settle


FULL = {"memory.used": "73000"}
HELD = [("GPU-bbbb", 4242, "72704")]


def test_a_restart_waits_until_the_dead_have_given_their_memory_back(
    tmp_path: Path, remembering: Any
) -> None:
    gate, said, settle = remembering
    settle([{}, SECOND | FULL], held=HELD)
    gate.keep_device_errors(1)
    looks = 0

    def check() -> None:
        nonlocal looks
        looks += 1
        if looks == 3:
            settle([{}, SECOND])

    gate.await_memory({4242, 4243}, 2, check)
    assert looks == 3
    assert said[0] == "waiting for memory of devices: pid 4242 holds 71.0 GiB of GPU-bbbb (at most 30 s)"
    assert said[1].startswith("the devices' memory is free after ")
    assert len(said) == 2, "it is told once"


def test_what_others_hold_is_waited_for_by_nobody(tmp_path: Path, remembering: Any) -> None:
    gate, said, settle = remembering
    settle([{}, SECOND | FULL], held=[("GPU-bbbb", 777, "72704")])
    gate.await_memory({4242}, 2, lambda: pytest.fail("it waits"))
    assert said == []


def test_devices_that_were_found_empty_are_not_asked_again(tmp_path: Path, remembering: Any) -> None:
    """Asking a driver may take a second, and a restart must not wait for that without need."""
    gate, _, _ = remembering
    gate.keep_device_errors(1)
    gate.await_memory({4242}, 2, lambda: None)
    asked = (tmp_path / "bin" / "asked").read_text()
    assert "--query-gpu" in asked
    assert "compute-apps" not in asked
    gate.await_memory({4242}, 3, lambda: None)
    assert "compute-apps" in (tmp_path / "bin" / "asked").read_text(), "what was true before an attempt only"


def test_memory_that_stays_held_is_told_and_explains_what_follows(
    tmp_path: Path, remembering: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The attempt starts all the same; when it lacks memory, that is not the job's doing."""
    gate, said, settle = remembering
    monkeypatch.setattr(gate_module, "MEMORY_PATIENCE", 0.1)
    settle([{}, SECOND | FULL], held=HELD)
    gate.await_memory({4242}, 2, lambda: None)
    assert said[-1].startswith("warning: pid 4242 holds 71.0 GiB of GPU-bbbb after 0 s, though")
    (warned,) = journalled(tmp_path, events.Warned)
    assert "pid 4242 holds 71.0 GiB" in warned.message
    (tmp_path / "run" / "attempts" / "000002").mkdir(parents=True)
    gate.keep_device_errors(2)
    (error,) = device_errors_of(ControlDirectory.open(tmp_path / "run"), 2)
    assert (error.device, error.held) == ("1", 71 * 2**30)
    end = WorkerEnd(rank=1, node="here", device="1", exit_code=1, message=OUT_OF_MEMORY)
    found = diagnose(Evidence(ends=[end], devices=[error]))
    assert found.cause is Cause.INFRASTRUCTURE
    assert "pid 4242 holds 71.0 GiB" in found.message
    other = msgspec.structs.replace(end, device="0")
    assert diagnose(Evidence(ends=[other], devices=[error])).cause is Cause.JOB, "its own device was free"
    assert diagnose(Evidence(ends=[end])).cause is Cause.JOB


@pytest.mark.parametrize("answer", [{"fails": "no devices were found"}, {"hangs": True}])
def test_a_driver_that_does_not_answer_holds_nobody_up(
    remembering: Any, monkeypatch: pytest.MonkeyPatch, answer: dict[str, Any]
) -> None:
    gate, said, settle = remembering
    monkeypatch.setattr(gate_module, "MEMORY_ANSWER", 0.3)
    settle([{}, SECOND], held=HELD, **answer)
    began = time.monotonic()
    gate.await_memory({4242}, 2, lambda: pytest.fail("it waits"))
    assert time.monotonic() - began < 5
    assert said == []


def test_whoever_asks_for_a_stop_meanwhile_is_heard(remembering: Any) -> None:
    gate, _, settle = remembering
    settle([{}, SECOND | FULL], held=HELD)

    def check() -> None:
        raise StopRun(ExitCode.STOPPED, "asked", "")

    with pytest.raises(StopRun):
        gate.await_memory({4242}, 2, check)


OUT_OF_MEMORY = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB"
