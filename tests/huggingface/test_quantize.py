"""quantize on fused models of every family: on packed tokens as in transformers' own code, and with adapters."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import bert_fast
from bert_fast.huggingface import fuse, unfuse, why_not
from bert_fast.modules.quantized_linear import QuantizedLinear
from tests.huggingface.families import CONFIG

transformers = pytest.importorskip("transformers", minversion="5")


@torch.no_grad()
def _kept(model: Any, batch: dict[str, Tensor], **flags: Any) -> Tensor:
    return model(**batch, **flags).last_hidden_state[batch["attention_mask"].bool()]


@pytest.mark.parametrize("prefix", ["Bert", *CONFIG])
def test_every_family_by_its_packed_path_and_by_transformers_code(make, batch, prefix: str) -> None:
    batch = {name: value for name, value in batch.items() if name != "token_type_ids"}
    model = fuse(make(f"{prefix}Model"))
    fp32 = _kept(model, batch)
    linears = {name for name, module in model.named_modules() if type(module) is nn.Linear and "layer" in name}
    bert_fast.quantize(model)
    assert linears == {name for name, module in model.named_modules() if isinstance(module, QuantizedLinear)}
    assert why_not(model, **batch) == []
    packed = _kept(model, batch)
    error = (packed - fp32).square().mean().sqrt()
    assert 0.0 < error < 0.1 * fp32.square().mean().sqrt()
    # Other roundings before a layer lead to other levels of 256: as far apart as both are from fp32.
    padded = _kept(unfuse(model), batch)
    assert (padded - packed).square().mean().sqrt() < error
    assert torch.equal(_kept(fuse(bert_fast.unquantize(model)), batch), fp32)


def test_heads_stay_in_fp32(make, batch) -> None:
    model = fuse(make("BertForMaskedLM"))
    bert_fast.quantize(model)
    assert type(model.cls.predictions.transform.dense) is nn.Linear
    with torch.no_grad():
        assert model(**batch).logits.isfinite().all()


def test_adapters_are_refused_before_and_after(make, batch) -> None:
    peft = pytest.importorskip("peft")
    adapted = peft.get_peft_model(fuse(make()), peft.LoraConfig(r=4, target_modules=["query"])).eval()
    with pytest.raises(ValueError, match=r"query: expected an nn.Linear alone, got peft.*: merge adapters into the"):
        bert_fast.quantize(adapted)
    merged = adapted.merge_and_unload()
    assert _kept(bert_fast.quantize(merged), batch).isfinite().all()
    with pytest.raises(ValueError, match=r"QuantizedLinear.* is not supported"):
        peft.get_peft_model(merged, peft.LoraConfig(r=4, target_modules=["query"]))


def test_hooks_see_a_quantized_linear_layer(make, batch) -> None:
    model = bert_fast.quantize(fuse(make()))
    seen: list[Tensor] = []
    expected = _kept(model, batch)
    model.encoder.layer[0].output.dense.register_forward_hook(lambda module, given, made: seen.append(made))
    assert (_kept(model, batch) - expected).abs().max() < 0.1 * expected.abs().max()
    assert len(seen) == 1 and seen[0].shape[-1] == 32
