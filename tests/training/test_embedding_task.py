"""EmbeddingTask: metrics and loss as sentence-transformers counts them, runs that learn, what is refused."""

import json
import random
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from bert_fast import BertConfig, BertForMaskedLM, BertTokenizer
from bert_fast.data.embedding import EmbeddingSource
from bert_fast.models import BertForTextEmbedding
from bert_fast.testing.tolerances import ABSOLUTE
from bert_fast.training.config import SettingsError
from bert_fast.training.recipes import plan_text, run
from bert_fast.training.recipes.inference import TrainedModel
from bert_fast.training.recipes.settings import Settings
from bert_fast.training.retrieval import rankings, retrieval_metrics
from bert_fast.training.task import Predictions
from bert_fast.training.tasks import EmbeddingTask

NOUNS = [f"thing{k}" for k in range(40)]
WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "what", "is", "a", "the", "of", "it", *NOUNS, "not"]


def rows(count: int, seed: int = 0) -> list[dict[str, str]]:
    """Questions about a thing, and sentences about it in other words."""
    draw = random.Random(seed)
    made = []
    for _ in range(count):
        thing, other = draw.sample(NOUNS, 2)
        fill = " ".join(draw.choices(["is", "a", "the", "of", "it"], k=draw.randint(1, 5)))
        made.append({"query": f"what is {thing} {fill}", "positive": f"{fill} {thing} it", "negative": f"not {other}"})
    return made


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    path = tmp_path_factory.mktemp("model")
    config = BertConfig(
        vocab_size=len(WORDS), hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=64,
        max_position_embeddings=32,
    )  # fmt: skip
    BertForMaskedLM(config).save_pretrained(path)
    BertTokenizer(WORDS).save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("data") / "train.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows(96)))
    return path


def settings(folder: Path, table: Path, output: Path, **more: Any) -> Settings:
    values = {
        "model": str(folder), "train": str(table), "output_dir": str(output), "valid_share": 0.2, "batch_size": 16,
        "learning_rate": 3e-3, "epochs": 3, "max_length": 16,
    }  # fmt: skip
    return Settings.of("embed", values | more)


@pytest.mark.parametrize("seed", range(3))
def test_metrics_are_those_of_sentence_transformers(seed: int) -> None:
    evaluation = pytest.importorskip("sentence_transformers.evaluation")
    draw = np.random.default_rng(seed)
    queries, documents = draw.normal(size=(23, 8)), draw.normal(size=(57, 8))
    relevant = [set(draw.choice(57, size=draw.integers(1, 14), replace=False).tolist()) for _ in range(23)]
    for query, wanted in zip(queries, relevant, strict=True):
        query += documents[list(wanted)].mean(0) * draw.choice([0.0, 2.0])
    ranked, scores = rankings(queries.astype(np.float32), documents.astype(np.float32), 10)
    found = retrieval_metrics(ranked, relevant)
    theirs = evaluation.InformationRetrievalEvaluator(
        queries={f"q{i}": "" for i in range(23)}, corpus={f"d{i}": "" for i in range(57)},
        relevant_docs={f"q{i}": {f"d{k}" for k in wanted} for i, wanted in enumerate(relevant)},
        precision_recall_at_k=[1, 10],
    )  # fmt: skip
    results = [
        [{"corpus_id": f"d{row}", "score": score} for row, score in zip(*both, strict=True)]
        for both in zip(ranked.tolist(), scores.tolist(), strict=True)
    ]
    expected = theirs.compute_metrics(results)
    assert found["recall@1"] == pytest.approx(expected["recall@k"][1])
    assert found["recall@10"] == pytest.approx(expected["recall@k"][10])
    assert found["mrr@10"] == pytest.approx(expected["mrr@k"][10])
    assert found["ndcg@10"] == pytest.approx(expected["ndcg@k"][10])


def test_rankings_against_the_whole_matrix(monkeypatch: pytest.MonkeyPatch) -> None:
    draw = np.random.default_rng(0)
    queries, documents = (draw.normal(size=(n, 5)).astype(np.float32) for n in (11, 7))
    documents[3] = documents[1]  # equal scores: the first row first
    whole = queries @ documents.T
    monkeypatch.setattr("bert_fast.training.retrieval._BLOCK", 15)
    ranked, scores = rankings(queries, documents, 4, similarity="dot")
    assert np.array_equal(ranked, np.argsort(-whole, axis=1, kind="stable")[:, :4])
    assert np.allclose(scores, np.take_along_axis(whole, ranked, axis=1))
    assert rankings(queries, documents, 10)[0].shape == (11, 7)


@pytest.mark.parametrize("symmetric", [False, True])
def test_the_loss_is_that_of_sentence_transformers(folder: Path, symmetric: bool) -> None:
    losses = pytest.importorskip("sentence_transformers.losses")
    tokenizer = BertTokenizer.from_pretrained(folder)
    source = EmbeddingSource.read(
        [{"query": f"thing{i}", "positive": f"the thing{i + 9}", "negative": f"not thing{i + 20}"} for i in range(6)],
        tokenizer, negatives=["negative"],
    )  # fmt: skip
    with pytest.warns(UserWarning, match="not used: cls.predictions"):
        model = BertForTextEmbedding.from_pretrained(folder)
    batch = source.batch(0, np.arange(6))
    task = EmbeddingTask(source, symmetric=symmetric)
    loss = task.loss_parts(model, batch)["loss"]
    embeddings = model(**{k: v for k, v in batch.items() if k in ("input_ids", "cu_seqlens", "max_seqlen")}).embeddings
    name = "MultipleNegativesSymmetricRankingLoss" if symmetric else "MultipleNegativesRankingLoss"
    theirs = getattr(losses, name)(model=None)
    expected = theirs.compute_loss_from_embeddings([*embeddings.view(6, 3, -1).unbind(1)], labels=None)
    torch.testing.assert_close(loss, expected, rtol=0, atol=ABSOLUTE["minilm_embeddings"])
    assert task.label_counts(batch) == {"loss": 6}


def _labels(name: str) -> list[float]:
    return [float(k % 2) for k in range(6)] if name == "contrastive" else [0.0, 0.5, 0.25, 1.0, 0.5, 0.75]


OTHERS: dict[str, tuple[str, dict[str, Any]]] = {
    "cosent": ("CoSENTLoss", {}),
    "cosine_mse": ("CosineSimilarityLoss", {}),
    "contrastive": ("ContrastiveLoss", {}),
    "triplet": ("TripletLoss", {"triplet_margin": 0.5}),
    "margin_mse": ("MarginMSELoss", {}),
}


@pytest.mark.parametrize("dimensions", [None, [32, 8]], ids=["whole", "matryoshka"])
@pytest.mark.parametrize("name", OTHERS)
def test_other_losses_are_those_of_sentence_transformers(name: str, dimensions: list[int] | None, folder: Path) -> None:
    losses = pytest.importorskip("sentence_transformers.sentence_transformer.losses")
    from tests.losses.test_rows import Given

    kind, options = OTHERS[name]
    negatives = ["negative"] if name in ("triplet", "margin_mse") else []
    labels = _labels(name)
    made = [
        {"query": f"thing{k}", "positive": f"the thing{k + 9}", "negative": f"not thing{k + 20}", "score": label}
        for k, label in enumerate(labels)
    ]
    score = None if name == "triplet" else "score"
    tokenizer = BertTokenizer.from_pretrained(folder)
    source = EmbeddingSource.read(made, tokenizer, negatives=negatives, score=score, loss=name)  # type: ignore[arg-type]
    with pytest.warns(UserWarning, match="not used: cls.predictions"):
        model = BertForTextEmbedding.from_pretrained(folder)
    task = EmbeddingTask(source, loss=name, dimensions=dimensions)  # type: ignore[arg-type]
    batch = source.batch(0, np.arange(6))
    loss = task.loss_parts(model, batch)["loss"]
    assert task.label_counts(batch) == {"loss": 6} and task.fitted(model) is model
    with torch.no_grad():
        texts = source.texts
        columns = [model(**tokenizer.pack(column)).embeddings for column in texts]
    if name == "triplet":
        options = options | {"distance_metric": losses.TripletDistanceMetric.COSINE}
    given = Given()
    given.get_embedding_dimension = lambda: 32  # type: ignore[method-assign]
    theirs = getattr(losses, kind)(given, **options)
    if dimensions is not None:
        theirs = losses.MatryoshkaLoss(given, theirs, matryoshka_dims=dimensions)
    expected = theirs([{"e": one} for one in columns], torch.tensor(labels))
    torch.testing.assert_close(loss, expected.to(loss), rtol=0, atol=ABSOLUTE["minilm_embeddings"])


def test_pairs_with_scores_are_judged_by_their_order(folder: Path, tmp_path: Path) -> None:
    """Figures of a run are those of sentence-transformers' evaluator of what it leaves."""
    evaluation = pytest.importorskip("sentence_transformers.evaluation")
    library = pytest.importorskip("sentence_transformers")
    made = [{"query": row["query"], "positive": row["positive"], "near": 1.0} for row in rows(40)]
    made += [{"query": row["query"], "positive": row["negative"], "near": 0.25} for row in rows(40, seed=1)]
    table = tmp_path / "pairs.jsonl"
    table.write_text("".join(json.dumps(row) + "\n" for row in made))
    how = settings(
        folder, table, tmp_path / "run", label="near", dimensions=[32, 8], valid_share=None, valid=str(table)
    )
    result = run(how, quiet=True)
    assert result.metrics["spearman"] > 0.6
    model = library.SentenceTransformer(str(tmp_path / "run" / "model"), device="cpu")
    judge = evaluation.EmbeddingSimilarityEvaluator(
        [row["query"] for row in made], [row["positive"] for row in made], [row["near"] for row in made],
        write_csv=False,
    )  # fmt: skip
    found = judge(model)
    trained = TrainedModel.load(tmp_path / "run")
    metrics = trained.evaluate([str(table)])
    for name in ("spearman", "pearson"):
        assert metrics[name] == pytest.approx(found[f"{name}_cosine"], abs=ABSOLUTE["minilm_embeddings"])
    lines = (tmp_path / "run" / "predictions" / "valid.tsv").read_text().splitlines()
    assert lines[0].split("\t") == ["index", "score", "gold", "query", "positive"] and len(lines) == 81


def test_a_run_learns_and_leaves_a_model_for_search(folder: Path, table: Path, tmp_path: Path) -> None:
    result = run(settings(folder, table, tmp_path / "run", negatives=["negative"], pooling="max"), quiet=True)
    records = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    evaluations = [record["metrics"] for record in records if "metrics" in record]
    assert evaluations[-1]["ndcg@10"] > evaluations[0]["ndcg@10"] or evaluations[0]["ndcg@10"] > 0.9
    assert result.metrics["recall@10"] > 0.8
    model = BertForTextEmbedding.from_pretrained(tmp_path / "run" / "model")
    how = model.text_embedding
    assert (how.pooling, how.normalize, how.max_length) == ("max", True, 16)
    lines = (tmp_path / "run" / "predictions" / "valid.tsv").read_text().splitlines()
    assert lines[0].split("\t") == ["index", "rank", "score", "query", "found", "positive"] and len(lines) > 10
    trained = TrainedModel.load(tmp_path / "run")
    assert trained.evaluate([str(table)])["mrr@10"] > 0.8
    with pytest.raises(SettingsError, match="bert-fast embed"):
        trained.read([{"query": "a", "positive": "b"}])


def test_parts_train_the_same_model_bit_for_bit(
    folder: Path, table: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Encoded again in backward, or with all activations kept; a batch of one part is that of no parts."""
    assert BertConfig.from_pretrained(folder).hidden_dropout_prob == 0.1
    calls: list[bool] = []

    def kept(encode: Callable[[], Any], **options: Any) -> Any:
        calls.append(True)
        return encode()

    for name, size in (("no parts", None), ("one part", 48), ("again", 20), ("kept", 20)):
        if name == "kept":
            monkeypatch.setattr("bert_fast.models.text_embedding.checkpoint", kept)
        run(settings(folder, table, tmp_path / name, negatives=["negative"], epochs=1, part_size=size), quiet=True)
    weights = {path.name: (path / "model" / "model.safetensors").read_bytes() for path in tmp_path.iterdir()}
    assert weights["again"] == weights["kept"] and weights["no parts"] == weights["one part"]
    assert len(calls) > 5


def test_no_text_to_learn_from_is_one_to_judge_by(folder: Path, table: Path, tmp_path: Path) -> None:
    data = settings(folder, table, tmp_path).data
    train, valid = data.sources(
        BertTokenizer.from_pretrained(folder), seed=0, tokens_dir=None, on_main=lambda action: action()
    )
    assert len(train) + len(valid) == 96 and len(valid) > 5
    for column in (0, 1):
        assert not set(train.texts[column]) & set(valid.texts[column])


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"batch_size": 1}, "batch_size: expected at least 2 without negatives"),
        ({"graphs": True}, "graphs: expected False for embed"),
        ({"scale": 0.0}, "scale: expected a number above 0, got 0.0"),
        ({"part_size": 0}, "part_size: expected at least 1, got 0"),
        ({"pooling": "median"}, "pooling: expected one of mean, cls"),
        ({"dimensions": [16, 33]}, "dimensions: expected at most the model's 32, got 33"),
        ({"dimensions": [8, 8]}, "dimensions: expected different numbers from 1 on, got 8 8"),
        ({"loss": "cosent"}, "label: expected a column of numbers for cosent, got None"),
        ({"label": "score", "batch_size": 1}, "batch_size: expected at least 2 for cosent"),
        ({"label": "score", "loss": "triplet", "negatives": ["negative"]}, "label: expected None for triplet"),
        ({"loss": "triplet"}, "negatives: expected 1 column for triplet, got 0"),
        ({"label": "score", "loss": "cosine_mse", "negatives": ["negative"]}, "negatives: expected no column for"),
        ({"label": "score", "symmetric": True}, "symmetric: expected False for cosent"),
        ({"margin": 0.0}, "margin: expected a number above 0, at most 2, got 0.0"),
        ({"max_length": 33}, "max_length: expected at most the model's 32 positions, got 33"),
    ],
    ids=[
        "one",
        "graphs",
        "scale",
        "parts",
        "pooling",
        "width",
        "twice",
        "no label",
        "one pair",
        "triplet's label",
        "no negative",
        "negatives",
        "symmetric",
        "margin",
        "length",
    ],
)
def test_what_is_refused_before_the_first_step(
    values: dict[str, Any], message: str, folder: Path, table: Path, tmp_path: Path
) -> None:
    with pytest.raises(SettingsError, match=message):
        run(settings(folder, table, tmp_path / "run", **values), quiet=True)
    assert not (tmp_path / "run" / "model").exists()


def test_what_is_said_before_the_first_step(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """By a run and by what it would do: duplicates, texts that are cut, a batch of one; not where there is no harm."""
    path = tmp_path / "rows.jsonl"
    table = [{"query": f"what is {noun}", "positive": f"the {noun} it", "negative": "not it"} for noun in NOUNS[:9]]
    table[7]["positive"], table[4]["positive"] = table[2]["positive"], "the " * 30
    path.write_text("".join(json.dumps(row) + "\n" for row in table))
    values = {"valid_share": None, "batch_size": 8, "epochs": 1}
    said = [
        f"{path}: 2 rows share a query or a positive with others, directly or through others, and are no negatives of "
        f"them; the first: {path}: line 8, of the group of {path}: line 3",
        f"{path}: 1 texts have more than 16 tokens and are cut; the first: {path}: line 5, column 'positive', "
        "32 tokens",
    ]
    alone = "batches: 1 of 2 in the first epoch have one example, which nothing is compared with; the first: query"
    planned = plan_text(settings(folder, path, tmp_path / "plan", **values)).splitlines()
    notes = [line.removeprefix("note").strip() for line in planned if line.startswith("note")]
    assert notes[:2] == said and len(notes) == 3 and notes[2].startswith(f"{alone} 'what is thing")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run(settings(folder, path, tmp_path / "run", **values))
    assert [str(one.message) for one in caught if one.filename.endswith("runs.py")] == notes
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run(settings(folder, path, tmp_path / "quiet", **values), quiet=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in table[:3]))
    for values in ({"batch_size": 3}, {"batch_size": 2, "negatives": ["negative"]}):
        more = {"valid_share": None, "epochs": 1}
        assert "note" not in plan_text(settings(folder, path, tmp_path / "plan", **more, **values))


def test_rows_say_what_is_found_first() -> None:
    source = EmbeddingSource.read(
        [{"query": "thing1", "positive": "a thing1"}, {"query": "thing2", "positive": "the thing2"}],
        BertTokenizer(WORDS),
    )
    predictions = Predictions(source.lengths(0))
    predictions.add(np.array([1, 0]), {"embeddings": np.array([[[0, 1], [1, 0]], [[1, 0.1], [0.5, 1]]], np.float32)})
    rows = list(EmbeddingTask(None, source).rows(source, predictions))
    assert [(row["rank"], row["found"], row["positive"]) for row in rows] == [
        (2, "the thing2", "a thing1"), (2, "a thing1", "the thing2")
    ]  # fmt: skip
