"""Cases of embedding: a vocabulary of BERT's size, words as frequent as in text, with and without dropout."""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor
from torch.nn import functional as F

from benchmarks.kernels.case import AotCase, KernelCase, Problem, assert_gradients_close, dtype_name
from bert_fast import ops
from bert_fast.reference.dropout import dropout_scale, keep_mask
from bert_fast.reference.embedding import Embedding

EPS = 1e-12
NUM_WORDS, LENGTH, NUM_TYPES, PADDING_IDX = 30522, 512, 2, 0
_AOT_WORDS = 5000  # a table that counts as large, and less to allocate


def cases() -> Iterator[KernelCase]:
    """Full token budgets: bf16 tables, and fp32 tables under autocast to bf16."""
    for num_tokens in (4096, 16384, 32768):
        for hidden_size in (768, 1024):
            for dropout_p, tables in ((0.0, torch.bfloat16), (0.1, torch.bfloat16), (0.1, torch.float32)):
                yield _case(num_tokens, hidden_size, tables, torch.bfloat16, dropout_p)


def smoke_cases() -> Iterator[KernelCase]:
    """BERT-base."""
    for dropout_p, tables in ((0.0, torch.bfloat16), (0.1, torch.bfloat16), (0.1, torch.float32)):
        yield _case(4096, 768, tables, torch.bfloat16, dropout_p)


def small_cases() -> Iterator[KernelCase]:
    """A few tokens: a width that is no power of two, and BERT's."""
    yield _case(37, 100, torch.float32, torch.float32, 0.1)
    yield _case(100, 768, torch.float32, torch.bfloat16, 0.1)


def cpu_cases() -> Iterator[KernelCase]:
    """A training batch of BERT-base."""
    yield _case(4096, 768, torch.float32, torch.float32, 0.1)


def _case(num_tokens: int, hidden_size: int, tables: torch.dtype, y_dtype: torch.dtype, dropout_p: float) -> KernelCase:
    return KernelCase(
        "embedding", f"{num_tokens}x{hidden_size}", y_dtype,
        f"p{dropout_p}" + ("" if tables == y_dtype else f"-{dtype_name(tables)}-tables"),
        lambda device: make(num_tokens, hidden_size, tables, y_dtype, dropout_p, device),
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


def _launch(
    hidden_size: int, tables: torch.dtype, y_dtype: torch.dtype, dropout_p: float, *, vectors: bool
) -> Callable[[], None]:
    """One forward and one backward call; vectors: in place of ids, and neither token types nor positions."""

    def launch() -> None:
        from bert_fast.triton import embedding as family

        num_tokens = 64
        ids = torch.zeros(num_tokens, dtype=torch.int64)
        coords = torch.zeros(num_tokens, 2, dtype=torch.int32)
        word_table, position_table, type_table = (
            torch.empty(rows, hidden_size, dtype=tables) for rows in (_AOT_WORDS, LENGTH, NUM_TYPES)
        )
        parameter = torch.zeros(hidden_size)  # in fp32, as under autocast
        mask = (dropout_p, torch.zeros(1, dtype=torch.int64), coords, 1) if dropout_p else (0.0, None, None, 1)
        a = Embedding(
            torch.zeros(num_tokens, hidden_size, dtype=tables) if vectors else ids,
            None if vectors else ids,
            None if vectors else coords[:, 1],
            None if vectors else word_table,
            None if vectors else position_table,
            type_table,
            PADDING_IDX,
            parameter,
            parameter,
            EPS,
            *mask,
            y_dtype,
        )
        family.embedding_bwd(a, *family.embedding_fwd(a))

    return launch


def aot_cases() -> Iterator[AotCase]:
    """Every launch configuration of BERT's widths, and the widest: tables by output, ids and vectors."""
    from bert_fast.triton import embedding as family

    fp32, fp16, bf16 = torch.float32, torch.float16, torch.bfloat16
    pairs = ((fp32, fp32), (fp32, fp16), (fp32, bf16), (bf16, bf16))
    configurations = [(size, *pair, False) for size in (384, 768, 1024) for pair in pairs]
    configurations += [(size, dtype, dtype, False) for size in (2048, 4096, 8192) for dtype in (bf16, fp32)]
    configurations += [(768, tables, bf16, True) for tables in (bf16, fp32)]
    for hidden_size, tables, y_dtype, vectors in configurations:
        config = family.launch_config(hidden_size, tables, y_dtype)
        for dropout_p in (0.0, 0.1):
            yield AotCase(
                f"H={hidden_size} {dtype_name(y_dtype)} of {dtype_name(tables)} {'vectors' if vectors else 'ids'}",
                dropout_p > 0,
                _launch(hidden_size, tables, y_dtype, dropout_p, vectors=vectors),
                {
                    "_embedding_fwd_kernel": config.forward.rows * hidden_size,
                    "_embedding_bwd_kernel": config.backward.rows * hidden_size,
                },
                {
                    "_embedding_fwd_kernel": config.forward_programs_per_multiprocessor,
                    "_embedding_bwd_kernel": config.backward_programs_per_multiprocessor,
                },
                {
                    "_embedding_fwd_kernel": tables.itemsize + y_dtype.itemsize,
                    "_embedding_bwd_kernel": 2 * tables.itemsize + y_dtype.itemsize,
                },
            )
