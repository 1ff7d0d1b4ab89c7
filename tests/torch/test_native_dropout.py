"""Native dropout routines, per instruction set: masks against the specification to the bit, arithmetic against fp64."""

import itertools
import math
from types import ModuleType, SimpleNamespace

import pytest
import torch
from torch import Tensor

from bert_fast.reference import dropout as spec
from bert_fast.reference.dropout_add_layer_norm import MAX_WEIGHT, MIN_WEIGHT, max_shift, output_suffices
from bert_fast.testing.compare import assert_close_to_truth

SITE = spec.dropout_site(spec.DropoutSite.MLP_OUTPUT, layer=11)
SEEDS = (0, 1, -1, 2**63 - 1, -(2**63), 0x1234_5678_9ABC_DEF0)
PROBABILITIES = (0.0, 0.1, 0.5, 1 - 2**-16, 1.0)
EPS = 1e-12
DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)


def random_coords(num_rows: int) -> Tensor:
    """Coordinates that no rule connects: rows of a batch of 1000, positions of sequences of 512."""
    rows, positions = torch.randint(0, 1000, (num_rows,)), torch.randint(0, 512, (num_rows,))
    return torch.stack([rows, positions], dim=1).to(torch.int32)


def random_arguments(p: float) -> tuple[Tensor, dict[str, int | float]]:
    """A seed tensor and the keyword arguments by which the routines draw the same mask."""
    seed = int(torch.randint(-(2**62), 2**62, (1,)))
    common = {"seed": seed, "site": SITE, "threshold": spec.dropout_threshold(p), "scale": spec.dropout_scale(p)}
    return torch.tensor([seed]), common


@pytest.mark.parametrize("num_columns", [1, 7, 8, 9, 31, 63, 64, 65, 129, 384, 768, 1000])
@pytest.mark.parametrize("p", PROBABILITIES)
def test_keep_mask_is_the_specification(native: ModuleType, num_columns: int, p: float) -> None:
    coords = random_coords(5)
    for seed, site in itertools.product(SEEDS, (0, SITE, 2**31)):
        mask = torch.full((5, num_columns), 7, dtype=torch.uint8)
        for reading in (seed, seed % 2**64):  # as a signed and as an unsigned number
            native.keep_mask(
                mask.data_ptr(), 5, num_columns, coords.data_ptr(), reading, site, spec.dropout_threshold(p), 1
            )
        expected = spec.keep_mask(torch.tensor([seed]), site, coords, num_columns, p)
        assert torch.equal(mask, expected.to(torch.uint8)), f"seed {seed}, site {site}"


@pytest.mark.parametrize("num_columns", [1, 5, 16, 17, 384, 771])
@pytest.mark.parametrize("p", PROBABILITIES)
def test_dropout_is_the_specification_to_the_bit(native: ModuleType, num_columns: int, p: float) -> None:
    coords, (seed, common) = random_coords(9), random_arguments(p)
    wide = torch.randn(9, num_columns + 3)
    x = wide[:, :num_columns]
    expected = spec.dropout_fwd(x, p, seed, coords, SITE)
    out = torch.full((9, num_columns), torch.nan)
    native.dropout(
        out.data_ptr(), x.data_ptr(), 9, num_columns, x.stride(0), coords.data_ptr(), **common, num_threads=1
    )
    assert torch.equal(out, expected)
    in_place = x.contiguous().clone()
    native.dropout(
        in_place.data_ptr(),
        in_place.data_ptr(),
        9,
        num_columns,
        num_columns,
        coords.data_ptr(),
        **common,
        num_threads=2,
    )
    assert torch.equal(in_place, expected)


def layer_norm_inputs(num_rows: int, num_columns: int) -> SimpleNamespace:
    def rows() -> Tensor:
        return torch.randn(num_rows, num_columns)

    def columns() -> Tensor:
        return torch.randn(num_columns)

    return SimpleNamespace(
        x=rows(),
        x_bias=columns(),
        residual=rows() - 20,  # E[h^2] - E[h]^2 would lose most digits
        weight=columns(),
        bias=columns(),
        dy=rows(),
        coords=random_coords(num_rows),
    )


def composed_layer_norm(inputs: SimpleNamespace, keep: Tensor, scale: float, dtype: torch.dtype) -> dict[str, Tensor]:
    """Forward and backward by PyTorch's own operators and autograd."""
    leaves = {
        name: getattr(inputs, name).to(dtype).clone().requires_grad_()
        for name in ("x", "x_bias", "residual", "weight", "bias")
    }
    h = leaves["residual"] + (leaves["x"] + leaves["x_bias"]) * keep.to(dtype) * scale
    y = torch.nn.functional.layer_norm(h, h.shape[1:], leaves["weight"], leaves["bias"], EPS)
    y.backward(inputs.dy.to(dtype))
    variance = h.detach().var(dim=1, unbiased=False)
    values = {"y": y, "h": h, "mean": h.mean(dim=1), "rstd": (variance + EPS).rsqrt()}
    gradients = {"dx": "x", "dx_bias": "x_bias", "dresidual": "residual", "dweight": "weight", "dbias": "bias"}
    return {n: v.detach() for n, v in values.items()} | {n: leaves[leaf].grad for n, leaf in gradients.items()}


def native_layer_norm(
    native: ModuleType,
    inputs: SimpleNamespace,
    common: dict[str, int | float],
    num_threads: int,
    *,
    from_output: bool = False,
) -> dict[str, Tensor]:
    """Forward and backward; from_output: h and mean are not there, backward is given y."""
    num_rows, num_columns = inputs.x.shape
    by_element = {n: torch.full_like(inputs.x, torch.nan) for n in ("y", "h", "dresidual", "dx")}
    by_row = {n: torch.full((num_rows,), torch.nan) for n in ("mean", "rstd")}
    by_column = {n: torch.full((num_columns,), torch.nan) for n in ("dx_bias", "dweight", "dbias")}
    out = by_element | by_row | by_column
    if from_output:
        out = {n: t for n, t in out.items() if n not in ("h", "mean")}
    address = {"h": 0, "mean": 0} | {n: t.data_ptr() for n, t in (vars(inputs) | out).items()}
    size = {"num_rows": num_rows, "num_cols": num_columns, "coords": address["coords"], "num_threads": num_threads}
    forward = ("x", "x_bias", "residual", "weight", "bias", "y", "h", "mean", "rstd")
    native.dropout_add_layer_norm_fwd(**{n: address[n] for n in forward}, **size, **common, eps=EPS)
    kept = {"kept": address["y"], "bias": address["bias"]} if from_output else {"kept": address["h"], "bias": 0}
    backward = ("dy", "mean", "rstd", "weight", "dresidual", "dx", "dx_bias", "dweight", "dbias")
    native.dropout_add_layer_norm_bwd(**kept, **{n: address[n] for n in backward}, **size, **common)
    return out


@pytest.mark.parametrize(("num_rows", "num_columns"), [(1, 1), (3, 7), (4, 16), (67, 65), (130, 384), (257, 768)])
@pytest.mark.parametrize("p", [0.0, 0.1, 1.0])
@pytest.mark.parametrize("from_output", [False, True], ids=["from_input", "from_output"])
def test_dropout_add_layer_norm(native: ModuleType, num_rows, num_columns, p, from_output) -> None:  # type: ignore[no-untyped-def]
    inputs = layer_norm_inputs(num_rows, num_columns)
    if from_output:  # weights as far from 0 as they have to be
        inputs.weight = torch.where(inputs.weight < 0, inputs.weight - 0.1, inputs.weight + 0.1)
        inputs.bias = 7.9 * inputs.weight * (2 * torch.rand(num_columns) - 1)
    seed, common = random_arguments(p)
    keep = spec.keep_mask(seed, SITE, inputs.coords, num_columns, p)
    out = native_layer_norm(native, inputs, common, num_threads=2, from_output=from_output)
    plain, truth = (
        composed_layer_norm(inputs, keep, spec.dropout_scale(p), dtype) for dtype in (torch.float32, torch.float64)
    )
    if num_columns == 1:
        # The variance is 0, and 1 / sqrt(eps) = 1e6 magnifies the rounding of h: only these are well defined.
        names = {"h", "mean", "dbias"} & set(out)
    else:
        names = set(out)
    for name in sorted(names):
        assert_close_to_truth("native_dropout_add_layer_norm", name, out[name], plain[name], truth[name])
    assert not out["dx"][~keep].any(), "a dropped element has a gradient"


@pytest.mark.parametrize("alias", ["x", "residual"])
def test_layer_norm_forward_in_place_without_saving(native: ModuleType, alias: str) -> None:
    inputs = layer_norm_inputs(33, 100)
    expected = native_layer_norm(native, inputs, {"seed": 0, "site": 0, "threshold": 0, "scale": 1.0}, num_threads=1)
    address = {n: t.data_ptr() for n, t in vars(inputs).items()}
    native.dropout_add_layer_norm_fwd(
        **{n: address[n] for n in ("x", "x_bias", "residual", "weight", "bias")},
        **{"y": address[alias], "h": 0, "mean": 0, "rstd": 0, "num_rows": 33, "num_cols": 100, "eps": EPS},
        **{"coords": 0, "seed": 0, "site": 0, "threshold": 0, "scale": 1.0, "num_threads": 1},
    )
    assert torch.equal(getattr(inputs, alias), expected["y"])


@pytest.mark.parametrize("from_output", [False, True])
def test_layer_norm_bits_do_not_depend_on_threads(native: ModuleType, from_output: bool) -> None:
    inputs = layer_norm_inputs(700, 200)
    _, common = random_arguments(0.1)
    one, many = (
        native_layer_norm(native, inputs, common, num_threads, from_output=from_output) for num_threads in (1, 5)
    )
    for name in one:
        assert torch.equal(one[name], many[name]), name


def test_layer_norm_forward_is_the_same_with_and_without_h(native: ModuleType) -> None:
    inputs = layer_norm_inputs(33, 100)
    _, common = random_arguments(0.1)
    with_h, without = (native_layer_norm(native, inputs, common, 1, from_output=f) for f in (False, True))
    assert torch.equal(with_h["y"], without["y"]) and torch.equal(with_h["rstd"], without["rstd"])


@pytest.mark.parametrize("num_columns", [1, 5, 768])
def test_output_suffices_is_that_of_the_reference(native: ModuleType, num_columns: int) -> None:
    weights = [
        1.0,
        0.0,
        MIN_WEIGHT,
        -MIN_WEIGHT,
        MIN_WEIGHT * 0.999,
        MAX_WEIGHT,
        MAX_WEIGHT * 1.001,
        math.inf,
        math.nan,
    ]
    seen = set()
    for value, ratio, dtype in itertools.product(weights, [0.0, 1.0, -2.0, 2.01, 8.0, -8.01, math.nan], DTYPES):
        weight, bias = torch.ones(num_columns), torch.zeros(num_columns)
        weight[-1], bias[-1] = value, ratio * value
        expected = bool(output_suffices(weight, bias, dtype))
        limits = (MIN_WEIGHT, MAX_WEIGHT, max_shift(dtype))
        assert native.output_suffices(weight.data_ptr(), bias.data_ptr(), num_columns, *limits) == expected
        assert expected == (MIN_WEIGHT <= abs(value) <= MAX_WEIGHT and abs(ratio) <= max_shift(dtype))
        seen.add(expected)
    assert seen == {False, True}


def test_bad_arguments_are_named(native: ModuleType) -> None:
    x = torch.zeros(2, 8)
    with pytest.raises(ValueError, match="coords"):
        native.dropout(x.data_ptr(), x.data_ptr(), 2, 8, 8, 0, 0, 0, 6554, 1.0, 1)
    with pytest.raises(ValueError, match="threshold"):
        native.keep_mask(x.data_ptr(), 2, 8, x.data_ptr(), 0, 0, 65537, 1)
    with pytest.raises(ValueError, match="num_rows"):
        native.keep_mask(x.data_ptr(), -1, 8, x.data_ptr(), 0, 0, 1, 1)
    with pytest.raises(ValueError, match=r"simd level.*portable"):
        native.force_simd_level("neon")


def test_empty_tensors(native: ModuleType) -> None:
    native.dropout(0, 0, 0, 8, 8, 0, 0, 0, 6554, 1.0, 2)
    native.keep_mask(0, 0, 8, 0, 0, 0, 6554, 2)
    columns = torch.full((3, 4), torch.nan)
    native.dropout_add_layer_norm_bwd(
        *(0, 0, 0, 0, 0, 0, 0, 0), *(c.data_ptr() for c in columns), 0, 4, 0, 0, 0, 6554, 1.0, 2
    )
    assert (columns == 0).all(), "column sums over no rows are 0"


def test_every_level_is_listed_and_portable_is_last(native: ModuleType) -> None:
    assert native.simd_levels()[-1] == "portable"
    assert native.simd_level() in native.simd_levels()
    assert all(isinstance(present, bool) for present in native.cpu_features().values())
