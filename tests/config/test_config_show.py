"""`holdfast config show` says what the code says."""

from __future__ import annotations

import json
from pathlib import Path

from holdfast.config.settings import FIELDS
from kit.harness import finish, holdfast


def test_config_show_prints_values_and_sources_for_programs(tmp_path: Path) -> None:
    (tmp_path / "mine.toml").write_text("launch.max_restarts = 9\ncheckpoint.interval = 9")
    (tmp_path / "holdfast.toml").write_text("launch.stop_grace = 99")  # not asked for, so not read
    result = finish(
        holdfast("config", "show", "--config", "mine.toml", "--set", "run.dir=r", "--json"),
        cwd=tmp_path,
        env={"HOLDFAST_CHECKPOINT_INTERVAL": "50"},
    )
    assert result.code == 0, result.text
    shown = json.loads(result.out)
    assert list(shown) == list(FIELDS)
    assert shown["run.dir"] == {"value": "r", "source": "command line"}
    assert shown["launch.max_restarts"] == {"value": 9, "source": "file mine.toml"}
    assert shown["checkpoint.interval"] == {
        "value": 50,
        "source": "environment HOLDFAST_CHECKPOINT_INTERVAL",
    }
    assert shown["launch.stop_grace"] == {"value": 30.0, "source": "default"}


def test_config_show_prints_every_setting_with_its_description_for_people(tmp_path: Path) -> None:
    hostile = "[red]\x1b[2Jdir"
    result = finish(holdfast("config", "show", "--set", f"run.dir={hostile}"), cwd=tmp_path)
    assert result.code == 0, result.text
    assert "\x1b" not in result.out
    assert r'"[red]\u001b[2Jdir"' in result.out
    assert "command line" in result.out
    words = " ".join(result.out.split())
    for field in FIELDS.values():
        assert field.key in words
        assert field.description.split()[0] in words


def test_config_show_refuses_with_code_2(tmp_path: Path) -> None:
    result = finish(
        holdfast("config", "show", "--set", "checkpoint.interval=-1", "--set", "x.y=1"), cwd=tmp_path
    )
    assert result.code == 2
    assert result.out == ""
    assert result.err.startswith("holdfast: error: 2 problems in the settings; nothing was started:\n")
    assert "Traceback" not in result.err
