"""The layers of an encoder as CUDA graphs, forward and backward, within whatever loop trains the model."""

import warnings
import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.modules import module as _global

from bert_fast.backend import requested
from bert_fast.batch_invariance import ASKED
from bert_fast.errors import BackendError, DerivativeError
from bert_fast.graphs.budgets import Budget, by_work
from bert_fast.graphs.steps import check_device
from bert_fast.modules.call import Call
from bert_fast.ops._autocast import autocast_dtype
from bert_fast.ops._register import is_watched
from bert_fast.ops.packing import Packing, longest_first
from bert_fast.remembered import Remembered

_MOST_FORMS = 4  # of the same budgets: training and evaluation, with and without autocast; then all are given up
_NUM_WARMUP = 2
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_GLOBAL_HOOKS = [getattr(_global, f"_global{name}") for name in _HOOKS]


class EncoderGraphs:
    """Replays an encoder's layers: a graph for forward and one for backward, captured for each budget when it is met.

    Args:
        budgets: a batch takes the first that it fits into, by tokens, then by the longest sequence, then by the number
            of sequences; max_labels is not looked at. One that fits into none runs as it is; a warning says so once.
            Tokens that a batch does not use are computed, too, and reach neither the output nor a gradient.

    Set as `encoder.graphs` (`bert_fast.fuse(model, graphs=budgets)` does). Everything around the layers stays as it
    was, and so do gradient accumulation, DDP's buckets, clipping and optimizers: gradients leave backward as fresh
    tensors. Dropout has the masks of the same call without graphs, as their seed is an input. A call runs as it is

    - where layers are looked into: hooks, replaced `forward`s, hidden states, attention probabilities, caches, biases,
      rotary or relative positions, head masks, checkpointing, `torch.compile`, modes, a graph that is being captured
      around it;
    - between a forward pass and its backward pass, as the graphs of all budgets share their memory.

    Parameters that moved, or whose requires_grad changed, modes of modules and autocast have graphs of their own; after
    four such forms all are captured anew. Copies and pickles of the encoder begin without graphs.

    Raises:
        TypeError, ValueError: no budget. BackendError: there is no CUDA device; layers that cannot be captured.
        DerivativeError: a second backward pass after another forward pass.
    """

    def __init__(self, budgets: Sequence[Budget], *, device: torch.device | str = "cuda") -> None:
        if not budgets or not all(isinstance(budget, Budget) for budget in budgets):
            raise ValueError(f"graphs: expected at least one Budget, got {budgets!r}")
        check_device("graphs", device)
        self.budgets = sorted(budgets, key=by_work)
        self.device = torch.device(device)
        self._captured: dict[Any, dict[Budget, _Captured]] = {}
        self._number_of = Remembered(lambda parameters: object(), by_address=True)
        self._pool: Any = None
        self._stream: Any = None
        self._turn: weakref.ref[_Turn] | None = None  # the forward pass whose backward pass is yet to come
        self._warned: set[str] = set()

    def __deepcopy__(self, memo: Any) -> "EncoderGraphs":
        return EncoderGraphs(self.budgets, device=self.device)

    def __reduce__(self) -> Any:
        return _remade, (self.budgets, self.device)

    def __call__(self, encoder: Any, x: Tensor, call: Call) -> Tensor | None:
        """x [T, H] to [T, H], or [M, H] where the call names rows; None where the layers are to run as they are."""
        if not self._may_replay(encoder, x, call):
            return None
        parameters: list[nn.Parameter] = []
        state: list[Any] = []
        if not all(_looked_at(module, parameters, state) for module in encoder.layer):
            return None
        budget = self._budget_of(call.packing, len(x))
        if budget is None:
            return None
        is_trained = torch.is_grad_enabled() and (x.requires_grad or any(p.requires_grad for p in parameters))
        if self._turn is not None and self._turn() is not None:
            self._warn("a forward pass before the backward pass of the last one runs without graphs")
            return None
        form = (
            self._number_of(tuple(parameters)), *state, x.dtype, x.requires_grad, is_trained, call.seed is None,
            call.causal, autocast_dtype(x), requested(), ASKED.get(), torch.get_float32_matmul_precision(),
            torch.is_inference_mode_enabled(),
        )  # fmt: skip
        captured = self._of_form(form).get(budget)
        if captured is None:
            wanted = [p for p in parameters if p.requires_grad] if is_trained else []
            captured = _Captured(encoder, budget, x, call, wanted)
            captured.load(x.detach(), call)
            self._capture(captured, budget, x.device, is_trained)
            self._of_form(form)[budget] = captured
        else:
            captured.load(x.detach(), call)
        if not is_trained:
            return call.of_rows(captured.forward(len(x)))
        turn = _Turn()
        self._turn = weakref.ref(turn)
        made: Tensor = _Replay.apply(self, turn, captured, x, *captured.wanted)
        return call.of_rows(made)

    def gradients(self, turn: "_Turn", captured: "_Captured", dy: Tensor) -> list[Tensor | None]:
        """The backward pass of a forward pass: gradients of x, then of the parameters that want one."""
        if self._turn is None or self._turn() is not turn:
            raise DerivativeError(
                "backward through an encoder's graphs: expected the backward pass of the last forward pass, once, got "
                "another: what the graphs kept of it is overwritten"
            )
        gradients = captured.backward(dy)
        self._turn = None
        return gradients

    def _may_replay(self, encoder: Any, x: Tensor, call: Call) -> bool:
        extras = (
            call.keys, call.rotary, call.relative, call.bias, call.head_mask, call.cache, call.hidden_states,
            call.attentions, call.memory_packing, call.cross_attentions,
        )  # fmt: skip
        return (
            type(x) is Tensor
            and x.device.type == self.device.type
            and x.dim() == 2
            and len(x) > 0
            and all(one is None for one in extras)
            and not (encoder.training and encoder.checkpoint_every)
            and not is_watched(by_profiler=False)
            and not any(_GLOBAL_HOOKS)
            and not _is_capturing(x)
        )

    def _budget_of(self, packing: Packing, num_tokens: int) -> Budget | None:
        sizes = (num_tokens, packing.num_sequences, packing.max_seqlen)
        for budget in self.budgets:
            if all(map(int.__le__, sizes, (budget.max_tokens, budget.max_sequences, budget.max_seqlen))):
                return budget
        names = ("tokens", "sequences", "tokens a sequence")
        what = ", ".join(f"{size} {name}" for size, name in zip(sizes, names, strict=True))
        self._warn(f"a batch of {what} fits into no budget and runs without graphs: {self.budgets}")
        return None

    def _warn(self, what: str) -> None:
        kind = what.split(" of ")[0]
        if kind not in self._warned:
            self._warned.add(kind)
            warnings.warn(f"graphs: {what}", UserWarning, stacklevel=4)

    def _of_form(self, form: tuple[Any, ...]) -> "dict[Budget, _Captured]":
        if form not in self._captured and len(self._captured) >= _MOST_FORMS:
            self._captured.clear()
        return self._captured.setdefault(form, {})

    def _capture(self, captured: "_Captured", budget: Budget, device: torch.device, is_trained: bool) -> None:
        if self._stream is None:
            self._stream = _side_stream(device)
        torch.clear_autocast_cache()  # a copy of a weight in it is older than the replays
        try:
            with torch.cuda.device(device), torch.set_grad_enabled(is_trained):
                _warm_up(self._stream, captured, device)
                self._pool = captured.capture(self._pool, self._stream)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            raise BackendError(f"graphs: the layers could not be captured for {budget}: {error}") from error
        finally:
            torch.clear_autocast_cache()


class _Turn:
    """A forward pass; it lives as long as its backward pass may be asked for."""


class _Captured:
    """The graphs of one budget, and the tensors at fixed addresses that they read and write.

    wanted: parameters that get a gradient. Without gradients there is no backward pass.
    """

    def __init__(self, encoder: Any, budget: Budget, x: Tensor, call: Call, wanted: list[nn.Parameter]) -> None:
        device, slots = x.device, budget.num_slots
        self.wanted, self._encoder, self._budget = wanted, encoder, budget
        self._x = torch.zeros((budget.max_tokens, x.shape[1]), dtype=x.dtype, device=device)
        self._x.requires_grad_(x.requires_grad)
        self._cu_seqlens = torch.zeros(slots + 1, dtype=torch.int32, device=device)
        self._coords = torch.zeros((budget.max_tokens, 2), dtype=torch.int32, device=device)
        self._seed = None if call.seed is None else torch.zeros_like(call.seed)
        self._causal = call.causal
        steps = torch.arange(1, slots + 1, dtype=torch.int64, device=device)
        self._ends = (steps * budget.max_seqlen).clamp(max=budget.max_tokens).int()  # of filling sequences, from 0
        self._y = self._dy = self._x  # until it has run
        self._dx: Tensor | None = None
        # Gradients lie one behind the other: fresh ones of a dtype are one copy. Then which parameters get one.
        self._flat: dict[torch.dtype, Tensor] = {}
        self._has_gradient: list[bool] = []
        self._graphs: list[Any] = []

    def load(self, x: Tensor, call: Call) -> None:
        """Copies a batch in; tokens that it does not use are sequences of their own, of zeros."""
        packing, num_tokens = call.packing, len(x)
        used = packing.num_sequences + 1
        ends = self._cu_seqlens[used:]
        with torch.no_grad():
            self._x[:num_tokens].copy_(x)
            self._x[num_tokens:].zero_()
            self._coords[:num_tokens].copy_(packing.coords)
            self._cu_seqlens[:used].copy_(packing.cu_seqlens)
            torch.add(self._ends[: len(ends)], num_tokens, out=ends).clamp_(max=self._budget.max_tokens)
            if self._seed is not None and call.seed is not None:
                self._seed.copy_(call.seed)

    def capture(self, pool: Any, stream: Any) -> Any:
        """Captures the graphs; returns the pool of their memory."""
        for part in (self._run, self._differentiate) if self._y.requires_grad else (self._run,):
            graph = torch.cuda.CUDAGraph()
            # Of other threads only this one's calls are watched: a loader's may pin memory meanwhile.
            with torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
                part()
            self._graphs.append(graph)
            pool = graph.pool()
        return pool

    def warm_up(self) -> None:
        """What is captured, as it is: libraries set themselves up in it."""
        self._run()
        if self._y.requires_grad:
            self._dy = torch.zeros_like(self._y)
            self._differentiate()

    def forward(self, num_tokens: int) -> Tensor:
        """The layers' output, [T, H]."""
        self._graphs[0].replay()
        return self._y.detach()[:num_tokens].clone()

    def backward(self, dy: Tensor) -> list[Tensor | None]:
        """Gradients of x and of `wanted`, in fresh memory."""
        self._dy[: len(dy)].copy_(dy)
        self._dy[len(dy) :].zero_()
        self._graphs[1].replay()
        fresh = {dtype: iter(self._pieces(flat.clone(), dtype)) for dtype, flat in self._flat.items()}
        made = [next(fresh[p.dtype]) if has else None for p, has in zip(self.wanted, self._has_gradient, strict=True)]
        return [None if self._dx is None else self._dx[: len(dy)].clone(), *made]

    def _run(self) -> None:
        cu_seqlens = self._cu_seqlens
        order = longest_first(cu_seqlens) if cu_seqlens.is_cuda else None
        packing = Packing(cu_seqlens, self._budget.max_seqlen, self._coords, None, None, order)
        self._y = self._encoder.run_layers(self._x, call=Call(packing, self._seed, causal=self._causal))

    def _differentiate(self) -> None:
        inputs = [self._x, *self.wanted] if self._x.requires_grad else self.wanted
        made = [*torch.autograd.grad(self._y, inputs, self._dy, allow_unused=True)]
        self._dx = made.pop(0) if self._x.requires_grad else None
        self._has_gradient = [one is not None for one in made]
        found = [(p, one) for p, one in zip(self.wanted, made, strict=True) if one is not None]
        for dtype in {p.dtype for p, _ in found}:
            of_dtype = [one for p, one in found if p.dtype is dtype]
            if dtype not in self._flat:
                self._flat[dtype] = of_dtype[0].new_empty(sum(one.numel() for one in of_dtype))
            torch._foreach_copy_(self._pieces(self._flat[dtype], dtype), of_dtype)

    def _pieces(self, flat: Tensor, dtype: torch.dtype) -> list[Tensor]:
        """What belongs to each parameter of a dtype that gets a gradient."""
        of_dtype = [p for p, has in zip(self.wanted, self._has_gradient, strict=True) if has and p.dtype is dtype]
        pieces = flat.split([p.numel() for p in of_dtype])
        return [piece.view_as(p) for piece, p in zip(pieces, of_dtype, strict=True)]


class _Replay(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, graphs: EncoderGraphs, turn: _Turn, captured: _Captured, x: Tensor, *wanted: Tensor
    ) -> Tensor:
        ctx.graphs, ctx.turn, ctx.captured = graphs, turn, captured
        return captured.forward(len(x))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> Any:
        dx, *gradients = ctx.graphs.gradients(ctx.turn, ctx.captured, dy)
        return None, None, None, dx, *gradients


def _looked_at(module: nn.Module, parameters: list[nn.Parameter], state: list[Any]) -> bool:
    """Adds a module's parameters and modes, and those of all within; False where a hook listens to one.

    False, too, where one is to run again in backward, which transformers' layers decide by themselves.
    """
    own = module.__dict__
    if own.get("gradient_checkpointing") and module.training:
        return False
    if "forward" in own or any(own[name] for name in _HOOKS) or module._compiled_call_impl is not None:
        return False
    parameters += [p for p in module._parameters.values() if p is not None]
    state += module.training, own.get("p"), own.get("dropout_p")
    return all(_looked_at(one, parameters, state) for one in module._modules.values() if one is not None)


def _is_capturing(x: Tensor) -> bool:
    return x.is_cuda and torch.cuda.is_current_stream_capturing()


def _warm_up(stream: Any, captured: _Captured, device: torch.device) -> None:
    current = torch.cuda.current_stream(device)
    stream.wait_stream(current)
    with torch.cuda.stream(stream):
        for _ in range(_NUM_WARMUP):
            captured.warm_up()
    current.wait_stream(stream)


def _side_stream(device: torch.device) -> Any:
    return torch.cuda.Stream(device)


def _remade(budgets: Sequence[Budget], device: torch.device) -> EncoderGraphs | None:
    """Graphs of a pickled encoder; none where there is no device for them."""
    try:
        return EncoderGraphs(budgets, device=device)
    except BackendError:
        return None
