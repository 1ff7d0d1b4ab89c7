"""Our tokenizer in place of transformers', where both are the same.

A fast tokenizer is what its tokenizer.json says. Ours is made from that text, and taken only if it would write, of all
that decides about ids, the same: normalizer, pre-tokenizer, vocabulary, post-processor, added tokens. Then its ids are
those of theirs (docs/tokenizer.md). Tokenizers are looked at again when they change.
"""

import json
import tempfile
import weakref
from pathlib import Path
from typing import Any

from bert_fast.tokenization import BertTokenizer

__all__ = ["same_tokenizer"]

_CLASSES = ("BertTokenizer", "BertTokenizerFast", "PreTrainedTokenizerFast", "TokenizersBackend")
_PARTS = ("normalizer", "pre_tokenizer", "model", "added_tokens")
_known: "weakref.WeakKeyDictionary[Any, tuple[Any, BertTokenizer | str]]" = weakref.WeakKeyDictionary()


def same_tokenizer(theirs: Any) -> BertTokenizer | str:
    """The BertTokenizer that makes the ids which `theirs` makes, or why there is none.

    It has no greatest length: callers say what theirs has.
    """
    cls = type(theirs)
    if cls.__name__ not in _CLASSES or not cls.__module__.startswith("transformers."):
        return f"a {cls.__name__}, not a fast tokenizer of BERT's"
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
    options = ("unk_token", "continuing_subword_prefix", "max_input_chars_per_word")
    return (
        backend, backend.encode_special_tokens, backend.get_vocab_size(), str(backend.get_added_tokens_decoder()),
        *(None if part is None else part.__getstate__() for part in parts),
        type(model), *(getattr(model, name, None) for name in options),
    )  # fmt: skip


def _made(backend: Any) -> BertTokenizer | str:
    if backend.encode_special_tokens:
        return "split_special_tokens: special tokens within texts are split"
    text = backend.to_str()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "tokenizer.json"
        path.write_text(text, encoding="utf-8")
        try:
            ours = BertTokenizer.from_pretrained(path)
        except (TypeError, ValueError) as error:
            return str(error).replace(str(path), "tokenizer.json")
    theirs, own = json.loads(text), ours.as_json()
    wrong = [name for name in _PARTS if theirs[name] != own[name]]
    if _template(theirs["post_processor"]) != _template(own["post_processor"]):
        wrong.append("post_processor")
    return f"another {', '.join(wrong)} than bert_fast's tokenizer would have" if wrong else ours


def _template(processor: Any) -> Any:
    """A post-processor as a template, if it is one of either form."""
    if not processor or processor.get("type") != "BertProcessing":
        return processor
    (cls, cls_id), (sep, sep_id) = processor["cls"], processor["sep"]

    def piece(kind: str, name: str, type_id: int) -> dict[str, Any]:
        return {kind: {"id": name, "type_id": type_id}}

    single = [piece("SpecialToken", cls, 0), piece("Sequence", "A", 0), piece("SpecialToken", sep, 0)]
    return {
        "type": "TemplateProcessing",
        "single": single,
        "pair": [*single, piece("Sequence", "B", 1), piece("SpecialToken", sep, 1)],
        "special_tokens": {
            name: {"id": name, "ids": [token_id], "tokens": [name]} for name, token_id in ((cls, cls_id), (sep, sep_id))
        },
    }
