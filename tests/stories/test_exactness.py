"""Exact, or refused by name: every kind of training in docs/guides/exactness.md against the plain torch loop.

`make test` runs a fixed core, a diagonal through kinds, data, ways of saving, shapes of the loop, kills and
numbers of ranks. `make drill` runs every kind with every way of saving, some under `holdfast run`, and draws
combinations at random for some minutes: EXACTNESS_SEED repeats a draw, EXACTNESS_SECONDS is its time.
"""

from __future__ import annotations

import itertools
import os
import random
import re
import shutil
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import hypothesis
import pytest
from hypothesis import HealthCheck, Phase
from hypothesis import strategies as st

import holdfast
from kit.harness import REPO, finish
from kit.harness import holdfast as command
from kit.tiny import checkpoints, die, forked, train
from kit.worlds.exactness import MODES, Case, Inexact, Kill, Lab, Record, compare
from kit.worlds.kinds import ALONE, KINDS, SLOW_DATA, Kind

PAGE = REPO / "docs" / "guides" / "exactness.md"


@pytest.fixture(scope="module")
def lab() -> Iterator[Lab]:
    """In memory: every fsync of a save on a disk would take longer than the training."""
    place = Path("/dev/shm") / f"holdfast-exact-{uuid.uuid4().hex[:8]}"
    made = Lab(place)
    yield made
    made.close()
    shutil.rmtree(place, ignore_errors=True)


def case(name: str, **facts: Any) -> Case:
    """A case of a kind, with what that kind needs."""
    kind = KINDS[name]
    needed = dict(kind.case)
    if "kills" in needed:
        needed["kills"] = (Kill(*needed["kills"]),)
    if kind.data:
        needed["data"] = kind.data[0]
    return Case(name, **{"worlds": (kind.world,), **facts, **needed})


def failures(tries: list[Callable[[], object]]) -> list[str]:
    """All of them are tried, whatever the first ones give."""
    found = []
    for attempt in tries:
        try:
            attempt()
        except AssertionError as error:
            found.append(str(error))
    return found


# --- the page -----------------------------------------------------------------------------------------------


def rows() -> dict[str, str]:
    """Kind → outcome, as the page has them."""
    found = re.findall(
        r"^\| ([^|]+) \| (exact|refused|not seen|to be shown on a GPU) \|", PAGE.read_text(), re.MULTILINE
    )
    assert len({name for name, _ in found}) == len(found), "a kind has two rows"
    return dict(found)


def test_the_page_has_a_row_for_every_kind_and_no_other() -> None:
    wanted = {
        kind.name: "to be shown on a GPU" if kind.needs == "gpu" else kind.outcome for kind in KINDS.values()
    }
    assert rows() == wanted


def test_the_page_quotes_every_refusal() -> None:
    page = PAGE.read_text()
    for kind in KINDS.values():
        if kind.outcome == "refused":
            assert kind.words in page, f"{kind.name}: {kind.words}"


# --- the comparison -----------------------------------------------------------------------------------------


def record(**changes: Any) -> Record:
    step = {
        "step": 1,
        "loss": ["0x1p+0"],
        "ids": [1],
        "rates": ["0x1p-3"],
        "rng": "a",
        **changes.pop("step", {}),
    }
    final = {"model.weight": "f", "rng.torch": "r", **changes}
    return Record({1: {0: step}}, [final], [[0]])


@pytest.mark.parametrize(
    "changes",
    [{"step": {"loss": ["0x1.0000000000001p+0"]}}, {"step": {"ids": [2]}}, {"step": {"rates": ["0x1p-4"]}},
     {"step": {"rng": "b"}}, {"model.weight": "g"}, {"rng.torch": "s"}, {"optimizer.state": "more"}],
)  # fmt: skip
def test_whatever_differs_is_found(changes: dict[str, Any]) -> None:
    compare(Case("AdamW"), record(), record())
    with pytest.raises(Inexact, match="1 differences"):
        compare(Case("AdamW"), record(), record(**changes))


def test_a_case_is_told_in_words() -> None:
    told = case("DDP", mode="local", kills=(Kill("save", 3, 9), Kill("load", 0, 2))).words()
    assert told == (
        "DDP; data: distributed; local saves every 3 steps; loop: steps; 12 steps; ranks: 2; killed attempt "
        "1: at file operation 9 of the save after step 3 or later; attempt 2: at file 2 of the load"
    )


# --- trained ------------------------------------------------------------------------------------------------

CORE: list[Case] = [
    # Every shape of the loop, way of saving, and place of a kill; the epoch ends after step 5.
    case("BatchNorm and dropout", kills=(Kill("save", 3, 11), Kill("after", 5), Kill("before", 6))),
    case("SWA with SWALR", shape="epochs", kills=(Kill("before", 6), Kill("load", 0, 1), Kill("middle", 10))),
    case("GradScaler that skips steps", shape="compute", mode="asynchronous", kills=(Kill("everything", 7),)),
    case("a module with extra state", mode="local", kills=(Kill("everything", 7), Kill("after", 9))),
    case("an object of the script's own with a state_dict", mode="asynchronous",
         kills=(Kill("writers", 4), Kill("before", 9))),
    case("accumulation inside a step", shape="callback", kills=(Kill("middle", 7),)),
    case("accumulation inside a step, a batch for each piece", data="augmented", kills=(Kill("middle", 5),)),
    # Data, each with a kind that is worth a look.
    case("SequentialLR", data="with a generator"),
    case("ChainedScheduler of SequentialLR", data="batch sampler"),
    case("EMA in fp32 of a bf16 model", data="weighted", mode="local"),
    case("python's and numpy's random numbers in the step", data="augmented", shape="callback"),
    case("parameter groups with settings of their own", data="set_epoch", shape="epochs"),
    case("convolutions in channels_last", data="stream", mode="asynchronous"),
    case("spectral_norm", data="global"),
    # Optimizers, models and gradients that were different once, or might be.
    case("LBFGS"),
    case("SparseAdam, with Adam for the rest"),
    case("AdamW fused"),
    case("an optimizer around another, with its own state_dict"),
    case("an optimizer with numbers and lists in its state"),
    case("one optimizer over two models"),
    case("tied weights"),
    case("LoRA: an optimizer that was given the frozen weights too", mode="asynchronous"),
    case("master weights in fp32 under a bf16 model", mode="local"),
    case("accumulation over several steps"),
    case("gradients that the next step would throw away"),
    # Several ranks.
    case("DDP", kills=(Kill("save", 3, 7),)),
    case("FSDP2 at another number of ranks", worlds=(2, 1, 2), kills=(Kill("before", 5), Kill("after", 8))),
]  # fmt: skip


@pytest.mark.timeout(900)
def test_the_core_is_exact(lab: Lab) -> None:
    """Bitwise equal to the plain torch loop that was never interrupted, and without Holdfast."""
    exact = [case for case in CORE if KINDS[case.kind].outcome == "exact"]
    found = failures([lambda one=one: lab.check(one) for one in exact])
    assert not found, f"{len(found)} of {len(exact)}:\n" + "\n\n".join(found)


def check_refused(lab: Lab, kind: Kind, mode: str = "foreground") -> None:
    """It ends by itself, with words and a documented code, at the save that would have been worthless."""
    found = lab.refusal(case(kind.name, mode=mode, kills=()))
    assert 70 not in found.codes[-1], f"{kind.name}: {found.codes}\n{found.told}"
    assert 0 not in found.codes[-1], f"{kind.name} was not refused"
    assert kind.words in found.told, f"{kind.name}: {found.told}"
    assert max(found.steps, default=0) <= kind.by, f"{kind.name} went on to step {max(found.steps)}"


def refused() -> list[Kind]:
    return [kind for kind in KINDS.values() if kind.outcome == "refused" and not kind.needs]


@pytest.mark.timeout(600)
def test_what_is_not_exact_is_refused_by_name(lab: Lab) -> None:
    found = failures([lambda kind=kind: check_refused(lab, kind) for kind in refused()])
    assert not found, "\n\n".join(found)


@pytest.mark.parametrize("name", [kind.name for kind in KINDS.values() if kind.outcome == "not seen"])
def test_what_a_script_forgot_to_track_shows_in_the_comparison(lab: Lab, name: str) -> None:
    """Nobody but the script can know of it; and so the comparison is seen to find something in a real run."""
    with pytest.raises(Inexact, match="loss"):
        lab.check(case(name))


def test_a_user_proves_it_by_two_runs_and_a_comparison(tmp_path: Path) -> None:
    """As docs/guides/exactness.md says; test_ckpt_diff.py has what differs."""

    def killed(step: int, run: holdfast.Run) -> None:
        if step == 5:
            die()

    train(tmp_path / "whole")
    assert forked(lambda: train(tmp_path / "killed", at_step=killed) and None) == -9
    train(tmp_path / "killed")
    whole, again = (str(checkpoints(tmp_path / name)[0]) for name in ("whole", "killed"))
    same = finish(command("ckpt", "diff", whole, again), cwd=tmp_path)
    assert same.code == 0, same.text


# --- drills -------------------------------------------------------------------------------------------------


@pytest.mark.drill
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("mode", MODES)
def test_every_kind_is_exact_or_refused(lab: Lab, mode: str) -> None:
    exact = [kind for kind in KINDS.values() if kind.outcome == "exact" and kind.needs != "gpu"]
    tries = [lambda kind=kind: lab.check(case(kind.name, mode=mode)) for kind in exact]
    tries += [lambda kind=kind: check_refused(lab, kind, mode) for kind in refused()]
    found = failures(tries)
    assert not found, f"{len(found)} of {len(tries)}:\n" + "\n\n".join(found)


@pytest.mark.drill
@pytest.mark.timeout(900)
@pytest.mark.parametrize("mode", MODES)
def test_every_kind_of_data_is_exact(lab: Lab, mode: str) -> None:
    kills = (Kill("before", 5), Kill("before", 6), Kill("after", 9))
    cases = [Case("BatchNorm and dropout", data, mode, kills=kills) for data in ALONE]
    found = failures([lambda one=one: lab.check(one) for one in cases])
    assert not found, "\n\n".join(found)


@pytest.mark.drill
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "one",
    [
        case("BatchNorm and dropout", kills=(Kill("after", 5), Kill("load", 0, 2))),
        case("DDP", mode="asynchronous", kills=(Kill("middle", 8),)),
        case("FSDP2", mode="local", kills=(Kill("before", 8), Kill("save", 9, 3))),
    ],
    ids=lambda one: one.kind,
)
def test_restarted_by_the_launcher_it_is_exact(lab: Lab, one: Case) -> None:
    assert len(lab.check(one, launched=True).codes) > 1, "it was killed"


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Any combination that may be. What is simpler comes first, so that a failure becomes as simple."""
    names = [kind.name for kind in KINDS.values() if kind.outcome == "exact" and not kind.needs]
    kind = KINDS[draw(st.sampled_from(sorted(names, key=lambda name: (name != "AdamW", KINDS[name].world))))]
    fast = [data for data in kind.data or ALONE if data not in SLOW_DATA]
    slow = [data for data in kind.data or ALONE if data in SLOW_DATA]
    data = draw(st.sampled_from(slow if slow and draw(st.integers(0, 7)) == 7 else fast))
    shape = draw(st.sampled_from(kind.shapes))
    until = draw(st.integers(4, 13))
    steps, points = st.integers(1, until), st.integers(0, 30)
    kill = st.one_of(
        st.builds(Kill, st.sampled_from(("before", "middle", "after", "everything", "writers")), steps),
        st.builds(Kill, st.just("save"), steps, points),
        st.builds(Kill, st.just("load"), st.just(0), st.integers(0, 6)),
    )
    worlds: tuple[int, ...] = (kind.world,)
    if "another number" in kind.name:
        worlds = tuple(draw(st.lists(st.integers(1, 2), min_size=1, max_size=3)))
    return Case(
        kind.name,
        data,
        draw(st.sampled_from(MODES)),
        shape,
        draw(st.integers(1, 5)),
        tuple(draw(st.lists(kill, min_size=1, max_size=3))),
        worlds,
        until,
    )


@pytest.mark.drill
@pytest.mark.timeout(1500)
def test_combinations_drawn_at_random_are_exact(lab: Lab) -> None:
    """A failure is told in words, as simple as it could be made, with the seed that draws it again."""
    first = int(os.environ.get("EXACTNESS_SEED", random.SystemRandom().randrange(2**32)))
    end = time.monotonic() + float(os.environ.get("EXACTNESS_SECONDS", "480"))
    tried = 0
    for seed in itertools.count(first):
        if time.monotonic() >= end:
            break
        tried += draw(lab, seed, until=end)
    print(f"EXACTNESS_SEED={first}: {tried} combinations, all exact")


def draw(lab: Lab, seed: int, *, until: float, count: int = 20) -> int:
    """Try some combinations; how many. One that fails is made simpler for a while, and told."""
    failed: dict[Case, Inexact] = {}
    seen: set[Case] = set()

    @hypothesis.seed(seed)
    @hypothesis.settings(
        max_examples=count,
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
        phases=(Phase.generate, Phase.shrink),
    )
    @hypothesis.given(cases())
    def try_out(drawn: Case) -> None:
        if drawn in failed:
            raise failed[drawn]
        if drawn in seen or time.monotonic() > (until + 180 if failed else until):
            return
        seen.add(drawn)
        try:
            lab.check(drawn)
        except Inexact as error:
            failed[drawn] = error
            raise

    try:
        try_out()
    except Inexact as error:
        told = f"EXACTNESS_SEED={seed}, the simplest of {len(failed)} combinations that are not exact:"
        pytest.fail(f"{told}\n{error}", pytrace=False)
    return len(seen)
