"""AdamW, LAMB and the global norm of gradients in Triton, over lists of tensors.

With f the factor that unscales and clips gradients, t the step that is being made and c_i = 1 - beta_i^t:
    g = f * grad;   m = beta1 * m + w1 * g;   v = beta2 * v + w2 * g^2
    AdamW:  p -= lr * (weight_decay * p + m / c_1 / (sqrt(v) / sqrt(c_2) + eps))
    LAMB:   u = m / c_1 / (sqrt(v) / sqrt(c_2) + eps) + weight_decay * p;   p -= lr * |p| / |u| * u
Definitions, variants and sources: `reference/optimizer.py`; derivation in docs/kernels/optimizer.md.

Shapes: lists of tensors of any shapes. A program treats one chunk of one tensor; which, and where its tensors lie, it
reads from tables (`_pointer_tables.py`).
Bytes moved per element (the floor, and what the kernels do), with gradients of e bytes:
    global norm            reads grad: e
    AdamW                  reads grad, p, m, v; writes p, m, v: 24 + e                              28 in fp32
    LAMB, first pass       reads grad, p, m, v; writes m, v: 20 + e
    LAMB, second pass      reads p, m, v; writes p: 16                                              40 in fp32
    p here are master weights where there are some; then the first pass also reads the parameter, which somebody may
    have written to since the last step (its value takes the master's place), and the last pass writes it: + 4
    p in half precision without master weights: 4 less in AdamW, 2 and 4 less in the passes of LAMB
    groups that LAMB treats without trust ratio (weight_decay = 0) cost what AdamW costs
plus, per chunk of 8,192 elements, about 80 bytes of tables and 16 of partial sums.
Recomputed: u, in the second pass of LAMB, from m and v as stored. Storing it would move the same bytes (4 more written,
4 less read) and need memory as large as the parameters.
Precision: m, v, master weights and all arithmetic are fp32, roots correctly rounded; norms and bias
corrections are fp64, so no finite gradient overflows its square.
Determinism: no atomics; sums of squares are added within a chunk, then over chunks, in an order that depends on the
sizes of the tensors alone.

Passes go through the list in alternating directions: each begins with what the one before left in the L2 cache.
"""

import functools
import itertools
import math
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from bert_fast.addresses import numbers_of, reader
from bert_fast.reference.optimizer import StepLists, StepOptions, is_dense
from bert_fast.triton._adamw import adamw_step_kernel
from bert_fast.triton._lamb import lamb_moments_kernel, lamb_ratio_kernel, lamb_update_kernel
from bert_fast.triton._launch import architecture, ceil_div, register_limit
from bert_fast.triton._launch_plan import launch_plan
from bert_fast.triton._multi_tensor import VECTOR, address, chunk, load, sums_of_squares, whole_vectors
from bert_fast.triton._pointer_tables import address_table, chunks_of, part_of_table, table_of


@triton.jit(do_not_specialize=["first_partial"])
def _global_norm_partial_kernel(
    grads_ptr, entries_ptr, sizes_ptr, partial_ptr, first_partial,
    GRAD_TYPE: tl.constexpr, ALIGNED: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """partial[first_partial:] (fp64): the sum of squares of every chunk of a list."""
    tensor, start, length = chunk(entries_ptr, sizes_ptr, tl.program_id(0), CHUNK)
    g_ptr = address(grads_ptr, tensor, GRAD_TYPE, ALIGNED) + start
    vectors = whole_vectors(length)
    acc = tl.zeros([BLOCK // 4], tl.float64)
    for block in tl.range(0, vectors, BLOCK):
        acc += sums_of_squares(load(g_ptr, block + tl.arange(0, BLOCK), vectors, False).to(tl.float64))
    g = load(g_ptr, vectors + tl.arange(0, VECTOR), length, False).to(tl.float64)
    tl.store(partial_ptr + first_partial + tl.program_id(0), tl.sum(acc) + tl.sum(g * g))


@triton.jit(do_not_specialize=["n_partials"])
def _global_norm_final_kernel(partial_ptr, scale_ptr, norm_ptr, n_partials, BLOCK: tl.constexpr):
    """norm = sqrt(sum of partial) / scale, in one program."""
    acc = tl.zeros([BLOCK], tl.float64)
    for block in tl.range(0, n_partials, BLOCK):
        offs = block + tl.arange(0, BLOCK)
        acc += tl.load(partial_ptr + offs, mask=offs < n_partials, other=0.0)
    norm = tl.sqrt(tl.sum(acc))
    if scale_ptr is not None:
        norm = norm / tl.load(scale_ptr).to(tl.float64)
    tl.store(norm_ptr, norm.to(tl.float32))


@triton.jit(do_not_specialize=["n_tensors"])
def _step_scalars_kernel(
    steps_ptr, lr_ptr, norm_ptr, scale_ptr, found_inf_ptr, scalars_ptr, shared_ptr,
    lr, log_beta1, log_beta2, max_norm, n_tensors,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Counts the step of every tensor and works out what the other kernels multiply by.

    scalars (fp32 [n_tensors, 2]): sqrt(c_2) / c_1 and sqrt(c_2).
    shared (fp32 [3]): factor of gradients, lr, and 1 to go on or 0 to change nothing.
    """
    active = 1.0
    if found_inf_ptr is not None:
        active = tl.where(tl.load(found_inf_ptr) == 0.0, 1.0, 0.0)
    factor = tl.full([], 1.0, tl.float64)
    if scale_ptr is not None:
        factor = factor / tl.load(scale_ptr).to(tl.float64)
    if norm_ptr is not None:
        norm = tl.load(norm_ptr).to(tl.float64)
        factor = tl.where(norm > max_norm, factor * (max_norm / norm), factor)
    if lr_ptr is not None:
        lr = tl.load(lr_ptr).to(tl.float32)
    if tl.program_id(0) == 0:
        tl.store(shared_ptr, factor.to(tl.float32))
        tl.store(shared_ptr + 1, lr)
        tl.store(shared_ptr + 2, active)

    tensor = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = tensor < n_tensors
    step_ptr = tl.load(steps_ptr + tensor, mask=mask, other=0).to(tl.pointer_type(tl.float32))
    step = tl.load(step_ptr, mask=mask, other=1.0) + active
    tl.store(step_ptr, step, mask=mask)
    # 1 - beta^t in fp64: near beta = 1 the difference keeps too few digits in fp32. A log of -infinity gives 1.
    c1 = 1.0 - tl.exp(step.to(tl.float64) * log_beta1)
    c2 = 1.0 - tl.exp(step.to(tl.float64) * log_beta2)
    root_c2 = tl.sqrt(c2)
    tl.store(scalars_ptr + tensor * 2, (root_c2 / c1).to(tl.float32), mask=mask)
    tl.store(scalars_ptr + tensor * 2 + 1, root_c2.to(tl.float32), mask=mask)


@dataclass(frozen=True)
class LaunchConfig:
    """How elements are laid over programs; one configuration serves every dtype."""

    # 16 elements a thread on NVIDIA, 8 on AMD, whose warps are twice as wide: accesses of 128 bits on both.
    block: int = 2048
    # Enough to make the look-ups of a program (three dependent loads) vanish; small enough that the last programs to
    # finish do not leave the device idle: BERT-base is 13,400 chunks.
    chunk: int = 8192
    num_warps: int = 4
    tensors: int = 128  # whose scalars a program works out
    partials: int = 1024  # sums of chunks that are added at once


CONFIG = LaunchConfig()
_ALIGNMENT = 16  # bytes, the widest access of a thread
_TYPES = {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}


def _log(beta: float) -> float:
    """The logarithm that the kernel multiplies by a step; -infinity makes the bias correction 1."""
    return math.log(beta) if beta > 0.0 else -math.inf


@dataclass(frozen=True)
class _Group:
    """Lists of a step that are aligned alike, and the addresses of their gradients and of all else but steps."""

    lists: StepLists
    grads: bytes
    state: bytes
    is_aligned: bool


def _groups(lists: StepLists) -> Iterator[_Group]:
    """The lists by alignment: one group, or two where a place is not throughout. Addresses are read once."""
    written = lists.params, lists.exp_avgs, lists.exp_avg_sqs, lists.master_params
    grads, state = reader().addresses(lists.grads), reader().addresses(*written)
    if _are_aligned(grads) and _are_aligned(state):
        yield _Group(lists, grads, state, True)
        return
    numbers, count = numbers_of(grads + state), len(lists.grads)
    columns = [numbers[start : start + count] for start in range(0, len(numbers), count)]
    are_aligned = [all(address % _ALIGNMENT == 0 for address in place) for place in zip(*columns, strict=True)]
    for aligned in (True, False):
        chosen = [list(itertools.compress(column, (one is aligned for one in are_aligned))) for column in lists]
        if chosen[0]:
            group = StepLists._make(chosen)
            written = group.params, group.exp_avgs, group.exp_avg_sqs, group.master_params
            yield _Group(group, reader().addresses(group.grads), reader().addresses(*written), aligned)


def _are_aligned(addresses: bytes) -> bool:
    return not int.from_bytes(addresses, sys.byteorder) & _low_bits(len(addresses))


@functools.lru_cache(maxsize=256)
def _low_bits(size: int) -> int:
    """The bits of so many bytes of addresses that are 0 where all are aligned."""
    return int.from_bytes((_ALIGNMENT - 1).to_bytes(8, sys.byteorder) * (size // 8), sys.byteorder)


def _moment_arguments(a: StepOptions) -> tuple[float, ...]:
    """beta1, weight1, weight2, eps, weight_decay as kernels take them (1 - beta2 loses digits in fp32)."""
    return a.beta1, 1.0 - a.beta1 if a.grad_averaging else 1.0, 1.0 - a.beta2, a.eps, a.weight_decay


def _scalars(steps: Sequence[Tensor], a: StepOptions) -> tuple[Tensor, Tensor]:
    """Counts `steps` up; (fp32 [n, 2], fp32 [3]) of `_step_scalars_kernel`."""
    device = steps[0].device
    scalars = torch.empty(len(steps), 2, dtype=torch.float32, device=device)
    shared = torch.empty(3, dtype=torch.float32, device=device)
    lr_is_tensor = isinstance(a.lr, Tensor)
    clips = a.grad_norm is not None and a.max_grad_norm is not None
    launch_plan(
        _step_scalars_kernel,
        BLOCK=CONFIG.tensors,
        num_warps=CONFIG.num_warps,
        enable_fp_fusion=True,
    )(
        (ceil_div(len(steps), CONFIG.tensors),),
        (
            address_table(steps),
            a.lr if lr_is_tensor else None,
            a.grad_norm if clips else None,
            a.grad_scale,
            a.found_inf,
            scalars,
            shared,
        ),
        (
            0.0 if lr_is_tensor else float(a.lr),
            _log(a.beta1) if a.bias_correction else -math.inf,
            _log(a.beta2) if a.bias_correction else -math.inf,
            float(a.max_grad_norm) if clips and a.max_grad_norm is not None else 0.0,
            len(steps),
        ),
    )
    return scalars, shared


def global_norm(grads: list[Tensor], grad_scale: Tensor | None) -> Tensor:
    """Launches the two stages of the norm; arguments and result as in `reference/optimizer.py`.

    grads: at least one, of fp32, fp16 or bf16 (they may mix), on one device. Tensors with gaps in memory are copied.
    """
    device = grads[0].device
    alike = reader().are_alike(grads)
    if not alike:
        grads = [g if is_dense(g) else g.contiguous() for g in grads]
    addresses = reader().addresses(grads)
    by_kind: dict[tuple[torch.dtype, bool], list[Tensor]] = defaultdict(list)
    if alike and _are_aligned(addresses):
        by_kind[grads[0].dtype, True] = grads
    else:
        for g in grads:
            by_kind[g.dtype, g.data_ptr() % _ALIGNMENT == 0].append(g)
    cuts = {kind: chunks_of(tensors, CONFIG.chunk) for kind, tensors in by_kind.items()}
    num_partials = sum(cut.count for cut in cuts.values())
    partial = torch.empty(num_partials, dtype=torch.float64, device=device)
    norm = torch.empty((), dtype=torch.float32, device=device)
    start = 0
    for (dtype, aligned), tensors in by_kind.items():
        cut = cuts[dtype, aligned]
        if cut.count:
            part = addresses if len(by_kind) == 1 else reader().addresses(tensors)
            table = table_of(part, tensors[0], has_parts=True)
            launch_plan(
                _global_norm_partial_kernel,
                GRAD_TYPE=_TYPES[dtype],
                ALIGNED=aligned,
                CHUNK=CONFIG.chunk,
                BLOCK=CONFIG.block,
                num_warps=CONFIG.num_warps,
                enable_fp_fusion=True,  # running sums of squares
            )((cut.count,), (table, cut.entries, cut.sizes, partial), (start,))
        start += cut.count
    launch_plan(
        _global_norm_final_kernel,
        BLOCK=CONFIG.partials,
        num_warps=CONFIG.num_warps,
        enable_fp_fusion=True,
    )((1,), (partial, grad_scale, norm), (num_partials,))
    return norm


def adamw_step(lists: StepLists, a: StepOptions) -> None:
    """Launches a step of AdamW, as `reference.adamw_step`: one small kernel and one pass."""
    _run(_adamw_pass, lists, a._replace(bias_correction=True, grad_averaging=True))


def lamb_step(lists: StepLists, a: StepOptions) -> None:
    """Launches a step of LAMB, as `reference.lamb_step`: two small kernels and two passes.

    Without weight decay and use_nvlamb the trust ratio is 1, and what remains is AdamW without decay: one pass.
    """
    _run(_lamb_passes if a.use_nvlamb or a.weight_decay != 0.0 else _adamw_pass, lists, a)


def _run(run_pass: Callable[[_Group, StepOptions], None], lists: StepLists, a: StepOptions) -> None:
    if not lists.params:
        return
    for group in _groups(lists):
        run_pass(group, a)


def _adamw_pass(group: _Group, a: StepOptions) -> None:
    lists = group.lists
    scalars, shared = _scalars(lists.steps, a)
    cut = chunks_of(lists.params, CONFIG.chunk)
    if cut.count == 0:
        return
    grads, first_grad = part_of_table(lists.grads, group.grads)
    launch_plan(
        adamw_step_kernel,
        PARAM_TYPE=_TYPES[lists.params[0].dtype],
        GRAD_TYPE=_TYPES[lists.grads[0].dtype],
        HAS_MASTER=bool(lists.master_params),
        ALIGNED=group.is_aligned,
        CHUNK=CONFIG.chunk,
        BLOCK=CONFIG.block,
        num_warps=CONFIG.num_warps,
        **_adamw_registers(lists, architecture(scalars.device)),
        enable_fp_fusion=True,  # moments, and the subtraction from p
    )(
        (cut.count,),
        (
            grads,
            table_of(group.state, lists.params[0]),
            cut.entries,
            cut.sizes,
            scalars,
            shared,
        ),
        (first_grad, len(lists.params), *_moment_arguments(a)),
    )


def _adamw_registers(lists: StepLists, name: str) -> dict[str, int]:
    """With master weights sm_120's pass spills to make room for a fifth program on a multiprocessor; 128 leave four."""
    return register_limit(128 if lists.master_params and name == "sm_120" else 0, name)


def _lamb_passes(group: _Group, a: StepOptions) -> None:
    lists = group.lists
    scalars, shared = _scalars(lists.steps, a)
    cut = chunks_of(lists.params, CONFIG.chunk)
    if cut.count == 0:
        return
    grads, first_grad = part_of_table(lists.grads, group.grads)
    state = table_of(group.state, lists.params[0])
    partial = torch.empty(cut.count, 2, dtype=torch.float64, device=scalars.device)
    ratios = torch.empty(len(lists.params), dtype=torch.float32, device=scalars.device)
    sizes = dict(ALIGNED=group.is_aligned, CHUNK=CONFIG.chunk, BLOCK=CONFIG.block)
    # The second pass must find the very u that the norm is of: contraction is on in both.
    launch = dict(num_warps=CONFIG.num_warps, enable_fp_fusion=True)
    launch_plan(
        lamb_moments_kernel,
        PARAM_TYPE=_TYPES[lists.params[0].dtype],
        GRAD_TYPE=_TYPES[lists.grads[0].dtype],
        HAS_MASTER=bool(lists.master_params),
        **sizes,
        **launch,
    )(
        (cut.count,),
        (grads, state, cut.entries, cut.sizes, scalars, shared, partial),
        (first_grad, len(lists.params), *_moment_arguments(a)),
    )
    launch_plan(
        lamb_ratio_kernel,
        BLOCK=CONFIG.partials,
        **launch,
    )((len(lists.params),), (cut.first, partial, ratios))
    launch_plan(
        lamb_update_kernel,
        PARAM_TYPE=_TYPES[lists.params[0].dtype],
        HAS_MASTER=bool(lists.master_params),
        **sizes,
        **launch,
    )(
        (cut.count,),
        (state, cut.entries, cut.sizes, scalars, shared, ratios),
        (len(lists.params), a.eps, a.weight_decay),
    )
