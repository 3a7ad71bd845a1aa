"""Every random number generator a rank draws from, captured and restored together.

Besides the global ones there are those that a loader's dataset, sampler or collate function keeps in itself
(`LoaderKept`), and those of a loader's worker processes, which nobody outside can read: a worker sends their
state with each batch, and a worker started for a resume restores it (`WorkerStamps`).
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import io
import pickle
import random
import sys
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sized
from types import FunctionType, MethodType, ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.utils.data import DataLoader, Dataset, Sampler, get_worker_info

if TYPE_CHECKING:
    from holdfast.checkpoint.state import Tracked


def capture_rng() -> dict[str, Any]:
    state: dict[str, Any] = {"python": random.getstate(), "torch": torch.get_rng_state()}
    if "numpy" in sys.modules:
        import numpy

        state["numpy"] = numpy.random.get_state()
    if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        state["cuda"] = torch.cuda.get_rng_state_all()
    return state


def restore_rng(state: dict[str, Any]) -> None:
    """Restore what `capture_rng` gave, or seed everything if only a `seed` is known (another world size)."""
    if "seed" in state:
        random.seed(state["seed"])
        torch.manual_seed(state["seed"])
        if "numpy" in sys.modules:
            import numpy

            numpy.random.seed(state["seed"] % 2**32)
        return
    random.setstate(state["python"])
    torch.set_rng_state(state["torch"])
    if "numpy" in state:
        import numpy

        numpy.random.set_state(state["numpy"])
    if "cuda" in state and torch.cuda.is_available():
        if len(state["cuda"]) == torch.cuda.device_count():
            torch.cuda.set_rng_state_all(state["cuda"])
        else:
            # Fewer or more devices are visible than when this was saved: what matters is the rank's own.
            torch.cuda.set_rng_state(state["cuda"][min(torch.cuda.current_device(), len(state["cuda"]) - 1)])


def host_generators(others: list[torch.Generator]) -> dict[str, bytes]:
    """The states of this process's global CPU generators, and of `others`, for comparison."""
    found = {
        "torch": torch.get_rng_state().numpy().tobytes(),
        "python": repr(hash(random.getstate())).encode(),
    }
    if "numpy" in sys.modules:
        found["numpy"] = _numpy_words()
    for number, generator in enumerate(others):
        if generator is not torch.default_generator:
            found[f"generator {number}"] = generator.get_state().numpy().tobytes()
    return found


def _numpy_words() -> bytes:
    """The state of numpy's global generator, read from its memory: asking for it takes twenty times as long.

    This lacks the second half of a pair of normal numbers that it may hold; taking that implies an earlier
    draw.
    """
    import numpy

    source: Any = numpy.random.get_bit_generator()  # type: ignore[attr-defined]
    if type(source) is not numpy.random.MT19937:
        return repr(source.state).encode()
    return ctypes.string_at(source.ctypes.state_address, _MT19937_BYTES)


_MT19937_BYTES = 4 * 624 + 4
"""Its words, and the position in them."""


class Randomness:
    """All of the above together with the generators that a run tracks."""

    def __init__(self, tracked: Tracked) -> None:
        self._generators = tracked.generators()

    def capture(self) -> Any:
        return capture_rng(), [generator.state_dict() for generator in self._generators]

    def restore(self, kept: Any) -> None:
        state, generators = kept
        restore_rng(state)
        for generator, saved in zip(self._generators, generators, strict=True):
            generator.load_state_dict(saved)


# --- what objects keep in themselves ----------------------------------------------------------------------

DEEPEST, MOST_PARTS, MOST_OBJECTS = 10, 64, 5000
"""How far the walk through a loader goes: levels, parts of one container, objects in all. What is not found
is not restored; if it mattered, the digests of the batches show it."""
_PLAIN = (str, bytes, int, float, complex, bool, type(None), type, ModuleType, torch.Tensor, torch.nn.Module)


class FoundObject(NamedTuple):
    """An object that was found in another."""

    path: str
    holder: Any
    """What holds it; None for the object with which the walk began."""
    key: Any
    thing: Any
    called: bool
    """Whether the path to it leads through a function: then it may belong to anything, even to training."""


def walk(root: object) -> Iterator[FoundObject]:
    """The objects within an object, itself first, in an order that depends only on its structure."""
    seen = {id(root)}
    queue = deque([(FoundObject("", None, None, root, False), 0)])
    left = MOST_OBJECTS
    while queue and left > 0:
        part, depth = queue.popleft()
        left -= 1
        yield part
        if depth == DEEPEST or _kind(part.thing):
            continue
        for key, thing, called in _parts(part.thing):
            if isinstance(thing, _PLAIN) or id(thing) in seen or _is_array(thing):
                continue
            seen.add(id(thing))
            path = f"{part.path}.{key}" if part.path else str(key)
            queue.append((FoundObject(path, part.thing, key, thing, part.called or called), depth + 1))


def _parts(thing: Any) -> list[tuple[Any, Any, bool]]:
    if isinstance(thing, dict):
        return [(key, value, False) for key, value in thing.items()] if len(thing) <= MOST_PARTS else []
    if isinstance(thing, list | tuple):
        return [(at, value, False) for at, value in enumerate(thing)] if len(thing) <= MOST_PARTS else []
    if isinstance(thing, functools.partial):
        return [("func", thing.func, True), ("args", thing.args, True), ("keywords", thing.keywords, True)]
    if isinstance(thing, MethodType):
        return [("self", thing.__self__, True)]
    if isinstance(thing, FunctionType):
        cells = zip(thing.__code__.co_freevars, thing.__closure__ or (), strict=False)
        return [(name, cell.cell_contents, True) for name, cell in cells if _filled(cell)]
    module = type(thing).__module__
    if module.startswith("multiprocessing") or (
        module.startswith("holdfast.") and not isinstance(thing, Sized)
    ):
        return []
    held = getattr(thing, "__dict__", None)
    if not isinstance(held, dict):
        return []
    return [
        (key, value, False) for key, value in list(held.items()) if key not in ("_iterator", "_holdfast_made")
    ]


def _filled(cell: Any) -> bool:
    try:
        return cell.cell_contents is not None
    except ValueError:
        return False


def _is_array(thing: object) -> bool:
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(thing, numpy.ndarray)


def _kind(thing: object) -> str:
    """Which kind of generator this is; empty for anything else."""
    if isinstance(thing, torch.Generator):
        return "torch"
    if isinstance(thing, random.Random):
        return "python"
    numpy = sys.modules.get("numpy")
    if numpy is not None and isinstance(thing, numpy.random.Generator):
        return "numpy"
    return "legacy" if numpy is not None and isinstance(thing, numpy.random.RandomState) else ""


def _get(thing: Any) -> Any:
    kind = _kind(thing)
    if kind == "torch":
        return thing.get_state().numpy().tobytes()
    if kind == "python":
        return thing.getstate()
    return thing.bit_generator.state if kind == "numpy" else thing.get_state()


def _set(thing: Any, state: Any) -> None:
    kind = _kind(thing)
    if kind == "torch":
        thing.set_state(torch.frombuffer(bytearray(state), dtype=torch.uint8))
    elif kind == "python":
        thing.setstate(state)
    elif kind == "numpy":
        thing.bit_generator.state = state
    else:
        thing.set_state(state)


def _make(kind: str, state: Any) -> Any:
    """A generator of this kind, for an object that makes its own only on first use."""
    made: Any
    if kind == "torch":
        made = torch.Generator()
    elif kind == "python":
        made = random.Random()
    else:
        import numpy

        if kind == "numpy":
            made = numpy.random.Generator(getattr(numpy.random, state["bit_generator"])())
        else:
            made = numpy.random.RandomState()
    _set(made, state)
    return made


class LoaderKept:
    """What a loader keeps in itself that decides what comes next: its generators, and its numbers.

    Numbers are those that datasets and samplers hold as attributes (an epoch, a position, a count): they are
    part of the state if they have changed since this was made. So are lists of numbers that a sampler holds,
    such as an order that it changes from epoch to epoch, unless they are too long. Whatever else such objects
    hold is left to them.
    With `own_states` so are the numbers of objects with a state_dict, because their loader restores those.
    """

    def __init__(self, root: object, *, own_states: bool = False) -> None:
        self._root = root
        self._own_states = own_states
        made = {path: value for path, value in self._numbers().items() if not _is_seed(path)}
        # A function called again in this process may hand over the same loader, which has since moved on.
        self._made = getattr(root, "__dict__", {}).setdefault("_holdfast_made", made)

    def capture(self) -> dict[str, Any]:
        numbers = {
            path: value for path, value in self._numbers().items() if self._made.get(path, _NONE) != value
        }
        generators = {
            part.path: (_kind(part.thing), _get(part.thing))
            for part in walk(self._root)
            if _kind(part.thing) and not isinstance(part.thing, random.SystemRandom)
        }
        return {"numbers": numbers, "generators": generators}

    def restore(self, state: Mapping[str, Any]) -> list[str]:
        """Put that back; returns the paths of what no longer exists."""
        parts = {part.path: part for part in walk(self._root)}
        gone: list[str] = []
        for path, (kind, saved) in state["generators"].items():
            part = parts.get(path)
            if part is not None and _kind(part.thing) == kind:
                _set(part.thing, saved)
            elif not self._put(parts, path, _make(kind, saved)):
                gone.append(path)
        numbers = self._made | dict(state["numbers"])
        for path, value in numbers.items():
            if not self._put(parts, path, value):
                gone.append(path)
        return gone

    def _put(self, parts: Mapping[str, FoundObject], path: str, value: Any) -> bool:
        before, _, name = path.rpartition(".")
        holder = parts.get(before)
        if holder is None:
            return False
        thing = holder.thing
        if isinstance(value, int | float) and _shared_epoch(thing) is not None and name == "_epoch":
            thing.set_epoch(value)
        elif isinstance(value, list) and isinstance(held := getattr(thing, name, None), list):
            held[:] = value  # others may hold the same list
        elif isinstance(thing, dict):
            thing[name] = value
        elif hasattr(thing, "__dict__"):
            vars(thing)[name] = value
        else:
            return False
        return True

    def _numbers(self) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for part in walk(self._root):
            thing = part.thing
            if part.called or not _counts(thing, self._root):
                continue
            if self._own_states and hasattr(thing, "load_state_dict"):
                continue
            here = f"{part.path}." if part.path else ""
            held = getattr(thing, "__dict__", {})
            for name, value in list(held.items()):
                if type(value) in (int, float):
                    found[f"{here}{name}"] = value
                elif isinstance(thing, Sampler) and _is_list_of_numbers(value):
                    found[f"{here}{name}"] = list(value)
            if (epoch := _shared_epoch(thing)) is not None:
                found[f"{here}_epoch"] = epoch
            # Unless it is given a seed, webdataset draws one when a pipeline is made.
            if isinstance(options := held.get("kw"), dict) and type(options.get("seed")) is int:
                found[f"{here}kw.seed"] = options["seed"]
        return found


_NONE = object()
LONGEST = 100_000
"""Most numbers in a list that is compared, and stored, as part of a data position."""


def _is_list_of_numbers(value: object) -> bool:
    return type(value) is list and len(value) <= LONGEST and all(type(one) in (int, float) for one in value)


def _is_seed(path: str) -> bool:
    """Whether this number may differ from process to process, and so is always part of the state."""
    return path.endswith("kw.seed")


def _counts(thing: object, root: object) -> bool:
    """Whether this object's numbers are part of a data position."""
    if isinstance(thing, Dataset | Sampler):
        return True
    module = type(thing).__module__.partition(".")[0]
    if module == "webdataset":
        return True
    if thing is root:
        return not isinstance(thing, DataLoader) and not hasattr(thing, "state_dict")
    return callable(getattr(type(thing), "set_epoch", None))


def _shared_epoch(thing: object) -> int | None:
    """The epoch of a dataset that shares it with its workers through a tensor, as Hugging Face's do."""
    held = getattr(thing, "__dict__", {})
    value = held.get("_epoch") if isinstance(held, dict) else None
    if isinstance(value, torch.Tensor) and value.numel() == 1 and hasattr(type(thing), "set_epoch"):
        return int(value)
    return None


def generators_in(root: object) -> list[str]:
    """The paths of the generators within an object."""
    return [part.path for part in walk(root) if _kind(part.thing)]


def one_way_parts(dataset: object) -> dict[str, object]:
    """Iterators that a dataset holds as attributes: what was taken from one does not come back."""
    return {
        name: value
        for name, value in getattr(dataset, "__dict__", {}).items()
        if isinstance(value, Iterator) and not isinstance(value, io.IOBase)
    }


# --- a loader's worker processes ----------------------------------------------------------------------


class Stamp(NamedTuple):
    """What a worker sends with a batch."""

    worker: int
    state: bytes
    """The state of its generators after this batch; empty if the batch did not change it."""
    drew: bool
    """Whether the batch has drawn from the worker's global generators."""


class WorkerStamps:
    """A loader's `worker_init_fn` and `collate_fn`: a batch comes with the state of its worker's generators.

    Both are methods of one object, so that they share it in the worker, even if that is spawned. The state is
    sent only if the batch has changed it: a dataset that draws no random numbers costs nothing but the check.
    """

    def __init__(self) -> None:
        self._init: Callable[[int], object] | None = None
        self._collate: Callable[[Any], Any] = list
        self.states: dict[int, bytes] = {}
        """States for the workers that are started next, by the worker's number."""
        self._kept: LoaderKept | None = None
        self._last: tuple[dict[str, bytes], bytes] = {}, b""

    @contextlib.contextmanager
    def around(self, loader: Any) -> Iterator[None]:
        """Workers that the loader starts within take part; nothing else done with the loader notices this."""
        self._init, self._collate = loader.worker_init_fn, loader.collate_fn
        loader.worker_init_fn, loader.collate_fn = self.begin, self.collate
        try:
            yield
        finally:
            loader.worker_init_fn, loader.collate_fn = self._init, self._collate

    def begin(self, worker: int) -> None:
        """Runs in a worker as it starts."""
        if self._init is not None:
            self._init(worker)
        info = get_worker_info()
        assert info is not None
        self._kept = LoaderKept([info.dataset, self._collate])
        if worker in self.states:
            rng, kept = pickle.loads(self.states[worker])
            restore_rng(rng)
            self._kept.restore(kept)
        self._last = self._look()

    def collate(self, samples: Any) -> tuple[Any, Stamp]:
        """Runs in a worker, once it has the samples of a batch."""
        batch = self._collate(samples)
        info = get_worker_info()
        assert info is not None
        before, self._last = self._last, self._look()
        state = b""
        if self._last != before:
            assert self._kept is not None
            state = pickle.dumps((capture_rng(), self._kept.capture()))
        return batch, Stamp(info.id, state, self._last[0] != before[0])

    def _look(self) -> tuple[dict[str, bytes], bytes]:
        assert self._kept is not None
        return host_generators([]), pickle.dumps(self._kept.capture())

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_last": ({}, b""), "_kept": None}
