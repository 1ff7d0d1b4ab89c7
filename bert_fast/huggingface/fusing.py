"""fuse and unfuse: a model's classes change; query, key and value move side by side in memory."""

import copy
import importlib.util
from collections.abc import Sequence
from typing import Any, TypeVar

from torch import nn

from bert_fast.graphs import Budget, EncoderGraphs

_M = TypeVar("_M", bound=nn.Module)


def fuse(model: _M, *, graphs: Sequence[Budget] | None = None) -> _M:
    """Makes every BERT of `transformers` inside a model fast, in place, and every model of a family like it.

    Modules, parameters, configuration, hooks and signatures stay as they are, by identity. The classes of the models,
    of the modules inside them and of the models with a head change to subclasses which compute on packed tokens. Query,
    key and value of a layer move side by side in memory. Calls for which something speaks against the packed path
    (`why_not` says what) run transformers' own code. Copies and pickles of the model are fused as well, and
    `print(model)` says so. A SentenceTransformer, SparseEncoder or MultiVectorEncoder keeps texts packed up to their
    vectors, a CrossEncoder up to their scores. Fusing again changes nothing. Fuse before `fully_shard` and before
    torch.compile runs; before or after `.to`, loading, and the injection of PEFT's adapters.

    Args:
        model: any module that has a `transformers.BertModel` inside, or one of another family (docs/families.md lists
            them): one with a head, of an Auto class, of sentence-transformers, of a class derived from these.
        graphs: budgets of tokens (`bert_fast.graphs.Budget`; `graphs.budgets_for` chooses them) for which the layers
            are captured as CUDA graphs, forward and backward, and replayed in any loop that calls the model
            (`bert_fast.graphs.EncoderGraphs` says when). Fusing again with other budgets replaces them; None: as it
            was.

    Returns:
        model.

    Raises:
        TypeError: model is no module, or an entry of graphs no Budget.
        ValueError: no model of a family is inside, or no budget in graphs.
        ImportError: transformers is not installed.
        BackendError: graphs without a CUDA device.

    Example:
        >>> import transformers
        >>> config = transformers.BertConfig(
        ...     vocab_size=30, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=20
        ... )
        >>> model = bert_fast.fuse(transformers.BertModel(config))
        >>> "fused by bert_fast" in repr(model)
        True
        >>> model(torch.tensor([[1, 2, 3]])).last_hidden_state.shape
        torch.Size([1, 3, 16])
    """
    _check_module(model)
    need_transformers()
    from bert_fast.huggingface.classes import encoders, join_projections, swap_in
    from bert_fast.huggingface.families import model_names

    made = None if graphs is None else EncoderGraphs(graphs)
    if not swap_in(model):
        raise ValueError(
            f"model: expected a {model_names()} of transformers inside, got {_described(model)} without one"
            f"{_twin(model)}"
        )
    join_projections(model)
    if made is not None:
        for encoder in encoders(model):
            encoder.graphs = copy.deepcopy(made)
    return model


def unfuse(model: _M) -> _M:
    """Undoes `fuse`, in place: what is left is a model of transformers like any other. Parameters stay, by identity.

    Args:
        model: as for `fuse`; one that is not fused is left as it is.

    Returns:
        model.

    Raises:
        TypeError: model is no module.
        ValueError: a class was derived from a fused one, as `fully_shard` does; nothing is changed then.

    Example:
        >>> import transformers
        >>> config = transformers.BertConfig(
        ...     vocab_size=30, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=20
        ... )
        >>> model = bert_fast.fuse(transformers.BertModel(config))
        >>> "fused by bert_fast" in repr(bert_fast.unfuse(model))
        False
    """
    from bert_fast.huggingface.classes import swap_out

    _check_module(model)
    swap_out(model)
    return model


def why_not(model: nn.Module, **inputs: Any) -> list[str]:
    """Why calls of a model run transformers' own code, one line a reason; empty where they are packed.

    Args:
        model: as for `fuse`.
        inputs: arguments of forward without a head, such as output_attentions=True; without any, what lies in the
            process, the model and its configuration is listed, of one of sentence-transformers also what keeps it from
            packing texts.

    Returns:
        The reasons (list of str), each once.

    Raises:
        TypeError: model is no module.

    Example:
        >>> import transformers
        >>> config = transformers.BertConfig(
        ...     vocab_size=30, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=20
        ... )
        >>> model = bert_fast.fuse(transformers.BertModel(config))
        >>> bert_fast.why_not(model)
        []
        >>> bert_fast.why_not(model, input_ids=torch.tensor([[1, 2]]), output_attentions=True)
        ['output_attentions: probabilities are asked for']
    """
    from bert_fast.huggingface.fused import Fused, FusedAround
    from bert_fast.huggingface.heads import FusedSummaryHead
    from bert_fast.huggingface.models import FusedModel
    from bert_fast.huggingface.reasons import reasons, standing_reasons

    _check_module(model)
    inner = [module for module in model.modules() if isinstance(module, FusedModel)]
    if not inner:
        return [f"there is no fused model in this {type(model).__name__}: bert_fast.fuse was not called"]
    found = [
        f"{type(one).__name__}.forward: replaced for the whole process"
        for one in model.modules()
        if isinstance(one, Fused) and not isinstance(one, FusedModel) and one.is_replaced()
    ]
    found += [reason for one in inner for reason in (reasons(one, inputs) if inputs else standing_reasons(one))]
    if inputs:
        found += [
            reason
            for one in model.modules()
            if isinstance(one, FusedSummaryHead)
            for reason in one.reasons_of_head(inputs)
        ]
    else:
        found += [reason for one in model.modules() if isinstance(one, FusedAround) for reason in one.reasons_around()]
    return list(dict.fromkeys(found))


# What names of classes begin with in code that came with a checkpoint -> transformers' class of the same architecture.
_TWINS = {"NomicBert": "NomicBertModel", "NewModel": "GteModel", "XLMRobertaLoRA": "JinaEmbeddingsV3Model"}


def need_transformers() -> None:
    """Raises ImportError where transformers is not there, whose models these functions change."""
    if importlib.util.find_spec("transformers") is None:
        raise ImportError("transformers is not installed, whose models are made fast: pip install transformers")


def _twin(model: nn.Module) -> str:
    """Which class of transformers takes the checkpoint of a model whose code came with it, as a message says it."""
    for kind in map(type, model.modules()):
        if kind.__module__.startswith("transformers_modules."):
            for begins, known in _TWINS.items():
                if kind.__name__.startswith(begins):
                    where = f"{kind.__name__} of {kind.__module__}"
                    return f", but a {where}: load it as {known}, without trust_remote_code"
    return ""


def _described(model: nn.Module) -> str:
    """Its class, and whose it is where that is not to be seen."""
    cls = type(model)
    return f"a {cls.__name__}" + ("" if cls.__module__.startswith("torch.") else f" of {cls.__module__}")


def _check_module(model: Any) -> None:
    if not isinstance(model, nn.Module):
        raise TypeError(f"model: expected a torch.nn.Module, got {type(model).__module__}.{type(model).__name__}")
