"""PEFT's adapters on embeddings: trained tokens, LoRA, retrained tables; fused first or last, merged, saved, loaded."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from bert_fast.huggingface import fuse, unfuse, why_not

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
