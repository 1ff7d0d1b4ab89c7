"""The tokenizer of a directory, whichever class it is of."""

import os
import re
from typing import Any

from bert_fast.tokenization.calls import Tokenizer
from bert_fast.tokenization.files import TOKENIZER_FILE, as_path
from bert_fast.tokenization.tokenizer import BertTokenizer
from bert_fast.tokenization.xlm_roberta import XLMRobertaTokenizer

# Of nothing but the model: within strings JSON has a backslash before each quotation mark.
_IS_UNIGRAM = re.compile(rb'"type"\s*:\s*"Unigram"')


def load_tokenizer(path: str | os.PathLike[str], **options: Any) -> Tokenizer:
    """A directory or a tokenizer.json: an `XLMRobertaTokenizer` of a Unigram model, else a `BertTokenizer`.

    Args:
        path: what `from_pretrained` of either takes.
        options: arguments of the constructor.

    Raises: see `from_pretrained`.
    """
    file = as_path("path", path)
    if file.is_dir():
        file = file / TOKENIZER_FILE
    is_unigram = file.suffix == ".json" and file.is_file() and _IS_UNIGRAM.search(file.read_bytes())
    return (XLMRobertaTokenizer if is_unigram else BertTokenizer).from_pretrained(path, **options)
