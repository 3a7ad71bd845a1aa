"""The proof at the first save of an attempt: what is about to be stored would resume.

A checkpoint whose bytes are right may still be one that no resume takes, or that resumes as something else:
a class that pickles but does not unpickle, a `load_state_dict` that forgets something, an optimizer that
ignores a key. Discovered only at the first crash, that costs every hour since the start. So the first save of
an attempt, and the first one after its structure changed, is loaded again before it is stored, by a fork of
the trainer: the tracked objects are put back to how they were when the attempt began, as a new process would
have them; what is stored is read into them exactly as a resume would; then the state is collected again and
compared.

The verdict on each part: `values` (all came back by value, or was read in place into the very memory that
training uses), `structure` (names, kinds, shapes and types fit and the load succeeded, but not all values
were compared), or `not proven`, and why. It goes into the manifest.

Guarantee: training waits for at most DEADLINE seconds, once; the fork takes at most about MEMORY bytes of its
own, touches no device, no socket and no file of the trainer's, prints nothing, and ends with the trainer.
Nothing that happens to it harms training: if it cannot be forked, is killed, crashes or hangs, nothing is
proven, and that is reported. A difference counts only where it is certain: in what an object says of itself
after a load, about an entry that is not what a new process would begin with anyway.

The trainer has threads, and a fork keeps none of them. It does keep the trainer's handlers, destructors,
files, sockets, and memory that is shared between processes. None of those may be used in it. So signals are
blocked and the garbage collector is off from before the fork on, every descriptor leads nowhere, and before
forking the trainer checks what memory is mapped.

Guarantee: the fork never outlives its trainer, and is the first to go if the host runs out of memory.
`end` waits for no longer than REAP_PATIENCE. It reaps the fork by its own descriptor, so that other code that
waits for children of this process, or ignores their signals, is neither disturbed nor relied on.
"""

from __future__ import annotations

import bisect
import collections
import contextlib
import copy
import ctypes
import gc
import io
import logging
import os
import pickle
import resource
import select
import signal
import sys
import time
import types
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, NoReturn

import msgspec
import numpy
import torch
from torch import nn
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.tensor import DTensor

from holdfast.base import local_part
from holdfast.checkpoint.format import FAILURES, Proof, needs_more_than_a_fork
from holdfast.checkpoint.save import PR_SET_PDEATHSIG
from holdfast.checkpoint.state.adapters import flatten
from holdfast.checkpoint.state.nested import taken_apart
from holdfast.checkpoint.state.tracked import Tracked, check_parts, check_strict, from_blob, misfit, to_blob
from holdfast.checkpoint.state.untracked import Unheld, versions_of
from holdfast.errors import IncompleteStateError
from holdfast.process import MemoryMapping, proc

# --- the fork that it runs in -------------------------------------------------------------------------------

REAP_PATIENCE = 10.0
"""Seconds for a fork that has reported, or was killed, to be gone; its memory has to be unmapped first."""
REPORT_BYTES = 64 * 1024
"""What a pipe holds: writing that much never blocks."""

_libc = ctypes.CDLL(None, use_errno=True)


# --- before the fork ----------------------------------------------------------------------------------------


class Mappings:
    """The memory of this process, as it is mapped now."""

    def __init__(self, mappings: Sequence[MemoryMapping]) -> None:
        self._mappings = mappings
        self._starts = [mapping.start for mapping in mappings]

    def shares(self, start: int, end: int) -> bool:
        """Whether some byte of a range would be the same memory in a child, whose writes all would see."""
        at = max(0, bisect.bisect_right(self._starts, start) - 1)
        while at < len(self._mappings) and self._mappings[at].start < end:
            if self._mappings[at].shared and start < self._mappings[at].end:
                return True
            at += 1
        return False

    @property
    def network_adapter(self) -> str:
        """A network adapter (RDMA) whose memory this process has mapped; empty if there is none.

        What its driver does with memory that it has pinned, when the process forks, is not known here.
        """
        paths = (mapping.path for mapping in self._mappings)
        return next((path for path in paths if path.startswith("/dev/infiniband")), "")


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Around a fork: no signal handler and no destructor of the trainer's may ever run in the child."""
    collecting = gc.isenabled()
    gc.disable()
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    if sys.version_info >= (3, 12):
        # Forking beside threads is the point of this module; turned into an error, this would lose the child.
        ours = __package__.replace(".", r"\.")
        warnings.filterwarnings("ignore", ".*fork", DeprecationWarning, module=rf"{ours}\.proof$")
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
        if collecting:
            gc.enable()


# --- in the fork --------------------------------------------------------------------------------------------


def die_with(parent: int) -> None:
    _libc.prctl(PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
    if os.getppid() != parent:  # the parent died before that took effect
        os._exit(1)


def keep_only(kept: int) -> None:
    """Keep no file or socket of the trainer's but this one: what is printed or sent goes nowhere."""
    nowhere = os.open(os.devnull, os.O_RDWR)
    for number in proc.descriptors():
        if number not in (kept, nowhere):
            with contextlib.suppress(OSError):  # the descriptor of the listing itself
                os.fstat(number)
                os.dup2(nowhere, number)


def say(descriptor: int, told: bytes) -> None:
    view = memoryview(told[:REPORT_BYTES])
    while view:
        view = view[os.write(descriptor, view) :]


# --- in the trainer, beside it ------------------------------------------------------------------------------


def end(process: int) -> str:
    """Kill it and learn how it ended, waiting no longer than it takes to dismantle a dead process."""
    with contextlib.suppress(ProcessLookupError):
        signal.pidfd_send_signal(process, signal.SIGKILL)
    ready = select.poll()
    ready.register(process, select.POLLIN)
    ready.poll(int(1000 * REAP_PATIENCE))
    with contextlib.suppress(ChildProcessError):
        found = os.waitid(os.P_PIDFD, process, os.WEXITED | os.WNOHANG)
        if found is not None:
            killed = found.si_code in (os.CLD_KILLED, os.CLD_DUMPED)
            return f"{'signal' if killed else 'code'} {found.si_status}"
    return "unseen"


# Where two states differ.


PLAIN = (bool, int, float, complex, str, bytes, type(None))
"""Types whose equality means what it says. For anything else only the type is compared."""


def first_difference(a: Any, b: Any, path: str, *, by_value: bool = False) -> str:
    """The place of the first difference between two states; empty if none is found.

    `by_value`: 1 equals 1.0, a list equals a tuple, and the order of keys does not matter.
    """
    if by_value:
        a, b = _by_value(a), _by_value(b)
    if type(a) is not type(b):
        return path
    if isinstance(a, torch.Tensor | numpy.ndarray):
        return "" if same_bits(a, b) else path
    if isinstance(a, Mapping):
        if list(a) != list(b):
            return path
        each = (first_difference(a[k], b[k], f"{path}.{k}", by_value=by_value) for k in a)
        return next(filter(None, each), "")
    if isinstance(a, (list, tuple, collections.deque)):
        if len(a) != len(b):
            return path
        pairs = enumerate(zip(a, b, strict=True))
        each = (first_difference(x, y, f"{path}[{i}]", by_value=by_value) for i, (x, y) in pairs)
        return next(filter(None, each), "")
    if isinstance(a, PLAIN):
        return "" if a == b or (a != a and b != b) else path
    return "" if by_value else _difference_within(a, b, path)


def _difference_within(a: Any, b: Any, path: str) -> str:
    """The same for objects of one class, by what pickle would store of them."""
    if isinstance(a, (set, frozenset)):
        return "" if a == b else path
    one, other = taken_apart(a), taken_apart(b)
    if one is not None and other is not None:
        return first_difference(tuple(one)[1:], tuple(other)[1:], path) and path
    with contextlib.suppress(Exception):
        return "" if pickle.dumps(a) == pickle.dumps(b) else path
    return ""  # no two states that were stored


def _by_value(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.detach().as_subclass(torch.Tensor)
    if isinstance(value, Mapping):
        return {key: value[key] for key in sorted(value, key=lambda key: (type(key).__name__, str(key)))}
    if isinstance(value, (list, tuple)):
        return list(value)
    return float(value) if isinstance(value, (bool, int)) and abs(value) < 1 << 53 else value


def same_bits(a: Any, b: Any) -> bool:
    """Whether two tensors, or arrays, have the same type, shape and bytes: NaN equals NaN, but -0 not 0."""
    if isinstance(a, DTensor):  # each rank compares what it holds: no other rank may be comparing
        same = isinstance(b, DTensor) and a.placements == b.placements
        return same and same_bits(local_part(a), local_part(b))
    if isinstance(a, torch.Tensor):
        if not (_has_strides(a) and _has_strides(b)):
            return _as_stored(a) == _as_stored(b)
        return a.dtype == b.dtype and a.shape == b.shape and torch.equal(_bits(a), _bits(b))
    return bool(a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes())


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().resolve_conj().resolve_neg().cpu().contiguous().reshape(-1).view(torch.uint8)


def _has_strides(tensor: torch.Tensor) -> bool:
    return tensor.layout is torch.strided and not tensor.is_quantized and not tensor.is_nested


def _as_stored(tensor: torch.Tensor) -> bytes:
    """What torch.save makes of a tensor that has no strides, or not only them."""
    file = io.BytesIO()
    torch.save(tensor.detach().clone().cpu(), file)
    return file.getvalue()


def scramble(tensor: torch.Tensor) -> None:
    """Change its bits, whatever it is, so that a load that does not write here shows."""
    if tensor.is_contiguous():
        flat = tensor.reshape(-1).view(torch.uint8)
        torch.bitwise_not(flat, out=flat)
    else:
        tensor.copy_(torch.where(tensor == 0, torch.ones_like(tensor), torch.zeros_like(tensor)))


def same_memory(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.data_ptr() == b.data_ptr() and a.stride() == b.stride()


# --- what came back of what was saved -----------------------------------------------------------------------


class Change(NamedTuple):
    path: tuple[Any, ...]
    saved: Any
    found: Any


MISSING = object()


def changes(saved: Any, found: Any, path: tuple[Any, ...] = ()) -> Iterator[Change]:
    """Every place where `found` is not what was saved. An equal value of another type is no difference."""
    if isinstance(saved, torch.Tensor | numpy.ndarray):
        same = isinstance(found, type(saved)) or (
            isinstance(saved, torch.Tensor) and isinstance(found, torch.Tensor)
        )
        if not (same and same_bits(saved, found)):
            yield Change(path, saved, found)
    elif isinstance(saved, Mapping) and isinstance(found, Mapping):
        for key, value in saved.items():
            if key in found:
                yield from changes(value, found[key], (*path, key))
            else:
                yield Change((*path, key), value, MISSING)
    elif isinstance(saved, list | tuple | collections.deque) and isinstance(
        found, list | tuple | collections.deque
    ):
        if len(saved) != len(found):
            yield Change(path, saved, found)
        else:
            for at, (one, other) in enumerate(zip(saved, found, strict=True)):
                yield from changes(one, other, (*path, at))
    elif (isinstance(saved, PLAIN) or type(saved) is not type(found)) and not _equal(saved, found):
        yield Change(path, saved, found)


def _equal(a: Any, b: Any) -> bool:
    with contextlib.suppress(Exception):
        return bool(a == b) or (a != a and b != b)
    return False


def at_path(tree: Any, path: Sequence[Any]) -> Any:
    for key in path:
        try:
            tree = tree[key]
        except (KeyError, IndexError, TypeError):
            return MISSING
    return tree


def named(path: Sequence[Any]) -> str:
    return "".join(f"[{key}]" if isinstance(key, int) else f".{key}" for key in path).lstrip(".")


def shown(value: Any) -> str:
    if value is MISSING:
        return "nothing"
    if isinstance(value, torch.Tensor) and value.numel() > 8:
        return f"other values in a tensor of {tuple(value.shape)}"
    try:
        text = repr(value)
    except Exception:  # noqa: BLE001 - the user's code
        text = f"a {type(value).__name__}"
    return text if len(text) <= 80 else f"{text[:77]}…"


DEADLINE = 15.0
"""Seconds that training waits for a proof; after that it is ended, and nothing is proven."""
MEMORY = 1 << 30
"""Bytes that the fork may need for itself."""
VALUES = 32 << 20
"""Bytes of tensors that are compared by value, the smallest first. What is larger is neither written nor
read, so that it takes no memory."""
MEMORY_LOOK = 0.1
"""Seconds between two looks at its memory."""
KEPT = 4 << 20
"""Bytes of plain values of the tracked objects, as they were at the start, that are remembered."""
KEPT_TENSOR = 64 << 10
DEPTH = 6
"""How deep to go into the objects that a tracked object consists of."""
TOLD = 4
"""Errors that one report lists."""
_REPORT = 48 * 1024
"""Bytes; less than a pipe holds, so that writing it never blocks."""

VALUE, STRUCTURE = "values", "structure"
NOT_PROVEN = "not proven: "
CURE = "Nothing was stored of this save; older checkpoints are untouched"


class Report(msgspec.Struct, kw_only=True):
    """What one rank's proof found."""

    parts: dict[str, str] = {}
    """What is proven about each part."""
    errors: list[str] = []
    doubts: list[str] = []
    why_not: str = ""
    """Why there was no proof at all."""


@dataclass
class Subject:
    """What is about to be stored by this rank."""

    tracked: Tracked
    initial: Initial
    tensors: Mapping[str, Any]
    """By part; aliases of live state."""
    others: Mapping[str, Any]
    own: Mapping[str, Any]
    blob: torch.Tensor
    metadata: Callable[[], Metadata]
    """What `.metadata` will say of it, as far as this rank knows."""


# --- how tracked objects were at the start ------------------------------------------------------------------


class Initial:
    """The plain attributes of the tracked objects when the attempt began, before it resumed.

    That is what a new process would have: it constructs the same objects with the same script. None of the
    user's code runs here.
    """

    def __init__(self, tracked: Tracked) -> None:
        self._budget = KEPT
        self._kept: list[tuple[dict[str, Any], dict[str, Any], frozenset[str]]] = []
        """For each object: its attributes; copies of the plain ones; the names of all."""
        self._groups: list[tuple[torch.optim.Optimizer, list[dict[str, Any]]]] = []
        self._seen: set[int] = set()
        self.versions = versions_of(tracked)
        for _, thing in tracked.items():
            if isinstance(thing, nn.Module):
                for module in thing.modules():
                    if _has_state_of_its_own(module):
                        self._keep(module, DEPTH)
            elif isinstance(thing, torch.optim.Optimizer):
                groups = [self._plain(_without(group, "params")) for group in thing.param_groups]
                self._groups.append((thing, groups))
                self._keep(thing, DEPTH)
            else:
                self._keep(thing, DEPTH)
        self._seen.clear()

    def _keep(self, thing: object, depth: int) -> None:
        attributes = getattr(thing, "__dict__", None)
        if not isinstance(attributes, dict) or id(thing) in self._seen or depth == 0:
            return
        self._seen.add(id(thing))
        kept: dict[str, Any] = {}
        for name, value in attributes.items():
            if isinstance(thing, nn.Module | torch.optim.Optimizer) and _is_torchs(name):
                continue
            found = self._copy(value)
            if found is not _OPAQUE:
                kept[name] = found
            else:
                self._look_into(value, depth - 1)
        self._kept.append((attributes, kept, frozenset(attributes)))

    def _look_into(self, value: object, depth: int) -> None:
        if _is_another_story(value):
            return
        if type(value) in (list, tuple, dict):
            for inner in value.values() if isinstance(value, dict) else value:  # type: ignore[attr-defined]
                self._keep_found(inner, depth)
            return
        self._keep(value, depth)

    def _keep_found(self, value: object, depth: int) -> None:
        if not _is_another_story(value):
            self._keep(value, depth)

    def _plain(self, values: dict[str, Any]) -> dict[str, Any]:
        copies = {name: self._copy(value) for name, value in values.items()}
        return {name: value for name, value in copies.items() if value is not _OPAQUE}

    def _copy(self, value: Any) -> Any:
        """A copy of plain data; _OPAQUE for anything else."""
        size = _plain_bytes(value)
        if size is None or size > self._budget:
            return _OPAQUE
        self._budget -= size
        return copy.deepcopy(value)

    def put_back(self) -> None:
        """Only ever in a fork: the live objects are changed."""
        for attributes, kept, names in self._kept:
            for name in [name for name in attributes if name not in names and not _is_torchs(name)]:
                del attributes[name]
            attributes.update(copy.deepcopy(kept))
        for optimizer, groups in self._groups:
            optimizer.state.clear()
            for group, kept in zip(optimizer.param_groups, groups, strict=False):
                group.update(copy.deepcopy(kept))


_OPAQUE = object()
_NOT_LOOKED_INTO = (
    nn.Module,
    torch.optim.Optimizer,
    torch.Tensor,
    type,
    types.ModuleType,
    types.FunctionType,
    types.BuiltinFunctionType,
    types.MethodType,
)


def _is_another_story(value: object) -> bool:
    """What a tracked object may know of but does not consist of, such as the run that tracks it."""
    return isinstance(value, _NOT_LOOKED_INTO) or type(value).__module__.partition(".")[0] == "holdfast"


_TORCHS = frozenset({*vars(nn.Module()), "state", "param_groups", "defaults"}) - {"training"}
"""What torch itself keeps in a module or an optimizer."""


def _is_torchs(name: str) -> bool:
    return name in _TORCHS or name.startswith("_optimizer_")


def _has_state_of_its_own(module: nn.Module) -> bool:
    """Whether a module stores more than its parameters and buffers."""
    kind, plain = type(module), nn.Module
    return (
        kind.get_extra_state is not plain.get_extra_state
        or kind.state_dict is not plain.state_dict
        or kind._save_to_state_dict is not plain._save_to_state_dict
        or bool(module._state_dict_hooks)
    )


def _without(group: Mapping[str, Any], name: str) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key != name}


def _plain_bytes(value: Any) -> int | None:
    """Roughly how large plain data is; None if it is not plain throughout, or is on a device."""
    if isinstance(value, torch.Tensor):
        small = type(value) is torch.Tensor and value.is_cpu and not value.requires_grad
        size = value.numel() * value.element_size() if small and value.layout == torch.strided else None
        return size if size is not None and size <= KEPT_TENSOR else None
    if isinstance(value, numpy.ndarray):
        return int(value.nbytes) if not value.dtype.hasobject and value.nbytes <= KEPT_TENSOR else None
    if isinstance(value, numpy.generic) or type(value) in PLAIN:
        return sys.getsizeof(value)
    if type(value) in (list, tuple, set, frozenset, collections.deque, dict, collections.OrderedDict):
        total = 64
        keyed = isinstance(value, dict)
        for one in (*value.keys(), *value.values()) if keyed else value:
            size = _plain_bytes(one)
            if size is None or total > KEPT:
                return None
            total += size
        return total
    return None


# --- in the fork --------------------------------------------------------------------------------------------


class _Proof:
    """One rank's proof, in the fork."""

    def __init__(self, subject: Subject) -> None:
        self._subject = subject
        self._tracked = subject.tracked
        self._stored = flatten(subject.tensors)
        self._levels = dict.fromkeys(subject.tracked.names(), VALUE)
        self._errors: list[str] = []
        self._doubts: list[str] = []
        self._elsewhere = {_part_of(name) for name, one in self._stored.items() if not local_part(one).is_cpu}
        """Parts with tensors on a device: a fork can prove little about them; a failure proves nothing."""
        self._held: list[Any] = []
        """Device memory that must not be released here, and whatever else is better not finalised."""

    def run(self) -> Report:
        with torch.no_grad():
            saved = self._read_back()
            if not self._errors:
                self._load(saved)
        return Report(
            parts={**self._levels, **self._own_levels()},
            errors=self._errors[:TOLD],
            doubts=self._doubts[:TOLD],
        )

    def _own_levels(self) -> dict[str, str]:
        """These are compared as they are read back; they are put to use only before an iteration begins."""
        return {name: STRUCTURE if name in ("data", "gradients") else VALUE for name in self._subject.own}

    def _fail(self, error: str) -> None:
        self._errors.append(error)

    def _read_back(self) -> dict[str, Any]:
        """What unpickling gives, as a resume will see it."""
        subject = self._subject
        try:
            read: dict[str, Any] = from_blob(subject.blob)
        except Exception as error:  # noqa: BLE001 - the user's code
            self._blame_unpickling(error)
            return {}
        for change in changes(subject.own, read["own"]):
            what = f"the run's own state, {named(change.path)}"
            self._fail(f"{what}: it is read back as {shown(change.found)} instead of {shown(change.saved)}")
        for name, state in subject.others.items():
            for change in changes(state, read["tracked"].get(name, MISSING)):
                self._fail(
                    f"track({name}=…): {named(change.path) or 'its state'} is {shown(change.saved)}, but a "
                    f"save and a load turn it into {shown(change.found)}. Give its state_dict plain values, "
                    "containers and tensors"
                )
                break
        return read

    def _blame_unpickling(self, error: Exception) -> None:
        for name, state in self._subject.others.items():
            try:
                from_blob(to_blob(state))
            except Exception as found:  # noqa: BLE001 - the user's code
                self._fail(
                    f"track({name}=…): its state can be saved but not read back: {_told(found)}. Give its "
                    "state_dict plain values, containers and tensors"
                )
        if not self._errors:
            self._fail(
                f"the run's own state (data position, counters) cannot be read back: {_told(error)}. Give "
                "the loader's state_dict plain values, containers and tensors"
            )

    def _load(self, saved: dict[str, Any]) -> None:
        values = self._take_values()
        complete = len(values) == len(self._stored)
        unheld = Unheld(self._tracked, self._stored, self._subject.initial.versions, all_by_value=complete)
        self._stand_in_for_devices()
        self._subject.initial.put_back()
        for name in values:
            scramble(local_part(self._stored[name]))
        unheld.spoil()
        before = self._collected()
        given = from_blob(self._subject.blob)["tracked"]
        metadata = self._subject.metadata()  # if this fails it is our fault: nothing is proven or blamed
        targets: dict[str, Any] = {}
        try:
            check_parts(self._tracked.names(), given)
            targets = self._tracked.targets(given, metadata)
            check_strict(targets, metadata)
            if lost := sorted(self._stored.keys() - flatten(targets).keys()):
                raise misfit([f"{name}: in the checkpoint, but not tracked" for name in lost])
        except FAILURES as error:
            if not self._elsewhere and not needs_more_than_a_fork(error):
                self._fail(f"a resume would refuse it: {_told(error)}")
                return
            targets = {}
            self._give_up_tensors(error)
        read = flatten(targets)
        for name, tensor in read.items():
            if name in values:
                local_part(tensor).copy_(values[name])
        if not self._apply(targets, given):
            return
        try:
            tensors, others = self._tracked.collect()
        except FAILURES as error:
            if not self._elsewhere and not needs_more_than_a_fork(error):
                self._fail(f"after a load: {_told(error)}")
                return
            self._give_up_tensors(error)
            return
        self._compare_tensors(values, read, flatten(tensors))
        for name in self._tracked.names():
            self._compare_others(
                name, saved["tracked"].get(name), others.get(name), before.get(name, MISSING)
            )
        self._errors += unheld.errors()

    def _apply(self, targets: dict[str, Any], given: dict[str, Any]) -> bool:
        for name in self._tracked.names():
            if self._is_given_up(name):
                continue
            try:
                self._tracked.apply_part(name, targets, given)
            except FAILURES as error:
                if name in self._elsewhere or needs_more_than_a_fork(error):
                    self._lower(name, f"{NOT_PROVEN}its load_state_dict fails in a fork: {_told(error)}")
                    continue
                self._fail(
                    f"track({name}=…): its state cannot be loaded again, and a resume would fail in the same "
                    f"way: {_told(error)}"
                )
                return False
        return True

    def _give_up_tensors(self, error: BaseException) -> None:
        for name in self._tracked.names():
            if self._tracked.kind(name) != "object":
                self._lower(name, f"{NOT_PROVEN}a fork, which has no device, cannot load it: {_told(error)}")

    def _is_given_up(self, name: str) -> bool:
        return self._levels[name].startswith(NOT_PROVEN)

    def _collected(self) -> dict[str, Any]:
        """What the objects say of themselves as they were at the start; nothing if they cannot."""
        found: dict[str, Any] = {}
        try:
            found = copy.deepcopy(self._tracked.collect()[1])
        except Exception:  # noqa: BLE001 - the user's code, about a state it may never have been asked for
            self._doubtless()
        return found

    def _doubtless(self) -> None:
        """Without the state at the start, what a load brought back may be what a new process has anyway."""
        for name in self._tracked.names():
            if self._tracked.kind(name) == "object":
                self._lower(name, STRUCTURE)

    def _take_values(self) -> dict[str, torch.Tensor]:
        """Copies of the smallest tensors, as many as may be compared by value."""
        found: dict[str, torch.Tensor] = {}
        left = VALUES
        locals_ = {name: local_part(tensor) for name, tensor in self._stored.items()}
        for name, tensor in sorted(locals_.items(), key=lambda one: one[1].numel() * one[1].element_size()):
            size = tensor.numel() * tensor.element_size()
            if not tensor.is_cpu:
                self._lower(_part_of(name), STRUCTURE)
                continue
            if size > left:
                break
            left -= size
            found[name] = tensor.detach().clone()
        return found

    def _lower(self, part: str, level: str) -> None:
        self._levels[part] = weaker(self._levels.get(part, level), level)

    def _stand_in_for_devices(self) -> None:
        """A fork cannot use a device: parameters and buffers there get equally large, untouched ones here."""
        for _, model in self._tracked.models():
            for parameter in model.parameters():
                if not parameter.is_cpu and not isinstance(parameter, DTensor):
                    self._held.append(parameter.data)
                    parameter.data = torch.empty_like(parameter.data, device="cpu")
            for module in model.modules():
                for name, buffer in module._buffers.items():
                    if buffer is not None and not buffer.is_cpu and not isinstance(buffer, DTensor):
                        self._held.append(buffer)
                        module._buffers[name] = torch.empty_like(buffer, device="cpu")
        for optimizer in self._tracked.optimizers():
            self._held.append(dict(optimizer.state))

    def _compare_tensors(
        self,
        values: Mapping[str, torch.Tensor],
        read: Mapping[str, torch.Tensor],
        found: Mapping[str, torch.Tensor],
    ) -> None:
        for name, stored in self._stored.items():
            part = _part_of(name)
            now = found.get(name)
            if self._is_given_up(part):
                continue
            if part in self._elsewhere:
                fits = now is not None and (now.size(), now.dtype) == (stored.size(), stored.dtype)
                self._lower(
                    part, STRUCTURE if fits else f"{NOT_PROVEN}{name} does not exist without its device"
                )
            elif now is None:
                self._fail(f"track({part}=…): {name} is stored, but is gone after a load. {CURE}")
            elif now.size() != stored.size() or now.dtype != stored.dtype:
                self._fail(
                    f"track({part}=…): {name} is stored as {stored.dtype} {tuple(stored.size())}, but after "
                    f"a load it is {now.dtype} {tuple(now.size())}. {CURE}"
                )
            elif name in values:
                if not same_bits(values[name], local_part(now)):
                    self._fail(
                        f"track({part}=…): {name} has other values after a load than were stored. Its "
                        f"load_state_dict does not put them in place. {CURE}"
                    )
            elif not same_memory(local_part(read[name]), local_part(now)):
                self._lower(part, STRUCTURE)
        for name in found.keys() - self._stored.keys():
            part = _part_of(name)
            if part not in self._elsewhere and not self._is_given_up(part):
                self._fail(f"track({part}=…): {name} exists after a load, but is not stored")

    def _compare_others(self, name: str, saved: Any, found: Any, before: Any) -> None:
        if self._is_given_up(name) or name in self._elsewhere:
            return
        certain = before is not MISSING
        exercised = certain and next(changes(saved, before), None) is not None
        if self._tracked.kind(name) == "object" and not exercised:
            self._lower(name, STRUCTURE)
        for change in changes(saved, found):
            entry = named(change.path) or "its state"
            difference = f"{shown(change.saved)} was stored, and after a load it is {shown(change.found)}"
            at_start = at_path(before, change.path)
            counted = isinstance(change.saved, int) and isinstance(change.found, int)
            left_alone = next(changes(at_start, change.found), None) is None
            differs = certain and next(changes(change.saved, at_start), None) is not None
            if differs and (left_alone or not counted):
                self._fail(
                    f"track({name}=…): its load_state_dict does not bring {entry} back: {difference}. "
                    "Restore it there, or leave it out of state_dict if nothing depends on it"
                )
                return
            # The load itself turns it into something else: perhaps on purpose, as when it counts the loads.
            self._doubts.append(f"track({name}=…): loading its own state changes {entry}: {difference}")
            self._lower(name, STRUCTURE)
            return


def _part_of(name: str) -> str:
    return name.partition(".")[0]


def _told(error: BaseException) -> str:
    text = " ".join(str(error).split())[:600]
    return text if isinstance(error, IncompleteStateError) else f"{type(error).__name__}: {text}"


def weaker(a: str, b: str) -> str:
    """Pure: the lesser of two levels."""
    for level in (a, b):
        if level.startswith(NOT_PROVEN):
            return level
    return VALUE if a == b == VALUE else STRUCTURE


def _live(trainer: int, report: int, subject: Subject) -> NoReturn:
    """The whole life of the fork."""
    try:
        die_with(trainer)
        keep_only(report)
        proc.be_ended_first()
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        warnings.simplefilter("ignore")
        logging.disable(logging.CRITICAL)
        torch.set_num_threads(1)
        found = _Proof(subject).run()
    except BaseException as error:  # noqa: BLE001 - whatever it is, it must not be the trainer's
        found = Report(why_not=f"the proof itself failed: {_told(error)}")
    with contextlib.suppress(BaseException):
        say(report, _encoded(found))
    os._exit(0)


def _encoded(found: Report) -> bytes:
    data = msgspec.json.encode(found)
    while len(data) > _REPORT and (found.errors or found.doubts):
        found.errors, found.doubts = [text[:1000] for text in found.errors[:1]], []
        if len(msgspec.json.encode(found)) > _REPORT:
            found.parts = {}
            found.why_not = "" if found.errors else "the report is too long"
        return msgspec.json.encode(found)
    return data


# --- in the trainer -----------------------------------------------------------------------------------------


def prove(subject: Subject) -> Report:
    """Fork, wait at most DEADLINE seconds, and return what was found. Raises nothing of its own."""
    try:
        if why := _cannot_fork(subject):
            return Report(why_not=why)
        reading, report = os.pipe()
    except OSError as error:
        return Report(why_not=f"no process can be forked: {error}")
    os.set_blocking(reading, False)
    trainer = os.getpid()
    process = -1
    try:
        with quiet():
            pid = os.fork()
            if pid == 0:
                _live(trainer, report, subject)
        os.close(report)
        report = -1
        process = os.pidfd_open(pid)
        return _await(reading, process, pid)
    except OSError as error:
        return Report(why_not=f"no process can be forked: {error}")
    finally:
        for descriptor in (reading, report, process):
            if descriptor >= 0:
                os.close(descriptor)


def _cannot_fork(subject: Subject) -> str:
    mapped = Mappings(proc.mapped())
    if adapter := mapped.network_adapter:
        return f"this process has memory of a network adapter mapped ({adapter}), and is not forked"
    for name, tensor in flatten(subject.tensors).items():
        memory = local_part(tensor).untyped_storage()
        if memory.device.type == "cpu" and memory.nbytes():
            start = memory.data_ptr()
            if mapped.shares(start, start + memory.nbytes()):
                return f"{name} lies in memory that is shared between processes, and a fork would write there"
    return ""


def _await(reading: int, process: int, pid: int) -> Report:
    """The fork's report; when this returns, the fork is gone, or has been killed."""
    deadline = time.monotonic() + DEADLINE
    look, said, why = time.monotonic() + MEMORY_LOOK, b"", ""
    ready = select.poll()
    ready.register(reading, select.POLLIN)
    try:
        while True:
            now = time.monotonic()
            ready.poll(max(1, int(1000 * (min(deadline, look) - now))))
            try:
                more = os.read(reading, 1 << 16)
            except BlockingIOError:
                more = None
            if more == b"":
                break
            said += more or b""
            if time.monotonic() >= deadline:
                why = f"it took longer than {DEADLINE:g} s"
                break
            if time.monotonic() >= look:
                began = time.monotonic()
                if proc.private_bytes(pid) > MEMORY:
                    why = f"it needed more than {MEMORY >> 20} MiB"
                    break
                look = time.monotonic() + max(MEMORY_LOOK, 10 * (time.monotonic() - began))
    finally:
        how = end(process)
    if not why:
        try:
            return msgspec.json.decode(said, type=Report)
        except msgspec.DecodeError:
            why = f"its process ended without a word ({how})"
    return Report(why_not=why)


def merge(reports: Sequence[Report], step: int) -> Proof:
    """Pure: what is proven on all ranks."""
    parts: dict[str, str] = {}
    for rank, report in enumerate(reports):
        if report.why_not:
            who = f"rank {rank}: " if len(reports) > 1 else ""
            return Proof(step=step, why_not=f"{who}{report.why_not}")
        for name, level in report.parts.items():
            parts[name] = weaker(parts.get(name, level), level)
    return Proof(step=step, parts=parts)
