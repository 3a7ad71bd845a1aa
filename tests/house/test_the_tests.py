"""The tests themselves: where what they share lives, how long they are, and that what is skipped is told."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from kit.harness import REPO, finish, python

TESTS = REPO / "tests"


def test_no_test_imports_from_another_test_file() -> None:
    """What two of them use is in kit. tests/gpu is run by itself, and is a folder of its own."""
    imports = re.compile(r"^\s*(from|import) test_", re.MULTILINE)
    files = [path for path in TESTS.rglob("test_*.py") if "gpu" not in path.parts]
    assert [str(path) for path in files if imports.search(path.read_text())] == []


def test_no_file_is_over_1000_lines() -> None:
    long = {str(path): len(path.read_text().splitlines()) for path in TESTS.rglob("*.py")}
    assert {path: lines for path, lines in long.items() if lines > 1000} == {}


def test_no_folder_has_more_than_15_files() -> None:
    folders = [TESTS, *(path for path in TESTS.rglob("*") if path.is_dir())]
    assert {str(path) for path in folders if len(list(path.glob("*.py"))) > 15} == set()


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
