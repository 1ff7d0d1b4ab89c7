"""RerankingTask: metrics as sentence-transformers counts them, runs that learn, folders that it opens, refusals."""

import json
import random
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from bert_fast import BertConfig, BertForMaskedLM, BertForSequenceClassification, BertTokenizer
from bert_fast.data.reranking import RerankingSource
from bert_fast.testing.tolerances import ABSOLUTE
from bert_fast.training.config import SettingsError
from bert_fast.training.ordering import ordering_metrics
from bert_fast.training.recipes import CrossEncoder, plan_text, run
from bert_fast.training.recipes.inference import TrainedModel
from bert_fast.training.recipes.settings import Settings
from bert_fast.training.task import Predictions
from bert_fast.training.tasks import RerankingTask

NOUNS = [f"thing{k}" for k in range(40)]
WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "what", "is", "a", "the", "of", "it", *NOUNS, "not"]


def rows(count: int) -> list[dict[str, Any]]:
    """Documents that belong to their query begin with "the", others with "not"."""
    draw = random.Random(0)
    made = []
    for number in range(count):
        thing, other, third = draw.sample(NOUNS, 3)
        fill = " ".join(draw.choices(["is", "a", "of", "it"], k=draw.randint(1, 5)))
        documents = [f"the {thing} {fill}", f"not {other} {fill}", f"not {third}"]
        made.append({
            "query": f"what is {thing} {number % 7 * 'of '}", "positive": documents[0], "n1": documents[1],
            "n2": documents[2], "teacher": [2.0, -1.0, -2.0], "document": documents, "label": [1, 0, 0],
        })  # fmt: skip
    return made


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    path = tmp_path_factory.mktemp("model")
    config = BertConfig(
        vocab_size=len(WORDS), hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=64,
        max_position_embeddings=48,
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
        "learning_rate": 1e-2, "epochs": 8, "max_length": 24,
    }  # fmt: skip
    return Settings.of("rerank", values | more)


NEGATIVES = {"negatives": ["n1", "n2"]}


def scored(source: RerankingSource, scores: Any) -> Predictions:
    """Predictions that hold these scores, one for each sequence."""
    predictions = Predictions(source.lengths(0))
    counts = np.diff(source.cu_lists)
    matrix = np.full((len(source), counts.max()), np.nan, np.float32)
    matrix[np.arange(counts.max()) < counts[:, None]] = scores
    predictions.add(np.arange(len(source)), {"scores": matrix})
    return predictions


@pytest.mark.parametrize("ties", [False, True])
def test_metrics_are_those_of_sentence_transformers(ties: bool) -> None:
    """Several rows of a query, documents in several rows, more than ten documents, a query without a relevant one."""
    evaluation = pytest.importorskip("sentence_transformers.cross_encoder.evaluation")
    draw = np.random.default_rng(0)
    made, samples = [], []
    for query in NOUNS[:12]:
        texts = [f"{'the ' * k}a" for k in range(int(draw.integers(2, 30)))]
        relevant = (
            set() if query == "thing3" else {*draw.choice(texts, size=draw.integers(1, len(texts)), replace=False)}
        )
        samples.append({
            "query": query, "positive": [text for text in texts if text in relevant],
            "negative": [text for text in texts if text not in relevant],
        })  # fmt: skip
        half = len(texts) // 2
        for part in (texts[: half + 1], texts[half:]):  # one document is in both
            made.append({"query": query, "document": part, "label": [float(text in relevant) for text in part]})
    order = draw.permutation(len(made))
    source = RerankingSource.read([made[row] for row in order], BertTokenizer(WORDS))
    score_of: dict[tuple[str, str], float] = {}
    for query, texts in zip(source.queries, source.documents, strict=True):
        for text in texts:
            score = draw.integers(0, 4) / 4 if ties else draw.normal()
            score_of.setdefault((query, text), float(np.float32(score)))
    scores = [
        score_of[query, text] for query, texts in zip(source.queries, source.documents, strict=True) for text in texts
    ]
    found = RerankingTask(None, source).score(source, scored(source, scores))

    class Given:
        def predict(self, pairs: list[list[str]], **_: Any) -> np.ndarray:
            return np.array([score_of[query, text] for query, text in pairs], np.float32)

    theirs = evaluation.CrossEncoderRerankingEvaluator(samples, at_k=10, write_csv=False)
    theirs.store_metrics_in_model_card_data = lambda *_: None
    expected = theirs(Given())
    assert found.keys() == {"mrr@10", "ndcg@10", "map"}
    for name in ("ndcg@10", "map") if ties else found:  # the order of equal scores is not defined there
        assert found[name] == pytest.approx(expected[name]), name


def test_a_document_that_belongs_to_its_query_in_one_row_belongs_to_it() -> None:
    pairs = [("what", "thing1", 0.0), ("what", "thing1", 1.0), ("what", "thing2", 0.0)]
    source = RerankingSource.read(
        [dict(zip(("query", "document", "label"), pair, strict=True)) for pair in pairs], BertTokenizer(WORDS)
    )
    predictions = scored(source, [0.2, 0.2, 0.5])
    assert RerankingTask(None, source).score(source, predictions)["mrr@10"] == 0.5
    assert [row["rank"] for row in RerankingTask(None, source).rows(source, predictions)] == [2, 2, 1]


def test_metrics_by_hand() -> None:
    found = ordering_metrics([[0.5, 0.5, 0.1], [1.0], [1.0]], [[True, False, False], [True], [False]])
    assert found["mrr@10"] == pytest.approx((1 / 2 + 1 + 0) / 3)
    assert found["ndcg@10"] == pytest.approx(((1 + 1 / np.log2(3)) / 2 + 1 + 0) / 3)
    assert found["map"] == pytest.approx((1 / 2 + 1 + 0) / 3)
    late = ordering_metrics([[float(-k) for k in range(12)]], [[k == 10 for k in range(12)]])
    assert late == pytest.approx({"mrr@10": 0, "ndcg@10": 0, "map": 1 / 11})


KINDS: dict[str, tuple[dict[str, Any], str]] = {
    "binary": ({}, "BinaryCrossEntropyLoss"),
    "mse": ({"loss": "mse"}, "MSELoss"),
    "list_net": ({"loss": "list_net"}, "ListNetLoss"),
    "softmax": (NEGATIVES, "MultipleNegativesRankingLoss"),
    "margins": (NEGATIVES | {"teacher": "teacher"}, "MarginMSELoss"),
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_run_learns_and_sentence_transformers_opens_it(kind: str, folder: Path, table: Path, tmp_path: Path) -> None:
    library = pytest.importorskip("sentence_transformers")
    options, loss_name = KINDS[kind]
    result = run(settings(folder, table, tmp_path / "run", **options), quiet=True)
    assert result.metrics["ndcg@10"] > 0.95 and result.best_metric is not None
    records = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    losses = [record["metrics"]["loss"] for record in records if "metrics" in record]
    assert losses[-1] < losses[0]
    queries = ["what is thing1", "what is thing2 of it " + "a " * 40, "it"]
    documents = ["the thing1 is", "not thing7 " * 20, "not"]
    ours = CrossEncoder.from_pretrained(tmp_path / "run" / "model").scores(queries, documents)
    model = library.CrossEncoder(str(tmp_path / "run" / "model"), device="cpu")
    assert model.max_seq_length == 24 and model.num_labels == 1
    pairs = list(zip(queries, documents, strict=True))
    np.testing.assert_allclose(model.predict(pairs), ours, rtol=0, atol=ABSOLUTE["minilm_embeddings"])
    _same_loss(kind, loss_name, model, tmp_path / "run", table)


def _same_loss(kind: str, name: str, model: Any, folder: Path, table: Path) -> None:
    """The loss of a batch, as the task makes it, is that of sentence-transformers' on the same texts."""
    losses = pytest.importorskip("sentence_transformers.cross_encoder.losses")
    trained = TrainedModel.load(folder)
    few = [json.loads(line) for line in table.read_text().splitlines()[:5]]
    source = trained.read(few, is_labelled=True)
    task: Any = trained.settings.data.make_task(None, source)
    batch = source.batch(0, np.arange(5))
    with torch.no_grad():
        loss = task.loss_parts(trained.model, batch)["loss"]
        queries, columns = [row["query"] for row in few], [[row[n] for row in few] for n in ("positive", "n1", "n2")]
        flat = [[row["query"] for row in few for _ in range(3)], [text for row in few for text in row["document"]]]
        labels = torch.tensor([one for row in few for one in row["label"]], dtype=torch.float32)
        if kind in ("binary", "mse"):
            expected = getattr(losses, name)(model)(flat, labels)
        elif kind == "list_net":
            lists = [queries, [row["document"] for row in few]]
            expected = losses.ListNetLoss(model)(lists, [*labels.view(5, 3)])
        elif kind == "softmax":
            theirs = losses.MultipleNegativesRankingLoss(model, scale=1.0, activation_fn=None)
            scores = [theirs.call_model_with_columns(queries, column) for column in columns]
            expected = theirs.calculate_loss(scores, 5)
        else:
            expected = losses.MarginMSELoss(model)([queries, *columns], torch.tensor([row["teacher"] for row in few]))
    torch.testing.assert_close(loss, expected, rtol=0, atol=ABSOLUTE["minilm_embeddings"])
    counts = {"binary": 15, "mse": 15, "list_net": 5, "softmax": 5, "margins": 10}
    assert task.label_counts(batch) == {"loss": counts[kind]}


@pytest.mark.parametrize("loss", ["binary", "mse", "softmax", "list_net", "margin_mse"])
def test_lists_of_other_lengths_add_up(loss: Any, folder: Path) -> None:
    """A batch's loss is the mean of those of its examples, each by itself, over what `label_counts` counts."""
    draw = random.Random(1)
    made = []
    for count in (2, 5, 3, 2):
        documents = [f"{'the ' * k}thing{k}" for k in range(count)]
        made.append({"query": "what", "document": documents, "label": [draw.random() for _ in documents]})
    source = RerankingSource.read(made, BertTokenizer.from_pretrained(folder), loss=loss)
    torch.manual_seed(0)
    model = BertForSequenceClassification(BertConfig.from_pretrained(folder, num_labels=1, initializer_range=0.5))
    task = RerankingTask(source, loss=loss)
    whole = source.batch(0, np.array([1, 3, 0, 2]))
    total, counted = 0.0, 0
    with torch.no_grad():
        model.eval()
        for index in range(4):
            batch = source.batch(0, np.array([index]))
            count = task.label_counts(batch)["loss"]
            total, counted = total + task.loss_parts(model, batch)["loss"].item() * count, counted + count
        found = task.loss_parts(model, whole)["loss"].item()
        said = task.predict(model, whole)[1]["scores"]
    assert counted == task.label_counts(whole)["loss"]
    assert found == pytest.approx(total / counted, abs=ABSOLUTE["minilm_embeddings"])
    assert said.shape == (4, 5) and said.isnan().sum(1).tolist() == [0, 3, 3, 2]


def test_answers_about_files_and_lines(folder: Path, table: Path, tmp_path: Path) -> None:
    run(settings(folder, table, tmp_path / "run", **NEGATIVES, epochs=1), quiet=True)
    trained = TrainedModel.load(tmp_path / "run")
    metrics = trained.evaluate([str(table)])
    assert {"loss", "mrr@10", "ndcg@10", "map"} == metrics.keys()
    line = trained.settings.data.parse_line("what is it\tthe thing1", 1)
    answers = list(trained.answers(trained.read([line, {"query": "what is it", "document": ["not", "a"]}])))
    assert [answer["document"] for answer in answers] == ["the thing1", "not", "a"]
    assert [answer["index"] for answer in answers] == [0, 1, 1]
    assert sorted(answer["rank"] for answer in answers) == [1, 2, 3]  # among all documents of the query
    best = max(answers, key=lambda answer: answer["score"])
    assert best["rank"] == 1 and "relevant" not in best
    with pytest.raises(ValueError, match="a query and a document with a tab between them, got 1"):
        trained.settings.data.parse_line("what", 1)
    lines = (tmp_path / "run" / "predictions" / "valid.tsv").read_text().splitlines()
    assert lines[0].split("\t") == ["index", "score", "rank", "relevant", "query", "document"]
    assert (len(lines) - 1) % 3 == 0


def test_a_query_is_on_one_side(folder: Path, table: Path, tmp_path: Path) -> None:
    doubled = [dict(row, query=row["query"][: len("what is thing12")].strip()) for row in rows(96)]
    path = tmp_path / "train.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in doubled))
    data = settings(folder, path, tmp_path).data
    train, valid = data.sources(
        BertTokenizer.from_pretrained(folder), seed=0, tokens_dir=None, on_main=lambda action: action()
    )
    assert len(train) + len(valid) == 96 and len(set(valid.queries)) > 4
    assert not set(train.queries) & set(valid.queries)


def test_a_run_goes_on_where_it_was(folder: Path, table: Path, tmp_path: Path) -> None:
    """Without its last two checkpoints, as if it had been killed after the first one: the same weights, bit for bit."""
    how = settings(folder, table, tmp_path / "run", **NEGATIVES, epochs=3, keep_checkpoints=3)
    run(how, quiet=True)
    checkpoints = sorted((tmp_path / "run" / "checkpoints").glob("step-*"))
    assert len(checkpoints) == 3
    weights = (checkpoints[-1] / "model.safetensors").read_bytes()
    for path in checkpoints[1:]:
        shutil.rmtree(path)
    assert run(how, resume="must", quiet=True).step == 15
    assert (checkpoints[-1] / "model.safetensors").read_bytes() == weights


def test_what_would_be_done(folder: Path, table: Path, tmp_path: Path) -> None:
    text = plan_text(settings(folder, table, tmp_path / "run", **NEGATIVES))
    assert "rerank: BertForSequenceClassification" in text and "(by ndcg@10)" in text and "1 [CLS] what is" in text
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"graphs": True}, "graphs: expected False for rerank"),
        ({"teacher": "teacher"}, "teacher: goes with negatives"),
        ({"negatives": ["n1"], "loss": "margin_mse"}, "teacher: expected the column of the margins"),
        ({"loss": "hinge"}, "loss: expected one of binary, softmax"),
        ({"relevant_from": 2.0}, "valid: expected documents that belong to their queries"),
        ({"max_length": 49}, "max_length: expected at most the model's 48 positions, got 49"),
    ],
    ids=["graphs", "teacher", "no teacher", "loss", "relevant", "length"],
)
def test_what_is_refused_before_the_first_step(
    values: dict[str, Any], message: str, folder: Path, table: Path, tmp_path: Path
) -> None:
    with pytest.raises(SettingsError, match=message):
        run(settings(folder, table, tmp_path / "run", **values), quiet=True)
    assert not (tmp_path / "run" / "model").exists()


def test_any_classifier_can_begin(folder: Path, table: Path, tmp_path: Path) -> None:
    """The head of three classes is left, and so is what an older version of a cross-encoder did to its scores."""
    config = BertConfig.from_pretrained(folder, num_labels=3)
    config.sbert_ce_default_activation_function = "torch.nn.modules.activation.Sigmoid"
    BertForSequenceClassification(config).save_pretrained(tmp_path / "start")
    BertTokenizer(WORDS).save_pretrained(tmp_path / "start")
    run(settings(tmp_path / "start", table, tmp_path / "run", **NEGATIVES, epochs=1), quiet=True)
    library = pytest.importorskip("sentence_transformers")
    model = library.CrossEncoder(str(tmp_path / "run" / "model"), device="cpu")
    ours = CrossEncoder.from_pretrained(tmp_path / "run" / "model").scores(["what"], ["the it"])
    np.testing.assert_allclose(model.predict([("what", "the it")]), ours, rtol=0, atol=ABSOLUTE["minilm_embeddings"])
