"""`hf-turbo train-medusa`, from a model's folder and a file of prompts to heads and a table."""

import json

import pytest
import tiny_models
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from typer.testing import CliRunner

from hf_turbo.cli.app import app
from hf_turbo.cli.train_medusa import table
from hf_turbo.generation.medusa_heads import MedusaHeads
from hf_turbo.training.continuations import read_continuations

QUESTIONS = ["what is this", "and that", "say something nice", "why", "go on then"]


@pytest.fixture
def folder(tmp_path):
    words = sorted({word for question in QUESTIONS for word in question.split()})
    tokenizer = Tokenizer(models.WordLevel({word: 3 + number for number, word in enumerate(words)}, unk_token="why"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    model = tiny_models.build("llama")
    model.save_pretrained(tmp_path / "model")
    made = PreTrainedTokenizerFast(tokenizer_object=tokenizer)
    made.chat_template = "{% for message in messages %}why {{ message.content }} {% endfor %}"
    made.save_pretrained(tmp_path / "model")
    lines = [json.dumps({"question": question, "answer": "no"}) for question in QUESTIONS]
    (tmp_path / "prompts.jsonl").write_text("\n".join(lines))
    return tmp_path


def run(folder, *more, data="prompts.jsonl", model="model"):
    asked = ["train-medusa", str(folder / model), "--data", str(folder / data), "--out", str(folder / "out")]
    options = ["--new-tokens", "8", "--batch-size", "2", "--batch-tokens", "16", "--steps", "3", "--device", "cpu"]
    return CliRunner().invoke(app, [*asked, *options, *more])


def test_heads_from_a_file_of_prompts(folder):
    done = run(folder, "--heads", "2", "--layers", "2")
    assert done.exit_code == 0, done.output
    heads = MedusaHeads.from_pretrained(folder / "out")
    assert (heads.num_heads, heads.num_layers) == (2, 2)
    lines = done.stdout.splitlines()
    assert lines[0].split()[:2] == ["head", "guesses"] and "token +2" in lines[1] and "token +3" in lines[2]
    assert f"{heads.accuracies[0][0]:.1%}" in lines[1]
    assert lines[-1].endswith("out: 2 heads")
    assert heads.base_model_name_or_path == str(folder / "model")
    texts = read_continuations(folder / "out" / "continuations", len(QUESTIONS))
    template_and_words = sorted(1 + len(question.split()) for question in QUESTIONS)
    assert [text.num_prompt_tokens for text in texts] == template_and_words


def test_refused_in_one_sentence(folder):
    assert "no field 'prompt'" in told(run(folder, "--field", "prompt"))
    assert "there is no file" in told(run(folder, data="none.jsonl"))
    assert "learning_rate=-1.0: more than 0" in told(run(folder, "--learning-rate", "-1"))
    assert "can't load" in told(run(folder, model="none"))
    assert not (folder / "out").exists()


def told(done):
    assert done.exit_code == 2 and "Traceback" not in done.output
    return " ".join(done.output.replace("│", " ").split())


def test_the_table_adds_ranks_up(capsys):
    from rich.console import Console

    heads = MedusaHeads(2, 1, 4, 8)
    heads.accuracies = [[0.5, 0.25, 0.0], [0.25, 0.125, 0.0]]
    Console(width=120).print(table(heads))
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].split() == ["1", "token", "+2", "50.0%", "75.0%", "75.0%"]
    assert lines[2].split() == ["2", "token", "+3", "25.0%", "37.5%", "37.5%"]
    # 1 + 0.75 * (1 + 0.375)
    assert "63: 2.03" in " ".join(lines[3:])
