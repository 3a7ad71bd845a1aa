"""How bad it is what is known of a GPU. Pure; see `policy.health` for what the words mean.

A pending row remap lets programs run on: the bad row is set aside at the next reset. A remap that failed
means that there is nothing left to replace it with, and the device is due for replacement.
"""

from __future__ import annotations

from holdfast.policy.health import CheckResult, Status, amount

HOT = 90.0
"""Degrees Celsius; data-centre devices slow down a little above."""
SLOWED = {
    0x8: "the hardware slows it down (power brake, heat or current)",
    0x40: "the hardware slows it down because it is hot",
    0x80: "the hardware slows it down because an external power brake says so",
    0x20: "the driver slows it down because it is hot",
}
"""NVML's bits that mean a machine's fault. Idle clocks and the power cap are everyday."""


def judge_reachable(name: str, problem: str) -> CheckResult:
    if not problem:
        return CheckResult(name=name, status=Status.OK, found="answers")
    return CheckResult(
        name=name,
        status=Status.CRITICAL,
        found=f"cannot be reached: {problem}",
        expected="the driver answers for it",
        fix="drain the node and reset the device or reboot; look for XID 79 in the kernel log",
    )


def judge_memory_errors(
    name: str,
    *,
    uncorrected: int | None,
    ever: int | None,
    remap_pending: bool | None,
    remap_failed: bool | None,
    retire_pending: bool | None,
) -> CheckResult:
    """None: not known."""
    expected = "no memory errors beyond correction"
    reset = "reset the device when nothing uses it (`nvidia-smi -r -i N`), or reboot the node"
    if remap_failed:
        found = "a bad row of its memory could not be replaced"
        fix = "drain the node and have the device replaced"
        return CheckResult(name=name, status=Status.CRITICAL, found=found, expected=expected, fix=fix)
    pending = []
    if remap_pending:
        pending.append("a bad row of its memory waits to be replaced")
    if retire_pending:
        pending.append("a bad page of its memory waits to be retired")
    if uncorrected:
        pending.append(f"{uncorrected} memory errors beyond correction since its last reset")
    if pending:
        found = "; ".join(pending)
        return CheckResult(name=name, status=Status.WARNING, found=found, expected=expected, fix=reset)
    if uncorrected is None and ever is None:
        return CheckResult(name=name, status=Status.OK, found="it counts no memory errors (ECC is off)")
    past = f"; {ever} in its whole life" if ever else ""
    return CheckResult(name=name, status=Status.OK, found=f"none since its last reset{past}")


def judge_slowed(name: str, bits: int | None, temperature: float | None) -> CheckResult:
    why = [text for bit, text in SLOWED.items() if bits is not None and bits & bit]
    hot = temperature is not None and temperature >= HOT
    degrees = "" if temperature is None else f", {temperature:.0f} °C"
    if why or hot:
        return CheckResult(
            name=name,
            status=Status.WARNING,
            found=(why[0] if why else "it is hot") + degrees,
            expected="full clocks",
            fix="look at the node's cooling and power; a slow device slows all others down",
        )
    return CheckResult(name=name, status=Status.OK, found="not slowed down by heat or power" + degrees)


def judge_free_memory(name: str, used: int | None, total: int | None) -> CheckResult:
    """Before a job starts: what another program holds is not there for it."""
    if used is None or total is None:
        return CheckResult(name=name, status=Status.OK, found="not known")
    crowded = used > 0.05 * total + 2**30
    return CheckResult(
        name=name,
        status=Status.WARNING if crowded else Status.OK,
        found=f"{amount(used)} of {amount(total)} in use",
        expected="almost none in use",
        fix="see who uses it with `nvidia-smi`; an earlier job's process may hang" if crowded else "",
    )


def judge_computed(name: str, right: bool, problem: str, gflops: float) -> CheckResult:
    if problem or not right:
        found = problem or "a product whose every element is known came out WRONG"
        fix = "drain the node: a device that miscounts ruins what it trains"
        return CheckResult(
            name=name, status=Status.CRITICAL, found=found, expected="the known answer", fix=fix
        )
    return CheckResult(name=name, status=Status.OK, found=f"the known answer, {gflops:.4g} GFLOP/s")
