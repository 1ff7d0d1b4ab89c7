"""`warm_up` without a GPU: what it leaves as it was, which batches it takes, what it refuses.

What it compiles is seen over the null driver: tests/null_driver.
"""

import copy
import itertools
import warnings
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

import bert_fast
from bert_fast import warming

SIZES = dict(
    vocab_size=60, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=24,
    max_position_embeddings=24, num_labels=2,
)  # fmt: skip
CLASSES = (
    "BertModel", "BertForMaskedLM", "BertForPreTraining", "BertLMHeadModel", "BertForNextSentencePrediction",
    "BertForSequenceClassification", "BertForMultipleChoice", "BertForTokenClassification", "BertForQuestionAnswering",
)  # fmt: skip


def make(name: str, kind: str = "bert_fast", **settings: Any) -> Any:
    torch.manual_seed(0)
    sizes = SIZES | dict(is_decoder=name == "BertLMHeadModel") | settings
    if kind == "bert_fast":
        return getattr(bert_fast, name)(bert_fast.BertConfig(**sizes))
    transformers = pytest.importorskip("transformers")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return bert_fast.fuse(getattr(transformers, name)(transformers.BertConfig(**sizes)))


def make_steps(model: nn.Module, optimizer: Any = None, dtype: torch.dtype | None = None, modes=(True, True)) -> int:
    """What `warm_up` does on a GPU; returns how many backward passes there were."""
    with mock.patch("torch.autograd.grad", wraps=torch.autograd.grad) as grad:
        shares: list[float] = []
        warming._make_steps(model, warming._targets(model), (24, 150), modes, dtype, optimizer, shares.append)
    assert shares == sorted(shares)
    assert len(shares) >= grad.call_count
    return grad.call_count


def state_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Everything that somebody might notice, copied."""
    return copy.deepcopy(
        {
            "parameters": [p.detach() for p in model.parameters()],
            "versions": [p._version for p in model.parameters()],
            "gradients": [p.grad for p in model.parameters()],
            "buffers": dict(model.named_buffers()),
            "optimizer": optimizer.state_dict(),
            "options": [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups],
            "generator": torch.get_rng_state(),
            "modes": [module.training for module in model.modules()],
            "config": {k: v for k, v in vars(model.config).items() if not k.startswith("_")},
            "attributes": [sorted(vars(module)) for module in model.modules()],
        }
    )


def assert_same(one: Any, other: Any, where: str = "state") -> None:
    """Bit for bit."""
    assert type(one) is type(other), where
    if isinstance(one, torch.Tensor):
        assert one.dtype == other.dtype, where
        assert torch.equal(one.view(torch.uint8) if one.dim() else one, other.view(torch.uint8) if one.dim() else other)
    elif isinstance(one, dict):
        assert one.keys() == other.keys(), where
        for key in one:
            assert_same(one[key], other[key], f"{where}[{key!r}]")
    elif isinstance(one, list | tuple):
        assert len(one) == len(other), where
        for i, pair in enumerate(zip(one, other, strict=True)):
            assert_same(*pair, f"{where}[{i}]")
    else:
        assert one == other, where


def partly_trained(model: nn.Module) -> torch.optim.Optimizer:
    """An optimizer with state; then gradients that are kept, a module in evaluation, a frozen parameter."""
    optimizer = bert_fast.optim.AdamW(model.parameters(), lr=1e-3, max_grad_norm=1.0)
    for p in model.parameters():
        p.grad = torch.randn_like(p)
    optimizer.step()
    parameters = list(model.parameters())
    parameters[3].grad = None
    parameters[5].requires_grad_(False)
    model.train()
    next(module for module in model.modules() if type(module).__name__ == "BertLayer").eval()
    return optimizer


@pytest.mark.parametrize("kind", ["bert_fast", "fused"])
@pytest.mark.parametrize("name", CLASSES)
def test_nothing_changes(name: str, kind: str) -> None:
    model = make(name, kind)
    optimizer = partly_trained(model)
    before = state_of(model, optimizer)
    assert make_steps(model, optimizer) > 5
    assert_same(state_of(model, optimizer), before)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
def test_nothing_changes_under_autocast(dtype: torch.dtype) -> None:
    model = make("BertForTokenClassification")
    optimizer = partly_trained(model)
    before = state_of(model, optimizer)
    assert make_steps(model, optimizer, dtype) > 5
    assert_same(state_of(model, optimizer), before)
    assert not hasattr(optimizer, "found_inf")


def test_other_families_are_warmed_up_as_bert() -> None:
    """No text is longer than their positions, no types are given where there are none, and heads get their labels."""
    transformers = pytest.importorskip("transformers")
    from bert_fast.huggingface.models import FusedModel

    names = {"hidden_size": "dim", "num_hidden_layers": "n_layers", "num_attention_heads": "n_heads"}
    for name in ("RobertaForMaskedLM", "RobertaForCausalLM", "ElectraForPreTraining", "DistilBertModel", "MPNetModel"):
        cls = getattr(transformers, name)
        sizes = {names.get(key, key) if "Distil" in name else key: value for key, value in SIZES.items()}
        model = bert_fast.fuse(cls(cls.config_class(**sizes, is_decoder="Causal" in name)))
        longest = warming._longest(model)
        assert longest == (22 if name.startswith(("Roberta", "MPNet")) else 24)
        shares: list[float] = []
        with mock.patch.object(FusedModel, "_theirs", side_effect=AssertionError("left the packed path")):
            targets = warming._targets(model)
            assert targets == [model]
            warming._make_steps(model, targets, (longest, 60), (True, True), None, None, shares.append)
        assert len(shares) > 10


def test_nothing_changes_where_a_step_fails() -> None:
    model = make("BertForTokenClassification")
    optimizer = partly_trained(model)
    before = state_of(model, optimizer)
    with mock.patch("torch.autograd.grad", side_effect=MemoryError), pytest.raises(MemoryError):
        make_steps(model, optimizer)
    assert_same(state_of(model, optimizer), before)


def test_optimizer_takes_a_step_elsewhere() -> None:
    model = make("BertForSequenceClassification")
    optimizer = bert_fast.optim.Lamb(model.parameters(), lr=1e-3)
    called = []
    optimizer.register_step_post_hook(lambda *_: called.append(1))
    with mock.patch.object(
        bert_fast.optim.Lamb, "_norm", autospec=True, side_effect=bert_fast.optim.Lamb._norm
    ) as norm:
        make_steps(model, optimizer)
        assert norm.call_count == 1
        make_steps(model, optimizer, modes=(False, True))  # only evaluation
        assert norm.call_count == 1
    assert not called
    assert not optimizer.state
    make_steps(model, torch.optim.AdamW(model.parameters()))  # has no kernels of ours


@pytest.mark.parametrize("kind", ["bert_fast", "fused"])
def test_hooks_are_not_called(kind: str) -> None:
    model = make("BertForSequenceClassification", kind)
    called: list[str] = []

    def hook(name: str) -> Any:
        return lambda *_, **__: called.append(name)

    handles = [
        model.register_forward_hook(hook("forward")),
        model.bert.register_forward_pre_hook(hook("forward_pre")),
        model.bert.register_forward_hook(hook("forward with arguments"), with_kwargs=True),
        model.bert.encoder.layer[0].register_forward_hook(hook("layer")),
        model.classifier.register_full_backward_hook(hook("backward")),
        nn.modules.module.register_module_forward_hook(hook("everywhere")),
        model.classifier.weight.register_hook(hook("gradient")),
        model.classifier.weight.register_post_accumulate_grad_hook(hook("accumulated")),
    ]

    def of_a_step() -> list[str]:
        called.clear()
        model(torch.arange(6).view(2, 3), labels=torch.tensor([0, 1]), return_dict=True).loss.backward()
        return [*called]

    try:
        expected = of_a_step()
        assert len(set(expected)) >= 6
        called.clear()
        make_steps(model)
        assert called == []
        assert of_a_step() == expected
    finally:
        for handle in handles:
            handle.remove()


@pytest.mark.parametrize("use_reentrant", [True, False])
@pytest.mark.parametrize("kind", ["bert_fast", "fused"])
def test_checkpointing_keeps_its_form(kind: str, use_reentrant: bool) -> None:
    model = make("BertForSequenceClassification", kind)
    model.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
    optimizer = partly_trained(model)
    before = state_of(model, optimizer)
    assert make_steps(model, optimizer) > 5
    assert_same(state_of(model, optimizer), before)


@pytest.mark.parametrize("problem", ["regression", "multi_label_classification", "single_label_classification"])
@pytest.mark.parametrize("kind", ["bert_fast", "fused"])
def test_labels_are_those_of_the_problem(kind: str, problem: str) -> None:
    assert make_steps(make("BertForSequenceClassification", kind, problem_type=problem)) > 5
    assert make_steps(make("BertForSequenceClassification", kind, problem_type=None, num_labels=1)) > 5


def test_models_inside_others_are_found() -> None:
    inner, other = make("BertModel"), make("BertForQuestionAnswering")
    assert warming._targets(nn.Sequential(inner, nn.Linear(16, 2))) == [inner]
    assert warming._targets(nn.ModuleList([nn.Linear(2, 2), other])) == [other]
    two = [make("BertModel"), make("BertModel")]
    assert warming._targets(nn.ModuleList(two)) == two


def test_a_model_without_anything_to_learn() -> None:
    model = make("BertForSequenceClassification").requires_grad_(False)
    assert make_steps(model) == 0


@pytest.mark.parametrize(("longest", "tokens"), [(512, 4096), (512, 512), (512, 100), (1, 1), (24, 4096), (300, 1000)])
def test_batches_are_within_the_limits(longest: int, tokens: int) -> None:
    batches = [lengths for lengths, _ in warming._batches(make("BertModel"), longest, tokens)]
    assert {sum(lengths) <= tokens for lengths in batches} == {True}
    assert {1 <= length <= longest for lengths in batches for length in lengths} == {True}
    assert max(map(max, batches)) == min(longest, tokens)
    totals = sorted(map(sum, batches))
    if tokens >= 64:
        assert totals[-1] == tokens
        assert all(b <= 1.6 * a for a, b in itertools.pairwise(totals) if a >= 64)
    if longest == 512 and tokens == 4096:
        padded = {
            max(lengths) for lengths, has_mask in warming._batches(make("BertModel"), longest, tokens) if has_mask
        }
        assert padded >= {4, 8, 16, 32, 64, 128, 256, 512}
        assert max(map(len, batches)) == 1024


def test_sharded_and_wrapped_models_are_named() -> None:
    model = make("BertModel")
    wrapped = nn.Module()
    wrapped.inner = object.__new__(nn.parallel.DistributedDataParallel)
    nn.Module.__init__(wrapped.inner)
    wrapped.inner.module = model
    with pytest.raises(ValueError, match=r"model: .*DistributedDataParallel: give its \.module"):
        bert_fast.warm_up(wrapped)
    next(model.parameters()).to_local = None  # as DTensors have
    with pytest.raises(ValueError, match="model: expected whole parameters, got sharded ones"):
        bert_fast.warm_up(model)


def test_gradients_in_buckets_lie_anywhere() -> None:
    model = make("BertForSequenceClassification")
    optimizer = bert_fast.optim.AdamW(model.parameters(), max_grad_norm=1.0)
    places = []

    def norm(self: Any, work: Any, *_: Any) -> None:
        places.append({g.data_ptr() % 16 for lists in work for g in lists.grads})

    with mock.patch.object(bert_fast.optim.AdamW, "_norm", norm):
        warming._step(optimizer, False)
        with mock.patch.object(warming, "_has_buckets", return_value=True):
            warming._step(optimizer, False)
    assert places == [{0}, {0, 4}]


def test_there_is_nothing_to_compile_on_a_cpu(capsys) -> None:
    model = make("BertForMaskedLM")
    with mock.patch.object(warming, "_make_steps") as steps:
        assert bert_fast.warm_up(model, progress=True) == 0.0
    steps.assert_not_called()
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize(
    ("wrong", "error", "message"),
    [
        (dict(model="bert"), TypeError, "model: expected a torch.nn.Module, got str"),
        (dict(model=nn.Linear(2, 2)), ValueError, "model: expected one of bert_fast's .* got a Linear"),
        (dict(optimizer=1e-3), TypeError, "optimizer: expected a torch.optim.Optimizer or None, got float"),
        (dict(autocast_dtype=torch.float64), ValueError, "autocast_dtype: expected .* got torch.float64"),
        (dict(autocast_dtype="bf16"), ValueError, "autocast_dtype: expected .* got str"),
        (dict(max_seqlen=25), ValueError, "max_seqlen: .*24.*25"),
        (dict(max_seqlen=0), ValueError, "max_seqlen: .*0"),
        (dict(max_tokens=0), ValueError, "max_tokens: .*0"),
        (dict(max_tokens="all"), TypeError, "max_tokens: .*str"),
        (dict(training=1), TypeError, "training: .*int"),
        (dict(inference=None), TypeError, "inference: .*NoneType"),
        (dict(progress="yes"), TypeError, "progress: .*str"),
    ],
    ids=[
        "a name",
        "no BERT",
        "a rate",
        "fp64",
        "a dtype's name",
        "too long",
        "no tokens in a text",
        "no tokens",
        "words for a number",
        "a number for a flag",
        "None for a flag",
        "words for a flag",
    ],
)
def test_wrong_arguments(wrong: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        bert_fast.warm_up(**({"model": make("BertModel")} | wrong))


def test_progress_is_one_line(capsys) -> None:
    with warming._shown(True) as show:
        show(0.25)
    with warming._shown(False) as show:
        show(0.5)
    with warming._shown(None) as show:  # no terminal
        show(0.75)
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") <= 1
    assert "50%" not in err
    assert "75%" not in err
