"""What BertModel takes beside tokens and a 2-D mask, against the reference: training with dropout, all gradients."""

import pytest
import torch
from torch import Tensor, nn

import bert_fast
from bert_fast.reference.model import ReferenceBertModel
from bert_fast.testing.compare import assert_close_to_truth
from bert_fast.testing.parity import Case, evaluate, randomize

DECODER = {"is_decoder": True}
CROSS = {"is_decoder": True, "add_cross_attention": True}
MEMORY = ("encoder_hidden_states", "encoder_attention_mask")
SHOW = {"output_attentions": True, "output_hidden_states": True}
SEED = torch.tensor([2**40 + 17])

CASES = [
    Case("head mask", inputs=("head_mask",), mask="holes"),
    Case("head mask of layers", inputs=("layer_head_mask",)),
    Case("mask 3d", mask="3d"),
    Case("mask 4d", mask="4d", inputs=("layer_head_mask",)),
    Case("attentions", mask="holes", flags=SHOW),
    Case("attentions, head mask", mask="left", inputs=("head_mask",), flags=SHOW),
    Case("relative key", config={"position_embedding_type": "relative_key"}, mask="holes"),
    Case("relative key and query", config={"position_embedding_type": "relative_key_query"}, mask="left"),
    Case("relative attentions", config={"position_embedding_type": "relative_key_query"}, mask="4d", flags=SHOW),
    Case("vectors for words", inputs=("inputs_embeds", "token_type_ids", "position_ids"), mask="3d"),
    Case("chunks", config={"chunk_size_feed_forward": 3}, mask="holes", flags={"output_hidden_states": True}),
    Case("decoder", config=DECODER, mask="holes"),
    Case("decoder, no mask", config=DECODER, mask="none", flags=SHOW),
    Case("decoder, mask 4d", config=DECODER, mask="4d"),
    Case("relative decoder", config=DECODER | {"position_embedding_type": "relative_key_query"}, mask="left"),
    Case("memory", config=CROSS, inputs=MEMORY),
    Case("memory without mask", config=CROSS, inputs=("encoder_hidden_states",), mask="none", flags=SHOW),
    Case("memory, everything", config=CROSS | {"chunk_size_feed_forward": 4}, inputs=(*MEMORY, "head_mask"),
         mask="left", flags=SHOW),
    Case("relative decoder with memory", config=CROSS | {"position_embedding_type": "relative_key"}, inputs=MEMORY),
    Case("no memory given", config=CROSS, mask="left"),
    *(Case(f"cache{name}", first_step=6, config=DECODER | config, **settings) for name, config, settings in (
        ("", {}, {"mask": "holes"}),
        (", no mask", {}, {"mask": "none", "flags": SHOW}),
        (", left", {}, {"mask": "left", "inputs": ("head_mask",)}),
        (", relative", {"position_embedding_type": "relative_key_query"}, {"mask": "left", "flags": SHOW}),
        (", memory", CROSS, {"inputs": MEMORY, "flags": SHOW}),
    )),
]  # fmt: skip


def pair(case: Case, dtype: torch.dtype, dropout_p: float) -> tuple[nn.Module, nn.Module]:
    """Ours and the reference, in training, with the same parameters."""
    probabilities = {"hidden_dropout_prob": dropout_p, "attention_probs_dropout_prob": dropout_p}
    config = bert_fast.BertConfig(**case.full_config(), **probabilities)
    reference, fast = ReferenceBertModel(config), bert_fast.BertModel(config)
    randomize(reference)
    fast.load_state_dict(reference.state_dict())
    return fast.to(dtype).train(), reference.to(dtype).train()


def compare(fast: dict[str, Tensor], plain: dict[str, Tensor], truth: dict[str, Tensor]) -> None:
    assert fast.keys() == truth.keys()
    for name, value in truth.items():
        scale = max(1.0, value.abs().max().item())
        kind = "gradient" if name.startswith("grad ") else "output"
        assert_close_to_truth("fast_model", kind, fast[name] / scale, plain[name] / scale, value / scale)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_training_is_the_reference_s(case: Case):
    case = Case(**{**vars(case), "flags": {**case.flags, "dropout_seed": SEED}})
    fast, plain = (evaluate(m, case, case.tensors(torch.float32)) for m in pair(case, torch.float32, 0.2))
    truth = evaluate(pair(case, torch.float64, 0.2)[1], case, case.tensors(torch.float64))
    compare(fast, plain, truth)


SIZES = dict(
    vocab_size=50, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=40,
    max_position_embeddings=20, initializer_range=0.3,
)  # fmt: skip


def make(**changes: object) -> bert_fast.BertModel:
    return bert_fast.BertModel(bert_fast.BertConfig(**{**SIZES, **changes})).train()


def padded_and_packed() -> tuple[dict[str, Tensor], dict[str, Tensor], Tensor]:
    ids, mask = torch.randint(1, 50, (3, 7)), torch.ones(3, 7, dtype=torch.bool)
    mask[1, 4:], mask[2, 6:] = False, False
    cu_seqlens = torch.tensor([0, 7, 11, 17], dtype=torch.int32)
    packed = {"input_ids": ids[mask], "cu_seqlens": cu_seqlens, "max_seqlen": 7}
    return {"input_ids": ids, "attention_mask": mask}, packed, mask


FACTORS = torch.rand(2, 3, 4, 7, 7)
FEATURES = {
    "head mask": ({}, {"head_mask": FACTORS}),
    "relative": ({"position_embedding_type": "relative_key_query"}, {}),
    "decoder": ({"is_decoder": True}, {}),
    "memory": (
        CROSS,
        {"encoder_hidden_states": torch.randn(3, 5, 32), "encoder_attention_mask": FACTORS[0, :, 0, 0, :5] > 0.4},
    ),
    "chunks": ({"chunk_size_feed_forward": 2}, {}),
}  # fmt: skip


@pytest.mark.parametrize("name", FEATURES)
def test_packed_input_gives_the_bits_of_padded(name: str):
    config, arguments = FEATURES[name]
    model = make(**config)
    padded, packed, mask = padded_and_packed()
    results = []
    for call in (padded, packed):
        model.zero_grad()
        output = model(**call, **arguments, dropout_seed=SEED).last_hidden_state
        output = output[mask] if call is padded else output
        output.sin().sum().backward()
        results.append([output, *(p.grad for p in model.parameters() if p.grad is not None)])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_attentions_of_packed_input_are_those_of_padded():
    model = make(is_decoder=True)
    padded, packed, _ = padded_and_packed()
    wanted = model(**padded, output_attentions=True, dropout_seed=SEED).attentions
    got = model(**packed, output_attentions=True, dropout_seed=SEED).attentions
    assert all(torch.equal(a, b) for a, b in zip(got, wanted, strict=True))
    assert wanted[0].shape == (3, 4, 7, 7) and not wanted[0][1, :, 4:].any() and not wanted[0][1, :, :, 4:].any()


def test_masks_that_say_the_same():
    """Bool, integers and what is added; one row or head for all; a 2-D mask beside what it means to every query."""
    model, ids = make().eval(), torch.randint(1, 50, (3, 7))
    sees = torch.rand(3, 7, 7) > 0.3
    wanted = model(ids, sees).last_hidden_state
    least = torch.finfo(torch.float32).min
    for mask in (
        sees.long(), sees[:, None], sees[:, None].expand(3, 4, 7, 7), torch.where(sees, 0.0, least)[:, None],
        torch.where(sees, 0.0, -torch.inf)[:, None],
    ):  # fmt: skip
        assert torch.equal(model(ids, mask).last_hidden_state, wanted)
    keep = torch.tensor([[1] * 7, [1] * 4 + [0] * 3, [1] * 7])
    shown = model(ids, keep[:, None, None]).last_hidden_state  # [B, 1, 1, Sk]: padding is still computed
    torch.testing.assert_close(shown[keep.bool()], model(ids, keep).last_hidden_state[keep.bool()])
    assert shown[1, 5].any()


def test_a_mask_gets_its_gradient():
    model, ids = make(), torch.randint(1, 50, (3, 7))
    bias = torch.randn(3, 1, 7, 7).requires_grad_()
    model(ids, bias, dropout_seed=SEED).last_hidden_state.sin().sum().backward()
    assert bias.grad is not None and bias.grad.abs().min() > 0


@pytest.mark.parametrize("arguments", [{"use_reentrant": True}, {"use_reentrant": False}])
def test_checkpointing_gives_the_memory_its_gradient(arguments: dict[str, bool]):
    model = make(**CROSS)
    ids, results = torch.randint(1, 50, (3, 7)), []
    memory = torch.randn(3, 5, 32, requires_grad=True)
    for is_on in (False, True):
        if is_on:
            model.gradient_checkpointing_enable(arguments)
        model.zero_grad()
        memory.grad = None
        output = model(ids, encoder_hidden_states=memory, dropout_seed=SEED)
        assert (output.past_key_values is None) == is_on  # a layer that runs twice must not extend a cache twice
        output.last_hidden_state.sin().sum().backward()
        results.append([memory.grad, *(p.grad for p in model.parameters() if p.grad is not None)])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@pytest.mark.parametrize("is_packed", [False, True])
def test_what_is_shown_is_what_the_result_depends_on(is_packed: bool):
    """Gradients of hidden states and attentions, as methods that explain a result want them."""
    model = make(**CROSS)
    call = padded_and_packed()[is_packed]
    memory = torch.randn(3, 5, 32)
    output = model(**call, **SHOW, encoder_hidden_states=memory, dropout_seed=SEED)
    shown = [*output.hidden_states, *output.attentions, *output.cross_attentions]
    gradients = torch.autograd.grad(output.last_hidden_state.sin().sum(), shown)
    assert len(shown) == 3 + 2 + 2 and all(gradient.any() for gradient in gradients)


def test_checkpointing_leaves_attentions_alone():
    model, ids, results = make(), torch.randint(1, 50, (3, 7)), []
    for is_on in (False, True):
        if is_on:
            model.gradient_checkpointing_enable()
        model.zero_grad()
        attentions = model(ids, output_attentions=True, dropout_seed=SEED).attentions
        torch.stack(attentions).sin().sum().backward()
        results.append([torch.stack(attentions), *(p.grad for p in model.parameters() if p.grad is not None)])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
