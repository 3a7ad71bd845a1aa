"""What a rank says of itself: everything it can, whatever it is in, and never an exception."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest

from holdfast.process import proc
from holdfast.train import testimony
from kit.harness import finish, python, wait_until


def told(sections: tuple[str, ...] = ()) -> testimony.Testimony:
    return msgspec.json.decode(testimony.testify(sections), type=testimony.Testimony)


def test_every_thread_is_told_with_its_name() -> None:
    gate = threading.Event()

    def wait_at_the_gate() -> None:
        gate.wait(60)

    thread = threading.Thread(target=wait_at_the_gate, name="a \udcff name")
    thread.start()
    try:
        said = told(("train", "step"))
    finally:
        gate.set()
        thread.join()
    assert said.threads[0].main
    assert said.threads[0].frames[0].function == "_stacks"
    other = next(stack for stack in said.threads if stack.name == "a ? name")
    assert other.tid == thread.native_id
    assert "wait_at_the_gate" in [frame.function for frame in other.frames]
    assert said.sections == ["train", "step"]
    assert said.problems == []


def test_a_process_without_torch_stays_one(tmp_path: Path) -> None:
    script = tmp_path / "light.py"
    script.write_text(
        "import sys\nfrom holdfast.train import testimony\n"
        "said = testimony.testify()\nassert b'MainThread' in said\nassert 'torch' not in sys.modules\n"
    )
    result = finish(python(script), cwd=tmp_path)
    assert result.code == 0, result.text


def entry(number: int, **other: Any) -> dict[str, Any]:
    """As torch 2.11 and 2.13 write it, for gloo and NCCL alike."""
    return {
        "collective_seq_id": number,
        "is_p2p": False,
        "process_group": ["0", "default_pg"],
        "profiling_name": "nccl:all_reduce",
        "retired": False,
        "state": "scheduled",
        "input_sizes": [[4, 2]],
        "output_sizes": [[4, 2]],
        **other,
    }


def test_a_recorders_entries_say_which_is_the_first_that_is_not_done() -> None:
    entries = [
        entry(410, retired=True),
        entry(411, state="completed"),
        entry(412, state="started", profiling_name="nccl:_all_gather_base"),
        entry(413),
        entry(3, process_group=["1", "tp"], retired=True),
        entry(7, profiling_name="gloo:barrier", retired=True),  # the group's other backend counts for itself
        entry(999, is_p2p=True),
        {"torn": True}, None, entry(1, process_group=None),
    ]  # fmt: skip
    found = testimony.read_entries(entries, {"0": (0, 1)})
    assert {group: (p.entered, p.waits_in, p.name) for group, p in found.items()} == {
        ("0", "nccl"): (413, 412, "_all_gather_base"),
        ("0", "gloo"): (7, 0, "barrier"),
        ("1", "nccl"): (3, 0, "all_reduce"),
    }
    assert found["0", "nccl"].members == (0, 1)
    assert found["0", "nccl"].shapes == "[4,2] -> [4,2]"


ONE_RANK = """
import json, os, sys
import torch, torch.distributed as dist
from holdfast.train import testimony
dist.init_process_group("gloo", init_method="file://" + sys.argv[1], rank=0, world_size=1)
for _ in range(5): dist.all_reduce(torch.ones(2))
said = json.loads(testimony.testify())
print(json.dumps([said["positions"], said["recorders"], said["problems"]]))
dist.destroy_process_group()
assert json.loads(testimony.testify())["problems"] == []
assert not torch.cuda.is_initialized()
"""


@pytest.mark.parametrize(
    ("size", "name", "source"), [("2000", "all_reduce", ["generic"]), ("0", "", ["counters"])]
)
def test_without_a_flight_recorder_the_count_is_still_known(
    tmp_path: Path, size: str, name: str, source: list[str]
) -> None:
    """Pins what torch tells: which dumps there are, their fields, and the groups' own counts."""
    script = tmp_path / "one.py"
    script.write_text(ONE_RANK)
    env = {"TORCH_FR_BUFFER_SIZE": size, "GLOO_SOCKET_IFNAME": "lo"}
    result = finish(python(script, str(tmp_path / "store")), cwd=tmp_path, env=env)
    assert result.code == 0, result.text
    positions, recorders, problems = msgspec.json.decode(result.out.splitlines()[-1])
    (position,) = positions
    assert (position["group"], position["entered"], position["members"]) == ("0", 5, [0])
    assert (position.get("name", ""), position.get("waits_in", 0)) == (name, 0)
    assert (recorders, problems) == (source, [])


def test_a_recorder_that_hangs_or_fails_costs_only_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """A mock: the device that hangs is not here."""
    import torch.distributed  # noqa: F401 - without it there is nothing to ask
    from torch._C import _distributed_c10d as c10d

    gate = threading.Event()

    def hangs(**_: Any) -> bytes:
        gate.wait(60)
        return b"{}"

    def fails(**_: Any) -> bytes:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(testimony, "RECORDER_PATIENCE", 0.1)
    monkeypatch.setattr(c10d, "_dump_nccl_trace_json", hangs, raising=False)
    monkeypatch.setattr(c10d, "_dump_fr_trace_json", fails)
    started = time.monotonic()
    said = told()
    assert time.monotonic() - started < 15
    gate.set()
    assert said.threads
    assert said.problems == [
        "flight recorder nccl: no answer within 0.1 s",
        "flight recorder generic: RuntimeError: CUDA error: an illegal memory access was encountered",
    ]


def test_what_cannot_be_told_is_told_as_that(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> Any:
        raise MemoryError

    monkeypatch.setattr(testimony, "_stacks", broken)
    monkeypatch.setattr(testimony, "_positions", broken)
    assert told().problems == ["no stacks: MemoryError: ", "no collectives: MemoryError: "]


def test_a_signal_that_somebody_handles_is_not_taken(tmp_path: Path) -> None:
    taken = signal.SIGRTMIN + testimony._CANDIDATES[0]
    before = signal.signal(taken, lambda *_: None)
    try:
        installed = testimony.install(tmp_path, 3)
        assert installed is not None
        assert installed.signal != taken
        record = testimony.registered(tmp_path, 3)
        assert record is not None
        assert (record.pid, record.signal) == (os.getpid(), installed.signal)
        assert proc.catches(os.getpid(), installed.signal)
        os.kill(os.getpid(), installed.signal)
        path = testimony.stacks_path(tmp_path, 3)
        wait_until(
            lambda: b"test_a_signal_that_somebody_handles" in path.read_bytes(), 10, "the stacks are written"
        )
        installed.close()
        assert testimony.registered(tmp_path, 3) is None
        os.kill(os.getpid(), installed.signal)  # one that came too late ends nobody
        signal.signal(installed.signal, signal.SIG_DFL)
    finally:
        signal.signal(taken, before or signal.SIG_DFL)


def test_where_nothing_can_be_written_nothing_is_registered(tmp_path: Path) -> None:
    assert testimony.install(tmp_path / "missing", 0) is None
    code = "import signal,sys\nfrom holdfast.train import testimony\nfrom pathlib import Path\n"
    code += "print(testimony.install(Path('/missing'), 0))\n"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout == "None\n"
