"""Arguments that a model of transformers takes and drops, as dictionaries of features that come back have them.

Models of version 5 hand whatever they do not know (`**kwargs`) from function to function, down to the attention. An
argument is dropped if none of these functions has a parameter of its name.
"""

import functools
import importlib
import inspect
from collections.abc import Iterator
from typing import Any

from bert_fast.huggingface.family import IS_VERSION_4
from bert_fast.modules.originals import at_trace_time

# Modules whose functions get arguments that a model does not know, beside the model's own.
_MODULES = (
    "integrations.flash_attention", "integrations.flex_attention", "integrations.sdpa_attention", "loss.loss_utils",
    "masking_utils", "modeling_flash_attention_utils", "modeling_layers",
)  # fmt: skip
_WRAPPERS = ("output_", "return_", "use_cache")  # how names begin that what stands around `forward` looks for


def is_ignored(model: Any, name: str) -> bool:
    """Whether transformers' own forward of a fused model drops an argument, whatever its value."""
    return _drops(model.fused_theirs, model.fused_original.__module__, name)


@at_trace_time
def _drops(forward: Any, library: str, name: str) -> bool:
    if IS_VERSION_4 or not _takes_all(forward) or name.startswith(_WRAPPERS):
        return False
    return name not in _parameters(library)


@functools.cache
def _takes_all(forward: Any) -> bool:
    return any(each.kind is each.VAR_KEYWORD for each in inspect.signature(forward).parameters.values())


@functools.cache
def _parameters(library: str) -> frozenset[str]:
    """Names of the parameters of all functions that a model's unknown arguments may meet."""
    found: set[str] = set()
    for name in (library, *(f"transformers.{module}" for module in _MODULES)):
        for function in _functions(importlib.import_module(name)):
            found.update(inspect.signature(function).parameters)
    return frozenset(found)


def _functions(module: Any) -> Iterator[Any]:
    """Those of a module and of its classes."""
    for value in vars(module).values():
        if inspect.isfunction(value):
            yield value
        elif inspect.isclass(value) and value.__module__ == module.__name__:
            yield from filter(inspect.isfunction, vars(value).values())
