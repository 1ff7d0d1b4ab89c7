"""The tables of fused classes: nothing is missing in them, whatever was imported before."""

import subprocess
import sys

import pytest

pytest.importorskip("transformers", reason="the package transformers is not installed")

from bert_fast.huggingface import classes
from bert_fast.huggingface.families import LIBRARIES, TABLE
from bert_fast.huggingface.family import IS_VERSION_4, ONLY_IN_VERSION_4, ONLY_IN_VERSION_5, Family

KNOWN = {original: computing for library in LIBRARIES for _, original, computing in classes.known(library)}


@pytest.mark.parametrize("library", LIBRARIES, ids=lambda library: library.split(".")[-2])
def test_every_name_of_a_record_is_a_class_of_transformers(library: str) -> None:
    family = LIBRARIES[library]
    missing = {*family.models, *family.parts} - {name for name, _, _ in classes.known(library)}
    other = ONLY_IN_VERSION_5 if IS_VERSION_4 else ONLY_IN_VERSION_4
    assert all(name in other for name in missing), missing


@pytest.mark.parametrize("family", TABLE, ids=lambda family: family.inner)
def test_records_name_attributes_of_their_classes_only(family: Family) -> None:
    assert {*family.names, *family.missing} <= {*family.models, *family.parts}


@pytest.mark.parametrize("original", KNOWN, ids=lambda cls: cls.__name__)
def test_fused_classes_go_by_the_original_name(original: type) -> None:
    fused = classes.fused_class(original)
    assert fused is not None and fused is not original and issubclass(fused, KNOWN[original])
    assert issubclass(fused, original) and fused.__mro__.index(KNOWN[original]) < fused.__mro__.index(original)
    names = [(cls.__name__, cls.__qualname__, cls.__module__) for cls in (fused, original)]
    assert names[0] == names[1]
    assert classes.fused_class(original) is fused and classes.fused_class(fused) is fused
    assert classes.original_class(fused) is original and classes.original_class(original) is None


def test_no_library_is_imported_for_another() -> None:
    code = """if True:
        import sys, torch
        from transformers import BertConfig, BertModel
        import bert_fast
        model = BertModel(BertConfig(hidden_size=8, num_attention_heads=2, num_hidden_layers=1, intermediate_size=8))
        assert not bert_fast.why_not(bert_fast.fuse(model))
        from bert_fast.huggingface.families import LIBRARIES
        print(sorted(library for library in LIBRARIES if library in sys.modules))
    """
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout == "['transformers.models.bert.modeling_bert']\n", done.stdout + done.stderr
