"""Rotary position embedding of packed tokens, on any back-end, over the memory of query and key where it may be.

Registered as `bert_fast::rotary_fwd` and `_bwd`, which make new tensors: this is what tracing and modes see. Else an
autograd function writes in place: the result over qkv if the caller says so, the gradient over the upstream one if
nothing else holds it.
"""

from typing import Any

import torch
from torch import Tensor

from bert_fast.backend import OpSpec, requested, resolve
from bert_fast.checks import check_dtype, check_flag, check_number, check_same_device, check_shape, check_tensor
from bert_fast.ops._autocast import without_autocast
from bert_fast.ops._define import define
from bert_fast.ops._memory import name_call
from bert_fast.ops._register import are_plain, is_watched
from bert_fast.ops._saved import keep_tensors, kept_tensors
from bert_fast.ops._sole_holder import holders, is_sole
from bert_fast.reference.rotary import Rotary

_DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)


def rotary(
    qkv: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool = False, inplace: bool = False,
    backend: str | None = None,
) -> Tensor:  # fmt: skip
    """y1 = x1 cos - x2 sin, y2 = x2 cos + x1 sin for every pair (x1, x2) of the heads of query and key.

    Args:
        qkv (Tensor [T, 3, A, D], fp32/fp16/bf16/fp64; D even): query, key and value of every token, as `attention_qkv`
            takes them; value is passed through. Or [T, A, D]: all heads are turned, of queries or keys alone. Any
            strides; where neighbours in a head are none in memory, Triton works on a copy.
        cos (Tensor [T, D / 2], fp32; fp64 beside fp64): of the angles, see `rotary_tables`; no gradient.
        sin (Tensor [T, D / 2], dtype of cos): of the same angles.
        interleaved: pairs are (x[2 i], x[2 i + 1]), as RoFormer has them; else (x[i], x[i + D / 2]), the halves of a
            head.
        inplace: write the result over qkv, of which value is not touched then. The caller gives qkv up: in compiled
            graphs, under `torch.func` and where modes watch, the result is a new tensor and qkv stays as it was.
        backend: "triton", "torch" or "reference"; None takes the first that can run the call.

    Returns:
        y (Tensor, shape and dtype of qkv): new and contiguous, or the memory of qkv.

    Raises:
        TypeError, ValueError: the message names the argument.
        BackendError: the named back-end cannot run the call.
        RuntimeError: PyTorch's own, where a leaf that requires a gradient would be overwritten; and in backward,
            where a function saved qkv before it was.

    Differentiable once, in qkv. Backward turns by the negative angle, over the upstream gradient where nothing else
        holds it. Saves cos and sin, which all layers of a call share. Deterministic; no device sync.

    Precision:
        computed in fp32 (fp64 for fp64), rounded once. transformers casts cos and sin to the dtype of qkv first and
        rounds both products and the sum, which in bf16 errs 1.6 times as much.

    Autocast: the dtype of qkv stays.
    In place, qkv should be a whole tensor or `product.view(T, 3, A, D)`: of other views PyTorch copies the gradient
        three times in backward.
    Source: Su et al. 2021 (arXiv:2104.09864), section 3.4.2.

    Example:
        >>> cos, sin = ops.rotary_tables(torch.tensor([1.0, 0.1]), torch.arange(5))
        >>> ops.rotary(torch.randn(5, 3, 2, 4), cos, sin).shape
        torch.Size([5, 3, 2, 4])
    """
    _check(qkv, cos, sin)
    check_flag("interleaved", interleaved)
    check_flag("inplace", inplace)
    if inplace and any(size > 1 and not stride for size, stride in zip(qkv.shape, qkv.stride(), strict=True)):
        raise ValueError(f"qkv: expected one place per element (inplace), got strides {qkv.stride()}")
    backend = requested(backend)
    if is_watched(by_profiler=False) or not are_plain((qkv, cos, sin)):
        if qkv.dim() == 4:
            return _op(qkv, cos, sin, interleaved, backend)
        return _op(qkv.unsqueeze(1), cos, sin, interleaved, backend).squeeze(1)
    if not (torch.is_grad_enabled() and qkv.requires_grad):
        y = _make(qkv, qkv.shape, cos, sin, interleaved, backend, inplace, False)
        if inplace and not y.is_inference():
            torch.autograd.graph.increment_version(y)
        return y
    if inplace:
        _check_leaf(qkv)
    if inplace and (whole := _whole(qkv)) is not None:
        y = _Eager.apply(whole, qkv.shape, cos, sin, interleaved, backend, True)
        return y.view(qkv.shape)
    return _Eager.apply(qkv, qkv.shape, cos, sin, interleaved, backend, inplace)


def rotary_tables(inv_freq: Tensor, positions: Tensor, scaling: float = 1.0) -> tuple[Tensor, Tensor]:
    """cos and sin of positions * inv_freq, times scaling, for `rotary`.

    Args:
        inv_freq (Tensor [D / 2], fp32 or fp64): angle of a step, in radians: theta ** (-2 i / D).
        positions (Tensor [T], integers or floating): of every token within its text.
        scaling: factor of both tables (YaRN's and others' attention factor).

    Returns:
        cos, sin (Tensor [T, D / 2], dtype of inv_freq), the first halves of those that transformers makes, to the bit:
        angles are products in the dtype of inv_freq, so from position 2 ** 24 on fp32 rounds positions.

    Raises:
        TypeError, ValueError: the message names the argument.

    No gradient. No device sync.

    Example:
        >>> cos, sin = ops.rotary_tables(torch.tensor([1.0]), torch.tensor([0, 1]))
        >>> [round(number, 4) for number in cos.flatten().tolist()]
        [1.0, 0.5403]
    """
    check_shape("inv_freq", inv_freq, ("D / 2",))
    check_dtype("inv_freq", inv_freq, (torch.float32, torch.float64))
    check_shape("positions", positions, ("T",))
    if positions.dtype is torch.bool or positions.is_complex():
        kind = str(positions.dtype).removeprefix("torch.")
        raise TypeError(f"positions: expected an integer or floating-point dtype, got {kind}")
    check_same_device("positions", positions, "inv_freq", inv_freq)
    scaling = check_number("scaling", scaling)
    with torch.no_grad():
        angles = positions.to(inv_freq.dtype)[:, None] * inv_freq
        cos, sin = angles.cos(), angles.sin()
        return (cos, sin) if scaling == 1.0 else (cos * scaling, sin * scaling)


def _check(qkv: Tensor, cos: Tensor, sin: Tensor) -> None:
    check_tensor("qkv", qkv)
    if not (qkv.dim() == 3 or (qkv.dim() == 4 and qkv.shape[1] == 3)) or qkv.shape[-1] % 2 or not qkv.shape[-1]:
        raise ValueError(f"qkv: expected shape [T, 3, A, D] or [T, A, D] with an even D, got {list(qkv.shape)}")
    check_dtype("qkv", qkv, _DTYPES)
    wide = torch.float64 if qkv.dtype is torch.float64 else torch.float32
    for name, table in (("cos", cos), ("sin", sin)):
        check_shape(name, table, (qkv.shape[0], qkv.shape[-1] // 2))
        check_dtype(name, table, (wide,))
        check_same_device(name, table, "qkv", qkv)
        if table.requires_grad and torch.is_grad_enabled():
            raise ValueError(f"{name}: expected a Tensor that requires no gradient, got one that does")


def _check_leaf(qkv: Tensor) -> None:
    """Raises what PyTorch would raise after qkv is overwritten."""
    base = qkv if qkv._base is None else qkv._base
    if base.is_leaf and base.requires_grad:
        what = "a leaf Variable" if base is qkv else "a view of a leaf Variable"
        raise RuntimeError(f"{what} that requires grad is being used in an in-place operation.")


def _whole(qkv: Tensor) -> Tensor | None:
    """The tensor of which qkv is all elements in their order, made by nothing but `view`; None if there is none.

    An autograd function that writes to it costs nothing beyond itself. One that writes to a view has PyTorch copy the
    gradient of all of the base, then the view's part of it, then the result back.
    """
    base, node = qkv._base, qkv.grad_fn
    if base is None or node is None or base.grad_fn is None or base.dtype is not qkv.dtype:
        return None
    if base.numel() != qkv.numel() or not (base.is_contiguous() and qkv.is_contiguous()):
        return None
    made = base.grad_fn
    while node is not made:  # a function of the caller's may return a view, and have a gradient of its own
        if node is None or node.name() != "ViewBackward0":
            return None
        node = node.next_functions[0][0]
    return base


def _as_parts(t: Tensor, shape: torch.Size) -> Tensor:
    """[T, P, A, D] of a tensor of these elements in order. shape: of the op's argument."""
    if t.shape != shape:
        t = t.view(shape)
    return t if len(shape) == 4 else t.unsqueeze(1)


@without_autocast
def _make(
    x: Tensor, shape: torch.Size, cos: Tensor, sin: Tensor, interleaved: bool, backend: str, inplace: bool,
    is_backward: bool,
) -> Tensor:  # fmt: skip
    """x turned: x itself if in place, else a new tensor of this shape."""
    parts = _as_parts(x, shape)
    module: Any = resolve("rotary", OpSpec(x.device, x.dtype), backend)
    try:
        if inplace:
            module.rotary_in_place(Rotary(parts, cos, sin, interleaved), is_backward)
            return x
        if is_backward:
            a = Rotary(None, cos, sin, interleaved)  # type: ignore[arg-type]  # what backward is given
            return module.rotary_bwd(a, parts)["qkv"].contiguous().view(x.shape)
        return module.rotary_fwd(Rotary(parts, cos, sin, interleaved)).contiguous().view(shape)
    except torch.OutOfMemoryError as error:
        name_call(error, "rotary_bwd" if is_backward else "rotary_fwd", (x,))
        raise


_op = define("rotary", Rotary, outputs={"y": "x T P A 2F"}, backward="dy cos sin interleaved", gradients="qkv")


class _Eager(torch.autograd.Function):
    """What the op and its formula compute, in memory that is there already."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, shape: torch.Size, cos: Tensor, sin: Tensor, interleaved: bool, backend: str, inplace: bool
    ) -> Tensor:
        """x: of shape, or its elements in order."""
        ctx.set_materialize_grads(False)
        keep_tensors(ctx, (cos, sin))
        ctx.others = (shape, interleaved, backend)
        if inplace:
            ctx.mark_dirty(x)
        return _make(x, shape, cos, sin, interleaved, backend, inplace, False)

    @staticmethod
    def backward(ctx: Any, dy: Tensor | None) -> Any:
        if dy is None:
            return (None,) * 7
        is_free = is_sole(holders(dy))  # to be asked first: whatever looks at dy may hold it
        cos, sin = kept_tensors(ctx, ("cos", "sin"))
        shape, interleaved, backend = ctx.others
        if torch.is_grad_enabled() or is_watched(by_profiler=False) or not are_plain((dy, cos, sin)):
            parts = _as_parts(dy.contiguous(), shape)
            dx = torch.ops.bert_fast.rotary_bwd(parts, cos, sin, interleaved, backend).view(dy.shape)
        else:
            is_free = is_free and dy.is_contiguous()
            dx = _make(dy if is_free else dy.contiguous(), shape, cos, sin, interleaved, backend, is_free, True)
        return dx, *(None,) * 6
