"""Our tokenizer in place of transformers', where both are the same.

A fast tokenizer is what its tokenizer.json says. Ours is made from that text, and taken only if it would write, of all
that decides about ids, the same: normalizer, pre-tokenizer, vocabulary, post-processor, added tokens. Then its ids are
those of theirs (docs/tokenizer.md, docs/unigram.md). Tokenizers are looked at again when they change.
"""

import json
import tempfile
import weakref
from pathlib import Path
from typing import Any

from bert_fast.tokenization import Tokenizer, load_tokenizer
from bert_fast.tokenization.template_file import read_template, special_ids

_NAMES = ("Bert", "Camembert", "DebertaV2", "DistilBert", "Electra", "MPNet", "XLMRoberta")
_CLASSES = {f"{name}Tokenizer{kind}" for name in _NAMES for kind in ("", "Fast")}
_CLASSES |= {"PreTrainedTokenizerFast", "TokenizersBackend"}
_PARTS = ("normalizer", "pre_tokenizer", "model", "added_tokens")
_known: "weakref.WeakKeyDictionary[Any, tuple[Any, Tokenizer | str]]" = weakref.WeakKeyDictionary()


def same_tokenizer(theirs: Any) -> Tokenizer | str:
    """The tokenizer of ours that makes the ids which `theirs` makes, or why there is none.

    It has no greatest length: callers say what theirs has.
    """
    cls = type(theirs)
    if cls.__name__ not in _CLASSES or not cls.__module__.startswith("transformers.") or not theirs.is_fast:
        return f"a {cls.__name__}, not a fast tokenizer of a class that bert_fast knows"
    if theirs.padding_side != "right":  # which moves the positions of padded texts
        return f"padding_side: {theirs.padding_side!r}"
    if theirs.truncation_side != "right":
        return f"truncation_side: {theirs.truncation_side!r}"
    mark = _mark(theirs)
    known = _known.get(theirs)
    if known is None or known[0] != mark:
        known = _known[theirs] = mark, _made(theirs.backend_tokenizer)
    return known[1]


def _mark(theirs: Any) -> tuple[Any, ...]:
    """What a change of a tokenizer changes; takes microseconds, its JSON takes milliseconds."""
    backend = theirs.backend_tokenizer
    model = backend.model
    parts = (backend.normalizer, backend.pre_tokenizer, backend.post_processor)
    options = ("unk_token", "continuing_subword_prefix", "max_input_chars_per_word", "unk_id", "byte_fallback")
    return (
        backend, backend.encode_special_tokens, backend.get_vocab_size(), str(backend.get_added_tokens_decoder()),
        *(None if part is None else part.__getstate__() for part in parts),
        type(model), *(getattr(model, name, None) for name in options),
    )  # fmt: skip


def _made(backend: Any) -> Tokenizer | str:
    if backend.encode_special_tokens:
        return "split_special_tokens: special tokens within texts are split"
    text = backend.to_str()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "tokenizer.json"
        path.write_text(text, encoding="utf-8")
        # Scores of a Unigram model are in memory what the text says; only a file is read with rounding.
        (path.parent / "tokenizer_config.json").write_text('{"tokenizer_class": "XLMRobertaTokenizer"}')
        try:
            ours = load_tokenizer(path.parent)
        except (TypeError, ValueError) as error:
            return str(error).replace(str(path), "tokenizer.json")
    theirs, own = json.loads(text), ours.as_json()
    wrong = [name for name in _PARTS if theirs[name] != own[name]]
    if _template(theirs["post_processor"]) != _template(own["post_processor"]):
        wrong.append("post_processor")
    return f"another {', '.join(wrong)} than bert_fast's tokenizer would have" if wrong else ours


def _template(processor: Any) -> Any:
    """A post-processor as form, names and ids, whichever way it is written."""
    return processor and (read_template(processor), special_ids(processor))
