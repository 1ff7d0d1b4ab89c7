"""Other libraries' tools on families that are not BERT: adapters, export, checkpointing, trainers, copies and files."""

import copy
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from bert_fast.huggingface import fuse, unfuse, why_not
from bert_fast.huggingface.fused import Fused
from tests.huggingface import families

transformers = pytest.importorskip("transformers", minversion="5")

PREFIXES = [prefix for prefix in families.CONFIG if prefix not in families.ALIKE]
each_family = pytest.mark.parametrize("prefix", PREFIXES)


@pytest.fixture
def batch(batch) -> dict[str, Tensor]:
    """Without types, which not all families have."""
    return {name: value for name, value in batch.items() if name != "token_type_ids"}


def _run(model: Any, batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """The first output without padding, and every gradient by name."""
    model.zero_grad()
    first = model(**batch)[0]
    first = first[batch["attention_mask"].bool()] if first.shape[:2] == batch["attention_mask"].shape else first
    first.sin().sum().backward()
    return {"output": first.detach(), **{n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}}


def _assert_same(mine: dict[str, Tensor], theirs: dict[str, Tensor]) -> None:
    assert mine.keys() == theirs.keys() and len(mine) > 1
    for name, value in theirs.items():
        _close(name, mine[name], value)


def _close(name: str, mine: Tensor, theirs: Tensor) -> None:
    torch.testing.assert_close(mine, theirs, msg=lambda text: f"{name}: {text}")


@each_family
@pytest.mark.parametrize("order", ["fuse first", "adapters first"])
def test_adapters(make, batch, prefix: str, order: str, tmp_path: Path) -> None:
    """LoRA on every linear layer: scores, gradients, saved, loaded, merged."""
    peft = pytest.importorskip("peft")
    base = make(f"{prefix}ForTokenClassification").double()  # gradients of adapters cancel in fp32

    def adapted(is_fused: bool) -> Any:
        own = copy.deepcopy(base)
        torch.manual_seed(3)
        config = peft.LoraConfig(target_modules="all-linear", r=4, init_lora_weights=False)
        model = peft.get_peft_model(fuse(own) if is_fused and order == "fuse first" else own, config).eval()
        return fuse(model) if is_fused else model

    fused, untouched = adapted(True), adapted(False)
    assert why_not(fused, **batch) == []
    wanted = _run(untouched, batch)
    _assert_same(_run(fused, batch), wanted)
    assert len(wanted) > 12 * 2, "two matrices for each of six layers, twice"
    fused.save_pretrained(tmp_path)
    again = fuse(peft.PeftModel.from_pretrained(copy.deepcopy(base), tmp_path).eval())
    with torch.no_grad():
        plain = untouched(**batch).logits[batch["attention_mask"].bool()]
        torch.testing.assert_close(again(**batch).logits[batch["attention_mask"].bool()], plain)
        merged = fused.merge_and_unload()
        assert isinstance(merged, Fused) and why_not(merged, **batch) == []
        torch.testing.assert_close(merged(**batch).logits[batch["attention_mask"].bool()], plain)


@each_family
def test_export(make, batch, prefix: str) -> None:
    """A program that is carried elsewhere runs without bert_fast and gives what the model gives."""
    with_a_head = f"{prefix}For{'TokenClassification' if prefix in families.ROTARY else 'QuestionAnswering'}"
    for name in (f"{prefix}Model", with_a_head):
        model = fuse(make(name, num_labels=2))
        arguments = batch["input_ids"], batch["attention_mask"]
        program = torch.export.export(model, arguments, strict=False)
        assert "bert_fast" not in str(program.graph)
        exported, eager = program.module()(*arguments), model(*arguments)
        assert exported.keys() == eager.keys()
        for key, value in eager.items():
            torch.testing.assert_close(exported[key], value)


@pytest.mark.parametrize("prefix", [prefix for prefix in PREFIXES if prefix != "MPNet"])  # transformers has it not
@pytest.mark.parametrize("reentrant", [False, True])
def test_gradient_checkpointing(make, batch, prefix: str, reentrant: bool) -> None:
    """Layers run again in backward, and draw the masks that they drew."""
    model = fuse(make(f"{prefix}ForMaskedLM", dropout_p=0.3)).train()
    torch.manual_seed(5)
    results, calls = [_run(model, batch)], []
    families.checkpoint_layers(model, {"use_reentrant": reentrant})
    kind = type(next(m for m in model.modules() if isinstance(m, nn.ModuleList))[0])
    original = kind.forward_packed
    kind.forward_packed = lambda self, *args, **kwargs: calls.append(1) or original(self, *args, **kwargs)
    try:
        torch.manual_seed(5)
        results.append(_run(model, batch))
    finally:
        del kind.forward_packed
    assert len(calls) == 4, "two layers, twice each"
    assert results[0].keys() == results[1].keys()
    assert all(torch.equal(value, results[1][name]) for name, value in results[0].items())


@each_family
def test_copies_pickles_and_files(make, batch, prefix: str, tmp_path: Path) -> None:
    """Copied, pickled, saved while fused by each way; loaded into an untouched model, and unfused in place."""
    safetensors = pytest.importorskip("safetensors.torch")
    untouched = make(f"{prefix}ForMaskedLM")
    model = fuse(copy.deepcopy(untouched))
    wanted, of_fused = untouched(**batch).logits, model(**batch).logits
    safetensors.save_model(model, str(tmp_path / "weights.safetensors"))
    model.save_pretrained(tmp_path)
    other = make(f"{prefix}ForMaskedLM")
    safetensors.load_model(other, str(tmp_path / "weights.safetensors"))
    read = type(untouched).from_pretrained(tmp_path)
    for each in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(each(**batch).logits, of_fused)
    for each in (other, read):
        assert torch.equal(each.eval()(**batch).logits, wanted)
    assert isinstance(pickle.loads(pickle.dumps(model)), Fused) and not isinstance(other, Fused)
    parameters = list(model.parameters())
    assert [type(m) for m in unfuse(model).modules()] == [type(m) for m in untouched.modules()]
    assert all(a is b for a, b in zip(parameters, model.parameters(), strict=True))
    assert torch.equal(model(**batch).logits, wanted)


@each_family
def test_trainer(make, prefix: str, tmp_path: Path) -> None:
    """transformers' Trainer on a fused model takes the steps that it takes on an untouched one."""
    pytest.importorskip("accelerate")
    generator = torch.Generator().manual_seed(0)
    words = [torch.randint(5, 61, (4 + i % 3,), generator=generator).tolist() for i in range(8)]
    rows = [{"input_ids": ids, "labels": i % 3} for i, ids in enumerate(words)]

    def collate(features: list[dict[str, Any]]) -> dict[str, Tensor]:
        longest = max(len(row["input_ids"]) for row in features)
        ids = torch.ones(len(features), longest, dtype=torch.long)
        mask = torch.zeros_like(ids)
        for place, row in enumerate(features):
            ids[place, : len(row["input_ids"])] = torch.tensor(row["input_ids"])
            mask[place, : len(row["input_ids"])] = 1
        return {"input_ids": ids, "attention_mask": mask, "labels": torch.tensor([row["labels"] for row in features])}

    no_dropout = {"seq_classif_dropout": 0.0} if prefix == "DistilBert" else {}
    base, results = make(f"{prefix}ForSequenceClassification", **no_dropout).double(), []
    for is_fused in (False, True):
        model = copy.deepcopy(base)
        arguments = transformers.TrainingArguments(
            output_dir=str(tmp_path / str(is_fused)), per_device_train_batch_size=4, max_steps=3, learning_rate=1e-3,
            report_to=[], use_cpu=True, optim="sgd", save_strategy="no", disable_tqdm=True,
            gradient_accumulation_steps=2,
        )  # fmt: skip
        trainer = transformers.Trainer(
            fuse(model) if is_fused else model, arguments, train_dataset=rows, data_collator=collate
        )
        trainer.train()
        results.append(dict(model.named_parameters()))
    moved = sum(not torch.equal(p, q) for p, q in zip(results[0].values(), base.parameters(), strict=True))
    assert moved > 20
    for name, value in results[0].items():
        _close(name, results[1][name], value)


@pytest.mark.parametrize("prefix", ["Roberta", "XLMRoberta", "DistilBert", "Electra", "MPNet"])
def test_a_training_step_of_sentence_transformers(prefix: str, tmp_path: Path) -> None:
    sentence_transformers = pytest.importorskip("sentence_transformers")
    from sentence_transformers.sentence_transformer import losses

    from tests.huggingface.sentence_folders import TEXTS, make_folder

    make_folder(prefix, tmp_path)
    values, gradients = [], []
    for is_fused in (False, True):
        model = sentence_transformers.SentenceTransformer(str(tmp_path / "folder"), device="cpu")
        for module in model.modules():
            if isinstance(module, nn.Dropout):
                module.p = 0.0
        model[0].model.config.attention_probs_dropout_prob = model[0].model.config.attention_dropout = 0.0
        model = (fuse(model) if is_fused else model).double().train()
        features = [dict(model.preprocess(texts)) for texts in (TEXTS, TEXTS[::-1])]
        loss = losses.MultipleNegativesRankingLoss(model)(features, None)
        loss.backward()
        values.append(loss.detach())
        gradients.append({name: p.grad for name, p in model.named_parameters() if p.grad is not None})
    torch.testing.assert_close(values[1], values[0])
    assert len(gradients[0]) > 20
    _assert_same(gradients[1], gradients[0])
