"""That what is skipped is told at the end."""

from __future__ import annotations

from pathlib import Path

import pytest

from kit.harness import REPO, finish, python

SKIPPING = """
import pytest

@pytest.fixture(scope="session")
def needed():
    pytest.skip("NO SUCH MACHINE: its promise")

@pytest.mark.usefixtures("needed")
@pytest.mark.parametrize("case", [1, 2])
def test_needs_it(case): ...

@pytest.mark.skipif(True, reason="nobody is root")
def test_root(): ...

def test_well(): ...
"""


@pytest.mark.drill
def test_each_reason_of_a_skip_is_told_once_in_the_summary(tmp_path: Path) -> None:
    (tmp_path / "test_skipping.py").write_text(SKIPPING)
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    command = [*python("-m", "pytest"), "-p", "kit.untested", "-n", "2", "test_skipping.py"]
    done = finish(command, cwd=tmp_path, env={"PYTHONPATH": str(REPO / "tests")})
    assert done.code == 0, done.text
    summary = done.out.partition("not tested")[2]
    assert "2 skipped: NO SUCH MACHINE: its promise" in summary, done.text
    assert "1 skipped: nobody is root" in summary, done.text
