"""What no kernel may do, whatever was recorded before: what the ahead-of-time gate fails on."""

import re
from typing import Any

from benchmarks.aot.device import CARDS, EVERY, derive, resident_warps

# Above this the random numbers, not the memory, would set the speed of a memory-bound kernel: 8 bytes an element leave
# 55 issue slots, of which such a kernel's own arithmetic takes up to 20 and schedulers never fill all.
DROPOUT_LIMIT = {"sm_90": 18.0}
# At 1 issuing alone takes as long as moving the bytes; beyond it no kernel reaches the bandwidth, whatever it does.
ISSUE_SHARE_LIMIT = 1.0
# Names of rows -> a limit of their own, with the reason.
_ISSUE_SHARE_EXCEPTIONS = {
    # Four warps to a row, loads ahead through shared memory: up to 1.46 where a warp to a row takes 0.8. But that one's
    # 8 warps leave a multiprocessor idle half of the time, and an H200 takes 0.7 to 0.85 of it with 20.
    re.compile(r"dropout_add_layer_norm_bwd H=768 (fp16|bf16)\b.* sm_90"): 1.5,
}

# fp32 products in three terms hold every operand twice; with a bias or relative positions besides, or with heads of
# more than 64 columns, some tiles do not fit into 255 registers, the smallest ones neither. fp32 is there to be exact,
# so these may spill.
_MAY_SPILL = re.compile(r"attention_.*( D=(96|128) fp32| fp32 (bias|relative_key|disentangled))\b.* sm_\d+")

# With dropout these spill a few registers since random words no longer pass through shared memory. Those of sm_90 in
# half precision take less time so on an H200 at every length that was timed (docs/decisions/0006-attention-dropout.md);
# of the others nothing was timed.
_MAY_SPILL_A_LITTLE = re.compile(
    r"attention_(fwd_short S<=128|bwd_short S<=(64|128)|bwd_dkdv(_stored)? tiled) D=\d+ (bf16|fp16)( qkv| causal)?"
    r" dropout sm_90"
    r"|attention_bwd_dkdv tiled D=32 fp32( qkv)? dropout sm_\d+"
    r"|attention_(fwd tiled D=32|bwd_dq tiled D=(96|128)) bf16 dropout sm_100"
    r"|attention_bwd_dq tiled D=64 bf16 causal dropout sm_80"
)
_A_LITTLE = 88  # bytes of a thread

# On cards three kernels besides, by 24 bytes at most: other rows would be laid over other threads, on every chip.
_MAY_SPILL_ON_CARDS = re.compile(
    r"(dropout_add_layer_norm_bwd H=8192 fp32 dropout|embedding_bwd H=\d+ fp16 of fp32 ids plain|lamb_moments fp16) .*"
)

Rows = dict[str, dict[str, Any]]


def with_dropout_cost(rows: Rows) -> Rows:
    """The rows, each that drops with its instructions per element above the same kernel without dropout."""
    for key, row in rows.items():
        plain = rows.get(key.replace(" dropout ", " plain "))
        if " dropout " in key and plain is not None and "loop_instructions" in row and row["elements_per_thread"]:
            with_it, without = (one["loop_instructions"] / one["elements_per_thread"] for one in (row, plain))
            row["dropout_per_element"] = round(with_it - without, 2)
    return rows


def problems_of(rows: Rows) -> list[str]:
    """What is wrong with measured rows, a line each."""
    return [f"{key}: {problem}" for key, row in rows.items() for problem in _problems_of(key, row)]


def _problems_of(key: str, row: dict[str, Any]) -> list[str]:
    """Of one row."""
    name = key.rsplit(" ", 1)[1]
    problems = _problems_of_space(key, row, name)
    if name in CARDS:
        return problems
    derived = derive(row, name)
    # A head of 16 columns is 32 bytes: 64 threads of a warp take less than 16 each.
    is_wide = not row["multiply_adds_per_element"] or name.startswith("sm_")
    wide = row["loads_128"] + row["stores_128"] + row["bulk_copy_instructions"]
    if row["elements_per_thread"] and is_wide and not wide:
        problems.append("no load or store of 128 bits at all")
    claimed = (row["elements_per_thread"] or 0) * (row["bytes_per_element"] or 0)
    if name == "sm_90" and row["loop_bytes"] < claimed and not row["bulk_copy_instructions"]:
        # Then shares of issue slots are of too many elements: a case with wrong numbers, or loops that were not found.
        problems.append(f"main loops move {row['loop_bytes']} bytes a thread, the case claims {claimed:.0f}")
    problems += _problems_of_products(row, name)
    if name == "sm_90" and row["needs_bulk_copies"] and not row["bulk_copy_instructions"]:
        problems.append("no bulk copy (UTMALDG)")
    if name == "sm_90" and row["is_specialized"] and not row["register_reallocations"]:
        problems.append("no warps of their own for loads (USETMAXREG)")
    cost = row.get("dropout_per_element")
    # fp32 attention is short of registers; what it costs there says nothing of the random numbers.
    is_limited = not row["multiply_adds_per_element"] or row["needs_warpgroup_products"]
    if cost is not None and is_limited and cost > DROPOUT_LIMIT.get(name, float("inf")):
        problems.append(f"dropout costs {cost} instructions an element, limit {DROPOUT_LIMIT[name]}")
    limits = (limit for rows, limit in _ISSUE_SHARE_EXCEPTIONS.items() if rows.fullmatch(key))
    limit = next(limits, ISSUE_SHARE_LIMIT)
    for field, what in (("issue_share", "issue slots"), ("half_rate_share", "slots of the arithmetic-logic pipe")):
        share = derived[field]
        if share is not None and share > limit:
            problems.append(f"takes {share} of the {what} that memory leaves it, limit {limit}")
    return problems


def _may_spill(key: str) -> bool:
    """Whether a kernel is named above."""
    is_card = key.rsplit(" ", 1)[1] in CARDS
    named = [_MAY_SPILL, _MAY_SPILL_A_LITTLE, *([_MAY_SPILL_ON_CARDS] if is_card else [])]
    return any(names.fullmatch(key) for names in named)


def _problems_of_space(key: str, row: dict[str, Any], name: str) -> list[str]:
    """Registers, and shared memory."""
    target, problems = EVERY[name], []
    # AMD's scalar registers spill to lanes of vector registers; only what those do not hold goes to memory, as bytes.
    spilling = row.get("spill_instructions", 0)
    if (row["spill_bytes"] or (spilling and name.startswith("sm_"))) and not _may_spill(key):
        problems.append(f"spills ({row['spill_bytes']} bytes, {spilling} instructions)")
    if row["spill_bytes"] > _A_LITTLE and _MAY_SPILL_A_LITTLE.fullmatch(key):
        problems.append(f"spills {row['spill_bytes']} bytes, limit {_A_LITTLE}")
    if row["shared_bytes"] > target.shared_limit_bytes:
        problems.append(f"{row['shared_bytes']} bytes of shared memory, limit {target.shared_limit_bytes}")
    elif name.startswith("sm_") and name not in CARDS:
        # Launchers count resident programs on NVIDIA's; of a card, which holds fewer, the last run in a second round.
        meant = row["resident_threads"] // target.warp_size
        fit = resident_warps(target, row["registers"], row["shared_bytes"], row["num_warps"])
        if fit < meant:
            problems.append(f"{fit} warps fit on a multiprocessor, {meant} are meant to run at once")
    return problems


def _problems_of_products(row: dict[str, Any], name: str) -> list[str]:
    """Products must run on tensor cores, on sm_90 on the instructions of four warps where dtype and tile allow it."""
    claimed = row["multiply_adds_per_element"]
    if claimed is not None and not row["tensor_core_instructions"]:
        return ["no instruction of a tensor core"]
    if name != "sm_90" or not row["needs_warpgroup_products"]:
        return []
    if not row["warpgroup_products"]:
        return ["no product of four warps (HGMMA)"]
    if claimed is not None and row["loop_multiply_adds"] < claimed * row["elements_per_thread"]:
        # Then instructions per element are of too many elements, or of another loop.
        expected = round(claimed * row["elements_per_thread"])
        return [f"the main loop makes {row['loop_multiply_adds']} multiply-adds a thread, the case claims {expected}"]
    return []
