"""The tokenizer of a directory, whichever class it is of."""

import os
import re
from typing import Any

from bert_fast.tokenization.calls import Tokenizer
from bert_fast.tokenization.files import TOKENIZER_FILE, tokenizer_place
from bert_fast.tokenization.tokenizer import BertTokenizer
from bert_fast.tokenization.xlm_roberta import XLMRobertaTokenizer

# Of nothing but the model: within strings JSON has a backslash before each quotation mark.
_IS_UNIGRAM = re.compile(rb'"type"\s*:\s*"Unigram"')


def load_tokenizer(path: str | os.PathLike[str], **options: Any) -> Tokenizer:
    """Returns an `XLMRobertaTokenizer` where the files hold a Unigram model, else a `BertTokenizer`.

    Args:
        path: what `from_pretrained` of either takes: a directory, a tokenizer.json or a name on the hub.
        options: as of `from_pretrained`.

    Returns:
        The tokenizer.

    Raises:
        FileNotFoundError, TypeError, ValueError: see `from_pretrained`.

    Example:
        >>> words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "a", "text"]
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     paths = bert_fast.BertTokenizer(words).save_pretrained(folder)
        ...     type(tokenization.load_tokenizer(folder)).__name__
        'BertTokenizer'
    """
    place = tokenizer_place("path", path, options)
    file = place / TOKENIZER_FILE if place.is_dir() else place
    is_unigram = file.suffix == ".json" and file.is_file() and _IS_UNIGRAM.search(file.read_bytes())
    return (XLMRobertaTokenizer if is_unigram else BertTokenizer)._of_place(place, str(path), options)
