"""What fuse changes, what it leaves, and that it lasts: copies, files, moves, subclasses."""

import copy
import inspect
import io
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from bert_fast.huggingface import fuse, unfuse, why_not
from bert_fast.huggingface.fused import Fused
from bert_fast.storage import are_neighbours

transformers = pytest.importorskip("transformers", minversion="5")

ROOT = Path(__file__).resolve().parents[2]
NAMES = (
    "BertModel", "BertForMaskedLM", "BertForPreTraining", "BertLMHeadModel", "BertForNextSentencePrediction",
    "BertForSequenceClassification", "BertForMultipleChoice", "BertForTokenClassification", "BertForQuestionAnswering",
    "RobertaModel", "RobertaForCausalLM", "RobertaForMaskedLM", "RobertaForMultipleChoice",
    "RobertaForQuestionAnswering", "RobertaForSequenceClassification", "RobertaForTokenClassification",
    "XLMRobertaForMaskedLM", "CamembertForTokenClassification", "ElectraModel", "ElectraForCausalLM",
    "ElectraForMaskedLM", "ElectraForMultipleChoice", "ElectraForPreTraining", "ElectraForQuestionAnswering",
    "ElectraForSequenceClassification", "ElectraForTokenClassification", "DistilBertModel", "DistilBertForMaskedLM",
    "DistilBertForMultipleChoice", "DistilBertForQuestionAnswering", "DistilBertForSequenceClassification",
    "DistilBertForTokenClassification", "MPNetModel", "MPNetForMaskedLM", "MPNetForMultipleChoice",
    "MPNetForQuestionAnswering", "MPNetForSequenceClassification", "MPNetForTokenClassification",
)  # fmt: skip


class OwnBert(transformers.BertModel):
    """At the top of a module, where pickle finds it."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        output = super().forward(*args, **kwargs)
        output.last_hidden_state = 2 * output.last_hidden_state
        return output


def _are_joined(model: nn.Module) -> bool:
    attentions: list[Any] = [module for module in model.modules() if type(module).__name__.endswith("SelfAttention")]
    return bool(attentions) and all(are_neighbours(a.query.weight, a.key.weight, a.value.weight) for a in attentions)


class Shown(transformers.BertModel):
    """A class that shows something of its own."""

    def extra_repr(self) -> str:
        return "\n".join(filter(None, ("layers of mine", super().extra_repr())))


def test_print_shows_that_a_model_is_fused(make) -> None:
    model = make("BertForSequenceClassification")
    plain = repr(model)
    assert repr(fuse(model)).splitlines()[:4] == [
        "BertForSequenceClassification(", "  fused by bert_fast", "  (bert): BertModel(", "    fused by bert_fast",
    ]  # fmt: skip
    assert repr(copy.deepcopy(model)) == repr(model) and repr(unfuse(model)) == plain
    shown = fuse(Shown(transformers.BertConfig(hidden_size=16, num_hidden_layers=1, num_attention_heads=2)))
    assert repr(shown).splitlines()[1:3] == ["  layers of mine", "  fused by bert_fast"]


@pytest.mark.parametrize("name", NAMES)
def test_only_classes_change_and_they_change_back(make, name) -> None:
    model = make(name, num_labels=2)
    hook = model.register_forward_hook(lambda *_: None)
    before = {key: (id(module), type(module)) for key, module in model.named_modules()}
    parameters = {key: id(value) for key, value in model.named_parameters(remove_duplicate=False)}
    values = {key: value.clone() for key, value in model.state_dict().items()}
    attributes = {key: set(vars(module)) for key, module in model.named_modules()}
    signature = inspect.signature(model.forward)

    assert fuse(model) is model
    assert {key: id(module) for key, module in model.named_modules()} == {
        key: value[0] for key, value in before.items()
    }
    assert {key: id(value) for key, value in model.named_parameters(remove_duplicate=False)} == parameters
    assert all(torch.equal(value, values[key]) for key, value in model.state_dict().items())
    assert isinstance(model, before[""][1]) and type(model) is not before[""][1] and _are_joined(model)
    for attribute in ("__name__", "__qualname__", "__module__"):
        assert getattr(type(model), attribute) == getattr(before[""][1], attribute)
    assert str(model.__class__) == str(before[""][1])
    assert inspect.signature(model.forward) == signature
    assert hook.id in model._forward_hooks

    classes = [type(module) for module in model.modules()]
    assert [type(module) for module in fuse(model).modules()] == classes, "twice is once"
    assert unfuse(model) is model
    assert {key: (id(module), type(module)) for key, module in model.named_modules()} == before
    assert {key: set(vars(module)) for key, module in model.named_modules()} == attributes
    unfuse(model)


def test_the_packed_path_is_taken(make, batch, monkeypatch) -> None:
    """Else everything here would pass by transformers' own code."""
    fused = [fuse(make(name, num_labels=2)) for name in NAMES if not name.endswith("ForMultipleChoice")]
    calls: list[type] = []
    for cls in {type(model.base_model.encoder) for model in fused}:
        packed = cls.forward_packed

        def record(self: Any, *args: Any, packed: Any = packed, **kwargs: Any) -> Any:
            calls.append(type(self))
            return packed(self, *args, **kwargs)

        monkeypatch.setattr(cls, "forward_packed", record)
    for model in fused:
        refused = model.fused_family.unknown_arguments
        model(**{key: value for key, value in batch.items() if key not in refused})
    assert calls == [type(model.base_model.encoder) for model in fused]


def test_a_model_without_bert_is_refused() -> None:
    with pytest.raises(
        ValueError, match=r"model: expected a BertModel.* of transformers inside, got a Linear without one"
    ):
        fuse(nn.Linear(2, 2))
    with pytest.raises(TypeError, match=r"model: expected a torch\.nn\.Module, got builtins\.str"):
        fuse("bert-base-uncased")  # type: ignore[type-var]
    assert why_not(nn.Linear(2, 2)) == ["there is no fused model in this Linear: bert_fast.fuse was not called"]


def test_any_model_around_a_bert(make, batch) -> None:
    class Around(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.left, self.right = make(), make("BertForTokenClassification")

    model = fuse(Around())
    assert isinstance(model.left, Fused) and isinstance(model.right.bert, Fused) and type(model) is Around
    assert why_not(model, **batch) == []


@pytest.mark.parametrize("name", ["BertModel", "BertForMaskedLM", "OwnBert", "RobertaForMaskedLM"])
@pytest.mark.parametrize("how", ["deepcopy", "pickle", "pickle 0", "torch.save"])
def test_copies_are_fused(make, batch, name, how) -> None:
    model = make() if name == "OwnBert" else make(name)
    if name == "OwnBert":
        model.__class__ = OwnBert
    model = fuse(model)
    if how == "deepcopy":
        again = copy.deepcopy(model)
    elif how == "torch.save":
        file = io.BytesIO()
        torch.save(model, file)
        file.seek(0)
        again = torch.load(file, weights_only=False)
    else:
        again = pickle.loads(pickle.dumps(model, 0 if how == "pickle 0" else pickle.HIGHEST_PROTOCOL))
    assert type(again) is type(model) and _are_joined(again) and why_not(again, **batch) == []
    assert torch.equal(again(**batch)[0], model(**batch)[0])
    assert {id(p) for p in again.parameters()}.isdisjoint(id(p) for p in model.parameters())
    unfuse(again)
    assert not any(isinstance(module, Fused) for module in again.modules())


def test_a_pickle_is_read_by_a_process_that_fused_nothing(make, batch, tmp_path) -> None:
    model = fuse(make())
    torch.save((model, batch, model(**batch)[0].detach()), tmp_path / "model.pt")
    code = (
        "import torch; model, batch, out = torch.load('model.pt', weights_only=False)\n"
        "from bert_fast.huggingface import why_not; assert why_not(model, **batch) == []\n"
        "assert torch.equal(model(**batch)[0], out)"
    )
    command = [sys.executable, "-c", code]
    done = subprocess.run(
        command, cwd=tmp_path, env={"PYTHONPATH": str(ROOT)}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


def test_a_subclass_keeps_what_it_overrides(make, batch) -> None:
    model = make()
    plain = fuse(copy.deepcopy(model))
    model.__class__ = OwnBert
    fuse(model)
    assert type(model).__mro__[1] is OwnBert and type(fuse(copy.deepcopy(model))) is type(model)
    assert torch.equal(model(**batch)[0], 2 * plain(**batch)[0])
    assert type(unfuse(model)) is OwnBert


def test_moves_loading_and_training_keep_neighbours(make, batch, tmp_path) -> None:
    model = fuse(make())
    assert _are_joined(model.to(torch.float64)) and _are_joined(model.to(torch.float32))
    expected = model(**batch)[0]
    state = {key: value.clone() for key, value in model.state_dict().items()}
    model.load_state_dict(state, assign=True)
    assert not _are_joined(model), "the test needs tensors that lie apart"
    assert torch.equal(model(**batch)[0], expected)
    assert _are_joined(model.train()) and _are_joined(model.eval())
    model.save_pretrained(tmp_path)
    again = type(model).from_pretrained(tmp_path)
    assert type(again) is type(model) and _are_joined(again) and not again.training
    assert torch.equal(again(**batch)[0], expected)
    assert transformers.AutoConfig.from_pretrained(tmp_path).architectures == ["BertModel"]


def test_parameters_in_a_buffer_stay_there(make) -> None:
    """DeepSpeed and FSDP1 keep parameters in one buffer, which their optimizers write to."""
    model = make()
    parameters = list(model.parameters())
    flat = torch.cat([p.detach().flatten() for p in parameters])
    fuse(model)
    for parameter, piece in zip(parameters, flat.split([p.numel() for p in parameters]), strict=True):
        parameter.data = piece.view_as(parameter)
    places = [p.data_ptr() for p in parameters]
    model.train().eval()
    assert [p.data_ptr() for p in model.parameters()] == places and not _are_joined(model)


@pytest.mark.parametrize("first", ["fuse", "double"])
def test_before_or_after_a_move(make, batch, first) -> None:
    model, truth = make(), make()
    truth.load_state_dict(model.state_dict())
    model = fuse(model).double() if first == "fuse" else fuse(model.double())
    kept = batch["attention_mask"].bool()
    torch.testing.assert_close(model(**batch)[0][kept], truth.double()(**batch)[0][kept])


def test_changed_parts_count(make, batch) -> None:
    """Dropout, activation and tables that are changed after fuse are those that run."""
    model, untouched = make(), make()
    untouched.load_state_dict(model.state_dict())
    fuse(model)
    kept = batch["attention_mask"].bool()
    for each in (model, untouched):
        each.encoder.layer[0].intermediate.intermediate_act_fn = nn.ReLU()
        each.encoder.layer[1].intermediate.intermediate_act_fn = nn.ELU()
        each.embeddings.token_type_embeddings = nn.Embedding.from_pretrained(torch.arange(64.0).sin().view(2, 32))
    assert why_not(model, **batch) == []
    torch.testing.assert_close(model(**batch)[0][kept], untouched(**batch)[0][kept])
    model.train()
    assert torch.equal(model(**batch)[0], model(**batch)[0]), "dropout is 0"
    model.encoder.layer[1].output.dropout.p = 0.5
    assert not torch.equal(model(**batch)[0], model(**batch)[0])
    model.encoder.layer[1].eval()
    assert torch.equal(model(**batch)[0], model(**batch)[0]), "a layer in evaluation does not drop"
