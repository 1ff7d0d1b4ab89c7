"""CUDA graphs on a CPU, for tests: what a capture calls is noted operator by operator, and called again at the same
addresses.

As with CUDA's, numbers are those of the capture, tensors are where they were then, a capture computes nothing, what a
replay returns is overwritten by the next (of any graph, as they share memory), and nobody may look at values meanwhile.
"""

import contextlib
import sys
from collections.abc import Iterator
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from bert_fast import graphs
from bert_fast.graphs import encoders, steps
from bert_fast.models.packed import PackedBertModel
from bert_fast.modules import call
from bert_fast.ops.packing import Packing
from bert_fast.training import arguments, replaying

_LOOKS = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, Tensor)]


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _is_in_a_check() -> bool:
    """Whether values are checked, as they are on a CPU only (see `check_ids`): no graph of CUDA's holds that."""
    frame: Any = sys._getframe(2)
    while frame is not None:
        if frame.f_code.co_name.startswith("check_") and "bert_fast" in frame.f_code.co_filename:
            return True
        frame = frame.f_back
    return False


class _Recorder(TorchDispatchMode):
    """Calls operators and notes them; what they write into memory that was there before is put back by `undo`."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, Any, Any, Any]] = []
        self.before: dict[Any, tuple[Tensor, Tensor]] = {}
        self.made: set[int] = set()
        self.generator = torch.get_rng_state()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if _is_in_a_check():
            return func(*args, **kwargs)
        inputs = _tensors((args, kwargs))
        is_by_number = func is torch.ops.aten.index.Tensor and all(t.dtype is not torch.bool for t in inputs[1:])
        if _LOOKS & set(func.tags) and not is_by_number:
            raise RuntimeError(f"operation not permitted when stream is capturing: {func}")
        if func._schema.is_mutable:
            for tensor in inputs:
                place = (tensor.data_ptr(), tensor.shape, tensor.stride())
                if _storage(tensor) not in self.made and place not in self.before:
                    self.before[place] = (tensor, tensor.detach().clone())
        outputs = func(*args, **kwargs)
        known = {_storage(tensor) for tensor in inputs}
        self.made |= {_storage(tensor) for tensor in _tensors(outputs)} - known
        self.calls.append((func, args, kwargs, outputs))
        return outputs

    def undo(self) -> None:
        with torch.no_grad():  # an optimizer writes into parameters
            for tensor, value in reversed(self.before.values()):
                tensor.copy_(value)
        torch.set_rng_state(self.generator)


def _first_rows(packing: Packing) -> Tensor:
    """As on a GPU: on a CPU their number is asked for."""
    return packing.cu_seqlens[:-1].long().clamp(max=packing.coords.shape[0] - 1)


def _layout(packing: Packing, rows: Tensor) -> Packing:
    """Likewise; sequences without tokens have their queries in the one before."""
    cu_seqlens = torch.searchsorted(rows, packing.cu_seqlens.long(), out_int32=True)
    longest = max(packing.max_seqlen, packing.num_sequences)
    return Packing(cu_seqlens, longest, packing.coords.index_select(0, rows), None, None, packing.order)


class RecordedGraph:
    """Stands for `torch.cuda.CUDAGraph`."""

    all: ClassVar[list["RecordedGraph"]] = []
    num_replays: ClassVar[int] = 0

    def __init__(self) -> None:
        self.recorder: _Recorder | None = None
        self.own: list[Tensor] = []
        self.reads: set[int] = set()

    def pool(self) -> str:
        return "pool"

    def replay(self) -> None:
        assert self.recorder is not None
        RecordedGraph.num_replays += 1
        for graph in RecordedGraph.all:  # one memory for all of them, but for what this one reads of another
            for tensor in graph.own:
                if _storage(tensor) in self.reads:
                    continue
                with torch.inference_mode(tensor.is_inference()):
                    tensor.fill_(float("nan") if tensor.is_floating_point() else 0)
        with torch.no_grad():
            for func, args, kwargs, noted in self.recorder.calls:
                outputs = func(*args, **kwargs)
                for place, value in zip(_tensors(noted), _tensors(outputs), strict=True):
                    if place.untyped_storage().data_ptr() != value.untyped_storage().data_ptr():
                        place.copy_(value)


_capturing: list[RecordedGraph] = []


@contextlib.contextmanager
def _graph(graph: RecordedGraph, **options: Any) -> Iterator[None]:
    recorder = _Recorder()
    _capturing.append(graph)
    try:
        with recorder:
            yield
    finally:
        _capturing.pop()
        recorder.undo()
    graph.recorder = recorder
    outputs = {_storage(t): t for *_, outs in recorder.calls for t in _tensors(outs) if _storage(t) in recorder.made}
    graph.reads = {
        _storage(t) for _, args, kwargs, _ in recorder.calls for t in _tensors((args, kwargs))
    } - recorder.made
    graph.own = [t for t in outputs.values() if t._base is None]
    RecordedGraph.all.append(graph)


def install(monkeypatch: pytest.MonkeyPatch) -> None:
    """`CapturedStep` and `EncoderGraphs` work on a CPU from here on."""
    monkeypatch.setattr(RecordedGraph, "all", [])
    monkeypatch.setattr(RecordedGraph, "num_replays", 0)
    for module in (graphs, encoders, steps, arguments):
        monkeypatch.setattr(module, "check_device", lambda name, device: None)
    monkeypatch.setattr(replaying, "_is_capturing", lambda: bool(_capturing))
    monkeypatch.setattr(call, "_layout", _layout)
    # As one operator: on a CPU it looks which rows are labelled.
    monkeypatch.setattr(sys.modules["bert_fast.ops.linear_cross_entropy"], "_is_eager", lambda *tensors: False)
    encode = PackedBertModel.encode
    # On a GPU every token is encoded where words are given by their positions, whose number nobody asks for.
    monkeypatch.setattr(
        PackedBertModel,
        "encode",
        lambda self, *given, rows=None, **named: encode(
            self, *given, rows=rows if rows is _first_rows else None, **named
        ),
    )
    of_cpu = call.first_rows
    for name in [name for name in sys.modules if name.startswith("bert_fast.")]:
        if getattr(sys.modules[name], "first_rows", None) is of_cpu:
            monkeypatch.setattr(sys.modules[name], "first_rows", _first_rows)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", RecordedGraph)
    monkeypatch.setattr(torch.cuda, "graph", _graph)
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    monkeypatch.setattr(encoders, "_is_capturing", lambda x: bool(_capturing))
    monkeypatch.setattr(encoders, "_side_stream", lambda device: None)
    monkeypatch.setattr(encoders, "_warm_up", lambda stream, captured, device: captured.warm_up())
    monkeypatch.setattr(graphs.CapturedStep, "_warm_up", lambda self, inputs: self.step(inputs))
    monkeypatch.setattr(graphs.CapturedStep, "_side_stream", lambda self: None)
