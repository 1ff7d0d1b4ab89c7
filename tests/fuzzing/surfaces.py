"""The registry: every surface, how many of its cases a run makes, and which case belongs to which.

A case is one integer. Its last two digits are the place of its surface in `SURFACES`, so that a number means the same
whatever mix of surfaces a run makes; new surfaces are added at the end.
"""

from collections.abc import Callable
from dataclasses import dataclass

from . import examples, model_files, modelling, ops, optimizers, planted, runs, tokenizers
from .case import Case

_PLACES = 100
_GIGABYTE = 1 << 30


@dataclass(frozen=True)
class Surface:
    """A part of what users call.

    run: makes the calls of one case. share: its part of a long run, relative to the others; in_ci: cases in CI.
    seconds: processor time that a case may take. memory: bytes that a worker may take beyond what it starts with.
    """

    name: str
    run: Callable[[Case], None]
    share: float
    in_ci: int
    seconds: float = 10.0
    memory: int = _GIGABYTE


SURFACES = (
    Surface("planted faults", planted.run, share=0, in_ci=0, seconds=0.5),
    Surface("ops", ops.run_public, share=20, in_ci=1000),
    Surface("registered ops", ops.run_registered, share=20, in_ci=1000),
    Surface("tokenizer", tokenizers.run_constructor, share=8, in_ci=500),
    Surface("tokenizer calls", tokenizers.run_calls, share=40, in_ci=1500),
    Surface("tokenizer files", model_files.run_tokenizer_files, share=8, in_ci=500),
    Surface("model files", model_files.run_model_files, share=8, in_ci=500),
    Surface("configurations", model_files.run_configurations, share=8, in_ci=500),
    Surface("optimizers", optimizers.run, share=8, in_ci=400),
    Surface("models", modelling.run_models, share=6, in_ci=300),
    Surface("modules", modelling.run_modules, share=6, in_ci=200),
    Surface("fused models", modelling.run_fused, share=4, in_ci=200),
    Surface("examples", examples.run_examples, share=6, in_ci=300),
    Surface("text sources", examples.run_sources, share=4, in_ci=200),
    Surface("token stores", examples.run_stores, share=4, in_ci=200),
    Surface("collators", examples.run_collators, share=10, in_ci=300),
    Surface("resumed runs", runs.run_resumed, share=0.5, in_ci=60, seconds=60),
    Surface("training arguments", runs.run_arguments, share=4, in_ci=200),
    Surface("commands", runs.run_commands, share=0.5, in_ci=60, seconds=60),
)


def surface_of(number: int) -> Surface:
    """The surface that a case belongs to."""
    return SURFACES[number % _PLACES]


def surface_named(name: str) -> Surface:
    """The surface of this name.

    Raises:
        KeyError: there is none.
    """
    return {surface.name: surface for surface in SURFACES}[name]


def numbers_of(surface: Surface, first: int, count: int) -> list[int]:
    """The numbers of `count` cases of a surface, from the `first` one on."""
    place = SURFACES.index(surface)
    return [(first + index) * _PLACES + place for index in range(count)]
