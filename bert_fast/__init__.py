"""BERT training kernels, drop-in modules and a C++ WordPiece tokenizer."""
