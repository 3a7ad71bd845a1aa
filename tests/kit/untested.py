"""A plugin of pytest: what was skipped, and why, at the end of the output, where it is not overlooked."""

from __future__ import annotations

from collections import Counter

import pytest


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """A skip leaves a promise untested."""
    found = Counter(_why(report) for report in terminalreporter.stats.get("skipped", []))
    if found:
        terminalreporter.section("not tested", sep="!", red=True)
        for why, count in found.items():
            terminalreporter.line(f"{count} skipped: {why}")


def _why(report: pytest.TestReport | pytest.CollectReport) -> str:
    found = report.longrepr
    words = str(found[-1]) if isinstance(found, tuple) else str(found)
    return words.removeprefix("Skipped: ")
