"""TODO"""

from __future__ import annotations

from typing import TYPE_CHECKING

from holdfast.base.fronts import offers

if TYPE_CHECKING:
    from holdfast.checkpoint.choose.ladder import BAD as BAD
    from holdfast.checkpoint.choose.ladder import FRESH as FRESH
    from holdfast.checkpoint.choose.ladder import LOCAL as LOCAL
    from holdfast.checkpoint.choose.ladder import NO_RUNG as NO_RUNG
    from holdfast.checkpoint.choose.ladder import PROBE_SIZE as PROBE_SIZE
    from holdfast.checkpoint.choose.ladder import REFUSED as REFUSED
    from holdfast.checkpoint.choose.ladder import REFUSED_STANDINGS as REFUSED_STANDINGS
    from holdfast.checkpoint.choose.ladder import USED as USED
    from holdfast.checkpoint.choose.ladder import RungOutlook as RungOutlook
    from holdfast.checkpoint.choose.ladder import first_of as first_of
    from holdfast.checkpoint.choose.ladder import highest_committed_step as highest_committed_step
    from holdfast.checkpoint.choose.ladder import look_at as look_at
    from holdfast.checkpoint.choose.ladder import take_pinned as take_pinned
    from holdfast.checkpoint.choose.load import LoadedState as LoadedState
    from holdfast.checkpoint.choose.plain import is_plain_root as is_plain_root
    from holdfast.checkpoint.choose.reader import VerifyingReader as VerifyingReader
    from holdfast.checkpoint.choose.resolver import Resolution as Resolution
    from holdfast.checkpoint.choose.resolver import checkpoint_root as checkpoint_root
    from holdfast.checkpoint.choose.resolver import resolve_plain as resolve_plain
    from holdfast.checkpoint.choose.resolver import resolve_resume as resolve_resume
    from holdfast.checkpoint.choose.resolver import run_of_root as run_of_root
    from holdfast.checkpoint.choose.resume import Proposal as Proposal
    from holdfast.checkpoint.choose.resume import ResumeDecision as ResumeDecision
    from holdfast.checkpoint.choose.resume import Resumer as Resumer
    from holdfast.checkpoint.choose.resume import open_at_start as open_at_start
    from holdfast.checkpoint.choose.suspicion import situation_of as situation_of
    from holdfast.checkpoint.choose.suspicion import still_open as still_open
    from holdfast.checkpoint.choose.suspicion import write_down as write_down
    from holdfast.checkpoint.choose.suspicion import write_findings as write_findings
else:
    __getattr__ = offers(__name__)
