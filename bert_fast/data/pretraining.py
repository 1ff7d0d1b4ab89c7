"""`PretrainingSource`: batches to pre-train BERT on, made from a token store as they are needed.

    source = PretrainingSource(TokenStore.open("corpus", tokenizer), tokenizer, max_length=128)
    batch = source.batch(epoch, np.arange(256))
    model(**batch).loss  # BertForPreTraining; of BertForMaskedLM with next_sentence=False

Nothing is written and nothing is padded: pairs and masked words are drawn anew in every epoch, and any process or
worker makes any batch from (seed, epoch, indices) alone.

Source: Devlin et al. 2019 (arXiv:1810.04805), section 3.1 and appendix A.
"""

from functools import partial
from typing import Any, NamedTuple

import numpy as np

from bert_fast.checks import check_count, check_flag, check_integer, check_number
from bert_fast.data.arguments import check_tokenizer_kind, row_index, row_indices
from bert_fast.data.masking import Masking
from bert_fast.data.pretraining_texts import Texts, check_documents, full_sentences, sentence_pairs
from bert_fast.data.sequences import packed_batch
from bert_fast.data.token_store import TokenStore, check_tokenizer
from bert_fast.errors import StoreError
from bert_fast.tokenization import Tokenizer
from bert_fast.tokenization.pack import PackedBatch

_MAX_LENGTH = 1 << 16  # tokens that masking counts
_TOKENS_AT_ONCE = 1 << 24  # whose ids are counted
_OPTIONS = (
    "max_length", "next_sentence", "whole_words", "mask_probability", "seed", "short_sequence_probability",
)  # fmt: skip


class PretrainingSource:
    """Examples for masked words, and with `next_sentence` for pairs of texts: a `Source`.

    An example is [CLS] A [SEP] B [SEP] (see `sentence_pairs`), or without next_sentence [CLS] text [SEP], as many whole
    sentences of one document as fit (see `full_sentences`). Which words are masked, and how, see `Masking`. Pairs and
    masks depend on the epoch; texts without pairs are the same in every one.

    Batches have, beside the entries of every `Source`: masked_lm_positions and labels (int64 [M]): places in the batch,
    ascending, and the tokens that were there; next_sentence_label (int64 [B], with next_sentence): 0 where B follows A,
    1 where it is from another document.

    Args:
        store: tokenized texts.
        tokenizer: the store's.
        max_length: tokens of an example, special tokens counted.
        next_sentence: pairs, for BertForPreTraining; False: texts, for BertForMaskedLM.
        whole_words: mask whole words.
        mask_probability: share of the tokens (or words) that are to be predicted.
        seed: of chance.
        short_sequence_probability: share of pairs that are made shorter.

    Pickles as its arguments: workers open the store again. Planning an epoch takes a microsecond or two for each
    example; the last plan is kept.

    Raises:
        TypeError, ValueError: a wrong argument.
        StoreError: the store was made with another tokenizer, has no tokens, or for pairs only one document.

    Example:
        >>> words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "a", "text"]
        >>> tokenizer = bert_fast.BertTokenizer(words)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     _ = pathlib.Path(folder, "x.txt").write_text("a text a text " * 4)
        ...     store = data.tokenize_files([f"{folder}/x.txt"], f"{folder}/store", tokenizer)
        ...     source = data.PretrainingSource(store, tokenizer, max_length=18, next_sentence=False)
        ...     batch = next(iter(data.Batches(source, max_tokens=64).epoch(0)))
        ...     batch["input_ids"].shape, len(batch["labels"]) > 0
        (torch.Size([18]), True)
    """

    def __init__(
        self,
        store: TokenStore,
        tokenizer: Tokenizer,
        *,
        max_length: int = 128,
        next_sentence: bool = True,
        whole_words: bool = False,
        mask_probability: float = 0.15,
        seed: int = 0,
        short_sequence_probability: float = 0.1,
    ) -> None:
        _check_kinds(store, tokenizer)
        check_flag("next_sentence", next_sentence)
        self._num_special = tokenizer.form.num_special(next_sentence)
        fewest = self._num_special + (2 if next_sentence else 1)
        self.max_length = check_count("max_length", max_length, fewest, _MAX_LENGTH)
        short_share = check_number("short_sequence_probability", short_sequence_probability)
        if not 0 <= short_share <= 1:
            raise ValueError(f"short_sequence_probability: expected 0 to 1, got {short_share}")
        if tokenizer.cls_token_id is None or tokenizer.sep_token_id is None:
            raise ValueError("tokenizer: expected one with a cls_token and a sep_token")
        check_tokenizer(store.path, store.info, tokenizer)
        self.store = store
        self.tokenizer = tokenizer
        self.next_sentence = next_sentence
        self.seed = check_integer("seed", seed)
        self.short_sequence_probability = short_share
        self._masking = Masking(tokenizer, mask_probability=mask_probability, whole_words=whole_words)
        self.whole_words, self.mask_probability = whole_words, self._masking.mask_probability
        self._texts = Texts(store)
        if not len(self._texts.starts):
            raise StoreError(f"{store.path}: has no tokens")
        if next_sentence:
            check_documents(self._texts)
        self._planned: tuple[int, _Examples] | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        arguments = {name: getattr(self, name) for name in _OPTIONS}
        return partial(PretrainingSource, **arguments), (self.store, self.tokenizer)

    def __len__(self) -> int:
        """Examples of the first epoch."""
        return len(self.lengths(0))

    def lengths(self, epoch: int) -> np.ndarray:
        """Tokens of every example of this epoch: int32 [n]. With pairs, n differs a little between epochs."""
        return self._examples(epoch).lengths

    def batch(self, epoch: int, indices: np.ndarray) -> PackedBatch:
        """The examples `indices` (int [B]) with masked words; see the class.

        Raises: IndexError: this epoch has no such example.
        """
        indices = row_indices(indices, len(self.lengths(epoch)), f" in epoch {epoch}")
        examples = self._examples(epoch)
        bounds = examples.bounds[indices]  # [B, 2] or [B, 4]
        starts, sizes = bounds[:, ::2], bounds[:, 1::2] - bounds[:, ::2]
        joined = self.tokenizer.form.join(self.store.tokens, starts, sizes)
        masked = self._masking(joined.ids, joined.boundaries, indices, self.seed, epoch)
        labels = {"labels": masked.labels, "masked_lm_positions": masked.positions}
        if self.next_sentence:
            labels["next_sentence_label"] = examples.is_random[indices].astype(np.int64)
        return packed_batch(joined._replace(ids=masked.input_ids), **labels)

    def max_labels(self, max_tokens: int, max_sequences: int | None = None) -> int:
        """How many tokens of a batch are to be predicted at most, for `graphs.Budget`.

        Args:
            max_tokens: of the batch, special tokens counted.
            max_sequences: of the batch; None: as many as there is room for, of one word each.
        """
        max_tokens = check_count("max_tokens", max_tokens, 0)
        if max_sequences is not None:
            max_sequences = check_count("max_sequences", max_sequences, 0)
        if self.whole_words:
            return max_tokens  # of a sequence of one long word, all
        special = self._num_special
        sequences = max_tokens // (special + 1) if max_sequences is None else max_sequences
        return max(1, min(max_tokens, int(self.mask_probability * max_tokens) + sequences))

    def decode(self, epoch: int, index: int) -> str:
        """An example as text: words to predict as [shown:there], [MASK:cat] or, of those not hidden, [dog:cat]."""
        batch = self.batch(epoch, np.array([row_index(index, len(self.lengths(epoch)))]))
        words = self.tokenizer.convert_ids_to_tokens(batch["input_ids"].tolist())
        there = self.tokenizer.convert_ids_to_tokens(batch["labels"].tolist())
        for position, word in zip(batch["masked_lm_positions"].tolist(), there, strict=True):
            shown = "MASK" if words[position] == self.tokenizer.mask_token else words[position]
            words[position] = f"[{shown}:{word}]"
        if self.next_sentence:
            words.append(("(B follows A)", "(B is random)")[int(batch["next_sentence_label"])])
        return " ".join(words)

    def _examples(self, epoch: int) -> "_Examples":
        """The plan of an epoch."""
        epoch, planned = check_integer("epoch", epoch), self._planned
        if planned is not None and (planned[0] == epoch or not self.next_sentence):
            return planned[1]
        room, is_random = self.max_length - self._num_special, np.zeros(0, dtype=bool)
        if self.next_sentence:
            *ends, is_random = sentence_pairs(
                self._texts, room, seed=self.seed, epoch=epoch,
                short_sequence_probability=self.short_sequence_probability,
            )  # fmt: skip
        else:
            ends = [*full_sentences(self._texts, room)]
        bounds = np.stack(ends, axis=1)
        lengths = (bounds[:, 1::2] - bounds[:, ::2]).sum(axis=1) + self._num_special
        examples = _Examples(bounds, is_random, lengths.astype(np.int32))
        self._planned = (epoch, examples)
        return examples


class _Examples(NamedTuple):
    """An epoch: bounds of A (and B) in the store (int64 [n, 2] or [n, 4]), is_random and lengths ([n])."""

    bounds: np.ndarray
    is_random: np.ndarray
    lengths: np.ndarray


def _check_kinds(store: Any, tokenizer: Any) -> None:
    if not isinstance(store, TokenStore):
        raise TypeError(f"store: expected a TokenStore, got {type(store).__name__}")
    check_tokenizer_kind(tokenizer)


def unigram_entropy(store: TokenStore, tokenizer: Tokenizer) -> float:
    """Entropy of a store's tokens in nats, special tokens left out; 0 for a store without any.

    It is the masked-LM loss of a model that knows how often each token is, and looks at nothing. One that also repeats
    what it sees comes lower without any use of context, as a tenth of the words to predict stand there unmasked: see
    `pretraining_checks.context_free_loss`.
    """
    counts = token_counts(store, tokenizer)
    shares = counts[counts > 0] / max(1, counts.sum())
    return float(-(shares * np.log(shares)).sum())


def token_counts(store: TokenStore, tokenizer: Tokenizer) -> np.ndarray:
    """How often each token occurs in a store: int64 [vocabulary], 0 for special tokens."""
    _check_kinds(store, tokenizer)
    check_tokenizer(store.path, store.info, tokenizer)
    size = len(tokenizer)
    counts = np.zeros(size, dtype=np.int64)
    for start in range(0, len(store.tokens), _TOKENS_AT_ONCE):
        counts += np.bincount(store.tokens[start : start + _TOKENS_AT_ONCE], minlength=size)
    counts[tokenizer.all_special_ids] = 0
    return counts
