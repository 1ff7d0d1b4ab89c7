"""Compiled kernels over the driver that runs nothing: no bad launch, no needless compilation, nothing costs more."""

import ast
import re
from pathlib import Path

import pytest

from bert_fast import native
from tests.null_driver.server import run
from tools.null_driver import table
from tools.null_driver.device_answers import answer_for_gpu
from tools.null_driver.saved_bytes import layer_list

ROOT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.slow


def test_no_step_launches_more_than_was_written_down() -> None:
    found = run("launches", with_bodies=False)
    assert found["risen"] == [], "python -m tools.null_driver --kernels shows what; --record writes it down"
    assert found["refusals"] == [0, ""]
    assert {row[0] for row in found["rows"]} <= set(table.read())


def test_a_layer_keeps_what_it_keeps_on_the_cpu_and_a_dropout_mask() -> None:
    """In bf16. The page has the list."""
    pytest.importorskip("transformers", reason="the package transformers is not installed")
    found, on_cpu = run("saved_bytes", with_bodies=False), {name: tensor.nbytes for name, tensor in layer_list(1, 512)}
    of_mask = {name: (shape, nbytes) for name, shape, nbytes in found if name not in on_cpu}
    assert of_mask == {"mask": ([12, 512 // 16 + 1, 512 // 2], 12 * 33 * 256 * 4)}
    assert {name: nbytes for name, _, nbytes in found if name not in of_mask} == on_cpu
    text = (ROOT / "docs" / "saved_bytes.md").read_text(encoding="utf-8").split("## On a GPU")[1]
    rows = re.findall(r"\n\| (\w+) \|.*\| ([\d.]+) \|", text)
    assert rows == [(name, f"{8 * nbytes / 2**20:.3f}") for name, _, nbytes in found], "the page is of 8 sequences"


def test_lengths_compile_nothing_anew() -> None:
    found = run("shapes", with_bodies=False)
    assert {batch: kernels for batch, kernels in found["compiled"].items() if kernels} == {}
    assert found["refusals"] == [0, ""]
    assert len(found["compiled"]) > 30


def test_nothing_is_left_to_compile_after_warm_up() -> None:
    found = run("warm_up", with_bodies=False)
    assert {batch: kernels for batch, kernels in found["compiled"].items() if kernels} == {}
    assert found["refusals"] == [0, ""]
    assert min(found["warmed"].values()) > 20
    assert len(found["compiled"]) > 300


def test_the_host_waits_once_for_padding_and_once_for_labelled_words() -> None:
    """Packed input costs nothing; of words, which of them carry a label, where only these go through the head."""
    found = run("syncs", with_bodies=False)
    padding, labels = ["tolist"], ["nonzero"]
    words = "BertForMaskedLM bf16"
    wanted = {case: ([] if "packed" in case else padding) for case in found}
    wanted |= {f"{words} bert_fast": padding + labels, f"{words} packed": labels}
    assert {case: forward for case, (forward, *_) in found.items()} == wanted
    assert {case: others for case, (_, *others) in found.items() if others != [[], []]} == {}
    assert len(found) == 10 and {f"{words} bert_fast", f"{words} packed"} <= found.keys()


@pytest.mark.parametrize("device", ["sm_80", "sm_90"])
def test_asked_for_the_same_bits_every_batch_has_the_same_kernels(device: str) -> None:
    found = run("batch_invariant", device)
    assert {case: asked for case, (_, asked) in found.items()} == {case: [1, 0] for case in found}
    # As they are, half precision has several lists; and the library's products are in none, as nobody sees its kernels.
    as_they_are = {case: both for case, (both, _) in found.items()}
    assert len(found) == 3 and all(num_products > 0 for _, num_products in as_they_are.values())
    lists = [num_lists for case, (num_lists, _) in as_they_are.items() if "fp32" not in case]
    assert len(lists) == 2 and min(lists) > 5, "the test would not see a difference"


def test_compilations_are_noticed() -> None:
    kernel = ["_count_kernel"]
    assert run("compilations") == [kernel, [], kernel, [], kernel]


@pytest.mark.parametrize("device", ["sm_100", "sm_120"])
def test_other_devices_take_every_launch(device: str) -> None:
    found = run("one_step", device, with_bodies=False)
    assert found["refusals"] == [0, ""]
    assert {"_gemm_kernel", "_attention_bwd_short_kernel", "adamw_step_kernel"} <= set(found["kernels"])
    assert (found["maps"] > 0) == (device == "sm_100"), "descriptors are for processors that were looked at"


def test_kernels_without_bodies_are_asked_for_the_same() -> None:
    assert run("one_step", with_bodies=False) == run("one_step")


ACCEPTED = {"grid", "48 KB", "all shared memory", "tensor map"}
MESSAGES = {
    "no programs": "grid of 0 x 1 x 1",
    "too many programs": "grid of 2147483648",
    "too many rows of programs": "invalid argument",
    "too many layers of programs": "invalid argument",
    "too many threads": "block of 1056 threads",
    "no function": "code 400",
    "shared memory not asked for": "at most 49152 were asked for",
    "no cubin": "image is invalid",
    "another kernel": "symbol not found",
}
TENSOR_MAPS = {
    "address": "no multiple of 16 bytes",
    "stride": "stride of 258 bytes",
    "far stride": f"stride of {2**40} bytes",
    "box": "side 257",
    "empty box": "side 0",
    "swizzle": "swizzled over 128",
    "row": "8 bytes in a row",
    "rank": "stride of 2 bytes",
    "size": "size 0",
    "type": "data type 16",
    "NaN": "NaN outside of integers",
}


def test_bad_launches_are_refused() -> None:
    answers = run("refusals")
    too_much = {"too much shared memory": "232449 bytes of shared memory asked for, a block has 232448"}
    wanted = MESSAGES | too_much | {f"tensor map: {fault}": message for fault, message in TENSOR_MAPS.items()}
    assert set(answers) == ACCEPTED | set(wanted)
    assert {name for name, answer in answers.items() if answer == "accepted"} == ACCEPTED
    assert {name: answers[name] for name, message in wanted.items() if message not in answers[name]} == {}


def test_a_device_has_limits_of_its_own() -> None:
    answers = run("refusals", "sm_80")
    assert "a block has 166912" in answers["too much shared memory"]
    assert "operation not supported" in answers["tensor map"]
    assert answers["all shared memory"] == "accepted"


def test_registers_are_those_that_ptxas_gave() -> None:
    found = run("resources")
    assert [one["ours"] for one in found] == [one["theirs"] for one in found]
    assert found[-1]["ours"]["STACK"] > 0, "no kernel spilled: nothing was compared"


def test_plans_launch_what_triton_launches() -> None:
    found = run("plans_ask_for_the_same", with_bodies=False)
    assert found["wrong"] == []
    assert found["refusals"] == [0, ""]
    kernels = {"_gemm_kernel", "_attention_fwd_kernel", "_attention_bwd_short_kernel", "adamw_step_kernel"}
    assert kernels <= found["compared"].keys() and len(found["compared"]) > 20


def test_layers_by_programs_launch_what_layers_launch() -> None:
    """With BERT_FAST_ALL_LAYERS=1: of all models, in minutes."""
    found = run("layers_by_programs", with_bodies=False)
    assert found["wrong"] == [] and found["untraced"] == 0
    assert found["refusals"] == [0, ""]
    assert {name: counts for name, counts in found["programs"].items() if max(counts, default=0) >= 10} == {}
    assert found["compared"] > 1000 and found["replayed"] > 100
    assert native.load() is None or found["in extension"][0] == 0 < found["in extension"][1]


def test_triton_launches_what_is_new_and_what_somebody_looks_at() -> None:
    found = run("who_launches")
    assert {call for call, (_, _, is_same) in found.items() if not is_same} == set()
    compiles = {
        "first", "of 16", "one", "wide", "wide stride", "integer for a float", "no tensor", "other dtype",
        "not aligned", "the other not aligned",
    }  # fmt: skip
    assert {call for call, (_, num_compiled, _) in found.items() if num_compiled} == compiles
    watched = {"enter hook", "exit hook", "replaced hook", "replaced run", "hook before a run"}
    elsewhere = {"wide again", "wide and negative", "another device is the current one"}
    assert {call for call, (by_triton, _, _) in found.items() if by_triton} == compiles | watched | elsewhere
    assert not found["at last"][0]


def test_plans_need_no_more_of_a_launcher_than_that_it_can_be_called() -> None:
    assert run("other_launchers", with_bodies=False) == {"same": True, "launches": 29, "refusals": [0, ""]}


def test_gpu_answers() -> None:
    """The questions that the package asks, each with the answer that a GPU's tensor gives."""
    answers = {
        "x.device.type == 'cpu'": False,
        "x.device.type != 'cuda'": False,
        "device.type not in ('cpu', 'cuda')": False,
        "x.device.type != 'meta' and x.device.type == 'cuda'": True,
        "x.is_cuda and not x.is_cpu": True,
        "x.device.index == -1": True,
        "autocast(x.device.type)": "cpu",  # torch is asked for what runs here
        "words.type == 'cpu'": True,
    }

    class Device:
        type, index = "cpu", None

    class Thing:
        device, is_cuda, is_cpu, type = Device, False, True, "cpu"

    names = {"x": Thing, "device": Device, "words": Thing, "autocast": str}
    for question, answer in answers.items():
        tree = ast.fix_missing_locations(answer_for_gpu(f"answer = {question}"))
        scope = dict(names)
        exec(compile(tree, "question", "exec"), scope)
        assert scope["answer"] == answer, question


PART = {"launches": {"_a_kernel": 2}, "tensor maps": 0, "products": 1, "small": 3, "python calls": 10}


def test_what_rises_is_named() -> None:
    recorded = {"step": {"forward": PART}}
    more = PART | {"launches": {"_a_kernel": 3, "_b_kernel": 1}, "small": {"add": 2, "sum": 2}, "products": 0}
    assert table.risen({"step": {"forward": more}}, recorded) == [
        "step, forward: 3 _a_kernel, at most 2 written down",
        "step, forward: 1 _b_kernel, at most 0 written down",
        "step, forward: 4 small, at most 3 written down",
    ]
    assert table.risen({"step": {"forward": PART}}, recorded) == []
    assert len(table.risen({"another": {"forward": PART}}, recorded)) == 4
