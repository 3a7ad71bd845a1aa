"""What only followed from another rank's end is put away, found again, and told in one line."""

from __future__ import annotations

import io
import json
import re
import sys
import threading
import traceback
from collections.abc import Callable
from pathlib import Path

import pytest
import torch.distributed as dist

from holdfast.errors import DecisionTimeoutError, HandedOverError, PingFailedError
from holdfast.policy.diagnosis import loss_of_peer
from holdfast.policy.evidence import Raised
from holdfast.policy.signs import SIGNS
from holdfast.record.attempts import ends_of, failures_of
from holdfast.record.directory import ControlDirectory
from holdfast.record.launches import LaunchInfo
from holdfast.train import crash as folding
from holdfast.train.crash import CrashHook, chain_of
from kit.harness import REPO, finish, holdfast

SCRIPT = str(REPO / "tests" / "scripts" / "faults" / "lose_a_peer.py")
LOST = (
    "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:537] Read error [127.0.0.1]:29888: Connection "
    "reset by peer. This is typically caused by a remote worker hanging or bugs in the application. GLHF! 🏖️"
)
LINE = re.compile(
    r"^[\d:]{8} holdfast\[rank 0\]: ended because it lost another rank "
    r"\((?P<error>RuntimeError: [^()]*)\): a consequence, not the cause; "
    r"its traceback, (?P<lines>\d+) lines, is in (?P<path>/\S+/errors/rank_000000\.traceback)$",
    re.MULTILINE,
)


# -- which exceptions are only that --------------------------------------------------------------------------


def caused(outer: BaseException, inner: BaseException) -> BaseException:
    try:
        try:
            raise inner
        except type(inner):
            raise outer  # noqa: B904 - what was being handled counts
    except BaseException as error:  # noqa: BLE001 - of any kind
        return error


def lost(error: BaseException) -> str:
    """The message of the exception that is found to have lost a peer; empty if none is."""
    found = loss_of_peer([Raised(**one) for one in chain_of(error)])
    return found.message if found is not None else ""


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError(LOST),
        RuntimeError("[../gloo/transport/tcp/unbound_buffer.cc:78] Application timeout caused pair closure"),
        dist.DistBackendError("NCCL communicator was aborted on rank 1."),
        dist.DistBackendError("NCCL error in: x.cpp:1, remote process exited or there was a network error"),
        dist.DistNetworkError("Failed to recv, got 0 bytes. Connection was likely closed."),
        dist.DistStoreError("Timed out after 601 seconds waiting for clients. 1/2 clients joined."),
        DecisionTimeoutError("no decision about resume within 300 s"),
        caused(RuntimeError("training failed"), RuntimeError(LOST)),
        caused(DecisionTimeoutError("no decision"), dist.DistNetworkError("Connection reset by peer")),
    ],
)
def test_the_loss_of_a_peer_is_known(error: BaseException) -> None:
    assert lost(error)


@pytest.mark.parametrize(
    "error",
    [
        ValueError("bad sample"),
        RuntimeError("bad sample"),
        ConnectionRefusedError(111, "Connection refused"),
        BrokenPipeError(32, "Broken pipe"),
        RuntimeError("the database said: connection refused"),
        ValueError(LOST),
        caused(RuntimeError(LOST), ValueError("bad sample")),
        caused(RuntimeError("failed"), caused(RuntimeError(LOST), KeyError("lr"))),
        ExceptionGroup("several", [ValueError("bad sample"), RuntimeError(LOST)]),
        ExceptionGroup("one", [RuntimeError(LOST)]),
        dist.DistNetworkError("The server socket has failed to listen on any local network address."),
        dist.DistNetworkError("The IPv6 network addresses of (x, 1) cannot be retrieved (gai error: -2 - "
                              "Name or service not known)."),
        RuntimeError("Caught ApiError in DataLoader worker process 0.\nOriginal Traceback (most recent call "
                     "last):\n  File \"/gloo.py\", line 1, in f\nApiError: connection refused (gloo)"),
        dist.DistBackendError("NCCL communicator was aborted: uncorrectable ECC error encountered"),
        dist.DistBackendError("NCCL error in: x.cpp:1: CUDA out of memory; connection closed by peer"),
        RuntimeError("[gloo/x.cc:1] Timed out waiting 1800000ms for recv operation to complete"),
        HandedOverError("rank 1 on a: Connection reset by peer"),
        PingFailedError("rank 1 did not answer"),
    ],
)  # fmt: skip
def test_nothing_else_is_taken_for_it(error: BaseException) -> None:
    assert not lost(error)


def test_of_a_chain_whose_beginning_is_not_known_nothing_is_said() -> None:
    error: BaseException = ValueError("the cause")
    for _ in range(9):
        error = caused(RuntimeError(LOST), error)
    assert not lost(error)
    assert loss_of_peer([]) is None


def test_every_sign_of_a_lost_peer_is_of_one_and_no_other_is() -> None:
    for sign in SIGNS:
        kind, _, message = sign.example.partition(": ")
        kind = f"holdfast.errors.{kind}" if kind == "DecisionTimeoutError" else kind
        assert (loss_of_peer([Raised(types=[kind], message=message)]) is not None) is sign.symptom, sign


# -- the hook ------------------------------------------------------------------------------------------------


@pytest.fixture
def launched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """As a rank under `holdfast run`; where its traceback would go."""
    attempt = tmp_path / "run" / "attempts" / "000003"
    attempt.mkdir(parents=True)
    info = LaunchInfo(run_dir=str(tmp_path / "run"), run_id="r", launch="l", attempt=3, epoch=1, node="a")
    environ = {
        **info.to_environment(),
        "TORCHELASTIC_ERROR_FILE": str(tmp_path / "error.json"),
        "RANK": "0",
        "WORLD_SIZE": "2",
    }
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("HOLDFAST_VERBOSITY", raising=False)
    monkeypatch.setattr(sys, "excepthook", sys.__excepthook__)
    monkeypatch.setattr(CrashHook, "_folding", None)
    return attempt / "errors" / "rank_000000.traceback"


def crash(error: BaseException) -> str:
    """What the hooks in place print of an uncaught exception, on standard error."""
    try:
        raise error
    except BaseException:  # noqa: BLE001 - of any kind
        sys.excepthook(type(error), error, error.__traceback__)
    return "".join(traceback.format_exception(error))


def test_one_line_is_printed_and_the_file_holds_the_traceback(
    launched: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    told: list[bool] = []
    CrashHook(lambda _: told.append((tmp_path / "error.json").exists() and not launched.exists()))
    whole = crash(RuntimeError(LOST))
    shown = capsys.readouterr().err
    found = LINE.fullmatch(shown.strip())
    assert found is not None, shown
    assert found["error"] == "RuntimeError: Read error [127.0.0.1]:29888: Connection reset by peer"
    assert found["path"] == str(launched)
    assert launched.read_text() == whole
    assert int(found["lines"]) == len(whole.splitlines())
    assert told == [True], "the error file comes first, then the run is told"
    assert json.loads((tmp_path / "error.json").read_text())["message"]["extraInfo"]["py_callstack"] == whole


def unset(name: str) -> Callable[[pytest.MonkeyPatch, Path], None]:
    return lambda patch, _: patch.delenv(name)


def to(name: str, value: str) -> Callable[[pytest.MonkeyPatch, Path], None]:
    return lambda patch, _: patch.setenv(name, value)


@pytest.mark.parametrize(
    "change",
    [
        unset("HOLDFAST_LAUNCH"),
        to("HOLDFAST_LAUNCH", "{"),
        unset("TORCHELASTIC_ERROR_FILE"),
        to("WORLD_SIZE", "1"),
        unset("RANK"),
        to("HOLDFAST_VERBOSITY", "debug"),
        lambda _, target: target.parent.write_text("in the way"),
        lambda _, target: target.parent.parent.rmdir(),
    ],
    ids=["no launcher", "torn", "no error file", "alone", "no rank", "debug", "in the way", "gone"],
)
def test_where_it_cannot_be_put_away_or_must_not_be_it_is_printed(
    change: Callable[[pytest.MonkeyPatch, Path], None],
    launched: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    change(monkeypatch, launched)
    CrashHook()
    whole = crash(RuntimeError(LOST))
    assert capsys.readouterr().err == whole
    assert not launched.exists()


@pytest.mark.parametrize("asked", ["normal", "", "louder"])
def test_only_debug_unfolds(
    asked: str, launched: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HOLDFAST_VERBOSITY", asked)
    CrashHook()
    crash(RuntimeError(LOST))
    assert LINE.fullmatch(capsys.readouterr().err.strip())


def test_an_interruption_and_a_users_error_are_printed(
    launched: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    CrashHook()
    for error in (caused(KeyboardInterrupt(), RuntimeError(LOST)), ValueError("bad sample")):
        assert crash(error) == capsys.readouterr().err
    assert not launched.exists()


def test_storage_that_hangs_costs_its_patience_and_no_traceback(
    launched: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    go_on = threading.Event()
    monkeypatch.setattr(folding, "PATIENCE", 0.05)
    monkeypatch.setattr(folding, "replace_atomic", lambda *_, **__: go_on.wait(60))
    CrashHook()
    try:
        assert crash(RuntimeError(LOST)) == capsys.readouterr().err
    finally:
        go_on.set()


def test_a_huge_traceback_is_kept_within_bounds(launched: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(folding, "FILE_LIMIT", 300)
    CrashHook()
    whole = crash(RuntimeError(LOST))
    kept = launched.read_text()
    assert kept.startswith(whole[:150])
    assert kept.endswith(whole[-150:])
    assert f"{len(whole) - 300} characters are left out here" in kept


def test_hooks_of_others_are_told_and_what_they_say_is_kept(
    launched: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    told: list[BaseException] = []

    def theirs(kind: type[BaseException], error: BaseException, trace: object) -> None:
        told.append(error)
        print("reported as event 4711", file=sys.stderr)
        sys.__excepthook__(kind, error, error.__traceback__)

    monkeypatch.setattr(sys, "excepthook", theirs)
    CrashHook(told.append)
    CrashHook(told.append)
    error = RuntimeError(LOST)
    whole = crash(error)
    assert told == [error] * 3
    shown = capsys.readouterr().err
    assert LINE.fullmatch(shown.strip()), "one line, also where one hook is inside of another"
    assert launched.read_text() == f"{whole}\nreported as event 4711\n{whole}"


def torchs_hook(monkeypatch: pytest.MonkeyPatch) -> None:
    """Put the hook around the present one that torch puts there with a process group."""
    inner = sys.excepthook

    def _distributed_excepthook(*args: object) -> None:
        before, sys.stderr = sys.stderr, io.StringIO()
        printed = sys.stderr
        try:
            inner(*args)  # type: ignore[arg-type]
        finally:
            sys.stderr = before
        lines = printed.getvalue().split("\n")
        sys.stderr.write("\n".join(f"[rank0]: {line}" if line else "" for line in lines))

    monkeypatch.setattr(sys, "excepthook", _distributed_excepthook)


@pytest.mark.parametrize("outside", [True, False])
def test_torchs_own_hook_neither_changes_the_line_nor_doubles_the_file(
    outside: bool, launched: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "__stderr__", sys.stderr)
    if not outside:
        torchs_hook(monkeypatch)
    CrashHook()
    if outside:
        torchs_hook(monkeypatch)
    whole = crash(RuntimeError(LOST))
    shown = capsys.readouterr().err
    assert LINE.fullmatch(shown.strip()), shown
    assert launched.read_text() == whole


@pytest.mark.parametrize("folds", [True, False])
def test_an_error_with_a_code_of_its_own_keeps_it_and_is_shown_through_torchs_hook(
    folds: bool, launched: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """torch's hook prints what it collected after ours has returned; ours ends the process."""
    monkeypatch.setattr(sys, "__stderr__", sys.stderr)
    CrashHook()
    CrashHook()
    torchs_hook(monkeypatch)
    error = DecisionTimeoutError("no decision within 300 s") if folds else PingFailedError("rank 1 is silent")
    with pytest.raises(SystemExit) as ended:
        crash(error)
    assert ended.value.code == int(error.exit_code)
    shown = capsys.readouterr().err
    assert shown.count("\n") == 1 if folds else shown.count("PingFailedError: rank 1 is silent") == 1
    begins = r"[\d:]{8} holdfast\[rank 0\]: ended" if folds else r"Traceback \(most recent call last\):"
    assert re.match(begins, shown)
    assert launched.exists() is folds


# -- real ranks ----------------------------------------------------------------------------------------------


@pytest.mark.drill
@pytest.mark.parametrize(
    ("flags", "environ", "folds"),
    [
        ([], {}, True),
        (["--group-first"], {"HOLDFAST_VERBOSITY": "normal"}, True),
        (["--in-the-way"], {}, False),
        ([], {"HOLDFAST_VERBOSITY": "debug"}, False),
    ],
    ids=["run first", "group first", "in the way", "debug"],
)
def test_the_peer_of_a_killed_rank_says_one_line_and_the_run_goes_on(
    flags: list[str], environ: dict[str, str], folds: bool, tmp_path: Path
) -> None:
    argv = holdfast("run", "--run-dir", "run", "--nproc-per-node", "2", SCRIPT, *flags)
    result = finish(argv, cwd=tmp_path, env=environ, timeout=120)
    assert result.code == 0, result.text
    control = ControlDirectory.open(tmp_path / "run")
    assert [end and (end.outcome, end.exit_code, end.cause) for _, end in ends_of(control)] == [
        ("failed", -9, "infrastructure"),
        ("finished", 0, ""),
    ]
    peer = next(failure for failure in failures_of(control, 1) if failure.rank == 0)
    assert peer.exit_code == 1
    assert "by peer" in peer.message
    assert re.fullmatch(r"\S*lose_a_peer\.py:\d+ in main", peer.errors[0].where)
    found = LINE.search(result.err)
    assert (found is not None) is folds, result.text
    assert ("Traceback (most recent call last)" in result.err) is not folds, result.text
    assert ("GLHF" in result.err) is not folds, result.text
    if found is not None:
        kept = Path(found["path"]).read_text()
        assert Path(found["path"]).parent == Path(peer.error_file).parent
        written = json.loads(Path(peer.error_file).read_text())["message"]["extraInfo"]["py_callstack"]
        first, _, rest = kept.partition("\n")
        assert first == "Traceback (most recent call last):"
        assert written.endswith(rest), "but for a forked worker's own frame at its beginning"
        assert len(kept.splitlines()) == int(found["lines"])
        assert found.start() < result.err.index("holdfast: rank 1 on ")
