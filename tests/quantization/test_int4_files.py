"""The files of quantized checkpoints: those of old tools, of the Hub's cache, and those that are refused."""

import json
import shutil

import fixtures
import pytest
import torch
from fixtures import checkpoint
from loaded import change_config, change_files, change_model_config, load, logits, quantized, rename
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, LlamaForCausalLM

from hf_turbo.quantization.int4_linear import FileLinear
from hf_turbo.quantization.loading import load_int4

pytestmark = pytest.mark.usefixtures("registered")


@pytest.mark.parametrize("name", ["autogptq_sym_g32", "autogptq_gm1_desc"])
def test_old_names_of_files(name, tmp_path):
    folder = checkpoint(name, tmp_path)
    assert not (folder / "model.safetensors").exists()
    model = load(folder)
    assert len(quantized(model)) == 14
    folder.rename(tmp_path / "below")
    others = (
        load_int4(tmp_path / "below", dtype=torch.float32),
        LlamaForCausalLM.from_pretrained(tmp_path / "below", dtype=torch.float32),
        load(tmp_path, subfolder="below"),
        load_int4(tmp_path, subfolder="below", dtype=torch.float32),
    )
    for other in others:
        assert torch.equal(logits(other, name), logits(model, name))


def test_a_config_beside_the_models(tmp_path):
    folder = checkpoint("autogptq_sym_g32", tmp_path)
    wanted = logits(load(folder), "autogptq_sym_g32")
    change_model_config(folder, quantization_config=None)
    model = load_int4(folder, dtype=torch.float32)
    assert torch.equal(logits(model, "autogptq_sym_g32"), wanted)
    model.save_pretrained(tmp_path / "saved")
    assert torch.equal(logits(load(tmp_path / "saved"), "autogptq_sym_g32"), wanted)
    (folder / "quantize_config.json").unlink()
    with pytest.raises(ValueError, match=r"is not quantized.*quantize_config\.json"):
        load_int4(folder)


def test_old_awq_config(tmp_path):
    folder = checkpoint("awq_gemm_g32", tmp_path)
    change_model_config(folder, quantization_config=None)
    (folder / "quant_config.json").write_text(
        json.dumps({"zero_point": True, "q_group_size": 32, "w_bit": 4, "version": "GEMM"})
    )
    model = load_int4(folder, dtype=torch.float32)
    torch.testing.assert_close(
        logits(model, "awq_gemm_g32"), fixtures.reference_logits("awq_gemm_g32")[1], atol=4e-3, rtol=0
    )


def test_several_odd_files_are_not_guessed_among(tmp_path):
    folder = checkpoint("autogptq_sym_g32", tmp_path)
    file = next(folder.glob("*.safetensors"))
    shutil.copy(file, folder / "other.safetensors")
    with pytest.raises(ValueError, match=r"several others: gptq_model-4bit-32g\.safetensors, other\.safetensors"):
        load(folder)


def pickle_of(folder):
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()


def test_pickles_only_when_asked(tmp_path):
    folder = checkpoint("gptq_sym_g32", tmp_path)
    wanted = logits(load(folder))
    pickle_of(folder)
    with pytest.raises(ValueError, match=r"is a pickle.*use_safetensors=False"):
        load(folder)
    assert torch.equal(logits(load(folder, use_safetensors=False)), wanted)
    assert torch.equal(logits(load_int4(folder, use_safetensors=False, dtype=torch.float32)), wanted)


def test_hub_snapshots_are_links(tmp_path):
    """A repository in the Hub's cache: links to files without a suffix."""
    folder = checkpoint("gptq_sym_g32", tmp_path)
    model = load(folder)
    model.save_pretrained(folder, max_shard_size="200KB")
    snapshot = tmp_path / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    for index, file in enumerate(sorted(folder.iterdir())):
        if file.name != "model.safetensors":
            (tmp_path / f"blob{index}").write_bytes(file.read_bytes())
            (snapshot / file.name).symlink_to(tmp_path / f"blob{index}")
    assert torch.equal(logits(load(snapshot)), logits(model))


# G08: what is refused, before anything is replaced.


@pytest.fixture
def nothing_replaced(monkeypatch):
    """No module of any model becomes quantized."""

    def refuse(self, *args, **kwargs):
        raise AssertionError("a module was replaced")

    monkeypatch.setattr(FileLinear, "__init__", refuse)


def drop(suffix):
    def change(tensors):
        del tensors[next(name for name in tensors if name.endswith(suffix))]

    return change


def resize(suffix):
    def change(tensors):
        name = next(name for name in tensors if name.endswith(suffix))
        tensors[name] = tensors[name][:, :-8].contiguous()

    return change


REFUSED_FILES = {
    "no scales": (drop("q_proj.scales"), ValueError, "q_proj.*scales"),
    "no codes": (drop("q_proj.qweight"), ValueError, "q_proj.*codes"),
    "narrow": (resize("k_proj.qweight"), ValueError, "k_proj"),
    "an embedding": (
        rename("model.layers.0.mlp.up_proj", "model.embed_tokens"),
        (NotImplementedError, ValueError),
        "embed",
    ),
    "other names": (
        rename("layers.0.mlp.up_proj", "layers.0.ffn.up_proj"),
        ValueError,
        "layers.0.mlp.up_proj.*no weight",
    ),
}


@pytest.mark.parametrize("change, error, message", REFUSED_FILES.values(), ids=REFUSED_FILES)
def test_wrong_files_are_refused(change, error, message, tmp_path, nothing_replaced):
    folder = checkpoint("gptq_sym_g32", tmp_path)
    change_files(folder, change)
    with pytest.raises(error, match=message):
        load(folder)


REFUSED_CONFIGS = {
    "bitblas": ("gptq_sym_g32", {"checkpoint_format": "bitblas", "format": "bitblas"}, "bitblas"),
    "planar": ("gptq_sym_g32", {"checkpoint_format": "gptq_p", "format": "gptq_p"}, "gptq_p"),
    "5 bits": ("gptq_sym_g32", {"bits": 5}, "5"),
    "pack_dtype": ("gptq_sym_g32", {"pack_dtype": "int16"}, "int16"),
    "exllama": ("awq_gemm_g32", {"version": "exllama"}, "exllama"),
    "packing_format": (
        "ar_auto_gptq_g32",
        {"quant_method": "auto-round", "packing_format": "auto_round:x"},
        "auto_round:x",
    ),
}


@pytest.mark.parametrize("name, changes, message", REFUSED_CONFIGS.values(), ids=REFUSED_CONFIGS)
def test_unknown_layouts_are_refused_by_name(name, changes, message, tmp_path, nothing_replaced):
    folder = checkpoint(name, tmp_path)
    change_config(folder, **changes)
    with pytest.raises(NotImplementedError, match=message):
        load(folder)


def test_a_model_of_another_size_is_refused(tmp_path, nothing_replaced):
    folder = checkpoint("gptq_sym_g32", tmp_path)
    config = AutoConfig.from_pretrained(folder)
    config.intermediate_size *= 2
    with pytest.raises(ValueError, match="down_proj is 128 x 256 in the checkpoint and 128 x 512 in the model"):
        load(folder, config=config)


def test_a_bias_that_the_checkpoint_lacks_is_not_made_up(tmp_path, nothing_replaced):
    folder = checkpoint("gptq_sym_g32", tmp_path)
    config = AutoConfig.from_pretrained(folder)
    config.attention_bias = True
    with pytest.raises(ValueError, match="_proj has a bias in the model, but none in the checkpoint"):
        load(folder, config=config)


@pytest.mark.parametrize("harm", ["missing", "cut", "absent"])
def test_shards_that_are_not_whole_are_refused(harm, tmp_path, nothing_replaced, monkeypatch):
    folder = checkpoint("gptq_sym_g32", tmp_path)
    index = shard(folder)
    victim = folder / index["model.layers.1.mlp.up_proj.qweight"]
    if harm == "missing":
        victim.unlink()
    elif harm == "cut":
        victim.write_bytes(victim.read_bytes()[:-10])
    else:
        change_files(
            folder, lambda tensors: [tensors.pop(key) for key in list(tensors) if "1.mlp.up_proj" in key], victim
        )
    with pytest.raises(
        (ValueError, OSError), match={"missing": victim.name, "cut": "cut short", "absent": "index"}[harm]
    ):
        load(folder)


def shard(folder):
    """Splits a folder's file into two with an index; name -> file."""
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    index = {}
    for number in (1, 2):
        file = f"model-0000{number}-of-00002.safetensors"
        part = {name: tensor for name, tensor in tensors.items() if (".1." in name) == (number == 2)}
        save_file(part, folder / file, {"format": "pt"})
        index.update(dict.fromkeys(part, file))
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))
    return index


def test_sharded(tmp_path):
    folder = checkpoint("gptq_sym_g32", tmp_path)
    wanted = logits(load(folder))
    shard(folder)
    assert torch.equal(logits(load(folder)), wanted)


def test_state_dicts_are_refused(tmp_path):
    folder = checkpoint("gptq_sym_g32", tmp_path)
    config = AutoConfig.from_pretrained(folder)
    with pytest.raises(NotImplementedError, match="from a folder"):
        LlamaForCausalLM.from_pretrained(None, config=config, state_dict=fixtures.tensors("gptq_sym_g32"))
