"""What the tests of the attention kernels share: a case as the launchers take it, its comparison, grids of features."""

import functools
import itertools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from bert_fast.reference import attention as reference
from bert_fast.reference.attention import Attention
from bert_fast.testing.attention import SEED, SITE, AttentionCase
from bert_fast.testing.compare import assert_close_to_truth

OP = "attention"
TOLERANCES = "triton_attention"
EXTRAS = ("bias", "relative_keys", "relative_queries")


def arguments_of(case: AttentionCase, inputs: dict[str, Tensor]) -> Attention:
    """The arguments of a case with these tensors. What a call does not need is None, as the op leaves it."""
    extras = {name: inputs.get(name) for name in EXTRAS}
    looks_up = case.causal or any(t is not None for t in extras.values())
    device = inputs["q"].device
    cu_q, cu_k, coords_q, coords_k = (t.to(device) for t in (*case.cu_seqlens(), *case.coords()))
    return Attention(
        q=inputs["q"],
        k=inputs["k"],
        v=inputs["v"],
        cu_seqlens_q=cu_q,
        cu_seqlens_k=cu_k,
        max_seqlen_q=max(case.lengths, default=0),
        max_seqlen_k=max(case.lengths if case.lengths_k is None else case.lengths_k, default=0),
        softmax_scale=case.scale,
        dropout_p=case.dropout_p,
        seed=SEED.to(device) if case.dropout_p else None,
        coords_q=coords_q if looks_up or case.dropout_p else None,
        coords_k=coords_k if looks_up else None,
        site=SITE if case.dropout_p else 0,
        causal=case.causal,
        **extras,
        sequence_order=None,
        keeps=True,
    )


def run(family: Any, a: Attention, dout: Tensor) -> dict[str, Tensor]:
    """out, lse and the gradient of every tensor by a back-end's launchers."""
    out, lse, mask = family.attention_fwd(a)
    wants = {name for name in EXTRAS if getattr(a, name) is not None}
    made = family.attention_bwd(a, dout, out, lse, mask, wants)
    assert made.keys() == {"q", "k", "v"} | wants
    return {"out": out, "lse": lse} | {f"d{name}": gradient for name, gradient in made.items()}


def truth_of(a: Attention, dout: Tensor) -> dict[str, Tensor]:
    """The same by the reference in fp64, from inputs as rounded as they are."""
    wide = (x.double() if isinstance(x, Tensor) and x.is_floating_point() else x for x in a)
    return run(reference, Attention(*wide), dout.double())


def check(
    family: Any,
    case: AttentionCase,
    dtype: torch.dtype,
    inputs: dict[str, Tensor] | None = None,
    units: dict[str, float] | None = None,
    **changes: Any,
) -> dict[str, Tensor]:
    """Compares every output with the fp64 reference on the same rounded inputs, which must stay as they were.

    inputs: instead of the case's own. units: where scores are large, what dq and dk are divided by before they are
    compared, as large scores are. changes: of arguments that change no result. Returns: the results.
    """
    inputs = case.inputs(dtype) if inputs is None else inputs
    a = arguments_of(case, inputs)
    before = {name: t.clone() for name, t in inputs.items()}
    actual = run(family, a._replace(**changes), inputs["dout"])
    for name, copy in before.items():
        assert torch.equal(inputs[name].nan_to_num(nan=7.0), copy.nan_to_num(nan=7.0)), f"{name} was written to"
    truth, plain = truth_of(a, inputs["dout"]), case.plain_of(before)
    plain["lse"] = reference.attention_fwd(a)[1]  # fp32 throughout
    assert actual.keys() == truth.keys() == plain.keys()
    has_keys = torch.isfinite(truth["lse"])
    assert torch.equal(actual["lse"] == -torch.inf, ~has_keys), "lse is -inf where no key is left, only there"
    for results in (actual, truth, plain):
        results["lse"] = results["lse"][has_keys]
    for name, result in actual.items():
        assert result.is_contiguous(), name
        unit, output = (1.0, name) if units is None else (units.get(name, 1.0), f"{name}_of_large")
        assert_close_to_truth(TOLERANCES, output, result / unit, plain[name] / unit, truth[name] / unit)
    assert not actual["out"].transpose(0, 1)[~has_keys].any(), "out is 0 where no key is left"
    assert not actual["dq"].transpose(0, 1)[~has_keys].any(), "dq is 0 where no key is left"
    return actual


def in_fused_buffer(inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    """q, k and v as parts of one buffer [T, 3, A, D], which holds NaN past the tokens; queries are the keys' tokens."""
    buffer = torch.stack([inputs[name] for name in "qkv"], dim=1)
    buffer = torch.cat([buffer, torch.full_like(buffer[:1], torch.nan)])[:-1]
    return inputs | dict(zip("qkv", buffer.unbind(1), strict=True))


def heads_first(inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    """q, k, v and dout as views of [A, T, D + 8], the rest of each row NaN."""

    def moved(t: Tensor) -> Tensor:
        tokens, heads, head_dim = t.shape
        memory = t.new_full((heads, tokens, head_dim + 8), torch.nan)
        view = memory[..., :head_dim].transpose(0, 1)
        return view.copy_(t)

    return inputs | {name: moved(inputs[name]) for name in ("q", "k", "v", "dout")}


def pairwise(**features: Sequence[Any]) -> list[dict[str, Any]]:
    """Combinations in which any two values of any two features meet at least once: far fewer than all of them."""
    names = list(features)
    every = {name: range(len(values)) for name, values in features.items()}
    missing = {
        ((a, i), (b, j)) for a, b in itertools.combinations(names, 2) for i in every[a] for j in every[b]
    }  # fmt: skip

    def key(a: str, i: int, b: str, j: int) -> tuple[tuple[str, int], tuple[str, int]]:
        return ((a, i), (b, j)) if names.index(a) < names.index(b) else ((b, j), (a, i))

    rows: list[dict[str, Any]] = []
    while missing:
        chosen = dict(min(missing))

        def gain(name: str, i: int, chosen: dict[str, int] = chosen) -> tuple[int, int]:
            """How many pairs a value completes; ties go round, so that values occur equally often."""
            met = sum(key(name, i, other, j) in missing for other, j in chosen.items())
            return met, -((i - len(rows)) % len(every[name]))

        for name in names:
            if name not in chosen:
                chosen[name] = max(every[name], key=functools.partial(gain, name))
        missing.difference_update(itertools.combinations([(name, chosen[name]) for name in names], 2))
        rows.append({name: features[name][chosen[name]] for name in names})
    return rows
