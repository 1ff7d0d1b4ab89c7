"""Surfaces: the constructor of the tokenizer, what is asked of it afterwards, and its calls."""

import contextlib
import functools
import itertools
import random
from collections.abc import Callable
from typing import Any

import numpy as np

from bert_fast.tokenization import AddedToken, BatchEncoding, BertTokenizer

from .case import Case, describe
from .rules import argument_names
from .tensors import garbage, spoil
from .texts import SPECIAL, Texts, added_tokens, engine_options, vocabulary

_NAMED = ("unk_token", "sep_token", "pad_token", "cls_token", "mask_token", "bos_token", "eos_token")
# What tokenizers of transformers and ours are asked for beside calls; names of entries of dictionaries count as named.
_NAMES = ("input_ids", "token_type_ids", "attention_mask", "special_tokens_mask", "extra_special_tokens", *_NAMED)


@functools.lru_cache(128)
def make_tokenizer(number: int) -> BertTokenizer:
    """A tokenizer with options of its own; nobody changes it."""
    rng = random.Random(number)
    tokens = vocabulary(number % 24)
    options = engine_options(rng)
    if rng.random() < 0.3:
        options["extra_special_tokens"] = rng.sample(["<s>", "[ab]", "x y", "é", "##a", " lead"], 2)
    if rng.random() < 0.3:
        options["model_max_length"] = rng.choice((8, 33, 512))
    sides = ("right", "right", "left")
    options |= {"padding_side": rng.choice(sides), "truncation_side": rng.choice(sides)}
    if rng.random() < 0.2:
        options["never_split"] = ["ab", "[UNK]", "a,b"]
    return BertTokenizer(tokens, **options)


# --- the constructor --------------------------------------------------------------------------------------------------


def run_constructor(case: Case) -> None:
    """A tokenizer of random arguments; then a few things are asked of it."""
    texts, rng = Texts(case), case.rng
    arguments: dict[str, Any] = {"vocab": _vocab(case, texts), **engine_options(rng)}
    for name in rng.sample(_NAMED, rng.choice((0, 0, 1, 2))):
        arguments[name] = rng.choice(("[PAD]", "[MASK]", rng.choice(texts.vocab), "new", AddedToken("[CLS]"), None))
    if case.chance(0.3):
        arguments[rng.choice(("extra_special_tokens", "additional_special_tokens"))] = [
            rng.choice((rng.choice(texts.vocab), "<new>", "", AddedToken("x ", lstrip=True), {"content": "y"}))
            for _ in range(rng.randint(0, 4))
        ]
    if case.chance(0.2):
        drawn = added_tokens(rng, texts.vocab)
        arguments["added_tokens"] = {token.pop("id"): AddedToken(**token) for token in drawn}
    others = {
        "never_split": ["ab", "[UNK]"],
        "model_max_length": rng.choice((None, 0, 5, 512, 10**30)),
        "padding_side": rng.choice(("left", "right")),
        "truncation_side": rng.choice(("left", "right")),
        "continuing_subword_prefix": rng.choice(("##", "", "@@", "é", "#")),
        "model_input_names": rng.choice((["input_ids"], ["input_ids", "attention_mask"], [])),
        "pad_token_type_id": rng.choice((0, 1, -1)),
        "name_or_path": "name",
        "clean_up_tokenization_spaces": case.chance(0.5),
        "do_basic_tokenize": True,
    }
    for name in rng.sample(sorted(others), rng.randint(0, 3)):
        arguments[name] = others[name]
    if case.chance(0.5):
        name = rng.choice(sorted(arguments))
        if name != "vocab" or case.chance(0.3):
            arguments[name] = spoil(rng, arguments[name])
    tokenizer = case.call(BertTokenizer, **arguments, names=("vocab",))
    for _ in range(rng.randint(0, 3)):
        _ask(case, tokenizer, texts)


def _vocab(case: Case, texts: Texts) -> Any:
    """A vocabulary as a list, a mapping or a file, whole or not."""
    tokens: list[Any] = texts.vocab
    rng = case.rng
    if case.chance(0.3):
        tokens = list(tokens)
        place = rng.randrange(len(tokens))
        odd = (tokens[0], "", "\n", "a\r", "\ud800", None, 5, b"a", "a" * 5000, "a b", "\0")
        tokens[place : place + rng.randint(0, 1)] = [rng.choice(odd)]
    kind = rng.randrange(6)
    if kind == 0:
        return dict(zip(tokens, rng.choice((range(len(tokens)), range(1, len(tokens) + 1))), strict=True))
    if kind == 1:
        path = case.folder / "vocab.txt"
        content = "\n".join(map(str, tokens)).encode(errors="surrogatepass")
        if case.chance(0.4):
            content = (
                rng.choice((b"", b"\xff\xfe", b"\xef\xbb\xbf", b"\n\n")) + content[: rng.choice((0, 9, len(content)))]
            )
        path.write_bytes(content)
        return rng.choice((path, str(path)))
    if kind == 2:
        return tuple(tokens)
    if kind == 3 and case.chance(0.3):
        return rng.choice((SPECIAL, [], {}, "", "no such file", [SPECIAL], iter(tokens), np.array(SPECIAL)))
    return tokens


# --- what is asked of a tokenizer -------------------------------------------------------------------------------------


def _ids(case: Case, tokenizer: BertTokenizer) -> Any:
    """Ids, in or out of range, in some form."""
    rng, size = case.rng, len(tokenizer)
    ids = [rng.randrange(-1, size) if case.chance(0.1) else rng.randrange(size) for _ in range(rng.randint(0, 6))]
    if case.chance(0.1):
        ids.append(rng.choice((-1, size, 2**31, 2**64, None, "a", 1.5)))
        return ids
    return rng.choice((ids, tuple(ids), np.array(ids, np.int64), [ids, ids], ids[:1], np.int64(3), garbage(rng)))


def _token(case: Case, texts: Texts) -> Any:
    rng = case.rng
    switches = {name: case.chance(0.5) for name in ("single_word", "lstrip", "rstrip", "normalized", "special")}
    content = rng.choice((rng.choice(texts.vocab), texts.text()[:20], "", " ", "<new>", "\ud800"))
    return rng.choice((content, AddedToken(content, **switches), {"content": content, **switches}, garbage(rng)))


def _ask(case: Case, tokenizer: BertTokenizer, texts: Texts) -> None:
    """One of the methods, or a name set."""
    rng = case.rng
    questions: dict[str, Callable[[], tuple[Any, ...]]] = {
        "decode": lambda: (_ids(case, tokenizer), case.chance(0.5)),
        "batch_decode": lambda: ([_ids(case, tokenizer) for _ in range(2)],),
        "convert_ids_to_tokens": lambda: (_ids(case, tokenizer), case.chance(0.5)),
        "convert_tokens_to_ids": lambda: (rng.choice((texts.texts(), texts.text(), garbage(rng))),),
        "convert_tokens_to_string": lambda: (rng.choice((rng.choices(texts.vocab, k=4), garbage(rng))),),
        "add_tokens": lambda: (rng.choice((_token(case, texts), [_token(case, texts), _token(case, texts)])),),
        "add_special_tokens": lambda: (
            rng.choice(({rng.choice(_NAMED): _token(case, texts)}, {"extra_special_tokens": [_token(case, texts)]})),
        ),
        "build_inputs_with_special_tokens": lambda: (_ids(case, tokenizer), _ids(case, tokenizer)),
        "create_token_type_ids_from_sequences": lambda: (_ids(case, tokenizer),),
        "get_special_tokens_mask": lambda: (_ids(case, tokenizer), None, case.chance(0.5)),
        "pad": lambda: (_rows(case, tokenizer), rng.choice((True, False, "max_length", "longest", "none"))),
        "tokenize": lambda: (texts.anything(),),
        "encode": lambda: (texts.anything(),),
        "save_pretrained": lambda: (case.folder / rng.choice(("a", "b/c", "\0", "x" * 300)),),
        "save_vocabulary": lambda: (case.folder, rng.choice((None, "p", "a/b", ""))),
    }
    if case.chance(0.15):
        name = rng.choice(_NAMED) + rng.choice(("", "_id"))
        value = rng.choice((rng.choice(texts.vocab), 3, -1, 10**6, garbage(rng)))
        case.call(setattr, tokenizer, name, value, names=(name,))
        return
    name = rng.choice(sorted(questions))
    arguments = questions[name]()
    if case.chance(0.1):
        arguments = (*arguments[:1], *(spoil(rng, argument) for argument in arguments[1:]), garbage(rng))
        arguments = arguments[: len(argument_names(getattr(tokenizer, name)))]
    case.call(getattr(tokenizer, name), *arguments, names=(*_NAMES, "vocab"))


def _rows(case: Case, tokenizer: BertTokenizer) -> Any:
    """What a collator hands to `pad`, whole or not."""
    rng = case.rng
    rows = []
    for _ in range(rng.randint(0, 3)):
        length = rng.randint(0, 5)
        row: dict[str, Any] = {"input_ids": [rng.randrange(len(tokenizer)) for _ in range(length)]}
        if case.chance(0.5):
            row["attention_mask"] = [1] * (length if case.chance(0.9) else length + 1)
        if case.chance(0.2):
            row[rng.choice(("label", "labels", "token_type_ids", "input_ids"))] = rng.choice(
                (1, [1] * length, None, "a")
            )
        rows.append(row)
    return rng.choice((rows, rows, {"input_ids": [row["input_ids"] for row in rows]}, garbage(rng)))


# --- calls ------------------------------------------------------------------------------------------------------------


def _options(case: Case) -> dict[str, Any]:
    rng = case.rng
    options: dict[str, Callable[[], Any]] = {
        "add_special_tokens": lambda: case.chance(0.5),
        "padding": lambda: rng.choice((True, False, "longest", "max_length", "do_not_pad")),
        "truncation": lambda: rng.choice((True, False, "longest_first", "only_first", "only_second", None)),
        "max_length": lambda: rng.choice((0, 1, 2, 3, 4, 5, 8, 16, 17, 64, 512)),
        "stride": lambda: rng.choice((0, 1, 2, 5)),
        "is_split_into_words": lambda: case.chance(0.5),
        "pad_to_multiple_of": lambda: rng.choice((1, 2, 8, 64)),
        "padding_side": lambda: rng.choice(("left", "right")),
        "return_tensors": lambda: rng.choice(("pt", "np", None)),
        "return_token_type_ids": lambda: case.chance(0.5),
        "return_attention_mask": lambda: case.chance(0.5),
        "return_overflowing_tokens": lambda: case.chance(0.7),
        "return_special_tokens_mask": lambda: True,
        "return_offsets_mapping": lambda: True,
        "return_length": lambda: True,
        "verbose": lambda: case.chance(0.5),
    }
    chosen = {name: options[name]() for name in rng.sample(sorted(options), rng.choice((0, 1, 2, 3, 4, 6, 9)))}
    if chosen and case.chance(0.12):
        name = rng.choice(sorted(chosen))
        value = spoil(rng, chosen[name])
        is_huge = isinstance(value, int | float) and 1e5 < abs(value) < 1e30  # a width that somebody asked for
        chosen[name] = 7 if is_huge else value
    if case.chance(0.01):
        chosen[rng.choice(("max_len", "return_tensor", "text2"))] = 1
    return chosen


def run_calls(case: Case) -> None:
    """One call of a tokenizer, `encode_ragged` or `pack`; then the result is asked about its tokens."""
    tokenizer, texts = make_tokenizer(case.rng.randrange(96)), Texts(case)
    case.say(f"tokenizer = make_tokenizer(...)  # {tokenizer.vocab_size} tokens, {tokenizer._engine_options}")
    kind = case.rng.randrange(10)
    if kind < 2:
        return _run_ragged(case, tokenizer, texts)
    if kind == 2:
        return _run_pack(case, tokenizer, texts)
    if kind == 3:
        return _ask(case, BertTokenizer(texts.vocab), texts)
    options = _options(case)
    text = _split(case, texts) if options.get("is_split_into_words") is True else texts.anything()
    pair = None
    if case.chance(0.3):
        pair = texts.anything() if case.chance(0.2) else _like(texts, text)
    arguments = (text,) if pair is None else (text, pair)
    encoding = case.call(tokenizer, *arguments, **options, names=("text", "text_pair", "buffer", "boundaries"))
    case.expect(isinstance(encoding, BatchEncoding), f"a call gave {type(encoding).__name__}")
    _expect_sound(case, encoding, text, options)
    if pair is None and isinstance(text, str | list):
        again = case.call(tokenizer, text, **options)
        case.expect(repr(_plain(encoding)) == repr(_plain(again)), "a second call gave another result")
    if case.chance(0.3) and text is not None:
        _ask_encoding(case, encoding)


def _split(case: Case, texts: Texts) -> Any:
    words = texts.words()
    return case.rng.choice(
        (words, [texts.words() for _ in range(3)], [(texts.words(), texts.words())], texts.anything())
    )


def _like(texts: Texts, text: Any) -> Any:
    """Second texts that fit the first ones."""
    if isinstance(text, str | bytes):
        return texts.single()
    return [texts.single() for _ in text] if isinstance(text, list) else texts.batch()


def _plain(encoding: BatchEncoding) -> dict[str, Any]:
    return {key: value.tolist() if hasattr(value, "tolist") else value for key, value in encoding.items()}


def _expect_sound(case: Case, encoding: BatchEncoding, text: Any, options: dict[str, Any]) -> None:
    """All entries have the lengths of the ids, offsets lie within their text."""
    plain = _plain(encoding)
    if "input_ids" not in plain:
        return
    rows = plain["input_ids"]
    is_flat = not rows or not isinstance(rows[0], list | np.ndarray)
    for name in ("token_type_ids", "attention_mask", "special_tokens_mask", "offset_mapping"):
        if name in plain:
            pairs = zip([rows], [plain[name]], strict=True) if is_flat else zip(rows, plain[name], strict=True)
            case.expect(
                all(len(a) == len(b) for a, b in pairs), f"{name} is as long as input_ids nowhere or not everywhere"
            )
    if "offset_mapping" in plain and isinstance(text, str) and is_flat:
        for start, stop in plain["offset_mapping"]:
            case.expect(0 <= start <= stop <= max(len(text), 10**9), f"offsets [{start}, {stop}] leave the text")
    if options == {} and isinstance(text, str):
        case.expect(plain["input_ids"] is not None, describe(plain))


def _ask_encoding(case: Case, encoding: BatchEncoding) -> None:
    rng = case.rng
    name = rng.choice(("tokens", "word_ids", "sequence_ids", "token_to_chars", "char_to_token", "word_to_tokens",
                       "word_to_chars", "char_to_word", "token_to_word", "token_to_sequence"))  # fmt: skip
    numbers: list[Any] = [
        rng.choice((0, 0, 0, 1, 2, 5)) for _ in range(1 if name in ("tokens", "word_ids", "sequence_ids") else 2)
    ]

    def ask(*indices: Any) -> None:
        with contextlib.suppress(IndexError, ValueError):  # a row or token that is not there: as from a list
            getattr(encoding, name)(*indices)

    case.say(f"encoding.{name}(...)")
    case.call(ask, *numbers)  # what the call took, it can answer questions about
    if case.chance(0.1):
        numbers[rng.randrange(len(numbers))] = garbage(rng)
        case.call(ask, *numbers, names=argument_names(getattr(encoding, name)))
    if case.chance(0.3):
        case.call(encoding.to, "cpu" if case.chance(0.9) else garbage(rng))


def _run_ragged(case: Case, tokenizer: BertTokenizer, texts: Texts) -> None:
    rng = case.rng
    options: dict[str, Any] = {}
    if case.chance(0.5):
        options["add_special_tokens"] = case.chance(0.5)
    if case.chance(0.4):
        options["max_length"] = rng.choice((0, 1, 2, 3, 5, 17))
    options |= {"return_offsets_mapping": case.chance(0.5), "return_word_ids": case.chance(0.5)}
    if case.chance(0.3):
        options |= {"dtype": rng.choice(("int32", "int64", "int16")), "num_threads": rng.choice((0, 1, 2, 5))}
    if case.chance(0.15):
        name = rng.choice(sorted(options))
        options[name] = spoil(rng, options[name])
    batch = texts.batch() if case.chance(0.8) else texts.anything()
    parts = ("buffer", "boundaries", "text")  # of texts that come as (buffer, boundaries)
    ids, ends, offsets, word_ids = case.call(tokenizer.encode_ragged, batch, **options, names=parts)
    case.expect(ends[0] == 0 and ends[-1] == len(ids), "cu_seqlens do not span the ids")
    case.expect(all(a <= b for a, b in itertools.pairwise(ends)), "cu_seqlens fall")
    case.expect(len(ids) == 0 or (min(ids) >= 0 and max(ids) < len(tokenizer)), "ids outside of the vocabulary")
    for name, extra in (("offsets", offsets), ("word_ids", word_ids)):
        case.expect(extra is None or len(extra) == len(ids), f"{name} are not as many as the ids")
    again = tokenizer.encode_ragged(batch, **options) if isinstance(batch, list | tuple) else (ids,)
    case.expect(np.array_equal(ids, again[0]), "a second call gave other ids")


def _run_pack(case: Case, tokenizer: BertTokenizer, texts: Texts) -> None:
    rng = case.rng
    options: dict[str, Any] = {}
    if case.chance(0.5):
        options["max_tokens"] = rng.choice((1, 3, 8, 40, 1000))
    if case.chance(0.5):
        options["max_length"] = rng.choice((0, 1, 2, 3, 5, 17))
    if options and case.chance(0.2):
        name = rng.choice(sorted(options))
        options[name] = spoil(rng, options[name])
    pairs = texts.batch() if case.chance(0.3) else None
    batch = texts.batch() if case.chance(0.8) else texts.anything()
    packed = case.call(tokenizer.pack, batch, pairs, **options, names=("text",))  # of an iterator's own error
    case.expect(int(packed.cu_seqlens[-1]) == len(packed.input_ids), "cu_seqlens do not end at the number of tokens")
    case.expect(len(packed.position_ids) == len(packed.input_ids), "position_ids are not as many as input_ids")
