"""Cases of rotary: query and key of BERT's token counts and heads, over the tensor that holds them, and beside it."""

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor

from benchmarks.aot.case import AotCase, KernelFacts
from benchmarks.kernels.case import KernelCase, Problem, Use, assert_gradients_close, dtype_name
from benchmarks.kit import bert
from bert_fast import ops
from bert_fast.reference.rotary import Rotary

_HEAD = 64


def cases() -> Iterator[KernelCase]:
    """BERT's shapes; a few rows, of which heads are no whole number of vectors, too."""
    base, large = bert.BASE.hidden // _HEAD, bert.LARGE.hidden // _HEAD
    for num_tokens, heads in ((bert.TOKENS[0], base), (bert.TOKENS[0], large)):
        yield _case(Use.GPU, num_tokens, heads, _HEAD, torch.bfloat16, interleaved=False, inplace=True)
    for inplace, interleaved in ((True, False), (False, False), (True, True)):
        uses = Use.GPU | Use.SMOKE
        yield _case(uses, bert.FEWEST_TOKENS, base, _HEAD, torch.bfloat16, interleaved=interleaved, inplace=inplace)
    yield _case(Use.CPU, bert.FEWEST_TOKENS, base, _HEAD, torch.float32, interleaved=False, inplace=True)
    yield _case(Use.SMALL, bert.FEW_ROWS, 3, 30, torch.float32, interleaved=False, inplace=False)
    yield _case(Use.SMALL, bert.FEW_ROWS, 5, 128, torch.bfloat16, interleaved=True, inplace=False)
    yield _case(Use.SMALL, bert.FEW_ROWS, base, _HEAD, torch.bfloat16, interleaved=False, inplace=True)


def _case(
    uses: Use, num_tokens: int, num_heads: int, head_dim: int, dtype: torch.dtype, *, interleaved: bool, inplace: bool
) -> KernelCase:
    variant = f"{'interleaved' if interleaved else 'halves'}{'-inplace' if inplace else ''}"
    make_it = partial(make, num_tokens, num_heads, head_dim, dtype, interleaved, inplace)
    return KernelCase("rotary", f"{num_tokens}x3x{num_heads}x{head_dim}", dtype, variant, make_it, uses)


def make(
    num_tokens: int, num_heads: int, head_dim: int, dtype: torch.dtype, interleaved: bool, inplace: bool,
    device: torch.device,
) -> Problem:  # fmt: skip
    """Query, key and value of texts of 512 tokens; in place, they are turned on and on."""
    qkv = bert.normal(num_tokens, 3, num_heads, head_dim, dtype=dtype, device=device).requires_grad_()
    upstream = bert.normal(num_tokens, 3, num_heads, head_dim, dtype=dtype, device=device)
    steps = torch.arange(head_dim // 2, device=device) / (head_dim // 2)
    cos, sin = ops.rotary_tables(10000.0**-steps, torch.arange(num_tokens, device=device) % 512)
    wide = [_of_all_columns(t, interleaved)[:, None] for t in (cos, sin)]
    ours = partial(ops.rotary, cos=cos, sin=sin, interleaved=interleaved, inplace=inplace)

    def fast(qkv: Tensor) -> Tensor:
        """A leaf that requires a gradient must not be written to."""
        return ours(qkv.clone() if inplace else qkv)

    def eager(qkv: Tensor) -> Tensor:
        """As transformers has it, with tables in the dtype of qkv."""
        q, k, v = qkv.unbind(1)
        cos, sin = (t.to(qkv.dtype) for t in wide)
        return torch.stack([*(t * cos + _crossed(t, interleaved) * sin for t in (q, k)), v], 1)

    verify = partial(assert_gradients_close, "rotary", ("y", "dqkv"), fast, eager, (qkv,), upstream)
    if not inplace:
        moved = 2 * qkv.nbytes + 2 * cos.nbytes
        return Problem((qkv,), upstream, fast, eager, bytes_moved={"fwd": moved, "bwd": moved}, verify=verify)
    given = qkv.detach().clone()
    moved = 4 * given.nbytes // 3 + 2 * cos.nbytes
    return Problem((given,), None, ours, eager, bytes_moved={"step": moved}, verify=verify)


def _of_all_columns(table: Tensor, interleaved: bool) -> Tensor:
    return table.repeat_interleave(2, -1) if interleaved else torch.cat((table, table), -1)


def _crossed(x: Tensor, interleaved: bool) -> Tensor:
    """Each number's partner, negative where it stands second."""
    if interleaved:
        return torch.stack((-x[..., 1::2], x[..., 0::2]), -1).flatten(-2)
    x1, x2 = x.chunk(2, -1)
    return torch.cat((-x2, x1), -1)


def aot_cases() -> Iterator[AotCase]:
    """Heads of BERT's models in all dtypes, both pairings, over qkv and beside it; a head of another size."""
    for num_heads, head_dim, dtype, interleaved in (
        *((bert.BASE.hidden // _HEAD, _HEAD, dtype, pairs) for dtype in bert.DTYPES for pairs in (False, True)),
        (bert.LARGE.hidden // _HEAD, _HEAD, torch.bfloat16, False),
        (bert.MINILM.heads, bert.MINILM.hidden // bert.MINILM.heads, torch.bfloat16, False),
        (5, 128, torch.bfloat16, False),
    ):
        yield _aot_case(num_heads, head_dim, dtype, interleaved)


def _aot_case(num_heads: int, head_dim: int, dtype: torch.dtype, interleaved: bool) -> AotCase:
    from bert_fast.triton import rotary as family

    def launch() -> None:
        qkv, angles = torch.zeros(64, 3, num_heads, head_dim, dtype=dtype), torch.zeros(64, head_dim // 2)
        a = Rotary(qkv, angles, angles, interleaved)
        family.rotary_in_place(a, False)
        family.rotary_fwd(a)

    config = family.launch_config(num_heads, head_dim // 2, dtype)
    facts = KernelFacts(2 * config.tokens * num_heads * config.freqs, 2 * dtype.itemsize)
    pairs = "interleaved" if interleaved else "halves"
    return AotCase(f"A={num_heads} D={head_dim} {pairs} {dtype_name(dtype)}", launch, {"_rotary_kernel": facts})
