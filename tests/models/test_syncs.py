"""How often the host waits for a device in a forward pass: once for a mask that is there, and never for what it knows.

Over tensors that only say they are on a GPU (`tests/pretended_gpu.py`), by the torch back-end; `tests/null_driver`
counts the same where kernels are launched.
"""

from typing import Any

import pytest
import torch
from torch import Tensor

import bert_fast
from bert_fast.backend import use_backend
from bert_fast.huggingface.attention import attend
from bert_fast.ops import Packing, attention_padded, unpad
from tests.pretended_gpu import GPU, OnGpu, PretendedGpu
from tools.null_driver.steps import CLASSES, LENGTHS, SIZES, inputs_of

ASKS = ["_to_copy"]  # one transfer of all lengths to the host
OFFSETS = 1  # pinned tensor: offsets and order are copied to the device together
WORDS = ("BertForMaskedLM", "BertForPreTraining", "BertLMHeadModel")


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Any:
    with use_backend("torch"):
        yield PretendedGpu(monkeypatch)


def make(name: str, kind: str = "bert_fast", **changes: Any) -> Any:
    torch.manual_seed(0)
    num_labels = 2 if name == "BertForQuestionAnswering" else 3
    sizes = SIZES | dict(num_hidden_layers=2, num_labels=num_labels, is_decoder=name == "BertLMHeadModel") | changes
    if kind == "bert_fast":
        return getattr(bert_fast, name)(bert_fast.BertConfig(**sizes))
    transformers = pytest.importorskip("transformers")
    return bert_fast.fuse(getattr(transformers, name)(transformers.BertConfig(**sizes)))


@pytest.fixture
def pretends(gpu: PretendedGpu, monkeypatch: pytest.MonkeyPatch) -> PretendedGpu:
    """The same, for fused models, which leave tensors of subclasses to transformers' own code."""
    pytest.importorskip("transformers")
    from bert_fast.huggingface import reasons

    monkeypatch.setattr(reasons, "_PLAIN_TENSORS", (*reasons._PLAIN_TENSORS, OnGpu))
    return gpu


def there(inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: OnGpu(t) for name, t in inputs.items()}


@pytest.mark.parametrize("kind", ["bert_fast", "fused"])
@pytest.mark.parametrize("name", CLASSES)
def test_a_mask_costs_one_sync_and_none_on_the_host(name: str, kind: str, pretends: PretendedGpu) -> None:
    model, inputs = make(name, kind), inputs_of(name)
    wanted = model.eval()(**inputs)[0]
    mask = inputs.pop("attention_mask")
    num_masks = 2 if (name, kind) == ("BertLMHeadModel", "fused") else 1  # its loss, transformers' own, reads it too
    with pretends, torch.no_grad():
        inputs = there(inputs)
        pretends.moved(model)
        for is_training in (False, True):
            model.train(is_training)
            # Which words are labelled is asked as well, where only these go through the head.
            labels = ["nonzero"] if is_training and name in WORDS and kind == "bert_fast" else []
            with pretends.waits(ASKS + labels, num_pinned=OFFSETS):
                there_too = model(attention_mask=OnGpu(mask), **inputs)[0]
            with pretends.waits(labels, num_pinned=num_masks + OFFSETS):
                from_host = model(attention_mask=mask, **inputs)[0]
            if not is_training:
                assert torch.equal(from_host.inner, wanted) and torch.equal(there_too.inner, wanted)


@pytest.mark.parametrize("where", ["there", "on the host"])
@pytest.mark.parametrize("kind", ["bert_fast", "fused"])
def test_packed_input_waits_for_nothing(kind: str, where: str, pretends: PretendedGpu) -> None:
    name = "BertForTokenClassification"
    model, inputs = make(name, kind).eval(), inputs_of(name)
    keep = inputs.pop("attention_mask").bool()
    offsets = torch.tensor([0, *LENGTHS], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    inputs = {one: t[keep] for one, t in inputs.items()}
    wanted = model(**inputs, cu_seqlens=offsets, max_seqlen=max(LENGTHS))
    with pretends, torch.no_grad():
        pretends.moved(model)
        given = OnGpu(offsets) if where == "there" else offsets
        with pretends.waits([], num_pinned=int(where == "on the host")):
            output = model(**there(inputs), cu_seqlens=given, max_seqlen=max(LENGTHS))
    assert torch.equal(output.logits.inner, wanted.logits) and torch.equal(output.loss.inner, wanted.loss)


@pytest.mark.parametrize("kind", ["bert_fast", "fused"])
def test_a_batch_of_the_packed_collator_waits_for_nothing(kind: str, pretends: PretendedGpu) -> None:
    """As transformers' Trainer hands it over: every tensor on the device, numbers as they are."""
    features = [{"input_ids": list(range(5, 5 + length)), "label": length % 2} for length in LENGTHS]
    batch = bert_fast.PackedCollator()(features)
    model = pretends.moved(make("BertForSequenceClassification", kind))
    with pretends, torch.no_grad():
        batch = {name: OnGpu(value) if isinstance(value, Tensor) else value for name, value in batch.items()}
        with pretends.waits([]):
            model(**batch)


def test_positions_of_words_are_not_counted(gpu: PretendedGpu) -> None:
    model, inputs = gpu.moved(make("BertForMaskedLM")), inputs_of("BertForMaskedLM")
    labels, mask = inputs.pop("labels"), inputs.pop("attention_mask")
    positions = (labels.flatten() >= 0).nonzero().squeeze(1)
    with gpu, torch.no_grad():
        words = dict(labels=OnGpu(labels.flatten()[positions]), masked_lm_positions=OnGpu(positions))
        with gpu.waits([], num_pinned=1 + OFFSETS):
            model(**there(inputs), **words, attention_mask=mask)


@pytest.mark.parametrize("kind", ["bert_fast", "fused"])
def test_a_memory_has_a_mask_of_its_own(kind: str, pretends: PretendedGpu) -> None:
    model = pretends.moved(make("BertLMHeadModel", kind, add_cross_attention=True).eval())
    inputs = inputs_of("BertLMHeadModel")
    mask, _ = inputs.pop("attention_mask"), inputs.pop("labels")
    states, memory_mask = torch.randn(4, 7, 32), torch.arange(7) < torch.tensor([7, 1, 3, 5])[:, None]
    with pretends, torch.no_grad():
        arguments = there(inputs) | dict(encoder_hidden_states=OnGpu(states), use_cache=False)
        with pretends.waits(ASKS * 2, num_pinned=2 * OFFSETS):
            wanted = model(**arguments, attention_mask=OnGpu(mask), encoder_attention_mask=OnGpu(memory_mask))[0]
        with pretends.waits([], num_pinned=2 + 2 * OFFSETS):
            output = model(**arguments, attention_mask=mask, encoder_attention_mask=memory_mask)[0]
    assert torch.equal(output.inner, wanted.inner)


def test_nothing_padded_needs_no_copy(gpu: PretendedGpu) -> None:
    model = gpu.moved(make("BertModel").eval())
    with gpu, torch.no_grad():
        ids = OnGpu(torch.arange(8).view(2, 4))
        for mask in (None, torch.ones(2, 4)):
            with gpu.waits([]):
                model(ids, attention_mask=mask)
        with gpu.waits(ASKS):
            model(ids, attention_mask=OnGpu(torch.ones(2, 4)))


def test_attention_counts_one_mask_once(gpu: PretendedGpu) -> None:
    """transformers' layers hand over one mask of queries and keys."""
    x, keep = torch.randn(2, 4, 2, 8), torch.tensor([[1, 1, 0, 1], [1, 0, 0, 0]])
    wanted = attention_padded(x, x, x, keep_mask=keep)
    with gpu, torch.no_grad():
        q = OnGpu(x)
        for mask, syncs in ((OnGpu(keep), ASKS), (keep, [])):
            with gpu.waits(syncs, num_pinned=OFFSETS + (not syncs)):
                out = attention_padded(q, q, q, keep_mask=mask)
            assert torch.equal(out.inner, wanted)
        with gpu.waits(ASKS, num_pinned=OFFSETS):
            heads = q.transpose(1, 2)
            out, _ = attend(torch.nn.Identity(), heads, heads, heads, OnGpu(keep))
        assert torch.equal(out.inner, wanted)


def test_layouts_are_those_of_the_device(gpu: PretendedGpu) -> None:
    keep = torch.tensor([[1, 0, 1], [0, 1, 0]])
    with gpu:
        with gpu.waits([], num_pinned=1 + OFFSETS):
            packed, packing = unpad(OnGpu(torch.arange(6).view(2, 3)), keep)
        with gpu.waits(ASKS, num_pinned=OFFSETS):
            wanted = Packing.from_keep_mask(OnGpu(keep))
        for name in ("cu_seqlens", "coords", "indices", "order"):
            got, want = getattr(packing, name), getattr(wanted, name)
            assert got.device == GPU and torch.equal(got.inner, want.inner)
        assert packing.max_seqlen == wanted.max_seqlen == 2 and packed.inner.tolist() == [0, 2, 4]


def test_offsets_of_the_host_are_checked(gpu: PretendedGpu) -> None:
    model = gpu.moved(make("BertModel"))
    with gpu, torch.no_grad():
        ids, offsets = OnGpu(torch.arange(4)), torch.tensor([0, 3, 4], dtype=torch.int32)
        with pytest.raises(ValueError, match=r"^max_seqlen: expected at least the longest sequence"):
            model(ids, cu_seqlens=offsets, max_seqlen=2)
        with pytest.raises(ValueError, match=r"^cu_seqlens: expected offsets that rise from 0 to the number of tokens"):
            model(ids, cu_seqlens=offsets[:2], max_seqlen=3)


def test_what_would_be_baked_into_a_graph_is_refused(gpu: PretendedGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    offsets = torch.tensor([0, 3, 4], dtype=torch.int32)
    with gpu:
        with pytest.raises(ValueError, match=r"expected device cuda:0 while a CUDA graph is captured, got cpu"):
            Packing.from_cu_seqlens(offsets, 3, 4, GPU)
        with pytest.raises(ValueError, match=r"expected device cuda:0 while a CUDA graph is captured, got cpu"):
            Packing.from_keep_mask(torch.tensor([[1, 0]]), GPU)
        Packing.from_cu_seqlens(OnGpu(offsets), 3, 4, GPU)


def test_other_masks_and_devices_are_refused(gpu: PretendedGpu) -> None:
    model = gpu.moved(make("BertModel"))
    with gpu, torch.no_grad():
        ids = OnGpu(torch.arange(8).view(2, 4))
        for shape in ((2, 4, 4), (2, 1, 1, 4)):
            with pytest.raises(ValueError, match=r"^attention_mask: expected device cuda:0 .*, got cpu"):
                model(ids, attention_mask=torch.ones(shape))
        with pytest.raises(ValueError, match=r"^keep_mask: expected device cpu or cpu, got cuda:0"):
            Packing.from_keep_mask(OnGpu(torch.ones(2, 4)), "cpu")
        with pytest.raises(ValueError, match=r"^attention_mask: expected device cpu .*, got cuda:0"):
            make("BertModel")(torch.arange(8).view(2, 4), attention_mask=OnGpu(torch.ones(2, 4)))


def test_transformers_own_code_gets_the_mask_where_the_tokens_are(pretends: PretendedGpu) -> None:
    """A call that is not packed takes a mask of the host too."""
    from bert_fast.huggingface.models import beside_tokens

    ids, mask = OnGpu(torch.arange(8).view(2, 4)), torch.ones(2, 4)
    with pretends:
        inputs = {"input_ids": ids, "attention_mask": mask, "head_mask": None}
        with pretends.waits([], num_pinned=1):
            assert beside_tokens(inputs)["attention_mask"].device == GPU
        there_already = inputs | {"attention_mask": OnGpu(mask)}
        assert beside_tokens(there_already) is there_already
        assert beside_tokens({"attention_mask": mask}) == {"attention_mask": mask}
