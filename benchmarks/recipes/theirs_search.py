"""The recipes of vectors and rerankers with sentence-transformers alone: its models, losses, evaluators and trainers.

Both sides begin with the same weights, as in `theirs`. Batches are as its documentation teaches: random ones without
two rows that have a text in common.
"""

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import sentence_transformers
import torch
from datasets import Dataset
from sentence_transformers import CrossEncoder, SentenceTransformer

from benchmarks.recipes import examples
from benchmarks.recipes.cases import Clock
from bert_fast.training.recipes.build import build
from bert_fast.training.recipes.settings import Settings

Scores = dict[str, float]


def their_run(settings: Settings) -> dict[str, Any]:
    """As `cases.our_run`; `padded_tokens` are those of the batches, padding counted."""
    clock = Clock()
    with tempfile.TemporaryDirectory() as directory:
        start = Path(directory) / "start"
        ours = build(settings)
        ours.model.save_pretrained(start)
        ours.tokenizer.save_pretrained(start)
        del ours
        with clock.running():
            make = {"embed": _embed, "rerank": _rerank}[settings.task]
            model, trainer, scores = make(settings, start, Path(directory) / "run")
            before = scores(model)
            counted = {"tokens": 0, "padded_tokens": 0}
            hook = model[0].register_forward_pre_hook(lambda module, given: _count(counted, module, *given))
            trainer.train()
            hook.remove()
            metrics = scores(model)
    return {
        "metrics": metrics,
        "before": before,
        "steps": trainer.state.global_step,
        **counted,
        "seconds": round(clock.seconds, 1),
        "cpu_seconds": round(clock.cpu_seconds, 1),
        "threads": torch.get_num_threads(),
        "sentence_transformers": sentence_transformers.__version__,
    }


def _count(counted: dict[str, int], module: Any, features: dict[str, Any]) -> None:
    """Adds up the tokens that a model learns from."""
    if module.training:
        mask = features["attention_mask"]
        counted["tokens"] += int(mask.sum())
        counted["padded_tokens"] += mask.numel()


def _embed(settings: Settings, start: Path, directory: Path) -> tuple[Any, Any, Callable[[Any], Scores]]:
    """(model, trainer, what judges the model)."""
    from sentence_transformers.sentence_transformer.evaluation import InformationRetrievalEvaluator
    from sentence_transformers.sentence_transformer.losses import MultipleNegativesRankingLoss

    data: Any = settings.data
    columns = [data.query, data.positive, *(data.negatives or ())]
    train, valid = examples.rows(data.train), examples.rows(data.valid)
    model = SentenceTransformer(str(start), device="cpu")
    documents = list(dict.fromkeys(row[column] for row in valid for column in columns[1:]))
    place = {text: str(number) for number, text in enumerate(documents)}
    queries = list(dict.fromkeys(row[data.query] for row in valid))
    number = {text: str(number) for number, text in enumerate(queries)}
    wanted: dict[str, set[str]] = {}
    for row in valid:
        wanted.setdefault(number[row[data.query]], set()).add(place[row[data.positive]])
    judge = InformationRetrievalEvaluator(
        {number[text]: text for text in queries}, {place[text]: text for text in documents}, wanted,
        precision_recall_at_k=[1, 10], main_score_function="cosine", write_csv=False,
    )  # fmt: skip

    def scores(model: Any) -> Scores:
        model.eval()
        found = judge(model)
        return {name: float(found[f"cosine_{name}"]) for name in ("recall@1", "recall@10", "mrr@10", "ndcg@10")}

    trainer = sentence_transformers.SentenceTransformerTrainer(
        model=model,
        args=sentence_transformers.SentenceTransformerTrainingArguments(**_arguments(settings, directory)),
        train_dataset=Dataset.from_list([{column: row[column] for column in columns} for row in train]),
        loss=MultipleNegativesRankingLoss(model, scale=data.scale),
        evaluator=judge,
    )
    return model, trainer, scores


def _rerank(settings: Settings, start: Path, directory: Path) -> tuple[Any, Any, Callable[[Any], Scores]]:
    """(model, trainer, what judges the model)."""
    from sentence_transformers.cross_encoder import CrossEncoderTrainer, CrossEncoderTrainingArguments
    from sentence_transformers.cross_encoder.evaluation import CrossEncoderRerankingEvaluator
    from sentence_transformers.cross_encoder.losses import ListNetLoss

    data: Any = settings.data
    train, valid = examples.rows(data.train), examples.rows(data.valid)
    model = CrossEncoder(str(start), device="cpu")
    judged: dict[str, dict[str, Any]] = {}
    for row in valid:
        of_query = judged.setdefault(row[data.query], {"query": row[data.query], "positive": [], "negative": []})
        of_query["positive"] += [row[data.positive]]
        of_query["negative"] += [row[column] for column in data.negatives]
    for of_query in judged.values():
        of_query["positive"] = list(dict.fromkeys(of_query["positive"]))
        of_query["negative"] = list(dict.fromkeys(of_query["negative"]))
    judge = CrossEncoderRerankingEvaluator(list(judged.values()), at_k=10, write_csv=False)

    def scores(model: Any) -> Scores:
        model.eval()
        found = judge(model)
        return {name: float(found[name]) for name in ("mrr@10", "ndcg@10", "map")}

    # A softmax of labels that is 1 for the document that belongs to the query, and 0 for the others.
    labels = [40.0] + [-40.0] * len(data.negatives)
    rows = [
        {
            "query": row[data.query],
            "documents": [row[data.positive], *(row[name] for name in data.negatives)],
            "labels": labels,
        }
        for row in train
    ]
    trainer = CrossEncoderTrainer(
        model=model,
        args=CrossEncoderTrainingArguments(**_arguments(settings, directory)),
        train_dataset=Dataset.from_list(rows),
        loss=ListNetLoss(model),
        evaluator=judge,
    )
    return model, trainer, scores


def _arguments(settings: Settings, directory: Path) -> dict[str, Any]:
    config = settings.training
    return {
        "output_dir": str(directory),
        "num_train_epochs": config.epochs or 1.0,
        "max_steps": config.steps or -1,
        "per_device_train_batch_size": config.batch_size,
        "learning_rate": config.learning_rate,
        "weight_decay": config.weight_decay,
        "adam_beta1": config.betas[0],
        "adam_beta2": config.betas[1],
        "adam_epsilon": config.eps,
        "max_grad_norm": config.max_grad_norm,
        "lr_scheduler_type": config.schedule,
        "warmup_steps": config.warmup,
        "seed": config.seed,
        "batch_sampler": "no_duplicates" if settings.task == "embed" else "batch_sampler",
        "logging_steps": config.log_every,
        "eval_strategy": "epoch",
        "save_strategy": "epoch",
        "save_total_limit": config.keep_checkpoints,
        "report_to": "none",
        "disable_tqdm": True,
        "use_cpu": True,
        "dataloader_pin_memory": False,
    }
