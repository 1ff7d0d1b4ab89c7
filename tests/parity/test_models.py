"""The fast models against the reference (training with dropout, padded and packed) and against Hugging Face."""

import pytest
import torch
from torch import Tensor

import bert_fast
from bert_fast import models
from bert_fast.reference import heads
from bert_fast.reference import model as reference_model
from bert_fast.testing.compare import assert_close_to_truth
from bert_fast.testing.parity import Case, evaluate, randomize
from bert_fast.testing.tolerances import RELATIVE

NAMES = ("BertModel", "BertForMaskedLM", "BertForPreTraining", "BertForSequenceClassification")
LABELS = {
    "BertModel": (),
    "BertForMaskedLM": ("words",),
    "BertForPreTraining": ("words", "next_sentence_label"),
    "BertForSequenceClassification": ("class",),
}
STATES = {"output_hidden_states": True}

CASES = [
    *(Case(f"{name} {mask}", model=name, mask=mask, labels=LABELS[name]) for name in NAMES
      for mask in ("none", "right", "left", "holes")),
    Case("states", mask="right", flags=STATES, inputs=("token_type_ids", "position_ids")),
    Case("vectors for words", inputs=("inputs_embeds", "token_type_ids"), mask="holes"),
    Case("one token", length=1, mask="none"),
    Case("odd sizes", config={"hidden_size": 40, "num_attention_heads": 5, "intermediate_size": 33}, length=17),
    *(Case(f"act {act}", model="BertForMaskedLM", config={"hidden_act": act}, labels=("words",))
      for act in ("gelu_new", "gelu_pytorch_tanh", "relu", "silu", "swish", "tanh")),
    Case("untied", model="BertForMaskedLM", config={"tie_word_embeddings": False}, labels=("words",)),
    Case("regression", model="BertForSequenceClassification", config={"num_labels": 1}, labels=("number",)),
    Case("multi-label", model="BertForSequenceClassification",
         config={"num_labels": 4, "problem_type": "multi_label_classification"}, labels=("classes",)),
    Case("slow: attentions", flags={"output_attentions": True, **STATES}),
    Case("slow: head mask", inputs=("head_mask",)),
    Case("slow: mask 3d", mask="3d"),
    Case("slow: mask 4d", model="BertForMaskedLM", mask="4d", labels=("words",)),
]  # fmt: skip


def _pair(case: Case, dtype: torch.dtype, dropout_p: float = 0.0):
    probabilities = {"hidden_dropout_prob": dropout_p, "attention_probs_dropout_prob": dropout_p}
    config = bert_fast.BertConfig(**case.full_config(), **probabilities)
    fast = getattr(models, case.model)(config)
    name = f"Reference{case.model}"
    reference = getattr(heads if hasattr(heads, name) else reference_model, name)(config)
    randomize(reference)
    fast.load_state_dict(reference.state_dict())
    return fast.to(dtype).eval(), reference.to(dtype).eval()


def _compare(fast: dict[str, Tensor], plain: dict[str, Tensor], truth: dict[str, Tensor]) -> None:
    assert fast.keys() == truth.keys()
    for name, value in truth.items():
        scale = max(1.0, value.abs().max().item())
        kind = "gradient" if name.startswith("grad ") else "output"
        assert_close_to_truth("fast_model", kind, fast[name] / scale, plain[name] / scale, value / scale)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_outputs_and_gradients_of_evaluation(case: Case):
    tensors = case.tensors(torch.float32)
    fast, plain = (evaluate(model, case, tensors) for model in _pair(case, torch.float32))
    exact_fast, truth = (evaluate(model, case, case.tensors(torch.float64)) for model in _pair(case, torch.float64))
    _compare(fast, plain, truth)
    for name, value in truth.items():
        error = (exact_fast[name] - value).abs().max().item()
        assert error <= RELATIVE["vs_transformers_fp64"] * max(1.0, value.abs().max().item()), name


@pytest.mark.parametrize("case", [c for c in CASES if not c.flags.get("output_attentions")], ids=lambda case: case.name)
def test_training_with_dropout_draws_the_same_masks(case: Case):
    results = {}
    seed = torch.tensor([2**40 + 17])
    for dtype in (torch.float32, torch.float64):
        flags = {**case.flags, "dropout_seed": seed}
        if "words" in case.labels:
            flags["output_logits"] = True
        for side, model in zip(("fast", "reference"), _pair(case, dtype, 0.2), strict=True):
            call = {k: v for k, v in flags.items() if side == "fast" or k != "output_logits"}
            run = Case(**{**vars(case), "flags": call})
            results[side, dtype] = evaluate(model.train(), run, case.tensors(dtype))
    _compare(results["fast", torch.float32], results["reference", torch.float32], results["reference", torch.float64])


@pytest.mark.parametrize("name", NAMES)
def test_against_transformers(name: str):
    transformers = pytest.importorskip("transformers", minversion="5")
    case = Case(f"hf {name}", model=name, labels=LABELS[name], inputs=("token_type_ids",), flags=STATES)
    theirs = getattr(transformers, name)(transformers.BertConfig(**case.full_config(), attn_implementation="eager"))
    randomize(theirs)
    results = {}
    for dtype in (torch.float32, torch.float64):
        fast, _ = _pair(case, dtype)
        fast.load_state_dict({key: value.to(dtype) for key, value in theirs.state_dict().items()})
        results["fast", dtype] = evaluate(fast, case, case.tensors(dtype))
        results["theirs", dtype] = evaluate(theirs.to(dtype).eval(), case, case.tensors(dtype))
    _compare(results["fast", torch.float32], results["theirs", torch.float32], results["theirs", torch.float64])


def _packed(case: Case) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The case's padded call, and the same call packed."""
    tensors = case.tensors(torch.float32)
    keep = case.valid()
    cu_seqlens = torch.nn.functional.pad(keep.sum(1).cumsum(0), (1, 0)).int()
    packed = {k: v[keep] for k, v in tensors.items() if v.shape[:2] == keep.shape and k != "attention_mask"}
    rest = {k: v for k, v in tensors.items() if k not in packed and k != "attention_mask"}
    return tensors, packed | rest | {"cu_seqlens": cu_seqlens, "max_seqlen": int(keep.sum(1).max())}


@pytest.mark.parametrize("name", NAMES)
def test_packed_equals_padded_bit_for_bit(name: str):
    case = Case(f"packed {name}", model=name, mask="right", labels=LABELS[name], inputs=("token_type_ids",))
    model, _ = _pair(case, torch.float32, 0.1)
    model.train()
    results = []
    for call in _packed(case):
        model.zero_grad()
        output = model(**call, dropout_seed=torch.tensor([5]))
        scores = output["loss"] if LABELS[name] else output["pooler_output"].square().sum()
        scores.backward()
        results.append([scores.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)])
    assert len(results[0]) == len(results[1])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@pytest.mark.parametrize("packed", [False, True], ids=["padded", "packed"])
def test_training_curves_stay_together(packed: bool):
    """50 steps of AdamW from one seed with dropout 0.1, fast beside reference."""
    case = Case("curve", model="BertForMaskedLM", labels=("words",), batch_size=6, length=23,
                config={"hidden_size": 48, "num_attention_heads": 4, "intermediate_size": 96})  # fmt: skip
    fast, reference = _pair(case, torch.float32, 0.1)
    fast.init_weights()
    reference.load_state_dict(fast.state_dict())
    losses: dict[str, list[float]] = {}
    for name, model in (("fast", fast), ("reference", reference)):
        model.train()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        generator = torch.Generator().manual_seed(3)
        losses[name] = []
        padded_call, packed_call = _packed(case)
        call = packed_call if packed and name == "fast" else padded_call
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
