"""The Triton kernels of the embedding, in the interpreter, against the fp64 reference."""

from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from bert_fast import backend
from bert_fast.reference import embedding as reference
from bert_fast.reference.dropout import dropout_scale, keep_mask
from bert_fast.reference.embedding import Embedding
from bert_fast.testing.compare import assert_close_to_truth
from bert_fast.testing.tolerances import RELATIVE
from bert_fast.testing.traffic import traffic

pytestmark = pytest.mark.interpreter

OP = "embedding"
SITE = 8
SEED = torch.tensor([-0x0123_4567_89AB_CDEF], dtype=torch.int64)
# Sequences of three tokens, in rows and at positions far from 0.
COORDS = torch.stack([torch.arange(4096) // 3 + 1_000_003, torch.arange(4096) % 3 + 2**31 - 3], dim=1).int()
NAMES = ("y", "mean", "rstd", "dwords", "dposition_table", "dtype_table", "dweight", "dbias")
NAME_OF = {"words": "dwords", "word_table": "dwords"}
NUM_WORDS, NUM_POSITIONS = 23, 9


@pytest.fixture
def kernels():  # type: ignore[no-untyped-def]
    """The module under test, imported only where the interpreter runs: importing triton costs a second."""
    spec = backend.OpSpec(torch.device("cpu"), torch.float32, hidden_size=768)
    return backend.resolve(OP, spec, "triton")


@dataclass
class Inputs:
    """One call, forward and backward."""

    words: Tensor
    token_type_ids: Tensor | None
    position_ids: Tensor | None
    word_table: Tensor | None
    position_table: Tensor | None
    type_table: Tensor
    weight: Tensor
    bias: Tensor
    dy: Tensor
    dropout_p: float = 0.1
    padding_idx: int | None = 2
    eps: float = 1e-12
    out_dtype: torch.dtype | None = None

    @property
    def record(self) -> Embedding:
        """The arguments of the op."""
        return Embedding(
            self.words, self.token_type_ids, self.position_ids, self.word_table, self.position_table, self.type_table,
            self.padding_idx, self.weight, self.bias, self.eps, *self.mask(), self.out_dtype or self.type_table.dtype,
        )  # fmt: skip

    def mask(self) -> tuple[float, Tensor | None, Tensor | None, int]:
        return (self.dropout_p, SEED, COORDS[: len(self.words)], SITE) if self.dropout_p else (0.0, None, None, SITE)

    def wide(self) -> "Inputs":
        """In fp64."""
        doubles = {n: t.double() for n, t in vars(self).items() if isinstance(t, Tensor) and t.is_floating_point()}
        return replace(self, **doubles, out_dtype=None)


def make_inputs(
    num_tokens: int,
    hidden_size: int,
    dtype: torch.dtype = torch.float32,
    dropout_p: float = 0.1,
    *,
    dy_dtype: torch.dtype | None = None,
    parameter_dtype: torch.dtype | None = None,
    num_types: int = 2,
    vectors: bool = False,
) -> Inputs:
    sizes = NUM_WORDS, NUM_POSITIONS, num_types
    words, positions, types = (torch.randint(0, size, (num_tokens,)) for size in sizes)
    word_table, position_table, type_table = (torch.randn(size, hidden_size).to(dtype) for size in sizes)
    weight, bias = torch.randn(2, hidden_size).to(parameter_dtype or dtype).unbind()
    return Inputs(
        torch.randn(num_tokens, hidden_size).to(dtype) if vectors else words,
        types,
        positions.int(),
        None if vectors else word_table,
        position_table,
        type_table,
        weight,
        bias,
        torch.randn(num_tokens, hidden_size).to(dy_dtype or dtype),
        dropout_p,
        padding_idx=None if vectors else 2,
        out_dtype=dy_dtype,
    )


def run(family, i: Inputs) -> dict[str, Tensor]:  # type: ignore[no-untyped-def]
    """Forward and backward of one implementation, what it did not compute left out."""
    y, mean, rstd = family.embedding_fwd(i.record)
    made = family.embedding_bwd(i.record, i.dy, mean, rstd)
    return {"y": y, "mean": mean, "rstd": rstd} | {NAME_OF.get(name, f"d{name}"): t for name, t in made.items()}


def run_plain(i: Inputs) -> dict[str, Tensor]:
    """The same from PyTorch's operators and autograd, every intermediate rounded to the dtype as eager mode does."""
    tensors = i.words, i.word_table, i.position_table, i.type_table, i.weight, i.bias
    leaves = [t if t is None or not t.is_floating_point() else t.clone().requires_grad_() for t in tensors]
    words, word_table, position_table, type_table, weight, bias = leaves
    embed = torch.nn.functional.embedding
    h = words if words.is_floating_point() else embed(words, word_table, i.padding_idx)
    h = h + (type_table[0] if i.token_type_ids is None else embed(i.token_type_ids, type_table))
    if position_table is not None:
        h = h + embed(i.position_ids, position_table)
    y = torch.nn.functional.layer_norm(h.to(weight.dtype), weight.shape, weight, bias, i.eps).to(h.dtype)
    if i.dropout_p:
        keep = keep_mask(SEED, SITE, i.mask()[2], y.shape[1], i.dropout_p)
        y = y * keep * dropout_scale(i.dropout_p)
    y = y.to(i.out_dtype or y.dtype)
    y.backward(i.dy)
    with torch.no_grad():
        mean, rstd = h.float().mean(1), (h.float().var(1, unbiased=False) + i.eps).rsqrt()
    first = words if words.is_floating_point() else word_table
    named = dict(zip(NAMES[3:], (first, position_table, type_table, weight, bias), strict=True))
    gradients = {name: leaf.grad for name, leaf in named.items() if leaf is not None}
    return {"y": y.detach(), "mean": mean, "rstd": rstd} | gradients


def check(kernels, i: Inputs) -> dict[str, Tensor]:  # type: ignore[no-untyped-def]
    """Compares every output with the fp64 reference on the same rounded inputs; inputs must stay as they were."""
    before = {name: t.clone() for name, t in vars(i).items() if isinstance(t, Tensor)}
    actual, plain, truth = run(kernels, i), run_plain(i), run(reference, i.wide())
    assert actual.keys() == truth.keys()
    for name, tensor in actual.items():
        of_half = name in ("mean", "rstd") and i.type_table.dtype != torch.float32
        assert_close_to_truth(OP, f"{name}_of_half" if of_half else name, tensor, plain[name], truth[name])
        assert tensor.is_contiguous(), name
    for name, copy in before.items():
        assert torch.equal(getattr(i, name), copy), name
    return actual


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("hidden_size", [8, 13, 40, 384, 768, 1000, 1024])
def test_widths(kernels, hidden_size: int, dtype: torch.dtype) -> None:  # type: ignore[no-untyped-def]
    check(kernels, make_inputs(5, hidden_size, dtype))


@pytest.mark.slow
@pytest.mark.parametrize(("hidden_size", "dtype"), [(312, torch.float32), (4096, torch.float16), (8192, torch.float32)])
def test_more_widths(kernels, hidden_size: int, dtype: torch.dtype) -> None:  # type: ignore[no-untyped-def]
    check(kernels, make_inputs(2, hidden_size, dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("num_tokens", [0, 1, 31, 32, 33, 100])
def test_numbers_of_tokens(kernels, num_tokens: int, dtype: torch.dtype) -> None:  # type: ignore[no-untyped-def]
    check(kernels, make_inputs(num_tokens, 24, dtype))


@pytest.mark.parametrize("dropout_p", [0.0, 0.5, 1.0])
def test_dropout(kernels, dropout_p: float) -> None:  # type: ignore[no-untyped-def]
    check(kernels, make_inputs(7, 33, dropout_p=dropout_p))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("dropout_p", [0.1, 0.5, 1 - 2**-16])
def test_masks_are_those_of_the_reference(kernels, dtype: torch.dtype, dropout_p: float) -> None:  # type: ignore[no-untyped-def]
    """Bit for bit: zeros where the reference drops, in y, and in dbias of a single token."""
    i = make_inputs(6, 384, dtype, dropout_p)
    i = replace(i, bias=torch.full_like(i.bias, 100.0))  # nothing that is kept may happen to be 0
    keep = keep_mask(SEED, SITE, i.mask()[2], 384, dropout_p)
    assert torch.equal(run(kernels, i)["y"] != 0, keep)
    one = replace(i, **{name: getattr(i, name)[:1] for name in ("words", "token_type_ids", "position_ids")})
    one = replace(one, dy=torch.ones_like(i.dy[:1]))
    assert torch.equal(run(kernels, one)["dbias"] != 0, keep[0])


@pytest.mark.parametrize("has_positions", [False, True])
@pytest.mark.parametrize("types", ["none", "one", "two", "three"])
@pytest.mark.parametrize("vectors", [False, True])
def test_tables(kernels, vectors: bool, types: str, has_positions: bool) -> None:  # type: ignore[no-untyped-def]
    """With and without ids, positions and types; three types take another path to their gradient."""
    i = make_inputs(11, 20, num_types={"one": 1, "three": 3}.get(types, 2), vectors=vectors)
    if types == "none":
        i = replace(i, token_type_ids=None)
    if not has_positions:
        i = replace(i, position_ids=None, position_table=None)
    check(kernels, i)


@pytest.mark.parametrize("padding_idx", [None, 0, NUM_WORDS - 1])
def test_padding_row(kernels, padding_idx: int | None) -> None:  # type: ignore[no-untyped-def]
    i = make_inputs(50, 16)
    i.words[::3] = padding_idx or 0
    dwords = check(kernels, replace(i, padding_idx=padding_idx))["dwords"]
    assert dwords[padding_idx or 0].any() == (padding_idx is None)


def test_a_vocabulary_of_several_rows_a_program(kernels) -> None:  # type: ignore[no-untyped-def]
    """Rows that no token looked up are exactly 0, next to others and in blocks of their own; sizes not whole blocks."""
    i = make_inputs(70, 16)
    vocabulary = torch.randn(4099, 16)  # more rows than a small table has
    words = torch.tensor([0, 1, 1022, 1023, 1024, 4095, 4098])[torch.randint(0, 7, (70,))]
    dwords = check(kernels, replace(i, word_table=vocabulary, words=words, padding_idx=1023))["dwords"]
    looked_up = torch.zeros(4099, dtype=torch.bool)
    looked_up[words] = True
    looked_up[1023] = False
    assert torch.equal(dwords.any(1), looked_up)


@pytest.mark.slow
def test_thousands_of_tokens_of_one_word(kernels) -> None:  # type: ignore[no-untyped-def]
    """One row of each table takes nearly all tokens: sums of pieces, and of tokens before and behind them."""
    i = make_inputs(2111, 8)
    i.words[:] = 7
    i.words[[0, 5, 2000]] = torch.tensor([1, 22, 2])
    i.position_ids[:] = 0
    i.position_ids[-3:] = 8
    check(kernels, i)


@pytest.mark.parametrize("tables", [torch.float32, torch.float16])
def test_half_precision_output_and_parameters(kernels, tables: torch.dtype) -> None:  # type: ignore[no-untyped-def]
    """Under autocast tables are fp32 and y half; a half model may keep its LayerNorm in fp32."""
    check(kernels, make_inputs(5, 40, tables, dy_dtype=torch.float16, parameter_dtype=torch.float32))


def test_half_precision_vectors_beside_fp32_tables(kernels) -> None:  # type: ignore[no-untyped-def]
    i = make_inputs(5, 40, vectors=True)
    i = replace(i, words=i.words.half())
    actual, truth = run(kernels, i), run(reference, i.wide())
    assert actual["dwords"].dtype == torch.float16
    for name, plain in run(reference, i).items():
        assert_close_to_truth(OP, name, actual[name], plain, truth[name])


@pytest.mark.parametrize("layout", ["every other", "expanded", "int32 column"])
def test_strided_ids(kernels, layout: str) -> None:  # type: ignore[no-untyped-def]
    i = make_inputs(6, 24)

    def relaid(ids: Tensor) -> Tensor:
        if layout == "every other":
            return ids.repeat_interleave(2)[::2]
        if layout == "expanded":
            return ids[:1].expand(6)
        return torch.stack([ids * 0 - 1, ids], dim=1).int()[:, 1]

    names = ("words", "token_type_ids", "position_ids")
    check(kernels, replace(i, **{name: relaid(getattr(i, name)) for name in names}))


@pytest.mark.parametrize("layout", ["row-strided", "transposed"])
def test_strided_tables_and_gradients(kernels, layout: str) -> None:  # type: ignore[no-untyped-def]
    i = make_inputs(6, 40)

    def relaid(t: Tensor) -> Tensor:
        return torch.cat([t, t + 1], dim=1)[:, :40] if layout == "row-strided" else t.t().contiguous().t()

    names = ("word_table", "position_table", "type_table", "dy")
    i = replace(i, **{name: relaid(getattr(i, name)) for name in names})
    check(kernels, replace(i, weight=i.weight.repeat_interleave(2)[::2]))


@pytest.mark.parametrize("outside", [-1, NUM_WORDS, 2**16 - 1, 2**32])
@pytest.mark.parametrize("name", ["words", "position_ids", "token_type_ids"])
def test_ids_outside_their_table(kernels, name: str, outside: int) -> None:  # type: ignore[no-untyped-def]
    """Their rows are NaN and count nowhere; all other rows and all gradients are as if the tokens were not there."""
    i = make_inputs(10, 16, num_types=3)
    ids = getattr(i, name).long().clone()
    ids[[0, 5, 9]] = outside
    actual = run(kernels, replace(i, **{name: ids}))
    kept = torch.ones(10, dtype=torch.bool)
    kept[[0, 5, 9]] = False
    assert actual["y"][~kept].isnan().all() and actual["mean"][~kept].isnan().all()
    valid = replace(i, dy=i.dy * kept[:, None])
    expected, truth = run(reference, valid), run(reference, valid.wide())
    for key in ("y", "mean", "rstd"):
        assert_close_to_truth(OP, key, actual[key][kept], expected[key][kept], truth[key][kept])
    for key in NAMES[3:]:
        assert_close_to_truth(OP, key, actual[key], expected[key], truth[key])


def test_one_column(kernels) -> None:  # type: ignore[no-untyped-def]
    """A row of one column is its own mean: y is bias and nothing flows back, exactly."""
    i = make_inputs(5, 1, dropout_p=0.0)
    actual = run(kernels, i)
    assert torch.equal(actual["y"], i.bias.expand(5, 1))
    assert not any(actual[name].any() for name in ("dwords", "dposition_table", "dtype_table", "dweight"))


def test_rows_far_from_zero(kernels) -> None:  # type: ignore[no-untyped-def]
    """An offset of -20 with a spread of 0.02 defeats variances computed as E[h^2] - E[h]^2."""
    i = make_inputs(5, 96)
    i = replace(i, word_table=i.word_table * 0.02 - 20, type_table=i.type_table * 0, position_table=None, eps=1e-5)
    actual, plain, truth = run(kernels, i), run_plain(i), run(reference, i.wide())
    for name in ("y", "mean", "dwords", "dweight"):  # rstd is 50: one unit in its last place exceeds the floor
        assert_close_to_truth(OP, name, actual[name], plain[name], truth[name])


def test_infinite_rows_stay_in_their_rows(kernels) -> None:  # type: ignore[no-untyped-def]
    """Also past the last token, where a program has rows left over."""
    i = make_inputs(6, 16)
    i.words[:] = torch.tensor([1, 3, 4, 1, 3, 4])
    i.word_table[0] = torch.inf  # nobody looks it up
    actual = run(kernels, i)
    assert all(t.isfinite().all() for t in actual.values())
    i.words[2] = 0
    y = run(kernels, i)["y"]
    assert y[2].isnan().any() and y[[0, 1, 3, 4, 5]].isfinite().all()


def test_only_wanted_gradients_are_made(kernels) -> None:  # type: ignore[no-untyped-def]
    i = make_inputs(5, 24)
    _, mean, rstd = kernels.embedding_fwd(i.record)
    everything = kernels.embedding_bwd(i.record, i.dy, mean, rstd)
    for wants in (set(), {"word_table"}, {"position_table"}, {"type_table"}):
        got = kernels.embedding_bwd(i.record, i.dy, mean, rstd, wants)
        assert got.keys() == wants | {"weight", "bias"}
        assert all(torch.equal(gradient, everything[name]) for name, gradient in got.items())


def test_packed_tokens_draw_the_masks_of_padded_ones(kernels) -> None:  # type: ignore[no-untyped-def]
    i = make_inputs(12, 64, dropout_p=0.5)
    kept = torch.tensor([0, 1, 4, 5, 7, 11])
    whole = run(kernels, i)["y"]
    names = ("words", "token_type_ids", "position_ids", "coords")
    packed = kernels.embedding_fwd(i.record._replace(**{name: getattr(i.record, name)[kept] for name in names}))[0]
    assert torch.equal(packed, whole[kept])


def test_runs_repeat_bit_for_bit(kernels) -> None:  # type: ignore[no-untyped-def]
    i = make_inputs(70, 40, torch.float16)
    first, second = run(kernels, i), run(kernels, i)
    assert all(torch.equal(first[name], second[name]) for name in NAMES)


def test_bf16_stays_within_a_unit_of_the_reference(kernels) -> None:  # type: ignore[no-untyped-def]
    i = make_inputs(5, 96, torch.bfloat16)
    actual, expected = run(kernels, i)["y"].float(), run(reference, i)["y"].float()
    # The interpreter truncates where the reference rounds.
    assert ((actual - expected).abs() <= expected.abs() * RELATIVE["bf16_stored_by_interpreter"]).all()


def test_offsets_beyond_two_to_the_31(kernels, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    """Rows of the tables lie 2^31 + 8 elements behind one another, in sparse files that take no space."""
    hidden_size, stride = 16, 2**31 + 8
    i = make_inputs(4, hidden_size, torch.float16)
    i = replace(i, words=i.words % 2, position_ids=i.position_ids % 2, padding_idx=None)
    i = replace(i, word_table=i.word_table[:2], position_table=i.position_table[:2], dy=i.dy[:1].expand(4, -1))

    def far_apart(name: str) -> Tensor:
        t = getattr(i, name)
        storage = torch.from_file(str(tmp_path / name), shared=True, size=stride + hidden_size, dtype=t.dtype)
        return storage.as_strided((2, hidden_size), (stride, 1)).copy_(t)

    far = replace(i, **{name: far_apart(name) for name in ("word_table", "position_table", "type_table")})
    actual, expected = run(kernels, far), run(kernels, i)
    assert all(torch.equal(actual[name], expected[name]) for name in NAMES)


def test_token_gradients_beyond_two_to_the_31(kernels, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    """The last of 2^27 + 1 tokens is read from its place in dh, a sparse file; the table has one row."""
    from bert_fast.triton import _table_gradient as stage

    num_tokens, hidden_size = 2**27 + 1, 16
    dh = torch.from_file(str(tmp_path / "dh"), shared=True, size=num_tokens * hidden_size, dtype=torch.float16)
    dh = dh.view(num_tokens, hidden_size)
    dh[-1] = torch.arange(1, 17)
    order, starts = torch.tensor([num_tokens - 1]), torch.tensor([0, 1], dtype=torch.int32)
    dtable = torch.empty(1, hidden_size, dtype=torch.float16)
    constants = {"N_COLS": hidden_size, "COLS": 16, "ITEMS": 8, "PIECE": stage.PIECE}
    stage._segment_sums_kernel[(1,)](dh, order, starts, dtable, dtable, 1, -1, ROWS=1, **constants)
    assert torch.equal(dtable[0], dh[-1])


@pytest.mark.parametrize("dtypes", [(torch.float32,) * 2, (torch.bfloat16,) * 2, (torch.float32, torch.bfloat16)])
def test_every_width_has_a_configuration(kernels, dtypes: tuple[torch.dtype, torch.dtype]) -> None:  # type: ignore[no-untyped-def]
    for hidden_size in range(1, 8193):
        config = kernels.launch_config(hidden_size, *dtypes)
        for tile in (config.forward, config.backward):
            assert tile.chunks * tile.chunk_cols >= hidden_size
            for size in (tile.chunks, tile.rows, tile.chunk_cols, tile.num_warps):
                assert size & (size - 1) == 0
        assert config.backward.num_warps * config.backward_programs_per_multiprocessor <= 16


@pytest.mark.parametrize("dropout_p", [0.0, 0.1])
def test_bytes_of_forward_are_those_of_the_docstring(kernels, dropout_p: float) -> None:  # type: ignore[no-untyped-def]
    i = make_inputs(13, 40, torch.float16, dropout_p)
    with traffic() as counted:
        y, mean, rstd = kernels.embedding_fwd(i.record)
    for t in (y, mean, rstd):
        assert counted.times_stored(t) == {1}
    assert counted.stored_bytes == sum(t.nbytes for t in (y, mean, rstd))
    # Each word row is loaded once for each of its tokens (and the last token's by what is left of the last program).
    tile = kernels.launch_config(40, torch.float16, torch.float16).forward
    times = -(-13 // tile.rows) * tile.rows
    ids = (i.words, i.token_type_ids, i.position_ids)
    names = [t for t in i.mask()[1:3] if t is not None]  # seed, coords
    rows = sum(table[ids_.unique()].nbytes for ids_, table in zip(ids, (i.word_table, i.type_table, i.position_table),
        strict=True))  # fmt: skip
    read = rows + sum(t.nbytes for t in (*ids, *names, i.weight, i.bias))
    tensors = (*ids, *names, i.word_table, i.type_table, i.position_table, i.weight, i.bias)
    assert counted.unique_loaded_bytes(*tensors) == read
    words = sum(counted.loads[address] for address in range(i.word_table.data_ptr(), i.word_table.data_ptr()
        + i.word_table.nbytes, 2))  # fmt: skip
    assert words == times * 40


@pytest.mark.parametrize("dropout_p", [0.0, 0.1])
def test_bytes_of_backward_are_those_of_the_docstring(kernels, dropout_p: float) -> None:  # type: ignore[no-untyped-def]
    """dh is written once and read once for each table, every element of a table's gradient is written once."""
    num_tokens, hidden_size = 200, 40
    i = make_inputs(num_tokens, hidden_size, torch.float16, dropout_p)
    i.words[:150] = 5  # several whole pieces
    _, mean, rstd = kernels.embedding_fwd(i.record)
    with traffic() as counted:
        gradients = kernels.embedding_bwd(i.record, i.dy, mean, rstd).values()
    for t in (i.dy, *(t for t in (i.mask()[2],) if t is not None)):
        assert counted.times_loaded(t) == {1}
    for t in gradients:
        assert counted.times_stored(t) == {1}
    row = hidden_size * 2
    outputs = sum(t.nbytes for t in gradients)
    keys = 2 * num_tokens * 2
    starts = 4 * (NUM_WORDS + 1 + NUM_POSITIONS + 1)
    pieces = 2 * num_tokens // 32 * hidden_size * 4
    programs = 2  # multiprocessors of the interpreter, times programs on each, no more than groups of rows
    config = kernels.launch_config(hidden_size, torch.float16, torch.float16)
    programs *= config.backward_programs_per_multiprocessor
    partial = 4 * 4 * hidden_size * programs
    assert counted.stored_bytes <= num_tokens * row + outputs + keys + starts + pieces + partial
    per_token = 2 * row + 3 * row + 8 + 4 + 8 + 8 + 8  # dy, three lookups (words and what comes from cache), ids, ...
    tables = 2 * (num_tokens * row + 8 * num_tokens) + pieces + 2 * 10 * 4 * 64  # dh and order, pieces, binary searches
    assert counted.loaded_bytes <= 1.05 * (num_tokens * per_token + tables + partial) + 32 * row
