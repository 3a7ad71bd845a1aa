"""A forked process becomes the worker that `python -u script` would have become.

What an exec would have done is done here by hand, and what it would have inherited comes with the agent's
request: session, directory, mask, descriptors, signals, environment, arguments, `__main__` and fresh random
state. docs/guides/fast-restarts.md lists what still differs. Torch is not imported here.

Guarantees: when something cannot be done, the process tells the agent and ends; it never runs half-prepared.
What was imported ahead (torch, numpy, what depends on them) is hidden until the script imports it. If by then
the script has changed something that the import reads, such as OMP_NUM_THREADS, the process starts over as a
new interpreter, under the same process id, and leaves a note that makes the agent start later workers cold.
"""

from __future__ import annotations

import atexit
import builtins
import contextlib
import ctypes
import importlib
import importlib.machinery
import os
import random
import signal
import sys
import threading
import traceback
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import msgspec

from holdfast.base import say_as_rank
from holdfast.process import Stream, guarded, proc

WORD = 60.0
"""Seconds for which a prepared worker waits for the agent's word."""
PR_SET_PDEATHSIG = 1

MAY_DIFFER = (
    "RANK", "LOCAL_RANK", "GROUP_RANK", "ROLE_RANK", "ROLE_NAME", "WORLD_SIZE", "LOCAL_WORLD_SIZE",
    "GROUP_WORLD_SIZE", "ROLE_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "CUDA_VISIBLE_DEVICES",
    "CUDA_MODULE_LOADING", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE",
)  # fmt: skip
MAY_DIFFER_PREFIXES = ("HOLDFAST_", "TORCHELASTIC_", "TORCH_NCCL_", "TORCH_FR_", "NCCL_", "GLOO_")
"""Variables that are read when a worker runs, not while torch is imported. Every other difference between the
parent's environment and a worker's (OMP_*, MKL_*, PYTHON*, LD_*, TORCH_* …) makes a start cold: nobody knows
what has read it already."""
ROOTS = ("torch", "numpy")
"""What is imported ahead of every script. Importing the first brings the second along."""
NATIVE = (
    "OMP_", "GOMP_", "KMP_", "MKL_", "OPENBLAS_", "GOTO_", "BLIS_", "TORCH_", "PYTORCH_", "ATEN_", "C10_",
    "DNNL_", "ONEDNN_", "KINETO_", "LRU_CACHE_CAPACITY", "NPY_",
)  # fmt: skip
"""What their libraries read when they are loaded. What Python code reads is recorded while it is imported.
CUDA's own variables are read when a device is first used, which no import may do."""
PLACED = ("OMP_PROC_BIND", "OMP_PLACES", "GOMP_CPU_AFFINITY", "KMP_AFFINITY")
"""With one of these, OpenMP divides the processors among its threads as soon as it is loaded."""


# What the agent, the preloaded parent and a forked worker say to each other.
#
# A path, an argument or a variable need not be text: whatever bytes it has, they arrive. So these are bytes
# here, and become text again (with surrogates) where they are used.


class Fork(msgspec.Struct, frozen=True, kw_only=True):
    """The agent to the parent: a worker is wanted. The worker's own line to the agent comes with this,
    followed by a descriptor for each of `stdio`."""

    command: list[bytes]
    module: bytes
    script: bytes
    arguments: list[bytes]
    environment: dict[bytes, bytes]
    stdio: list[int]
    """Which of the worker's descriptors they become."""
    processors: list[int]
    """The processors that it is bound to; none means the same as the parent."""
    note: bytes
    """The file in which it says, once, why it started over as a new interpreter."""
    cwd: bytes
    umask: int
    ignored: list[int]
    """Signals that it ignores."""
    blocked: list[int]


class ForkReady(msgspec.Struct, frozen=True, tag="ready"):
    """The parent has imported everything; a worker is prepared."""


class Born(msgspec.Struct, frozen=True, tag="born"):
    """The parent has forked a worker."""

    pid: int


class ForkRefused(msgspec.Struct, frozen=True, tag="refused"):
    """The parent does not fork."""

    why: str
    spoilt: bool = False
    """Whether a parent that imports only what it must would fork."""


class Failed(msgspec.Struct, frozen=True, tag="failed"):
    """A worker could not be prepared, and ends."""

    why: str


class Go(msgspec.Struct, frozen=True):
    """The agent to a worker: run the script."""


FromParent = ForkReady | Born | ForkRefused
FromWorker = ForkReady | Failed


def sayable(text: str) -> str:
    """The text without anything that is not text, such as a file's name may contain."""
    return text.encode(errors="replace").decode()


def may_differ(name: str) -> bool:
    return name in MAY_DIFFER or name.startswith(MAY_DIFFER_PREFIXES)


def processors_matter(environment: Mapping[str, str]) -> bool:
    """Whether OpenMP, while being loaded, looks at the processors that it may use."""
    return "OMP_NUM_THREADS" not in environment or any(name in environment for name in PLACED)


def die_with(parent: int) -> None:
    """Ask the kernel for SIGKILL when the parent dies; end at once if the parent is no longer `parent`."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)


class Chance:
    """Random state as after a cold start: fresh in every worker, unless a module was meant to seed it."""

    def __init__(self) -> None:
        self._before: dict[str, object] = {}
        self._seeded: dict[str, bool] = {}
        self._python: Any = None

    def remember(self) -> None:
        self._before = self._state()

    def compare(self) -> None:
        now = self._state()
        self._seeded = {name: now[name] != self._before.get(name) for name in now}
        self._python = random.getstate()

    @staticmethod
    def _state() -> dict[str, object]:
        state: dict[str, object] = {"random": random.getstate()}
        if "numpy.random" in sys.modules:
            state["numpy"] = sys.modules["numpy.random"].get_state()[1].tobytes()
        if "torch" in sys.modules:
            state["torch"] = sys.modules["torch"].initial_seed()
        return state

    def refresh(self) -> None:
        """Called in a worker. Python's own `random` seeds itself after every fork."""
        if self._seeded.get("random"):
            random.setstate(self._python)
        if not self._seeded.get("numpy", True):
            sys.modules["numpy.random"].seed()
        if not self._seeded.get("torch", True):
            sys.modules["torch"].default_generator.seed()
        if "multiprocessing.process" in sys.modules:
            process = sys.modules["multiprocessing.process"]
            process.current_process().authkey = os.urandom(32)


class Ahead:
    """What was imported ahead of the script, and what those imports saw of their process."""

    def __init__(self) -> None:
        self.asked: set[str] = set()
        """Variables that Python code read."""
        self.roots: dict[str, str] = {}
        """Module → the root whose import it brings about."""
        self._also: tuple[str, ...] = ()
        self._processors = os.sched_getaffinity(0)
        self._hidden: dict[str, types.ModuleType] = {}
        self._script = 0
        self._begun: dict[str, str] = {}
        self._path: list[str] = []
        self._start_over: Callable[[str], None] = lambda _: None

    @contextlib.contextmanager
    def recorded(self, *also: str) -> Iterator[None]:
        """Wraps imports. `also`: modules besides ROOTS that are hidden, with what is inside them."""
        self._also = (*self._also, *also)
        kind: Any = type(os.environ)
        theirs = kind.__getitem__

        def asked(environ: object, name: object) -> object:
            if isinstance(name, str):
                self.asked.add(name)
            return theirs(environ, name)

        kind.__getitem__ = asked
        try:
            yield
        finally:
            kind.__getitem__ = theirs
            self.roots = brought_along(sys.modules, self._also)

    # -- in a worker ----------------------------------------------------------------------------------------

    def hide(self, start_over: Callable[[str], None]) -> None:
        """Until the script imports them, nothing shows that these modules are there."""
        self._start_over = start_over
        self._script = os.getpid()
        self._begun, self._path = c_environment(), list(sys.path)
        for name in self.roots:
            module = sys.modules.pop(name, None)
            if module is not None:
                self._hidden[name] = module
                self._let_go(name)
        sys.meta_path.insert(0, self)
        atexit.register(self.show)  # runs before torch's own exit handlers, which may import it

    def show(self, *roots: str) -> None:
        """Bring back the modules that an import of one of these roots brings; without roots, all of them."""
        for name, module in list(self._hidden.items()):
            if not roots or self.roots[name] in roots:
                del self._hidden[name]
                sys.modules[name] = module
                parent, child = self._package_in_sight(name)
                if parent is not None and child not in vars(parent):
                    setattr(parent, child, module)
        if not self._hidden and self in sys.meta_path:
            sys.meta_path.remove(self)

    def _let_go(self, name: str) -> None:
        """Remove the hidden module from the attributes of a package that stays in sight."""
        parent, child = self._package_in_sight(name)
        if parent is not None and vars(parent).get(child) is self._hidden[name]:
            delattr(parent, child)

    def _package_in_sight(self, name: str) -> tuple[types.ModuleType | None, str]:
        """The package that a module belongs to, if it is never hidden, and the module's name in it."""
        parent, _, child = name.rpartition(".")
        found = sys.modules.get(parent) if parent not in self.roots else None
        return (found if isinstance(found, types.ModuleType) else None), child

    def find_spec(
        self, name: str, path: object = None, target: object = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Python's finder interface; just asking whether there is such a module changes nothing."""
        del path, target
        module = self._hidden.get(name)
        known = getattr(module, "__spec__", None)
        if module is None or known is None:
            return None
        loader: Any = self
        spec = importlib.machinery.ModuleSpec(name, loader, origin=known.origin, loader_state=(module, known))
        spec.submodule_search_locations = known.submodule_search_locations
        spec.has_location = known.has_location
        return spec

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        """The first import. Python's loader interface."""
        root = self.roots[spec.name]
        if os.getpid() == self._script and spec.name in self._hidden and (why := self._differs(root)):
            self._start_over(why)  # returns only if that is not possible
        self.show(*(ROOTS if root in ROOTS[:1] else (root,)))
        module: types.ModuleType = spec.loader_state[0]
        return module

    def exec_module(self, module: types.ModuleType) -> None:
        """Nothing to do: it was executed long ago."""
        ours: Any = module.__spec__
        module.__spec__ = ours.loader_state[1]

    def _differs(self, root: str) -> str:
        """What the script has done that would change its import of `root`; empty if nothing."""
        now = c_environment()
        changed = sorted(
            name
            for name in {*now, *self._begun}
            if now.get(name) != self._begun.get(name)
            and (name in self.asked or name.startswith(NATIVE))
            and not may_differ(name)
        )
        if changed:
            names, them = ", ".join(changed), "it" if len(changed) == 1 else "them"
            return (
                f"the script changes {names} before it imports {root}, which then reads {them}. For fast "
                f"restarts set {them} for `holdfast run` itself"
            )
        if os.sched_getaffinity(0) != self._processors and processors_matter(now):
            return f"the workers are bound to processors before they import {root}, which then counts them"
        if sys.path != self._path:
            find = importlib.machinery.PathFinder.find_spec
            then, found = find(root, self._path), find(root, sys.path)
            if then is not None and (found is None or found.origin != then.origin):
                place = "nowhere" if found is None else found.origin
                return f"the script changes sys.path before it imports {root}, which is then found {place}"
        return ""


def brought_along(modules: Mapping[str, types.ModuleType], also: Sequence[str] = ()) -> dict[str, str]:
    """Which of `modules` cannot be imported without one of ROOTS, and which root that is.

    A module that has something from another one among its globals has imported that one. The modules inside
    one of `also` that need none of ROOTS have that one as their root. Python's own are never included.
    """
    found = {name: name.partition(".")[0] for name in modules if name.partition(".")[0] in ROOTS}
    rest = {
        name: module
        for name, module in list(modules.items())
        if name not in found
        and name.partition(".")[0] not in sys.stdlib_module_names
        and name not in ("__main__", "__mp_main__")
        and isinstance(module, types.ModuleType)
    }
    for root in ROOTS:
        while more := {name for name, module in rest.items() if _has_of(module, root, found)}:
            found |= dict.fromkeys(more, root)
            rest = {name: module for name, module in rest.items() if name not in more}
    for root in also:
        found |= {name: root for name in rest if f"{name}.".startswith(f"{root}.") and name not in found}
    return found


def _has_of(module: types.ModuleType, root: str, found: Mapping[str, str]) -> bool:
    for key, value in list(vars(module).items()):
        owner = _owner(value)
        # Any import of a module makes it an attribute of its package. It does not show whether the package
        # has imported it itself; our own are known not to.
        if owner == f"{module.__name__}.{key}" and owner.startswith("holdfast."):
            continue
        if found.get(owner) == root:
            return True
    return False


def _owner(value: object) -> str:
    """The module that a value is, or comes from, as far as is known without running the value's own code."""
    if isinstance(value, types.ModuleType):
        return str(vars(value).get("__name__", ""))
    return str(value.__module__) if isinstance(value, type | types.FunctionType) else ""


def c_environment() -> dict[str, str]:
    """The environment as libraries see it, including what `os.putenv` put there behind Python's back."""
    entries = ctypes.POINTER(ctypes.c_char_p).in_dll(ctypes.CDLL(None), "environ")
    found: dict[str, str] = {}
    position = 0
    while entries and (entry := entries[position]) is not None:
        name, _, value = os.fsdecode(entry).partition("=")
        found[name] = value
        position += 1
    return found


class Worker:
    """A forked process that becomes what `python -u` would have become."""

    def __init__(
        self,
        request: Fork,
        descriptors: Sequence[int],
        main: Mapping[str, object],
        changes: Mapping[str, str | None],
        chance: Chance,
        ahead: Ahead,
    ) -> None:
        """`descriptors`: the connection to the agent, then one for each of `request.stdio`. `main`: what
        the interpreter puts into a script's `__main__`. `changes`: what imports did to the environment."""
        self._main = main
        self._request = request
        self._changes = changes
        self._chance = chance
        self._ahead = ahead
        self._line: Stream[Go] = Stream.at(descriptors[0], Go)
        self._stdio = dict(zip(request.stdio, descriptors[1:], strict=True))
        self._command = [os.fsdecode(part) for part in request.command]
        self._environment = {os.fsdecode(k): os.fsdecode(v) for k, v in request.environment.items()}
        self.module = os.fsdecode(request.module)
        self.script = os.fsdecode(request.script)
        self.path = ""

    def prepare(self) -> None:
        """Do everything but run the script; then wait for the agent's word. Ends the process on a fault."""
        try:
            self._settle()
            self._set_up_main()
            self._ahead.hide(self._start_over)
            self._line.send(ForkReady(), within=WORD)
            if self._line.receive(WORD) is None:
                raise TimeoutError(f"the agent did not let it run within {WORD:g} s")
            self._line.close()
        except BaseException as error:  # noqa: BLE001 - the agent hears of it, and starts a cold worker
            with contextlib.suppress(OSError):
                why = sayable(traceback.format_exception_only(error)[-1].strip())
                self._line.send(Failed(why), within=WORD)
            os._exit(1)

    def _settle(self) -> None:
        """Set what an exec would have set or kept: session, directory, descriptors, signals, environment."""
        request = self._request
        os.setsid()
        os.umask(request.umask)
        os.chdir(request.cwd)
        for target, descriptor in self._stdio.items():
            os.dup2(descriptor, target)
            os.close(descriptor)
        if request.processors:
            os.sched_setaffinity(0, request.processors)
        self._set_signals()
        wanted: dict[str, str | None] = {**self._environment, **self._changes}
        for name in [name for name in os.environ if wanted.get(name) is None]:
            del os.environ[name]
        os.environ.update({name: value for name, value in wanted.items() if value is not None})

    def _set_signals(self) -> None:
        ignored = set(self._request.ignored)
        for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:
            with contextlib.suppress(OSError):  # some the C library keeps for itself
                if number in (signal.SIGPIPE, signal.SIGXFSZ):
                    continue  # Python ignores them whatever it inherits
                if number in ignored:
                    signal.signal(number, signal.SIG_IGN)
                elif number == signal.SIGINT:
                    signal.signal(number, signal.default_int_handler)
                elif signal.getsignal(number) == signal.SIG_IGN:
                    signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_SETMASK, set(self._request.blocked))

    def _start_over(self, why: str) -> None:
        """Become a new interpreter, which runs the script from its beginning; returns if that fails."""
        request = self._request
        if request.note:
            with contextlib.suppress(OSError), open(request.note, "x") as file:  # noqa: PTH123
                file.write(why)
        what = f"this worker goes on as it is, although it should start over: {why}; "
        if children := ", ".join(str(pid) for pid in proc.children()):
            say_as_rank(f"{what}but it has started processes ({children})")
            return
        try:
            os.chdir(request.cwd)
            os.umask(request.umask)
            self._set_signals()
            for stream in (sys.stdout, sys.stderr):
                with contextlib.suppress(Exception):
                    stream.flush()
            command = guarded(self._command, os.getppid())
            os.execve(command[0], command, self._environment)
        except OSError as error:
            say_as_rank(f"{what}but {error}")

    def _set_up_main(self) -> None:
        command = self._command
        sys.orig_argv[:] = command
        arguments = [os.fsdecode(part) for part in self._request.arguments]
        sys.argv[:] = ["-m" if self.module else self.script, *arguments]
        _show_command(command)
        self._chance.refresh()
        main_thread = threading.main_thread()
        if hasattr(main_thread, "_set_native_id"):
            main_thread._set_native_id()  # Python does not do it after a fork
        importlib.invalidate_caches()
        main = types.ModuleType("__main__")
        vars(main).update(self._main, __doc__=None, __builtins__=builtins)
        if "__annotations__" in self._main:
            vars(main)["__annotations__"] = {}
        if not self.module:  # runpy fills in the rest for a module
            self.path = os.path.join(os.getcwd(), self.script)  # noqa: PTH109, PTH118 - as Python does it
            main.__file__ = self.path
            main.__loader__ = importlib.machinery.SourceFileLoader("__main__", self.path)
        replaced = sys.modules["__main__"]
        for name, module in list(sys.modules.items()):
            if module is replaced:  # also the name that multiprocessing has for it
                sys.modules[name] = main
            elif getattr(module, "__dict__", {}).get("__main__") is replaced:
                module.__dict__["__main__"] = main  # `import __main__`

    def read(self) -> bytes:
        try:
            with open(self.path, "rb") as file:  # noqa: PTH123
                return file.read()
        except OSError as error:
            what = f"[Errno {error.errno}] {error.strerror}"
            print(f"{sys.executable}: can't open file {self.path!r}: {what}", file=sys.stderr)
            sys.exit(2)


def _show_command(command: list[str]) -> None:
    """Let `ps` show the worker's own command line, as far as there is room in place of this process's."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        start, end = proc.place_of_arguments()
        text = b"\0".join(os.fsencode(part) for part in command)[: end - start - 1]
        if start:
            ctypes.memset(start, 0, end - start)
            ctypes.memmove(start, text, len(text))
