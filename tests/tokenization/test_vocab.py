"""Reading and writing vocabularies."""

import pickle
import re
from pathlib import Path

import pytest

from bert_fast.reference.wordpiece import WordPiece
from bert_fast.tokenization import BertTokenizer
from bert_fast.tokenization.vocab import (
    Vocabulary,
    open_vocab,
    read_vocab,
    vocab_from_mapping,
    vocab_to_text,
)

from .conftest import VOCABULARIES
from .native_core import make_native, needs_native

SIZES = dict(zip(VOCABULARIES, (30522, 28996, 21128, 119547), strict=True))
MINIMAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "a", "##b"]


def write(path: Path, content: bytes) -> Path:
    path.write_bytes(content)
    return path


@pytest.mark.parametrize("name", VOCABULARIES)
def test_published_vocabularies(name: str, shared_data: Path) -> None:
    path = shared_data / "vocab" / name / "vocab.txt"
    tokens = read_vocab(path)
    assert len(tokens) == SIZES[name]
    assert [tokens.index(token) for token in MINIMAL[:5]] == [0, 100, 101, 102, 103]
    assert vocab_to_text(tokens).encode() == path.read_bytes()


def test_line_separators_inside_entries(shared_data: Path) -> None:
    tokens = read_vocab(shared_data / "vocab" / "bert-base-chinese" / "vocab.txt")
    assert tokens[343] == "\u2028"
    assert tokens[13502] == "##\u2028"
    tokenizer = BertTokenizer(shared_data / "vocab" / "bert-base-chinese" / "vocab.txt", do_lower_case=False)
    assert tokenizer.convert_ids_to_tokens([343, 13502]) == ["\u2028", "##\u2028"]


def test_windows_line_ends_and_a_missing_last_one(tmp_path: Path) -> None:
    crlf = write(tmp_path / "crlf.txt", "\r\n".join([*MINIMAL, "x\u2028y", ""]).encode())
    bare = write(tmp_path / "bare.txt", "\n".join([*MINIMAL, "x\u2028y"]).encode())
    assert read_vocab(crlf) == read_vocab(bare) == [*MINIMAL, "x\u2028y"]


def test_entries_keep_whitespace(tmp_path: Path) -> None:
    assert read_vocab(write(tmp_path / "v", b" a\n \n\tc\n")) == [" a", " ", "\tc"]


def test_duplicates_are_named_with_their_lines(tmp_path: Path) -> None:
    path = write(tmp_path / "vocab.txt", b"a\nb\na\nc\nb\n")
    with pytest.raises(ValueError, match=r"vocab\.txt repeats tokens: 'a' on lines 1 and 3; 'b' on lines 2 and 5"):
        read_vocab(path)
    many = write(tmp_path / "many.txt", b"".join(b"%d\n" % (k // 2) for k in range(20)))
    with pytest.raises(ValueError, match="and 5 more"):
        read_vocab(many)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is empty"),
        (b"\n\r\n", "is empty"),
        (b"\xef\xbb\xbf[PAD]\n", "starts with a byte order mark"),
        (b"a\nb\n\xff\n", "is not UTF-8: line 3, byte 4"),
    ],
)
def test_unreadable_files(content: bytes, message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=message):
        read_vocab(write(tmp_path / "vocab.txt", content))


@pytest.mark.parametrize("ending", ["\n", "\r\n"])
@pytest.mark.parametrize("blank", [" ", "\t", " \t "])
def test_blanks_behind_a_token_are_named(blank: str, ending: str, tmp_path: Path) -> None:
    """Behind every token, behind one, behind the last; the file, the line and the token are in the message."""
    lines = [f"{token}{blank}" for token in MINIMAL]
    path = write(tmp_path / "all.txt", ending.join(lines).encode())
    with pytest.raises(ValueError, match=r"behind tokens: .* on line 1; .* on line 5") as caught:
        BertTokenizer(path)
    assert str(path) in str(caught.value)
    assert repr(lines[0]) in str(caught.value)
    for place in (3, len(MINIMAL) - 1):
        some = [*MINIMAL[:place], lines[place], *MINIMAL[place + 1 :]]
        for end in ("", ending):
            path = write(tmp_path / "one.txt", (ending.join(some) + end).encode())
            with pytest.raises(
                ValueError, match=f"behind tokens: {re.escape(repr(lines[place]))} on line {place + 1};"
            ):
                read_vocab(path)
    blanks = [*MINIMAL, blank, f"##{blank}"]  # entries of characters: no token stands before them
    assert read_vocab(write(tmp_path / "characters.txt", ending.join(blanks).encode())) == blanks


@pytest.mark.parametrize("name", ["bert-base-uncased", "bert-base-chinese"])
def test_searching_a_file_finds_what_the_dictionary_has(name: str, shared_data: Path) -> None:
    path = shared_data / "vocab" / name / "vocab.txt"
    tokens = read_vocab(path)
    some = [
        *tokens[:5],
        *tokens[100:105],
        *tokens[-3:],
        "##",
        "\u2028",
        "[MASK",
        "MASK]",
        "nothing",
        "\ud800",
        "",
        "a\nb",
    ]
    ids = {token: token_id for token_id, token in enumerate(tokens)}
    for token in some:
        assert open_vocab(path).find(token) == ids.get(token), token
    vocabulary = open_vocab(path)
    assert [vocabulary.find(token) for token in tokens] == list(range(len(vocabulary)))
    assert pickle.loads(pickle.dumps(vocabulary)).ids == vocabulary.ids == ids


@pytest.mark.parametrize("ending", ["\n", "\r\n"])
@pytest.mark.parametrize("last", [True, False])
def test_lines_of_every_ending(ending: str, last: bool, tmp_path: Path) -> None:
    tokens = [*MINIMAL, "", "a a", "\u2028", "b", "é"]
    content = ending.join(tokens).encode() + ending.encode() * last
    vocabulary = open_vocab(write(tmp_path / "v.txt", content))
    assert [vocabulary.find(token) for token in tokens] == list(range(len(tokens)))
    assert (vocabulary.tokens, len(vocabulary)) == (tokens, len(tokens))
    assert [vocabulary.find(token) for token in ("a ", " a", "\r", "a\r", "\u2028\r")] == [None] * 5
    made = Vocabulary(content)
    tokenizer = BertTokenizer(made)
    assert tokenizer.encode("a b é") == BertTokenizer(tokens).encode("a b é")
    assert (len(tokenizer), tokenizer.get_vocab()) == (len(tokens), vocabulary.ids)


def test_encoding_makes_no_strings(shared_data: Path) -> None:
    tokenizer = BertTokenizer(shared_data / "vocab" / "bert-base-uncased" / "vocab.txt")
    tokenizer(["a b", "c"], padding=True, return_tensors="np")
    assert (tokenizer.encode("a"), tokenizer.mask_token_id, len(tokenizer)) == ([101, 1037, 102], 103, 30522)
    assert tokenizer._vocabulary._tokens is None and tokenizer._vocabulary._ids is None
    assert tokenizer.convert_ids_to_tokens([1037, 103]) == ["a", "[MASK]"]


def test_duplicates_are_told_by_the_tokenizer_too(tmp_path: Path) -> None:
    lines = "\n".join([*MINIMAL, "a"]).encode()
    for path in (write(tmp_path / "vocab.txt", lines), tmp_path):
        with pytest.raises(ValueError, match=r"vocab\.txt repeats tokens: 'a' on lines 6 and 8$"):
            BertTokenizer.from_pretrained(path)
    write(tmp_path / "vocab.txt", b"a\na\n")  # special tokens are missing as well
    with pytest.raises(ValueError, match=r"repeats tokens: 'a' on lines 1 and 2$"):
        BertTokenizer(tmp_path / "vocab.txt")


@needs_native
def test_engines_of_bytes() -> None:
    lines = [*MINIMAL, "x\u2028y", "é", "\0", ""]
    for content in ("\n".join(lines), "\r\n".join(lines) + "\r\n"):
        texts = ["a ab é \0 x", "[MASK]"]
        assert make_native(content.encode()).encode_lists(texts) == make_native(lines).encode_lists(texts)
        assert WordPiece(content.encode()).encode_lists(texts) == make_native(lines).encode_lists(texts)
    with pytest.raises(ValueError, match="vocab: expected UTF-8, got an invalid byte at 6"):
        make_native(b"[UNK]\n\xff")
    with pytest.raises(ValueError, match="vocab: expected distinct tokens, got 'a' at positions 1 and 2"):
        make_native(b"[UNK]\na\r\na")
    with pytest.raises(ValueError, match="unk_token: expected a token of the vocabulary"):
        make_native(b"")


def test_missing_files(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="vocab: there is no file"):
        BertTokenizer(tmp_path / "nothing.txt")
    with pytest.raises(ValueError, match=r"is a directory; pass the file, or use BertTokenizer\.from_pretrained"):
        BertTokenizer(tmp_path)


def test_missing_special_tokens(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"special tokens are missing.*sep_token '\[SEP\]', mask_token '\[MASK\]'"):
        BertTokenizer({"[PAD]": 0, "[UNK]": 1, "[CLS]": 2, "a": 3})
    with pytest.raises(ValueError, match=r"unk_token \(None\)"):
        BertTokenizer(MINIMAL, unk_token=None)
    assert BertTokenizer(MINIMAL[:4], mask_token=None).mask_token_id is None


def test_forms_of_a_vocabulary(tmp_path: Path) -> None:
    path = write(tmp_path / "vocab.txt", vocab_to_text(MINIMAL).encode())
    mapping = {token: token_id for token_id, token in enumerate(MINIMAL)}
    expected = {"input_ids": [2, 5, 6, 3], "token_type_ids": [0] * 4, "attention_mask": [1] * 4}
    for tokenizer in (
        BertTokenizer(path),
        BertTokenizer(str(path)),
        BertTokenizer(vocab_file=path),
        BertTokenizer(mapping),
        BertTokenizer(dict(reversed(mapping.items()))),
        BertTokenizer(MINIMAL),
        BertTokenizer.from_pretrained(path),
    ):
        assert dict(tokenizer("ab")) == expected
        assert tokenizer.get_vocab() == mapping


@pytest.mark.parametrize(
    ("mapping", "error", "message"),
    [
        ({}, ValueError, "the mapping is empty"),
        ({"a": 0, "b": 2}, ValueError, "ids must be 0 to 1, without gaps, for 2 tokens; 'b' has 2"),
        ({"a": 0, "b": 0}, ValueError, "id 0 is given to both 'a' and 'b'"),
        ({"a": "0"}, TypeError, "expected str -> int, got 'a' -> '0'"),
        ({3: 0}, TypeError, "expected str -> int, got 3 -> 0"),
        ({"a": True}, TypeError, "expected str -> int"),
        ({"a": -1}, ValueError, "'a' has -1"),
    ],
)
def test_bad_mappings(mapping: dict[str, int], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        vocab_from_mapping(mapping)


def test_bad_vocabulary_arguments(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="expected a path, a mapping or a list of tokens, got NoneType"):
        BertTokenizer()
    with pytest.raises(TypeError, match="give either vocab or vocab_file, not both"):
        BertTokenizer(MINIMAL, vocab_file=tmp_path)
    with pytest.raises(ValueError, match="the token 'a' stands at 5 and at 7"):
        BertTokenizer([*MINIMAL, "a"])
    with pytest.raises(TypeError, match="got int"):
        BertTokenizer(7)  # type: ignore[arg-type]


def test_tokens_that_no_line_can_hold() -> None:
    with pytest.raises(ValueError, match=r"token 1, 'x\\ny', cannot be written"):
        vocab_to_text(["a", "x\ny"])
