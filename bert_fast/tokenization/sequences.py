"""Sequences with special tokens around texts that are ids already."""

from collections.abc import Sequence

from bert_fast.tokenization.arguments import check_flags, members, shown
from bert_fast.tokenization.special_tokens import TokenTable


class SequenceTable(TokenTable):
    """The part of the tokenizer that puts [CLS] and [SEP] around ids, and finds them again."""

    def num_special_tokens_to_add(self, pair: bool = False) -> int:
        """How many special tokens a text (2) or a pair of texts (3; 4 with two separators) gets."""
        check_flags(pair=pair)
        return self._pairs.num_special(bool(pair))

    def build_inputs_with_special_tokens(
        self, token_ids_0: Sequence[int], token_ids_1: Sequence[int] | None = None
    ) -> list[int]:
        """[CLS] A [SEP], or [CLS] A [SEP] B [SEP]."""
        cls_id, sep_id = self._id_of_named("cls_token"), self._id_of_named("sep_token")
        first = [cls_id, *members("token_ids_0", token_ids_0), sep_id]
        if token_ids_1 is None:
            return first
        return [*first, *[sep_id] * (self._pairs.num_separators - 1), *members("token_ids_1", token_ids_1), sep_id]

    def create_token_type_ids_from_sequences(
        self, token_ids_0: Sequence[int], token_ids_1: Sequence[int] | None = None
    ) -> list[int]:
        """0 for [CLS] A [SEP], 1 for B [SEP] (0 where the model knows no types)."""
        first = [0] * (len(members("token_ids_0", token_ids_0)) + 2)
        if token_ids_1 is None:
            return first
        second = [self._pairs.type_id] * (len(members("token_ids_1", token_ids_1)) + 1)
        return first + [0] * (self._pairs.num_separators - 1) + second

    def get_special_tokens_mask(
        self,
        token_ids_0: Sequence[int],
        token_ids_1: Sequence[int] | None = None,
        already_has_special_tokens: bool = False,
    ) -> list[int]:
        """1 for special tokens, 0 for others.

        Args:
            token_ids_0: ids of the first text, or of a finished sequence.
            token_ids_1: ids of the second text.
            already_has_special_tokens: `token_ids_0` is a finished sequence; every special token in it counts.
        """
        check_flags(already_has_special_tokens=already_has_special_tokens)
        if already_has_special_tokens:
            if token_ids_1 is not None:
                raise ValueError("token_ids_1: a sequence that has its special tokens already comes alone")
            special = set(self.all_special_ids)
            ids = members("token_ids_0", token_ids_0)
            try:
                return [int(token_id in special) for token_id in map(int, ids)]
            except (OverflowError, RuntimeError, TypeError, ValueError):
                raise TypeError(f"token_ids_0: expected a list of ints, got {shown(ids)}") from None
        first = [1, *[0] * len(members("token_ids_0", token_ids_0)), 1]
        if token_ids_1 is None:
            return first
        return [*first, *[1] * (self._pairs.num_separators - 1), *[0] * len(members("token_ids_1", token_ids_1)), 1]
