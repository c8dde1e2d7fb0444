"""Medusa heads against a computation by hand, in every layout that is published."""

import json

import pytest
import tiny_models
import torch
from huggingface_hub.errors import EntryNotFoundError, LocalEntryNotFoundError
from safetensors.torch import load_file, save_file

from hf_turbo import quantize
from hf_turbo.generation.medusa_heads import MedusaHeads
from hf_turbo.quantization.data_free import Options, new_spec, quantize_weight
from hf_turbo.quantization.int4_linear import Int4Linear

HEADS, HIDDEN, VOCAB = 3, 32, 128


@pytest.fixture(scope="module")
def base():
    return tiny_models.build("llama")


def drawn(*shape):
    return torch.randn(*shape) / shape[-1] ** 0.5


def published(num_layers=1, own=False, prefix="", num_heads=HEADS):
    """Tensors by the names of the published layout."""
    tensors = {}
    for head in range(num_heads):
        for block in range(num_layers):
            tensors[f"{prefix}{head}.{block}.linear.weight"] = drawn(HIDDEN, HIDDEN)
            tensors[f"{prefix}{head}.{block}.linear.bias"] = drawn(HIDDEN)
        if own:
            tensors[f"{prefix}{head}.{num_layers}.weight"] = drawn(VOCAB, HIDDEN)
    return tensors


def by_hand(tensors, hidden, base_projection, num_layers, prefix=""):
    """Logits `[..., heads, V]`, a head and a block at a time."""
    logits = []
    for head in range(HEADS):
        x = hidden
        for block in range(num_layers):
            y = x @ tensors[f"{prefix}{head}.{block}.linear.weight"].T
            y = y + tensors[f"{prefix}{head}.{block}.linear.bias"]
            x = x + y * torch.sigmoid(y)
        logits.append(x @ tensors.get(f"{prefix}{head}.{num_layers}.weight", base_projection).T)
    return torch.stack(logits, dim=-2)


def write(folder, tensors, file="medusa_lm_head.safetensors", config=None):
    folder.mkdir(exist_ok=True)
    if file.endswith(".safetensors"):
        save_file(tensors, folder / file)
    else:
        torch.save(tensors, folder / file)
    if config is not None:
        (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize("own", [False, True], ids=["shared", "own"])
@pytest.mark.parametrize("num_layers", [1, 2])
@pytest.mark.parametrize("prefix", ["", "medusa_head."])
@pytest.mark.parametrize("file", ["medusa_lm_head.safetensors", "medusa_lm_head.pt"])
def test_both_layouts_give_the_logits_computed_by_hand(tmp_path, base, file, prefix, num_layers, own):
    tensors = published(num_layers, own, prefix)
    heads = MedusaHeads.from_pretrained(write(tmp_path, tensors, file), base)
    hidden = torch.randn(2, 5, HIDDEN)
    expected = by_hand(tensors, hidden, base.lm_head.weight, num_layers, prefix)
    found = heads(hidden, base.lm_head)
    assert found.shape == (2, 5, HEADS, VOCAB)
    torch.testing.assert_close(found, expected)
    assert (heads.projections is not None) == own
    assert not heads.training and not any(p.requires_grad for p in heads.parameters())


@pytest.mark.parametrize("biases", [False, True])
def test_vllm_names(tmp_path, base, biases):
    tensors = published(2, own=True)
    if not biases:
        for name, tensor in tensors.items():
            if name.endswith("bias"):
                tensor.zero_()
    renamed = {}
    for name, tensor in tensors.items():
        head, block, *_, kind = name.split(".")
        if "linear" not in name:
            renamed[f"lm_heads.{head}.weight"] = tensor
        elif biases or kind == "weight":
            renamed[f"blocks.{head}.layers.{block}.{kind}"] = tensor
    config = {"model_type": "medusa", "num_heads": HEADS, "num_hidden_layers": 2, "hidden_size": HIDDEN}
    heads = MedusaHeads.from_pretrained(write(tmp_path, renamed, "model.safetensors", config), base)
    hidden = torch.randn(4, HIDDEN)
    torch.testing.assert_close(heads(hidden), by_hand(tensors, hidden, None, 2))


def test_a_file_itself_and_no_model(tmp_path, base):
    tensors = published(own=True)
    path = write(tmp_path, tensors, "medusa_lm_head.pt") / "medusa_lm_head.pt"
    heads = MedusaHeads.from_pretrained(path)
    assert (heads.num_heads, heads.num_layers, heads.hidden_size, heads.vocab_size) == (HEADS, 1, HIDDEN, VOCAB)
    assert heads.fit_to(base) is heads
    with pytest.raises(ValueError, match="how large the vocabulary is"):
        MedusaHeads.from_pretrained(write(tmp_path / "shared", published()))


def test_the_config_of_published_heads_may_tell_of_fewer(tmp_path, base):
    config = {"medusa_num_heads": 2, "medusa_num_layers": 1, "base_model_name_or_path": "some/base"}
    heads = MedusaHeads.from_pretrained(write(tmp_path, published(2), config=config), base)
    assert (heads.num_heads, heads.num_layers, heads.base_model_name_or_path) == (HEADS, 2, "some/base")


def without(tensors, *names):
    return {name: tensor for name, tensor in tensors.items() if name not in names}


@pytest.mark.parametrize(
    "tensors, config, told",
    [
        (without(published(), "1.0.linear.bias"), None, ["missing keys: 1.0.linear.bias$"]),
        (without(published(own=True), "0.1.weight", "2.1.weight"), None, ["missing keys: 0.1.weight, 2.1.weight"]),
        (without(published(2), "2.1.linear.weight"), None, ["2.1.linear.weight"]),
        (published(), {"medusa_num_heads": 4}, ["missing keys: 3.0.linear.bias, 3.0.linear.weight"]),
        (published(), {"medusa_num_layers": 2}, ["0.1.linear.weight", "2.1.linear.bias"]),
        ({**published(), "norm.weight": drawn(4), "0.5.weight": drawn(4)}, None, ["unknown keys: 0.5.weight, norm"]),
        (
            {**without(published(), "0.0.linear.weight"), "0.0.linear.scale": drawn(4)},
            None,
            ["missing keys: 0.0.linear.weight; unknown keys: 0.0.linear.scale"],
        ),
        ({"model.embed": drawn(4)}, None, ["no Medusa heads; its keys: model.embed"]),
    ],
)
def test_missing_and_unknown_keys_are_all_listed(tmp_path, base, tensors, config, told):
    folder = write(tmp_path, tensors, config=config)
    for words in told:
        with pytest.raises(ValueError, match=words):
            MedusaHeads.from_pretrained(folder, base)


def test_sizes_that_do_not_fit(tmp_path, base):
    odd = published()
    odd["1.0.linear.weight"] = drawn(HIDDEN, HIDDEN + 1)
    with pytest.raises(ValueError, match=r"weight of head 1, block 0: \[32, 33\]"):
        MedusaHeads.from_pretrained(write(tmp_path / "odd", odd), base)
    with pytest.raises(ValueError, match="hidden size of 64"):
        MedusaHeads.from_pretrained(write(tmp_path / "config", published(), config={"hidden_size": 64}), base)
    narrow = tiny_models.build("llama", hidden_size=16)
    with pytest.raises(ValueError, match="hidden size is 32, the model's 16"):
        MedusaHeads.from_pretrained(write(tmp_path / "right", published()), narrow)
    other = tiny_models.build("llama", vocab_size=96)
    with pytest.raises(ValueError, match="128 tokens, the model's 96"):
        MedusaHeads.from_pretrained(write(tmp_path / "own", published(own=True)), other)


def test_nothing_there(tmp_path, base):
    with pytest.raises(ValueError, match="has no Medusa heads: none of medusa_lm_head"):
        MedusaHeads.from_pretrained(tmp_path, base)
    (tmp_path / "medusa_lm_head.safetensors").write_bytes(b"cut")
    with pytest.raises(ValueError, match="can't read Medusa heads from"):
        MedusaHeads.from_pretrained(tmp_path, base)


class _Runs:
    """A pickle that would run code."""

    def __reduce__(self):
        return (print, ("code of the file ran",))


def test_a_pickle_runs_no_code(tmp_path, base, capsys):
    torch.save({"0.0.linear.weight": _Runs()}, tmp_path / "medusa_lm_head.pt")
    with pytest.raises(ValueError, match="can't read"):
        MedusaHeads.from_pretrained(tmp_path, base)
    assert "ran" not in capsys.readouterr().out


@pytest.mark.parametrize("own", [False, True], ids=["shared", "own"])
def test_saved_in_the_published_layout(tmp_path, base, own):
    tensors = published(2, own)
    heads = MedusaHeads.from_pretrained(write(tmp_path / "given", tensors), base)
    heads.accuracies = [[0.5, 0.25], [0.25, 0.125], [0.125, 0.0]]
    heads.base_model_name_or_path = "some/base"
    heads.save_pretrained(tmp_path / "saved")
    assert sorted(path.name for path in (tmp_path / "saved").iterdir()) == ["config.json", "medusa_lm_head.safetensors"]
    saved = load_file(tmp_path / "saved" / "medusa_lm_head.safetensors")
    assert saved.keys() == tensors.keys()
    assert all(torch.equal(saved[name], tensors[name]) for name in tensors)
    config = json.loads((tmp_path / "saved" / "config.json").read_text())
    assert (config["medusa_num_heads"], config["medusa_num_layers"], config["hidden_size"]) == (HEADS, 2, HIDDEN)
    again = MedusaHeads.from_pretrained(tmp_path / "saved")
    assert again.accuracies == heads.accuracies and again.base_model_name_or_path == "some/base"


def test_a_save_that_fails_leaves_the_old_heads(tmp_path, base, monkeypatch):
    heads = MedusaHeads.from_pretrained(write(tmp_path, published()), base)
    before = (tmp_path / "medusa_lm_head.safetensors").read_bytes()

    def cut(tensors, path, **kwargs):
        path.write_bytes(b"half")
        raise OSError("disk full")

    monkeypatch.setattr("safetensors.torch.save_file", cut)
    with pytest.raises(OSError, match="disk full"):
        heads.save_pretrained(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["medusa_lm_head.safetensors"]
    assert (tmp_path / "medusa_lm_head.safetensors").read_bytes() == before


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_heads_take_the_models_dtype(tmp_path, dtype):
    base = tiny_models.build("llama").to(dtype)
    heads = MedusaHeads.from_pretrained(write(tmp_path, published()), base)
    assert {p.dtype for p in heads.parameters()} == {dtype}
    hidden = torch.randn(4, HIDDEN)
    expected = by_hand(load_file(tmp_path / "medusa_lm_head.safetensors"), hidden, base.lm_head.weight.float(), 1)
    found = heads(hidden.to(dtype), base.lm_head)
    torch.testing.assert_close(found.float(), expected, atol=0.2, rtol=0.05)


def test_a_quantized_projection_is_shared_as_well(tmp_path):
    base = quantize(tiny_models.build("llama"), 4, 16)
    options = Options(4, 32)
    weight = quantize_weight(base.lm_head.weight, options)
    base.lm_head = Int4Linear.from_grouped(weight, None, new_spec(weight, options))
    heads = MedusaHeads.from_pretrained(write(tmp_path, published()), base)
    hidden = torch.randn(4, HIDDEN)
    tensors = load_file(tmp_path / "medusa_lm_head.safetensors")
    expected = by_hand(tensors, hidden, base.lm_head.dequantize(torch.float32), 1)
    torch.testing.assert_close(heads(hidden, base.lm_head), expected, atol=1e-3, rtol=1e-3)


def test_heads_without_training_are_the_projection(base):
    hidden = torch.randn(3, HIDDEN)
    plain = base.lm_head(hidden).unsqueeze(1).expand(-1, HEADS, -1)
    shared = MedusaHeads(HEADS, 2, HIDDEN, VOCAB)
    torch.testing.assert_close(shared(hidden, base.lm_head), plain)
    with pytest.raises(ValueError, match="give it as `project`"):
        shared(hidden)
    with pytest.raises(ValueError, match="own_projection=True"):
        shared.copy_projection(base.lm_head.weight)
    own = MedusaHeads(HEADS, 2, HIDDEN, VOCAB, own_projection=True)
    with pytest.raises(ValueError, match=r"\[128, 32\] is needed, not \[64, 32\]"):
        own.copy_projection(base.lm_head.weight[:64])
    own.copy_projection(base.lm_head.weight)
    torch.testing.assert_close(own(hidden), plain)


@pytest.mark.parametrize("sizes", [(0, 1, 8, 8), (1, 0, 8, 8)])
def test_sizes_below_one(sizes):
    with pytest.raises(ValueError, match="at least 1"):
        MedusaHeads(*sizes)


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """A Hub with one repository, and the files that were asked for."""
    asked = []

    def hf_hub_download(name, file):
        asked.append(file)
        if name != "some/heads":
            raise LocalEntryNotFoundError("can't reach the Hub\nand more")
        if not (tmp_path / file).is_file():
            raise EntryNotFoundError(file)
        return str(tmp_path / file)

    monkeypatch.setattr("huggingface_hub.hf_hub_download", hf_hub_download)
    return asked


@pytest.mark.parametrize("config", [None, {"medusa_num_heads": HEADS, "base_model_name_or_path": "some/base"}])
def test_heads_of_the_hub(tmp_path, base, hub, config):
    tensors = published()
    write(tmp_path, tensors, "medusa_lm_head.pt", config)
    heads = MedusaHeads.from_pretrained("some/heads", base)
    assert torch.equal(heads.weights[0][1], tensors["1.0.linear.weight"])
    assert hub == ["medusa_lm_head.safetensors", "medusa_lm_head.pt", "config.json"]
    assert heads.base_model_name_or_path == (config and "some/base")


def test_no_heads_on_the_hub(tmp_path, base, hub):
    with pytest.raises(ValueError, match=r"'some/heads' of the Hub has no Medusa heads: none of medusa_lm_head"):
        MedusaHeads.from_pretrained("some/heads", base)
    with pytest.raises(ValueError, match=r"no Medusa heads 'other/heads': give a folder.* \(can't reach the Hub\)"):
        MedusaHeads.from_pretrained("other/heads", base)
