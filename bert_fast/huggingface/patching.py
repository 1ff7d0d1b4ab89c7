"""patch_transformers: models are fused where they are made."""

import functools
import threading
from types import TracebackType
from typing import Any

from bert_fast.huggingface.fusing import need_transformers

_lock = threading.Lock()
_holders: set["Patch"] = set()  # patches not undone: while there is one, models are fused
_wrapped: dict[type, tuple[Any, Any]] = {}  # class -> its __init__ and ours


class Patch:
    """What `patch_transformers` returns; as a context manager it ends with the block.

    Example:
        >>> import transformers
        >>> config = transformers.BertConfig(
        ...     vocab_size=30, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=20
        ... )
        >>> patch = bert_fast.patch_transformers()
        >>> model = transformers.BertModel(config)  # fused
        >>> patch.undo()
    """

    def undo(self) -> None:
        """Ends this patch: models made afterwards are as before, unless another patch holds. Twice is once."""
        with _lock:
            _holders.discard(self)
            if _holders:
                return
            for cls, (original, ours) in _wrapped.items():
                if cls.__init__ is ours:  # type: ignore[misc]  # else it was wrapped again: ours does nothing now
                    cls.__init__ = original  # type: ignore[misc]
            _wrapped.clear()

    def __enter__(self) -> "Patch":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.undo()


def patch_transformers() -> Patch:
    """Fuses every BERT, and every model of a family like it, that transformers makes from here on, as `fuse` does.

    That is whatever runs the constructor of their classes or of classes derived from them: construction,
    from_pretrained, Auto classes, pipelines, models with one as a part. Models that exist stay as they are, and
    those made under the patch stay fused when it ends. If sentence-transformers was imported before, its models as a
    whole are among them. Patching twice is fine: each patch is undone on its own. Thread-safe.

    Raises:
        ImportError: transformers is not installed.

    Returns:
        The `Patch`: `undo()` ends it, and so does the end of a `with` block.

    Example:
        >>> import transformers
        >>> config = transformers.BertConfig(
        ...     vocab_size=30, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=20
        ... )
        >>> with bert_fast.patch_transformers():
        ...     model = transformers.BertModel(config)
        >>> bert_fast.why_not(model)
        []
    """
    need_transformers()
    from bert_fast.huggingface.classes import all_models, around

    patch = Patch()
    with _lock:
        if not _holders:
            cls: Any
            for cls in (*all_models(), *around()):
                _wrapped[cls] = cls.__init__, _fusing(cls.__init__)
                cls.__init__ = _wrapped[cls][1]
        _holders.add(patch)
    return patch


def _fusing(original: Any) -> Any:
    from bert_fast.huggingface.classes import swap_in

    @functools.wraps(original)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        if _holders:
            swap_in(self)

    return __init__
