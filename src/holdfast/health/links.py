"""Reads the counters of a node's links, where the system shows them. Judges nothing, changes nothing."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

from holdfast.health.kernel_log import normal_bus
from holdfast.health.result import ask
from holdfast.policy.health import CheckResult
from holdfast.policy.links import LIMITS, Port, Slot, judge_nvlink, judge_ports_of, judge_slots

SYSFS = Path("/sys")
TIMEOUT = 10.0
_VENDORS = {"0x10de": "gpu", "0x15b3": "adapter"}
"""NVIDIA's devices; Mellanox' adapters."""
_CLASSES = ("0x03", "0x02")
"""Displays and 3D controllers; networks. What else such a vendor makes (bridges, audio) is left out."""
_STATE = re.compile(r"\d+: (\w+)")
_RATE = re.compile(r"([\d.]+) Gb/sec")
_GPU = re.compile(r"^(GPU \d+)\b")
_LINK = re.compile(r"^\s+Link (\d+): ([A-Za-z][A-Za-z \-]*?)(?: Count)?:\s*(\d+)\s*$")


def check_links(sysfs: Path = SYSFS) -> list[CheckResult]:
    """InfiniBand ports, NVLink, and the lanes of GPUs and adapters; nothing where there are none."""
    return [
        *judge_ports_of(ports(sysfs)),
        *judge_slots(slots(sysfs)),
        *judge_nvlink(nvlink()),
    ]


def ports(sysfs: Path = SYSFS) -> list[Port]:
    """Every port of every InfiniBand or RoCE adapter."""
    found = []
    for place in sorted((sysfs / "class" / "infiniband").glob("*/ports/*")):
        state, rate = _STATE.match(_text(place / "state")), _RATE.match(_text(place / "rate"))
        counters = {name: _number(place / "counters" / name) for name in LIMITS}
        found.append(
            Port(
                name=f"{place.parent.parent.name}/{place.name}",
                state=state[1] if state else "",
                rate=float(rate[1]) if rate else None,
                counters={name: value for name, value in counters.items() if value is not None},
            )
        )
    return found


def slots(sysfs: Path = SYSFS) -> list[Slot]:
    """GPUs and adapters on the bus. Their speed is left out: idle devices lower it to save power."""
    found = []
    for place in sorted((sysfs / "bus" / "pci" / "devices").glob("*")):
        what = _VENDORS.get(_text(place / "vendor"))
        if what is None or not _text(place / "class").startswith(_CLASSES):
            continue
        fatal = re.search(r"TOTAL_ERR_FATAL (\d+)", _text(place / "aer_dev_fatal"))
        found.append(
            Slot(
                bus=normal_bus(place.name),
                what=what,
                width=_number(place / "current_link_width"),
                widest=_number(place / "max_link_width"),
                fatal=int(fatal[1]) if fatal else 0,
            )
        )
    return found


def nvlink() -> dict[str, dict[str, int]]:
    """Device → counter of its links → value, as `nvidia-smi` tells; the kernel shows none of them."""
    if shutil.which("nvidia-smi") is None:
        return {}
    answer = ask(["nvidia-smi", "nvlink", "-e"], TIMEOUT)
    return parse_nvlink(answer.out) if answer.code == 0 else {}


def parse_nvlink(text: str) -> dict[str, dict[str, int]]:
    found: dict[str, dict[str, int]] = {}
    device = ""
    for line in text.splitlines():
        if named := _GPU.match(line):
            device = named[1]
        elif device and (told := _LINK.match(line)):
            found.setdefault(device, {})[f"link {told[1]} {told[2].lower()}"] = int(told[3])
    return found


def _text(path: Path) -> str:
    try:
        return path.read_text(errors="replace").strip()
    except OSError:
        return ""


def _number(path: Path) -> int | None:
    text = _text(path)
    return int(text) if text.isascii() and text.isdigit() else None
