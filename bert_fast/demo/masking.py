"""Masked-LM examples, as BERT was pre-trained: 15 % of the tokens are to be predicted.

Source: Devlin et al. 2019 (arXiv:1810.04805), section 3.1 and appendix A.1.
"""

import torch
from torch import Tensor

__all__ = ["IGNORE_INDEX", "mask_tokens"]

IGNORE_INDEX = -100
CHOSEN, MASKED, REPLACED = 0.15, 0.8, 0.1  # of the tokens; of the chosen: [MASK]; of the chosen: any word


def mask_tokens(
    input_ids: Tensor, maskable: Tensor, mask_id: int, vocab_size: int, generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    """Hides tokens; returns (input_ids, labels), both new, int64, of the shape of `input_ids`.

    Of the chosen tokens 80 % become [MASK], 10 % a word drawn from the whole vocabulary, 10 % stay. Labels are the
    original ids where chosen, -100 elsewhere.

    Args:
        input_ids (Tensor, int64, CPU): any shape.
        maskable (Tensor, bool): False for special tokens and padding.
        mask_id: id of [MASK].
        vocab_size: drawn words are below.
        generator: decides everything.
    """
    chosen = (torch.rand(input_ids.shape, generator=generator) < CHOSEN) & maskable
    fate = torch.rand(input_ids.shape, generator=generator)
    words = torch.randint(vocab_size, input_ids.shape, generator=generator)
    masked = input_ids.masked_fill(chosen & (fate < MASKED), mask_id)
    masked = torch.where(chosen & (fate >= MASKED) & (fate < MASKED + REPLACED), words, masked)
    return masked, input_ids.masked_fill(~chosen, IGNORE_INDEX)
