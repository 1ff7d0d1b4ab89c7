"""Training with dropout on: the reference against transformers 5 whose dropout layers are given our masks.

So every site is checked: where it stands, which number it has, and which rows, positions and columns it asks for.
"""

import copy

import pytest
import torch
from torch import Tensor, nn

from bert_fast.reference import heads, model
from bert_fast.reference.dropout import DropoutSite, attention_keep_mask, dropout_scale, dropout_site, keep_mask
from bert_fast.testing.parity import Case, evaluate, randomize
from bert_fast.testing.tolerances import RELATIVE

transformers = pytest.importorskip("transformers", minversion="5")
from transformers.models.bert import modeling_bert  # noqa: E402

SEED = torch.tensor([-(2**62) - 12345], dtype=torch.int64)
RATES = {"hidden_dropout_prob": 0.25, "attention_probs_dropout_prob": 0.3, "classifier_dropout": 0.5}
CROSS = {**RATES, "is_decoder": True, "add_cross_attention": True}
MEMORY = ("encoder_hidden_states", "encoder_attention_mask")
CASES = [
    Case("model", config=RATES, flags={"output_attentions": True, "output_hidden_states": True}),
    Case("model, left", config=RATES, mask="left"),
    Case("model, holes", config=RATES, mask="holes"),
    Case("model, one rate", config={"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.9}, mask="none"),
    Case("positions are columns", config=RATES, inputs=("position_ids",)),
    Case("cross-attention", config=CROSS, inputs=MEMORY, flags={"output_attentions": True, "use_cache": False}),
    Case("masked lm", model="BertForMaskedLM", config=RATES, labels=("words",)),
    Case("pre-training", model="BertForPreTraining", config=RATES, labels=("words", "next_sentence_label")),
    Case("sequence classes", model="BertForSequenceClassification", config=RATES, labels=("class",)),
    Case("multiple choice", model="BertForMultipleChoice", config=RATES, labels=("class",)),
    Case("token classes", model="BertForTokenClassification", config=RATES, labels=("tokens",)),
]


def _names(*shape: int) -> Tensor:
    """(row, column) of every token of a padded batch, int32 [B * S, 2]."""
    return torch.cartesian_prod(*(torch.arange(size) for size in shape)).int()


class _CounterDropout(nn.Module):
    """Stands in for nn.Dropout at one site, on padded [B, S, H] or pooled [B, H]."""

    def __init__(self, p: float, site: int) -> None:
        super().__init__()
        self.p, self.site = p, site

    def forward(self, x: Tensor) -> Tensor:
        rows, columns = x.shape[0], x.shape[1] if x.dim() == 3 else 1
        keep = keep_mask(SEED, self.site, _names(rows, columns), x.shape[-1], self.p)
        return x * keep.view(x.shape) * dropout_scale(self.p)


def _attention(module, query, key, value, attention_mask, scaling=None, dropout=0.0, **_):
    """Eager attention with counter-based dropout; the site is an attribute of the module."""
    scores = query @ key.transpose(2, 3) * scaling
    if attention_mask is not None:
        scores = scores + attention_mask
    batch_size, num_heads, num_queries, num_keys = scores.shape
    is_kept = torch.ones(batch_size, num_keys, dtype=torch.bool)
    if attention_mask is not None:  # a key that no query sees is padding
        is_kept = (attention_mask == 0).any(dim=(1, 2)).expand(batch_size, -1)
    keep = []
    for names, kept_keys in zip(_names(batch_size, num_queries).split(num_queries), is_kept, strict=True):
        of_kept = attention_keep_mask(SEED, module.site, names, int(kept_keys.sum()), num_heads, dropout)
        keep.append(torch.zeros(num_heads, num_queries, num_keys, dtype=torch.bool))
        keep[-1][:, :, kept_keys] = of_kept  # a key's name is its ordinal among those kept
    weights = scores.softmax(-1) * torch.stack(keep) * dropout_scale(dropout)
    return (weights @ value).transpose(1, 2).contiguous(), weights


def _with_our_masks(theirs: nn.Module, config: object) -> None:
    hidden = config.hidden_dropout_prob
    encoder = getattr(theirs, "bert", theirs)
    encoder.embeddings.dropout = _CounterDropout(hidden, dropout_site(DropoutSite.EMBEDDING))
    for index, layer in enumerate(encoder.encoder.layer):
        layer.attention.self.site = dropout_site(DropoutSite.ATTENTION_PROBS, index)
        layer.attention.output.dropout = _CounterDropout(hidden, dropout_site(DropoutSite.ATTENTION_OUTPUT, index))
        if hasattr(layer, "crossattention"):
            layer.crossattention.self.site = dropout_site(DropoutSite.CROSS_ATTENTION_PROBS, index)
            output = dropout_site(DropoutSite.CROSS_ATTENTION_OUTPUT, index)
            layer.crossattention.output.dropout = _CounterDropout(hidden, output)
        layer.output.dropout = _CounterDropout(hidden, dropout_site(DropoutSite.MLP_OUTPUT, index))
    if hasattr(theirs, "dropout"):
        theirs.dropout = _CounterDropout(theirs.dropout.p, dropout_site(DropoutSite.HEAD))


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_training_outputs_and_gradients(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(modeling_bert, "eager_attention_forward", _attention)
    config = transformers.BertConfig(**case.full_config(), attn_implementation="eager")
    theirs = getattr(transformers, case.model)(config).double().train()
    randomize(theirs)
    _with_our_masks(theirs, config)
    name = f"Reference{case.model}"
    ours = getattr(heads if hasattr(heads, name) else model, name)(copy.deepcopy(config)).double().train()
    ours.load_state_dict(theirs.state_dict())

    tensors = case.tensors(torch.float64)
    wanted = evaluate(theirs, case, tensors)
    got = evaluate(ours, case, {**tensors, "dropout_seed": SEED})
    plain = evaluate(ours.eval(), case, tensors)
    assert got.keys() == wanted.keys()
    for name, value in got.items():
        scale = max(1.0, value.abs().max().item())
        error = (value - wanted[name]).abs().max().item()
        assert error <= RELATIVE["vs_transformers_fp64"] * scale, f"{name}: {error:.2e}"
    assert max((got[name] - plain[name]).abs().max().item() for name in got) > 1e-2  # dropout did something
