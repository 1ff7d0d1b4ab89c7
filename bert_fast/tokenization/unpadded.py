"""The part of the tokenizer that makes batches without padding."""

from typing import Any

from bert_fast.tokenization.arguments import check_flags, shown
from bert_fast.tokenization.direct import Specials
from bert_fast.tokenization.form import SequenceForm
from bert_fast.tokenization.inputs import parse_inputs
from bert_fast.tokenization.options import MOST_TOKENS, Shape, check_int, resolve_shape, tensor_kind
from bert_fast.tokenization.pack import PackedBatch, pack_inputs, pack_texts
from bert_fast.tokenization.padding import to_tensor
from bert_fast.tokenization.pretrained import StoredTokenizer
from bert_fast.tokenization.ragged import RaggedBatch, cut_left

_SHORT_TEXT_TOKENS = 32  # pack(max_tokens=...) first reads as many texts as would fit at this length


class UnpaddedTokenizer(StoredTokenizer):
    """The part of the tokenizer that makes batches without padding: `encode_ragged` and `pack`."""

    @property
    def form(self) -> SequenceForm:
        """How sequences are made of one text or two, for those who have ids without special tokens."""
        return SequenceForm(*self._around, self._pairs)

    def encode_ragged(
        self,
        texts: Any,
        *,
        add_special_tokens: bool = True,
        max_length: int | None = None,
        dtype: str = "int32",
        return_offsets_mapping: bool = False,
        return_word_ids: bool = False,
        return_tensors: str = "np",
        num_threads: int = 0,
    ) -> RaggedBatch:
        """Tokenizes texts into one array without padding, with the boundaries between texts: the fastest form.

        Args:
            texts: a list of str or UTF-8 bytes; or, read without a Python object for each text, a NumPy array of
                strings, an Arrow column, or (buffer, boundaries): UTF-8 in anything with the buffer protocol (bytes,
                mmap, uint8 array) and int64 [n + 1], text i is buffer[boundaries[i]:boundaries[i + 1]].
            add_special_tokens: [CLS] text [SEP].
            max_length: texts lose what exceeds it, special tokens counted, on `truncation_side`; None: nothing is lost,
                whatever model_max_length is.
            dtype: of the ids, "int32" or "int64".
            return_offsets_mapping: also return where each token comes from.
            return_word_ids: also return which word each token belongs to.
            return_tensors: "np" for NumPy arrays, "pt" for torch tensors over the same memory.
            num_threads: 0: as many as there are processors and the texts are worth. The result is the same.

        Raises:
            TypeError, ValueError: bad arguments; the message names the argument, and the index of the text.
        """
        try:
            num_special = 2 if add_special_tokens else 0
            offsets = True if return_offsets_mapping else False  # noqa: SIM210 (bool() takes thrice as long)
            word_ids = True if return_word_ids else False  # noqa: SIM210
        except Exception:
            check_flags(
                add_special_tokens=add_special_tokens,
                return_offsets_mapping=return_offsets_mapping,
                return_word_ids=return_word_ids,
            )
            raise
        if not isinstance(dtype, str):
            raise ValueError(f"dtype: expected 'int32' or 'int64', got {shown(dtype)}")
        num_threads = check_int("num_threads", num_threads, 0, 2**31 - 1) or 0
        max_length = check_int("max_length", max_length, 0)
        if max_length is not None and max_length < num_special:
            raise ValueError(f"max_length: {max_length} leaves no room for the 2 special tokens of a text")
        if max_length is not None:
            max_length = min(max_length, MOST_TOKENS)
        kind = tensor_kind(return_tensors)
        if kind is None:
            raise ValueError("return_tensors: expected 'pt' or 'np', got None")
        limit = max_length if self.truncation_side == "right" else None
        batch = RaggedBatch(
            *self._engine.encode(
                texts,
                offsets=offsets,
                word_ids=word_ids,
                num_threads=num_threads,
                dtype=dtype,
                around=self._around if add_special_tokens else None,
                max_tokens=None if limit is None else limit - num_special,
            )
        )
        if max_length is not None and limit is None:
            batch = cut_left(batch, max_length, num_before=num_special // 2)
        if kind == "np":
            return batch
        return RaggedBatch(*(None if array is None else to_tensor(array, kind) for array in batch))

    def pack(
        self, texts: Any, pairs: Any = None, max_tokens: int | None = None, max_length: int | None = None
    ) -> PackedBatch:
        """Tokenizes texts (or pairs) into one row without padding, for models that take `cu_seqlens`.

        Args:
            texts: a list of texts or pairs.
            pairs: a list of second texts.
            max_tokens: at most so many tokens in all: the batch holds the first texts, whole, as many as fit.
                `batch.num_sequences` says how many; the rest is for the next call.
            max_length: longer sequences are truncated ("longest_first"); default: model_max_length.

        Returns:
            input_ids, token_type_ids, position_ids (int64 [T]), cu_seqlens (int32 [B + 1]), max_seqlen (int); no
            position_ids where pairs have two separators: models of RoBERTa's kind count them in another way.

        Raises:
            ValueError: the first text alone has more than `max_tokens`.
        """
        max_tokens = check_int("max_tokens", max_tokens, 1)
        longest = self.model_max_length if max_length is None else check_int("max_length", max_length, 0) or 0
        if pairs is None and longest >= 2 and self.truncation_side == "right":
            batch = pack_texts(
                self._engine, texts, self.form, longest - 2 if longest < MOST_TOKENS else None,
                None if max_tokens is None or max_tokens > MOST_TOKENS else max_tokens,
            )  # fmt: skip
            if batch is not None:
                return batch
        parsed = parse_inputs(texts, pairs, names=("texts", "pairs"))
        if not parsed.is_batched:
            raise TypeError(f"texts: expected a list of texts, got {type(texts).__name__}")
        shape = self._shape(truncation=True, max_length=max_length)
        count = total = len(parsed.has_pair)
        if max_tokens is not None:
            count = min(total, 1 + max_tokens // _SHORT_TEXT_TOKENS)
        while True:  # a long list is read only as far as its texts may fit: twice as far each time
            batch = pack_inputs(self._engine, parsed.head(count), shape, self.form, max_tokens)
            if count == total or batch.num_sequences < count:
                return batch
            count = min(total, 2 * count)

    def _specials(self) -> Specials:
        return Specials(self._pad_id, self._around, self.pad_token_type_id, self._pairs)

    def _shape(
        self,
        add_special_tokens: bool = True,
        padding: Any = False,
        truncation: Any = None,
        max_length: int | None = None,
        stride: int = 0,
        pad_to_multiple_of: int | None = None,
        padding_side: str | None = None,
    ) -> Shape:
        """The arguments of a call that decide how long rows are, with the tokenizer's defaults."""
        return resolve_shape(
            padding=padding,
            truncation=truncation,
            max_length=max_length,
            stride=stride,
            pad_to_multiple_of=pad_to_multiple_of,
            padding_side=self.padding_side if padding_side is None else padding_side,
            truncation_side=self.truncation_side,
            model_max_length=self.model_max_length,
            add_special_tokens=add_special_tokens,
            has_pad_token=self.pad_token is not None,
        )
