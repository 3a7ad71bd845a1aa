"""Exit codes: one table. test_docs.py compares it with its page."""

from __future__ import annotations

from pathlib import Path

import pytest

from holdfast import errors
from holdfast.errors import MEANINGS, ExitCode
from kit.harness import finish, holdfast

ERRORS = [
    value
    for value in vars(errors).values()
    if isinstance(value, type) and issubclass(value, errors.HoldfastError)
]


def test_every_code_has_a_meaning_and_an_advice() -> None:
    assert list(MEANINGS) == list(ExitCode)
    for code, (meaning, advice) in MEANINGS.items():
        assert meaning.endswith("."), code
        assert advice, code
        assert "|" not in meaning + advice  # would break the table


def test_no_code_is_used_twice_nor_taken_by_the_shell() -> None:
    numbers = [int(member) for member in ExitCode.__members__.values()]  # aliases included
    assert len(numbers) == len(set(numbers))
    assert all(0 <= number < 126 for number in numbers)  # from 126 on the shell speaks, of signals mostly


def test_the_two_codes_that_other_tools_know_keep_their_numbers() -> None:
    assert (ExitCode.RERUN_WANTED, ExitCode.VALIDATION_FAILED) == (16, 17)


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: error.__name__)
def test_every_error_ends_with_a_documented_code_that_is_no_success(
    error: type[errors.HoldfastError],
) -> None:
    assert error.exit_code in MEANINGS
    assert error.exit_code is not ExitCode.OK


@pytest.mark.parametrize(
    "arguments",
    [("config", "show", "--set", "no.such=1"), ("config", "show", "--no-such"), ("no-such",)],
    ids=" ".join,
)
def test_the_command_ends_with_the_usage_code(arguments: tuple[str, ...], tmp_path: Path) -> None:
    result = finish(holdfast(*arguments), cwd=tmp_path)
    assert result.code == ExitCode.USAGE, result.text
    assert "Traceback" not in result.err
    assert "rror: " in result.err
