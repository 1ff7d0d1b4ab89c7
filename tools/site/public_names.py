"""Every public name of the package, read from its sources, and the page that lists them with their stability.

    python -m tools.site.public_names [--write]      docs/api.md

A name is public if `__all__` of one of these modules holds it. Importing this module imports no torch.
"""

import argparse
import ast
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "api.md"
STABLE, NEW = "stable", "may change"


@dataclass(frozen=True)
class Part:
    """A public module: its name, what it is for, and whether its names are stable (but those listed)."""

    module: str
    title: str
    stability: str = STABLE
    but: tuple[str, ...] = ()


PARTS = (
    Part(
        "bert_fast", "What most programs need",
        but=(
            "XLMRobertaTokenizer", "batch_invariant", "warm_up", "BertForTextEmbedding", "graphs", "losses", "quantize",
            "unquantize",
        ),
    ),
    Part(
        "bert_fast.ops", "Operations, each with its gradient",
        but=(
            "dropout_site", "DropoutSite", "draw_seed", "gated_mlp", "linear_int8", "quantize_weight",
            "QuantizedWeight",
        ),
    ),
    Part("bert_fast.optim", "Optimizers", but=("make_lamb",)),
    Part("bert_fast.losses", "Losses of embeddings, with the negatives of a batch", NEW),
    Part("bert_fast.data", "From files to batches", NEW, ("PackedCollator",)),
    Part("bert_fast.training", "Training runs", NEW),
    Part("bert_fast.tokenization", "What tokenizers take and give", but=("XLMRobertaTokenizer",)),
    Part("bert_fast.huggingface", "transformers' models in place"),
    Part("bert_fast.graphs", "CUDA graphs of whole steps, and of layers", NEW),
    Part("bert_fast.errors", "Exceptions"),
)  # fmt: skip

# Why names left -> the names -> where they are, or what to use instead; of several, in their order.
LEFT = {
    "transformers' Trainer does it": {
        "training.TrainingConfig": "`training.TrainingArguments`; fields have transformers' names",
        "training.TrainingResult, training.Evaluation": "what `Trainer.train` and `Trainer.evaluate` return",
        "training.Task": "`train_dataset`, `eval_dataset` and `compute_metrics` of the `Trainer`",
        "training.Predictions": "arrays over all examples, as `Trainer.predict` returns them",
        "training.Observer, training.Step, training.Plan": "`transformers.TrainerCallback`",
        "recipes.Settings, recipes.run": "`bert_fast.training.Trainer`, or the commands with `--config`",
        "recipes.SettingsError": "`ValueError`; of a file `SourceError`",
        "recipes.plan_text": "nothing; `Batches.plan` says what an epoch is made of",
        "recipes.TrainedModel": "`bert-fast predict`, or `Trainer.predict` and `rows` of the task",
        "reporting.MetricsLog, reporting.read_metrics": "`log_history` in trainer_state.json",
        "reporting.ReportPage, reporting.write_report, bert-fast report": "curves.png, which the commands draw",
        "reporting.RunDirectory": "the folder as transformers leaves it",
        "reporting.ProgressLine, reporting.TensorBoardLog, reporting.default_observers": "transformers' callbacks",
        "reporting.model_flops, reporting.peak_flops": "nothing",
        "bert-fast evaluate": "`bert-fast predict RUN FILE --evaluate`",
        "bert-fast verify": "`TokenStore.verify` for stores; nothing for checkpoints, which have no digests",
    },
    "one class holds the examples of all tasks": {
        "data.ClassificationSource, tasks.ClassificationTask": "`training.tasks.classification.Classification`",
        "data.MultipleChoiceSource, tasks.MultipleChoiceTask": "`training.tasks.multiple_choice.MultipleChoice`",
        "data.QuestionAnsweringSource, tasks.QuestionAnsweringTask": (
            "`training.tasks.question_answering.QuestionAnswering`"
        ),
        "data.TokenClassificationSource, tasks.TokenClassificationTask": (
            "`training.tasks.token_classification.TokenClassification`"
        ),
    },
    "only the command needs them": {
        "recipes.SIZES, recipes.make_config": "moved to `bert_fast.cli.pretrain`; may change without notice",
    },
    "it is an example": {"bert-fast demo": "`make demo`, which runs examples/demo.py"},
    "sentence-transformers does it": {
        "bert-fast embed, recipes.embed_files": "`SentenceTransformer.encode` on a fused model",
        "bert-fast search, recipes.Index, recipes.search": "`sentence_transformers.util.semantic_search`",
        "bert-fast mine, recipes.Limits, recipes.Mined, recipes.mine": (
            "`sentence_transformers.util.mine_hard_negatives`"
        ),
        "bert-fast finetune embed, bert-fast finetune rerank": (
            "`SentenceTransformerTrainer`, `CrossEncoderTrainer` on a fused model"
        ),
        "recipes.CrossEncoder": "`bert_fast.fuse(sentence_transformers.CrossEncoder(...))`",
        "recipes.Embedder": "`bert_fast.fuse(SentenceTransformer(...))`, or `bert_fast.BertForTextEmbedding`",
        "recipes.read_corpus": "reading the lines of the file",
        "losses.contrastive, losses.cosent, losses.cosine_mse": (
            "`ContrastiveLoss`, `CoSENTLoss`, `CosineSimilarityLoss`"
        ),
        "losses.margin_mse, losses.matryoshka, losses.triplet": "`MarginMSELoss`, `MatryoshkaLoss`, `TripletLoss`",
        "losses.list_margin_mse, losses.list_softmax": "`MarginMSELoss`, `ListNetLoss` of cross-encoders",
        "losses.score_cross_entropy, losses.score_mse": "`BinaryCrossEntropyLoss`, `MSELoss` of cross-encoders",
    },
    "backward by parts is the loss's own backward": {
        "losses.cached_backward": "`losses.cached_loss`, with an ordinary `backward`",
    },
}


@dataclass(frozen=True)
class Name:
    """A public name: where it is public, where it is defined, what its docstring says first, its stability."""

    name: str
    part: Part
    defined: str
    says: str

    @property
    def stability(self) -> str:
        other = NEW if self.part.stability == STABLE else STABLE
        return other if self.name in self.part.but else self.part.stability

    @property
    def path(self) -> str:
        """As users import it."""
        return f"{self.part.module}.{self.name}"


def file_of(module: str) -> Path | None:
    """The source of a dotted module name; None if there is none."""
    path = ROOT.joinpath(*module.split("."))
    return next((p for p in (path / "__init__.py", path.with_suffix(".py")) if p.is_file()), None)


def public_names(part: Part) -> list[Name]:
    """In the order of `__all__`, without dunders. ValueError where `but` names none of them."""
    path = file_of(part.module)
    assert path is not None, part.module
    assignments = (node for node in ast.parse(path.read_text(encoding="utf-8")).body if isinstance(node, ast.Assign))
    names: list[str] = next(ast.literal_eval(a.value) for a in assignments if ast.unparse(a.targets[0]) == "__all__")
    if unknown := set(part.but) - set(names):
        raise ValueError(f"{part.module}.__all__: no {', '.join(sorted(unknown))}")
    return [Name(name, part, *found_in(part.module, name)) for name in names if not name.startswith("__")]


def found_in(module: str, name: str) -> tuple[str, str]:
    """(where a name of a module is defined, the first sentence of its docstring); imports are followed.

    ValueError where the module has no such name.
    """
    path = file_of(module)
    for node in _statements(ast.parse(path.read_text(encoding="utf-8"))) if path else ():
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name == name:
            return f"{module}.{name}", _first(ast.get_docstring(node))
        if isinstance(node, ast.Assign | ast.AnnAssign) and name in _targets(node):
            return f"{module}.{name}", "A constant"
        if isinstance(node, ast.ImportFrom) and node.module and f"{node.module}.{name}" != f"{module}.{name}":
            for alias in node.names:
                if (alias.asname or alias.name) == name:
                    return found_in(node.module, alias.name)
    submodule = file_of(f"{module}.{name}")
    if submodule is None:
        raise ValueError(f"{module}: {name} is neither defined nor imported there")
    return f"{module}.{name}", _first(ast.get_docstring(ast.parse(submodule.read_text(encoding="utf-8"))))


def _targets(node: ast.Assign | ast.AnnAssign) -> list[str]:
    return [ast.unparse(t) for t in (node.targets if isinstance(node, ast.Assign) else [node.target])]


def _statements(tree: ast.Module) -> Iterator[ast.stmt]:
    """Those of a module, also where they are for type checkers alone."""
    for node in tree.body:
        yield node
        if isinstance(node, ast.If):
            yield from node.body


def _first(docstring: str | None) -> str:
    paragraph = " ".join((docstring or "").split("\n\n")[0].split())
    return paragraph.split(". ")[0].rstrip(".:") if paragraph else ""


HEAD = """\
# Every public name

<!-- Written by `python -m tools.site.public_names --write`. -->
A name is public if a table below has it; all else may change in any release, modules whose name begins with an
underscore above all. `bert_fast.<name>` is the short way to what most programs need.

**stable**: the name, its arguments and what they mean stay. What has to go is first marked: for one minor release and
at least three months it works as before, warns (`DeprecationWarning`) and says what to use instead; the changelog lists
it under "Deprecated". Before version 1.0 that holds from one minor version (0.1) to the next (0.2).

**may change**: works and is tested like the rest, but its form is young; it may change in a minor release without a
warning. The changelog says so.

Part of the interface are also: parameter names and files of models, token ids, dropout masks of a seed, and what an
error names. Speeds, memory, and which back-end computes an operation are not. Numbers may differ in their last bits
between releases.
"""

LEFT_HEAD = """\
## What left
Names that earlier versions had. All other names stay and are in the tables above. No released version had these, so
there is no deprecation period. `recipes`, `reporting` and `tasks` were modules of `bert_fast.training`. Losses without
a module are those of sentence-transformers.
"""


def render() -> str:
    """The page."""
    parts = [HEAD]
    for part in PARTS:
        rows = [f"| `{n.name}` | {n.says.replace('|', '&#124;')} | {n.stability} |" for n in public_names(part)]
        head = f"## {part.module}\n{part.title}.\n\n| name | what | stability |\n| --- | --- | --- |\n"
        parts.append(head + "\n".join(rows) + "\n")
    rows = [
        f"| {', '.join(f'`{name}`' for name in names.split(', '))} | {use} | {reason} |"
        for reason, left in LEFT.items()
        for names, use in left.items()
    ]
    parts.append(f"{LEFT_HEAD}\n| name | now | because |\n| --- | --- | --- |\n" + "\n".join(rows) + "\n")
    return "\n".join(parts)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.site.public_names", description=__doc__.splitlines()[0])
    parser.add_argument("--write", action="store_true", help="write docs/api.md; else print it")
    if parser.parse_args(arguments).write:
        PAGE.write_text(render(), encoding="utf-8")
    else:
        print(render(), end="")
    return 0


if __name__ == "__main__":
    sys.exit(main())
