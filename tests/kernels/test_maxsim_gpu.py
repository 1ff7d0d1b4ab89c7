"""The Triton kernels of maxsim on a GPU, at full shapes: scores and gradients; the same bits twice."""

from itertools import accumulate

import pytest
import torch

from bert_fast import ops
from bert_fast.reference.maxsim import Maxsim, maxsim_bwd, maxsim_fwd
from bert_fast.testing.compare import assert_close_to_truth

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("columns", [96, 128, 768])
@pytest.mark.parametrize("number", [1, 32, 128])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_scores_and_gradients(dtype: torch.dtype, number: int, columns: int) -> None:
    """Where rounding decides which of two tokens is chosen, the gradient is judged for what was chosen."""
    lengths = torch.randint(0, 301, (number,)).tolist()
    offsets = [torch.tensor([0, *accumulate(t)], dtype=torch.int32, device="cuda") for t in ([32] * number, lengths)]
    queries, documents = (
        torch.nn.functional.normalize(torch.randn(int(t[-1]), columns, device="cuda"), dim=1).to(dtype) for t in offsets
    )
    upstream = torch.randn(number, number, device="cuda")
    a = Maxsim(queries, documents, offsets[0], offsets[1], max(lengths))
    runs = []
    for _ in range(2):
        leaves = [t.detach().clone().requires_grad_() for t in (queries, documents)]
        scores = ops.maxsim(
            *leaves, cu_seqlens_q=offsets[0], cu_seqlens_d=offsets[1], max_seqlen_d=a.max_seqlen_d, backend="triton"
        )
        runs.append([scores.detach(), *torch.autograd.grad(scores, leaves, upstream)])
    assert all(map(torch.equal, *runs)), "two runs differ"
    from bert_fast.triton import maxsim as kernels

    chosen = kernels.maxsim_fwd(a)[1]
    wide = a._replace(queries=queries.double(), documents=documents.double())
    truth = [maxsim_fwd(wide)[0], *maxsim_bwd(wide, upstream.double(), chosen, {"queries", "documents"}).values()]
    plain = [maxsim_fwd(a)[0], *maxsim_bwd(a, upstream, chosen, {"queries", "documents"}).values()]
    for name, actual, stock, exact in zip(("scores", "dqueries", "ddocuments"), runs[0], plain, truth, strict=True):
        assert_close_to_truth("maxsim", name, actual, stock, exact)
