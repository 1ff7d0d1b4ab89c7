"""Programs run in C++: the launches of plans byte for byte, and what is refused, raised and given up."""

from typing import Any

import pytest

from bert_fast import native
from tests.null_driver.server import run

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(native.load() is None, reason=f"no extension: {native.unavailable_reason()}"),
]


@pytest.mark.parametrize("device", ["sm_80", "sm_90", "sm_100"])
def test_every_launch_of_a_step_is_that_of_its_plan(device: str) -> None:
    found = run("programs_ask_for_the_same", device, with_bodies=False)
    assert found["wrong"] == []
    assert found["refusals"] == [0, ""]
    kernels = {"_gemm_kernel", "_attention_fwd_kernel", "_attention_bwd_short_kernel", "adamw_step_kernel"}
    assert kernels <= found["compared"].keys() and len(found["compared"]) > 25


def test_programs_ask_for_the_shared_memory_of_kernels() -> None:
    found = run("programs_of_whole_kernels")
    assert found["wrong"] == []
    assert found["refusals"] == [0, ""]
    assert len(found["compared"]) > 15
    assert {"_attention_fwd_short_kernel", "_gemm_kernel"} <= {*found["with shared memory"]}


def test_a_program_is_for_any_number_of_rows() -> None:
    found = run("programs_of_any_size")
    assert found["wrong"] == []
    assert found["refusals"] == [0, ""]
    assert found["compared"]["_dropout_add_layer_norm_bwd_kernel"] == 50
    assert found["compared"]["_gemm_kernel"] > 40 and found["maps"] > 40
    assert found["programs"] < 10, "a program for each size"


def test_steps_share_memory_at_offsets() -> None:
    found = run("programs_in_one_block")
    assert found["wrong"] == []
    assert found["refusals"] == [0, ""]
    assert found["compared"] == 100 and found["programs"] == 2
    assert found["bad stride"].startswith("RuntimeError: _gemm_kernel: a tensor map of ")
    assert found["bad stride"].endswith(" with row stride 129: invalid argument")


@pytest.fixture(scope="module")
def faults() -> dict[str, Any]:
    return run("program_faults")


RUNS = {
    "fits", "list", "other numbers", "not specialised for this one", "operand at 16", "16 where compiled",
    "1 where compiled", "guard holds", "guard of a negative number", "offset of 16",
}  # fmt: skip
RUNS_WITHOUT_LAUNCH = {"no programs", "negative grid"}  # as Triton
RAISED = {
    "type of inputs": "inputs: expected a tuple or list of 2 tensors and None, got a dict of 0",
    "number of inputs": "inputs: expected a tuple or list of 2 tensors and None, got a tuple of 1",
    "type of an input": "inputs[1]: expected a tensor or None, got int",
    "number of numbers": "numbers: expected a tuple of 2 integers, got (5,)",
    "type of a number": "'float' object cannot be interpreted as an integer",
    "arguments": "run: expected inputs and numbers, got 1 arguments",
}


def test_what_a_kernel_was_not_compiled_for_is_refused_before_the_first_launch(faults: dict[str, Any]) -> None:
    found = dict(faults["programs_refuse"])
    assert {label: found.pop(label) for label in RAISED} == {
        label: f"TypeError: {text}" for label, text in RAISED.items()
    }
    assert {label for label, answer in found.items() if answer == [False, 1]} == RUNS
    assert {label for label, answer in found.items() if answer == [False, 0]} == RUNS_WITHOUT_LAUNCH
    assert {
        label for label, answer in found.items() if answer == [True, 0]
    } == found.keys() - RUNS - RUNS_WITHOUT_LAUNCH
    assert len(found) == 29


def test_forms_that_would_go_wrong_are_no_programs(faults: dict[str, Any]) -> None:
    found = dict(faults["forms_are_checked"])
    assert [label for label, is_one in found.items() if is_one] == ["as it is"]
    assert len(found) == 21


def test_cpp_and_python_make_the_same_launches_in_random_sequences_of_calls() -> None:
    found = run("random_sequences", with_bodies=False)
    assert found["wrong"] == []
    assert found["altered"] > 10, "the comparison does not notice a changed dropout site"
    assert found["calls"] > 500 and found["in extension"] > 350 and found["launches"] > 5000
    assert found["errors"]["a launch"] > 30


MIDDLE = {
    "a call": "Stop: here",
    "memory": "RuntimeError: ",
    "a negative size": "RuntimeError: Expected result >= 0 to be true",
    "no tensor": "TypeError: expected a tensor in slot 3, got NoneType",
    "too few results": "ValueError: ",
    "no results": "TypeError: 'NoneType' object is not iterable",
    "elsewhere in memory": "RuntimeError: _scale_kernel: an operand lies at no multiple of 16 bytes",
    "a launch": "RuntimeError: _scale_kernel: the launch failed: invalid argument",
}


def test_a_failure_in_the_middle_gives_up_all_tensors(faults: dict[str, Any]) -> None:
    found = dict(faults["programs_fail_in_the_middle"])
    assert found.pop("by the plan") == [[], True]
    assert {label: text for label, (text, _, _) in found.items() if not text.startswith(MIDDLE[label])} == {}
    assert {label: rest for label, (_, *rest) in found.items() if rest != [1, True]} == {}
    assert found.keys() == MIDDLE.keys()


def test_nothing_is_kept_by_runs_within_runs_and_threads(faults: dict[str, Any]) -> None:
    found = dict(faults["programs_keep_nothing"])
    assert found.pop("blocks") < 100
    assert found == {
        "references": True,
        "given back": [1006, True],
        "outputs": [[5, 3], None, True],
        "arguments": ["Tensor", "list", "int", "tuple", ["text", "a constant that is no other"]],
        "within": [1, True, 20],
        "threads": [[], 4 * 300 + 20],
        "given up": True,
    }


def test_a_kernel_whose_parameters_are_not_those_of_its_cubin_is_none(faults: dict[str, Any]) -> None:
    found = dict(faults["kernels_are_checked"])
    refused = {
        "an argument less": "parameters: expected 6, the cubin has 7",
        "one more": "parameters: expected 8, the cubin has 7",
        "another size": "bytes of parameter 1: expected 4, the cubin has 8",
        "another name": "no attributes of such a kernel",
        "no cubin": "no 64-bit ELF file",
        "another type": "a parameter of type i64 is not known",
    }
    assert {label: text for label, text in refused.items() if text not in found[label]} == {}
    assert found["as it is"] == "returned _scale_kernel"
    assert found["damaged"] == "ValueError returned _", "nothing was read, or nothing refused"
    assert found["known"] == [True, False, False, False, False]


def test_the_next_run_of_the_same_sizes_takes_memory_again() -> None:
    found = run("scratch")
    assert found["refusals"] == [0, ""]
    new, known = 2, 1  # a result, and scratch
    assert [found["first"], found["again"]] == [new, known]
    assert found["another stride"] == [True, new + known + known], "it has no say in sizes"
    assert found["more rows"] == [new, known]
    assert found["another program"] == [new, new, known], "one program keeps memory"
    assert found["an error"] == [True, 0, new, known]
    assert found["captured"] == [new, new, 0] and found["after it"] == [new, known], "a graph's memory is the graph's"
    assert found["streams"] == [new, known, new, new, new, known], "the default stream's"
    assert found["128 MB"] == [new, new, 0]
    assert found["in the middle"] == [2, 1, 1], "what is not kept is freed by its last step"
    assert found["an output"] == [new, new] and found["outputs apart"] == 4
    assert found["same launches"]
    assert found["kept"] == found["given up"] + 1
    assert found["threads"] == 2


def test_a_backward_pass_within_inference_mode_leaves_the_next_one_its_own_memory() -> None:
    pytest.importorskip("transformers", reason="the package transformers is not installed")
    found = run("backward_in_inference_mode", with_bodies=False)
    assert found == {"missing": [[], []], "refusals": [0, ""]}


def test_products_of_layers_are_those_of_pytorchs_functions() -> None:
    """With BERT_FAST_ALL_LAYERS=1: of all models, in minutes."""
    found = run("products_of_layers", with_bodies=False)
    assert found["wrong"] == []
    assert found["refusals"] == [0, "", 0, ""]
    assert found["compared"] > 500 and found["by address"] > 300


def test_products_of_any_shape_are_right() -> None:
    found = run("products_are_right")
    assert found["wrong"] == []
    assert found["refusals"] == [0, "", 0, ""]
    assert found["counts"].keys() == {"plain", "with bias", "in fp32", "added", "added in fp32"}
    assert min(found["counts"].values()) > 100


def test_pytorch_makes_products_that_cublaslt_does_not() -> None:
    found = run("product_faults")
    assert found["refusals"] == [0, "", 0, ""]
    ours, theirs = "by address", "by PyTorch"
    assert found["first and second run"] == [theirs, ours], "a program's first run is Python's"
    assert found["searches for an algorithm"] == [True, ours], "one for each form, not for each call"
    assert found["no rows"] == theirs
    assert found["no algorithm"] == [theirs, theirs] and found["known to have no algorithm"] == theirs
    assert found["others have one"] == ours
    assert found["fails"] == ["a product of [5, 8] and [8, 3]: cuBLASLt's status is 13", ours]
    assert found["accumulation in fp16"] == found["tuned"] == [theirs, theirs]
    assert found["again"] == ours
    assert found["no library"] == [theirs, theirs]
    assert [one.split(":")[0] for one in found["warnings"]] == ["BERT_FAST_PRODUCTS=cublaslt"]
