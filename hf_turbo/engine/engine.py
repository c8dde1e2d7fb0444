"""The engine: one forward a step for all requests that run, the choice of their tokens, and what follows from it.

It belongs to one thread. On a GPU the host runs one step ahead: it launches a step with tokens that it has not read
yet, which the device has.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable
from collections.abc import Sequence as Many
from operator import attrgetter
from typing import Any

import torch

from ..generation.loop import runs_ahead
from ..generation.readback import Letter
from ..modeling.head_input import HeadInput
from ..ops.transfer import ints_to_device
from .batch import Batch
from .choice import Chooser, RequestChoice, Taker, not_numbers
from .drafted import DraftedSteps
from .forwards import RowForwards
from .limits import EngineLimits
from .memory import CacheMemory
from .metrics import EngineMetrics
from .newest import Newest
from .news import News
from .request import Request, Sequence, Status
from .scheduler import Scheduler, Share

#: While texts go on and others wait, a plan is made at least once in so many steps.
_PLAN_EVERY = 16

#: The one sequence of a request that asks for no more.
_FIRST = [0]

_row_of = attrgetter("sequence.row")


class Engine:
    """Computes requests together.

    Args:
        model: a patched model.
        limits: of a step, and of memory.

    Raises:
        PackedUnsuited: the model's forwards can't be shared by rows.
    """

    def __init__(self, model: Any, limits: EngineLimits) -> None:
        speculation = model._hf_turbo.speculation
        reads_hidden = speculation is not None and speculation.drafter.reads_hidden
        self._forwards = RowForwards(model, HeadInput() if reads_hidden else None)
        self._forwards.probe()
        device = self._forwards.device
        self._memory = CacheMemory(model, self._forwards, limits)
        self.scheduler = Scheduler(self._memory, limits.max_tokens, limits.max_rows, limits.max_chunk)
        self._chooser = Chooser(limits.return_logprobs)
        self._drafted: DraftedSteps | None = None
        if speculation is not None:
            self._drafted = DraftedSteps(model, limits, self._forwards, self._memory, self._chooser)
        self._goes_ahead = runs_ahead(device) if limits.goes_ahead is None else limits.goes_ahead
        self._choices: dict[Request, RequestChoice] = {}
        #: Those of which all tokens must have been read before the next is chosen.
        self._held_back: set[Request] = set()
        #: Those for which the likeliest tokens are not all that is asked for.
        self._need_logits: set[Request] = set()
        #: Tokens that end the text of a request, or did so of one that was there with these.
        self._ends: set[int] = set()
        self._under_way: deque[tuple[Batch, Letter]] = deque()
        self._letters = [Letter(), Letter()]
        self._newest = Newest(device)
        #: What goes on unless something joins or ends, and for how many steps at most.
        self._steady: Batch | None = None
        self._steady_left: int | None = None
        self._num_added = 0
        #: Of the step under way: requests with news, tokens computed that do not continue a text, tokens read, seconds
        #: between two tokens of a text and how many had them, seconds not the host's.
        self._changed: dict[Request, None] = {}
        self._num_prompt = self._num_read = 0
        self._gaps: Counter[float] = Counter()
        self._seconds_away = 0.0
        self.metrics = EngineMetrics()

    @property
    def has_work(self) -> bool:
        return bool(self._under_way) or bool(self.scheduler.num_waiting + self.scheduler.num_running)

    def add(self, request: Request) -> None:
        """Takes a request; one that can never fit has failed when this returns."""
        request.order = self._num_added
        self._num_added += 1
        self.scheduler.add(request)
        if request.is_over:
            self.metrics.note_end(request.status)
        else:
            choice = RequestChoice(request.options, request.prompt, self._forwards.device)
            self._choices[request] = choice
            if not choice.may_go_ahead:
                self._held_back.add(request)
            if self._chooser.needs_logits(request.options):
                self._need_logits.add(request)
            request.quiet_below = request.options.stops.quiet_below
            self._ends |= request.options.stops.ends
            self._steady = None

    def cancel(self, request: Request) -> None:
        """Ends a request where it is; one that is over stays what it is."""
        if not request.is_over:
            self._end(request, Status.CANCELLED)

    def step(self) -> list[Request]:
        """One step. Returns the requests that have new tokens or have ended in it."""
        began = time.perf_counter()
        self._changed, self._num_prompt, self._num_read, self._seconds_away = {}, 0, 0, 0.0
        self._gaps.clear()
        self._memory.look()
        launched = self._go_on() or self._plan()
        self._read(1 if launched and self._goes_ahead else 0)
        self._memory.make_room()
        self._note_step(time.perf_counter() - began)
        return list(self._changed)

    def fail_all(self, error: Exception) -> list[Request]:
        """Everything that is under way fails."""
        self._under_way.clear()
        requests = list(self._choices)
        for request in requests:
            self._end(request, Status.FAILED, error)
        return requests

    def close(self) -> None:
        """Gives back all blocks."""
        self.fail_all(RuntimeError("the engine was closed"))
        if self._drafted is not None:
            self._drafted.close()
        self._memory.close()

    def model_may_have_changed(self) -> None:
        """Texts that were kept before are kept no more if it has; captured steps are made anew."""
        self._memory.look_again()
        self._forwards.cache.model_is_as_it_was = False

    def _plan(self) -> bool:
        """Asks for the next step and launches it; False: there is none."""
        if not (goes_ahead := self._may_go_ahead()):
            self._read(0)
        plan = self.scheduler.plan()
        self.metrics.preemptions += len(plan.preempted)
        for request in plan.failed:
            self._end(request, Status.FAILED, request.error)
        if not plan.shares:
            return False
        self._memory.make_room()
        if self._draft(plan.shares):
            return True
        batch = self._launch(plan.shares)
        # After a prompt there may be room for the next one; a plan without any has let in what it could.
        is_whole = batch.goes_on and not any(sequence.request.is_over for sequence in batch.sequences)
        if is_whole and not self._num_prompt and (goes_ahead or not self._goes_ahead):
            self._steady, self._steady_left = batch, batch.num_steps_left()
            if self.scheduler.num_waiting and (self._steady_left is None or self._steady_left > _PLAN_EVERY):
                self._steady_left = _PLAN_EVERY
        return True

    def _may_go_ahead(self) -> bool:
        """Whether the next step may be launched before the host has read the last one."""
        if not self._goes_ahead or not self._memory.has_room_for_step:
            # Who is preempted must be known to its last token. With this much room nobody is: a prompt's chunk takes
            # what there is and preempts only where that is not enough for a single token.
            return False
        if self._may_draft:
            return False
        return not self._held_back or self._held_back.isdisjoint(self.scheduler.running)

    @property
    def _may_draft(self) -> bool:
        """Whether the next step may be one with drafts, for which the host must know all tokens."""
        return self._drafted is not None and self._drafted.may_draft

    def _draft(self, shares: Many[Share]) -> bool:
        """Where every row is to get a token: gives them more, by way of drafts; False: nothing has been done."""
        if self._drafted is None or len(shares) < len(self._memory.rows):
            return False
        if any(share.num_tokens > 1 or share.sequence.num_missing > 1 for share in shares):
            return False
        news = self._timed(self._drafted.run, list(self._memory.rows), self._choices)
        if news is None:
            return False
        self._take_all({one.sequence.request: [one] for one in news}, time.perf_counter())
        return True

    def _go_on(self) -> bool:
        """Launches the last step's sequences once more, where nothing has joined or ended; False: it can't be.

        No plan is made: at so many rows making one takes as long as a small model's step.
        """
        batch, left = self._steady, self._steady_left
        if batch is None or left == 0 or not self._memory.has_room_for_step or self._may_draft:
            self._steady = None
            return False
        self._steady_left = None if left is None else left - 1
        result = self._timed(self._forwards.step, self._newest.tokens, not self._need_logits)
        self._saw(batch.sequences, is_step=True)
        for sequence in batch.sequences:
            sequence.num_cached += 1
        self._choose(batch, result)
        return True

    def _launch(self, shares: Many[Share]) -> Batch:
        """Computes a step and chooses the tokens that follow; the answer is for whom."""
        by_row = sorted(shares, key=_row_of)
        ready: list[Sequence] = []
        chunks: list[Sequence] = []
        wanted, end = [], -1
        for sequence, num_tokens in by_row:
            end += num_tokens
            num_missing = len(sequence.tokens) + sequence.num_unknown - sequence.num_cached
            if num_tokens == num_missing:
                ready.append(sequence)
                wanted.append(end)
            if num_missing > 1:
                self._num_prompt += num_tokens
                if num_tokens > 1:
                    chunks.append(sequence)
        result = self._compute(by_row, ready, wanted)
        for sequence, num_tokens in by_row:
            sequence.num_cached += num_tokens
        self._memory.keep(chunks)  # what comes next may begin like these
        batch, rows = self._batch(ready)
        if batch.sequences:
            if rows is not None and rows != list(range(len(result))):
                result = result.index_select(0, ints_to_device(rows, result.device))
            self._choose(batch, result)
        return batch

    def _choose(self, batch: Batch, result: torch.Tensor) -> None:
        """Chooses a token for each of a batch's sequences by what forwards gave for each, and sends it home."""
        chosen = self._chooser.choose(result, batch.takers)
        for sequence in batch.sequences:
            sequence.num_unknown += 1
        batch.traced = [choice for choice, _ in self._chooser.traced]
        self._newest.put(chosen.tokens, batch.sequences)
        letter = self._letters.pop() if self._letters else Letter()
        self._under_way.append((batch, letter.send(chosen.tokens, chosen.logprobs, chosen.doubts)))
        for request in {sequence.request for sequence in batch.sequences} if chosen.errors else ():
            if (error := chosen.errors.get(self._choices[request])) is not None:
                self._end(request, Status.FAILED, error)

    def _compute(self, shares: Many[Share], ready: Many[Sequence], wanted: Many[int]) -> torch.Tensor:
        """What `RowForwards.packed` gives for the last token of each sequence that is ready.

        Args:
            shares: in the order of their rows.
            ready: of them, those that miss no other tokens.
            wanted: the places of their last tokens among all that are computed.
        """
        tokens = self._newest.tokens_of(shares)
        num_rows = self._forwards.num_rows
        if len(shares) == len(tokens) == num_rows:
            result = self._timed(self._forwards.step, tokens, not self._need_logits)
            self._saw(ready, is_step=True)
            if len(ready) == num_rows:
                return result
            return result.index_select(0, ints_to_device(wanted, result.device))
        q_lens = [0] * num_rows
        for sequence, num_tokens in shares:
            q_lens[sequence.held_row] = num_tokens
        result = self._timed(self._forwards.packed, tokens, q_lens, wanted, not self._need_logits)
        self._saw(ready, is_step=False)
        return result

    def _saw(self, ready: Many[Sequence], is_step: bool) -> None:
        if self._drafted is not None:
            self._drafted.saw(ready, is_step)

    def _batch(self, ready: list[Sequence]) -> tuple[Batch, list[int] | None]:
        """The sequences that get a token each, and which of the ready ones' logits is each's; None: its own."""
        num_rows = self._forwards.num_rows
        if not [sequence for sequence in ready if sequence.request.num_sequences > 1]:
            takers: list[Taker] = [(self._choices[sequence.request], _FIRST) for sequence in ready]
            return Batch(ready, takers, goes_on=0 < len(ready) == num_rows), None
        batch, rows = self._batch_of_several(ready)
        in_order = [sequence.row for sequence in batch.sequences] == list(range(num_rows))
        batch.goes_on = in_order and bool(ready)
        return batch, rows

    def _batch_of_several(self, ready: list[Sequence]) -> tuple[Batch, list[int]]:
        """The same where requests may have several sequences: all they ask for, once their prompts are done."""
        rows_of: dict[Request, list[int]] = {}
        for row, sequence in enumerate(ready):
            rows_of.setdefault(sequence.request, []).append(row)
        batch, rows = Batch([], []), []
        for request, own in rows_of.items():
            if len(request.sequences) < request.num_sequences:
                own *= request.num_sequences
                request.fork()
                self._memory.fork(request)
                live = request.sequences
            else:
                if len(own) > 1:
                    own.sort(key=lambda row: ready[row].index)
                live = [ready[row] for row in own]
            batch.sequences += live
            batch.takers.append((self._choices[request], [sequence.index for sequence in live]))
            rows += own
        return batch, rows

    def _read(self, num_stay: int) -> None:
        """Takes in the steps under way, the oldest first, until so many are left."""
        while len(self._under_way) > num_stay:
            batch, letter = self._under_way.popleft()
            arrived = self._timed(letter.open)
            tokens, logprobs, doubts = ([] if x is None else x.tolist() for x in arrived)
            self._letters.append(letter)
            now = time.perf_counter()
            news: dict[Request, list[News]] = {}
            for place in self._take_quickly(batch, tokens, logprobs, doubts, now):
                sequence, logprob = batch.sequences[place], [logprobs[place]] if logprobs else None
                failures: dict[int, Exception] = {0: not_numbers()} if doubts and doubts[place] else {}
                one = News(sequence, [tokens[place]], logprob, failures)
                news.setdefault(sequence.request, []).append(one)
            self._take_all(news, now)

    def _take_quickly(
        self, batch: Batch, tokens: list[int], logprobs: list[float], doubts: list[bool], now: float
    ) -> list[int]:
        """Takes in the tokens that are neither the first nor the last of a text.

        Nearly all are like that: this is what the host does most often, so it looks at as few objects as it can.

        Returns:
            The places of the others, but of those that come after an end.
        """
        changed, ends = self._changed, self._ends
        others: list[int] = []
        before: list[float] = []  # when the texts got the tokens before these
        for place, (sequence, token) in enumerate(zip(batch.sequences, tokens, strict=True)):
            sequence.num_unknown -= 1
            request, times, text = sequence.request, sequence.times, sequence.tokens
            if request.status >= Status.FINISHED or sequence.is_done:
                continue  # it is over
            changed[request] = None
            if not times or len(text) + 1 >= request.quiet_below or token in ends or (doubts and doubts[place]):
                others.append(place)
                continue
            before.append(times[-1])
            text.append(token)
            times.append(now)
            if logprobs:
                sequence.logprobs.append(logprobs[place])
        for choice in batch.traced:
            choice.settle()
        self._num_read += len(before)
        for time_before, count in Counter(before).items():
            self._gaps[now - time_before] += count
        return others

    def _take_all(self, news: dict[Request, list[News]], now: float) -> None:
        """Takes in tokens that have come now."""
        for request, each in news.items():
            self._take(request, each, now)

    def _take(self, request: Request, news: list[News], now: float) -> None:
        """Takes in tokens of a request's sequences."""
        self._changed[request] = None
        try:
            for one in news:
                self._append(one, now)
            self._choices[request].settle()
        except Exception as error:  # of its criteria, say: the other requests have nothing to do with it
            self._end(request, Status.FAILED, error)
            return
        done = [one.sequence for one in news if one.sequence.is_done]
        if all(sequence.is_done for sequence in request.sequences):
            self._end(request, Status.FINISHED)
        elif done:
            self._memory.leave(done)
            self._steady = None

    def _append(self, news: News, now: float) -> None:
        """Takes in a sequence's tokens up to its end.

        Raises:
            Exception: what went wrong with the first of them that is missing then.
        """
        sequence, choice = news.sequence, self._choices[news.sequence.request]
        num_good = min(news.failures, default=len(news.tokens))
        kept, sequence.is_done = choice.keep(sequence.index, news.tokens[:num_good], len(sequence.tokens))
        choice.undo(max(news.num_choices - len(kept), 0))
        self._num_read += len(kept)
        for place, token in enumerate(kept):
            if sequence.times:
                self._gaps[now - sequence.times[-1]] += 1
            elif sequence.index == 0:
                self.metrics.note_first_token(now - sequence.request.arrived_at)
                self.metrics.asked_tokens += len(sequence.request.prompt)
                self.metrics.hit_tokens += sequence.request.num_found
            sequence.append(token, None if news.logprobs is None else news.logprobs[place], now)
        if not sequence.is_done and num_good in news.failures:
            raise news.failures[num_good]

    def _end(self, request: Request, status: Status, error: Exception | None = None) -> None:
        """A request is over."""
        request.status, request.error = status, error
        self._steady = None
        self.scheduler.remove(request)
        self.metrics.note_end(status)
        self._choices.pop(request, None)
        self._held_back.discard(request)
        self._need_logits.discard(request)
        if not self._choices:
            self._ends = set()
            self._chooser.forget()
        if self._drafted is not None:
            self._drafted.forget(request)
        self._changed[request] = None

    def _timed(self, work: Callable[..., Any], *args: Any) -> Any:
        """Does what is not the engine's own work, and counts how long that takes."""
        began = time.perf_counter()
        result = work(*args)
        self._seconds_away += time.perf_counter() - began
        return result

    def _note_step(self, seconds: float) -> None:
        if self._drafted is not None:
            self._drafted.note(seconds)
        metrics, groups = self.metrics, self._forwards.cache.pool.all_groups()
        num_rows = self._forwards.num_rows
        metrics.note_step(self._num_prompt, self._num_read, num_rows, seconds, seconds - self._seconds_away)
        for gap, count in self._gaps.items():
            metrics.note_token_gap(gap, count)
        metrics.waiting, metrics.running = self.scheduler.num_waiting, self.scheduler.num_running
        metrics.blocks_used = sum([group.manager.num_used for group in groups])
        metrics.blocks_cached = sum([group.manager.num_cached for group in groups])
        metrics.blocks_total = sum([group.manager.num_blocks for group in groups])
