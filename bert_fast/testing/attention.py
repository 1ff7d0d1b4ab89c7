"""Cases of attention with any of its features, run on a back-end or written once more in plain PyTorch."""

import itertools
import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from bert_fast import ops
from bert_fast.reference.dropout import attention_keep_mask, dropout_scale

SEED = torch.tensor([-(2**61) + 12345])
SITE = 9
TABLES = {"C": "relative_keys", "P": "relative_queries"}  # letters as in reference/relative_positions.py


@dataclass(frozen=True)
class AttentionCase:
    """One call; equal cases have equal inputs.

    lengths (of queries), lengths_k (None: those of queries): one a sequence. holes: positions skip some columns, as
    where padding stood inside. cached: queries stand at the last positions of their keys, as in decoding. order:
    sequence i stands in row `order[i]` of the original batch, None: in row i. softmax_scale: None for 1 / sqrt(D).
    bias: None, or the letters of the dimensions that are not 1, out of "BAQK". removes: bias holds -inf for
    some pairs, and for all keys of some queries. relative: the letters of the tables of relative positions that
    there are, out of "CP".
    """

    lengths: tuple[int, ...]
    lengths_k: tuple[int, ...] | None = None
    num_heads: int = 2
    head_dim: int = 8
    dropout_p: float = 0.0
    causal: bool = False
    bias: str | None = None
    removes: bool = False
    relative: str = ""
    holes: bool = False
    cached: bool = False
    softmax_scale: float | None = None
    order: tuple[int, ...] | None = None

    @property
    def has_other_keys(self) -> bool:
        """Whether keys are not the queries' tokens."""
        return self.lengths_k is not None

    @property
    def scale(self) -> float:
        """What scores are multiplied by."""
        return 1 / math.sqrt(self.head_dim) if self.softmax_scale is None else self.softmax_scale

    def cu_seqlens(self) -> tuple[Tensor, Tensor]:
        """Of queries and keys, int32 [B + 1]."""
        q, k = (torch.tensor([0, *itertools.accumulate(n)], dtype=torch.int32) for n in self._lengths())
        return q, k

    def coords(self) -> tuple[Tensor, Tensor]:
        """Of queries and keys, int32 [T, 2]."""
        generator = torch.Generator().manual_seed(1)
        rows = self.order or tuple(range(len(self.lengths)))
        named = []
        for lengths in self._lengths():
            pairs = [torch.zeros(0, 2, dtype=torch.long)]
            for row, length in zip(rows, lengths, strict=True):
                columns = length + length // 2 + 1 if self.holes else length
                positions = torch.randperm(columns, generator=generator)[:length].sort().values
                pairs.append(torch.stack((torch.full_like(positions, row), positions), 1))
            named.append(torch.cat(pairs).int())
            if not self.has_other_keys:
                named.append(named[0])
                break
        if self.cached:
            lengths_q, lengths_k = (torch.tensor(lengths, dtype=torch.int32) for lengths in self._lengths())
            named[0][:, 1] += (lengths_k - lengths_q).clamp(min=0).repeat_interleave(lengths_q)
        return named[0], named[1]

    def inputs(self, dtype: torch.dtype) -> dict[str, Tensor]:
        """q, k, v, dout and the extras that the case has, by the names of `ops.attention`'s arguments."""
        generator = torch.Generator().manual_seed(0)
        (cu_q, cu_k), (coords_q, coords_k) = self.cu_seqlens(), self.coords()

        def normal(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)

        num_q, num_k = int(cu_q[-1]), int(cu_k[-1])
        tensors = {name: normal(n, self.num_heads, self.head_dim) for name, n in (("q", num_q), ("k", num_k))}
        tensors |= {"v": normal(*tensors["k"].shape), "dout": normal(*tensors["q"].shape)}
        sizes = [1, 1, 1]
        if num_q:
            sizes[:2] = (coords_q.amax(0) + 1).tolist()
        if num_k:
            sizes[2] = int(coords_k[:, 1].max()) + 1
        full = dict(zip("BAQK", (sizes[0], self.num_heads, *sizes[1:]), strict=True))
        if self.bias is not None:
            tensors["bias"] = normal(*(full[letter] if letter in self.bias else 1 for letter in "BAQK"))
        if self.removes:
            shape = tensors["bias"].shape
            gone = torch.rand(shape, generator=generator) < 0.3
            gone |= torch.rand((*shape[:3], 1), generator=generator) < 0.2  # for these queries, all keys
            tensors["bias"] = tensors["bias"].masked_fill(gone, -torch.inf)
        for letter in self.relative:
            tensors[TABLES[letter]] = normal(2 * max(full["Q"], full["K"]) + 1, self.num_heads, self.head_dim)
        return tensors

    def run(self, backend: str | None, dtype: torch.dtype, device: str = "cpu") -> dict[str, Tensor]:
        """out and the gradient of every tensor, by `ops.attention`."""
        return self._run(backend, {name: t.to(device) for name, t in self.inputs(dtype).items()})

    def truth(self, dtype: torch.dtype) -> dict[str, Tensor]:
        """The same by the reference in fp64, from inputs rounded to this dtype."""
        return self._run("reference", {name: t.double() for name, t in self.inputs(dtype).items()})

    def _run(self, backend: str | None, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
        leaves = _leaves(inputs)
        out = self.attend(backend, leaves)
        return {"out": out.detach(), **_gradients(out, leaves, inputs["dout"])}

    def attend(self, backend: str | None, tensors: dict[str, Tensor]) -> Tensor:
        """`ops.attention` of the tensors of `inputs` but dout, on whatever device they are."""
        device = tensors["q"].device
        (cu_q, cu_k), (coords_q, coords_k) = self.cu_seqlens(), self.coords()
        given: dict[str, Any] = dict(tensors)
        if self.has_other_keys:
            given |= {"cu_seqlens_k": cu_k.to(device), "max_seqlen_k": max(self._lengths()[1], default=0)}
        return ops.attention(
            **given, cu_seqlens_q=cu_q.to(device), max_seqlen_q=max(self.lengths, default=0),
            causal=self.causal, dropout_p=self.dropout_p, seed=SEED.to(device), coords_q=coords_q.to(device),
            coords_k=coords_k.to(device), site=SITE, softmax_scale=self.softmax_scale,
            backend=backend,
        )  # fmt: skip

    def plain(self, dtype: torch.dtype) -> dict[str, Tensor]:
        """The same with PyTorch's own operators in this dtype, sequence by sequence."""
        return self.plain_of(self.inputs(dtype))

    def plain_of(self, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
        """`plain` of other tensors of the same shapes, which will require gradients."""
        leaves, dout = _leaves(inputs), inputs["dout"]
        outs = [leaves["q"][:0]]
        spans = zip(*(itertools.pairwise(cu.tolist()) for cu in self.cu_seqlens()), strict=True)
        coords_q, coords_k = self.coords()
        for span_q, span_k in spans:
            of_q, of_k = slice(*span_q), slice(*span_k)
            names, places = coords_q[of_q], coords_k[of_k, 1].long()
            probabilities = self._plain_scores(leaves, of_q, of_k, names.long(), places).softmax(-1)
            probabilities = torch.where(probabilities.isnan(), 0.0, probabilities)  # rows of -inf
            if self.dropout_p:
                keep = attention_keep_mask(SEED, SITE, names, len(places), self.num_heads, self.dropout_p)
                probabilities = probabilities * keep * dropout_scale(self.dropout_p)
            outs.append((probabilities @ leaves["v"][of_k].transpose(0, 1)).transpose(0, 1))
        out = torch.cat(outs)
        return {"out": out.detach(), **_gradients(out, leaves, dout)}

    def _plain_scores(
        self, leaves: dict[str, Tensor], of_q: slice, of_k: slice, names: Tensor, places: Tensor
    ) -> Tensor:
        q, k = leaves["q"][of_q].transpose(0, 1), leaves["k"][of_k].transpose(0, 1)
        scores = q @ k.transpose(1, 2)
        for letter in self.relative:
            table = leaves[TABLES[letter]]
            of_pairs = table[names[:, 1:] - places + (len(table) - 1) // 2]  # [Sq, Sk, A, D]
            if letter == "C":
                scores = scores + torch.einsum("aqd,qkad->aqk", q, of_pairs)
            else:
                scores = scores + torch.einsum("akd,qkad->aqk", k, of_pairs)
        scores = scores * self.scale
        if "bias" in leaves and len(names):
            scores = scores + _block(leaves["bias"], names, places)
        if self.causal:
            scores = scores.masked_fill(places > names[:, 1:], -torch.inf)
        # softmax's own gradient of a row of -inf is NaN.
        is_empty = (scores == -torch.inf).all(-1, keepdim=True)
        return torch.where(is_empty, -torch.inf, scores.masked_fill(is_empty, 0.0))

    def _lengths(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        return self.lengths, self.lengths if self.lengths_k is None else self.lengths_k


def _leaves(inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: t.requires_grad_() for name, t in inputs.items() if name != "dout"}


def _block(bias: Tensor, names: Tensor, places: Tensor) -> Tensor:
    """[A or 1, Sq or 1, Sk or 1] of one sequence."""
    rows, _, queries, keys = bias.shape
    block = bias[names[0, 0] if rows > 1 else 0]
    block = block[:, names[:, 1]] if queries > 1 else block
    return block[:, :, places] if keys > 1 else block


def _gradients(out: Tensor, leaves: dict[str, Tensor], dout: Tensor) -> dict[str, Tensor]:
    gradients = torch.autograd.grad(out, list(leaves.values()), dout, allow_unused=True, materialize_grads=True)
    return {f"d{name}": gradient for name, gradient in zip(leaves, gradients, strict=True)}
