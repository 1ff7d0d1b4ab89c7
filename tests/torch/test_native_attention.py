"""Native attention on packed sequences, per instruction set, against fp64 and the dropout specification."""

from types import ModuleType, SimpleNamespace

import pytest
import torch
from torch import Tensor

from bert_fast.reference import dropout as spec
from bert_fast.testing.compare import assert_close_to_truth

SITE = spec.dropout_site(spec.DropoutSite.ATTENTION_PROBS, layer=5)

# name -> (queries, keys) of every sequence; None: as many keys as queries
BATCHES: dict[str, list[tuple[int, int]]] = {
    "one token": [(1, 1)],
    "short": [(5, 5), (16, 16), (17, 17), (0, 0), (3, 3)],
    "blocks": [(24, 24), (96, 96), (100, 100)],
    "long": [(200, 200)],
    "cross": [(7, 70), (30, 1), (4, 0), (0, 6), (130, 33)],
    "no keys at all": [(4, 0)],
}


def make_case(lens: list[tuple[int, int]], positions: str, head_dim: int, num_heads: int = 3) -> SimpleNamespace:
    """Packed inputs; q, k and v lie in one tensor where the lengths agree, so their tokens are far apart.

    positions: "plain" 0, 1, 2, ..; "shifted" 5, 6, 7, ..; "gaps" increasing with holes, drawn for queries and keys
    apart, so that causal leaves some queries without keys.
    """
    cu_q, cu_k = (torch.tensor([0, *side]).cumsum(0).to(torch.int32) for side in zip(*lens, strict=True))
    total_q, total_k = int(cu_q[-1]), int(cu_k[-1])

    def coords(side: int, total: int) -> Tensor:
        rows = [torch.full((pair[side],), 2 * i) for i, pair in enumerate(lens)]
        orders = {
            "plain": torch.arange,
            "shifted": lambda n: torch.arange(n) + 5,
            "gaps": lambda n: torch.randperm(3 * n)[:n].sort().values + 9,
        }
        places = [orders[positions](pair[side]) for pair in lens]
        return torch.stack([torch.cat(rows), torch.cat(places)], dim=1).to(torch.int32).reshape(total, 2)

    if total_q == total_k:
        q, k, v = (
            t.reshape(total_q, num_heads, head_dim) for t in torch.randn(total_q, 3, num_heads * head_dim).unbind(1)
        )
    else:
        q, k, v = (torch.randn(total, num_heads, head_dim) for total in (total_q, total_k, total_k))
    return SimpleNamespace(
        q=q,
        k=k,
        v=v,
        dout=torch.randn(total_q, num_heads, head_dim),
        cu_q=cu_q,
        cu_k=cu_k,
        coords_q=coords(0, total_q),
        coords_k=coords(1, total_k),
        softmax_scale=0.4,
    )


def composed(case: SimpleNamespace, seed: Tensor, p: float, causal: bool, dtype: torch.dtype) -> dict[str, Tensor]:
    """Sequence by sequence with PyTorch's own operators and autograd."""
    q, k, v = (t.detach().to(dtype).clone().requires_grad_() for t in (case.q, case.k, case.v))
    num_heads = q.shape[1]
    out, lse = torch.zeros_like(q), torch.full((num_heads, len(q)), -torch.inf, dtype=dtype)
    for i in range(len(case.cu_q) - 1):
        of_q, of_k = (slice(int(edges[i]), int(edges[i + 1])) for edges in (case.cu_q, case.cu_k))
        coords_q, key_positions = case.coords_q[of_q], case.coords_k[of_k, 1]
        if not len(coords_q) or not len(key_positions):
            continue
        scores = torch.einsum("qad,kad->aqk", q[of_q], k[of_k]) * case.softmax_scale
        if causal:
            scores = scores.masked_fill(key_positions > coords_q[:, 1:2], -torch.inf)
        lse[:, of_q] = scores.detach().logsumexp(-1)
        probs = torch.softmax(scores.masked_fill(scores.isneginf().all(-1, keepdim=True), 0.0), -1)
        probs = torch.where(scores.isneginf().all(-1, keepdim=True), 0.0, probs)
        keep = spec.attention_keep_mask(seed, SITE, coords_q, len(key_positions), num_heads, p).to(dtype)
        out[of_q] = torch.einsum("aqk,kad->qad", probs * keep * spec.dropout_scale(p), v[of_k])
    if out.requires_grad:
        out.backward(case.dout.to(dtype))
    gradients = {n: torch.zeros_like(t) if t.grad is None else t.grad for n, t in (("dq", q), ("dk", k), ("dv", v))}
    return {"out": out.detach(), "lse": lse, **gradients}


def run_native(
    native: ModuleType, case: SimpleNamespace, seed: int, p: float, causal: bool, num_threads: int = 2
) -> dict[str, Tensor]:
    total_q, num_heads, head_dim = case.q.shape
    out = torch.full((total_q, num_heads, head_dim), torch.nan)
    lse = torch.full((num_heads, total_q + 3), torch.nan)
    # Gradients are slices of a wider tensor, as those of one joint projection are.
    grads = {
        n: torch.full((len(t), 2, *t.shape[1:]), torch.nan)[:, 1]
        for n, t in (("dq", case.q), ("dk", case.k), ("dv", case.v))
    }
    inputs = {n: getattr(case, n).data_ptr() for n in ("q", "k", "v", "cu_q", "cu_k", "coords_q")}
    inputs["coords_k"] = case.coords_k.data_ptr() if causal else 0  # dropout names keys by their ordinals
    common = inputs | {
        "out": out.data_ptr(),
        "lse": lse.data_ptr(),
        "num_sequences": len(case.cu_q) - 1,
        "num_q_tokens": total_q,
        "num_k_tokens": len(case.k),
        "num_heads": num_heads,
        "head_dim": head_dim,
        "softmax_scale": case.softmax_scale,
        "seed": seed,
        "site": SITE,
        "threshold": spec.dropout_threshold(p),
        "scale": spec.dropout_scale(p),
        "causal": causal,
        "lse_stride": total_q + 3,
        "num_threads": num_threads,
    }
    common |= {f"{n}_stride": getattr(case, n).stride(0) for n in ("q", "k", "v")}
    native.attention_fwd(**common)
    addresses = {n: g.data_ptr() for n, g in grads.items()} | {f"{n}_stride": g.stride(0) for n, g in grads.items()}
    del common["out"]
    native.attention_bwd(dout=case.dout.data_ptr(), **addresses, **common)
    assert lse[:, total_q:].isnan().all(), "lse was written beyond its tokens"
    return {"out": out, "lse": lse[:, :total_q], **grads}


# (dropout_p, head_dim, positions, causal)
VARIANTS = [
    (0.0, 32, "plain", False),
    (0.1, 64, "plain", False),
    (0.1, 48, "shifted", True),
    (0.0, 64, "gaps", True),
    (0.1, 32, "gaps", False),
    (0.1, 64, "plain", True),
    (0.1, 40, "plain", False),
    (0.0, 5, "gaps", True),
    (0.1, 16, "gaps", True),
    (1.0, 16, "shifted", False),
]


@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize(("p", "head_dim", "positions", "causal"), VARIANTS)
def test_attention(native: ModuleType, batch: str, positions: str, causal: bool, p: float, head_dim: int) -> None:
    case = make_case(BATCHES[batch], positions, head_dim)
    seed = int(torch.randint(-(2**62), 2**62, (1,)))
    actual = run_native(native, case, seed, p, causal)
    plain, truth = (composed(case, torch.tensor([seed]), p, causal, dtype) for dtype in (torch.float32, torch.float64))
    dead = torch.isneginf(truth["lse"])
    assert torch.equal(torch.isneginf(actual["lse"]), dead)
    assert (actual["out"][dead.t()] == 0).all()
    for name in ("out", "dq", "dk", "dv"):
        assert_close_to_truth("native_attention", name, actual[name], plain[name], truth[name])
    assert_close_to_truth("native_attention", "lse", actual["lse"][~dead], plain["lse"][~dead], truth["lse"][~dead])


@pytest.mark.parametrize("positions", ["plain", "shifted", "gaps"])
@pytest.mark.parametrize("causal", [False, True])
def test_probabilities_one_by_one(native: ModuleType, positions: str, causal: bool) -> None:
    """Keys and values are unit vectors: q holds the scores, out the probabilities after dropout, dq their gradient."""
    lens = [(24, 48), (48, 48), (30, 17)]
    case = make_case(lens, positions, head_dim=48, num_heads=2)
    units = torch.cat([torch.eye(48)[:keys] for _, keys in lens])[:, None].expand(-1, 2, -1).contiguous()
    case.k, case.v, case.q = units, units, case.q * 15
    seed = int(torch.randint(-(2**62), 2**62, (1,)))
    actual = run_native(native, case, seed, 0.1, causal)
    plain, truth = (composed(case, torch.tensor([seed]), 0.1, causal, t) for t in (torch.float32, torch.float64))
    for name in ("out", "dq"):
        assert_close_to_truth("native_attention", name, actual[name], plain[name], truth[name])
    # The mask itself, not just values near 0: whatever is not tiny is kept or dropped as specified.
    assert (truth["out"] == 0).any()
    assert (actual["out"][truth["out"] == 0] == 0).all()
    assert (actual["out"][truth["out"] > 1e-30] > 0).all()


@pytest.mark.parametrize("num_keys", [1, 2, 31, 32, 33, 127, 128, 129, 512, 1000])
def test_masks_are_the_specification(native: ModuleType, num_keys: int) -> None:
    """Equal scores and one key's value at a time: out is nonzero exactly where that key is kept."""
    num_queries, num_heads = 16, 3
    case = make_case([(num_queries, num_keys)], "gaps", head_dim=16, num_heads=num_heads)
    case.q.zero_()
    found = torch.zeros(num_heads, num_queries, num_keys, dtype=torch.bool)
    for first in range(0, num_keys, 16):
        case.v = torch.zeros(num_keys, num_heads, 16)
        case.v[first : first + 16] = torch.eye(16)[: num_keys - first, None]
        out = run_native(native, case, -12345, 0.3, causal=False)["out"].transpose(0, 1)
        found[:, :, first : first + 16] = out[:, :, : num_keys - first] != 0
    seed = torch.tensor([-12345])
    assert torch.equal(found, spec.attention_keep_mask(seed, SITE, case.coords_q, num_keys, num_heads, 0.3))


@pytest.mark.parametrize("p", [0.0, 0.1])
def test_a_single_key_gives_scores_no_gradient(native: ModuleType, p: float) -> None:
    case = make_case([(1, 1), (30, 1)], "plain", head_dim=40)
    case.softmax_scale = 0.25  # a scaled score is then the same number with and without a rounding of its own
    actual = run_native(native, case, 3, p, causal=False)
    assert not actual["dq"].any() and not actual["dk"].any(), "its probability is 1 whatever the score"
    assert actual["dv"].any()


def extreme_scores() -> SimpleNamespace:
    """One head; keys and values are unit vectors, so q holds the scores and out the probabilities."""
    case = make_case([(3, 40), (1, 40)], "plain", head_dim=48, num_heads=1)
    case.k = torch.eye(48)[:40].repeat(2, 1)[:, None].contiguous()
    case.v = case.k.clone()
    case.q[0] = 3e38  # all equal, far beyond exp's range
    case.q[1] = -3e38
    case.q[2, 0, :20] = -1e4  # underflows beside the other half
    case.q[2, 0, 20:] = 0.0
    case.softmax_scale = 1.0
    # No lse can hold 3e38 + log 40, so a backward pass that starts from lse cannot give the first two rows' gradients.
    case.dout[:2] = 0.0
    return case


def test_extreme_scores(native: ModuleType) -> None:
    case = extreme_scores()
    actual = run_native(native, case, 0, 0.0, causal=False)
    plain, truth = (composed(case, torch.tensor([0]), 0.0, False, t) for t in (torch.float32, torch.float64))
    for name in ("out", "dq", "dv"):  # dk is dq's numbers times scores, not of a size that a floor fits
        assert_close_to_truth("native_attention", name, actual[name], plain[name], truth[name])
    assert actual["dk"].isfinite().all()
    assert not actual["out"][2, 0, :20].any(), "e^-10000 is 0"
    assert (actual["lse"][0, :2] == case.q[:2, 0, 0]).all(), "log 40 is lost beside 3e38"


@pytest.mark.parametrize("softmax_scale", [0.3535, -0.3535])
@pytest.mark.parametrize("size", [1e3, 1e10, 1e12, 1e16, 1e20, 1e30])
def test_large_scores_are_scaled_without_losing_the_largest(
    native: ModuleType, size: float, softmax_scale: float
) -> None:
    case = make_case([(7, 7), (0, 0), (40, 40)], "plain", head_dim=1)  # products are exact: equal scores stay equal
    case.q, case.k = case.q.abs() * size, case.k.sign()
    case.softmax_scale = softmax_scale
    actual = run_native(native, case, 0, 0.0, causal=False)
    plain, truth = (composed(case, torch.tensor([0]), 0.0, False, t) for t in (torch.float32, torch.float64))
    assert_close_to_truth("native_attention", "out", actual["out"], plain["out"], truth["out"])
    assert all(actual[name].isfinite().all() for name in ("dq", "dk", "dv"))


def test_nan_is_not_hidden(native: ModuleType) -> None:
    case = extreme_scores()
    case.k[40 + 7, 0, 7] = torch.nan  # one score of the second sequence
    case.q[3] = torch.randn(48)
    out = run_native(native, case, 0, 0.0, causal=False)["out"]
    assert out[3, 0, :40].isnan().all()
    assert out[:3].isfinite().all(), "a NaN stays in its sequence"


def test_bits_do_not_depend_on_threads(native: ModuleType) -> None:
    case = make_case([(90, 90), (20, 20), (128, 128), (64, 64)], "plain", head_dim=64)
    one, many = (run_native(native, case, 7, 0.1, causal=False, num_threads=n) for n in (1, 5))
    for name in one:
        assert torch.equal(one[name], many[name]), name


def test_bad_arguments_are_named(native: ModuleType) -> None:
    case = make_case([(4, 4)], "plain", head_dim=257)
    with pytest.raises(ValueError, match="head_dim"):
        run_native(native, case, 0, 0.0, causal=False)
    case = make_case([(4, 4)], "plain", head_dim=16)
    case.cu_k = torch.tensor([4, 0], dtype=torch.int32)
    with pytest.raises(ValueError, match="cu_seqlens"):
        run_native(native, case, 0, 0.0, causal=False)
    case = make_case([(4, 4)], "plain", head_dim=16)
    for position in (1, 0):  # the same position twice; a step back
        case.coords_k[2, 1] = position
        with pytest.raises(ValueError, match="coords_k"):
            run_native(native, case, 0, 0.0, causal=True)
    case = make_case([(1, 65537)], "plain", head_dim=16, num_heads=1)  # one more than a head has names for
    with pytest.raises(ValueError, match="cu_seqlens_k"):
        run_native(native, case, 0, 0.1, causal=False)
