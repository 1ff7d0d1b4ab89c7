"""What a layer keeps for backward: the list adds up, the goal holds, the page is the list."""

from typing import Any

import pytest
import torch
from torch import nn

from benchmarks import saved_bytes as command
from benchmarks.kit.bert import VOCAB_SIZE
from benchmarks.kit.saved_bytes import saved_bytes
from benchmarks.models.forward_backward import make_models

pytest.importorskip("transformers", reason="the package transformers is not installed")


def test_saved_bytes_counts_storages_once_and_no_parameters() -> None:
    model = nn.Linear(8, 16, bias=False)
    x = torch.randn(4, 8, requires_grad=True)

    def forward() -> torch.Tensor:
        y = model(x)  # saves x and the weight
        return (y * y.view(16, 4).view(4, 16)).sum()  # saves y twice, one storage

    assert saved_bytes(model, forward) == 4 * (4 * 8 + 4 * 16)


def test_saved_bytes_tells_freed_storages_apart() -> None:
    x = torch.randn(1000, requires_grad=True)

    def forward() -> torch.Tensor:
        y = x
        for _ in range(5):
            y = y.sin()  # saves its input; without a reference each could land where the last one was
        return y

    assert saved_bytes(nn.Identity(), forward) == 5 * 4 * 1000


@pytest.fixture(scope="module")
def lists() -> dict[str, Any]:
    return command.layer_lists("base", 1, 512)


def test_a_layer_keeps_at_most_35_percent_of_the_eager_layer(lists: dict[str, Any]) -> None:
    assert 0.1 < command.share(lists) <= command.GOAL == 0.35


def test_the_list_adds_up_to_what_one_more_layer_costs() -> None:
    input_ids = torch.randint(1000, VOCAB_SIZE, (2, 33))
    totals: dict[str, list[int]] = {"bert_fast": [], "transformers": []}
    for num_layers in (1, 2):
        for name, model in zip(totals, make_models("minilm", 0.1, num_layers), strict=True):
            model.config._attn_implementation = "eager"
            model.train()
            totals[name].append(saved_bytes(model, lambda: model(input_ids=input_ids).last_hidden_state))  # noqa: B023
    listed = command.layer_lists("minilm", 2, 33)
    assert {name: sum(one.nbytes for one in saved) for name, saved in listed.items()} == {
        name: two - one for name, (one, two) in totals.items()
    }


def test_nothing_is_listed_twice_and_the_total_is_the_sum(lists: dict[str, Any]) -> None:
    for saved in lists.values():
        rows = command.table(saved)
        sizes = [float(row.rsplit("|", 2)[1].strip(" *")) for row in rows[2:]]
        assert len(rows) == len(saved) + 3
        assert sum(sizes[:-1]) == pytest.approx(sizes[-1], abs=0.0005 * len(sizes))
    names = {name for one in lists["transformers"] for name in one.saved_by}
    assert {"softmax", "gelu", "native_layer_norm"} <= names
    assert all("softmax" not in one.made_by for one in lists["bert_fast"])
    parts = [float(part.rsplit(" ", 1)[1]) for part in command.by_op(lists["transformers"]).split(", ")]
    assert parts == sorted(parts, reverse=True)
    assert sum(parts) == pytest.approx(sum(one.nbytes for one in lists["transformers"]) / 2**20, abs=0.05 * len(parts))


def test_the_page_has_the_list(lists: dict[str, Any]) -> None:
    text = command.PAGE.read_text(encoding="utf-8")
    for one in lists["bert_fast"]:
        assert f"| {one.made_by} | {one.saved_by[0]} | {', '.join(one.saved_by[1:])} |" in text, (
            "run `python -m benchmarks.saved_bytes --write`"
        )
    ours = text.split("## bert_fast")[1].split("##")[0]
    assert ours.count("\n| ") == len(lists["bert_fast"]) + 3
    total = 8 * sum(one.nbytes for one in lists["bert_fast"]) / 2**20  # the page is of 8 sequences
    assert f"| **{total:.3f}** |" in ours


def test_the_command_stores_the_page_and_fails_beyond_the_goal(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(command, "PAGE", tmp_path / "docs" / "page.md")
    (tmp_path / "docs").mkdir()
    arguments = ["--shape", "minilm", "--batch-size", "1", "--length", "128"]
    monkeypatch.setattr(command, "GOAL", 0.9)
    assert command.main([*arguments, "--write"]) == 0
    printed = capsys.readouterr().out
    assert printed in command.PAGE.read_text() and "| mlp_fwd output 1 | mlp_fwd |" in printed
    monkeypatch.setattr(command, "GOAL", 0.01)
    assert command.main(arguments) == 1
