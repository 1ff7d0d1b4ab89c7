"""Embeddings of texts: poolings by hand, sentence-transformers' folders both ways, parts bit for bit."""

import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from bert_fast import BertConfig, BertModel, BertTokenizer
from bert_fast.errors import CheckpointError
from bert_fast.models import BertForTextEmbedding
from bert_fast.models.pooling import POOLINGS, pooled
from bert_fast.models.sentence_folder import TextEmbedding, read_sentence_folder
from bert_fast.testing.tolerances import ABSOLUTE
from bert_fast.tokenization import load_tokenizer

WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "a", "short", "text", "##s", "é", "."]
TEXTS = ["a short text .", "texts " * 40, "é", "a", "", "short . " * 9]


def by_hand(rows: Tensor, pooling: str) -> Tensor:
    weights = torch.arange(1, len(rows) + 1, dtype=rows.dtype)[:, None]
    return {
        "mean": lambda: rows.mean(0), "max": lambda: rows.amax(0), "cls": lambda: rows[0], "last": lambda: rows[-1],
        "weighted": lambda: (rows * weights).sum(0) / weights.sum(),
    }[pooling]()  # fmt: skip


@pytest.mark.parametrize("pooling", POOLINGS)
def test_poolings_and_their_gradients(pooling: Any) -> None:
    lengths = [1, 7, 2, 64, 3]
    hidden = torch.randn(sum(lengths), 5, dtype=torch.float64, requires_grad=True)
    cu_seqlens = torch.tensor([0, *lengths]).cumsum(0).int()
    expected = torch.stack([by_hand(rows, pooling) for rows in hidden.split(lengths)])
    found = pooled(hidden, cu_seqlens, pooling)
    upstream = torch.randn_like(expected)
    torch.testing.assert_close(found, expected)
    for one in zip(torch.autograd.grad(found, hidden, upstream), torch.autograd.grad(expected, hidden, upstream)):  # noqa: B905
        torch.testing.assert_close(*one)
    assert pooled(hidden.detach().bfloat16(), cu_seqlens, pooling).dtype == torch.float32
    wide = hidden.detach().repeat(1, 2)[:, ::2]  # strided
    assert torch.equal(pooled(wide, cu_seqlens, pooling), pooled(wide.contiguous(), cu_seqlens, pooling))
    with pytest.raises(ValueError, match="pooling: expected one of"):
        pooled(hidden, cu_seqlens, "median")  # type: ignore[arg-type]


@pytest.mark.parametrize("pooling", ["mean", "max", "weighted"])
def test_a_sequence_without_tokens_gets_zeros(pooling: Any) -> None:
    hidden = torch.randn(3, 4, requires_grad=True)
    found = pooled(hidden, torch.tensor([0, 2, 2, 3]), pooling)
    assert torch.equal(found[1], torch.zeros(4))
    found.sum().backward()
    assert hidden.grad is not None and hidden.grad.isfinite().all()


def make_config(**how: Any) -> BertConfig:
    torch.set_num_threads(1)
    return BertConfig(
        vocab_size=len(WORDS), hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32,
        max_position_embeddings=32, initializer_range=0.5, text_embedding={"max_length": 20} | how,
    )  # fmt: skip


def embed(model: BertForTextEmbedding, texts: list[str] = TEXTS, **options: Any) -> Tensor:
    ids = BertTokenizer(WORDS, do_lower_case=False).pack(texts, max_length=20)
    output = model(**ids, **options)
    return output.embeddings


@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("pooling", POOLINGS)
def test_sentence_transformers_opens_what_is_saved(pooling: str, normalize: bool, tmp_path: Path) -> None:
    sentence_transformers = pytest.importorskip("sentence_transformers")
    model = BertForTextEmbedding(make_config(pooling=pooling, normalize=normalize)).eval()
    model.save_pretrained(tmp_path)
    BertTokenizer(WORDS, do_lower_case=False).save_pretrained(tmp_path)
    with torch.no_grad():
        ours = embed(model)
    theirs = sentence_transformers.SentenceTransformer(str(tmp_path), device="cpu")
    assert theirs.max_seq_length == 20
    found = torch.from_numpy(theirs.encode(TEXTS))
    assert (found - ours).abs().max() < ABSOLUTE["minilm_embeddings"] * max(1.0, ours.abs().max().item())
    again = BertForTextEmbedding.from_pretrained(tmp_path)
    assert again.text_embedding == TextEmbedding(pooling, normalize, 20)  # type: ignore[arg-type]
    with torch.no_grad():
        assert torch.equal(embed(again), ours)
    # And the other way: without our entry in config.json, from their own files as they write them.
    theirs.save(str(tmp_path / "theirs"))
    stored = json.loads((tmp_path / "theirs" / "config.json").read_text())
    stored.pop("text_embedding", None)
    (tmp_path / "theirs" / "config.json").write_text(json.dumps(stored))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the pooler that transformers adds
        other = BertForTextEmbedding.from_pretrained(tmp_path / "theirs").eval()
    assert other.text_embedding == TextEmbedding(pooling, normalize, 20)  # type: ignore[arg-type]
    assert load_tokenizer(tmp_path / "theirs").model_max_length == 20
    with torch.no_grad():
        vectors = embed(other)
    assert (vectors - ours).abs().max() < ABSOLUTE["minilm_embeddings"] * max(1.0, ours.abs().max().item())


def test_padded_input_and_packed_input_agree() -> None:
    model = BertForTextEmbedding(make_config(pooling="weighted")).eval()
    tokenizer = BertTokenizer(WORDS, do_lower_case=False)
    padded = tokenizer(TEXTS, padding=True, truncation=True, max_length=20, return_tensors="pt")
    with torch.no_grad():
        found = model(**padded).embeddings
        torch.testing.assert_close(found, embed(model), rtol=0, atol=ABSOLUTE["minilm_embeddings"])
    assert isinstance(model(**padded, return_dict=False), tuple)


@pytest.mark.parametrize("size", [1, 2, 4, 6, 100])
def test_parts_have_the_gradients_of_parts_that_are_kept(size: int) -> None:
    """Bit for bit, with dropout: each part is encoded again with the masks that it had."""
    tokenizer = BertTokenizer(WORDS, do_lower_case=False)
    model = BertForTextEmbedding(make_config(normalize=True)).train()

    def gradients(parts: bool) -> list[Tensor]:
        torch.manual_seed(3)
        model.zero_grad()
        if parts:
            made = embed(model, part_size=size)
        else:
            texts = [TEXTS[i : i + size] for i in range(0, len(TEXTS), size)]
            made = torch.cat([model(**tokenizer.pack(some, max_length=20)).embeddings for some in texts])
        (made @ made.T * torch.arange(36.0).view(6, 6)).square().sum().backward()
        return [made.detach(), *(p.grad for p in model.parameters() if p.grad is not None)]

    kept, again = gradients(parts=False), gradients(parts=True)
    assert len(kept) == len(again) > 10 and all(map(torch.equal, kept, again))
    with torch.no_grad():
        torch.manual_seed(3)
        assert torch.equal(embed(model, part_size=size), kept[0])


def test_parts_keep_what_the_last_one_keeps() -> None:
    model = BertForTextEmbedding(make_config()).train()
    own, saved = {p.data_ptr() for p in model.parameters()}, []
    for texts, size in ((TEXTS[-1:], None), (TEXTS, 1), (TEXTS, None)):
        storages: dict[int, int] = {}

        def note(t: Tensor, storages: dict[int, int] = storages) -> Tensor:
            if t.data_ptr() not in own:
                storages[t.data_ptr()] = t.nbytes
            return t

        with torch.autograd.graph.saved_tensors_hooks(note, lambda t: t):
            embed(model, texts, part_size=size)
        saved.append(sum(storages.values()))
    assert saved[0] == saved[1] < saved[2] / 2


def test_parts_of_no_texts() -> None:
    assert embed(BertForTextEmbedding(make_config()), [], part_size=2).shape == (0, 16)


def test_what_parts_refuse() -> None:
    model = BertForTextEmbedding(make_config())
    with pytest.raises(ValueError, match="part_size: expected None but for packed input_ids"):
        model(torch.tensor([[2, 5, 3]]), part_size=2)
    with pytest.raises(ValueError, match="part_size: expected at least 1, got 0"):
        embed(model, part_size=0)
    with pytest.raises(ValueError, match="output_attentions: expected None beside part_size"):
        embed(model, part_size=2, output_attentions=True)


DAMAGES = {
    "modules.json": [
        ("{}", "expected a list of modules"), ("[", "cannot be read"),
        ('[{"type": "x.Transformer", "path": ""}, {"type": "Pooling"}, {"type": "x.Dense"}]', "got Transformer, P"),
        ('[{"type": "Transformer", "path": ""}, {"type": "Pooling", "path": "../../etc"}]', "expected a folder within"),
    ],
    "1_Pooling/config.json": [
        ('{"pooling_mode": ["mean", "cls"]}', "expected one pooling .* got mean, cls"),
        ('{"pooling_mode_mean_sqrt_len_tokens": true}', "got pooling_mode_mean_sqrt"),
        ("{}", "got none"), ("[]", "expected an object"),
        ('{"pooling_mode": "mean", "include_prompt": false}', "include_prompt"),
    ],
    "sentence_bert_config.json": [
        ('{"max_seq_length": "many"}', "max_seq_length: expected"), ('{"max_seq_length": 1}', "got 1"),
    ],
}  # fmt: skip


@pytest.mark.parametrize(
    ("own", "of_tokenizer", "length"),
    [(30, 20, 30), (None, 20, 20), (None, 10**30, None), (None, "many", None), (None, None, None)],
    ids=["own", "tokenizer's", "no limit", "no number", "neither"],
)
def test_the_length_is_the_tokenizers_where_the_folder_has_none(
    own: int | None, of_tokenizer: Any, length: int | None, tmp_path: Path
) -> None:
    BertForTextEmbedding(make_config()).save_pretrained(tmp_path)
    (tmp_path / "sentence_bert_config.json").write_text(json.dumps({"max_seq_length": own}))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"model_max_length": of_tokenizer}))
    folder = read_sentence_folder(tmp_path)
    assert folder is not None and folder.max_length == length


@pytest.mark.parametrize(("name", "text", "message"), [(n, *case) for n, cases in DAMAGES.items() for case in cases])
def test_files_that_say_nothing_we_know(name: str, text: str, message: str, tmp_path: Path) -> None:
    BertModel(make_config()).save_pretrained(tmp_path)
    BertForTextEmbedding(make_config()).save_pretrained(tmp_path / "good")
    (tmp_path / "good" / name).write_text(text)
    with pytest.raises(CheckpointError, match=message) as caught:
        read_sentence_folder(tmp_path / "good")
    assert Path(name).name in str(caught.value)
    config = json.loads((tmp_path / "good" / "config.json").read_text())
    for wrong in ({"pooling": "median"}, {"polling": "mean"}, 3, {"max_length": 0}):
        (tmp_path / "good" / "config.json").write_text(json.dumps(config | {"text_embedding": wrong}))
        with pytest.raises(CheckpointError, match="good: "):
            BertForTextEmbedding.from_pretrained(tmp_path / "good")
