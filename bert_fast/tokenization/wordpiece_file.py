"""What a tokenizer.json with BERT's WordPiece model says, and how one is written."""

from pathlib import Path
from typing import Any

from bert_fast.tokenization.added_token import AddedToken
from bert_fast.tokenization.files import read_added_tokens, read_padding_side
from bert_fast.tokenization.json_files import (
    MODEL_KINDS,
    NORMALIZER_KINDS,
    TOKENIZER_KINDS,
    check_kinds,
    read_json_object,
    type_of,
)
from bert_fast.tokenization.layout import PairForm
from bert_fast.tokenization.template_file import read_template, template_json
from bert_fast.tokenization.vocab import vocab_from_mapping

_HINTS = {
    "Unigram": "; XLMRobertaTokenizer reads it",
    "BPE": ", which transformers' tokenizers read; a model of transformers with it runs here by bert_fast.fuse",
}


def read_tokenizer_json(path: Path) -> tuple[dict[str, Any], dict[int, AddedToken]]:
    """Arguments for the constructor of `BertTokenizer`, and added tokens by id.

    Raises:
        ValueError: it holds a tokenizer that is not BERT's, or is damaged; the message names the part.
    """
    state = read_json_object(path)
    check_kinds(path, state, TOKENIZER_KINDS)
    model = state.get("model") or {}
    # Older files leave the type out; only WordPiece has max_input_chars_per_word and a mapping as vocabulary.
    if model.get("type", "WordPiece") != "WordPiece" or not isinstance(model.get("vocab"), dict):
        hint = _HINTS.get(str(model.get("type")), "")
        raise ValueError(f"{path}: expected a WordPiece model, got {type_of(model)}{hint}")
    check_kinds(path, model, MODEL_KINDS, "model: ")
    added = read_added_tokens(path, state)
    try:
        options: dict[str, Any] = {"vocab": vocab_from_mapping(model["vocab"])}
    except (TypeError, ValueError) as error:
        raise ValueError(f"{path}: {error}") from None
    for key in ("unk_token", "max_input_chars_per_word", "continuing_subword_prefix"):
        if model.get(key) is not None:
            options[key] = model[key]
    options.update(_read_normalizer(path, state.get("normalizer")))
    pre_tokenizer = type_of(state.get("pre_tokenizer") or {})
    if pre_tokenizer != "BertPreTokenizer":
        raise ValueError(f"{path}: expected the pre-tokenizer BertPreTokenizer, got {pre_tokenizer}")
    options.update(_read_post_processor(path, state.get("post_processor")))
    options.update(read_padding_side(path, state))
    for name, usual, other in (("pad_token", "[PAD]", "<pad>"), ("mask_token", "[MASK]", "<mask>")):
        if usual not in model["vocab"] and other in model["vocab"]:  # MPNet's
            options[name] = other
    return options, added


def _read_normalizer(path: Path, normalizer: dict[str, Any] | None) -> dict[str, Any]:
    kind = type_of(normalizer or {})
    if normalizer is None or kind != "BertNormalizer":
        raise ValueError(f"{path}: expected the normalizer BertNormalizer, got {kind}")
    check_kinds(path, normalizer, NORMALIZER_KINDS, "normalizer: ")
    names = {
        "do_lower_case": "lowercase",
        "strip_accents": "strip_accents",
        "tokenize_chinese_chars": "handle_chinese_chars",
        "clean_text": "clean_text",
    }
    return {option: normalizer[key] for option, key in names.items() if key in normalizer}


def _read_post_processor(path: Path, processor: dict[str, Any] | None) -> dict[str, Any]:
    """The names of [CLS] and [SEP], and the form of pairs."""
    if processor is None:
        return {}
    template = read_template(processor)
    if template is None:
        raise ValueError(f"{path}: expected a post-processor that makes [CLS] A [SEP], got {type_of(processor)}")
    options = {"cls_token": template.cls_token, "sep_token": template.sep_token, "pairs": template.pairs}
    if template.pairs.type_id == 0:
        options["model_input_names"] = ("input_ids", "attention_mask")
    return options


def tokenizer_json(
    vocab: list[str],
    added: dict[int, AddedToken],
    engine_options: dict[str, Any],
    special: dict[str, tuple[str, int]],
    pairs: PairForm,
) -> dict[str, Any]:
    """The state that `tokenizers.Tokenizer.from_file` reads, without truncation and padding.

    Args:
        vocab: tokens by id.
        added: added tokens by id.
        engine_options: arguments of the engine's constructor.
        special: "cls_token" and "sep_token" -> (content, id); "unk_token" likewise.
        pairs: what rows of two texts look like.
    """
    (cls, cls_id), (sep, sep_id) = special["cls_token"], special["sep_token"]
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [{"id": token_id, **entry.as_dict()} for token_id, entry in sorted(added.items())],
        "normalizer": {
            "type": "BertNormalizer",
            "clean_text": engine_options["clean_text"],
            "handle_chinese_chars": engine_options["handle_chinese_chars"],
            "strip_accents": engine_options["strip_accents"],
            "lowercase": engine_options["lowercase"],
        },
        "pre_tokenizer": {"type": "BertPreTokenizer"},
        "post_processor": {
            "type": "TemplateProcessing",
            **template_json(pairs, cls, sep),
            "special_tokens": {
                content: {"id": content, "ids": [token_id], "tokens": [content]}
                for content, token_id in ((cls, cls_id), (sep, sep_id))
            },
        },
        "decoder": {"type": "WordPiece", "prefix": engine_options["continuing_prefix"], "cleanup": True},
        "model": {
            "type": "WordPiece",
            "unk_token": special["unk_token"][0],
            "continuing_subword_prefix": engine_options["continuing_prefix"],
            "max_input_chars_per_word": engine_options["max_word_chars"],
            "vocab": {entry: token_id for token_id, entry in enumerate(vocab)},
        },
    }
