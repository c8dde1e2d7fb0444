"""Folder to folder: what is written, what is refused, and the command."""

import json
import re
import shutil
import stat
import weakref
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from tiny_models import build
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

from hf_turbo.cli.app import app
from hf_turbo.quantization import quantize_folder as module
from hf_turbo.quantization.data_free import quantize, quantize_weight
from hf_turbo.quantization.int4_linear import Int4Linear
from hf_turbo.quantization.quantize_folder import quantize_folder
from hf_turbo.quantization.quantize_plan import Options
from hf_turbo.quantization.registry import int4_registered

IDS = torch.arange(3, 20)[None]
SIZES = {"hidden_size": 64, "intermediate_size": 96}
EXPERT_SIZES = {"moe_intermediate_size": 32, "shared_expert_intermediate_size": 32}
SETTINGS = [(4, True), (4, False), (8, True), (8, False)]
settings = pytest.mark.parametrize("bits, symmetric", SETTINGS)


def saved(name, folder, dtype=torch.float32, shard=None, **overrides):
    """A tiny model, and the folder that it was saved to."""
    model = build(name, **{**SIZES, **overrides}).to(dtype)
    model.config.dtype = dtype
    model.save_pretrained(folder, **({} if shard is None else {"max_shard_size": shard}))
    return model


def tensors(folder):
    return {name: tensor for file in sorted(folder.glob("*.safetensors")) for name, tensor in load_file(file).items()}


def read_config(folder, name="config.json"):
    return json.loads((folder / name).read_text())


def same(ours, theirs):
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        assert tensor.dtype == theirs[name].dtype and torch.equal(tensor, theirs[name]), name


def fields(words, bits):
    """Unsigned fields of int32 words, the lowest bits first: `[..., W]` to `[..., W * 32 / bits]`."""
    words = np.ascontiguousarray(words).view(np.uint32)
    parts = (words[..., None] >> np.arange(0, 32, bits, dtype=np.uint32)) & (2**bits - 1)
    return parts.reshape(*words.shape[:-1], -1).astype(np.int64)


def by_the_book(module_tensors, bits, added):
    """The weight `[N, K]` in fp32 as the format's description reads it, written without this package."""
    tensors = {name: tensor.numpy() for name, tensor in module_tensors.items()}
    codes = fields(tensors["qweight"].T, bits).T  # [K, N]
    zeros = fields(tensors["qzeros"], bits) + added  # [G, N]
    group = tensors["g_idx"]
    return torch.from_numpy((tensors["scales"].astype(np.float32)[group] * (codes - zeros[group])).T)


class TestFile:
    @settings
    def test_field_by_field(self, tmp_path, bits, symmetric):
        model = saved("llama", tmp_path / "in")
        quantize_folder(tmp_path / "in", tmp_path / "out", bits, 32, symmetric=symmetric)
        found = tensors(tmp_path / "out")
        before = tensors(tmp_path / "in")
        linears = [name for name in before if re.search(r"layers\.\d\..*_proj\.weight$", name)]
        assert len(linears) == 14
        for weight in linears:
            name = weight.removesuffix(".weight")
            rows, columns = before[weight].shape
            parts = {short: found.pop(f"{name}.{short}") for short in ("qweight", "qzeros", "scales", "g_idx")}
            groups, words = columns // 32, 32 // bits
            assert {short: (part.dtype, tuple(part.shape)) for short, part in parts.items()} == {
                "qweight": (torch.int32, (columns // words, rows)),
                "qzeros": (torch.int32, (groups, rows // words)),
                "scales": (torch.float16, (groups, rows)),
                "g_idx": (torch.int32, (columns,)),
            }
            assert parts["g_idx"].tolist() == [channel // 32 for channel in range(columns)]
            if symmetric:
                assert (parts["qzeros"] == (0x77777777 if bits == 4 else 0x7F7F7F7F)).all()
            expected = quantize_weight(before.pop(weight), Options(bits, 32, symmetric)).dequantize(torch.float32)
            assert torch.equal(by_the_book(parts, bits, added=int(symmetric)), expected)
            error = (expected - model.get_parameter(weight)).abs()
            assert error.max() < model.get_parameter(weight).abs().max() * (0.2 if bits == 4 else 0.02)
        same(found, before)  # nothing else was added, changed or lost

    @settings
    def test_config_by_key(self, tmp_path, bits, symmetric):
        saved("llama", tmp_path / "in")
        quantize_folder(tmp_path / "in", tmp_path / "out", bits, 32, symmetric=symmetric)
        config = read_config(tmp_path / "out")
        quantization = config.pop("quantization_config")
        assert config == read_config(tmp_path / "in")
        assert quantization == read_config(tmp_path / "out", "quantize_config.json")
        (quantizer,) = quantization.pop("meta")["quantizer"]
        assert re.fullmatch(r"hf_turbo:\d+\.\d+\.\d+", quantizer)
        assert quantization == {
            "quant_method": "gptq",
            # gptqmodel reads asymmetric v1 files of its own only
            "checkpoint_format": "gptq" if symmetric else "gptq_v2",
            "bits": bits,
            "group_size": 32,
            "sym": symmetric,
            "desc_act": False,
            "lm_head": False,
            "pack_dtype": "int32",
        }

    def test_file_says_it_is_of_torch(self, tmp_path):
        saved("llama", tmp_path / "in")
        quantize_folder(tmp_path / "in", tmp_path / "out", 4, 32)
        with safe_open(tmp_path / "out" / "model.safetensors", framework="pt") as file:
            assert file.metadata() == {"format": "pt"}

    def test_everything_else_is_copied(self, tmp_path):
        saved("llama", tmp_path / "in")
        texts = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "LICENSE", "vocab.txt")
        for name in (*texts, "pytorch_model.bin", "model.gguf", "pytorch_model.bin.index.json", ".hidden"):
            (tmp_path / "in" / name).write_text(name)
        (tmp_path / "in" / "additional_chat_templates").mkdir()
        (tmp_path / "in" / "additional_chat_templates" / "tools.jinja").write_text("x")
        (tmp_path / "in" / "original").mkdir()
        quantize_folder(tmp_path / "in", tmp_path / "out", 4, 32)
        assert {path.name for path in (tmp_path / "out").iterdir()} == {
            *texts, "config.json", "generation_config.json", "quantize_config.json", "model.safetensors",
            "additional_chat_templates",
        }  # fmt: skip
        assert (tmp_path / "out" / "LICENSE").read_text() == "LICENSE"

    @pytest.mark.parametrize("bits, symmetric, dtype", [(4, True, torch.bfloat16), (8, False, torch.float32)])
    @pytest.mark.parametrize("name", ["llama", "qwen2", "gemma3_text", "phi3"])
    def test_is_what_a_model_quantized_in_place_saves(self, tmp_path, name, bits, symmetric, dtype):
        model = saved(name, tmp_path / "in", dtype)
        quantize_folder(tmp_path / "in", tmp_path / "out", bits, 32, symmetric=symmetric)
        quantize(model, bits, 32, symmetric=symmetric).save_pretrained(tmp_path / "own")
        same(tensors(tmp_path / "out"), tensors(tmp_path / "own"))
        assert read_config(tmp_path / "out")["quantization_config"] == model.config.quantization_config
        assert read_config(tmp_path / "own")["quantization_config"] == model.config.quantization_config

    @settings
    def test_loads(self, tmp_path, bits, symmetric):
        model = saved("qwen2", tmp_path / "in")
        quantize_folder(tmp_path / "in", tmp_path / "out", bits, 32, symmetric=symmetric)
        with int4_registered():
            loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out", attn_implementation="eager")
        quantize(model, bits, 32, symmetric=symmetric)
        with torch.no_grad():
            assert torch.equal(loaded(IDS).logits, model(IDS).logits)
        assert sum(isinstance(layer, Int4Linear) for layer in loaded.modules()) == 14

    def test_a_folder_whose_names_transformers_changes(self, tmp_path):
        """As the checkpoints of the base model without its head: no `model.` in front."""
        model = saved("llama", tmp_path / "in")
        renamed = {name.removeprefix("model."): tensor for name, tensor in tensors(tmp_path / "in").items()}
        save_file(renamed, tmp_path / "in" / "model.safetensors", {"format": "pt"})
        assert quantize_folder(tmp_path / "in", tmp_path / "out", 4, 32).linears == 14
        expected = quantize_weight(model.model.layers[0].mlp.up_proj.weight, Options(4, 32))
        scales = tensors(tmp_path / "out")["layers.0.mlp.up_proj.scales"]
        assert torch.equal(scales, expected.scales)

    def test_skip(self, tmp_path):
        saved("llama", tmp_path / "in")
        done = quantize_folder(tmp_path / "in", tmp_path / "out", 4, 32, skip=["down_proj"])
        found = tensors(tmp_path / "out")
        assert done.linears == 12 and "model.layers.0.mlp.down_proj.weight" in found
        rules = read_config(tmp_path / "out")["quantization_config"]["dynamic"]
        assert rules == {r"-:^model\.layers\.\d+\.mlp\.down_proj$": {}}


class TestShards:
    def test_each_becomes_one(self, tmp_path):
        saved("llama", tmp_path / "in", shard="60KB")
        files = {path.name for path in (tmp_path / "in").glob("*.safetensors")}
        assert len(files) > 2
        quantize_folder(tmp_path / "in", tmp_path / "out", 4, 32)
        assert {path.name for path in (tmp_path / "out").glob("*.safetensors")} == files
        index = read_config(tmp_path / "out", "model.safetensors.index.json")
        held = {name: file for file in files for name in load_file(tmp_path / "out" / file)}
        assert index["weight_map"] == held
        assert index["metadata"]["total_size"] == sum(t.nbytes for t in tensors(tmp_path / "out").values())

    def test_are_the_same_as_one_file(self, tmp_path):
        saved("llama", tmp_path / "one")
        saved("llama", tmp_path / "many", shard="60KB")
        for name in ("one", "many"):
            quantize_folder(tmp_path / name, tmp_path / f"{name}-out", 4, 32)
        same(tensors(tmp_path / "one-out"), tensors(tmp_path / "many-out"))

    def test_one_is_in_memory_at_a_time(self, tmp_path, monkeypatch):
        saved("llama", tmp_path / "in", shard="60KB")
        earlier, alive, save = [], [], module._save

        def watched(written, file):
            alive.append(sum(ref() is not None for ref in earlier))
            earlier.extend(weakref.ref(tensor) for tensor in written.values())
            return save(written, file)

        monkeypatch.setattr(module, "_save", watched)
        quantize_folder(tmp_path / "in", tmp_path / "out", 4, 32)
        assert len(alive) > 2 and not any(alive) and earlier

    def test_progress_comes_to_the_end(self, tmp_path):
        saved("llama", tmp_path / "in", shard="60KB")
        told = []
        quantize_folder(tmp_path / "in", tmp_path / "out", 4, 32, progress=lambda *what: told.append(what))
        names, done, totals = zip(*told)
        assert sorted(names) == sorted(tensors(tmp_path / "in"))
        assert done[0] == 0 and list(done) == sorted(done) and len(set(totals)) == 1
        assert 0.8 * totals[0] < done[-1] < totals[0]


class TestExperts:
    @pytest.mark.parametrize("name", ["qwen2_moe", "qwen3_moe", "mixtral"])
    def test_stored_one_by_one_are_quantized(self, tmp_path, name):
        saved(name, tmp_path / "in", **EXPERT_SIZES)
        before = tensors(tmp_path / "in")
        experts = [key.removesuffix(".weight") for key in before if ".experts." in key]
        assert len(experts) == 2 * 4 * 3
        done = quantize_folder(tmp_path / "in", tmp_path / "out", 4, 32)
        after = tensors(tmp_path / "out")
        assert not done.left
        for expert in experts:
            parts = {short: after[f"{expert}.{short}"] for short in ("qweight", "qzeros", "scales", "g_idx")}
            expected = quantize_weight(before[f"{expert}.weight"], Options(4, 32)).dequantize(torch.float32)
            assert torch.equal(by_the_book(parts, 4, added=1), expected)
        routers = [key for key in before if re.search(r"(mlp|block_sparse_moe)\.(shared_expert_)?gate\.weight$", key)]
        assert routers and all(torch.equal(after[key], before[key]) for key in routers)

    def test_skipped_ones_stay(self, tmp_path):
        saved("qwen3_moe", tmp_path / "in", **EXPERT_SIZES)
        done = quantize_folder(tmp_path / "in", tmp_path / "out", 4, 32, skip=["experts"])
        assert done.linears == 8 and "model.layers.0.mlp.experts.0.up_proj.weight" in tensors(tmp_path / "out")
        rules = read_config(tmp_path / "out")["quantization_config"]["dynamic"]
        assert r"-:^model\.layers\.\d+\.mlp\.experts$" in rules

    def test_stored_in_one_tensor_are_left_and_named(self, tmp_path):
        saved("gpt_oss", tmp_path / "in", head_dim=16)
        before = tensors(tmp_path / "in")
        fused = [key for key in before if "experts" in key]
        assert any(before[key].dim() == 3 for key in fused)
        done = quantize_folder(tmp_path / "in", tmp_path / "out", 4, 32)
        after = tensors(tmp_path / "out")
        assert done.left == ("model.layers.0.mlp.experts", "model.layers.1.mlp.experts")
        assert all(torch.equal(after[key], before[key]) for key in fused)


def contents(folder: Path):
    return {path.relative_to(folder): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


class TestRefusals:
    @pytest.fixture
    def folder(self, tmp_path):
        saved("llama", tmp_path / "in", shard="60KB")
        return tmp_path / "in"

    def refused(self, folder, said, error=ValueError, **options):
        before = contents(folder.parent)
        with pytest.raises(error, match=said):
            quantize_folder(folder, folder.parent / "out", **{"bits": 4, "group_size": 32, **options})
        assert contents(folder.parent) == before
        assert sorted(path.name for path in folder.parent.iterdir()) == ["in"]

    def edit(self, folder, change):
        """Changes the tensors of the file that holds the last layer's down_proj."""
        name = "model.layers.1.mlp.down_proj.weight"
        file = folder / read_config(folder, "model.safetensors.index.json")["weight_map"][name]
        found = load_file(file)
        change(found, name)
        save_file(found, file, {"format": "pt"})

    def test_target_that_is_not_empty(self, folder, tmp_path):
        (tmp_path / "out").mkdir()
        (tmp_path / "out" / "mine").write_text("x")
        with pytest.raises(ValueError, match="is not empty"):
            quantize_folder(folder, tmp_path / "out", 4, 32)
        assert [path.name for path in (tmp_path / "out").iterdir()] == ["mine"]

    def test_empty_target_is_taken(self, folder, tmp_path):
        (tmp_path / "out").mkdir()
        quantize_folder(folder, tmp_path / "out", 4, 32)
        assert sorted(path.name for path in tmp_path.iterdir()) == ["in", "out"]
        usual = tmp_path / "usual"
        usual.mkdir()
        assert stat.S_IMODE((tmp_path / "out").stat().st_mode) == stat.S_IMODE(usual.stat().st_mode)

    def test_quantized_already(self, folder, tmp_path):
        quantize_folder(folder, tmp_path / "out", 4, 32)
        shutil.rmtree(folder)
        (tmp_path / "out").rename(folder)
        self.refused(folder, "quantized already, says its quantize_config.json")
        (folder / "quantize_config.json").unlink()
        self.refused(folder, "quantized already, says its config.json")
        config = read_config(folder)
        del config["quantization_config"]
        (folder / "config.json").write_text(json.dumps(config))
        self.refused(folder, "quantized already: it holds .*qweight")

    def test_no_model(self, folder):
        (folder / "config.json").unlink()
        self.refused(folder, "no config.json")

    def test_no_safetensors(self, folder):
        for path in folder.glob("*.safetensors*"):
            path.unlink()
        self.refused(folder, "neither model.safetensors nor model.safetensors.index.json")

    def test_missing_shard(self, folder):
        next(folder.glob("*.safetensors")).unlink()
        self.refused(folder, "lacks model-0000.-of-.*safetensors")

    def test_index_that_leaves_the_folder(self, folder):
        index = read_config(folder, "model.safetensors.index.json")
        index["weight_map"]["lm_head.weight"] = "../elsewhere.safetensors"
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
        self.refused(folder, "outside the folder")

    def test_missing_weight(self, folder):
        self.edit(folder, lambda found, name: found.pop(name))
        self.refused(folder, r"lacks 1 of the weights to quantize, such as model\.layers\.1\.mlp\.down_proj\.weight")

    def test_wrong_shape(self, folder):
        self.edit(folder, lambda found, name: found.update({name: found[name][:, :64].contiguous()}))
        self.refused(folder, r"down_proj\.weight is \[64, 64\], config.json says \[64, 96\]")

    def test_unsupported_dtype(self, folder):
        self.edit(folder, lambda found, name: found.update({name: found[name].to(torch.float8_e4m3fn)}))
        self.refused(folder, r"down_proj\.weight is F8_E4M3; must be one of BF16")

    def test_bad_value_is_found_late_and_leaves_nothing(self, folder):
        self.edit(folder, lambda found, name: found[name].fill_(float("nan")))
        self.refused(folder, r"model\.layers\.1\.mlp\.down_proj: .*nan")

    def test_interrupted(self, folder, monkeypatch):
        def interrupted(*arguments):
            raise KeyboardInterrupt

        monkeypatch.setattr(module, "_write_configs", interrupted)
        self.refused(folder, None, KeyboardInterrupt)

    def test_group_size(self, folder):
        self.refused(folder, "has 32 input channels.*group_size=16 or 32", group_size=64, skip=["self_attn.q_proj"])

    def test_a_model_that_transformers_does_not_know(self, folder):
        (folder / "config.json").write_text(json.dumps({**read_config(folder), "model_type": "x", "architectures": []}))
        self.refused(folder, "can't build the model")


class TestCommand:
    def run(self, *arguments):
        done = CliRunner().invoke(app, ["quantize", *map(str, arguments)], env={"COLUMNS": "400"})
        return done, re.sub(r"\s+", " ", done.output)

    @pytest.fixture
    def folder(self, tmp_path):
        saved("llama", tmp_path / "in")
        return tmp_path / "in"

    def test_writes_the_folder(self, folder, tmp_path):
        done, output = self.run(folder, tmp_path / "out", "--group-size", 32)
        assert done.exit_code == 0, output
        assert "out: 14 linears in 4 bits; 0.000263 GB to 0.0000" in output.replace("9.88e-05", "0.0000988")
        assert read_config(tmp_path / "out")["quantization_config"]["sym"] is True

    def test_options(self, folder, tmp_path):
        options = ["--bits", 8, "--group-size", 16, "--asymmetric", "--skip", "down_proj", "--skip", "o_proj"]
        done, output = self.run(folder, tmp_path / "out", *options)
        assert done.exit_code == 0 and "10 linears in 8 bits" in output
        config = read_config(tmp_path / "out")["quantization_config"]
        assert (config["bits"], config["group_size"], config["sym"]) == (8, 16, False) and len(config["dynamic"]) == 2

    def test_fused_experts_are_named(self, tmp_path):
        saved("gpt_oss", tmp_path / "in", head_dim=16)
        done, output = self.run(tmp_path / "in", tmp_path / "out", "--group-size", 32)
        assert done.exit_code == 0, output
        assert "left as they are: experts stored in one tensor, 2 layers, such as model.layers.0.mlp.experts" in output

    def test_errors_are_one_sentence(self, folder, tmp_path):
        done, output = self.run(folder, tmp_path / "out")
        assert done.exit_code == 2 and "no multiple of group_size=128" in output and "Traceback" not in output
        assert not (tmp_path / "out").exists()

    def test_no_such_model(self, tmp_path, monkeypatch):
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
        done, output = self.run("nobody/nothing", tmp_path / "out")
        assert done.exit_code == 2 and "no model 'nobody/nothing': give a folder or an id of the Hub" in output

    def test_a_repository_is_fetched(self, folder, tmp_path, monkeypatch):
        asked = []

        def snapshot_download(name, allow_patterns):
            asked.append((name, allow_patterns))
            return str(folder)

        monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot_download)
        done, output = self.run("someone/something", tmp_path / "out", "--group-size", 32)
        assert done.exit_code == 0, output
        ((name, patterns),) = asked
        assert name == "someone/something" and "*.safetensors" in patterns and not [p for p in patterns if "bin" in p]
