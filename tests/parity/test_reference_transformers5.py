"""The reference against Hugging Face transformers 5: every output and every gradient, fp64 and fp32."""

import copy

import pytest
import torch
from torch import Tensor

from bert_fast.reference import heads, model
from bert_fast.testing.compare import assert_close_to_truth
from bert_fast.testing.parity import Case, evaluate, randomize
from bert_fast.testing.tolerances import RELATIVE

transformers = pytest.importorskip("transformers", minversion="5")

EVERYTHING = {"output_attentions": True, "output_hidden_states": True}
DECODER = {"is_decoder": True}
CROSS = {"is_decoder": True, "add_cross_attention": True}
MEMORY = ("encoder_hidden_states", "encoder_attention_mask")
REGRESSION = {"num_labels": 1}
SEVERAL = {"num_labels": 4, "problem_type": "multi_label_classification"}

CASES = [
    *(Case(f"mask {mask}", mask=mask, flags=EVERYTHING) for mask in ("none", "full", "right", "left", "holes", "4d")),
    Case("mask 3d", mask="3d", flags=EVERYTHING),
    Case("one token", length=1, mask="none"),
    Case("one head", config={"hidden_size": 32, "num_attention_heads": 1}, length=40, batch_size=2),
    Case("five heads", config={"hidden_size": 40, "num_attention_heads": 5}, length=7),
    Case("wide heads", config={"hidden_size": 64, "num_attention_heads": 2, "num_hidden_layers": 3}, length=17),
    Case("types and positions", inputs=("token_type_ids", "position_ids")),
    Case("vectors for words", inputs=("inputs_embeds", "token_type_ids"), mask="left"),
    Case("no padding id", config={"pad_token_id": None}, mask="none"),
    *(
        Case(f"act {act}", model="BertForMaskedLM", config={"hidden_act": act}, labels=("words",))
        for act in ("gelu", "gelu_new", "gelu_pytorch_tanh", "relu", "silu", "swish", "tanh")
    ),
    Case("masked lm", model="BertForMaskedLM", labels=("words",), flags=EVERYTHING),
    Case("masked lm, no labels", model="BertForMaskedLM", mask="left"),
    Case("masked lm, untied", model="BertForMaskedLM", config={"tie_word_embeddings": False}, labels=("words",)),
    Case("pre-training", model="BertForPreTraining", labels=("words", "next_sentence_label")),
    Case("pre-training, no labels", model="BertForPreTraining"),
    Case("next sentence", model="BertForNextSentencePrediction", labels=("class",)),
    Case("sequence classes", model="BertForSequenceClassification", config={"num_labels": 5}, labels=("class",)),
    Case("sequence number", model="BertForSequenceClassification", config=REGRESSION, labels=("number",)),
    Case("sequence multi-label", model="BertForSequenceClassification", config=SEVERAL, labels=("classes",)),
    Case("multiple choice", model="BertForMultipleChoice", inputs=("token_type_ids",), labels=("class",)),
    Case("token classes", model="BertForTokenClassification", config={"num_labels": 4}, labels=("tokens",)),
    Case("question answering", model="BertForQuestionAnswering", mask="none",
         labels=("start_positions", "end_positions")),
    Case("question answering, no labels", model="BertForQuestionAnswering"),
    Case("decoder", config=DECODER, flags=EVERYTHING),
    Case("decoder, left", config=DECODER, mask="left"),
    Case("decoder, cache", config=DECODER, first_step=4),
    Case("decoder, cache, one step, left", config=DECODER, first_step=10, mask="left"),
    Case("decoder, cache, no mask", config=DECODER, first_step=6, mask="none", inputs=("inputs_embeds",)),
    Case("cross-attention", config=CROSS, inputs=MEMORY, flags=EVERYTHING),
    Case("cross-attention, no mask", config=CROSS, inputs=("encoder_hidden_states",), memory_length=3),
    Case("cross-attention, cache", config=CROSS, inputs=MEMORY, first_step=5),
    Case("language model", model="BertLMHeadModel", config=DECODER, labels=("words",)),
    Case("language model, memory", model="BertLMHeadModel", config=CROSS, inputs=MEMORY, labels=("words",)),
    Case("language model, no labels, cache", model="BertLMHeadModel", config=DECODER, first_step=9),
]  # fmt: skip


def _models(case: Case, dtype: torch.dtype):
    config = transformers.BertConfig(**case.full_config(), attn_implementation="eager")
    theirs = getattr(transformers, case.model)(config)
    randomize(theirs)
    name = f"Reference{case.model}"
    ours = getattr(heads if hasattr(heads, name) else model, name)(copy.deepcopy(config))
    assert ours.state_dict().keys() == theirs.state_dict().keys()
    ours.load_state_dict(theirs.state_dict())
    return ours.to(dtype).eval(), theirs.to(dtype).eval()


def _for_transformers(case: Case, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """A mask per pair as the 4-D one that version 5 wants in its place."""
    if case.mask != "3d":
        return tensors
    mask = tensors["attention_mask"]
    added = torch.zeros(mask.shape).masked_fill(mask == 0, torch.finfo(torch.float32).min)
    return {**tensors, "attention_mask": added[:, None]}


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_outputs_and_gradients(case: Case) -> None:
    results = {}
    for dtype in (torch.float64, torch.float32):
        ours, theirs = _models(case, dtype)
        tensors = case.tensors(dtype)
        results[dtype] = evaluate(ours, case, tensors), evaluate(theirs, case, _for_transformers(case, tensors))
    truth, wanted = results[torch.float64]
    # Where the decoder is not tied, version 5 keeps a second, unused bias.
    unused = {"grad cls.predictions.bias"} if case.config.get("tie_word_embeddings") is False else set()
    assert truth.keys() - unused == wanted.keys()
    assert any(name.startswith("grad ") for name in wanted)
    bound = RELATIVE["reference_vs_transformers_fp64"]
    if case.model == "BertLMHeadModel" and "labels" in case.tensors(torch.float64):
        bound = RELATIVE["reference_vs_transformers_causal_loss"]
    for name in wanted:
        value = truth[name]
        scale = max(1.0, value.abs().max().item())
        error = (value - wanted[name]).abs().max().item()
        assert error <= bound * scale, f"{name}: differs by {error:.2e} at scale {scale:.2e}"
        ours32, theirs32 = (result[name] / scale for result in results[torch.float32])
        kind = "gradient" if name.startswith("grad ") else "output"
        assert_close_to_truth("reference_model", kind, ours32, theirs32, value / scale)
