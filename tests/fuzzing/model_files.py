"""Surfaces: damaged files of models and of tokenizers, configurations of random values, and saving."""

import functools
import io
import json
import pickle
import random
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from bert_fast import models
from bert_fast.errors import CheckpointError
from bert_fast.models.checkpoint import load_checkpoint, load_into
from bert_fast.tokenization import AddedToken, BertTokenizer

from .case import Case
from .damage import Files, damage, mutated_json, read_folder, write_folder
from .tensors import garbage, spoil
from .texts import SPECIAL, Texts, vocabulary

CLASSES = ("BertForMaskedLM", "BertForMultipleChoice", "BertForNextSentencePrediction", "BertForPreTraining",
           "BertForQuestionAnswering", "BertForSequenceClassification", "BertForTokenClassification", "BertLMHeadModel",
           "BertModel")  # fmt: skip


def small_config(**changes: Any) -> models.BertConfig:
    """A BERT of a few thousand parameters."""
    sizes = {"vocab_size": 23, "hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2}
    sizes |= {"intermediate_size": 12, "max_position_embeddings": 16, "type_vocab_size": 2}
    return models.BertConfig(**(sizes | changes))


# --- models -----------------------------------------------------------------------------------------------------------


@functools.lru_cache(32)
def _saved_model(name: str, form: str) -> Files:
    """The files of a model of this class: "safetensors", "shards", "bin" or "bin shards"."""
    torch.default_generator.manual_seed(1)
    model = getattr(models, name)(small_config())
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder, max_shard_size=2000 if "shards" in form else "50GB")
        files = read_folder(Path(folder))
    if not form.startswith("bin"):
        return files
    weights = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    files = {"config.json": files["config.json"]}
    if form == "bin":
        return files | {"pytorch_model.bin": _pickled(weights)}
    half = len(weights) // 2
    parts = [dict(list(weights.items())[:half]), dict(list(weights.items())[half:])]
    names = [f"pytorch_model-0000{part}-of-00002.bin" for part in (1, 2)]
    where = {key: name for name, part in zip(names, parts, strict=True) for key in part}
    files["pytorch_model.bin.index.json"] = json.dumps({"metadata": {}, "weight_map": where}).encode()
    return files | dict(zip(names, map(_pickled, parts), strict=True))


def _pickled(value: Any, legacy: bool = False) -> bytes:
    file = io.BytesIO()
    torch.save(value, file, _use_new_zipfile_serialization=not legacy)
    return file.getvalue()


class _Code:
    """Unpickles as a call."""

    def __reduce__(self) -> Any:
        return print, ("code from a file ran",)


def _odd_weights(rng: random.Random) -> Any:
    """What a .bin file may hold in the place of a state dict."""
    good = {"bert.embeddings.word_embeddings.weight": torch.zeros(23, 8)}
    name = "bert.embeddings.word_embeddings.weight"
    return rng.choice(
        (
            lambda: garbage(rng),
            lambda: good | {name: torch.zeros(23, 8).to_sparse()},
            lambda: good | {name: torch.zeros(23, 8, device="meta")},
            lambda: good | {name: torch.zeros(1).expand(10**9, 10**6)},
            lambda: good | {name: torch.zeros(23, 8, dtype=rng.choice((torch.int8, torch.bool, torch.complex64)))},
            lambda: good | {3: torch.zeros(2)},
            lambda: good | {"x": _Code()},
            lambda: {"state_dict": {"model": {"state_dict": good}}},
            lambda: [good],
            lambda: torch.quantize_per_tensor(torch.zeros(3), 0.1, 0, torch.qint8),
            lambda: {name: spoil(rng, torch.zeros(23, 8))},
        )
    )()


def run_model_files(case: Case) -> None:
    """A model, its configuration or its weights read from damaged files."""
    rng, folder = case.rng, case.folder
    name = rng.choice(CLASSES)
    form = rng.choice(("safetensors", "safetensors", "shards", "bin", "bin shards"))
    files = dict(_saved_model(name, form))
    if form == "bin" and case.chance(0.3):
        try:
            content = _pickled(_odd_weights(rng), legacy=case.chance(0.2))
        except (RuntimeError, TypeError, NotImplementedError, AttributeError, pickle.PicklingError):
            return  # nothing that torch.save writes
        files["pytorch_model.bin"] = content
    write_folder(folder, files)
    damage(case, folder, rng.choice((0, 1, 1, 1, 2, 3)))
    kind = rng.randrange(8)
    if kind == 0:
        case.call(models.BertConfig.from_pretrained, folder)
    elif kind == 1:
        state = case.call(load_checkpoint, folder, dtype=rng.choice((None, torch.float16)))
        _expect_untouched_or_loaded(case, state)
    elif kind == 2:
        path = rng.choice(sorted(folder.iterdir()) or [folder])
        case.call(load_checkpoint, path)
    else:
        wanted = getattr(models, name if case.chance(0.8) else rng.choice(CLASSES))
        options = _loading_options(case)
        model = case.call(wanted.from_pretrained, folder, **options, names=(*_config_names(), *options))
        for parameter in (model[0] if options.get("output_loading_info") else model).parameters():
            case.expect(not parameter.is_meta, "a loaded model has parameters on meta")


def _loading_options(case: Case) -> dict[str, Any]:
    rng = case.rng
    options: dict[str, Callable[[], Any]] = {
        "dtype": lambda: rng.choice((None, "auto", "float16", torch.bfloat16, "int8", "torch.float64")),
        "ignore_mismatched_sizes": lambda: case.chance(0.5),
        "num_labels": lambda: rng.choice((1, 2, 3, 7)),
        "device": lambda: rng.choice(("cpu", "meta", "nowhere", None)),
        "hidden_dropout_prob": lambda: rng.choice((0.0, 0.5, 1.0, 2.0)),
        "add_pooling_layer": lambda: case.chance(0.5),
        "output_loading_info": lambda: True,
    }
    chosen = {name: options[name]() for name in rng.sample(sorted(options), rng.choice((0, 0, 1, 2)))}
    if chosen and case.chance(0.15):
        name = rng.choice(sorted(chosen))
        chosen[name] = spoil(rng, chosen[name])
    return chosen


@functools.lru_cache(1)
def _config_names() -> tuple[str, ...]:
    return ("num_labels", "torch_dtype", "model_type", *vars(small_config()))


def _expect_untouched_or_loaded(case: Case, state: dict[str, torch.Tensor]) -> None:
    """Loads weights into a model; one that is refused is as it was."""
    model = models.BertForMaskedLM(small_config(vocab_size=case.rng.choice((23, 23, 24))))
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    strict, ignored = case.chance(0.5), case.chance(0.5)
    case.say(f"load_into(BertForMaskedLM(...), state, strict={strict}, ignore_mismatched_sizes={ignored})")
    try:
        load_into(model, state, strict=strict, ignore_mismatched_sizes=ignored, source=case.folder)
    except (CheckpointError, ValueError, TypeError) as error:
        for name, tensor in model.state_dict().items():
            case.expect(torch.equal(tensor, before[name]), f"load_into refused ({error}) and changed {name}")


# --- configurations ---------------------------------------------------------------------------------------------------


def run_configurations(case: Case) -> None:
    """`BertConfig` of random values, written and read back; a model of it where that is small."""
    rng = case.rng
    values = small_config().to_dict()
    for _ in range(rng.choice((1, 1, 2, 3))):
        name = rng.choice(sorted(values))
        alike = [value for value in _CONFIG_VALUES if type(value) is type(values[name])]
        likely = alike if alike and case.chance(0.7) else _CONFIG_VALUES
        values[name] = spoil(rng, values[name]) if case.chance(0.2) else rng.choice(likely)
    if case.chance(0.2):
        values = mutated_json(rng, values)
    if not isinstance(values, dict) or not all(isinstance(name, str) for name in values):
        return
    names = (*_config_names(), *values)
    config = case.call(models.BertConfig, **values, names=names)
    if case.chance(0.5):
        case.call(config.save_pretrained, case.folder / "saved", names=names)
        again = case.call(models.BertConfig.from_pretrained, case.folder / "saved")
        lines = set(config.to_json_string().splitlines()) ^ set(again.to_json_string().splitlines())
        case.expect(not lines, f"a configuration came back as another: {sorted(lines)}")
    elif case.chance(0.3):
        case.call(config.with_overrides, **{rng.choice(names): rng.choice(_CONFIG_VALUES)}, names=names)
    elif case.chance(0.3):
        case.call(setattr, config, rng.choice(names), rng.choice(_CONFIG_VALUES), names=names)
    else:
        sizes = (config.vocab_size, config.hidden_size, config.intermediate_size, config.max_position_embeddings)
        if max(*sizes, config.type_vocab_size, config.num_labels) < 5000 and config.num_hidden_layers < 50:
            case.call(getattr(models, rng.choice(CLASSES)), config, names=names)


_CONFIG_VALUES: tuple[Any, ...] = (
    *(None, True, 0, 1, 2, 3, -1, 7, 64, 10**9, 2**63, 0.0, 0.5, 1.5, float("nan"), "", "gelu", "relu", "relative_key"),
    *(
        "float16",
        "single_label_classification",
        [],
        ["A"],
        {},
        {0: "a", 1: "b"},
        {"a": 0},
        {1: "a"},
        {"0": "a", "1": "a"},
    ),
    *({0: [1]}, {5: [0]}, {0: ["x"]}, torch.float16, torch.int8, torch.nn.functional.gelu, object()),
)


# --- tokenizers -------------------------------------------------------------------------------------------------------


@functools.lru_cache(12)
def _saved_tokenizer(number: int) -> Files:
    rng = random.Random(number)
    added = {"extra_special_tokens": ["<s>", "x y"]} if number % 2 else {}
    tokenizer = BertTokenizer(vocabulary(number)[:60], do_lower_case=rng.random() < 0.5, **added)
    if number % 3 == 0:
        tokenizer.add_tokens([AddedToken("new", single_word=True), " lead"])
    with tempfile.TemporaryDirectory() as folder:
        tokenizer.save_pretrained(folder)
        files = read_folder(Path(folder))
    if number % 4 == 1:
        del files["tokenizer.json"]
    if number % 4 == 2:
        files["added_tokens.json"] = b'{"new": 60, "old": 61}'
    return files


def run_tokenizer_files(case: Case) -> None:
    """A tokenizer read from damaged files, asked to encode, and saved again."""
    rng, folder, texts = case.rng, case.folder, Texts(case)
    write_folder(folder, _saved_tokenizer(rng.randrange(12)))
    if case.chance(0.15):
        (folder / "vocab.txt").write_bytes(rng.choice((b"", b"a", b"\xff", "\n".join([*SPECIAL, "a", "a"]).encode())))
    damage(case, folder, rng.choice((0, 1, 1, 1, 2, 3)))
    place = folder if case.chance(0.8) else folder / rng.choice(("tokenizer.json", "vocab.txt", "nothing"))
    options: dict[str, Any] = {}
    if case.chance(0.2):
        options[rng.choice(("do_lower_case", "model_max_length", "padding_side", "unk_token", "vocab", "nothing"))] = (
            rng.choice((True, 7, "left", "[PAD]", garbage(rng)))
        )
    tokenizer = case.call(BertTokenizer.from_pretrained, place, **options, names=options)
    case.call(tokenizer, texts.text())
    if case.chance(0.3):
        case.call(tokenizer.save_pretrained, folder / "again", names=("vocab",))
        again = case.call(BertTokenizer.from_pretrained, folder / "again")
        case.expect(again.get_vocab() == tokenizer.get_vocab(), "a saved tokenizer came back with another vocabulary")
