"""Health checks: what is looked at, how it is judged, and that nothing hangs or is left behind."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
import time
import tomllib
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import holdfast
from holdfast.checkpoint.choose import resume
from holdfast.health import gpu, node
from holdfast.health.examination import CheckedPlace, quick_checks
from holdfast.health.gpu import Gpu, Gpus, ask_nvidia_smi, names_of, normal_bus, read_kernel_log
from holdfast.health.gpu import judged as judged_log
from holdfast.health.judgements import (
    EXIT_CODES,
    CheckResult,
    HealthStatus,
    judge_computed,
    judge_free_memory,
    judge_gate,
    judge_load,
    judge_memory,
    judge_memory_errors,
    judge_open_files,
    judge_shared_memory,
    judge_skew,
    judge_slowed,
    judge_space,
    judge_storage,
    judge_threads,
    worst,
)
from holdfast.health.trials import Check, ask, run_checks
from holdfast.journal.writer import JournalWriter
from holdfast.policy.signs import XIDS, XidClass, accuses_device, proves_broken
from holdfast.process import proc
from kit.harness import REPO
from kit.nodes.machines import SECOND, hung_mount, inside_mounts, nvidia_smi

MIB, GIB = 2**20, 2**30


# --- judging ------------------------------------------------------------------------------------------------

results = st.lists(
    st.builds(
        CheckResult,
        name=st.sampled_from(["memory", "gpu 0", "storage of the run directory"]),
        status=st.sampled_from(list(HealthStatus)),
        found=st.text(max_size=20),
        fix=st.text(max_size=20),
    ),
    max_size=6,
)


@given(results)
def test_the_worst_is_what_is_wrong_for_certain_then_what_could_not_be_looked_at(
    found: list[CheckResult],
) -> None:
    kinds = {one.status for one in found}
    expected = next(
        (one for one in (HealthStatus.CRITICAL, HealthStatus.WARNING, HealthStatus.UNKNOWN) if one in kinds),
        HealthStatus.OK,
    )
    assert worst(found) is expected
    assert worst(reversed(found)) is expected


@given(results, st.sampled_from(["off", "warn", "refuse"]))
def test_a_node_is_kept_out_for_critical_findings_and_on_refuse_alone(
    found: list[CheckResult], mode: str
) -> None:
    answer = judge_gate(found, mode)
    critical = [one for one in found if one.status is HealthStatus.CRITICAL]
    assert answer.kept_out == (mode == "refuse" and bool(critical))
    assert bool(answer.why) == answer.kept_out
    if answer.kept_out:
        assert all(one.describe() in answer.why for one in critical)
        assert "holdfast doctor" in answer.why
        assert "health.gate" in answer.why


@given(st.integers(0, 2**50), st.integers(0, 2**50))
def test_more_of_something_is_never_judged_worse(one: int, other: int) -> None:
    gravity = [HealthStatus.CRITICAL, HealthStatus.WARNING, HealthStatus.OK]
    less, more = sorted((one, other))
    for judge in (
        lambda n: judge_memory(n, None),
        lambda n: judge_space("x", "/x", n, None),
        lambda n: judge_shared_memory(n, n),
        lambda n: judge_open_files(n, -1),
        lambda n: judge_threads(0, n, "user"),
    ):
        assert gravity.index(judge(less).status) <= gravity.index(judge(more).status)


@pytest.mark.parametrize(
    ("judged", "expected"),
    [
        (judge_memory(128 * MIB - 1, None), HealthStatus.CRITICAL),
        (judge_memory(128 * MIB, None), HealthStatus.WARNING),
        (judge_memory(GIB - 1, None), HealthStatus.WARNING),
        (judge_memory(GIB, None), HealthStatus.OK),
        (judge_space("x", "/x", 16 * MIB - 1, None), HealthStatus.CRITICAL),
        (judge_space("x", "/x", 16 * MIB, None), HealthStatus.WARNING),
        (judge_space("x", "/x", GIB, None), HealthStatus.OK),
        (judge_space("x", "/x", GIB, 999), HealthStatus.WARNING),
        (judge_space("x", "/x", GIB, 1000), HealthStatus.OK),
        (judge_space("x", "/x", 0, 0), HealthStatus.CRITICAL),
        (judge_storage("x", "/x", "", 2.1), HealthStatus.WARNING),
        (judge_storage("x", "/x", "", 1.9), HealthStatus.OK),
        (judge_shared_memory(GIB, 256 * MIB - 1), HealthStatus.WARNING),
        (judge_shared_memory(GIB, 256 * MIB), HealthStatus.OK),
        (judge_open_files(127, -1), HealthStatus.CRITICAL),
        (judge_open_files(128, -1), HealthStatus.WARNING),
        (judge_open_files(1024, -1), HealthStatus.OK),
        (judge_open_files(-1, -1), HealthStatus.OK),
        (judge_threads(37, 100, "user"), HealthStatus.CRITICAL),
        (judge_threads(36, 100, "user"), HealthStatus.WARNING),
        (judge_threads(0, 1024, "user"), HealthStatus.OK),
        (judge_skew("x", 2.0, 0.0), HealthStatus.OK),
        (judge_skew("x", 2.1, 0.0), HealthStatus.WARNING),
        (judge_load(8.1, 2), HealthStatus.WARNING),
        (judge_load(8.0, 2), HealthStatus.OK),
        (judge_slowed("x", None, 90.0), HealthStatus.WARNING),
        (judge_slowed("x", None, 89.0), HealthStatus.OK),
        (judge_free_memory("x", 5 * GIB + 1, 80 * GIB), HealthStatus.WARNING),
        (judge_free_memory("x", 5 * GIB, 80 * GIB), HealthStatus.OK),
    ],
)
def test_every_limit_is_where_the_page_says(judged: CheckResult, expected: HealthStatus) -> None:
    """The table in docs/guides/health.md, on both sides of each limit."""
    assert judged.status is expected, judged


def test_whatever_is_not_well_says_what_to_do() -> None:
    bad = [
        judge_memory(MIB, None),
        judge_memory(MIB, GIB),
        judge_space("x", "/x", 0, None),
        judge_space("x", "/x", GIB * 100, 0),
        judge_shared_memory(64 * MIB, 64 * MIB),
        judge_open_files(100, 200),
        judge_threads(99, 100, "user"),
        judge_skew("x", 10.0, 0.1),
        judge_storage("x", "/x", "cannot fsync", 0.1),
        judge_storage("x", "/x", "", 10.0, "fsync"),
    ]
    for one in bad:
        assert one.status in (HealthStatus.WARNING, HealthStatus.CRITICAL), one
        assert one.fix, one
        assert one.expected, one


def test_the_exit_codes_are_as_documented() -> None:
    assert {str(status): code for status, code in EXIT_CODES.items()} == {
        "ok": 0, "warning": 1, "critical": 2, "unknown": 3,
    }  # fmt: skip


def test_a_containers_default_of_shared_memory_is_a_warning() -> None:
    """E7: containers default to 64 MB; it need not hurt, so it keeps nobody out."""
    found = judge_shared_memory(64 * MIB, 64 * MIB)
    assert found.status is HealthStatus.WARNING
    assert "--shm-size" in found.fix


def test_a_skew_within_its_own_uncertainty_is_no_skew() -> None:
    assert judge_skew("x", 2.9, 1.0).status is HealthStatus.OK
    assert judge_skew("x", -3.1, 1.0).status is HealthStatus.WARNING
    assert "behind" in judge_skew("x", -5.0, 0.0).found


# --- the runner ---------------------------------------------------------------------------------------------


def fine(name: str) -> Check:
    return Check(name=name, look=lambda: CheckResult(name=name, status=HealthStatus.OK))


def test_a_check_that_hangs_is_left_behind_and_counts_as_it_says() -> None:
    """Issue 7, part 4: nothing that hangs holds up the others, nor who asked."""
    forever = threading.Event()
    hanging = Check(
        name="mount", look=lambda: forever.wait(60) or [], deadline=0.3, hung=HealthStatus.CRITICAL
    )
    began = time.monotonic()
    found = run_checks([fine("a"), hanging, fine("b")])
    assert time.monotonic() - began < 5.0
    forever.set()
    assert [(one.name, one.status) for one in found] == [
        ("a", HealthStatus.OK), ("mount", HealthStatus.CRITICAL), ("b", HealthStatus.OK),
    ]  # fmt: skip
    assert "no answer within 0.3 s" in found[1].found


def test_a_check_that_raises_could_not_look() -> None:
    def broken() -> CheckResult:
        raise OSError("no such thing")

    (found,) = run_checks([Check(name="x", look=broken, hung=HealthStatus.CRITICAL)])
    assert found.status is HealthStatus.UNKNOWN
    assert "no such thing" in found.found


def test_a_program_that_hangs_is_killed_and_not_waited_for() -> None:
    began = time.monotonic()
    answer = ask(["sleep", "100"], 0.3)
    assert answer.hung
    assert time.monotonic() - began < 5.0
    assert ask(["/no/such/program"], 1.0).missing
    assert ask(["sh", "-c", "echo out; echo err >&2; exit 3"], 20.0).code == 3


# --- the node -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("version", [1, 2])
def test_the_tightest_cgroup_limit_counts_and_what_can_be_reclaimed_is_free(
    tmp_path: Path, version: int
) -> None:
    own = tmp_path / "own"
    if version == 2:
        own.write_text("0::/job/step\n")
        base, limit, used, cache = tmp_path / "cg", "memory.max", "memory.current", "inactive_file"
        other = "active_file"
    else:
        own.write_text("5:cpu:/x\n4:memory:/job/step\n")
        base, limit = tmp_path / "cg" / "memory", "memory.limit_in_bytes"
        used, cache, other = "memory.usage_in_bytes", "total_inactive_file", "total_active_file"
    step = base / "job" / "step"
    step.mkdir(parents=True)
    (step / limit).write_text("max\n" if version == 2 else str(2**63 - 4096))
    (step / used).write_text("1")
    (step.parent / limit).write_text(str(4 * GIB))
    (step.parent / used).write_text(str(3 * GIB))
    (step.parent / "memory.stat").write_text(f"anon 5\n{cache} {GIB // 2}\n{other} {GIB // 2}\n")
    assert node.cgroup_memory(tmp_path / "cg", own) == (4 * GIB, 2 * GIB, "/job")
    found = node.check_memory(tmp_path / "cg", own)
    assert "4.0 GiB that its cgroup allows" in found.found


@pytest.mark.parametrize("version", [1, 2])
def test_the_tightest_limit_of_threads_counts_whosever_it_is(
    tmp_path: Path, version: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = tmp_path / "own"
    own.write_text("0::/job/step\n" if version == 2 else "5:cpu:/x\n4:pids:/job/step\n")
    job = tmp_path / "cg" / ("pids" if version == 1 else "") / "job"
    (job / "step").mkdir(parents=True)
    for place, limit, used in ((job / "step", "max", 5), (job, "2000", 1950)):
        (place / "pids.max").write_text(f"{limit}\n")
        (place / "pids.current").write_text(f"{used}\n")
    monkeypatch.setattr(node.os, "geteuid", lambda: 0)
    assert node.check_threads(tmp_path / "cg", own).found == "1950 of 2000 used (this container or job)"
    monkeypatch.setattr(node.os, "geteuid", lambda: 4321)
    monkeypatch.setattr(node.resource, "getrlimit", lambda _: (20, 20))
    user = node.check_threads(tmp_path / "cg", own)
    assert (user.status, user.found) == (HealthStatus.CRITICAL, "0 of 20 used (this user)")
    (job / "pids.current").write_text("1999\n")
    assert "1999 of 2000" in node.check_threads(tmp_path / "cg", own).found, "room for 1, not for 20"


def test_without_a_limit_the_machines_own_memory_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = tmp_path / "own"
    own.write_text("0::/\n")
    assert node.cgroup_memory(tmp_path / "none", own) is None
    assert node.cgroup_memory(tmp_path / "none", tmp_path / "missing") is None
    monkeypatch.setattr(proc, "memory_available", lambda: 77 * GIB)
    assert node.check_memory(tmp_path / "none", own).found == "77.0 GiB available"
    monkeypatch.undo()
    (told,) = re.findall(r"MemAvailable:\s+(\d+) kB", Path("/proc/meminfo").read_text())
    assert 0.5 < proc.memory_available() / (int(told) * 1024) < 2, "in bytes, as the kernel has it"


def test_space_is_looked_at_where_a_directory_will_be(tmp_path: Path) -> None:
    found = node.check_space(tmp_path / "not" / "there", "the root")
    assert str(tmp_path) in found.found
    assert not (tmp_path / "not").exists()


def of_place(path: Path) -> list[CheckResult]:
    """What the one file that is written to a place tells: of the storage, and of the clock."""
    told = quick_checks([CheckedPlace(what="the root", path=path)], [])[-1].look()
    return told if isinstance(told, list) else [told]


def test_the_clock_agrees_with_the_file_systems(tmp_path: Path) -> None:
    assert [one.status for one in of_place(tmp_path)] == [HealthStatus.OK, HealthStatus.OK]
    assert len(of_place(tmp_path / "none")) == 1, "no file, no stamp to compare with"
    assert not list(tmp_path.iterdir())


def test_a_clock_that_is_off_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """E7: this machine's clock, moved; the file system stamps with the real one."""
    real = time.time
    monkeypatch.setattr(node.time, "time", lambda: real() + 60.0)
    _, found = of_place(tmp_path)
    assert found.status is HealthStatus.WARNING
    assert re.search(r"(59|60)\.\d+ s ahead", found.found)


def test_each_part_of_a_node_can_be_looked_at_alone() -> None:
    """E9."""
    names = {one.name for one in holdfast.check_node([("the root", Path("/tmp"))])}
    assert names == {"memory", "shared memory", "open files", "threads", "load", "space of the root"}
    assert node.check_shared_memory(shared=Path("/no/such")).status is HealthStatus.WARNING


# --- storage ------------------------------------------------------------------------------------------------


def test_storage_that_works_is_tried_and_left_as_it_was(tmp_path: Path) -> None:
    (tmp_path / "theirs").write_text("x")
    assert holdfast.check_storage(tmp_path).status is HealthStatus.OK
    assert [path.name for path in tmp_path.iterdir()] == ["theirs"]


@pytest.mark.parametrize("step", ["fsync", "rename", "fsync_dir"])
def test_the_step_that_fails_is_named_and_nothing_is_left_behind(
    tmp_path: Path, step: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Scenario 25: each step of trying storage is a guard of its own."""

    def fails(*args: object) -> None:
        raise OSError(5, "Input/output error", str(args[0]))

    if step == "fsync_dir":
        monkeypatch.setattr(node, "fsync_dir", fails)
    else:
        monkeypatch.setattr(node.os, step, fails)
    found = node.check_storage(tmp_path, "the root")
    monkeypatch.undo()
    assert found.status is HealthStatus.CRITICAL
    wanted = {
        "fsync": "cannot fsync:",
        "rename": "cannot rename:",
        "fsync_dir": "cannot fsync the directory:",
    }
    assert wanted[step] in found.found
    assert not list(tmp_path.iterdir())


def test_storage_that_gives_back_other_bytes_is_critical(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = Path.read_bytes
    monkeypatch.setattr(Path, "read_bytes", lambda self: b"\0" + read(self)[1:])
    found = node.try_storage(tmp_path)
    assert "were written and read back as" in found.problem


def test_a_directory_that_is_not_there_is_not_made(tmp_path: Path) -> None:
    assert node.check_storage(tmp_path / "a" / "b").status is HealthStatus.OK
    assert not (tmp_path / "a").exists()
    (tmp_path / "file").write_text("x")
    for path in (tmp_path / "file", tmp_path / "file" / "below"):
        assert node.check_storage(path).status is HealthStatus.CRITICAL, path


def test_slow_storage_is_a_warning_that_names_what_is_slow(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("holdfast.health.judgements.LATENCY_WARNING", 0.0)
    real, blocked = os.rename, threading.Event()

    def slow(old: Path, new: Path) -> None:
        blocked.wait(0.3)
        real(old, new)

    monkeypatch.setattr(node.os, "rename", slow)
    found = node.check_storage(tmp_path)
    assert found.status is HealthStatus.WARNING
    assert "most of it to rename" in found.found
    assert found.seconds >= 0.3


def test_a_file_system_that_hangs_is_critical_and_holds_nobody_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A real mount whose server never answers: for the doctor and the gate, and for a storage alarm."""
    monkeypatch.setattr(resume, "PATIENCE", 0.5)
    root = tmp_path / "root"
    root.mkdir()
    began = time.monotonic()
    with hung_mount(root):
        found = by_name(run_checks(quick_checks([CheckedPlace(what="the root", path=root)], patience=0.5)))
        journal = JournalWriter(tmp_path / "journal", "rank-0", 1)
        alarm = resume.blame_storage(journal, ["step_2", "step_1"], root)
        journal.close()
    assert time.monotonic() - began < 20.0
    for name in ("space of the root", "storage of the root"):
        assert found[name].status is HealthStatus.CRITICAL
        assert "no answer within 0.5 s" in found[name].found
    assert f"{root} did not answer within 0.5 s" in alarm


# --- the kernel's log ---------------------------------------------------------------------------------------

KMSG = """6,1,5000000,-;Linux version 6.1
 SUBSYSTEM=pci
3,2,60000000,-;NVRM: Xid (PCI:0000:3b:00): 79, pid='<unknown>', name=<unknown>, GPU has fallen off the bus.
3,3,61000000,-;NVRM: Xid (PCI:0000:5e:00): 31, pid=123, name=python, Ch 00000008
3,4,62000000,-;NVRM: Xid (PCI:0000:5e:00): 999, something new
"""


def test_xids_are_read_from_the_kernels_own_log(tmp_path: Path) -> None:
    log = tmp_path / "kmsg"
    log.write_text(KMSG)
    found = read_kernel_log(kmsg=log, commands=[])
    assert [(one.number, one.bus, one.stamp) for one in found.errors] == [
        (79, "0000:3b:00", 60.0), (31, "0000:5e:00", 61.0), (999, "0000:5e:00", 62.0),
    ]  # fmt: skip
    booted = time.time() - time.clock_gettime(time.CLOCK_MONOTONIC)
    assert abs(found.errors[0].at - booted - 60.0) < 5.0
    judged = judged_log(found)
    assert judged.status is HealthStatus.CRITICAL
    assert "XID 79 on 0000:3b:00" in judged.found
    assert "drain" in judged.fix


@pytest.mark.parametrize("program", ["dmesg", "journalctl"])
def test_xids_are_read_from_whichever_may_be_read(
    tmp_path: Path, program: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    line = "NVRM: Xid (PCI:0000:3b:00): 13, pid=1, Graphics SM Warp Exception"
    shown = f"[   60.123456] {line}" if program == "dmesg" else f"1700000000.123456 host kernel: {line}"
    fake = tmp_path / program
    fake.write_text(f"#!/bin/sh\necho '{shown}'\n")
    fake.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    refused = ("sh", "-c", "echo not permitted >&2; exit 1")
    found = read_kernel_log(kmsg=tmp_path / "none", commands=[refused, (program,)])
    assert [(one.number, one.bus) for one in found.errors] == [(13, "0000:3b:00")]
    assert judged_log(found).status is HealthStatus.WARNING


def test_a_log_that_nobody_may_read_is_unknown_and_said(tmp_path: Path) -> None:
    """Not allowed is not the same as no error."""
    found = read_kernel_log(
        kmsg=tmp_path / "none", commands=[("sh", "-c", "echo Operation not permitted >&2; exit 1"), ("true",)]
    )
    judged = judged_log(found)
    assert judged.status is HealthStatus.UNKNOWN
    assert "Operation not permitted" in judged.found
    assert "it showed nothing" in judged.found


def test_a_buss_address_has_one_spelling() -> None:
    assert {normal_bus(one) for one in ("00000000:3B:00.0", "0000:3b:00", "3b:00", "0000:3B:00.1")} == {
        "0000:3b:00"
    }


def test_every_xid_that_recovery_takes_for_broken_hardware_is_explained_so() -> None:
    broken = {number for number in XIDS if proves_broken(number)}
    assert broken >= {48, 64, 79, 95}
    assert all(map(accuses_device, broken))
    assert not any(accuses_device(number) for number in (13, 31, 43, 45, 63, 99999))
    assert not proves_broken(99999)
    assert all(xid.meaning and xid.for_node for xid in XIDS.values())
    assert XIDS[79].kind is XidClass.DRAIN


BEARS_OUT = {
    XidClass.APPLICATION: ("RESTART_APP", "IGNORE"),
    XidClass.NOTICE: ("IGNORE", "WORKFLOW_XID_45", "XID_154", "UPDATE_SWFW"),
    XidClass.RESET: ("RESET_GPU", "WORKFLOW_XID_48"),
    XidClass.DRAIN: ("RESTART_BM", "WORKFLOW_NVLINK_ERR", "WORKFLOW_NVLINK5_ERR"),
    XidClass.HARDWARE: ("CHECK_MECHANICALS", "CONTACT_SUPPORT"),
}
"""The words of NVIDIA's catalogue from which each class may be taken."""


def test_every_xid_has_a_source_that_bears_its_class_out_or_is_unproven_and_accuses_nobody() -> None:
    for number, xid in XIDS.items():
        if xid.unproven:
            assert not accuses_device(number), number
            assert not proves_broken(number), number
            assert "unproven" in xid.for_node
        else:
            assert any(word in xid.says for word in BEARS_OUT[xid.kind]), (number, xid)
    assert {number for number, xid in XIDS.items() if xid.unproven} == {
        42, 47, 59, 61, 65, 73, 122, 123, 124, 125, 157, 161, 167, 171, 172, 173,
    }  # fmt: skip


def test_the_page_names_only_extras_that_exist() -> None:
    declared = tomllib.loads((REPO / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    for page in (REPO / "docs").rglob("*.md"):
        text = page.read_text()
        named = {*re.findall(r"extras? `(\w+)`", text), *re.findall(r"holdfast\[([\w,]+)\]", text)}
        for extra in {one for names in named for one in names.split(",")}:
            assert extra in declared, f"{page.relative_to(REPO)} names the extra {extra}"


# --- GPUs ---------------------------------------------------------------------------------------------------


def with_smi(monkeypatch: pytest.MonkeyPatch, environment: dict[str, str]) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("holdfast.health.gpu._installed", lambda _: False)


def by_name(found: list[CheckResult]) -> dict[str, CheckResult]:
    return {one.name: one for one in found}


def test_gpus_are_asked_for_through_nvidia_smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ill = {"ecc.errors.uncorrected.volatile.total": "3", "clocks_event_reasons.active": "0x0000000000000040"}
    remapped = {"GPU-aaaa": ("No", "No"), "GPU-bbbb": ("Yes", "No")}
    with_smi(monkeypatch, nvidia_smi(tmp_path, [{}, SECOND | ill], remapped=remapped))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    found = by_name(holdfast.check_gpus(compute=False))
    assert found["gpu 0"].found == "NVIDIA H200 answers"
    assert {found[name].status for name in found if name.startswith("gpu 0")} == {HealthStatus.OK}
    errors = found["gpu 1 memory errors"]
    assert errors.status is HealthStatus.WARNING
    assert "3 memory errors beyond correction" in errors.found
    assert "waits to be replaced" in errors.found
    assert "hot" in found["gpu 1 clocks"].found


def test_a_row_that_could_not_be_replaced_is_critical(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_smi(monkeypatch, nvidia_smi(tmp_path, [{}], remapped={"GPU-aaaa": ("No", "Yes")}))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    assert by_name(holdfast.check_gpus(compute=False))["gpu 0 memory errors"].status is HealthStatus.CRITICAL


def test_fields_that_a_release_does_not_know_are_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    unknown = ("clocks_event_reasons.active", "retired_pages.pending")
    with_smi(monkeypatch, nvidia_smi(tmp_path, [{}], unknown=unknown))
    (one,) = ask_nvidia_smi().devices
    assert (one.throttling, one.retire_pending, one.uncorrected) == (1, None, 0)


def test_a_driver_that_hangs_is_critical_and_costs_its_deadline_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A sick driver hangs for ever, so it is asked in a child process."""
    with_smi(monkeypatch, nvidia_smi(tmp_path, [{}], hangs=True))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    began = time.monotonic()
    (found,) = gpu.check_gpus(compute=False, timeout=0.5)
    assert time.monotonic() - began < 10.0
    assert found.status is HealthStatus.CRITICAL


def test_a_driver_that_fails_is_critical_only_where_gpus_are_visible(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A CPU node may have the program without the driver."""
    with_smi(monkeypatch, nvidia_smi(tmp_path, [], fails="NVIDIA-SMI has failed"))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    assert gpu.check_gpus(compute=False)[0].status is HealthStatus.CRITICAL
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert gpu.check_gpus(compute=False)[0].status is HealthStatus.UNKNOWN


def test_a_gpu_that_is_not_listed_any_more_is_critical() -> None:
    one = Gpus(devices=[Gpu(index=0, bus="0000:3b:00")], source="nvidia-smi")
    found = by_name(gpu.judge_gpus(one, ["0", "1"]))
    assert found["gpu count"].status is HealthStatus.CRITICAL
    named = by_name(gpu.judge_gpus(one, ["0", "1"], insist=False))
    assert named["gpu count"].status is HealthStatus.WARNING, (
        "somebody's wish in CUDA_VISIBLE_DEVICES is no proof"
    )
    lost = Gpus(devices=[Gpu(index=0, problem="GPU is lost")], source="nvml")
    assert gpu.judge_gpus(lost, ["0"])[0].status is HealthStatus.CRITICAL


def test_without_a_driver_there_is_nothing_to_check(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "present", lambda: False)
    assert [one.status for one in holdfast.check_gpus()] == [HealthStatus.OK]


def test_devices_have_the_names_that_the_launcher_gives_them() -> None:
    devices = [Gpu(index=0, uuid="GPU-aaaa-1"), Gpu(index=1, uuid="GPU-bbbb-2")]
    assert names_of(devices, ["1", "0"]) == {0: "0", 1: "1"}
    assert names_of(devices, ["GPU-bbbb"]) == {1: "GPU-bbbb"}
    assert names_of(devices, ["3", "5"]) == {0: "3", 1: "5"}, "a container numbers what it shows from 0"
    assert names_of(devices, []) == {}


def test_heat_and_memory_errors_are_judged_apart() -> None:
    assert judge_slowed("x", 0x1 | 0x4, 40.0).status is HealthStatus.OK, "idle and the power cap are everyday"
    assert judge_slowed("x", None, 95.0).status is HealthStatus.WARNING
    nothing = dict.fromkeys(("uncorrected", "ever", "remap_pending", "remap_failed", "retire_pending"))
    assert "ECC is off" in judge_memory_errors("x", **nothing).found  # type: ignore[arg-type]


def test_a_device_that_others_use_is_busy_and_only_a_wrong_answer_is_miscounting(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import torch

    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda index: (100 * MIB, 80 * GIB))
    computed = gpu._compute_on(0)
    assert (computed.free, computed.problem) == (100 * MIB, "")
    busy = judge_computed("x", right=False, gflops=0.0, free=computed.free)
    crowded = judge_computed(
        "x", right=False, gflops=0.0, problem="AcceleratorError: CUDA error: out of memory"
    )
    for one in (busy, crowded):
        assert one.status is HealthStatus.WARNING
        assert "another program uses it" in one.found
        assert "drain" not in one.fix
    assert "100.0 MiB of its memory free" in busy.found
    failed = judge_computed("x", right=False, gflops=0.0, problem="RuntimeError: uncorrectable ECC error")
    wrong = judge_computed("x", right=False, gflops=90.0)
    assert failed.status is wrong.status is HealthStatus.CRITICAL
    assert "miscounts" not in failed.fix
    assert "miscounts" in wrong.fix
    assert judge_computed("x", right=True, gflops=90.0).status is HealthStatus.OK


def test_computing_without_a_gpu_says_so_and_hides_nothing() -> None:
    """The child process that would compute: here it finds no device, which on a GPU node is critical."""
    (found,) = gpu.check_compute(timeout=120.0)
    assert found.status is HealthStatus.CRITICAL
    assert "no usable CUDA device" in found.found


# --- in a container -----------------------------------------------------------------------------------------


@pytest.mark.usefixtures("mount_namespaces")
def test_a_small_shared_memory_is_seen_for_real() -> None:
    """E7: a mount of 64 MiB, as containers have it."""
    setup = "mount -t tmpfs -o size=64m tmpfs /dev/shm"
    code = "from holdfast.health.node import check_shared_memory as c; r = c(); print(r.status, r.found)"
    command = inside_mounts(setup, [sys.executable, "-c", code])
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert done.stdout.strip() == "warning 64.0 MiB free of 64.0 MiB in /dev/shm", done.stderr
