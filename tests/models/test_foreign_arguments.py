"""Every argument of transformers' from_pretrained and save_pretrained: taken, of no effect, or refused by name."""

import ast
import inspect
import shutil
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from bert_fast import BertConfig, BertForSequenceClassification, BertLMHeadModel, BertModel
from bert_fast.errors import CheckpointError
from bert_fast.models.foreign_arguments import one_device
from bert_fast.models.text_embedding import BertForTextEmbedding

transformers = pytest.importorskip("transformers", minversion="5")
Make = Callable[..., nn.Module]
pytestmark = pytest.mark.filterwarnings("ignore:Bert")

# What is taken with its meaning -> a value that a plain folder goes with.
TAKEN: dict[str, Any] = {
    "pretrained_model_name_or_path": None, "config": None, "cache_dir": "cache", "ignore_mismatched_sizes": True,
    "force_download": False, "local_files_only": True, "token": False, "revision": "main", "use_safetensors": True,
    "state_dict": None, "output_loading_info": False, "dtype": "auto", "torch_dtype": torch.float32,
    "device_map": "cpu", "subfolder": "", "variant": None, "key_mapping": {},
}  # fmt: skip
# What changes nothing -> a value that people give.
WITHOUT_EFFECT: dict[str, Any] = {
    "weights_only": False, "disable_mmap": True, "tqdm_class": object, "_from_pipeline": "text", "_from_auto": True,
    "offload_folder": "offload", "offload_buffers": True, "_commit_hash": "1" * 40, "trust_remote_code": True,
    "allow_all_kernels": True, "attn_implementation": "flash_attention_2", "experts_implementation": "eager",
    "mirror": "m", "_fast_init": True, "low_cpu_mem_usage": True, "from_tf": False, "from_flax": False,
    "offload_state_dict": True,
}  # fmt: skip
# What is not here -> values that ask for nothing, and one that asks.
REFUSED: dict[str, tuple[list[Any], Any]] = {
    "proxies": ([None, {}], {"http": "host"}),
    "max_memory": ([None], {0: "1GB"}),
    "quantization_config": ([None], {"load_in_8bit": True}),
    "adapter_kwargs": ([None, {}], {"revision": "main"}),
    "adapter_name": (["default"], "other"),
    "generation_config": ([None], object()),
    "gguf_file": ([None], "model.gguf"),
    "distributed_config": ([None], object()),
    "device_mesh": ([None], object()),
    "tp_plan": ([None], "auto"),
    "tp_size": ([None], 2),
    "use_kernels": ([False], True),
    "kernel_config": ([None], object()),
    "fusion_config": ([None], {"patch_embeddings": True}),
}


def _arguments(function: Any) -> set[str]:
    """Names in a signature, and those that the code takes out of **kwargs."""
    function = inspect.unwrap(getattr(function, "__func__", function))
    names = {name for name, one in inspect.signature(function).parameters.items() if one.kind not in (2, 4)}
    for node in ast.walk(ast.parse(textwrap.dedent(inspect.getsource(function)))):
        called = isinstance(node, ast.Call) and ast.unparse(node.func) in ("kwargs.pop", "kwargs.get")
        if called and isinstance(node.args[0], ast.Constant):
            names.add(node.args[0].value)
        if isinstance(node, ast.For) and "kwargs.pop" in ast.unparse(node) and isinstance(node.iter, ast.List):
            names |= {one.value for one in node.iter.elts}
    return names - {"cls", "self"}


@pytest.fixture(scope="module")
def source(make_hf: Make) -> nn.Module:
    return make_hf("BertForSequenceClassification", num_labels=3)


@pytest.fixture(scope="module")
def folder(source: nn.Module, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("folder")
    source.save_pretrained(path)
    return path


def _same(model: nn.Module, source: nn.Module) -> bool:
    theirs = source.state_dict()
    return all(torch.equal(value, theirs[name]) for name, value in model.state_dict().items())


def test_no_argument_is_forgotten() -> None:
    names = _arguments(transformers.PreTrainedModel.from_pretrained)
    assert len(names) > 40
    assert names - {"experts_implementation"} <= TAKEN.keys() | WITHOUT_EFFECT.keys() | REFUSED.keys()


@pytest.mark.parametrize("name", [*TAKEN, *WITHOUT_EFFECT])
def test_taken(folder: Path, source: nn.Module, name: str) -> None:
    value = {**TAKEN, **WITHOUT_EFFECT}[name]
    assert _same(BertForSequenceClassification.from_pretrained(folder, **{name: value}), source)


@pytest.mark.parametrize("name", REFUSED)
def test_refused(folder: Path, source: nn.Module, name: str) -> None:
    nothing, asked = REFUSED[name]
    for value in nothing:
        assert _same(BertForSequenceClassification.from_pretrained(folder, **{name: value}), source)
    with pytest.raises(ValueError, match=rf"^{name}: expected (None|False) \(.*\), got "):
        BertForSequenceClassification.from_pretrained(folder, **{name: asked})


def test_loading_info(make_hf: Make, tmp_path: Path) -> None:
    """What transformers says of the same files."""
    make_hf("BertForPreTraining").save_pretrained(tmp_path / "pretraining")
    make_hf("BertForSequenceClassification", num_labels=4).save_pretrained(tmp_path / "classes")
    for name in ("pretraining", "classes"):
        how = {"num_labels": 3, "ignore_mismatched_sizes": True, "output_loading_info": True}
        model, info = BertForSequenceClassification.from_pretrained(tmp_path / name, **how)
        _, theirs = transformers.BertForSequenceClassification.from_pretrained(tmp_path / name, **how)
        assert isinstance(model, BertForSequenceClassification) and not model.training
        assert info["missing_keys"] == theirs["missing_keys"]
        assert info["mismatched_keys"] == theirs["mismatched_keys"] and info["error_msgs"] == theirs["error_msgs"]
        # A tied bias counts once here.
        assert info["unexpected_keys"] <= theirs["unexpected_keys"] and bool(info["unexpected_keys"]) == (
            name == "pretraining"
        )


def test_configuration_by_its_path(folder: Path, source: nn.Module, tmp_path: Path) -> None:
    config = BertConfig.from_pretrained(folder)
    config.hidden_dropout_prob = 0.4
    config.save_pretrained(tmp_path)
    for path in (tmp_path, str(tmp_path), tmp_path / "config.json"):
        model = BertForSequenceClassification.from_pretrained(folder, config=path, attention_probs_dropout_prob=0.2)
        assert _same(model, source) and model.config.hidden_dropout_prob == 0.4
        assert model.config.attention_probs_dropout_prob == 0.2
    with pytest.raises(CheckpointError, match=r"absent\.json: no such file or directory"):
        BertForSequenceClassification.from_pretrained(folder, config=tmp_path / "absent.json")


def test_subfolder(folder: Path, source: nn.Module, tmp_path: Path) -> None:
    shutil.copytree(folder, tmp_path / "a" / "b")
    for subfolder in ("a/b", Path("a") / "b"):
        assert _same(BertForSequenceClassification.from_pretrained(tmp_path, subfolder=subfolder), source)
        assert BertConfig.from_pretrained(tmp_path, subfolder=subfolder).num_labels == 3
    with pytest.raises(CheckpointError, match=r"c: no such file or directory"):
        BertForSequenceClassification.from_pretrained(tmp_path, subfolder="c")
    with pytest.raises(TypeError, match=r"subfolder: expected a name or None, got int"):
        BertForSequenceClassification.from_pretrained(tmp_path, subfolder=1)


@pytest.mark.parametrize("size", ["50GB", "5KB"])
def test_variants(source: nn.Module, tmp_path: Path, size: str) -> None:
    """Written by transformers and read here, and the other way round; one variant leaves another alone."""
    source.save_pretrained(tmp_path / "theirs", variant="fp16", max_shard_size=size)
    model = BertForSequenceClassification.from_pretrained(tmp_path / "theirs", variant="fp16")
    assert _same(model, source)
    with pytest.raises(CheckpointError, match=r"holds none of model\.safetensors, "):
        BertForSequenceClassification.from_pretrained(tmp_path / "theirs")
    for shard_size in ("10KB", size):  # the second takes the place of the first
        model.save_pretrained(tmp_path / "ours", variant="fp16", max_shard_size=shard_size)
    again = transformers.BertForSequenceClassification.from_pretrained(tmp_path / "ours", variant="fp16")
    assert _same(again, source)
    other = BertForSequenceClassification(BertConfig.from_pretrained(tmp_path / "ours"))
    other.save_pretrained(tmp_path / "ours", max_shard_size=size)
    assert _same(BertForSequenceClassification.from_pretrained(tmp_path / "ours", variant="fp16"), source)
    assert _same(BertForSequenceClassification.from_pretrained(tmp_path / "ours"), other)
    with pytest.raises(ValueError, match=r"variant: expected letters, digits"):
        BertForSequenceClassification.from_pretrained(tmp_path / "ours", variant="../fp16")
    with pytest.raises(
        CheckpointError, match=r"none of model\.bf16\.safetensors.*\(model\.safetensors.* is there, but"
    ):
        BertForSequenceClassification.from_pretrained(tmp_path / "ours", variant="bf16")


def test_formats(source: nn.Module, tmp_path: Path) -> None:
    source.save_pretrained(tmp_path)
    other = {name: value + 1 for name, value in source.state_dict().items()}
    torch.save(other, tmp_path / "pytorch_model.bin")
    for use in (None, True):
        assert _same(BertForSequenceClassification.from_pretrained(tmp_path, use_safetensors=use), source)
    model = BertForSequenceClassification.from_pretrained(tmp_path, use_safetensors=False)
    assert torch.equal(model.classifier.bias, other["classifier.bias"])
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"none of model\.safetensors, .*\(pytorch_model\.bin is there, but"):
        BertForSequenceClassification.from_pretrained(tmp_path, use_safetensors=True)


def test_weights_given(folder: Path, source: nn.Module) -> None:
    config, weights = BertConfig.from_pretrained(folder), source.state_dict()
    assert _same(BertForSequenceClassification.from_pretrained(None, config=config, state_dict=weights), source)
    assert _same(BertForSequenceClassification.from_pretrained(None, config=folder, state_dict=weights), source)
    with pytest.raises(ValueError, match=r"path: expected None beside state_dict"):
        BertForSequenceClassification.from_pretrained(folder, state_dict=weights)
    with pytest.raises(ValueError, match=r"config: expected a configuration beside state_dict, got None"):
        BertForSequenceClassification.from_pretrained(None, state_dict=weights)
    with pytest.raises(TypeError, match=r"path: expected"):
        BertForSequenceClassification.from_pretrained()


def test_names_of_weights(folder: Path, source: nn.Module, tmp_path: Path) -> None:
    """As transformers renames them."""
    strange = {name.replace("bert.encoder", "my.stack", 1): value for name, value in source.state_dict().items()}
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    (tmp_path / "model.safetensors").unlink()
    torch.save(strange, tmp_path / "pytorch_model.bin")
    for mapping in ({r"^my\.stack": "bert.encoder"}, {r"my": "bert", r"stack": "encoder"}):
        for cls in (BertForSequenceClassification, transformers.BertForSequenceClassification):
            assert _same(cls.from_pretrained(tmp_path, key_mapping=mapping), source)
    for mapping in ({"(": "a"}, {"a": 1}):
        with pytest.raises(ValueError, match=r"key_mapping: expected regular expressions and names"):
            BertForSequenceClassification.from_pretrained(tmp_path, key_mapping=mapping)
    with pytest.raises(ValueError, match=r"key_mapping: expected a name for each weight"):
        BertForSequenceClassification.from_pretrained(tmp_path, key_mapping={".*": "a"})
    with pytest.raises(TypeError, match=r"key_mapping: expected a mapping of patterns to names, got list"):
        BertForSequenceClassification.from_pretrained(tmp_path, key_mapping=[])


def test_one_device(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    cpu = torch.device("cpu")
    for device_map in ("cpu", cpu, {"": "cpu"}, {"bert": "cpu", "classifier": cpu}, "auto", "balanced", "sequential"):
        assert one_device(None, device_map) == (cpu if device_map != "auto" or not torch.cuda.is_available() else None)
        assert BertForSequenceClassification.from_pretrained(folder, device_map=device_map).device == cpu
    assert one_device(None, None) is None
    wrong = [
        ({"bert": "cpu", "classifier": "meta"}, r"expected one device for the whole model, got cpu and meta"),
        ({"": "disk"}, r"expected a torch\.device or its name, got 'disk'"),
        ({}, r"expected one device for the whole model, got none"),
        ("nonsense", r"expected a torch\.device or its name, got 'nonsense'"),
        (-1, r"expected a torch\.device or its name, got -1"),
        (True, r"expected a torch\.device or its name, got True"),
        ([], r"expected a torch\.device or its name, got list"),
    ]
    for device_map, message in wrong:
        with pytest.raises(ValueError, match=rf"^device_map: {message}"):
            BertForSequenceClassification.from_pretrained(folder, device_map=device_map)
    with pytest.raises(ValueError, match=r"^device_map: expected None beside device='cpu', got 'auto'"):
        BertForSequenceClassification.from_pretrained(folder, device="cpu", device_map="auto")
    if not torch.cuda.is_available():
        monkeypatch.setenv("LOCAL_RANK", "3")
        for device_map, name in (("cuda", "cuda:3"), (1, "cuda:1")):
            with pytest.raises(ValueError, match=rf"^device_map: expected one that PyTorch can use here, got '{name}'"):
                one_device(None, device_map)


def test_positional_arguments(folder: Path) -> None:
    assert BertModel.from_pretrained(folder, False).pooler is None
    assert BertModel.from_pretrained(pretrained_model_name_or_path=folder).pooler is not None


# Configurations.
CONFIG_WITHOUT_EFFECT = {"_from_auto": True, "_from_pipeline": "text", "trust_remote_code": True}


def test_no_argument_of_configurations_is_forgotten(folder: Path) -> None:
    theirs = transformers.PreTrainedConfig
    names = _arguments(theirs.from_pretrained) | _arguments(theirs._get_config_dict) | _arguments(theirs.from_dict)
    names -= {"config_dict", "kwargs", "_configuration_file"}
    taken = {name: value for name, value in TAKEN.items() if name in names - {"pretrained_model_name_or_path"}}
    refused = names & REFUSED.keys()
    assert names == {*taken, *refused, *CONFIG_WITHOUT_EFFECT, "return_unused_kwargs", "pretrained_model_name_or_path"}
    config = BertConfig.from_pretrained(folder)
    assert BertConfig.from_pretrained(folder, **taken, **CONFIG_WITHOUT_EFFECT) == config
    for name in refused:
        with pytest.raises(ValueError, match=rf"^{name}: expected"):
            BertConfig.from_pretrained(folder, **{name: REFUSED[name][1]})
    assert BertConfig.from_pretrained(folder, dtype="auto", attn_implementation="eager") == config


def test_unused_arguments(folder: Path) -> None:
    how = {"hidden_dropout_prob": 0.3, "num_labels": 4, "foo": False, "return_unused_kwargs": True}
    config, unused = BertConfig.from_pretrained(folder, **how)
    _, theirs = transformers.BertConfig.from_pretrained(folder, **how)
    assert unused == theirs == {"foo": False}
    assert (config.hidden_dropout_prob, config.num_labels) == (0.3, 4) and not hasattr(config, "foo")


# Saving.
SAVE_TAKEN: dict[str, Any] = {"max_shard_size": "5KB", "variant": "x", "is_main_process": True, "state_dict": None}
SAVE_WITHOUT_EFFECT: dict[str, Any] = {
    "token": "secret", "save_peft_format": False, "save_original_format": False, "save_function": torch.save,
    "push_to_hub": False, "distributed_checkpoint": False, "safe_serialization": True,
}  # fmt: skip


@pytest.mark.parametrize("cls", [BertLMHeadModel, BertForTextEmbedding])
def test_saving(cls: Any, folder: Path, tmp_path: Path) -> None:
    names = _arguments(transformers.PreTrainedModel.save_pretrained) - {"save_directory", "commit_message"}
    assert names <= {*SAVE_TAKEN, *SAVE_WITHOUT_EFFECT, "repo_id", "create_pr"}  # of push_to_hub
    model = cls.from_pretrained(folder)
    for number, (name, value) in enumerate({**SAVE_TAKEN, **SAVE_WITHOUT_EFFECT}.items()):
        model.save_pretrained(tmp_path / f"{number}", **{name: value})
        how = {name: value} if name == "variant" else {}
        assert _same(cls.from_pretrained(tmp_path / f"{number}", **how), model)
    for name in ("push_to_hub", "distributed_checkpoint"):
        with pytest.raises(ValueError, match=rf"^{name}: expected False \(.*\), got True"):
            model.save_pretrained(tmp_path / "refused", **{name: True})
    with pytest.raises(ValueError, match=r"^safe_serialization: expected True"):
        model.save_pretrained(tmp_path / "refused", safe_serialization=False)
    with pytest.raises(TypeError, match=r"got 'max_shard'"):
        model.save_pretrained(tmp_path / "refused", max_shard="5KB")
    with pytest.raises(TypeError, match=r"^state_dict: expected a mapping from names to tensors, got list"):
        model.save_pretrained(tmp_path / "refused", state_dict=[])
    model.save_pretrained(tmp_path / "refused", is_main_process=False)
    assert not (tmp_path / "refused").exists()
    with pytest.raises(ValueError, match=r"^push_to_hub: expected False"):
        model.config.save_pretrained(tmp_path, push_to_hub=True)


def test_saving_other_weights(folder: Path, source: nn.Module, tmp_path: Path) -> None:
    model = BertForSequenceClassification.from_pretrained(folder)
    other = {name: value + 1 for name, value in model.state_dict().items()}
    model.save_pretrained(tmp_path, state_dict=other)
    again = BertForSequenceClassification.from_pretrained(tmp_path)
    assert torch.equal(again.classifier.weight, other["classifier.weight"]) and _same(model, source)
