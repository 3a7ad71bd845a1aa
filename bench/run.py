"""Holdfast side by side with plain PyTorch: `make bench`, or `python bench/run.py --help`.

Writes bench/results.json, `{name: {ours, baseline, baseline_name, unit, ratio, target}}`, after every
benchmark, so that a run which is interrupted keeps what it measured, and prints it as a table at its end.
Values are medians. A target that is not met is shown as such and is not an error: times depend on the machine
and on who else uses it. A benchmark that fails is one: the others still run, and the exit code is 1.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import large
import measures
from rich.console import Console
from rich.table import Table

RESULTS = Path(__file__).with_name("results.json")


@dataclass(frozen=True)
class Benchmark:
    title: str
    measure: Callable[[Path, int, int], measures.Samples]
    baseline_name: str
    unit: str
    limit: float | None
    """None: the figure is to be known, and there is no target for it."""
    of: str
    """What the limit holds for: `ratio` of the times, or `ours` alone."""
    shows_growth: bool = False
    """The baseline is the same in smaller parts: a ratio near 1 says that it grows as the problem does."""

    @property
    def target(self) -> str:
        if self.limit is None:
            return ""
        return f"<= {self.limit:g}" + ("" if self.of == "ratio" else f" {self.unit}")


BENCHMARKS = {
    "save": Benchmark(
        "save, with fsync and digests, committed",
        measures.save,
        "torch.distributed.checkpoint.save",
        "s",
        1.0,
        "ratio",
    ),
    "load": Benchmark(
        "verified load, fresh process", measures.load, "torch.distributed.checkpoint.load", "s", 1.15, "ratio"
    ),
    "load-ranks": Benchmark(
        "the same by two ranks at once, as much each",
        measures.load_ranks,
        "torch.distributed.checkpoint.load",
        "s",
        0.5,
        "ratio",
    ),
    "async-blocked": Benchmark(
        "asynchronous save, 2 ranks: training held up",
        measures.blocked,
        "torch.distributed.checkpoint.async_save",
        "s",
        None,
        "ratio",
    ),
    "object-blocked": Benchmark(
        "asynchronous save of an object that is not torch's, half the size: training held up",
        measures.object_blocked,
        "torch.save of its state into memory",
        "s",
        0.5,
        "ratio",
    ),
    "async-blocked-copy": Benchmark(
        "the same, fingerprints included",
        measures.blocked_beside_copy,
        "bare copy of the same tensors",
        "s",
        2.0,
        "ratio",
    ),
    "async-first": Benchmark(
        "the first asynchronous save of a process, 2 ranks: training held up",
        measures.first_blocked,
        "its later ones",
        "s",
        2.0,
        "ratio",
    ),
    "local-blocked": Benchmark(
        "save to the local tier, 2 ranks: training held up, fingerprints included",
        measures.local_blocked,
        "bare copy of the same tensors",
        "s",
        2.0,
        "ratio",
    ),
    "local-first": Benchmark(
        "the first save of a process to the local tier, 2 ranks: training held up",
        measures.first_local_blocked,
        "its later ones",
        "s",
        2.0,
        "ratio",
    ),
    "async-committed": Benchmark(
        "asynchronous save, 2 ranks: until it is committed",
        measures.committed,
        "torch.distributed.checkpoint.async_save",
        "s",
        1.0,
        "ratio",
    ),
    "restart": Benchmark(
        "a worker of two dies: until the group is whole again",
        measures.restarted,
        "torchrun",
        "s",
        0.25,
        "ratio",
    ),
    "in-process": Benchmark(
        "an exception on one rank of two: until both step again, in the same processes",
        measures.restarted_in_place,
        "torchrun",
        "s",
        0.1,
        "ratio",
    ),
    "in-process-job": Benchmark(
        "the same script, processes started again by holdfast run",
        measures.restarted_in_job,
        "torchrun",
        "s",
        None,
        "ratio",
    ),
    "launch": Benchmark(
        "two workers launched: until their first all-reduce", measures.launched, "torchrun", "s", 1.0, "ratio"
    ),
    "node-loss": Benchmark(
        "one node of three dies: until the other two train again",
        measures.node_lost,
        "torch elastic",
        "s",
        0.3,
        "ratio",
    ),
    "replicate": Benchmark(
        "a peer holds a verified replica, over loopback",
        measures.replicated,
        "bare socket copy",
        "s",
        1.43,  # a throughput of 0.7
        "ratio",
    ),
    "resume": Benchmark(
        "resume of 2 ranks from their nodes' own copies, verified as they are loaded",
        measures.resumed_own,
        "from the checkpoint root",
        "s",
        None,
        "ratio",
    ),
    "resume-peer": Benchmark(
        "the same from each other's replicas, over loopback",
        measures.resumed_peer,
        "from the checkpoint root",
        "s",
        None,
        "ratio",
    ),
    "step": Benchmark(
        "cost of a step with nothing to do", measures.step, "bare for loop", "us", 50.0, "ours"
    ),
    "checks": Benchmark(
        "a step of 10 ms in one process, loss and gradients checked",
        measures.checked,
        "the same without checks",
        "ms",
        1.03,
        "ratio",
    ),
    "small-save": Benchmark(
        "10,000 tensors of 1 KB: save, with fsync and digests, committed",
        measures.small_saved,
        "torch.distributed.checkpoint.save",
        "s",
        1.0,
        "ratio",
    ),
    "small-save-first": Benchmark(
        "the first save of a run: planned, and proven to resume",
        measures.small_saved_first,
        "torch.distributed.checkpoint.save",
        "s",
        None,
        "ratio",
    ),
    "small-save-torch": Benchmark(
        "the same", measures.small_saved_torch, "torch.save into one file, with fsync", "s", None, "ratio"
    ),
    "small-load": Benchmark(
        "10,000 tensors of 1 KB: verified load",
        measures.small_loaded,
        "torch.distributed.checkpoint.load",
        "s",
        1.0,
        "ratio",
    ),
    "small-load-torch": Benchmark(
        "the same",
        measures.small_loaded_torch,
        "torch.load of one file, nothing verified",
        "s",
        None,
        "ratio",
    ),
    "small-load-adam": Benchmark(
        "the same with Adam: 30,000 more",
        measures.small_loaded_adam,
        "torch.distributed.checkpoint.load",
        "s",
        1.0,
        "ratio",
    ),
    "small-blocked": Benchmark(
        "10,000 tensors of 1 KB: training held up by an asynchronous save",
        measures.small_blocked,
        "torch.distributed.checkpoint.async_save",
        "s",
        0.05,
        "ours",
    ),
    "small-compute": Benchmark(
        "10,000 gradients of 1 KB: what checking them adds to a step",
        measures.small_computed,
        "the step without checks",
        "ms",
        3.0,
        "ours",
    ),
    "stragglers": Benchmark(
        "one section measured for the straggler detector",
        measures.sections,
        "a with that does nothing",
        "us",
        5.0,
        "ours",
    ),
    "stragglers-waits": Benchmark(
        "one wait in a collective, timed for the straggler detector",
        measures.waited,
        "the same in a step that is not measured",
        "us",
        5.0,
        "ours",
    ),
    "stragglers-report": Benchmark(
        "a straggler report of 10,000 ranks, judged by rank 0",
        measures.judged,
        "eight times the same for 1,250",
        "s",
        2.0,
        "ours",
        shows_growth=True,
    ),
    "monitor": Benchmark(
        "signs of life to the agent, cost of a step in the rank",
        measures.monitor,
        "bare for loop",
        "us",
        20.0,
        "ours",
    ),
    "stop": Benchmark(
        "watching for a request to stop, cost of a step in the rank",
        measures.stop,
        "bare for loop",
        "us",
        20.0,
        "ours",
    ),
    "metadata-parse": Benchmark(
        ".metadata of 2.2 million chunks: read and checked, for each chunk",
        large.parsed,
        "the interpreter alone, of a 32nd of it",
        "us",
        0.1,
        "ratio",
    ),
    "metadata-parse-memory": Benchmark(
        "the same: memory at its highest, for each chunk, the file's own bytes included",
        large.parsed_memory,
        "the interpreter alone, of a 32nd of it",
        "bytes",
        0.5,
        "ratio",
    ),
    "plan-size": Benchmark(
        "a save of 100,000 entries by 1,024 ranks, 4 of which hold a part of each: planned, its records read",
        large.planned,
        "eight times an eighth of the entries and ranks",
        "s",
        None,
        "ours",
        shows_growth=True,
    ),
    "plan-size-memory": Benchmark(
        "the same: memory of rank 0 at its highest",
        large.planned_memory,
        "eight times an eighth of the entries and ranks",
        "MiB",
        None,
        "ours",
        shows_growth=True,
    ),
    "assembly": Benchmark(
        "resume from local copies, planned for 10,000 ranks",
        measures.assembled,
        "eight times the same for 1,250",
        "s",
        2.0,
        "ours",
        shows_growth=True,
    ),
}


def summarise(benchmark: Benchmark, samples: measures.Samples) -> dict[str, Any]:
    ours, baseline = (statistics.median(values) for values in samples)
    return {
        "ours": round(ours, 4),
        "baseline": round(baseline, 4),
        "baseline_name": benchmark.baseline_name,
        "unit": benchmark.unit,
        "ratio": round(ours / baseline, 3) if benchmark.of == "ratio" or benchmark.shows_growth else None,
        "target": benchmark.target,
    }


def is_met(benchmark: Benchmark, result: dict[str, Any]) -> bool | None:
    """None: it has no target."""
    return None if benchmark.limit is None else bool(result[benchmark.of] <= benchmark.limit)


def in_a_line(name: str, result: dict[str, Any]) -> str:
    ratio = "" if result["ratio"] is None else f", ratio {result['ratio']:.2f}"
    verdict = {None: "", True: ", met", False: f", not met ({result['target']})"}[
        is_met(BENCHMARKS[name], result)
    ]
    return (
        f"{name}: {result['ours']:.3f} {result['unit']} against {result['baseline']:.3f} "
        f"({result['baseline_name']}){ratio}{verdict}"
    )


def show(results: dict[str, dict[str, Any]], samples: dict[str, measures.Samples], size_mib: int) -> None:
    table = Table(title=f"Holdfast beside plain PyTorch, {size_mib} MiB", title_justify="left")
    for column in ("benchmark", "ours", "baseline", "ratio", "target", ""):
        table.add_column(column, overflow="fold")
    for name, result in results.items():
        benchmark = BENCHMARKS[name]
        ours, baseline = (
            f"{result[side]:.3f} {result['unit']}\n[dim]{min(values):.3f} … {max(values):.3f}[/dim]"
            for side, values in zip(("ours", "baseline"), samples[name], strict=True)
        )
        table.add_row(
            f"{name}\n[dim]{benchmark.title}[/dim]",
            ours,
            f"{baseline}\n[dim]{benchmark.baseline_name}[/dim]",
            ("" if result["ratio"] is None else f"{result['ratio']:.2f}")
            + ("\n[dim]1 is linear[/dim]" if benchmark.shows_growth else ""),
            benchmark.target,
            {None: "", True: "[green]met[/green]", False: "[red]not met[/red]"}[is_met(benchmark, result)],
        )
    Console().print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description="Benchmarks of Holdfast against plain PyTorch.")
    parser.add_argument("--size", type=int, default=1024, metavar="MiB", help="state to save and load")
    parser.add_argument("--repeat", type=int, default=7, help="repetitions of each; the median counts")
    parser.add_argument("--only", metavar="NAME", help="one of them, and those whose names begin with it")
    parser.add_argument("--dir", type=Path, help="where temporary data goes (default: the system's)")
    parser.add_argument("--json", action="store_true", help="print the results as JSON instead of a table")
    chosen = parser.parse_args()
    if chosen.size < 1 or chosen.repeat < 1:
        parser.error("--size and --repeat must be at least 1")
    wanted = [n for n in BENCHMARKS if not chosen.only or n == chosen.only or n.startswith(f"{chosen.only}-")]
    if not wanted:
        parser.error(f"--only {chosen.only}: there is {', '.join(BENCHMARKS)}")
    sys.exit(0 if run(wanted, chosen) else 1)


def run(wanted: list[str], chosen: argparse.Namespace) -> bool:
    """Whether each of them could be measured."""
    results: dict[str, dict[str, Any]] = {}
    samples: dict[str, measures.Samples] = {}
    failed = []
    with tempfile.TemporaryDirectory(prefix="holdfast-bench-", dir=chosen.dir) as work:
        for number, name in enumerate(wanted, 1):
            benchmark, begun, place = BENCHMARKS[name], time.monotonic(), f"[{number}/{len(wanted)}]"
            print(f"{place} {name}: {benchmark.title} …", file=sys.stderr, flush=True)
            try:
                measured = benchmark.measure(Path(work), chosen.size, chosen.repeat)
                results[name] = summarise(benchmark, measured)
            except Exception:  # noqa: BLE001 - whatever it was, the others are still worth measuring
                traceback.print_exc()
                failed.append(name)
                continue
            samples[name] = measured
            RESULTS.write_text(json.dumps(results, indent=2) + "\n")
            took = time.monotonic() - begun
            print(f"{place} {in_a_line(name, results[name])} [{took:.0f} s]", file=sys.stderr, flush=True)
    if chosen.json:
        print(json.dumps(results, indent=2))
    else:
        show(results, samples, chosen.size)
    if failed:
        print(f"could not be measured: {', '.join(failed)}; the tracebacks stand above", file=sys.stderr)
    return not failed


if __name__ == "__main__":
    main()
