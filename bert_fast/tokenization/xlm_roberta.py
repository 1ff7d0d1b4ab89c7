"""`XLMRobertaTokenizer`, the drop-in for tokenizers of transformers with a Unigram (SentencePiece) model."""

import os
from collections.abc import Container, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bert_fast.tokenization.added_token import AddedToken
from bert_fast.tokenization.arguments import check_flags, shown
from bert_fast.tokenization.calls import Tokenizer
from bert_fast.tokenization.engine import Engine, make_unigram
from bert_fast.tokenization.files import as_path, class_of, read_added_tokens, read_padding_side
from bert_fast.tokenization.json_files import TOKENIZER_KINDS, check_kinds, read_json_object
from bert_fast.tokenization.unigram_file import read_unigram
from bert_fast.tokenization.vocab import Vocabulary

if TYPE_CHECKING:
    pass

# Parts of a tokenizer.json that are kept and written back as they are.
_KEPT_PARTS = ("normalizer", "pre_tokenizer", "post_processor", "decoder", "model")
# Classes of transformers 5 that build their model of the numbers in a tokenizer.json, as Python reads them; others
# leave the file to `tokenizers`.
_DEBERTA = "DebertaV2Tokenizer"
_EXACT_CLASSES = {
    f"{name}{kind}" for name in ("CamembertTokenizer", _DEBERTA, "XLMRobertaTokenizer") for kind in ("", "Fast")
}


class XLMRobertaTokenizer(Tokenizer):
    """Text to Unigram ids and back, for XLM-R and its relatives (multilingual-e5, bge-m3, MiniLM) and DeBERTa v2, v3.

    Ids, masks, offsets and word ids are those of Hugging Face `tokenizers` for the same tokenizer.json. What calls,
    `encode_ragged` and `pack` take and return is as in `BertTokenizer`; rows are as the file's template says: XLM-R's
    <s> A </s> and <s> A </s></s> B </s>, or DeBERTa's [CLS] A [SEP] and [CLS] A [SEP] B [SEP] with types 0 and 1.

    Args:
        tokenizer_file: path of a tokenizer.json, or the object in one.
        model_max_length: what `truncation=True` and `padding="max_length"` use without `max_length`; None: no limit.
        padding_side, truncation_side: "right" or "left".
        bos_token, eos_token, unk_token, sep_token, pad_token, cls_token, mask_token: special tokens, all in the
            vocabulary. None: cls_token and sep_token (bos_token, eos_token) as in the file's template, unk_token as in
            its model, "<pad>" or "[PAD]", "<mask>" or "[MASK]" if the file has them.
        extra_special_tokens, additional_special_tokens: further special tokens, in a list or by the names that they get
            as attributes; new ones are added.
        model_input_names: which of token_type_ids and attention_mask a call returns unasked; None: attention_mask, and
            token_type_ids where the file's template gives a second text others than the first.
        clean_up_tokenization_spaces: default of `decode`.
        pad_token_type_id: type id of padding.
        added_tokens: added tokens by id, besides those of the file.
        exact_scores: take scores as they are written, as transformers 5's own class does; False: as `tokenizers` rounds
            them when it reads a file. The last bit decides between ways to cut a word with equal sums of scores.
        name_or_path: where it came from.

    Raises:
        ValueError: the file has no Unigram model, or a part that is not run here; the message names the part and what
            is expected.
        BackendError: the C++ extension is not there.

    Source: Kudo 2018 (arXiv:1804.10959); Conneau et al. 2020 (arXiv:1911.02116).

    Example:
        >>> import json, transformers
        >>> vocab = [(piece, -1.0) for piece in ("<s>", "<pad>", "</s>", "<unk>", "\u2581a", "\u2581text")]
        >>> file = transformers.XLMRobertaTokenizer(vocab=vocab).backend_tokenizer.to_str()
        >>> bert_fast.XLMRobertaTokenizer(json.loads(file))("a text")["input_ids"]
        [0, 4, 5, 2]
    """

    def __init__(
        self,
        tokenizer_file: str | os.PathLike[str] | Mapping[str, Any],
        model_max_length: float | None = None,
        padding_side: str | None = None,
        truncation_side: str = "right",
        *,
        bos_token: Any = None,
        eos_token: Any = None,
        unk_token: Any = None,
        sep_token: Any = None,
        pad_token: Any = None,
        cls_token: Any = None,
        mask_token: Any = None,
        extra_special_tokens: Sequence[Any] | Mapping[str, Any] | None = None,
        additional_special_tokens: Sequence[Any] | Mapping[str, Any] | None = None,
        model_input_names: Sequence[str] | None = None,
        clean_up_tokenization_spaces: bool = False,
        pad_token_type_id: int = 0,
        added_tokens: Mapping[int, AddedToken] | None = None,
        exact_scores: bool = False,
        name_or_path: str = "",
    ) -> None:
        check_flags(exact_scores=exact_scores)
        path, state = _read_state(tokenizer_file)
        file = read_unigram(path, state, bool(exact_scores))
        if not isinstance(added_tokens, Mapping | None):
            raise TypeError(f"added_tokens: expected a mapping from ids to AddedTokens, got {shown(added_tokens)}")
        self._pairs = file.pairs
        self._state = {name: state.get(name) for name in _KEPT_PARTS}
        self._exact_scores = bool(exact_scores)
        self._mark, self._drops_first = file.mark, file.drops_first
        vocabulary = Vocabulary(file.vocab, str(path))
        stored = read_added_tokens(path, dict(state))
        known = {token.content for token in stored.values()}
        if isinstance(mask_token, Mapping) and mask_token.get("content") in known:
            mask_token = mask_token["content"]  # a configuration file: what the token says about itself counts
        if model_input_names is None:
            model_input_names = ["input_ids", "attention_mask", *["token_type_ids"][: int(file.pairs.type_id != 0)]]
        cls_token, sep_token = cls_token or file.named["cls_token"], sep_token or file.named["sep_token"]
        super().__init__(
            vocabulary,
            {
                "bos_token": bos_token or cls_token,
                "eos_token": eos_token or sep_token,
                "unk_token": unk_token or file.named["unk_token"],
                "sep_token": sep_token,
                "cls_token": cls_token,
                "pad_token": pad_token or _first_known(vocabulary, known, "<pad>", "[PAD]"),
                "mask_token": mask_token or _first_known(vocabulary, known, "<mask>", "[MASK]"),
            },
            {"extra_special_tokens": extra_special_tokens, "additional_special_tokens": additional_special_tokens},
            {**stored, **(added_tokens or {})},
            file.engine_options,
            model_max_length=model_max_length,
            padding_side=padding_side or read_padding_side(path, dict(state)).get("padding_side", "right"),
            truncation_side=truncation_side,
            model_input_names=model_input_names,
            clean_up_tokenization_spaces=clean_up_tokenization_spaces,
            pad_token_type_id=pad_token_type_id,
            name_or_path=name_or_path,
        )

    @classmethod
    def _of_class(cls, place: Path) -> dict[str, Any]:
        return {"exact_scores": place.is_dir() and class_of(place) in _EXACT_CLASSES}

    def convert_tokens_to_string(self, tokens: Sequence[str]) -> str:
        """The text of a list of tokens: joined, marks turned into spaces, that of the first token left out."""
        try:
            if self._mark is None:
                return " ".join(tokens)
            pieces = [token.replace(self._mark, " ") for token in tokens]
            if pieces and self._drops_first:
                pieces[0] = tokens[0].replace(self._mark, "")
            return "".join(pieces)
        except (AttributeError, RuntimeError, TypeError):  # what has not the methods of a str
            raise TypeError(f"tokens: expected a list of str, got {shown(tokens)}") from None

    def as_json(self) -> dict[str, Any]:
        """What tokenizer.json holds of it: all that decides which ids a text has."""
        added = [{"id": token_id, **token.as_dict()} for token_id, token in sorted(self._added.items())]
        return {"version": "1.0", "truncation": None, "padding": None, "added_tokens": added, **self._state}

    def identity(self) -> list[Any]:
        """See `StoredTokenizer.identity`: normalizer, splitting, pieces with their scores, and added tokens."""
        parts = {name: self._state[name] for name in ("normalizer", "pre_tokenizer", "model")}
        return [parts, self._added_identity(), *(["exact_scores"] if self._exact_scores else [])]

    def continuing_ids(self) -> list[int]:
        """See `StoredTokenizer.continuing_ids`: those that do not begin with the mark of a space, unknown ones too."""
        mark = self._engine_options["replacement"]
        return [
            token_id
            for token_id, token in enumerate(self._vocabulary.tokens)
            if not token.startswith(mark) and (token_id not in self._added or token == self.unk_token)
        ]

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}(name_or_path={self.name_or_path!r}, vocab_size={self.vocab_size}, "
            f"model_max_length={self.model_max_length}, padding_side={self.padding_side!r}, "
            f"truncation_side={self.truncation_side!r}, special_tokens={self.special_tokens_map})"
        )

    def _make_engine(self, added_tokens: list[tuple[Any, ...]]) -> Engine:
        return make_unigram(self._vocabulary.tokens, added_tokens=added_tokens, **self._engine_options)

    def _own_files(self) -> dict[str, str]:
        return {}

    def _own_config(self) -> dict[str, Any]:
        # Each of these classes of transformers 5 reads the scores that count here.
        if not self._exact_scores:
            return {"tokenizer_class": "PreTrainedTokenizerFast"}
        steps = self._engine_options["normalizer"]
        if ("compose",) not in steps and not str(self._config.get("tokenizer_class")).startswith(_DEBERTA):
            return {"tokenizer_class": "XLMRobertaTokenizer"}
        return {
            "tokenizer_class": _DEBERTA,
            "do_lower_case": ("lowercase",) in steps,
            "split_by_punct": self._engine_options["split_punctuation"],
            "add_prefix_space": self._engine_options["prepend"] == "always",
            "unk_id": self._engine_options["unk_id"],
        }

    @classmethod
    def _read_json(cls, path: Path) -> tuple[dict[str, Any], dict[int, AddedToken]]:
        return {"tokenizer_file": path}, {}

    @classmethod
    def _read_vocabulary(cls, path: Path) -> tuple[dict[str, Any], dict[int, AddedToken]]:
        raise ValueError(f"{path}: expected a tokenizer.json, which alone holds the scores of a Unigram model")


def _read_state(tokenizer_file: Any) -> tuple[Path, Mapping[str, Any]]:
    if isinstance(tokenizer_file, Mapping):
        path, state = Path("tokenizer.json"), tokenizer_file
    else:
        path = as_path("tokenizer_file", tokenizer_file)
        if not path.is_file():
            raise FileNotFoundError(f"tokenizer_file: there is no file {path}")
        state = read_json_object(path)
    check_kinds(path, state, TOKENIZER_KINDS)
    return path, state


def _first_known(vocabulary: Vocabulary, added: Container[str], *tokens: str) -> str | None:
    return next((token for token in tokens if token in added or vocabulary.find(token) is not None), None)
