"""The Triton kernels of dropout-add-LayerNorm, in the interpreter, against the fp64 reference.

Most tests let the kernels choose what backward reads (`saves` "device"), once with weights that let it be y and once
with weights that do not.
"""

from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from bert_fast import backend
from bert_fast.reference import dropout_add_layer_norm as reference
from bert_fast.reference.dropout import keep_mask
from bert_fast.reference.dropout_add_layer_norm import (
    MAX_WEIGHT,
    MIN_WEIGHT,
    DropoutAddLayerNorm,
    max_shift,
    output_suffices,
)
from bert_fast.testing.compare import assert_close_to_truth
from bert_fast.testing.tolerances import RELATIVE
from bert_fast.testing.traffic import traffic

pytestmark = pytest.mark.interpreter

OP = "dropout_add_layer_norm"
SITE = 11
SEED = torch.tensor([-0x0123_4567_89AB_CDEF], dtype=torch.int64)  # negative: the upper half of the key has its top bit


@pytest.fixture
def kernels():  # type: ignore[no-untyped-def]
    """The module under test, imported only where the interpreter runs: importing triton costs a second."""
    spec = backend.OpSpec(torch.device("cpu"), torch.float32, hidden_size=768)
    return backend.resolve(OP, spec, "triton")


def coords_of(num_tokens: int) -> Tensor:
    """Sequences of three tokens, in rows and at positions far from 0."""
    index = torch.arange(num_tokens, dtype=torch.int32)
    return torch.stack([index // 3 + 1_000_003, index % 3 + 2**31 - 3], dim=1)


@dataclass
class Inputs:
    """One call, forward and backward."""

    x: Tensor
    residual: Tensor
    x_bias: Tensor | None
    weight: Tensor
    bias: Tensor
    dy: Tensor
    dropout_p: float
    eps: float = 1e-12
    saves: str = "device"
    mask: tuple[Tensor | None, Tensor | None, int] = field(init=False)

    def __post_init__(self) -> None:
        self.mask = (SEED, coords_of(len(self.x)), SITE) if self.dropout_p else (None, None, SITE)

    @property
    def keeps_h(self) -> bool:
        """Whether forward stores h."""
        return self.saves == "input" or (
            self.saves == "device" and not output_suffices(self.weight, self.bias, self.x.dtype)
        )

    @property
    def record(self) -> DropoutAddLayerNorm:
        """The arguments of the op."""
        return DropoutAddLayerNorm(
            self.x, self.residual, self.x_bias, self.weight, self.bias, self.eps, self.dropout_p, *self.mask, self.saves
        )

    def tensors(self) -> list[Tensor]:
        named = (self.x, self.residual, self.x_bias, self.weight, self.bias, self.dy)
        return [t for t in named if t is not None]


def make_inputs(
    num_tokens: int,
    hidden_size: int,
    dtype: torch.dtype = torch.float32,
    dropout_p: float = 0.1,
    *,
    has_bias: bool = True,
    parameter_dtype: torch.dtype | None = None,
    offset: float = 0.0,
    scale: float = 1.0,
    suffices: bool = False,
) -> Inputs:
    """suffices: parameters with which y is all that backward needs; without, most weights are too close to 0."""
    x, residual, dy = torch.randn(3, num_tokens, hidden_size).unbind()
    x_bias, weight, bias = torch.randn(3, hidden_size).unbind()
    if suffices:
        weight = torch.where(weight < 0, weight - 0.2, weight + 0.2)
        bias = 1.45 * weight * (2 * torch.rand(hidden_size) - 1)  # no rounding may lift it above 1.5 times the weight
    else:
        bias[0] = 9 * weight[0]
    x_bias, weight, bias = (t.to(parameter_dtype or dtype) for t in (x_bias, weight, bias))
    return Inputs(
        (x * scale).to(dtype),
        (residual * scale + offset).to(dtype),
        x_bias if has_bias else None,
        weight,
        bias,
        dy.to(dtype),
        dropout_p,
    )


def run(family, i: Inputs) -> tuple[Tensor, ...]:  # type: ignore[no-untyped-def]
    """(y, h, mean, rstd, dx, dresidual, dx_bias, dweight, dbias) of one implementation."""
    y, h, mean, rstd = family.dropout_add_layer_norm_fwd(i.record)
    made = family.dropout_add_layer_norm_bwd(i.record, i.dy, y, h, mean, rstd)
    return y, h, mean, rstd, *(made[name] for name in ("x", "residual", "x_bias", "weight", "bias"))


def run_plain(i: Inputs) -> tuple[Tensor, ...]:
    """The same from PyTorch's operators and autograd, every intermediate rounded to the dtype as eager mode does."""
    x, residual, weight, bias = (t.clone().requires_grad_() for t in (i.x, i.residual, i.weight, i.bias))
    x_bias = (i.x_bias if i.x_bias is not None else torch.zeros_like(i.weight)).clone().requires_grad_()
    branch = x + x_bias.to(x.dtype)
    if i.dropout_p:
        keep = keep_mask(SEED, SITE, coords_of(len(x)), x.shape[1], i.dropout_p)
        branch = branch * keep / (1 - i.dropout_p) if i.dropout_p < 1 else branch * 0
    h = residual + branch
    y = torch.nn.functional.layer_norm(h.to(weight.dtype), weight.shape, weight, bias, i.eps).to(x.dtype)
    y.backward(i.dy)
    with torch.no_grad():
        mean = h.float().mean(1)
        rstd = (h.float().var(1, unbiased=False) + i.eps).rsqrt()
    grads = [t.grad for t in (x, residual, x_bias, weight, bias)]
    return tuple(t.detach() for t in (y, h, mean, rstd, *grads) if t is not None)


def check(kernels, i: Inputs, *, keeps_h: bool | None = None) -> None:  # type: ignore[no-untyped-def]
    """Compares every output with the fp64 reference on the same rounded inputs; inputs must stay as they were.

    keeps_h: whether h is to be there; by default what the weights say.
    """
    keeps_h = i.keeps_h if keeps_h is None else keeps_h
    before = [t.clone() for t in i.tensors()]
    double = replace(
        i, **{n: t.double() for n, t in vars(i).items() if isinstance(t, Tensor) and n != "mask"}
    )  # fmt: skip
    names = ("y", "h", "mean", "rstd", "dx", "dresidual", "dx_bias", "dweight", "dbias")
    for name, actual, plain, truth in zip(names, run(kernels, i), run_plain(i), run(reference, double), strict=True):
        if name == "h" and not keeps_h:  # allocated or not, nothing was written
            assert actual is None if i.saves == "output" else torch.isnan(actual).all()
            continue
        of_half = name in ("mean", "rstd") and i.x.dtype != torch.float32
        assert_close_to_truth(OP, f"{name}_of_half" if of_half else name, actual, plain, truth)
        assert actual.is_contiguous(), name
    for tensor, copy in zip(i.tensors(), before, strict=True):
        assert torch.equal(tensor, copy)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("hidden_size", [8, 13, 33, 96, 384, 768, 1000, 1024])
@pytest.mark.parametrize("suffices", [False, True])
def test_widths(kernels, hidden_size: int, dtype: torch.dtype, suffices: bool) -> None:  # type: ignore[no-untyped-def]
    check(kernels, make_inputs(5, hidden_size, dtype, suffices=suffices))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("hidden_size", "dtype"),
    [(128, torch.float16), (312, torch.float32), (1500, torch.float16), (4096, torch.float32), (8192, torch.float16)],
)
def test_more_widths(kernels, hidden_size: int, dtype: torch.dtype) -> None:  # type: ignore[no-untyped-def]
    i = make_inputs(2, hidden_size, dtype, suffices=hidden_size != 1500)
    # The widest fp32 rows keep h whatever the weights are.
    keeps_h = kernels.launch_config(hidden_size, dtype, "sm_90").keeps_h
    assert keeps_h == (hidden_size == 8192 and dtype == torch.float32)
    check(kernels, i, keeps_h=keeps_h or i.keeps_h)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("num_tokens", [0, 1, 3, 17, 64])
def test_numbers_of_tokens(kernels, num_tokens: int, dtype: torch.dtype) -> None:  # type: ignore[no-untyped-def]
    check(kernels, make_inputs(num_tokens, 96, dtype, suffices=num_tokens != 17))


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("dropout_p", [0.0, 0.1, 0.5, 1.0])
@pytest.mark.parametrize("suffices", [False, True])
def test_dropout_and_bias(kernels, dropout_p: float, has_bias: bool, suffices: bool) -> None:  # type: ignore[no-untyped-def]
    check(kernels, make_inputs(7, 33, dropout_p=dropout_p, has_bias=has_bias, suffices=suffices))


@pytest.mark.parametrize("saves", ["input", "output"])
@pytest.mark.parametrize("dropout_p", [0.0, 0.1])
def test_told_what_to_save(kernels, saves: str, dropout_p: float) -> None:  # type: ignore[no-untyped-def]
    """Both answers, given by the caller; the output gives the same bits as the kernels' own choice of it."""
    i = replace(make_inputs(7, 33, torch.float16, dropout_p, suffices=True), saves=saves)
    check(kernels, i)
    if saves == "output":
        told, chosen = run(kernels, i), run(kernels, replace(i, saves="device"))
        assert all(torch.equal(a, b) for n, (a, b) in enumerate(zip(told, chosen, strict=True)) if n != 1)


@pytest.mark.parametrize("suffices", [False, True])
def test_half_precision_with_fp32_parameters(kernels, suffices: bool) -> None:  # type: ignore[no-untyped-def]
    check(kernels, make_inputs(5, 40, torch.float16, parameter_dtype=torch.float32, suffices=suffices))


UNSAFE = {
    "zero": (0.0, 0.0), "tiny": (1e-6, 0.0), "negative and tiny": (-1e-6, 1e-6), "huge bias": (0.5, 300.0),
    "huge": (2e4, 1.0),
}  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("name", UNSAFE)
def test_one_unsafe_column_is_enough(kernels, name: str, dtype: torch.dtype) -> None:  # type: ignore[no-untyped-def]
    """A weight near 0, or a bias that buries it: everything, this column's gradients included, comes from h."""
    i = make_inputs(6, 72, dtype, suffices=True)
    i.weight[71], i.bias[71] = UNSAFE[name]
    assert i.keeps_h
    if name == "huge":
        i.dy[:, 71] = 0.0  # comparisons are absolute: its values would hide all others
        i.residual[:, 71] = i.x[:, 71] = i.x_bias[71] = 0.0
    check(kernels, i)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_weights_all_zero(kernels, dtype: torch.dtype) -> None:  # type: ignore[no-untyped-def]
    """As at the start of residual networks that initialise their last LayerNorm with zeros."""
    i = make_inputs(6, 72, dtype, suffices=True)
    i.weight.zero_()
    check(kernels, i)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("weight", [MIN_WEIGHT, MAX_WEIGHT])
def test_weights_at_the_limits(kernels, dtype: torch.dtype, weight: float) -> None:  # type: ignore[no-untyped-def]
    """The smallest and largest weights, with the largest bias, of which n is read from y."""
    i = make_inputs(6, 72, dtype, suffices=True)
    i.weight.copy_(weight * i.weight.sign())
    i.bias.copy_(max_shift(dtype) * i.weight * torch.randn(72).sign())
    assert not i.keeps_h
    i = replace(i, dy=(i.dy.float() / weight).to(dtype))  # so that gradients are near 1
    named = zip(("y", "mean", "rstd", "dx", "dresidual", "dx_bias"), (0, 2, 3, 4, 5, 6), strict=True)
    double = replace(i, **{n: t.double() for n, t in vars(i).items() if isinstance(t, Tensor) and n != "mask"})
    results = run(kernels, i), run_plain(i), run(reference, double)
    for name, index in named:
        actual, plain, truth = (result[index] / (weight if name == "y" else 1.0) for result in results)
        of_half = name in ("mean", "rstd") and i.x.dtype != torch.float32
        assert_close_to_truth(OP, f"{name}_of_half" if of_half else name, actual, plain, truth)


@pytest.mark.parametrize("where", ["weight", "bias"])
def test_parameters_that_are_not_numbers(kernels, where: str) -> None:  # type: ignore[no-untyped-def]
    """NaN takes the path of h, and shows where plain torch shows it."""
    i = make_inputs(4, 24, dropout_p=0.0, suffices=True)  # plain torch multiplies what is dropped by 0
    getattr(i, where)[5] = float("nan")
    assert i.keeps_h
    for actual, plain in zip(run(kernels, i), run_plain(i), strict=True):
        assert torch.equal(torch.isnan(actual), torch.isnan(plain))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("suffices", [False, True])
def test_rows_far_from_zero(kernels, dtype: torch.dtype, suffices: bool) -> None:  # type: ignore[no-untyped-def]
    """An offset of -20 with a spread of 0.01 defeats variances computed as E[h^2] - E[h]^2."""
    check(kernels, replace(make_inputs(5, 96, dtype, offset=-20.0, scale=0.01, suffices=suffices), eps=1e-5))


@pytest.mark.parametrize(("dtype", "scale"), [(torch.float32, 1e15), (torch.float16, 5e3)])
def test_huge_values(kernels, dtype: torch.dtype, scale: float) -> None:  # type: ignore[no-untyped-def]
    i = make_inputs(5, 96, dtype, scale=scale)
    units = {"y": 1.0, "h": scale}  # compared after division: floors are meant for values near 1
    for (name, unit), actual, expected in zip(units.items(), run(kernels, i), run(reference, i), strict=False):
        assert torch.isfinite(actual).all()
        assert_close_to_truth(OP, name, actual / unit, expected / unit, expected.double() / unit)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_one_column(kernels, dtype: torch.dtype) -> None:  # type: ignore[no-untyped-def]
    """A row of one column is its own mean: y is bias and nothing flows back, exactly."""
    i = make_inputs(5, 1, dtype)
    y, _, mean, _, dx, dresidual, *_ = run(kernels, i)
    assert torch.equal(y, i.bias.expand_as(y))
    assert torch.isfinite(mean).all()
    assert not dx.any() and not dresidual.any()


def test_constant_rows_and_bert_eps(kernels) -> None:  # type: ignore[no-untyped-def]
    """Variance 0: rstd is 1e6, y is bias exactly."""
    i = make_inputs(3, 40, dropout_p=0.0, has_bias=False)
    y, _, _, rstd = run(kernels, replace(i, x=torch.zeros_like(i.x), residual=torch.full_like(i.x, 2.0)))[:4]
    assert torch.equal(y, i.bias.expand_as(y))
    assert (rstd > 9e5).all()


def test_dropped_infinities_stay_out(kernels) -> None:  # type: ignore[no-untyped-def]
    i = replace(make_inputs(2, 16, dropout_p=1.0, has_bias=False), saves="input")
    _, h = run(kernels, replace(i, x=torch.full_like(i.x, float("inf"))))[:2]
    assert torch.equal(h, i.residual)


@pytest.mark.parametrize("layout", ["row-strided", "transposed", "expanded"])
@pytest.mark.parametrize("suffices", [False, True])
def test_strides(kernels, layout: str, suffices: bool) -> None:  # type: ignore[no-untyped-def]
    i = make_inputs(6, 40, suffices=suffices)

    def relaid(t: Tensor) -> Tensor:
        if layout == "row-strided":
            return torch.cat([t, t + 1], dim=1)[:, : t.shape[1]]
        if layout == "transposed":
            return t.t().contiguous().t()
        return t[:1].expand_as(t)

    check(kernels, replace(i, x=relaid(i.x), residual=relaid(i.residual), dy=relaid(i.dy)))


def test_strided_parameters(kernels) -> None:  # type: ignore[no-untyped-def]
    i = make_inputs(5, 16, suffices=True)
    every_other = {name: getattr(i, name).repeat_interleave(2)[::2] for name in ("x_bias", "weight", "bias")}
    check(kernels, replace(i, **every_other))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("hidden_size", [13, 384, 768])
@pytest.mark.parametrize("dropout_p", [2**-16, 0.1, 0.5, 1 - 2**-16, 1.0])
def test_masks_are_those_of_the_reference(kernels, hidden_size, dtype, dropout_p) -> None:  # type: ignore[no-untyped-def]
    """Bit for bit, in forward and backward: ones come out where the reference keeps, zeros elsewhere."""
    if dropout_p == 2**-16 and hidden_size == 13:
        pytest.skip("too few elements for one in 65,536 to drop")
    num_tokens = 6
    coords = coords_of(num_tokens)
    ones, zeros = torch.ones(num_tokens, hidden_size, dtype=dtype), torch.zeros(num_tokens, hidden_size, dtype=dtype)
    keep = keep_mask(SEED, SITE, coords, hidden_size, dropout_p)
    weight = torch.ones(hidden_size)
    a = DropoutAddLayerNorm(ones, zeros, None, weight, weight, 1e-12, dropout_p, SEED, coords, SITE, "input")
    _, h, mean, rstd = kernels.dropout_add_layer_norm_fwd(a)
    assert torch.equal(h != 0, keep)
    dy = torch.randn(num_tokens, hidden_size).to(dtype)
    made = kernels.dropout_add_layer_norm_bwd(a, dy, None, zeros, mean, torch.ones_like(rstd))
    assert torch.equal(made["x"] != 0, keep & (made["residual"] != 0))


def test_masks_depend_on_seed_site_row_and_position(kernels) -> None:  # type: ignore[no-untyped-def]
    ones, weight = torch.ones(1, 768), torch.ones(768)

    def mask(seed: int = 1, site: int = 2, row: int = 3, position: int = 4) -> Tensor:
        coords = torch.tensor([[row, position]], dtype=torch.int32)
        return kernels.dropout_add_layer_norm_fwd(
            DropoutAddLayerNorm(
                ones, ones * 0, None, weight, weight, 1e-12, 0.5, torch.tensor([seed]), coords, site, "input"
            )
        )[1]

    base = mask()
    assert torch.equal(base, mask())
    for other in (mask(seed=1 + 2**32), mask(seed=2), mask(site=3), mask(row=5), mask(position=5)):
        assert not torch.equal(base, other)


def test_runs_repeat_bit_for_bit(kernels) -> None:  # type: ignore[no-untyped-def]
    i = make_inputs(33, 96, torch.float16, suffices=True)
    for index, (first, second) in enumerate(zip(run(kernels, i), run(kernels, i), strict=True)):
        assert torch.equal(first, second) or index == 1  # h is not written


def test_without_dropout_dx_is_dresidual(kernels) -> None:  # type: ignore[no-untyped-def]
    outputs = run(kernels, make_inputs(4, 16, dropout_p=0.0))
    assert outputs[4] is outputs[5]


def test_bf16_stays_within_a_unit_of_the_reference(kernels) -> None:  # type: ignore[no-untyped-def]
    i = replace(make_inputs(5, 96, torch.bfloat16), saves="input")
    y, h, mean, rstd = run(kernels, i)[:4]
    expected_h = run(reference, i)[1].float()
    expected_y = (h.float() - mean[:, None]) * rstd[:, None] * i.weight.float() + i.bias.float()
    for actual, expected in ((h, expected_h), (y, expected_y)):
        assert ((actual.float() - expected).abs() <= expected.abs() * RELATIVE["bf16_stored_by_interpreter"]).all()


def test_offsets_beyond_two_to_the_31(kernels, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    """The second row of every input lies 2^31 + 8 elements behind the first, in a sparse file that takes no space."""
    hidden_size, stride = 16, 2**31 + 8
    i = make_inputs(2, hidden_size, torch.float16)  # y and h are contiguous: new tensors of T * H elements

    def far_apart(name: str, t: Tensor) -> Tensor:
        storage = torch.from_file(str(tmp_path / name), shared=True, size=stride + hidden_size, dtype=t.dtype)
        far = storage.as_strided((2, hidden_size), (stride, 1))
        return far.copy_(t)

    far = replace(i, **{name: far_apart(name, getattr(i, name)) for name in ("x", "residual", "dy")})
    assert far.x.stride(0) == stride
    for actual, expected in zip(run(kernels, far), run(kernels, i), strict=True):
        assert torch.equal(actual, expected)


@pytest.mark.parametrize("name", ["sm_80", "sm_90"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_every_width_has_a_configuration(kernels, dtype: torch.dtype, name: str) -> None:  # type: ignore[no-untyped-def]
    for hidden_size in range(1, 8193):
        config = kernels.launch_config(hidden_size, dtype, name)
        for tile in (config.forward, config.backward):
            assert tile.chunks * tile.chunk_cols >= hidden_size
            assert tile.chunk_cols % tile.vector == 0
            assert (
                tile.rows * tile.chunk_cols == tile.num_warps * 32 * tile.vector or tile.chunk_cols < 32 * tile.vector
            )
            for size in (tile.chunks, tile.rows, tile.chunk_cols, tile.num_warps):
                assert size & (size - 1) == 0


@pytest.mark.parametrize("dropout_p", [0.0, 0.1])
@pytest.mark.parametrize("suffices", [False, True])
def test_bytes_are_those_of_the_docstring(kernels, dropout_p, suffices) -> None:  # type: ignore[no-untyped-def]
    """Three tensors forward (four where h is stored), each element once; nothing but parameters and sums besides."""
    i = make_inputs(13, 40, torch.float16, dropout_p, suffices=suffices)
    with traffic() as forward:
        y, h, mean, rstd = kernels.dropout_add_layer_norm_fwd(i.record)
    names = [t for t in i.mask[1:2] if t is not None]  # coords
    written = (y, mean, rstd) if suffices else (y, h, mean, rstd)
    for t in (i.x, i.residual, *names):
        assert forward.times_loaded(t) == {1}
    for t in written:
        assert forward.times_stored(t) == {1}
    parameters = (i.x_bias, i.weight, i.bias)
    seed = dropout_p > 0
    assert len(forward.loads) == sum(t.numel() for t in (i.x, i.residual, *names, *parameters)) + seed
    assert forward.stored_bytes == sum(t.nbytes for t in written)

    with traffic() as backward:
        made = kernels.dropout_add_layer_norm_bwd(i.record, i.dy, y, h, mean, rstd)
    dx, dresidual, *sums = (made[name] for name in ("x", "residual", "x_bias", "weight", "bias"))
    kept = (y, rstd) if suffices else (h, mean, rstd)
    for t in (i.dy, *kept, *names):
        assert backward.times_loaded(t) == {1}
    outputs = (dx, dresidual, *sums) if dropout_p else (dresidual, *sums)
    for t in outputs:
        assert backward.times_stored(t) == {1}
    partial_bytes = backward.stored_bytes - sum(t.nbytes for t in outputs)
    assert partial_bytes % (4 * 3 * 40) == 0 and partial_bytes > 0
    read = sum(t.numel() for t in (i.dy, *kept, i.weight, i.bias, *names)) + seed + partial_bytes // 4
    assert len(backward.loads) == read
