"""Several agents of one launch on this machine, each a node of its own."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path

from kit.harness import REPO, Job, free_port, holdfast, job, wait_until

STEP = str(REPO / "tests" / "scripts" / "launch" / "launch_step.py")


def free_endpoint() -> str:
    return f"127.0.0.1:{free_port()}"


class Cluster:
    """Agents that share a run directory, a rendezvous and a script."""

    def __init__(
        self, cwd: Path, stack: contextlib.ExitStack, nnodes: str, endpoint: str, *, hosted: bool
    ) -> None:
        self._conf = "last_call_timeout=60" + (",is_host=0" if hosted else "")
        self.cwd = cwd
        self.endpoint = endpoint
        self.agents: dict[str, Job] = {}
        self._stack = stack
        self._nnodes = nnodes

    def start(
        self,
        name: str,
        *flags: str,
        acts: str = "wait,ok",
        script: str = STEP,
        grace: float = 0.3,
        preload: bool = False,
        wrap: Callable[[list[str]], list[str]] = list,
    ) -> Job:
        """Start the agent of one node; `wrap` may put it elsewhere."""
        command = holdfast(
            "run", "--run-dir", "run", "--nnodes", self._nnodes, "--rdzv-backend", "c10d",
            "--rdzv-endpoint", self.endpoint, "--rdzv-conf", self._conf, "--rdzv-id", "cluster",
            "--set", f"launch.node_name={name}", "--set", f"launch.stop_grace={grace}",
            "--set", "launch.node_timeout=3", *([] if preload else ["--no-preload"]), *flags,
            script, acts, "log",
        )  # fmt: skip
        agent = self._stack.enter_context(job(wrap(command), cwd=self.cwd))
        self.agents[name] = agent
        return agent

    def wait_for_workers(self, attempt: int, count: int) -> None:
        """Until so many workers of an attempt have begun; the agents that wait are named if they do not."""
        wait_until(lambda: self.begun(attempt) >= count or self._ended(), 60, f"{count} workers of {attempt}")
        assert self.begun(attempt) >= count, "\n".join(a.output().text for a in self.agents.values())

    def begun(self, attempt: int) -> int:
        path = self.cwd / "log"
        if not path.exists():
            return 0
        return sum(line.split()[0] == str(attempt) for line in path.read_text().splitlines())

    def _ended(self) -> bool:
        return any(agent.process.poll() not in (None, 0, -9) for agent in self.agents.values())

    def said(self, name: str, text: str, timeout: float = 60.0) -> None:
        """Wait until an agent has said this."""
        wait_until(lambda: text in self.agents[name].output().err, timeout, f"{name} says {text!r}")


@contextlib.contextmanager
def cluster(cwd: Path, nnodes: str, endpoint: str = "") -> Iterator[Cluster]:
    """With no endpoint, the store lives in this process, so that any of the agents can be lost."""
    store = None
    if not endpoint:
        from torch.distributed import TCPStore  # type: ignore[attr-defined]

        limit = timedelta(seconds=30)
        store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=limit)
        endpoint = f"127.0.0.1:{store.port}"
    with contextlib.ExitStack() as stack:
        yield Cluster(cwd, stack, nnodes, endpoint, hosted=store is not None)
    del store


def workers_of(agent: Job) -> list[int]:
    return [pid for pid, line in agent.processes().items() if "launch_step.py" in line and pid != agent.pid]


def finish_all(group: Cluster, names: str, code: int = 0, timeout: float = 90) -> None:
    for name in names.split():
        result = group.agents[name].wait(timeout)
        assert result.code == code, f"{name}: {result.text}"
