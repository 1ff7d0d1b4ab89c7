"""Fused models under the tools that people train and serve with: compile, export, PEFT, checkpointing, threads."""

import copy
import threading
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from bert_fast.huggingface import fuse, register_attention, unfuse, why_not
from bert_fast.huggingface.fused import Fused
from tests.huggingface.families import checkpoint_layers

transformers = pytest.importorskip("transformers", minversion="5")

NAMES = ("BertModel", "BertForMaskedLM", "BertForSequenceClassification")


def _kept(output: Any, batch: dict[str, Tensor]) -> Tensor:
    """What is compared: the first of the outputs, without padding."""
    first = output[0]
    return first[batch["attention_mask"].bool()] if first.dim() == 3 else first


def _gradients(model: nn.Module, batch: dict[str, Tensor]) -> dict[str, Tensor]:
    model.zero_grad()
    _kept(model(**batch), batch).sin().sum().backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def _assert_same_gradients(model: nn.Module, other: nn.Module, batch: dict[str, Tensor]) -> None:
    mine, theirs = _gradients(model, batch), _gradients(other, batch)
    assert mine.keys() == theirs.keys() and mine
    for name, gradient in theirs.items():
        torch.testing.assert_close(mine[name], gradient, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.parametrize(
    ("name", "training"), [("BertModel", False), ("BertForMaskedLM", True), ("BertForSequenceClassification", True)]
)
def test_full_graph_compile(make, batch, name, training) -> None:
    torch._dynamo.reset()
    # A graph of one layer is made in half the time; the others have two, the last with fewer rows for one of them.
    model = fuse(make(name, num_hidden_layers=1 if name == "BertForMaskedLM" else 2)).train(training)
    compiled = torch.compile(copy.deepcopy(model), fullgraph=True, dynamic=True, backend="aot_eager")
    with torch._dynamo.config.patch(error_on_recompile=True):
        for columns in (9, 7, 8):
            part = {key: value[:, :columns].clone() for key, value in batch.items()}
            outputs = [_kept(each(**part), part) for each in (compiled, model)]
            torch.testing.assert_close(*outputs)
            if training:
                outputs[0].sin().sum().backward()
                assert (
                    compiled.get_submodule("_orig_mod").base_model.encoder.layer[0].output.dense.weight.grad is not None
                )
    torch._dynamo.reset()


HEADS = (
    "BertForMaskedLM", "BertForPreTraining", "BertLMHeadModel", "BertForNextSentencePrediction",
    "BertForSequenceClassification", "BertForTokenClassification", "BertForQuestionAnswering",
)  # fmt: skip


@pytest.mark.parametrize(
    ("name", "strict"),
    [*((name, False) for name in ("BertModel", *HEADS)), ("BertModel", True), ("BertForQuestionAnswering", True)],
)
def test_export_is_the_model_without_our_ops(make, batch, name, strict) -> None:
    """A program that is carried elsewhere runs without bert_fast and gives what the model gives, on padding too."""
    model = fuse(make(name, num_labels=2, use_cache=False, is_decoder=name == "BertLMHeadModel"))
    batch["attention_mask"][2, :2] = 0  # the pooler reads the first token that is kept
    arguments = batch["input_ids"], batch["attention_mask"]
    program = torch.export.export(model, arguments, strict=strict)
    assert "bert_fast" not in str(program.graph)
    exported, eager = program.module()(*arguments), model(*arguments)
    assert exported.keys() == eager.keys()
    for key, value in eager.items():
        torch.testing.assert_close(exported[key], value)
    untouched, full = unfuse(model)(*arguments), batch["attention_mask"].all(1)
    for key, value in untouched.items():
        torch.testing.assert_close(exported[key][full], value[full])


@pytest.mark.parametrize("order", ["fuse first", "adapters first"])
def test_lora_on_query_and_value(make, batch, order) -> None:
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(target_modules=["query", "value"], r=4, lora_alpha=8, init_lora_weights=False)

    def adapted(base: nn.Module, is_fused: bool) -> nn.Module:
        torch.manual_seed(3)
        base = copy.deepcopy(base)
        if is_fused and order == "fuse first":
            fuse(base)
        model = peft.get_peft_model(base, config)
        return fuse(model) if is_fused else model

    base = make("BertForTokenClassification")
    fused, untouched = adapted(base, True), adapted(base, False)
    assert why_not(fused, **batch) == []
    _assert_same_gradients(fused, untouched, batch)
    assert len(_gradients(fused, batch)) == 2 * 2 * 2, "two matrices of two adapters of two layers"
    with fused.disable_adapter():
        torch.testing.assert_close(_kept(fused(**batch), batch), _kept(base(**batch), batch))
    merged = fused.merge_and_unload()
    assert isinstance(merged, Fused) and why_not(merged, **batch) == []
    torch.testing.assert_close(_kept(merged(**batch), batch), _kept(untouched(**batch), batch))


def test_lora_on_every_linear_layer(make, batch) -> None:
    peft = pytest.importorskip("peft")
    models = []
    for is_fused in (True, False):
        torch.manual_seed(3)
        base = make("BertForSequenceClassification")
        config = peft.LoraConfig(task_type="SEQ_CLS", target_modules="all-linear", r=4, init_lora_weights=False)
        model = peft.get_peft_model(base, config).eval()
        models.append(fuse(model) if is_fused else model)
    assert why_not(models[0], **batch) == []
    _assert_same_gradients(*models, batch)


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_gradient_checkpointing(make, batch, name, reentrant) -> None:
    """Layers run again in backward, and draw the masks that they drew."""
    model = fuse(make(name, dropout_p=0.3)).train()
    call = {**batch, "dropout_seed": torch.tensor([3])}
    drop = [module for module in model.children() if isinstance(module, nn.Dropout)]
    for module in drop:
        module.p = 0.0  # a head's own, which draws from PyTorch's generator
    plain = _gradients(model, call)
    calls = []
    counter = type(model.base_model.encoder.layer[0].output)
    original = counter.forward_packed
    checkpoint_layers(model, {"use_reentrant": reentrant})
    counter.forward_packed = lambda self, *args, **kwargs: calls.append(1) or original(self, *args, **kwargs)
    try:
        again = _gradients(model, call)
    finally:
        del counter.forward_packed
    assert len(calls) == 4, "two layers, twice each"
    assert plain.keys() == again.keys() and all(torch.equal(plain[key], again[key]) for key in plain)


def test_inputs_that_require_gradients(make, batch) -> None:
    """What PEFT asks for beside checkpointing: a hook on the word embeddings, which is then called."""
    model = fuse(make()).train().requires_grad_(False)
    model.encoder.layer[1].output.dense.requires_grad_(True)
    checkpoint_layers(model, {"use_reentrant": True})
    model.enable_input_require_grads()
    assert why_not(model, **batch) == []
    assert list(_gradients(model, batch)) == [
        "encoder.layer.1.output.dense.weight",
        "encoder.layer.1.output.dense.bias",
    ]


def test_threads_share_a_model(make, batch) -> None:
    model = fuse(make())
    inputs = [{key: value[row : row + 1] for key, value in batch.items()} for row in range(3)]
    expected = [model(**each)[0] for each in inputs]
    results: dict[int, Tensor] = {}

    def work(index: int) -> None:
        for _ in range(5):
            results[index] = model(**inputs[index % 3])[0]

    threads = [threading.Thread(target=work, args=(index,)) for index in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(torch.equal(results[index], expected[index % 3]) for index in range(6))


def test_autocast(make, batch) -> None:
    models = fuse(make("BertForMaskedLM")), make("BertForMaskedLM")
    models[1].load_state_dict(models[0].state_dict())
    truth = _kept(models[1](**batch), batch)
    with torch.autocast("cpu", torch.bfloat16):
        fused, untouched = (_kept(model(**batch), batch) for model in models)
    assert fused.dtype == untouched.dtype
    assert (fused - truth).abs().mean() <= 2 * (untouched - truth).abs().mean()


def test_sentence_transformers(make, tmp_path) -> None:
    sentence_transformers = pytest.importorskip("sentence_transformers")
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "a", "small", "red", "house", "on", "the", "hill"]
    (tmp_path / "vocab.txt").write_text("\n".join(words))
    make(vocab_size=len(words)).save_pretrained(tmp_path)
    transformers.BertTokenizer(str(tmp_path / "vocab.txt")).save_pretrained(tmp_path)
    model = sentence_transformers.SentenceTransformer(str(tmp_path), device="cpu")  # with pooling by mean
    texts = ["a small red house", "the hill", "on"]
    untouched = model.encode(texts, convert_to_tensor=True)
    assert fuse(model) is model and why_not(model) == []
    assert any(isinstance(module, Fused) for module in model.modules())
    torch.testing.assert_close(model.encode(texts, convert_to_tensor=True), untouched)


@pytest.mark.parametrize("is_decoder", [False, True])
def test_attention_implementation(make, batch, is_decoder) -> None:
    """Without fuse: attention alone, under transformers' interface."""
    register_attention()
    register_attention()
    model = make(is_decoder=is_decoder)
    pairs = torch.rand(3, 1, 9, 9) < 0.7
    calls = [batch, {**batch, "attention_mask": pairs | torch.eye(9).bool()}, {"input_ids": batch["input_ids"]}]
    expected = [model(**call)[0] for call in calls]
    model.set_attn_implementation("bert_fast")
    for call, wanted in zip(calls, expected, strict=True):
        where = batch["attention_mask"].bool() if call is batch else slice(None)
        torch.testing.assert_close(model(**call)[0][where], wanted[where])
    if is_decoder:
        first = model(batch["input_ids"][:, :5])
        rest = model(batch["input_ids"][:, 5:], past_key_values=first.past_key_values)[0]
        torch.testing.assert_close(rest, expected[2][:, 5:])
    for layer in model.encoder.layer:
        layer.attention.self.dropout.p = 0.5
    model.train()
    outputs = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        outputs.append(model(**batch)[0])
    assert torch.equal(outputs[0], outputs[1]) and not torch.equal(outputs[0], outputs[2])
    outputs[0].sum().backward()
    assert model.encoder.layer[0].attention.self.key.weight.grad.abs().max() > 0


def test_attention_implementation_refuses_what_it_lacks() -> None:
    from bert_fast.huggingface.attention import attend

    q = torch.randn(2, 4, 3, 8)
    with pytest.raises(ValueError, match=r"softcap: expected None with attn_implementation='bert_fast', got 3\.0"):
        attend(nn.Module(), q, q, q, None, softcap=3.0)
    grouped, _ = attend(nn.Module(), q, q[:, :2], q[:, 2:], None)
    spread, _ = attend(nn.Module(), q, q[:, [0, 0, 1, 1]], q[:, [2, 2, 3, 3]], None)
    assert torch.equal(grouped, spread)


def test_attention_implementation_takes_a_factor_of_each_head() -> None:
    from bert_fast.huggingface.attention import attend

    q, factors = torch.randn(2, 4, 3, 8), torch.randn(4)
    mask = torch.ones(2, 3, dtype=torch.int64)
    mask[1, 2] = 0
    plain, _ = attend(nn.Module(), q, q, q, mask)
    for given in (factors, factors.view(1, 4, 1, 1)):  # as BART and as ViT of transformers 4 hand it on
        masked, _ = attend(nn.Module(), q, q, q, mask, head_mask=given)
        torch.testing.assert_close(masked, plain * factors[:, None])
    with pytest.raises(ValueError, match=r"head_mask: expected 4 factors, one a head, got shape \[3\]"):
        attend(nn.Module(), q, q, q, mask, head_mask=factors[:3])


def test_states_and_optimizers_carry_over(make, batch) -> None:
    """Fusing within a training run: parameters are the same objects, so an optimizer goes on."""
    models = make(), make()
    models[1].load_state_dict(models[0].state_dict())
    losses: list[list[float]] = [[], []]
    for index, model in enumerate(models):
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        for step in range(4):
            if index == 0 and step == 1:
                fuse(model)
            if index == 0 and step == 3:
                unfuse(model)
            loss = _kept(model(**batch), batch).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses[index].append(loss.item())
    torch.testing.assert_close(torch.tensor(losses[0]), torch.tensor(losses[1]))
    assert losses[0][0] > losses[0][-1]
