"""What a step that passes when it is replayed shows, for any reports, places and states."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from holdfast.policy.results import Place, RankResult, Rerun
from holdfast.policy.verdicts import judge_replay

PLACES = st.builds(Place, st.sampled_from(["a", "b"]), st.sampled_from(["", "0", "1"]))
BAD = st.lists(
    st.builds(
        lambda rank, place: RankResult(rank=rank, node=place.node, device=place.device, reasons=["nan"]),
        st.integers(0, 3),
        PLACES,
    ),
    max_size=3,
    unique_by=lambda one: one.rank,
)


@given(
    BAD,
    st.dictionaries(st.integers(0, 3), PLACES),
    st.dictionaries(st.integers(0, 3), st.sampled_from([True, False, None])),
)
def test_only_the_same_state_on_another_device_accuses_a_device(
    bad: list[RankResult], now: dict[int, Place], same: dict[int, bool | None]
) -> None:
    findings = judge_replay(Rerun(step=7, bad=bad), now, same)
    assert len(findings) == max(1, len(bad))
    for one, finding in zip(bad, findings, strict=False):
        old = Place(one.node, one.device)
        guilty = same.get(one.rank) is True and one.rank in now and now[one.rank] != old
        assert finding.verdict == ("device" if guilty else "transient")
        assert finding.place == old
        assert "step 7" in finding.evidence
    if not bad:
        assert (findings[0].verdict, findings[0].place) == ("transient", None)
