"""`Manager`: Transformers' `ContinuousBatchingManager` for a patched model, served by hf_turbo's engine."""

from __future__ import annotations

import asyncio
import itertools
import logging
import threading
import weakref
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
from transformers import ContinuousBatchingConfig, GenerationConfig
from transformers.generation.continuous_batching.requests import GenerationOutput

from ..handle import PatchHandle
from .configs import RequestConfigs
from .limits import EngineLimits, limits_of
from .metrics import EngineMetrics
from .options import RequestOptions
from .outputs import CANCELLED, Handler, Outbox, Submission
from .request import Request
from .supported import OBJECTS
from .worker import Stop, Worker

logger = logging.getLogger("hf_turbo")


class Manager:
    """Takes requests from any thread, and brings their texts; a thread of its own computes them together.

    It has the methods of Transformers' `ContinuousBatchingManager`, and the same results. What is more: every request
    may have options of its own, `stream` and `astream` give its new tokens, `pause` works in all releases, and
    `metrics` says how things go.

    Args:
        model: a patched model. It is put into evaluation mode, as Transformers does.
        generation_config: of requests that say nothing else; None for the model's own.
        continuous_batching_config: how much is done at once.
        make_engine: makes the engine; another one in tests.
        reads_along: as of `limits_of`.

    Raises:
        ValueError: a value of the config that is not allowed.
        NotImplementedError: a field of the config asks for what there is not.
    """

    def __init__(
        self,
        model: Any,
        generation_config: GenerationConfig | None = None,
        continuous_batching_config: ContinuousBatchingConfig | None = None,
        make_engine: Callable[[Any, EngineLimits], Any] | None = None,
        reads_along: bool = True,
    ) -> None:
        self.continuous_batching_config = continuous_batching_config or ContinuousBatchingConfig()
        self._handle: PatchHandle = model._hf_turbo
        self.limits = limits_of(self.continuous_batching_config, self._handle, model.device.type, reads_along)
        self.model = model.eval()
        self.generation_config = generation_config
        self.warmed_up = False
        self._configs = RequestConfigs(model)
        self._outbox = Outbox()
        make = partial(make_engine or _new_engine, model, self.limits)
        self._worker = Worker(make, self._outbox, model.device, self.continuous_batching_config.max_queue_size)
        self._is_destroyed = False
        self._lock = threading.Lock()
        self._numbers = itertools.count()
        self._seeds = None if self.limits.seed is None else torch.Generator().manual_seed(self.limits.seed)
        weakref.finalize(self, _abandon, weakref.ref(self._worker))

    def __reduce__(self) -> Any:
        """A copy of a model has no manager."""
        return _no_manager, ()

    # ---- life

    def warmup(self) -> None:
        """Makes the engine now, so that what is wrong with it is said here. Steps are captured as they come up.

        Raises:
            PackedUnsuited: the model's forwards can't be shared by requests.
        """
        self._worker.build()
        self.warmed_up = True

    def start(self) -> None:
        """Starts the thread. One that has been stopped can be started again.

        Raises:
            RuntimeError: the manager has been destroyed.
        """
        if self._is_destroyed:
            raise RuntimeError("a manager that has been destroyed can't be started; make another one")
        if self._handle.manager is self:
            self._handle.manager = None
        self._worker.start()

    def is_running(self) -> bool:
        """Whether the thread is there."""
        return self._worker.is_alive

    def stop(
        self,
        block: bool = True,
        timeout: float | None = None,
        keep_for_next_session: bool = False,
        hard_stop: bool = False,
    ) -> None:
        """Ends the thread once what is under way has ended, and gives back all that it held.

        Args:
            block: wait for it.
            timeout: seconds to wait at most; None without a limit.
            keep_for_next_session: keep the engine and what its cache knows: the model's next
                `init_continuous_batching` or `generate_batch` gets this manager.
            hard_stop: don't wait for what is under way: it fails.

        Raises:
            RuntimeError: called within `pause()`.
        """
        if not self._worker.was_started:
            logger.warning("the manager was not started")
            keep_for_next_session = False
        self._worker.stop(Stop.NOW if hard_stop else Stop.WHEN_DONE, keep_for_next_session)
        if block:
            self.join(timeout=timeout)
        if keep_for_next_session and self.fatal_error is None:
            self._handle.manager = self

    def join(self, stop_trigger_time: float | None = None, timeout: float | None = None) -> None:
        """Waits for the thread to end, for so many seconds at most. The first argument is Transformers'; not used."""
        if not self._worker.join(timeout):
            logger.warning("the manager's thread has not ended within %s s", timeout)

    def destroy(self) -> None:
        """Stops for good. Twice is fine."""
        if self._handle.manager is self:
            self._handle.manager = None
        self._is_destroyed = True
        self._worker.stop(Stop.WHEN_DONE)
        self.join()

    def pause(self) -> AbstractContextManager[None]:
        """Nothing is computed within the block, so that the model may be changed; requests go on afterwards.

        Raises:
            RuntimeError: the manager isn't running.
        """
        return self._worker.pause()

    @property
    def fatal_error(self) -> Exception | None:
        """What the engine died of."""
        return self._worker.fatal_error

    @property
    def background_thread_status(self) -> Worker:
        """Where Transformers' server looks for `fatal_error`."""
        return self._worker

    @property
    def batch_processor(self) -> Any:
        """The engine; None while there is none. Where Transformers' server looks for it."""
        return self._worker.engine

    @property
    def metrics(self) -> EngineMetrics | None:
        """Of the engine, or of the last one; None before there was one."""
        return self._worker.metrics

    # ---- requests

    def add_request(
        self,
        input_ids: Iterable[int],
        request_id: str | None = None,
        max_new_tokens: int | None = None,
        streaming: bool = False,
        record_timestamps: bool = False,
        eos_token_id: int | list[int] | None = None,
        **options: Any,
    ) -> str:
        """Takes a request. For many threads.

        Args:
            input_ids: the prompt: at least one token.
            request_id: a name for it; None for "req_" and a number. Further sequences of `num_return_sequences` are
                called `<id>__child#0`, ...
            max_new_tokens: None for what the generation config says.
            streaming: whether there is a result for every new token, each with all tokens so far, or only one at the
                end.
            record_timestamps: whether results say when each token came (`time.perf_counter`).
            eos_token_id: None for what the generation config says.
            options: any attribute of a GenerationConfig for this request alone; `seed`, with which sampled text is
                what `generate()` gives after `torch.manual_seed(seed)`; `logits_processor`, `stopping_criteria`,
                `prefix_allowed_tokens_fn` and `tokenizer` as of `generate()`; `priority`, an int: larger ones come
                first; `salt`, a str: prompts share cached blocks only with prompts of the same salt.

        Returns:
            The request's id.

        Raises:
            ValueError: an option that isn't known or allowed, no tokens, tokens that the model doesn't know, or an id
                that is under way.
            NotImplementedError: something that one request of many can't have, beams for example.
            RuntimeError: the manager has been stopped, or its engine has failed (the cause).
            queue.Full: `max_queue_size` requests were waiting for ten seconds.
        """
        named = {"max_new_tokens": max_new_tokens, "eos_token_id": eos_token_id}
        options |= {name: value for name, value in named.items() if value is not None}
        submission = self.prepare(input_ids, request_id, options, self.generation_config)
        submission.streaming, submission.record_timestamps = streaming, record_timestamps
        self.submit([submission])
        return submission.request.id

    def add_requests(
        self,
        inputs: list[list[int]],
        max_new_tokens: int | None = None,
        streaming: bool = False,
        record_timestamps: bool = False,
        **options: Any,
    ) -> list[str]:
        """Takes a request for each prompt, all with the same options: none of them if one isn't allowed.

        Arguments and errors are those of `add_request`.
        """
        options |= {} if max_new_tokens is None else {"max_new_tokens": max_new_tokens}
        submissions = [self.prepare(ids, None, options, self.generation_config) for ids in inputs]
        for submission in submissions:
            submission.streaming, submission.record_timestamps = streaming, record_timestamps
            self.submit([submission])
        return [submission.request.id for submission in submissions]

    def prepare(
        self,
        input_ids: Iterable[int],
        request_id: str | None,
        options: dict[str, Any],
        generation_config: GenerationConfig | None,
    ) -> Submission:
        """Makes a request and looks whether it is allowed; nothing is queued. Arguments as of `add_request`."""
        prompt = _ids(input_ids)
        num_known = self.model.get_input_embeddings().weight.shape[0]
        if prompt and not 0 <= min(prompt) <= max(prompt) < num_known:
            raise ValueError(f"token ids go from 0 to {num_known - 1}, not from {min(prompt)} to {max(prompt)}")
        if not prompt:
            raise ValueError("a prompt has at least one token")
        own = dict(options)  # None means what it means to generate()
        priority, salt = own.pop("priority", None) or 0, own.pop("salt", None) or ""
        objects = {name: own.pop(name) for name in OBJECTS if name in own}
        with self._lock:
            if self._seeds is not None and own.get("seed") is None:
                own["seed"] = int(torch.empty((), dtype=torch.int64).random_(generator=self._seeds).item())
        # Not inference mode, which the caller may be in: processors may write to tensors that are made here.
        with torch.inference_mode(False), torch.no_grad():
            chosen = RequestOptions.of(self.model, prompt, generation_config, own, configs=self._configs, **objects)
        request = Request(
            self._new_id() if request_id is None else request_id, prompt, chosen.max_new_tokens, chosen.num_sequences,
            priority, chosen, salt,
        )  # fmt: skip
        return Submission(request, prompt)

    def submit(self, group: list[Submission], handler: Handler | None = None) -> None:
        """Queues requests that begin together: where one of them can't be served at all, none is.

        Args:
            group: of `prepare`.
            handler: gets their results; None: whoever asks for them.

        Raises:
            ValueError, RuntimeError, queue.Full: as `add_request`.
        """
        names = [name for submission in group for name in submission.names]
        self._outbox.expect(names, handler)
        try:
            self._worker.submit(group)
        except BaseException:
            self._outbox.withdraw(names)
            raise

    def cancel_request(self, request_id: str) -> None:
        """Ends a request, with all its sequences: its results say FAILED, with `outputs.CANCELLED` as the error.

        One that isn't under way is no error.
        """
        self._worker.cancel(request_id)

    # ---- results

    def get_result(self, request_id: str | None = None, timeout: float | None = None) -> GenerationOutput | None:
        """The oldest result that nobody has taken, of one request or of any.

        Args:
            request_id: None for any.
            timeout: seconds to wait; None for as long as the manager runs.

        Returns:
            None where none has come, or the request isn't known.
        """
        return self._outbox.take(request_id, timeout)

    def __iter__(self) -> Iterator[GenerationOutput]:
        """All results, as they come, until the manager stops."""
        while (output := self._outbox.take()) is not None:
            yield output

    def request_id_iter(self, request_id: str) -> Iterator[GenerationOutput]:
        """The results of one request, as they come, until it has ended."""
        while (output := self._outbox.take(request_id)) is not None:
            yield output
            if output.is_finished():
                return

    def register_result_handler(self, request_id: str, callback: Callable[[GenerationOutput], object]) -> None:
        """Has the running event loop call `callback` with each result of a request, until it has ended.

        May be called before `add_request`, or after: results that nobody has taken yet come first.
        """
        self._outbox.handle(request_id, Handler(callback, asyncio.get_running_loop()))

    def stream(self, request_id: str) -> Iterator[list[int]]:
        """The new tokens of a request, as they come: an iterator of lists.

        It ends when the request is cancelled. Leaving it early (`close()`) cancels the request and drops its results.

        Raises:
            ValueError: there is no such request.
            RuntimeError: while iterating: the request has failed.
        """
        self._begin_stream(request_id)
        return self._stream(request_id)

    def astream(self, request_id: str) -> AsyncIterator[list[int]]:
        """As `stream`, for `async for` on the running event loop."""
        self._begin_stream(request_id)
        results: asyncio.Queue[GenerationOutput] = asyncio.Queue()
        self.register_result_handler(request_id, results.put_nowait)
        return self._astream(request_id, results)

    def _begin_stream(self, request_id: str) -> None:
        if not self._outbox.knows(request_id):
            raise ValueError(f"there is no request {request_id!r} under way")
        self._worker.stream(request_id)

    def _stream(self, request_id: str) -> Iterator[list[int]]:
        num_seen, has_ended = 0, False
        try:
            for output in self.request_id_iter(request_id):
                has_ended = output.is_finished()
                if new := _new_tokens(output, num_seen):
                    num_seen += len(new)
                    yield new
        except GeneratorExit:
            if not has_ended:
                self._leave(request_id)
            raise

    async def _astream(self, request_id: str, results: asyncio.Queue[GenerationOutput]) -> AsyncIterator[list[int]]:
        num_seen, has_ended = 0, False
        try:
            while not has_ended:
                output = await results.get()
                has_ended = output.is_finished()
                if new := _new_tokens(output, num_seen):
                    num_seen += len(new)
                    yield new
        except (GeneratorExit, asyncio.CancelledError):
            if not has_ended:
                self._leave(request_id)
            raise

    def _leave(self, request_id: str) -> None:
        """Cancels a request of which nobody wants to know any more."""
        if self._outbox.drop(request_id):  # what is still to come would wait for ever
            self.cancel_request(request_id)

    def _new_id(self) -> str:
        with self._lock:
            return next(name for i in self._numbers if not self._outbox.knows(name := f"req_{i}"))


def _ids(input_ids: Any) -> list[int]:
    """A prompt as a list of ints.

    Raises:
        ValueError: it is something else.
    """
    ids = input_ids.tolist() if hasattr(input_ids, "tolist") else list(input_ids)
    if not all(issubclass(kind, int) for kind in set(map(type, ids))):
        raise ValueError("a prompt is a list of token ids, one for each token")
    return ids


def _new_tokens(output: GenerationOutput, num_seen: int) -> list[int]:
    """What is new in a result, which has all tokens so far.

    Raises:
        RuntimeError: the request has failed.
    """
    if output.error is not None and output.error != CANCELLED:
        raise RuntimeError(f"request {output.request_id!r} has failed: {output.error}")
    return output.generated_tokens[num_seen:]


def _new_engine(model: Any, limits: EngineLimits) -> Any:
    from .engine import Engine

    return Engine(model, limits)


def _abandon(worker: weakref.ref[Worker]) -> None:
    found = worker()
    if found is not None:
        found.abandon()


def _no_manager() -> None:
    return None
