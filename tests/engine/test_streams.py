"""Tokens as they come: streams, asyncio and handlers, over a toy engine."""

import asyncio
import threading
import time
from contextlib import suppress

import pytest
from toy_engine import PROMPT, SOON, managed, toy_tokens


def test_streams_give_new_tokens(model):
    with managed(model) as manager:
        name = manager.add_request(PROMPT, max_new_tokens=5)  # not asked to stream
        assert [token for new in manager.stream(name) for token in new] == toy_tokens(PROMPT, 5)
        with pytest.raises(ValueError, match="no request 'nobody'"):
            manager.stream("nobody")


def test_a_stream_brings_tokens_as_they_come(model):
    gate = threading.Semaphore(0)
    with managed(model, gate=gate) as manager:
        stream = manager.stream(manager.add_request(PROMPT, max_new_tokens=3))
        for token in toy_tokens(PROMPT, 3):
            gate.release()
            assert next(stream) == [token]
        assert list(stream) == []


def test_leaving_a_stream_cancels_the_request(model):
    gate = threading.Semaphore(1)
    with managed(model, gate=gate) as manager:
        name = manager.add_request(PROMPT, max_new_tokens=1000)
        stream = manager.stream(name)
        next(stream)
        stream.close()
        gate.release(1)
        manager.stop(timeout=SOON)  # nothing is under way that it would wait for
        assert manager.toys[0].num_steps == 2 and not manager.is_running()
        assert manager.get_result() is None  # nor does anything wait for someone to take it


def test_a_stream_that_has_ended_is_left_without_harm_to_the_next_request_of_that_name(model):
    with managed(model) as manager:
        for prompt in ([5, 6], [7]):
            stream = manager.stream(manager.add_request(prompt, request_id="again", max_new_tokens=1))
            assert next(stream) == toy_tokens(prompt, 1)
            manager.add_request([8], request_id="again")
            stream.close()
            output = manager.get_result("again", timeout=SOON)
            assert output is not None and output.generated_tokens == toy_tokens([8], 4), output


def test_asyncio(model):
    async def read(manager, prompt, count):
        name = manager.add_request(prompt, max_new_tokens=count)
        return [token async for new in manager.astream(name) for token in new]

    async def handled(manager, before):
        done = asyncio.get_running_loop().create_future()
        outputs = []

        def take(output):
            outputs.append(output)
            if output.is_finished():
                done.set_result(threading.current_thread())

        if before:
            manager.register_result_handler("h", take)
        manager.add_request(PROMPT, request_id="h", streaming=True)
        if not before:
            await asyncio.sleep(0.1)  # results wait for their handler
            manager.register_result_handler("h", take)
        assert await done is threading.main_thread()
        return [output.generated_tokens for output in outputs]

    async def main(manager):
        texts = await asyncio.gather(*(read(manager, [3 + i], 2 + i) for i in range(6)))
        assert texts == [toy_tokens([3 + i], 2 + i) for i in range(6)]
        for before in (True, False):
            assert await handled(manager, before) == [toy_tokens(PROMPT, k) for k in (1, 2, 3, 4)]
        task = asyncio.create_task(read(manager, PROMPT, 10**6))
        await asyncio.sleep(0.05)
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task
        while manager.toys[0].requests:
            await asyncio.sleep(0.01)

    with managed(model) as manager:
        asyncio.run(asyncio.wait_for(main(manager), 4 * SOON))
        assert manager.get_result(timeout=0) is None  # handlers got it all


def test_a_handler_that_raises_harms_nobody(model):
    async def main(manager):
        loop, seen = asyncio.get_running_loop(), []
        loop.set_exception_handler(lambda loop, context: seen.append(context["exception"]))
        manager.register_result_handler("bad", lambda output: 1 / 0)
        for name in ("bad", "good"):
            manager.add_request(PROMPT, request_id=name)
        text = [token async for new in manager.astream("good") for token in new]
        while not seen:
            await asyncio.sleep(0.01)
        return text, seen

    with managed(model) as manager:
        text, seen = asyncio.run(asyncio.wait_for(main(manager), SOON))
        assert text == toy_tokens(PROMPT, 4) and type(seen[0]) is ZeroDivisionError
        # ... nor does a loop that is gone.
        gate = threading.Event()

        async def leave():
            manager.add_request(PROMPT, request_id="late", max_new_tokens=10**6)
            manager.register_result_handler("late", lambda output: gate.set())

        asyncio.run(leave())
        manager.cancel_request("late")
        assert manager.get_result(manager.add_request(PROMPT), timeout=SOON).error is None


def test_a_loop_that_is_gone_is_told_of_once(model, caplog):
    gate = threading.Semaphore(0)

    async def leave(manager):
        manager.add_request(PROMPT, request_id="late", max_new_tokens=9)
        manager.astream("late")  # nobody reads

    with managed(model, gate=gate) as manager:
        asyncio.run(leave(manager))
        gate.release(9)
        while manager._outbox.knows("late"):
            time.sleep(0.01)
        assert len([r for r in caplog.records if "no event loop" in r.message]) == 1


def test_after_a_loop_that_is_gone_the_name_is_as_good_as_new(model):
    gate = threading.Semaphore(0)

    async def leave(manager):
        manager.add_request(PROMPT, request_id="again", max_new_tokens=1)
        manager.register_result_handler("again", print)

    with managed(model, gate=gate) as manager:
        asyncio.run(leave(manager))
        gate.release(9)
        while manager._outbox.knows("again"):
            time.sleep(0.01)
        manager.add_request([8], request_id="again", max_new_tokens=2)
        output = manager.get_result("again", timeout=SOON)
        assert output is not None and output.generated_tokens == toy_tokens([8], 2)


def test_leaving_an_asyncio_stream_says_nothing(model, caplog):
    gate = threading.Semaphore(1)

    async def leave(manager):
        async for _ in manager.astream(manager.add_request(PROMPT, request_id="left", max_new_tokens=9)):
            break

    with managed(model, gate=gate) as manager:
        asyncio.run(leave(manager))
        gate.release(9)
        manager.stop(timeout=SOON)
        assert manager.toys[0].num_steps == 2 and not manager._outbox.knows("left")
        assert not [r for r in caplog.records if "no event loop" in r.message]


@pytest.mark.parametrize("reads_all", [False, True])
def test_leaving_an_asyncio_stream_that_has_ended_harms_no_other_request(model, reads_all):
    async def leave(manager):
        stream = manager.astream(manager.add_request(PROMPT, request_id="again", max_new_tokens=1 if reads_all else 2))
        await anext(stream)
        while manager._outbox.knows("again"):
            await asyncio.sleep(0.01)
        if reads_all:
            manager.add_request([8], request_id="again")
        await stream.aclose()
        if not reads_all:
            manager.add_request([8], request_id="again")

    with managed(model) as manager:
        asyncio.run(leave(manager))
        output = manager.get_result("again", timeout=SOON)
        assert output is not None and output.generated_tokens == toy_tokens([8], 4)


def test_whoever_waits_for_what_a_handler_gets_is_let_go(model):
    async def main(manager):
        got = []
        waiter = threading.Thread(target=lambda: got.append(manager.get_result("x")))
        waiter.start()
        await asyncio.sleep(0.05)
        manager.register_result_handler("x", print)
        waiter.join(SOON)
        assert not waiter.is_alive() and got == [None]

    with managed(model, gate=threading.Semaphore(0)) as manager:
        manager.add_request(PROMPT, request_id="x")
        asyncio.run(main(manager))
