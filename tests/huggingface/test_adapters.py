"""PEFT's adapters on embeddings: trained tokens, LoRA, retrained tables; fused first or last, merged, saved, loaded."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from bert_fast.huggingface import fuse, unfuse, why_not
from tests.huggingface.families import CONFIG

transformers = pytest.importorskip("transformers", minversion="5")
peft = pytest.importorskip("peft")

TOKENS = [2, 5, 17]
LORA: dict[str, dict[str, Any]] = {
    "tokens": {"target_modules": ["query"], "trainable_token_indices": TOKENS},
    "positions and types": {
        "target_modules": ["query"],
        "trainable_token_indices": {"position_embeddings": [0, 3], "token_type_embeddings": [1]},
    },
    "lora": {"target_modules": ["word_embeddings", "position_embeddings", "token_type_embeddings"]},
    "dora": {"target_modules": ["query", "word_embeddings"], "use_dora": True},
    "retrained": {"target_modules": ["query"], "modules_to_save": ["word_embeddings", "LayerNorm"]},
}


def _config(name: str) -> Any:
    if name == "tokens alone":
        return peft.TrainableTokensConfig(token_indices=TOKENS, target_modules=["word_embeddings"])
    return peft.LoraConfig(r=4, init_lora_weights=name == "dora", **LORA[name])


def _adapted(base: nn.Module, name: str, fused: str) -> Any:
    """An adapted copy of base, its adapters away from 0; fused: "before" the adapters, "after" them, or "not"."""
    base = copy.deepcopy(base)
    torch.manual_seed(3)
    model = peft.get_peft_model(fuse(base) if fused == "before" else base, _config(name)).eval()
    with torch.no_grad():
        for path, parameter in model.named_parameters():
            if parameter.requires_grad and "magnitude" not in path:
                parameter.add_(0.1 * torch.randn_like(parameter))
    return fuse(model) if fused == "after" else model


def _run(model: Any, batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """Scores of tokens, and every gradient by name."""
    model.zero_grad()
    scores = model(**batch).logits[batch["attention_mask"].bool()]
    scores.sin().sum().backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return {"scores": scores.detach(), **gradients}


def _assert_same(mine: dict[str, Tensor], theirs: dict[str, Tensor]) -> None:
    assert mine.keys() == theirs.keys() and len(mine) > 1
    for name, value in theirs.items():
        torch.testing.assert_close(mine[name], value, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("fused", ["before", "after"])
@pytest.mark.parametrize("name", [*LORA, "tokens alone"])
def test_scores_and_gradients(make, batch, name, fused, tied) -> None:
    base = make("BertForMaskedLM", tie_word_embeddings=tied).double()
    model, untouched = _adapted(base, name, fused), _adapted(base, name, "not")
    assert why_not(model, **batch) == []
    _assert_same(_run(model, batch), _run(untouched, batch))
    with model.disable_adapter(), torch.no_grad():
        kept = batch["attention_mask"].bool()
        torch.testing.assert_close(model(**batch).logits[kept], base(**batch).logits[kept])


@pytest.mark.parametrize("name", [*LORA, "tokens alone"])
def test_merged(make, batch, name) -> None:
    """Merging and taking it back, then for good, with the adapters gone."""
    base, kept = make("BertForTokenClassification").double(), batch["attention_mask"].bool()
    model, untouched = _adapted(base, name, "after"), _adapted(base, name, "not")
    expected = untouched(**batch).logits[kept]
    model.merge_adapter()
    torch.testing.assert_close(model(**batch).logits[kept], expected)
    model.unmerge_adapter()
    torch.testing.assert_close(model(**batch).logits[kept], expected)
    merged = model.merge_and_unload()
    assert why_not(merged, **batch) == [] and type(merged.bert.embeddings.word_embeddings) is nn.Embedding
    torch.testing.assert_close(merged(**batch).logits[kept], expected)
    assert type(unfuse(merged)) is transformers.BertForTokenClassification


@pytest.mark.parametrize("name", ["tokens", "lora", "tokens alone"])
@torch.no_grad()  # what asks for gradients rounds otherwise
def test_saved_and_loaded(make, batch, name, tmp_path) -> None:
    """What a fused model saves, an untouched one loads, and the other way round."""
    base, kept = make("BertForTokenClassification"), batch["attention_mask"].bool()
    model = _adapted(base, name, "before")
    expected = model(**batch).logits[kept]
    model.save_pretrained(tmp_path / "fused")
    untouched = peft.PeftModel.from_pretrained(copy.deepcopy(base), tmp_path / "fused").eval()
    torch.testing.assert_close(untouched(**batch).logits[kept], expected)
    untouched.save_pretrained(tmp_path / "untouched")
    again = peft.PeftModel.from_pretrained(fuse(copy.deepcopy(base)), tmp_path / "untouched").eval()
    assert why_not(again, **batch) == []
    assert torch.equal(again(**batch).logits[kept], expected)


WHOLE = [
    ("BertForSequenceClassification", "pooler", "before"),
    ("BertForSequenceClassification", "pooler", "after"),
    ("BertForSequenceClassification", "embeddings", "before"),
    ("BertForSequenceClassification", "embeddings", "after"),
    ("BertForPreTraining", "pooler", "after"),
    ("RobertaModel", "pooler", "after"),
    ("XLMRobertaModel", "pooler", "after"),
    ("CamembertModel", "pooler", "after"),
    ("MPNetModel", "pooler", "after"),
]


def _retrained(base: nn.Module, whole: str, fused: str) -> Any:
    """Two adapters with a whole module retrained, and one without; the first is active."""
    base = copy.deepcopy(base)
    torch.manual_seed(3)
    lora = {"r": 4, "target_modules": r".*attn\.q|.*\.query"}
    config = peft.LoraConfig(**lora, modules_to_save=[whole])
    model = peft.get_peft_model(fuse(base) if fused == "before" else base, config)
    if whole == "pooler":  # of the embeddings, PEFT would take the copies for modules to copy once more
        model.add_adapter("second", config)
    model.add_adapter("lora alone", peft.LoraConfig(**lora))
    with torch.no_grad():
        for path, parameter in model.named_parameters():
            if "lora_" in path or "modules_to_save" in path:
                parameter.add_(0.1 * torch.randn_like(parameter))
    return fuse(model.eval()) if fused == "after" else model.eval()


def _pooled(model: Any, batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """What a model makes of pooled sequences, and every gradient by name."""
    model.zero_grad()
    output = model(**batch)
    pooled = next(output[name] for name in ("pooler_output", "seq_relationship_logits", "logits") if name in output)
    if not pooled.requires_grad:
        return {"pooled": pooled}
    pooled.sin().sum().backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return {"pooled": pooled.detach(), **gradients}


@pytest.mark.parametrize(("name", "whole", "fused"), WHOLE)
def test_whole_modules_retrained(make, batch, name, whole, fused) -> None:
    """A copy of the pooler or the embeddings for every adapter: whichever is active, none, and disabled."""
    batch = {key: value for key, value in batch.items() if name.startswith("Bert") or key != "token_type_ids"}
    base = make(name, **CONFIG.get(name.removesuffix("Model"), {})).double()
    model, untouched = (_retrained(base, whole, how) for how in (fused, "not"))
    for adapter in (*model.peft_config, "default"):
        for one in (model, untouched):
            one.set_adapter(adapter)
        assert why_not(model, **batch) == []
        mine, theirs = _pooled(model, batch), _pooled(untouched, batch)
        assert mine.keys() == theirs.keys() and len(mine) > 1
        assert any("modules_to_save" in path for path in mine) == (adapter != "lora alone")
        for path, value in theirs.items():
            torch.testing.assert_close(
                mine[path], value, msg=lambda text, where=f"{adapter}, {path}": f"{where}: {text}"
            )
    with model.disable_adapter(), untouched.disable_adapter():
        assert why_not(model, **batch) == []
        torch.testing.assert_close(_pooled(model, batch), _pooled(untouched, batch))


def test_whole_modules_saved_and_merged(make, batch, tmp_path) -> None:
    base = make("BertForSequenceClassification", dropout_p=0.1)
    model = _retrained(base, "pooler", "before")
    with torch.no_grad():
        expected = model(**batch).logits
        model.save_pretrained(tmp_path / "fused")
        untouched = peft.PeftModel.from_pretrained(copy.deepcopy(base), tmp_path / "fused").eval()
        torch.testing.assert_close(untouched(**batch).logits, expected)
        again = peft.PeftModel.from_pretrained(fuse(copy.deepcopy(base)), tmp_path / "fused").eval()
        assert why_not(again, **batch) == []
        assert torch.equal(again(**batch).logits, expected)
        torch.manual_seed(5)
        dropped = again.train()(**batch).logits
        merged = again.merge_and_unload()
        torch.manual_seed(5)
        torch.testing.assert_close(merged(**batch).logits, dropped)
        assert why_not(merged, **batch) == [] and type(unfuse(merged)) is transformers.BertForSequenceClassification
        torch.testing.assert_close(merged.eval()(**batch).logits, expected)


def test_whole_modules_that_others_watch(make, batch) -> None:
    """A hook on a copy, or a copy of a class that is not fused, and transformers' code runs."""
    model = _retrained(make(), "pooler", "after")
    pooler = model.base_model.model.pooler
    handle = pooler.modules_to_save["second"].register_forward_hook(lambda *_: None)
    assert why_not(model, **batch) == ["pooler.modules_to_save.second: hooks are registered"]
    handle.remove()
    pooler.modules_to_save["second"] = nn.Identity()
    assert why_not(model, **batch) == ["pooler: a ModulesToSaveWrapper which is not fused"]


def test_trained_tokens_alone_change(make, batch) -> None:
    """Steps of training move the rows that were named, and leave the others."""
    model = _adapted(make("BertForMaskedLM"), "tokens", "after").train()
    table = model.get_input_embeddings()
    before = table.weight.detach().clone()
    batch["input_ids"][0, :3] = torch.tensor(TOKENS)
    optimizer = torch.optim.SGD((p for p in model.parameters() if p.requires_grad), lr=0.1)
    model(**batch, labels=batch["input_ids"]).loss.backward()
    optimizer.step()
    moved = (table.weight.detach() != before).any(1).nonzero().flatten()
    assert moved.tolist() == TOKENS
