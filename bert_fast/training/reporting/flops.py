"""Floating-point operations of a model, and which share of its device's peak a run reaches (MFU)."""

import re
from typing import Any

import torch

from bert_fast.models.config import BertConfig
from bert_fast.training.observers import Plan, Step

__all__ = ["LABEL_SHARE", "model_flops", "model_flops_utilisation", "peak_flops"]

LABEL_SHARE = 0.15  # of the tokens, that masked language models predict (Devlin et al. 2019, arXiv:1810.04805)

_BACKWARD = 2  # as much as forward for the gradient of the input, and again for that of the weights
_WORD_MODELS = ("BertForMaskedLM", "BertForPreTraining")
_SEQUENCE_MODELS = ("BertForSequenceClassification", "BertForMultipleChoice", "BertForNextSentencePrediction")


def model_flops(config: BertConfig, head: str) -> tuple[float, float]:
    """(flops_per_token, flops_per_square) of forward and backward, as `observers.Plan` has them.

    Counts the matrix products that the mathematics needs, on tokens without padding, a multiply and an add as two
    (Chowdhery et al. 2022, arXiv:2204.02311, appendix B); nothing for look-ups, norms, activations, what is computed
    once a sequence (pooler, classifier of a sequence), or again because of gradient checkpointing. What no loss looks
    at is not counted, either, since it is not computed:

    - the head of a masked language model runs on 15 % of the tokens;
    - under a head that sees first tokens alone, the last layer has keys and values of all tokens, but no more.

    Args:
        config: sizes, also as transformers keeps them; heads that were pruned do not count.
        head: name of the model's class, as type(model).__name__; one that is not known here counts as the encoder.
    """
    hidden, head_dim = config.hidden_size, config.hidden_size // config.num_attention_heads
    num_layers = config.num_hidden_layers
    # Products of queries, or of queries and of keys, with distances (Huang et al. 2020, arXiv:2009.13658)
    # transformers 5 has neither them nor pruned heads.
    terms = {"relative_key": 1, "relative_key_query": 2}.get(getattr(config, "position_embedding_type", "absolute"), 0)
    pruned: dict[int, Any] = getattr(config, "pruned_heads", None) or {}
    per_token = per_square = 0
    for layer in range(num_layers):
        heads = config.num_attention_heads - len(pruned.get(layer, ()))
        if head in _SEQUENCE_MODELS and layer == num_layers - 1:
            per_token += 2 * 2 * hidden * heads * head_dim
            continue
        per_token += 2 * (4 * hidden * heads * head_dim + 2 * hidden * config.intermediate_size)
        per_square += 2 * (2 + terms) * heads * head_dim
    if head in _WORD_MODELS:
        words = 2 * hidden * (hidden + config.vocab_size)
        return (1 + _BACKWARD) * (per_token + LABEL_SHARE * words), float((1 + _BACKWARD) * per_square)
    if head == "BertForTokenClassification":
        per_token += 2 * hidden * config.num_labels
    elif head == "BertForQuestionAnswering":
        per_token += 2 * hidden * 2
    return float((1 + _BACKWARD) * per_token), float((1 + _BACKWARD) * per_square)


# Dense peaks in TFLOP/s from the makers' data sheets: 16-bit tensor cores (bf16 and fp16), TF32, fp32 without tensor
# cores. The first pattern that is found in the device's name counts. None: the device cannot, or nobody says.
_Peaks = tuple[float | None, float | None, float | None]
_PEAKS: tuple[tuple[str, _Peaks], ...] = (
    (r"\bG?B200\b", (2250, 1125, 75)),
    (r"\bH[12]00 NVL\b", (835, 418, 60)),
    (r"\bH100 PCIe\b", (756, 378, 51)),
    (r"\b(G?H200|G?H100|H800)\b", (989, 494, 67)),
    (r"\b(A100|A800)\b", (312, 156, 19.5)),
    (r"\bA30\b", (165, 82, 10.3)),
    (r"\bA40\b", (149.7, 74.8, 37.4)),
    (r"\bA10\b", (125, 62.5, 31.2)),
    (r"\bRTX A6000\b", (154.8, 77.4, 38.7)),
    (r"\bL40S\b", (362, 183, 91.6)),
    (r"\bL40\b", (181, 90.5, 90.5)),
    (r"\bL4\b", (121, 60, 30.3)),
    (r"\bRTX 5090\b", (209.5, 104.8, 104.8)),
    (r"\bRTX 4090\b", (165.2, 82.6, 82.6)),
    (r"\bRTX 3090\b", (71, 35.6, 35.6)),
    (r"\bV100\b", (125, None, 15.7)),
    (r"\bT4\b", (65, None, 8.1)),
    (r"\bInstinct MI3(00|25)X\b", (1307.4, 653.7, 163.4)),
    (r"\bInstinct MI250X\b", (191.5, None, 47.9)),  # one of its two dies, which are two devices
    (r"\bInstinct MI210\b", (181, None, 45.3)),
)
_WITHOUT_BF16 = re.compile(r"\b(V100|T4)\b")
# Parts of a device, and chips of the same name that are slower.
_OTHERS = re.compile(r"\b(CPU|MIG|Laptop|Mobile|Max-Q|4090 D|5090 D|SUPER)\b", re.IGNORECASE)


def peak_flops(device: str, precision: str) -> float | None:
    """Flops a second that a device's maker promises for dense matrix products; None where that is not known.

    Args:
        device: its name, as torch.cuda.get_device_name says, maker included.
        precision: "bf16", "fp16" or "fp32". In fp32 the peak is that of TF32 where
            torch.set_float32_matmul_precision allows it.
    """
    if not re.search(r"\b(NVIDIA|Tesla|AMD Instinct)\b", device) or _OTHERS.search(device):
        return None
    for pattern, (half, tf32, single) in _PEAKS:
        if re.search(pattern, device):
            if precision == "fp32":
                peak = tf32 if tf32 is not None and torch.get_float32_matmul_precision() != "highest" else single
            else:
                peak = None if precision == "bf16" and _WITHOUT_BF16.search(device) else half
            return None if peak is None else peak * 1e12
    return None


def model_flops_utilisation(plan: Plan, step: Step) -> float | None:
    """The share of the peak of all devices that a step's useful flops are; None where the peak is not known."""
    peak = peak_flops(plan.device, str(plan.config.get("precision", "fp32")))
    flops = plan.flops_per_token * step.tokens + plan.flops_per_square * step.squares
    if peak is None or not flops or step.seconds <= 0:
        return None
    return flops / (step.seconds * peak * plan.num_processes)
