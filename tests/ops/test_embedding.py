"""The op embedding: every back-end, autograd, torch.library and torch.compile contracts, messages."""

from typing import Any

import pytest
import torch
from torch import Tensor

from bert_fast import backend
from bert_fast.errors import BackendError
from bert_fast.ops.embedding import embedding
from bert_fast.reference.dropout import keep_mask
from bert_fast.testing.compare import assert_close_to_truth

BACKENDS = ["reference", "torch", pytest.param("triton", marks=pytest.mark.interpreter)]
SITE = 0
H = 24
LEAVES = ("words", "word_table", "position_table", "type_table", "weight", "bias")
_fwd = torch.ops.bert_fast.embedding_fwd.default
_bwd = torch.ops.bert_fast.embedding_bwd.default


def call(num_tokens: int = 9, dtype: torch.dtype = torch.float32, *, vectors: bool = False) -> dict[str, Any]:
    """Arguments of the op: a vocabulary of 11 words, 7 positions, 2 types."""
    words, positions, types = (torch.randint(0, size, (num_tokens,)) for size in (11, 7, 2))
    word_table, position_table, type_table = (torch.randn(size, H).to(dtype).requires_grad_() for size in (11, 7, 2))
    weight, bias = (torch.randn(H).requires_grad_() for _ in range(2))
    return {
        "words": torch.randn(num_tokens, H).to(dtype).requires_grad_() if vectors else words,
        "word_table": None if vectors else word_table,
        "type_table": type_table,
        "weight": weight,
        "bias": bias,
        "token_type_ids": types.int(),
        "position_ids": positions,
        "position_table": position_table,
        "padding_idx": None if vectors else 3,
    }


def mask(num_tokens: int = 9, dropout_p: float = 0.3) -> dict[str, Any]:
    positions = torch.arange(num_tokens, dtype=torch.int32)
    coords = torch.stack([positions // 2, positions % 2], dim=1)
    return {"dropout_p": dropout_p, "seed": torch.tensor([77]), "coords": coords, "site": SITE}


def needing_gradients(arguments: dict[str, Any]) -> dict[str, Tensor]:
    return {name: arguments[name] for name in LEAVES if getattr(arguments[name], "requires_grad", False)}


def outputs(name: str, arguments: dict[str, Any], dy: Tensor) -> dict[str, Tensor]:
    y = embedding(**arguments, backend=name)
    inputs = needing_gradients(arguments)
    gradients = torch.autograd.grad(y, list(inputs.values()), dy)
    return {"y": y} | {f"d{key}": gradient for key, gradient in zip(inputs, gradients, strict=True)}


def doubled(arguments: dict[str, Any]) -> dict[str, Any]:
    leaves = {name: t.detach().double().requires_grad_() for name, t in needing_gradients(arguments).items()}
    return arguments | leaves


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize("dropout_p", [0.0, 0.3])
@pytest.mark.parametrize("changed", ["nothing", "vectors", "no types", "no positions", "no padding"])
def test_back_ends_agree_with_fp64(name: str, dropout_p: float, changed: str) -> None:
    arguments = call(vectors=changed == "vectors") | (mask(dropout_p=dropout_p) if dropout_p else {})
    without = {"no types": "token_type_ids", "no padding": "padding_idx"}.get(changed)
    if without is not None:
        arguments[without] = None
    if changed == "no positions":
        arguments["position_ids"] = arguments["position_table"] = None
    dy = torch.randn(9, H)
    truth, plain = outputs("reference", doubled(arguments), dy.double()), outputs("reference", arguments, dy)
    for key, actual in outputs(name, arguments, dy).items():
        assert_close_to_truth("embedding", key, actual, plain[key], truth[key])


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_with_fp32_parameters(name: str, dtype: torch.dtype) -> None:
    arguments = call(dtype=dtype) | mask()
    got = outputs(name, arguments, torch.randn(9, H).to(dtype))
    assert {key: t.dtype for key, t in got.items()} == {
        "y": dtype, "dword_table": dtype, "dposition_table": dtype, "dtype_table": dtype,
        "dweight": torch.float32, "dbias": torch.float32,
    }  # fmt: skip
    if dtype == torch.float16:  # the interpreter stores bf16 truncated
        truth = outputs("reference", doubled(arguments), torch.zeros(9, H).double())["y"]
        assert_close_to_truth("embedding", "y", got["y"], outputs("reference", arguments, got["y"])["y"], truth)


@pytest.mark.parametrize("name", BACKENDS)
def test_the_padding_row_and_words_not_looked_up_get_exactly_nothing(name: str) -> None:
    arguments = call()
    arguments["words"] = torch.tensor([3, 3, 5, 5, 5, 3, 0, 5, 10])
    gradient = outputs(name, arguments, torch.randn(9, H))["dword_table"]
    assert gradient.any(1).nonzero().flatten().tolist() == [0, 5, 10]


@pytest.mark.parametrize("name", BACKENDS)
def test_tied_tables_sum_their_gradients(name: str) -> None:
    """A decoder that shares the word table adds its own gradient."""
    arguments = call() | mask()
    dy, factor = torch.randn(9, H), torch.randn(9, 11)
    table = arguments["word_table"]
    alone = outputs(name, arguments, dy)["dword_table"]
    y = embedding(**arguments, backend=name)
    ((y * dy).sum() + (y.detach() @ table.t() * factor).sum()).backward()
    torch.testing.assert_close(table.grad, alone + factor.t() @ y.detach())


@pytest.mark.parametrize("name", BACKENDS)
def test_only_wanted_gradients_are_computed(name: str) -> None:
    """Frozen tables cost nothing: the gradients of the others are what they would be."""
    arguments = call() | mask()
    dy = torch.randn(9, H)
    everything = outputs(name, arguments, dy)
    for frozen in ("word_table", "position_table", "type_table", "weight"):
        some = arguments | {frozen: arguments[frozen].detach()}
        got = outputs(name, some, dy)
        assert got.keys() == everything.keys() - {f"d{frozen}"}
        assert all(torch.equal(got[key], everything[key]) for key in got)


@pytest.mark.parametrize("name", BACKENDS)
def test_ids_and_gradients_of_any_strides(name: str) -> None:
    arguments = call() | mask()
    arguments["position_ids"] = torch.stack([torch.full((9,), -1), torch.arange(9) % 7], dim=1).int()[:, 1]
    arguments["words"] = torch.tensor([4]).expand(9)
    expected = outputs(name, arguments | {"words": torch.full((9,), 4)}, torch.ones(9, H))
    arguments["word_table"] = arguments["word_table"].detach().t().contiguous().t().requires_grad_()
    got = outputs(name, arguments, torch.ones(1, 1).expand(9, H))
    assert all(t.is_contiguous() and torch.equal(t, expected[key]) for key, t in got.items())


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize("vectors", [False, True])
def test_no_tokens(name: str, vectors: bool) -> None:
    arguments = call(0, vectors=vectors) | mask(0)
    y = embedding(**arguments, backend=name)
    y.sum().backward()
    assert y.shape == (0, H)
    for leaf in needing_gradients(arguments).values():
        assert leaf.grad.shape == leaf.shape and not leaf.grad.any()


@pytest.mark.parametrize("name", BACKENDS)
def test_packed_tokens_draw_the_masks_of_padded_ones(name: str) -> None:
    arguments = call() | mask(dropout_p=0.5)
    whole = embedding(**arguments, backend=name)
    kept = torch.tensor([0, 2, 3, 8])
    part = {key: arguments[key][kept] for key in ("words", "token_type_ids", "position_ids", "coords")}
    packed = embedding(**(arguments | part), backend=name)
    keep = keep_mask(arguments["seed"], SITE, part["coords"], H, 0.5)
    assert torch.equal(packed != 0, keep) and torch.equal(whole[kept] != 0, keep)


@pytest.mark.parametrize("name", BACKENDS)
def test_runs_repeat_bit_for_bit(name: str) -> None:
    arguments = call() | mask()
    dy = torch.randn(9, H)
    first, second = outputs(name, arguments, dy), outputs(name, arguments, dy)
    assert all(torch.equal(first[key], second[key]) for key in first)


@pytest.mark.parametrize("name", BACKENDS)
def test_outputs_alias_nothing(name: str) -> None:
    for vectors in (False, True):
        a = {key: t.detach() if isinstance(t, Tensor) else t for key, t in call(vectors=vectors).items()}
        words = a["words"].clone()
        given = (a["words"], a["token_type_ids"], a["position_ids"], a["word_table"], a["position_table"],
            a["type_table"], a["padding_idx"], a["weight"])  # fmt: skip
        out = _fwd(*given, a["bias"], 1e-5, 0.0, None, None, SITE, torch.float32, name)
        out += _bwd(out[0] * 1, *given, *out[1:], 0.0, None, None, SITE, 7, name)
        addresses = [t.data_ptr() for t in (*out, *given) if isinstance(t, Tensor)]
        assert len(set(addresses)) == len(addresses)
        assert torch.equal(a["words"], words)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["reference", "torch"])
@pytest.mark.parametrize(("vectors", "dropout_p", "needs"), [(False, 0.3, 7), (True, 0.0, 5)])
def test_opcheck(name: str, vectors: bool, dropout_p: float, needs: int) -> None:
    a = call(vectors=vectors)
    masks = (0.3, *[mask()[key] for key in ("seed", "coords", "site")]) if dropout_p else (0.0, None, None, SITE)
    given = (a["words"], a["token_type_ids"], a["position_ids"], a["word_table"], a["position_table"], a["type_table"],
        a["padding_idx"], a["weight"])  # fmt: skip
    torch.library.opcheck(_fwd, (*given, a["bias"], 1e-5, *masks, torch.float32, name))
    given = tuple(t.detach() if isinstance(t, Tensor) else t for t in given)
    torch.library.opcheck(_bwd, (torch.randn(9, H), *given, torch.randn(9), torch.rand(9), *masks, needs, name))


def test_ids_are_checked_in_compiled_graphs() -> None:
    torch._dynamo.reset()
    compiled = torch.compile(embedding, fullgraph=True, backend="aot_eager", dynamic=True)
    compiled(**call(5) | mask(5))
    with pytest.raises(ValueError, match=r"words: expected ids in \[0, 11\), got 11"):
        compiled(**(call(12) | mask(12) | {"words": torch.full((12,), 11)}))


def saved(arguments: dict[str, Any]) -> list[Tensor]:
    kept: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        embedding(**arguments)
    return kept


def test_saves_two_numbers_a_token_besides_its_inputs() -> None:
    arguments = call() | mask()
    addresses = {t.data_ptr() for t in arguments.values() if isinstance(t, Tensor)}
    made = [t for t in saved(arguments) if t.data_ptr() not in addresses]
    assert [(t.numel(), t.dtype) for t in made] == [(9, torch.float32)] * 2


def test_saves_nothing_without_gradients() -> None:
    with torch.no_grad():
        assert saved(call() | mask()) == []


def test_backward_runs_where_forward_was_asked_to_run(monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = call() | mask()
    with backend.use_backend("reference"):
        y = embedding(**arguments)
    expected = outputs("reference", arguments, torch.ones(9, H))["dword_table"]
    from bert_fast.torch import embedding as other

    monkeypatch.setattr(other, "embedding_bwd", None)
    assert torch.equal(torch.autograd.grad(y, arguments["word_table"], torch.ones(9, H))[0], expected)


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_autocast_decides_the_output_and_keeps_the_tables(name: str, dtype: torch.dtype) -> None:
    arguments = call() | mask()
    expected = embedding(**arguments, backend=name)
    with torch.autocast("cpu", dtype):
        y = embedding(**arguments, backend=name)
    assert y.dtype == dtype
    if (name, dtype) != ("triton", torch.bfloat16):  # the interpreter stores bf16 truncated
        assert torch.equal(y, expected.to(dtype))
    y.sum().backward()
    assert all(leaf.grad.dtype == torch.float32 for leaf in needing_gradients(arguments).values())
    with torch.autocast("cpu", dtype):
        assert embedding(**doubled(arguments)).dtype == torch.float64


@pytest.mark.parametrize("name", BACKENDS)
def test_vectors_may_be_narrower_than_the_tables(name: str) -> None:
    arguments = call(vectors=True)
    arguments["words"] = arguments["words"].detach().half().requires_grad_()
    got = outputs(name, arguments, torch.randn(9, H))
    assert got["y"].dtype == torch.float32 and got["dwords"].dtype == torch.float16


def test_a_probability_that_rounds_to_zero_drops_nothing() -> None:
    arguments = call()
    assert torch.equal(embedding(**arguments, **mask(dropout_p=2**-18)), embedding(**arguments))


NINE = torch.zeros(9, dtype=torch.int64)


@pytest.mark.parametrize(
    ("changed", "error", "message"),
    [
        ({"words": [1]}, TypeError, "words: expected a Tensor, got list"),
        ({"words": torch.zeros(3, 3, dtype=torch.int64)}, ValueError, r"words: expected shape \[T\], got \[3, 3\]"),
        ({"words": torch.zeros(9, 23)}, ValueError, r"words: expected shape \[T, 24\], got \[9, 23\]"),
        ({"words": NINE.short()}, TypeError, "words: expected dtype int64 or int32, got int16"),
        ({"words": NINE.bool()}, TypeError, "words: expected dtype int64 or int32, got bool"),
        ({"words": torch.zeros(9, H).double()}, TypeError, "words: expected ids or vectors of dtype float32 .*float64"),
        ({"words": NINE.to("meta")}, ValueError, r"words: expected device cpu \(that of type_table\), got meta"),
        ({"words": NINE - 1}, ValueError, r"words: expected ids in \[0, 11\), got -1"),
        ({"words": NINE + 11}, ValueError, r"words: expected ids in \[0, 11\), got 11"),
        ({"word_table": None}, TypeError, "word_table: expected a Tensor, got NoneType"),
        ({"word_table": torch.zeros(11, 23)}, ValueError, r"word_table: expected shape \[V, 24\], got \[11, 23\]"),
        ({"word_table": torch.zeros(11, H).half()}, TypeError, "word_table: expected dtype float32 .* got float16"),
        ({"type_table": torch.zeros(2, 2, H)}, ValueError, r"type_table: expected shape \[K, H\], got \[2, 2, 24\]"),
        ({"type_table": torch.zeros(0, H)}, ValueError, "type_table: expected at least one row and one column"),
        ({"type_table": torch.zeros(2, H).long()}, TypeError, "type_table: expected dtype float32 or .*, got int64"),
        ({"token_type_ids": NINE[:8]}, ValueError, r"token_type_ids: expected shape \[9\], got \[8\]"),
        ({"token_type_ids": NINE + 2}, ValueError, r"token_type_ids: expected ids in \[0, 2\), got 2"),
        ({"token_type_ids": NINE.float()}, TypeError, "token_type_ids: expected dtype int64 or int32, got float32"),
        ({"position_ids": None}, ValueError, "position_ids: expected a Tensor beside position_table, got None"),
        ({"position_table": None}, ValueError, "position_table: expected a Tensor beside position_ids, got None"),
        ({"position_ids": NINE - 5}, ValueError, r"position_ids: expected ids in \[0, 7\), got -5"),
        ({"position_ids": NINE.to("meta")}, ValueError, "position_ids: expected device cpu"),
        ({"position_table": torch.zeros(7, 25)}, ValueError, r"position_table: expected shape \[M, 24\], got"),
        ({"padding_idx": 11}, ValueError, r"padding_idx: expected a row of word_table, in \[0, 11\), got 11"),
        ({"padding_idx": -1}, ValueError, r"padding_idx: expected a row of word_table, in \[0, 11\), got -1"),
        ({"weight": torch.zeros(23)}, ValueError, r"weight: expected shape \[24\], got \[23\]"),
        ({"weight": torch.zeros(H).half()}, TypeError, "weight: expected dtype float32, got float16"),
        ({"bias": None}, TypeError, "bias: expected a Tensor, got NoneType"),
        ({"bias": torch.zeros(H).double()}, TypeError, "bias: expected dtype float32 .* got float64"),
        ({"dropout_p": 1.5}, ValueError, r"dropout_p: expected a probability in \[0, 1\], got 1.5"),
        ({"dropout_p": float("nan")}, ValueError, r"dropout_p: expected a probability in \[0, 1\], got nan"),
        ({"seed": None}, ValueError, "seed: expected a Tensor where dropout_p is 0.3, got None"),
        ({"coords": torch.zeros(8, 2).int()}, ValueError, r"coords: expected shape \[9, 2\], got \[8, 2\]"),
        ({"site": -1}, ValueError, r"site: expected a number in \[0, 2\*\*31\), got -1"),
        ({"backend": "cuda"}, BackendError, "expected one of .*, got 'cuda'"),
    ],
)  # fmt: skip
def test_messages(changed: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        embedding(**(call() | mask() | changed))


def test_triton_says_why_it_cannot_run() -> None:
    with pytest.raises(BackendError, match=r"dtype torch\.float64 is none of"):
        embedding(**doubled(call()), backend="triton")
    wide = torch.zeros(2, 8200)
    with pytest.raises(BackendError, match="hidden size 8200 exceeds 8192"):
        embedding(NINE, wide, wide, wide[0], wide[0], backend="triton")
