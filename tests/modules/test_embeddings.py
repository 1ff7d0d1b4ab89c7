"""BertEmbeddings: Hugging Face's parameters, agreement with the modules it is made of, one mask however tokens lie."""

import pytest
import torch
from torch import nn

from bert_fast.models.config import BertConfig
from bert_fast.modules.call import Call
from bert_fast.modules.embeddings import BertEmbeddings
from bert_fast.ops import Packing
from bert_fast.testing.compare import assert_close_to_truth

SIZES = {"vocab_size": 30, "hidden_size": 24, "num_attention_heads": 2, "max_position_embeddings": 12}
SEED = torch.tensor([9])
IDS = torch.randint(1, 30, (2, 5), generator=torch.Generator().manual_seed(1))
KEEP = torch.tensor([[1, 1, 1, 0, 0], [0, 1, 1, 1, 1]])


def _module(**settings) -> BertEmbeddings:
    module = BertEmbeddings(BertConfig(**(SIZES | settings)))
    for parameter in module.parameters():
        nn.init.normal_(parameter)
    return module


def _full(module: BertEmbeddings, ids=IDS, types=None, embeds=None) -> torch.Tensor:
    packing = Packing.full(*IDS.shape, IDS.device)
    flat = [None if t is None else t.flatten(0, 1) for t in (ids, types, None, embeds)]
    return module(*flat, call=Call(packing, SEED))


def test_parameters_are_named_as_in_hugging_face() -> None:
    assert {name: list(t.shape) for name, t in _module().state_dict().items()} == {
        "word_embeddings.weight": [30, 24],
        "position_embeddings.weight": [12, 24],
        "token_type_embeddings.weight": [2, 24],
        "LayerNorm.weight": [24],
        "LayerNorm.bias": [24],
    }


@pytest.mark.parametrize("has_types", [False, True])
def test_eval_is_the_composition_of_its_modules(has_types: bool) -> None:
    types = torch.randint(0, 2, IDS.shape) if has_types else None
    module = _module().eval()
    results = {}
    for dtype in (torch.float32, torch.float64):
        m = module.to(dtype)
        h = m.word_embeddings(IDS) + m.position_embeddings(torch.arange(5))
        h = h + m.token_type_embeddings(torch.zeros_like(IDS) if types is None else types)
        results[dtype] = m.LayerNorm(h).flatten(0, 1)
    actual = _full(module.float(), types=types)
    assert_close_to_truth("embedding", "y", actual, results[torch.float32], results[torch.float64])


def test_vectors_of_the_words_stand_for_their_ids() -> None:
    module = _module().train()
    assert torch.equal(_full(module), _full(module, None, embeds=module.word_embeddings(IDS)))


def test_padded_and_packed_tokens_get_the_same_rows() -> None:
    module = _module(hidden_dropout_prob=0.4).train()
    packing = Packing.from_keep_mask(KEEP)
    ids = packing.pack(IDS)
    packed = module(ids, call=Call(packing, SEED))
    assert torch.equal(packed, _full(module)[KEEP.flatten() != 0])
    assert not torch.equal(packed, module(ids, call=Call(packing, SEED + 1)))


def test_evaluation_drops_nothing_and_saves_no_activation() -> None:
    module = _module(hidden_dropout_prob=0.9).eval()
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        y = _full(module)
    assert (y != 0).all()
    parameters = {p.data_ptr() for p in module.parameters()}
    assert sum(t.numel() for t in saved if t.data_ptr() not in parameters) <= 4 * IDS.numel()  # ids, mean, rstd


def test_the_padding_row_gets_no_gradient() -> None:
    module = _module(pad_token_id=3)
    ids = IDS.clone()
    ids[0, :2] = 3
    _full(module, ids).square().sum().backward()
    gradient = module.word_embeddings.weight.grad
    assert not gradient[3].any() and gradient[ids[ids != 3]].any(1).all()


def test_a_decoder_that_shares_the_table_adds_its_gradient() -> None:
    module = _module(hidden_dropout_prob=0.0)
    decoder = nn.Linear(24, 30, bias=False)
    decoder.weight = module.word_embeddings.weight
    y, factor, upstream = _full(module), torch.randn(10, 30), torch.randn(10, 24)
    ((y * upstream).sum() + (decoder(y.detach()) * factor).sum()).backward()
    tied = module.word_embeddings.weight.grad.clone()
    module.zero_grad()
    _full(module).backward(upstream)
    torch.testing.assert_close(tied, module.word_embeddings.weight.grad + factor.t() @ y.detach())


def test_a_replaced_word_table_is_used() -> None:
    module = _module().eval()
    module.word_embeddings = nn.Embedding.from_pretrained(torch.randn(40, 24), freeze=True)
    y = _full(module, IDS + 10)
    y.sum().backward()
    assert module.word_embeddings.weight.grad is None and module.position_embeddings.weight.grad is not None


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((IDS + 30, None, None), r"input_ids: expected ids in \[0, 30\)"),
        ((IDS, IDS * 0 + 2, None), r"token_type_ids: expected ids in \[0, 2\), got 2"),
        ((IDS, None, IDS * 0 - 1), r"position_ids: expected ids in \[0, 12\), got -1"),
    ],
)
def test_messages_name_the_models_arguments(arguments: tuple, message: str) -> None:
    flat = [None if t is None else t.flatten() for t in arguments]
    with pytest.raises(ValueError, match=message):
        _module()(*flat, call=Call(Packing.full(2, 5, IDS.device), SEED))
