"""Reference and models against Hugging Face transformers 5: every output and every gradient."""

from typing import Any

import pytest
import torch
from torch import Tensor

from bert_fast.testing.parity import Case, added_mask, evaluate, randomize

from .cases import TRANSFORMERS_5
from .comparing import check, every_run, in_fp64, our_model

transformers = pytest.importorskip("transformers", minversion="5")


def _for_transformers(case: Case, tensors: dict[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
    """A mask per pair as the 4-D one that version 5 wants in its place."""
    if case.mask != "3d":
        return tensors
    return {**tensors, "attention_mask": added_mask(tensors["attention_mask"] != 0, torch.zeros((), dtype=dtype))}


@every_run(TRANSFORMERS_5)
def test_outputs_and_gradients(case: Case, form: str, dtype: torch.dtype) -> None:
    config = transformers.BertConfig(**case.full_config(), attn_implementation="eager")
    model: Any = getattr(transformers, case.model)(config).eval()
    randomize(model)
    ours = our_model(case, form)
    assert list(ours.state_dict()) == list(model.state_dict())
    ours.load_state_dict(model.to(dtype).state_dict())

    tensors = _for_transformers(case, case.tensors(dtype), dtype)
    theirs = evaluate(model, case, tensors)
    truth = evaluate(model.double(), case, in_fp64(tensors))
    check(case, form, dtype, ours, theirs, truth)
