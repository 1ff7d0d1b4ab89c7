"""Tokenizers timed: bert_fast's beside all others that are installed. `python -m benchmarks.tokenizers --help`.

Importing this package imports no torch and no tokenizer.
"""
