"""Saving: transformers opens it exactly; a full disk or a kill at any moment leaves the old or the new checkpoint."""

import json
import os
import signal
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from bert_fast.errors import CheckpointError
from bert_fast.models import checkpoint_writer
from bert_fast.models.checkpoint import load_checkpoint, load_into
from bert_fast.models.checkpoint_writer import save_checkpoint
from bert_fast.models.config import BertConfig

transformers = pytest.importorskip("transformers")

Make = Callable[..., nn.Module]
ARCHITECTURES = {
    "BertModel": "AutoModel",
    "BertForPreTraining": "AutoModelForPreTraining",
    "BertForMaskedLM": "AutoModelForMaskedLM",
    "BertLMHeadModel": "AutoModelForCausalLM",
    "BertForNextSentencePrediction": "AutoModelForNextSentencePrediction",
    "BertForSequenceClassification": "AutoModelForSequenceClassification",
    "BertForMultipleChoice": "AutoModelForMultipleChoice",
    "BertForTokenClassification": "AutoModelForTokenClassification",
    "BertForQuestionAnswering": "AutoModelForQuestionAnswering",
}


def files(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir()}


def holds(directory: Path, model: nn.Module) -> bool:
    """Whether the directory's weights are exactly those of the model, and its configuration can be read."""
    BertConfig.from_pretrained(directory)
    stored, state = load_checkpoint(directory), model.state_dict()
    return stored.keys() <= state.keys() and all(torch.equal(value, state[key]) for key, value in stored.items())


@pytest.mark.parametrize(("name", "auto"), ARCHITECTURES.items())
@pytest.mark.parametrize("max_shard_size", ["50GB", "4KB"])
def test_transformers_opens_it(make_hf: Make, tmp_path: Path, name: str, auto: str, max_shard_size: str) -> None:
    model = make_hf(name, is_decoder=name == "BertLMHeadModel", num_labels=3)
    assert save_checkpoint(tmp_path / "new" / "dir", model, model.config, max_shard_size=max_shard_size).is_dir()
    directory = tmp_path / "new" / "dir"
    assert (directory / "model.safetensors").exists() == (max_shard_size == "50GB")
    opened, info = getattr(transformers, auto).from_pretrained(directory, output_loading_info=True)
    assert type(opened) is type(model)
    assert not info["missing_keys"] and not info["unexpected_keys"] and not info["mismatched_keys"]
    assert opened.state_dict().keys() == model.state_dict().keys()
    assert all(torch.equal(value, opened.state_dict()[key]) for key, value in model.state_dict().items())
    assert opened.config.num_labels == 3 and opened.config.architectures == [name]
    again = make_hf(name, num_labels=3)
    load_into(again, load_checkpoint(directory), strict=True)
    assert all(torch.equal(value, again.state_dict()[key]) for key, value in model.state_dict().items())


@pytest.mark.parametrize("max_shard_size", [10**9, 1])
def test_tied_parameters_are_stored_once_as_transformers_does(
    make_hf: Make, tmp_path: Path, max_shard_size: int
) -> None:
    for name in ("BertForMaskedLM", "BertForPreTraining"):
        ours, theirs = tmp_path / f"ours-{name}", tmp_path / f"theirs-{name}"
        model = make_hf(name)
        save_checkpoint(ours, model, model.config, max_shard_size=max_shard_size)
        model.save_pretrained(theirs)
        assert load_checkpoint(ours).keys() == load_checkpoint(theirs).keys()
    if max_shard_size > 1:
        with safe_open(ours / "model.safetensors", framework="pt") as file:
            assert file.metadata() == {"format": "pt"}
    else:
        index = json.loads((ours / "model.safetensors.index.json").read_text())
        assert len(set(index["weight_map"].values())) == len(index["weight_map"])  # one tensor a file
        parameters = sum(parameter.numel() for parameter in model.parameters())
        assert index["metadata"] == {"total_parameters": parameters, "total_size": 4 * parameters}


def test_config_is_filled_in_on_a_copy(make_hf: Make, tmp_path: Path) -> None:
    config = BertConfig(hidden_size=16, num_attention_heads=4, note="kept")
    save_checkpoint(tmp_path, make_hf("BertForTokenClassification").to(torch.bfloat16), config)
    saved = BertConfig.from_pretrained(tmp_path)
    assert saved.architectures == ["BertForTokenClassification"] and saved.dtype is torch.bfloat16
    assert saved.note == "kept"  # type: ignore[attr-defined]
    assert config.architectures is None and config.dtype is None
    assert load_checkpoint(tmp_path)["classifier.weight"].dtype is torch.bfloat16


def test_wrappers_are_taken_off(make_hf: Make, tmp_path: Path) -> None:
    model = make_hf("BertModel")
    for i, wrapped in enumerate((nn.DataParallel(model), torch.compile(model), torch.compile(nn.DataParallel(model)))):
        save_checkpoint(tmp_path / str(i), wrapped, model.config)
        assert holds(tmp_path / str(i), model)
        assert BertConfig.from_pretrained(tmp_path / str(i)).architectures == ["BertModel"]


class _Views(nn.Module):
    """Parameters that are not contiguous or share one storage without being tied."""

    def __init__(self) -> None:
        super().__init__()
        fused = torch.randn(6, 4)
        self.query, self.key = nn.Parameter(fused[:3]), nn.Parameter(fused[3:])
        self.transposed = nn.Parameter(torch.randn(3, 5).t())
        self.empty = nn.Parameter(torch.empty(0, 4))
        self.also_empty = nn.Parameter(torch.empty(0, 4))


def test_views_and_strides(tmp_path: Path) -> None:
    model = _Views()
    save_checkpoint(tmp_path, model, BertConfig())
    assert holds(tmp_path, model) and len(load_checkpoint(tmp_path)) == 5
    assert (tmp_path / "model.safetensors").stat().st_size < 1000


class _Shared(nn.Module):
    """Values of every kind, under two names, overlapping, and as other numbers in the same memory."""

    def __init__(self) -> None:
        super().__init__()
        bits = torch.randint(-(2**31), 2**31, (7, 4), dtype=torch.int32)  # NaNs with payloads, denormals, -0
        self.x = nn.Parameter(bits.view(torch.float32))
        self.again = self.x
        self.top = nn.Parameter(self.x.data[:3])
        self.bits = nn.Buffer(bits)
        for dtype in (torch.float64, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.uint8, torch.bool):
            name = str(dtype).removeprefix("torch.")
            self.register_buffer(f"of_{name}", torch.randint(0, 2, (5, 8), dtype=torch.uint8).view(dtype))
        self.scalar = nn.Buffer(torch.tensor(3))


@pytest.mark.parametrize("max_shard_size", [10**9, 1])
@pytest.mark.parametrize("tied", [True, False])
def test_read_back_bit_for_bit(tmp_path: Path, tied: bool, max_shard_size: int) -> None:
    model = _Shared()
    save_checkpoint(tmp_path, model, BertConfig(tie_word_embeddings=tied), max_shard_size=max_shard_size)
    stored, state = load_checkpoint(tmp_path), model.state_dict()
    assert state.keys() - stored.keys() == ({"again"} if tied else set())
    for name, value in stored.items():
        assert value.dtype == state[name].dtype and value.shape == state[name].shape
        assert bytes(value.untyped_storage()) == bytes(state[name].clone().untyped_storage()), name


def test_models_that_hold_no_values(tmp_path: Path) -> None:
    config = BertConfig()
    with torch.device("meta"):
        empty = nn.Linear(2, 2)
    sparse, strange = nn.Module(), nn.Module()
    sparse.register_buffer("x", torch.eye(3).to_sparse())
    strange.register_state_dict_post_hook(lambda _, state, *__: state.update(x="text"))
    for model, got in (
        (empty, "a tensor without values, of the meta device as weight"),
        (sparse, "a tensor of layout sparse_coo as x"),
        (strange, "str as x"),
    ):
        with pytest.raises(ValueError, match=f"model: expected dense tensors in its state, got {got}"):
            save_checkpoint(tmp_path / "new", model, config)
    assert not (tmp_path / "new").exists()


def test_other_files_stay_and_old_shards_go(make_hf: Make, tmp_path: Path) -> None:
    model = make_hf("BertModel")
    (tmp_path / "vocab.txt").write_text("[PAD]")
    (tmp_path / "pytorch_model.bin").write_bytes(b"old")
    for size in (1, 9000, 9000, 10**9, 5000, 10**9):
        save_checkpoint(tmp_path, model, model.config, max_shard_size=size)
        assert holds(tmp_path, model)
        names = set(files(tmp_path)) - {"vocab.txt", "pytorch_model.bin", "config.json"}
        if size == 10**9:
            assert names == {"model.safetensors"}
        else:
            index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
            assert names == {"model.safetensors.index.json", *index["weight_map"].values()}
    assert (tmp_path / "pytorch_model.bin").read_bytes() == b"old"


def test_saving_over_the_file_the_values_came_from(make_hf: Make, tmp_path: Path) -> None:
    model = make_hf("BertModel")
    save_checkpoint(tmp_path, model, model.config)
    mapped = nn.ParameterDict({"x": load_checkpoint(tmp_path)["pooler.dense.weight"]})
    for _ in range(2):
        save_checkpoint(tmp_path, mapped, model.config)
    assert torch.equal(load_checkpoint(tmp_path)["x"], model.pooler.dense.weight)
    assert torch.equal(mapped["x"], model.pooler.dense.weight)


@pytest.mark.parametrize(
    "size", [0, -5, "", "5 apples", "GB", True, 1.5, None, pytest.param("9" * 400 + "GB", id="endless")]
)
def test_wrong_shard_sizes(make_hf: Make, tmp_path: Path, size: Any) -> None:
    model = make_hf("BertModel")
    with pytest.raises(ValueError, match="max_shard_size: expected a positive number of bytes"):
        save_checkpoint(tmp_path / "new", model, model.config, max_shard_size=size)
    assert not (tmp_path / "new").exists()


def test_wrong_arguments_change_nothing(make_hf: Make, tmp_path: Path) -> None:
    model = make_hf("BertModel")
    save_checkpoint(tmp_path, model, model.config)
    before = files(tmp_path)
    with pytest.raises(ValueError, match="hidden_act: a callable cannot be written"):
        save_checkpoint(tmp_path, make_hf("BertModel"), BertConfig(hidden_act=torch.tanh))
    with pytest.raises(TypeError, match="config: expected"):
        save_checkpoint(tmp_path, make_hf("BertModel"), {})
    assert files(tmp_path) == before
    with pytest.raises(CheckpointError, match=r"config\.json: the checkpoint could not be written"):
        save_checkpoint(tmp_path / "config.json", model, model.config)


# --- failures in the middle, with the small model in one file or in a few shards
ONE, SHARDS = 10**9, 12_000


def _half_written(path: Path | str) -> None:
    content = Path(path).read_bytes()
    Path(path).write_bytes(content[: len(content) // 2])


@pytest.mark.parametrize("old_size", [ONE, SHARDS])
@pytest.mark.parametrize(("new_size", "fails_at"), [(ONE, 1), (SHARDS, 1), (SHARDS, 2)])
def test_full_disk(
    make_hf: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, old_size: int, new_size: int, fails_at: int
) -> None:
    model = make_hf("BertModel")
    save_checkpoint(tmp_path, model, model.config, max_shard_size=old_size)
    before = files(tmp_path)
    calls = 0

    def full(tensors: dict[str, Tensor], path: Path, metadata: dict[str, str]) -> None:
        nonlocal calls
        calls += 1
        save_file(tensors, path, metadata=metadata)
        if calls == fails_at:
            _half_written(path)
            raise OSError(28, "No space left on device")

    monkeypatch.setattr(checkpoint_writer, "save_file", full)
    other = make_hf("BertModel")
    with pytest.raises(CheckpointError, match=r"could not be written: .*No space left"):
        save_checkpoint(tmp_path, other, other.config, max_shard_size=new_size)
    assert files(tmp_path) == before and holds(tmp_path, model)


@pytest.mark.parametrize("old_size", [ONE, SHARDS])
@pytest.mark.parametrize(("new_size", "fails_at"), [(ONE, 1), (SHARDS, 1), (SHARDS, 2)])
def test_renaming_that_fails(
    make_hf: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, old_size: int, new_size: int, fails_at: int
) -> None:
    """Shards that have their names already go again: no index knows them."""
    model, other = make_hf("BertModel"), make_hf("BertModel")
    save_checkpoint(tmp_path, model, model.config, max_shard_size=old_size)
    before, replace, calls = files(tmp_path), os.replace, 0

    def fail(source: Path, target: Path) -> None:
        nonlocal calls
        calls += 1
        if calls == fails_at:
            raise PermissionError(1, "Operation not permitted")
        replace(source, target)

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(CheckpointError, match="Operation not permitted"):
        save_checkpoint(tmp_path, other, other.config, max_shard_size=new_size)
    assert files(tmp_path) == before and holds(tmp_path, model)


@pytest.mark.parametrize("size", [ONE, SHARDS])
def test_threads_that_save_to_one_place(make_hf: Make, tmp_path: Path, size: int) -> None:
    """What is there in the end is one of the models, whole, and nothing else."""
    models = [make_hf("BertModel", hidden_size=width) for width in (16, 32)]
    for attempt in range(8):
        directory, together = tmp_path / str(attempt), threading.Barrier(2)

        def save(model: nn.Module, directory: Path = directory, together: threading.Barrier = together) -> None:
            together.wait()
            save_checkpoint(directory, model, model.config, max_shard_size=size)

        with ThreadPoolExecutor(2) as pool:
            list(pool.map(save, models))
        width = BertConfig.from_pretrained(directory).hidden_size
        assert holds(directory, models[width // 32])
        shards = {path.name for path in directory.glob("*.safetensors")}
        assert len(shards) == 1 or shards == _shards_of(directory)
        assert not list(directory.glob(".*"))


def _shards_of(directory: Path) -> set[str]:
    return set(json.loads((directory / "model.safetensors.index.json").read_text())["weight_map"].values())


def test_links_in_the_way(make_hf: Make, tmp_path: Path) -> None:
    model, victim = make_hf("BertModel"), tmp_path / "victim"
    victim.write_text("kept")
    directory = tmp_path / "model"
    directory.mkdir()
    for name in ("config.json", "model.safetensors", ".config.json.00000000.tmp"):
        (directory / name).symlink_to(victim)
    (directory / ".model.safetensors.00000000.tmp").symlink_to(tmp_path / "nothing")
    save_checkpoint(directory, model, model.config)
    assert holds(directory, model) and victim.read_text() == "kept"
    assert not (directory / "config.json").is_symlink() and not (directory / "model.safetensors").is_symlink()


def _killed_at(event: int, save: Callable[[], object]) -> bool:
    # Runs `save` in a child that kills itself before its `event`-th step (and half-way through writing a file).
    # Returns whether it was killed.
    child = os.fork()
    if child == 0:
        steps = 0

        def before(function: Callable[..., Any]) -> Callable[..., Any]:
            def wrapped(*arguments: Any, **options: Any) -> Any:
                nonlocal steps
                steps += 1
                if steps == event:
                    if function is save_file:
                        function(*arguments, **options)
                        _half_written(arguments[1])
                    os.kill(os.getpid(), signal.SIGKILL)
                return function(*arguments, **options)

            return wrapped

        try:
            checkpoint_writer.save_file = before(save_file)
            os.replace, os.fsync = before(os.replace), before(os.fsync)
            Path.write_text, Path.unlink = before(Path.write_text), before(Path.unlink)  # type: ignore[method-assign]
            save()
            os._exit(0)
        except BaseException:
            os._exit(1)
    status = os.waitpid(child, 0)[1]
    assert os.WIFSIGNALED(status) or os.WEXITSTATUS(status) == 0
    return os.WIFSIGNALED(status)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.parametrize("old_size", [ONE, SHARDS])
@pytest.mark.parametrize("new_size", [ONE, SHARDS])
def test_killed_at_any_moment(make_hf: Make, tmp_path: Path, old_size: int, new_size: int) -> None:
    old, new = make_hf("BertModel"), make_hf("BertModel")
    outcomes = []
    for event in range(1, 100):
        directory = tmp_path / str(event)
        save_checkpoint(directory, old, old.config, max_shard_size=old_size)
        killed = _killed_at(event, partial(save_checkpoint, directory, new, new.config, max_shard_size=new_size))
        is_old, is_new = holds(directory, old), holds(directory, new)
        assert is_old != is_new, f"neither the old nor the new checkpoint after a kill at step {event}"
        outcomes.append(is_new)
        if outcomes[-2:] in ([False], [False, True]):  # the first, and the first new one
            loaded = transformers.BertModel.from_pretrained(directory)
            assert torch.equal(loaded.pooler.dense.weight, (new if is_new else old).pooler.dense.weight)
        save_checkpoint(directory, new, new.config, max_shard_size=new_size)
        assert holds(directory, new)
        if not killed:
            break
    assert len(outcomes) > 5 and not outcomes[0] and outcomes[-1]
    assert outcomes == sorted(outcomes)  # old until one step, new from then on


def test_files_of_a_killed_process_are_removed_later(make_hf: Make, tmp_path: Path) -> None:
    model = make_hf("BertModel")
    left = [
        ".model.safetensors.0123abcd.tmp",
        ".config.json.0123abcd.tmp",
        ".model-00001-of-00002.safetensors.ab12ab12.tmp",
    ]
    others = [".model.safetensors.tmp", "model.tmp", ".notes.0123abcd.tmp"]
    for name in (*left, *others):
        (tmp_path / name).write_bytes(b"x")
    save_checkpoint(tmp_path, model, model.config)
    assert set(files(tmp_path)) == {*left, *others, "config.json", "model.safetensors"}  # may still be written to
    for name in (*left, *others):
        os.utime(tmp_path / name, (time.time() - 7200,) * 2)
    save_checkpoint(tmp_path, model, model.config)
    assert set(files(tmp_path)) == {*others, "config.json", "model.safetensors"}
