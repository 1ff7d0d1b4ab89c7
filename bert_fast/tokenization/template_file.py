"""What the post-processor of a tokenizer.json says about special tokens around texts."""

from typing import Any, NamedTuple

from bert_fast.tokenization.json_files import type_of
from bert_fast.tokenization.layout import BERT_PAIRS, PairForm


class Template(NamedTuple):
    """The names of the tokens in front of texts and behind them, and what rows of two texts look like."""

    cls_token: str
    sep_token: str
    pairs: PairForm


def read_template(processor: Any) -> Template | None:
    """[CLS] A [SEP] and [CLS] A [SEP] B [SEP], with as many separators in the middle as there are, in either form.

    None: it makes something else, or is damaged.
    """
    try:
        kind = type_of(processor)
        if kind in ("BertProcessing", "RobertaProcessing"):
            cls, sep = processor["cls"][0], processor["sep"][0]
            pairs = BERT_PAIRS if kind == "BertProcessing" else PairForm(num_separators=2, type_id=0)
        else:
            cls, sep = (processor["single"][place]["SpecialToken"]["id"] for place in (0, -1))
            num_separators = len(processor["pair"]) - len(processor["single"]) - 1
            pairs = PairForm(num_separators, processor["pair"][-1]["SpecialToken"]["type_id"])
            expected = template_json(pairs, cls, sep)
            if num_separators < 1 or any(processor[name] != pieces for name, pieces in expected.items()):
                return None
        is_read = isinstance(cls, str) and isinstance(sep, str) and type(pairs.type_id) is int
        return Template(cls, sep, pairs) if is_read else None
    except (AttributeError, KeyError, IndexError, TypeError, ValueError):
        return None


def template_json(pairs: PairForm, cls_token: str, sep_token: str) -> dict[str, list[dict[str, Any]]]:
    """The "single" and "pair" of a TemplateProcessing."""

    def piece(kind: str, name: str, type_id: int = 0) -> dict[str, Any]:
        return {kind: {"id": name, "type_id": type_id}}

    separator = piece("SpecialToken", sep_token)
    single = [piece("SpecialToken", cls_token), piece("Sequence", "A"), separator]
    second = [piece("Sequence", "B", pairs.type_id), piece("SpecialToken", sep_token, pairs.type_id)]
    return {"single": single, "pair": [*single, *[separator] * (pairs.num_separators - 1), *second]}


def special_ids(processor: Any) -> dict[str, Any]:
    """The ids of special tokens by their names, as a post-processor that `read_template` reads holds them."""
    if type_of(processor) == "TemplateProcessing":
        return {name: entry["ids"] for name, entry in processor["special_tokens"].items()}
    return {name: [token_id] for name, token_id in (processor["cls"], processor["sep"])}
