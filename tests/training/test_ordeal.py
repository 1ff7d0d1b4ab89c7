"""The table of `tests.training.ordeal`, as docs/training.md has it in short."""

import pytest

pytest.importorskip("accelerate")

GOES_ON = "goes on after step 9, same bits at the end"
NAMED = f"damage named, {GOES_ON}"


@pytest.mark.slow
def test_killed_damaged_and_gone_on_with() -> None:
    from tests.training.ordeal import table

    found = table()
    expected = {
        "kill -9, up to 5 times, in steps and in saves": "goes on each time, same bits at the end",
        "state.json removed, resume": GOES_ON,  # it was never complete
        "a bit of both checkpoints, resume": "refused, naming optimizer.pt",
        "flipped labels, resume": "refused, naming digests.train",
        "a bit of store.json, open": "damage named (store.json)",
        "tokens.bin cut off, open": "damage named (tokens.bin)",
    }
    for name in ("tokens.bin", "documents.bin", "sentences.bin"):
        expected[f"a bit of {name}, open"] = "not noticed"
        expected[f"a bit of {name}, verify"] = f"damage named ({name})"
    assert len(found) >= 19
    for tried, happened in found:
        default = "damage named (store.json)" if tried.endswith("verify") else NAMED
        assert happened == expected.pop(tried, default), tried
    assert not expected
