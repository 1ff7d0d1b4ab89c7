"""Without the C++ extension the torch back-end gives the same results and the very same dropout masks."""

import functools
import os
import subprocess
import sys
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import bert_fast
from bert_fast import native, ops
from bert_fast.reference.dropout import attention_keep_mask, keep_mask
from bert_fast.testing.compare import assert_close_to_truth
from bert_fast.torch import _native

SITE = 11
LENGTHS = [17, 0, 30, 1]
SEED = torch.tensor([-(2**61) + 99])


@pytest.fixture(autouse=True)
def _needs_native() -> None:
    if native.load() is None:
        pytest.skip(str(native.unavailable_reason()))


def _layout() -> ops.Packing:
    cu_seqlens = torch.tensor([0, *LENGTHS]).cumsum(0).int()
    return ops.Packing.from_cu_seqlens(cu_seqlens, max(LENGTHS), sum(LENGTHS))


def _both(monkeypatch: pytest.MonkeyPatch, function: Callable[[], dict[str, Tensor]]) -> list[dict[str, Tensor]]:
    """What function gives with the extension, and without."""
    assert _native.routines(torch.zeros(1)) is not None
    with_extension = function()
    monkeypatch.setattr(native, "load", lambda: None)
    assert _native.routines(torch.zeros(1)) is None
    return [with_extension, function()]


def _gradients(output: Tensor, **leaves: Tensor) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    output.backward(torch.randn(output.shape, generator=generator).to(output.dtype))
    return {f"d{name}": leaf.grad for name, leaf in leaves.items() if leaf.grad is not None}


def _dropout(dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    generator, coords = torch.Generator().manual_seed(0), _layout().coords
    x = torch.randn(len(coords), 45, generator=generator).to(dtype).requires_grad_()
    y = ops.dropout(x, 0.3, seed=SEED, coords=coords, site=SITE)
    return {"y": y, **_gradients(y, x=x)}


def _dropout_add_layer_norm(dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    generator, coords = torch.Generator().manual_seed(0), _layout().coords
    x, residual = (torch.randn(len(coords), 45, generator=generator).to(dtype).requires_grad_() for _ in range(2))
    x_bias, weight, bias = (torch.randn(45, generator=generator).to(dtype).requires_grad_() for _ in range(3))
    arguments = dict(x_bias=x_bias, dropout_p=0.3, seed=SEED, coords=coords, site=SITE)
    y = ops.dropout_add_layer_norm(x, residual, weight, bias, **arguments)
    return {"y": y, **_gradients(y, x=x, residual=residual, x_bias=x_bias, weight=weight, bias=bias)}


def _attention(
    dtype: torch.dtype = torch.float32, head_dim: int = 32, tables: tuple[str, ...] = ()
) -> dict[str, Tensor]:
    generator, packing = torch.Generator().manual_seed(0), _layout()
    shape = (len(packing.coords), 3, head_dim)
    q, k, v = (torch.randn(shape, generator=generator).to(dtype).requires_grad_() for _ in range(3))
    size = (2 * max(LENGTHS) - 1, *shape[1:])
    of = {name: torch.randn(size, generator=generator).to(dtype).requires_grad_() for name in tables}
    out = ops.attention(
        q, k, v, cu_seqlens_q=packing.cu_seqlens, max_seqlen_q=packing.max_seqlen, dropout_p=0.3, seed=SEED,
        coords_q=packing.coords, site=SITE, **of,
    )  # fmt: skip
    return {"out": out, **_gradients(out, q=q, k=k, v=v, **of)}


@pytest.mark.parametrize(
    ("op", "function"),
    [
        ("dropout", _dropout),
        ("dropout_add_layer_norm", _dropout_add_layer_norm),
        ("attention", _attention),
        ("attention", functools.partial(_attention, head_dim=20)),  # no whole vectors
        ("attention", functools.partial(_attention, tables=("relative_keys",))),
        ("attention", functools.partial(_attention, tables=("relative_queries",))),
        ("attention", functools.partial(_attention, tables=("relative_keys", "relative_queries"))),
    ],
)
def test_ops_agree(monkeypatch, op, function):
    truth = function(torch.float64)
    actual, plain = _both(monkeypatch, function)
    assert actual.keys() == plain.keys() == truth.keys()
    for name in truth:
        assert_close_to_truth(op, name, actual[name], plain[name], truth[name])
        assert_close_to_truth(op, name, plain[name], actual[name], truth[name])


def test_dropout_is_bit_equal(monkeypatch):
    actual, plain = _both(monkeypatch, _dropout)
    assert all(torch.equal(actual[name], plain[name]) for name in actual)
    assert torch.equal(actual["y"] != 0, keep_mask(SEED, SITE, _layout().coords, 45, 0.3))


def test_masks_inside_layer_norm(monkeypatch):
    """dx is 0 exactly where the element was dropped, and forward adds exactly the kept ones to the residual."""
    coords = _layout().coords
    keep = keep_mask(SEED, SITE, coords, 45, 0.3)

    def forward() -> dict[str, Tensor]:
        ones, zeros = torch.ones(len(coords), 45), torch.zeros(len(coords), 45)
        _, h, _, _ = torch.ops.bert_fast.dropout_add_layer_norm_fwd(
            ones, zeros, None, ones[0], zeros[0], 1e-12, 0.3, SEED, coords, SITE, "input", "torch"
        )
        return {"h": h}

    for result in _both(monkeypatch, lambda: forward() | _dropout_add_layer_norm()):
        assert torch.equal(result["h"] != 0, keep)
        assert torch.equal(result["dx"] != 0, keep)


def test_masks_inside_attention(monkeypatch):
    """With identity values the output is the dropped probability matrix; dv shows the mask of backward."""
    length, heads = 32, 2
    index = torch.arange(length, dtype=torch.int32)
    coords = torch.stack((index * 0 + 3, index), 1)
    keep = attention_keep_mask(SEED, SITE, coords, length, heads, 0.4)

    def probabilities() -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(0)
        q, k = (torch.randn(length, heads, length, generator=generator) for _ in range(2))
        eye = torch.eye(length).unsqueeze(1).repeat(1, heads, 1)
        v = eye.clone().requires_grad_()
        out = ops.attention(
            q, k, v, cu_seqlens_q=torch.tensor([0, length]).int(), max_seqlen_q=length, dropout_p=0.4, seed=SEED,
            coords_q=coords, site=SITE,
        )  # fmt: skip
        out.backward(eye)
        return {"forward": out.transpose(0, 1), "backward": v.grad.permute(1, 2, 0)}

    for result in _both(monkeypatch, probabilities):
        assert torch.equal(result["forward"] != 0, keep)
        assert torch.equal(result["backward"] != 0, keep)


@pytest.mark.parametrize(
    "name", ["BertModel", "BertForMaskedLM", "BertForPreTraining", "BertForSequenceClassification"]
)
def test_models_agree(monkeypatch, name):
    config = bert_fast.BertConfig(
        vocab_size=50, hidden_size=64, num_hidden_layers=2, num_attention_heads=2, intermediate_size=96,
        max_position_embeddings=40, num_labels=3, initializer_range=0.2,
    )  # fmt: skip
    model = getattr(bert_fast, name)(config).train()
    ids, mask = torch.randint(1, 50, (4, 33)), torch.ones(4, 33)
    mask[1, 20:], mask[2], mask[3, :5] = 0, 0, 0
    labels = {
        "BertForMaskedLM": {"labels": ids},
        "BertForPreTraining": {"labels": ids, "next_sentence_label": torch.tensor([0, 1, 1, 0])},
        "BertForSequenceClassification": {"labels": torch.tensor([0, 1, 2, 0])},
    }.get(name, {})

    def step() -> dict[str, Tensor]:
        model.zero_grad()
        output = model(ids, mask, dropout_seed=SEED, **labels)
        score = output.loss if labels else output.last_hidden_state.sin().sum() + output.pooler_output.sum()
        score.backward()
        gradients = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
        return {"output": output[0].detach().clone(), **gradients}

    actual, plain = _both(monkeypatch, step)
    model.double()
    truth = step()
    for key, value in truth.items():
        scale = max(1.0, value.abs().max().item())
        kind = "output" if key == "output" else "gradient"
        results = [t / scale for t in (actual[key], plain[key], value)]
        assert_close_to_truth("fast_model", kind, *results)


def test_the_environment_switches_the_extension_off():
    code = (
        "import torch; from bert_fast import native, ops; assert native.load() is None; "
        "assert 'BERT_FAST_NATIVE=0' in native.unavailable_reason(); "
        "c = torch.tensor([[0, 0], [5, 7]], dtype=torch.int32); "
        "y = ops.dropout(torch.ones(2, 20), 0.5, seed=torch.tensor([3]), coords=c, site=1); "
        "print((y != 0).int().flatten().tolist())"
    )
    environment = {**os.environ, "BERT_FAST_NATIVE": "0"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    coords = torch.tensor([[0, 0], [5, 7]], dtype=torch.int32)
    y = ops.dropout(torch.ones(2, 20), 0.5, seed=torch.tensor([3]), coords=coords, site=1)
    assert done.stdout.strip() == str((y != 0).int().flatten().tolist())
