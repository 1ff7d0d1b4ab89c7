"""Hugging Face's models, loaded quietly: no progress bars, no remarks about a head that the checkpoint lacks."""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from torch import nn

__all__ = ["load_peer_encoder", "open_checkpoint", "peer_masked_lm", "quiet_transformers"]


@contextlib.contextmanager
def quiet_transformers() -> Iterator[None]:
    """Errors only, no bars; what was set before is set again afterwards."""
    from transformers.utils import logging

    verbosity, had_bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if had_bars:
            logging.enable_progress_bar()


def load_peer_encoder(folder: Path) -> nn.Module:
    """transformers' BertModel with SDPA attention, in fp32 and evaluation mode."""
    import transformers

    with quiet_transformers():
        return transformers.BertModel.from_pretrained(folder, attn_implementation="sdpa").eval()


def peer_masked_lm(folder: Path, state_dict: dict[str, Any]) -> nn.Module:
    """transformers' BertForMaskedLM (SDPA) with the configuration of `folder` and the given weights."""
    import transformers

    with quiet_transformers():
        config = transformers.BertConfig.from_pretrained(folder)
        model = transformers.BertForMaskedLM._from_config(config, attn_implementation="sdpa")
    model.load_state_dict(state_dict)
    return model


def open_checkpoint(folder: Path) -> tuple[nn.Module, Any]:
    """A directory as users of transformers open it: (AutoModelForMaskedLM in evaluation mode, AutoTokenizer)."""
    import transformers

    with quiet_transformers():
        model = transformers.AutoModelForMaskedLM.from_pretrained(folder).eval()
        return model, transformers.AutoTokenizer.from_pretrained(folder)
