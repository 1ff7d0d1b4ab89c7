"""Floating-point operations of every op, for `torch.utils.flop_counter.FlopCounterMode`.

Matrix products count, 2 for each multiply-add, as in PyTorch's formulas; all else counts 0. Attention counts as
PyTorch's fused attention: 2 products forward and, with the scores that are made again, 5 backward, whatever a causal
mask hides. Other products that backward makes again are counted there, too.

That module imports triton, which takes longer than all of this library, so formulas are registered when the
program imports it.
"""

import importlib.abc
import importlib.util
import sys
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from bert_fast.ops import encoder_layer as _encoder_layer  # registers the one op that the public ones do not
from bert_fast.reference.dropout_add_layer_norm import AGAIN
from bert_fast.reference.encoder_layer import BEFORE_MLP, BEFORE_OUTPUT, OF_MLP

assert _encoder_layer
_COUNTER = "torch.utils.flop_counter"
# Ops without a matrix product: PyTorch counts nothing for their like, and lists them nowhere.
WITHOUT_PRODUCTS = frozenset({
    "adamw_step", "bias_gelu_bwd", "bias_gelu_fwd", "cross_entropy_bwd", "cross_entropy_fwd", "dropout",
    "dropout_add_layer_norm_bwd", "dropout_add_layer_norm_fwd", "embedding_bwd", "embedding_fwd", "global_norm",
    "lamb_step", "layer_norm_bwd", "layer_norm_fwd", "linear_cross_entropy_bwd",
    "maxsim_bwd", "rotary_bwd", "rotary_fwd",
})  # fmt: skip


def _is_missing(t: Tensor | None) -> bool:
    """Whether a tensor was not made, which the dispatcher has as one without elements."""
    return t is None or not t.numel()


def _lengths(cu_seqlens: Tensor, max_seqlen: int) -> list[int]:
    """Of every sequence; the longest for all where values are not there, as PyTorch's formulas have it."""
    from torch._subclasses.fake_tensor import FakeTensor
    from torch._subclasses.functional_tensor import FunctionalTensor

    if isinstance(cu_seqlens, FakeTensor | FunctionalTensor) or cu_seqlens.is_meta:
        return [max_seqlen] * (len(cu_seqlens) - 1)
    lengths: list[int] = cu_seqlens.diff().tolist()
    return lengths


def _pairs(a: Any) -> int:
    """Queries times keys, of all sequences."""
    if hasattr(a, "cu_seqlens"):
        return sum(length * length for length in _lengths(a.cu_seqlens, a.max_seqlen))
    lengths = _lengths(a.cu_seqlens_q, a.max_seqlen_q), _lengths(a.cu_seqlens_k, a.max_seqlen_k)
    return sum(q * k for q, k in zip(*lengths, strict=True))


def _linear_fwd(a: Any) -> int:
    return 2 * a.x.shape[0] * a.weight.numel()


def _linear_int8(a: Any) -> int:
    return 2 * a.x.shape[0] * a.x.shape[1] * a.scale.shape[0]


def _linear_bwd(a: Any) -> int:
    return 2 * a.dy.shape[0] * a.weight.numel() * (a.wants_dx + a.wants_dweight)


def _linear_gelu_bwd(a: Any) -> int:
    return _linear_bwd(a) + 2 * a.dy.shape[0] * a.weight.numel() * _is_missing(a.pre)


def _mlp_fwd(a: Any) -> int:
    return 2 * a.x.shape[0] * (a.up_weight.numel() + a.down_weight.numel())


def _mlp_bwd(a: Any) -> int:
    wants_pre = a.wants_dx or a.wants_dup_weight or a.wants_dup_bias
    again = _is_missing(a.pre) and (wants_pre or a.wants_ddown_weight)
    up = a.up_weight.numel() * (a.wants_dx + a.wants_dup_weight + again)
    return 2 * a.dy.shape[0] * (up + a.down_weight.numel() * (wants_pre + a.wants_ddown_weight))


def _gated_mlp_fwd(a: Any) -> int:
    return 2 * a.x.shape[0] * (2 * a.up_weight.numel() + a.down_weight.numel())


def _gated_mlp_bwd(a: Any) -> int:
    wants_pre = a.wants_dx or a.wants_dweight or a.wants_dbias
    again = _is_missing(a.pre) and (wants_pre or a.wants_ddown_weight)
    first = 2 * a.up_weight.numel() * (a.wants_dx + a.wants_dweight + again)
    return 2 * a.dy.shape[0] * (first + a.down_weight.numel() * (wants_pre + a.wants_ddown_weight))


def _qkv_projection_fwd(a: Any) -> int:
    return 2 * a.x.shape[0] * (a.wq.numel() + a.wk.numel() + a.wv.numel())


def _qkv_projection_bwd(a: Any) -> int:
    return 2 * a.dqkv.shape[0] * (a.wq.numel() + a.wk.numel() + a.wv.numel()) * (a.wants_dx + a.wants_dweight)


def _attention_fwd(a: Any) -> int:
    q = a.qkv[:, 0] if hasattr(a, "qkv") else a.q
    terms = (a.relative_keys is not None) + (a.relative_queries is not None)
    return (4 + 2 * terms) * _pairs(a) * q.shape[1] * q.shape[2]


def _attention_bwd(a: Any) -> int:
    return _attention_fwd(a) // 2 * 5


def _linear_cross_entropy_fwd(a: Any) -> int:
    """Forward makes the gradients, too."""
    return 2 * a.x.shape[0] * a.weight.numel() * (1 + a.wants_dx + a.wants_dweight)


def _splade_bwd(a: Any) -> int:
    return 2 * a.x.shape[0] * a.weight.numel() * (a.wants_dx + a.wants_dweight)


def _maxsim_fwd(a: Any) -> int:
    """Backward gathers what forward chose."""
    return 2 * a.queries.shape[0] * a.documents.numel()


def _encoder_layer_fwd(a: Any) -> int:
    tokens, queries, width = a.x.shape[0], a.coords_q.shape[0], a.query_weight.numel()
    projection = tokens * (a.key_weight.numel() + a.value_weight.numel()) + queries * width
    rest = a.attention_output_weight.numel() + a.up_weight.numel() + a.down_weight.numel()
    return 2 * (projection + queries * rest) + 4 * _pairs(a) * a.query_weight.shape[0]


def _encoder_layer_bwd(a: Any) -> int:
    wants = {name.removeprefix("wants_d") for name, value in vars(a).items() if name.startswith("wants_d") and value}
    queries, output = a.dy.shape[0], a.attention_output_weight.numel()
    before_mlp, before_output = bool(wants & BEFORE_MLP), bool(wants & BEFORE_OUTPUT)
    products = queries * a.down_weight.numel() * ((a.saves == AGAIN) + ("down_weight" in wants))
    if before_mlp or not wants.isdisjoint(OF_MLP - {"down_weight"}):
        products += queries * a.down_weight.numel()
    products += queries * a.up_weight.numel() * (before_mlp + ("up_weight" in wants))
    again = a.attention_saves == AGAIN and before_mlp
    products += queries * output * (again + before_output + ("attention_output_weight" in wants))
    if not before_output:
        return 2 * products
    tokens = queries if _is_missing(a.kv) else a.kv.shape[0]
    projection = tokens * (a.key_weight.numel() + a.value_weight.numel()) + queries * a.query_weight.numel()
    products += projection * (("x" in wants) + ("qkv_weight" in wants))
    return 2 * products + 10 * _pairs(a) * a.query_weight.shape[0]


FORMULAS: dict[str, Callable[[Any], int]] = {
    "attention_bwd": _attention_bwd,
    "attention_fwd": _attention_fwd,
    "attention_qkv_bwd": _attention_bwd,
    "attention_qkv_fwd": _attention_fwd,
    "encoder_layer_bwd": _encoder_layer_bwd,
    "encoder_layer_fwd": _encoder_layer_fwd,
    "gated_mlp_bwd": _gated_mlp_bwd,
    "gated_mlp_fwd": _gated_mlp_fwd,
    "linear_bwd": _linear_bwd,
    "linear_cross_entropy_fwd": _linear_cross_entropy_fwd,
    "linear_fwd": _linear_fwd,
    "linear_gelu_bwd": _linear_gelu_bwd,
    "linear_gelu_fwd": _linear_fwd,
    "linear_int8": _linear_int8,
    "maxsim_fwd": _maxsim_fwd,
    "mlp_bwd": _mlp_bwd,
    "mlp_fwd": _mlp_fwd,
    "qkv_projection_bwd": _qkv_projection_bwd,
    "qkv_projection_fwd": _qkv_projection_fwd,
    "splade_bwd": _splade_bwd,
    "splade_fwd": _linear_fwd,
}


def _register(counter: ModuleType) -> None:
    for name, formula in FORMULAS.items():
        packet = getattr(torch.ops.bert_fast, name)
        names = [argument.name for argument in packet.default._schema.arguments]

        def count(*values: Any, out_val: Any, _names: list[str] = names, _formula: Any = formula, **given: Any) -> int:
            return int(_formula(SimpleNamespace(**dict(zip(_names, values, strict=False)), **given)))

        counter.register_flop_formula(packet, get_raw=True)(count)


class _AfterImport(importlib.abc.MetaPathFinder):
    """Lets the import system find the counter's module, and registers the formulas once that has run."""

    def find_spec(self, name: str, path: Any = None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name != _COUNTER:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.loader is not None:
            loader: Any = spec.loader
            execute = loader.exec_module

            def execute_and_register(module: ModuleType) -> None:
                execute(module)
                _register(module)

            loader.exec_module = execute_and_register
        return spec


def register_formulas() -> None:
    """Registers the formulas, now or when PyTorch's module that counts is imported."""
    counter = sys.modules.get(_COUNTER)
    if counter is None:
        sys.meta_path.insert(0, _AfterImport())
    else:
        _register(counter)
