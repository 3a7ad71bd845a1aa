"""Whatever a command is given, it ends in time with a documented code and one message, and harms nothing.

The commands and their options are taken from the program itself, so a new one is tried without being named
here. What is generated: paths of every kind of file there is, texts, numbers, URLs and settings. A command
runs in this process, as `main` runs it, with a scratch directory that has all of them in it.
"""

from __future__ import annotations

import ctypes
import io
import json
import os
import re
import shutil
import signal
import socket
import stat
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer.main
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import holdfast.cli.app as program
from holdfast.base.bounded import Bounded
from holdfast.errors import ExitCode
from holdfast.journal.events import Warned
from holdfast.journal.writer import JournalWriter
from holdfast.record.directory import ControlDirectory
from kit.checkpoints import make_checkpoint, save_stock

SECONDS = 20.0
"""For one call, on a machine that does other things too; a healthy one takes some milliseconds."""
DOCUMENTED = {int(code) for code in ExitCode} | {3}
"""3: of `doctor`, that something could not be looked at."""

LEFT_OUT = {
    "run": "starts processes; see test_run_refuses_what_it_cannot_use",
    "demo": "trains for seconds; see test_the_demo_refuses_what_it_cannot_use",
    "slurm requeue": "asks a scheduler; test_slurm_requeue has its arguments",
}
NEVER_GIVEN = {"--run", "--follow", "--watch", "--open", "--all-nodes", "--help", "--version"}
"""Options that start something, or are meant not to end."""


def commands() -> dict[str, Any]:
    """Every command by its words. (Typer may bring a click of its own, so no class of that is asked for.)"""
    found: dict[str, Any] = {}

    def walk(command: Any, words: list[str]) -> None:
        if hasattr(command, "commands"):
            for name, one in command.commands.items():
                walk(one, [*words, name])
        else:
            found[" ".join(words)] = command

    walk(typer.main.get_command(program.app), [])
    return found


COMMANDS = commands()
TRIED = sorted(set(COMMANDS) - set(LEFT_OUT))
LONG = "x" * 300
PLACES = [
    "run", "run/checkpoints", "run/checkpoints/CKPT", "run/journal", "run/run.json", "stock", "empty", "file",
    "damaged", "notarun", "fifo", "socket", "locked", "locked/below", "loop", "dangling", "linked", "device",
    "missing", "missing/below", "file/below", LONG, f"run/{LONG}", "a/" * 2100, "new.out", "report.html", ".",
    "..", "", " ", "-", "~", "\udcff\udcfe", "new\nline", "\x1b[31m", "ü", "²", "deep.json", "config.toml",
    "bad.toml", "s3://", "http://[::1", "file://", "a://b", "file:///nowhere/here", "%s", "{0}", "\u202e",
]  # fmt: skip
WORDS = [
    "²", "-1", "0", "1", "1e300", "nan", "inf", "-inf", "99999999999999999999", "1" * 5000, "", " ", "auto",
    "fresh", "step_00000120-0123456789abcdef", "http://[::1", "checkpoint.interval=²", "a=b", "run.dir=", "=",
    "checkpoint.remote_root=http://[::1", "launch.alert_url=http://[::1", "\udcff", "\x07", "[", "🙂",
    "model", "torch", "safetensors", "local", "node\n", "checkpoint.resume_from=²", "0x10", "1_000", "٣",
]  # fmt: skip


def given_value(parameter: Any) -> st.SearchStrategy[str]:
    """A value for an argument: mostly of its kind."""
    words = st.sampled_from(WORDS)
    kind = parameter.type.name
    if kind == "choice":
        return st.one_of(st.sampled_from([str(one) for one in parameter.type.choices]), words)
    if kind.startswith(("integer", "float")):
        return st.one_of(st.integers().map(str), st.floats().map(str), words)
    texts = st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=20)
    return st.one_of(st.sampled_from(PLACES), st.sampled_from(PLACES), st.sampled_from(WORDS), texts)


@st.composite
def command_lines(draw: st.DrawFn) -> list[str]:
    words = draw(st.sampled_from(TRIED))
    line: list[str] = []
    arguments: list[str] = []
    for parameter in COMMANDS[words].params:
        if parameter.param_type_name == "argument":
            count = draw(st.integers(0, 3)) if parameter.nargs == -1 else 1
            arguments += [draw(given_value(parameter)) for _ in range(count)]
            continue
        if NEVER_GIVEN & {*parameter.opts}:
            continue
        wanted = parameter.required or draw(st.integers(0, 3)) == 0
        if not wanted:
            continue
        if parameter.is_flag:
            line.append(draw(st.sampled_from([*parameter.opts, *parameter.secondary_opts])))
        else:
            line += [parameter.opts[0], draw(given_value(parameter))]
    dashes = draw(st.booleans())
    return [*words.split(), *line, *(["--"] if dashes else []), *arguments]


# --- the scene ----------------------------------------------------------------------------------------------


class Scene:
    """A scratch directory with one of everything, made anew when a command has changed it."""

    def __init__(self, home: Path) -> None:
        self.home = home
        self.scratch = home / "scratch"
        self.outside = home / "outside"
        self.outside.mkdir(parents=True)
        (self.outside / "precious").write_text("precious")
        (self.outside / "folder").mkdir()
        (self.outside / "folder" / "precious").write_text("precious")
        self.model = home / "model"
        self._make(self.model)
        self.renew()

    def renew(self) -> None:
        self._unlock()
        shutil.rmtree(self.scratch, ignore_errors=True)
        shutil.copytree(self.model, self.scratch, symlinks=True)
        os.mkfifo(self.scratch / "fifo")
        with socket.socket(socket.AF_UNIX) as bound:
            here = Path.cwd()
            os.chdir(self.scratch)
            bound.bind("socket")
            os.chdir(here)
        (self.scratch / "locked").chmod(0)

    def _unlock(self) -> None:
        if (self.scratch / "locked").exists():
            (self.scratch / "locked").chmod(0o700)

    def _make(self, place: Path) -> None:
        place.mkdir()
        control, _ = ControlDirectory.open_or_create(place / "run")
        journal = JournalWriter(control.journal, "agent", 1)
        journal.write(Warned(message="hello"))
        journal.close()
        lines = [
            b'{"v":1,"at":1e300,"who":"a","attempt":1,"seq":1,"body":{"event":"warned","message":"x"}}',
            b'{"v":1,"at":-1e300,"who":"a","attempt":1,"seq":1,"body":{"event":"warned","message":"x"}}',
            b'{"v":1,"at":1,"who":"\\ud800","attempt":1,"seq":1,"body":{"event":"warned","message":"\\ud800"}}',
            b'{"v":1,"at":5,"who":"a","attempt":99999999999999999999,"seq":1,"body":{"event":"x","y":[1e300]}}',
            b'{"v":1,"at":6,"who":"a","attempt":1,"seq":1,"body":' + b"[" * 5000,
            b"\xff\xfe", b"null", b"",
        ]  # fmt: skip
        (control.journal / "000001-odd-1.jsonl").write_bytes(b"\n".join(lines) + b"\n")
        checkpoint = make_checkpoint(place / "run" / "checkpoints")
        os.rename(checkpoint, checkpoint.with_name("CKPT"))
        save_stock(place / "stock")
        shutil.copytree(place / "run" / "checkpoints" / "CKPT", place / "damaged")
        (place / "damaged" / ".metadata").write_bytes(b"\x80\x04" + b"}" * 100_000)
        for name in ("empty", "notarun", "locked", "locked/below"):
            (place / name).mkdir()
        (place / "notarun" / "run.json").write_text("[" * 100_000)
        (place / "file").write_text("precious")
        (place / "deep.json").write_text("[" * 100_000)
        (place / "config.toml").write_text("[checkpoint]\ninterval = 5\n")
        (place / "bad.toml").write_bytes(b"[checkpoint\n\xff\0")
        (place / "loop").symlink_to("loop")
        (place / "dangling").symlink_to("nowhere")
        (place / "linked").symlink_to(self.outside / "precious")
        (place / "device").symlink_to("/dev/null")

    def seen_outside(self) -> dict[str, tuple[int, int, bytes]]:
        """All that must not change, with what it holds."""
        found = {}
        for path in sorted(self.outside.rglob("*")):
            info = path.lstat()
            data = path.read_bytes() if path.is_file() else b""
            found[str(path)] = (info.st_mode, info.st_mtime_ns, data)
        for path in self.home.iterdir():
            found[str(path)] = (path.lstat().st_mode, 0, b"")
        found["/dev/null"] = (Path("/dev/null").stat().st_mode, 0, b"")
        return found


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    made = Scene(tmp_path_factory.mktemp("commands") / "home")
    (made.home / "tmp").mkdir()
    before, here = os.environ.copy(), Path.cwd()
    for name in [name for name in os.environ if name.startswith(("HOLDFAST_", "SLURM_"))]:
        del os.environ[name]
    os.environ.update(HOME=str(made.home), TMPDIR=str(made.home / "tmp"), NO_COLOR="1", COLUMNS="100")
    kept, tempfile.tempdir = tempfile.tempdir, str(made.home / "tmp")
    os.chdir(made.scratch)
    yield made
    os.chdir(here)
    tempfile.tempdir = kept
    os.environ.clear()
    os.environ.update(before)
    made._unlock()


def call(*arguments: str) -> tuple[int, str, str]:
    """`holdfast …` as `main` runs it: its code, output and messages."""
    out, err = (io.TextIOWrapper(io.BytesIO(), encoding="utf-8", write_through=True) for _ in range(2))
    kept = sys.argv, sys.stdout, sys.stderr, sys.stdin
    with Path(os.devnull).open() as nothing:
        sys.argv, sys.stdout, sys.stderr, sys.stdin = ["holdfast", *arguments], out, err, nothing
        code: Any = "it did not end"
        try:
            program.main()
        except SystemExit as end:
            code = end.code or 0
        finally:
            sys.argv, sys.stdout, sys.stderr, sys.stdin = kept
    texts = [stream.buffer.getvalue().decode(errors="replace") for stream in (out, err)]  # type: ignore[attr-defined]
    return code, *texts  # type: ignore[return-value]


def check(scene: Scene, line: list[str]) -> tuple[int, str]:
    """Run a command line and hold it to what is promised."""
    outside = scene.seen_outside()
    began = time.monotonic()
    calling = Bounded(lambda: call(*line), "command")
    assert calling.ended(SECONDS), f"{line} still runs after {SECONDS:g} s"
    code, out, err = calling.result()
    told = f"{line}\ncode {code} after {time.monotonic() - began:.1f} s\n{out[-2000:]}\n--- stderr\n{err}"
    traces = sorted((scene.home / "tmp").glob("holdfast-defect-*"))
    for trace in traces:
        told += trace.read_text()
        trace.unlink()
    assert not traces, told
    assert "Traceback" not in out + err, told
    assert code in DOCUMENTED, told
    messages = re.findall(r"^(?:holdfast: error|Error|Aborted)", err, re.MULTILINE)
    assert len(messages) <= 1, told
    assert len(err) < 12_000, told
    assert code != ExitCode.USAGE or err or line[0] == "doctor", told  # its 2 says: something is critical
    assert scene.seen_outside() == outside, f"something outside was changed\n{told}"
    return code, err


def restore(scene: Scene) -> None:
    """As it was, for the next one. Most commands change nothing."""
    now = {str(path.relative_to(scene.scratch)) for path in scene.scratch.rglob("*")}
    wanted = {str(path.relative_to(scene.model)) for path in scene.model.rglob("*")}
    wanted -= {"locked/below"}
    if now != wanted | {"fifo", "socket"} or (scene.scratch / "file").read_text() != "precious":
        os.chdir(scene.home)
        scene.renew()
        os.chdir(scene.scratch)


# --- the property -------------------------------------------------------------------------------------------


@settings(
    max_examples=50 if settings().max_examples <= 100 else 1500,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
@given(line=command_lines())
def test_no_command_ends_in_a_traceback_hangs_or_harms(line: list[str], scene: Scene) -> None:
    check(scene, line)
    restore(scene)


def plain(parameter: Any, first: str) -> list[str]:
    """A value with which a command gets further than to its arguments."""
    if parameter.type.name == "choice":
        return [str(next(iter(parameter.type.choices)))]
    return {"reason": ["why"], "which": ["step_00000120-0123456789abcdef"]}.get(parameter.name, [first])


def all_lines(words: str) -> Iterator[list[str]]:
    """Each value for each argument and option of a command, the others as they should be."""
    parameters = [one for one in COMMANDS[words].params if not NEVER_GIVEN & {*one.opts}]
    needed = [one for one in parameters if one.required]
    for chosen in parameters:
        values = [""] if getattr(chosen, "is_flag", False) else PLACES + WORDS
        for value in values:
            line, arguments = words.split(), []
            for one in dict.fromkeys([*needed, chosen]):
                if one.param_type_name == "argument":
                    arguments += [value] if one is chosen else plain(one, "run")
                elif getattr(one, "is_flag", False):
                    line.append(one.opts[0])
                else:
                    line += [one.opts[0], *([value] if one is chosen else plain(one, "run"))]
            yield [*line, "--", *arguments]


@pytest.mark.drill
@pytest.mark.parametrize("words", TRIED)
def test_every_value_for_every_argument(words: str, scene: Scene) -> None:
    failures = []
    for line in all_lines(words):
        try:
            check(scene, line)
        except AssertionError as error:
            failures.append(str(error))
        restore(scene)
    assert not failures, f"{len(failures)} failures\n" + "\n=======\n".join(failures)


REPORTED = [
    ["journal", "run"],
    ["journal", "run", "--report", "new.html"],
    ["status", "run"],
    ["plan", "run"],
    ["recover", "run"],
    ["ckpt", "locate", "run", "--resume-from", "²"],
    ["ckpt", "locate", "run", "--resume-from", "1" * 5000],
    ["ckpt", "ls", "http://[::1"],
    ["ckpt", "verify", "http://[::1"],
    ["ckpt", "ls", "damaged"],
    ["ckpt", "ls", LONG],
    ["status", f"run/{LONG}"],
    ["status", "\udcff\udcfe"],
    ["clean", "a/" * 2100],
    ["control", "pin", "run", "1" * 5000, "--reason", "x"],
    ["config", "show", "--set", "launch.alert_url=http://[::1"],
]


def test_what_once_ended_in_a_traceback(scene: Scene) -> None:
    for line in REPORTED:
        check(scene, line)
    restore(scene)


# --- what those leave out -----------------------------------------------------------------------------------


def test_run_refuses_what_it_cannot_use(scene: Scene) -> None:
    """Before anything is started. (It imports torch, so there are few of these.)"""
    for line in (
        ["--run-dir", LONG, "file"],
        ["--config", "fifo", "file"],
        ["--config", "bad.toml", "file"],
        ["--set", "checkpoint.interval=²", "file"],
        ["--set", "launch.alert_url=https://hooks.example/T0/secret", "file"],
        ["--ft-cfg-path", "fifo", "file"],
        ["--ft-cfg-path", "bad.toml", "file"],
        ["--nproc-per-node", "²", "file"],
    ):
        code, err = check(scene, ["run", *line])
        assert code in (ExitCode.USAGE, ExitCode.CONTROL_UNUSABLE), f"{line}: {code}\n{err}"
        assert "secret" not in err.replace("a secret on a command line", ""), err
        restore(scene)


def test_the_demo_refuses_what_it_cannot_use(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(signal, "signal", lambda *_: None)  # which works in the main thread only
    for place in (
        "file",
        "run",
        "fifo",
        "socket",
        "loop",
        "dangling/x",
        "device",
        LONG,
        "stock",
        "\udcff/\n",
    ):
        if place == "\udcff/\n":
            continue  # it could be made, and would train
        code, err = check(scene, ["demo", "--dir", place])
        assert code == ExitCode.USAGE, f"{place}: {err}"
    (scene.scratch / "empty" / ".holdfast-demo").symlink_to(scene.outside / "precious")
    assert check(scene, ["demo", "--dir", "empty"])[0] == ExitCode.USAGE
    (scene.scratch / "empty" / ".holdfast-demo").unlink()
    os.mkfifo(scene.scratch / "empty" / ".holdfast-demo")
    assert check(scene, ["demo", "--dir", "empty"])[0] == ExitCode.USAGE
    restore(scene)


NOBODYS = [
    ["status", "locked/below"],
    ["journal", "locked/below"],
    ["journal", "run"],
    ["ckpt", "ls", "locked"],
    ["ckpt", "verify", "locked/below"],
    ["ckpt", "locate", "locked/below"],
    ["recover", "locked/below"],
    ["control", "show", "locked/below"],
    ["clean", "locked/below"],
    ["clean", "locked"],
    ["config", "show", "--config", "locked/below"],
    ["plan", "locked/below"],
    ["journal", "run", "--report", "locked/report.html"],
]


def test_what_nobody_may_read_is_said(scene: Scene) -> None:
    """In a child without the rights of a superuser, which these tests may have."""
    (scene.scratch / "run" / "journal").chmod(0)
    told = scene.home / "tmp" / "told.json"
    pid = os.fork()
    if pid == 0:
        try:
            give_up_rights()
            found = []
            for line in NOBODYS:
                try:
                    found.append([*check(scene, line)])
                except BaseException as error:  # noqa: BLE001 - told to the test
                    found.append([-1, repr(error)])
            told.write_text(json.dumps(found))
        finally:
            os._exit(0)
    os.waitpid(pid, 0)
    (scene.scratch / "run" / "journal").chmod(0o755)
    answers = json.loads(told.read_text())
    told.unlink()
    for line, (code, err) in zip(NOBODYS, answers, strict=True):
        assert code in (ExitCode.USAGE, ExitCode.CONTROL_UNUSABLE), f"{line}: {code} {err}"
        assert re.search("ermission denied|not readable", err), f"{line}: {code} {err}"


def give_up_rights() -> None:
    """CAP_DAC_OVERRIDE and CAP_DAC_READ_SEARCH, if this process has them."""
    if os.geteuid() != 0:
        return
    libc = ctypes.CDLL(None, use_errno=True)
    header = (ctypes.c_uint32 * 2)(0x20080522, 0)
    sets = (ctypes.c_uint32 * 6)()
    assert libc.capget(header, sets) == 0
    for word in (0, 1):
        sets[word] &= ~0b110
    assert libc.capset(header, sets) == 0


def test_a_defect_is_told_in_a_line_and_its_trace_is_kept(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    import holdfast.observe.status as status

    def broken(*_: Any) -> None:
        raise KeyError("nobody\nthought of this")

    monkeypatch.setattr(status, "status_of", broken)
    code, out, err = call("status", "run")
    assert (code, out) == (ExitCode.FAILED, "")
    assert re.fullmatch(
        r"holdfast: error: this is a defect of holdfast [^ ]+, not of what you did: KeyError: .* "
        r"\(test_every_command\.py:\d+\)\. The full trace is in \S+: please report it\n",
        err,
    ), err
    path = Path(re.search(r"is in (\S+):", err)[1])  # type: ignore[index]
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert "Traceback (most recent call last)" in path.read_text()
    path.unlink()


def identity(path: Path) -> tuple[int, ...]:
    info = path.lstat()
    return info.st_ino, info.st_mode, info.st_size, info.st_mtime_ns


OUTPUTS = [
    ["journal", "run", "--report", "OUT"],
    ["recover", "run", "--markdown", "OUT"],
    ["ckpt", "export", "run/checkpoints/CKPT", "OUT"],
    ["slurm", "script", "--time", "10", "--output", "OUT", "--", "train.py"],
]


@pytest.mark.parametrize("line", OUTPUTS, ids=lambda line: " ".join(line[:2]))
def test_an_output_replaces_nothing_that_is_not_its_own(line: list[str], scene: Scene) -> None:
    restore(scene)
    insist = "--force" if line[0] == "slurm" else "--overwrite"
    for out in ("file", "fifo", "socket", "device", "linked", "dangling", "empty", "/dev/null"):
        before = identity(Path(out))
        for more in ([], [insist]):
            if out == "file" and more:
                continue
            given_line = [*line[:2], *more, *(out if word == "OUT" else word for word in line[2:])]
            code, err = check(scene, given_line)
            assert code == ExitCode.USAGE, f"{given_line}: {code} {err}"
            assert "refused to replace" in err, err
            assert identity(Path(out)) == before
    assert Path("file").read_text() == "precious"
    assert not Path("nowhere").exists()
    restore(scene)
