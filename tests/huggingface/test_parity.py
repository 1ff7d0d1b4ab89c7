"""Fused models against the untouched ones: every output and gradient, on the calls that our models are tested with."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

import bert_fast
from bert_fast.huggingface import fuse, why_not
from bert_fast.testing.parity import Case, evaluate, randomize
from tests.parity.cases import TRANSFORMERS_5
from tests.parity.comparing import check, in_fp64

transformers = pytest.importorskip("transformers", minversion="5")

CASES = [case for case in TRANSFORMERS_5 if case.mask != "3d"]  # masks per pair are another thing in version 5
IN_BF16 = ("mask right", "masked lm", "pre-training", "sequence classes", "cross-attention", "language model")
RUNS = [
    *((case, torch.float32) for case in CASES),
    *((case, torch.bfloat16) for case in CASES if case.name in IN_BF16),
]


@pytest.mark.parametrize(("case", "dtype"), RUNS, ids=lambda value: getattr(value, "name", None))
def test_outputs_and_gradients(case: Case, dtype: torch.dtype) -> None:
    config = transformers.BertConfig(**case.full_config(), attn_implementation="eager")
    untouched: Any = getattr(transformers, case.model)(config).eval()
    randomize(untouched)
    untouched.to(dtype)
    fused = fuse(copy.deepcopy(untouched))
    tensors = case.tensors(dtype)
    theirs = evaluate(untouched, case, tensors)
    truth = evaluate(untouched.double(), case, in_fp64(tensors))
    check(case, "padded", dtype, fused, theirs, truth)


@pytest.mark.parametrize(
    "name", ["BertModel", "BertForMaskedLM", "BertForPreTraining", "BertForNextSentencePrediction"]
)
@pytest.mark.parametrize("mask", ["none", "holes"])
def test_training_drops_what_our_own_model_drops(name: str, mask: str) -> None:
    """The same weights, the same seed: the same masks at every place, so the same bits."""
    case = Case(f"{name} {mask}", model=name, mask=mask)
    probabilities = {"hidden_dropout_prob": 0.3, "attention_probs_dropout_prob": 0.3}
    ours = getattr(bert_fast, name)(bert_fast.BertConfig(**case.full_config(), **probabilities)).train()
    randomize(ours)
    theirs = fuse(getattr(transformers, name)(transformers.BertConfig(**case.full_config(), **probabilities))).train()
    theirs.load_state_dict(ours.state_dict())
    call = {**case.tensors(torch.float32), "dropout_seed": torch.tensor([5])}
    for mine, other in zip(ours(**call).to_tuple(), theirs(**call).to_tuple(), strict=True):
        assert torch.equal(mine, other)
    call["dropout_seed"] = torch.tensor([6])
    assert not torch.equal(theirs(**call).to_tuple()[-1], other)


@pytest.mark.parametrize("name", ["BertModel", "BertForMaskedLM", "BertForTokenClassification"])
def test_padding_is_exactly_zero(make, batch, name) -> None:
    model = fuse(make(name)).eval()
    output = model(**batch, output_hidden_states=True)
    padding = batch["attention_mask"] == 0
    if name != "BertForTokenClassification":  # whose classifier adds its bias to zeros
        assert not output[0][padding].any() and output[0][~padding].any()
    assert len(output.hidden_states) == 3
    assert all(not states[padding].any() for states in output.hidden_states)


@pytest.mark.parametrize("name", ["BertModel", "BertForMaskedLM", "BertForTokenClassification", "BertLMHeadModel",
                                  "BertForSequenceClassification", "BertForNextSentencePrediction"])  # fmt: skip
def test_packed_input_gives_the_bits_of_padded(make, batch, name) -> None:
    model = fuse(make(name, is_decoder=name == "BertLMHeadModel", use_cache=False)).eval()
    kept = batch["attention_mask"].bool() & (torch.arange(9) < 6)  # without the hole: positions are counted
    padded = model(batch["input_ids"], attention_mask=kept)[0]
    cu_seqlens = torch.nn.functional.pad(kept.sum(1).cumsum(0), (1, 0)).int()
    packed = model(input_ids=batch["input_ids"][kept], cu_seqlens=cu_seqlens, max_seqlen=6)[0]
    assert torch.equal(packed, padded if padded.dim() == 2 else padded[kept])


def test_packed_input_has_no_slow_path(make) -> None:
    model = fuse(make())
    with pytest.raises(ValueError, match=r"cu_seqlens: expected a call without \['output_attentions"):
        model(
            torch.ones(3, dtype=torch.long), cu_seqlens=torch.tensor([0, 3]).int(), max_seqlen=3, output_attentions=True
        )


def test_word_losses_of_packed_and_labelled_only(make, batch) -> None:
    """output_logits=False: the loss without scores of the rest; packed causal labels end with their sequence."""
    batch["attention_mask"][2] = 1  # no hole, at which the two causal losses differ
    labels = batch["input_ids"].masked_fill((batch["attention_mask"] == 0) | (torch.arange(9) % 2 == 0), -100)
    for name in ("BertForMaskedLM", "BertLMHeadModel"):
        model = fuse(make(name, is_decoder=name == "BertLMHeadModel")).train()
        whole, lean = model(**batch, labels=labels), model(**batch, labels=labels, output_logits=False)
        assert lean.logits is None
        torch.testing.assert_close(lean.loss, whole.loss)
        assert model(**batch, labels=labels, return_dict=False, output_logits=False)[0].dim() == 0


@pytest.mark.parametrize(
    "name", ["BertForSequenceClassification", "BertForMultipleChoice", "BertForNextSentencePrediction"]
)
def test_pooled_heads_compute_first_tokens_only(make, batch, name, monkeypatch) -> None:
    model = fuse(make(name)).eval()
    sizes: list[int] = []
    layer = model.bert.encoder.layer[1].output
    original = type(layer).forward_packed

    def record(self: Any, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if self is layer:
            sizes.append(len(x))
        return original(self, x, *args, **kwargs)

    monkeypatch.setattr(type(layer), "forward_packed", record)
    if name == "BertForMultipleChoice":
        batch = {key: value[None] for key, value in batch.items()}
    model(**batch)
    assert sizes == [3]
    model(**batch, output_hidden_states=True)
    assert sizes[1] > 3
    with torch.no_grad():
        model.bert.register_forward_hook(lambda *_: None)
        model(**batch)
    assert sizes[2] > 3, "somebody who looks at the BertModel sees all of it"


def test_states_are_chosen_by_number(make, batch) -> None:
    model = fuse(make())
    every = model(**batch, output_hidden_states=True).hidden_states
    some = model(**batch, output_hidden_states=[0, -1, 7]).hidden_states
    assert why_not(model, **batch, output_hidden_states=[0]) == []
    assert some[1] is None and torch.equal(some[0], every[0]) and torch.equal(some[2], every[2])
    config = copy.deepcopy(model.config)
    model.config.output_hidden_states = True
    assert len(model(**batch).hidden_states) == 3
    model.config = config


def test_the_last_logits_only(make, batch) -> None:
    model = fuse(make("BertLMHeadModel", is_decoder=True, use_cache=False))
    every = model(**batch).logits
    for keep in (2, torch.tensor([7, 8])):
        torch.testing.assert_close(model(**batch, logits_to_keep=keep).logits[:1], every[:1, -2:])
