"""What keeps a fused SentenceTransformer or CrossEncoder from packing texts: it is said, and the outputs are theirs."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from bert_fast import fuse, why_not
from bert_fast.testing.tolerances import ABSOLUTE

library = pytest.importorskip("sentence_transformers")
transformers = pytest.importorskip("transformers")
modules = pytest.importorskip("sentence_transformers.sentence_transformer.modules")
from sentence_transformers.base.modules import Transformer  # noqa: E402

WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "a", "small", "red", "house", "on", "the", "hill", "##s", "."]
TEXTS = ["a small red house", "the hills", "", "On the house . " * 20, "a b c"]
ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def small_dir(make: Callable[..., nn.Module], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small random encoder with a tokenizer."""
    folder = tmp_path_factory.mktemp("small")
    (folder / "vocab.txt").write_text("\n".join(WORDS))
    make(vocab_size=len(WORDS) + 1).save_pretrained(folder)
    transformers.BertTokenizer(str(folder / "vocab.txt"), model_max_length=24).save_pretrained(folder)
    return folder


@pytest.fixture
def small(small_dir: Path) -> Callable[..., Any]:
    """A function to a model of it, for vectors or, of three labels, scores."""

    def build(cls: Any = library.SentenceTransformer) -> Any:
        if cls is library.CrossEncoder:
            torch.manual_seed(3)
            return cls(str(small_dir), num_labels=1, device="cpu")
        return cls(modules=[Transformer(str(small_dir)), modules.Pooling(32)], device="cpu")

    return build


def _close(found: Any, wanted: Any) -> None:
    assert found.shape == wanted.shape
    slack = 20 * ABSOLUTE["sentence_embeddings"] * max(1.0, np.abs(wanted).max())
    np.testing.assert_allclose(found, wanted, rtol=0, atol=slack)


def _is_padded(call: Callable[[], Any], monkeypatch: pytest.MonkeyPatch) -> tuple[Any, bool]:
    """What a call returns, and whether texts were tokenized by transformers for it."""
    calls = []
    original = transformers.PreTrainedTokenizerBase.__call__
    with monkeypatch.context() as patch:
        patch.setattr(
            transformers.PreTrainedTokenizerBase,
            "__call__",
            lambda self, *args, **kwargs: calls.append(1) or original(self, *args, **kwargs),
        )
        return call(), bool(calls)


def _doubled(module: Any, args: Any, output: Any) -> Any:
    name = "sentence_embedding" if "sentence_embedding" in output else "token_embeddings"
    output[name] = output[name] * 2
    return output


def _own_preprocess(model: Any) -> None:
    original = model[0].preprocess
    model[0].preprocess = lambda inputs, **kwargs: original([f"the {text}" for text in inputs], **kwargs)


def _own_forward(model: Any) -> None:
    original = model[1].forward
    model[1].forward = lambda features, **kwargs: _doubled(None, None, original(features, **kwargs))


def _normalizer(model: Any) -> None:
    from tokenizers import normalizers

    model.tokenizer.backend_tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Lowercase(), normalizers.Replace("house", "hill")]
    )


def _template(model: Any) -> None:
    from tokenizers.processors import TemplateProcessing

    model.tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="[CLS] $A [SEP] [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )


# how a reason begins -> what is done to the model
CHANGES: dict[str, Callable[[Any], Any]] = {
    "hooks are registered at the model": lambda m: m.register_forward_hook(_doubled),
    "transformer: hooks are registered": lambda m: m[0].register_forward_hook(_doubled),
    "pooling: hooks are registered": lambda m: m[1].register_forward_hook(_doubled),
    "the encoder's forward is replaced, or hooks": lambda m: m[0].model.register_forward_hook(lambda *_: None),
    "transformer: its preprocess is replaced": _own_preprocess,
    "pooling: its forward is replaced": _own_forward,
    "config.output_hidden_states": lambda m: setattr(m[0].model.config, "output_hidden_states", True),
    "processing_kwargs": lambda m: setattr(m[0], "processing_kwargs", {"text": {"max_length": 5}}),
    "tokenizer: padding_side: 'left'": lambda m: setattr(m.tokenizer, "padding_side", "left"),
    "tokenizer: truncation_side: 'left'": lambda m: setattr(m.tokenizer, "truncation_side", "left"),
    "tokenizer: tokenizer.json: expected the normalizer": _normalizer,
    "tokenizer: tokenizer.json: expected a post-processor": _template,
}


@pytest.mark.parametrize("reason", CHANGES)
def test_reasons(small: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, reason: str) -> None:
    """Before fuse or after it, also after calls that were packed."""
    untouched, before, after = small(), small(), fuse(small())
    plain, padded = _is_padded(lambda: after.encode(TEXTS), monkeypatch)
    assert why_not(after) == [] and not padded
    for model in (untouched, before, after):
        CHANGES[reason](model)
    wanted = untouched.encode(TEXTS)
    for model in (fuse(before), after):
        assert [found[: len(reason)] for found in why_not(model)] == [reason]
        found, padded = _is_padded(lambda model=model: model.encode(TEXTS), monkeypatch)
        assert padded
        _close(found, wanted)
    if not reason.startswith(("config", "the encoder")):
        assert np.abs(plain - wanted).max() > 1e-3, "the change counts"


@pytest.mark.slow
def test_a_compiled_model(small: Callable[..., Any]) -> None:
    model = fuse(small())
    model.compile(backend="eager")
    assert why_not(model) == ["the model is compiled"]
    _close(model.encode(TEXTS[:1]), small().encode(TEXTS[:1]))


def test_further_modules_and_other_encoders(small: Callable[..., Any], small_dir: Path) -> None:
    model = fuse(library.SentenceTransformer(modules=[Transformer(str(small_dir))], device="cpu"))
    assert why_not(model) == ["modules: Transformer, not Transformer, Pooling, ..."]
    model = fuse(small(library.CrossEncoder))
    model[0].model.bert.register_forward_hook(lambda *_: None)
    assert why_not(model) == ["bert: it is replaced, or hooks are registered"]


def test_tokenizers_that_change_stay_ours(small: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Changes that bert_fast's tokenizer knows, too, count from the next call on."""
    model, untouched = fuse(small()), small()
    outputs = [model.encode(TEXTS)]
    changes: list[Callable[[Any], Any]] = [
        lambda m: setattr(m, "max_seq_length", 7),
        lambda m: m.tokenizer.add_tokens(["b"]),
        lambda m: setattr(m.tokenizer.backend_tokenizer, "normalizer", _cased()),
    ]
    for change in changes:
        for each in (model, untouched):
            change(each)
        found, padded = _is_padded(lambda: model.encode(TEXTS), monkeypatch)
        assert not padded and why_not(model) == []
        _close(found, untouched.encode(TEXTS))
        assert all(np.abs(found - other).max() > 1e-3 for other in outputs)
        outputs.append(found)


def _cased() -> Any:
    from tokenizers.normalizers import BertNormalizer

    return BertNormalizer(lowercase=False)


def test_both_forms_of_the_post_processor(small: Callable[..., Any]) -> None:
    from tokenizers.processors import BertProcessing

    model, untouched = fuse(small(library.CrossEncoder)), small(library.CrossEncoder)
    for each in (model, untouched):
        each.tokenizer.backend_tokenizer.post_processor = BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    assert why_not(model) == []
    pairs = [("a house", "on the hill"), ("red", "")]
    _close(model.predict(pairs), untouched.predict(pairs))


def test_tokenizers_without_type_ids(small: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    model, untouched = fuse(small(library.CrossEncoder)), small(library.CrossEncoder)
    pairs = [("a house", "on the hill"), ("red", "")]
    other = untouched.predict(pairs)
    for each in (model, untouched):
        each.tokenizer.model_input_names = ["input_ids", "attention_mask"]
    found, padded = _is_padded(lambda: model.predict(pairs), monkeypatch)
    assert not padded
    _close(found, untouched.predict(pairs))
    assert np.abs(found - other).max() > 1e-4


def test_nothing_of_it_is_imported() -> None:
    """A BERT is fused without sentence-transformers, whether it is installed or not."""
    code = (
        "import sys; sys.modules['sentence_transformers'] = None\n"
        "import transformers, bert_fast\n"
        "model = transformers.BertModel(transformers.BertConfig(vocab_size=9, hidden_size=8, num_hidden_layers=1, "
        "num_attention_heads=1, intermediate_size=8))\n"
        "with bert_fast.patch_transformers(): pass\n"
        "assert bert_fast.why_not(bert_fast.fuse(model)) == []\n"
        "del sys.modules['sentence_transformers']; bert_fast.fuse(model)\n"
        "assert not [n for n in sys.modules if n.startswith('sentence_tr') or n.endswith('sentence_models')]"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_versions_without_a_loop_of_their_own_to_pack_are_fused_from_padded_features(small_dir: Path) -> None:
    """Those before 6.2, which tokenize in `encode`; `why_not` says so."""
    code = (
        "import sys, sentence_transformers as library, bert_fast\n"
        "from sentence_transformers.base.modules import Transformer\n"
        "from sentence_transformers.sentence_transformer.modules import Pooling\n"
        "for cls in (library.SentenceTransformer, library.CrossEncoder, library.SparseEncoder): del cls._inference\n"
        "del library.MultiVectorEncoder._inference, library.base.BaseModel._inference\n"
        "made = lambda: library.SentenceTransformer(modules=[Transformer(sys.argv[1]), Pooling(32)], device='cpu')\n"
        "model, features = bert_fast.fuse(made()), made().preprocess(['a small red house', 'the hills'])\n"
        "found, wanted = (m.eval()(dict(features))['sentence_embedding'] for m in (model, made()))\n"
        "assert (found - wanted).abs().max() < 1e-4\n"
        "assert bert_fast.why_not(model)[0].startswith('sentence_transformers: a version before 6.2')"
    )
    run = [sys.executable, "-c", code, str(small_dir)]
    done = subprocess.run(run, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
