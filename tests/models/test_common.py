"""What users expect of every model: files, tying, shapes, repeatability, what is returned, checkpointing, copies."""

import copy
import inspect
import pickle
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import bert_fast
from bert_fast.testing.parity import randomize

MODELS = [
    "BertModel", "BertForMaskedLM", "BertForPreTraining", "BertLMHeadModel", "BertForNextSentencePrediction",
    "BertForSequenceClassification", "BertForMultipleChoice", "BertForTokenClassification", "BertForQuestionAnswering",
]  # fmt: skip
SIZES = dict(
    vocab_size=40, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=37,
    max_position_embeddings=16, num_labels=3,
)  # fmt: skip
BATCH, LENGTH, CHOICES, HEADS = 3, 7, 2, 2
every_model = pytest.mark.parametrize("name", MODELS)


def make(name: str, **changes: Any) -> Any:
    with warnings.catch_warnings():  # a language model that is no decoder
        warnings.simplefilter("ignore")
        config = {**SIZES, "is_decoder": name == "BertLMHeadModel", **changes}
        model = getattr(bert_fast, name)(bert_fast.BertConfig(**config))
    randomize(model)
    return model.eval()


def inputs(name: str, **more: Any) -> dict[str, Any]:
    shape = (BATCH, CHOICES, LENGTH) if name == "BertForMultipleChoice" else (BATCH, LENGTH)
    mask = torch.ones(shape, dtype=torch.long)
    mask[1, ..., 5:] = 0
    ids = torch.randint(1, 40, shape)
    return {"input_ids": ids, "attention_mask": mask, "token_type_ids": ids % 2, **more}


def labels(name: str) -> dict[str, Tensor]:
    names = inspect.signature(getattr(bert_fast, name).forward).parameters
    words = name in MODELS[1:4] or name == "BertForTokenClassification"
    made = {}
    if "labels" in names:
        made["labels"] = torch.randint(0, 2, (BATCH, LENGTH) if words else (BATCH,))
    if name == "BertForPreTraining":
        made["next_sentence_label"] = torch.tensor([0, 1, 1])
    if "start_positions" in names:
        made |= {"start_positions": torch.tensor([0, 1, 2]), "end_positions": torch.tensor([3, 2, 6])}
    return made


def tensors(output: Any) -> list[Tensor]:
    return [value for value in torch.utils._pytree.tree_leaves(output) if isinstance(value, Tensor)]


def same(a: Any, b: Any) -> bool:
    ours, theirs = tensors(a), tensors(b)
    return len(ours) == len(theirs) > 0 and all(map(torch.equal, ours, theirs))


def loss_of(name: str, model: nn.Module, call: dict[str, Any]) -> Tensor:
    output = model(**call, **labels(name))
    return output.pooler_output.square().sum() if name == "BertModel" else output.loss


# --- files


@every_model
def test_save_and_load(name: str, tmp_path: Path) -> None:
    model, call = make(name), inputs(name)
    model.save_pretrained(tmp_path)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        loaded = type(model).from_pretrained(tmp_path)
    assert not loaded.training and loaded.config == type(model).from_pretrained(tmp_path).config
    assert same(loaded(**call), model(**call))


@every_model
def test_round_trip_with_transformers(name: str, tmp_path: Path) -> None:
    """Written by transformers, read, written, read by transformers: the same bits, and nothing missing or left over."""
    transformers = pytest.importorskip("transformers")
    config = {**SIZES, "num_labels": 2, "is_decoder": name == "BertLMHeadModel"}
    theirs = getattr(transformers, name)(transformers.BertConfig(**config))
    randomize(theirs)
    theirs.save_pretrained(tmp_path / "theirs")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model = getattr(bert_fast, name).from_pretrained(tmp_path / "theirs")
    model.save_pretrained(tmp_path / "ours", max_shard_size="40KB")
    back, info = type(theirs).from_pretrained(tmp_path / "ours", output_loading_info=True)
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    for other in (model.state_dict(), back.state_dict()):
        assert other.keys() == theirs.state_dict().keys()
        assert all(torch.equal(value, other[key]) for key, value in theirs.state_dict().items())


@every_model
def test_body_from_a_checkpoint_of_another_task(name: str, tmp_path: Path) -> None:
    body = make("BertModel")
    body.save_pretrained(tmp_path)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # which parameters are new is the subject of test_pretrained
        model = getattr(bert_fast, name).from_pretrained(tmp_path)
    state = body.state_dict()
    assert all(torch.equal(value, state[key]) for key, value in model.base_model.state_dict().items())


@every_model
def test_copies_and_pickles_compute_the_same(name: str) -> None:
    model, call = make(name), inputs(name)
    expected = model(**call)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert same(other(**call), expected)
        assert (other.get_output_embeddings() is None) == (model.get_output_embeddings() is None)
        if other.get_output_embeddings() is not None:
            assert other.get_output_embeddings().weight is other.get_input_embeddings().weight


class Tagger(bert_fast.BertPreTrainedModel):
    """A model of a user's own, written as for transformers."""

    def __init__(self, config: bert_fast.BertConfig, scale: float = 1.0) -> None:
        super().__init__(config)
        self.bert = bert_fast.BertModel(config, add_pooling_layer=False)
        self.classifier = nn.Linear(config.hidden_size, config.num_labels)
        self.scale = scale
        self.post_init()

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        return self.classifier(self.bert(input_ids, attention_mask=attention_mask)[0]) * self.scale


def test_models_of_users(tmp_path: Path) -> None:
    body, call = make("BertModel"), inputs("BertModel")
    body.save_pretrained(tmp_path / "body")
    with pytest.warns(UserWarning, match=r"Tagger from .* initial values: classifier\.weight, classifier\.bias; "):
        model = Tagger.from_pretrained(tmp_path / "body", num_labels=5, scale=2.0)
    assert model.scale == 2.0 and model.get_input_embeddings() is model.bert.embeddings.word_embeddings
    assert torch.equal(model.bert.encoder.layer[1].output.dense.weight, body.encoder.layer[1].output.dense.weight)
    model.resize_token_embeddings(44)
    model.gradient_checkpointing_enable()
    model.save_pretrained(tmp_path / "whole")
    loaded = Tagger.from_pretrained(tmp_path / "whole", scale=2.0)
    assert loaded.config.architectures == ["Tagger"] and loaded.config.vocab_size == 44
    del call["token_type_ids"]
    assert torch.equal(loaded(**call), model.eval()(**call))


# --- parameters


@every_model
def test_initial_values(name: str) -> None:
    model = getattr(bert_fast, name)(bert_fast.BertConfig(**SIZES, is_decoder=True, initializer_range=1e-10))
    for key, parameter in model.named_parameters():
        expected = 1.0 if key.endswith("LayerNorm.weight") else 0.0
        assert (parameter - expected).abs().max() < 1e-8, key
    assert not model.get_input_embeddings().weight[0].any()
    randomize(model)
    model.init_weights()
    assert all(p.abs().max() < 1e-8 for key, p in model.named_parameters() if not key.endswith("LayerNorm.weight"))


@every_model
def test_tying_follows_the_configuration(name: str) -> None:
    for tied in (True, False):
        model = make(name, tie_word_embeddings=tied)
        head = model.get_output_embeddings()
        assert (head is not None) == (name in MODELS[1:4])
        if head is not None:
            assert (head.weight is model.get_input_embeddings().weight) == tied
            assert model.num_parameters() == sum(p.numel() for p in set(model.parameters()))


@every_model
def test_all_parameters_learn(name: str) -> None:
    """Every parameter has a gradient, but for those that the head has no use for."""
    model = make(name).train()
    loss_of(name, model, inputs(name)).backward()
    without = [key for key, parameter in model.named_parameters() if parameter.grad is None]
    assert without == []


# --- outputs


SHAPES = {
    "BertModel": {"last_hidden_state": (BATCH, LENGTH, 32), "pooler_output": (BATCH, 32)},
    "BertForMaskedLM": {"logits": (BATCH, LENGTH, 40)},
    "BertForPreTraining": {"prediction_logits": (BATCH, LENGTH, 40), "seq_relationship_logits": (BATCH, 2)},
    "BertLMHeadModel": {"logits": (BATCH, LENGTH, 40)},
    "BertForNextSentencePrediction": {"logits": (BATCH, 2)},
    "BertForSequenceClassification": {"logits": (BATCH, 3)},
    "BertForMultipleChoice": {"logits": (BATCH, CHOICES)},
    "BertForTokenClassification": {"logits": (BATCH, LENGTH, 3)},
    "BertForQuestionAnswering": {"start_logits": (BATCH, LENGTH), "end_logits": (BATCH, LENGTH)},
}


@every_model
def test_output_shapes(name: str) -> None:
    model = make(name, use_cache=False)
    output = model(**inputs(name))
    assert {key: tuple(value.shape) for key, value in output.items()} == SHAPES[name]
    if name != "BertModel":
        output = model(**inputs(name), **labels(name))
        assert output.loss.shape == () and output[0] is output.loss and list(output)[1:] == list(SHAPES[name])


@every_model
def test_tuple_and_dictionary_hold_the_same(name: str) -> None:
    model, call = make(name), inputs(name, output_hidden_states=True)
    as_tuple = model(**call, return_dict=False)
    assert type(as_tuple) is tuple and same(as_tuple, model(**call))
    model.config.return_dict = False
    assert type(model(**call)) is tuple and same(model(**call), as_tuple)


@every_model
def test_evaluation_repeats_and_training_drops(name: str) -> None:
    model, call = make(name), inputs(name)
    assert same(model(**call), model(**call))
    model.train()
    assert not same(model(**call), model(**call))
    first = model(**call, dropout_seed=torch.tensor([1]))
    assert same(model(**call, dropout_seed=torch.tensor([1])), first)
    torch.manual_seed(3)
    first = model(**call)
    torch.manual_seed(3)
    assert same(model(**call), first)


@every_model
@pytest.mark.parametrize("by", ["argument", "configuration"])
def test_hidden_states_and_attentions(name: str, by: str) -> None:
    model, call, asked = make(name), inputs(name), {"output_hidden_states": True, "output_attentions": True}
    plain = model(**call)
    if by == "configuration":
        for key, value in asked.items():
            setattr(model.config, key, value)
        asked = {}
    output = model(**call, **asked)
    rows = BATCH * (CHOICES if name == "BertForMultipleChoice" else 1)
    assert [tuple(state.shape) for state in output.hidden_states] == [(rows, LENGTH, 32)] * 3
    assert [tuple(p.shape) for p in output.attentions] == [(rows, HEADS, LENGTH, LENGTH)] * 2
    keep = call["attention_mask"].flatten(0, -2).bool()
    for probabilities in output.attentions:
        torch.testing.assert_close(probabilities.sum(-1), keep[:, None].expand(-1, HEADS, -1).float())
        assert not probabilities[~keep[:, None, None].expand_as(probabilities)].any()
    for key in SHAPES[name]:
        torch.testing.assert_close(output[key], plain[key])


@every_model
def test_gradients_of_hidden_states_and_attentions_can_be_kept(name: str) -> None:
    model = make(name)
    output = model(**inputs(name), output_hidden_states=True, output_attentions=True)
    kept = [output.hidden_states[0], output.attentions[0]]
    for tensor in kept:
        tensor.retain_grad()
    next(iter(output.values())).flatten()[0].backward()
    assert all(tensor.grad is not None and tensor.grad.isfinite().all() for tensor in kept)


# --- inputs


@every_model
def test_vectors_for_words(name: str) -> None:
    model, call = make(name), inputs(name)
    expected = model(**call)
    vectors = model.get_input_embeddings()(call.pop("input_ids"))
    for ours, theirs in zip(tensors(model(**call, inputs_embeds=vectors)), tensors(expected), strict=True):
        torch.testing.assert_close(ours, theirs)
    with pytest.raises(ValueError, match="input_ids, inputs_embeds: expected exactly one of the two, got both"):
        model(**call, inputs_embeds=vectors, input_ids=vectors[..., 0].long())


@every_model
def test_arguments_by_position(name: str) -> None:
    model, call = make(name), inputs(name)
    assert same(model(*call.values()), model(**call))
    with pytest.raises(TypeError, match=r"forward\(\) takes from 1 to 7 positional arguments but 8 were given"):
        model(*[None] * 7)


@every_model
def test_chunks_of_the_feed_forward_change_nothing(name: str) -> None:
    model, call = make(name), inputs(name)
    whole = model(**call)
    chunked = make(name, chunk_size_feed_forward=3)
    chunked.load_state_dict(model.state_dict())
    for ours, theirs in zip(tensors(chunked(**call)), tensors(whole), strict=True):
        torch.testing.assert_close(ours, theirs)


@every_model
def test_pruned_heads(name: str, tmp_path: Path) -> None:
    model, call = make(name), inputs(name)
    model.prune_heads({0: [1]})
    model.save_pretrained(tmp_path)
    assert same(type(model).from_pretrained(tmp_path)(**call), model(**call))
    assert model(**call, output_attentions=True).attentions[0].shape[1] == 1


# --- training


@every_model
@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing_changes_no_gradient(name: str, reentrant: bool) -> None:
    model, call = make(name).train(), inputs(name, dropout_seed=torch.tensor([9]))
    target, results = labels(name), []
    for enabled in (False, True):
        if enabled:
            model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        assert model.is_gradient_checkpointing == enabled
        model.zero_grad()
        output = model(**call, **target)
        (output.pooler_output.square().sum() if name == "BertModel" else output.loss).backward()
        results.append({key: p.grad.clone() for key, p in model.named_parameters() if p.grad is not None})
    assert results[0].keys() == results[1].keys()
    assert all(torch.equal(value, results[1][key]) for key, value in results[0].items())
    model.gradient_checkpointing_disable()
    assert not model.is_gradient_checkpointing


@every_model
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_other_precisions(name: str, dtype: torch.dtype) -> None:
    model, call = make(name).to(dtype), inputs(name)
    assert model.dtype is dtype
    for key, value in model(**call, **labels(name)).items():
        wide = torch.float64 if dtype is torch.float64 else torch.float32
        assert value.dtype is (wide if key == "loss" else dtype) and value.isfinite().all()
