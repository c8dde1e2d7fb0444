"""Training on a corpus that a head can learn wholly, and going on where a training was cut off."""

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
import tiny_models
import torch

from hf_turbo import patch, quantize
from hf_turbo.generation.medusa_heads import MedusaHeads
from hf_turbo.training import continuations, medusa
from hf_turbo.training.base_model import frozen, hidden_states_of
from hf_turbo.training.loop import learning_rate_at
from hf_turbo.training.medusa import train_medusa

PERIOD = 7
QUICK = dict(batch_size=4, batch_tokens=64, learning_rate=0.02, steps=12, progress=False)


@pytest.fixture
def base():
    return tiny_models.build("llama")


def cycles(number=12):
    """Texts of several lengths that go round and round through the same tokens, from anywhere."""
    return [[10 + (start + i) % PERIOD for i in range(20 + 3 * start)] for start in range(number)]


def weights(heads):
    return {name: tensor.clone() for name, tensor in heads.state_dict().items()}


def same(one, other):
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize("shared", [True, False], ids=["shared", "own"])
def test_heads_learn_a_cycle_and_the_model_stays_as_it_is(tmp_path, base, shared):
    before = weights(base)
    heads = train_medusa(
        base,
        None,
        cycles(),
        tmp_path,
        num_heads=3,
        shared_projection=shared,
        **{**QUICK, "steps": 200, "gradient_accumulation": 2},
    )
    assert same(before, weights(base))
    assert all(p.grad is None and p.requires_grad for p in base.parameters())
    tokens = torch.tensor(cycles()[0])
    with hidden_states_of(base) as compute:
        hidden = compute([tokens.tolist()])
    guesses = heads(hidden, base.lm_head).argmax(-1)[0]
    for head in range(3):
        distance = 2 + head
        right = guesses[:-distance, head] == tokens[distance:]
        assert right.float().mean() > 0.95
        assert heads.accuracies[head][0] > 0.95
        assert sum(heads.accuracies[head]) <= 1 + 1e-6
    assert (heads.projections is None) == shared
    assert all((weight != 0).any(dim=(1, 2)).all() for weight in heads.weights)


def test_what_a_training_leaves(tmp_path, base):
    heads = train_medusa(base, None, cycles(), tmp_path, **{**QUICK, "steps": 45, "checkpoint_every": 10})
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "config.json",
        "log.jsonl",
        "medusa_lm_head.safetensors",
        "settings.json",
        "training.png",
    ]
    lines = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [10, 20, 30, 40, 45]
    assert all(len(line["loss"]) == len(line["accuracy"]) == 3 for line in lines)
    assert sum(lines[-1]["loss"]) < sum(lines[0]["loss"])
    rates = [QUICK["learning_rate"] * learning_rate_at(line["step"] - 1, 45, 0.1) for line in lines]
    assert [line["learning_rate"] for line in lines] == pytest.approx(rates)
    assert (tmp_path / "training.png").read_bytes().startswith(b"\x89PNG")
    loaded = MedusaHeads.from_pretrained(tmp_path, base)
    assert same(weights(heads), weights(loaded)) and loaded.accuracies == heads.accuracies


@pytest.mark.parametrize("held_out, number", [(0.25, 3), (0.01, 1), (0.0, 12)])
def test_accuracies_are_measured_on_texts_that_were_held_out(tmp_path, base, monkeypatch, held_out, number):
    asked, make = [], medusa.make_examples
    monkeypatch.setattr(
        medusa, "make_examples", lambda model, texts, *a, **k: asked.append(texts) or make(model, texts, *a, **k)
    )
    train_medusa(base, None, cycles(), tmp_path, **{**QUICK, "held_out": held_out})
    trained, measured = ({tuple(text.tokens) for text in texts} for texts in asked)
    assert len(measured) == number and trained | measured == set(map(tuple, cycles()))
    assert not trained & measured or held_out == 0


def test_each_step_takes_the_next_batches(tmp_path, base, monkeypatch):
    taken, batch = [], medusa.Batches.__getitem__
    monkeypatch.setattr(medusa.Batches, "__getitem__", lambda self, number: taken.append(number) or batch(self, number))
    train_medusa(base, None, cycles(), tmp_path, **{**QUICK, "steps": 45, "gradient_accumulation": 2})
    assert taken == list(range(90))


class CutOff(Exception): ...


def cut_off_at(monkeypatch, step):
    """The process dies in the middle of a step."""
    take_step = medusa.Loop._take_step

    def dying(loop):
        if loop.step == step:
            raise CutOff
        return take_step(loop)

    monkeypatch.setattr(medusa.Loop, "_take_step", dying)


@pytest.mark.parametrize("step", [3, 7, 11])
def test_cut_off_and_resumed_gives_the_same_heads(tmp_path, base, monkeypatch, step):
    options = {**QUICK, "checkpoint_every": 5, "gradient_accumulation": 2}
    whole = train_medusa(base, None, cycles(), tmp_path / "whole", **options)
    with monkeypatch.context() as patched:
        cut_off_at(patched, step)
        with pytest.raises(CutOff):
            train_medusa(base, None, cycles(), tmp_path / "cut", **options)
    torch.manual_seed(99)
    steps = Counter()
    take_step = medusa.Loop._take_step
    monkeypatch.setattr(medusa.Loop, "_take_step", lambda loop: steps.update(["taken"]) or take_step(loop))
    resumed = train_medusa(base, None, cycles(), tmp_path / "cut", **options)
    assert steps["taken"] == 12 - step // 5 * 5
    assert same(weights(whole), weights(resumed)) and whole.accuracies == resumed.accuracies
    logs = [(tmp_path / name / "log.jsonl").read_text() for name in ("whole", "cut")]
    assert logs[0] == logs[1]
    steps.clear()
    again = train_medusa(base, None, cycles(), tmp_path / "cut", **options)
    assert not steps and same(weights(whole), weights(again))


def test_without_resume_all_begins_anew(tmp_path, base):
    first = train_medusa(base, None, cycles(), tmp_path, **QUICK)
    with pytest.raises(ValueError, match=r"seed was 0 and is 1; learning_rate was 0\.02 and is 0\.01"):
        train_medusa(base, None, cycles(), tmp_path, **{**QUICK, "learning_rate": 0.01, "seed": 1})
    with pytest.raises(ValueError, match="prompts was 12 and is 11"):
        train_medusa(base, None, cycles(11), tmp_path, **QUICK)
    assert same(weights(first), weights(MedusaHeads.from_pretrained(tmp_path, base)))
    other = train_medusa(base, None, cycles(), tmp_path, resume=False, **{**QUICK, "learning_rate": 0.01})
    assert not same(weights(first), weights(other))


def test_a_loss_that_is_no_number(tmp_path, base, monkeypatch):
    broken = medusa.make_examples

    def poisoned(*args, **kwargs):
        examples = broken(*args, **kwargs)
        examples.hidden.fill_(float("nan"))
        return examples

    monkeypatch.setattr(medusa, "make_examples", poisoned)
    with pytest.raises(RuntimeError, match=r"the loss of step 1 is \[nan, nan, nan\]: lower learning_rate \(0.02\)"):
        train_medusa(base, None, cycles(), tmp_path, **QUICK)
    assert all(p.requires_grad for p in base.parameters()) and not base.lm_head._forward_pre_hooks
    assert not list(tmp_path.glob("*.bin"))


class WordTokenizer:
    """Words to numbers, with a chat template of its own."""

    def __init__(self, chat_template="yes"):
        self.chat_template = chat_template

    def __call__(self, texts):
        return type("Encoded", (), {"input_ids": [[2 + len(word) % 90 for word in text.split()] for text in texts]})

    def apply_chat_template(self, chats, add_generation_prompt, tokenize, return_dict):
        assert add_generation_prompt and tokenize and return_dict
        said = [self([message["content"] for message in messages]).input_ids for messages in chats]
        return {"input_ids": [[token for turn in turns for token in (1, *turn)] + [1] for turns in said]}


PROMPTS = ["what is this", "and that one over there", "say something nice", "why", "go on then please now"]


@pytest.mark.parametrize("patched", [False, True], ids=["plain", "patched"])
@pytest.mark.parametrize("bits", [None, 4])
def test_prompts_are_continued_by_the_model(tmp_path, base, bits, patched):
    if bits:
        quantize(base, bits, 16)
    if patched:
        patch(base)
    options = {**QUICK, "new_tokens": 9, "batch_size": 2, "held_out": 0.2}
    heads = train_medusa(base, WordTokenizer(), PROMPTS, tmp_path, **options)
    texts = continuations.read_continuations(tmp_path / "continuations", len(PROMPTS))
    assert len(texts) == len(PROMPTS) and heads.accuracies is not None
    for text in texts:
        prompt = torch.tensor([text.tokens[: text.num_prompt_tokens]])
        alone = base.generate(prompt, max_new_tokens=9, do_sample=False)
        assert text.tokens == alone[0].tolist()


def test_continuations_are_made_once(tmp_path, base, monkeypatch):
    monkeypatch.setattr(continuations, "_SHARD", 2)
    options = {**QUICK, "new_tokens": 6, "temperature": 5.0}
    whole = train_medusa(base, WordTokenizer(), PROMPTS, tmp_path / "whole", **options)
    continue_batch, made = continuations._continue_batch, []

    def dying(model, prompts, config):
        if len(made) == 2:
            raise CutOff
        made.append(prompts)
        return continue_batch(model, prompts, config)

    with monkeypatch.context() as cut:
        cut.setattr(continuations, "_continue_batch", dying)
        with pytest.raises(CutOff):
            train_medusa(base, WordTokenizer(), PROMPTS, tmp_path / "cut", **options)
    monkeypatch.setattr(continuations, "_continue_batch", lambda *a: made.append(a[1]) or continue_batch(*a))
    torch.manual_seed(99)
    resumed = train_medusa(base, WordTokenizer(), PROMPTS, tmp_path / "cut", **options)
    assert len(made) == 3  # two before, the last one now
    assert same(weights(whole), weights(resumed)) and whole.accuracies == resumed.accuracies
    folders = [tmp_path / name / "continuations" for name in ("whole", "cut")]
    said = [continuations.read_continuations(folder, len(PROMPTS)) for folder in folders]
    assert said[0] == said[1]


def test_a_continuation_ends_with_its_end(tmp_path, base):
    free = train_and_read(base, tmp_path / "free")
    common = Counter(token for text in free for token in text.tokens[text.num_prompt_tokens + 1 :])
    end = common.most_common(1)[0][0]
    base.generation_config.eos_token_id = [end, 127]
    for text, before in zip(train_and_read(base, tmp_path / "ended"), free):
        new, long = text.tokens[text.num_prompt_tokens :], before.tokens[text.num_prompt_tokens :]
        assert new == (long[: long.index(end) + 1] if end in long else long)


def train_and_read(base, folder):
    train_medusa(base, WordTokenizer(), PROMPTS, folder, **{**QUICK, "steps": 1, "new_tokens": 12})
    return continuations.read_continuations(folder / "continuations", len(PROMPTS))


def test_no_room_or_nothing_said(tmp_path, base):
    with pytest.raises(ValueError, match="no prompt leaves room for three tokens in max_length=4"):
        train_medusa(base, WordTokenizer(), PROMPTS, tmp_path, max_length=4)
    with pytest.raises(ValueError, match="no such option: heads; there are batch_size"):
        train_medusa(base, None, cycles(), tmp_path, heads=4)
    base.generation_config.eos_token_id = list(range(128))
    with pytest.raises(ValueError, match="nothing to guess"):
        train_medusa(base, WordTokenizer(), PROMPTS, tmp_path, **QUICK)


def test_a_half_precision_model(tmp_path):
    base = tiny_models.build("llama").to(torch.bfloat16)
    heads = train_medusa(base, None, cycles(), tmp_path, **{**QUICK, "steps": 120})
    assert {p.dtype for p in heads.parameters()} == {torch.bfloat16}
    assert heads.accuracies[0][0] > 0.9


def test_the_model_is_as_before_whatever_happens(base):
    base.train()
    base.model.layers[0].eval()
    base.lm_head.weight.requires_grad_(False)

    def fail():
        with frozen(base):
            assert not any(module.training for module in base.modules())
            assert not any(p.requires_grad for p in base.parameters())
            raise CutOff

    with pytest.raises(CutOff):
        fail()
    assert base.training and not base.model.layers[0].mlp.training and base.model.layers[1].training
    assert not base.lm_head.weight.requires_grad and base.model.norm.weight.requires_grad


_TWO_PROCESSES = """
import sys
import tiny_models, torch
from test_train_medusa import PROMPTS, QUICK, WordTokenizer, cycles
from hf_turbo.training.medusa import train_medusa

base = tiny_models.build("llama")
heads = train_medusa(base, None, cycles(), sys.argv[1], **{**QUICK, "steps": 100})
train_medusa(base, WordTokenizer(), PROMPTS, sys.argv[1] + "-said", **{**QUICK, "new_tokens": 8})
print(heads.accuracies[0][0] > 0.95, float(heads.weights[0].double().sum()), flush=True)
"""


@pytest.mark.slow
def test_two_processes_train_the_same_heads(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(_TWO_PROCESSES)
    here = Path(__file__).parent
    paths = {"PYTHONPATH": os.pathsep.join(map(str, (here, here.parent, here.parent.parent)))}
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script)]
    environment = {**os.environ, **paths, "ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1"}
    done = subprocess.run([*launch, str(tmp_path / "out")], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    one, other = done.stdout.splitlines()
    assert one == other and one.startswith("True")
    said = continuations.read_continuations(tmp_path / "out-said" / "continuations", len(PROMPTS))
    assert len(said) == len(PROMPTS)
