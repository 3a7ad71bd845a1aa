"""The measurements. Each returns samples of ours and of the baseline, taken in turns on one file system."""

from __future__ import annotations

import functools
import gc
import json
import os
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import checks
import inprocess
import msgspec
import node_loss
import replicate
import resume
import small
import stragglers
import torch.distributed.checkpoint as dcp
from torch.distributed import TCPStore
from workload import Weights

import holdfast
from holdfast.checkpoint.copies import rules
from holdfast.checkpoint.copies.rules import assemble, describe_assembly, order
from holdfast.launch.monitor import Monitor
from holdfast.policy.timeouts import Limits

Samples = tuple[list[float], list[float]]
WATCHED = 1.2
"""Seconds of a sample of `stop`."""
STEPS = 20_000
CHILD_DEADLINE = 600
RANKS = 10_000
RANKS_PER_NODE, SHARDS = 8, 4
PARTS = 8
"""Smaller problems beside which a large one shows how it grows."""


def alternate(repeat: int, ours: Callable[[], float], baseline: Callable[[], float]) -> Samples:
    """One warm-up of each, then `repeat` of each, taking turns at who goes first."""
    samples: Samples = ([], [])
    for turn in range(repeat + 1):
        pair = [(samples[0], ours), (samples[1], baseline)]
        for kept, measure in pair if turn % 2 else reversed(pair):
            value = measure()
            if turn:
                kept.append(value)
    return samples


def save(work: Path, size_mib: int, repeat: int) -> Samples:
    """Seconds of a durable, digested, committed `Run.save`, and of `dcp.save` with its defaults."""
    model = Weights(size_mib, filled=True)
    directory = work / "save"

    def ours() -> float:
        with _run(directory, model) as run:
            run.start()
            started = time.perf_counter()
            run.save()
            return time.perf_counter() - started

    def baseline() -> float:
        state = {"model": model.state_dict()}
        started = time.perf_counter()
        dcp.save(state, checkpoint_id=directory, no_dist=True)
        return time.perf_counter() - started

    def clean(measure: Callable[[], float]) -> Callable[[], float]:
        def measured() -> float:
            os.sync()  # nobody pays for what was left to write back before
            try:
                return measure()
            finally:
                shutil.rmtree(directory)

        return measured

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        return alternate(repeat, clean(ours), clean(baseline))


def load(work: Path, size_mib: int, repeat: int) -> Samples:
    """Seconds of a verified load, and of `dcp.load` of the very same directory, in fresh processes."""
    return _loads(work, size_mib, repeat, ranks=1)


def load_ranks(work: Path, size_mib: int, repeat: int) -> Samples:
    """The same by two ranks at once, as many bytes each: the slower one's time."""
    return _loads(work, size_mib, repeat, ranks=2)


def _loads(work: Path, size_mib: int, repeat: int, *, ranks: int) -> Samples:
    directory = work / "load"
    with _run(directory, Weights(size_mib, filled=True)) as run:
        run.start()
        checkpoint = directory / "checkpoints" / str(run.save())
    os.sync()
    seen: set[float] = set()

    def child(how: str) -> Callable[[], float]:
        def measured() -> float:
            script = Path(__file__).with_name("load_once.py")
            argv = [sys.executable, str(script), how, str(checkpoint), str(size_mib)]
            environ = {**os.environ, "LOCAL_WORLD_SIZE": str(ranks)}
            pipe = subprocess.PIPE
            children = [
                subprocess.Popen(argv, stdin=pipe, stdout=pipe, text=True, env=environ) for _ in range(ranks)
            ]
            try:
                for one in children:
                    assert one.stdout is not None
                    one.stdout.readline()
                told = [pool.submit(one.communicate, "go\n", timeout=CHILD_DEADLINE) for one in children]
                answers = [json.loads(one.result()[0]) for one in told]
            finally:
                for one in children:
                    one.kill()
                    one.wait()
            seen.update(answer["checksum"] for answer in answers)
            if len(seen) != 1:
                raise RuntimeError(f"the loads of {checkpoint} gave different values")
            return max(float(answer["seconds"]) for answer in answers)

        return measured

    try:
        with ThreadPoolExecutor(ranks) as pool:
            return alternate(repeat, child("holdfast"), child("dcp"))
    finally:
        shutil.rmtree(directory)


def blocked(work: Path, size_mib: int, repeat: int) -> Samples:
    """Seconds for which an asynchronous save holds training up, and those of `dcp.async_save`."""
    found = _two_ranks(work, size_mib, repeat)
    return [blocked for blocked, _ in found["ours"]], [blocked for blocked, _ in found["dcp"]]


def blocked_beside_copy(work: Path, size_mib: int, repeat: int) -> Samples:
    """The same, beside a bare copy of the same tensors into memory that is there already."""
    found = _two_ranks(work, size_mib, repeat)
    return [blocked for blocked, _ in found["ours"]], [blocked for blocked, _ in found["copy"]]


def committed(work: Path, size_mib: int, repeat: int) -> Samples:
    """Seconds from the call of an asynchronous save to its commit, and to the end of `dcp.async_save`."""
    found = _two_ranks(work, size_mib, repeat)
    return [whole for _, whole in found["ours"]], [whole for _, whole in found["dcp"]]


def first_blocked(work: Path, size_mib: int, repeat: int) -> Samples:
    """Seconds for which the first asynchronous save of a process holds training up, and those of later ones.

    In fresh processes each time, after some steps and when what is got ready beside them is there.
    """
    return _firsts([_measure_ranks(work, size_mib, 0) for _ in range(repeat)])


def first_local_blocked(work: Path, size_mib: int, repeat: int) -> Samples:
    """The same for saves to the local tier, in memory."""
    found = []
    for _ in range(repeat):
        with tempfile.TemporaryDirectory(prefix="holdfast-bench-", dir="/dev/shm") as memory:
            found.append(_measure_ranks(work, size_mib, 0, memory))
    return _firsts(found)


def _firsts(found: list[dict[str, list[tuple[float, float]]]]) -> Samples:
    """Of each process: its first save, and the median of those after the second."""
    saves = [[blocked for blocked, _ in one["ours"][1:]] for one in found]
    for one in found:
        step, taken = one["ours"][0]
        told = f"the longest step before: {step:.3f} s; all was ready {taken:.2f} s after the steps"
        print(told, file=sys.stderr)
    return [each[0] for each in saves], [statistics.median(each[2:]) for each in saves]


def local_blocked(work: Path, size_mib: int, repeat: int) -> Samples:
    """Seconds for which a save to the local tier holds training up, and a bare copy of the same tensors."""
    with tempfile.TemporaryDirectory(prefix="holdfast-bench-", dir="/dev/shm") as memory:
        found = _two_ranks(work, size_mib, repeat, memory)
    return [blocked for blocked, _ in found["ours"]], [blocked for blocked, _ in found["copy"]]


def object_blocked(work: Path, size_mib: int, repeat: int) -> Samples:
    """Seconds for which an asynchronous save of an object holds training up; those of `torch.save` of it."""
    script = str(Path(__file__).with_name("objects.py"))
    argv = [sys.executable, script, str(work / "objects"), str(max(8, size_mib // 2)), str(repeat)]
    found = subprocess.run(argv, stdout=subprocess.PIPE, check=True, timeout=CHILD_DEADLINE)
    told = json.loads(found.stdout)
    return told["ours"], told["pickled"]


@functools.cache
def _two_ranks(
    work: Path, size_mib: int, repeat: int, local: str = ""
) -> dict[str, list[tuple[float, float]]]:
    """The same, measured once for all that asks for it."""
    return _measure_ranks(work, size_mib, repeat, local)


def _measure_ranks(
    work: Path, size_mib: int, repeat: int, local: str = ""
) -> dict[str, list[tuple[float, float]]]:
    """Two ranks that save side by side, the slower one's times."""
    directory = work / "ranks"
    directory.mkdir()
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    script = str(Path(__file__).with_name("async_rank.py"))
    arguments = [str(value) for value in (port, directory, size_mib, repeat)] + [local] * bool(local)
    ranks = [
        subprocess.Popen([sys.executable, script, str(rank), "2", *arguments], stdout=subprocess.PIPE)
        for rank in range(2)
    ]
    try:
        told = [rank.communicate(timeout=CHILD_DEADLINE)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
        shutil.rmtree(directory)
    if any(rank.returncode for rank in ranks):
        raise RuntimeError(f"{script} ended with {[rank.returncode for rank in ranks]}")
    found: dict[str, list[tuple[float, float]]] = json.loads(told[0])
    return found


def step(work: Path, size_mib: int, repeat: int) -> Samples:
    """Microseconds a step that `Run.steps` adds to a bare loop, and those of the bare loop itself."""
    del size_mib
    loader = list(range(100))
    model = Weights(0, filled=False)
    directory = work / "step"

    def bare() -> float:
        started = time.perf_counter()
        for _ in range(STEPS // len(loader)):
            for _batch in loader:
                pass
        return (time.perf_counter() - started) / STEPS * 1e6

    def ours() -> float:
        run = _run(directory, model)
        started = 0.0
        try:
            for number, _batch in run.steps(loader, until=STEPS + 1):
                if number == 1:
                    started = time.perf_counter()  # starting the run is over
                elif number == STEPS + 1:
                    ended = time.perf_counter()
            return (ended - started) / STEPS * 1e6 - bare()
        finally:
            shutil.rmtree(directory)

    return alternate(repeat, ours, bare)


def checked(work: Path, size_mib: int, repeat: int) -> Samples:
    """Milliseconds of a step of about 10 ms with its loss and gradients checked, and without."""
    del size_mib
    return checks.checked(work, repeat)


def small_saved(work: Path, size_mib: int, repeat: int) -> Samples:
    """Seconds of a save of 10,000 tensors of 1 KB, and of `dcp.save`."""
    del size_mib
    found = _small_saves(work, repeat)
    return found["ours"], found["dcp"]


def small_saved_first(work: Path, size_mib: int, repeat: int) -> Samples:
    """The same for the first save of a run, and `dcp.save`."""
    del size_mib
    found = _small_saves(work, repeat)
    return found["first"], found["dcp"]


def small_saved_torch(work: Path, size_mib: int, repeat: int) -> Samples:
    """The same, and `torch.save` with an fsync."""
    del size_mib
    found = _small_saves(work, repeat)
    return found["ours"], found["torch"]


def small_loaded(work: Path, size_mib: int, repeat: int) -> Samples:
    """Seconds of a verified load of 10,000 tensors of 1 KB, and of `dcp.load`."""
    del size_mib
    found = _small_loads(work, repeat, adam=False)
    return found["ours"], found["dcp"]


def small_loaded_torch(work: Path, size_mib: int, repeat: int) -> Samples:
    """The same, and `torch.load`."""
    del size_mib
    found = _small_loads(work, repeat, adam=False)
    return found["ours"], found["torch"]


def small_loaded_adam(work: Path, size_mib: int, repeat: int) -> Samples:
    """The same with Adam, whose state is 30,000 more; `dcp.load` between torch's functions for the state."""
    del size_mib
    found = _small_loads(work, repeat, adam=True)
    return found["ours"], found["dcp"]


@functools.cache
def _small_saves(work: Path, repeat: int) -> dict[str, list[float]]:
    return small.saved(work, repeat)


@functools.cache
def _small_loads(work: Path, repeat: int, *, adam: bool) -> dict[str, list[float]]:
    return small.loaded(work, repeat, adam=adam)


def small_blocked(work: Path, size_mib: int, repeat: int) -> Samples:
    """Seconds for which an asynchronous save of 10,000 tensors of 1 KB holds training up."""
    del size_mib
    return small.blocked(work, repeat)


def small_computed(work: Path, size_mib: int, repeat: int) -> Samples:
    """Milliseconds that `run.compute` adds to a step with 10,000 gradients of 1 KB, and those of the step."""
    del size_mib
    return small.computed(work, repeat)


def sections(work: Path, size_mib: int, repeat: int) -> Samples:
    """Microseconds that a section of the straggler detector adds, and those of a `with` that does nothing."""
    del work, size_mib
    return stragglers.sections(repeat)


def waited(work: Path, size_mib: int, repeat: int) -> Samples:
    """Microseconds that timing a collective's wait adds to it; in a step that is not measured."""
    del work, size_mib
    return stragglers.waits(repeat)


def restarted(work: Path, size_mib: int, repeat: int) -> Samples:
    """Seconds from a worker's death until both workers have met again and summed a number."""
    del size_mib
    ours, baseline = _launches(work, repeat)
    return [restart for _, restart in ours], [restart for _, restart in baseline]


def restarted_in_place(work: Path, size_mib: int, repeat: int) -> Samples:
    """Seconds from an exception on one of two ranks until both have made a step again."""
    del size_mib
    found = inprocess.restarts(work, repeat)
    return found["in place"], found["torchrun"]


def restarted_in_job(work: Path, size_mib: int, repeat: int) -> Samples:
    """The same script, with processes started again by `holdfast run`."""
    del size_mib
    found = inprocess.restarts(work, repeat)
    return found["in job"], found["torchrun"]


def launched(work: Path, size_mib: int, repeat: int) -> Samples:
    """Seconds from the command until both workers have met and summed a number."""
    del size_mib
    ours, baseline = _launches(work, repeat)
    return [launch for launch, _ in ours], [launch for launch, _ in baseline]


Launches = list[tuple[float, float]]


@functools.cache
def _launches(work: Path, repeat: int) -> tuple[Launches, Launches]:
    """Two workers that import torch, one of which dies once: launch and restart of each, in turns."""
    found: tuple[Launches, Launches] = ([], [])
    flags = ["--nproc-per-node", "2", "--max-restarts", "1"]
    commands = (
        [sys.executable, "-m", "holdfast", "run", *flags, "--run-dir", str(work / "launched")],
        [sys.executable, "-m", "torch.distributed.run", "--standalone", *flags],
    )
    for turn in range(repeat + 1):
        sides = [(found[0], commands[0]), (found[1], commands[1])]
        for kept, command in sides if turn % 2 else reversed(sides):
            sample = _launch(work, command)
            if turn:  # the first of each warms the caches
                kept.append(sample)
    return found


def _launch(work: Path, command: list[str]) -> tuple[float, float]:
    log, output = work / "launched.log", work / "launched.out"
    script = str(Path(__file__).with_name("restart_rank.py"))
    # Without the variable torchrun's own restart fails: new ranks read the addresses of dead ones.
    environment = {**os.environ, "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", "OMP_NUM_THREADS": "1"}
    started = time.time()
    try:
        with output.open("wb") as file:
            subprocess.run(
                [*command, script, str(log)],
                env=environment,
                stdout=file,
                stderr=file,
                timeout=CHILD_DEADLINE,
            )
        lines = [line.split() for line in log.read_text().splitlines()]
        first, second = (
            [float(at) for what, attempt, _, at in lines if (what, attempt) == ("together", number)]
            for number in ("0", "1")
        )
        crash = next(float(at) for what, _, _, at in lines if what == "crash")
        if len(first) != 2 or len(second) != 2:
            raise RuntimeError(f"{command[2]} did not form both groups:\n{output.read_text()}")
        return max(first) - started, max(second) - crash
    finally:
        for path in (log, output):
            path.unlink(missing_ok=True)
        shutil.rmtree(work / "launched", ignore_errors=True)


def node_lost(work: Path, size_mib: int, repeat: int) -> Samples:
    """Seconds from the loss of one of three nodes until the workers of the other two have begun again."""
    del size_mib
    found: Samples = ([], [])
    for turn in range(min(repeat, 3)):  # torch takes most of a minute
        for kept, ours in ((found[0], True), (found[1], False)):
            kept.append(node_loss.once(ours, work / f"node-loss-{turn}-{ours}"))
    return found


def replicated(work: Path, size_mib: int, repeat: int) -> Samples:
    """Seconds until a peer holds a verified replica of an image, and those of a bare socket copy of it."""
    with replicate.sides(work, size_mib) as (ours, bare):
        return alternate(repeat, ours, bare)


def resumed_own(work: Path, size_mib: int, repeat: int) -> Samples:
    """Seconds of a resume from the nodes' own copies, and from the checkpoint root."""
    found = _resumes(work, size_mib, repeat)
    return found["own"], found["global"]


def resumed_peer(work: Path, size_mib: int, repeat: int) -> Samples:
    """Seconds of a resume from the other node's replicas, and from the checkpoint root."""
    found = _resumes(work, size_mib, repeat)
    return found["peer"], found["global"]


@functools.cache
def _resumes(work: Path, size_mib: int, repeat: int) -> dict[str, list[float]]:
    """All three ways in turns, measured once for both that ask for it."""
    found: dict[str, list[float]] = {way: [] for way in resume.WAYS}
    with resume.ways(work, size_mib) as measured:
        for turn in range(repeat + 1):
            for way in resume.WAYS[:: 1 if turn % 2 else -1]:
                seconds = measured[way]()
                if turn:  # the first of each warms the caches
                    found[way].append(seconds)
    return found


def monitor(work: Path, size_mib: int, repeat: int) -> Samples:
    """Microseconds a step that signs of life to the agent add in the rank, and those of the bare loop."""
    del size_mib
    watch = Monitor(work / "monitor", Limits())
    try:
        script = str(Path(__file__).with_name("beat_rank.py"))
        rank = subprocess.Popen(
            [sys.executable, script, str(watch.path), str(repeat)], stdout=subprocess.PIPE
        )
        watch.begin({0: rank.pid})
        told, _ = rank.communicate(timeout=CHILD_DEADLINE)
    finally:
        watch.close()
    if rank.returncode:
        raise RuntimeError(f"{script} ended with {rank.returncode}")
    samples = json.loads(told)
    return [ours - bare for ours, bare in samples], [bare for _, bare in samples]


def stop(work: Path, size_mib: int, repeat: int) -> Samples:
    """Microseconds a step that watching for a request to stop adds, its threads at work, and the bare loop's.

    One of two ranks, with a store to look into; at least a second each, so that the threads take their share.
    """
    del work, size_mib
    store = TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)

    def steps(should_stop: Callable[[int], bool] | None) -> float:
        number, started = 0, time.perf_counter()
        while (ended := time.perf_counter()) - started < WATCHED:
            for _ in range(1000):
                number += 1
                if should_stop is not None and should_stop(number):
                    raise RuntimeError("somebody asked the benchmark to stop")
        return (ended - started) / number * 1e6

    with holdfast.ShutdownHandler(group=(store, (0, 2))) as handler:
        return alternate(repeat, lambda: steps(handler.should_stop), lambda: steps(None))


def assembled(work: Path, size_mib: int, repeat: int) -> Samples:
    """Seconds in which one of 10,000 ranks plans its resume from what all hold; of 1,250, eight times."""
    del work, size_mib
    return _grown(repeat, _planner)


def judged(work: Path, size_mib: int, repeat: int) -> Samples:
    """Seconds in which rank 0 judges a straggler report of 10,000 ranks; of 1,250, eight times."""
    del work, size_mib
    return _grown(repeat, lambda ranks: stragglers.judging(ranks, RANKS_PER_NODE))


def _grown(repeat: int, prepare: Callable[[int], Callable[[], float]]) -> Samples:
    ours = prepare(RANKS)
    fewer = [prepare(RANKS // PARTS) for _ in range(PARTS)]  # apart, so that caches help neither side more
    return alternate(repeat, ours, lambda: sum(part() for part in fewer))


def _planner(ranks: int) -> Callable[[], float]:
    """Each rank has four shards and a replica of them; a spare with nothing has replaced the first node."""
    places = [f"{rank // RANKS_PER_NODE:012x}" for rank in range(ranks)]
    files = [[f"__{rank}_{shard}.distcp" for shard in range(SHARDS)] for rank in range(ranks)]
    held: dict[str, list[str]] = {place: [] for place in places}
    for rank, targets in enumerate(rules.replicate(places, factor=2, jump=0).targets):
        for place in (places[rank], *targets):
            held[place] += files[rank]
    held[places[0]] = []
    answers = {place: msgspec.json.encode(paths) for place, paths in held.items()}
    saved_at = {path: places[rank] for rank in range(ranks) for path in files[rank]}
    names = {place: f"node-{place}" for place in answers}
    listed = list(saved_at)

    def measured() -> float:
        gc.collect()
        gc.disable()  # a collection goes through all of torch, whenever it happens to come
        try:
            started = time.perf_counter()
            told = {place: msgspec.json.decode(answer, type=list[str]) for place, answer in answers.items()}
            assembly = assemble(listed, told, in_global=False)
            evidence = describe_assembly(assembly, names, saved_at)
            sources = [order(assembly, path, places[0], 0) for path in files[0]]
            taken = time.perf_counter() - started
        finally:
            gc.enable()
        if not assembly.complete or not all(sources) or len(evidence) != 2:
            raise RuntimeError(f"the plan for {ranks} ranks is wrong: {evidence}")
        return taken

    return measured


def _run(directory: Path, model: Weights) -> holdfast.Run:
    run = holdfast.Run(run_dir=str(directory), checkpoint_interval=0, checkpoint_save_at_end=False)
    run.track(model=model)
    return run
