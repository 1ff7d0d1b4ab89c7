"""The tables of fused classes: nothing is missing in them, whatever was imported before."""

import pytest

pytest.importorskip("transformers", reason="the package transformers is not installed")

from bert_fast.huggingface import classes, containers, heads, models, token_heads, word_heads

TABLE = {**classes.MODELS, **classes.PARTS}
DEFINED = [
    value
    for module in (containers, heads, models, token_heads, word_heads)
    for name, value in vars(module).items()
    if name.startswith("FusedBert") and value.__module__ == module.__name__
]


def test_every_class_is_in_its_place() -> None:
    assert set(DEFINED) == set(TABLE.values())
    assert all(computing.__bases__[-1] is original for original, computing in TABLE.items())


@pytest.mark.parametrize("original", TABLE, ids=lambda cls: cls.__name__)
def test_fused_classes_go_by_the_original_name(original: type) -> None:
    fused = classes.fused_class(original)
    assert fused is not None and fused is not original and issubclass(fused, TABLE[original])
    names = [(cls.__name__, cls.__qualname__, cls.__module__) for cls in (fused, original)]
    assert names[0] == names[1]
    assert classes.fused_class(original) is fused and classes.fused_class(fused) is fused
    assert classes.original_class(fused) is original and classes.original_class(original) is None
