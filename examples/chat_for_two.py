"""Two people chat with one model at the same time: both answers grow side by side, computed together.

    python examples/chat_for_two.py                                       SmolLM2-135M-Instruct, questions of its own
    python examples/chat_for_two.py --ada "Who are you?" --ada "Say it shorter." --bob "Count to ten."

Each of the two waits for an answer before the next question; neither waits for the other.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from rich.columns import Columns
from rich.console import Console
from rich.live import Live
from rich.panel import Panel
from rich.text import Text
from transformers import AutoModelForCausalLM, AutoTokenizer

import hf_turbo
from hf_turbo.engine.manager import Manager
from hf_turbo.sample_models import SampleModelError, sample_model

QUESTIONS = {
    "Ada": ["Why is the sky blue? One sentence.", "And why is it red in the evening?"],
    "Bob": ["Name three things that float.", "Which of them is the heaviest?"],
}


@dataclass
class Chat:
    """One person's side: the questions that are still to come, and what was said."""

    name: str
    questions: list[str]
    turns: list[dict[str, str]] = field(default_factory=list)

    def shown(self) -> Panel:
        text = Text()
        for turn in self.turns:
            is_question = turn["role"] == "user"
            text.append(f"{turn['content']}\n", style="bold" if is_question else "")
        return Panel(text, title=self.name, width=56)


async def talk(chat: Chat, manager: Manager, tokenizer: Any, max_new_tokens: int) -> None:
    """Asks one question after the other; the answers appear in the chat token by token."""
    for question in chat.questions:
        chat.turns.append({"role": "user", "content": question})
        request = manager.add_request(encode(tokenizer, chat.turns), max_new_tokens=max_new_tokens)
        answer = {"role": "assistant", "content": ""}
        chat.turns.append(answer)
        tokens: list[int] = []
        async for new in manager.astream(request):
            tokens += new
            answer["content"] = tokenizer.decode(tokens, skip_special_tokens=True)


async def talk_all(chats: list[Chat], manager: Manager, tokenizer: Any, max_new_tokens: int, console: Console) -> None:
    """Lets all talk at once, and shows them side by side."""
    talks = asyncio.gather(*(talk(chat, manager, tokenizer, max_new_tokens) for chat in chats))
    with Live(console=console, refresh_per_second=10) as live:
        while not talks.done():
            await asyncio.wait([talks], timeout=0.1)
            live.update(Columns([chat.shown() for chat in chats]))
    console.print()
    await talks


def encode(tokenizer: Any, turns: list[dict[str, str]]) -> list[int]:
    """Token ids of a chat, by the model's template where it has one."""
    if tokenizer.chat_template is None:
        return tokenizer("\n".join(turn["content"] for turn in turns))["input_ids"]
    return tokenizer.apply_chat_template(turns, add_generation_prompt=True, return_dict=True)["input_ids"]


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse_arguments(arguments)
    folder = options.model or str(sample_model("smollm2-135m-instruct"))
    tokenizer = AutoTokenizer.from_pretrained(folder)
    dtype = torch.float32 if options.device == "cpu" else torch.bfloat16
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).to(options.device)
    hf_turbo.patch(model)
    chats = [Chat(name, getattr(options, name.lower()) or asked) for name, asked in QUESTIONS.items()]
    console = Console()
    manager = model.init_continuous_batching()
    manager.start()
    try:
        asyncio.run(talk_all(chats, manager, tokenizer, options.max_new_tokens, console))
    finally:
        manager.stop(hard_stop=True)
    seen = manager.metrics.as_dict()
    console.print(
        f"{seen['decoded_tokens']} tokens in {seen['steps']} steps, {seen['rows_per_step']:.1f} chats a step; "
        f"first token after {seen['first_token_seconds']['p50']:.2f} s, the next ones every "
        f"{seen['token_gap_seconds']['p50'] * 1000:.0f} ms (medians)",
        style="dim",
    )
    return 0


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Two people chat with one model at the same time.")
    for name in QUESTIONS:
        parser.add_argument(f"--{name.lower()}", action="append", metavar="TEXT", help=f"a question of {name}'s")
    parser.add_argument("--model", help="a folder or a name (default: a small sample model)")
    parser.add_argument("--max-new-tokens", type=int, default=60, metavar="N", help="of an answer (default 60)")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    try:
        sys.exit(main())
    except SampleModelError as error:
        sys.exit(str(error))
