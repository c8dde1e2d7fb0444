"""The manager over a toy engine: who gets which results, what ends whom, and that nothing waits for ever."""

import asyncio
import gc
import queue
import threading
import time
import weakref
from collections import Counter
from unittest.mock import patch

import pytest
import torch
from toy_engine import PROMPT, SOON, ToyEngine, collect, managed, no_thread_left, toy_tokens
from transformers import ContinuousBatchingConfig
from transformers.generation.continuous_batching.requests import GenerationOutput, RequestStatus

from hf_turbo.engine.manager import Manager
from hf_turbo.engine.outputs import CANCELLED, Handler, Outbox

# ---- results


def test_a_result_is_transformers_own(model):
    with managed(model) as manager:
        before = time.perf_counter()
        name = manager.add_request(PROMPT, max_new_tokens=3, record_timestamps=True)
        output = manager.get_result(name, timeout=SOON)
    assert type(output) is GenerationOutput and name == output.request_id == "req_0"
    assert (output.prompt_ids, output.generated_tokens) == (PROMPT, toy_tokens(PROMPT, 3))
    assert output.status is RequestStatus.FINISHED and output.is_finished() and output.error is None
    assert output.logprobs == [-0.5] * 3
    assert before <= output.created_time <= output.timestamps[0] <= output.timestamps[1] <= output.timestamps[2]
    assert output.created_time <= output.lifespan[0] <= output.lifespan[1] <= time.perf_counter()


def test_streamed_results_have_all_tokens_so_far(model):
    with managed(model) as manager:
        name = manager.add_request(PROMPT, streaming=True)
        outputs = list(manager.request_id_iter(name))
    assert [output.generated_tokens for output in outputs] == [toy_tokens(PROMPT, k) for k in (1, 2, 3, 4)]
    assert [output.is_finished() for output in outputs] == [False, False, False, True]
    assert outputs[0].status is RequestStatus.DECODING and outputs[0].timestamps is None


def test_further_sequences_have_transformers_names(model):
    with managed(model) as manager:
        manager.add_request(PROMPT, request_id="x", num_return_sequences=3, do_sample=True)
        ended = collect(manager, 3)
    assert list(ended) == ["x__child#1", "x__child#0", "x"]  # as they ended
    for name, count, index in (("x", 4, 0), ("x__child#0", 3, 1), ("x__child#1", 2, 2)):
        assert ended[name].generated_tokens == toy_tokens(PROMPT, count, index)
        assert ended[name].status is RequestStatus.FINISHED


def test_results_by_id_and_by_age(model):
    with managed(model, start=False) as manager:
        for name in ("a", "b", "c"):
            manager.add_request(PROMPT, request_id=name)
        manager.start()
        assert manager.get_result("b", timeout=SOON).request_id == "b"
        assert [manager.get_result(timeout=SOON).request_id for _ in range(2)] == ["a", "c"]
        assert manager.get_result("b") is None  # taken: not waited for
        began = time.perf_counter()
        assert manager.get_result(timeout=0.05) is None
        assert 0.05 <= time.perf_counter() - began < SOON


def test_many_threads_submit_and_take(model):
    taken, num_threads, num_each = Counter(), 8, 12

    def use(manager, thread):
        for i in range(num_each):
            prompt = [thread + 3, i + 3]
            name = manager.add_request(prompt, max_new_tokens=2 + i % 3)
            output = manager.get_result(name, timeout=SOON)
            assert output.generated_tokens == toy_tokens(prompt, 2 + i % 3)
            taken[name] += 1

    with managed(model, ContinuousBatchingConfig(max_requests_per_batch=3)) as manager:
        threads = [threading.Thread(target=use, args=(manager, i)) for i in range(num_threads)]
        [thread.start() for thread in threads]
        [thread.join(SOON * 4) for thread in threads]
        [toy] = manager.toys
        assert toy.most_at_once <= 3 and len(toy.threads) == 1
    assert len(taken) == num_threads * num_each and set(taken.values()) == {1}


def test_iterating_ends_when_the_manager_stops(model):
    with managed(model) as manager:
        seen = []
        reader = threading.Thread(target=lambda: seen.extend(output.request_id for output in manager))
        reader.start()
        names = [manager.add_request(PROMPT) for _ in range(5)]
        manager.stop(timeout=SOON)
        reader.join(SOON)
    assert not reader.is_alive() and sorted(seen) == sorted(names)


# ---- what is not allowed


def test_what_is_wrong_is_said_at_once(model):
    with managed(model, start=False) as manager:
        for error, match, arguments in (
            (ValueError, "at least one token", dict(input_ids=[])),
            (ValueError, "token ids go from 0", dict(input_ids=[10**6])),
            (ValueError, "token ids go from 0", dict(input_ids=[-1])),
            (ValueError, "list of token ids", dict(input_ids=[[1, 2]])),
            (ValueError, "temprature", dict(input_ids=PROMPT, temprature=2.0)),
            (NotImplementedError, "num_beams", dict(input_ids=PROMPT, num_beams=4)),
            (NotImplementedError, "output_scores", dict(input_ids=PROMPT, output_scores=True)),
            (ValueError, "seed", dict(input_ids=PROMPT, seed="x")),
        ):
            with pytest.raises(error, match=match):
                manager.add_request(**arguments)
        with pytest.raises(ValueError, match="at least one token"):
            manager.add_requests([PROMPT, []])
        assert not manager._outbox.knows("req_0") and not manager._worker._new


def test_an_id_is_one_requests_at_a_time(model):
    with managed(model, gate=(gate := threading.Semaphore(0))) as manager:
        manager.add_request(PROMPT, request_id="req_0")
        with pytest.raises(ValueError, match="'req_0' is taken"):
            manager.add_request(PROMPT, request_id="req_0")
        assert manager.add_request(PROMPT) == "req_1"
        gate.release(1000)
        assert set(collect(manager, 2)) == {"req_0", "req_1"}
        manager.add_request([9], request_id="req_0")  # free again
        assert manager.get_result("req_0", timeout=SOON).generated_tokens == toy_tokens([9], 4)


def test_what_could_not_be_added_takes_no_results_with_it(model):
    with managed(model) as manager:
        manager.add_request(PROMPT, request_id="again")
        manager.stop(timeout=SOON)
        with pytest.raises(RuntimeError, match="stopped"):
            manager.submit([manager.prepare([9], "again", {}, None)], Handler(print))
        manager.start()
        manager.add_request([8], request_id="again", max_new_tokens=2)
        manager.stop(timeout=SOON)
        assert manager.get_result().generated_tokens == toy_tokens(PROMPT, 4)
        assert manager.get_result().generated_tokens == toy_tokens([8], 2)
        assert manager.get_result() is None and not manager._outbox.knows("again")


def test_a_full_queue_lets_callers_wait(model):
    gate = threading.Semaphore(0)
    with managed(model, ContinuousBatchingConfig(max_queue_size=2), start=False, gate=gate) as manager:
        with patch("hf_turbo.engine.worker._PATIENCE", 0.1):
            names = [manager.add_request(PROMPT) for _ in range(2)]
            with pytest.raises(queue.Full, match="max_queue_size"):
                manager.add_request(PROMPT)
        waiter = threading.Thread(target=lambda: names.append(manager.add_request(PROMPT)))
        waiter.start()
        time.sleep(0.05)
        assert len(names) == 2
        manager.start()
        waiter.join(SOON)
        gate.release(1000)
        assert set(collect(manager, 3)) == set(names) and len(names) == 3


def test_a_prompt_that_never_fits_fails_alone(model):
    with managed(model, too_long=3) as manager:
        names = manager.add_requests([[3, 4], [3, 4, 5, 6], [3]])
        ended = collect(manager, 3)
    assert [ended[name].error for name in names] == [None, "4 tokens never fit", None]
    assert ended[names[1]].status is RequestStatus.FAILED


# ---- cancelling


def test_cancel_before_the_start_and_unknown_and_twice(model):
    with managed(model, start=False) as manager:
        for name in ("a", "b"):
            manager.add_request(PROMPT, request_id=name, num_return_sequences=2, do_sample=True)
        manager.cancel_request("a")
        manager.cancel_request("a")
        manager.cancel_request("nobody")
        ended = collect(manager, 2)
        assert {name: output.error for name, output in ended.items()} == {"a": CANCELLED, "a__child#0": CANCELLED}
        manager.add_request(PROMPT, request_id="nobody")  # the cancel was before it
        manager.start()
        assert all(output.error is None for output in collect(manager, 3).values())


def test_a_cancel_that_comes_too_late_spares_the_next_request_of_that_name(model):
    gate, may_go_on = threading.Semaphore(0), threading.Event()
    with managed(model, gate=gate) as manager:
        manager.add_request(PROMPT, request_id="again", max_new_tokens=1)
        while not (manager.toys and manager.toys[0].requests):
            time.sleep(0.01)
        deliver = manager._outbox.deliver

        def deliver_and_wait(outputs):
            deliver(outputs)
            may_go_on.wait(SOON)

        with patch.object(manager._outbox, "deliver", deliver_and_wait):
            manager.cancel_request("again")  # it is computing its last token just now
            gate.release(1000)
            assert manager.get_result("again", timeout=SOON).error is None
            manager.add_request([9], request_id="again")
            may_go_on.set()
            output = manager.get_result("again", timeout=SOON)
        assert output.error is None and output.generated_tokens == toy_tokens([9], 4)


@pytest.mark.parametrize("state", ["queued", "waiting", "running", "one of two ended", "ended"])
def test_cancel_ends_whoever_waits(model, state):
    gate = threading.Semaphore(0)
    config = ContinuousBatchingConfig(max_requests_per_batch=1)
    with managed(model, config, gate=gate, gap=3) as manager:
        if state == "waiting":
            manager.add_request(PROMPT, request_id="first", max_new_tokens=10**6)
        many = dict(num_return_sequences=2, do_sample=True) if state == "one of two ended" else {}
        manager.add_request(PROMPT, request_id="x", max_new_tokens=3 if state == "ended" else 6, **many)
        if state != "queued":
            gate.release({"waiting": 2, "running": 1, "one of two ended": 3, "ended": 3}[state])
            while manager.toys[0].num_steps < 1 or gate._value:
                time.sleep(0.005)
        got = []
        waiter = threading.Thread(target=lambda: got.extend(manager.request_id_iter("x")))
        waiter.start()
        manager.cancel_request("x")
        manager.cancel_request("x")
        gate.release(1)  # the step under way ends
        waiter.join(SOON)
        assert not waiter.is_alive() and len(got) == 1
        if state == "ended":
            assert got[0].error is None and got[0].generated_tokens == toy_tokens(PROMPT, 3)
        else:
            assert got[0].error == CANCELLED and got[0].status is RequestStatus.FAILED
            assert got[0].generated_tokens == toy_tokens(PROMPT, len(got[0].generated_tokens))
        if many:
            assert manager.get_result("x__child#0", timeout=SOON).error is None  # it had ended before
        assert not [request for request in manager.toys[0].requests if request.id == "x"]


# ---- failures


def test_a_request_that_fails_alone(model):
    with managed(model, bad_id="bad") as manager:
        for name in ("a", "bad", "b"):
            manager.add_request(PROMPT, request_id=name)
        ended = collect(manager, 3)
        assert ended["bad"].error == "'its processor'" and ended["bad"].generated_tokens == toy_tokens(PROMPT, 1)
        assert ended["a"].error is None and ended["b"].error is None
        manager.add_request(PROMPT, request_id="bad")
        with pytest.raises(RuntimeError, match="'bad' has failed: 'its processor'"):
            list(manager.stream("bad"))


def test_an_error_of_the_engine_reaches_all_who_wait(model):
    gate, results = threading.Semaphore(1), {}

    def note(name, ask):
        try:
            results[name] = ask()
        except Exception as error:
            results[name] = error

    async def listen(manager):
        return [new async for new in manager.astream("async")]

    with managed(model, fails_at=2, gate=gate) as manager:
        for name in ("by id", "iterated", "streamed", "async", "handled", "nobody's"):
            manager.add_request(PROMPT, request_id=name)
        asks = {
            "by id": lambda: manager.get_result("by id"),
            "iterated": lambda: list(manager.request_id_iter("iterated")),
            "streamed": lambda: list(manager.stream("streamed")),
            "async": lambda: asyncio.run(listen(manager)),
        }
        threads = [threading.Thread(target=note, args=item) for item in asks.items()]
        [thread.start() for thread in threads]
        time.sleep(0.1)
        began = time.perf_counter()
        gate.release()
        [thread.join(SOON) for thread in threads]
        assert time.perf_counter() - began < 1.0
        assert results["by id"].error == "the toy broke" and results["by id"].status is RequestStatus.FAILED
        assert [output.error for output in results["iterated"]] == ["the toy broke"]
        for name in ("streamed", "async"):
            assert "has failed: the toy broke" in str(results[name])
        assert set(collect(manager, 2)) == {"handled", "nobody's"}
        assert manager.get_result() is None and list(manager) == []
        with pytest.raises(RuntimeError, match="takes no requests") as raised:
            manager.add_request(PROMPT)
        assert isinstance(raised.value.__cause__, ArithmeticError)
        assert manager.background_thread_status.fatal_error is manager.fatal_error is raised.value.__cause__
        manager.join(timeout=SOON)
        assert not manager.is_running() and manager.toys[0].num_closed == 1 and manager.batch_processor is None
        manager.stop()
        assert manager.fatal_error is not None  # a server asks for it after stop(), too
        gate.release(1000)
        manager.start()  # with a new engine
        name = manager.add_request(PROMPT, max_new_tokens=1)
        assert manager.get_result(name, timeout=SOON).error is None
        assert len(manager.toys) == 2


def test_an_engine_that_cannot_be_made(model):
    def make(model, limits):
        raise MemoryError("no room")

    manager = Manager(model, make_engine=make)
    with pytest.raises(MemoryError, match="no room"):
        manager.warmup()
    name = manager.add_request(PROMPT)
    manager.start()
    assert manager.get_result(name, timeout=SOON).error == "no room"
    assert isinstance(manager.fatal_error, MemoryError)


# ---- life


def test_stop_finishes_what_is_under_way_and_hard_stop_does_not(model):
    with managed(model, seconds=0.01) as manager:
        names = [manager.add_request(PROMPT, max_new_tokens=8) for _ in range(3)]
        manager.stop(timeout=SOON)
        ended = collect(manager, 3)
        assert all(ended[name].generated_tokens == toy_tokens(PROMPT, 8) for name in names)
        with pytest.raises(RuntimeError, match="stopped"):
            manager.add_request(PROMPT, request_id="again")
        manager.start()
        manager.add_request(PROMPT, request_id="again")  # it had not come about
        assert manager.get_result("again", timeout=SOON).error is None
        names = [manager.add_request(PROMPT, max_new_tokens=10**6) for _ in range(3)]
        manager.stop(hard_stop=True, timeout=SOON)
        assert not manager.is_running()
        assert {output.error for output in collect(manager, 3).values()} == {
            "the manager was stopped before this request had ended"
        }
        assert [toy.num_closed for toy in manager.toys] == [1, 1]


def test_stop_without_waiting(model):
    gate = threading.Semaphore(0)
    with managed(model, gate=gate) as manager:
        name = manager.add_request(PROMPT)
        manager.stop(block=False)
        manager.stop(timeout=0.05)  # not yet
        assert manager.is_running()
        gate.release(1000)
        assert manager.get_result(name, timeout=SOON).error is None
        manager.join(timeout=SOON)
        assert not manager.is_running()


def test_destroyed_is_for_good(model):
    with managed(model) as manager:
        manager.destroy()
        manager.destroy()
        with pytest.raises(RuntimeError, match="destroyed"):
            manager.start()
        assert not manager.is_running()


def test_a_manager_that_nobody_holds_leaves_no_thread(model):
    with managed(model) as other:
        other.stop()
        toys = []
        manager = Manager(model, make_engine=lambda model, limits: toys.append(ToyEngine(model, limits)) or toys[-1])
        manager.start()
        manager.add_request(PROMPT, max_new_tokens=10**6)
        gone = weakref.ref(manager)
        del manager
        gc.collect()
        assert gone() is None
        until = time.perf_counter() + SOON
        while not no_thread_left() and time.perf_counter() < until:
            time.sleep(0.02)
        assert no_thread_left() and toys[0].num_closed == 1


def test_pause(model):
    with managed(model, seconds=0.002) as manager:
        name = manager.add_request(PROMPT, max_new_tokens=10**6)
        inside, leave = threading.Event(), threading.Event()

        def other():
            with manager.pause():
                inside.set()
                leave.wait(SOON)

        with manager.pause():
            thread = threading.Thread(target=other)
            thread.start()
            assert inside.wait(SOON)
            steps = manager.toys[0].num_steps
            time.sleep(0.1)
            assert manager.toys[0].num_steps == steps
            with pytest.raises(RuntimeError, match="within pause"):
                manager.stop()
        time.sleep(0.1)
        assert manager.toys[0].num_steps == steps  # the other one still holds it
        leave.set()
        thread.join(SOON)
        until = time.perf_counter() + SOON
        while manager.toys[0].num_steps == steps and time.perf_counter() < until:
            time.sleep(0.005)
        assert manager.toys[0].num_steps > steps
        manager.cancel_request(name)
        manager.stop(timeout=SOON)
        with pytest.raises(RuntimeError, match="started"):
            manager.pause().__enter__()


def test_an_engine_is_made_and_computes_without_gradients(model):
    seen = []

    def look():
        seen.append((torch.is_grad_enabled(), torch.is_inference_mode_enabled()))

    class Watching(ToyEngine):
        def __init__(self, *args):
            look()
            super().__init__(*args)

        def step(self):
            look()
            return super().step()

    manager = Manager(model, make_engine=Watching)
    with torch.inference_mode():
        manager.warmup()
        manager.start()
        name = manager.add_request(PROMPT, max_new_tokens=2, repetition_penalty=1.5)
    assert manager.get_result(name, timeout=SOON).error is None
    manager.stop(timeout=SOON)
    assert len(seen) == 3 and set(seen) == {(False, False)}


def test_what_a_request_brings_may_be_written_to(model):
    with managed(model, start=False) as manager, torch.inference_mode():
        options = manager.prepare(PROMPT, None, {"min_new_tokens": 2, "eos_token_id": 3}, None).request.options
        assert options.processors and not any(one.eos_token_id.is_inference() for one in options.processors)


def test_a_seed_of_the_config_settles_requests_without_one(model):
    def seeds(config):
        with managed(model, config, start=False) as manager:
            options = dict(input_ids=PROMPT, options={"do_sample": True}, request_id=None, generation_config=None)
            given = manager.prepare(**options | {"options": {"do_sample": True, "seed": 7}}).request.options.seed
            assert given == 7
            return [manager.prepare(**options).request.options.seed for _ in range(3)]

    first = seeds(ContinuousBatchingConfig(seed=1))
    assert first == seeds(ContinuousBatchingConfig(seed=1)) and len(set(first)) == 3
    assert first != seeds(ContinuousBatchingConfig(seed=2))


def test_who_waits_for_results_is_woken_by_results_alone():
    """A thread that wakes takes the interpreter from the engine's: not after every step."""
    outbox, woken, handled = Outbox(), [], []
    outbox.open()
    outbox.expect(["mine"])
    outbox.expect(["handled"], Handler(handled.append))
    with patch.object(outbox._changed, "notify_all", lambda: woken.append(1)):
        outbox.deliver([])
        outbox.deliver([GenerationOutput(request_id="handled", status=RequestStatus.FINISHED)])
        assert len(handled) == 1 and not woken
        outbox.deliver([GenerationOutput(request_id="mine", status=RequestStatus.FINISHED)])
    assert woken and outbox.take(timeout=SOON).request_id == "mine"
