"""Cases of attention: batches of one length and of real texts' lengths, with and without dropout.

FLOPs count the products of the algorithm, 2 forward and 5 backward, over scores that exist: 4 and 10 sum(S^2) A D.
"""

import itertools
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.aot.case import AotCase, KernelFacts
from benchmarks.aot.launches import Launch, capture
from benchmarks.kernels.case import (
    KernelCase,
    Problem,
    Use,
    assert_gradients_close,
    dtype_name,
    installed,
    verified_only,
)
from benchmarks.kit import bert
from bert_fast import ops
from bert_fast.ops.packing import Packing
from bert_fast.reference.attention import Attention
from bert_fast.reference.dropout import attention_keep_mask, dropout_scale
from bert_fast.testing.attention import TABLES, AttentionCase
from bert_fast.testing.compare import assert_close_to_truth

SITE = 9
# Lengths of real texts in tokens of BERT's uncased vocabulary, [CLS] and [SEP] included: text -> (share of the
# sequences, the length that it does not pass). books: sentences of public-domain English novels, 26,148 of them. squad:
# XQuAD's English questions with their passages, in windows of 384 tokens with stride 128, 1,219 of them.
QUANTILES: dict[str, tuple[tuple[float, int], ...]] = {
    "books": (
        (0.0, 4), (0.05, 7), (0.1, 9), (0.25, 14), (0.5, 24), (0.75, 38), (0.9, 55), (0.95, 68), (0.99, 100),
        (0.999, 152), (1.0, 326),
    ),
    "squad": (
        (0.0, 43), (0.05, 91), (0.1, 112), (0.25, 134), (0.5, 165), (0.75, 215), (0.9, 267), (0.95, 324), (0.99, 384),
        (1.0, 384),
    ),
}  # fmt: skip


def mixed_lengths(text: str, num_tokens: int) -> list[int]:
    """Lengths of a batch of exactly `num_tokens` tokens, distributed as those of a text, in a fixed random order."""
    points = QUANTILES[text]

    def at(share: float) -> float:
        (low, a), (high, b) = next(pair for pair in itertools.pairwise(points) if share <= pair[1][0])
        return a + (b - a) * (share - low) / (high - low)

    mean = sum(at((i + 0.5) / 1000) for i in range(1000)) / 1000
    count = max(1, int(0.9 * num_tokens / mean))  # fewer than are needed
    while sum(round(at((i + 0.5) / count)) for i in range(count)) < num_tokens:
        count += 1
    lengths = [round(at((i + 0.5) / count)) for i in range(count)]
    order = torch.randperm(count, generator=torch.Generator().manual_seed(0)).tolist()
    lengths = [lengths[i] for i in order]
    excess = sum(lengths) - num_tokens
    while excess:  # taken from the first sequences that are longer than one token
        index = next(i for i, length in enumerate(lengths) if length > 1)
        taken = min(excess, lengths[index] - 1)
        lengths[index] -= taken
        excess -= taken
    return lengths


def cases() -> Iterator[KernelCase]:
    """Full token budgets with heads of BERT-base, BERT-large and MiniLM; all extras; a few rows; rare calls."""
    full = [("S128", [128] * 128), ("S512", [512] * 32), *((text, mixed_lengths(text, 16384)) for text in QUANTILES)]
    for dropout_p in (0.1, 0.0):
        for variant, lengths in full:
            yield _of_bert(Use.GPU, bert.BASE, variant, lengths, dropout_p)
        yield _of_bert(Use.GPU, bert.LARGE, "S512", [512] * 64, dropout_p)
    yield _of_bert(Use.GPU, bert.BASE, "S2048", [2048] * 8, 0.1)
    yield _case(Use.GPU, "S128 p0.1", [128] * 128, 12, 32, torch.bfloat16, 0.1)
    yield _of_bert(Use.GPU, bert.LARGE, "S128", [128] * 256, 0.1)
    yield _of_bert(Use.GPU, bert.LARGE, "squad", mixed_lengths("squad", 32768), 0.1)
    for longest, dropout_p in itertools.product((128, 512), (0.0, 0.1)):  # for whole heads, and tiled
        lengths = [longest * part // 128 for part in (128, 77, 1, 0, 100, 64, 31, 111)] * (1024 // longest)
        yield _of_bert(Use.SMOKE, bert.BASE, f"S<={longest}", lengths, dropout_p)
    for feature, letters in _TABLES.items():
        extras = AttentionCase((130, 0, 64, 270), None, 12, 64, 0.1, bias="AQK", relative=letters)
        yield _of(extras, Use.SMOKE, f"{feature} bias p0.1", torch.bfloat16, make_with_extras)
        for variant, lengths in (("S128", (128,) * 32), ("S512", (512,) * 8)):
            extras = AttentionCase(lengths, None, 12, 64, 0.1, relative=letters)
            yield _of(extras, Use.GPU, f"{feature} {variant} p0.1", torch.bfloat16, make_with_extras)
    extras = AttentionCase((128,) * 32, None, 12, 64, 0.1, bias="AQK", relative="C")
    yield _of(extras, Use.GPU, "relative_key bias p0.1", torch.bfloat16, make_with_extras)
    for length, dropout_p in itertools.product((128, 512), (0.0, 0.1)):  # all slots filled, and half of them
        count = bert.FEWEST_TOKENS // length
        half = [max(1, round((i + 0.5) * length / count)) for i in range(count)]  # 1 token to nearly all of them
        for fill, lengths in ((1.0, [length] * count), (0.5, half)):
            yield _case(
                Use.CPU, f"fill {fill} p{dropout_p}", lengths, 12, 64, torch.float32, dropout_p, padded_length=length
            )
    # Short and long sequences, one of a single token and one of none; a size of head that is no power of two.
    yield _case(Use.SMALL, "S37+1+0+20 p0.1", (37, 1, 0, 20), 2, 64, torch.float32, 0.1)
    yield _case(Use.SMALL, "S150+3 p0.1", (150, 3), 2, 64, torch.bfloat16, 0.1)
    yield _case(Use.SMALL, "S33+40 p0.0", (33, 40), 2, 24, torch.bfloat16, 0.0)
    for (variant, rare), dtype in itertools.product(_RARE.items(), (torch.bfloat16, torch.float32)):
        yield _of(rare, Use.WITNESS, variant, dtype, _make_rare)


# Features -> letters of the tables of relative positions: BERT's, for queries alone, and DeBERTa's.
_TABLES = {"relative_key": "C", "disentangled": "CP"}
# What only some calls ask for.
_RARE = {
    "S130 causal D128 p0.1": AttentionCase((130,), num_heads=1, head_dim=128, causal=True, dropout_p=0.1),
    "S100 causal": AttentionCase((100, 3), num_heads=1, head_dim=64, causal=True),
    "S140 bias p0.1": AttentionCase((140, 3), num_heads=1, head_dim=64, bias="BAQK", dropout_p=0.1),
    # Holes make several windows of distances for a tile of scores.
    "S70 relative_key holes": AttentionCase((70, 3), num_heads=1, head_dim=64, relative="C", holes=True),
    "S70 disentangled holes p0.1": AttentionCase(
        (70, 3), num_heads=1, head_dim=64, relative="CP", holes=True, dropout_p=0.1
    ),
    "S140 causal p0.1": AttentionCase((140, 3), num_heads=1, head_dim=64, causal=True, dropout_p=0.1),
    "S140 p0.5": AttentionCase((140, 3), num_heads=1, head_dim=64, dropout_p=0.5),  # of such no mask is stored
    "S140 fewer keys": AttentionCase((140, 5), (3, 150), num_heads=1, head_dim=40, dropout_p=0.1),
}


def _of_bert(uses: Use, size: bert.Size, variant: str, lengths: Sequence[int], dropout_p: float) -> KernelCase:
    head_dim = size.hidden // size.heads
    return _case(uses, f"{variant} p{dropout_p}", lengths, size.heads, head_dim, torch.bfloat16, dropout_p)


def _case(
    uses: Use, variant: str, lengths: Sequence[int], num_heads: int, head_dim: int, dtype: torch.dtype,
    dropout_p: float, padded_length: int | None = None,
) -> KernelCase:  # fmt: skip
    tokens = f"{len(lengths)}x{padded_length}" if padded_length else f"{sum(lengths)}"
    return KernelCase(
        "attention", f"{tokens}x{num_heads}x{head_dim}", dtype, variant,
        partial(make, tuple(lengths), num_heads, head_dim, dtype, dropout_p, padded_length=padded_length), uses,
    )  # fmt: skip


def _of(case: AttentionCase, uses: Use, variant: str, dtype: torch.dtype, make: Callable[..., Problem]) -> KernelCase:
    shape = f"{sum(case.lengths)}x{case.num_heads}x{case.head_dim}"
    return KernelCase("attention", shape, dtype, variant, partial(make, case, dtype), uses)


def make(
    lengths: tuple[int, ...],
    num_heads: int,
    head_dim: int,
    dtype: torch.dtype,
    dropout_p: float,
    device: torch.device,
    padded_length: int | None = None,
) -> Problem:
    """Parts of one random buffer [T, 3, A, D], as a fused projection leaves them.

    padded_length: of the batch that others work on; default: the longest sequence.
    """
    num_tokens, longest = sum(lengths), padded_length or max(lengths)
    cu_seqlens = torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32, device=device)
    packing = Packing.from_cu_seqlens(cu_seqlens, max(lengths), num_tokens)
    seed = ops.draw_seed(device)

    def leaves(*shape: int) -> tuple[Tensor, ...]:
        parts = torch.randn(*shape, 3, num_heads, head_dim, device=device).to(dtype).unbind(-3)
        return tuple(part.requires_grad_() for part in parts)

    def gradient(*shape: int) -> Tensor:
        return torch.randn(*shape, num_heads, head_dim, device=device).to(dtype)

    def fast(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return ops.attention(
            q, k, v, cu_seqlens_q=cu_seqlens, max_seqlen_q=max(lengths), dropout_p=dropout_p,
            seed=seed if dropout_p else None, coords_q=packing.coords, site=SITE, sequence_order=packing.order,
        )  # fmt: skip

    inputs, upstream = leaves(num_tokens), gradient(num_tokens)
    of_padded: tuple[tuple[Tensor, ...], Tensor] | None = None
    mask: Tensor | None = None
    if any(length != longest for length in lengths):
        of_padded = leaves(len(lengths), longest), gradient(len(lengths), longest)
        mask = torch.arange(longest, device=device) < cu_seqlens.diff()[:, None]  # [B, S]
    eager = partial(_sdpa, batch_size=len(lengths), length=longest, mask=mask, dropout_p=dropout_p)
    peers = _padded_peers(eager, mask, device, longest)
    own_inputs = dict.fromkeys(("eager", "compiled", *peers), of_padded) if of_padded else {}
    if device.type == "cuda":
        peers |= _packed_peers(cu_seqlens, max(lengths), dropout_p)

    def verify() -> None:
        results = _results(fast, inputs, upstream)
        dtypes = dtype, torch.float64
        plain, truth = _explicit(inputs, upstream, lengths, packing.coords, seed, dropout_p, dtypes)
        for name, *outputs in zip(("out", "dq", "dk", "dv"), results, plain, truth, strict=True):
            assert_close_to_truth(tolerances_of(device), name, *outputs)

    tile = num_tokens * num_heads * head_dim * dtype.itemsize
    statistics = num_tokens * num_heads * 4 + (packing.coords.nbytes if dropout_p else 0)
    products = sum(length**2 for length in lengths) * num_heads * head_dim
    return Problem(
        inputs, upstream, fast, eager, verify=verify, peers=peers, own_inputs=own_inputs,
        bytes_moved={"fwd": 4 * tile + statistics, "bwd": 8 * tile + statistics},
        flops={"fwd": 4 * products, "bwd": 10 * products},
    )  # fmt: skip


def _sdpa(
    q: Tensor, k: Tensor, v: Tensor, batch_size: int, length: int, mask: Tensor | None, dropout_p: float,
    backend: SDPBackend | None = None,
) -> Tensor:  # fmt: skip
    """PyTorch's attention of a padded batch, [B, S, A, D] or, where nothing is padded, [B S, A, D]."""
    shape = q.shape
    heads = (t.view(batch_size, length, *shape[-2:]).transpose(1, 2) for t in (q, k, v))
    attend = partial(F.scaled_dot_product_attention, *heads, None if mask is None else mask[:, None, None], dropout_p)
    if backend is None:
        return attend().transpose(1, 2).reshape(shape)
    with sdpa_kernel(backend):
        return attend().transpose(1, 2).reshape(shape)


def _padded_peers(
    eager: Callable[..., Tensor], mask: Tensor | None, device: torch.device, length: int
) -> dict[str, Callable[..., Tensor]]:
    """SDPA's back-ends one by one; a CPU has one worth naming, flash takes no mask, math would keep 2,048 x 2,048."""
    if device.type != "cuda":
        return {}
    backends = {"sdpa_efficient": SDPBackend.EFFICIENT_ATTENTION, "sdpa_cudnn": SDPBackend.CUDNN_ATTENTION}
    if mask is None:
        backends["sdpa_flash"] = SDPBackend.FLASH_ATTENTION
    if length <= 512:
        backends["sdpa_math"] = SDPBackend.MATH
    return {name: partial(eager, backend=backend) for name, backend in backends.items()}


def _packed_peers(cu_seqlens: Tensor, longest: int, dropout_p: float) -> dict[str, Callable[..., Tensor]]:
    """Attention of packed sequences by others; only flash-attn 2 drops probabilities, and the others return none."""
    bounds = (cu_seqlens, cu_seqlens, longest, longest)
    if dropout_p:
        return installed(
            flash_attn=("flash_attn:flash_attn_varlen_func", lambda f, *qkv: f(*qkv, *bounds, dropout_p=dropout_p))
        )
    return installed(
        flash_attn=("flash_attn:flash_attn_varlen_func", lambda f, *qkv: f(*qkv, *bounds)),
        flash_attn_3=("flash_attn_interface:flash_attn_varlen_func", lambda f, *qkv: f(*qkv, *bounds)),
        varlen_attn=("torch.nn.attention.varlen:varlen_attn", lambda f, *qkv: f(*qkv, *bounds)),
    )


def _results(function: Callable[..., Tensor], inputs: tuple[Tensor, ...], upstream: Tensor) -> tuple[Tensor, ...]:
    """Output and gradients."""
    out = function(*inputs)
    return out.detach(), *torch.autograd.grad(out, inputs, upstream)


def _explicit(
    inputs: tuple[Tensor, ...],
    upstream: Tensor,
    lengths: tuple[int, ...],
    coords: Tensor,
    seed: Tensor,
    dropout_p: float,
    dtypes: tuple[torch.dtype, ...],
) -> list[list[Tensor]]:
    """Output and gradients, in each of the dtypes, by plain operators, the reference's mask included.

    Sequence by sequence, backward too: at full shapes all probabilities in fp64 would not fit beside one another. A
    sequence's mask, which takes more operators than all else, is made once for all dtypes.
    """
    pieces: list[list[tuple[Tensor, ...]]] = [[] for _ in dtypes]
    num_heads, head_dim = inputs[0].shape[1:]
    bounds = itertools.pairwise([0, *itertools.accumulate(lengths)])
    for start, end in bounds:
        span = slice(start, end)
        keep = None
        if dropout_p:
            keep = attention_keep_mask(seed, SITE, coords[span], end - start, num_heads, dropout_p)

        def attend(q: Tensor, k: Tensor, v: Tensor, keep: Tensor | None = keep) -> Tensor:
            q, k, v = (t.transpose(0, 1) for t in (q, k, v))
            probabilities = (q @ k.transpose(1, 2) / head_dim**0.5).softmax(-1)
            if keep is not None:
                probabilities = probabilities * keep * dropout_scale(dropout_p)
            return (probabilities @ v).transpose(0, 1)

        for dtype, found in zip(dtypes, pieces, strict=True):
            leaves = tuple(t.detach()[span].to(dtype).requires_grad_() for t in inputs)
            found.append(_results(attend, leaves, upstream[span].to(dtype)))
    return [[torch.cat(parts) for parts in zip(*found, strict=True)] for found in pieces]


def tolerances_of(device: torch.device) -> str:
    """The name under which the table of tolerances has attention's results on a device."""
    return "triton_attention_on_gpu" if device.type == "cuda" else "attention"


def make_with_extras(attention: AttentionCase, dtype: torch.dtype, device: torch.device) -> Problem:
    """The case's own tensors, with gradients of the bias of each head and of the table of distances.

    eager is the torch back-end, and so is what errors are held against.
    """
    tensors = {name: t.to(device) for name, t in attention.inputs(dtype).items()}
    upstream = tensors.pop("dout")
    names, inputs = tuple(tensors), tuple(t.requires_grad_() for t in tensors.values())

    def fast(*given: Tensor) -> Tensor:
        return attention.attend(None, dict(zip(names, given, strict=True)))

    def eager(*given: Tensor) -> Tensor:
        backend = "reference" if given[0].dtype == torch.float64 else "torch"
        return attention.attend(backend, dict(zip(names, given, strict=True)))

    outputs = ("out", *(f"d{name}" for name in names))
    given, made = bert.nbytes(*inputs), upstream.nbytes
    return Problem(
        inputs, upstream, fast, eager,
        verify=partial(assert_gradients_close, tolerances_of(device), outputs, fast, eager, inputs, upstream),
        bytes_moved={"fwd": given + made, "bwd": 2 * given + 2 * made},
    )  # fmt: skip


def _make_rare(case: AttentionCase, dtype: torch.dtype, device: torch.device) -> Problem:
    def verify() -> None:
        actual, plain, truth = case.run("triton", dtype), case.plain(dtype), case.truth(dtype)
        for name, result in actual.items():
            assert_close_to_truth("triton_attention", name, result, plain[name], truth[name])

    return verified_only(verify)


# Kernel -> matrix products of a tile; each takes BLOCK_D multiply-adds a score.
_PRODUCTS = {
    "_attention_fwd_short_kernel": 2,
    "_attention_bwd_short_kernel": 5,
    "_attention_fwd_kernel": 2,
    "_attention_fwd_stored_kernel": 2,
    "_attention_bwd_dq_kernel": 3,
    "_attention_bwd_dkdv_kernel": 4,
    "_attention_bwd_dq_stored_kernel": 3,
    "_attention_bwd_dkdv_stored_kernel": 4,
}


_LONG = 4096  # tokens: beyond the lengths of which a dropout mask is stored


def aot_cases() -> Iterator[AotCase]:
    """Kernels for whole heads and for tiles, for the heads of BERT models and the widest, as launched on a GPU."""
    fp32, fp16, bf16 = bert.DTYPES
    kinds = [(d, bf16, "") for d in (64, 32, 16, 128, 96)] + [(64, fp16, "")] + [(d, fp32, "") for d in (64, 32, 128)]
    kinds += [(d, dtype, "causal") for d, dtype in ((64, bf16), (128, bf16), (64, fp32))]
    kinds += [(64, bf16, "bias")]
    for (head_dim, dtype, feature), dropout_p in itertools.product(kinds, (0.0, 0.1)):
        yield from _aot_cases(head_dim, dtype, dropout_p, feature)
        if not feature:  # as the models call it: gradients are parts of one tensor
            yield from _aot_cases(head_dim, dtype, dropout_p, is_packed=True)
    for feature in ("bias", *_TABLES):
        for head_dim, dtype in ((64, bf16), (128, bf16), (64, fp32), (128, fp32)):
            if (head_dim, dtype, feature) not in kinds:
                yield from _aot_cases(head_dim, dtype, 0.1, feature)


def _aot_cases(
    head_dim: int, dtype: torch.dtype, dropout_p: float, feature: str = "", is_packed: bool = False
) -> Iterator[AotCase]:
    """A case for every number of tokens for which one program holds a whole head, and for tiles.

    With dropout two of tiles: kernels that store the mask and read it, where there are, and those that draw it.
    """
    suffix = f"D={head_dim} {dtype_name(dtype)}" + (f" {feature}" if feature else "") + (" qkv" if is_packed else "")
    for max_seqlen in (32, 64, 128, 512, *((_LONG,) if dropout_p else ())):
        launch = partial(_launch, max_seqlen, head_dim, dtype, dropout_p, feature, is_packed)
        with capture() as launches:  # only to see which kernels run, and with which tiles
            launch()
        is_short = any(one.kernel.__name__.endswith("_short_kernel") for one in launches)
        if not is_short and max_seqlen < 512:
            continue
        kernels = {one.kernel.__name__: _facts(one, dtype, feature) for one in launches}
        name = f"S<={max_seqlen} {suffix}" if is_short else f"tiled {suffix}"
        yield AotCase(name, launch, kernels, has_dropout=dropout_p > 0)


def _facts(launch: Launch, dtype: torch.dtype, feature: str) -> KernelFacts:
    name, constants = launch.kernel.__name__, launch.constants
    tile = constants["BLOCK_M"], constants["BLOCK_N"]
    is_wide = dtype != torch.float32 and min(tile) >= 64 and launch.num_warps % 4 == 0
    # Relative positions take products with a window of the table, whose number depends on the positions.
    if name not in _PRODUCTS or feature in _TABLES:
        return KernelFacts(needs_warpgroup_products=is_wide)
    multiply_adds = _PRODUCTS[name] * constants["BLOCK_D"]
    return KernelFacts(tile[0] * tile[1], multiply_adds=multiply_adds, needs_warpgroup_products=is_wide)


def _launch(
    max_seqlen: int, head_dim: int, dtype: torch.dtype, dropout_p: float, feature: str, is_packed: bool
) -> None:
    """One forward and backward of a sequence of 12 heads, with every gradient that the feature has.

    is_packed: as `ops.attention_qkv` launches it, whose backward writes one tensor; forward is the same.
    """
    from bert_fast.triton import attention as family

    q, k, v = torch.empty(512, 3, 12, head_dim, dtype=dtype).unbind(1)
    cu_seqlens, order = torch.zeros(2, dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
    coords = torch.zeros(512, 2, dtype=torch.int32)
    seed = torch.zeros(1, dtype=torch.int64) if dropout_p else None
    table, letters = torch.zeros(1023, 12, head_dim, dtype=dtype), _TABLES.get(feature, "")
    a = Attention(
        q, k, v, cu_seqlens, cu_seqlens, max_seqlen, max_seqlen, head_dim**-0.5, dropout_p, seed,
        coords_q=coords if dropout_p or feature else None,
        coords_k=coords if feature else None,
        site=SITE,
        causal=feature == "causal",
        bias=torch.zeros(1, 12, 512, 512, dtype=dtype) if feature == "bias" else None,
        relative_keys=table if "C" in letters else None,
        relative_queries=table if "P" in letters else None,
        sequence_order=order,
        keeps=True,
    )  # fmt: skip
    wants = {name for name in ("bias", *TABLES.values()) if getattr(a, name) is not None}
    out, lse, mask = family.attention_fwd(a)
    dqkv = torch.zeros(512, 3, 12, head_dim, dtype=dtype) if is_packed else None
    family.attention_bwd(a, out, out, lse, mask, wants, dqkv)
