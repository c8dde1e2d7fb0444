"""Prompts from files, data sets and lists, as texts, conversations and token ids; and the options."""

import json
import math

import datasets
import pytest
import torch

from hf_turbo.training.config import TrainingConfig
from hf_turbo.training.loop import learning_rate_at
from hf_turbo.training.prompts import read_prompts
from hf_turbo.training.record import Log, read_log


class Letters:
    """A letter a token; a turn is its role's first letter, its text and a dot."""

    def __init__(self, chat=True):
        self.chat_template = "a template" if chat else None

    def __call__(self, texts):
        assert texts  # real ones fail without any
        return type("Encoded", (), {"input_ids": [[ord(letter) for letter in text] for text in texts]})

    def apply_chat_template(self, chats, add_generation_prompt, tokenize, return_dict):
        assert chats and add_generation_prompt and tokenize and return_dict
        turns = [[message["role"][0] + message["content"] + "." for message in messages] for messages in chats]
        return {"input_ids": self(["".join(parts) + "a" for parts in turns]).input_ids}


def texts(prompts):
    return ["".join(map(chr, tokens)) for tokens in prompts.tokens]


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")


def write(tmp_path, ending, rows):
    path = tmp_path / f"data{ending}"
    if ending == ".jsonl":
        path.write_text("\n".join(map(json.dumps, rows)))
    elif ending == ".json":
        path.write_text(json.dumps(rows))
    elif ending == ".csv":
        path.write_text("\n".join([",".join(rows[0]), *(",".join(row.values()) for row in rows)]))
    elif ending == ".parquet":
        datasets.Dataset.from_list(rows).to_parquet(path)
    else:
        path.write_text("\n".join(row["question"] for row in rows))
    return path


@pytest.mark.parametrize("ending", [".jsonl", ".json", ".csv", ".parquet", ".txt"])
def test_files(tmp_path, ending):
    path = write(tmp_path, ending, [{"question": "Hi", "answer": "Oh"}, {"question": "Why", "answer": "So"}])
    assert texts(read_prompts(path, Letters())) == ["uHi.a", "uWhy.a"]
    assert texts(read_prompts(str(path), Letters(chat=False))) == ["Hi", "Why"]
    if ending != ".txt":
        assert texts(read_prompts(path, Letters(), "answer")) == ["uOh.a", "uSo.a"]


def test_conversations_end_with_their_last_user_message():
    system = {"role": "system", "content": "S"}
    turns = [system, *({"role": role, "content": text} for role, text in [("user", "A"), ("assistant", "B")])]
    data = datasets.Dataset.from_dict({"id": [1, 2], "messages": [turns, [*turns, {"role": "user", "content": "C"}]]})
    assert texts(read_prompts(data, Letters())) == ["sS.uA.a", "sS.uA.aB.uC.a"]
    assert texts(read_prompts([turns], Letters())) == ["sS.uA.a"]
    with pytest.raises(ValueError, match="without a user's message"):
        read_prompts([[system]], Letters())


@pytest.mark.parametrize("chat, expected", [(True, ["uA.a", "uB.a", "uC.a"]), (False, ["A", "uB.a", "C"])])
def test_prompts_keep_their_order(chat, expected):
    data = ["A", [{"role": "user", "content": "B"}], "C"]
    assert texts(read_prompts(data, Letters(chat))) == expected


def test_token_ids_are_ready():
    found = read_prompts([[1, 2, 3], [4, 5]], None)
    assert found.ready and found.tokens == [[1, 2, 3], [4, 5]]
    assert read_prompts([torch.tensor([1, 2, 3])], None).tokens == [[1, 2, 3]]
    assert read_prompts(datasets.Dataset.from_dict({"ids": [[1, 2, 3]]}), None).ready
    assert not read_prompts(["text"], Letters()).ready


@pytest.mark.parametrize(
    "data, tokenizer, field, told",
    [
        ([], None, None, "no prompts"),
        (["text"], None, None, "need a tokenizer"),
        (["text", [1, 2]], Letters(), None, "some of the prompts are texts and others token ids"),
        ([1.5], Letters(), None, r"not 1\.5"),
        ([[{"role": "user"}]], Letters(), None, "a prompt is a text, a list of messages or a list of token ids"),
        ({"train": ["a"]}, Letters(), None, "take one split"),
        (["text"], Letters(), "prompt", "a list has none"),
        ("none.jsonl", Letters(), None, "there is no file none.jsonl"),
        ("prompts.docx", Letters(), None, r"read from \.json, \.jsonl, \.csv"),
        (datasets.Dataset.from_dict({"a": ["x"], "b": ["y"]}), Letters(), None, "There are a, b"),
        (datasets.Dataset.from_dict({"a": ["x"]}), Letters(), "b", "no field 'b'; its fields are a"),
    ],
)
def test_refused(data, tokenizer, field, told):
    with pytest.raises(ValueError, match=told):
        read_prompts(data, tokenizer, field)


@pytest.mark.parametrize(
    "options, told",
    [
        ({"num_heads": 0, "batch_size": 0}, "num_heads=0: at least 1; batch_size=0: at least 1"),
        ({"learning_rate": 0.0}, "learning_rate=0.0: more than 0"),
        ({"learning_rate": math.nan}, "learning_rate=nan: more than 0"),
        ({"temperature": -1.0}, "temperature=-1.0: at least 0"),
        ({"held_out": 1.0}, "held_out=1.0: from 0 to less than 1"),
        ({"steps": 0}, "steps=0: at least 1, or None"),
        ({"max_length": 3}, "max_length=3: at least 4"),
        ({"lr": 1.0}, "no such option: lr; there are batch_size"),
    ],
)
def test_options_that_are_not_allowed(options, told):
    with pytest.raises(ValueError) as refused:
        TrainingConfig.of(options)
    assert told in str(refused.value)


def test_options_are_of_continuations_or_of_training():
    config = TrainingConfig(seed=5)
    parts = config.of_continuations(), config.of_training()
    assert {**parts[0], **parts[1]} == vars(config) and not parts[0].keys() & parts[1].keys()


def test_the_learning_rate_rises_and_falls():
    rates = [learning_rate_at(step, 100, 0.1) for step in range(101)]
    assert rates[0] == pytest.approx(1 / 11) and rates[10] == 1.0 and rates[55] == pytest.approx(0.5)
    assert rates[100] == pytest.approx(0.0, abs=1e-12)
    assert rates[:11] == sorted(rates[:11]) and rates[10:] == sorted(rates[10:], reverse=True)
    assert learning_rate_at(0, 1, 0.0) == 1.0


def test_a_log_drops_what_will_be_done_again(tmp_path):
    log = Log(tmp_path / "log.jsonl", 0)
    for step in (20, 40, 60):
        log.add(step, [1.0], [0.5], 1e-3)
    with log.path.open("a") as file:
        file.write('{"step": 8')  # cut off
    Log(log.path, 40).add(60, [0.9], [0.6], 1e-3)
    assert [(line["step"], line["loss"]) for line in read_log(log.path)] == [(20, [1.0]), (40, [1.0]), (60, [0.9])]
