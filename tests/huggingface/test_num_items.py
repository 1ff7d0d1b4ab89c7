"""`num_items_in_batch`: a fused head makes of it what the untouched one does."""

import copy
from typing import Any

import pytest
import torch

from bert_fast.huggingface import fuse
from bert_fast.testing.parity import Case, randomize
from tests.huggingface import families
from tests.parity.cases import TRANSFORMERS_5

pytest.importorskip("transformers", minversion="5")

HEADS = (
    "masked lm", "language model", "pre-training", "sequence classes", "multiple choice", "token classes",
    "question answering", "replaced tokens", "next sentence",
)  # fmt: skip
RUNS = [
    (prefix, case)
    for prefix in ("Bert", *families.CONFIG)
    for case in (TRANSFORMERS_5 if prefix == "Bert" else families.cases(prefix, TRANSFORMERS_5))
    if case.name in HEADS
]


@pytest.mark.parametrize(("prefix", "case"), RUNS, ids=lambda value: getattr(value, "name", value))
def test_the_loss_is_that_of_the_untouched_head(prefix: str, case: Case) -> None:
    untouched = families.theirs(prefix, case)
    randomize(untouched)
    fused = fuse(copy.deepcopy(untouched))
    call: dict[str, Any] = {**case.tensors(torch.float32), **case.flags}
    plain = untouched(**call).loss
    for count in (37, torch.tensor(37)):
        expected = untouched(**call, num_items_in_batch=count).loss
        assert torch.equal(expected, plain) == (case.name != "language model")
        torch.testing.assert_close(fused(**call, num_items_in_batch=count).loss, expected)
