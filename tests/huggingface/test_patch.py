"""patch_transformers: where models are made, how long it holds, and from several threads."""

import copy
import threading

import pytest
import torch

import bert_fast
from bert_fast.huggingface import Patch, patch_transformers, why_not
from bert_fast.huggingface.fused import Fused

transformers = pytest.importorskip("transformers", minversion="5")

NAMES = ("BertModel", "BertForMaskedLM", "BertForTokenClassification")


def _is_fused(model) -> bool:
    berts = [module for module in model.modules() if isinstance(module, transformers.BertModel)]
    return bool(berts) and all(isinstance(bert, Fused) for bert in berts) and not why_not(model)


class WithHead(transformers.BertPreTrainedModel):
    def __init__(self, config: transformers.BertConfig) -> None:
        super().__init__(config)
        self.bert = transformers.BertModel(config, add_pooling_layer=False)
        self.post_init()


class Derived(transformers.BertForMaskedLM):
    def __init__(self, config: transformers.BertConfig) -> None:
        super().__init__(config)
        self.extra = transformers.BertModel(config)


@pytest.fixture
def small(make) -> transformers.BertConfig:
    return copy.deepcopy(make().config)


@pytest.mark.parametrize("name", NAMES)
def test_every_way_of_making_a_model(make, batch, name, tmp_path) -> None:
    untouched = make(name)
    untouched.save_pretrained(tmp_path)
    cls, auto = getattr(transformers, name), {
        "BertModel": transformers.AutoModel, "BertForMaskedLM": transformers.AutoModelForMaskedLM,
        "BertForTokenClassification": transformers.AutoModelForTokenClassification,
    }[name]  # fmt: skip
    with patch_transformers():
        made = [cls(untouched.config), cls.from_pretrained(tmp_path), auto.from_pretrained(tmp_path)]
        made.append(auto.from_config(untouched.config))
    for model in made:
        assert _is_fused(model)
    kept = batch["attention_mask"].bool()
    for model in made[1:3]:
        torch.testing.assert_close(model(**batch)[0][kept], untouched(**batch)[0][kept])
    assert not _is_fused(cls(untouched.config)), "undone"


def test_derived_classes_and_parts(small) -> None:
    with patch_transformers():
        assert _is_fused(WithHead(small))
        derived = Derived(small)
        decoder = copy.deepcopy(small)
        decoder.is_decoder = decoder.add_cross_attention = True
        pair = transformers.EncoderDecoderModel(
            encoder=transformers.BertModel(small), decoder=transformers.BertLMHeadModel(decoder)
        )
    assert _is_fused(derived) and type(derived).__mro__[1] is Derived
    assert isinstance(pair.encoder, Fused) and isinstance(pair.decoder.bert, Fused)


def test_patches_are_counted_and_undone_once(small) -> None:
    before = transformers.BertModel.__init__
    first, second = patch_transformers(), bert_fast.patch_transformers()
    assert isinstance(first, Patch)
    first.undo()
    first.undo()
    assert _is_fused(transformers.BertModel(small)), "the second holds"
    second.undo()
    assert transformers.BertModel.__init__ is before
    assert not _is_fused(transformers.BertModel(small))
    with pytest.raises(RuntimeError, match="in the block"), patch_transformers():
        raise RuntimeError("in the block")
    assert transformers.BertModel.__init__ is before


def test_a_constructor_that_somebody_wrapped_meanwhile_stays(small, monkeypatch) -> None:
    calls = []
    monkeypatch.setattr(transformers.BertModel, "__init__", transformers.BertModel.__init__)
    patch = patch_transformers()
    ours = transformers.BertModel.__init__

    def theirs(self, *args, **kwargs):
        calls.append(1)
        ours(self, *args, **kwargs)

    transformers.BertModel.__init__ = theirs
    patch.undo()
    assert transformers.BertModel.__init__ is theirs
    assert not _is_fused(transformers.BertModel(small)) and calls == [1]


def test_threads(small) -> None:
    before, errors = transformers.BertModel.__init__, []

    def work() -> None:
        try:
            for _ in range(5):
                with patch_transformers():
                    assert _is_fused(transformers.BertModel(small))
        except BaseException as error:  # an assertion in a thread would be lost
            errors.append(error)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors and transformers.BertModel.__init__ is before
