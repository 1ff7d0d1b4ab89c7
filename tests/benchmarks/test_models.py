"""Whole-model cases: what is compared with what, and what a call costs at one token."""

import pytest

import bert_fast
from benchmarks import table
from benchmarks.models.families import FAMILIES
from benchmarks.models.forward_backward import make_models, padded_batch
from benchmarks.registry import CASES, FAMILY_CASES, FUSED_CASES
from bert_fast.testing.tolerances import ABSOLUTE

transformers = pytest.importorskip("transformers", reason="the package transformers is not installed")


@pytest.mark.parametrize("is_fused", [False, True])
def test_both_sides_are_one_model(is_fused: bool) -> None:
    ours, theirs = make_models("minilm", 0.0, num_layers=1, is_fused=is_fused)
    assert isinstance(ours, transformers.BertModel) == is_fused and type(ours) is not type(theirs)
    assert {p.data_ptr() for p in ours.parameters()}.isdisjoint(p.data_ptr() for p in theirs.parameters())
    batch = padded_batch([5, 3])
    outputs = [model.eval()(**batch).last_hidden_state[batch["attention_mask"].bool()] for model in (ours, theirs)]
    assert (outputs[0] - outputs[1]).abs().max() <= ABSOLUTE["minilm_embeddings"]


def test_fused_cases_have_names_and_goals_of_their_own() -> None:
    assert {case.name for case in CASES}.isdisjoint(case.name for case in FUSED_CASES)
    for processor, shown in zip(table.fused(), table.render_fused().split("\n\n**"), strict=True):
        name, _, *rows = shown.removeprefix("**").splitlines()
        assert name == f"{processor}**"
        assert len(rows) == 2 + len(FUSED_CASES) and "| fused |" in rows[0]
    assert "fuse/" not in table.render_models() + table.render_pieces()


@pytest.mark.parametrize("family", FAMILIES)
def test_of_every_family_both_sides_are_one_model(family: str) -> None:
    fused, theirs = make_models("tiny", 0.0, is_fused=True, family=family)
    assert (
        type(theirs).__name__ == f"{family}Model"
        and isinstance(fused, type(theirs))
        and type(fused) is not type(theirs)
    )
    assert theirs.config.hidden_size == 32 and theirs.config.vocab_size == FAMILIES[family].vocab_size
    batch = padded_batch([5, 3], family)
    assert (batch["input_ids"][1, 3:] == theirs.config.pad_token_id).all() and not bert_fast.why_not(fused, **batch)
    outputs = [model.eval()(**batch).last_hidden_state[batch["attention_mask"].bool()] for model in (fused, theirs)]
    assert (outputs[0] - outputs[1]).abs().max() <= ABSOLUTE["minilm_embeddings"]


def test_families_have_a_table_of_their_own() -> None:
    names = {case.name for case in FAMILY_CASES}
    assert len(names) == len(FAMILY_CASES) and names.isdisjoint(case.name for case in (*CASES, *FUSED_CASES))
    assert {case.family for case in FAMILY_CASES} == FAMILIES.keys() - {"Bert"}
    rows = table.render_families().splitlines()
    assert len(rows) == 2 + len(FAMILY_CASES) and rows[2].startswith("| RoBERTa base, ")
    assert "families/" not in table.render_models() + table.render_pieces() + table.render_fused()
