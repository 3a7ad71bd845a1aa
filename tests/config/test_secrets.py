"""Secrets are not shown or kept where others read, and what others wrote is not executed."""

from __future__ import annotations

import io
import json
import os
import pickle
import random
import stat
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.distributed.checkpoint.metadata import Metadata

from holdfast.checkpoint.format.metadata import MetadataError, as_torch, parse
from holdfast.checkpoint.state.tracked import UnreadObjectsError, from_blob, to_blob
from holdfast.config.fields import HIDDEN, mask, masked
from holdfast.config.sources import load
from holdfast.errors import ConfigError
from holdfast.record.directory import ControlDirectory
from holdfast.record.launches import record_launch
from kit.commands import command

URL = "https://hooks.example/services/T0/B1?key=s3cr3t"


# --- settings -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("more", [[], ["--json"]])
def test_the_address_of_a_webhook_is_shown_up_to_its_host(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, more: list[str]
) -> None:
    (tmp_path / "c.toml").write_text(
        f"[launch]\nalert_url = {json.dumps(URL)}\n"
        "alert_command = \"curl -H 'Authorization: Bearer s3cr3t' x\"\n"
    )
    shown = command("config", "show", "--config", tmp_path / "c.toml", *more)
    assert shown.code == 0
    assert f"https://hooks.example/{HIDDEN}" in shown.out
    assert f"Authorization: Bearer {HIDDEN}" in shown.out
    assert "s3cr3t" not in shown.out
    assert "T0" not in shown.out
    assert load(tmp_path / "c.toml").settings.launch.alert_url == URL, "only what is shown is masked"


@pytest.mark.parametrize(
    ("given", "setting"),
    [
        (f"launch.alert_url={URL}", "HOLDFAST_LAUNCH_ALERT_URL"),
        ("launch.alert_command=curl -d token=s3cr3t x", "HOLDFAST_LAUNCH_ALERT_COMMAND"),
        ("checkpoint.remote_root=s3://me:s3cr3t@bucket/x", "HOLDFAST_CHECKPOINT_REMOTE_ROOT"),
    ],
)
def test_a_secret_on_the_command_line_is_refused_with_the_way_to_give_it(given: str, setting: str) -> None:
    refused = command("config", "show", "--set", given)
    assert refused.code == 2
    assert "a secret on a command line is seen by everybody" in refused.err
    assert f"the file of --config, or set {setting}" in refused.err
    assert "s3cr3t" not in refused.err + refused.out


def test_a_wrong_secret_is_not_repeated_in_the_message() -> None:
    with pytest.raises(ConfigError, match="without spaces") as refused:
        load(environ={"HOLDFAST_LAUNCH_ALERT_URL": "https://hooks.example/s3cr3t x"})
    assert "s3cr3t" not in str(refused.value)
    with pytest.raises(ConfigError, match="it is not a URL"):
        load(environ={"HOLDFAST_LAUNCH_ALERT_URL": "http://[::1"})
    with pytest.raises(ConfigError, match="it is not a URL"):
        load(environ={"HOLDFAST_CHECKPOINT_REMOTE_ROOT": "http://[::1"})


def test_what_only_looks_like_a_secret_is_left_as_it_is() -> None:
    for text in ("step:1,tokens:2", "s3://bucket/a@b", "mail -s holdfast ops@example.org", "a secret place"):
        assert mask(text) == text
    assert (
        mask("s3://me:x@b/p api_key=1 --hf-token=2")
        == f"s3://{HIDDEN}@b/p api_key={HIDDEN} --hf-token={HIDDEN}"
    )
    assert masked("launch.alert_url", "") == ""
    assert masked("checkpoint.interval", 5) == 5


def test_how_a_launch_was_started_is_for_its_owner_only(tmp_path: Path) -> None:
    control, _ = ControlDirectory.open_or_create(tmp_path / "run")
    before = os.umask(0)
    try:
        nodes = {"min_nodes": 1, "max_nodes": 1, "workers_per_node": 1}
        told = record_launch(control, "l", ["train.py", "--key", "x"], node="n", root="", **nodes)
    finally:
        os.umask(before)
    assert told == ""
    (path,) = (tmp_path / "run" / "launches").iterdir()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


# --- what is unpickled --------------------------------------------------------------------------------------


class Planted:
    """Runs something when it is read."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (self.path,)


def test_state_of_plain_values_is_read_without_unpickling_anything(monkeypatch: pytest.MonkeyPatch) -> None:
    state = {
        "tracked": {"schedule": {"lr": 0.1, "steps": [1, 2]}, "order": OrderedDict(a=torch.ones(2))},
        "own": {
            "rng": {"python": random.getstate(), "numpy": np.random.get_state()},
            "scalar": np.float64(2.5),
        },
        "arrays": [np.arange(3, dtype=kind) for kind in (np.int8, np.float32, np.complex128)],
    }
    monkeypatch.setattr(pickle, "Unpickler", None)  # what a free load uses
    read = from_blob(to_blob(state), objects=False)
    assert read["tracked"]["schedule"] == state["tracked"]["schedule"]
    assert torch.equal(read["tracked"]["order"]["a"], torch.ones(2))
    assert read["own"]["rng"]["python"] == state["own"]["rng"]["python"]
    assert (read["own"]["rng"]["numpy"][1] == state["own"]["rng"]["numpy"][1]).all()
    for a, b in zip(read["arrays"], state["arrays"], strict=True):
        assert a.dtype == b.dtype
        assert (a == b).all()
    assert read["own"]["scalar"] == 2.5


def test_an_object_is_named_and_not_opened_where_nobody_resumes(tmp_path: Path) -> None:
    blob = to_blob({"tracked": {"x": Planted(str(tmp_path / "made"))}, "own": {}})
    with pytest.raises(UnreadObjectsError, match=r"posix\.mkdir"):
        from_blob(blob, objects=False)
    assert not (tmp_path / "made").exists()
    from_blob(blob)  # a resume reads what the same run has written
    assert (tmp_path / "made").exists()


def test_metadata_makes_no_object_but_its_own(tmp_path: Path) -> None:
    whole = Metadata(state_dict_metadata={}, planner_data={}, storage_data={})
    read = as_torch(parse(pickle.dumps(whole)))
    assert (read.state_dict_metadata, read.planner_data, dict(read.storage_data)) == ({}, {}, {})
    for evil in (Planted(str(tmp_path / "made")), eval, os.path.join):
        with pytest.raises(MetadataError, match="which metadata never does"):
            parse(pickle.dumps(evil))
    sneaky = b"\x80\x04\x8c\x08builtins\x8c\x07getattr\x93\x8c\x07pathlib\x8c\x04Path\x93\x8c\x06unlink\x86R."
    with pytest.raises(MetadataError, match=r"calls builtins\.getattr"):
        parse(sneaky)
    assert pickle.load(io.BytesIO(sneaky)) is Path.unlink, "the standard one would have found it"
    assert not (tmp_path / "made").exists()
