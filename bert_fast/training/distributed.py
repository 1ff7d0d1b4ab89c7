"""`Processes`: the processes of a run, as `accelerate` started them, and what they tell one another on the host."""

import datetime
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import nn

from bert_fast.errors import TrainingError
from bert_fast.graphs import check_device
from bert_fast.training.config import TrainingConfig

__all__ = ["Processes", "lost_process"]

_MIXED_PRECISION = {"fp32": "no", "bf16": "bf16", "fp16": "fp16"}
_PATIENCE = datetime.timedelta(minutes=30)  # for a process that is busy: tokenizing, writing predictions


class Processes:
    """One process or many: device, precision and gradient exchange by `accelerate`; words between hosts by gloo.

    Counts of labels, requests to stop and predictions go over a group of their own on the host, so that none of them
    waits for a GPU.

    Raises: ImportError without accelerate; ValueError for a precision that the device does not have; ValueError,
        BackendError for graphs where there are none.
    """

    def __init__(self, config: TrainingConfig) -> None:
        try:
            from accelerate import Accelerator
            from accelerate.state import AcceleratorState
            from accelerate.utils import DistributedDataParallelKwargs, InitProcessGroupKwargs
        except ImportError as error:
            raise ImportError(f"training needs accelerate: pip install bert_fast[train] ({error})") from error
        # accelerate keeps one state for the whole process and refuses another precision, even of a run that is over.
        AcceleratorState._reset_state()
        self.accelerator = Accelerator(
            # Without being told so it takes each of several processes on a CPU for a run of its own.
            cpu=not torch.accelerator.is_available(),
            mixed_precision=_MIXED_PRECISION[config.precision],
            # Gradients are kept once, in the buckets that they are exchanged in.
            kwargs_handlers=[
                InitProcessGroupKwargs(timeout=_PATIENCE),
                DistributedDataParallelKwargs(gradient_as_bucket_view=True),
            ],
            step_scheduler_with_optimizer=False,
        )
        self.device: torch.device = self.accelerator.device
        self.rank: int = self.accelerator.process_index
        self.count: int = self.accelerator.num_processes
        self.is_sharded = config.sharding == "fsdp2"
        if config.precision == "fp16" and self.device.type == "cpu":
            raise ValueError("precision: expected 'fp32' or 'bf16' on a CPU, got 'fp16'")
        if self.is_sharded and self.count == 1:
            raise ValueError("sharding: expected 'none' for a single process, got 'fsdp2'; see docs/scaling.md")
        if config.graphs:
            check_device("graphs", self.device)
            if self.count > 1:
                raise ValueError(f"graphs: expected False for {self.count} processes, got True")
        self._host: Any = torch.distributed.new_group(backend="gloo", timeout=_PATIENCE) if self.count > 1 else None

    @property
    def is_main(self) -> bool:
        """Whether this is the process that talks and writes."""
        return self.rank == 0

    def place(self, model: Any) -> Any:
        """The model on its device; sharded, every layer by itself, where the run asks for it."""
        model = model.to(self.device)
        if self.is_sharded:
            from torch.distributed.device_mesh import init_device_mesh
            from torch.distributed.fsdp import fully_shard

            for tensor in (*model.parameters(), *model.buffers()):  # as DDP does: the first process's weights are all's
                torch.distributed.broadcast(tensor.detach(), src=0)
            mesh = init_device_mesh(self.device.type, (self.count,))
            for layer in model.base_model.encoder.layer:
                fully_shard(layer, mesh=mesh)
            fully_shard(model, mesh=mesh)
        return model

    def prepare(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[nn.Module, Any]:
        """(the model to call in training, the optimizer to step), with autocast, gradient exchange and loss scaling."""
        # What is sharded exchanges gradients by itself: accelerate is to add autocast only.
        prepared = self.accelerator.prepare_model(model, evaluation_mode=self.is_sharded)
        return prepared, self.accelerator.prepare_optimizer(optimizer, device_placement=False)

    def exchanging(self, model: nn.Module, is_last: bool) -> AbstractContextManager[Any]:
        """Around forward and backward of a micro-batch: gradients are exchanged with the last of a step only."""
        if self.is_sharded:
            model.set_requires_gradient_sync(is_last)  # type: ignore[operator]
            return nullcontext()
        return nullcontext() if is_last else self.accelerator.no_sync(model)

    def sums(self, numbers: Mapping[str, float]) -> dict[str, float]:
        """Sums over the processes, name by name; every process gives the same names."""
        if self._host is None:
            return dict(numbers)
        values = torch.tensor(list(numbers.values()), dtype=torch.float64)
        with _lost_processes_explained():
            torch.distributed.all_reduce(values, group=self._host)
        return dict(zip(numbers, values.tolist(), strict=True))

    def gathered(self, value: Any) -> list[Any]:
        """What every process gave, in their order, in every process."""
        if self._host is None:
            return [value]
        values: list[Any] = [None] * self.count
        with _lost_processes_explained():
            torch.distributed.all_gather_object(values, value, group=self._host)
        return values

    def from_main(self, value: Any) -> Any:
        """What the main process gave, in every process."""
        if self._host is None:
            return value
        values = [value]
        with _lost_processes_explained():
            torch.distributed.broadcast_object_list(values, src=0, group=self._host)
        return values[0]

    def on_main(self, action: Any) -> Any:
        """Calls `action` in the main process only; its result, or its error, in every process."""
        if self._host is None:
            return action()
        result, error = None, None
        if self.is_main:
            try:
                result = action()
            except Exception as caught:  # the others must not wait for ever
                error = caught
        message = self.from_main(None if error is None else f"{type(error).__name__}: {error}")
        if error is not None:
            raise error
        if message is not None:
            raise TrainingError(f"the main process failed: {message}")
        return self.from_main(result)

    def close(self) -> None:
        """Says goodbye to the other processes."""
        if self._host is not None and torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()


def lost_process(error: BaseException) -> TrainingError | None:
    """What to say of an error if it means that another process is gone; None if it means something else."""
    text = str(error)
    if not any(words in text.lower() for words in ("connection closed by peer", "connection reset", "broken pipe")):
        return None
    return TrainingError(
        f"another process of this run is gone ({text.strip().splitlines()[0][:200]}). See its own messages; the same "
        "command goes on from the last checkpoint"
    )


@contextmanager
def _lost_processes_explained() -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        lost = lost_process(error)
        if lost is None:
            raise
        raise lost from error
