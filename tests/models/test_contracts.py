"""What the models promise to PyTorch and to code written for transformers, beyond values."""

import inspect
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import bert_fast
from bert_fast import ops
from bert_fast.demo.saved_bytes import saved_bytes

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


# ---- torch.compile


@pytest.fixture
def no_recompiles() -> Iterator[None]:
    torch._dynamo.reset()
    with torch._dynamo.config.patch(error_on_recompile=True):
        yield
    torch._dynamo.reset()


def _packed(lengths: list[int]) -> dict[str, Any]:
    total = sum(lengths)
    cu_seqlens = torch.tensor([0, *lengths]).cumsum(0).int()
    return {"input_ids": _ids(total), "cu_seqlens": cu_seqlens, "max_seqlen": max(lengths), "dropout_seed": SEED}


def _padded(lengths: list[int]) -> dict[str, Any]:
    mask = torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]
    return {"input_ids": _ids(*mask.shape), "attention_mask": mask, "dropout_seed": SEED}


def _labelled(call: dict[str, Any]) -> dict[str, Any]:
    ids = call["input_ids"]
    return call | {"labels": torch.where(ids % 2 == 0, ids, -100)}


def _positions(call: dict[str, Any]) -> dict[str, Any]:
    return call | {"masked_lm_positions": torch.tensor([3, 0]), "labels": torch.tensor([4, 5])}


CALLS = {
    "encoder, packed": ("BertModel", _packed),
    "encoder, padded": ("BertModel", _padded),
    "masked LM, packed": ("BertForMaskedLM", lambda lengths: _labelled(_packed(lengths))),
    "masked LM, padded": ("BertForMaskedLM", lambda lengths: _labelled(_padded(lengths))),
    "masked LM, all logits": ("BertForMaskedLM", lambda lengths: _labelled(_packed(lengths)) | {"output_logits": True}),
    "masked LM, positions": ("BertForMaskedLM", lambda lengths: _positions(_packed(lengths))),
}


@pytest.mark.parametrize("case", CALLS)
def test_one_graph_for_all_lengths(no_recompiles, case):
    name, make = CALLS[case]
    model = _model(name)
    compiled = torch.compile(model, fullgraph=True, dynamic=True, backend="aot_eager")
    for lengths in ([4, 3], [6, 9], [11, 2]):
        results = []
        call = make(lengths)
        for run in (model, compiled):
            model.zero_grad()
            output = run(**call)
            loss = output.loss if "labels" in call else output[0].sin().sum() + output.pooler_output.sum()
            loss.backward()
            results.append([output[0].detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)])
        for eager, graph in zip(*results, strict=True):
            torch.testing.assert_close(graph, eager)


def test_compiled_inference_takes_any_number_of_tokens(no_recompiles):
    """Eager inference works on chunks of tokens; the graph must not hold their number."""
    model = _model(max_position_embeddings=600).eval()
    compiled = torch.compile(model, fullgraph=True, dynamic=True, backend="aot_eager")
    with torch.no_grad():
        for lengths in ([40, 30], [500, 600], [600, 600, 600]):
            call = _packed(lengths)
            torch.testing.assert_close(compiled(**call)[0], model(**call)[0])


def test_a_compiled_model_still_refuses_wrong_offsets():
    """The routines read addresses: offsets beyond the tokens must be named, not followed."""
    torch._dynamo.reset()
    compiled = torch.compile(_model().eval(), fullgraph=True, backend="aot_eager")
    call = _packed([4, 3])
    compiled(**call)
    call["cu_seqlens"] = torch.tensor([0, 4, 4000], dtype=torch.int32)
    with pytest.raises(ValueError, match=r"cu_seqlens_q: expected offsets that rise from 0 to the number of tokens"):
        compiled(**call)


def _op_calls(dtype: torch.dtype, *, transposed: bool) -> dict[str, tuple]:
    def new(*shape: int) -> Tensor:
        if transposed and len(shape) > 1:
            return torch.randn(shape[1], shape[0], *shape[2:], dtype=dtype).transpose(0, 1)
        return torch.randn(shape, dtype=dtype)

    index = torch.arange(5, dtype=torch.int32)
    coords, cu = torch.stack((index * 0, index), 1), torch.tensor([0, 2, 5], dtype=torch.int32)
    x, w, b, dy = new(5, 16), new(8, 16), new(8), new(5, 8)
    q, k, v = (new(5, 2, 16) for _ in range(3))
    layout = (cu, cu, 3, 3, 0.3, 0.2, SEED, coords, coords, 4, False)
    statistics = torch.float64 if dtype == torch.float64 else torch.float32
    lse, mean = torch.zeros(2, 5, dtype=statistics), torch.ones(5, dtype=statistics)
    drop = (0.1, SEED, coords, 1)
    return {
        "linear_fwd": (x, w, b),
        "linear_bwd": (dy, x, w),
        "linear_gelu_fwd": (x, w, b, "none"),
        "linear_gelu_bwd": (dy, x, w, new(5, 8), "tanh"),
        "qkv_projection_fwd": (x, w, b, w, b, w, b),
        "qkv_projection_bwd": (dy, new(5, 8), new(5, 8), x, w, w, w),
        "dropout": (x, 0.5, SEED, coords, 2),
        "attention_fwd": (q, k, v, *layout),
        "attention_bwd": (new(5, 2, 16), q, k, v, torch.randn(5, 2, 16, dtype=dtype), lse, *layout),
        "dropout_add_layer_norm_fwd": (x, new(5, 16), None, new(16), new(16), 1e-12, *drop),
        "dropout_add_layer_norm_bwd": (x, new(5, 16), mean, mean, new(16), *drop),
    }


@pytest.mark.parametrize("op", _op_calls(torch.float32, transposed=False))
@pytest.mark.parametrize("backend", ["torch", "reference"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("transposed", [False, True], ids=["contiguous", "transposed"])
def test_outputs_are_laid_out_as_graphs_are_told(op, backend, dtype, transposed):
    """Compiled code trusts the fake implementations: a wrong stride there is silently wrong data."""
    arguments = (*_op_calls(dtype, transposed=transposed)[op], backend)
    torch.library.opcheck(
        getattr(torch.ops.bert_fast, op), arguments, test_utils=("test_schema", "test_autograd_registration",
        "test_faketensor"),
    )  # fmt: skip


def test_every_registered_op_is_checked():
    registered = {name.split("::")[1].split(".")[0] for name in torch._C._dispatch_get_all_op_names()
                  if name.startswith("bert_fast::")}  # fmt: skip
    assert registered == set(_op_calls(torch.float32, transposed=False))


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


# ---- messages


def _call(name: str, **arguments: Any) -> Any:
    return lambda: _model(name)(**arguments)


X, W = torch.zeros(5, 32), torch.zeros(4, 32)
Q, CU = torch.zeros(5, 2, 16), torch.tensor([0, 2, 5], dtype=torch.int32)
INDEX = torch.arange(5, dtype=torch.int32)
COORDS = torch.stack((INDEX * 0, INDEX), 1)
ZEROS = torch.zeros(2, 3, dtype=torch.long)
MESSAGES = {
    "linear dtype": (lambda: ops.linear(X, W.half()), TypeError, r"weight: expected dtype float32 \(that of x\), got"),
    "linear integers": (lambda: ops.linear(X.long(), W.long()), TypeError, "x: expected a floating-point dtype, got"),
    "linear device": (
        lambda: ops.linear(X, W, torch.empty(4, device="meta")),
        ValueError,
        r"bias: expected device cpu \(that of x\), got meta",
    ),
    "gelu dtype": (lambda: ops.linear_gelu(X, W, W[:, 0].double()), TypeError, "bias: expected dtype float32"),
    "qkv dtype": (
        lambda: ops.qkv_projection(X, W, W[:, 0], W, W[:, 0], W.half(), W[:, 0]),
        TypeError,
        "wv: expected dtype float32",
    ),
    "attention end": (
        lambda: ops.attention(Q, Q, Q, cu_seqlens_q=CU * 1000, max_seqlen_q=5000),
        ValueError,
        r"cu_seqlens_q: expected offsets that rise from 0 to the number of tokens \(5\), got \[0, 2000, 5000\]",
    ),
    "attention keys": (
        lambda: ops.attention(Q, Q[:3], Q[:3], cu_seqlens_q=CU, max_seqlen_q=3),
        ValueError,
        "cu_seqlens_k: expected offsets",
    ),
    "attention bound": (
        lambda: ops.attention(Q, Q, Q, cu_seqlens_q=CU, max_seqlen_q=2),
        ValueError,
        r"max_seqlen_q: expected at least the longest sequence \(3\), got 2",
    ),
    "causal coords dtype": (
        lambda: ops.attention(Q, Q, Q, cu_seqlens_q=CU, max_seqlen_q=3, causal=True, coords_q=COORDS.long()),
        TypeError,
        "coords_q: expected dtype int32, got int64",
    ),
    "causal coords shape": (
        lambda: ops.attention(Q, Q, Q, cu_seqlens_q=CU, max_seqlen_q=3, causal=True, coords_q=COORDS[:2]),
        ValueError,
        r"coords_q: expected shape \[5, 2\], got \[2, 2\]",
    ),
    "dropout device": (
        lambda: ops.dropout(X, 0.1, seed=SEED.to("meta"), coords=COORDS, site=0),
        ValueError,
        "seed: expected device cpu",
    ),
    "dropout site": (
        lambda: ops.dropout(X, 0.1, seed=SEED, coords=COORDS, site=-1),
        ValueError,
        "site: expected a number in",
    ),
    "dropout p": (
        lambda: ops.dropout(X, "0.1", seed=SEED, coords=COORDS, site=0),
        TypeError,
        "dropout_p: expected a number, got str",
    ),
    "ids": (_call("BertModel", input_ids=[[1]]), TypeError, "input_ids: expected a Tensor, got list"),
    "mask": (
        _call("BertModel", input_ids=ZEROS, attention_mask=[[1]]),
        TypeError,
        "attention_mask: expected a Tensor, got list",
    ),
    "max_seqlen": (
        _call("BertModel", input_ids=ZEROS[0], cu_seqlens=CU, max_seqlen=3.0),
        TypeError,
        "max_seqlen: expected an int, got float",
    ),
    "huge max_seqlen": (
        _call("BertModel", input_ids=INDEX, cu_seqlens=CU, max_seqlen=10**9),
        ValueError,
        r"max_seqlen: expected at most 20 tokens a sequence \(max_position_embeddings\), got 1000000000",
    ),
    "embeddings width": (
        _call("BertModel", inputs_embeds=torch.zeros(1, 2, 31)),
        ValueError,
        r"inputs_embeds: expected a last dimension of 32 \(hidden_size\), got shape \[1, 2, 31\]",
    ),
    "embeddings dtype": (
        _call("BertModel", inputs_embeds=torch.zeros(1, 2, 32).double()),
        TypeError,
        r"inputs_embeds: expected dtype float32 \(that of the parameters\), got float64",
    ),
    "head mask": (
        _call("BertModel", input_ids=ZEROS, head_mask=torch.ones(7)),
        ValueError,
        r"head_mask: expected shape \[2\], \[2, 2\] or .*, got \[7\]",
    ),
    "decoder": (
        _call("BertModel", input_ids=ZEROS, encoder_hidden_states=X),
        ValueError,
        "encoder_hidden_states: expected None in an encoder, got Tensor",
    ),
    "positions": (
        _call("BertForMaskedLM", input_ids=ZEROS, masked_lm_positions=torch.tensor([6])),
        ValueError,
        r"masked_lm_positions: expected ids in \[0, 6\), got 6",
    ),
    "regression": (
        lambda: _model("BertForSequenceClassification", num_labels=1)(ZEROS, labels=torch.zeros(1)),
        ValueError,
        r"labels: expected shape \[2, 1\], got \[1\]",
    ),
    "labels": (
        _call("BertForSequenceClassification", input_ids=ZEROS, labels=[0, 1]),
        TypeError,
        "labels: expected a Tensor, got list",
    ),
    "configuration": (
        lambda: bert_fast.BertModel({"hidden_size": 32}),
        TypeError,
        r"config: expected a bert_fast.BertConfig, got builtins.dict",
    ),
    "checkpointing": (
        lambda: _model().activation_checkpointing_enable(offload=True),
        ValueError,
        "offload: expected False",
    ),
}


@pytest.mark.parametrize("case", MESSAGES)
def test_bad_arguments_are_named(case):
    call, error, message = MESSAGES[case]
    with pytest.raises(error, match=message):
        call()
