from __future__ import annotations

import pytest
import torch


@pytest.fixture(autouse=True, scope="session")
def _one_thread() -> None:
    """CPU results are bitwise repeatable only at equal thread counts."""
    torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _no_holdfast_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    """A developer's own HOLDFAST_* variables must not reach the tests."""
    import os

    for name in list(os.environ):
        if name.startswith("HOLDFAST_"):
            monkeypatch.delenv(name)
