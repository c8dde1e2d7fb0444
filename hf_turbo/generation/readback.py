"""What the host learns of the steps: at once, or one step behind so that it never waits for the step under way."""

from __future__ import annotations

from collections import deque
from functools import cache
from typing import Any

import torch

from ..ops.attention_config import next_power_of_2


@cache
def _mail(steps: torch.cuda.Stream) -> torch.cuda.Stream:
    """On which letters of one stream's steps go home: in that stream itself the next step would wait for the copy."""
    # PyTorch hands out the same few streams again and again. Those of a high priority are others than graphs are
    # captured on, perhaps by another thread just now.
    return torch.cuda.Stream(steps.device, priority=-1)


class Letter:
    """Small tensors of one step on their way to the host. Used again and again."""

    def __init__(self) -> None:
        self._sent: tuple[torch.Tensor | None, ...] = ()  # which nobody else may write to while they are copied
        self._at_home: list[torch.Tensor | None] = []
        self._memory: dict[int, torch.Tensor] = {}  # pinned: getting it takes longer than a small copy
        self._written: torch.cuda.Event | None = None  # when the tensors were; events are used again, too
        self._arrived: torch.cuda.Event | None = None

    def send(self, *tensors: torch.Tensor | None) -> Letter:
        """Copies tensors of one device, best of the same shapes each time; None where there is nothing to tell.

        They are not to be written to before the letter is opened.
        """
        device = next(x.device for x in tensors if x is not None)
        if device.type != "cuda":
            self._at_home = [None if x is None else x.cpu() for x in tensors]
            return self
        if self._written is None or self._arrived is None:
            self._written, self._arrived = torch.cuda.Event(), torch.cuda.Event()
        if not self._fits(tensors):
            self._at_home = [None if x is None else self._place_for(i, x) for i, x in enumerate(tensors)]
        self._sent = tensors
        steps = torch.cuda.current_stream(device)
        mail = _mail(steps)
        self._written.record(steps)
        mail.wait_event(self._written)
        with torch.cuda.stream(mail):
            for home, x in zip(self._at_home, tensors, strict=True):
                if home is not None and x is not None:
                    home.copy_(x, non_blocking=True)
            self._arrived.record(mail)
        return self

    def _place_for(self, i: int, x: torch.Tensor) -> torch.Tensor:
        """Room for the i-th tensor, which may be smaller than an earlier one."""
        room = self._memory.get(i)
        if room is None or room.dtype != x.dtype or len(room) < x.numel():
            room = self._memory[i] = torch.empty(next_power_of_2(x.numel()), dtype=x.dtype, pin_memory=True)
        return room[: x.numel()].view(x.shape)

    def _fits(self, tensors: tuple[torch.Tensor | None, ...]) -> bool:
        wanted, there = ([None if x is None else (x.shape, x.dtype) for x in xs] for xs in (tensors, self._at_home))
        return wanted == there

    def open(self) -> list[torch.Tensor | None]:
        """The tensors on the CPU, until the letter is sent again; waits until they are there."""
        if self._arrived is not None:
            self._arrived.synchronize()
            self._sent = ()
        return self._at_home


class Readback:
    """Reads each step's verdict, and hands its tokens to a streamer.

    Args:
        streamer: `put` gets int64 `[rows]` on the CPU, in order, and never the tokens of a step that is taken back.
        runs_ahead: read a step's verdict when the next step has been launched.
    """

    def __init__(self, streamer: Any, runs_ahead: bool) -> None:
        self.runs_ahead = runs_ahead
        self._streamer = streamer
        self._under_way: deque[Letter] = deque()
        self._spare = [Letter(), Letter()]

    def after_step(self, verdict: torch.Tensor | None, tokens: torch.Tensor, is_last: bool) -> bool:
        """Whether the loop stops here.

        Args:
            verdict: bool `[]`, whether every row is done; or fp32 `[]`, negative when every row is done and NaN where
                probabilities were. None for "go on".
            tokens: the step's, int64 `[rows]`.
            is_last: no step may follow.

        Raises:
            RuntimeError: the probabilities of a step were no numbers.
        """
        if verdict is None and self._streamer is None:
            return is_last
        self._under_way.append(self._spare.pop().send(verdict, None if self._streamer is None else tokens))
        stays = 1 if self.runs_ahead and not is_last else 0
        while len(self._under_way) > stays:
            letter = self._under_way.popleft()
            self._spare.append(letter)
            if self._says_stop(letter):
                return True
        return is_last

    @property
    def steps_to_undo(self) -> int:
        """Steps that were launched after the one that ended the text."""
        return len(self._under_way)

    def _says_stop(self, letter: Letter) -> bool:
        verdict, tokens = letter.open()
        if tokens is not None:
            self._streamer.put(tokens.clone())
        if verdict is None:
            return False
        value = verdict.item()
        if value != value:
            raise RuntimeError("probability tensor contains either `inf`, `nan` or element < 0")
        return value is True or value < 0
