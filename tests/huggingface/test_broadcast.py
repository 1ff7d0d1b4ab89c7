"""Masks, types and positions that broadcast to a batch [B, S], beside untouched models; what does not is refused."""

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import bert_fast
from bert_fast.huggingface import fuse, why_not
from bert_fast.huggingface.attention import register_attention
from tests.huggingface.families import CONFIG, ENCODERS, ROTARY

pytest.importorskip("transformers", minversion="5")
B, S = 3, 9
SHAPES = [(1, S), (B, 1), (1, 1), (S,), (1,), (), (B, S)]
NO_MATCH = [(2, S), (B, 2), (2,), (B, 1, S)]
PADDED = torch.tensor([[1, 1, 1, 1, 1, 1, 0, 0, 0]])
MASKS = {"[1, S]": PADDED, "[B, 1]": torch.tensor([[1], [0], [1]]), "[1, 1]": torch.ones(1, 1), "all": PADDED[:, :6]}


def _ids(*shape: int, low: int = 3, high: int = 61) -> Tensor:
    return torch.randint(low, high, shape)


def _models(make: Any, prefix: str) -> dict[str, Any]:
    """An untouched model of a family by each of its attentions, and the same parameters fused, and in our class."""
    base = make(f"{prefix}Model", **CONFIG.get(prefix, {})).double()
    models = {"eager": base}
    base.set_attn_implementation("eager")
    if prefix != "MPNet":
        models["sdpa"] = copy.deepcopy(base)
        models["sdpa"].set_attn_implementation("sdpa")
    models["fused"] = fuse(copy.deepcopy(base))
    if prefix == "Bert":
        models["ours"] = bert_fast.BertModel(bert_fast.BertConfig.from_hf(base.config)).eval().double()
        models["ours"].load_state_dict(base.state_dict(), strict=False)
    return models


def _hidden(model: nn.Module, arguments: dict[str, Any]) -> Tensor | Exception:
    try:
        with torch.no_grad():
            return model(**arguments).last_hidden_state
    except (IndexError, RuntimeError, TypeError, ValueError) as error:
        return error


def _ids_beside(prefix: str) -> Iterator[tuple[str, dict[str, Tensor]]]:
    """Types and positions of every shape, each alone and both."""
    ids, most = _ids(B, S), CONFIG.get(prefix, {}).get("type_vocab_size", 2)
    for shape in (*SHAPES, *NO_MATCH):
        if prefix in ROTARY and shape == (2,):
            continue  # transformers turns the first of its two heads by the one, and the second by the other
        positions = {"position_ids": _ids(*shape, high=20)}
        yield f"positions {shape}", {"input_ids": ids, **positions}
        if prefix not in ENCODERS:
            types = {"token_type_ids": _ids(*shape, low=0, high=most)}
            yield f"types {shape}", {"input_ids": ids, **types}
            yield f"both {shape}", {"input_ids": ids, **types, **positions}
    if prefix not in ENCODERS:
        types = {"token_type_ids": _ids(B, S, low=0, high=most)}
        yield "types of more rows", {"input_ids": ids[:1], **types}
        yield "types of vectors", {"inputs_embeds": torch.randn(1, S, _width(prefix)).double(), **types}


def _width(prefix: str) -> int:
    return CONFIG.get(prefix, {}).get("embedding_size", 32)


@pytest.mark.parametrize("prefix", ["Bert", *CONFIG])
def test_types_and_positions(make, prefix) -> None:
    """Whatever an untouched model takes, by either of its attentions, and with its numbers."""
    models, taken = _models(make, prefix), 0
    for name, arguments in _ids_beside(prefix):
        made = {how: _hidden(model, arguments) for how, model in models.items()}
        expected = made.pop("eager")
        if isinstance(expected, Exception):
            # transformers needs positions of two dimensions, some families only without types; we take others, too.
            if "position_ids" in arguments and not isinstance(made["fused"], Exception):
                full = {**arguments, "position_ids": arguments["position_ids"].expand(B, S)}
                torch.testing.assert_close(made["fused"], _hidden(models["eager"], full))
            else:
                assert isinstance(made["fused"], TypeError | ValueError), name
            continue
        taken += 1
        assert why_not(models["fused"], **arguments) == []
        for how, hidden in made.items():
            torch.testing.assert_close(hidden, expected, msg=lambda text, at=f"{name}, {how}": f"{at}: {text}")
    assert taken > 5


@pytest.mark.parametrize("prefix", ["Bert", *CONFIG])
def test_masks(make, prefix) -> None:
    """As the whole mask; untouched models take one row of it only where it hides nothing (transformers 4: always)."""
    models, ids = _models(make, prefix), _ids(B, S)
    for mask in MASKS.values():
        full = torch.ones(B, S) if mask.shape == (1, 6) else mask.expand(B, S).contiguous()
        mask = full[:1] if mask.shape == (1, 6) else mask
        expected = _hidden(models["eager"], {"input_ids": ids, "attention_mask": full})
        for how, model in models.items():
            hidden = _hidden(model, {"input_ids": ids, "attention_mask": mask})
            if isinstance(hidden, IndexError):
                assert how in ("eager", "sdpa") and mask.shape[0] == 1 and not mask.all()
                continue
            torch.testing.assert_close(hidden[full != 0], expected[full != 0])
    assert why_not(models["fused"], input_ids=ids, attention_mask=PADDED) == []
    for shape in ((2, S), (B, 2), (B, S + 1)):
        with pytest.raises(ValueError, match=r"attention_mask: expected shape"):
            models["fused"](input_ids=ids, attention_mask=torch.ones(shape))


@pytest.mark.parametrize("name", ["BertForTokenClassification", "BertForSequenceClassification", "BertForMaskedLM"])
def test_heads_on_either_path(make, name) -> None:
    """A call that leaves the packed path takes the same masks, and leaves out the same padding."""
    model = fuse(make(name).double())
    labels = _ids(B, S, low=0, high=3) if "Sequence" not in name else _ids(B, low=0, high=3)
    for mask in (PADDED, MASKS["[B, 1]"]):
        given = {"input_ids": _ids(B, S), "token_type_ids": _ids(1, S, low=0, high=2), "labels": labels}
        full = model(**given, attention_mask=mask.expand(B, S).contiguous())
        for asked in (None, True):
            output = model(**given, attention_mask=mask, output_attentions=asked)
            assert (output.attentions is None) == (asked is None)
            if "Sequence" not in name or mask is PADDED:  # of a text without tokens nothing is pooled
                torch.testing.assert_close(output.logits, full.logits)
                torch.testing.assert_close(output.loss, full.loss)


def test_decoders_and_memories(make) -> None:
    """One memory for all rows, one row of its mask; a decoder's own mask has all columns."""
    base = make("BertLMHeadModel", is_decoder=True, add_cross_attention=True).double()
    model, ids, memory = fuse(copy.deepcopy(base)), _ids(B, S), torch.randn(B, 4, 32).double()
    keep = torch.tensor([[1, 1, 0, 0]])
    ours = bert_fast.BertLMHeadModel(bert_fast.BertConfig.from_hf(base.config)).eval().double()
    ours.load_state_dict(base.state_dict(), strict=False)
    cases = {
        "one memory": {"encoder_hidden_states": memory[:1]},
        "its mask": {"encoder_hidden_states": memory[:1], "encoder_attention_mask": keep},
        "one column": {"encoder_hidden_states": memory, "encoder_attention_mask": torch.ones(B, 1)},
        "one row": {"encoder_hidden_states": memory, "attention_mask": torch.ones(1, S)},
    }
    for name, given in cases.items():
        call = {"input_ids": ids, "use_cache": False, **given}
        expected = base(**call).logits
        for one in (model, ours):
            torch.testing.assert_close(one(**call).logits, expected, msg=lambda text, name=name: f"{name}: {text}")
        assert why_not(model, **call) == []
    # Behind a decoder's mask transformers counts every further column as padding.
    for one in (model, ours):
        with pytest.raises(ValueError, match=r"attention_mask: expected shape \[3, 9\]"):
            one(input_ids=ids, use_cache=False, attention_mask=torch.ones(B, 1))


def test_attention_alone(make) -> None:
    """`attn_implementation="bert_fast"`, whose layers get the mask as it came."""
    register_attention()
    base, ids = make().double(), _ids(B, S)
    model = copy.deepcopy(base)
    model.set_attn_implementation("bert_fast")
    for mask in (PADDED, MASKS["[B, 1]"], MASKS["[1, 1]"]):
        full = mask.expand(B, S).contiguous()
        expected = base(input_ids=ids, attention_mask=full).last_hidden_state
        hidden = model(input_ids=ids, attention_mask=mask).last_hidden_state
        torch.testing.assert_close(hidden[full != 0], expected[full != 0])
