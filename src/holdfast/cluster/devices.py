"""How ranks see a node's devices: what each is called, how a worker gets one, which one a rank has.

A device has a name and a handle. The name says which card it is, in exclusions, transients and evidence: the
beginning of its UUID where the driver gives one. The handle is what makes CUDA use it: an entry of
CUDA_VISIBLE_DEVICES, in the terms in which this process sees its devices. The two differ inside a container,
where the names in `/dev` keep the host's numbers and CUDA counts from 0. NVIDIA_VISIBLE_DEVICES only says
what a container's runtime puts into `/dev`; what counts is what is there.

Guarantee: however ranks see devices (all of them, or with `--virtual-local-rank` one each), an arrangement
puts each rank on the device that it names for that rank, and never two ranks on one device unless it says so.
Exclusions by the names of older releases (numbers) are still understood. On a CPU the entries of
CUDA_VISIBLE_DEVICES are stand-ins.
"""

from __future__ import annotations

import contextlib
import functools
import os
import re
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from holdfast.policy import Place, device_of
from holdfast.record import LaunchInfo

VISIBLE = "CUDA_VISIBLE_DEVICES"
ORDER = "CUDA_DEVICE_ORDER"
_DEV = Path("/dev")
_PROC = Path("/proc/driver/nvidia/gpus")
_SHORT = len("GPU-01234567")
"""Characters of a UUID that make a name. CUDA accepts any number that tells the device from others."""
_ASK = 20.0
"""Seconds for nvidia-smi: without its persistence daemon the driver wakes every device first."""


class Card(msgspec.Struct, frozen=True, kw_only=True):
    """A card as the kernel shows it. Empty text means not known."""

    minor: int
    """Its number in `/dev`."""
    bus: str = ""
    uuid: str = ""
    model: str = ""


class Device(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    handle: str
    """What CUDA_VISIBLE_DEVICES has to hold for a worker to have this device."""
    former: list[str] = []
    """What older releases called it, and an operator may still call it."""
    uuid: str = ""

    def is_called(self, name: str | None) -> bool:
        if name is None:
            return False
        by_uuid = len(name) >= _SHORT and self.uuid.startswith(name)
        return name == self.name or name in self.former or by_uuid


# -- what there is: pure -------------------------------------------------------------------------------------


def devices_seen(environ: Mapping[str, str], cards: Sequence[Card]) -> list[Device]:
    """Pure: the devices that CUDA shows to a process with this environment, in CUDA's order."""
    cards = sorted(cards, key=lambda card: (card.bus if all(one.bus for one in cards) else "", card.minor))
    given = environ.get(VISIBLE)
    if given is not None:
        uuids = [card.uuid for card in cards]
        return [_of_entry(entry, _card_of(entry, cards, environ), uuids) for entry in _entries(given)]
    minors = [str(card.minor) for card in cards]
    if not _in_bus_order(cards, environ):
        return [Device(name=str(place), handle=str(place)) for place in range(len(cards))]
    found = []
    for place, card in enumerate(cards):
        also = [str(place)] if str(place) not in minors else []
        name = _name(card.uuid, [one.uuid for one in cards]) or minors[place]
        former = [one for one in (minors[place], *also) if one != name]
        found.append(Device(name=name, handle=str(place), former=former, uuid=card.uuid))
    return found


def _entries(given: str) -> list[str]:
    """As CUDA reads them: entries after an invalid one do not count. NoDevFiles is Slurm's word for none."""
    found = []
    for entry in (part.strip() for part in given.split(",")):
        if not entry or entry.startswith("-") or entry == "NoDevFiles":
            break
        found.append(entry)
    return found


def _card_of(entry: str, cards: Sequence[Card], environ: Mapping[str, str]) -> Card | None:
    """The card that an entry of CUDA_VISIBLE_DEVICES means, if that is certain."""
    if entry.startswith("GPU-"):
        meant = [card for card in cards if card.uuid.startswith(entry)]
        return meant[0] if len(meant) == 1 else Card(minor=-1, uuid=entry)
    if entry.isdigit() and int(entry) < len(cards) and _in_bus_order(cards, environ):
        return cards[int(entry)]
    return None


def _of_entry(entry: str, card: Card | None, uuids: Sequence[str]) -> Device:
    name = _name(card.uuid, uuids) if card is not None else ""
    if card is None or not name or name == entry:
        return Device(name=entry, handle=entry, uuid=card.uuid if card is not None else "")
    return Device(name=name, handle=entry, former=[entry], uuid=card.uuid)


def _in_bus_order(cards: Sequence[Card], environ: Mapping[str, str]) -> bool:
    """Whether CUDA's order is that of the bus; by default CUDA puts the fastest model first."""
    return environ.get(ORDER) == "PCI_BUS_ID" or len({card.model for card in cards}) <= 1


def _name(uuid: str, all_of_them: Sequence[str]) -> str:
    short = uuid[:_SHORT]
    return uuid if sum(one.startswith(short) for one in all_of_them) > 1 else short


# -- who has which: pure -------------------------------------------------------------------------------------


def environment_of(
    arranged: Sequence[str], here: Sequence[Device], local_rank: int, *, virtual: bool
) -> dict[str, str]:
    """Pure: what a worker's environment needs to have the device that an arrangement gives to its rank.

    `arranged`: names, in the order of local ranks. `here`: the devices as this process sees them. `virtual`:
    each worker sees only its own device, as device 0; else it sees all, and takes the one of its local rank.
    The plain order needs nothing.
    """
    handles = {device.name: device.handle for device in here}
    if not arranged or (not virtual and list(arranged) == [device.name for device in here]):
        return {}
    shown = [device_of(arranged, local_rank)] if virtual else list(arranged)
    return {VISIBLE: ",".join(handles.get(name, name) for name in shown)}


def index_of(worker: Mapping[str, str], here: Sequence[Device], local_rank: int) -> int:
    """Pure: the number under which this process sees the device of a worker that has this environment."""
    shown = _entries(worker.get(VISIBLE, ""))
    if not shown:
        return local_rank % len(here) if here else local_rank
    own = device_of(shown, int(worker.get("LOCAL_RANK", local_rank)))
    return next((place for place, device in enumerate(here) if device.handle == own), local_rank)


# -- this node -----------------------------------------------------------------------------------------------


def devices_here(environ: Mapping[str, str] = os.environ) -> list[Device]:
    """The devices of this node as its workers see them, in that order; none on a CPU."""
    return devices_seen(environ, read_cards())


def visible_devices(environ: Mapping[str, str] = os.environ) -> list[str]:
    """Their names."""
    return [device.name for device in devices_here(environ)]


def own_place(node: str, environ: Mapping[str, str] = os.environ) -> Place:
    """Where this worker runs, as the launcher names it."""
    told = LaunchInfo.from_environment(environ)
    if told is not None and told.device:
        return Place(node, told.device)
    return Place(node, device_of(visible_devices(environ), int(environ.get("LOCAL_RANK", "0") or "0")))


@functools.cache
def read_cards(dev: Path = _DEV, proc: Path = _PROC) -> tuple[Card, ...]:
    """The cards that this node, or container, has. Read once: which card is which does not change."""
    minors = {int(path.name[6:]) for path in dev.glob("nvidia[0-9]*") if path.name[6:].isdigit()}
    known = {}
    for path in proc.glob("*/information") if minors else ():
        with contextlib.suppress(OSError, ValueError):
            card = _parse(path.parent.name, path.read_text())
            known[card.minor] = card
    found = [known.get(minor, Card(minor=minor)) for minor in sorted(minors)]
    if any(card.bus and not card.uuid for card in found):  # the driver has not woken it yet
        uuids = _ask_uuids()
        found = [msgspec.structs.replace(card, uuid=card.uuid or uuids.get(card.bus, "")) for card in found]
    return tuple(found)


def _parse(bus: str, text: str) -> Card:
    """`/proc/driver/nvidia/gpus/<bus>/information`. ValueError if it does not say which device this is."""
    lines = (line.partition(":") for line in text.splitlines())
    told = {key.strip(): value.strip() for key, _, value in lines}
    uuid = told.get("GPU UUID", "")
    sure = re.fullmatch(r"GPU-[0-9a-fA-F-]{32,40}", uuid) is not None  # otherwise it is question marks
    return Card(
        minor=int(told.get("Device Minor", "")),
        bus=bus.lower(),
        uuid=uuid if sure else "",
        model=told.get("Model", ""),
    )


def _ask_uuids() -> dict[str, str]:
    """Bus → UUID, from nvidia-smi; nothing if that is missing or does not answer."""
    command = ["nvidia-smi", "--query-gpu=pci.bus_id,uuid", "--format=csv,noheader"]
    if shutil.which(command[0]) is None:
        return {}
    try:
        told = subprocess.run(command, capture_output=True, text=True, timeout=_ASK, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return {}
    rows = (line.split(", ") for line in told.stdout.splitlines())
    # nvidia-smi writes the domain with eight digits, the kernel with four.
    return {row[0].strip().lower()[-12:]: row[1].strip() for row in rows if len(row) == 2}
