"""What the server of `process_server.py` imports, so that its children need not: most of what tests import."""

import atexit
import contextlib
import gc
import os

os.environ["HF_HUB_OFFLINE"] = "1"  # as the fuzzer wants it before anything reads it

import numpy  # noqa: F401
import pytest  # noqa: F401
import torch._dynamo
import torch.distributed  # noqa: F401

import bert_fast.cli.main
import bert_fast.data
import bert_fast.training  # noqa: F401
from tests.training import toy  # noqa: F401

with contextlib.suppress(ImportError):
    from transformers import BertForMaskedLM, BertForPreTraining  # noqa: F401

gc.collect()
gc.freeze()  # a child neither visits what its server imported nor copies the memory that it lies in
atexit.register(gc.unfreeze)  # as in `conftest.py`
