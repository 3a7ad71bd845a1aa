"""Trains a kind of kinds/, by a plain loop or by one with a `Run`, and leaves an exact record.

A `Case` is one combination of kind, data, way of saving, shape of the loop, kills and numbers of ranks.
`check` trains it with Holdfast, killed as the case says and started again each time, and compares the record
with that of the plain loop, never interrupted, in processes without Holdfast: loss bits, sample
ids, rates and random states of every step, and at the end every parameter, buffer, optimizer state, schedule
and tracked object.

Processes are forks of two zygotes that have imported torch, one of them Holdfast too; each attempt is one.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import importlib
import itertools
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
import traceback
import uuid
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from kit.harness import finish, holdfast
from kit.worlds import kinds
from kit.worlds.kinds import DATA, KINDS, Parts, Place

LIMIT = 120.0
"""Seconds that an attempt may take."""
MARK = "HFTEST_EXACT"
"""In the environment of what a case starts: whose it is."""
MODES = ("foreground", "asynchronous", "local")
WHERES = ("before", "middle", "after", "save", "load", "everything", "writers")


@dataclass(frozen=True)
class Kill:
    """SIGKILL in one attempt."""

    where: str
    """before, in the middle of, or after a step's work; at a file operation of a save; at an opened file of a
    load; 'everything': before a step, together with what writes for the rank; 'writers': that."""
    step: int = 0
    """The step; of a save: the first one after which it may come."""
    point: int = 0
    """Of a save or a load: how many file operations it gets to make."""

    def words(self) -> str:
        return {
            "before": f"before step {self.step}",
            "middle": f"in the middle of step {self.step}",
            "after": f"at the end of step {self.step}",
            "save": f"at file operation {self.point} of the save after step {self.step} or later",
            "load": f"at file {self.point} of the load",
            "everything": f"before step {self.step}, with its writers",
            "writers": f"(its writers alone) before step {self.step}",
        }[self.where]


@dataclass(frozen=True)
class Case:
    kind: str
    data: str = "shuffled"
    mode: str = "foreground"
    shape: str = "steps"
    interval: int = 3
    kills: tuple[Kill, ...] = (Kill("before", 8),)
    worlds: tuple[int, ...] = (1,)
    """Of each attempt; the last one's is that of all later ones."""
    until: int = 12
    device: str = "cpu"

    def world(self, attempt: int) -> int:
        return self.worlds[min(attempt, len(self.worlds) - 1)]

    @property
    def grouped(self) -> bool:
        return KINDS[self.kind].world > 1

    @property
    def other_world(self) -> bool:
        return len(set(self.worlds)) > 1

    def words(self) -> str:
        killed = (
            "; ".join(f"attempt {n}: {kill.words()}" for n, kill in enumerate(self.kills, 1)) or "nowhere"
        )
        ranks = " then ".join(map(str, self.worlds))
        return (
            f"{self.kind}; data: {self.data}; {self.mode} saves every {self.interval} steps; "
            f"loop: {self.shape}; {self.until} steps; ranks: {ranks}; killed {killed}"
        )

    def plain(self) -> Case:
        """What of it the plain loop depends on."""
        world = min(self.worlds)
        return Case(self.kind, self.data, kills=(), worlds=(world,), until=self.until, device=self.device)


def case_of(text: str) -> Case:
    raw = json.loads(text)
    raw["kills"] = tuple(Kill(**kill) for kill in raw["kills"])
    raw["worlds"] = tuple(raw["worlds"])
    return Case(**raw)


# --- the record ---------------------------------------------------------------------------------------------


def digest(value: Any) -> str:
    """Of a leaf: its kind and its bits."""
    if isinstance(value, torch.Tensor):
        from torch.distributed.tensor import DTensor

        if isinstance(value, torch.nn.parameter.UninitializedTensorMixin):
            return "uninitialised"
        whole = value.detach()
        if isinstance(whole, DTensor):
            whole = whole.full_tensor()
        if whole.layout is not torch.strided:
            whole = whole.to_dense()
        bare = torch.view_as_real(whole) if whole.is_complex() else whole
        data = bare.cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        told = hashlib.sha256(data).hexdigest()[:16]
        return f"{str(whole.dtype)[6:]}{list(whole.shape)}{list(whole.stride())} {told}"
    if isinstance(value, np.ndarray):
        return f"{value.dtype}{value.shape} {hashlib.sha256(value.tobytes()).hexdigest()[:16]}"
    if isinstance(value, float):
        return value.hex()
    if callable(value):
        return f"function {getattr(value, '__qualname__', type(value).__name__)}"
    text = repr(value)
    return (
        f"{type(value).__name__} {text if len(text) < 80 else hashlib.sha256(text.encode()).hexdigest()[:16]}"
    )


def leaves(tree: Any, path: str) -> Iterator[tuple[str, str]]:
    if isinstance(tree, Mapping):
        for key in sorted(tree, key=str):
            yield from leaves(tree[key], f"{path}.{key}")
    elif isinstance(tree, list | tuple | set):
        yield f"{path}.len", str(len(tree))
        for number, item in enumerate(tree):
            yield from leaves(item, f"{path}[{number}]")
    elif hasattr(tree, "__dict__") and not isinstance(tree, torch.Tensor) and not callable(tree):
        yield from leaves(vars(tree), path)
    else:
        yield path, digest(tree)


def state_of(thing: Any) -> dict[str, Any]:
    """What must be the same, seen without a state_dict where that might leave something out."""
    if isinstance(thing, torch.nn.Module):
        return {
            "parameters": dict(thing.named_parameters(remove_duplicate=False)),
            "requires_grad": {name: p.requires_grad for name, p in thing.named_parameters()},
            "buffers": dict(thing.named_buffers(remove_duplicate=False)),
            "training": {name: module.training for name, module in thing.named_modules()},
            "extra": {
                name: module.get_extra_state()
                for name, module in thing.named_modules()
                if type(module).get_extra_state is not torch.nn.Module.get_extra_state
            },
        }
    if isinstance(thing, torch.optim.Optimizer):
        groups = thing.param_groups
        return {
            "own": {} if isinstance(thing, _Sharded) else thing.state_dict(),
            "state": [[thing.state.get(p, {}) for p in group["params"]] for group in groups],
            "groups": [{key: value for key, value in group.items() if key != "params"} for group in groups],
        }
    if isinstance(thing, torch.Generator):
        return {"state": thing.get_state()}
    return dict(thing.state_dict())


try:
    from torch.distributed.optim import ZeroRedundancyOptimizer as _Sharded
except ImportError:  # a build of torch without it

    class _Sharded:  # type: ignore[no-redef]
        pass


def rng(case: Case) -> dict[str, Any]:
    found: dict[str, Any] = {
        "torch": torch.get_rng_state(),
        "numpy": repr([np.random.get_state()[1].tobytes(), np.random.get_state()[2:]]),  # type: ignore[index, union-attr]
        "python": repr(random.getstate()),
    }
    return found | ({"cuda": torch.cuda.get_rng_state()} if case.device == "cuda" else {})


def short(tree: Any) -> str:
    return hashlib.sha256(repr(sorted(leaves(tree, ""))).encode()).hexdigest()[:16]


# --- training -----------------------------------------------------------------------------------------------


@dataclass
class Trainer:
    """One rank of one attempt."""

    case: Case
    attempt: int
    rank: int
    place: Path
    plain: bool
    parts: Parts = field(init=False)
    kill: Kill | None = field(init=False, default=None)
    step: int = field(init=False, default=0)

    def train(self) -> None:
        case = self.case
        torch.set_num_threads(1)
        if case.device == "cuda":
            torch.use_deterministic_algorithms(True)
        if not self.plain and self.attempt < len(case.kills):
            self.kill = case.kills[self.attempt]
        kinds.MIDDLE.append(lambda: self.at("middle", self.step))
        where = Place(self.rank, case.world(self.attempt), case.device)
        torch.manual_seed(7)
        np.random.seed(7)
        random.seed(7)
        self.parts = KINDS[case.kind].build(where)
        self.log = (self.place / f"rank{self.rank}.{self.attempt}.log").open("a", buffering=1)
        if self.plain:
            self.plain_loop(DATA[case.data](where))
            assert "holdfast" not in sys.modules
        else:
            self.loop(where)
        self.leave_record()

    def at(self, where: str, step: int) -> None:
        if self.kill is not None and (self.kill.where, self.kill.step) == (where, step):
            die()

    def work(self, step: int, batches: list[Any], compute: Callable[..., Any] | None = None) -> Any:
        """One step, as the script has it."""
        self.step = step
        if self.kill is not None and self.kill.where in ("everything", "writers") and self.kill.step == step:
            kill_writers(self.place)
        self.at("everything", step)
        self.at("before", step)
        parts = self.parts
        parts.before(step)
        total = []
        for _, x in batches:
            given = x.to(self.case.device)
            total.append(
                compute(parts.forward_backward, given)
                if compute is not None
                else parts.forward_backward(given)
            )
            if len(batches) > 1:
                kinds.middle()
        self.at("middle", step)
        parts.update()
        ids = [int(n) for numbers, _ in batches for n in numbers]
        rates = [
            float(group["lr"]).hex()
            for opt in self.optimizers()
            for group in opt.param_groups
            if "lr" in group
        ]
        losses = [float(value).hex() for value in total]
        told = {"step": step, "loss": losses, "ids": ids, "rates": rates, "rng": short(rng(self.case))}
        self.log.write(json.dumps(told) + "\n")
        self.at("after", step)
        return total[-1], ids

    def optimizers(self) -> list[torch.optim.Optimizer]:
        return [thing for thing in self.parts.tracked.values() if isinstance(thing, torch.optim.Optimizer)]

    def plain_loop(self, loader: Any) -> None:
        def stream() -> Iterator[Any]:
            epoch = 0
            while True:
                sampler = getattr(loader, "sampler", None)
                if hasattr(sampler, "set_epoch"):
                    sampler.set_epoch(epoch)
                yield from loader
                epoch += 1

        batches = stream()
        for step in range(1, self.case.until + 1):
            self.work(step, [next(batches) for _ in range(self.parts.batches_a_step)])

    def loop(self, where: Place) -> None:
        import holdfast

        case = self.case
        loader = DATA[case.data](where)
        if case.data == "global":
            loader = holdfast.GlobalBatches(kinds.Numbers(), 8, seed=2)
        run = holdfast.Run(run_dir=self.place / "run", **settings(case, self.place))
        run.track(**self.parts.tracked)
        if self.kill is not None and self.kill.where == "load":
            die_at_open(self.kill.point)
        compute = run.compute if case.shape == "compute" else None
        if case.shape in ("steps", "compute"):
            several = {"batches": self.parts.batches_a_step} if self.parts.batches_a_step > 1 else {}
            for step, batch in run.steps(loader, until=case.until, **several):
                self.die_in_save(run, step)
                loss, ids = self.work(step, batch if several else [batch], compute)
                run.record(loss=loss, samples=ids)
            return
        feed = run.feed(loader)
        run.start()
        OPENED.clear()
        while run.step < case.until:
            if case.shape == "epochs":
                for batch in feed:
                    run.begin_step()
                    self.die_in_save(run, run.step + 1)
                    self.work(run.step + 1, [batch])
                    run.end_step()
                    if run.step >= case.until:
                        break
                continue
            run.begin_step()
            self.die_in_save(run, run.step + 1)
            loss, ids = self.work(run.step + 1, [feed.next() for _ in range(self.parts.batches_a_step)])
            run.record(loss=loss, samples=ids)
            run.end_step()
        run.finish()

    def die_in_save(self, run: Any, step: int) -> None:
        """From this step on saves are made inside what kills them."""
        OPENED.clear()
        kill = self.kill
        if kill is None or kill.where != "save" or kill.step > step or self.armed:
            return
        self.armed = True
        from kit.tiny import counting_file_operations

        def deadly(original: Callable[[], None]) -> Callable[[], None]:
            def save() -> None:
                with counting_file_operations(
                    lambda number, name, args: die() if number == kill.point else None
                ):
                    original()

            return save

        for name in ("scheduled", "scheduled_locally"):
            setattr(run._session.saving, name, deadly(getattr(run._session.saving, name)))

    armed = False

    def leave_record(self) -> None:
        found: dict[str, str] = {}
        for name, thing in {**self.parts.tracked, **self.parts.watched}.items():
            found |= dict(leaves(state_of(thing), name))
        found |= dict(leaves(rng(self.case), "rng"))
        text = json.dumps(found)
        (self.place / f"final{self.rank}.json").write_text(text)


def settings(case: Case, place: Path) -> dict[str, object]:
    chosen: dict[str, object] = {
        "checkpoint_interval": case.interval,
        "checkpoint_read_back": False,
        "checkpoint_timeout": 60.0,
        "checkpoint_handover_timeout": 20.0,
        "control_lease_ttl": 20.0,
        "control_decision_timeout": 60.0,
    }
    if case.mode != "foreground":
        chosen["checkpoint_async_save"] = True
    if case.mode == "local":
        chosen |= {
            "checkpoint_interval": 2 * case.interval,
            "checkpoint_non_persistent_ckpt_type": "local",
            "checkpoint_non_persistent_save_interval": case.interval,
            "checkpoint_non_persistent_local_ckpt_dir": str(place / "memory"),
            "checkpoint_replication_factor": 1,
        }
    return chosen


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def kill_writers(place: Path) -> None:
    for pid in at_work(place):
        if pid != os.getpid():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


OPENED: list[int] = []
"""Files that a load may still open; empty: as many as it likes."""


def die_at_open(point: int) -> None:
    OPENED[:] = [point]

    def told(event: str, args: tuple[Any, ...]) -> None:
        if (
            event == "open"
            and OPENED
            and any(part in str(args[0]) for part in ("/checkpoints/step_", "/images/"))
        ):
            OPENED[0] -= 1
            if OPENED[0] < 0:
                die()

    sys.addaudithook(told)


def at_work(place: Path) -> list[int]:
    """Live processes that were started for the case at this place."""
    found = []
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            if entry.name.isdigit() and f"{MARK}={place}".encode() in (entry / "environ").read_bytes().split(
                b"\0"
            ):
                found.append(int(entry.name))
    return found


# --- the zygote ---------------------------------------------------------------------------------------------


def rank_process(case: Case, attempt: int, rank: int, place: Path, plain: bool) -> None:
    """In a fork: train, and end with the code that the script would end with."""
    code = 70
    try:
        out = os.open(place / f"rank{rank}.{attempt}.err", os.O_CREAT | os.O_WRONLY | os.O_APPEND)
        os.dup2(out, 1)
        os.dup2(out, 2)
        world = case.world(attempt)
        os.environ |= {MARK: str(place), "RANK": str(rank), "WORLD_SIZE": str(world), "LOCAL_RANK": str(rank)}
        os.environ |= {"LOCAL_WORLD_SIZE": str(world)}
        if case.grouped:
            store = dist.FileStore(str(place / f"store{attempt}"), world)
            limit = timedelta(seconds=LIMIT)
            dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=limit)
        Trainer(case, attempt, rank, place, plain).train()
        if case.grouped:
            dist.barrier()
        code = 0
    except SystemExit as leaving:
        code = int(leaving.code or 0)
    except BaseException as error:  # noqa: BLE001 - the child must end here, whatever happened
        traceback.print_exc()
        code = int(getattr(error, "exit_code", 70))
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


PRELOADED = ("torch._dynamo", "torch.distributed.fsdp", "torch.distributed.optim", "torch.nn.parallel")
"""What the kinds import, at the latest when an optimizer is made; a fork has it already."""
PRELOADED_HELD = ("kit.tiny", "holdfast.run", "holdfast.checkpoint.choose.resume")


def serve(plain: bool) -> None:
    """Read what to train, fork its ranks, answer how they ended; who is left when one dies is killed."""
    torch.set_num_threads(1)
    for name in PRELOADED if plain else (*PRELOADED, *PRELOADED_HELD):
        importlib.import_module(name)
    print("ready", flush=True)
    for line in sys.stdin:
        asked = json.loads(line)
        case, attempt, place = case_of(asked["case"]), asked["attempt"], Path(asked["place"])
        pids = []
        for rank in range(case.world(attempt)):
            pid = os.fork()
            if pid == 0:
                os.setsid()
                rank_process(case, attempt, rank, place, plain)
            pids.append(pid)
        print(json.dumps(_await(pids)), flush=True)


def _await(pids: list[int]) -> list[int]:
    codes: dict[int, int] = {}
    deadline = time.monotonic() + LIMIT
    while len(codes) < len(pids):
        for pid in pids:
            if pid in codes:
                continue
            done, status = os.waitpid(pid, os.WNOHANG)
            if done:
                codes[pid] = os.waitstatus_to_exitcode(status)
                if codes[pid] == -signal.SIGKILL:
                    deadline = min(deadline, time.monotonic())  # as a launcher would end the others
        if len(codes) < len(pids) and time.monotonic() >= deadline:
            for pid in pids:
                if pid not in codes:
                    os.kill(pid, signal.SIGKILL)
            deadline = float("inf")
        time.sleep(0.003)
    return [codes[pid] for pid in pids]


class Zygote:
    """A process that forks what trains; `plain`: one that never imports Holdfast."""

    def __init__(self, plain: bool) -> None:
        here = Path(__file__).parents[2]
        env = {key: value for key, value in os.environ.items() if not key.startswith("HOLDFAST_")}
        env |= {
            "OMP_NUM_THREADS": "1",
            "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
            "PYTORCH_NVML_BASED_CUDA_CHECK": "1",
        }
        env |= {"PYTHONPATH": f"{here}:{os.environ.get('PYTHONPATH', '')}"}
        self.process = subprocess.Popen(
            [sys.executable, str(Path(__file__)), "plain" if plain else "held"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=env,
        )

    def train(self, case: Case, attempt: int, place: Path) -> list[int]:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        request = {"case": json.dumps(dataclasses.asdict(case)), "attempt": attempt, "place": str(place)}
        self.process.stdin.write(json.dumps(request) + "\n")
        self.process.stdin.flush()
        while (line := self.process.stdout.readline()) == "ready\n":
            pass
        assert line, "the zygote has ended"
        return list(json.loads(line))

    def close(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait(30)


# --- comparing ----------------------------------------------------------------------------------------------


@dataclass
class Record:
    steps: dict[int, dict[int, dict[str, Any]]]
    """By step and rank."""
    final: list[dict[str, str]]
    codes: list[list[int]]
    """Of each attempt, by rank."""
    told: str = ""
    """What the last attempt wrote."""


class Inexact(AssertionError):  # noqa: N818 - it is an assertion
    """A run that differs from the plain loop."""


def read(case: Case, place: Path, codes: list[list[int]]) -> Record:
    """What all attempts have left; a step that was done again must have given the same."""
    steps: dict[int, dict[int, dict[str, Any]]] = {}
    for attempt, ended in enumerate(codes):
        done: dict[int, dict[int, dict[str, Any]]] = {}
        for rank in range(len(ended)):
            for line in (place / f"rank{rank}.{attempt}.log").read_text().splitlines():
                told = json.loads(line)
                done.setdefault(told["step"], {})[rank] = told
        for step, by_rank in done.items():
            before = steps.get(step, by_rank)
            if before.keys() == by_rank.keys() and alike(case, before) != alike(case, by_rank):
                raise Inexact(f"step {step} was done twice, differently:\n{before}\n{by_rank}")
            steps[step] = by_rank if len(by_rank) == len(ended) else {**before, **by_rank}
    last = range(len(codes[-1]))
    final = [place / f"final{rank}.json" for rank in last]
    told = [(place / f"rank{rank}.{len(codes) - 1}.err").read_text(errors="replace") for rank in last]
    return Record(steps, [json.loads(f.read_text()) for f in final if f.exists()], codes, "\n".join(told))


class Lab:
    """Both zygotes, and the plain records that are known already."""

    def __init__(self, place: Path) -> None:
        self.place = place
        self._zygotes: dict[bool, Zygote] = {}
        self._plain: dict[Case, Record] = {}

    def zygote(self, plain: bool) -> Zygote:
        if plain not in self._zygotes:
            self._zygotes[plain] = Zygote(plain)
        return self._zygotes[plain]

    def plain(self, case: Case) -> Record:
        """What the plain loop does, never interrupted."""
        asked = case.plain()
        if asked not in self._plain:
            with self.folder() as place:
                codes = [self.zygote(True).train(asked, 0, place)]
                found = read(asked, place, codes)
                assert set(codes[0]) == {0}, f"the plain loop of {case.kind} failed: {codes}\n{found.told}"
                self._plain[asked] = found
        return self._plain[asked]

    def held(self, case: Case, place: Path) -> Record:
        """What Holdfast makes of it: killed as told, started again until it ends by itself."""
        codes = []
        for attempt in range(len(case.kills) + 1):
            codes.append(self.zygote(False).train(case, attempt, place))
            if -signal.SIGKILL not in codes[-1]:
                break
        return read(case, place, codes)

    def launched(self, case: Case, place: Path) -> Record:
        """The same under `holdfast run`, which starts it again by itself."""
        ranks = str(case.worlds[0])
        script = [str(Path(__file__)), "launched", json.dumps(dataclasses.asdict(case)), str(place)]
        command = holdfast("run", "--nproc-per-node", ranks, "--run-dir", str(place / "run"), *script)
        ended = finish(command, cwd=place, env={"PYTHONPATH": str(Path(__file__).parents[2])}, timeout=LIMIT)
        attempts = len(list(place.glob("rank0.*.log")))
        for attempt, rank in itertools.product(range(attempts), range(case.worlds[0])):
            (place / f"rank{rank}.{attempt}.log").touch()
            (place / f"rank{rank}.{attempt}.err").write_text(ended.text)
        killed = [[-signal.SIGKILL] * case.worlds[0]] * (attempts - 1)
        return read(case, place, [*killed, [ended.code] * case.worlds[0]])

    def refusal(self, case: Case) -> Record:
        """What becomes of a case that is never killed, and ends all the same."""
        with self.folder() as place:
            return self.held(case, place)

    def check(self, case: Case, *, launched: bool = False) -> Record:
        """Exact, or an `Inexact` that says in words what was not."""
        expected = self.plain(case)
        try:
            with self.folder() as place:
                found = self.launched(case, place) if launched else self.held(case, place)
            if set(found.codes[-1]) != {0}:
                raise Inexact(f"it ended with {found.codes}:\n{found.told}")
            compare(case, expected, found)
        except Inexact as error:
            raise Inexact(f"{case.words()}\n{error}") from None
        return found

    @contextlib.contextmanager
    def folder(self) -> Iterator[Path]:
        place = self.place / uuid.uuid4().hex[:8]
        place.mkdir(parents=True)
        try:
            yield place
        finally:
            deadline = time.monotonic() + 30
            while at_work(place) and time.monotonic() < deadline:
                time.sleep(0.005)
            assert not at_work(place), "its writers have not ended"
            shutil.rmtree(place)

    def close(self) -> None:
        for zygote in self._zygotes.values():
            zygote.close()


def compare(case: Case, expected: Record, found: Record) -> None:
    problems = []
    for step, by_rank in sorted(expected.steps.items()):
        wanted, got = (alike(case, by_rank), alike(case, found.steps.get(step, {})))
        if wanted != got:
            problems.append(f"step {step}: the plain loop {wanted}\n         with Holdfast  {got}")
    if extra := sorted(found.steps.keys() - expected.steps.keys()):
        problems.append(f"steps beyond the end: {extra}")
    ranks = 1 if case.other_world else len(expected.final)
    for rank in range(ranks):
        wanted, got = expected.final[rank], found.final[rank]
        names = [name for name in sorted({*wanted, *got}) if wanted.get(name) != got.get(name)]
        if case.other_world:
            names = [name for name in names if not name.startswith("rng")]
        problems += [
            f"{n} of rank {rank}: {wanted.get(n)} by the plain loop, {got.get(n)} with Holdfast"
            for n in names
        ]
    if problems:
        raise Inexact(f"{len(problems)} differences:\n" + "\n".join(problems[:12]))


def alike(case: Case, by_rank: dict[int, dict[str, Any]]) -> Any:
    """What of a step is compared: all of it, or, at another number of ranks, what they make together."""
    if not case.other_world:
        return [by_rank[rank] for rank in sorted(by_rank)]
    losses = [float.fromhex(loss) for told in by_rank.values() for loss in told["loss"]]
    return sum(losses) / len(losses), sorted(n for told in by_rank.values() for n in told["ids"])


def launched() -> None:
    """As a script under `holdfast run`: the attempt is the launcher's."""
    from holdfast.record.launches import LaunchInfo

    launch = LaunchInfo.from_environment(os.environ)
    assert launch is not None
    case, place = case_of(sys.argv[2]), Path(sys.argv[3])
    if case.grouped:
        dist.init_process_group("gloo")
    Trainer(case, launch.attempt - 1, int(os.environ["RANK"]), place, False).train()
    sys.stdout.flush()
    os._exit(0)  # the model keeps its mesh's gloo group alive, which may abort the interpreter's end


if __name__ == "__main__":
    if sys.argv[1] == "launched":
        launched()
    serve(plain=sys.argv[1] == "plain")
