"""Textbook PyTorch BERT: the specification that every other path is judged by.

Start with `model.py`, which says what BERT computes and where it defines what Hugging Face leaves open; `layers.py` and
`heads.py` are its parts. Each family of operations has a file with the formulas of both passes, a forward that autograd
can differentiate and the same gradients written out:

    embedding  qkv_projection  attention (relative_positions)  dropout_add_layer_norm  linear  linear_gelu  mlp
    gated_mlp  bias_gelu (activations)  layer_norm  cross_entropy  linear_cross_entropy  splade  maxsim  rotary
    dropout (the definition of every mask)

`packing.py` removes padding and reads attention masks, `precision.py` holds the one rule of precision, `wordpiece.py`
is the tokenizer's specification. Everything here imports torch and the standard library only, favours reading over
speed, and runs on any device.
"""
