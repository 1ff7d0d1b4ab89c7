"""linear_cross_entropy with groups: classes that a row leaves out."""

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from bert_fast.ops.linear_cross_entropy import linear_cross_entropy
from bert_fast.testing.compare import assert_close_to_truth
from tests.ops.test_linear_cross_entropy import BACKENDS, IGNORE, OP, leaves, results, with_groups

# Infinite scores and masked lanes, whose results are selected away: NumPy says so, a GPU does not.
pytestmark = pytest.mark.filterwarnings("ignore:.* encountered in:RuntimeWarning")


def plain_with_groups(x: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, left_out: Tensor) -> Tensor:
    """Scores one by one, row by row."""
    logits, losses = F.linear(x, weight.to(x.dtype), None if bias is None else bias.to(x.dtype)), []
    for z, label, out in zip(logits if x.dtype == torch.float64 else logits.float(), labels, left_out, strict=True):
        if label != IGNORE:
            keep = ~out
            keep[label] = True
            losses.append(z[keep].logsumexp(0) - z[label])
    return torch.stack(losses).mean()


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("num_words", [1, 5, 70, 1100])
def test_groups_leave_classes_out(name: str, num_words: int, dtype: torch.dtype) -> None:
    """In memory of other dtypes and strides, too; a class that is left out gets no gradient of that row."""
    x, weight, bias, labels = leaves(7, num_words, dtype=dtype)
    groups, left_out = with_groups(7, num_words)
    relaid = {
        "row_groups": groups["row_groups"].int().repeat_interleave(2)[::2],
        "class_groups": groups["class_groups"],
    }
    doubles = [t.detach().double().requires_grad_() for t in (x, weight, bias)]
    truth = results(plain_with_groups(*doubles, labels, left_out), doubles, -5.0)
    stock = results(plain_with_groups(x, weight, bias, labels, left_out), (x, weight, bias), -5.0)
    for given in (groups, relaid):
        loss = linear_cross_entropy(x, weight, bias, labels, backend=name, **given)
        for key, actual in results(loss, (x, weight, bias), -5.0).items():
            assert_close_to_truth(OP, key, actual, stock[key], truth[key])


@pytest.mark.parametrize("name", BACKENDS)
def test_a_row_of_one_group_has_no_loss(name: str) -> None:
    """All but the label left out: there is nothing to choose from."""
    x, weight, bias, labels = leaves(6, 300)
    groups = {"row_groups": torch.zeros(6, dtype=torch.int64), "class_groups": torch.zeros(300, dtype=torch.int64)}
    found = results(linear_cross_entropy(x, weight, bias, labels, backend=name, **groups), (x, weight, bias))
    assert all(not t.any() for t in found.values())


def test_groups_of_no_use() -> None:
    x, weight, bias, labels = leaves(3, 5)
    rows, classes = torch.zeros(3, dtype=torch.int64), torch.zeros(5, dtype=torch.int64)
    for arguments, error, message in [
        ({"row_groups": rows}, ValueError, "class_groups: expected a tensor beside the other groups, got None"),
        ({"class_groups": classes}, ValueError, "row_groups: expected a tensor beside the other groups, got None"),
        ({"row_groups": classes, "class_groups": classes}, ValueError, r"row_groups: expected .*\[3\].*\[5\]"),
        ({"row_groups": rows, "class_groups": rows}, ValueError, r"class_groups: expected .*\[5\].*\[3\]"),
        ({"row_groups": rows.float(), "class_groups": classes}, TypeError, "row_groups: expected dtype int64 or int32"),
        (
            {"row_groups": rows, "class_groups": classes, "label_smoothing": 0.1},
            ValueError, "label_smoothing: expected 0 with row_groups, which leave classes out, got 0.1",
        ),
    ]:  # fmt: skip
        with pytest.raises(error, match=message):
            linear_cross_entropy(x, weight, bias, labels, **arguments)
