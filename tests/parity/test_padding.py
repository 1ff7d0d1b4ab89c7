"""Padding has no part in what a head learns or says: every head, our classes and fused ones, beside transformers' own.

Where transformers lets padding into a result, what is compared is its result with padding left out: the softmax over
positions, in which it counts the scores that it computes for padding, and labels that stand there.
"""

import copy
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import bert_fast
from bert_fast.huggingface import fuse
from bert_fast.testing.parity import randomize
from bert_fast.testing.tolerances import RELATIVE

transformers = pytest.importorskip("transformers", minversion="5")

SIZES = dict(
    vocab_size=61, hidden_size=36, num_hidden_layers=2, num_attention_heads=3, intermediate_size=50,
    max_position_embeddings=24, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, use_cache=False,
)  # fmt: skip
BATCH, LENGTH, MORE, CHOICES = 4, 11, 5, 3
KEPT = torch.arange(LENGTH) < torch.tensor([11, 6, 2, 9])[:, None]
STARTS, ENDS = torch.tensor([3, 0, 30, 4]), torch.tensor([8, 5, 30, 4])  # the third answer is in another window
CLASSES = torch.tensor([2, 0, 1, 1])
HEADS: dict[str, tuple[str, dict[str, Any], dict[str, Tensor]]] = {  # class, configuration, labels of sequences
    "masked words": ("BertForMaskedLM", {}, {}),
    "words and next sentence": ("BertForPreTraining", {}, {"next_sentence_label": CLASSES % 2}),
    "next words": ("BertLMHeadModel", {"is_decoder": True}, {}),
    "next sentence": ("BertForNextSentencePrediction", {}, {"labels": CLASSES % 2}),
    "classes": ("BertForSequenceClassification", {"num_labels": 3}, {"labels": CLASSES}),
    "several classes": ("BertForSequenceClassification", {"num_labels": 3}, {"labels": torch.eye(4, 3).double()}),
    "number": ("BertForSequenceClassification", {"num_labels": 1}, {"labels": CLASSES.double()}),
    "choices": ("BertForMultipleChoice", {}, {"labels": CLASSES}),
    "token classes": ("BertForTokenClassification", {"num_labels": 3}, {}),
    "answers": ("BertForQuestionAnswering", {}, {"start_positions": STARTS, "end_positions": ENDS}),
}
FAMILIES = ("ours", "fused")


def _untouched(head: str) -> Any:
    name, config, _ = HEADS[head]
    model = getattr(transformers, name)(transformers.BertConfig(**SIZES, **config)).double().train()
    randomize(model)
    return model


def _model(head: str, family: str) -> Any:
    untouched = _untouched(head)
    if family == "fused":
        return fuse(untouched)
    name, config, _ = HEADS[head]
    ours = getattr(bert_fast, name)(bert_fast.BertConfig(**SIZES, **config)).double().train()
    ours.load_state_dict(untouched.state_dict())
    return ours


def _batch(head: str, labels_on_padding: bool = False) -> dict[str, Tensor]:
    """Padded on the right, with words where padding is; half of the tokens are labelled where tokens are."""
    generator = torch.Generator().manual_seed(3)
    ids = torch.randint(1, 61, (BATCH, LENGTH), generator=generator)
    words = torch.randint(0, 3, (BATCH, LENGTH), generator=generator)
    words[:, ::2] = -100
    batch = {"input_ids": ids, "attention_mask": KEPT.long(), **HEADS[head][2]}
    if "labels" not in batch and head != "answers":
        batch["labels"] = words if labels_on_padding else words.masked_fill(~KEPT, -100)
    if head == "choices":
        batch["input_ids"] = torch.stack([ids + choice for choice in range(CHOICES)], dim=1) % 60
        batch["attention_mask"] = KEPT[:, None].expand(BATCH, CHOICES, LENGTH).long()
    return batch


def _with_more_padding(batch: dict[str, Tensor]) -> dict[str, Tensor]:
    values = {"input_ids": 7, "attention_mask": 0, "labels": 1}
    return {
        name: F.pad(value, (0, MORE), value=values[name]) if value.shape[-1] == LENGTH else value
        for name, value in batch.items()
    }


def _scores(output: Any) -> dict[str, Tensor]:
    return {name: value for name, value in output.items() if "logits" in name}


def _loss(output: Any, batch: dict[str, Tensor]) -> Tensor:
    """transformers' own loss, of answers with padding left out of the softmax."""
    if "start_logits" not in output:
        return output.loss
    losses = []
    for name in ("start", "end"):
        scores = output[f"{name}_logits"].masked_fill(batch["attention_mask"] == 0, -torch.inf)
        losses.append(F.cross_entropy(scores, batch[f"{name}_positions"].clamp(max=LENGTH), ignore_index=LENGTH))
    return (losses[0] + losses[1]) / 2


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("head", HEADS)
def test_training_beside_transformers(head: str, family: str) -> None:
    """Five steps from the same weights: the same losses, and the same weights at the end."""
    batch, models = _batch(head), (_model(head, family), _untouched(head))
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.02) for model in models]
    bound = RELATIVE["vs_transformers_causal_loss" if head == "next words" else "vs_transformers_fp64"]
    for _ in range(5):
        losses = models[0](**batch).loss, _loss(models[1](**batch), batch)
        assert abs(losses[0].item() - losses[1].item()) <= bound * losses[1].item()
        for loss, optimizer in zip(losses, optimizers, strict=True):
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    theirs = dict(models[1].named_parameters())
    for name, parameter in models[0].named_parameters():
        scale = max(1.0, theirs[name].abs().max().item())
        assert (parameter - theirs[name]).abs().max() <= bound * scale, name


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("head", HEADS)
def test_more_padding_changes_nothing(head: str, family: str) -> None:
    """Neither loss nor gradients nor scores of tokens, whatever labels stand there."""
    batch, results = _batch(head, labels_on_padding=True), []
    for call in (batch, _with_more_padding(batch)):
        model = _model(head, family)
        output = model(
            **call, **({"output_logits": True} if hasattr(getattr(model, "cls", None), "predictions") else {})
        )
        output.loss.backward()
        scores = {
            name: value[:, :LENGTH] if value.shape[1:2] == call["input_ids"].shape[1:] else value
            for name, value in _scores(output).items()
        }
        results.append([output.loss, *scores.values(), *(p.grad for p in model.parameters() if p.grad is not None)])
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("path", ["packed", "theirs"])
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("head", ["masked words", "next words", "token classes", "answers"])
def test_scores_of_padding(head: str, family: str, path: str) -> None:
    """0, and where tokens compete the most negative number: on transformers' own path too."""
    model, batch = _model(head, family).eval(), _batch(head)
    output = model(**batch, output_attentions=path == "theirs")
    for value in _scores(output).values():
        padding = value[~KEPT]
        if head == "answers":
            assert (padding == torch.finfo(value.dtype).min).all() and not value.softmax(1)[~KEPT].any()
            assert value.argmax(1).lt(KEPT.sum(1)).all()
        else:
            assert not padding.any()
        assert value[KEPT].abs().gt(0).all()


@pytest.mark.parametrize("family", FAMILIES)
def test_a_loss_is_the_same_on_either_path(family: str) -> None:
    for head in ("masked words", "next words", "token classes", "answers"):
        model, batch = _model(head, family), _batch(head, labels_on_padding=True)
        model.config.attn_implementation = model.config._attn_implementation = "eager"
        losses = [model(**batch, output_attentions=shown).loss for shown in (False, True)]
        torch.testing.assert_close(*losses, msg=lambda text, head=head: f"{head}: {text}")


@pytest.mark.parametrize("family", FAMILIES)
def test_positions_on_padding_count_for_nothing(family: str) -> None:
    """As those outside of the window; the second text has no token there, the third none at all."""
    batch = _batch("answers")
    batch["attention_mask"][2] = 0
    losses = []
    for second, third in ((8, 0), (30, 30)):
        model = _model("answers", family)
        batch["start_positions"], batch["end_positions"] = (torch.tensor([3, second, third, 4]) for _ in range(2))
        losses.append(model(**batch).loss)
    assert torch.equal(*losses) and losses[0] < 100
    nowhere = {**batch, "start_positions": torch.full((BATCH,), 30), "end_positions": torch.full((BATCH,), 30)}
    assert model(**nowhere).loss == 0
    with pytest.raises(ValueError, match=r"start_positions: expected shape \[4\], got \[3\]"):
        model(**{**batch, "start_positions": STARTS[:3]})


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=["fp32", "bf16", "fp16"])
def test_scores_of_padding_do_no_harm(family: str, dtype: torch.dtype) -> None:
    """They are numbers: best spans, probabilities and distances between two models come out finite."""
    model, batch = _model("answers", family).to(dtype).eval(), _batch("answers")
    with torch.no_grad():
        output = model(**batch)
    assert output.loss.isfinite()
    for value in _scores(output).values():
        assert value.dtype == dtype and value.isfinite().all()
        log_probabilities = value.float().log_softmax(1)
        assert F.kl_div(log_probabilities, log_probabilities.exp(), reduction="batchmean").abs() < 1e-5
        ranked = np.argsort(value.float().numpy(), axis=1)[:, ::-1]  # as the examples of transformers rank them
        assert all(set(row[:n]) == set(range(n)) for row, n in zip(ranked, KEPT.sum(1).tolist(), strict=True))


@pytest.mark.parametrize("name", ["BertForTokenClassification", "BertForQuestionAnswering"])
def test_hooks_on_the_bert_inside(name: str) -> None:
    """The head is transformers' own then, around a BertModel whose padding is 0."""
    head = {"BertForTokenClassification": "token classes", "BertForQuestionAnswering": "answers"}[name]
    model, batch = _model(head, "fused"), _batch(head, labels_on_padding=True)
    watched, seen = copy.deepcopy(model), []
    watched.bert.register_forward_hook(lambda module, args, output: seen.append(output.last_hidden_state.shape))
    torch.testing.assert_close(dict(watched(**batch)), dict(model(**batch)))
    assert seen == [(BATCH, LENGTH, 36)]


def test_packed_answers_of_fused_models() -> None:
    model, batch = _model("answers", "fused"), _batch("answers")
    lengths = KEPT.sum(1)
    packed = {
        "input_ids": batch["input_ids"][KEPT], "cu_seqlens": F.pad(lengths.cumsum(0), (1, 0)).int(),
        "max_seqlen": LENGTH, **HEADS["answers"][2],
    }  # fmt: skip
    expected, output = model(**batch), model(**packed)
    assert torch.equal(output.loss, expected.loss)
    assert torch.equal(output.start_logits, expected.start_logits[KEPT])
    assert isinstance(model(**packed, return_dict=False), tuple)


def test_transformers_counts_padding_among_answers() -> None:
    """Why its loss is not what fused models are compared with."""
    batch = _batch("answers")
    output = _untouched("answers")(**batch)
    assert abs(output.loss - _loss(output, batch)) > 1e-3
