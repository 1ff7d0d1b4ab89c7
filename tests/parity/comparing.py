"""Ours beside theirs: which runs there are, our models as they are compared, and what is asserted."""

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import bert_fast
from bert_fast.reference import heads
from bert_fast.reference import model as reference_model
from bert_fast.testing.compare import assert_close_to_truth
from bert_fast.testing.parity import Case, evaluate
from bert_fast.testing.tolerances import RELATIVE

Results = dict[str, Tensor]

# How a case is run: on the reference, or on our models with padded or packed input.
FORMS = ("reference", "padded", "packed")
DTYPES = (torch.float32, torch.bfloat16)


def every_run(cases: list[Case], forms: tuple[str, ...] = FORMS, dtypes: tuple[torch.dtype, ...] = DTYPES) -> Any:
    """Parametrizes a test by case, form and dtype.

    The reference is compared in fp32 only. Not in bf16: ReLU, whose derivative jumps where a pre-activation is rounded
    to the other side of 0, which happens to either side's own values.
    """

    def fits(case: Case, form: str, dtype: torch.dtype) -> bool:
        if dtype is torch.bfloat16 and (form == "reference" or case.config.get("hidden_act") == "relu"):
            return False
        return form != "packed" or case.can_be_packed

    runs = [
        pytest.param(case, form, dtype, id=f"{case.name}-{form}-{str(dtype).removeprefix('torch.')}")
        for case, form, dtype in itertools.product(cases, forms, dtypes)
        if fits(case, form, dtype)
    ]
    return pytest.mark.parametrize(("case", "form", "dtype"), runs)


def our_model(case: Case, form: str) -> nn.Module:
    """In evaluation."""
    config = bert_fast.BertConfig(**case.full_config())
    if form != "reference":
        return getattr(bert_fast, case.model)(config).eval()
    name = f"Reference{case.model}"
    return getattr(heads if hasattr(heads, name) else reference_model, name)(config).eval()


def in_fp64(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The same numbers."""
    return {name: value.double() if value.is_floating_point() else value for name, value in tensors.items()}


def check(case: Case, form: str, dtype: torch.dtype, ours: nn.Module, theirs: Results, truth: Results) -> None:
    """Every output and every gradient of ours.

    ours: our model, its parameters numbers of `dtype`. theirs: what theirs gives in `dtype`; truth: in fp64, from the
    same numbers.
    """
    # Where the decoder is not tied, version 5 keeps a second, unused bias.
    unused = {"grad cls.predictions.bias"} if case.config.get("tie_word_embeddings") is False else set()
    tensors = case.tensors(dtype)
    mine = evaluate(ours.to(dtype), case, tensors, form == "packed")
    assert mine.keys() - unused == truth.keys() - unused
    assert any(name.startswith("grad ") for name in truth)
    exact = evaluate(ours.double(), case, in_fp64(tensors), form == "packed")
    is_causal_loss = case.model == "BertLMHeadModel" and "loss" in truth
    bound = RELATIVE["vs_transformers_causal_loss" if is_causal_loss else "vs_transformers_fp64"]
    for name, wanted in truth.items():
        scale = max(1.0, wanted.abs().max().item())
        error = (exact[name] - wanted).abs().max().item()
        assert error <= bound * scale, f"{name}: differs by {error:.2e} in fp64, at scale {scale:.2e}"
        model = "reference_model" if form == "reference" else "fast_model"
        kind = "gradient" if name.startswith("grad ") else "output"
        got = mine[name].to(theirs[name].dtype)  # our losses are fp32 where theirs are rounded
        assert_close_to_truth(model, kind, got / scale, theirs[name] / scale, wanted / scale)
