"""Models in half precision whose LayerNorms were kept in fp32: fused and own classes compute as the untouched one."""

import copy
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn

import bert_fast
from bert_fast.testing.parity import Case, evaluate, randomize
from tests.huggingface import families
from tests.parity.comparing import check, in_fp64

CASES = {
    "masked lm": Case("masked lm", "BertForMaskedLM", mask="right"),
    "sequence classes": Case("sequence classes", "BertForSequenceClassification", mask="right"),
}
KEPT = {
    "all": lambda name: True,
    "embeddings": lambda name: "embeddings" in name,
    "layers": lambda name: "layer." in name,
    "head": lambda name: name.startswith(("cls", "lm_head", "vocab_layer_norm", "generator_predictions")),
}


def keep_in_fp32(model: nn.Module, dtype: torch.dtype, kept: str = "all") -> nn.Module:
    """The model in `dtype`, its LayerNorms, or some of them, in fp32."""
    model.to(dtype)
    norms = [one for name, one in model.named_modules() if isinstance(one, nn.LayerNorm) and KEPT[kept](name)]
    assert norms
    for norm in norms:
        norm.float()
    return model


def assert_computes_alike(untouched: Any, ours: Any, case: Case, dtype: torch.dtype, autocast: bool = False) -> None:
    """Both in half precision, with LayerNorms of the same dtypes and the same values."""
    tensors = case.tensors(dtype)
    truth = evaluate(copy.deepcopy(untouched).double(), case, in_fp64(tensors))
    with torch.autocast("cpu", dtype) if autocast else nullcontext():
        theirs = evaluate(untouched, case, tensors)
        check(case, "padded", dtype, ours, theirs, truth)


def untouched_of(prefix: str, task: str) -> tuple[Any, Case]:
    """A model of transformers in fp32."""
    case = families.cases(prefix, [CASES[task]])[0] if prefix != "Bert" else CASES[task]
    model = families.theirs(prefix, case)
    randomize(model)
    return model, case


@pytest.mark.parametrize("autocast", [False, True], ids=["plain", "autocast"])
@pytest.mark.parametrize("prefix", ["Bert", *families.CONFIG])
def test_fused(prefix: str, autocast: bool) -> None:
    untouched, case = untouched_of(prefix, "masked lm")
    keep_in_fp32(untouched, torch.bfloat16)
    assert_computes_alike(untouched, bert_fast.fuse(copy.deepcopy(untouched)), case, torch.bfloat16, autocast)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("autocast", [False, True], ids=["plain", "autocast"])
@pytest.mark.parametrize("task", CASES)
def test_own_classes(task: str, autocast: bool, dtype: torch.dtype) -> None:
    untouched, case = untouched_of("Bert", task)
    ours = getattr(bert_fast, case.model)(bert_fast.BertConfig(**case.full_config())).eval()
    ours.load_state_dict(untouched.state_dict(), strict=False)
    keep_in_fp32(untouched, dtype)
    assert_computes_alike(untouched, keep_in_fp32(ours, dtype), case, dtype, autocast)


@pytest.mark.parametrize("kept", ["embeddings", "layers", "head"])
def test_some_of_them(kept: str) -> None:
    untouched, case = untouched_of("Bert", "masked lm")
    keep_in_fp32(untouched, torch.float16, kept)
    assert_computes_alike(untouched, bert_fast.fuse(copy.deepcopy(untouched)), case, torch.float16)


@pytest.mark.parametrize("task", CASES)
def test_peft_prepares_a_quantized_model(task: str) -> None:
    """All but the weights that are quantized is fp32 then, which stand here in half precision."""
    peft = pytest.importorskip("peft")
    untouched, case = untouched_of("Bert", task)
    untouched.bfloat16().is_loaded_in_8bit = True
    untouched = peft.prepare_model_for_kbit_training(untouched, use_gradient_checkpointing=False)
    for module in untouched.modules():
        if isinstance(module, nn.Linear):
            module.bfloat16()
    assert untouched.bert.embeddings.LayerNorm.weight.dtype is torch.float32
    untouched.requires_grad_()  # to compare all gradients; it froze the model
    assert_computes_alike(untouched, bert_fast.fuse(copy.deepcopy(untouched)), case, torch.bfloat16, autocast=True)
