"""The reference heads' own definitions: padding, labels, tying, seeds; parity with Hugging Face is in tests/parity."""

from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bert_fast.reference import heads
from bert_fast.testing.parity import randomize

CONFIG = {
    "vocab_size": 31, "hidden_size": 12, "num_hidden_layers": 1, "num_attention_heads": 3, "intermediate_size": 20,
    "max_position_embeddings": 16, "type_vocab_size": 2, "pad_token_id": 0, "hidden_act": "gelu",
    "layer_norm_eps": 1e-12, "hidden_dropout_prob": 0.2, "attention_probs_dropout_prob": 0.3,
    "initializer_range": 0.02, "is_decoder": False, "num_labels": 3,
}  # fmt: skip
IDS = torch.randint(1, 31, (3, 6), generator=torch.Generator().manual_seed(1))
MASK = (torch.arange(6) < torch.tensor([[6], [3], [4]])).long()
SEED = torch.tensor([99], dtype=torch.int64)


def _model(name: str, **changes: object) -> nn.Module:
    model = getattr(heads, f"ReferenceBert{name}")(SimpleNamespace(**{**CONFIG, **changes}))
    randomize(model)
    return model.double().eval()


def _logits(output: heads.ReferenceHeadOutput) -> Tensor:
    logits = output.prediction_logits if output.logits is None else output.logits
    assert logits is not None
    return logits


@pytest.mark.parametrize("name", ["ForMaskedLM", "ForPreTraining", "ForTokenClassification"])
def test_padding_has_no_scores_and_no_loss(name: str) -> None:
    model = _model(name)
    labels = torch.randint(0, 3, MASK.shape)
    other = torch.where(MASK == 1, labels, 2 - labels)
    extra = {"next_sentence_label": torch.tensor([0, 1, 1])} if name == "ForPreTraining" else {}
    outputs = [model(IDS, MASK, labels=each, **extra) for each in (labels, other, labels.masked_fill(MASK == 0, -100))]
    assert not _logits(outputs[0])[MASK == 0].any() and _logits(outputs[0])[MASK == 1].any(-1).all()
    assert torch.equal(outputs[0].loss, outputs[1].loss) and torch.equal(outputs[0].loss, outputs[2].loss)


@pytest.mark.parametrize("name", ["ForMaskedLM", "ForTokenClassification"])
def test_loss_is_the_mean_over_labelled_tokens(name: str) -> None:
    model = _model(name)
    labels = torch.randint(0, 3, MASK.shape).masked_fill(torch.rand(MASK.shape) < 0.5, -100)
    output = model(IDS, MASK, labels=labels)
    rows = (labels != -100) & (MASK == 1)
    torch.testing.assert_close(output.loss, F.cross_entropy(_logits(output)[rows], labels[rows]))
    nothing = model(IDS, MASK, labels=torch.full_like(labels, -100))
    nothing.loss.backward()
    assert nothing.loss.item() == 0.0
    assert all(p.grad is None or not p.grad.any() for p in model.parameters())


def test_masked_lm_positions_gather_rows() -> None:
    positions, labels = torch.tensor([7, 0, 13]), torch.tensor([4, 8, 15])
    for name in ("ForMaskedLM", "ForPreTraining"):
        model = _model(name)
        extra = {"next_sentence_label": torch.tensor([0, 1, 1])} if name == "ForPreTraining" else {}
        gathered = model(IDS, MASK, labels=labels, masked_lm_positions=positions, **extra)
        spread = torch.full(MASK.shape, -100).flatten().index_put((positions,), labels).view(MASK.shape)
        whole = model(IDS, MASK, labels=spread, **extra)
        assert _logits(gathered).shape == (3, 31)
        torch.testing.assert_close(_logits(gathered), _logits(whole).flatten(0, 1)[positions])
        torch.testing.assert_close(gathered.loss, whole.loss)


def test_answers_are_never_on_padding() -> None:
    model = _model("ForQuestionAnswering")
    start, end = torch.tensor([1, 0, 3]), torch.tensor([[5], [2], [99]])  # the last end is not in the window
    output = model(IDS, MASK, start_positions=start, end_positions=end)
    for logits in (output.start_logits, output.end_logits):
        probabilities = logits.softmax(-1)
        assert not probabilities[MASK == 0].any()
        torch.testing.assert_close(probabilities.sum(-1), torch.ones(3).double())
    expected = []
    for row, length in enumerate(MASK.sum(1)):
        alone = model(IDS[row : row + 1, :length])
        expected.append((alone.start_logits, alone.end_logits))
    starts = [F.cross_entropy(s, t.view(1)) for (s, _), t in zip(expected, start, strict=True)]
    ends = [F.cross_entropy(e, t.view(1)) for (_, e), t in zip(expected[:2], end[:2], strict=True)]
    torch.testing.assert_close(output.loss, (sum(starts) / 3 + sum(ends) / 2) / 2)


def test_next_word_loss() -> None:
    model = _model("LMHeadModel", is_decoder=True)
    output = model(IDS, labels=IDS)
    assert output.model.past_key_values is None
    torch.testing.assert_close(output.loss, F.cross_entropy(output.logits[:, :-1].flatten(0, 1), IDS[:, 1:].flatten()))
    assert model(IDS).model.past_key_values is not None
    for mask in (MASK, MASK.flip(1)):  # padding on the right and on the left; its ids are labels too
        output = model(IDS, mask, labels=IDS)
        rows = (mask[:, :-1] == 1) & (mask[:, 1:] == 1)
        torch.testing.assert_close(output.loss, F.cross_entropy(output.logits[:, :-1][rows], IDS[:, 1:][rows]))


def test_problem_types() -> None:
    labels = torch.tensor([2, 0, 1])
    model = _model("ForSequenceClassification")
    output = model(IDS, MASK, labels=labels)
    torch.testing.assert_close(output.loss, F.cross_entropy(output.logits, labels))
    several = torch.tensor([[1.0, 0.0, 1.0], [0.0, 0.0, 0.0], [1.0, 1.0, 0.0]]).double()
    output = model(IDS, MASK, labels=several)
    torch.testing.assert_close(output.loss, F.binary_cross_entropy_with_logits(output.logits, several))
    output = _model("ForSequenceClassification", problem_type="regression")(IDS, MASK, labels=several)
    torch.testing.assert_close(output.loss, F.mse_loss(output.logits, several))
    number = _model("ForSequenceClassification", num_labels=1)
    for shape in ((3,), (3, 1)):
        output = number(IDS, MASK, labels=labels.double().view(shape))
        torch.testing.assert_close(output.loss, F.mse_loss(output.logits.squeeze(1), labels.double()))


def test_word_table_is_shared_with_the_decoder() -> None:
    tied, untied = _model("ForMaskedLM"), _model("ForMaskedLM", tie_word_embeddings=False)
    assert tied.cls.predictions.decoder.weight is tied.bert.embeddings.word_embeddings.weight
    assert untied.cls.predictions.decoder.weight is not untied.bert.embeddings.word_embeddings.weight
    assert tied.cls.predictions.bias is tied.cls.predictions.decoder.bias
    assert {"cls.predictions.decoder.weight", "cls.predictions.decoder.bias", "cls.predictions.bias"} <= set(
        tied.state_dict()
    )


@pytest.mark.parametrize("name", ["ForSequenceClassification", "ForTokenClassification"])
def test_classifier_dropout(name: str) -> None:
    """Its own rate where the config gives one, the hidden rate otherwise; one seed draws it like everything else."""
    quiet = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    plain = _model(name, **quiet)
    expected = _logits(plain(IDS, MASK))
    assert torch.equal(_logits(plain.train()(IDS, MASK)), expected)
    dropped = _model(name, **quiet, classifier_dropout=0.5).train()
    first, second = (_logits(dropped(IDS, MASK, dropout_seed=SEED)) for _ in range(2))
    assert torch.equal(first, second) and not torch.allclose(first, expected)
    everything = _logits(_model(name, **quiet, classifier_dropout=1.0).train()(IDS, MASK, dropout_seed=SEED))
    bias = plain.classifier.bias.detach()
    torch.testing.assert_close(everything[MASK == 1] if everything.dim() == 3 else everything, bias.expand(
        int(MASK.sum()) if everything.dim() == 3 else 3, 3))  # fmt: skip
