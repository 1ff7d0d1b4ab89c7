"""From tokens back to text."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from bert_fast.tokenization.arguments import check_flags, members, plain, shown
from bert_fast.tokenization.sequences import SequenceTable

# What Hugging Face's WordPiece decoder undoes, in its order: spaces before punctuation and English contractions.
_CONTRACTIONS = (" .", " ?", " !", " ,", " ' ", " n't", " 'm", " do not", " 's", " 've", " 're")
_JOINED = (".", "?", "!", ",", "'", "n't", "'m", " don't", "'s", "'ve", "'re")


class TokenDecoder(SequenceTable):
    """The part of the tokenizer that turns ids into text."""

    clean_up_tokenization_spaces: bool

    def decode(
        self, token_ids: Any, skip_special_tokens: bool = False, clean_up_tokenization_spaces: bool | None = None
    ) -> Any:
        """The text of a sequence of ids, or the texts of several.

        Args:
            token_ids: an int, a list, array or tensor of ints, or a batch of such.
            skip_special_tokens: leave special tokens out.
            clean_up_tokenization_spaces: default: that of the tokenizer.

        Raises:
            ValueError: an id is not in the vocabulary.
        """
        check_flags(skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=clean_up_tokenization_spaces)
        token_ids = plain("token_ids", token_ids)
        if isinstance(token_ids, Mapping):
            if "input_ids" not in token_ids:
                raise ValueError("token_ids: expected an entry input_ids in the mapping")
            token_ids = token_ids["input_ids"]
        token_ids = [token_ids] if isinstance(token_ids, int) else members("token_ids", token_ids)
        if token_ids and (isinstance(token_ids[0], (list, tuple)) or getattr(token_ids[0], "ndim", 0)):
            return [self.decode(row, skip_special_tokens, clean_up_tokenization_spaces) for row in token_ids]
        skipped = {token_id for token_id, token in self._added.items() if token.special} if skip_special_tokens else ()
        text = self.convert_tokens_to_string(self._tokens_of("token_ids", token_ids, skipped))
        if clean_up_tokenization_spaces is None:
            clean_up_tokenization_spaces = self.clean_up_tokenization_spaces
        return clean_up(text) if clean_up_tokenization_spaces else text

    def batch_decode(
        self, sequences: Any, skip_special_tokens: bool = False, clean_up_tokenization_spaces: bool | None = None
    ) -> list[str]:
        """The texts of several sequences of ids."""
        texts: list[str] = []
        for row in members("sequences", sequences):
            try:
                texts.append(self.decode(row, skip_special_tokens, clean_up_tokenization_spaces))
            except (TypeError, ValueError) as error:
                kind = TypeError if isinstance(error, TypeError) else ValueError
                raise kind(f"sequences[{len(texts)}]: {error}") from None
        return texts

    def convert_tokens_to_string(self, tokens: Sequence[str]) -> str:
        """The text of a list of tokens."""
        try:
            return join_tokens(tokens, self._engine_options["continuing_prefix"])
        except (AttributeError, RuntimeError, TypeError):  # what has not the methods of a str
            raise TypeError(f"tokens: expected a list of str, got {shown(tokens)}") from None


def join_tokens(tokens: Sequence[str], prefix: str = "##") -> str:
    """The text of a list of tokens: continuations joined, other tokens after a space, punctuation drawn to the left."""
    pieces = []
    for index, token in enumerate(tokens):
        if index:
            token = token.removeprefix(prefix) if token.startswith(prefix) else " " + token
        pieces.append(_replace_all(token, _CONTRACTIONS, _JOINED))
    return "".join(pieces)


def clean_up(text: str) -> str:
    """Draws punctuation and English contractions to the left in a whole text (`clean_up_tokenization_spaces`)."""
    keep = [index for index, old in enumerate(_CONTRACTIONS) if old != " do not"]
    return _replace_all(text, [_CONTRACTIONS[index] for index in keep], [_JOINED[index] for index in keep])


def _replace_all(text: str, olds: Iterable[str], news: Iterable[str]) -> str:
    if " " in text:  # every pattern has one
        for old, new in zip(olds, news, strict=True):
            text = text.replace(old, new)
    return text
