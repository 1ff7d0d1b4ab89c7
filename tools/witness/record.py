"""Which kernels were run as they are, and how close they came: the section `witnessed` of the kernels' record.

A line belongs to a target, and one besides to the oldest Triton that is supported ("sm_90 oldest").
"""

import hashlib
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Any

from benchmarks.families import family_names
from benchmarks.kit.programs import families_of, kernel_digests, short
from tools import kernel_record

if TYPE_CHECKING:  # bert_fast is imported later, with a GPU's answers
    from bert_fast.testing.compare import Comparison

_OF_SM_90 = "_stored"  # what the names of kernels end in that other processors do not launch
RUNS = {"sm_80": "newest", "sm_90": "newest", "sm_90 oldest": "oldest"}  # the Triton of each


def run_of(device: str, triton_version: str) -> str:
    """The run of `RUNS` that this device and Triton make."""
    return f"{device} oldest" if triton_version == kernel_record.read()["triton"]["oldest"] else device


def figures(found: "Sequence[Comparison]") -> dict[str, Any]:
    """Of a case's outputs the one that comes closest to its tolerance, and the share of it that its errors take."""
    if not found:
        return {"output": None, "share": None}
    most = max(found, key=_share)
    return {"output": f"{most.output} {most.dtype}", "share": round(_share(most), 2)}


def _share(one: "Comparison") -> float:
    pairs = ((one.worst, one.allowed_worst), (one.rms, one.allowed_rms))
    return max(error / allowed if allowed else float(error > 0.0) for error, allowed in pairs)


def digests(run: str, triton_version: str) -> dict[str, str]:
    """Key of the record -> digest of what a run of all kernels depends on now."""
    return {
        f"{short(kernel)} {run}": hashlib.sha256(f"{program} {triton_version}".encode()).hexdigest()[:12]
        for kernel, program in kernel_digests().items()
        if run.startswith("sm_90") or not short(kernel).endswith(_OF_SM_90)
    }


def stale_families(run: str, triton_version: str) -> list[str]:
    """Families of ops that need a kernel which this run has not seen as it is."""
    stale = kernel_record.stale("witnessed", digests(run, triton_version))
    return families_of({key.split(" ", 1)[0] for key in stale})


def write(run: str, triton_version: str, lines: Sequence[dict[str, Any]], families: Collection[str]) -> None:
    """Stores what was right of a run over all cases of these families, kernel by kernel.

    A kernel that families besides them launch keeps its line if that is of the kernel as it is.
    """
    current = digests(run, triton_version)
    known = kernel_record.read()["witnessed"]
    found: kernel_record.Rows = {}
    for key, digest in current.items():
        kernel = key.split(" ", 1)[0]
        cases = [line for line in lines if line["ok"] and kernel in map(short, line["kernels"])]
        is_whole = set(families) == set(family_names())
        if cases and (is_whole or known.get(key, {}).get("digest") != digest):
            found[key] = {
                "cases": len(cases),
                "programs": sum(line["programs"] for line in cases),
                "share": max((line["share"] for line in cases if line["share"] is not None), default=None),
                "digest": digest,
            }
    keys = [f"{short(kernel)} {one}" for kernel in sorted(kernel_digests()) for one in RUNS]
    kernel_record.update("witnessed", found, keys)
