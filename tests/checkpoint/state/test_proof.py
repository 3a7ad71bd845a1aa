"""The first save of an attempt is proven to resume, in a fork; what would not is an error then, by name."""

from __future__ import annotations

import contextlib
import json
import math
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch
from torch import nn

import holdfast
from holdfast.checkpoint.format import manifest as manifests
from holdfast.checkpoint.format.manifest import Proof
from holdfast.checkpoint.save import snapshot
from holdfast.checkpoint.state import proof
from holdfast.checkpoint.state.proof import Initial, Report, changes, merge, weaker
from holdfast.checkpoint.state.tracked import Tracked
from holdfast.errors import ExitCode, IncompleteStateError
from holdfast.journal.events import SaveFailed
from kit.ranks.writers import ranks
from kit.runs import events_in, warnings_of
from kit.tiny import Holds, build, checkpoints, die, forked, train

ALL_VALUES = dict.fromkeys(("model", "optimizer", "schedule", "rng", "counters"), "values") | {
    "data": "structure",
    "gradients": "structure",
}


def proofs(run_dir: Path) -> list[Proof]:
    """Of the checkpoints, oldest first."""
    return [manifests.read(path)[0].proof for path in reversed(checkpoints(run_dir))]


# --- what would not resume ----------------------------------------------------------------------------------


class Counts:
    """State that changes with every step."""

    def __init__(self) -> None:
        self.seen, self.limit, self.loads = 0, 100, 0

    def state_dict(self) -> dict[str, Any]:
        return {"seen": self.seen}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.seen = state["seen"]


class Forgets(Counts):
    def __init__(self) -> None:
        super().__init__()
        self.best = math.inf

    def __call__(self, loss: float) -> None:
        self.best = min(self.best, loss)

    def state_dict(self) -> dict[str, Any]:
        return {"seen": self.seen, "loss": {"best": self.best}}


class Refuses(Counts):
    def load_state_dict(self, state: dict[str, Any]) -> None:
        raise KeyError("epoch")


def fails_to_unpickle() -> None:
    raise OSError("the socket of another process")


class PicklesOnly:
    def __reduce__(self) -> tuple[Any, ...]:
        return (fails_to_unpickle, ())


class ComesBackOther:
    def __reduce__(self) -> tuple[type, tuple[()]]:
        return (dict, ())


def local_instance() -> object:
    class Inner:
        pass

    return Inner()


class WithExtra(nn.Linear):
    """Counts its calls, keeps the number as extra state, and ignores what is loaded."""

    def __init__(self) -> None:
        super().__init__(2, 2)
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return super().forward(x)

    def get_extra_state(self) -> dict[str, int]:
        return {"calls": self.calls}

    def set_extra_state(self, state: Any) -> None:
        pass


class Warming(torch.optim.SGD):
    """Counts its warm-up beside its state; its load_state_dict does not take that over."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.warm = 0.0

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step()
        self.warm += 0.25

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "warm": self.warm}

    def load_state_dict(self, state_dict: Any) -> None:
        super().load_state_dict({key: state_dict[key] for key in ("state", "param_groups")})


def run_with(run_dir: Path, until: int = 2, *, model: nn.Module | None = None, **more: Any) -> None:
    """Every step saves. `more`: settings, by their prefix, and things to track."""
    settings = {key: more.pop(key) for key in list(more) if key.startswith("checkpoint_")}
    model = model or nn.Linear(2, 2)
    optimizer = more.pop("optimizer", torch.optim.SGD)(model.parameters(), lr=0.1, momentum=0.9)
    run = holdfast.Run(run_dir=run_dir, **{"checkpoint_interval": 1, "control_lease_ttl": 5.0, **settings})
    run.track(model=model, optimizer=optimizer, **more)
    for _ in run.steps([1, 2, 3], until=until):
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        for thing in more.values():
            if hasattr(thing, "seen"):
                thing.seen += 1
            if isinstance(thing, Forgets):
                thing(0.5)


@pytest.mark.parametrize(
    ("tracked", "named"),
    [
        (lambda: {"thing": Forgets()}, r"track\(thing=…\).*loss\.best.*0\.5 was stored.* it is inf"),
        (
            lambda: {"thing": Refuses()},
            r"track\(thing=…\).*be loaded again.*KeyError: 'epoch'",
        ),
        (
            lambda: {"thing": Holds({"a": PicklesOnly()})},
            r"track\(thing=…\).*not read back: OSError",
        ),
        (lambda: {"thing": Holds({"a": ComesBackOther()})}, r"track\(thing=…\): a is .*ComesBackOther.*\{\}"),
        (lambda: {"thing": Holds({"a": local_instance()})}, r"track\(thing=…\): its state cannot be saved"),
        (lambda: {"model": WithExtra()}, r"track\(model=…\).*model\._extra_state: WithExtra did not take it"),
        (
            lambda: {"optimizer": Warming},
            r"track\(optimizer=…\).*warm.*0\.25 was stored.* it is 0\.0",
        ),
    ],
)
@pytest.mark.parametrize("asynchronous", [False, True])
def test_what_would_not_resume_is_an_error_at_the_first_save(
    tmp_path: Path, tracked: Callable[[], dict[str, Any]], named: str, asynchronous: bool
) -> None:
    with pytest.raises(IncompleteStateError, match=named) as caught:
        run_with(tmp_path / "run", checkpoint_async_save=asynchronous, **tracked())
    assert "step_00000001" in str(caught.value)
    assert caught.value.exit_code == ExitCode.STATE_MISFIT
    assert checkpoints(tmp_path / "run") == []
    staging = tmp_path / "run" / "checkpoints" / ".staging"
    assert [path for path in staging.glob("*") if not path.name.startswith(".")] == []
    assert events_in(tmp_path / "run", SaveFailed) == [], (
        "it is not one of the failed saves that a run may have"
    )


def test_what_this_rank_stores_and_no_load_would_read_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What other ranks store is theirs to read; what a rank stores itself it must read back."""
    whole = Tracked.targets

    def partly(tracked: Tracked, *given: Any) -> dict[str, Any]:
        found = whole(tracked, *given)
        found["model"] = {name: value for name, value in found["model"].items() if name != "bias"}
        return found

    monkeypatch.setattr(Tracked, "targets", partly)
    monkeypatch.setattr(proof, "VALUES", 0)  # nothing is compared by value
    with pytest.raises(IncompleteStateError, match=r"model\.bias: in the checkpoint, but not tracked"):
        run_with(tmp_path / "run", model=nn.Linear(2, 2))
    assert checkpoints(tmp_path / "run") == []


def test_one_rank_that_would_not_resume_is_the_same_error_on_all(tmp_path: Path) -> None:
    def work(rank: int) -> None:
        thing = Forgets() if rank == 1 else Counts()
        try:
            run_with(tmp_path / "run", thing=thing)
        except IncompleteStateError as error:
            (tmp_path / f"error-{rank}").write_text(str(error))
            raise

    ranks(tmp_path, 2, work, codes=int(ExitCode.STATE_MISFIT))
    first, second = ((tmp_path / f"error-{rank}").read_text() for rank in (0, 1))
    assert first == second
    assert "rank 1: track(thing=…)" in first
    assert checkpoints(tmp_path / "run") == []


class Informs(Counts):
    """Its state also says what the script has set, which a load need not restore, and counts the loads."""

    def state_dict(self) -> dict[str, Any]:
        return {"seen": self.seen, "limit": self.limit, "loads": self.loads, "version": 3}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if state["limit"] != self.limit:
            raise ValueError("another limit")
        self.seen = state["seen"]
        self.loads = state["loads"] + 1


def test_an_entry_that_every_new_process_has_anyway_need_not_be_loaded(tmp_path: Path) -> None:
    run_with(tmp_path / "run", thing=Informs())
    (doubt,) = warnings_of(tmp_path / "run")
    assert doubt == (
        "track(thing=…): loading its own state changes loads: 0 was stored, and after a load it is 1"
    )
    assert proofs(tmp_path / "run")[0].parts["thing"] == "structure"
    run_with(tmp_path / "run", until=4, thing=Informs())


# --- an ordinary run ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("settings", [{}, {"checkpoint_async_save": True}])
def test_an_ordinary_run_is_proven_once_and_every_manifest_says_so(
    tmp_path: Path, settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    forks: list[Report] = []
    monkeypatch.setattr(snapshot, "prove", lambda subject: forks.append(proof.prove(subject)) or forks[-1])
    train(tmp_path / "run", until=9, **settings)
    assert len(forks) == 1
    assert proofs(tmp_path / "run") == 3 * [Proof(step=3, parts=ALL_VALUES)]
    train(tmp_path / "run", until=12, **settings)
    assert proofs(tmp_path / "run")[3:] == [Proof(step=12, parts=ALL_VALUES)]
    assert not any("proof" in text for text in warnings_of(tmp_path / "run"))


def test_the_proof_changes_nothing_in_the_trainer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bitwise the same run, hooks called as often, gradients, modes and files as without."""

    def observed(run_dir: Path) -> tuple[Any, ...]:
        calls: list[str] = []
        model, optimizer, schedule, loader = build()
        model.register_state_dict_pre_hook(lambda *_: calls.append("state"))  # type: ignore[no-untyped-call]
        model.register_load_state_dict_post_hook(lambda *_: calls.append("load"))
        optimizer.register_step_pre_hook(lambda *_: calls.append("step"))
        optimizer.register_load_state_dict_post_hook(lambda *_: calls.append("load optimizer"))
        run = holdfast.Run(run_dir=run_dir, checkpoint_interval=2, control_lease_ttl=5.0)
        run.track(model=model, optimizer=optimizer, schedule=schedule)
        seen: list[Any] = []
        for step, (_, x) in run.steps(loader, until=4):
            loss = (model(x) - x).square().mean()
            loss.backward()
            optimizer.step()
            schedule.step()
            if step != 2:  # these gradients are there while it is saved
                optimizer.zero_grad()
            grads = [p.grad.clone() if p.grad is not None else None for p in model.parameters()]
            seen.append((loss.item().hex(), [g.sum().item().hex() if g is not None else "" for g in grads]))
        descriptors = len(os.listdir("/proc/self/fd"))
        return seen, torch.get_rng_state().tolist(), calls, descriptors

    proven = observed(tmp_path / "proven")
    assert proofs(tmp_path / "proven")[0].parts["optimizer"] == "values"
    monkeypatch.setattr(snapshot, "prove", lambda subject: Report(why_not="not tried"))
    assert observed(tmp_path / "not") == proven


def test_a_changed_structure_is_proven_again(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    head = nn.Linear(2, 2)
    optimizer = torch.optim.SGD([*model.parameters(), *head.parameters()], lr=0.1, momentum=0.9)
    whole = nn.Sequential(model, head)
    run = holdfast.Run(run_dir=tmp_path / "run", checkpoint_interval=1, control_lease_ttl=5.0)
    run.track(model=whole, optimizer=optimizer)
    for step, _ in run.steps([1], until=4):
        (model(torch.ones(1, 2)) if step < 3 else whole(torch.ones(1, 2))).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert [found.step for found in proofs(tmp_path / "run")] == [1, 1, 3, 3]


def test_large_tensors_are_neither_copied_nor_compared_and_it_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(proof, "VALUES", 4 * 4 + 2 * 4 + 64)
    run_with(tmp_path / "run", model=nn.Linear(2, 2, bias=False))
    assert proofs(tmp_path / "run")[0].parts["model"] == "values", "read in place"


# --- the proof itself cannot be had -------------------------------------------------------------------------


@contextlib.contextmanager
def in_the_fork(monkeypatch: pytest.MonkeyPatch, do: Callable[[], None]) -> Iterator[None]:
    with monkeypatch.context() as patch:
        patch.setattr(proof._Proof, "run", lambda self: do())
        yield


def takes_memory() -> None:
    kept = bytearray(64 << 20)
    time.sleep(30)
    del kept


def hangs() -> None:
    time.sleep(30)


def crashes() -> None:
    import ctypes

    ctypes.string_at(0)


def prints_and_raises() -> None:
    print("THE FORK PRINTS", flush=True)
    os.write(2, b"THE FORK WRITES")
    raise RuntimeError("of its own")


def own_children() -> set[int]:
    """Also those that have ended and that nobody has waited for; earlier tests may have left some."""
    found: set[int] = set()
    for thread in Path("/proc/self/task").iterdir():
        with contextlib.suppress(FileNotFoundError):  # the thread has just ended
            found.update(map(int, (thread / "children").read_text().split()))
    return found


@pytest.mark.parametrize(
    ("happens", "why"),
    [
        (die, "its process ended without a word (signal 9)"),
        (crashes, "its process ended without a word (signal 11)"),
        (hangs, "it took longer than 0.5 s"),
        (takes_memory, "it needed more than 8 MiB"),
        (prints_and_raises, "the proof itself failed: RuntimeError: of its own"),
    ],
)
def test_whatever_happens_to_the_fork_training_goes_on_and_it_is_told_once(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    happens: Callable[[], None],
    why: str,
) -> None:
    monkeypatch.setattr(proof, "DEADLINE", 0.5 if happens is hangs else 15.0)
    monkeypatch.setattr(proof, "MEMORY", 8 << 20 if happens is takes_memory else 1 << 30)
    before, children = set(os.listdir("/proc/self/fd")), own_children()
    with in_the_fork(monkeypatch, happens):
        outcome = train(tmp_path / "run", until=9)
    assert proofs(tmp_path / "run") == 3 * [Proof(step=3, why_not=why)]
    (told_once,) = [text for text in warnings_of(tmp_path / "run") if "proof" in text]
    assert why in told_once
    assert "THE FORK" not in "".join(capfd.readouterr())
    assert own_children() <= children
    assert set(os.listdir("/proc/self/fd")) == before
    assert outcome.losses == train(tmp_path / "other", until=9).losses


def test_without_a_process_to_be_had_training_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_fork() -> int:
        raise BlockingIOError(11, "Resource temporarily unavailable")

    monkeypatch.setattr(os, "fork", no_fork)
    train(tmp_path / "run", until=3)
    monkeypatch.undo()
    (found,) = proofs(tmp_path / "run")
    assert "no process can be forked" in found.why_not


def test_a_fault_of_the_proof_itself_is_not_blamed_on_what_is_stored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With torch 2.11 it ended every run of FSDP2 at its first save."""

    def unknown(*_: object) -> NoReturn:
        raise NotImplementedError("Operator aten.is_pinned.default does not have a sharding strategy")

    monkeypatch.setattr(snapshot, "metadata_of", unknown)
    train(tmp_path / "run", until=3)
    (found,) = proofs(tmp_path / "run")
    assert found.why_not.startswith("the proof itself failed: NotImplementedError")


def test_the_fork_ends_with_its_trainer(tmp_path: Path) -> None:
    place = tmp_path / "fork"

    def work() -> None:
        def live(self: Any) -> Report:
            place.write_text(str(os.getpid()))
            os.kill(os.getppid(), 9)
            time.sleep(30)
            return Report()

        proof._Proof.run = live  # type: ignore[method-assign]
        train(tmp_path / "run", until=3)

    assert forked(work) == -9
    deadline = time.monotonic() + 10
    while Path(f"/proc/{place.read_text()}/cwd").exists():
        assert time.monotonic() < deadline, "the fork outlives its trainer"
        time.sleep(0.01)


def test_a_diagnostic_save_is_not_held_up_by_a_proof(tmp_path: Path) -> None:
    run = holdfast.Run(run_dir=tmp_path / "run", control_lease_ttl=5.0)
    run.track(model=nn.Linear(1, 1), thing=Refuses())

    def work() -> None:
        for _ in run.steps([1], until=1):
            run._session.saving.save("diagnostic", diagnostic=True)

    with pytest.raises(IncompleteStateError):
        work()
    assert checkpoints(tmp_path / "run") == []
    kept = (tmp_path / "run" / "checkpoints").glob("*/step_*")
    assert [path.name[:13] for path in kept] == ["step_00000000"]


# --- decisions ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("saved", "found", "where"),
    [
        ({"a": 1, "b": [1, {"c": 2.0}]}, {"b": [1, {"c": 2.0}], "a": 1, "more": 0}, []),
        ({"a": 1, "b": [1, {"c": 2.0}]}, {"a": 1, "b": [1, {"c": 2.5}]}, [("b", 1, "c")]),
        ({"a": 1}, {}, [("a",)]),
        ([1, 2], (1, 2), []),
        ([1, 2], [1], [()]),
        ({"a": 1}, {"a": 1.0}, []),
        ({"a": math.nan}, {"a": math.nan}, []),
        ({"t": torch.zeros(2)}, {"t": -torch.zeros(2)}, [("t",)]),
        ({"t": torch.zeros(2)}, {"t": [0.0, 0.0]}, [("t",)]),
        ({"t": torch.zeros(2)}, {"t": nn.Parameter(torch.zeros(2))}, []),
        ({"x": object()}, {"x": object()}, []),
        ({"x": object()}, {"x": 3}, [("x",)]),
    ],
)
def test_changes(saved: Any, found: Any, where: list[tuple[Any, ...]]) -> None:
    assert [change.path for change in changes(saved, found)] == where


def test_what_is_proven_of_all_ranks_is_the_least_of_them() -> None:
    assert weaker("values", "values") == "values"
    assert weaker("values", "structure") == "structure"
    assert weaker("structure", "not proven: x") == "not proven: x"
    both = [Report(parts={"a": "values", "b": "values"}), Report(parts={"a": "values", "b": "structure"})]
    assert merge(both, 7) == Proof(step=7, parts={"a": "values", "b": "structure"})
    assert merge([*both, Report(why_not="it hung")], 7) == Proof(step=7, why_not="rank 2: it hung")


def test_objects_are_put_back_to_how_they_were_at_the_start() -> None:
    class Inner:
        def __init__(self) -> None:
            self.history: list[float] = []

    class Outer(Counts):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.parts, self.model = Inner(), [Inner()], nn.Linear(1, 1)

    from holdfast.checkpoint.state.tracked import Tracked

    thing = Outer()
    tracked = Tracked()
    tracked.add("thing", thing)
    initial = Initial(tracked)
    thing.seen, thing.late = 5, 1  # type: ignore[attr-defined]
    thing.inner.history.append(1.0)
    thing.parts[0].history.append(2.0)
    model = thing.model
    initial.put_back()
    assert (thing.seen, thing.inner.history, thing.parts[0].history) == (0, [], [])
    assert not hasattr(thing, "late")
    assert thing.model is model


def test_a_manifest_of_an_earlier_release_says_nothing_of_a_proof(tmp_path: Path) -> None:
    run_with(tmp_path / "run", until=1)
    (path,) = checkpoints(tmp_path / "run")
    body = json.loads((path / "holdfast.json").read_text())["body"]
    assert body.pop("proof")["step"] == 1
    raw = json.dumps(body).encode()
    data = b'{"digest":"%b","body":%b}\n' % (manifests.digest_bytes(raw).encode(), raw)
    assert manifests.decode(data)[0].proof == Proof()
