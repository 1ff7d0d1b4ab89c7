"""Disentangled attention (DeBERTa; He et al. 2020, arXiv:2006.03654): relative positions with keys and queries.

With e_d the embedding of distance d = i - j, and K and Q linear layers of the attention,

    score[i, j] = (q_i . k_j + q_i . K(e_d) + k_j . Q(e_d)) / sqrt(D * number of terms)

The published terms are called content-to-content, "c2p" and "p2c". All layers of a model share the embeddings.
Distances beyond a bound, and in version 2 neighbouring large distances, share one embedding too. So a layer projects
each embedding once, and then copies the result to all distances that use it.
"""

import functools
import math
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from bert_fast.modules.attention import PackedSelfAttention
from bert_fast.modules.call import Call
from bert_fast.modules.fusable import is_plain, plain_linear
from bert_fast.modules.residual_norm import is_plain_norm
from bert_fast.ops.dropout import DropoutSite, dropout, dropout_site
from bert_fast.ops.layer_norm import layer_norm


class RelativeEmbeddings(NamedTuple):
    """Embeddings of the distances between the tokens of a call.

    weight (Tensor [N, H]): the model's embeddings, before `norm` (None: there is none).
    rows (Tensor [2M - 1], int64): the row of weight for distances -(M - 1) .. M - 1, rising.
    first, end (int): rows outside [first, end) are not used.
    """

    weight: Tensor
    norm: nn.LayerNorm | None
    rows: Tensor
    first: int
    end: int

    def whole(self) -> "RelativeEmbeddings":
        """The same with all rows in use, for a linear layer whose hooks see its input."""
        return self._replace(first=0, end=len(self.weight))

    def embeddings(self, dropout_p: float, site: int, call: Call) -> Tensor:
        """The rows in use after LayerNorm and dropout, [end - first, H]."""
        x, norm = self.weight[self.first : self.end], self.norm
        if norm is not None:
            x = layer_norm(x, norm.weight, norm.bias, eps=norm.eps) if is_plain_norm(norm) else norm(x)
        if dropout_p == 0.0:
            return x
        numbers = torch.arange(self.first, self.end, dtype=torch.int32, device=x.device)
        coords = torch.stack((torch.zeros_like(numbers), numbers), dim=1)
        return dropout(x, dropout_p, seed=call.seed, coords=coords, site=site)

    def by_distance(self, projected: Tensor, num_heads: int) -> Tensor:
        """Projected rows in use [end - first, A * D] to one vector for every distance, [2M - 1, A, D]."""
        # The gradient of `embedding` is deterministic on GPUs, unlike that of `index_select`.
        return F.embedding(self.rows - self.first, projected).unflatten(1, (num_heads, -1))


@functools.cache
def _scale(head_dim: int, num_terms: int) -> float:
    """1 / sqrt(head_dim * num_terms), of the root rounded to fp32 as transformers has it."""
    return 1.0 / torch.tensor(math.sqrt(head_dim * num_terms), dtype=torch.float32).item()


class PackedDisentangledAttention(PackedSelfAttention):
    """Self-attention whose scores hold products with keys and queries of relative positions.

    position_terms: those of "c2p" and "p2c" that are in the scores. position_key, position_query: the linear layers K
    and Q, each needed by its term; the attention's own `key` and `query` where shares_projections is True.
    position_dropout: drops elements of the embeddings before they are projected.
    """

    position_embedding_type = "disentangled"
    position_terms: Any
    position_key: Any
    position_query: Any
    position_dropout: nn.Dropout | None
    shares_projections: bool

    @property
    def position_dropout_p(self) -> float:
        """The probability with which elements of the embeddings drop; 0 in evaluation."""
        found = self.position_dropout
        return found.p if found is not None and found.training else 0.0

    def _scoring(self, call: Call) -> dict[str, Any]:
        found: dict[str, Any] = {"softmax_scale": _scale(self.head_dim, 1 + len(self.position_terms))}
        relative, shares, layers = call.relative, self.shares_projections, {}
        if "c2p" in self.position_terms:
            layers["relative_keys"] = self.key if shares else self.position_key
        if "p2c" in self.position_terms:
            layers["relative_queries"] = self.query if shares else self.position_query
        if relative is None or not layers:
            return found
        if not all(map(is_plain, layers.values())):
            relative = relative.whole()
        p = 0.0 if call.seed is None else self.position_dropout_p
        # Embeddings of tokens drop at this kind of site too, as those of layer 0.
        x = relative.embeddings(p, dropout_site(DropoutSite.EMBEDDING, self.layer_index + 1), call)
        for name, layer in layers.items():
            projected = plain_linear(x, layer) if is_plain(layer) else layer(x[None])[0]
            found[name] = relative.by_distance(projected, self.num_heads)
        return found
