"""Cases of embedding: a vocabulary of BERT's size, words as frequent as in text, with and without dropout."""

import itertools
from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F

from benchmarks.aot.case import AotCase, facts_of_rows
from benchmarks.kernels.case import KernelCase, Problem, Use, assert_gradients_close, dtype_name, full_shapes
from benchmarks.kit import bert
from bert_fast import ops
from bert_fast.reference.dropout import dropout_scale, keep_mask
from bert_fast.reference.embedding import Embedding

EPS = 1e-12
NUM_WORDS, LENGTH, NUM_TYPES, PADDING_IDX = bert.VOCAB_SIZE, 512, 2, 0
_AOT_WORDS = 5000  # a table that counts as large, and less to allocate


def cases() -> Iterator[KernelCase]:
    """BERT's token counts and widths: bf16 tables, and fp32 tables under autocast to bf16; a few tokens."""
    kinds = ((0.0, torch.bfloat16), (0.1, torch.bfloat16), (0.1, torch.float32))
    for (uses, num_tokens, size), (dropout_p, tables) in itertools.product(full_shapes(), kinds):
        yield _case(uses, num_tokens, size.hidden, tables, torch.bfloat16, dropout_p)
    yield _case(Use.CPU, bert.FEWEST_TOKENS, bert.BASE.hidden, torch.float32, torch.float32, 0.1)
    yield _case(Use.SMALL, bert.FEW_ROWS, 100, torch.float32, torch.float32, 0.1)  # a width that is no power of two
    yield _case(Use.SMALL, 100, bert.BASE.hidden, torch.float32, torch.bfloat16, 0.1)


def _case(
    uses: Use, num_tokens: int, hidden_size: int, tables: torch.dtype, y_dtype: torch.dtype, dropout_p: float
) -> KernelCase:
    return KernelCase(
        "embedding", f"{num_tokens}x{hidden_size}", y_dtype,
        f"p{dropout_p}" + ("" if tables == y_dtype else f"-{dtype_name(tables)}-tables"),
        partial(make, num_tokens, hidden_size, tables, y_dtype, dropout_p), uses,
    )  # fmt: skip


def word_ids(num_tokens: int, device: torch.device) -> Tensor:
    """Words whose frequency falls as 1 / rank (Zipf), as in text, at ids in random order.

    The shares are summed up on the CPU: on a GPU the order of a running sum is not the same twice, and a word at the
    edge of two would be another one.
    """
    shares = (1.0 / torch.arange(1, NUM_WORDS, dtype=torch.float64)).cumsum(0)
    places = torch.rand(num_tokens, device=device, dtype=torch.float64) * shares[-1].item()
    ranks = torch.searchsorted(shares.to(device), places, right=True).clamp_(max=NUM_WORDS - 2)
    return 1 + torch.randperm(NUM_WORDS - 1, device=device)[ranks]


def make(
    num_tokens: int, hidden_size: int, tables: torch.dtype, y_dtype: torch.dtype, dropout_p: float, device: torch.device
) -> Problem:
    """Sequences of 512 tokens, the first 200 of type 0; autocast where the dtypes of tables and output differ."""
    sizes = (NUM_WORDS, LENGTH, NUM_TYPES)
    leaves = [torch.randn(rows, hidden_size, device=device).to(tables) for rows in sizes]
    leaves += [torch.randn(hidden_size, device=device).to(tables) for _ in range(2)]
    inputs = tuple(leaf.requires_grad_() for leaf in leaves)
    words, token = word_ids(num_tokens, device), torch.arange(num_tokens, device=device)
    positions = token % LENGTH
    types = (positions >= 200).long()
    upstream = torch.randn(num_tokens, hidden_size, device=device).to(y_dtype)
    coords = torch.stack((token // LENGTH, positions), dim=1).int()
    seed = ops.draw_seed(device)

    def fast(word_table: Tensor, position_table: Tensor, type_table: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        with torch.autocast(device.type, torch.bfloat16, enabled=tables != y_dtype):
            return ops.embedding(
                words, word_table, type_table, weight, bias, token_type_ids=types, position_ids=positions,
                position_table=position_table, padding_idx=PADDING_IDX, eps=EPS, dropout_p=dropout_p, seed=seed,
                coords=coords,
            )  # fmt: skip

    def normalised(
        word_table: Tensor, position_table: Tensor, type_table: Tensor, weight: Tensor, bias: Tensor
    ) -> Tensor:
        h = F.embedding(words, word_table, PADDING_IDX) + F.embedding(types, type_table)
        return F.layer_norm(h + F.embedding(positions, position_table), weight.shape, weight, bias, EPS)

    def eager(*parameters: Tensor) -> Tensor:
        return F.dropout(normalised(*parameters), dropout_p).to(y_dtype)

    def verify() -> None:
        factor = keep_mask(seed, 0, coords, hidden_size, dropout_p) * dropout_scale(dropout_p)

        def same_mask(*parameters: Tensor) -> Tensor:
            y = normalised(*parameters)
            return (y * factor.to(y.dtype)).to(torch.float64 if y.dtype == torch.float64 else y_dtype)

        names = ("y", "dword_table", "dposition_table", "dtype_table", "dweight", "dbias")
        assert_gradients_close("embedding", names, fast, same_mask, inputs, upstream)

    row, ids, coords_bytes = hidden_size * tables.itemsize, 3 * 8, 8 if dropout_p else 0
    small_tables = (LENGTH + NUM_TYPES) * row
    per_token = upstream.nbytes // num_tokens + row + ids + coords_bytes + 8
    # dh written once, read for words and for positions; both sorts' order and keys.
    tables_per_token = 3 * row + 2 * (2 + 16 - 2)
    return Problem(
        inputs, upstream, fast, eager, verify=verify,
        bytes_moved={
            "fwd": num_tokens * per_token + small_tables,
            "bwd": num_tokens * (per_token + tables_per_token) + NUM_WORDS * row + 2 * small_tables,
        },
    )  # fmt: skip


def aot_cases() -> Iterator[AotCase]:
    """Every launch configuration of BERT's widths, and the widest: tables by output, ids and vectors."""
    fp32, fp16, bf16 = bert.DTYPES
    pairs = ((fp32, fp32), (fp32, fp16), (fp32, bf16), (bf16, bf16))
    shapes = [(size, *pair, False) for size in bert.HIDDEN_SIZES for pair in pairs]
    shapes += [(size, dtype, dtype, False) for size in bert.WIDEST for dtype in (bf16, fp32)]
    shapes += [(bert.BASE.hidden, tables, bf16, True) for tables in (bf16, fp32)]
    for shape, dropout_p in itertools.product(shapes, (0.0, 0.1)):
        yield _aot_case(*shape, dropout_p)


def _aot_case(
    hidden_size: int, tables: torch.dtype, y_dtype: torch.dtype, has_vectors: bool, dropout_p: float
) -> AotCase:
    """One forward and one backward call; has_vectors: in place of ids, and neither token types nor positions."""
    from bert_fast.triton import embedding as family

    def launch() -> None:
        ids, coords = torch.zeros(64, dtype=torch.int64), torch.zeros(64, 2, dtype=torch.int32)
        word_table, position_table, type_table = (
            torch.empty(rows, hidden_size, dtype=tables) for rows in (_AOT_WORDS, LENGTH, NUM_TYPES)
        )
        vectors = torch.zeros(64, hidden_size, dtype=tables), None, None, None, None
        parameter = torch.zeros(hidden_size)  # in fp32, as under autocast
        a = Embedding(
            *(vectors if has_vectors else (ids, ids, coords[:, 1], word_table, position_table)),
            type_table, PADDING_IDX, parameter, parameter, EPS, dropout_p,
            *((torch.zeros(1, dtype=torch.int64), coords) if dropout_p else (None, None)), 1, y_dtype,
        )  # fmt: skip
        family.embedding_bwd(a, *family.embedding_fwd(a))

    facts = facts_of_rows(
        "embedding", family.launch_config(hidden_size, tables, y_dtype), hidden_size,
        forward_bytes=tables.itemsize + y_dtype.itemsize, backward_bytes=2 * tables.itemsize + y_dtype.itemsize,
    )  # fmt: skip
    name = f"H={hidden_size} {dtype_name(y_dtype)} of {dtype_name(tables)} {'vectors' if has_vectors else 'ids'}"
    return AotCase(name, launch, facts, has_dropout=dropout_p > 0)
