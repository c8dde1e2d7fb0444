"""Training on a GPU: the hidden states lie there, and the host waits for nothing within a step."""

import tiny_models
import torch
from helpers import needs_gpu
from test_train_medusa import QUICK, cycles

from hf_turbo.training import examples, medusa
from hf_turbo.training.medusa import train_medusa


@needs_gpu
def test_heads_learn_a_cycle_in_bf16(tmp_path):
    base = tiny_models.build("llama").to("cuda", torch.bfloat16)
    heads = train_medusa(base, None, cycles(), tmp_path, **{**QUICK, "steps": 200})
    assert {(p.dtype, p.device.type) for p in heads.parameters()} == {(torch.bfloat16, "cuda")}
    assert all(ranks[0] > 0.9 for ranks in heads.accuracies)


@needs_gpu
def test_no_step_waits_for_the_gpu(tmp_path, monkeypatch):
    take_step, room = medusa.Loop._take_step, examples._room
    devices = []

    def strict(loop):
        if loop.step == 0:  # draws the epoch's order and makes the optimizer's state
            return take_step(loop)
        torch.cuda.set_sync_debug_mode("error")
        try:
            return take_step(loop)
        finally:
            torch.cuda.set_sync_debug_mode("default")

    def seen(*args):
        made = room(*args)
        devices.append(made.device.type)
        return made

    monkeypatch.setattr(medusa.Loop, "_take_step", strict)
    monkeypatch.setattr(examples, "_room", seen)
    base = tiny_models.build("llama").to("cuda", torch.bfloat16)
    options = {**QUICK, "batch_tokens": 16, "gradient_accumulation": 2, "steps": 40}
    train_medusa(base, None, cycles(30), tmp_path, **options)
    assert devices == ["cuda", "cuda"]
