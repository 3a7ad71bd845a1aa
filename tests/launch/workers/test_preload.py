"""A worker that was forked from the preloaded parent is what a new interpreter would have been."""

from __future__ import annotations

import json
import os
import re
import signal
import sys
import textwrap
import time
import types
from collections.abc import Iterator
from pathlib import Path

import pytest

from holdfast.launch.workers.forked_worker import brought_along
from holdfast.launch.workers.preload import ColdStart, Preload, PreloadedParent, Request, Script
from holdfast.launch.workers.start import Starter
from kit.harness import REPO, await_child, is_alive, wait_until
from kit.ranks.forking import DEADLINE, cold, command, fork, streams, text_of, warm, without_torch

WHO = (REPO / "tests" / "scripts" / "launch" / "who_am_i.py").read_text()


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where all scripts are: the parent is made for one directory."""
    return tmp_path_factory.mktemp("scripts")


@pytest.fixture(scope="module")
def environment() -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1", "RANK": "7"}


@pytest.fixture(scope="module")
def parent(place: Path, environment: dict[str, str]) -> Iterator[PreloadedParent]:
    before = {**environment, "RANK": "0", "HOLDFAST_GONE": "1"}
    preloaded = PreloadedParent(Preload((), str(place), before))
    preloaded.wait()
    yield preloaded
    preloaded.close()


@pytest.fixture(autouse=True)
def _here(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(place)


def write(place: Path, name: str, text: str) -> str:
    (place / name).write_text(textwrap.dedent(text))
    return name


def same(parent: PreloadedParent, args: list[str], environment: dict[str, str], stdin: str = "") -> str:
    """Run both ways: exit code, stdout and stderr are the same. Returns the output."""
    theirs = cold(args, environment, stdin)
    ours = warm(parent, args, environment, stdin)
    ours.err, theirs.err = (re.sub(r" at 0x\w+>", ">", text) for text in (ours.err, theirs.err))
    assert ours == theirs
    return ours.out


@pytest.mark.parametrize(
    "how", ["script", *(pytest.param(how, marks=pytest.mark.drill) for how in ("link", "module"))]
)
def test_everything_it_can_find_out_is_the_same(
    how: str, parent: PreloadedParent, place: Path, environment: dict[str, str]
) -> None:
    write(place, "who_am_i.py", WHO)
    if how == "link":
        (place / "link.py").symlink_to("who_am_i.py")
    target = {"script": ["who_am_i.py"], "link": ["./link.py"], "module": ["-m", "who_am_i"]}[how]
    args = command(*target, "--flag", "two words")
    theirs, ours = cold(args, environment), warm(parent, args, environment)
    assert [ours.code, ours.err] == [0, ""] == [theirs.code, theirs.err]
    expected, found = json.loads(theirs.out), json.loads(ours.out)
    for name in expected["told"]:
        # The two runs' files for stdin, stdout and stderr have names of their own.
        if name == "descriptors":
            assert [item.split()[0] for item in found["told"][name]] == [
                item.split()[0] for item in expected["told"][name]
            ], found["told"][name]
        else:
            assert found["told"][name] == expected["told"][name], name
    assert found["told"]["environment"]["RANK"] == "7"
    assert "HOLDFAST_GONE" not in found["told"]["environment"]


def test_what_is_no_text_arrives_as_it_is(
    parent: PreloadedParent, place: Path, environment: dict[str, str]
) -> None:
    """A path, an argument and a variable are bytes, whatever Python makes of them."""
    script = os.fsdecode(b"odd_\xff.py")
    write(place, script, "import os, sys\nprint(ascii([sys.argv, os.environb[b'HOLDFAST_ODD']]))")
    odd = {**environment, "HOLDFAST_ODD": os.fsdecode(b"\xfe\x80 caf\xc3\xa9")}
    told = same(parent, command(script, os.fsdecode(b"--name=\xe9")), odd)
    assert told.strip() == ascii([[script, "--name=\udce9"], b"\xfe\x80 caf\xc3\xa9"])


def test_random_state_is_fresh_in_every_worker(
    parent: PreloadedParent, place: Path, environment: dict[str, str]
) -> None:
    script = write(place, "who_am_i.py", WHO)
    workers = [json.loads(warm(parent, command(script), environment).out)["chance"] for _ in range(2)]
    for name in workers[0]:
        assert workers[0][name] != workers[1][name], name


ENDS = {
    "exit code": "import sys; sys.exit(7)",
    "exit message": "import sys; sys.exit('that is all')",
    "exit in a thread that is joined": """
        import threading, time
        def late():
            time.sleep(0.2)
            print("the thread's last words")
        threading.Thread(target=late).start()
        print("the main thread's last words")
        """,
    "atexit": "import atexit; atexit.register(print, 'at exit'); print('before')",
    "exception": """
        def fail(depth):
            if depth == 0:
                raise ValueError("no such sample")
            fail(depth - 1)
        try:
            {}["missing"]
        except KeyError:
            fail(2)
        """,
    "exception group": """
        raise ExceptionGroup("several", [ValueError("one"), TypeError("two")])
        """,
    "excepthook": """
        import sys, traceback
        def hook(kind, error, trace):
            print("hook", kind.__name__, [frame.name for frame in traceback.extract_tb(trace)])
        sys.excepthook = hook
        def fail(): 1 / 0
        fail()
        """,
    "syntax error": "x = (1,\ny = 2\n",
    "encoding": "# -*- coding: latin-1 -*-\nprint(__file__ and 'fine')\n",
    "interrupt": "raise KeyboardInterrupt",
    "sigint": "import os, signal\nos.kill(os.getpid(), signal.SIGINT)\nimport time\ntime.sleep(30)",
    "sigterm": "import os, signal\nos.kill(os.getpid(), signal.SIGTERM)\nimport time\ntime.sleep(30)",
    "sigkill": "import os, signal\nprint('unbuffered', end='')\nos.kill(os.getpid(), signal.SIGKILL)",
    "abort": "import os\nos.abort()",
    "closed pipe": "import os, signal\nprint(signal.getsignal(signal.SIGPIPE))\nos._exit(3)",
    "stdin": "import sys\nprint(input().upper(), sys.stdin.read())",
    "unbuffered": "import os, sys\nprint('a', end='')\nos.write(1, b'b')\nprint('c', end='')\nos._exit(0)",
    "stderr order": "import sys\nprint('1', file=sys.stderr)\nsys.stderr.write('2')\nraise SystemExit",
    "warning": "import warnings\nwarnings.warn('careful')\nwarnings.warn('old', DeprecationWarning)",
    "unraisable": "class Odd:\n    def __del__(self): raise ValueError('in del')\nx = Odd()\n",
}


@pytest.mark.parametrize("name", ENDS)
def test_it_ends_the_same_way(
    name: str, parent: PreloadedParent, place: Path, environment: dict[str, str]
) -> None:
    script = write(place, "end.py", ENDS[name])
    same(parent, command(script), environment, stdin="given\nand more\n")


def test_a_module_that_fails_and_one_that_is_not_there(
    parent: PreloadedParent, place: Path, environment: dict[str, str]
) -> None:
    write(
        place,
        "failing.py",
        "def f():\n    raise OSError(5, 'of the disk')\nif __name__ == '__main__':\n    f()\n",
    )
    same(parent, command("-m", "failing", "x"), environment)
    same(parent, command("-m", "nowhere.to.be.found"), environment)


def test_a_script_that_vanished_is_told_as_python_tells_it(
    parent: PreloadedParent, place: Path, environment: dict[str, str]
) -> None:
    script = write(place, "vanished.py", "")
    with streams("") as files:
        forked = fork(parent, command(script), environment, files)
        (place / script).unlink()
        forked.go()
        code = await_child(forked.pids[0], DEADLINE)
        err = text_of(files[2])
    theirs = cold(command(script), environment)
    assert (code, err) == (theirs.code, theirs.err)


CHILDREN = """
    import multiprocessing, pickle, sys
    from dataclasses import dataclass

    @dataclass
    class Sample:
        value: int

    class Samples:
        def __len__(self): return 8
        def __getitem__(self, index): return index * 2

    def double(sample):
        return Sample(sample.value * 2)

    def noop(start):
        return None

    if __name__ == "__main__":
        print(pickle.loads(pickle.dumps(Sample(3))), Sample.__module__)
        for method in ("fork", "spawn", "forkserver"):
            with multiprocessing.get_context(method).Pool(1) as pool:
                print(method, pool.map(double, [Sample(4)]))
        import torch
        from torch.utils.data import DataLoader
        for method in ("fork", "spawn"):
            loader = DataLoader(Samples(), batch_size=4, num_workers=1, multiprocessing_context=method)
            print(method, [batch.tolist() for batch in loader])
        x = torch.ones(2, requires_grad=True)
        (x @ x).backward()
        print(x.grad, torch.ones(300, 300).mm(torch.ones(300, 300)).sum())
    """


def test_children_of_a_worker_work(parent: PreloadedParent, place: Path, environment: dict[str, str]) -> None:
    """Classes of `__main__` are pickled; each start method and the loaders of torch find the script again."""
    script = write(place, "children.py", CHILDREN)
    ours = warm(parent, command(script), environment)
    assert ours.code == 0, ours.err
    assert ours.out.splitlines() == [
        "Sample(value=3) __main__",
        *[f"{method} [Sample(value=8)]" for method in ("fork", "spawn", "forkserver")],
        *[f"{method} [[0, 2, 4, 6], [8, 10, 12, 14]]" for method in ("fork", "spawn")],
        "tensor([2., 2.]) tensor(27000000.)",
    ]


def test_signals_are_set_as_an_exec_would_leave_them(
    parent: PreloadedParent, place: Path, environment: dict[str, str]
) -> None:
    """What the agent ignores or blocks is inherited; what only the parent ignores is not."""
    script = write(
        place,
        "signals.py",
        """
        import signal
        for number in sorted(signal.valid_signals()):
            print(int(number), str(signal.getsignal(number)).split(" at ")[0])
        print(signal.pthread_sigmask(signal.SIG_BLOCK, []))
        """,
    )
    kept = signal.signal(signal.SIGUSR2, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGWINCH])
    try:
        out = same(parent, command(script), environment)
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGWINCH])
        signal.signal(signal.SIGUSR2, kept)
    assert f"{int(signal.SIGUSR2)} Handlers.SIG_IGN" in out or f"{int(signal.SIGUSR2)} 1" in out


# -- lives and deaths ---------------------------------------------------------------------------------------


def test_nothing_runs_before_the_word_and_nothing_is_left_without_it(
    parent: PreloadedParent, place: Path, environment: dict[str, str]
) -> None:
    script = write(place, "mark.py", "open('mark', 'w').close()")
    with streams("") as files:
        forked = fork(parent, command(script), environment, files)
        pid = forked.pids[0]
        assert Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1] == str(os.getpid())
        assert os.getpgid(pid) == os.getsid(pid) == pid
        deadline = time.monotonic() + 1.0  # long enough for a script of one line, were it run
        while time.monotonic() < deadline:
            assert is_alive(pid)
            assert not (place / "mark").exists()
            time.sleep(0.05)
        forked.end()
    assert not (place / "mark").exists()
    assert not Path(f"/proc/{pid}").exists(), "it was reaped"


def test_a_parent_that_dies_gives_a_reason_and_leaves_no_worker(
    place: Path, environment: dict[str, str]
) -> None:
    script = write(place, "mark.py", "open('mark', 'w').close()")
    preloaded = PreloadedParent(Preload((), str(place), environment))
    try:
        os.kill(preloaded.pid, signal.SIGKILL)
        with streams("") as files, pytest.raises(ColdStart, match="ended with SIGKILL") as caught:
            fork(preloaded, command(script), environment, files)
        assert not caught.value.lasting
        assert "SIGKILL" in preloaded.ended()
    finally:
        preloaded.close()
    assert not (place / "mark").exists()


AGENT = """
    import os, sys, time
    from holdfast.launch.workers.preload import Preload, PreloadedParent, Request, Script
    when = sys.argv[1]
    modules = ("slow",) if when == "imports" else ()
    parent = PreloadedParent(Preload(modules, os.getcwd(), dict(os.environ)))
    if when == "imports":
        time.sleep(300)
    parent.wait()
    request = Request(Script.of([sys.executable, "-u", "sleep.py"]), dict(os.environ), {})
    if when == "asking":
        print("asking", flush=True)
        while True:
            parent.fork({0: request, 1: request}).go()
    forked = parent.fork({0: request, 1: request})
    print(*forked.pids.values(), flush=True)
    if when == "running":
        forked.go()
    time.sleep(300)
    """


@pytest.mark.parametrize("when", ["imports", "asking", "prepared", "running"])
def test_nothing_outlives_an_agent_that_is_killed(when: str, tmp_path: Path) -> None:
    from kit.harness import job, python

    without_torch(tmp_path)
    write(tmp_path, "agent.py", AGENT)
    write(tmp_path, "sleep.py", "import time; time.sleep(300)")
    write(tmp_path, "slow.py", "import time; print('importing', flush=True); time.sleep(300)")
    with job(python("agent.py", when), cwd=tmp_path, may_leave=True) as agent:
        wait_until(lambda: agent.output().out.endswith("\n"), 60, "the agent gets there")
        if when == "asking":
            wait_until(lambda: len(agent.processes()) > 4, 60, "workers are being made")
        pids = [pid for pid in agent.processes() if pid != agent.pid]
        assert len(pids) >= {"imports": 1, "asking": 3, "prepared": 3, "running": 3}[when]
        agent.signal(signal.SIGKILL)
        wait_until(lambda: not agent.processes(), 10, f"everything ends with its agent: {agent.processes()}")


def test_a_silent_parent_costs_its_deadline_only(
    place: Path, environment: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("holdfast.launch.workers.preload.IMPORTS", 0.5)
    preloaded = PreloadedParent(Preload((), str(place), environment))
    try:
        os.kill(preloaded.pid, signal.SIGSTOP)
        began = time.monotonic()
        with pytest.raises(ColdStart, match="had not finished its imports in time"):
            preloaded.wait()
        assert time.monotonic() - began < 20
    finally:
        preloaded.close()
    assert not is_alive(preloaded.pid)


# -- what makes a start cold --------------------------------------------------------------------------------

MODULES = {
    "raises": ("raise RuntimeError('no licence')", "the import of --preload chosen failed: RuntimeError: no"),
    "exits": ("import sys; sys.exit(3)", "the import of --preload chosen failed: SystemExit: 3"),
    "threads": (
        "import threading, time; threading.Thread(target=time.sleep, args=(300,), daemon=True).start()",
        "2 threads",
    ),
    "cuda": ("import torch; torch.cuda.is_initialized = lambda: True", "CUDA was initialised"),
    "dies": ("import os; os._exit(9)", "ended with code 9"),
}


@pytest.mark.parametrize("name", MODULES)
def test_a_preloaded_module_that_makes_forking_unsafe(
    name: str, tmp_path: Path, environment: dict[str, str]
) -> None:
    text, reason = MODULES[name]
    without_torch(tmp_path)
    write(tmp_path, "chosen.py", text)
    preloaded = PreloadedParent(Preload(("chosen",), str(tmp_path), environment))
    try:
        with pytest.raises(ColdStart, match=reason):
            preloaded.wait()
    finally:
        preloaded.close()


def test_preloaded_modules_are_imported_once_and_their_effects_are_kept(
    tmp_path: Path, environment: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """An environment variable that an import set, seeds that it fixed; and a file that changes is noticed."""
    monkeypatch.chdir(tmp_path)
    write(
        tmp_path,
        "chosen.py",
        """
        import os, random, numpy, torch
        os.environ["SET_BY_IMPORT"] = "yes"
        os.environ.pop("REMOVED_BY_IMPORT", None)
        random.seed(1); numpy.random.seed(2); torch.manual_seed(3)
        MADE_IN = os.getpid()
        """,
    )
    script = write(
        tmp_path,
        "use.py",
        """
        import os, random, sys
        print("chosen" in sys.modules, "torch" in sys.modules, "numpy" in sys.modules)
        import chosen, numpy, torch
        print(os.environ["SET_BY_IMPORT"], "REMOVED_BY_IMPORT" in os.environ)
        print(random.random(), numpy.random.rand(), torch.rand(1), torch.initial_seed())
        """,
    )
    environment = {**environment, "REMOVED_BY_IMPORT": "1"}
    preloaded = PreloadedParent(Preload(("chosen",), str(tmp_path), environment))
    try:
        same(preloaded, command(script), environment)
        made = write(tmp_path, "made.py", "import os, chosen\nprint(chosen.MADE_IN != os.getpid())")
        assert warm(preloaded, command(made), environment).out == "True\n"
        (tmp_path / "chosen.py").write_text("CHANGED = True")
        with pytest.raises(ColdStart, match=r"chosen\.py has changed since it was imported"):
            warm(preloaded, command(script), environment)
    finally:
        preloaded.close()


def test_what_is_imported_later_is_left_out_once_it_made_forks_unsafe(
    tmp_path: Path, environment: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """sympy stands for something that starts a thread, on some machine, some day."""
    without_torch(tmp_path)
    monkeypatch.chdir(tmp_path)
    write(
        tmp_path,
        "sympy.py",
        "import threading, time\nthreading.Thread(target=time.sleep, args=(99,)).start()",
    )
    script = write(tmp_path, "nothing.py", "")
    preload = Preload((), str(tmp_path), environment)
    preloaded = PreloadedParent(preload)
    try:
        assert warm(preloaded, command(script), environment).code == 0
        threads = Path(f"/proc/{preloaded.pid}/task")
        wait_until(lambda: len(list(threads.iterdir())) > 1, 60, "the parent imports more")
        with pytest.raises(ColdStart, match="2 threads") as caught:
            warm(preloaded, command(script), environment)
        assert caught.value.spoilt
    finally:
        preloaded.close()
    said: list[str] = []
    starter = Starter(say=said.append)
    starter._preload = preload
    starter._go_cold(caught.value)
    assert starter._preload == preload._replace(later=False)


# -- what a script does before it imports torch -------------------------------------------------------------


SLOW = pytest.mark.drill


@pytest.mark.parametrize(
    ("before", "shown", "found", "why"),
    [
        # Two threads where the parent has one, as under torchrun.
        ("os.environ['OMP_NUM_THREADS'] = '2'", "torch.get_num_threads()", "2", "changes OMP_NUM_THREADS"),
        ("sys.path.insert(0, 'other')", "torch.OTHER", "another", "sys.path before it imports torch"),
        pytest.param(
            "import numpy; os.putenv('OMP_NUM_THREADS', '2')", "torch.get_num_threads()", "2",
            "changes OMP_NUM_THREADS", marks=SLOW,
        ),
        pytest.param(
            "os.environ['PYTORCH_JIT'] = '0'", "torch.jit._state._enabled.enabled", "False",
            "changes PYTORCH_JIT", marks=SLOW,
        ),
        pytest.param(
            "import holdfast; os.environ['MKL_CBWR'] = 'AVX2'", "torch.nn.__name__", "torch.nn",
            "changes MKL_CBWR", marks=SLOW,
        ),
        # What does not concern the import leaves the worker as it is.
        ("os.environ['OMP_NUM_THREADS'] = '1'; os.environ['NCCL_DEBUG'] = 'INFO'", "torch.e > 2", "True", ""),
        ("os.environ['MINE'] = '1'; sys.path.insert(0, 'empty'); import numpy", "numpy.ones(1)", "[1.]", ""),
        ("from importlib import util; util.find_spec('torch').origin", "torch.nn.__name__", "torch.nn", ""),
    ],
)  # fmt: skip
def test_a_script_that_changes_what_an_import_reads_gets_a_new_interpreter(
    before: str,
    shown: str,
    found: str,
    why: str,
    parent: PreloadedParent,
    place: Path,
    environment: dict[str, str],
) -> None:
    (place / "other").mkdir(exist_ok=True)
    (place / "other" / "torch.py").write_text("OTHER = 'another'\n")
    (place / "empty").mkdir(exist_ok=True)
    text = f"""
        import os, sys
        print(os.getpid() == os.getsid(0), sys.argv[1:], os.environ["RANK"], flush=True)
        assert not {{"torch", "numpy"}} & {{*sys.modules}}
        {before}
        import torch
        print({shown})
        print("forked" if "holdfast.launch.workers.forked_worker" in sys.modules else "cold")
        """
    args, note = command(write(place, "early.py", text), "x y"), place / "note"
    note.unlink(missing_ok=True)
    with streams("") as files:
        forked = parent.fork({0: Request(Script.of(args), environment, files, note=str(note))})
        forked.go()
        assert await_child(forked.pids[0], DEADLINE) == 0, text_of(files[2])
        printed = text_of(files[1]).splitlines()
    first = "True ['x y'] 7"
    assert printed == ([first, first, found, "cold"] if why else [first, found, "forked"])
    assert (why in note.read_text()) if why else not note.exists()


def test_a_worker_that_has_children_goes_on_and_says_what_is_wrong(
    parent: PreloadedParent, place: Path, environment: dict[str, str]
) -> None:
    """A new interpreter would not know of them. Children of the script never start it over."""
    script = write(
        place,
        "early.py",
        """
        import os, subprocess, sys
        os.environ["OMP_NUM_THREADS"] = "2"
        child = os.fork()
        if child == 0:
            import torch
            os._exit(7)
        helper = subprocess.Popen(["sleep", "60"])
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
        import torch
        helper.kill()
        helper.wait()
        """,
    )
    ended = warm(parent, command(script), environment)
    assert ended.code == 0, ended.err
    assert "changes OMP_NUM_THREADS before it imports torch" in ended.err
    assert "but it has started processes" in ended.err


def test_modules_that_need_torch_are_told_from_those_that_do_not() -> None:
    def module(name: str, **globals_: object) -> types.ModuleType:
        made = types.ModuleType(name)
        vars(made).update(globals_)
        return made

    class Thing:
        pass

    Thing.__module__ = "torch.nn"
    torch, numpy, os_ = module("torch"), module("numpy"), module("os")
    user = module("user.model", Thing=Thing)
    modules = {
        "torch": torch,
        "torch.nn": module("torch.nn", numpy=numpy),
        "numpy": numpy,
        "numpyish": module("numpyish"),
        "os": os_,
        "json": module("json", torch=torch),
        "user": module("user"),
        "user.model": user,
        "user.train": module("user.train", model=user, numpy=numpy),
        "arrays": module("arrays", np=numpy, os=os_),
        "__main__": module("__main__", torch=torch),
        "holdfast.run": (ours := module("holdfast.run", torch=torch)),
        "holdfast": module("holdfast", run=ours),
        "package.part": (part := module("package.part", torch=torch)),
        "package": module("package", part=part),
    }
    assert brought_along(modules, ["numpyish", "user"]) == {
        "torch": "torch",
        "torch.nn": "torch",
        "numpy": "numpy",
        "user.model": "torch",
        "user.train": "torch",
        "arrays": "numpy",
        "holdfast.run": "torch",
        "package.part": "torch",
        "package": "torch",
        "numpyish": "numpyish",
        "user": "user",
    }


def test_a_variable_that_an_import_may_have_read_makes_a_start_cold(
    parent: PreloadedParent, place: Path, environment: dict[str, str]
) -> None:
    script = write(place, "mark.py", "open('mark', 'w').close()")
    for change in ({"OMP_NUM_THREADS": "2"}, {"PYTHONHASHSEED": "0"}, {"MKL_NUM_THREADS": "1"}, {"TZ": "X"}):
        with pytest.raises(ColdStart, match=f"{next(iter(change))} changed since"):
            warm(parent, command(script), {**environment, **change})
    without = {name: value for name, value in environment.items() if name != "PATH"}
    with pytest.raises(ColdStart, match="PATH changed since"):
        warm(parent, command(script), without)
    assert not (place / "mark").exists()


def test_a_command_that_a_forked_python_cannot_become(place: Path) -> None:
    from holdfast.launch.workers.preload import Script

    (place / "package").mkdir(exist_ok=True)
    write(place, "mark.py", "")
    for args, reason in (
        (["/bin/true"], "run by /bin/true"),
        ([sys.executable, "-O", "mark.py"], "has another form"),
        (command("-c", "pass"), "has another form"),
        (command("package"), "not a Python source file"),
    ):
        with pytest.raises(ColdStart, match=reason) as caught:
            Script.of(args)
        assert caught.value.lasting
