"""What was done to the whole process: a fused model does what the untouched one does, and `why_not` says why.

Every row of `CHANGES` is something that people do to classes, registries and switches; it says what a fused model then
does: "packed" or "theirs". In both cases its numbers are the untouched model's.
"""

import contextlib
import functools
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.modules import module as hooks

from bert_fast.huggingface import fuse, why_not
from bert_fast.modules.originals import GLOBAL_HOOKS, Originals
from bert_fast.testing.tolerances import RELATIVE
from tests.huggingface.families import CONFIG, ROTARY

transformers = pytest.importorskip("transformers", minversion="5")

from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS  # noqa: E402

# A model of each family -> its configuration.
MODELS: dict[str, dict[str, Any]] = {
    "BertModel": {}, "ElectraModel": {}, "RobertaModel": {"pad_token_id": 1}, "XLMRobertaModel": {"pad_token_id": 1},
    "CamembertModel": {"pad_token_id": 2}, "DistilBertModel": {}, "MPNetModel": {"pad_token_id": 1},
    **{f"{prefix}Model": CONFIG[prefix] for prefix in ROTARY if prefix in CONFIG},
}  # fmt: skip
Change = Callable[[pytest.MonkeyPatch], None]


def _other(forward: Any) -> Any:
    """Another function: of its first tensor, the cosine."""

    @functools.wraps(forward)
    def other(*args: Any, **kwargs: Any) -> Any:
        output = forward(*args, **kwargs)
        return (output[0].cos(), *output[1:]) if isinstance(output, tuple) else output.cos()

    return other


def _replaced(owner: Any, name: str) -> Change:
    return lambda patch: patch.setattr(owner, name, _other(getattr(owner, name)))


def _replaced_in_place_of(path: str) -> Change:
    """A class or function of transformers' BERT."""
    owner: Any = transformers.models.bert.modeling_bert
    *classes, name = path.split(".")
    for each in classes:
        owner = getattr(owner, each)
    return _replaced(owner, name)


def _unmasked(patch: pytest.MonkeyPatch) -> None:
    cls = transformers.BertModel
    patch.setattr(cls, "_create_attention_masks", lambda self, *args, **kwargs: (None, None))


def _registered(registry: Any, name: str) -> Change:
    return lambda patch: patch.setitem(registry._global_mapping, name, _other(registry[name]))


def _registered_here(patch: pytest.MonkeyPatch) -> None:
    patch.setitem(ALL_ATTENTION_FUNCTIONS._local_mapping, "sdpa", _other(ALL_ATTENTION_FUNCTIONS["sdpa"]))


def _hooked(patch: pytest.MonkeyPatch) -> None:
    def scale(module: nn.Module, args: Any, output: Any) -> Any:
        return output * 1.5 if isinstance(module, nn.LayerNorm) else None

    patch.setitem(hooks._global_forward_hooks, -1, scale)


def _switched(get: Callable[[], Any], put: Callable[[Any], Any], value: Any) -> Change:
    def change(patch: pytest.MonkeyPatch) -> None:
        before = get()
        put(value)
        patch.callback(lambda: put(before))  # type: ignore[attr-defined]

    return change


CHANGES: dict[str, tuple[str, Change]] = {
    "BertSelfAttention.forward": ("theirs", _replaced_in_place_of("BertSelfAttention.forward")),
    "BertLayer.forward": ("theirs", _replaced_in_place_of("BertLayer.forward")),
    "BertEmbeddings.forward": ("theirs", _replaced_in_place_of("BertEmbeddings.forward")),
    "BertOutput.forward": ("theirs", _replaced_in_place_of("BertOutput.forward")),
    "BertPooler.forward": ("theirs", _replaced_in_place_of("BertPooler.forward")),
    "BertLayer.feed_forward_chunk": ("theirs", _replaced_in_place_of("BertLayer.feed_forward_chunk")),
    "apply_chunking_to_forward": ("theirs", _replaced_in_place_of("apply_chunking_to_forward")),
    "BertModel._create_attention_masks": ("theirs", _unmasked),
    "GELUActivation.forward": ("packed", _replaced(transformers.activations.GELUActivation, "forward")),
    "nn.Linear.__call__": ("theirs", _replaced(nn.Linear, "__call__")),
    "nn.LayerNorm.__call__": ("theirs", _replaced(nn.LayerNorm, "__call__")),
    "nn.Linear.forward": ("theirs", _replaced(nn.Linear, "forward")),
    "nn.LayerNorm.forward": ("theirs", _replaced(nn.LayerNorm, "forward")),
    "nn.Embedding.forward": ("theirs", _replaced(nn.Embedding, "forward")),
    "F.linear": ("theirs", _replaced(nn.functional, "linear")),
    "F.layer_norm": ("theirs", _replaced(nn.functional, "layer_norm")),
    "F.embedding": ("theirs", _replaced(nn.functional, "embedding")),
    "F.scaled_dot_product_attention": ("theirs", _replaced(nn.functional, "scaled_dot_product_attention")),
    "attention registered": ("theirs", _registered(ALL_ATTENTION_FUNCTIONS, "sdpa")),
    "attention registered here": ("theirs", _registered_here),
    "hooks of all modules": ("theirs", _hooked),
    "another attention registered": ("packed", _registered(ALL_ATTENTION_FUNCTIONS, "flex_attention")),
    "another family": ("packed", _replaced(transformers.models.roberta.modeling_roberta.RobertaLayer, "forward")),
    "deterministic": (
        "packed",
        _switched(torch.are_deterministic_algorithms_enabled, torch.use_deterministic_algorithms, True),
    ),
    "default dtype": ("packed", _switched(torch.get_default_dtype, torch.set_default_dtype, torch.float32)),
    "default half": ("packed", _switched(torch.get_default_dtype, torch.set_default_dtype, torch.bfloat16)),
    "default device": ("packed", _switched(lambda: None, torch.set_default_device, "cpu")),
    "matmul precision": (
        "packed",
        _switched(torch.get_float32_matmul_precision, torch.set_float32_matmul_precision, "high"),
    ),
    "anomaly": ("packed", _switched(torch.is_anomaly_enabled, torch.autograd.set_detect_anomaly, True)),
}


class _Patch(pytest.MonkeyPatch):
    """monkeypatch, and what is to be called at its end."""

    def __init__(self) -> None:
        super().__init__()
        self._callbacks: list[Callable[[], Any]] = []

    def callback(self, function: Callable[[], Any]) -> None:
        self._callbacks.append(function)

    def undo(self) -> None:
        for function in self._callbacks:
            function()
        super().undo()


@contextlib.contextmanager
def _changed(change: Change) -> Iterator[None]:
    patch = _Patch()
    try:
        change(patch)
        yield
    finally:
        patch.undo()


def _pair(make: Any, name: str = "BertModel", **config: Any) -> tuple[Any, Any]:
    models = make(name, **config).double(), make(name, **config).double()
    models[1].load_state_dict(models[0].state_dict())
    return models


def _equal(fused: Any, untouched: Any, batch: dict[str, Any]) -> None:
    """Of kept tokens: on padding, the packed path returns 0."""
    kept = batch["attention_mask"].bool()
    for got, wanted in zip(*(_seen(model(**batch), kept) for model in (fused, untouched)), strict=True):
        _close(got, wanted)


def _close(got: Tensor, wanted: Tensor) -> None:
    assert (got - wanted).abs().max() <= RELATIVE["vs_transformers_fp64"] * wanted.abs().max()


def _seen(output: Any, kept: Tensor) -> list[Tensor]:
    pooled = output.get("pooler_output")
    return [output.last_hidden_state[kept], *([] if pooled is None else [pooled])]


@pytest.mark.parametrize("name", CHANGES)
def test_changes_of_the_process(make, batch, name) -> None:
    path, change = CHANGES[name]
    fused, untouched = _pair(make)
    kept = batch["attention_mask"].bool()
    late, plain = fuse(fused), _seen(untouched(**batch), kept)
    with _changed(change):
        early, again = _pair(make)
        again.load_state_dict(untouched.state_dict()), early.load_state_dict(untouched.state_dict())
        for model in (late, fuse(early)):
            assert bool(why_not(model)) == bool(why_not(model, **batch)) == (path == "theirs"), why_not(model)
            _equal(model, untouched, batch)
        if path == "theirs":
            changed = _seen(untouched(**batch), kept)
            assert not all(map(torch.allclose, changed, plain)), "the change does something"
    assert why_not(late) == why_not(early) == []
    _equal(late, untouched, batch)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("part", ["SelfAttention", "Layer", "Embeddings", "Model"])
def test_classes_of_every_family(make, batch, monkeypatch, name, part) -> None:
    """Named as families name them; a head whose model is replaced runs it as well."""
    fused, untouched = _pair(make, name, **MODELS[name])
    family = fused.base_model
    fuse(fused)
    ends = {"SelfAttention": ("attention", "self_attn"), "Layer": ("layer.0", "layers.0"), "Embeddings": "embeddings"}
    module = next(m for n, m in untouched.named_modules() if n.endswith(ends.get(part, "")))
    if part == "Model":
        module = untouched
    monkeypatch.setattr(type(module), "forward", _other_state(type(module).forward))
    assert why_not(fused) == [
        f"{type(module).__module__.rpartition('.')[2]}.{type(module).__name__}.forward: replaced for the whole process"
    ]
    inputs = {key: value for key, value in batch.items() if key not in family.fused_family.unknown_arguments}
    _equal(fused, untouched, inputs)


def _other_state(forward: Any) -> Any:
    def other(self: Any, *args: Any, **kwargs: Any) -> Any:
        output = forward(self, *args, **kwargs)
        if isinstance(output, Tensor):
            return output.sin()
        if isinstance(output, tuple):
            return output[0].sin(), *output[1:]
        output.last_hidden_state = output.last_hidden_state.sin()
        return output

    return other


HEADS = ("BertForSequenceClassification", "BertForTokenClassification", "BertForMaskedLM", "RobertaForMaskedLM",
         "ElectraForPreTraining", "DistilBertForQuestionAnswering")  # fmt: skip


@pytest.mark.parametrize("name", HEADS)
def test_a_replaced_forward_of_a_head(make, batch, monkeypatch, name) -> None:
    config = {"num_labels": 2, **({"pad_token_id": 1} if name.startswith("Roberta") else {})}
    fused, untouched = _pair(make, name, **config)
    early, _ = _pair(make, name, **config)
    fuse(fused)
    cls = type(untouched)

    def forward(self: Any, input_ids: Tensor, **kwargs: Any) -> Tensor:
        return self.base_model(input_ids, **kwargs).last_hidden_state[:, 0].sum(-1)

    monkeypatch.setattr(cls, "forward", forward)
    inputs = {key: value for key, value in batch.items() if key not in fused.fused_family.unknown_arguments}
    for model in (fused, fuse(early)):
        model.load_state_dict(untouched.state_dict())
        _close(model(**inputs), untouched(**inputs))
        assert f"{cls.__name__}.forward: replaced for the whole process" in why_not(model)


def test_every_call_of_a_global_hook(make, batch) -> None:
    """As many as an untouched model makes, in their order; a tracker that registers them sees the same modules."""
    fused, untouched = _pair(make)
    fuse(fused)
    first, second = (_calls_seen(model, batch) for model in (fused, untouched))
    assert first == second and len(first) > 40 and not any(GLOBAL_HOOKS)


def _calls_seen(model: Any, batch: dict[str, Any]) -> list[str]:
    """Calls of modules by name, as global hooks see them in a forward and a backward pass."""
    names, seen = {module: name for name, module in model.named_modules()}, []
    handles = [
        hooks.register_module_forward_pre_hook(lambda module, args: seen.append(f"> {names.get(module)}")),
        hooks.register_module_forward_hook(lambda module, args, out: seen.append(f"< {names.get(module)}")),
        hooks.register_module_full_backward_hook(lambda module, *_: seen.append(f"backward {names.get(module)}")),
    ]
    try:
        assert any(GLOBAL_HOOKS)
        model(**batch).pooler_output.sum().backward()
    finally:
        for handle in handles:
            handle.remove()
    return seen


def test_own_models_call_every_linear_layer(batch) -> None:
    """Global hooks and a replaced nn.Linear.forward reach bert_fast's own classes."""
    import bert_fast

    model = bert_fast.BertModel(bert_fast.BertConfig(
        vocab_size=61, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=48,
        max_position_embeddings=24)).eval().double()  # fmt: skip
    plain, seen = model(**batch).last_hidden_state, []
    handle = hooks.register_module_forward_hook(lambda module, args, out: seen.append(module))
    try:
        _close(model(**batch).last_hidden_state, plain)
    finally:
        handle.remove()
    assert {module for module in model.modules() if isinstance(module, nn.Linear)} <= set(seen)
    with _changed(_replaced(nn.Linear, "forward")):
        assert not torch.allclose(model(**batch).last_hidden_state, plain)


def test_what_the_configuration_says_is_a_reason(make) -> None:
    model = fuse(make(attn_implementation="eager"))
    assert why_not(model) == []
    model.config.output_attentions = True
    assert why_not(model) == ["output_attentions: probabilities are asked for"]
    model.config.output_attentions = False
    model.config._attn_implementation = "my_attention"
    assert why_not(model) == ["config._attn_implementation: 'my_attention' is not one of transformers' own"]


def test_replaced_before_the_import() -> None:
    """A function that is not the library's is found though it was there first."""
    program = """
import torch
from transformers.models.bert import modeling_bert
own = modeling_bert.BertSelfAttention.forward
modeling_bert.BertSelfAttention.forward = lambda self, hidden, *args, **kwargs: (hidden, None)
linear, torch.nn.functional.linear = torch.nn.functional.linear, lambda x, w, b=None: linear(x, w, b)
import bert_fast
sizes = dict(vocab_size=9, hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8)
config = modeling_bert.BertConfig(**sizes)
model = bert_fast.fuse(modeling_bert.BertModel(config))
print(bert_fast.why_not(model))
modeling_bert.BertSelfAttention.forward, torch.nn.functional.linear = own, linear
print(bert_fast.why_not(model))
"""
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert run.stdout.splitlines() == [
        "['modeling_bert.BertSelfAttention.forward: replaced for the whole process', "
        "'torch.nn.functional.linear: replaced for the whole process']",
        "[]",
    ]


def test_originals_are_compared_by_identity() -> None:
    originals = Originals(nn, ("Linear.forward", "functional.gelu"))
    assert not originals.replaced()
    with _changed(lambda patch: patch.setattr(nn.functional, "gelu", nn.functional.relu)):
        assert originals.replaced() == ["functional.gelu"], "torch's own, in another's place"
    assert not originals.replaced()


def test_an_argument_that_transformers_drops(make, batch) -> None:
    fused, untouched = _pair(make)
    fuse(fused)
    extra = {"sentence_embedding": torch.ones(3), "all_layer_embeddings": (), "seq_idx": torch.ones(3, 9)}
    assert why_not(fused, **batch, **extra) == []
    _equal(fused, untouched, {**batch, **extra})
    for name in ("position_bias", "is_causal", "softcap", "sliding_window", "output_something", "past_key_values"):
        assert why_not(fused, **batch, **{name: torch.ones(1)}), name
    head, theirs = _pair(make, "BertForMaskedLM")
    labels = {"input_ids": batch["input_ids"], "labels": batch["input_ids"], "ignore_index": 5}
    got, wanted = (model(**labels).loss for model in (fuse(head), theirs))
    _close(got, wanted)


def test_nothing_is_drawn_where_nothing_drops(make, batch) -> None:
    """Else a seeded loader beside a fused model would mask other words."""
    for name in (
        "BertModel",
        "RobertaForMaskedLM",
        "ElectraForSequenceClassification",
        "DistilBertForTokenClassification",
    ):
        config = {"pad_token_id": 1} if name.startswith("Roberta") else {}
        model = fuse(make(name, **config)).train()
        inputs = {key: value for key, value in batch.items() if key not in model.fused_family.unknown_arguments}
        state = torch.get_rng_state()
        model(**inputs)
        assert torch.equal(torch.get_rng_state(), state), name


@pytest.mark.parametrize("path", ["encoder", "encoder.layer.0", "encoder.layer.1.attention.self", "embeddings"])
def test_parts_in_evaluation_under_a_model_in_training(make, batch, path) -> None:
    """Of transformers, a part in evaluation does not drop; attention asks itself, not its nn.Dropout."""
    fused, untouched = _pair(make, dropout_p=0.5)
    for model in (fuse(fused), untouched):
        model.train()
        for other in model.modules():
            if isinstance(other, nn.Dropout):
                other.p = 0.0
        part = model.get_submodule(path)
        for inside in part.modules():
            if isinstance(inside, nn.Dropout):
                inside.p = 0.5
        part.eval()
    assert why_not(fused, **batch) == []
    _equal(fused, untouched, batch)
    self_attention = fused.encoder.layer[0].attention.self.train()
    self_attention.dropout.p = 0.5
    self_attention.dropout.eval()
    assert why_not(fused) == ["encoder.layer.0.attention.self.dropout: in evaluation"]


def test_a_head_in_training_over_a_model_in_evaluation(make, batch) -> None:
    model = fuse(make("BertForTokenClassification", dropout_p=0.5)).train()
    model.bert.eval()
    assert not torch.equal(model(**batch).logits, model(**batch).logits), "the head drops, as of transformers"


def _parametrized(model: Any) -> None:
    class Doubled(nn.Module):
        def forward(self, weight: Tensor) -> Tensor:
            return 2.0 * weight

    nn.utils.parametrize.register_parametrization(model.encoder.layer[0].output.dense, "weight", Doubled())


# What is done to a model late, after it was fused -> the path, and how.
LATE: dict[str, tuple[str, Callable[[Any], Any]]] = {
    "config.hidden_act": ("packed", lambda model: setattr(model.config, "hidden_act", "relu")),
    "config.hidden_dropout_prob": ("packed", lambda model: setattr(model.config, "hidden_dropout_prob", 0.5)),
    "config.layer_norm_eps": ("packed", lambda model: setattr(model.config, "layer_norm_eps", 0.5)),
    "config.num_hidden_layers": ("packed", lambda model: setattr(model.config, "num_hidden_layers", 7)),
    "config.is_decoder": ("theirs", lambda model: setattr(model.config, "is_decoder", True)),
    "config.output_hidden_states": ("packed", lambda model: setattr(model.config, "output_hidden_states", True)),
    "attention set late": ("packed", lambda model: model.set_attn_implementation("eager")),
    "eps of a LayerNorm": ("packed", lambda model: setattr(model.encoder.layer[0].output.LayerNorm, "eps", 0.5)),
    "a parametrization": ("packed", _parametrized),
    "an activation": (
        "packed",
        lambda model: setattr(model.encoder.layer[0].intermediate, "intermediate_act_fn", nn.ReLU()),
    ),
    "a layer less": ("packed", lambda model: model.encoder.layer.__delitem__(1)),
}


@pytest.mark.parametrize("name", LATE)
def test_changes_of_a_fused_model(make, batch, name) -> None:
    path, change = LATE[name]
    fused, untouched = _pair(make)
    for model in (fuse(fused), untouched):
        change(model)
    assert bool(why_not(fused, **batch)) == (path == "theirs"), why_not(fused, **batch)
    _equal(fused, untouched, batch)


def test_the_registry_of_activations(make, batch, monkeypatch) -> None:
    """It is asked when a model is made: models keep the modules that they have."""
    from transformers.activations import ACT2CLS

    late, untouched = _pair(make)
    fuse(late)
    monkeypatch.setitem(ACT2CLS, "gelu", nn.ReLU)
    early, _ = _pair(make)
    early.load_state_dict(untouched.state_dict())
    plain = make().double()
    plain.load_state_dict(untouched.state_dict())
    _equal(late, untouched, batch)
    _equal(fuse(early), plain, batch)
