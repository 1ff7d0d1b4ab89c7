"""Surfaces: the models and the modules of the library called with random arguments; fused models beside stock ones."""

import functools
import inspect
import random
from collections.abc import Callable
from typing import Any

import torch
import transformers
from torch import Tensor, nn

import bert_fast
from bert_fast import models
from bert_fast.modules.dropout_add_layer_norm import DropoutAddLayerNorm
from bert_fast.modules.layer_norm import LayerNorm
from bert_fast.testing.tolerances import FUZZING_SLACK, tolerance

from .case import Case
from .model_files import CLASSES, small_config
from .tensors import Tensors, garbage, spoil

_VOCABULARY, _LENGTH, _HIDDEN, _HEADS = 23, 16, 8, 2
_VARIANTS: tuple[dict[str, Any], ...] = (
    {},
    {},
    {"position_embedding_type": "relative_key"},
    {"position_embedding_type": "relative_key_query", "hidden_act": "relu"},
    {"is_decoder": True},
    {"is_decoder": True, "add_cross_attention": True},
    {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "num_labels": 1},
    {"num_labels": 3, "problem_type": "multi_label_classification", "hidden_act": "gelu_new"},
)


# Arguments that hardly a call has, and some that no model takes.
_SELDOM = ("inputs", "x", "num_items_in_batch", "cache_position", "past_key_values", "masked_lm_positions",
           "output_logits", "logits_to_keep", "num_choices", "next_sentence_label")  # fmt: skip


@functools.lru_cache(64)
def _model(name: str, variant: int, trains: bool) -> nn.Module:
    torch.default_generator.manual_seed(variant)
    return getattr(models, name)(small_config(**_VARIANTS[variant])).train(trains)


def run_models(case: Case) -> None:
    """Forward and backward of a model, or one of its methods."""
    rng = case.rng
    name, variant = rng.choice(CLASSES), rng.randrange(len(_VARIANTS))
    if case.chance(0.12):
        return _run_methods(case, name, variant)
    model = _model(name, variant, case.chance(0.5))
    case.say(f"model = {name}(small_config(**{_VARIANTS[variant]})).train({model.training})")
    arguments = _arguments(case, model, name, variant)
    fits = True
    if case.chance(0.5):
        fits = False
        for argument in rng.sample(sorted(arguments), min(len(arguments), rng.choice((1, 1, 2)))):
            arguments[argument] = spoil(rng, arguments[argument])
        if case.chance(0.1):
            arguments[rng.choice(_SELDOM)] = garbage(rng)
    # `words` is what the op of embeddings calls input_ids, which lie on another device than its tables.
    names = (*inspect.signature(type(model).forward).parameters, "words")
    output = case.call(model, **arguments, names=names)
    loss = output.get("loss") if hasattr(output, "get") else None
    if loss is not None and loss.requires_grad:
        case.call(loss.sum().backward, names=names)
        model.zero_grad()
    if fits:
        tensors = [t for t in _values(output) if t.is_floating_point()]
        case.expect(all(not torch.isnan(t).any() for t in tensors), "NaN from finite weights and fitting inputs")
        if not model.training:
            again = _values(case.call(model, **arguments, names=names))
            same = all(torch.equal(a, b) for a, b in zip(_values(output), again, strict=True))
            case.expect(same, "a second call gave other bits")


def _values(output: Any) -> list[Tensor]:
    """The tensors of an output, caches left out."""
    items = output.items() if hasattr(output, "items") else [("", output)]
    found = []
    for name, value in items:
        if isinstance(value, Tensor):
            found.append(value)
        elif isinstance(value, tuple) and name != "past_key_values":
            found += [item for item in value if isinstance(item, Tensor)]
    return found


def _arguments(case: Case, model: nn.Module, name: str, variant: int) -> dict[str, Any]:
    rng, d = case.rng, Tensors(case)
    d.dtype, d.any_layout = torch.float32, case.chance(0.3)
    batch, length = rng.randint(1, 3), rng.choice((1, 2, 5, 16))
    is_choice = name == "BertForMultipleChoice"
    shape = (batch, 2, length) if is_choice else (batch, length)
    arguments: dict[str, Any] = {"input_ids": d.integers(_VOCABULARY, *shape)}
    is_packed = not is_choice and case.chance(0.25)
    if is_packed:
        cu_seqlens, longest, lengths = d.offsets()
        longest = min(longest, _LENGTH)
        shape, batch = (sum(lengths),), len(lengths)
        arguments = {"input_ids": d.integers(_VOCABULARY, *shape), "cu_seqlens": cu_seqlens, "max_seqlen": longest}
    if case.chance(0.1):
        del arguments["input_ids"]
        arguments["inputs_embeds"] = d.normal(*shape, _HIDDEN)
    optional: dict[str, Callable[[], Any]] = {
        "token_type_ids": lambda: d.integers(2, *shape),
        "position_ids": lambda: d.integers(_LENGTH, *shape),
        "output_attentions": lambda: case.chance(0.5),
        "output_hidden_states": lambda: case.chance(0.5),
        "return_dict": lambda: case.chance(0.7),
        "dropout_seed": d.seed,
    }
    if not is_packed:
        optional["attention_mask"] = lambda: _mask(d, batch, length, is_choice)
        optional["head_mask"] = lambda: d.normal(*rng.choice(((_HEADS,), (2, _HEADS)))).detach()
    if _VARIANTS[variant].get("add_cross_attention") and not is_packed and not is_choice:
        optional["encoder_hidden_states"] = lambda: d.normal(batch, 3, _HIDDEN)
        optional["encoder_attention_mask"] = lambda: d.integers(2, batch, 3)
    if _VARIANTS[variant].get("is_decoder") and not is_packed:
        optional["use_cache"] = lambda: case.chance(0.5)
    for argument in rng.sample(sorted(optional), rng.choice((0, 1, 2, 3))):
        arguments[argument] = optional[argument]()
    if case.chance(0.5):
        arguments |= _labels(d, name, model.config, shape, batch)
    return arguments


def _mask(d: Tensors, batch: int, length: int, is_choice: bool) -> Tensor:
    if is_choice:
        return d.integers(2, batch, 2, length)
    kinds = ((batch, length), (batch, length), (batch, length, length), (batch, 1, length, length))
    mask = d.integers(2, *d.rng.choice(kinds))
    return d.rng.choice((mask, mask.bool(), mask.float()))


def _labels(d: Tensors, name: str, config: Any, shape: tuple[int, ...], batch: int) -> dict[str, Any]:
    if name in ("BertForMaskedLM", "BertLMHeadModel", "BertForPreTraining"):
        labels = torch.where(torch.rand(shape) < 0.5, -100, d.integers(_VOCABULARY, *shape, dtype=torch.int64))
        return {"labels": labels} | ({"next_sentence_label": d.integers(2, batch)} if "Pre" in name else {})
    if name == "BertForQuestionAnswering":
        return {"start_positions": d.integers(20, batch) - 1, "end_positions": d.integers(20, batch)}
    if name == "BertForTokenClassification":
        return {"labels": d.integers(config.num_labels, *shape)}
    if name == "BertForSequenceClassification" and config.problem_type == "multi_label_classification":
        return {"labels": d.integers(2, batch, config.num_labels).float()}
    if name == "BertModel":
        return {}
    return {"labels": d.integers(config.num_labels if "Sequence" in name else 2, batch)}


def _run_methods(case: Case, name: str, variant: int) -> None:
    """Methods that change a model, which is then called."""
    rng = case.rng
    model = getattr(models, name)(small_config(**_VARIANTS[variant]))
    methods: dict[str, Callable[[], tuple[Any, ...]]] = {
        "resize_token_embeddings": lambda: (rng.choice((1, 22, 23, 24, 64, 0, -1, None, garbage(rng))),),
        "resize_position_embeddings": lambda: (rng.choice((1, 15, 16, 17, 0, -1, garbage(rng))),),
        "prune_heads": lambda: (rng.choice(({0: [0]}, {1: [0, 1]}, {5: [0]}, {0: [7]}, {}, garbage(rng))),),
        "gradient_checkpointing_enable": lambda: (),
        "gradient_checkpointing_disable": lambda: (),
        "activation_checkpointing_enable": lambda: (),
        "set_input_embeddings": lambda: (rng.choice((nn.Embedding(30, _HIDDEN), nn.Embedding(23, 5), garbage(rng))),),
        "num_parameters": lambda: (case.chance(0.5), case.chance(0.5)),
        "tie_weights": lambda: (),
        "save_pretrained": lambda: (rng.choice((case.folder / "a", case.folder / "\0", case.folder / ("x" * 300))),),
    }
    for _ in range(rng.randint(1, 3)):
        method = rng.choice(sorted(methods))
        options = {"max_shard_size": rng.choice((100, "1KB", "0", -1, "a", garbage(rng)))}
        has_options = method == "save_pretrained" and case.chance(0.5)
        case.call(getattr(model, method), *methods[method](), **(options if has_options else {}), names=("config",))
    model.eval()
    ids = torch.randint(model.get_input_embeddings().weight.shape[0], (1, 2, 3) if "Choice" in name else (1, 3))
    case.call(model, ids, names=("input_ids", "config"))


# --- modules ----------------------------------------------------------------------------------------------------------


def run_modules(case: Case) -> None:
    """The modules that stand alone."""
    rng, d = case.rng, Tensors(case)
    d.dtype = torch.float32
    hidden = d.size()
    arguments: dict[str, Any] = {"hidden_size": hidden, "eps": rng.choice((1e-12, 1e-5))}
    _, _, lengths = d.offsets()
    if case.chance(0.4):
        module = case.call(LayerNorm, **_spoiled(case, arguments))
        inputs: dict[str, Any] = {"input": d.normal(d.size(0), hidden)}
    else:
        arguments["dropout_p"] = rng.choice((0.0, 0.5, 1.0))
        module = case.call(DropoutAddLayerNorm, **_spoiled(case, arguments))
        inputs = {"x": d.normal(sum(lengths), hidden), "residual": d.normal(sum(lengths), hidden)}
        if case.chance(0.7):
            inputs |= {"seed": d.seed(), "coords": d.coords(lengths)}
            module.site = rng.choice((0, 5))
    inputs = _spoiled(case, inputs)
    # `input` is x to the op that LayerNorm is a module of; parameters have other sizes where hidden_size was another.
    names = (*inspect.signature(type(module).forward).parameters, "x", "weight", "bias", "eps", "dropout_p")
    y = case.call(module, **inputs, names=names)
    if y.requires_grad and not y.is_meta:
        case.call(y.sum().backward, names=names)


def _spoiled(case: Case, arguments: dict[str, Any]) -> dict[str, Any]:
    if case.chance(0.3):
        name = case.rng.choice(sorted(arguments))
        value = spoil(case.rng, arguments[name])
        is_huge = name == "hidden_size" and isinstance(value, int | float) and abs(value) > 1e5
        arguments[name] = 0 if is_huge else value
    return arguments


# --- fused models -----------------------------------------------------------------------------------------------------

_FUSED = ("BertModel", "BertForMaskedLM", "BertForSequenceClassification", "BertForTokenClassification",
          "BertForQuestionAnswering", "BertForPreTraining", "BertLMHeadModel", "BertForMultipleChoice")  # fmt: skip


@functools.lru_cache(32)
def _pair(name: str, variant: int) -> tuple[nn.Module, nn.Module]:
    """A model of transformers as it is, and one with the same weights that was fused."""
    rng = random.Random(variant)
    values = small_config(**rng.choice(({}, {"is_decoder": True}, {"num_labels": 3}))).to_dict()
    kept = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size",
            "max_position_embeddings", "type_vocab_size", "is_decoder", "id2label", "label2id")  # fmt: skip
    config = transformers.BertConfig(**{key: values[key] for key in kept})
    torch.default_generator.manual_seed(variant)
    stock, fused = (getattr(transformers, name)(config).eval() for _ in range(2))
    fused.load_state_dict(stock.state_dict())
    return stock, bert_fast.fuse(fused)


def run_fused(case: Case) -> None:
    """What transformers' model returns, the fused one returns; what it refuses may be refused in any way."""
    name, variant = case.rng.choice(_FUSED), case.rng.randrange(3)
    stock, fused = _pair(name, variant)
    arguments = _arguments(case, stock, name, 0)
    for argument in ("cu_seqlens", "max_seqlen", "dropout_seed"):
        arguments.pop(argument, None)
    ids = arguments.get("input_ids", arguments.get("inputs_embeds"))
    if isinstance(ids, Tensor) and ids.dim() == (1 if "input_ids" in arguments else 2):
        return  # packed: the library's own classes alone
    fits = not case.chance(0.4)
    if not fits:
        argument = case.rng.choice(sorted(arguments))
        arguments[argument] = spoil(case.rng, arguments[argument])
    if any(isinstance(value, Tensor) and value.is_meta for value in arguments.values()):
        return  # beside weights with values: what the stock model makes of it has none
    case.say(f"stock and fused {name}, variant {variant}")
    try:
        with torch.no_grad():
            expected = stock(**arguments)
    except Exception as error:
        case.say(f"# stock refuses: {type(error).__name__}")
        expected = None
    # Beyond what fits, the stock model takes much by chance: vectors of integers, a mask of no rows. Fused, it says no.
    names = () if fits else {*inspect.signature(type(fused).forward).parameters, *arguments}
    dtype = torch.bfloat16 if case.chance(0.3) else torch.float32
    if dtype is torch.bfloat16:
        case.say("# the fused one under autocast in bf16")
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=dtype is torch.bfloat16):
        output = case.call(fused, **arguments, names=names, any_error=expected is None)
    if expected is None:
        return
    keep = arguments.get("attention_mask")
    has_padding = isinstance(keep, Tensor)  # whose rows are zeros, scores of nobody
    for mine, theirs in zip(_values(output), _values(expected), strict=True):
        case.expect(mine.shape == theirs.shape, f"shape {list(mine.shape)}, stock gives {list(theirs.shape)}")
        if not has_padding and mine.is_floating_point() and not torch.isnan(theirs).any():
            bound = FUZZING_SLACK * tolerance("fast_model", "output", dtype).floor
            error, size = ((t.float().abs().max() if t.numel() else 0.0) for t in (mine - theirs, theirs))
            close = bool(error <= bound * max(1.0, float(size)))
            case.expect(close, "the fused model gives other values than the stock one")
