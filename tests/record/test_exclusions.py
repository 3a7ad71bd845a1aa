"""Exclusions: what is kept out stays out, with its reason, until it is readmitted; in doubt it stays out."""

from __future__ import annotations

import os
import string

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.errors import ControlError, UsageError
from holdfast.record.directory import ControlDirectory
from holdfast.record.operator import exclude, excluded, readmit
from kit.harness import wait_until
from kit.tiny import forked


def names(control: ControlDirectory) -> list[str]:
    return [one.describe() for one in excluded(control)]


def test_an_exclusion_stays_with_its_reason_until_the_same_thing_is_readmitted(
    control: ControlDirectory,
) -> None:
    assert excluded(control) == []
    exclude(control, "node-b", None, "its NIC flaps", "alice", 3)
    exclude(control, "node-b", "2", "double bit errors", "recovery", 3)
    exclude(control, "node-a", "GPU-4f/1", "slow", "alice", 4)
    again = ControlDirectory.open(control.path)
    assert names(again) == ["node-a, device GPU-4f/1", "node-b", "node-b, device 2"]
    kept = excluded(again)[1]
    assert (kept.reason, kept.by, kept.attempt) == ("its NIC flaps", "alice", 3)
    readmit(control, "node-b", None, "new cable", "bob")
    assert names(control) == ["node-a, device GPU-4f/1", "node-b, device 2"], "a device is not its node"
    readmit(control, "node-b", "2", "swapped", "bob")
    exclude(control, "node-b", "2", "again", "recovery", 9)
    assert excluded(control)[-1].reason == "again"


@pytest.mark.parametrize("damage", [b"", b"{", b'{"node":"elsewhere"}', b"\xff\xfe"])
def test_a_record_that_cannot_be_read_counts_as_an_exclusion(
    control: ControlDirectory, damage: bytes
) -> None:
    exclude(control, "node-b", None, "why", "alice", 1)
    record = next((control.path / "exclusions" / "node-b").glob("*.json"))
    record.write_bytes(damage)
    (found,) = excluded(control)
    assert found.node == "node-b"
    assert "cannot be read" in found.reason


@pytest.mark.parametrize("name", ["000002-whatever.json", "2.json", "nonsense.json", "000001-excluded.json"])
def test_what_nobody_can_place_or_understand_counts_as_an_exclusion(
    control: ControlDirectory, name: str
) -> None:
    readmit(control, "node-b", None, "why", "alice")
    assert excluded(control) == []
    (control.path / "exclusions" / "node-b" / name).write_text("{}")
    assert names(control) == ["node-b"]


def test_what_a_killed_writer_left_counts_for_nothing(control: ControlDirectory) -> None:
    exclude(control, "node-b", "1", "why", "alice", 1)
    readmit(control, "node-b", "1", "why", "alice")
    for folder in ("", "node-b", "node-b/devices", "node-b/devices/1"):
        (control.path / "exclusions" / folder / ".000003-excluded.json.0123456789ab.tmp").write_text("{")
    assert excluded(control) == []


def test_a_damaged_readmission_still_readmits(control: ControlDirectory) -> None:
    """Its name says what it is; nobody else writes there by accident."""
    exclude(control, "node-b", None, "why", "alice", 1)
    readmit(control, "node-b", None, "why", "alice")
    (control.path / "exclusions" / "node-b" / "000002-readmitted.json").write_bytes(b"")
    assert excluded(control) == []


@settings(max_examples=30, deadline=None)  # each one is several fsyncs
@given(
    node=st.text(min_size=1, max_size=20),
    device=st.none() | st.text(st.sampled_from(string.printable + "é%"), min_size=1, max_size=10),
)
def test_any_name_is_told_again(
    tmp_path_factory: pytest.TempPathFactory, node: str, device: str | None
) -> None:
    control = ControlDirectory.open_or_create(tmp_path_factory.mktemp("run"))[0]
    try:
        exclude(control, node, device, "why", "alice", 1)
    except UsageError:
        assert not node.strip() or not (device or "x").strip() or len(node) * 12 > 200
        return
    except ControlError as error:
        pytest.fail(str(error))
    (found,) = excluded(control)
    assert (found.node, found.device, found.reason) == (node, device, "why")
    assert {path.name for path in control.path.iterdir()} == {"run.json", "exclusions"}, "nothing outside"


@pytest.mark.parametrize("name", ["", " ", "x" * 300, "\ud800"])
def test_a_name_that_cannot_be_one_is_refused_and_nothing_written(
    control: ControlDirectory, name: str
) -> None:
    with pytest.raises(UsageError, match="is not a node's name"):
        exclude(control, name, None, "why", "alice", 1)
    with pytest.raises(UsageError, match="is not a device's name"):
        exclude(control, "node-a", name, "why", "alice", 1)
    assert not (control.path / "exclusions").exists()


def test_several_writers_at_once_lose_nothing(control: ControlDirectory) -> None:
    """Four processes write to one node's folder at the same time; every record is there, each number once."""
    gate = control.path / "go"
    pids = []
    for writer in range(4):
        pid = os.fork()
        if pid == 0:
            code = 70
            try:
                wait_until(gate.exists, 30, "the gate opens")
                for number in range(8):
                    exclude(control, "node-b", None, f"{writer}/{number}", "alice", number)
                code = 0
            finally:
                os._exit(code)
        pids.append(pid)
    gate.write_text("")
    assert [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids] == [0] * 4
    files = sorted(path.name for path in (control.path / "exclusions" / "node-b").iterdir())
    assert files == [f"{number:06d}-excluded.json" for number in range(1, 33)]


def test_a_writer_killed_at_any_file_operation_leaves_all_or_nothing(control: ControlDirectory) -> None:
    from kit.tiny import counting_file_operations, die

    exclude(control, "node-b", None, "first", "alice", 1)
    readmit(control, "node-b", None, "first", "alice")
    operation = 0
    seen = set()
    while True:
        before = names(control)

        def kill_at(number: int, name: str, args: object, at: int = operation) -> None:
            if number == at:
                die()

        def work() -> None:
            with counting_file_operations(kill_at):
                exclude(control, "node-b", None, "second", "alice", 2)

        ended = forked(work)
        after = names(control)
        assert before == []
        assert after in ([], ["node-b"])
        seen.add((ended, tuple(after)))
        if after:
            readmit(control, "node-b", None, "next", "alice")
        if ended == 0:
            break
        operation += 1
    assert {(-9, ()), (0, ("node-b",))} <= seen
