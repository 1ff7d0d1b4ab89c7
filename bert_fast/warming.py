"""`warm_up`: the kernels of a model's steps are compiled before the first one.

Triton compiles a kernel when it is launched for the first time, and some kernels have forms for lengths, for numbers of
tokens and for batches with and without padding. So steps are made on small batches that between them look like any:

    lengths    each power of two, since forms change at powers of two only; with padding and without
    tokens     from one to the most that a batch will have, by steps of a half, for the tiles of matrix products

Nothing is left behind but compiled kernels: gradients are asked for without being kept, an optimizer's step is made on
other tensors, hooks are silent, generators and modes are put back.
"""

import contextlib
import functools
import inspect
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module as nn_module

from bert_fast.checks import check_count, check_flag
from bert_fast.models.masked_lm import BertLMHeadModel
from bert_fast.models.packed import PackedBertModel
from bert_fast.optim._base import MultiTensorOptimizer
from bert_fast.terminal import Part, StatusLine

_SHORTEST = 4  # tokens; below, nothing changes
_FEWEST = 64  # tokens, or sequences, from which on matrix products are worth a tile
_GROWTH = 1.5  # of their numbers, from batch to batch: a choice of tiles mostly holds for as large a range
_DEFAULT_TOKENS = 4096
_MANY_SCORES = 2048  # rows of scores of the vocabulary: 250 MB in fp32
_NUM_CHOICES = 2
_AUTOCAST_DTYPES = (torch.bfloat16, torch.float16)
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
# Models that take labels, by the name that ours have in common with transformers'.
_HEADS = frozenset(
    (
        "BertForMaskedLM", "BertForPreTraining", "BertLMHeadModel", "BertForNextSentencePrediction",
        "BertForSequenceClassification", "BertForMultipleChoice", "BertForTokenClassification",
        "BertForQuestionAnswering",
    )
)  # fmt: skip


def warm_up(
    model: nn.Module,
    *,
    optimizer: torch.optim.Optimizer | None = None,
    autocast_dtype: torch.dtype | None = None,
    max_seqlen: int | None = None,
    max_tokens: int = _DEFAULT_TOKENS,
    training: bool = True,
    inference: bool = True,
    progress: bool | None = None,
) -> float:
    """Compiles, or loads from Triton's cache, the kernels that a run of this model will need.

    Call it once the model is on its device, in its dtype, with the layers frozen that will be: half a minute on a
    machine that has compiled none of it, some seconds on one that has. On a CPU there is nothing to compile: it returns
    0.0 at once.

    Parameters, gradients, buffers, the optimizer and its state, generators and modes stay as they are, bit for bit, and
    no hook is called. Memory: that of forward and backward of a batch of max_tokens.

    Args:
        model: one of bert_fast's, one that `fuse` changed, or a module with such a model inside (which is then warmed
            up, the rest of the module is not); not wrapped in DistributedDataParallel or sharded.
        optimizer: `optim.AdamW` or `Lamb`, whose kernels and those of clipping are compiled as well. Others have none
            here.
        autocast_dtype: of `torch.autocast` around training, torch.bfloat16 or torch.float16; None: as it is where this
            is called. With float16 the optimizer is taken to be stepped by a GradScaler.
        max_seqlen: of the longest sequence to come; None: as long as the model takes.
        max_tokens: of the largest batch to come, without padding.
        training: forward with dropout, backward.
        inference: forward alone, without gradients.
        progress: whether to say on stderr how far it is; None: where that is a terminal.

    Not compiled: what other arguments than token ids, padding and labels need, such as masks of 3 or 4 dimensions.

    Returns:
        The seconds that it took.

    Raises:
        TypeError, ValueError: the message names the argument.

    Example:
        >>> config = BertConfig(
        ...     vocab_size=30, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=20
        ... )
        >>> bert_fast.warm_up(bert_fast.BertModel(config))  # on a CPU there is nothing to compile
        0.0
    """
    targets = _targets(model)
    _check_optimizer(optimizer)
    if autocast_dtype is not None and autocast_dtype not in _AUTOCAST_DTYPES:
        got = autocast_dtype if isinstance(autocast_dtype, torch.dtype) else type(autocast_dtype).__name__
        raise ValueError(f"autocast_dtype: expected torch.bfloat16, torch.float16 or None, got {got}")
    for name, flag in (("training", training), ("inference", inference)):
        check_flag(name, flag)
    if progress is not None:
        check_flag("progress", progress)
    longest = min(_longest(target) for target in targets)
    if max_seqlen is not None:
        longest = check_count("max_seqlen", max_seqlen, 1, longest)
    max_tokens = check_count("max_tokens", max_tokens, 1)
    began = time.perf_counter()
    device = next(model.parameters()).device
    if device.type != "cuda":
        return 0.0
    with _shown(progress) as show:
        _make_steps(model, targets, (longest, max_tokens), (training, inference), autocast_dtype, optimizer, show)
    return time.perf_counter() - began


def _make_steps(
    model: nn.Module, targets: Sequence[Any], most: tuple[int, int], modes: tuple[bool, bool],
    autocast_dtype: torch.dtype | None, optimizer: torch.optim.Optimizer | None, show: Callable[[float], object],
) -> None:  # fmt: skip
    """What compiles: steps on every kind of batch. most: tokens of a sequence and of a batch. modes: as in `warm_up`.

    show: is told the share that is done.
    """
    device = next(model.parameters()).device
    is_trained = [is_training for is_training, wanted in zip((True, False), modes, strict=True) if wanted]
    steps = [(target, mode, *batch) for target in targets for mode in is_trained for batch in _batches(target, *most)]
    with _unchanged(model, device):
        for number, (target, is_training, lengths, has_mask) in enumerate(steps):
            show(number / len(steps))
            for module in target.modules():
                module.training = is_training
            _run(target, _inputs(target, lengths, has_mask, device), is_training, autocast_dtype)
        if modes[0] and isinstance(optimizer, MultiTensorOptimizer):
            _step(optimizer, autocast_dtype == torch.float16)


def _targets(model: Any) -> list[Any]:
    """The models inside that are run: the outermost with a head, or every BertModel where there is none."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"model: expected a torch.nn.Module, got {type(model).__name__}")
    modules = list(model.modules())
    berts: list[Any] = [module for module in modules if isinstance(module, PackedBertModel)]
    if not berts:
        raise ValueError(
            f"model: expected one of bert_fast's or one that bert_fast.fuse changed, got a {type(model).__name__}"
        )
    if any(isinstance(module, nn.parallel.DistributedDataParallel) for module in modules):
        raise ValueError("model: expected the model itself, got one in DistributedDataParallel: give its .module")
    if any(hasattr(p, "to_local") for p in model.parameters()):
        raise ValueError("model: expected whole parameters, got sharded ones: call warm_up before fully_shard")
    return next(([module] for module in modules if _head(module) and set(berts) & set(module.modules())), berts)


def _longest(target: Any) -> int:
    """Tokens of the longest sequence that a model takes."""
    behind = next(one.numbers_behind for one in target.modules() if isinstance(one, PackedBertModel))
    longest: int = target.config.max_position_embeddings - (0 if behind is None else behind + 1)
    return longest


def _head(model: nn.Module) -> str:
    """The name in `_HEADS` that a model goes by, or would if its family were BERT, "" for none."""
    in_bert: str | None = getattr(model, "in_bert", None)  # as a fused head says
    return in_bert or next((cls.__name__ for cls in type(model).__mro__ if cls.__name__ in _HEADS), "")


def _check_optimizer(optimizer: Any) -> None:
    if optimizer is not None and not isinstance(optimizer, torch.optim.Optimizer):
        raise TypeError(f"optimizer: expected a torch.optim.Optimizer or None, got {type(optimizer).__name__}")


def _batches(model: nn.Module, max_seqlen: int, max_tokens: int) -> Iterator[tuple[list[int], bool]]:
    """(lengths, whether a mask is given) of the batches that between them need every kernel."""
    if _head(model) == "BertForMultipleChoice":
        max_tokens = max(1, max_tokens // _NUM_CHOICES)  # each choice is a text of these lengths
    max_seqlen = min(max_seqlen, max_tokens)
    yield [1], False
    for longest in _powers(_SHORTEST, max_seqlen):
        padded = [longest, max(1, longest // 2), 1]
        while sum(padded) > max_tokens and len(padded) > 1:
            del padded[1]
        whole = [longest] * min(3, max_tokens // longest)
        yield from ((padded, True), (whole, True), (whole, False))
    for num_tokens in _rising(_FEWEST, max_tokens):
        full, rest = divmod(num_tokens, max_seqlen)
        yield [max_seqlen] * full + [rest] * (rest > 0), True
    for num_sequences in _rising(_FEWEST, max_tokens // _SHORTEST):
        yield [min(_SHORTEST, max_seqlen)] * num_sequences, True


def _powers(first: int, last: int) -> Iterator[int]:
    """first, doubled as long as that is below the last one, and the last one."""
    while first < last:
        yield first
        first *= 2
    yield last


def _rising(first: int, last: int) -> Iterator[int]:
    """Numbers up to the last one, by steps of a half."""
    number = float(first)
    while number < last:
        yield int(number)
        number *= _GROWTH
    if first <= last:
        yield last


def _inputs(model: Any, lengths: Sequence[int], has_mask: bool, device: torch.device) -> dict[str, Any]:
    """A padded batch for a model, with labels where it takes some."""
    config, head = model.config, _head(model)
    ends = torch.tensor(lengths)[:, None]  # [B, 1]
    keep = torch.arange(max(lengths)) < ends  # [B, S]
    words = torch.arange(keep.numel()).view(keep.shape) % config.vocab_size
    inputs = {"input_ids": words}
    inner = next(one for one in model.modules() if isinstance(one, PackedBertModel))
    if inner.embeddings.token_type_embeddings is not None:
        inputs["token_type_ids"] = torch.zeros_like(words)
    if has_mask:
        inputs["attention_mask"] = keep.long()
    if head == "BertForMultipleChoice":
        inputs = {name: t.unsqueeze(1).expand(-1, _NUM_CHOICES, -1).contiguous() for name, t in inputs.items()}
    labels = _labels(head, config, words, keep)
    return {name: t.to(device) for name, t in (inputs | labels).items()}


def _labels(head: str, config: Any, words: Tensor, keep: Tensor) -> dict[str, Tensor]:
    rows = torch.zeros(len(words), dtype=torch.int64)
    if head in ("BertForMaskedLM", "BertForPreTraining", "BertLMHeadModel"):
        every = 1 if head == "BertLMHeadModel" else 6
        labels = {"labels": words.masked_fill((torch.arange(words.shape[1]) % every != 0) | ~keep, -100)}
        return labels | ({"next_sentence_label": rows} if head == "BertForPreTraining" else {})
    if head == "BertForTokenClassification":
        return {"labels": torch.zeros_like(words).masked_fill(~keep, -100)}
    if head == "BertForQuestionAnswering":
        return {"start_positions": rows, "end_positions": rows}
    if head == "BertForSequenceClassification":
        problem, num_labels = getattr(config, "problem_type", None), config.num_labels
        if problem == "multi_label_classification":
            return {"labels": torch.zeros(len(words), num_labels)}
        if problem == "regression" or (problem is None and num_labels == 1):
            return {"labels": torch.zeros(len(words)) if num_labels == 1 else torch.zeros(len(words), num_labels)}
    return {"labels": rows} if head else {}


def _run(model: Any, inputs: dict[str, Any], is_training: bool, autocast_dtype: torch.dtype | None) -> None:
    """Forward, in training backward too; what they compute is forgotten."""
    if not is_training and "labels" in inputs and isinstance(model, BertLMHeadModel):
        # Without labels it fills a cache, and a layer that does runs op by op; a fused model leaves that to others.
        _run(model, {name: t for name, t in inputs.items() if name != "labels"}, False, autocast_dtype)
    if not is_training and inputs["input_ids"].numel() > _MANY_SCORES and _takes(model, "output_logits"):
        inputs["output_logits"] = False  # of the vocabulary, for each token: no run keeps as many
    device_type = inputs["input_ids"].device.type
    autocast = torch.autocast(device_type, autocast_dtype) if autocast_dtype else contextlib.nullcontext()
    with torch.set_grad_enabled(is_training):
        with autocast:
            output = model(**inputs, return_dict=True)
        if not is_training:
            return
        loss = getattr(output, "loss", None)
        results = [output.last_hidden_state, getattr(output, "pooler_output", None)] if loss is None else [loss]
        results = [result for result in results if result is not None and result.requires_grad]
        if results:
            wanted = [p for p in model.parameters() if p.requires_grad]
            upstream = [torch.ones_like(result) for result in results]
            torch.autograd.grad(results, wanted, upstream, allow_unused=True)


def _takes(model: nn.Module, argument: str) -> bool:
    return argument in inspect.signature(type(model).forward).parameters


def _step(optimizer: MultiTensorOptimizer, is_scaled: bool) -> None:
    """A step of an optimizer like this one, on parameters of one element for each of its own.

    Addresses count: where one is no multiple of 16 bytes, another kernel runs. Gradients of several processes lie in
    buckets, where any may be such a one.
    """
    twin = object.__new__(type(optimizer))
    twin.__dict__.update({name: value for name, value in vars(optimizer).items() if name not in ("state", "grad_norm")})
    twin.state = type(optimizer.state)(dict)
    grad_places = (0, 1) if _has_buckets() else (0,)
    twin.param_groups, made = [], []
    for group in optimizer.param_groups:
        params: list[Tensor] = []
        for p in group["params"]:
            for grad_away in grad_places:
                if p.requires_grad:
                    params.append(nn.Parameter(_element(p, p.data_ptr() % 16 // p.element_size())))
                    params[-1].grad = _element(p, grad_away)
        twin.param_groups.append({**group, "params": params})
        made += params
    if is_scaled and made:
        twin.grad_scale, twin.found_inf = (torch.tensor(n, device=made[0].device) for n in (1.0, 0.0))  # type: ignore[attr-defined]
    MultiTensorOptimizer.step(twin)  # the class's own method calls no hooks


def _has_buckets() -> bool:
    return torch.distributed.is_available() and torch.distributed.is_initialized()


def _element(p: Tensor, away: int) -> Tensor:
    """A tensor of one element of this one's dtype, so many elements behind whole 16 bytes."""
    return torch.zeros(away + 1, dtype=p.dtype, device=p.device)[away:]


@contextlib.contextmanager
def _unchanged(model: nn.Module, device: torch.device) -> Iterator[None]:
    """Puts back what runs of a model change; hooks do nothing meanwhile."""
    modules = list(model.modules())
    modes = [module.training for module in modules]
    buffers = [(b, b.clone()) for b in model.buffers()]
    configs = {id(m.config): m.config for m in modules if hasattr(m, "config")}.values()
    # transformers' models note there which kind of labels they saw first.
    problems = [(config, config.problem_type) for config in configs if hasattr(config, "problem_type")]
    hooks = [getattr(module, name) for module in modules for name in _HOOKS]
    hooks += [getattr(nn_module, name) for name in vars(nn_module) if name.startswith("_global_") and "hooks" in name]
    hooks += [p._backward_hooks for p in model.parameters()]
    index = device.index
    generators = [] if not torch.cuda.is_available() else [torch.cuda.current_device() if index is None else index]
    with _silent(hooks), _for_autograd(modules), torch.random.fork_rng(devices=generators):
        try:
            yield
        finally:
            for module, mode in zip(modules, modes, strict=True):
                module.training = mode
            for config, problem in problems:
                config.problem_type = problem
            with torch.no_grad():
                for buffer, was in buffers:
                    buffer.copy_(was)


@contextlib.contextmanager
def _silent(hooks: Iterable[Any]) -> Iterator[None]:
    """Hooks stay registered, as paths are chosen by whether there are any, but do nothing."""
    kept = [(registered, dict(registered)) for registered in hooks if isinstance(registered, dict) and registered]
    for registered, _ in kept:
        for key in registered:
            if callable(registered[key]):
                registered[key] = _nothing
    try:
        yield
    finally:
        for registered, own in kept:
            registered.update(own)


def _nothing(*_: Any, **__: Any) -> None:
    pass


@contextlib.contextmanager
def _for_autograd(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Checkpointing in the form that gives gradients without keeping them; it runs the same kernels."""
    changed: list[tuple[nn.Module, str, Any]] = []
    for module in modules:
        own = module.__dict__
        for name in ("checkpoint_arguments", "_gradient_checkpointing_func"):  # ours, transformers'
            value = own.get(name)
            if isinstance(value, functools.partial):
                changed.append((module, name, value))
                own[name] = functools.partial(value, use_reentrant=False)
            elif isinstance(value, dict):
                changed.append((module, name, value))
                own[name] = value | {"use_reentrant": False}
    try:
        yield
    finally:
        for module, name, value in changed:
            module.__dict__[name] = value


@contextlib.contextmanager
def _shown(progress: bool | None) -> Iterator[Callable[[float], object]]:
    if not (sys.stderr.isatty() if progress is None else progress):
        yield lambda share: None
        return
    with contextlib.closing(StatusLine(is_transient=True)) as line:
        line.open("compiling kernels", is_patient=True)
        yield lambda share: line.show([Part("compiling kernels", 0)], share, f"compiling kernels: {share:.0%}")
