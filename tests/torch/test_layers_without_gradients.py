"""Layers without gradients on the CPU: one routine for all, the same bits in every batch, never of older weights."""

import copy
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

import bert_fast
from bert_fast import native
from bert_fast.testing.compare import assert_close_to_truth
from bert_fast.torch import encoder_layer as module

HIDDEN = 24
PRECISIONS = ["fp32", "bf16", "autocast"]


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    if native.load() is None:
        pytest.skip(str(native.unavailable_reason()))
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(num_threads)


def make_model(**changes: Any) -> Any:
    torch.manual_seed(0)
    sizes = dict(vocab_size=50, hidden_size=HIDDEN, num_hidden_layers=3, num_attention_heads=3, intermediate_size=40)
    config = bert_fast.BertConfig(**(sizes | dict(initializer_range=0.4) | changes))
    return bert_fast.BertModel(config).eval()


def in_precision(model: Any, precision: str) -> tuple[Any, AbstractContextManager[Any]]:
    """The model, in bf16 where that is asked for, and the context in which it is called."""
    context = torch.autocast("cpu", torch.bfloat16, enabled=precision == "autocast")
    return (model.bfloat16() if precision == "bf16" else model), context


@pytest.fixture(params=native.load().simd_levels() if native.load() is not None else [])
def level(request: pytest.FixtureRequest) -> Iterator[str]:
    """Each instruction set, in use."""
    lib: Any = native.load()
    lib.force_simd_level(request.param)
    yield request.param
    lib.force_simd_level("auto")


def texts(*lengths: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(1, 50, (length,), generator=generator) for length in lengths]


def padded(rows: list[Tensor], more: int = 0) -> dict[str, Tensor]:
    """A batch with `more` columns of padding beside the longest."""
    width = max(map(len, rows)) + more
    ids = torch.stack([torch.nn.functional.pad(row, (0, width - len(row))) for row in rows])
    return dict(input_ids=ids, attention_mask=(torch.arange(width) < torch.tensor([len(row) for row in rows])[:, None]))


def packed(rows: list[Tensor]) -> dict[str, Any]:
    lengths = torch.tensor([0, *map(len, rows)])
    cu_seqlens = lengths.cumsum(0, dtype=torch.int32)
    return dict(input_ids=torch.cat(rows), cu_seqlens=cu_seqlens, max_seqlen=int(lengths.max()))


def assert_true(made: Tensor, model: Any, batch: dict[str, Tensor], name: str = "last_hidden_state") -> None:
    """Against the reference in fp64, erring no more than the reference in fp32 does, as the table has it."""
    with bert_fast.use_backend("reference"), torch.no_grad():
        plain = getattr(model(**batch), name)
        truth = getattr(copy.deepcopy(model).double()(**batch), name)
    assert_close_to_truth("encoder_layer", "y", made, plain, truth)


@pytest.fixture
def calls() -> Iterator[list[int]]:
    """How many layers the routine was given, call by call."""
    seen: list[int] = []
    routine = module.encoder_layers_fwd

    def counted(layers: Any, *quantized: Any) -> Any:
        y = routine(layers, *quantized)
        seen.append(-1 if y is None else len(layers))
        return y

    with mock.patch.object(module, "encoder_layers_fwd", counted):
        yield seen


@pytest.mark.parametrize("hidden_act", ["gelu", "gelu_new", "relu", "silu", "tanh"])
@pytest.mark.parametrize("is_decoder", [False, True])
def test_values(hidden_act: str, is_decoder: bool, calls: list[int]) -> None:
    model = make_model(hidden_act=hidden_act, is_decoder=is_decoder, use_cache=False)
    batch = padded(texts(7, 1, 19, 4))
    with torch.inference_mode():
        made = model(**batch).last_hidden_state
    assert calls == ([-1] * 4 if hidden_act == "tanh" else [3])  # no routine has tanh: layer by layer, op by op
    assert_true(made, model, batch, "last_hidden_state")


def test_few_rows_of_the_last_layer(calls: list[int]) -> None:
    torch.manual_seed(0)
    config = make_model().config
    model = bert_fast.BertForSequenceClassification(config).eval()
    batch = padded(texts(7, 1, 19, 4))
    with torch.inference_mode():
        made = model(**batch).logits
    assert calls == [3]
    assert_true(made, model, batch, "logits")


def test_bits_of_the_layers_one_by_one() -> None:
    """With a hook on a layer, which is then called, and so are the others."""
    model = make_model()
    batch = padded(texts(7, 1, 19, 4))
    with torch.inference_mode():
        together = model(**batch).last_hidden_state
        shapes: list[torch.Size] = []
        model.encoder.layer[1].register_forward_hook(lambda layer, args, y: shapes.append(y.shape))
        apart = model(**batch).last_hidden_state
    assert shapes == [torch.Size([31, HIDDEN])]
    assert torch.equal(together, apart)


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("num_threads", [1, 2, 5])
def test_a_text_has_the_same_bits_in_every_batch(num_threads: int, precision: str) -> None:
    """Alone, among others in any order, padded by any number of columns, packed, by any number of threads."""
    model, context = in_precision(make_model(hidden_size=48, intermediate_size=1600), precision)
    rows = texts(1, 2, 5, 7, 16, 17, 31, 33, 64, 100, 130)
    with torch.inference_mode(), context:
        alone = [model(input_ids=row[None]).last_hidden_state[0] for row in rows]
        torch.set_num_threads(num_threads)
        generator = torch.Generator().manual_seed(2)
        for round_index in range(20):
            size = int(torch.randint(1, len(rows) + 1, (1,), generator=generator))
            order = torch.randperm(len(rows), generator=generator)[:size].tolist()
            chosen = [rows[index] for index in order]
            if round_index % 2:
                states = model(**packed(chosen)).last_hidden_state.split([len(row) for row in chosen])
            else:
                batch = padded(chosen, more=round_index)
                states = [y[: len(row)] for y, row in zip(model(**batch).last_hidden_state, chosen, strict=True)]
            for index, y in zip(order, states, strict=True):
                assert torch.equal(y, alone[index]), f"text {index} of {order}, threads {num_threads}"


def _in_place(model: Any) -> None:
    with torch.no_grad():
        model.encoder.layer[0].attention.self.query.weight.mul_(1.5)


def _by_data(model: Any) -> None:
    model.encoder.layer[2].output.dense.weight.data.add_(0.1)


def _by_numpy(model: Any) -> None:
    model.encoder.layer[1].intermediate.dense.weight.detach().numpy()[3] += 1.0


def _new_parameter(model: Any) -> None:
    dense = model.encoder.layer[1].attention.output.dense
    dense.weight = torch.nn.Parameter(dense.weight.detach() * 1.2)


def _load(model: Any) -> None:
    model.load_state_dict({name: 1.1 * value for name, value in model.state_dict().items()})


def _load_by_assignment(model: Any) -> None:
    model.load_state_dict({name: 1.1 * value for name, value in model.state_dict().items()}, assign=True)


def _step(model: Any) -> None:
    model(input_ids=torch.arange(6)[None]).last_hidden_state.square().sum().backward()
    torch.optim.SGD(model.parameters(), lr=0.01).step()


def _prune(model: Any) -> None:
    model.prune_heads({1: [0]})


def _from_another_thread(model: Any) -> None:
    thread = threading.Thread(target=_in_place, args=(model,))
    thread.start()
    thread.join()


@pytest.mark.parametrize(
    "change",
    [
        _in_place,
        _by_data,
        _by_numpy,
        _new_parameter,
        _load,
        _load_by_assignment,
        _step,
        _prune,
        _from_another_thread,
    ],
)
def test_weights_are_never_older_than_they_are(change: Callable[[Any], None]) -> None:
    model, batch = make_model(), padded(texts(7, 12))
    with torch.inference_mode():
        before = model(**batch).last_hidden_state
    change(model)
    with torch.inference_mode():
        after = model(**batch).last_hidden_state
    assert not torch.equal(before, after)
    assert_true(after, model, batch, "last_hidden_state")


@pytest.mark.parametrize("change", [_in_place, _by_data, _by_numpy, _new_parameter, _load_by_assignment])
def test_weights_rounded_by_autocast_are_never_older_than_they_are(change: Callable[[Any], None]) -> None:
    model, batch = make_model(), padded(texts(7, 12))
    with torch.inference_mode(), torch.autocast("cpu", torch.bfloat16):
        before = model(**batch).last_hidden_state
        with torch.inference_mode(False):
            change(model)
        after = model(**batch).last_hidden_state
        fresh = copy.deepcopy(model)(**batch).last_hidden_state
    assert not torch.equal(before, after)
    assert torch.equal(after, fresh)


@pytest.mark.parametrize("sizes", [(24, 40), (96, 160)], ids=str)  # of the first no row is whole tiles
@pytest.mark.parametrize("precision", ["bf16", "autocast"])
def test_bf16_errs_less_than_op_by_op(precision: str, sizes: tuple[int, int], level: str, calls: list[int]) -> None:
    model = make_model(hidden_size=sizes[0], intermediate_size=sizes[1], initializer_range=0.2)
    model, context = in_precision(model, precision)
    batch = padded(texts(7, 1, 19, 40))
    with torch.inference_mode(), context:
        made = model(**batch).last_hidden_state
        with mock.patch.object(module, "encoder_layers_fwd", return_value=None):
            plain = model(**batch).last_hidden_state  # op by op
    with torch.inference_mode(), bert_fast.use_backend("reference"):
        truth = copy.deepcopy(model).double()(**batch).last_hidden_state
    assert made.dtype == plain.dtype == torch.bfloat16
    if level == "portable":
        assert calls == [-1] * 4
        return
    assert calls == [3]
    mine, theirs = ((one.double() - truth).norm() for one in (made, plain))
    assert mine < theirs


@pytest.mark.parametrize("precision", ["bf16", "autocast"])
def test_bf16_of_few_rows_and_one_layer_alone(precision: str, calls: list[int]) -> None:
    config = make_model().config
    model, context = in_precision(bert_fast.BertForSequenceClassification(config).eval(), precision)
    batch = padded(texts(7, 1, 19, 4))
    with torch.inference_mode(), context:
        logits = model(**batch).logits
        assert calls == [3]
        shown = model(**batch, output_hidden_states=True).logits  # of states that are rounded between the layers
        assert calls == [3, 1, 1, 1]
        with mock.patch.object(module, "encoder_layers_fwd", return_value=None):
            plain = model(**batch).logits
    with torch.inference_mode(), bert_fast.use_backend("reference"):
        truth = copy.deepcopy(model).double()(**batch).logits
    for made in (logits, shown):
        assert_close_to_truth("encoder_layer", "y", made, plain, truth)


@pytest.mark.parametrize("change", ["fp32 LayerNorms", "fp16", "not contiguous", "one fp32 weight", "training"])
def test_what_is_not_bf16_alone_runs_op_by_op(change: str, calls: list[int]) -> None:
    model, batch = make_model(), padded(texts(7, 12))
    model = model.half() if change == "fp16" else model.bfloat16()
    dense = model.encoder.layer[1].output.dense
    if change == "fp32 LayerNorms":
        for module in model.modules():
            if isinstance(module, torch.nn.LayerNorm):
                module.float()
    elif change == "not contiguous":
        dense.weight = torch.nn.Parameter(dense.weight.detach().t().contiguous().t())
    elif change == "one fp32 weight":
        dense.weight = torch.nn.Parameter(dense.weight.detach().float())
    elif change == "training":
        model.train()
    with torch.inference_mode(), torch.autocast("cpu", torch.bfloat16, enabled="fp32" in change):
        made = model(**batch).last_hidden_state
    assert made.isfinite().all()
    assert 3 not in calls and calls.count(1) == (2 if change in ("not contiguous", "one fp32 weight") else 0)


def test_who_sees_layers_sees_them(calls: list[int]) -> None:
    model, batch = make_model(), padded(texts(7, 12))
    with torch.inference_mode():
        together = model(**batch).last_hidden_state
        shown = model(**batch, output_hidden_states=True)
        assert calls == [3, 1, 1, 1]
        assert len(shown.hidden_states) == 4
        assert torch.equal(shown.last_hidden_state, together)
        del calls[:]
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
            model(**batch)
        assert sum(event.name == "bert_fast::encoder_layer_fwd" for event in profiler.events()) == 3
        del calls[:]
        model.encoder.layer[1].forward = mock.Mock(wraps=model.encoder.layer[1].forward)
        assert torch.equal(model(**batch).last_hidden_state, together)
        assert model.encoder.layer[1].forward.call_count == 1


def test_gradients_take_the_other_way(calls: list[int]) -> None:
    model, batch = make_model(), padded(texts(7, 12))
    model(**batch).last_hidden_state.sum().backward()
    assert calls == []
    assert model.encoder.layer[0].output.dense.weight.grad is not None


def test_training_mode_drops(calls: list[int]) -> None:
    model, batch = make_model().train(), padded(texts(7, 12))
    with torch.inference_mode():
        first, second = (model(**batch).last_hidden_state for _ in range(2))
    assert not torch.equal(first, second)
    assert calls == []


def test_in_training_mode_gradients_change_no_bit(calls: list[int]) -> None:
    """What is computed again with gradients, as cached losses do, is what it was."""
    model = make_model(hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0).train()
    batch = padded(texts(7, 12))
    with torch.no_grad():
        without = model(**batch).last_hidden_state
    assert torch.equal(without, model(**batch).last_hidden_state)
    assert calls == []


def test_no_row_of_the_last_layer_is_wanted(calls: list[int]) -> None:
    model = bert_fast.BertForMaskedLM(make_model().config).eval()
    batch = padded(texts(7, 12))
    labels = torch.full_like(batch["input_ids"], -100)
    with torch.inference_mode():
        output = model(**batch, labels=labels, output_logits=False)
    assert calls == [3]
    with bert_fast.use_backend("reference"):
        expected = model(**batch, labels=labels, output_logits=False)
    torch.testing.assert_close(output.loss, expected.loss.detach(), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("lengths", [(1,), (0, 5, 0), (0,)])
def test_odd_batches(lengths: tuple[int, ...], precision: str) -> None:
    model, context = in_precision(make_model(), precision)
    rows = texts(*lengths)
    with torch.inference_mode(), context:
        made = model(**packed(rows)).last_hidden_state
    assert made.shape == (sum(lengths), HIDDEN)
    assert made.isfinite().all()


def test_no_extension(monkeypatch: pytest.MonkeyPatch) -> None:
    model, batch = make_model(), padded(texts(7, 12))
    with torch.inference_mode(), monkeypatch.context() as patch:
        patch.setattr(native, "load", lambda: None)
        made = model(**batch).last_hidden_state
    assert_true(made, model, batch)
