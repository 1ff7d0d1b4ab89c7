"""Fused models against the untouched ones: every output and gradient, on the calls that our models are tested with."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

import bert_fast
from bert_fast.huggingface import fuse, why_not
from bert_fast.testing.parity import Case, evaluate, randomize
from tests.huggingface import families
from tests.parity.cases import TRANSFORMERS_5
from tests.parity.comparing import check, in_fp64

transformers = pytest.importorskip("transformers", minversion="5")

CASES = [case for case in TRANSFORMERS_5 if case.mask != "3d"]  # masks per pair are another thing in version 5
IN_BF16 = ("mask right", "masked lm", "pre-training", "sequence classes", "cross-attention", "language model")
# Of families whose code is that of another, the calls that go through their own classes.
OF_ALIKE = ("mask holes", "vectors for words", "masked lm", "sequence classes", "multiple choice", "token classes",
            "question answering", "language model")  # fmt: skip
RUNS = [
    *(("Bert", case, torch.float32) for case in CASES),
    *(("Bert", case, torch.bfloat16) for case in CASES if case.name in IN_BF16),
    *(
        (prefix, case, dtype)
        for prefix in families.CONFIG
        for dtype in (torch.float32, torch.bfloat16)
        for case in families.cases(prefix, CASES)
        if (case.name in OF_ALIKE if prefix in families.ALIKE else not case.name.startswith("act "))
        # Not the causal loss alone: one number, whose error in bf16 is luck on either side.
        and (dtype is torch.float32 or (case.name in IN_BF16[:-1] and prefix not in families.ALIKE))
    ),
]


@pytest.mark.parametrize(("prefix", "case", "dtype"), RUNS, ids=lambda value: getattr(value, "name", None))
def test_outputs_and_gradients(prefix: str, case: Case, dtype: torch.dtype) -> None:
    untouched = families.theirs(prefix, case, attn_implementation="eager")
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


@pytest.mark.parametrize("training", [False, True])
def test_a_family_drops_what_bert_drops(training: bool) -> None:
    """RoBERTa is BERT with positions of its own: with these given, outputs and gradients are the same bits."""
    case = Case("positions", inputs=("token_type_ids",), mask="holes")
    probabilities = {"hidden_dropout_prob": 0.3, "attention_probs_dropout_prob": 0.3}
    bert = families.theirs("Bert", case, **probabilities)
    theirs = families.theirs("Roberta", case, **probabilities, pad_token_id=1)
    randomize(bert)
    theirs.load_state_dict(bert.state_dict())
    call = {**case.tensors(torch.float32), "dropout_seed": torch.tensor([5])}
    call["input_ids"][:, 3] = 1  # which is padding by its id, and none by the mask
    counted = (call["input_ids"] != 1).long()
    results = []
    for model, positions in ((bert, {"position_ids": counted.cumsum(1) * counted + 1}), (theirs, {})):
        output = fuse(model).train(training)(**call, **positions)
        (output.last_hidden_state.sin().sum() + output.pooler_output.cos().sum()).backward()
        gradients = {name: p.grad for name, p in model.named_parameters()}
        table = gradients["embeddings.position_embeddings.weight"]
        assert (table[1] == 0).all() == (model is theirs), "no gradient where padding's position is"
        gradients["embeddings.word_embeddings.weight"][:2] = table[1] = 0.0  # rows of padding's ids
        results.append({**output, **gradients})
    for name, value in results[0].items():
        assert torch.equal(value, results[1][name]), name


# Names of BERT -> those of a family whose modules are others.
_RENAMED = {
    "DistilBert": {
        ".attention.self.query.": ".attention.q_lin.", ".attention.self.key.": ".attention.k_lin.",
        ".attention.self.value.": ".attention.v_lin.", ".attention.output.dense.": ".attention.out_lin.",
        ".attention.output.LayerNorm.": ".sa_layer_norm.", ".intermediate.dense.": ".ffn.lin1.",
        ".output.dense.": ".ffn.lin2.", ".output.LayerNorm.": ".output_layer_norm.", "encoder.": "transformer.",
    },
    "MPNet": {
        ".attention.self.query.": ".attention.attn.q.", ".attention.self.key.": ".attention.attn.k.",
        ".attention.self.value.": ".attention.attn.v.", ".attention.output.dense.": ".attention.attn.o.",
        ".attention.output.LayerNorm.": ".attention.LayerNorm.",
    },
}  # fmt: skip


@pytest.mark.parametrize("prefix", _RENAMED)
def test_other_modules_drop_what_bert_drops(prefix: str) -> None:
    """DistilBERT and MPNet are BERT without types, the one without dropout behind attention, the other without bias."""
    case = Case("other modules", mask="holes")
    bert, theirs = (
        families.theirs(name, case, hidden_dropout_prob=0.3, attention_probs_dropout_prob=0.2).double()
        for name in ("Bert", prefix)
    )
    randomize(bert)
    torch.nn.init.zeros_(bert.embeddings.token_type_embeddings.weight)
    for layer in bert.encoder.layer if prefix == "DistilBert" else ():
        layer.attention.output.dropout.p = 0.0

    def renamed(name: str) -> str:
        for ours, other in _RENAMED[prefix].items():
            name = name.replace(ours, other)
        return name

    state = {renamed(name): value for name, value in bert.state_dict().items()}
    state["encoder.relative_attention_bias.weight"] = torch.zeros(32, 3)
    theirs.load_state_dict({name: state[name] for name in theirs.state_dict()})
    call = {**case.tensors(torch.float64), "dropout_seed": torch.tensor([5])}
    call["input_ids"].clamp_(min=2)  # no padding's ids, of which families think otherwise
    if prefix == "MPNet":
        call["position_ids"] = torch.arange(2, 2 + case.length)
    results = []
    for model in (bert, theirs):
        hidden = fuse(model).train()(**call).last_hidden_state
        hidden.sin().sum().backward()
        gradients = {renamed(name): p.grad for name, p in model.named_parameters() if p.grad is not None}
        results.append({**gradients, "hidden": hidden})
    assert results[0]["hidden"].any() and len(results[1]) > 30
    for name, value in results[1].items():
        if name in results[0]:
            torch.testing.assert_close(value, results[0][name], msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.parametrize("name", ["BertModel", "BertForMaskedLM", "BertForTokenClassification", "RobertaModel",
                                  "RobertaForMaskedLM", "RobertaForTokenClassification"])  # fmt: skip
def test_padding_is_exactly_zero(make, batch, name) -> None:
    model = fuse(make(name)).eval()
    output = model(**batch, output_hidden_states=True)
    padding = batch["attention_mask"] == 0
    if not name.endswith("ForTokenClassification"):  # whose classifier adds its bias to zeros
        assert not output[0][padding].any() and output[0][~padding].any()
    assert len(output.hidden_states) == 3
    assert all(not states[padding].any() for states in output.hidden_states)


@pytest.mark.parametrize("name", ["BertModel", "BertForMaskedLM", "BertForTokenClassification", "BertLMHeadModel",
                                  "BertForSequenceClassification", "BertForNextSentencePrediction", "RobertaModel",
                                  "RobertaForMaskedLM", "RobertaForSequenceClassification",
                                  "RobertaForTokenClassification", "XLMRobertaForCausalLM", "ElectraForMaskedLM",
                                  "ElectraForPreTraining", "DistilBertModel", "DistilBertForMaskedLM", "MPNetModel",
                                  "MPNetForMaskedLM", "MPNetForTokenClassification"])  # fmt: skip
def test_packed_input_gives_the_bits_of_padded(make, batch, name) -> None:
    model = fuse(make(name, is_decoder="LM" in name and "Masked" not in name, use_cache=False)).eval()
    batch["input_ids"][:, 3] = 1  # RoBERTa's padding, within the text
    kept = batch["attention_mask"].bool() & (torch.arange(9) < 6)  # without the hole: positions are counted
    padded = model(batch["input_ids"], attention_mask=kept)[0]
    cu_seqlens = torch.nn.functional.pad(kept.sum(1).cumsum(0), (1, 0)).int()
    packed = model(input_ids=batch["input_ids"][kept], cu_seqlens=cu_seqlens, max_seqlen=6)[0]
    assert torch.equal(packed, padded[kept] if padded.shape[:2] == kept.shape else padded)


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
    "name", ["BertForSequenceClassification", "BertForMultipleChoice", "BertForNextSentencePrediction",
             "RobertaForSequenceClassification", "RobertaForMultipleChoice", "ElectraForMultipleChoice",
             "MPNetForSequenceClassification", "MPNetForMultipleChoice"]
)  # fmt: skip
def test_pooled_heads_compute_first_tokens_only(make, batch, name, monkeypatch) -> None:
    model = fuse(make(name)).eval()
    sizes: list[int] = []
    layer = model.base_model.encoder.layer[1].output
    original = type(layer).forward_packed

    def record(self: Any, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if self is layer:
            sizes.append(len(x))
        return original(self, x, *args, **kwargs)

    monkeypatch.setattr(type(layer), "forward_packed", record)
    if name.startswith("MPNet"):
        del batch["token_type_ids"]
    if name.endswith("ForMultipleChoice"):
        batch = {key: value[None] for key, value in batch.items()}
    model(**batch)
    assert sizes == [3]
    model(**batch, output_hidden_states=True)
    assert sizes[1] > 3
    with torch.no_grad():
        model.base_model.register_forward_hook(lambda *_: None)
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
        torch.testing.assert_close(model(**batch, logits_to_keep=keep).logits, every[:, -2:])
    assert not every[1, -2:].any() and every[2, -2:].any(), "of padding, and of tokens"


@torch.no_grad()
def test_the_last_logits_beside_a_cache(make, batch) -> None:
    model = fuse(make("BertLMHeadModel", is_decoder=True))
    whole = {name: value for name, value in batch.items() if name != "token_type_ids"}
    every = model(**whole, use_cache=False).logits
    first = model(whole["input_ids"][:, :6], attention_mask=whole["attention_mask"][:, :6], use_cache=True)
    rest = {"input_ids": whole["input_ids"][:, 6:], "attention_mask": whole["attention_mask"]}
    for keep in (0, 1):
        cache = copy.deepcopy(first.past_key_values)
        scores = model(**rest, past_key_values=cache, logits_to_keep=keep).logits
        torch.testing.assert_close(scores, every[:, 6:] if keep == 0 else every[:, -1:])
