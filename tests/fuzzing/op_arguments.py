"""Arguments that fit, for every public op."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from bert_fast import ops
from bert_fast.reference.activations import ACTIVATIONS

from .tensors import Tensors

Arguments = dict[str, Any]


def _rows(d: Tensors, num_columns: int) -> Tensor:
    return d.normal(d.size(0), num_columns)


def _any_rank(d: Tensors, num_columns: int) -> Tensor:
    return d.normal(*(d.size(0) for _ in range(d.rng.randint(0, 3))), num_columns)


def _activation(d: Tensors) -> str:
    return d.rng.choice(sorted(ACTIVATIONS))


def _dropout(d: Tensors, lengths: list[int], name: str = "coords") -> Arguments:
    if d.case.chance(0.5):
        return {}
    return {
        "dropout_p": d.rng.choice((0.1, 0.5, 1.0, 0.9, 1e-6)),
        "seed": d.seed(),
        name: d.coords(lengths),
        "site": d.rng.choice((0, 1, 17, 2**31 - 1)),
    }


def _eps(d: Tensors, hidden: int) -> float:
    """Of LayerNorm. A few columns may be all alike; a small eps then makes much of the last bits of what differs."""
    return d.rng.choice((1e-12, 1e-5, 1e-3)) if hidden > 4 else 0.1


def _layer_norm(d: Tensors) -> Arguments:
    hidden, dtype = d.size(), d.parameter_dtype
    return {
        "x": _any_rank(d, hidden),
        "weight": d.normal(hidden, dtype=dtype),
        "bias": d.normal(hidden, dtype=dtype),
        "eps": _eps(d, hidden),
    }


def _bias_activation(d: Tensors) -> Arguments:
    size = d.size()
    bias = d.maybe(lambda: d.normal(size, dtype=d.parameter_dtype))
    return {"x": _any_rank(d, size), "bias": bias, "hidden_act": _activation(d)}


def _bias_gelu(d: Tensors) -> Arguments:
    arguments = _bias_activation(d)
    del arguments["hidden_act"]
    return arguments | {"approximate": d.rng.choice(("none", "tanh"))}


def _labels(d: Tensors, num_rows: int, num_classes: int) -> Arguments:
    ignored = d.rng.choice((-100, -1, 0, 7, -(2**40)))
    labels = d.integers(num_classes, num_rows, dtype=None if abs(ignored) < 2**31 else torch.int64)
    labels = torch.where(torch.rand(num_rows) < d.rng.choice((0.0, 0.5, 1.0)), ignored, labels).to(labels.dtype)
    smoothing = d.rng.choice((0.0, 0.0, 0.1, 1.0))
    return {"labels": labels, "ignore_index": ignored, "label_smoothing": smoothing}


def _cross_entropy(d: Tensors) -> Arguments:
    logits = d.normal(d.size(0), d.size())
    return {"logits": logits, **_labels(d, *logits.shape)}


def _parameters(d: Tensors, rows: int, columns: int, prefix: str = "") -> Arguments:
    dtype = d.parameter_dtype
    weight = d.normal(rows, columns, dtype=dtype)
    return {f"{prefix}weight": weight, f"{prefix}bias": d.maybe(lambda: d.normal(rows, dtype=dtype))}


def _linear(d: Tensors) -> Arguments:
    columns = d.size(0)
    return {"x": _rows(d, columns), **_parameters(d, d.size(0), columns)}


def _linear_activation(d: Tensors) -> Arguments:
    return _linear(d) | {"hidden_act": _activation(d), "save_pre": d.case.chance(0.5)}


def _linear_gelu(d: Tensors) -> Arguments:
    return _linear(d) | {"approximate": d.rng.choice(("none", "tanh")), "save_pre": d.case.chance(0.5)}


def _linear_cross_entropy(d: Tensors) -> Arguments:
    columns, classes = d.size(), d.size()
    x = _rows(d, columns)
    arguments = {"x": x, **_parameters(d, classes, columns), **_labels(d, len(x), classes)}
    if d.case.chance(0.3):
        groups = {"row_groups": d.integers(4, len(x)), "class_groups": d.integers(4, classes)}
        arguments |= groups | {"label_smoothing": 0.0}
    return arguments


def _mlp(d: Tensors) -> Arguments:
    columns, inner = d.size(), d.size()
    up, down = _parameters(d, inner, columns, "up_"), _parameters(d, d.size(), inner, "down_")
    return {"x": _rows(d, columns), **up, **down, "hidden_act": _activation(d), "save_pre": d.case.chance(0.5)}


def _gated_mlp(d: Tensors) -> Arguments:
    _, _, lengths = d.offsets()
    columns, inner, dtype, has_bias = d.size(), d.size(), d.parameter_dtype, d.case.chance(0.5)
    arguments: Arguments = {"x": d.normal(sum(lengths), columns)}
    for prefix in ("gate_", "up_"):
        arguments[f"{prefix}weight"] = d.normal(inner, columns, dtype=dtype)
        arguments[f"{prefix}bias"] = d.normal(inner, dtype=dtype) if has_bias else None
    arguments |= _parameters(d, d.size(), inner, "down_")
    arguments |= {"hidden_act": _activation(d), "save_pre": d.case.chance(0.5)}
    return arguments | _dropout(d, lengths)


def _qkv_projection(d: Tensors) -> Arguments:
    columns, rows, dtype, has_bias = d.size(), d.size(), d.parameter_dtype, d.case.chance(0.6)
    arguments: Arguments = {"x": _rows(d, columns)}
    if d.case.chance(0.3):  # neighbours in one storage
        together = d.normal(3, rows, columns, dtype=dtype).detach().contiguous()
        weights = [part.requires_grad_() for part in together.unbind()]
    else:
        weights = [d.normal(rows, columns, dtype=dtype) for _ in range(3)]
    for letter, weight in zip("qkv", weights, strict=True):
        arguments[f"w{letter}"] = weight
        arguments[f"b{letter}"] = d.normal(rows, dtype=dtype) if has_bias else None
    return arguments


def _splade(d: Tensors) -> Arguments:
    cu_seqlens, _, lengths = d.offsets()
    columns = d.size()
    return {
        "x": d.normal(sum(lengths), columns),
        **_parameters(d, d.size(), columns),
        "cu_seqlens": cu_seqlens,
        "activation": d.rng.choice(("relu", "log1p_relu")),
    }


def _dropout_op(d: Tensors) -> Arguments:
    _, _, lengths = d.offsets()
    names = {"dropout_p": 0.0, "seed": None, "coords": None, "site": 0}
    return {"x": d.normal(sum(lengths), d.size(0)), **names, **_dropout(d, lengths)}


def _dropout_add_layer_norm(d: Tensors) -> Arguments:
    _, _, lengths = d.offsets()
    hidden, dtype = d.size(), d.parameter_dtype
    x, residual = (d.normal(sum(lengths), hidden) for _ in range(2))
    weight, bias = (d.normal(hidden, dtype=dtype) for _ in range(2))
    x_bias = d.maybe(lambda: d.normal(hidden, dtype=dtype))
    tensors = {"x": x, "residual": residual, "weight": weight, "bias": bias, "x_bias": x_bias}
    return tensors | {"eps": _eps(d, hidden)} | _dropout(d, lengths)


def _embedding(d: Tensors) -> Arguments:
    _, _, lengths = d.offsets()
    count, hidden, words, types, positions = sum(lengths), d.size(), d.size(), d.rng.randint(1, 3), d.size()
    dtype = d.parameter_dtype
    arguments: Arguments = {"word_table": d.normal(words, hidden), "type_table": d.normal(types, hidden)}
    if d.case.chance(0.2):
        arguments["words"] = d.normal(count, hidden)
    else:
        arguments["words"] = d.integers(words, count)
        arguments["padding_idx"] = d.maybe(lambda: d.rng.randrange(words))
    if d.case.chance(0.7):
        arguments["token_type_ids"] = d.integers(types, count)
    if d.case.chance(0.7):
        arguments |= {"position_ids": d.integers(positions, count), "position_table": d.normal(positions, hidden)}
    weight, bias = (d.normal(hidden, dtype=dtype) for _ in range(2))
    return arguments | {"weight": weight, "bias": bias, "eps": _eps(d, hidden)} | _dropout(d, lengths)


def _extras(d: Tensors, heads: int, dim: int, lengths: list[int], longest: int) -> Arguments:
    """causal, bias, relative positions; they reach as far as coords may."""
    extras: Arguments = {"causal": d.case.chance(0.3), "softmax_scale": d.rng.choice((None, 0.3, 1.0, 0.0))}
    reach = 2 * longest + 4
    if d.case.chance(0.25):
        full = (len(lengths), heads, reach, reach)
        extras["bias"] = d.normal(*(size if d.case.chance(0.6) else 1 for size in full))
    for name in ("relative_keys", "relative_queries"):
        if d.case.chance(0.2):
            extras[name] = d.normal(2 * reach - 1, heads, dim)
    return extras


def _heads(d: Tensors) -> tuple[int, int]:
    return d.rng.choice((1, 1, 2, 3, 12)), d.rng.choice((1, 2, 3, 4, 8, 16, 17, 32, 64))


def _attention(d: Tensors) -> Arguments:
    heads, dim = _heads(d)
    cu_seqlens, longest, lengths = d.offsets()
    arguments: Arguments = {"q": d.normal(sum(lengths), heads, dim)}
    arguments |= {"cu_seqlens_q": cu_seqlens, "max_seqlen_q": longest}
    key_lengths = lengths
    if d.case.chance(0.3):
        key_lengths = [d.rng.choice((0, 1, 4, 9)) for _ in lengths]
        ends = torch.tensor([0, *key_lengths]).cumsum(0).int()
        arguments |= {"cu_seqlens_k": ends, "max_seqlen_k": max(key_lengths, default=0)}
    for name in "kv":
        arguments[name] = d.normal(sum(key_lengths), heads, dim)
    arguments |= _extras(d, heads, dim, lengths, max(*lengths, *key_lengths, 0, 0))
    arguments |= _dropout(d, lengths, "coords_q")
    if "cu_seqlens_k" in arguments:
        arguments |= {"coords_q": d.coords(lengths), "coords_k": d.coords(key_lengths)}
    if d.case.chance(0.2) and lengths:
        order = sorted(range(len(lengths)), key=lambda i: -lengths[i])
        arguments["sequence_order"] = torch.tensor(order, dtype=torch.int32)
    return arguments


def _attention_with_probabilities(d: Tensors) -> Arguments:
    arguments = _attention(d)
    arguments.pop("sequence_order", None)
    return arguments


def _attention_qkv(d: Tensors) -> Arguments:
    heads, dim = _heads(d)
    cu_seqlens, longest, lengths = d.offsets()
    qkv = d.normal(sum(lengths), 3, heads, dim)
    extras = _extras(d, heads, dim, lengths, max(*lengths, 0, 0))
    return {"qkv": qkv, "cu_seqlens": cu_seqlens, "max_seqlen": longest} | extras | _dropout(d, lengths)


def _attention_padded(d: Tensors) -> Arguments:
    heads, dim = _heads(d)
    batch, num_queries = d.rng.randint(0, 3), d.rng.choice((0, 1, 3, 8, 17))
    num_keys, first = (num_queries, 0) if d.case.chance(0.6) else (num_queries + d.rng.choice((0, 1, 5)), 0)
    if num_keys > num_queries:
        first = num_keys - num_queries
    arguments: Arguments = {"q": d.normal(batch, num_queries, heads, dim), "first_position": first}
    for name in "kv":
        arguments[name] = d.normal(batch, num_keys, heads, dim)
    if d.case.chance(0.6):
        arguments["keep_mask"] = d.integers(2, batch, num_queries)
        arguments["keep_mask_k"] = d.maybe(lambda: d.integers(2, batch, num_keys).bool())
        if num_keys != num_queries and arguments["keep_mask_k"] is None:
            arguments["keep_mask_k"] = d.integers(2, batch, num_keys)
    extras = _extras(d, heads, dim, [1] * batch, num_keys)
    if "bias" in extras:
        full = (batch, heads, num_queries, num_keys)
        extras["bias"] = d.normal(*(size if d.case.chance(0.6) else 1 for size in full))
    if d.case.chance(0.4):
        extras |= {"dropout_p": 0.2, "seed": d.seed(), "site": d.rng.randrange(100)}
    return arguments | extras


def _maxsim(d: Tensors) -> Arguments:
    columns, (of_queries, _, queries), (of_documents, longest, documents) = d.size(), d.offsets(), d.offsets()
    tensors = {"queries": d.normal(sum(queries), columns), "documents": d.normal(sum(documents), columns)}
    return tensors | {"cu_seqlens_q": of_queries, "cu_seqlens_d": of_documents, "max_seqlen_d": longest}


def _global_norm(d: Tensors) -> Arguments:
    dtypes = (d.dtype, torch.float32)
    grads = [d.normal(*_shape(d), dtype=d.rng.choice(dtypes)).detach() for _ in range(d.rng.randint(1, 4))]
    return {"grads": grads, "grad_scale": d.maybe(lambda: torch.tensor(d.rng.choice((1.0, 1024.0))))}


def _shape(d: Tensors) -> list[int]:
    return [d.size(0) for _ in range(d.rng.choice((0, 1, 2, 2, 2, 3)))]


def _step(d: Tensors) -> Arguments:
    """Lists of parameters, gradients and state of one layout each or of any."""
    shapes, gradient_dtype = [_shape(d) for _ in range(d.rng.randint(0, 4))], d.parameter_dtype
    state = torch.float64 if d.dtype == torch.float64 else torch.float32
    is_half = d.dtype in (torch.float16, torch.bfloat16)
    columns: dict[str, list[Tensor]] = {
        "params": [d.normal(*shape).detach() for shape in shapes],
        "grads": [d.normal(*shape, dtype=gradient_dtype).detach() for shape in shapes],
        "exp_avgs": [d.normal(*shape, dtype=state).detach() for shape in shapes],
        "exp_avg_sqs": [d.normal(*shape, dtype=state).detach().square() for shape in shapes],
        "steps": [torch.tensor(float(d.rng.randrange(5))) for _ in shapes],
    }
    if is_half and d.case.chance(0.5):
        columns["master_params"] = [d.normal(*shape, dtype=torch.float32).detach() for shape in shapes]
    arguments: Arguments = dict(columns)
    arguments["lr"] = d.rng.choice((1e-3, 0.0, 1.0, torch.tensor(1e-2)))
    arguments["weight_decay"] = d.rng.choice((0.0, 0.01))
    arguments["eps"] = d.rng.choice((1e-8, 1e-6))
    if d.case.chance(0.4):
        arguments |= {"grad_norm": torch.tensor(2.0), "max_grad_norm": d.rng.choice((1.0, 5.0))}
    if d.case.chance(0.3):
        arguments |= {"grad_scale": torch.tensor(8.0), "found_inf": torch.tensor(float(d.rng.randrange(2)))}
    return arguments


def _rotary(d: Tensors) -> Arguments:
    tokens, freqs = d.size(0), d.size()
    qkv = d.normal(tokens, *((3,) if d.case.chance(0.7) else ()), d.size(), 2 * freqs)
    wide = torch.float64 if d.dtype == torch.float64 else torch.float32
    cos, sin = (d.normal(tokens, freqs, dtype=wide).detach() for _ in range(2))
    return {"qkv": qkv, "cos": cos, "sin": sin, "interleaved": d.case.chance(0.5)}


def _lamb_step(d: Tensors) -> Arguments:
    flags = ("bias_correction", "grad_averaging", "use_nvlamb")
    return _step(d) | {name: d.case.chance(0.5) for name in flags}


OPS: dict[str, tuple[Callable[..., Any], Callable[[Tensors], Arguments]]] = {
    "attention": (ops.attention, _attention),
    "attention_padded": (ops.attention_padded, _attention_padded),
    "attention_qkv": (ops.attention_qkv, _attention_qkv),
    "attention_with_probabilities": (ops.attention_with_probabilities, _attention_with_probabilities),
    "bias_activation": (ops.bias_activation, _bias_activation),
    "bias_gelu": (ops.bias_gelu, _bias_gelu),
    "cross_entropy": (ops.cross_entropy, _cross_entropy),
    "dropout": (ops.dropout, _dropout_op),
    "dropout_add_layer_norm": (ops.dropout_add_layer_norm, _dropout_add_layer_norm),
    "embedding": (ops.embedding, _embedding),
    "gated_mlp": (ops.gated_mlp, _gated_mlp),
    "global_norm": (ops.global_norm, _global_norm),
    "layer_norm": (ops.layer_norm, _layer_norm),
    "linear": (ops.linear, _linear),
    "linear_activation": (ops.linear_activation, _linear_activation),
    "linear_cross_entropy": (ops.linear_cross_entropy, _linear_cross_entropy),
    "linear_gelu": (ops.linear_gelu, _linear_gelu),
    "maxsim": (ops.maxsim, _maxsim),
    "mlp": (ops.mlp, _mlp),
    "qkv_projection": (ops.qkv_projection, _qkv_projection),
    "splade": (ops.splade, _splade),
    "rotary": (ops.rotary, _rotary),
}
# They overwrite their arguments.
STEPS = {"adamw_step": (ops.adamw_step, _step), "lamb_step": (ops.lamb_step, _lamb_step)}
