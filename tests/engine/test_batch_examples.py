"""The examples of many requests at once run, and their texts are those of `generate()`."""

import importlib.util
import json
import string
import sys
from pathlib import Path

import pytest
import torch
from helpers import build
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A tiny model that reads and writes single characters."""
    path = tmp_path_factory.mktemp("model")
    model = build("llama")
    model.generation_config.eos_token_id = None
    model.save_pretrained(path)
    characters = Tokenizer(models.WordLevel({c: i for i, c in enumerate(string.printable[:128])}, unk_token="!"))
    characters.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    characters.decoder = decoders.Fuse()
    PreTrainedTokenizerFast(tokenizer_object=characters).save_pretrained(path)
    return path


def example(name):
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # its dataclasses look themselves up
    spec.loader.exec_module(module)
    return module


def said(folder, text, count, **options):
    """What the plain model says after a text."""
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), PreTrainedTokenizerFast.from_pretrained(folder)
    ids = tokenizer(text, return_tensors="pt")["input_ids"]
    new = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=count, **options)[0, ids.shape[1] :]
    return tokenizer.decode(new)


def test_complete_dataset_goes_on_where_it_was(folder, tmp_path, capsys):
    texts, data, out = [f"row {i} of seven" for i in range(7)], tmp_path / "rows.jsonl", tmp_path / "out"
    data.write_text("".join(json.dumps({"text": text, "n": i}) + "\n" for i, text in enumerate(texts)))
    arguments = [str(out), "--data", str(data), "--model", str(folder), "--batch-size", "3", "--max-new-tokens", "5",
                 "--new-column", "more", "--device", "cpu"]  # fmt: skip
    run = example("complete_dataset").main
    assert run(arguments) == 0
    files = sorted(out.glob("part-*.jsonl"))
    rows = [json.loads(line) for file in files for line in file.read_text().splitlines()]
    assert len(files) == 3 and [row["n"] for row in rows] == list(range(7))
    assert [row["more"] for row in rows] == [said(folder, text, 5) for text in texts]

    kept = {file: file.stat().st_mtime_ns for file in files}
    whole = files[1].read_text()
    files[1].unlink()
    assert run(arguments) == 0
    assert files[1].read_text() == whole
    assert all(files[i].stat().st_mtime_ns == kept[files[i]] for i in (0, 2))
    with pytest.raises(SystemExit, match="temperature"):
        run([*arguments, "--temperature", "0.5"])
    with pytest.raises(SystemExit, match="no column 'body'"):
        run([*arguments, "--column", "body"])


def test_chat_for_two(folder, capsys):
    arguments = ["--model", str(folder), "--max-new-tokens", "6", "--device", "cpu", "--ada", "hello", "--bob", "bye"]
    assert example("chat_for_two").main(arguments) == 0
    shown = capsys.readouterr().out
    assert "Ada" in shown and "Bob" in shown and "12 tokens in" in shown
