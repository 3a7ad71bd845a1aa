"""A soak: one run of the example on two nodes, and one random fault after the other.

The soak plays the world around the run: it breaks things, starts again an agent that has ended (as a
scheduler or a person would), and after a documented stop resets the budget and launches once more. What it
asserts is in `test_soak.py`. Everything random comes from the seed, but for the moments at which processes
run.
"""

from __future__ import annotations

import contextlib
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from holdfast.checkpoint.copies.tier import places_under
from holdfast.drill.faults import FaultError, flip_in_checkpoint
from holdfast.errors import ExitCode
from holdfast.journal import JournalLine
from holdfast.journal.events import AttemptStarted, DecisionMade, SaveCommitted, WorkersStarted
from holdfast.journal.reader import JournalReader
from kit.harness import REPO, Job, finish, holdfast, wait_until
from kit.nodes.machines import fill, hung_mount
from kit.nodes.namespaces import PORT, Network

EXAMPLE = str(REPO / "examples" / "train_gpt.py")
TRAIN = str(REPO / "tests" / "scripts" / "train" / "train_with_faults.py")
NODES = ("a", "b")
INTERVAL = 5
LOCAL_INTERVAL = 2
STEPS_PER_FAULT = 16
"""More than one fault and the recovery from it use up."""
PACE = 0.05
"""Seconds that a step takes at least, so that a run goes only so far while its storage is bad."""
BAD_STORAGE = 9.0
"""Seconds that storage is full or stalled, at most: one and a half times-to-live."""
WITHIN = ("kill", "stop", "raise", "exit", "agent", "corrupt", "both", "garbage")
"""Faults that need no network of their own."""
ON_STORAGE = ("full_disk", "stalled_storage")
"""Faults that need a file system of the run's own."""
DISK = 1024
"""Megabytes of that."""
STOPS = (ExitCode.FAILED, ExitCode.BUDGET_SPENT, ExitCode.NOTHING_LEFT, ExitCode.NO_CAPACITY)
"""Documented stops, after which a person looks, resets the budget and launches again."""
RESUMABLE = (
    ExitCode.LEASE_LOST, ExitCode.RUN_IS_LIVE, ExitCode.DECISION_TIMEOUT, ExitCode.STORE_LOST, ExitCode.OK,
    ExitCode.STORAGE_FAILED, -signal.SIGKILL,
)  # fmt: skip
STRANGER = """
import sys
from datetime import timedelta
from torch.distributed import TCPStore
for place in sys.argv[1:]:
    host, port, index = place.split("/")
    try:
        store = TCPStore(host, int(port), is_master=False, timeout=timedelta(seconds=2))
        rounds = [f"round.{n}/holdfast/{key}" for n in range(1, 9) for key in ("attempt", "notice")]
        for key in ("meeting", "farewell", *rounds):
            store.set(f"holdfast.soak.{index}/{key}", b"\\xff garbage")
    except RuntimeError:
        pass  # nobody meets there
"""
"""Overwrites what agents say to each other, at every endpoint that is in use."""
PATIENCE = 150.0
"""Seconds without a commit after which the soak has found something that does not end."""


def model(steps: int) -> list[str]:
    """The example's arguments: small, so that the faults take the time and not the steps."""
    return [f"--steps={steps}", "--device=cpu", "--parallel=ddp", "--layers=1", "--dim=32"]


@dataclass
class Report:
    seed: int
    faults: list[str] = field(default_factory=list)
    codes: Counter[str] = field(default_factory=Counter)
    resets: int = 0
    attempts: int = 0
    seconds: float = 0.0
    from_memory: int = 0
    """Resumes in which shards were found in the local tier."""
    longest: float = 0.0
    """Seconds from a fault to the next commit, at most."""
    problems: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        kinds = ", ".join(f"{count} {kind}" for kind, count in sorted(Counter(self.faults).items()))
        codes = ", ".join(f"{code}: {count}" for code, count in sorted(self.codes.items()))
        lines = [
            f"soak, seed {self.seed}: {len(self.faults)} faults ({kinds}) in {self.seconds:.0f} s",
            f"  attempts: {self.attempts}; budgets reset after a stop: {self.resets}; "
            f"resumes from memory: {self.from_memory}",
            f"  agents ended with: {codes}",
            f"  longest from a fault to the next commit: {self.longest:.1f} s",
        ]
        return "\n".join(lines + [f"  PROBLEM: {problem}" for problem in self.problems])


class Soak:
    def __init__(
        self,
        cwd: Path,
        *,
        faults: int,
        seed: int,
        net: Network | None,
        local: Path | None = None,
        disk: bool = False,
    ) -> None:
        """With `local`, a directory in memory, the run saves in the background and has a local tier there.

        `disk`: the run directory is a file system of its own, which may be filled and stalled.
        """
        self.cwd = cwd
        self._local = local
        self.report = Report(seed)
        self._faults = faults
        self._rng = random.Random(seed)
        self._net = net
        self._kinds = (*WITHIN, *(("partition",) if net is not None else ()), *(ON_STORAGE if disk else ()))
        self._chosen = self._order()
        meanwhile = int(BAD_STORAGE / PACE) * sum(kind in ON_STORAGE for kind in self._chosen)
        self.steps = (STEPS_PER_FAULT * faults + meanwhile) // INTERVAL * INTERVAL + 4 * INTERVAL
        self._agents: dict[str, Job] = {}
        self._lines: list[JournalLine] = []
        self._reader = JournalReader(cwd / "run" / "journal")
        self._tmp = cwd / "tmp"
        self._orders = cwd / "orders"
        self._done: set[str] = set()
        self._retry: dict[str, float] = {}
        for place in (self._tmp, self._orders):
            place.mkdir()

    # --- the world ------------------------------------------------------------------------------------------

    def run(self) -> Report:
        began = time.monotonic()
        try:
            self._await_commit("the first commit")
            for kind in self._chosen:
                if self._done:
                    self.report.problems.append(
                        f"the run ended before {kind}, fault {len(self.report.faults) + 1}"
                    )
                    break
                self.report.faults.append(kind)
                broken = time.monotonic()
                self._break(kind)
                self._await_commit(f"a commit after {kind}")
                self.report.longest = max(self.report.longest, time.monotonic() - broken)
            self._await_end()
        finally:
            whole = len(self._done) == len(NODES)
            for agent in self._agents.values():
                if whole:
                    with contextlib.suppress(AssertionError):
                        wait_until(
                            lambda job=agent: not job.processes(), 10.0, "what outlives its trainer ends"
                        )
                left = agent.kill_everything()
                if left and whole:
                    self.report.problems.append(f"processes left behind: {left}")
        self._poll()
        numbers = {line.attempt for line in self._lines if isinstance(line.body, AttemptStarted)}
        self.report.attempts = len(numbers)
        self.report.seconds = time.monotonic() - began
        decided = [line.body for line in self._lines if isinstance(line.body, DecisionMade)]
        told = [text for one in decided if one.about == "resume" for text in one.evidence]
        self.report.from_memory = sum(bool(re.search("[1-9][0-9]* of .* on the node", text)) for text in told)
        left_over = [path.name for path in self._tmp.iterdir() if path.name.startswith("holdfast")]
        killed = self.report.faults.count("agent") + self.report.faults.count("both")
        if len(left_over) > 2 * killed:  # a killed agent cannot tidy up
            self.report.problems.append(f"directories left behind: {left_over}")
        return self.report

    def _order(self) -> list[str]:
        """All kinds in turn, shuffled anew each time."""
        chosen: list[str] = []
        while len(chosen) < self._faults:
            chosen += self._rng.sample(self._kinds, len(self._kinds))
        return chosen[: self._faults]

    def _start(self, name: str) -> None:
        index = NODES.index(name)
        settings: dict[str, object] = {
            "launch.node_name": name, "launch.node_timeout": 3, "launch.stop_grace": 1,
            "control.lease_ttl": 6, "control.decision_timeout": 40, "checkpoint.interval": INTERVAL,
            "monitor.rank_section_timeouts": "setup:60,step:5,checkpointing:20",
            "monitor.rank_heartbeat_timeout": 30, "monitor.initial_rank_heartbeat_timeout": 60,
            "journal.step_flush": 0, "health.gate": "off",
        }  # fmt: skip
        if self._local is not None:
            settings |= {
                "checkpoint.async_save": "true", "checkpoint.non_persistent_ckpt_type": "local",
                "checkpoint.non_persistent_local_ckpt_dir": self._local / name,
                "checkpoint.non_persistent_save_interval": LOCAL_INTERVAL,
                "checkpoint.replication_timeout": 5, "checkpoint.handover_timeout": 10,
            }  # fmt: skip
        flags = [word for key, value in settings.items() for word in ("--set", f"{key}={value}")]
        endpoint = ",".join(f"{host}:{port}" for host, port in self._endpoints())
        command = holdfast(
            "run", "--run-dir", "run", "--nnodes", str(len(NODES)), "--rdzv-backend", "c10d",
            "--rdzv-endpoint", endpoint, "--rdzv-id", "soak", "--rdzv-conf", "join_timeout=60",
            "--local-addr", self._address(index), *flags,
            TRAIN, EXAMPLE, *model(self.steps),
        )  # fmt: skip
        environment = {"TMPDIR": str(self._tmp), "SOAK_FAULTS": str(self._orders), "SOAK_PACE": str(PACE)}
        environment["CUDA_VISIBLE_DEVICES"] = ""
        if self._net is not None:
            environment["GLOO_SOCKET_IFNAME"] = "eth0"
            command = self._net.inside(index, command)
        self._agents[name] = Job(command, cwd=self.cwd, env=environment)

    def _endpoints(self) -> list[tuple[str, int]]:
        hosts = [self._address(number) for number in range(len(NODES))]
        ports = [PORT, PORT] if self._net is not None else [self._port(), self._port() + 1]
        return list(zip(hosts, ports, strict=True))

    def _address(self, index: int) -> str:
        return self._net.address(index) if self._net is not None else "127.0.0.1"

    def _port(self) -> int:
        return 20000 + (os.getpid() * 7) % 9000

    def _tend(self) -> None:
        """Start again what has ended, as far as it should be."""
        for name in NODES:
            agent = self._agents.get(name)
            if agent is None:
                self._start(name)
                continue
            code = agent.process.poll()
            if code is None or name in self._done or time.monotonic() < self._retry.get(name, 0.0):
                continue
            if name not in self._retry:
                self.report.codes[str(code)] += 1
                if code == ExitCode.OK:
                    self._done.add(name)
                    continue
                if code in STOPS:
                    self._reset()
                elif code not in RESUMABLE:
                    self.report.problems.append(f"{name} ended with {code}:\n{agent.output().err[-3000:]}")
                self._retry[name] = time.monotonic() + 0.5
                continue
            del self._retry[name]
            left = {pid: line for pid, line in agent.processes().items() if not _may_outlive(line)}
            if left and code != -signal.SIGKILL:
                self.report.problems.append(f"{name} ended with {code} and left {left}")
            agent.kill_everything()
            self._start(name)

    def _reset(self) -> None:
        """What a person does after a stop."""
        self.report.resets += 1
        asked = finish(
            holdfast("control", "reset-budget", "run", "--reason", "soak"), cwd=self.cwd, timeout=60
        )
        if asked.code != 0:
            self.report.problems.append(f"reset-budget: {asked.text}")

    # --- what is seen ---------------------------------------------------------------------------------------

    def _poll(self) -> None:
        with contextlib.suppress(FileNotFoundError):
            self._lines.extend(self._reader.poll())

    def _commits(self) -> list[SaveCommitted]:
        return [line.body for line in self._lines if isinstance(line.body, SaveCommitted)]

    def _drained(self) -> SaveCommitted:
        return [save for save in self._commits() if save.tier == "global"][-1]

    def _highest(self) -> int:
        return max((save.step for save in self._commits() if save.tier == "global"), default=0)

    def _await_commit(self, what: str) -> None:
        """Until a checkpoint beyond all earlier ones is there."""
        self._poll()
        target, deadline = self._highest(), time.monotonic() + PATIENCE
        while self._highest() <= target and len(self._done) < len(NODES):
            self._tend()
            self._poll()
            if time.monotonic() > deadline:
                told = "\n".join(f"--- {name}\n{a.output().err[-3000:]}" for name, a in self._agents.items())
                raise AssertionError(f"{what}: not within {PATIENCE:g} s\n{self.report}\n{told}")
            time.sleep(0.05)

    def _await_end(self) -> None:
        deadline = time.monotonic() + PATIENCE + self.steps * 0.5
        while len(self._done) < len(NODES):
            self._tend()
            self._poll()
            if time.monotonic() > deadline:
                raise AssertionError(f"the run did not end\n{self.report}")
            time.sleep(0.05)

    def final(self) -> Path:
        last = self._drained()
        assert last.step == self.steps
        return self.cwd / "run" / "checkpoints" / last.checkpoint

    # --- faults ---------------------------------------------------------------------------------------------

    def _break(self, kind: str) -> None:
        self._poll()
        rank = self._rng.randrange(len(NODES))
        if kind in ("kill", "stop"):
            self._signal(rank, signal.SIGKILL if kind == "kill" else signal.SIGSTOP)
        elif kind == "both":
            self._signal(rank, signal.SIGKILL)
            self._kill_agent(self._rng.choice(NODES))
        elif kind == "raise":
            (self._orders / f"fault-{rank}").write_text("raise")
        elif kind == "exit":
            (self._orders / f"fault-{rank}").write_text(f"exit:{self._rng.choice((3, 16, 77))}")
        elif kind == "agent":
            self._kill_agent(self._rng.choice(NODES))
        elif kind == "corrupt":
            newest = self.cwd / "run" / "checkpoints" / self._drained().checkpoint
            with contextlib.suppress(FaultError):
                flip_in_checkpoint(newest, seed=self._rng.randrange(1000))
            if self._local is not None:
                self._flip_in_memory(self._local / self._rng.choice(NODES))
            self._signal(rank, signal.SIGKILL)
        elif kind == "garbage":
            places = [f"{host}/{port}/{index}" for index, (host, port) in enumerate(self._endpoints())]
            command = [sys.executable, "-c", STRANGER, *places]
            if self._net is not None:
                command = self._net.inside(rank, command)
            subprocess.run(command, timeout=60, check=False, capture_output=True)
            self._signal(rank, signal.SIGKILL)  # so that they meet over it
        elif kind == "partition":
            assert self._net is not None
            host = self._rng.randrange(len(NODES))
            self._net.cut(host)
            self._wait(self._rng.uniform(1.0, 8.0))  # how long the network is down
            self._net.mend(host)
        elif kind == "full_disk":
            filler = self.cwd / "run" / "filler"
            fill(filler)
            self._wait(self._rng.uniform(1.0, BAD_STORAGE))
            filler.unlink()
        elif kind == "stalled_storage":
            with hung_mount(self.cwd / "run"):
                self._wait(self._rng.uniform(1.0, BAD_STORAGE))

    def _wait(self, seconds: float) -> None:
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            self._tend()
            time.sleep(0.05)

    def _flip_in_memory(self, directory: Path) -> None:
        """In every copy of the newest local step that one node has, whatever else is at work on it."""
        for tier in places_under(directory):
            records = tier.records()
            for record in records:
                if record.name == records[0].name:
                    with contextlib.suppress(OSError), tier.image(record).open("r+b") as image:
                        image.seek(record.nbytes // 2)
                        byte = image.read(1)[0]
                        image.seek(-1, os.SEEK_CUR)
                        image.write(bytes([byte ^ 16]))

    def _kill_agent(self, name: str) -> None:
        with contextlib.suppress(ProcessLookupError):
            self._agents[name].signal(signal.SIGKILL)

    def _signal(self, rank: int, number: int) -> None:
        started = [line.body for line in self._lines if isinstance(line.body, WorkersStarted)]
        pid = next((body.pids[rank] for body in reversed(started) if rank in body.pids), None)
        if pid is None:
            return
        with contextlib.suppress(OSError):  # it may have ended since
            environment = Path(f"/proc/{pid}/environ").read_bytes()
            if b"HFTEST_JOB" in environment:
                os.kill(pid, number)


def _may_outlive(command_line: str) -> bool:
    """Writers and peer servers finish what they have begun, and for so long the keeper waits for them."""
    return "-m holdfast.checkpoint." in command_line or "-m holdfast.launch.workers.orphans" in command_line
