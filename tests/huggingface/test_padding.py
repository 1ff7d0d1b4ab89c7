"""What fused models make of padding does not depend on the path of a call."""

import copy
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import bert_fast
from bert_fast.huggingface import fuse, why_not
from bert_fast.testing.parity import randomize
from tests.huggingface.conftest import SIZES
from tests.huggingface.families import ALIKE, CONFIG, configuration

transformers = pytest.importorskip("transformers")

EAGER = {"attn_implementation": "eager"}
PREFIXES = ("Bert", *CONFIG)
HEADS = ("Model", "ForSequenceClassification", "ForMultipleChoice", "ForNextSentencePrediction", "ForPreTraining")
NAMES = [
    f"{prefix}{head}"
    for prefix in PREFIXES
    for head in HEADS
    if hasattr(transformers, f"{prefix}{head}")
    and (prefix, head) != ("Electra", "ForPreTraining")
    and (prefix not in ALIKE or head == "ForSequenceClassification")
]
# What sends a call to transformers' own code -> what is done to the model, and the call's arguments.
Change = Callable[[Any], Any]


def _hook_inside(model: Any) -> Any:
    return _layers(model)[0].register_forward_hook(lambda module, args, output: None)


def _hook_on_the_model(model: Any) -> Any:
    return model.base_model.register_forward_hook(lambda module, args, output: None)


WAYS: dict[str, tuple[Change | None, dict[str, Any]]] = {
    "attentions": (None, {"output_attentions": True}),
    "attentions and states": (None, {"output_attentions": True, "output_hidden_states": True}),
    "hook inside": (_hook_inside, {}),
    "hook on the model": (_hook_on_the_model, {}),  # packed, and all of it is shown
}


def _layers(model: Any) -> Any:
    return getattr(model.base_model, "encoder", None).layer if hasattr(model.base_model, "encoder") else (
        model.base_model.transformer.layer
    )  # fmt: skip


def _model(name: str, **config: Any) -> Any:
    cls, prefix = getattr(transformers, name), next(p for p in reversed(PREFIXES) if name.startswith(p))
    none = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    model = cls(configuration(cls, **{**SIZES, **none, **CONFIG.get(prefix, {}), **EAGER, **config})).eval()
    randomize(model)
    return model


def _batch(name: str) -> dict[str, Tensor]:
    """Padded on the left, on the right, on both sides with a hole, and nothing but padding."""
    kept = torch.ones(4, 9, dtype=torch.long)
    kept[0, :4] = kept[1, 5:] = kept[2, [0, 5, 8]] = kept[3] = 0
    batch = {"input_ids": torch.randint(3, 61, (4, 9)), "attention_mask": kept}
    if name.endswith("ForMultipleChoice"):
        batch = {key: value.view(2, 2, 9) for key, value in batch.items()}
        batch["labels"] = torch.tensor([1, 0])
    elif name.endswith("ForSequenceClassification"):
        batch["labels"] = torch.tensor([2, 0, 1, 1])
    elif name.endswith("ForNextSentencePrediction"):
        batch["labels"] = torch.tensor([1, 0, 1, 1])
    elif name.endswith("ForPreTraining"):
        batch |= {"labels": batch["input_ids"], "next_sentence_label": torch.tensor([1, 0, 1, 1])}
    return batch


@pytest.mark.parametrize("name", NAMES)
def test_every_path_gives_the_same(name: str) -> None:
    """Loss, logits, pooled sequences and hidden states of heads and models, and gradients; objects and tuples."""
    model, batch = fuse(_model(name)), _batch(name)
    expected, wanted = model(**batch, output_hidden_states=True), {}
    if "loss" in expected:
        expected.loss.backward()
        wanted = {key: p.grad for key, p in model.named_parameters() if p.grad is not None}
        assert len(wanted) > 20
    padding = (batch["attention_mask"] == 0).view(-1, 9)
    for way, (change, flags) in WAYS.items():
        handle = None if change is None else change(model)
        output = model(**batch, **flags)
        for key, value in output.items():
            if isinstance(value, tuple):
                continue
            torch.testing.assert_close(value, expected[key], msg=lambda text, key=key, way=way: f"{way}, {key}: {text}")
        for states in (output.get("last_hidden_state"), *(output.get("hidden_states") or ())):
            assert states is None or (not states[padding].any() and states[~padding].abs().sum(-1).all())
        for state, other in zip(output.get("hidden_states") or (), expected.hidden_states, strict=False):
            torch.testing.assert_close(state, other)
        if wanted and way == "attentions and states":
            model.zero_grad()
            output.loss.backward()
            for key, gradient in wanted.items():
                torch.testing.assert_close(
                    model.get_parameter(key).grad, gradient, msg=lambda t, key=key: f"{key}: {t}"
                )
        if handle is not None:
            handle.remove()
    as_tuple = model(**batch, **WAYS["attentions and states"][1], return_dict=False)
    assert isinstance(as_tuple, tuple)
    torch.testing.assert_close(as_tuple[0], expected[0])


@pytest.mark.parametrize(
    ("name", "mask"),
    [
        (name, mask)
        for name in NAMES
        for mask in ("none", "right", "4d")
        if mask == "right" or (name.startswith("Bert") and not name.endswith("ForMultipleChoice"))
    ],
)
def test_without_padding_on_the_left_all_is_as_untouched(name: str, mask: str) -> None:
    """Bit for bit on transformers' path, save for the zeros; a mask of four dimensions names no padding."""
    untouched, batch = _model(name), _batch(name)
    kept = torch.ones(4, 9, dtype=torch.long)
    kept[0, 7:] = kept[2, 3:] = 0
    if mask == "none":
        del batch["attention_mask"]
    elif mask == "right":
        batch["attention_mask"] = kept.view(batch["attention_mask"].shape)
    else:
        batch["attention_mask"] = torch.zeros(4, 1, 9, 9).masked_fill(kept[:, None, None] == 0, -1e9)
        batch["attention_mask"] = batch["attention_mask"].flip(3)  # as with padding on the left
    if name.endswith("ForPreTraining"):
        batch["labels"] = batch["labels"].masked_fill(kept == 0, -100)
    fused = fuse(copy.deepcopy(untouched))
    flags = {"output_attentions": True, "output_hidden_states": mask != "right"}
    output, expected = fused(**batch, **flags), untouched(**batch, **flags)
    assert output.keys() == expected.keys()
    for key, value in expected.items():
        if key == "prediction_logits" or (mask == "right" and key == "last_hidden_state"):
            assert torch.equal(output[key][kept == 1], value[kept == 1])
        elif isinstance(value, Tensor):
            assert torch.equal(output[key], value), key
        else:
            assert all(map(torch.equal, output[key], value)), key


def test_modules_are_called_as_often_as_in_an_untouched_model() -> None:
    """Hooks see the pooler called once, on hidden states as transformers computes them."""
    for name in ("BertForSequenceClassification", "RobertaForMultipleChoice", "MPNetForMultipleChoice"):
        untouched, batch, seen = _model(name), _batch(name), []
        for model in (untouched, fuse(copy.deepcopy(untouched))):
            calls: Counter[str] = Counter()
            shapes: dict[str, Any] = {}

            def hook(
                module: Any, args: Any, output: Any, calls: Any = calls, shapes: Any = shapes, key: str = ""
            ) -> None:
                calls[key] += 1
                shapes[key] = [one.shape for one in args if isinstance(one, Tensor)]

            for key, module in model.named_modules():
                module.register_forward_hook(lambda m, a, o, hook=hook, key=key: hook(m, a, o, key=key))
            model(**batch)
            seen.append((calls, shapes))
        assert seen[0] == seen[1] and sum(seen[0][0].values()) > 30


def test_hooks_see_zeros_and_not_what_the_head_reads() -> None:
    """Column 0 of padding is 0 to a hook on the model inside, and what the hook returns counts."""
    model, batch, seen = fuse(_model("RobertaForSequenceClassification")), _batch("Model"), []
    expected = model(**batch).logits
    handle = model.roberta.register_forward_hook(lambda module, args, output: seen.append(output.last_hidden_state))
    torch.testing.assert_close(model(**batch).logits, expected)
    torch.testing.assert_close(model(**batch, output_attentions=True).logits, expected)
    assert len(seen) == 2 and all(not states[0, 0].any() and states.shape == (4, 9, 32) for states in seen)
    handle.remove()
    model.roberta.register_forward_hook(lambda module, args, output: type(output)(output.last_hidden_state * 0.0))
    logits = model(**batch).logits
    torch.testing.assert_close(logits, logits[:1].expand(4, -1))
    assert not torch.isclose(logits, expected)[:3].any()  # the last text has no token at all
    packed = {"input_ids": batch["input_ids"][0], "cu_seqlens": torch.tensor([0, 4, 9]).int(), "max_seqlen": 5}
    if transformers.__version__.startswith("5"):
        assert model(**packed).logits.shape == (2, 3)


@pytest.mark.parametrize("prefix", PREFIXES)
def test_states_that_are_shown_get_their_gradients(prefix: str) -> None:
    """Of every layer, as in an untouched model: what the caller sees is what the rest is computed from."""
    untouched, batch = _model(f"{prefix}Model"), _batch("Model")
    batch = {key: value[:3] for key, value in batch.items()}
    kept, gradients = batch["attention_mask"] == 1, []
    for model in (untouched, fuse(copy.deepcopy(untouched))):
        output = model(**batch, output_attentions=True, output_hidden_states=True)
        loss = output.last_hidden_state[kept].sin().sum()
        gradients.append(torch.autograd.grad(loss, output.hidden_states))
        assert output.hidden_states[-1] is output.last_hidden_state
    for one, other in zip(*gradients, strict=True):
        torch.testing.assert_close(one[kept], other[kept])
        assert other[kept].abs().sum(-1).all()


def test_layers_that_run_again_in_backward() -> None:
    for reentrant in (False, True):
        model, batch = fuse(_model("BertForSequenceClassification")).train(), _batch("BertForSequenceClassification")
        losses = []
        for flags in ({}, {"output_attentions": True}, {"output_hidden_states": True, "output_attentions": True}):
            model.gradient_checkpointing_enable({"use_reentrant": reentrant})
            losses.append(model(**batch, **flags).loss)
            losses[-1].backward()
        for loss in losses[1:]:
            torch.testing.assert_close(loss, losses[0])


@torch.no_grad()
def test_beside_a_cache() -> None:
    """A mask is of cached columns too; a text padded on the left goes on as on its own."""
    model = fuse(_model("BertLMHeadModel", is_decoder=True))
    batch = _batch("Model")
    ids, kept = batch["input_ids"][:1], batch["attention_mask"][:1]
    positions = (kept.cumsum(1) - 1).clamp(min=0)
    whole = model.bert(ids, attention_mask=kept, position_ids=positions, use_cache=False)
    first = model.bert(ids[:, :6], attention_mask=kept[:, :6], position_ids=positions[:, :6], use_cache=True)
    rest = model.bert(
        ids[:, 6:], attention_mask=kept, position_ids=positions[:, 6:], past_key_values=first.past_key_values
    )
    torch.testing.assert_close(rest.last_hidden_state, whole.last_hidden_state[:, 6:])
    torch.testing.assert_close(first.pooler_output, whole.pooler_output)


@pytest.mark.parametrize("kind", ["first", "last", "mean", "cls_index"])
def test_a_summary_is_what_transformers_makes_of_padding(kind: str) -> None:
    """Of the last column, or of all, padding or not; of the first token where it is that."""
    untouched = _model("ElectraForMultipleChoice", summary_type=kind)
    fused, ids = fuse(copy.deepcopy(untouched)), torch.randint(3, 61, (1, 2, 9))
    masks = {name: torch.ones(1, 2, 9, dtype=torch.long) for name in ("full", "left", "right", "hole")}
    masks["left"][0, 0, :3] = masks["right"][0, 1, 5:] = masks["hole"][0, 0, 4] = 0
    packed = {"first": {"full", "left", "right", "hole"}, "mean": {"full"}}.get(kind, {"full", "left", "hole"})
    for name, mask in masks.items():
        call = {"input_ids": ids, "attention_mask": mask, "labels": torch.tensor([1])}
        found = why_not(fused, input_ids=ids[0], attention_mask=mask[0])
        assert found == ([] if name in packed else ["attention_mask: the head reads hidden states of padding"]), name
        if (kind, name) == ("first", "left"):
            continue  # where the first kept token is pooled
        for flags in ({}, {"output_attentions": True}, {"output_hidden_states": True}, {"return_dict": False}):
            output, expected = fused(**call, **flags), untouched(**call, **flags)
            torch.testing.assert_close(output[0], expected[0])
            torch.testing.assert_close(output[1], expected[1])
    torch.testing.assert_close(fused(ids).logits, untouched(ids).logits)


@pytest.mark.parametrize("way", ["compiled", "compiled with a hook", "the model inside compiled", "exported"])
def test_traced_and_compiled_calls(way: str) -> None:
    """As eager ones, of texts padded on the left."""
    model, batch = fuse(_model("DistilBertForSequenceClassification", num_hidden_layers=1)), _batch("Model")
    if way == "compiled":
        model = fuse(_model("MPNetForSequenceClassification", num_hidden_layers=1))
    expected, call = model(**batch).logits.detach(), model
    if way == "compiled with a hook":
        _hook_on_the_model(model)
    if way == "the model inside compiled":
        model.distilbert = torch.compile(model.distilbert, backend="eager")
    elif way == "exported":
        call = torch.export.export(model, (), batch, strict=False).module()
    else:
        call = torch.compile(model, backend="eager", fullgraph=way == "compiled")
    with torch.no_grad():
        torch.testing.assert_close(call(**batch).logits, expected)
    torch.compiler.reset()


@pytest.mark.parametrize("name", ["BertModel", "BertForSequenceClassification", "BertForMultipleChoice",
                                  "BertForNextSentencePrediction", "BertForPreTraining"])  # fmt: skip
def test_our_own_classes(name: str) -> None:
    """Attentions that are asked for change nothing else; their rows of padding are 0."""
    model = getattr(bert_fast, name)(bert_fast.BertConfig(**SIZES)).eval()
    randomize(model)
    batch = _batch(name)
    padding = (batch["attention_mask"] == 0).view(-1, 9)
    expected = model(**batch, output_hidden_states=True)
    output = model(**batch, output_hidden_states=True, output_attentions=True)
    for key, value in expected.items():
        torch.testing.assert_close(output[key], value, msg=lambda text, key=key: f"{key}: {text}")
    assert all(not states[padding].any() for states in output.hidden_states)
    assert all(not probabilities.transpose(1, 2)[padding].any() for probabilities in output.attentions)
