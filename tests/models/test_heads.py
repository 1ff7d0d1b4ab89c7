"""Masked-LM training without logits: gradients of a shared table, precisions, memory, what never exists."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

import bert_fast
from bert_fast.models.masked_lm import BertLMPredictionHead
from bert_fast.reference.heads import ReferenceBertForMaskedLM, ReferenceBertForPreTraining
from bert_fast.testing.compare import assert_close_to_truth
from bert_fast.testing.memory import peak_bytes
from bert_fast.testing.tolerances import RELATIVE

SIZES = dict(
    vocab_size=203, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=40,
    max_position_embeddings=20, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
)  # fmt: skip
REFERENCES = {"BertForMaskedLM": ReferenceBertForMaskedLM, "BertForPreTraining": ReferenceBertForPreTraining}


def _models(name: str = "BertForMaskedLM", **changes: Any) -> tuple[nn.Module, nn.Module]:
    """A fast model in training and the reference with the same parameters, all of them random."""
    fast = getattr(bert_fast, name)(bert_fast.BertConfig(**{**SIZES, **changes}))
    with torch.no_grad():
        for parameter in fast.parameters():
            parameter.add_(torch.randn_like(parameter) / 5)
    reference = REFERENCES[name](fast.config)
    reference.load_state_dict(fast.state_dict())
    return fast.train(), reference.train()


def _batch(positions: bool = False) -> dict[str, Tensor]:
    ids = torch.randint(1, SIZES["vocab_size"], (3, 8))
    mask = torch.ones(3, 8)
    mask[1, 5:] = 0
    labels = torch.where((torch.rand(3, 8) < 0.4) & (mask == 1), ids, -100)
    labels[0, 0] = 7
    call = {"input_ids": ids, "attention_mask": mask, "labels": labels}
    if positions:
        rows = (labels.flatten() != -100).nonzero().squeeze(1)
        call |= {"masked_lm_positions": rows, "labels": labels.flatten()[rows]}
    return call


def _gradients(model: nn.Module, call: dict[str, Tensor], **autocast: Any) -> dict[str, Tensor]:
    with torch.autocast("cpu", **autocast) if autocast else torch.enable_grad():
        output = model(**call)
    output.loss.backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return {"loss": output.loss.detach(), **gradients}


@pytest.mark.parametrize("name", REFERENCES)
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("positions", [False, True])
def test_loss_and_gradients_are_the_references(name: str, tied: bool, positions: bool) -> None:
    """A shared table has gradients from the words looked up and from the scores of all words."""
    fast, reference = _models(name, tie_word_embeddings=tied)
    call = _batch(positions)
    if name == "BertForPreTraining":
        call["next_sentence_label"] = torch.tensor([0, 1, 1])
    exact = copy.deepcopy(reference).double()
    assert fast(**call).to_tuple()[0].grad_fn is not None
    truth, plain, actual = (_gradients(model, call) for model in (exact, reference, fast))
    assert truth.keys() == actual.keys() and ("cls.predictions.decoder.weight" in actual) != tied
    for key, value in truth.items():
        scale = max(value.abs().max().item(), 0.05)  # a key's bias shifts nothing: its gradient is rounding
        assert_close_to_truth("fast_model", "gradient", actual[key] / scale, plain[key] / scale, value / scale)


@pytest.mark.parametrize("positions", [False, True])
@pytest.mark.parametrize("mode", ["autocast", "half model"])
def test_bf16(mode: str, positions: bool) -> None:
    """fp32 gradients of fp32 parameters; a bf16 model's are bf16; both about as far from fp64 as plain torch's."""
    fast, reference = _models()
    call = _batch(positions)
    exact = _gradients(copy.deepcopy(reference).double(), call)
    if mode == "autocast":
        runs = [_gradients(model, call, dtype=torch.bfloat16) for model in (fast, reference)]
    else:
        runs = [_gradients(model.bfloat16(), call) for model in (fast, reference)]
    assert runs[0]["loss"].dtype == torch.float32
    for key in ("loss", "cls.predictions.bias", "bert.embeddings.word_embeddings.weight"):
        actual, plain = (run[key].double() for run in runs)
        assert key == "loss" or runs[0][key].dtype == (torch.float32 if mode == "autocast" else torch.bfloat16)
        error, allowed = ((t - exact[key]).norm() / exact[key].norm() for t in (actual, plain))
        assert error <= 2 * allowed + RELATIVE["bf16_stored_by_interpreter"], key


class _Widest(TorchDispatchMode):
    """Notes the most rows that any tensor of scores has: one with as many columns as there are words, not the table."""

    def __init__(self, table: Tensor) -> None:
        super().__init__()
        self.table, self.rows = table, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for t in result if isinstance(result, tuple | list) else (result,):
            if isinstance(t, Tensor) and t.dim() == 2 and t.shape[1] == len(self.table):
                is_table = t.untyped_storage().data_ptr() == self.table.untyped_storage().data_ptr()
                self.rows = max(self.rows, 0 if is_table else t.shape[0])
        return result


@pytest.mark.parametrize("positions", [False, True])
def test_scores_of_more_than_the_rows_of_a_chunk_never_exist(monkeypatch: pytest.MonkeyPatch, positions: bool) -> None:
    from bert_fast.torch import linear_cross_entropy

    model, _ = _models()
    call = _batch(positions)
    num_labelled = int((call["labels"] != -100).sum())
    assert num_labelled > 4
    for chunk_rows, most in ((1000, num_labelled), (3, 3)):
        monkeypatch.setattr(linear_cross_entropy, "_CPU_CHUNK_BYTES", chunk_rows * SIZES["vocab_size"] * 4)
        with _Widest(model.get_output_embeddings().weight) as widest:
            output = model(**call)
            output.loss.backward()
        assert output.logits is None and 0 < widest.rows <= most


def test_logits_where_they_are_asked_for_have_the_same_loss() -> None:
    model, _ = _models()
    for positions in (False, True):
        call = _batch(positions)
        without, with_logits = model(**call), model(**call, output_logits=True)
        assert without.logits is None and with_logits.logits is not None
        torch.testing.assert_close(without.loss, with_logits.loss)
        evaluated = model.eval()(**call)
        assert evaluated.logits.shape == with_logits.logits.shape
        assert model(**call, output_logits=False).logits is None
        model.train()


def test_labels_out_of_range_are_named() -> None:
    model, _ = _models()
    for positions in (False, True):
        call = _batch(positions)
        call["labels"] = call["labels"].clone().flatten().index_fill_(0, torch.tensor([0]), 203).view_as(call["labels"])
        with pytest.raises(ValueError, match=r"labels: expected -100 or a class in \[0, 203\), got 203"):
            model(**call)


def test_memory_of_the_loss_at_full_vocabulary() -> None:
    """15 % of 4,096 tokens, BERT-base: at most a tenth of what scores of all tokens take, which nobody need compute."""
    config = bert_fast.BertConfig()
    tokens, num_labelled = 4096, 614
    with torch.device("meta"):
        stock = nn.Sequential(
            nn.Linear(768, 768), nn.GELU(), nn.LayerNorm(768), nn.Linear(768, config.vocab_size)
        )  # fmt: skip
        hidden = torch.empty(tokens, 768, requires_grad=True)
        labels = torch.empty(tokens, dtype=torch.int64)

    def stock_step() -> None:
        logits = stock(hidden)  # part of what a Hugging Face model returns
        F.cross_entropy(logits, labels).backward()
        assert logits.shape == (tokens, config.vocab_size)

    head = BertLMPredictionHead(config)
    rows = torch.randn(num_labelled, 768, requires_grad=True)
    words = torch.randint(0, config.vocab_size, (num_labelled,))
    ours, theirs = peak_bytes(lambda: head(rows, words).backward()), peak_bytes(stock_step)
    assert head.decoder.weight.grad is not None
    assert ours >= head.decoder.weight.nbytes, "the gradient of the table alone"
    assert ours <= 0.1 * theirs, f"{ours / 2**20:.0f} of {theirs / 2**20:.0f} MB"
