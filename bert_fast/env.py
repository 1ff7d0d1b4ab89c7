"""Every environment variable that bert_fast reads, read once at import; `bert-fast doctor` prints them.

Build-time variables (`BERT_FAST_NATIVE`, `BERT_FAST_CUDA`) are read by `setup.py`; `BERT_FAST_NATIVE` also here, so
that an installed extension can be switched off. `BERT_FAST_SIMD` is read by the tokenizer's C++ core when it is first
used (`csrc/wordpiece/dispatch.cpp`), as programs without Python use it too.
"""

import os
from dataclasses import dataclass

_KERNELS_KEPT = "64"  # a training step of BERT has some 30 products of different sizes, whatever the number of layers

VARIABLES = {
    "BERT_FAST_BACKEND": "back-end of every op: reference, torch or triton; default: the first that can run the call",
    "BERT_FAST_NATIVE": "0: neither build nor load the C++ extension (slower; same ids and masks, results to rounding)",
    "BERT_FAST_DEBUG": "1: value checks that need a device sync (ids, labels and lengths in range)",
    "BERT_FAST_PRODUCTS": "cublaslt: layers on a GPU call cuBLASLt directly; default: PyTorch's functions",
    "BERT_FAST_SIMD": "instruction set of the tokenizer: portable, avx2, avx512 or neon; default: the fastest there is",
    "CC": "C compiler with which Triton builds its launchers; default: gcc, else clang",
    "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "kernels that oneDNN keeps; default: a Trainer on a CPU sets 64, else 1024",
    "TRITON_INTERPRET": "1: Triton kernels run on CPU tensors in Triton's interpreter (for tests)",
}


@dataclass(frozen=True)
class Settings:
    """What the environment said at import."""

    backend: str | None
    native: bool
    debug: bool
    products: str | None
    c_compiler: str | None
    triton_interpret: bool


def _read() -> Settings:
    return Settings(
        backend=os.environ.get("BERT_FAST_BACKEND") or None,
        native=os.environ.get("BERT_FAST_NATIVE", "1") != "0",
        debug=os.environ.get("BERT_FAST_DEBUG", "0") == "1",
        products=os.environ.get("BERT_FAST_PRODUCTS") or None,
        c_compiler=os.environ.get("CC"),
        triton_interpret=os.environ.get("TRITON_INTERPRET", "0") == "1",
    )


SETTINGS = _read()


def bound_kernel_cache() -> None:
    """Has oneDNN keep 64 kernels for sizes of matrices, not 1024, unless the environment says how many.

    It makes a kernel for every new number of tokens, of which batches without padding have many. Kept ones do not come
    back; they lie between the tensors of their step, and what was freed around them is of no use to tensors of other
    sizes: a process grows for hundreds of batches, to one and a half times and more. oneDNN reads the variable when it
    makes its first kernel; later this does nothing.
    """
    if not {"ONEDNN_PRIMITIVE_CACHE_CAPACITY", "DNNL_PRIMITIVE_CACHE_CAPACITY"} & os.environ.keys():
        os.environ["ONEDNN_PRIMITIVE_CACHE_CAPACITY"] = _KERNELS_KEPT
