"""A plan is made once and used while it fits; any change on any rank is seen, and nothing is left out."""

from __future__ import annotations

import dataclasses
import pickle
import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.distributed import HashStore
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType
from torch.masked import masked_tensor

import holdfast
from holdfast.checkpoint.format import fingerprint as fingerprints
from holdfast.checkpoint.format import manifest as manifests
from holdfast.checkpoint.format import metadata as metadatas
from holdfast.checkpoint.format.layout import placeholder
from holdfast.checkpoint.format.shards import ALIGNMENT, Frames, plain
from holdfast.checkpoint.format.structure import verify
from holdfast.checkpoint.save import plan as planning
from holdfast.checkpoint.save import saver as saving
from holdfast.checkpoint.save import snapshot as snapshots
from holdfast.checkpoint.save.device import Buffer
from holdfast.checkpoint.save.plan import (
    Plan,
    SnapshotPlanner,
    find_sharings,
    make_plan,
    share_out,
    signature_of,
    term,
)
from holdfast.checkpoint.save.snapshot import stage_from_host
from holdfast.errors import SaveFailedError, UsageError
from holdfast.record.group import Group
from kit.ranks.writers import ranks
from kit.tensors import same_bits
from kit.tiny import checkpoints, train

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
OWN_1 = "holdfast.own_00001."


class Changing(nn.Module):
    """Plain tensors under names, which a test changes as it likes."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.fixed = nn.Linear(5, 5)
        self.register_buffer("a", torch.arange(6.0))

    def put(self, name: str, value: torch.Tensor | None) -> None:
        if value is None:
            delattr(self, name)
        elif name in dict(self.named_buffers()):
            setattr(self, name, value)
        else:
            self.register_buffer(name, value)


def started(run_dir: Path, **more: object) -> tuple[holdfast.Run, Changing]:
    run = holdfast.Run(
        run_dir=run_dir,
        **{"checkpoint_interval": 0, "checkpoint_save_at_end": False, "checkpoint_timeout": 30.0, **more},
    )
    model = Changing()
    run.track(model=model)
    run.start()
    return run, model


def step(run: holdfast.Run) -> None:
    run.begin_step()
    run.end_step()


def plans_made(run: holdfast.Run) -> int:
    return run._session.saving._snapshots._plans


def dumped(directory: Path, rank: int, step: int, model: nn.Module) -> None:
    torch.save(model.state_dict(), directory / f"state-{rank}-{step}")


def stored(path: Path) -> dict[str, torch.Tensor]:
    """Everything that stock DCP finds in a checkpoint, loaded by stock DCP."""
    metadata = dcp.FileSystemReader(path).read_metadata()
    target: dict[str, Any] = {}
    for name, entry in metadata.state_dict_metadata.items():
        assert isinstance(entry, TensorStorageMetadata)
        target[name] = torch.zeros(entry.size, dtype=entry.properties.dtype)
    dcp.load(target, checkpoint_id=path, no_dist=True)
    return target


def check_every_checkpoint(run_dir: Path, dumps: Path, world: int = 2) -> None:
    for path in [*checkpoints(run_dir), *(run_dir / "checkpoints" / "diagnostic").glob("step_*")]:
        assert verify(path).sound, verify(path).problems
        found = stored(path)
        number = int(path.name[5:13])
        held = [torch.load(dumps / f"state-{rank}-{number}") for rank in range(world)]
        expected: dict[str, torch.Tensor] = {}
        for rank, state in enumerate(held):
            for name, value in state.items():
                first = expected.setdefault(f"model.{name}", value)
                if not same_bits(first, value):
                    expected[f"holdfast.own_{rank:05d}.model.{name}"] = value
        expected_names = {*expected, *(f"holdfast.rank_{rank:05d}" for rank in range(world))}
        assert set(found) == expected_names, path.name
        wrong = [name for name, value in expected.items() if not same_bits(found[name], value)]
        assert wrong == [], path.name


CHANGES: list[tuple[str, Callable[[Changing], None]]] = [
    ("a key is added", lambda model: model.put("new", torch.full((3,), 7.0))),
    ("its dtype changes", lambda model: model.put("new", torch.full((3,), 7, dtype=torch.int32))),
    ("its shape changes", lambda model: model.put("new", torch.full((2, 2), 7, dtype=torch.int32))),
    ("it is removed", lambda model: model.put("new", None)),
    ("a shared one changes its dtype", lambda model: model.put("a", model.a.double())),
    ("a shared one changes its shape", lambda model: model.put("a", model.a[:4].clone())),
    ("a shared one changes its contents", lambda model: model.put("a", model.a + 1)),
]
REPLANS = [2, 3, 4, 5, 6, 7, 7]
"""Changed contents of what is stored per rank already need no new plan."""


@pytest.mark.parametrize(
    ("changing", "asynchronous"),
    [
        (0, True),
        (1, False),
        pytest.param(0, False, marks=pytest.mark.drill),
        pytest.param(1, True, marks=pytest.mark.drill),
    ],
)
def test_a_change_on_one_rank_makes_all_plan_again_and_nothing_is_left_out(
    tmp_path: Path, asynchronous: bool, changing: int
) -> None:
    """Scenario 8; case Megatron-LM#4378: a cached plan left out what had been added since."""

    def work(rank: int) -> None:
        run, model = started(tmp_path / "run", checkpoint_async_save=asynchronous)
        made = []

        def save() -> int:
            step(run)
            dumped(tmp_path, rank, run.step, model)
            run.save(wait=False)
            return plans_made(run)

        assert [save(), save()] == [1, 1]
        for _, change in CHANGES:
            if rank == changing:
                change(model)
            made.append(save())
            assert save() == made[-1], "the second time, nothing has changed"
        assert made == REPLANS
        step(run)
        dumped(tmp_path, rank, run.step, model)
        run.save(diagnostic=True)
        assert save() == made[-1], "a diagnostic save in between changes nothing"
        run.finish()

    ranks(tmp_path, 2, work)
    assert len(checkpoints(tmp_path / "run")) == 2 + 2 * len(CHANGES) + 1
    check_every_checkpoint(tmp_path / "run", tmp_path)


class Growing:
    """State outside of any tensor, of another length at every save."""

    def __init__(self) -> None:
        self.saves = 0

    def state_dict(self) -> dict[str, Any]:
        self.saves += 1
        return {"noise": b"x" * (self.saves * 7919 % 30_000), "saves": [self.saves] * (self.saves % 50)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.saves = len(state["noise"])


def test_while_nothing_changes_a_save_costs_one_exchange_of_a_few_numbers(tmp_path: Path) -> None:
    """Blobs of all lengths in between: RNG, counters and tracked objects are no structure."""

    def work(rank: int) -> None:
        calls: Counter[str] = Counter()

        def counted(module: Any, name: str) -> None:
            original = getattr(module, name)

            def call(*args: Any, **kwargs: Any) -> Any:
                calls[name] += 1
                return original(*args, **kwargs)

            setattr(module, name, call)

        for module, name in [(snapshots, "add_up"), (planning, "gather"), (planning, "scatter")]:
            counted(module, name)
        for name in ("all_reduce", "gather_object", "scatter_object_list", "all_gather_object", "barrier"):
            counted(dist, name)
        run = holdfast.Run(run_dir=tmp_path / "run", checkpoint_interval=0, checkpoint_save_at_end=False,
                           checkpoint_async_save=True, checkpoint_when_busy="wait")  # fmt: skip
        model = Changing()
        run.track(model=model, growing=Growing())
        run.start()
        calls.clear()
        for number in range(1, 31):
            torch.manual_seed(number)
            step(run)
            run.save(wait=False)
            run._session.saving._saver.wait(30.0)  # type: ignore[union-attr]
            run._session.saving.at_boundary()  # type: ignore[union-attr]
            if number == 3:
                settled, calls = plans_made(run), Counter()
        assert plans_made(run) == settled <= 3
        assert calls == {"add_up": 27, "all_reduce": 2 * 27}, "one a save, and one a step for its loss"
        run.finish()

    ranks(tmp_path, 2, work)
    assert len(checkpoints(tmp_path / "run")) == 30


def test_statistics_that_begin_to_differ_after_the_first_save_come_back_to_each_rank(tmp_path: Path) -> None:
    """BatchNorm's are alike at first, so one rank stores them for both; then each rank goes its own way."""

    def work(rank: int, *, resume: bool) -> None:
        run, model = started(tmp_path / "run", checkpoint_async_save=True)
        if not resume:
            step(run)
            run.save()
            assert plans_made(run) == 1
            model.a.fill_(100.0 + rank)
            step(run)
            run.save()
            assert plans_made(run) == 2
            model.a.fill_(200.0 + rank)
            step(run)
            run.save()
            assert plans_made(run) == 2, "each rank stores its own by now"
        assert model.a.tolist() == [200.0 + rank] * 6
        run.finish()

    ranks(tmp_path, 2, lambda rank: work(rank, resume=False))
    ranks(tmp_path, 2, lambda rank: work(rank, resume=True))
    found = stored(checkpoints(tmp_path / "run")[0])
    assert found["model.a"][0] == 200.0
    assert found[f"{OWN_1}model.a"][0] == 201.0


# --- a rank that cannot take part ---------------------------------------------------------------------------


@pytest.mark.parametrize("asynchronous", [False, True])
def test_ranks_that_save_different_steps_are_all_told(tmp_path: Path, asynchronous: bool) -> None:
    """Also where one of them plans its first save ahead, after its second step."""

    def work(rank: int) -> None:
        # Without checks, which would tell them apart at the end of the step already.
        off = {"validation_check_for_nan_in_loss": False}
        run, _ = started(tmp_path / "run", checkpoint_async_save=asynchronous, **off)
        step(run)
        if asynchronous:
            with pytest.raises(UsageError, match="Every rank must save at the same step"):
                (step if rank == 1 else holdfast.Run.save)(run)
            if rank == 0:
                run._session.saving._steps += 1  # it does not meet the other at the boundary of step 2
        if rank == 1 and not asynchronous:
            step(run)
        with pytest.raises(UsageError, match="Every rank must save at the same step"):
            run.save()
        if rank == 0:
            step(run)
        assert run.save().step == 2
        run.finish()

    ranks(tmp_path, 2, work)
    assert [path.name[:13] for path in checkpoints(tmp_path / "run")] == ["step_00000002"]
    assert not list((tmp_path / "run" / "checkpoints" / ".staging").iterdir())


class Failing:
    def __init__(self) -> None:
        self.fails = False

    def state_dict(self) -> dict[str, Any]:
        if self.fails:
            raise ValueError("no state today")
        return {"x": 1}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        del state


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("failing", [0, 1])
def test_a_state_that_cannot_be_taken_on_one_rank_is_the_same_error_on_all(
    tmp_path: Path, asynchronous: bool, failing: int
) -> None:
    def work(rank: int) -> None:
        run = holdfast.Run(run_dir=tmp_path / "run", checkpoint_interval=0, checkpoint_save_at_end=False,
                           checkpoint_async_save=asynchronous)  # fmt: skip
        thing = Failing()
        run.track(model=nn.Linear(2, 2), thing=thing)
        run.start()
        for broken in (False, True, False):
            thing.fails = broken and rank == failing
            step(run)
            if broken:
                told = rf"rank {failing}: track\(thing=…\), in its state_dict: ValueError: no state today"
                with pytest.raises(SaveFailedError, match=told):
                    run.save()
            else:
                run.save()
        run.finish()

    ranks(tmp_path, 2, work)
    steps = [int(path.name[5:13]) for path in checkpoints(tmp_path / "run")]
    assert steps == [3, 1]


@pytest.mark.parametrize("failing", [0, 1])
def test_a_plan_that_fails_on_one_rank_fails_for_all_and_the_next_save_works(
    tmp_path: Path, failing: int
) -> None:
    def work(rank: int) -> None:
        run, _ = started(tmp_path / "run", checkpoint_async_save=True)
        step(run)
        with pytest.MonkeyPatch.context() as patch:
            if rank == failing:

                def broken(self: SnapshotPlanner, digests: Any) -> Any:
                    raise RuntimeError("cannot plan")

                patch.setattr(SnapshotPlanner, "local_plan", broken)
            with pytest.raises(SaveFailedError, match=f"rank {failing} could not plan.*cannot plan"):
                run.save()
        step(run)
        run.save()
        run.finish()

    ranks(tmp_path, 2, work)
    (saved,) = checkpoints(tmp_path / "run")
    assert verify(saved).sound


# --- the same bytes, whichever way --------------------------------------------------------------------------


def shards(run_dir: Path) -> dict[str, bytes]:
    return {
        f"{path.name[:13]}/{shard.name}": shard.read_bytes()
        for path in checkpoints(run_dir)
        for shard in sorted(path.glob("*.distcp"))
    }


@pytest.mark.parametrize("world", [1, 2])
def test_foreground_and_background_saves_of_one_state_are_the_same_bytes(tmp_path: Path, world: int) -> None:
    for asynchronous in (False, True):
        run_dir = tmp_path / f"run-{asynchronous}"
        if world == 1:
            train(run_dir, until=6, checkpoint_async_save=asynchronous)
        else:
            ranks(tmp_path, 2, lambda rank, d=run_dir, a=asynchronous: _both(d, a))  # type: ignore[misc]
    one, other = shards(tmp_path / "run-False"), shards(tmp_path / "run-True")
    assert len(one) == 2 * world
    assert one == other


def _both(run_dir: Path, asynchronous: bool) -> None:
    train(run_dir, until=6, checkpoint_async_save=asynchronous)


# --- the pure parts -----------------------------------------------------------------------------------------

Held = list[dict[str, str]]
held_by_ranks = st.lists(
    st.dictionaries(st.sampled_from("abcdef"), st.sampled_from(["x:1", "x:2", "m:3"]), max_size=6),
    min_size=2,
    max_size=6,
)


def total(sharings: list[Any], held: Held) -> int:
    mine = share_out(sharings, len(held))
    return sum(term(mine[rank], digests) for rank, digests in enumerate(held)) % (1 << 64)


@given(held_by_ranks)
def test_what_ranks_hold_alike_adds_up_to_nothing(held: Held) -> None:
    sharings = find_sharings(held)
    assert total(sharings, held) == 0
    seen: Counter[str] = Counter(name for sharing in sharings for name in sharing.names)
    assert all(count == 1 for count in seen.values()), "each name is shared once"
    for sharing in sharings:
        assert len(sharing.ranks) > 1
        assert list(sharing.ranks) == sorted(sharing.ranks)
        for name in sharing.names:
            holders = [rank for rank, digests in enumerate(held) if name in digests]
            alike = [r for r in holders if held[r][name] == held[holders[0]][name]]
            assert sharing.ranks == tuple(alike)


@given(held_by_ranks, st.data())
def test_any_change_on_one_rank_shows(held: Held, data: st.DataObject) -> None:
    sharings = find_sharings(held)
    shared = [(rank, name) for sharing in sharings for rank in sharing.ranks for name in sharing.names]
    if not shared:
        return
    rank, name = data.draw(st.sampled_from(shared))
    changed = [dict(digests) for digests in held]
    changed[rank][name] = "x:changed"
    assert total(sharings, changed) != 0


@given(held_by_ranks, st.data())
def test_the_same_change_on_all_ranks_that_share_it_does_not(held: Held, data: st.DataObject) -> None:
    sharings = find_sharings(held)
    if not sharings:
        return
    sharing = data.draw(st.sampled_from(sharings))
    changed = [dict(digests) for digests in held]
    for rank in sharing.ranks:
        changed[rank][sharing.names[0]] = "x:changed"
    assert total(sharings, changed) == 0


def plan_for(state: dict[str, Any]) -> Plan:
    planner = SnapshotPlanner(state, 0, is_coordinator=True)
    return make_plan(Group(0, 1, HashStore(), None), 1, planner, signature_of(planner, 1), {}, Frames())


@given(
    st.dictionaries(
        st.text("abc._0", min_size=1, max_size=5),
        st.tuples(
            st.sampled_from([torch.float32, torch.bfloat16, torch.bool, torch.int64]),
            st.lists(st.integers(0, 40), max_size=3).map(tuple),
        ),
        min_size=1,
        max_size=12,
    )
)
def test_a_layout_has_no_gap_no_overlap_and_aligned_bytes(kinds: dict[str, Any]) -> None:
    state = {name: torch.zeros(shape, dtype=dtype) for name, (dtype, shape) in kinds.items()}
    plan = plan_for(state)
    assert sorted(item.name for item in plan.layout.items) == sorted(state)
    at = 0
    for item, frame in zip(plan.layout.items, plan.frames, strict=True):
        assert item.offset == at
        assert item.raw_offset == at + len(frame.before)
        assert item.raw_length == state[item.name].nbytes
        assert item.raw_length == 0 or item.raw_offset % ALIGNMENT == 0
        at += item.length
    assert at == plan.layout.size


def test_signatures_tell_every_difference_of_structure_and_none_of_contents() -> None:
    def signature(world: int = 2, **state: torch.Tensor) -> str:
        return signature_of(SnapshotPlanner(dict(state), 0, is_coordinator=True), world)

    base = signature(a=torch.zeros(3), b=torch.ones(2, 2))
    assert signature(a=torch.ones(3), b=torch.zeros(2, 2)) == base
    others = [
        signature(3, a=torch.zeros(3), b=torch.ones(2, 2)),
        signature(a=torch.zeros(3)),
        signature(a=torch.zeros(3), c=torch.ones(2, 2)),
        signature(a=torch.zeros(3), b=torch.ones(4)),
        signature(a=torch.zeros(3), b=torch.ones(2, 2, dtype=torch.float64)),
        signature(a=torch.zeros(3), b=torch.ones(2, 2), c=torch.zeros(0)),
        signature(a=torch.zeros(3, requires_grad=True), b=torch.ones(2, 2)),
    ]
    assert len({base, *others}) == len(others) + 1


def test_a_name_that_would_be_taken_for_the_checkpoints_own_is_refused() -> None:
    with pytest.raises(ValueError, match="rename it"):
        plan_for({placeholder(): torch.zeros(1)})


def test_names_are_those_that_dcp_gives() -> None:
    """Its own way to them takes a tenth of a second for 10,000 tensors, at every save."""
    one, two = torch.zeros(1), nn.Parameter(torch.zeros(2))
    state = {
        "model": {"a.b": one, "c": two, "wrapped": {"inner": {"deep": one}}},
        "optimizer": {"state": {}},
        "holdfast": {"rank_00000": one},
    }
    planner = SnapshotPlanner(state, 0, is_coordinator=True)
    names, mappings = flatten_state_dict(state)
    assert list(planner.state_dict.items()) == list(names.items())
    plan = planner.local_plan({})
    assert plan.planner_data == mappings
    assert [item.index.fqn for item in plan.items] == list(names)
    with pytest.raises(ValueError, match=re.escape("model.a.b")):
        SnapshotPlanner({"model": {"a.b": one, "a": {"b": one}}}, 0, is_coordinator=True)
    listed = SnapshotPlanner({"model": {"list": [one, two]}}, 0, is_coordinator=True)
    assert list(listed.state_dict) == ["model.list.0", "model.list.1"]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("made", "told"),
    [
        (lambda: torch.eye(2).to_sparse(), "a Tensor of layout torch.sparse_coo"),
        (lambda: torch.eye(2).to_sparse_csr(), "a Tensor of layout torch.sparse_csr"),
        (
            lambda: torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8),
            "a Tensor of type torch.qint8",
        ),
        (
            lambda: masked_tensor(torch.ones(2), torch.tensor([True, False])),
            "a MaskedTensor, which has no bytes",
        ),
    ],
)
def test_what_cannot_be_stored_by_its_bytes_is_named_with_what_it_is(
    tmp_path: Path, made: Callable[[], torch.Tensor], told: str
) -> None:
    model = nn.Module()
    model.register_buffer("table", made())
    run = holdfast.Run(run_dir=tmp_path / "run", checkpoint_interval=0, checkpoint_save_at_end=False)
    run.track(model=model)
    run.start()
    step(run)
    with pytest.raises(SaveFailedError, match=rf"model\.table: .*it is {told}"):
        run.save()
    run.close()


def test_tensors_of_one_name_that_ranks_hold_apart_are_compared_with_the_lowest_ranks() -> None:
    """Two halves each on two ranks; then as replicas on others, as something else there, and a plain one."""

    def rank(family: str, key: str, digest: str) -> planning.Holdings:
        if not family:
            return planning.Holdings({key: digest}, {})
        return planning.Holdings({key: digest} if key else {}, {"w": family}, {key: "w"})

    together = [rank("01", "w[0]", "a"), rank("01", "w[2]", "b")]
    same, other = rank("23", "w[2]", "b"), rank("23", "w[0]", "c")
    assert planning.contested_names(together) == frozenset()
    assert planning.contested_names([*together, same, other]) == {"w"}
    everyone = [*together, same, other, rank("45", "w[1]", "d"), rank("45", "", ""), rank("", "w", "e")]
    differing = planning.differing_names(everyone, {"w"})
    assert [rank for rank, names in differing.items() if names] == [3, 4, 5, 6]
    differing = planning.differing_names([rank("", "w", "e"), *together], {"w"})
    assert [rank for rank, names in differing.items() if names] == [1, 2]
    replicas = [*together, rank("01", "", ""), same, rank("23", "w[0]", "a"), rank("23", "", "")]
    assert not any(planning.differing_names(replicas, {"w"}).values()), "nor do those that hold nothing of it"


@pytest.mark.parametrize("threads", [1, 4])
def test_small_and_large_tensors_are_staged_alike(threads: int) -> None:
    base = torch.randn(20, 30)
    state = {
        **{f"small {n:03d}": torch.randn(256) for n in range(300)},
        "parameter": nn.Parameter(torch.randn(7)),
        "transposed": base.t(),
        "a column": base[:, 3],
        "conjugated": torch.randn(5, dtype=torch.complex64).conj(),
        "negated": torch.randn(5, dtype=torch.complex64).conj().imag,
        "zero-dimensional": torch.tensor(3.5, dtype=torch.bfloat16),
        "empty": torch.empty(0, 3),
        "large": torch.randn(100_000),
        "just small": torch.randn(fingerprints.SMALL // 4),
    }
    plan = plan_for(state)
    buffer = Buffer(0)
    try:
        buffer.prepare(plan)
        tensors = [state[item.name].detach() for item in plan.layout.items]
        known = {1: "x:known", len(tensors) - 1: "x:known"}
        elsewhere = [*tensors[:5], tensors[5].to("meta"), *tensors[6:]]
        prints = stage_from_host(buffer, plan, elsewhere, known, threads)
        for at, (item, tensor) in enumerate(zip(plan.layout.items, tensors, strict=True)):
            staged = buffer.bytes[item.raw_offset : item.raw_offset + item.raw_length].tobytes()
            raw = plain(tensor).numpy().tobytes()
            assert (staged == raw) is (at != 5), item.name
            if at != 5:
                assert prints[at] == known.get(at, fingerprints.of_bytes(raw, "x")), item.name
        assert prints.keys() == set(range(len(tensors))) - {5}
        tensors[7] = torch.zeros(257)
        with pytest.raises(SaveFailedError, match="small 007 has 1028 bytes, 1024 were planned"):
            stage_from_host(buffer, plan, tensors, known, threads)
    finally:
        buffer.close()


# --- size ---------------------------------------------------------------------------------------------------


def of_many(entries: int, world: int) -> list[SavePlan]:
    """What so many ranks would send, each with a part of every entry: no rank runs."""
    plans = []
    for rank in range(world):
        items = []
        for number in range(entries):
            offsets, properties = torch.Size([2 * rank, 0]), TensorProperties(torch.float32)
            chunk = ChunkStorageMetadata(offsets, torch.Size([2, 3]))
            data = TensorWriteData(chunk, properties, torch.Size([2 * world, 3]))
            items.append(
                WriteItem(MetadataIndex(f"w{number}", offsets), WriteItemType.SHARD, tensor_data=data)
            )
        own = f"holdfast.rank_{rank:05d}"
        data = TensorWriteData(
            ChunkStorageMetadata(torch.Size([0]), torch.Size([9])),
            TensorProperties(torch.uint8),
            torch.Size([9]),
        )
        items.append(WriteItem(MetadataIndex(own, torch.Size([0])), WriteItemType.TENSOR, tensor_data=data))
        paths = {item.index.fqn: ("model", item.index.fqn) for item in items}
        plans.append(
            SavePlan(items, storage_data=planning.Holdings({"shared": "x:1"}, {}), planner_data=paths)
        )
    return plans


def planned(entries: int, world: int) -> tuple[list[Any], Any, int]:
    """What each rank is told, what rank 0 declares, and how many names DCP has looked up meanwhile."""
    looked = 0

    class Counting(dict[str, Any]):
        def __getitem__(self, key: str) -> Any:
            nonlocal looked
            looked += 1
            return super().__getitem__(key)

    plans = [
        dataclasses.replace(plan, planner_data=Counting(plan.planner_data))
        for plan in of_many(entries, world)
    ]
    planner = SnapshotPlanner({"model": {"x": torch.zeros(1)}}, 0, is_coordinator=True)
    told, declared = planning._plan_for_all(planner, plans, Frames())
    return told, declared, looked


def test_a_rank_is_told_of_its_own_part_alone_however_many_there_are() -> None:
    few, many = planned(20, 4), planned(20, 64)
    for told, declared, _ in (few, many):
        for rank, (plan, shares) in enumerate(told):
            assert {item.index.fqn for item in plan.items} == {
                *(f"w{number}" for number in range(20)), f"holdfast.rank_{rank:05d}"
            }  # fmt: skip
            assert plan.planner_data is None
            assert [share.names for share in shares] == [("shared",)]
        read = metadatas.parse(declared.metadata)
        assert len(read.storage) == 21 * len(told)
        assert len(read.paths) == 20 + len(told)
        sizes = {file.path: file.size for files in declared.ranks for file in files}
        assert metadatas.completeness(read, sizes) == []
    largest = [max(len(pickle.dumps(one)) for one in told) for told, _, _ in (few, many)]
    assert largest[1] < 1.05 * largest[0]
    parts = [len(str(declared.ranks[-1])) for _, declared, _ in (few, many)]
    assert parts[1] < 1.05 * parts[0]
    assert len(many[1].metadata) < 1.1 * 16 * len(few[1].metadata)
    # Looked up rank by rank, the names of 64 ranks would be 256 times those of 4.
    assert many[2] <= 16 * max(1, few[2])


def test_an_item_of_two_ranks_is_found_without_counting_each(monkeypatch: pytest.MonkeyPatch) -> None:
    plans = of_many(3, 4)
    metadata = Metadata({})
    with pytest.raises(SaveFailedError, match=r"w0 at torch.Size\(\[0, 0\]\) would be stored twice"):
        planning._check_all_is_laid_out(metadata, [plans[0], plans[1], plans[0]])


@pytest.mark.parametrize(
    ("where", "limit", "said"),
    [
        (manifests, "MAX_MANIFEST_BYTES", "the manifest would be"),
        (metadatas, "MAX_METADATA_BYTES", "at most 1 are"),
    ],
)
def test_what_could_not_be_read_back_is_refused_before_anything_is_staged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: Any, limit: str, said: str
) -> None:
    monkeypatch.setattr(where, limit, 1)
    staged: list[Any] = []
    monkeypatch.setattr(snapshots, "stage_from_host", lambda *args, **more: staged.append(args))
    monkeypatch.setattr(saving, "write_shards", lambda *args, **more: staged.append(args))
    with pytest.raises(SaveFailedError, match=said):
        train(tmp_path / "run", until=4)
    assert staged == []
    assert checkpoints(tmp_path / "run") == []
    assert list((tmp_path / "run" / "checkpoints").glob(".staging/*")) == []
