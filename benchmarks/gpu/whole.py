"""What is no op: a model beside transformers', the same bits in every batch, a captured step, products to fp32."""

import itertools
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

import bert_fast
from benchmarks.gpu.checks import Skipped, SmokeCase
from benchmarks.kit import bert
from benchmarks.models.build import our_model, their_model
from bert_fast import graphs
from bert_fast.backend import OpSpec, implementation
from bert_fast.devices import wide_products
from bert_fast.testing.compare import assert_close_to_truth, assert_same_values

IGNORED = -100
NO_DROPOUT = dict(hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
SMALLEST_SCALE = 1e-3  # of a gradient, of the largest of all: that of a key's bias is 0 but for rounding


def whole_cases(size: str, is_dry: bool) -> list[SmokeCase]:
    """size "small": what a CPU gets through in moments. is_dry: nothing is computed, so nothing is compared."""
    small = size == "small"
    shape, layers, lengths = (bert.TINY, 1, (7, 3, 1)) if small else (bert.BASE, 4, (384, 300, 1, 77, 128, 31, 256, 64))
    model = partial(_launch_model if is_dry else check_model, shape, layers, lengths)
    name = f"{shape.name} {layers} layers/autocast bf16"
    return [
        SmokeCase("whole/addmm/bf16 to fp32", partial(check_addmm, 64 if small else 2048)),
        SmokeCase(f"whole/masked_lm/{name}", model),
        SmokeCase(
            f"whole/batch_invariant/{shape.name} {layers} layers",
            partial(check_same_bits, shape, layers, lengths, is_dry),
        ),
        SmokeCase(f"whole/graph/{name}", partial(check_graph, shape, layers, lengths)),
        SmokeCase(f"whole/layers as graphs/{name}", partial(check_layers, shape, layers, lengths)),
    ]


def check_addmm(size: int, device: torch.device) -> dict[str, Any]:
    """acc + a @ b in fp32 of operands in bf16, as gradients of more than 2,176 labelled rows are summed up.

    `way` in the case's line is how: what `devices.wide_products` found. "addmm" is the library's in one launch.
    """
    if device.type != "cuda" or torch.version.hip is not None:
        raise Skipped("products that round to another dtype are CUDA's")
    a, b = (bert.normal(size, size, dtype=torch.bfloat16, device=device) / size**0.25 for _ in range(2))
    acc = torch.randn(size, size, device=device)
    truth, plain = acc.double() + a.double() @ b.double(), acc + a.float() @ b.float()
    from bert_fast.triton import _gemm

    with _gemm.by_library():
        _gemm.product(a, b, out=acc, accumulate=True)
    assert_close_to_truth("gemm", "c_of_half", acc, plain, truth)
    return {"way": wide_products[a.device, a.dtype]}


def _models(shape: bert.Size, layers: int, device: torch.device) -> tuple[nn.Module, nn.Module]:
    """Ours and transformers', with equal weights that are drawn on the device."""
    try:
        import transformers  # noqa: F401
    except ImportError:
        raise Skipped("the package transformers is not installed") from None
    with torch.device(device):
        theirs = their_model("BertForMaskedLM", shape, num_hidden_layers=layers, **NO_DROPOUT)
    _draw(theirs)
    with torch.device(device):
        ours = our_model(theirs)
    return ours.train(), theirs.train()


def _draw(model: nn.Module) -> None:
    """Weights large enough that attention is far from uniform, norms and biases that do something."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(0.0, 0.05)
            if name.endswith("LayerNorm.weight"):
                parameter.add_(1.0)


def _padded(lengths: tuple[int, ...], device: torch.device) -> tuple[dict[str, Tensor], Tensor]:
    """A padded batch of which every seventh word is asked for, and which of its slots are tokens."""
    columns = torch.arange(max(lengths), device=device)
    keep = columns < torch.tensor(lengths, device=device)[:, None]
    words = torch.randint(1000, bert.VOCAB_SIZE, keep.shape, device=device) * keep
    labels = words.masked_fill(~keep | (columns % 7 != 0), IGNORED)
    return {"input_ids": words, "attention_mask": keep.long(), "labels": labels}, keep


def _results(model: nn.Module, batch: dict[str, Tensor], keep: Tensor, autocast: bool) -> dict[str, Tensor]:
    """Logits of all tokens, the loss, and gradients by the parameters' names."""
    model.zero_grad(set_to_none=True)
    with torch.autocast(keep.device.type, torch.bfloat16, enabled=autocast):
        with torch.no_grad():
            logits = model(**{name: t for name, t in batch.items() if name != "labels"}).logits
        loss = model(**batch).loss
    loss.backward()
    found = {"logits": logits[keep], "loss": loss.detach()}
    return found | {f"gradient of {name}": p.grad for name, p in model.named_parameters() if p.grad is not None}


def check_model(shape: bert.Size, layers: int, lengths: tuple[int, ...], device: torch.device) -> dict[str, Any]:
    """Forward and backward; errors are held against those of transformers' SDPA model, both beside it in fp64.

    Everything is divided by its largest element and rounded to bf16, for which the table has its tolerances.
    """
    torch.manual_seed(0)
    ours, theirs = _models(shape, layers, device)
    batch, keep = _padded(lengths, device)
    actual, plain = (_results(model, batch, keep, autocast=True) for model in (ours, theirs))
    truth = _results(theirs.double(), batch, keep, autocast=False)
    assert actual.keys() == truth.keys(), f"gradients of {sorted(actual.keys() ^ truth.keys())} are on one side alone"
    gradients = [t for name, t in truth.items() if name.startswith("gradient")]
    floor = SMALLEST_SCALE * max(t.abs().max().item() for t in gradients)
    for name, exact in truth.items():
        kind = "gradient" if name.startswith("gradient") else "output"
        scale = max(exact.abs().max().item(), floor if kind == "gradient" else 1.0)
        mine, other = ((t[name].double() / scale).bfloat16() for t in (actual, plain))
        assert_close_to_truth("fast_model", kind, mine, other, exact / scale, name=name)
    return {}


def _launch_model(shape: bert.Size, layers: int, lengths: tuple[int, ...], device: torch.device) -> dict[str, Any]:
    """Ours alone, in its two calls."""
    ours, _ = _models(shape, layers, device)
    _results(ours, *_padded(lengths, device), autocast=True)
    return {}


def check_same_bits(
    shape: bert.Size, layers: int, lengths: tuple[int, ...], is_dry: bool, device: torch.device
) -> dict[str, Any]:
    """Within `batch_invariant` hidden states of texts have the same bits alone and packed together.

    `differ_without` in the case's line: by dtype, of how many texts they differ where nobody asks.
    """
    if implementation("encoder_layer", OpSpec(device, torch.bfloat16)).backend != "triton":
        raise Skipped("the choice is Triton's kernels'; on the CPU nothing needs it")
    torch.manual_seed(0)
    with torch.device(device):
        model = bert_fast.BertModel(shape.config(bert_fast.BertConfig, num_hidden_layers=layers)).eval()
    _draw(model)
    texts = [torch.randint(1000, bert.VOCAB_SIZE, (n,), device=device) for n in lengths]
    differ_without = {}
    for dtype in (torch.bfloat16, torch.float32):
        model.to(dtype)
        differ_without[str(dtype).removeprefix("torch.")] = _num_differing(model, texts)
        with bert_fast.batch_invariant():
            differ = _num_differing(model, texts)
        assert is_dry or differ == 0, f"{differ} of {len(texts)} texts have other bits together than alone, in {dtype}"
    return {"differ_without": differ_without}


def _num_differing(model: nn.Module, texts: list[Tensor]) -> int:
    """How many texts have other hidden states together than alone."""

    def states(chosen: list[Tensor]) -> Tensor:
        sizes = [len(text) for text in chosen]
        ends = torch.tensor([0, *itertools.accumulate(sizes)], dtype=torch.int32, device=chosen[0].device)
        return model(input_ids=torch.cat(chosen), cu_seqlens=ends, max_seqlen=max(sizes)).last_hidden_state

    with torch.inference_mode():
        together = states(texts).split([len(text) for text in texts])
        return sum(not torch.equal(states([text]), one) for text, one in zip(texts, together, strict=True))


def check_graph(shape: bert.Size, layers: int, lengths: tuple[int, ...], device: torch.device) -> dict[str, Any]:
    """Loss and gradients of a captured step, replayed with other words in between, are those of the step as it is."""
    _need_graphs(device)
    torch.manual_seed(0)
    ours, _ = _models(shape, layers, device)
    batches = [_packed(lengths, device) for _ in range(2)]

    def train(batch: dict[str, Any]) -> list[Tensor]:
        with torch.autocast(device.type, torch.bfloat16):
            loss = ours(**batch).loss
        return [loss, *torch.autograd.grad(loss, list(ours.parameters()))]

    budget = graphs.Budget(sum(lengths), len(lengths), max(lengths), len(batches[0]["labels"]))
    step = graphs.CapturedStep(train, [budget], device=device, num_warmup=1)
    expected = [t.clone() for t in step(batches[0])]
    captured = [t.clone() for t in step(batches[0])]
    other = step(batches[1])[0].clone()
    replayed = step(batches[0])
    assert not torch.equal(other, expected[0]), "the loss of other words is the same: a replay does not read its batch"
    names = ["loss", *(f"gradient of {name}" for name, _ in ours.named_parameters())]
    for name, *found, one in zip(names, captured, replayed, expected, strict=True):
        for actual in found:
            assert_same_values("graph", name, actual, one)
    return {}


def check_layers(shape: bert.Size, layers: int, lengths: tuple[int, ...], device: torch.device) -> dict[str, Any]:
    """Loss and gradients of a fused model, its layers replayed, hidden dropout included, are those without graphs."""
    _need_graphs(device)
    torch.manual_seed(0)
    _, model = _models(shape, layers, device)
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.1
    batch, keep = _padded(lengths, device)

    def results() -> dict[str, Tensor]:
        torch.manual_seed(1)
        return _results(model, batch, keep, autocast=True)

    bert_fast.fuse(model)
    expected = results()
    bert_fast.fuse(model, graphs=[graphs.Budget(sum(lengths), len(lengths), max(lengths))])
    for found in (results(), results()):  # the first one captures
        for name, one in expected.items():
            assert_same_values("graph", name, found[name], one)
    return {}


def _need_graphs(device: torch.device) -> None:
    try:
        graphs.check_device("device", device)
    except Exception as why:
        raise Skipped(str(why)) from None


def _packed(lengths: tuple[int, ...], device: torch.device) -> dict[str, Any]:
    total, offsets = sum(lengths), [0, *itertools.accumulate(lengths)]
    positions = torch.arange(0, total, 7, device=device)
    words = torch.randint(1000, bert.VOCAB_SIZE, (total,), device=device)
    cu_seqlens = torch.tensor(offsets, dtype=torch.int32, device=device)
    return {
        "input_ids": words, "cu_seqlens": cu_seqlens, "max_seqlen": max(lengths), "masked_lm_positions": positions,
        "labels": words[positions],
    }  # fmt: skip
