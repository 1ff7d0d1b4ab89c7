"""Families under the other ways in: patching, compiling, files, attention alone; mixed in a model, and unknown ones."""

import copy

import pytest
import torch
from torch import nn

from bert_fast.huggingface import attention, fuse, patch_transformers, register_attention, unfuse, why_not
from bert_fast.huggingface.classes import all_models
from bert_fast.huggingface.fused import Fused
from tests.huggingface import families

transformers = pytest.importorskip("transformers", minversion="5")


def _kept(output, batch):
    first = output[0]
    return first[batch["attention_mask"].bool()] if first.shape[:2] == batch["attention_mask"].shape else first


def test_every_head_that_transformers_has_is_in_a_record() -> None:
    """Of the public classes of each family, all but the base class."""
    known = {cls.__name__ for cls in all_models()}
    for prefix in ("Bert", *families.CONFIG):
        public = {
            name for name in dir(transformers) if name.startswith((f"{prefix}For", f"{prefix}Model", f"{prefix}LMHead"))
        }
        assert public <= known, prefix


@pytest.mark.parametrize("prefix", families.CONFIG)
def test_patched_families_are_fused_where_they_are_made(make, batch, prefix: str, tmp_path) -> None:
    untouched = make(f"{prefix}ForTokenClassification")
    untouched.save_pretrained(tmp_path)
    batch = {name: value for name, value in batch.items() if name != "token_type_ids"}
    with patch_transformers():
        model = transformers.AutoModelForTokenClassification.from_pretrained(tmp_path)
    assert isinstance(model, Fused) and why_not(model, **batch) == []
    torch.testing.assert_close(_kept(model(**batch), batch), _kept(untouched(**batch), batch))
    model.save_pretrained(tmp_path / "again")
    again = type(untouched).from_pretrained(tmp_path / "again")
    assert not isinstance(again, Fused) and again.state_dict().keys() == untouched.state_dict().keys()
    assert all(torch.equal(value, untouched.state_dict()[key]) for key, value in again.state_dict().items())


@pytest.mark.parametrize("prefix", [prefix for prefix in families.CONFIG if prefix not in families.ALIKE])
def test_full_graph_compile(make, batch, prefix: str) -> None:
    torch._dynamo.reset()
    name = f"{prefix}ForSequenceClassification" if prefix == "Roberta" else f"{prefix}ForMaskedLM"
    batch = {name: value for name, value in batch.items() if name != "token_type_ids"}
    model = fuse(make(name, num_hidden_layers=2 if prefix == "Roberta" else 1)).train()
    compiled = torch.compile(copy.deepcopy(model), fullgraph=True, dynamic=True, backend="aot_eager")
    with torch._dynamo.config.patch(error_on_recompile=True):
        for columns in (9, 7):
            part = {key: value[:, :columns].clone() for key, value in batch.items()}
            outputs = [_kept(each(**part), part) for each in (compiled, model)]
            torch.testing.assert_close(*outputs)
            outputs[0].sin().sum().backward()
    torch._dynamo.reset()


@pytest.mark.parametrize("prefix", [prefix for prefix in families.CONFIG if prefix not in families.ONLY_EAGER])
def test_attention_alone(make, batch, prefix: str, monkeypatch) -> None:
    register_attention()
    del batch["token_type_ids"]
    untouched, model = make(f"{prefix}Model"), make(f"{prefix}Model", attn_implementation="bert_fast")
    calls: list[int] = []
    padded = attention.attention_padded
    monkeypatch.setattr(attention, "attention_padded", lambda *a, **k: (calls.append(1), padded(*a, **k))[1])
    torch.testing.assert_close(_kept(model(**batch), batch), _kept(untouched(**batch), batch))
    assert len(calls) == 2, "once a layer"


@pytest.mark.parametrize("uses_tasks", [False, True])
def test_task_types_of_ernie(make, batch, uses_tasks: bool) -> None:
    """Task 0 is packed, other tasks run transformers' code."""
    untouched = make("ErnieModel", use_task_id=uses_tasks)
    fused = fuse(copy.deepcopy(untouched))
    tasks = {"task_type_ids": torch.randint(1, 3, batch["input_ids"].shape)}
    assert why_not(fused, **batch) == []
    assert why_not(fused, **batch, **tasks) == ["task_type_ids: the packed path has no such argument"]
    outputs = [[_kept(model(**batch, **given), batch) for given in ({}, tasks)] for model in (untouched, fused)]
    torch.testing.assert_close(outputs[1], outputs[0])
    assert torch.allclose(*outputs[0]) is not uses_tasks
    words = {"inputs_embeds": torch.randn(3, 9, 32), "attention_mask": batch["attention_mask"]}
    torch.testing.assert_close(_kept(fused(**words), batch), _kept(untouched(**words), batch))


def test_packed_input_of_heads_that_pass_on_nothing_is_refused(make) -> None:
    cu_seqlens = torch.tensor([0, 3, 7], dtype=torch.int32)
    with pytest.raises(ValueError, match=r"input_ids: expected a padded batch \[B, S\], got shape \[7\]"):
        fuse(make("MPNetForSequenceClassification"))(torch.arange(2, 9), cu_seqlens=cu_seqlens, max_seqlen=4)


def test_families_mixed_in_one_model(make, batch) -> None:
    encoder, decoder = make("RobertaModel"), make("BertLMHeadModel", is_decoder=True, add_cross_attention=True)
    model = transformers.EncoderDecoderModel(encoder=encoder, decoder=decoder).eval()
    untouched = copy.deepcopy(model)
    call = {"input_ids": batch["input_ids"], "decoder_input_ids": batch["input_ids"][:, :5], "use_cache": False}
    expected = untouched(**call).logits
    fuse(model)
    assert isinstance(model.encoder, Fused) and isinstance(model.decoder.bert, Fused)
    assert why_not(model) == ["use_cache: a cache is asked for"], "where a call does not say otherwise"
    assert {one.fused_family.inner for one in model.modules() if isinstance(one, Fused)} == {"bert", "roberta"}
    torch.testing.assert_close(model(**call).logits, expected)
    assert [type(one) for one in unfuse(model).modules()] == [type(one) for one in untouched.modules()]


def test_unknown_families_are_refused_by_name() -> None:
    config = transformers.ConvBertConfig(
        vocab_size=9, hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8, embedding_size=8
    )
    model = transformers.ConvBertModel(config)
    with pytest.raises(ValueError, match=r"expected a BertModel, .*RobertaModel.* of transformers inside, got a "
                       r"ConvBertModel of transformers\.models\.convbert\.modeling_convbert without one"):  # fmt: skip
        fuse(model)
    assert why_not(model) == ["there is no fused model in this ConvBertModel: bert_fast.fuse was not called"]


def test_a_remote_model_of_a_known_name_is_refused() -> None:
    """What counts is whose class it is: code that came with a checkpoint may compute anything."""
    remote = type("RobertaModel", (nn.Module,), {"__module__": "transformers_modules.somebody.modeling_roberta"})
    with pytest.raises(ValueError, match=r"got a RobertaModel of transformers_modules\.somebody\.modeling_roberta"):
        fuse(remote())


def test_somebodys_part_is_a_reason(make, batch) -> None:
    class OwnLayer(transformers.models.roberta.modeling_roberta.RobertaLayer):
        pass

    model = make("RobertaForMaskedLM")
    model.roberta.encoder.layer[1].__class__ = OwnLayer
    assert why_not(fuse(model), **batch) == ["encoder.layer.1: a OwnLayer which is not fused"]
    assert model(**batch).logits.isfinite().all()


@pytest.mark.parametrize("prefix", ["Bert", *families.CONFIG])
@pytest.mark.parametrize(
    "options", [{}, {"output_hidden_states": True}, {"output_attentions": True}], ids=["plain", "states", "attentions"]
)
def test_tuples_hold_what_transformers_has_in_them(make, batch, prefix: str, options: dict[str, bool]) -> None:
    """With a pooling layer and without, and behind heads."""
    batch = {name: value for name, value in batch.items() if name != "token_type_ids"}
    untouched = [
        make(f"{prefix}{head}", attn_implementation="eager")
        for head in ("Model", "ForSequenceClassification", "ForMaskedLM")
    ]
    if "pooler" in untouched[0]._modules:
        untouched.append(make(f"{prefix}Model", attn_implementation="eager"))
        untouched[-1].pooler = None
    for model in untouched:
        expected = model(**batch, **options, return_dict=False)
        named = model(**batch, **options)
        fused = fuse(copy.deepcopy(model))
        got = fused(**batch, **options, return_dict=False)
        assert [type(value) for value in got] == [type(value) for value in expected], type(model).__name__
        assert fused(**batch, **options).keys() == named.keys() and type(fused(**batch, **options)) is type(named)


def test_a_part_that_is_never_called_has_no_hooks(make, batch) -> None:
    """DistilBERT's MLP is read by the layer that closes it; what shards it alone would wait for a call."""

    def hook(*_: object) -> None:
        pass

    hook.__module__ = "torch.distributed.somewhere"  # harmless on what is called
    del batch["token_type_ids"]
    model = fuse(make("DistilBertModel"))
    model.transformer.layer[0].register_forward_pre_hook(hook)
    assert why_not(model, **batch) == []
    model.transformer.layer[0].ffn.register_forward_pre_hook(hook)
    assert why_not(model, **batch) == ["transformer.layer.0.ffn: hooks are registered"]
