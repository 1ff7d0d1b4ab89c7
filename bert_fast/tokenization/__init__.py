"""The Python face of the C++ tokenizers: WordPiece and Unigram."""

from bert_fast.tokenization.added_token import AddedToken
from bert_fast.tokenization.calls import Tokenizer
from bert_fast.tokenization.encoding import BatchEncoding, CharSpan, Encoding, TokenSpan
from bert_fast.tokenization.loading import load_tokenizer
from bert_fast.tokenization.pack import PackedBatch
from bert_fast.tokenization.ragged import RaggedBatch
from bert_fast.tokenization.tokenizer import BertTokenizer
from bert_fast.tokenization.xlm_roberta import XLMRobertaTokenizer

__all__ = [
    "AddedToken",
    "BatchEncoding",
    "BertTokenizer",
    "CharSpan",
    "Encoding",
    "PackedBatch",
    "RaggedBatch",
    "TokenSpan",
    "Tokenizer",
    "XLMRobertaTokenizer",
    "load_tokenizer",
]
