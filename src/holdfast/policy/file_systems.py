"""What is known of the file systems that runs are kept on, and what to look at in each. Pure.

Only what a run depends on is judged: that a rename is one step for all who look, that what was made durable
stays, that an error is not made up, and that nodes see each other's files soon. What is merely worth knowing
is told with a file system that is well.
"""

from __future__ import annotations

from collections.abc import Collection

import msgspec

from holdfast.policy.health import CheckResult, Status


class Known(msgspec.Struct, frozen=True, kw_only=True):
    called: str
    worth_knowing: str = ""
    shared: bool = False
    """Whether several nodes can have it mounted."""
    lost_with: str = ""
    """With what everything on it goes; empty if it stays."""


_FUSE = "renames may not be one step, and what is written may be late: try it with `holdfast doctor`"
KINDS: dict[str, Known] = {
    "lustre": Known(
        called="Lustre",
        shared=True,
        worth_knowing="a directory's stripe count decides how fast large shards are written (`lfs "
        "getstripe`); quotas are not in the free space (`lfs quota`)",
    ),
    "nfs": Known(
        called="NFS",
        shared=True,
        worth_knowing="other nodes see a new name only after their attribute cache ends (acdirmax, 60 s "
        "unless set); one server bounds the speed of all nodes",
    ),
    "gpfs": Known(
        called="GPFS",
        shared=True,
        worth_knowing="quotas of blocks and of files are not in the free space (`mmlsquota`); many nodes "
        "that write into one directory wait for each other",
    ),
    "beegfs": Known(called="BeeGFS", shared=True, worth_knowing="quotas are not in the free space"),
    "ceph": Known(called="CephFS", shared=True, worth_knowing="quotas may be set on any directory above"),
    "weka": Known(called="Weka", shared=True),
    "wekafs": Known(called="Weka", shared=True),
    "cifs": Known(called="SMB", shared=True, worth_knowing=_FUSE),
    "tmpfs": Known(called="tmpfs", lost_with="the next reboot, or the container"),
    "ramfs": Known(called="ramfs", lost_with="the next reboot"),
    "overlay": Known(called="overlay", lost_with="the container"),
}
_LATER = {"nfs4": "nfs", "fuse.ceph": "ceph", "fuse.ceph-fuse": "ceph", "smb3": "cifs", "mmfs": "gpfs"}


def judge_file_system(
    what: str, path: str, kind: str, options: Collection[str], *, kept: bool
) -> CheckResult:
    """`kept`: whether what lies there must outlast the node; a local tier's directory need not."""
    name = f"file system of {what}"
    known = KINDS.get(_LATER.get(kind, kind))
    called = known.called if known is not None else kind
    trouble, fix = _trouble(kind, known, options, kept=kept)
    if trouble:
        found = f"{path} is on {called}: {trouble}"
        return CheckResult(name=name, status=Status.WARNING, found=found, fix=fix)
    told = f"; {known.worth_knowing}" if known is not None and known.worth_knowing else ""
    return CheckResult(name=name, status=Status.OK, found=f"{path} is on {called}{told}")


def _trouble(kind: str, known: Known | None, options: Collection[str], *, kept: bool) -> tuple[str, str]:
    """(what is wrong with it, what to do); empty if nothing is."""
    family = _LATER.get(kind, kind)
    if "ro" in options:
        return "it is mounted read-only", "mount it for writing, or set another directory"
    if known is not None and known.lost_with and kept:
        return (
            f"what is kept there is lost with {known.lost_with}",
            "set run.dir and checkpoint.root to a directory that stays, on all nodes the same",
        )
    if family == "nfs" and "soft" in options:
        return (
            "it is mounted `soft`, so a server that is only slow gives errors and saves fail",
            "mount it `hard`",
        )
    if family == "nfs" and {"nolock", "local_lock=all", "local_lock=flock"} & set(options):
        return "locks do not reach other nodes (nolock, local_lock)", "mount it with locks"
    if family == "lustre" and "flock" not in options:
        return (
            "it is mounted without `flock`, so locks fail or do not reach other nodes",
            "mount it with `flock`",
        )
    if kind.startswith("fuse") and family == kind and known is None:
        return (
            _FUSE,
            "use a file system that the kernel mounts itself, or checkpoint.remote for object stores",
        )
    return "", ""
