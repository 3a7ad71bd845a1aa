"""`holdfast demo`: one real run of it, and proof that each of its claims can fail."""

from __future__ import annotations

import fcntl
import json
import os
import re
import shutil
import signal
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from holdfast.checkpoint.format.manifest import Reason
from holdfast.checkpoint.format.structure import verify
from holdfast.drill import compare
from holdfast.drill import demo as demo_checks
from holdfast.drill.demo import demo_directory
from holdfast.drill.faults import FaultError, FlippedByte, Killed, flip_byte, kill_rank, payloads
from holdfast.errors import UsageError
from holdfast.journal import JournalLine
from holdfast.journal.events import (
    Resumed,
    RungRejected,
    SaveCommitted,
    SaveStarted,
    StepsDone,
    WorkersStarted,
)
from holdfast.journal.reader import read_journal
from kit.harness import finish, holdfast, job, wait_until

STEPS, RANKS = 60, 2


class Demo:
    """What one real demo left behind."""

    def __init__(self, place: Path, result: dict[str, Any]) -> None:
        self.place = place
        self.result = result
        self.flipped = msgspec.convert(result["flipped"], FlippedByte)
        self.killed = msgspec.convert(result["killed"], Killed)

    def lines(self, name: str = "run") -> list[JournalLine]:
        """Fresh from disk, so that a test may change them."""
        return read_journal(self.place / name / "journal")

    def final(self, name: str = "run") -> Path:
        return self.place / name / "checkpoints" / demo_checks.commits(self.lines(name))[-1].checkpoint


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Demo:
    """One demo for all test processes: whoever comes first runs it, the others wait, and all copy it."""
    base = tmp_path_factory.getbasetemp()
    shared = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "shared-demo"
    shared.mkdir(exist_ok=True)
    with (shared / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (shared / "said.json").exists():
            ended = finish(holdfast("demo", "--json", f"--steps={STEPS}", "--dir=d"), cwd=shared, timeout=170)
            assert ended.code == 0, ended.text
            (shared / "said.json").write_text(ended.out)
    own = tmp_path_factory.mktemp("demo") / "d"
    shutil.copytree(shared / "d", own, symlinks=True)
    return Demo(own, json.loads((shared / "said.json").read_text()))


def test_the_broken_run_ends_bitwise_equal_to_the_reference(demo: Demo) -> None:
    """Scenario 10, with a SIGKILL in mid-step: one shard is bad, every rank makes the same choice."""
    result = demo.result
    assert result["equal"] is True
    assert result["passed"] is True
    assert [check["holds"] for check in result["checks"]] == [True] * 6
    counts = {one["what"]: one["count"] for one in result["comparisons"]}
    assert counts["losses"] == counts["sample orders"] == STEPS * RANKS
    assert counts["parameters and optimizer states"] > 1_000_000
    assert len(counts) == 4


def test_the_incident_says_what_on_which_evidence_and_what_was_decided(demo: Demo) -> None:
    [incident] = demo.result["incidents"]
    assert re.fullmatch(r"rank 1 on \S+ was killed by SIGKILL in step \d+", incident["what"])
    evidence = " ".join(incident["evidence"])
    assert str(demo.killed.pid) in evidence
    assert demo.flipped.checkpoint in evidence
    assert Path(demo.flipped.path).name in evidence
    assert "step_00000015-" in incident["decision"]
    assert incident["steps_lost"] > 15
    assert 0 < incident["seconds_down"] <= incident["seconds_lost"] < demo.result["seconds"]["run"]


def test_the_report_needs_nothing_else_and_says_the_verdict(demo: Demo) -> None:
    page = Path(demo.result["report"]).read_text()
    assert "bitwise equal to the uninterrupted reference" in page
    assert demo.flipped.checkpoint in page
    for outside in ("<script", "src=", "@import", "url(", "<link"):
        assert outside not in page


def test_verify_shows_the_altered_checkpoint_as_altered(demo: Demo) -> None:
    ended = finish(
        holdfast("ckpt", "verify", "--json", str(Path(demo.flipped.path).parent)), cwd=demo.place.parent
    )
    assert ended.code == 1
    assert Reason.ALTERED in ended.out


# --- each claim can fail ------------------------------------------------------------------------------------


def test_a_kill_that_the_run_did_not_see_is_no_proof(demo: Demo) -> None:
    assert demo_checks.check_kill(demo.lines(), demo.killed).holds
    elsewhere = msgspec.structs.replace(demo.killed, pid=demo.killed.pid + 1)
    assert not demo_checks.check_kill(demo.lines(), elsewhere).holds


def test_a_kill_in_the_middle_of_a_save_is_not_one_in_mid_step(demo: Demo) -> None:
    lines = [line for line in demo.lines() if not isinstance(line.body, SaveCommitted) or line.attempt > 1]
    check = demo_checks.check_kill(lines, demo.killed)
    assert not check.holds
    assert "in the middle of saving" in check.found


def test_a_rank_is_only_broken_where_no_save_can_be_cut(demo: Demo) -> None:
    """At every line of the journal: never at a save's step, the one before it, or while a save is open."""
    lines, fit = demo.lines("reference"), 0
    for end in range(1, len(lines) + 1):
        seen = lines[:end]
        done = demo_checks.steps_done(seen, 1)
        if demo_checks.amid_step(seen, 1, interval=STEPS // 4, last=STEPS):
            fit += 1
            assert done % 15 not in (0, 14)
            assert done < STEPS - 1
            begun = {line.body.checkpoint for line in seen if isinstance(line.body, SaveStarted)}
            assert begun == {save.checkpoint for save in demo_checks.commits(seen)}
    assert fit >= STEPS / 2


def test_a_checkpoint_that_was_refused_for_another_reason_or_never_is_no_proof(demo: Demo) -> None:
    lines = demo.lines()
    assert demo_checks.check_refusal(lines, demo.killed, demo.flipped).holds
    never = [line for line in lines if not isinstance(line.body, RungRejected)]
    assert not demo_checks.check_refusal(never, demo.killed, demo.flipped).holds
    for line in lines:
        if isinstance(line.body, RungRejected):
            line.body.reasons = ["missing: its directory is gone"]
    assert not demo_checks.check_refusal(lines, demo.killed, demo.flipped).holds


def test_an_altered_checkpoint_that_was_not_the_newest_is_no_proof(demo: Demo) -> None:
    older = demo_checks.commits(demo.lines())[0].checkpoint
    flipped = msgspec.structs.replace(demo.flipped, checkpoint=older)
    assert not demo_checks.check_refusal(demo.lines(), demo.killed, flipped).holds


def test_a_resume_from_the_altered_checkpoint_or_from_nothing_fails_the_demo(demo: Demo) -> None:
    assert demo_checks.check_resume(demo.lines(), demo.killed, demo.flipped).holds
    for other in (demo.flipped.checkpoint, None):
        lines = demo.lines()
        for line in lines:
            if isinstance(line.body, Resumed) and line.attempt == 2:
                line.body.checkpoint = other
        assert not demo_checks.check_resume(lines, demo.killed, demo.flipped).holds


def test_a_run_or_a_reference_that_did_not_end_as_claimed_fails_the_demo(demo: Demo) -> None:
    lines, reference = demo.lines(), demo.lines("reference")
    assert demo_checks.check_finish(lines, demo.killed, steps=STEPS, exit_code=0).holds
    assert not demo_checks.check_finish(lines, demo.killed, steps=STEPS, exit_code=1).holds
    assert not demo_checks.check_finish(lines, demo.killed, steps=STEPS + 1, exit_code=0).holds
    assert not demo_checks.check_finish(reference, demo.killed, steps=STEPS, exit_code=0).holds
    assert demo_checks.check_reference(reference, steps=STEPS, exit_code=0).holds
    assert not demo_checks.check_reference(lines, steps=STEPS, exit_code=0).holds


def test_a_second_bad_checkpoint_or_a_repaired_one_fails_the_demo(demo: Demo, tmp_path: Path) -> None:
    root = tmp_path / "checkpoints"
    shutil.copytree(demo.place / "run" / "checkpoints", root)
    assert demo_checks.check_copies(root, demo.flipped).holds
    damaged = payloads(root / demo.final().name)[0]
    undo = flip_byte(root / demo.final().name / damaged.path, damaged.start)
    assert not demo_checks.check_copies(root, demo.flipped).holds
    flip_byte(Path(undo.path), undo.offset, bit=undo.bit)
    shard = root / demo.flipped.checkpoint / Path(demo.flipped.path).name
    flip_byte(shard, demo.flipped.offset, bit=demo.flipped.bit)
    assert not demo_checks.check_copies(root, demo.flipped).holds


def test_one_other_loss_is_found(demo: Demo) -> None:
    lines = demo.lines()
    [last] = [line.body for line in lines if line.who == "rank-1" and _does(line, STEPS)]
    last.loss[-1] = float(torch.tensor(last.loss[-1]).nextafter(torch.tensor(0.0)))
    found = _compare_steps(demo, lines, compare.compare_losses)
    assert found.difference.startswith(f"step {STEPS}, rank 1: ")


def test_one_other_sample_is_found_and_an_unrecorded_one_is_a_difference(demo: Demo) -> None:
    for digest in ("0123456789abcdef", ""):
        lines = demo.lines()
        [step] = [
            line.body for line in lines if line.who == "rank-0" and line.attempt == 1 and _does(line, 7)
        ]
        step.samples[-1] = digest
        found = _compare_steps(demo, lines, compare.compare_samples)
        assert found.difference.startswith("step 7, rank 0: ")
        assert digest in found.difference


def test_a_step_that_a_journal_lacks_is_a_difference(demo: Demo) -> None:
    lines = [line for line in demo.lines() if not (line.who == "rank-1" and _does(line, STEPS))]
    found = _compare_steps(demo, lines, compare.compare_losses)
    assert "is not in the journal of the first run" in found.difference
    assert _compare_steps(demo, [], compare.compare_samples).difference


def test_one_bit_of_one_tensor_is_found(demo: Demo) -> None:
    one, other = compare.read_state(demo.final()), compare.read_state(demo.final("reference"))
    assert all(part.equal for part in compare.compare_states(one, other))
    name = "optimizer.state.blocks.1.mlp.2.weight.exp_avg"
    one[name].view(torch.uint8)[-1, -1] ^= 1
    tensors, rest = compare.compare_states(one, other)
    assert tensors.difference.startswith(f"{name}, element {one[name].numel() - 1}: ")
    assert rest.equal
    del one[name]
    assert compare.compare_states(one, other)[0].difference == f"{name} is in the second only"


def test_other_random_states_are_found(demo: Demo) -> None:
    one, other = compare.read_state(demo.final()), compare.read_state(demo.final("reference"))
    one["holdfast.rank_00000"], one["holdfast.rank_00001"] = (
        one["holdfast.rank_00001"],
        one["holdfast.rank_00000"],
    )
    tensors, rest = compare.compare_states(one, other)
    assert tensors.equal
    assert "rng.torch" in rest.difference


def test_nothing_to_compare_is_not_equality() -> None:
    assert not any(part.equal for part in compare.compare_states({}, {}))


def test_altered_bytes_are_not_unpickled_for_the_comparison(demo: Demo) -> None:
    [found] = compare.compare_checkpoints(Path(demo.flipped.path).parent, demo.final("reference"))
    assert "altered" in found.difference


def _does(line: JournalLine, step: int) -> bool:
    return isinstance(line.body, StepsDone) and line.body.first + len(line.body.seconds) - 1 == step


def _compare_steps(demo: Demo, lines: list[JournalLine], how: Any) -> compare.Comparison:
    theirs = compare.timeline(demo.lines("reference"))
    assert how(compare.timeline(demo.lines()), theirs, steps=STEPS, ranks=RANKS).equal
    found: compare.Comparison = how(compare.timeline(lines), theirs, steps=STEPS, ranks=RANKS)
    return found


# --- the faults ---------------------------------------------------------------------------------------------


def test_a_flipped_byte_is_one_bit_in_one_place_and_leaves_size_and_times(demo: Demo, tmp_path: Path) -> None:
    copy = tmp_path / demo.final().name
    shutil.copytree(demo.final(), copy)
    where = payloads(copy)[3]
    shard = copy / where.path
    before, stat = shard.read_bytes(), shard.stat()
    flipped = flip_byte(shard, where.start + 5, bit=3)
    after = shard.read_bytes()
    assert [n for n in range(len(before)) if before[n] != after[n]] == [where.start + 5]
    assert before[flipped.offset] == flipped.before == flipped.after ^ 0b1000
    assert (shard.stat().st_size, shard.stat().st_mtime_ns) == (stat.st_size, stat.st_mtime_ns)
    assert [problem.reason for problem in verify(copy).problems] == [Reason.ALTERED]
    with pytest.raises(FaultError, match="there is none at offset"):
        flip_byte(shard, len(before))


def test_payloads_are_where_the_numbers_are(demo: Demo) -> None:
    state = compare.read_state(demo.final())
    for payload in payloads(demo.final()):
        data = (demo.final() / payload.path).read_bytes()[payload.start : payload.start + payload.length]
        assert data in state[payload.tensor].numpy().tobytes()  # all of it, or a rank's rows


def test_a_process_that_is_not_the_rank_any_more_is_not_killed(demo: Demo) -> None:
    with pytest.raises(FaultError, match="is gone"):
        kill_rank(demo.lines(), 1)
    import os

    lines = demo.lines()
    for line in lines:
        if isinstance(line.body, WorkersStarted):
            line.body.pids = {1: os.getpid()}
    with pytest.raises(FaultError, match="is not its worker any more"):
        kill_rank(lines, 1)
    with pytest.raises(FaultError, match="no workers_started event"):
        kill_rank([], 1)


# --- its directory and its end ------------------------------------------------------------------------------


def test_a_directory_with_other_things_is_refused_and_left_alone(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "thesis.tex").write_text("precious")
    ended = finish(holdfast("demo", "--dir", str(tmp_path)), cwd=tmp_path)
    assert ended.code == 2
    assert "choose another --dir" in ended.err
    assert (tmp_path / "run" / "thesis.tex").read_text() == "precious"


def test_an_earlier_demo_is_replaced_unless_something_was_put_beside_it(tmp_path: Path) -> None:
    with demo_directory(tmp_path / "d") as place:
        (place / "run").mkdir()
        (place / "report.html").touch()
        with pytest.raises(UsageError, match="another demo is running"), demo_directory(place):
            pass
    with demo_directory(place):
        assert [entry.name for entry in place.iterdir()] == [".holdfast-demo"]
        (place / "notes.txt").touch()
    with pytest.raises(UsageError, match=r"notes\.txt"), demo_directory(place):
        pass


DRILLED = [pytest.param(number, marks=pytest.mark.drill) for number in (signal.SIGINT, signal.SIGTERM)]


@pytest.mark.parametrize("number", [signal.SIGKILL, *DRILLED])
def test_however_the_demo_ends_no_process_is_left(tmp_path: Path, number: signal.Signals) -> None:
    with job(holdfast("demo", "--json", "--dir=d"), cwd=tmp_path) as running:

        def started() -> bool:
            lines = read_journal(tmp_path / "d" / "run" / "journal")
            return any(isinstance(line.body, WorkersStarted) for line in lines)

        wait_until(started, 60, "workers start")
        running.signal(number)
        ended = running.wait(30)
        wait_until(lambda: not running.processes(), 10, "everything the demo started ends")
    assert ended.code == {signal.SIGINT: 130, signal.SIGTERM: 143}.get(number, -number), ended.text
