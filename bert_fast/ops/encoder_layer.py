"""A layer of BERT as one differentiable op, for models that have made all that it is given.

Registered as `bert_fast::encoder_layer_fwd` and `_bwd`. There is no public function: modules
run this op where it can replace a layer's modules (`modules.whole_layer`), and the ops that it consists of elsewhere.
Both give the same bits.
"""

import functools
from collections.abc import Callable, Sequence, Set
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch._C import _any_requires_grad
from torch._C._autograd import _profiler_enabled

from bert_fast.backend import OpSpec, implementation, resolve
from bert_fast.checks import check_choice, check_count, check_dropout_p, check_ids, check_site
from bert_fast.errors import BackendError
from bert_fast.ops._attention_arguments import check_mask, shape_of_mask
from bert_fast.ops._attention_checks import check_dropout_lengths, check_lookups
from bert_fast.ops._define import define
from bert_fast.ops._layer_programs import Form as Form
from bert_fast.ops._layer_programs import LayerPrograms, arguments
from bert_fast.ops._layer_programs import of_call as of_call
from bert_fast.ops._register import are_plain
from bert_fast.ops._signature import check_given
from bert_fast.ops.dropout_add_layer_norm import what_is_saved
from bert_fast.ops.packing import check_offsets
from bert_fast.reference.attention import Attention
from bert_fast.reference.dropout_add_layer_norm import AGAIN, SAVES
from bert_fast.reference.encoder_layer import (
    BEFORE_MLP,
    BEFORE_OUTPUT,
    NOT_PROJECTED,
    OF_MLP,
    TENSORS,
    EncoderLayer,
    OfCall,
    OfLayer,
    Options,
    Projections,
    Saved,
)
from bert_fast.reference.linear_int8 import QuantizedWeight

_OF_CALL = TENSORS
_PARTS = ("qkv_projection", "linear", "attention", "dropout_add_layer_norm", "mlp", "encoder_layer")


@functools.lru_cache(maxsize=1024)
def is_whole(x_device: torch.device, dtype: torch.dtype, hidden_size: int, head_dim: int, request: str) -> bool:
    """Whether one back-end runs all ops of such a layer; else each is to choose its own, or to say why it cannot."""
    spec = OpSpec(x_device, dtype, hidden_size, head_dim)
    try:
        return len({implementation(op, spec, request).backend for op in _PARTS}) == 1
    except BackendError:
        return False


def encoder_layer_of_model(
    x: Tensor, layer: OfLayer, call: OfCall, backend: str, is_training: bool, projected: Projections = NOT_PROJECTED
) -> tuple[Tensor, Form | None]:
    """y [M, H] of arguments that fit, and for `encoder_layer_of_form` what was decided: `modules.whole_layer` looks.

    is_training: the model is, and has the same bits with gradients and without, where back-ends have other products for
    the latter. projected: queries, keys and values [T, N] where others make them, see `runs_programs`.
    The caller has made sure that the parameters are plain tensors and that no mode or transform follows single ops. A
    profiler may be on, which sees an op of the layer; of one that others project for it sees what the op asks for.
    Whether x and the call's tensors are plain is checked here, and that projected are is not.
    """
    parameters = layer.parameters
    saves = before = _saves(x, parameters)
    keeps = torch.is_grad_enabled() and _any_requires_grad(x, *projected, *parameters)
    # Where backward goes through the whole layer, it keeps all that the LayerNorms' inputs are computed from.
    has_all = not keeps or (call.tensors[0] is None and _any_requires_grad(x, *projected, *parameters[:6]))
    if has_all and saves == _DEVICE_TWICE and _computes_again(x.device, x.dtype, backend):
        saves = AGAIN, AGAIN
    returns = keeps or (is_training and x.is_cpu)
    options = Options.of(layer, call, saves, returns)
    if projected[0] is not None or (are_plain((x, *call.tensors)) and not _profiler_enabled()):
        module = resolve("encoder_layer", OpSpec(x.device, x.dtype), backend)
        if hasattr(module, "layer_of_model"):
            form = Form(layer, options, module, backend, keeps, before)
            return _programs(form, x, projected, parameters, call), form
        return _op.around(keeps, *arguments(x, layer, call, options), backend)[0], None
    return _op(*arguments(x, layer, call, options), backend)[0], None


def encoder_layer_of_form(
    form: Form, x: Tensor, parameters: tuple[Tensor | None, ...], call: OfCall, projected: Projections = NOT_PROJECTED
) -> Tensor | None:
    """y [M, H] of a call that is like the one that a form was made for, see `Form`; None where parameters are not."""
    if not form.fits(parameters) or (x.is_cpu and form.saves != _saves(x, parameters)):
        return None
    return _programs(form, x, projected, parameters, call)


def _saves(x: Tensor, parameters: tuple[Tensor | None, ...]) -> tuple[str, str]:
    """What both LayerNorms save, which on the CPU depends on values."""
    return what_is_saved(x, *parameters[8:10]), what_is_saved(x, *parameters[14:16])  # type: ignore[arg-type]


def encoder_layers_of_model(
    x: Tensor, given: Sequence[tuple[OfLayer, OfCall]], backend: str, quantized: Sequence[Sequence[QuantizedWeight]]
) -> Tensor | None:
    """y [M, H] of layers in a row without gradients; None where the back-end has no routine for these.

    x [T, H]: the input of the first layer. quantized: of each the six weights in their order, to be multiplied in place
    of the parameters; none: the parameters are. The caller has made sure that neither a profiler nor a mode follows
    single ops.
    """
    run = getattr(resolve("encoder_layer", OpSpec(x.device, x.dtype), backend), "encoder_layers_fwd", None)
    if run is None or not (are_plain((x, *given[0][1].tensors)) and are_plain((x, *given[-1][1].tensors))):
        return None
    layers = [arguments(x, *one, Options.of(*one, ("output", "output"), False)) for one in given]
    for a in (layers[0], layers[-1]):  # between them calls are alike
        _check_values(a, a.coords_q.shape[0], a.coords_k.shape[0])
    return run(layers, quantized)


@functools.lru_cache(maxsize=1024)
def runs_programs(device: torch.device, dtype: torch.dtype, request: str) -> ModuleType | None:
    """The back-end that runs such a layer by programs; None where there is none.

    It also runs the rest of a layer whose queries, keys and values others make.
    """
    try:
        module = resolve("encoder_layer", OpSpec(device, dtype), request)
    except BackendError:
        return None
    return module if hasattr(module, "layer_of_model") else None


@functools.lru_cache(maxsize=1024)
def _computes_again(device: torch.device, dtype: torch.dtype, request: str) -> bool:
    """Whether the back-end has one launch that does it, and that does nothing where it is not needed."""
    is_half = dtype in (torch.float16, torch.bfloat16)
    return is_half and implementation("encoder_layer", OpSpec(device, dtype), request).backend == "triton"


def _forward(module: ModuleType, a: EncoderLayer) -> Any:
    _check_values(a, a.coords_q.shape[0], a.coords_k.shape[0])
    return module.encoder_layer_fwd(a)


def _check_values(a: EncoderLayer, num_queries: int, num_tokens: int) -> None:
    check_offsets("cu_seqlens_q", a.cu_seqlens_q, "max_seqlen_q", a.max_seqlen_q, num_queries)
    if a.rows is not None:
        check_ids("rows", a.rows, num_tokens)
        check_offsets("cu_seqlens_k", a.cu_seqlens_k, "max_seqlen_k", a.max_seqlen_k, num_tokens)
    if a.causal:
        keys = a.coords_k.unsqueeze(2)  # not read: of as many tokens as the heads that are yet to be made
        check_lookups(a.attention(a.coords_q.unsqueeze(2), keys, keys))


def _check(a: EncoderLayer) -> None:
    """Raises where arguments, each of which is right, do not go together; in backward some are not given."""
    if a.rows is None and a.coords_q is not None and a.coords_k is not None:
        queries, keys = a.coords_q.shape[0], a.coords_k.shape[0]
        if queries != keys:
            raise ValueError(f"coords_q: expected {keys} tokens (those of coords_k) without rows, got {queries}")
    if len({bias is None for bias in (a.query_bias, a.key_bias, a.value_bias)}) > 1:
        raise ValueError("query_bias: expected all three biases of query, key and value or none, got some")
    check_count("num_heads", a.num_heads, 1)
    width = a.query_weight.shape[0]
    if width % a.num_heads or not width:
        raise ValueError(f"num_heads: expected a divisor of the rows of query_weight ({width}), got {a.num_heads}")
    for kind in ("probabilities", "attention"):  # those without a prefix are checked as every op's
        check_dropout_p(f"{kind}_dropout_p", getattr(a, f"{kind}_dropout_p"))
        check_site(getattr(a, f"{kind}_site"))
        check_given("seed", a.seed, getattr(a, f"{kind}_dropout_p") > 0.0)
    check_dropout_lengths("max_seqlen_k", a.max_seqlen_k, a.probabilities_dropout_p)
    for name in ("attention_saves", "saves"):
        check_choice(name, getattr(a, name), (*SAVES, AGAIN))


def _check_backward(a: EncoderLayer, y: Tensor | None, *saved: Any) -> None:
    """Raises unless what backward reads is there."""
    *kept, wants = saved
    given = {**a._asdict(), **Saved(*kept)._asdict(), "y": y}
    for name in sorted(_needed_by(a, wants) - _PERHAPS_NONE):
        check_given(name, given[name], is_needed=True)
    if given["mask"] is not None and not wants.isdisjoint(BEFORE_OUTPUT):
        check_mask(_attention(a, given["out"]), given["mask"])


def _check_values_in_backward(a: EncoderLayer, dy: Tensor, _: Tensor | None, *saved: Any) -> None:
    """Coordinates are not given there without dropout and causal order; what was saved has as many tokens."""
    *kept, wants = saved
    if not wants.isdisjoint(BEFORE_OUTPUT):
        _check_values(a, dy.shape[0], dy.shape[0] if a.rows is None else Saved(*kept).kv.shape[0])  # type: ignore[union-attr]


def _backward(module: ModuleType, a: EncoderLayer, *given: Any) -> dict[str, Tensor]:
    if not a.keeps:
        raise ValueError("keeps: expected True where gradients are wanted, got False")
    return module.encoder_layer_bwd(a, *given)


_PERHAPS_NONE = {"rows", "mask", "sequence_order", "seed", "attention_output_bias", "down_bias"}


def _shape_of_mask(module: ModuleType, a: EncoderLayer) -> tuple[int, ...] | None:
    return shape_of_mask(module, _attention(a, a.x.new_empty((a.coords_q.shape[0], a.query_weight.shape[0]))))


def _attention(a: EncoderLayer, out: Tensor) -> Attention:
    """Attention's arguments as far as they say what its mask is like. out [M, N]: or one like it."""
    q = out.view(out.shape[0], a.num_heads, out.shape[1] // a.num_heads)
    return a.attention(q, q, q)


def _needless(a: EncoderLayer, wants: Set[str]) -> Set[str]:
    return _WITH_A_CHOICE - _needed_by(a, wants)


def _needed_by(a: EncoderLayer, wants: Set[str]) -> Set[str]:
    return _needed(
        a.attention_saves, a.saves, a.rows is None, a.causal, a.probabilities_dropout_p > 0.0,
        a.attention_dropout_p > 0.0, a.dropout_p > 0.0, frozenset(wants),
    )  # fmt: skip


@functools.lru_cache(maxsize=1024)
def _needed(
    attention_saves: str, saves: str, is_all: bool, causal: bool, drops_probabilities: bool, drops_attention: bool,
    drops: bool, wants: frozenset[str],
) -> Set[str]:  # fmt: skip
    """What backward reads of all that has a "?" there."""
    needed = {"rstd", *_READ_OF_NORM[saves]}
    if saves == AGAIN:
        needed |= {"pre", "z", "down_bias"}
    is_named = drops
    if not wants.isdisjoint(BEFORE_MLP | OF_MLP):
        needed.add("pre")
    if "up_weight" in wants:
        needed.add("z")
    if not wants.isdisjoint(BEFORE_MLP):
        needed |= {"attention_rstd", *_READ_OF_ATTENTION_NORM[attention_saves]}
        if attention_saves == AGAIN:
            needed |= {"out", "x", "rows", "attention_output_bias"}
        is_named |= drops_attention
    if "attention_output_weight" in wants:
        needed.add("out")
    if not wants.isdisjoint(BEFORE_OUTPUT):
        needed |= {"out", "lse", "cu_seqlens_q", "cu_seqlens_k", "sequence_order"}
        needed |= {"mask"} if drops_probabilities else set()
        needed |= {"qkv"} if is_all else {"q", "kv", "rows"}
        needed |= {"coords_k"} if causal else set()
        is_named |= drops_probabilities or causal
    needed |= {"x"} if "qkv_weight" in wants else set()
    return needed | {"seed", "coords_q"} if is_named else needed


_READ_OF_NORM = {"input": ("h", "mean"), "output": ("y",), "device": ("h", "mean", "y"), AGAIN: ("y",)}
_READ_OF_ATTENTION_NORM = {
    "input": ("attention_h", "attention_mean"), "output": ("z",), "device": ("attention_h", "attention_mean", "z"),
    AGAIN: ("z",),
}  # fmt: skip
_WITH_A_CHOICE = frozenset((*Saved._fields, *_OF_CALL, "x", "y", "attention_output_bias", "down_bias"))
_DEVICE_TWICE = ("device", "device")
_OUTPUTS = {
    "y": "x M H", "qkv": "x T 3N", "q": "x M N", "kv": "x T 2N", "out": "x M N", "lse": "s num_heads M",
    "mask": "int32 _ _ _", "z": "x M H", "attention_h": "x M H", "attention_mean": "s M", "attention_rstd": "s M",
    "pre": "x M I", "h": "x M H",
    "mean": "s M", "rstd": "s M",
}  # fmt: skip
_MADE: dict[str, Callable[[EncoderLayer], bool]] = dict.fromkeys(Saved._fields, lambda a: a.keeps) | {
    "qkv": lambda a: a.keeps and a.rows is None,
    "q": lambda a: a.keeps and a.rows is not None,
    "kv": lambda a: a.keeps and a.rows is not None,
    "attention_h": lambda a: a.keeps and a.attention_saves not in ("output", AGAIN),
    "attention_mean": lambda a: a.keeps and a.attention_saves != AGAIN,
    "h": lambda a: a.keeps and a.saves not in ("output", AGAIN),
    "mean": lambda a: a.keeps and a.saves != AGAIN,
}

_PARAMETERS_KEPT = (
    "query_weight key_weight value_weight attention_output_weight attention_output_bias? attention_norm_weight "
    "attention_norm_bias up_weight down_weight down_bias? norm_weight norm_bias"
)
_CONSTANTS = (
    "max_seqlen_q max_seqlen_k num_heads causal hidden_act probabilities_dropout_p attention_dropout_p dropout_p "
    "probabilities_site attention_site site attention_saves saves keeps"
)
_JOINED = {
    "qkv_weight": ("query_weight", "key_weight", "value_weight"),
    "qkv_bias": ("query_bias", "key_bias", "value_bias"),
}
_JOINED_NAMES = {part: whole for whole, parts in _JOINED.items() for part in parts}
_KEPT = ("y", *Saved._fields, *_OF_CALL, "x", *_PARAMETERS_KEPT.replace("?", "").split())
_OTHERS = _CONSTANTS.split()

_op = define(
    "encoder_layer",
    EncoderLayer,
    outputs=_OUTPUTS,
    makes=_MADE,
    perhaps={"mask": _shape_of_mask},
    backward=f"dy y? {' '.join(f'{name}?' for name in (*Saved._fields, *_OF_CALL))} x? {_PARAMETERS_KEPT} {_CONSTANTS}",
    gradients="x? qkv_weight? qkv_bias? attention_output_weight? attention_output_bias? attention_norm_weight? "
    "attention_norm_bias? up_weight? up_bias? down_weight? down_bias norm_weight norm_bias",
    joined=_JOINED,
    needless=_needless,
    copies=("cu_seqlens_q", "cu_seqlens_k"),  # a loader may fill its buffer again
    last_dimension="hidden_size",
    run=_forward,
    run_backward=_backward,
    check=_check,
    check_backward=_check_backward,
    check_values=_check_values_in_backward,
)
_programs = LayerPrograms(_op, _needless, _check_values, _KEPT, _OTHERS, _JOINED_NAMES)
