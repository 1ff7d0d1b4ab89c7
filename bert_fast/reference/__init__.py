"""Textbook PyTorch BERT: the specification that every other path is judged by."""
