"""THE table of tolerances: no other file holds one.

An implementation passes when, on its worst element and in RMS, error(implementation) <= factor * error(plain torch in
the same dtype) + floor, both measured against the fp64 reference on the already rounded inputs (`testing/compare.py`).
Entries that compare with stored numbers of other implementations are plain absolute bounds.
"""

from dataclasses import dataclass

import torch

# Of the error that the table allows, in random calls. A million of them reach sizes, scales and cancellations that the
# tests of accuracy, for which the table is made, do not; there a result is to be seen as another one.
FUZZING_SLACK = 500.0


@dataclass(frozen=True)
class Tolerance:
    """Allowed error: factor times plain torch's own error, plus floor (absolute)."""

    factor: float
    floor: float


# Every op may err twice as much as plain torch in the same dtype: it rounds at the same places at most once more often.
# The floors are a few units in the last place of values near 1, for outputs that plain torch happens to get exactly.
_DEFAULT = {
    torch.float64: Tolerance(2.0, 1e-12),
    torch.float32: Tolerance(2.0, 1e-6),
    torch.float16: Tolerance(2.0, 1e-3),
    torch.bfloat16: Tolerance(2.0, 8e-3),
}

# (op, output) -> tolerance per dtype, where the default is too tight or too loose; each with its reason.
_SPECIAL: dict[tuple[str, str], dict[torch.dtype, Tolerance]] = {
    # Statistics are fp32, but of an h rounded to half precision: elements are off by up to 1e-3 (half a unit in the
    # last place of values near 4), averaged over as few as 8 columns.
    ("dropout_add_layer_norm", "mean_of_half"): {torch.float32: Tolerance(2.0, 4e-4)},
    ("dropout_add_layer_norm", "rstd_of_half"): {torch.float32: Tolerance(2.0, 4e-4)},
    # Columns of terms near 3, each off by a few units in the last place of fp32 (2^z rounds z first); the factor alone
    # would ask them to cancel as well as plain torch's.
    ("bias_gelu", "dbias"): {torch.float32: Tolerance(2.0, 3e-6)},
    # fp32 sums of terms that are evaluated for half precision: up to 0.01 units of fp16 (5e-6 near 1) in each.
    ("bias_gelu", "dbias_of_half"): {torch.float32: Tolerance(2.0, 5e-5)},
    # One product of three times as many terms as each of plain torch's three, which are rounded apart and then added:
    # where a processor's routine adds term after term, sqrt(3) times their error.
    ("qkv_projection", "dx"): {torch.float32: Tolerance(3.5, 1e-6)},
    # Gradients through a whole model, scaled to 1: dozens of roundings in another order than Hugging Face's, so that
    # either side's worst element can be a few times the other's.
    ("reference_model", "gradient"): {torch.float32: Tolerance(4.0, 4e-6)},
    # The fast models beside the reference, which rounds hardly more than once an op: other libraries' products, another
    # exponential, layer after layer; dropout scales what it keeps. The worst of a hundred pooled values in bf16 is a
    # matter of luck on either side.
    ("fast_model", "output"): {torch.float32: Tolerance(4.0, 2e-6), torch.bfloat16: Tolerance(4.0, 8e-3)},
    ("fast_model", "gradient"): {torch.float32: Tolerance(4.0, 8e-6), torch.bfloat16: Tolerance(4.0, 8e-3)},
    # dS = P * (dP - delta): where one key takes all, plain torch cancels to exactly 0 and the recomputed P leaves an
    # error of eps * |dout| |v| |k|, which dropout's scale multiplies: a few 1e-6 for normal inputs.
    ("attention", "dq"): {torch.float32: Tolerance(2.0, 5e-6)},
    ("attention", "dk"): {torch.float32: Tolerance(2.0, 5e-6)},
    # The same cancellation in every term of a sum over rows, heads or distances, taken in another order. In half
    # precision sums between 8 and 16 are rounded by up to half a unit in the last place, and so is each term before.
    **{
        ("attention", name): {
            torch.float32: Tolerance(2.0, 5e-6),
            torch.float16: Tolerance(2.0, 8e-3),
            torch.bfloat16: Tolerance(2.0, 6e-2),
        }
        for name in ("dbias", "drelative_keys", "drelative_queries")
    },
    # The same cancellation; tests of the C++ routine include a single token under dropout with head_dim 64 (5.2e-6).
    ("native_attention", "dq"): {torch.float32: Tolerance(2.0, 1e-5)},
    ("native_attention", "dk"): {torch.float32: Tolerance(2.0, 1e-5)},
    # The same cancellation. In half precision delta is made from out as rounded, off by up to half a unit in the last
    # place of |dout| |out|, where plain torch's cancels; sums between 8 and 16 are rounded by up to 4e-3 (fp16).
    **{
        ("triton_attention", name): {
            torch.float32: Tolerance(2.0, 5e-6),
            torch.float16: Tolerance(2.0, 4e-3),
            torch.bfloat16: Tolerance(2.0, 3e-2),
        }
        for name in ("dq", "dk", "dv")
    },
    # What is broadcast gets sums over rows, heads and pairs, up to 100, where a unit in the last place of fp32 is 8e-6.
    **{
        ("triton_attention", name): {
            torch.float32: Tolerance(2.0, 2e-5),
            torch.float16: Tolerance(2.0, 8e-3),
            torch.bfloat16: Tolerance(2.0, 6e-2),
        }
        for name in ("dbias", "drelative_keys", "drelative_queries")
    },
    # Tensor cores take fp32 as sums of TF32 terms and truncate what they add up; exponentials and logarithms are
    # the special function units'. In half precision as above.
    **{
        ("triton_attention_on_gpu", name): {
            torch.float32: Tolerance(4.0, 1e-5),
            torch.float16: Tolerance(2.0, 4e-3),
            torch.bfloat16: Tolerance(2.0, 3e-2),
        }
        for name in ("out", "lse", "dq", "dk", "dv")
    },
    **{
        ("triton_attention_on_gpu", name): {
            torch.float32: Tolerance(4.0, 1e-5),
            torch.float16: Tolerance(2.0, 8e-3),
            torch.bfloat16: Tolerance(2.0, 6e-2),
        }
        for name in ("dbias", "drelative_keys", "drelative_queries")
    },
    # Scores near 1e4: lse is saved in fp32, off by up to 1e-3, and so are probabilities made from it. Gradients are
    # divided by the scores' scale before.
    ("triton_attention", "lse_of_large"): {torch.float32: Tolerance(2.0, 1e-3)},
    **{
        ("triton_attention", f"{name}_of_large"): {
            torch.float32: Tolerance(2.0, 1e-2),
            torch.float16: Tolerance(2.0, 3e-2),
        }
        for name in ("out", "dq", "dk", "dv")
    },
    # Gradients are probabilities, most of them far below 1: the default floors of half precision would hide them, where
    # only results are rounded. In fp32 it counts that lse, up to 32, is saved in fp32: off by up to 1e-6, and so is p.
    ("cross_entropy", "dlogits"): {
        torch.float32: Tolerance(2.0, 2e-6),
        torch.float16: Tolerance(2.0, 1e-7),
        torch.bfloat16: Tolerance(2.0, 1e-9),
    },
    # lse of scores near 1e4 is saved in fp32, off by up to 5e-4, and so are probabilities taken from it.
    ("cross_entropy", "dlogits_of_large"): {torch.float32: Tolerance(2.0, 1e-2)},
    # fp32 sums, over rows, of terms up to 1 that are rounded to bf16: each is off by up to 2e-3.
    **{
        ("linear_cross_entropy", name): {torch.float32: Tolerance(2.0, 8e-3)}
        for name in ("dweight_of_half", "dbias_of_half")
    },
    # fp32 sums, over texts, of terms that are rounded to half precision on either side: each is off by up to 2e-3.
    **{("splade", f"{name}_of_half"): {torch.float32: Tolerance(2.0, 8e-3)} for name in ("dweight", "dbias")},
    # On a GPU, at full shapes: fp32 products are sums of up to 30,522 terms in another order than the library's, and of
    # TF32 terms where those of plain torch are; in half precision terms are rounded before sums over thousands of rows,
    # a few units in the last place of which show.
    **{
        ("linear_cross_entropy", f"{name}_on_gpu"): {
            torch.float32: Tolerance(4.0, 1e-5),
            torch.float16: Tolerance(2.0, 4e-3),
            torch.bfloat16: Tolerance(2.0, 3e-2),
        }
        for name in ("loss", "dx", "dweight", "dbias")
    },
    **{
        ("splade", f"{name}_on_gpu"): {
            torch.float32: Tolerance(4.0, 1e-5),
            torch.float16: Tolerance(2.0, 4e-3),
            torch.bfloat16: Tolerance(2.0, 3e-2),
        }
        for name in ("y", "dx", "dweight", "dbias")
    },
    **{
        (op, f"{name}_of_half_on_gpu"): {torch.float32: Tolerance(2.0, 3e-2)}
        for op in ("linear_cross_entropy", "splade")
        for name in ("dweight", "dbias")
    },
    # Logits of spread 4 over 30,522 and more classes: the loss is near 18, where a unit in the last place is 1.9e-6.
    ("cross_entropy", "loss_on_gpu"): {torch.float32: Tolerance(2.0, 4e-6)},
    # Weights near 1e4, and so is their gradient: a unit in the last place is 1e-3, and scores near 3e4 are rounded to
    # 2e-3 before they become probabilities.
    ("linear_cross_entropy", "dx_of_large_weight"): {torch.float32: Tolerance(2.0, 1e-2)},
    # fp32 sums near 1 of half-precision products: tensor cores truncate what they add up, once in 16 of as many as
    # 30,522 terms, by up to 6e-8 each time; the library may add up in parts, each of which is truncated less often.
    **{("gemm", f"{name}_of_half"): {torch.float32: Tolerance(4.0, 1e-4)} for name in ("c", "out")},
    # oneDNN, which makes fp32 products on some processors, adds up longer runs along K than MKL, plain torch's library:
    # at K from 768 to 4,096 its RMS error was up to 2.2 times MKL's, its worst of 3 million elements up to 4 times. The
    # loss, near 11 at first, has a unit in the last place of 1e-6.
    **{
        ("product_on_cpu", name): {torch.float32: Tolerance(5.0, 2e-6)}
        for name in ("y", "qkv", "loss", "dx", "dweight", "dwq", "dwk", "dwv", "dup_weight", "dup_bias", "ddown_weight")
    },
    # Steps divide by sqrt(v): where a gradient is near 0, rounding decides its sign, and the worst of many elements is
    # a matter of luck on either side.
    ("optimizer", "param_after_25_steps"): {torch.float32: Tolerance(4.0, 2e-6)},
}

# name -> absolute bound, for comparisons with stored fixtures or with another implementation
ABSOLUTE: dict[str, float] = {
    # Stored MiniLM outputs are fp32 on another machine, themselves within 3.3e-6 of fp64 (fixture notes).
    "minilm_embeddings": 2e-5,
    # Embeddings of unit length and scores of sentence-transformers, fused and untouched: fp32 sums in another order.
    "sentence_embeddings": 1e-6,
    # Sums over tokens of products of normal vectors of 16 elements, in fp32 and another order.
    "late_interaction": 1e-5,
    # Losses, and entries of vectors of unit length, behind eight steps of AdamW, which begin with signs of gradients:
    # where these are near 0, rounding decides them.
    "short_run": 2e-3,
    # F1 on 400 held-out texts: twice what seeds of dropout alone change (0.926 to 0.957 for spam, 0.417 to 0.435).
    "fine_tuning_f1": 0.06,
    # fp32 products of fp16 operands with values near 1, summed over 64: errors of sums in fp32 (2^-22 each), where a
    # product that had been rounded to fp16 in between would be off by 2^-12.
    "fp32_product_of_half": 2**-18,
    # A value and its 8-bit form, in steps of its scale: half of one, and three roundings in fp32, of 2^-24 of up to 255
    # steps each.
    "int8_steps": 0.5001,
    # Standard deviations of `testing/randomness.py`, seeds being fixed: one comparison, and the largest of up to 2,000
    # (which 4.6 exceed once in 200).
    "one_random_figure": 4.0,
    "largest_of_many_random_figures": 5.0,
}

# dtype -> units in its last place by which Triton's short forms of activations and derivatives may err before they are
# rounded: a tenth of the rounding that follows. Measured over all inputs: 0.051 in bf16, 0.026 in fp16.
SHORT_FORM_UNITS: dict[torch.dtype, float] = {torch.bfloat16: 0.06, torch.float16: 0.04}
# The same beside a zero of a derivative, where units in the last place of fp16 get as fine as those of the two fp32
# terms that cancel there (absolute error 3e-8; measured 0.45).
SHORT_FORM_UNITS_AT_A_ZERO = 0.5

# name -> relative bound
RELATIVE: dict[str, float] = {
    # Bytes that a kernel moves above the floor in its docstring: what it reads once per program, not once per element.
    "traffic_above_floor": 0.05,
    # Triton's interpreter truncates when it stores bf16: one unit in the last of 8 bits.
    "bf16_stored_by_interpreter": 2**-7,
    # Ours and Hugging Face, both in fp64: two orders of summation of the same sums, through a few layers and back.
    "vs_transformers_fp64": 1e-11,
    # SPLADE's derivative is made from y, rounded to fp32: exp(-y) of y up to 89 is off by up to 4e-6 of itself, and
    # where log1p is taken twice exp(-expm1(y)), of y up to 4.5, by up to 90 times the 2e-7 that y is off by.
    "splade_of_torch": 4e-5,
    # A layer in fp16 beside its ops: gradients that meet are rounded once where the ops round twice, 2**-11 each, and
    # what follows them is made of that; relative to each tensor's largest element.
    "sums_rounded_once": 0.01,
    # Hugging Face takes a decoder's loss in fp32, whatever the model's dtype.
    "vs_transformers_causal_loss": 1e-6,
    # Stored gradients of MiniLM's masked-LM loss, relative to each tensor's largest element (its norm, for norms): fp32
    # is within 2e-6 of fp64 per tensor (fixture notes); this leaves room for another order of summation.
    "minilm_gradients": 1e-5,
    # An optimizer step written twice in fp64, operations in another order, over a few dozen steps.
    "two_fp64_formulas": 1e-11,
    # 1,000 additions of 1e-5 to a number near 1 in fp32, each rounded by up to 6e-8 and all to one side at worst.
    "sum_of_1000_steps": 6e-5,
    # Gradients by norm, of logits whose gradients are rounded to fp16 once: half a unit in the last place, 5e-4 each,
    # most of them of either sign.
    "fp16_gradients_of_sums": 1e-3,
    # Two processes against one on the joint batch, after two SGD steps: sums of gradients in another order.
    "two_processes": 1e-6,
    # Fast and reference training from one seed, fp32, 50 steps: rounding differences amplified by AdamW's division.
    "training_loss_50_steps": 1e-4,
    # Fine-tuning real weights for 100 steps of AdamW, two implementations in fp32, no dropout: relative to the largest
    # loss. Hugging Face's eager and SDPA attention were 3e-5 apart.
    "fine_tuning_loss_100_steps": 3e-4,
    # The same for 4 steps of a tiny model, relative to the loss; measured 2e-7.
    "fine_tuning_loss_4_steps": 5e-6,
    # A batch alone, and filled up to a budget, in fp64: products of other shapes sum in another order.
    "filled_batch_fp64": 1e-11,
    # Six steps in fp32, eager on the batch and replayed on the filled one: the same, amplified by AdamW's division.
    "replayed_steps": 1e-4,
    # One loss of two implementations under autocast to bf16 (8 bits), a mean over at least dozens of words.
    "training_step_loss_bf16": 1e-2,
}


def tolerance(op: str, output: str, dtype: torch.dtype) -> Tolerance:
    """The tolerance of one output of one op in one dtype."""
    return _SPECIAL.get((op, output), {}).get(dtype, _DEFAULT[dtype])
