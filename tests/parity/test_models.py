"""Training with dropout: the models against the reference from one seed, and packed input against padded."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from bert_fast.testing.parity import Case, evaluate, packed_call, randomize
from bert_fast.testing.tolerances import RELATIVE

from .cases import TRANSFORMERS_4, TRANSFORMERS_5
from .comparing import check, every_run, in_fp64, our_model

SEED = {"dropout_seed": torch.tensor([2**40 + 17])}
# How each model is trained; question answering without padding, on which random answers would lie.
TRAINED = [
    Case("BertModel"),
    Case("BertForPreTraining", labels=("words", "next_sentence_label")),
    Case("BertForMaskedLM", labels=("words",)),
    Case("BertLMHeadModel", config={"is_decoder": True}, labels=("words",)),
    Case("BertForNextSentencePrediction", labels=("class",)),
    Case("BertForSequenceClassification", labels=("class",)),
    Case("BertForMultipleChoice", labels=("class",)),
    Case("BertForTokenClassification", labels=("tokens",)),
    Case("BertForQuestionAnswering", mask="none", labels=("start_positions", "end_positions")),
]
TRAINED = [replace(case, model=case.name, inputs=("token_type_ids",)) for case in TRAINED]


def _training_models(case: Case, dropout_p: float) -> tuple[nn.Module, nn.Module]:
    """Ours and the reference with the same parameters."""
    rates = {"hidden_dropout_prob": dropout_p, "attention_probs_dropout_prob": dropout_p}
    case = replace(case, config={**rates, **case.config})
    reference = our_model(case, "reference")
    randomize(reference)
    fast = our_model(case, "padded")
    fast.load_state_dict(reference.state_dict())
    return fast.train(), reference.train()


@every_run([*TRANSFORMERS_5, *TRANSFORMERS_4], ("padded", "packed"), (torch.float32,))
def test_dropout_draws_what_the_reference_draws(case: Case, form: str, dtype: torch.dtype) -> None:
    fast, reference = _training_models(case, 0.2)
    seeded = replace(case, flags={k: v for k, v in case.flags.items() if k != "legacy_cache"} | SEED)
    tensors = case.tensors(dtype)
    plain = evaluate(reference, seeded, tensors)
    truth = evaluate(reference.double(), seeded, in_fp64(tensors))
    logits = {"output_logits": True} if {"words"} & set(case.labels) else {}
    check(replace(seeded, flags=seeded.flags | logits), form, dtype, fast, plain, truth)


@pytest.mark.parametrize("case", TRAINED, ids=lambda case: case.name)
def test_packed_equals_padded_bit_for_bit(case: Case) -> None:
    model, _ = _training_models(case, 0.1)
    tensors = case.tensors(torch.float32)
    results: list[list[Tensor]] = []
    for call in (tensors, packed_call(case, tensors)):
        model.zero_grad()
        output = model(**call, **SEED)
        loss = output["loss"] if case.labels else output["pooler_output"].square().sum()
        loss.backward()
        results.append([loss.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)])
    assert len(results[0]) == len(results[1]) > 10
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@pytest.mark.parametrize("packed", [False, True], ids=["padded", "packed"])
def test_training_curves_stay_together(packed: bool):
    """50 steps of AdamW from one seed with dropout 0.1, fast beside reference."""
    case = Case("curve", model="BertForMaskedLM", labels=("words",), batch_size=6, length=23,
                config={"hidden_size": 48, "num_attention_heads": 4, "intermediate_size": 96})  # fmt: skip
    fast, reference = _training_models(case, 0.1)
    fast.init_weights()
    reference.load_state_dict(fast.state_dict())
    losses: dict[str, list[float]] = {}
    for name, model in (("fast", fast), ("reference", reference)):
        model.train()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        generator = torch.Generator().manual_seed(3)
        losses[name] = []
        tensors = case.tensors(torch.float32)
        call = packed_call(case, tensors) if packed and name == "fast" else tensors
        for _ in range(50):
            seed = torch.randint(-(2**63), 2**63 - 1, (1,), generator=generator)
            loss = model(**call, dropout_seed=seed).loss
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses[name].append(loss.item())
    assert losses["fast"][-1] < 0.7 * losses["fast"][0], "nothing was learnt: the comparison would be empty"
    distance = max(abs(a - b) / abs(b) for a, b in zip(losses["fast"], losses["reference"], strict=True))
    assert distance <= RELATIVE["training_loss_50_steps"], f"largest relative distance {distance:.2e}"
