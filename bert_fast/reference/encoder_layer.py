"""One layer of BERT, post-LayerNorm: attention, the MLP, and what closes either, as one function of its parameters.

    qkv = [x Wq^T + bq | x Wk^T + bk | x Wv^T + bv]
    z   = LayerNorm(x + dropout(attention(qkv) Wo^T + bo))
    y   = LayerNorm(z + dropout(act(z Wu^T + bu) Wd^T + bd))

Where only some rows are wanted (a head reads few tokens of the last layer), the queries are these rows: x is x[rows] in
the first line's queries and in the second line, and y has as many rows.

It is a composition of the ops `qkv_projection`, `linear`, `attention`, `dropout_add_layer_norm` and `mlp`, each as its
own file says, and has their bits; `LayerOps` is the composition, for any back-end's ops. Backward is theirs in the
other order; the two gradients that meet at x and at z are added up. Saved for backward: what these ops save. Of a
LayerNorm that `saves` "again" it is the output; where that does not suffice, backward computes the LayerNorm's input
again, from x and attention's output, or from z and the pre-activation.
Source: Devlin et al. 2019 (arXiv:1810.04805); Vaswani et al. 2017 (arXiv:1706.03762), section 3.
"""

import math
from collections.abc import Callable, Set
from typing import Annotated, Any, NamedTuple

import torch
from torch import Tensor

from bert_fast.reference.activations import activation_fwd
from bert_fast.reference.attention import Attention, attention_bwd, attention_fwd
from bert_fast.reference.dropout_add_layer_norm import (
    AGAIN,
    DropoutAddLayerNorm,
    dropout_add_layer_norm_bwd,
    dropout_add_layer_norm_fwd,
)
from bert_fast.reference.linear import Linear, linear_bwd, linear_fwd
from bert_fast.reference.mlp import Mlp, mlp_bwd, mlp_fwd
from bert_fast.reference.precision import wide
from bert_fast.reference.qkv_projection import QkvProjection, qkv_projection_bwd, qkv_projection_fwd


class EncoderLayer(NamedTuple):
    """The arguments; parameters have the dtype of x or, beside half precision, fp32. N is A * D. Any strides."""

    x: Annotated[Tensor, "x T H+"]
    query_weight: Annotated[Tensor, "p N H"]
    query_bias: Annotated[Tensor | None, "p N"]  # all three of these biases or none
    key_weight: Annotated[Tensor, "p N H"]
    key_bias: Annotated[Tensor | None, "p N"]
    value_weight: Annotated[Tensor, "p N H"]
    value_bias: Annotated[Tensor | None, "p N"]
    attention_output_weight: Annotated[Tensor, "p H N"]
    attention_output_bias: Annotated[Tensor | None, "p H"]
    attention_norm_weight: Annotated[Tensor, "p H"]
    attention_norm_bias: Annotated[Tensor, "p H"]
    up_weight: Annotated[Tensor, "p I H"]
    up_bias: Annotated[Tensor | None, "p I"]
    down_weight: Annotated[Tensor, "p H I"]
    down_bias: Annotated[Tensor | None, "p H"]
    norm_weight: Annotated[Tensor, "p H"]
    norm_bias: Annotated[Tensor, "p H"]
    rows: Annotated[Tensor | None, "int64 M"]  # the tokens that are wanted, rising; None: all
    # Of queries (the rows) and keys (all tokens), as in `Attention`; where rows is None they are the same.
    cu_seqlens_q: Annotated[Tensor, "int32 O+"]
    cu_seqlens_k: Annotated[Tensor, "int32 O"]
    max_seqlen_q: int
    max_seqlen_k: int
    coords_q: Annotated[Tensor, "int32 M 2"]  # (row, position) of every token in the original batch
    coords_k: Annotated[Tensor, "int32 T 2"]
    sequence_order: Annotated[Tensor | None, "int32 _"]  # as in `Attention`
    num_heads: int
    causal: bool
    hidden_act: str  # a name of `activations.ACTIVATIONS`
    # Probabilities of dropping, and sites, of attention's probabilities and of the two branches.
    probabilities_dropout_p: float
    attention_dropout_p: float
    dropout_p: float
    seed: Annotated[Tensor | None, "int64 1"]
    probabilities_site: int
    attention_site: int
    site: int
    attention_eps: float  # of the two LayerNorms
    eps: float
    attention_saves: str  # what their backward reads, see `dropout_add_layer_norm`; "again" included
    saves: str
    keeps: bool  # whether what backward reads is returned

    @property
    def projection(self) -> QkvProjection:
        """Query, key and value."""
        return QkvProjection(*self[:7])

    def attention(self, q: Tensor, k: Tensor, v: Tensor) -> Attention:
        """Attention of heads [M, A, D] to [T, A, D]."""
        seed = self.seed if self.probabilities_dropout_p else None
        is_named = seed is not None or self.causal
        return Attention(
            q, k, v, self.cu_seqlens_q, self.cu_seqlens_k, self.max_seqlen_q, self.max_seqlen_k,
            1.0 / math.sqrt(q.shape[2]), self.probabilities_dropout_p, seed, self.coords_q if is_named else None,
            self.coords_k if self.causal else None, self.probabilities_site, self.causal, None, None, None,
            self.sequence_order, self.keeps,
        )  # fmt: skip

    def attention_output(self, product: Any, residual: Any) -> DropoutAddLayerNorm:
        """What closes attention; in backward the two are not read."""
        return DropoutAddLayerNorm(
            product, residual, self.attention_output_bias, self.attention_norm_weight, self.attention_norm_bias,
            self.attention_eps, self.attention_dropout_p, self.seed, self.coords_q, self.attention_site,
            self.attention_saves,
        )  # fmt: skip

    def mlp(self, z: Tensor) -> Mlp:
        """The MLP without its last bias, which is added with the residual."""
        return Mlp(z, self.up_weight, self.up_bias, self.down_weight, None, self.hidden_act, self.keeps)

    def output(self, product: Any, residual: Any) -> DropoutAddLayerNorm:
        """What closes the MLP; in backward the two are not read."""
        return DropoutAddLayerNorm(
            product, residual, self.down_bias, self.norm_weight, self.norm_bias, self.eps, self.dropout_p, self.seed,
            self.coords_q, self.site, self.saves,
        )  # fmt: skip


class Saved(NamedTuple):
    """What backward reads of forward: all None where `keeps` is False. S: fp32, fp64 for fp64 inputs."""

    qkv: Tensor | None  # [T, 3N], dtype of x; None where rows are given, then the next two are there
    q: Tensor | None  # [M, N]
    kv: Tensor | None  # [T, 2N]
    out: Tensor | None  # [M, N]: of attention
    lse: Tensor | None  # [A, M], S
    mask: Tensor | None  # of attention's dropout, as `attention.stored_mask_shape` says; None where it is drawn again
    z: Tensor | None  # [M, H]: the MLP's input
    attention_h: Tensor | None  # [M, H]: LayerNorm's input, None where its output serves or it is computed again
    attention_mean: Tensor | None  # [M], S, None where attention_h is computed again
    attention_rstd: Tensor | None
    pre: Tensor | None  # [M, I]: the MLP's pre-activation
    h: Tensor | None
    mean: Tensor | None
    rstd: Tensor | None


# The tensors of `EncoderLayer` that all layers of a forward pass share.
TENSORS = ("rows", "cu_seqlens_q", "cu_seqlens_k", "coords_q", "coords_k", "sequence_order", "seed")


class OfLayer(NamedTuple):
    """What a layer's calls have in common. parameters: the fields from `query_weight` to `norm_bias`."""

    parameters: tuple[Tensor | None, ...]
    num_heads: int
    hidden_act: str
    probabilities: tuple[float, float, float]
    sites: tuple[int, int, int]
    eps: tuple[float, float]


class OfCall(NamedTuple):
    """What the layers of a forward pass have in common.

    tensors: the fields `TENSORS`. numbers: of tokens, of rows (without rows the same), of offsets, of sequences in
    order (0 without), max_seqlen_q, max_seqlen_k. kind: a number for what decides about kernels of it: which tensors
    there are, how they lie.
    """

    tensors: tuple[Tensor | None, ...]
    numbers: tuple[int, ...]
    causal: bool
    kind: int


class Options(NamedTuple):
    """What decides about kernels beside tensors."""

    num_heads: int
    causal: bool
    hidden_act: str
    probabilities: tuple[float, float, float]
    eps: tuple[float, float]
    saves: tuple[str, str]
    keeps: bool
    has_rows: bool

    @classmethod
    def of(cls, layer: OfLayer, call: OfCall, saves: tuple[str, str], keeps: bool) -> "Options":
        """Of a call of a layer."""
        return cls(
            layer.num_heads, call.causal, layer.hidden_act, layer.probabilities, layer.eps, saves, keeps,
            call.tensors[0] is not None,
        )  # fmt: skip

    @property
    def drops(self) -> bool:
        """Whether anything is dropped."""
        return any(self.probabilities)

    def fields(self) -> dict[str, Any]:
        """Those of `EncoderLayer`."""
        names = "probabilities_dropout_p", "attention_dropout_p", "dropout_p"
        return {
            "num_heads": self.num_heads, "causal": self.causal, "hidden_act": self.hidden_act,
            **dict(zip(names, self.probabilities, strict=True)), "attention_eps": self.eps[0], "eps": self.eps[1],
            "attention_saves": self.saves[0], "saves": self.saves[1], "keeps": self.keeps,
        }  # fmt: skip


PROJECTED = ("query", "key", "value")
Projected = tuple[Tensor, Tensor, Tensor]  # queries, keys, values [T, N]
Projections = Projected | tuple[None, None, None]
NOT_PROJECTED: tuple[None, None, None] = (None, None, None)


class LayerOps(NamedTuple):
    """The ops of one back-end that a layer consists of."""

    qkv_projection_fwd: Callable[..., Any]
    qkv_projection_bwd: Callable[..., Any]
    linear_fwd: Callable[..., Any]
    linear_bwd: Callable[..., Any]
    attention_fwd: Callable[..., Any]
    attention_bwd: Callable[..., Any]
    dropout_add_layer_norm_fwd: Callable[..., Any]
    dropout_add_layer_norm_bwd: Callable[..., Any]
    mlp_fwd: Callable[..., Any]
    mlp_bwd: Callable[..., Any]
    joined: Callable[..., Tensor]  # tensors one below the other, to be read
    # (a, saved, whether attention's is wanted) -> (attention_h, h): as `_norm_inputs`, which serves where this is None
    norm_inputs: Callable[..., tuple[Tensor | None, Tensor | None]] | None = None

    def forward(self, a: EncoderLayer, projected: Projected | None = None) -> tuple[Tensor | None, ...]:
        """y (Tensor [M, H], dtype of x), then the fields of `Saved`.

        projected: queries [M, N], keys and values [T, N] where others made them; rows are None then, and so are the
        projections' weights; x is [M, H].
        """
        qkv = q = kv = None
        residual = a.x
        if projected is not None:
            pass
        elif a.rows is None:
            qkv = self.qkv_projection_fwd(a.projection)
        else:
            residual = a.x.index_select(0, a.rows)
            q = self.linear_fwd(Linear(residual, a.query_weight, a.query_bias))
            kv = self.linear_fwd(self._key_and_value(a))
        heads = _heads(a, qkv, q, kv) if projected is None else _each_in_heads(a, projected)
        out, lse, mask = self.attention_fwd(a.attention(*heads))
        del heads
        saved: tuple[Tensor | None, ...] = (qkv, q, kv) if a.keeps else ()
        del qkv, q, kv  # what is not kept makes room for what follows
        out = out.flatten(1)
        product = self.linear_fwd(Linear(out, a.attention_output_weight, None))
        saved = (*saved, out, lse, mask) if a.keeps else ()
        del out, lse, mask
        z, *of_attention = self.dropout_add_layer_norm_fwd(a.attention_output(product, residual))
        del product
        product, pre = self.mlp_fwd(a.mlp(z))
        y, *of_mlp = self.dropout_add_layer_norm_fwd(a.output(product, z))
        if not a.keeps:
            return y, *(None,) * len(Saved._fields)
        return y, *saved, z, *of_attention, pre, *of_mlp

    def backward(
        self,
        a: EncoderLayer,
        dy: Tensor,
        y: Tensor,
        *saved: Tensor,
        wants: Set[str],
        projected: Projected | None = None,
    ) -> dict[str, Tensor]:
        """Gradients by name: x, qkv_weight and qkv_bias (of the three, one below the other), and the parameters'.

        projected: as in forward; then those of query, key and value, and x's as far as it is added to attention's
        output. "x" stands for all four among those that are wanted.
        """
        s: Any = Saved(*saved)
        before_mlp = wants & BEFORE_MLP
        attention_h, h = s.attention_h, s.h
        if AGAIN in (a.attention_saves, a.saves):
            attention_h, h = (self.norm_inputs or self._norm_inputs)(a, s, bool(before_mlp))
        made = self.dropout_add_layer_norm_bwd(a.output(None, None), dy, y, h, s.mean, s.rstd)
        del h
        gradients = {"down_bias": made["x_bias"], "norm_weight": made["weight"], "norm_bias": made["bias"]}
        if before_mlp or not wants.isdisjoint(OF_MLP):
            of_mlp = (wants & OF_MLP) | ({"x"} if before_mlp else set())
            of_product = self.mlp_bwd(a.mlp(s.z), made["x"], s.pre, of_mlp, made["residual"] if before_mlp else None)
            dz = of_product.pop("x", None)
            gradients |= of_product
        if before_mlp:
            made = self.dropout_add_layer_norm_bwd(
                a.attention_output(None, None), dz, s.z, attention_h, s.attention_mean, s.attention_rstd
            )
            del attention_h
            gradients |= {"attention_output_bias": made["x_bias"], "attention_norm_weight": made["weight"]}
            gradients["attention_norm_bias"] = made["bias"]
        before_output = wants & BEFORE_OUTPUT
        if before_output or "attention_output_weight" in wants:
            linear = Linear(s.out, a.attention_output_weight, None)
            of_linear = {"weight"} if "attention_output_weight" in wants else set()
            of_product = self.linear_bwd(linear, made["x"], of_linear | ({"x"} if before_output else set()))
            if "weight" in of_product:
                gradients["attention_output_weight"] = of_product["weight"]
        if before_output:
            heads = _heads(a, s.qkv, s.q, s.kv) if projected is None else _each_in_heads(a, projected)
            dout, out = of_product["x"].view(heads[0].shape), s.out.view(heads[0].shape)
            if projected is not None:
                made_of_heads = self.attention_bwd(a.attention(*heads), dout, out, s.lse, s.mask, frozenset())
                gradients |= {name: made_of_heads[name[0]].flatten(1) for name in PROJECTED}
                return gradients | {"x": made["residual"]}
            of_projection = {name.removeprefix("qkv_") for name in before_output}
            back = self._projection_bwd if a.rows is None else self._projections_of_rows_bwd
            for name, gradient in back(a, s, heads, dout, out, made["residual"], of_projection).items():
                gradients["x" if name == "x" else f"qkv_{name}"] = gradient
        return gradients

    def _norm_inputs(self, a: EncoderLayer, s: Saved, wants_attention: bool) -> tuple[Tensor | None, Tensor | None]:
        """The inputs of the two LayerNorms, as saved or computed again."""
        attention_h, h = s.attention_h, s.h
        if wants_attention and a.attention_saves == AGAIN:
            product = self.linear_fwd(Linear(s.out, a.attention_output_weight, None))  # type: ignore[arg-type]
            residual = a.x if a.rows is None else a.x.index_select(0, a.rows)
            attention_h = self._sum(a.attention_output(product, residual))
        if a.saves == AGAIN:
            act = activation_fwd(wide(s.pre), a.hidden_act).to(s.pre.dtype)  # type: ignore[arg-type, union-attr]
            h = self._sum(a.output(self.linear_fwd(Linear(act, a.down_weight, None)), s.z))
        return attention_h, h

    def _sum(self, a: DropoutAddLayerNorm) -> Tensor:
        """What goes into LayerNorm; eps, which it does not depend on, is not there in backward."""
        h: Tensor = self.dropout_add_layer_norm_fwd(a._replace(saves="input", eps=0.0))[1]
        return h

    def _projection_bwd(
        self, a: EncoderLayer, s: Saved, heads: Any, dout: Tensor, out: Tensor, dresidual: Tensor, wants: Set[str]
    ) -> dict[str, Tensor]:
        num_tokens, num_heads, head_dim = heads[0].shape
        dqkv = dout.new_empty((num_tokens, 3, num_heads, head_dim))
        self.attention_bwd(a.attention(*heads), dout, out, s.lse, s.mask, frozenset(), dqkv)
        return self.qkv_projection_bwd(a.projection, dqkv.flatten(1), wants, dresidual)

    def _projections_of_rows_bwd(
        self, a: EncoderLayer, s: Saved, heads: Any, dout: Tensor, out: Tensor, dresidual: Tensor, wants: Set[str]
    ) -> dict[str, Tensor]:
        made = self.attention_bwd(a.attention(*heads), dout, out, s.lse, s.mask, frozenset())
        dkv = torch.stack((made["k"], made["v"]), 1).flatten(1)
        rows: Any = a.rows
        x: Any = a.x.index_select(0, rows) if "weight" in wants else None
        of_query = self.linear_bwd(Linear(x, a.query_weight, None), made["q"].flatten(1), wants)
        of_others = self.linear_bwd(self._key_and_value(a), dkv, wants)
        gradients = {name: torch.cat((of_query[name], of_others[name])) for name in wants - {"x"}}
        if "x" in wants:
            gradients["x"] = of_others["x"].index_add_(0, rows, dresidual).index_add_(0, rows, of_query["x"])
        return gradients

    def _key_and_value(self, a: EncoderLayer) -> Linear:
        """Key and value as one linear layer."""
        bias = None if a.key_bias is None or a.value_bias is None else self.joined(a.key_bias, a.value_bias)
        return Linear(a.x, self.joined(a.key_weight, a.value_weight), bias)


# Gradients that backward gets to in this order.
OF_MLP = frozenset({"up_weight", "up_bias", "down_weight"})
BEFORE_OUTPUT = frozenset({"x", "qkv_weight", "qkv_bias"})
BEFORE_MLP = BEFORE_OUTPUT | {
    "attention_output_weight", "attention_output_bias", "attention_norm_weight", "attention_norm_bias",
}  # fmt: skip


def in_places(made: dict[str, Tensor], needs: tuple[bool, ...]) -> tuple[Tensor | None, ...]:
    """Gradients by name as those of x, what was projected, and the parameters; None where none is needed."""
    found = {name: one for name, one in made.items() if not name.startswith("qkv_")}
    for kind in ("weight", "bias"):
        whole = made.get(f"qkv_{kind}")
        if whole is not None:
            found |= dict(zip([f"{name}_{kind}" for name in PROJECTED], whole.chunk(3), strict=True))
    names = ("x", *PROJECTED, *EncoderLayer._fields[1:17])
    return tuple([found[name] if need else None for name, need in zip(names, needs, strict=True)])


def _heads(a: EncoderLayer, qkv: Tensor | None, q: Tensor | None, kv: Tensor | None) -> tuple[Tensor, ...]:
    """q [M, A, D], k and v [T, A, D], views."""
    heads = a.num_heads, a.query_weight.shape[0] // a.num_heads
    if qkv is not None:
        return qkv.view(qkv.shape[0], 3, *heads).unbind(1)
    assert q is not None and kv is not None
    return q.view(q.shape[0], *heads), *kv.view(kv.shape[0], 2, *heads).unbind(1)


def _each_in_heads(a: EncoderLayer, projected: Projected) -> tuple[Tensor, ...]:
    """The same of queries, keys and values [T, N] each."""
    width = projected[0].shape[1]
    return tuple([one.view(one.shape[0], a.num_heads, width // a.num_heads) for one in projected])


_OPS = LayerOps(
    qkv_projection_fwd, qkv_projection_bwd, linear_fwd, linear_bwd, attention_fwd, attention_bwd,
    dropout_add_layer_norm_fwd, dropout_add_layer_norm_bwd, mlp_fwd, mlp_bwd, lambda *tensors: torch.cat(tensors),
)  # fmt: skip


def encoder_layer_fwd(a: EncoderLayer) -> tuple[Tensor | None, ...]:
    """y (Tensor [M, H], dtype of x), then the fields of `Saved`."""
    return _OPS.forward(a)


def encoder_layer_bwd(a: EncoderLayer, dy: Tensor, *saved: Any) -> dict[str, Tensor]:
    """Gradients by name, from y and the fields of `Saved`, and the set of those that are wanted.

    x (Tensor [T, H]); qkv_weight (Tensor [3N, H]) and qkv_bias (Tensor [3N]): of the three projections, one below the
    other; the other parameters' of their shapes and dtypes, biases' of the dtype of their weight.
    """
    *kept, wants = saved
    return _OPS.backward(a, dy, *kept, wants=wants)
