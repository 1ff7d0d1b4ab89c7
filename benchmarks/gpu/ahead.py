"""What is compiled before it is timed: beside part `compile` of `make gpu`, or on a machine without a GPU.

On such a machine everything is compiled and launched over the null driver and nothing runs. Triton finds what it
compiles by its own files, its version and ptxas, and the cache holds absolute paths: so this wants the Triton, and the
Python, of the GPU's machine, and there the project at the same path. Only what is loaded stays in the cache, a seventh
of it.

Importing this module imports no torch.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import astuple, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from benchmarks.families import family_names
from benchmarks.gpu.run import Run, is_dry

KEPT = (".cubin", ".hsaco", ".json")  # machine code, and what Triton knows of it
OTHERS = ("whole", "tuned", "steps")  # what is compiled beside families


def in_order(families: Sequence[str]) -> list[str]:
    """What part `ahead` compiles, attention first, which takes longest; of all families also OTHERS."""
    others = OTHERS if set(families) == set(family_names()) else ()
    return [*sorted(families, key=lambda name: name != "attention"), *others]


def calls(what: str, run: Run) -> Iterator[tuple[str, Callable[[Any], object]]]:
    """Name and call, given a device, of what is to be compiled.

    what: a family, for its cases; "whole", for whole models; "tuned", for all that part `gemm` times; "steps",
        for the training steps of BERT; "compiled", for those that part `compiled` times, by torch.compile.
    """
    if what == "whole":
        from benchmarks.gpu.whole import whole_cases

        yield from ((case.name, case.check) for case in whole_cases("smoke", is_dry=True))
    elif what == "tuned":
        import torch

        from benchmarks.gemm_tuning import timing

        if run.device == "cpu":
            return
        # Under the null driver tensors say that they are a GPU's and lie on the CPU.
        gpu: Any = SimpleNamespace(type="cuda") if is_dry(run.device) else torch.device(run.device)
        for product, tile in timing.preparations(gpu):
            yield f"{product.name} {tile}", partial(timing.prepare, product, tile)
    elif what == "steps":
        for case in step_cases():
            yield from ((f"{case.name} {name}", partial(run_steps, case, name)) for name in ("bert_fast", "fused"))
    elif what == "compiled":
        from benchmarks.models.step_cases import CASES, SMALL_CASES
        from benchmarks.models.training_steps import compile_step

        for case in SMALL_CASES if run.size == "small" else CASES:
            if case.is_compiled:
                yield case.name, lambda device, case=case: compile_step(case, device, run.compile_backend)
    else:
        from benchmarks.kernels.case import Use
        from benchmarks.kernels.timing import results_of
        from benchmarks.registry import kernel_cases

        for case in kernel_cases(Use.SMOKE | Use.GPU, [what]):
            yield case.name, lambda device, case=case: results_of(case.make(device))


def step_cases() -> list[Any]:
    """The training steps of BERT that parts `steps`, `finetune` and `profile` run; one layer has all their kernels."""
    from benchmarks.models import finetuning_steps
    from benchmarks.models.step_cases import CASES

    return [*finetuning_steps.CASES, *(case for case in CASES if case.is_bert)]


def run_steps(case: Any, provider: str, device: Any) -> None:
    """Evaluation and two steps of a contestant."""
    import torch

    from benchmarks.models import finetuning_steps, training_steps

    is_finetuning = isinstance(case, finetuning_steps.FinetuneCase)
    module: Any = finetuning_steps if is_finetuning else training_steps
    kind: Any = finetuning_steps.FinetuneContestant if is_finetuning else training_steps.Contestant
    one_layer = replace(case.size, layers=1)
    case = type(f"OneLayer{type(case).__name__}", (type(case),), {"size": one_layer})(*astuple(case))
    contestant = kind(provider, case, module.make_batch(case, device), module.draw_donor(case, device), "eager")
    contestant.model.eval()
    with torch.no_grad():
        contestant.loss()
    contestant.model.train()
    contestant.steps(2)


def prune(cache: Path) -> tuple[int, int]:
    """Leaves in Triton's cache what is loaded from it: (kernels, bytes). Launchers are a machine's own and go."""
    kernels = size = 0
    for folder in filter(Path.is_dir, cache.iterdir()):
        files = list(folder.iterdir())
        is_kernel = any(path.suffix in KEPT[:2] for path in files)
        for path in files:
            if is_kernel and path.suffix in KEPT:
                size += path.stat().st_size
            else:
                path.unlink()
        if is_kernel:
            kernels += 1
        else:
            folder.rmdir()
    return kernels, size
