"""Texts one after another in one row: a fused model sees what transformers' attentions see in it."""

import inspect
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import bert_fast
from bert_fast.huggingface.reasons import reasons
from bert_fast.testing.tolerances import RELATIVE
from tests.huggingface.families import CONFIG, ROTARY

transformers = pytest.importorskip("transformers", minversion="5")

from transformers import modeling_flash_attention_utils as flash  # noqa: E402

bert_fast.register_attention()
LENGTHS = (5, 1, 7, 3)
POSITIONS = torch.cat([torch.arange(length) for length in LENGTHS]).unsqueeze(0)
CU_SEQLENS = torch.tensor([0, *torch.tensor(LENGTHS).cumsum(0)], dtype=torch.int32)
# Families whose attention is transformers' interface -> where positions begin; whether it gets position_ids.
FAMILIES = {
    "Bert": (0, True), "Electra": (0, True), "Roberta": (2, True), "XLMRoberta": (2, True), "Camembert": (3, True),
    "DistilBert": (0, False),
    **{prefix: (0, prefix == "NomicBert") for prefix in ROTARY if prefix in CONFIG},
}  # fmt: skip
PADDING = {"Roberta": 1, "XLMRoberta": 1, "Camembert": 2, "MPNet": 1}


def _flash(q: Tensor, k: Tensor, v: Tensor, dropout_p: float = 0.0, softmax_scale: float | None = None,
           causal: bool = False) -> Tensor:  # fmt: skip
    """flash_attn_func: [B, S, A, D]."""
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    out = F.scaled_dot_product_attention(q, k, v, dropout_p=dropout_p, scale=softmax_scale, is_causal=causal)
    return out.transpose(1, 2)


def _flash_varlen(q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: Any,
                  max_seqlen_k: Any, dropout_p: float = 0.0, softmax_scale: float | None = None,
                  causal: bool = False) -> Tensor:  # fmt: skip
    """flash_attn_varlen_func: [T, A, D]."""
    sizes = [cu_seqlens.diff().tolist() for cu_seqlens in (cu_seqlens_q, cu_seqlens_k, cu_seqlens_k)]
    parts = zip(*(t.split(lengths) for t, lengths in zip((q, k, v), sizes, strict=True)), strict=True)
    return torch.cat(
        [_flash(*(t.unsqueeze(0) for t in part), dropout_p, softmax_scale, causal).squeeze(0) for part in parts]
    )


@pytest.fixture(autouse=True)
def flash_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    """The package flash_attn by PyTorch's operators, under transformers' own code."""
    monkeypatch.setattr(flash, "_loaded_implementation", None)
    functions = (_flash, _flash_varlen, None, flash._pad_input, flash._unpad_input)
    monkeypatch.setattr(flash, "_lazy_imports", lambda *args, **kwargs: functions)
    for name in ("_flash_fn", "_flash_varlen_fn", "_pad_fn", "_unpad_fn", "_process_flash_kwargs_fn"):
        monkeypatch.setattr(flash, name, None)


def _models(make: Any, name: str, attention: str = "flash_attention_2", **config: Any) -> tuple[Any, Any]:
    """(fused, untouched), with the same parameters."""
    family = name.split("For")[0].removesuffix("Model").removesuffix("LMHead")
    if family in PADDING:
        config["pad_token_id"] = PADDING[family]
    models = make(name, **config).double(), make(name, **config).double()
    models[1].load_state_dict(models[0].state_dict())
    for model in models:
        model.config._attn_implementation = attention
    return bert_fast.fuse(models[0]), models[1]


def _batch(name: str, how: str = "positions") -> dict[str, Any]:
    family = next(family for family in sorted(FAMILIES, key=len, reverse=True) if name.startswith(family))
    batch: dict[str, Any] = {"input_ids": torch.randint(4, 61, (1, sum(LENGTHS)))}
    if how in ("positions", "both"):
        batch["position_ids"] = POSITIONS + FAMILIES[family][0]
    if how in ("offsets", "both"):
        batch |= {"cu_seq_lens_q": CU_SEQLENS, "cu_seq_lens_k": CU_SEQLENS.clone()}
        batch |= {"max_length_q": max(LENGTHS), "max_length_k": max(LENGTHS)}
    return batch


def _check(fused: Any, untouched: Any, batch: dict[str, Any], is_packed: bool = True) -> None:
    """Outputs and gradients are the untouched model's, by the path that is expected."""
    found = bert_fast.why_not(
        fused,
        **{
            name: value
            for name, value in batch.items()
            if not name.endswith(("label", "labels", "start_positions", "end_positions"))
        },
    )
    assert (found == []) == is_packed, found
    results = []
    for model in (fused, untouched):
        model.zero_grad()
        output = model(**batch)
        tensors = {name: value for name, value in output.items() if isinstance(value, Tensor)}
        seen = sum((value.double() ** 2).sum() for value in tensors.values())
        seen.backward()
        results.append(tensors | {n: p.grad for n, p in model.named_parameters() if p.grad is not None})
    assert results[0].keys() == results[1].keys()
    for key, wanted in results[1].items():
        got = results[0][key]
        assert got.shape == wanted.shape, key
        scale = max(1.0, wanted.abs().max().item())
        assert (got - wanted).abs().max().item() <= RELATIVE["vs_transformers_fp64"] * scale, key


@pytest.mark.parametrize("attention", ["flash_attention_2", "bert_fast"])
@pytest.mark.parametrize("how", ["positions", "offsets", "both"])
@pytest.mark.parametrize("family", FAMILIES)
def test_every_family(make, family, how, attention) -> None:
    name = f"{family}Model"
    batch, tells = _batch(name, how), FAMILIES[family][1] or how != "positions"
    fused, untouched = _models(make, name, attention)
    _check(fused, untouched, batch)
    one = {**batch, "position_ids": torch.arange(sum(LENGTHS)).unsqueeze(0) + FAMILIES[family][0]}
    texts = [fused(**one if each else batch).last_hidden_state for each in range(2)]
    assert tells or not torch.equal(*texts), "the texts make a difference"


@pytest.mark.parametrize("family", FAMILIES)
def test_other_attentions_see_one_text(make, family) -> None:
    name = f"{family}Model"
    for attention, how in (("sdpa", "both"), ("eager", "positions")):
        fused, untouched = _models(make, name, attention)
        _check(fused, untouched, _batch(name, how))


HEADS = {
    "BertForMaskedLM": lambda ids: {"labels": ids.clone()},
    "RobertaForMaskedLM": lambda ids: {"labels": ids.clone()},
    "DistilBertForMaskedLM": lambda ids: {"labels": ids.clone()},
    "ElectraForPreTraining": lambda ids: {"labels": (ids > 30).long()},
    "BertForTokenClassification": lambda ids: {"labels": ids % 3},
    "BertForSequenceClassification": lambda ids: {"labels": torch.tensor([2])},
    "RobertaForSequenceClassification": lambda ids: {"labels": torch.tensor([2])},
    "BertForQuestionAnswering": lambda ids: {"start_positions": torch.tensor([3]), "end_positions": torch.tensor([9])},
    "BertForPreTraining": lambda ids: {"labels": ids.clone(), "next_sentence_label": torch.tensor([1])},
}


@pytest.mark.parametrize("name", HEADS)
def test_heads(make, name) -> None:
    how = "offsets" if name.startswith("DistilBert") else "positions"
    batch = _batch(name, how)
    config = {"num_labels": 2} if name.endswith("Answering") else {}
    _check(*_models(make, name, **config), {**batch, **HEADS[name](batch["input_ids"])})


@pytest.mark.parametrize("attention", ["flash_attention_2", "bert_fast"])
def test_a_decoder(make, attention) -> None:
    """To bert_fast's attention a decoder gives a mask of all columns: one text."""
    batch = {**_batch("Bert"), "use_cache": False}
    models = _models(make, "BertLMHeadModel", attention, is_decoder=True)
    _check(*models, {**batch, "labels": batch["input_ids"].clone()})


def test_the_collator_as_installed(make) -> None:
    """By its defaults, and with offsets; RoBERTa's positions begin behind padding's id."""
    texts = [{"input_ids": torch.randint(4, 61, (length,)).tolist()} for length in LENGTHS]
    for name, options in (("BertForMaskedLM", {}), ("RobertaForMaskedLM", {"return_flash_attn_kwargs": True})):
        if "position_ids_start" in inspect.signature(transformers.DataCollatorWithFlattening).parameters:
            options = {**options, "position_ids_start": FAMILIES[name.removesuffix("ForMaskedLM")][0]}
        batch = dict(transformers.DataCollatorWithFlattening(return_seq_idx=True, **options)(texts))
        _check(*_models(make, name), batch)


def test_texts_are_those_of_a_padded_batch(make) -> None:
    """Flattened, padded and packed runs draw the same dropout."""
    fused, _ = _models(make, "BertModel", dropout_p=0.3)
    fused.train()
    ids, seed = torch.randint(4, 61, (sum(LENGTHS),)), torch.tensor([7])
    flat = fused(input_ids=ids.unsqueeze(0), position_ids=POSITIONS, dropout_seed=seed).last_hidden_state
    packed = fused(input_ids=ids, cu_seqlens=CU_SEQLENS, max_seqlen=max(LENGTHS), dropout_seed=seed).last_hidden_state
    assert torch.equal(flat.squeeze(0), packed)
    rows = torch.nn.utils.rnn.pad_sequence(ids.split(list(LENGTHS)), batch_first=True)
    mask = torch.nn.utils.rnn.pad_sequence([torch.ones(length) for length in LENGTHS], batch_first=True)
    padded = fused(input_ids=rows, attention_mask=mask, dropout_seed=seed).last_hidden_state
    assert torch.equal(padded[mask.bool()], packed)


def test_hidden_states_and_checkpointing(make) -> None:
    fused, untouched = _models(make, "BertModel")
    batch = {**_batch("Bert"), "output_hidden_states": True}
    for got, wanted in zip(fused(**batch).hidden_states, untouched(**batch).hidden_states, strict=True):
        assert got.shape == wanted.shape
        torch.testing.assert_close(got, wanted)
    for model in (fused.train(), untouched.train()):
        model.gradient_checkpointing_enable()
    _check(fused, untouched, _batch("Bert"))


def test_what_is_no_flattened_batch(make) -> None:
    """One text, several rows, a mask: as transformers' flash attention takes them."""
    fused, untouched = _models(make, "BertModel")
    ids = torch.randint(4, 61, (1, 9))
    mask = torch.ones(1, 9, dtype=torch.long)
    restarting = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3, 4]])
    _check(fused, untouched, {"input_ids": ids, "position_ids": torch.arange(9).unsqueeze(0)})
    _check(fused, untouched, {"input_ids": ids, "position_ids": torch.arange(3, 12).unsqueeze(0)})
    _check(fused, untouched, {"input_ids": ids, "position_ids": restarting, "attention_mask": mask})
    _check(fused, untouched, {"input_ids": ids[:, :1], "position_ids": restarting[:, :1]})
    _check(fused, untouched, {"input_ids": ids.view(3, 3), "position_ids": torch.tensor([[0, 1, 0]])})
    padded = {
        "input_ids": ids,
        "position_ids": restarting,
        "attention_mask": mask.clone().index_fill_(1, torch.tensor([8]), 0),
    }
    kept = [model(**padded).last_hidden_state[:, :8] for model in (fused, untouched)]
    torch.testing.assert_close(*kept, rtol=0, atol=RELATIVE["vs_transformers_fp64"])


def test_a_mask_that_keeps_everything(make) -> None:
    """transformers drops such a mask for flash attention; bert_fast's attention in an untouched model does so too."""
    fused, untouched = _models(make, "BertModel")
    untouched.config._attn_implementation = "bert_fast"
    batch = _batch("Bert")
    mask = torch.ones_like(batch["input_ids"])
    wanted = untouched(**batch).last_hidden_state
    for given in (mask, mask.bool(), mask.double()):
        for model in (untouched, fused):
            got = model(**batch, attention_mask=given).last_hidden_state
            torch.testing.assert_close(got, wanted, rtol=0, atol=RELATIVE["vs_transformers_fp64"])


def test_offsets_that_packing_cannot_take(make) -> None:
    fused, untouched = _models(make, "BertModel")
    batch = _batch("Bert", "offsets")
    other = torch.tensor([0, 6, 6, 13, 16], dtype=torch.int32)
    _check(fused, untouched, {**batch, "cu_seq_lens_k": other}, is_packed=False)
    ours = make("BertModel", attn_implementation="bert_fast")
    with pytest.raises(ValueError, match="cu_seq_lens_q, cu_seq_lens_k: queries and keys have other offsets"):
        ours(**{**batch, "cu_seq_lens_k": other})
    rows = {**batch, "input_ids": batch["input_ids"].view(2, 8)}
    _check(fused, untouched, rows, is_packed=False)
    shifted = {"input_ids": batch["input_ids"], "position_ids": POSITIONS.roll(2, 1)}
    assert bert_fast.why_not(fused, **shifted) == ["position_ids: the row does not begin with its smallest position"]
    with pytest.raises(ValueError, match=r"expected offsets that rise from 0 to the number of tokens \(16\)"):
        fused(**{**batch, "cu_seq_lens_q": other[:-1], "cu_seq_lens_k": other[:-1]})


def test_positions_written_in_place_are_read_again(make) -> None:
    fused, untouched = _models(make, "BertModel")
    batch = _batch("Bert")
    batch["position_ids"] = POSITIONS.clone()
    _check(fused, untouched, batch)
    batch["position_ids"].copy_(torch.arange(sum(LENGTHS)))
    _check(fused, untouched, batch)
    with torch.inference_mode():
        positions = POSITIONS.clone()
        got = [
            model(input_ids=batch["input_ids"], position_ids=positions).last_hidden_state
            for model in (fused, untouched)
        ]
    torch.testing.assert_close(*got)


def test_compiled_offsets(make) -> None:
    fused, _ = _models(make, "BertModel")
    batch = _batch("Bert", "offsets")
    compiled = torch.compile(fused, backend="eager")
    with torch.no_grad():
        torch.testing.assert_close(compiled(**batch).last_hidden_state, fused(**batch).last_hidden_state)
    assert reasons(fused, batch) == []


def _axolotl(batch: dict[str, Any]) -> dict[str, Any]:
    """A mask of the texts' numbers beside positions that begin anew."""
    numbers = torch.cat([torch.full((length,), number + 1) for number, length in enumerate(LENGTHS)])
    return {**batch, "attention_mask": numbers.unsqueeze(0)}


def _blocks(batch: dict[str, Any]) -> dict[str, Any]:
    numbers = torch.cat([torch.full((length,), number) for number, length in enumerate(LENGTHS)])
    return {**batch, "attention_mask": (numbers[:, None] == numbers)[None, None]}


# Layouts of texts in one row, as collators make them -> what a fused model does, and how the batch comes.
LAYOUTS: dict[str, tuple[str, str, Any]] = {
    "positions": ("packed", "flash_attention_2", lambda batch: batch),
    "positions of int32": ("packed", "flash_attention_2", lambda batch: {**batch, "position_ids": POSITIONS.int()}),
    "numbers of texts": ("packed", "flash_attention_2", lambda batch: {**batch, "seq_idx": POSITIONS.int()}),
    "some offsets": ("packed", "flash_attention_2", lambda batch: {**batch, "cu_seq_lens_q": CU_SEQLENS}),
    "a mask of numbers": ("packed", "flash_attention_2", _axolotl),
    "a kernel of the hub": ("packed", "kernels-community/flash-attn2", lambda batch: batch),
    "a mask of blocks": ("theirs", "sdpa", _blocks),
    "offsets by our names": ("refused", "flash_attention_2", lambda batch: {**batch, "cu_seqlens": CU_SEQLENS}),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_layouts_of_texts_in_a_row(make, monkeypatch, name) -> None:
    path, attention, layout = LAYOUTS[name]
    fused, untouched = _models(make, "BertModel", attention)
    if attention not in transformers.AttentionInterface._global_mapping:
        from transformers.integrations.flash_attention import flash_attention_forward

        monkeypatch.setitem(transformers.AttentionInterface._global_mapping, attention, flash_attention_forward)
        mask = transformers.AttentionMaskInterface._global_mapping["flash_attention_2"]
        monkeypatch.setitem(transformers.AttentionMaskInterface._global_mapping, attention, mask)
    batch = layout(_batch("Bert"))
    if path == "refused":
        with pytest.raises(ValueError, match=r"cu_seqlens|input_ids: expected packed tokens \[T\]"):
            fused(**batch)
    else:
        _check(fused, untouched, batch, is_packed=path == "packed")


def test_features_that_sentence_transformers_flattened(make, tmp_path) -> None:
    """Each text is pooled, by sentence-transformers' own Pooling."""
    sentence_transformers = pytest.importorskip("sentence_transformers", minversion="6")
    from tests.huggingface.sentence_folders import make_folder

    make_folder("DistilBert", tmp_path)
    models = [sentence_transformers.SentenceTransformer(str(tmp_path / "folder"), device="cpu") for _ in range(2)]
    bert_fast.fuse(models[0])
    for model in models:
        model[0].model.config._attn_implementation = "flash_attention_2"
        model.eval()
    batch = _batch("Bert", "both")
    batch["input_ids"] = batch["input_ids"] % len(models[0].tokenizer)
    batch["seq_idx"] = torch.repeat_interleave(torch.tensor(LENGTHS)).int().unsqueeze(0)
    with torch.no_grad():
        got, wanted = (model(dict(batch))["sentence_embedding"] for model in models)
    assert got.shape[0] == len(LENGTHS)
    torch.testing.assert_close(got, wanted)
