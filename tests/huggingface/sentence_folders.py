"""Small folders of sentence-transformers' models of any family, with the tokenizers that such models have."""

import json
from pathlib import Path
from typing import Any

import transformers

from bert_fast.testing.parity import randomize
from tests.huggingface.families import CONFIG, configuration
from tests.tokenization.unigram_core import MARK, Piece, forms, make_state

WORDS = ["a", "small", "red", "house", "on", "the", "hill", "short", "text", "café", "天", "气"]
TEXTS = ["a small red house", "", "Text texts on the hill. " * 30, "café, 天气!", "a", "short <pad> <mask> red"]
_PIECES: list[Piece] = [
    *((MARK + word, -4.0 - place) for place, word in enumerate(WORDS)),
    *((letter, -9.0) for letter in sorted(set("".join(WORDS)))),
    *((MARK, -3.0), (".", -5.0), ("xt", -6.0), ("ous", -6.5)),
]
_SIZES = dict(
    hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=48, max_position_embeddings=26,
    initializer_range=0.5,
)  # fmt: skip
# BERT: as multilingual MiniLM, with XLM-R's words.
UNIGRAM = ("Bert", "Roberta", "XLMRoberta", "Camembert", "Gte", "JinaEmbeddingsV3")


def unigram_state() -> dict[str, Any]:
    """A tokenizer.json of XLM-R's kind."""
    return make_state(_PIECES, forms()["xlm-r"])


def deberta_tokenizer() -> Any:
    """A tokenizer of DeBERTa v2's and v3's class with as many tokens."""
    special = [(token, 0.0) for token in ("[PAD]", "[CLS]", "[SEP]", "[UNK]")]
    return transformers.DebertaV2Tokenizer(vocab=[*special, *_PIECES], model_max_length=20)


def make_tokenizer(prefix: str) -> Any:
    """A fast tokenizer of transformers."""
    if prefix in UNIGRAM:
        import tokenizers

        names = {"cls_token": "<s>", "sep_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"}
        return transformers.PreTrainedTokenizerFast(
            tokenizer_object=tokenizers.Tokenizer.from_str(json.dumps(unigram_state())), mask_token="<mask>", **names
        )
    pieces = [*WORDS, "##s", "##t", "tex", ".", ",", "!"]
    if prefix == "MPNet":
        special = ["<s>", "<pad>", "</s>", "[UNK]", "<mask>"]
        vocab = {token: place for place, token in enumerate([*special, *pieces])}
        return transformers.MPNetTokenizer(vocab)
    vocab = {token: place for place, token in enumerate(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *pieces])}
    kind = "Bert" if prefix in ("Data2VecText", "DebertaV2", "Ernie", "NomicBert", "RoFormer") else prefix
    return getattr(transformers, f"{kind}Tokenizer")(vocab)


def make_checkpoint(prefix: str, path: Path, model: str = "Model", **config: Any) -> None:
    """A checkpoint of random weights with a tokenizer."""
    cls = getattr(transformers, f"{prefix}{model}")
    tokenizer = make_tokenizer(prefix)
    values = {"pad_token_id": tokenizer.pad_token_id, **CONFIG.get(prefix, {}), **config}
    values["pad_token_id"] = tokenizer.pad_token_id
    made = cls(configuration(cls, vocab_size=len(tokenizer), **_SIZES, **values))
    randomize(made)
    made.save_pretrained(path)
    tokenizer.model_max_length = 20
    tokenizer.save_pretrained(path)


def make_folder(prefix: str, path: Path, mode: str = "mean") -> Any:
    """A folder of sentence-transformers, and its model, untouched."""
    import sentence_transformers
    from sentence_transformers.base.modules import Normalize, Transformer
    from sentence_transformers.sentence_transformer.modules import Pooling

    make_checkpoint(prefix, path / "encoder")
    modules = [Transformer(str(path / "encoder")), Pooling(32, mode), Normalize()]
    model = sentence_transformers.SentenceTransformer(modules=modules, device="cpu")
    model.save(str(path / "folder"))
    return sentence_transformers.SentenceTransformer(str(path / "folder"), device="cpu")
