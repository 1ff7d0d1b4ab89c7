"""What the models promise to PyTorch and to code written for transformers, beyond values."""

import inspect
import threading
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import bert_fast
from benchmarks.kit.saved_bytes import saved_bytes

SIZES = dict(
    vocab_size=50, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=40,
    max_position_embeddings=20, num_labels=3,
)  # fmt: skip
NAMES = ("BertModel", "BertForMaskedLM", "BertForPreTraining", "BertForSequenceClassification")
SEED = torch.tensor([77])


def _model(name: str = "BertModel", **changes: Any) -> Any:
    return getattr(bert_fast, name)(bert_fast.BertConfig(**{**SIZES, **changes})).train()


def _ids(*shape: int) -> Tensor:
    return torch.randint(1, 50, shape)


def _mask() -> Tensor:
    mask = torch.ones(3, 9)
    mask[1, 4:], mask[2, :3] = 0, 0
    return mask


def _results(model: nn.Module, *inputs: Tensor, seed: Tensor = SEED) -> list[Tensor]:
    """Output and all gradients of one training step."""
    model.zero_grad()
    output = model(*inputs, dropout_seed=seed).last_hidden_state
    output.sin().sum().backward()
    return [output.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]


def _equal(first: list[Tensor], second: list[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


# ---- autograd


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
def test_without_gradients_nothing_is_saved(context):
    model = _model().eval()
    ids = _ids(3, 9)
    with context():
        count = saved_bytes(model, lambda: model(ids, _mask()).last_hidden_state)
        output = model(ids, _mask()).last_hidden_state
    assert count == 0
    assert not output.requires_grad
    torch.testing.assert_close(output, model(ids, _mask()).last_hidden_state)


def test_second_derivatives_are_refused_by_name():
    embeddings = torch.randn(2, 5, 32, requires_grad=True)
    output = _model()(inputs_embeds=embeddings).last_hidden_state.square().sum()
    (gradient,) = torch.autograd.grad(output, embeddings, create_graph=True)
    with pytest.raises(RuntimeError, match=r"backward through bert_fast\.\w+_bwd"):
        gradient.square().sum().backward()


@pytest.mark.parametrize("arguments", [{}, {"use_reentrant": True}, {"use_reentrant": False}])
def test_checkpointing_repeats_the_masks_and_saves_memory(arguments):
    model, ids = _model(num_hidden_layers=4), _ids(3, 9)
    wanted = _results(model, ids, _mask())
    plain = saved_bytes(model, lambda: model(ids, dropout_seed=SEED)[0])
    model.gradient_checkpointing_enable(arguments)
    assert model.is_gradient_checkpointing
    assert _equal(_results(model, ids, _mask()), wanted)
    # A layer keeps 16 tensors [T, H] and more; checkpointed, one.
    assert saved_bytes(model, lambda: model(ids, dropout_seed=SEED)[0]) < plain / 3
    model.activation_checkpointing_enable(every_n_layers=2)
    assert _equal(_results(model, ids, _mask()), wanted)
    model.gradient_checkpointing_disable()
    assert saved_bytes(model, lambda: model(ids, dropout_seed=SEED)[0]) == plain


def test_steps_repeat_bit_for_bit_at_every_thread_count():
    model, ids = _model(hidden_size=64), _ids(3, 9)
    before = torch.get_num_threads()
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            first = _results(model, ids, _mask())
            assert all(_equal(_results(model, ids, _mask()), first) for _ in range(3))
    finally:
        torch.set_num_threads(before)


def test_deterministic_algorithms_can_be_demanded():
    model, ids = _model(), _ids(3, 9)
    wanted = _results(model, ids, _mask())
    torch.use_deterministic_algorithms(True)
    try:
        assert _equal(_results(model, ids, _mask()), wanted)
    finally:
        torch.use_deterministic_algorithms(False)


def test_two_threads_train_two_models_as_if_alone():
    cases = [(_model(), _ids(3, 9), torch.tensor([seed])) for seed in (1, 2)]
    wanted = [_results(model, ids, seed=seed) for model, ids, seed in cases]
    same: list[bool] = []

    def work(index: int) -> None:
        model, ids, seed = cases[index]
        same.extend(_equal(_results(model, ids, seed=seed), wanted[index]) for _ in range(10))

    threads = [threading.Thread(target=work, args=(index,)) for index in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(same) == 20
    assert all(same)


# ---- dtypes


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_with_a_scaler_learns(dtype):
    model = _model("BertForSequenceClassification")
    optimizer, scaler = torch.optim.AdamW(model.parameters(), 1e-2), torch.amp.GradScaler("cpu")
    ids, labels, losses = _ids(3, 9), torch.tensor([0, 1, 2]), []
    for _ in range(12):
        with torch.autocast("cpu", dtype):
            loss = model(ids, _mask(), labels=labels, dropout_seed=SEED).loss
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        assert all(p.grad.dtype == torch.float32 and p.grad.isfinite().all() for p in model.parameters())
        scaler.step(optimizer)
        scaler.update()
        losses.append(loss.item())
    assert loss.dtype == torch.float32
    assert losses[-1] < 0.5 * losses[0]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("name", NAMES)
def test_parameters_of_any_floating_dtype_train(dtype, name):
    model, ids = _model(name).to(dtype), _ids(3, 9)
    labels = {
        "BertForMaskedLM": {"labels": ids},
        "BertForPreTraining": {"labels": ids, "next_sentence_label": torch.tensor([0, 1, 0])},
        "BertForSequenceClassification": {"labels": torch.tensor([0, 1, 2])},
    }.get(name, {})
    output = model(ids, _mask(), **labels)
    loss = output.loss if labels else output.last_hidden_state.sum() + output.pooler_output.sum()
    loss.backward()
    assert all(p.grad.dtype == dtype and p.grad.isfinite().all() for p in model.parameters())


# ---- inputs


def test_equivalent_inputs_give_equal_bits():
    model, ids = _model().eval(), _ids(3, 9)
    wanted = model(ids)[0]
    for other in (
        model(ids.int()),
        model(ids.t().contiguous().t()),
        model(ids, torch.ones(3, 9)),
        model(ids, torch.ones(3, 9, dtype=torch.bool)),
        model(ids, token_type_ids=torch.zeros(3, 9, dtype=torch.int32)),
        model(ids, position_ids=torch.arange(9)),
        model(
            ids,
            encoder_hidden_states=None,
            encoder_attention_mask=None,
            past_key_values=None,
            use_cache=True,
            cache_position=torch.arange(9),
        ),
    ):
        assert torch.equal(other[0], wanted)


def test_packed_input_with_empty_sequences_types_and_strided_offsets():
    model = _model()
    ids, types = _ids(7), torch.randint(0, 2, (7,))
    cu_seqlens = torch.tensor([[0, 9], [0, 9], [4, 9], [4, 9], [7, 9], [7, 9]], dtype=torch.int32)[:, 0]
    longest = torch.tensor(4)  # an int in a tensor counts as one
    packed = model(ids, token_type_ids=types, cu_seqlens=cu_seqlens, max_seqlen=longest, dropout_seed=SEED)
    mask = torch.zeros(5, 4)
    mask[1], mask[3, :3] = 1, 1
    wide, wide_types = torch.zeros(2, 5, 4, dtype=torch.long)
    wide[mask.bool()], wide_types[mask.bool()] = ids, types
    padded = model(wide, mask, wide_types, dropout_seed=SEED)
    assert torch.equal(padded.last_hidden_state[mask.bool()], packed.last_hidden_state)
    assert torch.equal(padded.pooler_output, packed.pooler_output)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_bad_numbers_stay_in_their_sequence(value):
    """They must come out (a diverging run has to show) and must not reach other sequences."""
    model, embeddings = _model(), torch.randn(3, 9, 32)
    clean = model(inputs_embeds=embeddings, dropout_seed=SEED)[0]
    embeddings[1, 4, 7] = value
    spoiled = model(inputs_embeds=embeddings, dropout_seed=SEED)[0]
    assert not spoiled[1].isfinite().any()
    assert torch.equal(spoiled[[0, 2]], clean[[0, 2]])


def test_an_empty_batch_trains():
    model = _model()
    model(torch.zeros(0, 4, dtype=torch.long)).last_hidden_state.sum().backward()
    assert all(not p.grad.any() for p in model.encoder.parameters())


def test_labels_on_padding_do_not_count():
    model, ids = _model("BertForMaskedLM").eval(), _ids(3, 9)
    ignored = torch.where(_mask().bool(), ids, -100)
    assert torch.equal(model(ids, _mask(), labels=ids).loss, model(ids, _mask(), labels=ignored).loss)


# ---- transformers


@pytest.mark.parametrize("name", NAMES)
def test_parameters_and_keys_are_those_of_transformers_in_their_order(name):
    transformers = pytest.importorskip("transformers", minversion="5")
    theirs, ours = getattr(transformers, name)(transformers.BertConfig(**SIZES)), _model(name)
    shapes = [[(key, p.shape) for key, p in model.named_parameters()] for model in (ours, theirs)]
    assert shapes[0] == shapes[1]
    assert list(ours.state_dict()) == list(theirs.state_dict())
    ours.load_state_dict(theirs.state_dict(), strict=True)
    theirs.load_state_dict(_model(name).state_dict(), strict=True)
    assert ours.num_parameters() == theirs.num_parameters()
    assert ours.num_parameters(exclude_embeddings=True) == theirs.num_parameters(exclude_embeddings=True)


@pytest.mark.parametrize("name", NAMES)
def test_arguments_of_transformers_are_taken(name):
    transformers = pytest.importorskip("transformers", minversion="5")
    ours, theirs = (
        inspect.signature(getattr(package, name).forward).parameters for package in (bert_fast, transformers)
    )
    assert set(theirs) - set(ours) <= {"kwargs"}


@pytest.mark.parametrize("name", NAMES)
def test_labels_are_the_arguments_that_transformers_knows_as_labels(name):
    """Their Trainer reports no loss where one of them is missing, and takes it out of the predictions otherwise."""
    transformers = pytest.importorskip("transformers", minversion="5")
    ours, theirs = (transformers.utils.find_labels(getattr(package, name)) for package in (bert_fast, transformers))
    assert ours == theirs


def test_collated_batches_of_transformers_train():
    transformers = pytest.importorskip("transformers", minversion="5")
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *"abcdefgh"]
    tokenizer = bert_fast.BertTokenizer({word: index for index, word in enumerate(words)})
    collator = transformers.DataCollatorForLanguageModeling(tokenizer, mlm_probability=0.5)
    batch = collator([tokenizer(text) for text in ("a b c d e f g h", "b a", "h g f e d")])
    assert isinstance(batch["labels"], Tensor)
    model = _model("BertForMaskedLM")
    model(**batch).loss.backward()
    assert model.bert.embeddings.word_embeddings.weight.grad.any()
