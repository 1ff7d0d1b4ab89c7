"""A tokenizer's files with one value changed, or damaged as text: they load and work, or the message names the file."""

import copy
import itertools
import json
import random
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest

from bert_fast.tokenization import AddedToken, BertTokenizer

CASES = 120  # of each file
VOCAB = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "a", "##b", "!"]
ODD: tuple[Any, ...] = (
    *(None, True, False, -1, 0, 5, 2**31, 2**70, -(2**70), 1.5, -1e300, 1e300),
    *("", "a", "[MASK]", "no token", "\n", "\0", "é" * 300, [], {}, [[]], ["a"], [None], {"a": 1}, {"content": 5}),
    *({"content": "a", "lstrip": 1}, {"content": ""}, [{"content": "z"}], {"type": "BertNormalizer"}, {"5": {}}),
)


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """Every file that is read, the older ones among them."""
    tokenizer = BertTokenizer(VOCAB, extra_special_tokens=["<x>"], never_split=["a"])
    tokenizer.add_tokens([AddedToken("zz", lstrip=True), "yy"])
    tokenizer.save_pretrained(tmp_path)
    (tmp_path / "added_tokens.json").write_text(json.dumps(tokenizer.get_added_vocab()))
    return tmp_path


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    yield path
    children = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, child in children:
        yield from places(child, (*path, key))


def changed(value: Any, path: tuple[Any, ...], new: Any) -> Any:
    """A copy with another value at a place; `...` takes the place away."""
    if not path:
        return new
    value = copy.deepcopy(value)
    parent = value
    for key in path[:-1]:
        parent = parent[key]
    if new is ...:
        del parent[path[-1]]
    else:
        parent[path[-1]] = new
    return value


def damaged(text: bytes, generator: random.Random) -> bytes:
    """Cut off, with other bytes in it, or with something put in that JSON or vocabularies should not hold."""
    place = generator.randrange(len(text))
    inserted = (
        *(b"\xff", b"\0", b"\n", b'"', b"[" * 100_000, b'{"a":' * 100_000, b"NaN", b"-Infinity", b"9" * 5000),
        *(b"\\ud800", b'"a": 1, "a": 2,', b"\xef\xbb\xbf", b"a\n", b"\r\n"),
    )
    piece = generator.choice(inserted)
    cut = generator.choice((0, 1, 10, len(text)))
    return text[:place] + generator.choice((b"", piece)) + text[place + cut :]


def outcome(directory: Path) -> str:
    """What is wrong with the tokenizer of a directory; nothing if it works."""
    try:
        tokenizer = BertTokenizer.from_pretrained(directory)
    except (TypeError, ValueError, OSError) as error:
        return f"{type(error).__name__}: {error}"
    tokenizer.decode(tokenizer("a zz! ab <x>", "b", max_length=5, truncation=True)["input_ids"])
    return ""


def refusals(directory: Path, contents: Iterable[tuple[Path, bytes]]) -> int:
    """How many of the contents are refused, each by a message of one line that names the place."""
    count = 0
    for path, content in contents:
        path.write_bytes(content)
        if message := outcome(directory):
            assert str(directory) in message and len(message) < 2000 and message.isprintable(), message
            count += 1
    return count


@pytest.mark.parametrize(
    ("name", "gone"),
    [
        ("tokenizer.json", ()),
        ("tokenizer_config.json", ()),
        ("special_tokens_map.json", ("tokenizer_config.json",)),
        ("added_tokens.json", ("tokenizer_config.json", "tokenizer.json")),
    ],
    ids=["tokenizer", "config", "special", "added"],
)
def test_other_values(name: str, gone: tuple[str, ...], directory: Path) -> None:
    """A value becomes an odd one, or is left out."""
    for other in gone:
        (directory / other).unlink()
    path = directory / name
    content = json.loads(path.read_text())
    assert not outcome(directory)
    cases = [case for case in itertools.product(places(content), (*ODD, ...)) if case != ((), ...)]
    chosen = random.Random(name).sample(cases, CASES)
    changes = ((path, json.dumps(changed(content, *case)).encode()) for case in chosen)
    assert refusals(directory, changes) > CASES // 4


@pytest.mark.parametrize(
    "name",
    ["tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "vocab.txt"],
)
def test_other_bytes(name: str, directory: Path) -> None:
    if name == "vocab.txt":
        (directory / "tokenizer.json").unlink()
    if name == "special_tokens_map.json":
        (directory / "tokenizer_config.json").unlink()
    path = directory / name
    content, generator = path.read_bytes(), random.Random(name)
    assert not outcome(directory)
    assert refusals(directory, ((path, damaged(content, generator)) for _ in range(CASES))) > CASES // 4


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"a": ' + "[" * 100_000, "is not valid JSON: it is nested too deeply"),
        ('{"do_lower_case": true, "do_lower_case": false}', "is not valid JSON: the key 'do_lower_case' stands twice"),
        ('{"model_max_length": NaN}', "is not valid JSON: NaN is no number of JSON"),
        ('{"model_max_length": 1e999}', "model_max_length: expected a number from 0 on or null, got inf"),
        ('{"x": ' + "9" * 5000 + "}", "is not valid JSON: Exceeds the limit"),
        ('{"x": "\\ud800"}', "is not valid JSON: a string holds half of a surrogate pair"),
        ('{"do_lower_case": 1}', "do_lower_case: expected true or false, got 1"),
        ('{"never_split": "a"}', "never_split: expected a list of strings or null, got 'a'"),
        ('{"added_tokens_decoder": {"x": "a"}}', r"added_tokens_decoder\['x'\]: expected ids as keys"),
        ("[]", "expected a JSON object, got list"),
    ],
    ids=["deep", "twice", "NaN", "infinite", "long", "surrogate", "switch", "list", "id", "array"],
)
def test_messages(content: str, message: str, directory: Path) -> None:
    path = directory / "tokenizer_config.json"
    path.write_text(content)
    with pytest.raises(ValueError, match=message) as caught:
        BertTokenizer.from_pretrained(directory)
    assert str(path) in str(caught.value)
