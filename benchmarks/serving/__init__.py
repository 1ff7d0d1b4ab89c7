"""Encoders as they are served on a CPU: bert_fast beside transformers, torch.compile, ONNX Runtime and OpenVINO.

cases.py        what is encoded: one text, batches as they come, and sorted ones
contestants.py  what encodes it
speed.py        the figures of a case, in turns
start.py        from files to the first answer, and memory; each contestant in a process of its own, answer.py
report.py       the tables of docs/results.md
"""
