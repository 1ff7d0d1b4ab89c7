"""Random sequences of calls of a layer over the null driver, run by programs in C++ and in Python.

A sequence calls a layer with changing batches and modes. Between calls its parameters are moved, replaced, frozen,
rewritten or cast, several forward passes wait for their backward pass, and launches fail. C++ and Python run each call.
Both must launch the same kernels with the same parameters, return tensors of the same form and raise the same errors.
Addresses of parameters and arguments are compared exactly, others by their last four bits.

Environment:
    BERT_FAST_SEQUENCES        the number of sequences, 200 by default. 100,000 take about an hour of one core.
    BERT_FAST_FIRST_SEQUENCE   the first one's seed, 0 by default.
"""

import bisect
import gc
import os
import random
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from tests.kernels.layer_changes import CHANGES, CONFIG, MOVES
from tests.null_driver.layer_scenarios import _ADDRESSES
from tools.null_driver.driver import NullDriver

NUM_SEQUENCES, NUM_BY_METHODS, NUM_ALTERED = 200, 30, 10
_LENGTHS = 1, 2, 5, 9, 16, 33, 64, 130
_Call = Callable[[], Sequence[Tensor | None]]


class _Compared:
    """Runs calls by both executors and compares them."""

    def __init__(self, driver: NullDriver) -> None:
        from bert_fast.triton._programs import _Runner

        self._driver, self._runner, self._run = driver, _Runner, _Runner.run
        self.in_extension = self.num_launches = 0
        self.errors: Counter[str] = Counter()
        self.wrong: list[str] = []

    def both(self, label: str, known: Sequence[Tensor], calls: dict[str, _Call], fails_at: int) -> dict[str, Any]:
        """Returns the results by executor, None for a call that raised. fails_at: the launch that fails, or 0."""
        spans = sorted({(one.data_ptr(), one.data_ptr() + one.nbytes) for one in known})
        starts = [start for start, _ in spans]
        found, made = {}, {}
        for name, call in calls.items():
            run = (lambda runner, *given: self._counted(runner, *given)) if name == "C++" else self._runner.run_here
            self._driver.reset()
            self._driver.fail_launch(fails_at)
            made[name], error = None, ""
            with mock.patch.object(self._runner, "run", run):
                try:
                    made[name] = call()
                except (RuntimeError, TypeError, ValueError) as raised:
                    error = "a launch" if "is to fail" in self._driver.refusals[1] else f"{raised}"[:60]
            self._driver.fail_launch(0)
            launches = [
                (one.kernel, one.grid, one.threads, one.shared_bytes, _places(one.parameters, spans, starts))
                for one in self._driver.launches()
            ]
            self.num_launches += len(launches)
            found[name] = launches, error, [_form_of(one) for one in made[name] or ()]
        one, other = found.values()
        if one != other:
            self.wrong.append(f"{label}: {next((a, b) for a, b in zip(one, other, strict=True) if a != b)}"[:3000])
        self.errors[one[1] or "none"] += 1
        return made

    def _counted(self, runner: Any, *given: Any) -> Any:
        is_native = runner._native is not None
        made = self._run(runner, *given)
        self.in_extension += made is not None and is_native
        return made


class _Altered(_Compared):
    """Gives C++ another dropout site, which the comparison must notice."""

    def _counted(self, runner: Any, inputs: Any, numbers: Any) -> Any:
        return super()._counted(runner, inputs, (*numbers[:-1], numbers[-1] + 1))


def _places(parameters: bytes, spans: list[tuple[int, int]], starts: list[int]) -> tuple[int, ...]:
    """Returns parameters as words of 8 bytes. Addresses outside of known memory are reduced to their last bits."""
    whole = len(parameters) // 8 * 8
    words = []
    for i in range(0, whole, 8):
        word = int.from_bytes(parameters[i : i + 8], "little")
        if word >> 32 in _ADDRESSES:
            place = bisect.bisect_right(starts, word) - 1
            if place < 0 or word >= spans[place][1]:
                word = word % 16 - 16
        words.append(word)
    return *words, int.from_bytes(parameters[whole:], "little")


def _form_of(one: Tensor | None) -> Any:
    return None if one is None else (one.dtype, tuple(one.shape), one.stride(), one.requires_grad)


def _cast(layer: Any, rng: random.Random) -> None:
    p = rng.choice(list(layer.parameters()))
    p.data = p.data.to(rng.choice((torch.float32, torch.bfloat16)))


class _Sequence:
    """A layer, and forward passes that wait for their backward pass."""

    def __init__(self, seed: int, compared: _Compared) -> None:
        from bert_fast.modules.layer import BertLayer

        self._rng, self._compared, self._label = random.Random(seed), compared, f"sequence {seed}"
        torch.manual_seed(seed)
        precision = self._rng.choice(("fp32", "bf16", "autocast"))
        self._layer: Any = BertLayer(CONFIG, 0).train(self._rng.random() < 0.8)
        if precision == "bf16":
            self._layer.to(torch.bfloat16)
        self._dtype = torch.float32 if precision == "fp32" else torch.bfloat16
        self._autocast = precision == "autocast"
        self._waiting: list[tuple[dict[str, tuple[Tensor, Tensor]], list[Tensor]]] = []

    def run(self) -> None:
        for _ in range(self._rng.randint(1, 6)):
            action = self._rng.random()
            if action < 0.5:
                self._forward()
            elif action < 0.75:
                self._backward()
            else:
                self._rng.choice((*CHANGES, _cast) if not self._waiting else (*MOVES, _cast))(self._layer, self._rng)
        while self._waiting:
            self._backward()

    def _fails_at(self) -> int:
        return self._rng.randint(1, 6) if self._rng.random() < 0.1 else 0

    def _forward(self) -> None:
        from bert_fast.modules.call import Call, first_rows
        from bert_fast.ops.packing import Packing

        lengths = [self._rng.choice(_LENGTHS) for _ in range(self._rng.randint(1, 4))]
        ends = torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)
        packing = Packing.from_cu_seqlens(ends, max(lengths), sum(lengths))
        call = Call(packing, torch.tensor([7]) if self._rng.random() < 0.7 else None)
        if self._rng.random() < 0.3:
            call = call.with_rows(first_rows(packing))
        given = torch.zeros(sum(lengths), 32, dtype=self._dtype)
        if self._rng.random() < 0.1:
            given = torch.cat((given, given), dim=1)[:, :32]  # not contiguous
        needs = self._rng.random() < 0.8
        inputs = {name: given.detach().requires_grad_(needs) for name in self._executors()}
        records = self._rng.random() < 0.8

        def forward(x: Tensor) -> list[Tensor]:
            with torch.set_grad_enabled(records), torch.autocast("cpu", torch.bfloat16, enabled=self._autocast):
                return [self._layer(x, call=call)]

        others = [one for one in call.of_layers.tensors if one is not None]
        known = [given, *others, *self._layer.parameters()]
        calls = {name: lambda x=x: forward(x) for name, x in inputs.items()}
        made = self._compared.both(self._label, known, calls, self._fails_at())
        if all(each is not None and each[0].requires_grad for each in made.values()):
            self._waiting.append(({name: (inputs[name], made[name][0]) for name in made}, [given, *others]))

    def _backward(self) -> None:
        if not self._waiting:
            return
        passes, known = self._waiting.pop(self._rng.randrange(len(self._waiting)))
        dy = torch.zeros_like(next(iter(passes.values()))[1])

        def backward(x: Tensor, y: Tensor) -> list[Tensor | None]:
            x.grad = None
            self._layer.zero_grad()
            y.backward(dy)
            return [x.grad, *[p.grad for p in self._layer.parameters()]]

        calls = {name: lambda pair=passes[name]: backward(*pair) for name in self._executors() if name in passes}
        self._compared.both(self._label, [dy, *known, *self._layer.parameters()], calls, self._fails_at())

    def _executors(self) -> list[str]:
        """Returns the executors in random order, so that either may run first after a change."""
        names = ["C++", "Python"]
        self._rng.shuffle(names)
        return names


def random_sequences(driver: NullDriver) -> dict[str, Any]:
    """Returns the calls in which C++ and Python differ, and how many calls were compared, by error."""
    import bert_fast  # noqa: F401  with the answers of a GPU
    from bert_fast import use_backend
    from bert_fast.triton._programs import forget

    driver.note_parameters()
    compared, altered = _Compared(driver), _Altered(driver)
    gc.disable()
    count = int(os.environ.get("BERT_FAST_SEQUENCES", NUM_SEQUENCES))
    first = int(os.environ.get("BERT_FAST_FIRST_SEQUENCE", 0))
    with use_backend("triton"):
        for seed in range(first, first + count):
            _Sequence(seed, compared).run()
            if seed % 500 == 0:
                gc.collect()
        with mock.patch("bert_fast.triton._native_program.exchange", return_value=None):
            forget()  # programs made from here on read tensors by methods
            for seed in range(NUM_BY_METHODS):
                _Sequence(seed, compared).run()
        for seed in range(NUM_ALTERED):
            _Sequence(seed, altered).run()
    return {
        "sequences": count, "calls": sum(compared.errors.values()), "launches": compared.num_launches,
        "in extension": compared.in_extension, "errors": dict(compared.errors), "wrong": compared.wrong[:3],
        "num wrong": len(compared.wrong), "altered": len(altered.wrong),
    }  # fmt: skip


SEQUENCE_SCENARIOS = {"random_sequences": random_sequences}
