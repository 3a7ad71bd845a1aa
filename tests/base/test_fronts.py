"""What is noted about imports, which changes nothing about them."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest

from holdfast.base.fronts import ImportWatch, seen_imports

SLEEPS = "import time\ntime.sleep({})\n"


@pytest.fixture
def watch(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> ImportWatch:
    """A watch of its own, and a folder on the path to import from."""
    monkeypatch.syspath_prepend(str(tmp_path))
    watch = ImportWatch()
    monkeypatch.setattr(sys, "meta_path", [watch, *sys.meta_path])
    return watch


def test_the_outermost_import_that_takes_long_is_noted_once(watch: ImportWatch, tmp_path: Path) -> None:
    (tmp_path / "hf_slow.py").write_text(SLEEPS.format(0.15) + "import hf_part\nimport hf_quick\n")
    (tmp_path / "hf_part.py").write_text(SLEEPS.format(0.15) + "import hf_last\n")
    (tmp_path / "hf_quick.py").write_text("")
    (tmp_path / "hf_last.py").write_text("")
    (tmp_path / "hf_after.py").write_text("")
    began = time.time()
    import hf_quick  # noqa: F401 - on its own it takes no time

    with pytest.raises(ModuleNotFoundError):
        import hf_nowhere  # noqa: F401
    import hf_slow  # noqa: F401

    found = watch.take_slow(began)
    assert list(found) == ["hf_slow"]
    assert 0.3 <= found["hf_slow"] <= time.time() - began
    assert watch.take_slow(began) == {}
    import hf_after  # noqa: F401 - what was taken is not noted again under another name

    assert watch.take_slow(began) == {}
    for name in ("hf_slow", "hf_part", "hf_quick", "hf_last", "hf_after"):
        del sys.modules[name]


def test_what_was_imported_earlier_than_asked_for_is_left_out(watch: ImportWatch, tmp_path: Path) -> None:
    (tmp_path / "hf_before.py").write_text(SLEEPS.format(0.15) + "import hf_before_part\n")
    (tmp_path / "hf_before_part.py").write_text("")
    import hf_before  # noqa: F401

    assert watch.take_slow(time.time()) == {}


def test_a_thing_among_the_modules_that_raises_when_asked_disturbs_no_import(
    watch: ImportWatch, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Rude:
        @property
        def __spec__(self) -> object:
            raise RuntimeError("do not ask")

    (tmp_path / "hf_polite.py").write_text("")
    monkeypatch.setitem(sys.modules, "torch", Rude())  # type: ignore[arg-type]
    assert watch.find_spec("torch.anything") is None
    import hf_polite  # noqa: F401


def test_when_torch_and_holdfast_were_imported_is_seen_whichever_comes_first() -> None:
    script = (
        "import time\n{}\nt = time.time()\ntime.sleep(0.3)\nbegan = time.time()\nholdfast.Run\n"
        "ended = time.time()\nfrom holdfast.base import seen_imports\nw = seen_imports()\n"
        "print(abs(w.torch_at - t) < 0.25, began <= w.ours_from, ended - 1 < w.ours_at <= ended)"
    )
    for first in ("import holdfast, torch", "import torch, holdfast"):
        done = subprocess.run([sys.executable, "-c", script.format(first)], capture_output=True, text=True)
        assert done.stdout.split() == ["True", "True", "True"], done.stdout + done.stderr
    assert seen_imports() is not None
