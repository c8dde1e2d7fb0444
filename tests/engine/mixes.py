"""Random mixes of requests for an engine, and what each of them gets alone."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from helpers import assert_pool_accounts, generate, prompt, used_blocks

from hf_turbo.engine.engine import Engine
from hf_turbo.engine.options import RequestOptions
from hf_turbo.engine.request import Request, Status


@dataclass
class Ask:
    """One request: its prompt, arguments of `generate()`, the step it comes in, and the one it is cancelled in."""

    prompt: list[int]
    options: dict[str, Any] = field(default_factory=dict)
    arrives: int = 0
    cancelled: int | None = None
    priority: int = 0

    def request(self, model, name: str) -> Request:
        options = RequestOptions.of(model, self.prompt, None, self.options)
        return Request(
            name, list(self.prompt), options.max_new_tokens, options.num_sequences, self.priority, options=options
        )

    def alone(self, stock) -> list[list[int]]:
        """The new tokens of each text that `generate()` makes of it, padding after an end left out."""
        options = dict(self.options)
        if (seed := options.pop("seed", None)) is not None:
            torch.manual_seed(seed)
        length, eos = len(self.prompt), options.get("eos_token_id") or []
        ids = torch.tensor([self.prompt], device=stock.device)
        rows = generate(stock, ids, options.pop("max_new_tokens"), **options).sequences
        texts = []
        for row in rows[:, length:].tolist():
            end = next((i + 1 for i, token in enumerate(row) if token in eos), len(row))
            texts.append(row[:end])
        return texts


def random_asks(stock, values: random.Random, count: int = 12, longest: int = 40, shared: int = 0) -> list[Ask]:
    """Requests of all kinds. Ends fall within their texts, as they are tokens that the model says.

    Args:
        stock: the model.
        shared: of the prompts, half begin with the same so many tokens.
    """
    asks = []
    for i in range(count):
        length = values.choice([1, 2, 3, 7, 15, 16, 17, 31, longest])
        ids = prompt(1, length, seed=values.randrange(10**6))[0].tolist()
        if shared and values.random() < 0.5:
            ids = prompt(1, shared, seed=7)[0].tolist() + ids
        options: dict[str, Any] = {"max_new_tokens": values.choice([1, 2, 5, 9, 17, 24]), "do_sample": False}
        if values.random() < 0.5:
            options |= {"do_sample": True, "temperature": values.choice([0.7, 1.5]), "seed": i}
            options |= values.choice([{}, {"top_k": 5}, {"top_p": 0.8}, {"min_p": 0.1}])
            options["num_return_sequences"] = values.choice([1, 1, 1, 3])
        options |= values.choice([{}, {}, {"repetition_penalty": 1.4}, {"no_repeat_ngram_size": 2}])
        if values.random() < 0.4:
            said = Ask(ids, options).alone(stock)[-1]
            options["eos_token_id"] = [values.choice(said), 2]
        cancelled = values.randrange(30) if values.random() < 0.15 else None
        asks.append(Ask(ids, options, values.randrange(20), cancelled, values.choice([0, 0, 0, 1])))
    return asks


def run(engine: Engine, model, asks: list[Ask], after_step: Callable[[], None] | None = None) -> list[Request]:
    """Lets an engine compute requests as they come and are cancelled; looks at the pool after every step."""
    requests: dict[int, Request] = {}
    step = 0
    with torch.no_grad():
        while engine.has_work or len(requests) < len(asks):
            for i, ask in enumerate(asks):
                if i not in requests and ask.arrives <= step:
                    requests[i] = ask.request(model, str(i))
                    engine.add(requests[i])
                if i in requests and ask.cancelled is not None and ask.cancelled == step:
                    engine.cancel(requests[i])
                    engine.cancel(requests[i])  # once more changes nothing
            changed = engine.step()
            assert len(set(changed)) == len(changed)
            assert_pool_accounts(model)
            if after_step is not None:
                after_step()
            step += 1
            assert step < 5000, "no end in sight"
    return [requests[i] for i in range(len(asks))]


def check(stock, asks: list[Ask], requests: list[Request]) -> None:
    """Every request has what it gets alone, or as much of it as there was when it was cancelled."""
    for ask, request in zip(asks, requests, strict=True):
        expected = ask.alone(stock)
        said = [sequence.new_tokens for sequence in request.sequences]
        if request.status is Status.CANCELLED:
            assert all(one == whole[: len(one)] for one, whole in zip(said, expected))
        else:
            assert request.status is Status.FINISHED, request.error
            assert said == expected, (request.id, ask.options)


def check_idle(engine: Engine, model) -> None:
    """Nothing is held any more."""
    assert not engine.has_work
    left = engine._choices, engine._held_back, engine._need_logits, engine._ends, engine._steady, engine._chooser.traced
    assert not any(left)
    engine.close()
    assert used_blocks(model) == 0
    assert_pool_accounts(model)
