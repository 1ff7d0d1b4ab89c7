"""Cases of optimizer: steps of AdamW and LAMB over the parameter lists of BERT-base and BERT-large."""

import importlib
import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from benchmarks.aot.case import AotCase, KernelFacts
from benchmarks.kernels.case import KernelCase, Problem, Use, dtype_name
from benchmarks.kit import bert
from bert_fast import ops
from bert_fast.reference.optimizer import StepLists, StepOptions
from bert_fast.testing.compare import assert_close_to_truth
from bert_fast.testing.optimizers import Hyper, Lists, random_lists, written_out_step

Shapes = list[tuple[int, ...]]
# Small steps: hundreds of them on the same gradients must leave weights that still look like weights.
HYPER = {"adamw": Hyper(lr=1e-6), "lamb": Hyper(lr=1e-6, max_grad_norm=1.0)}
COMPARED = 65_536  # elements per tensor that are compared, evenly spread; with the first and the last ones


def bert_shapes(size: bert.Size, num_layers: int) -> Shapes:
    """Shapes of the parameters of BertForPreTraining, in the order of its parameters()."""
    h, wide = size.hidden, size.intermediate
    norm: Shapes = [(h,), (h,)]
    linear: Shapes = [(h, h), (h,)]
    layer = [*linear * 4, *norm, (wide, h), (wide,), (h, wide), (h,), *norm]
    embeddings: Shapes = [(bert.VOCAB_SIZE, h), (512, h), (2, h), *norm]
    return [*embeddings, *layer * num_layers, *linear, (bert.VOCAB_SIZE,), *linear, *norm, (2, h), (2,)]


def cases() -> Iterator[KernelCase]:
    """fp32 parameters, and bf16 ones with master weights, of whole models and a few layers; LAMB clips, as in use."""
    for uses, name, shapes in (
        (Use.GPU, "bert-base", bert_shapes(bert.BASE, 12)),
        (Use.GPU, "bert-large", bert_shapes(bert.LARGE, 24)),
        (Use.SMOKE, "bert-base-2-layers", bert_shapes(bert.BASE, 2)),
        (Use.CPU, "minilm", bert_shapes(bert.MINILM, 6)),
        (Use.SMALL, "odd", [(301, 7), (1,), (8192,), (8193,), (77, 131)]),
    ):
        dtypes = (torch.float32,) if uses == Use.CPU else (torch.float32, torch.bfloat16)
        for dtype, kind in itertools.product(dtypes, HYPER):
            yield KernelCase("optimizer", name, dtype, kind, partial(make, kind, shapes, dtype), uses)


def make(kind: str, shapes: Shapes, dtype: torch.dtype, device: torch.device) -> Problem:
    """A step some way into training; every contestant but bert_fast steps copies of its own."""
    hyper = HYPER[kind]
    lists = random_lists(shapes, dtype, master=dtype != torch.float32, device=device)

    def step(lists: Lists, hyper: Hyper) -> None:
        norm = None if hyper.max_grad_norm is None else ops.global_norm(lists.grads)
        keywords: dict[str, Any] = {"lr": hyper.lr, "eps": hyper.eps, "weight_decay": hyper.weight_decay}
        function = ops.adamw_step if kind == "adamw" else ops.lamb_step
        function(*lists.all, **keywords, grad_norm=norm, max_grad_norm=hyper.max_grad_norm)

    def fast(*inputs: Tensor) -> None:
        step(lists, hyper)

    def verify() -> None:
        large = replace(hyper, lr=0.01)  # a step that leaves no doubt whether it was made
        actual = lists.copy()
        step(actual, large)
        truth, plain = (written_out_step(kind, lists.to(dtype), large) for dtype in (torch.float64, torch.float32))
        for name, ours, theirs, exact in (
            ("param", actual.master_params or actual.params, plain.params, truth.params),
            ("exp_avg", actual.exp_avgs, plain.exp_avgs, truth.exp_avgs),
            ("exp_avg_sq", actual.exp_avg_sqs, plain.exp_avg_sqs, truth.exp_avg_sqs),
        ):
            for triple in zip(ours, theirs, exact, strict=True):
                assert_close_to_truth("optimizer", name, *map(_sample, triple))
        for p, master in zip(actual.params, actual.master_params, strict=False):
            assert torch.equal(p, master.to(p.dtype)), "parameters are not their rounded master weights"

    elements, e = sum(p.numel() for p in lists.params), lists.grads[0].element_size()
    floor = 24 + e if kind == "adamw" else 36 + e
    floor += (2 * e if lists.master_params else 0) + (0 if hyper.max_grad_norm is None else e)
    return Problem(
        tuple(t for column in lists.all for t in column), None, fast, _stock(kind, lists, hyper),
        bytes_moved={"step": floor * elements}, verify=verify, peers=_peers(kind, lists, hyper),
    )  # fmt: skip


def _sample(t: Tensor) -> Tensor:
    flat = t.flatten()
    ends = min(flat.numel(), 8192 + 8)
    return torch.cat([flat[:ends], flat[-ends:], flat[:: max(1, flat.numel() // COMPARED)]])


def _stock(kind: str, lists: Lists, hyper: Hyper) -> Callable[..., None]:
    """AdamW as PyTorch ships it (fused), LAMB from its multi-tensor operators; made at the first call."""
    state: dict[str, Any] = {}

    def start() -> None:
        weights = [t.clone() for t in lists.master_params or lists.params]
        state.update(weights=weights, params=[p.clone() for p in lists.params] if lists.master_params else weights)
        if kind == "adamw":
            for w in weights:
                w.grad = torch.zeros_like(w)
            numbers = {"lr": hyper.lr, "eps": hyper.eps, "weight_decay": hyper.weight_decay}
            state["optimizer"] = torch.optim.AdamW(weights, **numbers, fused=True)
        else:
            state.update(m=[t.clone() for t in lists.exp_avgs], v=[t.clone() for t in lists.exp_avg_sqs], step=1)

    @torch.no_grad()
    def stock(*inputs: Tensor) -> None:
        if not state:
            start()
        weights, params = state["weights"], state["params"]
        grads = [g.to(w.dtype) for g, w in zip(lists.grads, weights, strict=True)]
        if kind == "adamw":
            for w, g in zip(weights, grads, strict=True):
                w.grad = g
            state["optimizer"].step()
        else:
            foreach_lamb(weights, grads, state["m"], state["v"], state["step"], hyper)
            state["step"] += 1
        if params is not weights:
            torch._foreach_copy_(params, weights)

    return stock


def foreach_lamb(p: list[Tensor], g: list[Tensor], m: list[Tensor], v: list[Tensor], step: int, hyper: Hyper) -> None:
    """LAMB as one writes it with PyTorch's multi-tensor operators."""
    assert hyper.max_grad_norm is not None
    norm = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(g)))
    g = torch._foreach_mul(g, (hyper.max_grad_norm / norm).clamp(max=1.0))
    torch._foreach_lerp_(m, g, 1 - hyper.beta1)
    torch._foreach_mul_(v, hyper.beta2)
    torch._foreach_addcmul_(v, g, g, 1 - hyper.beta2)
    denominator = torch._foreach_sqrt(v)
    torch._foreach_div_(denominator, math.sqrt(1 - hyper.beta2**step))
    torch._foreach_add_(denominator, hyper.eps)
    update = torch._foreach_div(m, denominator)
    torch._foreach_div_(update, 1 - hyper.beta1**step)
    torch._foreach_add_(update, p, alpha=hyper.weight_decay)
    p_norm, u_norm = (torch.stack(torch._foreach_norm(t)) for t in (p, update))
    ratio = torch.where((p_norm > 0) & (u_norm > 0), p_norm / u_norm, 1.0)
    torch._foreach_mul_(update, list((hyper.lr * ratio).unbind()))
    torch._foreach_sub_(p, update)


def _peers(kind: str, lists: Lists, hyper: Hyper) -> dict[str, Callable[..., None]]:
    """NVIDIA apex's optimizers, which have no master weights: fp32 only."""
    name = {"adamw": "FusedAdam", "lamb": "FusedLAMB"}[kind]
    try:
        importlib.import_module("amp_C")
        cls = getattr(importlib.import_module("apex.optimizers"), name)
    except (ImportError, AttributeError):  # not there, without its extensions, or the unrelated package
        return {}
    if lists.master_params or not lists.params[0].is_cuda:
        return {}
    state: dict[str, Any] = {}

    def peer(*inputs: Tensor) -> None:
        if not state:
            weights = [p.clone() for p in lists.params]
            numbers = {"lr": hyper.lr, "eps": hyper.eps, "weight_decay": hyper.weight_decay}
            numbers |= {} if hyper.max_grad_norm is None else {"max_grad_norm": hyper.max_grad_norm}
            state.update(weights=weights, grads=[g.clone() for g in lists.grads], optimizer=cls(weights, **numbers))
        for w, g in zip(state["weights"], state["grads"], strict=True):
            w.grad = g
        state["optimizer"].step()

    return {f"apex {name}": peer}


def aot_cases() -> Iterator[AotCase]:
    """Every kernel for parameters and gradients of each dtype, half-precision ones with and without master weights."""
    yield _aot_case(torch.float32, has_master=False)
    for dtype, has_master in itertools.product((torch.float16, torch.bfloat16), (False, True)):
        yield _aot_case(dtype, has_master)


def _aot_case(dtype: torch.dtype, has_master: bool) -> AotCase:
    """BERT's tensors are aligned; the variants for tensors that are not access single elements by nature."""
    from bert_fast.triton import _pointer_tables as tables
    from bert_fast.triton import optimizer as family

    # Wherever memory lies, no table of addresses is there already.
    @mock.patch.object(tables, "_address_cache", new_callable=tables._Cache)
    def launch(_: object) -> None:
        params, grads = ([torch.zeros(768, dtype=dtype)] for _ in range(2))
        exp_avgs, exp_avg_sqs = ([torch.zeros(768)] for _ in range(2))
        masters = [torch.zeros(768)] if has_master else []
        steps, scale, found_inf = [torch.zeros(())], torch.ones(()), torch.zeros(())
        norm = family.global_norm(grads, scale)
        lists = StepLists(params, grads, exp_avgs, exp_avg_sqs, steps, masters)
        numbers = (torch.zeros(()), 0.9, 0.999, 1e-6, 0.01)
        a = StepOptions(*numbers, True, True, False, norm, 1.0, scale, found_inf)
        family.adamw_step(lists, a)
        family.lamb_step(lists, a)

    grad, weight = dtype.itemsize, 4 if has_master else dtype.itemsize
    copy = dtype.itemsize if has_master else 0
    moved = {
        "_global_norm_partial_kernel": grad,
        "adamw_step_kernel": grad + 2 * weight + 16 + 2 * copy,
        "lamb_moments_kernel": grad + weight + 16 + copy,
        "lamb_update_kernel": 2 * weight + 8 + copy,
    }
    facts = {kernel: KernelFacts(family.CONFIG.block, float(nbytes)) for kernel, nbytes in moved.items()}
    return AotCase(f"{dtype_name(dtype)}{' master' if has_master else ''}", launch, facts)
