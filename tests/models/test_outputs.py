"""ModelOutput: one object, read as attributes, keys, positions and slices; None fields are absent."""

import copy
import dataclasses
import io
import pickle
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils import _pytree as pytree

from bert_fast.models import outputs
from bert_fast.models.outputs import (
    BaseModelOutputWithPoolingAndCrossAttentions,
    MaskedLMOutput,
    ModelOutput,
    QuestionAnsweringModelOutput,
    TextEmbeddingOutput,
)

CLASSES = [getattr(outputs, name) for name in outputs.__all__ if name != "ModelOutput"]
OF_TRANSFORMERS = [cls for cls in CLASSES if cls is not TextEmbeddingOutput]  # that one is of a class that it has not
LOSS, LOGITS = torch.tensor(1.5), torch.arange(6.0).view(2, 3)


@pytest.fixture
def out() -> MaskedLMOutput:
    return MaskedLMOutput(loss=LOSS, logits=LOGITS, attentions=(LOGITS, LOGITS))


def test_attribute_key_index_slice(out: MaskedLMOutput) -> None:
    assert out.logits is LOGITS and out["logits"] is LOGITS and out[1] is LOGITS
    assert out[-1] is out.attentions
    assert out[:2] == (LOSS, LOGITS) and out.to_tuple() == (LOSS, LOGITS, out.attentions)
    loss, logits = out[:2]
    assert loss is LOSS and logits is LOGITS
    assert dict(**out) == {"loss": LOSS, "logits": LOGITS, "attentions": out.attentions}


def test_none_fields_are_absent(out: MaskedLMOutput) -> None:
    assert list(out) == list(out.keys()) == ["loss", "logits", "attentions"]
    assert len(out) == 3 and "hidden_states" not in out and out.hidden_states is None
    with pytest.raises(KeyError, match="hidden_states"):
        out["hidden_states"]
    with pytest.raises(IndexError):
        out[3]
    assert MaskedLMOutput(logits=LOGITS)[0] is LOGITS
    assert len(MaskedLMOutput()) == 0 and MaskedLMOutput().to_tuple() == ()


def test_assignment_keeps_field_order_and_none_removes() -> None:
    out = MaskedLMOutput(logits=LOGITS, attentions=(LOGITS,))
    out.loss = LOSS
    assert out[0] is LOSS and list(out) == ["loss", "logits", "attentions"]
    out["hidden_states"] = (LOGITS,)
    assert list(out) == ["loss", "logits", "hidden_states", "attentions"] and out.hidden_states == (LOGITS,)
    out.loss = None
    assert out[0] is LOGITS and "loss" not in out
    with pytest.raises(KeyError, match="no field 'nonsense'"):
        out["nonsense"] = LOSS


@pytest.mark.parametrize("method", ["pop", "popitem", "setdefault", "update", "clear", "__delitem__"])
def test_deleting_is_refused(out: MaskedLMOutput, method: str) -> None:
    with pytest.raises(TypeError, match="cannot be deleted"):
        getattr(out, method)("loss")
    assert len(out) == 3


def test_rebuilds_from_mapping_and_pairs(out: MaskedLMOutput) -> None:
    for rebuilt in (MaskedLMOutput({**out}), MaskedLMOutput((k, v) for k, v in out.items())):  # type: ignore[arg-type]
        assert list(rebuilt.items()) == list(out.items()) and rebuilt.loss is LOSS
    with pytest.raises(KeyError, match="nonsense"):
        MaskedLMOutput({"nonsense": 1})  # type: ignore[arg-type]
    assert copy.copy(out).logits is LOGITS


def test_pickle_and_deepcopy(out: MaskedLMOutput) -> None:
    buffer = io.BytesIO()
    torch.save(out, buffer)
    buffer.seek(0)
    for restored in (pickle.loads(pickle.dumps(out)), copy.deepcopy(out), torch.load(buffer, weights_only=False)):
        assert type(restored) is MaskedLMOutput and list(restored) == list(out)
        assert torch.equal(restored.logits, LOGITS) and torch.equal(restored[0], LOSS)
        assert restored.hidden_states is None


@pytest.mark.parametrize("cls", CLASSES)
def test_pytree_round_trip(cls: type[ModelOutput]) -> None:
    names = [field.name for field in dataclasses.fields(cls)]  # type: ignore[arg-type]
    out = cls(**{name: torch.full((2,), float(i)) for i, name in enumerate(names) if i != 1})
    leaves, spec = pytree.tree_flatten(out)
    assert len(leaves) == len(names) - 1
    doubled = pytree.tree_map(lambda x: x * 2, out)
    assert type(doubled) is cls and list(doubled) == list(out)
    assert torch.equal(doubled[1], out[1] * 2)
    assert type(pytree.tree_unflatten(leaves, spec)) is cls


def test_pytree_leaf_that_becomes_a_mapping_stays_a_leaf() -> None:
    mapped = pytree.tree_map(lambda x: {"logits": x}, MaskedLMOutput(loss=LOSS))
    assert mapped.loss == {"logits": LOSS} and mapped.logits is None


@pytest.mark.parametrize("cls", OF_TRANSFORMERS)
def test_same_fields_as_transformers(cls: type[ModelOutput]) -> None:
    transformers = pytest.importorskip("transformers")
    modeling = transformers.modeling_outputs
    theirs = getattr(modeling, cls.__name__, None) or transformers.models.bert.modeling_bert.BertForPreTrainingOutput
    names = [field.name for field in dataclasses.fields(cls)]  # type: ignore[arg-type]
    assert names == [field.name for field in dataclasses.fields(theirs)]
    some = {name: torch.ones(1) for name in names[::2]}
    assert list(cls(**some)) == list(theirs(**some)) and len(cls(**some)[:2]) == len(theirs(**some)[:2])


class _Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)

    def forward(self, x: torch.Tensor) -> QuestionAnsweringModelOutput:
        y = self.linear(x)
        inner = BaseModelOutputWithPoolingAndCrossAttentions(last_hidden_state=y, hidden_states=(x, y))
        out = QuestionAnsweringModelOutput(start_logits=inner[0], end_logits=inner.last_hidden_state * 2)
        out.loss = out["start_logits"].sum()
        return out


def test_compiles_as_one_graph() -> None:
    model = _Model()
    x = torch.randn(2, 3)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    out, expected = compiled(x), model(x)
    assert type(out) is QuestionAnsweringModelOutput and list(out) == ["loss", "start_logits", "end_logits"]
    assert torch.equal(out[2], expected[2])
    out.loss.backward()
    assert model.linear.weight.grad is not None


def test_activation_checkpointing_passes_it_through() -> None:
    model = _Model()
    out = torch.utils.checkpoint.checkpoint(model, torch.randn(2, 3, requires_grad=True), use_reentrant=False)
    assert type(out) is QuestionAnsweringModelOutput
    out.loss.backward()
    assert model.linear.weight.grad is not None


def _train_under_ddp() -> None:
    model = nn.parallel.DistributedDataParallel(_Model(), static_graph=True)
    for _ in range(2):  # a static graph registers its hooks on the output's tensors
        out = model(torch.randn(2, 3))
        assert type(out) is QuestionAnsweringModelOutput
        out.loss.backward()
    assert model.module.linear.weight.grad is not None


def test_distributed_data_parallel_finds_the_tensors(tmp_path: Path) -> None:
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        # A function of its own: a reducer that outlives the group ends the group's thread, which may wait for Python's
        # lock, while it holds that lock.
        _train_under_ddp()
    finally:
        torch.distributed.destroy_process_group()


def test_accelerate_rebuilds_it(out: MaskedLMOutput) -> None:
    operations = pytest.importorskip("accelerate.utils.operations")
    half = MaskedLMOutput(loss=LOSS.half(), attentions=(LOGITS.half(),))
    converted = operations.convert_to_fp32(half)
    assert type(converted) is MaskedLMOutput and list(converted) == ["loss", "attentions"]
    assert converted.loss.dtype is converted.attentions[0].dtype is torch.float32
