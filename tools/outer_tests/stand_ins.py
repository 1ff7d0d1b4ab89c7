"""Models and data that other projects' tests load from the hub by name, made here: small, random, of the same classes.

    python -m tools.outer_tests.stand_ins FOLDER        # HF_HUB_CACHE=FOLDER/hub HF_DATASETS_CACHE=FOLDER/datasets

Nothing is downloaded. `MODELS` says what each name stands for: the class, the head and the sizes, as far as tests can
see them. The weights are random, so tests that expect a trained model's scores fail, on transformers as it is, too.
The folder is laid out as the hub's own cache, where `from_pretrained(name)` looks without network.
"""

import hashlib
import json
import random
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
VOCABULARY = ROOT.parent / "shared" / "data" / "vocab" / "bert-base-uncased" / "vocab.txt"
_SMALL = {"hidden_size": 32, "num_hidden_layers": 5, "num_attention_heads": 4, "intermediate_size": 37}
_TINY = {"hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 512}
_DISTIL = {"dim": 768, "n_layers": 2, "n_heads": 12, "hidden_dim": 3072}


@dataclass(frozen=True)
class StandIn:
    """What is made under a name: a class of transformers, and how sentence-transformers saves it, if it does.

    library: "transformers", or the class of sentence-transformers that is saved; "InferenceFree" is a SparseEncoder
        that looks the words of queries up in a table.
    """

    model: str
    sizes: Mapping[str, Any] = field(default_factory=lambda: _TINY)
    library: str = "transformers"


MODELS: dict[str, StandIn] = {
    "cross-encoder-testing/reranker-bert-tiny-gooaq-bce": StandIn(
        "BertForSequenceClassification", _TINY | {"num_labels": 1}, "CrossEncoder"
    ),
    "cross-encoder-testing/reranker-bert-tiny-gooaq-bce-STv54": StandIn(
        "BertForSequenceClassification", _TINY | {"num_labels": 1}
    ),
    "cross-encoder-testing/stsb-distilroberta-base": StandIn(
        "RobertaForSequenceClassification", _TINY | {"num_labels": 1}, "CrossEncoder"
    ),
    "cross-encoder/nli-MiniLM2-L6-H768": StandIn(
        "RobertaForSequenceClassification", _TINY | {"num_labels": 3}, "CrossEncoder"
    ),
    "cross-encoder/stsb-distilroberta-base": StandIn(
        "RobertaForSequenceClassification", _TINY | {"num_labels": 1}, "CrossEncoder"
    ),
    "distilbert/distilbert-base-uncased": StandIn("DistilBertForMaskedLM", _DISTIL),
    "distilbert/distilroberta-base": StandIn("RobertaForMaskedLM"),
    "google-bert/bert-base-uncased": StandIn("BertForPreTraining", _TINY),
    "hf-internal-testing/tiny-random-BertLMHeadModel": StandIn("BertLMHeadModel", _SMALL | {"is_decoder": True}),
    "hf-internal-testing/tiny-random-BertModel": StandIn("BertModel", _SMALL),
    "hf-internal-testing/tiny-random-bert": StandIn("BertModel", _SMALL),
    "hf-internal-testing/tiny-xlm-roberta": StandIn("XLMRobertaModel", _SMALL),
    "peft-internal-testing/tiny-random-BertForSequenceClassification": StandIn("BertForSequenceClassification", _SMALL),
    "peft-internal-testing/tiny-random-BertModel": StandIn("BertModel", _SMALL),
    "peft-internal-testing/tiny-random-RobertaForSequenceClassification": StandIn(
        "RobertaForSequenceClassification", _SMALL
    ),
    "peft-internal-testing/tiny-random-RobertaModel": StandIn("RobertaModel", _SMALL),
    "sentence-transformers-testing/stsb-bert-tiny-safetensors": StandIn("BertModel", _TINY, "SentenceTransformer"),
    "sentence-transformers/all-MiniLM-L6-v2": StandIn("BertModel", _TINY, "SentenceTransformer"),
    "sentence-transformers/paraphrase-distilroberta-base-v1": StandIn("RobertaModel", _TINY, "SentenceTransformer"),
    "sentence-transformers/paraphrase-mpnet-base-v2": StandIn("MPNetModel", _TINY, "SentenceTransformer"),
    "sparse-encoder-testing/inference-free-splade-bert-tiny-nq": StandIn("BertForMaskedLM", _TINY, "InferenceFree"),
    "sparse-encoder-testing/splade-bert-tiny-nq": StandIn("BertForMaskedLM", _TINY, "SparseEncoder"),
}
# Names of data sets -> columns, of which each split has a hundred rows.
DATA: dict[str, tuple[str, ...]] = {"sentence-transformers/stsb": ("sentence1", "sentence2", "score")}
SPLITS = ("train", "validation", "test")


def environment(folder: Path) -> dict[str, str]:
    """The variables by which the libraries find what `make` left in a folder."""
    return {"HF_HUB_CACHE": str(folder / "hub"), "HF_DATASETS_CACHE": str(folder / "datasets")}


def make(folder: Path) -> None:
    """Makes all that `MODELS` and `DATA` name, the same every time.

    Raises:
        FileNotFoundError: BERT's vocabulary is not in ../shared/data.
    """
    import torch

    if not VOCABULARY.exists():
        raise FileNotFoundError(f"stand-ins: expected BERT's vocabulary at {VOCABULARY}")
    words = VOCABULARY.read_text(encoding="utf-8").splitlines()
    folders = {name: _snapshot(folder / "hub", name) for name in MODELS}
    tokenizers: dict[str, Any] = {}
    for name, stand_in in MODELS.items():
        torch.manual_seed(int.from_bytes(hashlib.sha256(name.encode()).digest()[:4], "little"))
        family = next(family for family in _TOKENIZERS if stand_in.model.startswith(family))
        if family not in tokenizers:
            tokenizers[family] = _TOKENIZERS[family](words)
        _save(folders[name], stand_in, tokenizers[family])
    for name, columns in DATA.items():
        _save_data(folder / "datasets", name, columns, [word for word in words if word.isalpha()])


def _snapshot(hub: Path, name: str) -> Path:
    """The folder of a model's files in a cache of the hub, made with what leads there."""
    commit = hashlib.sha1(name.encode()).hexdigest()
    model = hub / f"models--{name.replace('/', '--')}"
    (model / "refs").mkdir(parents=True)
    (model / "refs" / "main").write_text(commit)
    (model / "snapshots" / commit).mkdir(parents=True)
    return model / "snapshots" / commit


def _save(folder: Path, stand_in: StandIn, tokenizer: Any) -> None:
    import transformers

    cls = getattr(transformers, stand_in.model)
    sizes = {"vocab_size": len(tokenizer), "pad_token_id": tokenizer.pad_token_id, **stand_in.sizes}
    if "Roberta" in stand_in.model or "MPNet" in stand_in.model:
        sizes["max_position_embeddings"] = 514
    model = cls(cls.config_class(**sizes))
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    if stand_in.library != "transformers":
        _WRAPPERS[stand_in.library](str(folder)).save_pretrained(str(folder))


def _sentence_transformer(path: str) -> Any:
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.base.modules import Transformer
    from sentence_transformers.sentence_transformer.modules import Pooling

    encoder = Transformer(path)
    return SentenceTransformer(modules=[encoder, Pooling(encoder.get_embedding_dimension(), "mean")])


def _cross_encoder(path: str) -> Any:
    from sentence_transformers import CrossEncoder

    return CrossEncoder(path)


def _sparse_encoder(path: str) -> Any:
    from sentence_transformers import SparseEncoder

    return SparseEncoder(path)  # a masked-LM model: SPLADE


def _inference_free(path: str) -> Any:
    from sentence_transformers import SparseEncoder
    from sentence_transformers.base.modules import Router
    from sentence_transformers.sparse_encoder.modules import SparseStaticEmbedding

    encoder, pooling = SparseEncoder(path)
    table = SparseStaticEmbedding(tokenizer=encoder.tokenizer, frozen=False)
    router = Router.for_query_document(query_modules=[table], document_modules=[encoder, pooling])
    return SparseEncoder(modules=[router], similarity_fn_name="dot")


_WRAPPERS: dict[str, Callable[[str], Any]] = {
    "CrossEncoder": _cross_encoder,
    "InferenceFree": _inference_free,
    "SentenceTransformer": _sentence_transformer,
    "SparseEncoder": _sparse_encoder,
}


def _word_pieces(words: list[str], **options: Any) -> Any:
    """A tokenizer as BERT's."""
    import transformers

    if int(transformers.__version__.split(".")[0]) < 5:
        return transformers.BertTokenizerFast(vocab_file=str(VOCABULARY), model_max_length=512, **options)
    vocabulary = {word: index for index, word in enumerate(words)}
    return transformers.BertTokenizerFast(vocab=vocabulary, model_max_length=512, **options)


def _untyped_word_pieces(words: list[str]) -> Any:
    """The same, for models without token types."""
    return _word_pieces(words, model_input_names=["input_ids", "attention_mask"])


def _byte_pairs(words: list[str]) -> Any:
    """A tokenizer as RoBERTa's, trained on a vocabulary's words."""
    from tokenizers import ByteLevelBPETokenizer
    from transformers import RobertaTokenizerFast

    trained = ByteLevelBPETokenizer(add_prefix_space=False)
    special = ["<s>", "<pad>", "</s>", "<unk>", "<mask>"]
    trained.train_from_iterator((f" {word}" for word in words), vocab_size=1024, special_tokens=special)
    state = json.loads(trained.to_str())["model"]
    merges = [tuple(pair) for pair in state["merges"]]
    return RobertaTokenizerFast(vocab=state["vocab"], merges=merges, model_max_length=512)


_TOKENIZERS: dict[str, Callable[[list[str]], Any]] = {
    "Bert": _word_pieces,
    "DistilBert": _untyped_word_pieces,
    "MPNet": _untyped_word_pieces,
    "Roberta": _byte_pairs,
    "XLMRoberta": _byte_pairs,
}


def _save_data(cache: Path, name: str, columns: tuple[str, ...], words: list[str]) -> None:
    """A data set as `datasets` keeps one that it has loaded before: an Arrow file for each split."""
    import datasets
    from datasets.arrow_writer import ArrowWriter

    drawn = random.Random(name)
    folder = cache / name.replace("/", "___") / "default" / "0.0.0" / hashlib.sha1(name.encode()).hexdigest()
    folder.mkdir(parents=True)
    kinds = {column: datasets.Value("float32" if column == "score" else "string") for column in columns}
    features, title = datasets.Features(kinds), name.split("/")[-1]
    splits = datasets.SplitDict(dataset_name=title)
    for split in SPLITS:
        with ArrowWriter(features=features, path=str(folder / f"{title}-{split}.arrow")) as writer:
            for _ in range(100):
                texts = {column: " ".join(drawn.choices(words, k=drawn.randint(3, 20))) for column in columns}
                writer.write(texts | ({"score": drawn.random()} if "score" in columns else {}))
            num_examples, num_bytes = writer.finalize()
        splits.add(datasets.SplitInfo(split, num_bytes=num_bytes, num_examples=num_examples))
    info = datasets.DatasetInfo(
        features=features, splits=splits, builder_name=title, dataset_name=title, config_name="default", version="0.0.0"
    )
    info.write_to_directory(str(folder))


if __name__ == "__main__":
    make(Path(sys.argv[1]))
