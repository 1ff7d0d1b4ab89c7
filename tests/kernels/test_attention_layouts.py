"""The Triton kernels of attention, in the interpreter: where tensors lie, and what lies beside them."""

from pathlib import Path

import pytest
import torch

from bert_fast import backend
from bert_fast.testing.attention import AttentionCase

from .attention_grid import OP, arguments_of, check, heads_first, in_fused_buffer, run

pytestmark = [
    pytest.mark.interpreter,
    # Infinities and NaN that tests put there: NumPy says so, a GPU does not.
    pytest.mark.filterwarnings("ignore:.* encountered in:RuntimeWarning", "ignore:All-NaN slice:RuntimeWarning"),
]

DTYPES = [torch.float32, torch.float16]


@pytest.fixture
def kernels():  # type: ignore[no-untyped-def]
    """The module under test, imported only where the interpreter runs: importing triton costs a second."""
    return backend.resolve(OP, backend.OpSpec(torch.device("cpu"), torch.float32), "triton")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
@pytest.mark.parametrize("lengths_k", [None, (6, 35, 9)])
def test_nothing_leaks_into_other_sequences(  # type: ignore[no-untyped-def]
    kernels, dtype: torch.dtype, bad: float, lengths_k: tuple[int, ...] | None
) -> None:
    case = AttentionCase((7, 33, 5), lengths_k, num_heads=1, head_dim=24, dropout_p=0.1)
    inputs, spoilt = case.inputs(dtype), case.inputs(dtype)
    bounds_q, bounds_k = (cu.tolist() for cu in case.cu_seqlens())
    for name in ("q", "k", "v", "dout"):
        start, end = (bounds_q if name in ("q", "dout") else bounds_k)[1:3]
        spoilt[name][start:end] = bad
    good, results = (run(kernels, arguments_of(case, given), given["dout"]) for given in (inputs, spoilt))
    for name in good:
        start, end = (bounds_k if name in ("dk", "dv") else bounds_q)[1:3]
        one, other = (t.transpose(0, 1) if name == "lse" else t for t in (good[name], results[name]))
        for part in (slice(None, start), slice(end, None)):
            assert torch.equal(one[part], other[part]), name
        assert not torch.isfinite(other[start:end]).all(), f"{name}: what is not finite must show"


@pytest.mark.parametrize(("dtype", "length"), [(torch.float32, 20), (torch.float16, 40)])
def test_expanded_and_transposed_gradients(kernels, dtype: torch.dtype, length: int) -> None:  # type: ignore[no-untyped-def]
    case = AttentionCase((length, 2), num_heads=2, head_dim=32, dropout_p=0.1)
    inputs = case.inputs(dtype)
    dout = inputs["dout"]
    relaid = {
        "one token's": dout[:1].expand_as(dout),
        "one head's": dout[:, :1].expand_as(dout),
        "one number": dout[:1, :1, :1].expand_as(dout),
        "columns first": dout.permute(2, 1, 0).contiguous().permute(2, 1, 0),
        "every other column": dout.repeat_interleave(2, dim=2)[..., ::2],
    }
    for name, gradient in relaid.items():
        assert not gradient.is_contiguous(), name
        check(kernels, case, dtype, inputs | {"dout": gradient})


@pytest.mark.parametrize("head_dim", [16, 40])
@pytest.mark.parametrize("dtype", DTYPES)
def test_layouts_give_the_same_bits(kernels, head_dim: int, dtype: torch.dtype) -> None:  # type: ignore[no-untyped-def]
    case = AttentionCase((9, 0, 40), num_heads=2, head_dim=head_dim, dropout_p=0.1)
    inputs = case.inputs(dtype)
    expected = run(kernels, arguments_of(case, inputs), inputs["dout"])
    for layout in (in_fused_buffer, heads_first):
        relaid = layout(inputs)
        results = run(kernels, arguments_of(case, relaid), relaid["dout"])
        assert all(torch.equal(results[name], expected[name]) for name in expected), layout.__name__


def test_expanded_queries_and_keys(kernels) -> None:  # type: ignore[no-untyped-def]
    """One token for all, stride 0."""
    case = AttentionCase((5, 40), head_dim=16, dropout_p=0.1)
    inputs = case.inputs(torch.float32)
    check(kernels, case, torch.float32, inputs | {name: inputs[name][:1].expand_as(inputs[name]) for name in "qkv"})


def test_strided_offsets_and_names(kernels) -> None:  # type: ignore[no-untyped-def]
    """cu_seqlens and coords whose elements do not stand side by side."""
    case = AttentionCase((5, 40), (33, 2), head_dim=16, dropout_p=0.1, causal=True, holes=True)
    a = arguments_of(case, case.inputs(torch.float32))
    spread = {
        name: getattr(a, name).repeat_interleave(2, dim=0)[::2]
        for name in ("cu_seqlens_q", "cu_seqlens_k", "coords_q", "coords_k")
    }
    check(kernels, case, torch.float32, **spread)
    check(kernels, case, torch.float32, coords_q=a.coords_q.T.contiguous().T, coords_k=a.coords_k.T.contiguous().T)


def test_strides_beyond_two_to_the_31(kernels, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    """Heads or tokens 2^31 elements apart, the next one or the one after, in a sparse file that takes no space."""
    case = AttentionCase((3,), num_heads=2, head_dim=16, dropout_p=0.1)
    inputs = case.inputs(torch.float16)
    expected = run(kernels, arguments_of(case, inputs), inputs["dout"])
    far_apart = 2**31 + 9
    for strides in ((16, far_apart, 1), (far_apart, 16, 1), (2**30 + 9, 16, 1)):
        far = {}
        for name, t in inputs.items():
            size = sum((n - 1) * stride for n, stride in zip(t.shape, strides, strict=True)) + 1
            file = str(tmp_path / f"{name}{strides[0]}")
            storage = torch.from_file(file, shared=True, size=size, dtype=torch.float16)
            far[name] = storage.as_strided(t.shape, strides).copy_(t)
        results = run(kernels, arguments_of(case, far), far["dout"])
        assert all(torch.equal(results[name], expected[name]) for name in expected)
