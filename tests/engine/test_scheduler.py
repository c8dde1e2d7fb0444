"""The scheduler: each rule by exact plans, and where all of them together lead, in a toy engine."""

import math
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from plan_follower import PlanFollower, ToyMemory, said_alone

from hf_turbo.engine.request import Request, Status
from hf_turbo.engine.scheduler import Scheduler


class Desk:
    """A scheduler with a toy engine behind it, in which nobody's text ends by itself."""

    def __init__(self, block_size=1, max_tokens=100, max_rows=4, max_chunk=None, keeps_prefixes=False):
        self.memory = ToyMemory(1000, block_size, keeps_prefixes)
        self.scheduler = Scheduler(self.memory, max_tokens, max_rows, max_chunk)
        self.engine = PlanFollower(self.memory, self.scheduler, max_tokens, max_rows)
        self.num_added = 0

    def add(self, name, num_tokens, **options):
        request = Request(name, [7] * num_tokens, **{"max_new_tokens": None, **options}, order=self.num_added)
        self.num_added += 1
        self.scheduler.add(request)
        return request

    def step(self):
        """How many tokens each sequence gets, by its request's name and its index."""
        plan = self.engine.step()
        return {share.sequence.request.id + str(share.sequence.index): share.num_tokens for share in plan.shares}

    def leave_free(self, num_units):
        """Makes so many units the free ones, whatever was free before."""
        self.memory.capacity += num_units - len(self.memory.free)
        first = max(self.memory.free | set(self.memory.owners), default=0) + 1
        self.memory.free = set(range(first, first + num_units))

    @property
    def running(self):
        return "".join(request.id for request in self.scheduler.running)

    @property
    def waiting(self):
        return "".join(request.id for request in self.scheduler.waiting)


# The order, and a step's tokens.


def test_who_decodes_comes_first_then_prompts_in_order_of_priority_and_arrival():
    desk = Desk(max_tokens=20)
    desk.add("a", 20)
    desk.step()
    desk.add("b", 4)
    desk.add("c", 30, priority=1)
    assert desk.step() == {"a0": 1, "c0": 19}
    assert desk.waiting == "b"
    assert list(desk.step().items()) == [("a0", 1), ("c0", 11), ("b0", 4)]
    assert list(desk.step().items()) == [("c0", 1), ("a0", 1), ("b0", 1)]
    assert desk.running == "cab"


def test_a_prompt_is_computed_once_in_chunks_and_then_a_token_a_step():
    desk = Desk(max_tokens=8)
    request = desk.add("a", 20, max_new_tokens=3)
    assert [desk.step() for _ in range(6)] == [{"a0": 8}, {"a0": 8}, {"a0": 4}, {"a0": 1}, {"a0": 1}, {}]
    assert request.status is Status.FINISHED and not desk.scheduler.has_work


def test_beside_decoding_ones_all_chunks_together_keep_to_max_chunk():
    desk = Desk(max_tokens=20, max_chunk=5)
    desk.add("a", 20)
    assert desk.step() == {"a0": 20}  # nothing decodes
    desk.add("b", 3)
    desk.add("c", 9)
    assert desk.step() == {"a0": 1, "b0": 3, "c0": 2}
    assert desk.step() == {"a0": 1, "b0": 1, "c0": 5}


def test_every_decoding_row_gets_its_token_and_a_prompt_what_remains():
    desk = Desk(max_tokens=4, max_rows=4)
    for name in "abc":
        desk.add(name, 1)
    desk.step()
    desk.add("d", 3)
    for _ in range(4):
        assert desk.step() == {"a0": 1, "b0": 1, "c0": 1, "d0": 1}


def test_where_only_last_tokens_are_to_be_read_there_is_nothing_to_compute():
    desk = Desk(max_chunk=1)
    a = desk.add("a", 3, max_new_tokens=1)
    desk.scheduler.plan()
    a.sequences[0].num_cached, a.sequences[0].num_unknown = 3, 1
    desk.add("b", 5)
    [share] = desk.scheduler.plan().shares  # nor does anything decode
    assert (share.sequence.request.id, share.num_tokens) == ("b", 5)


# Memory for those that decode.


def test_decoding_takes_memory_from_the_last_in_order_and_nothing_is_admitted_then():
    desk = Desk()
    a, b, c = desk.add("a", 5), desk.add("b", 5), desk.add("c", 5, priority=1)
    desk.step()
    d = desk.add("d", 2, priority=2)
    desk.leave_free(1)
    assert desk.step() == {"c0": 1, "a0": 1}  # with b's five units there would be room for d
    assert (desk.running, desk.waiting) == ("ca", "db")
    assert (b.status, b.num_preempted, b.sequences[0].num_cached) == (Status.WAITING, 1, 0)
    assert b.sequences[0].tokens == [7] * 5 + [1]
    assert b.sequences[0] not in desk.memory.held
    assert a.num_preempted == c.num_preempted == d.num_preempted == 0
    assert desk.step() == {"c0": 1, "a0": 1}  # d needs three of the four units that are left, of which these take two


def test_the_last_in_order_gives_way_itself_and_takes_nothing_from_those_before_it():
    desk = Desk(block_size=4)
    a, b = desk.add("a", 5), desk.add("b", 4)
    desk.step()
    desk.leave_free(0)
    assert desk.step() == {"a0": 1}
    assert (desk.running, desk.waiting) == ("a", "b")
    assert (a.num_preempted, b.num_preempted) == (0, 1)


def test_all_of_a_requests_sequences_decode_or_none():
    desk = Desk()
    desk.add("a", 3), desk.add("b", 3, num_sequences=2)
    assert desk.step() == {"a0": 3, "b0": 3}
    assert desk.step() == {"a0": 1, "b0": 1, "b1": 1}
    desk.leave_free(2)
    assert desk.step() == {"a0": 1}


def test_a_request_that_outgrows_the_cache_alone_fails():
    desk = Desk()
    a, b = desk.add("a", 5), desk.add("b", 5)
    desk.step()
    desk.leave_free(0)
    for _ in range(5):
        assert desk.step() == {"a0": 1}
    plan = desk.engine.step()
    assert (plan.failed, a.status) == ([a], Status.FAILED)
    with pytest.raises(RuntimeError, match="1 sequences of up to 11 tokens need 1 more units, 0 are available"):
        raise a.error
    assert a.sequences[0] not in desk.memory.held
    assert [(share.sequence.request, share.num_tokens) for share in plan.shares] == [(b, 6)]  # it had got one more
    assert b.num_preempted == 1


@pytest.mark.parametrize("is_alone", [False, True])
def test_nobody_gives_way_or_fails_while_the_host_does_not_know_his_tokens(is_alone):
    desk = Desk()
    requests = [desk.add(name, 5) for name in ("a" if is_alone else "ab")]
    desk.step()
    desk.leave_free(0)
    sequence = requests[-1].sequences[0]
    sequence.tokens.pop()
    sequence.num_unknown = 1
    with pytest.raises(RuntimeError, match="1 of its tokens have not been read"):
        desk.scheduler.plan()
    assert desk.scheduler.running == tuple(requests) and desk.scheduler.num_waiting == 0
    assert sequence.num_cached == 5 and sequence in desk.memory.held
    assert (requests[-1].status, requests[-1].num_preempted) == (Status.RUNNING, 0)


# Memory for prompts.


def test_a_chunk_is_cut_to_the_memory_there_is():
    desk = Desk(max_tokens=6)
    desk.add("a", 1), desk.add("b", 20)
    assert desk.step() == {"a0": 1, "b0": 5}
    desk.leave_free(4)
    assert desk.step() == {"a0": 1, "b0": 3}


def test_a_chunk_without_memory_waits_for_those_before_it_and_keeps_what_it_has():
    desk = Desk(block_size=4, max_tokens=5)
    desk.add("a", 1), desk.add("b", 20)
    assert desk.step() == {"a0": 1, "b0": 4}
    desk.leave_free(0)
    assert desk.step() == {"a0": 1}
    assert desk.running == "ab" and desk.scheduler.running[1].sequences[0].num_cached == 4


def test_a_chunk_without_memory_takes_that_of_younger_ones_and_their_share_of_the_step():
    desk = Desk(max_tokens=6)
    a = desk.add("a", 1)
    desk.step()
    desk.add("b", 30, priority=1)
    assert desk.step() == {"a0": 1, "b0": 5}
    desk.leave_free(1)
    assert desk.step() == {"b0": 3}  # the free one, and two that a held
    assert (desk.running, desk.waiting, a.num_preempted) == ("b", "a", 1)


def test_a_prompt_that_gets_no_memory_alone_fails():
    desk = Desk(max_tokens=6)
    request = desk.add("a", 20)
    desk.step()
    desk.leave_free(2)
    assert desk.step() == {"a0": 2}
    assert desk.engine.step().failed == [request]
    assert isinstance(request.error, RuntimeError) and not desk.scheduler.has_work


def test_several_sequences_are_computed_again_without_their_last_tokens_and_then_go_on_together():
    desk = Desk(max_tokens=6)
    desk.add("a", 3, num_sequences=2)
    desk.step(), desk.step()
    b = desk.add("b", 1, priority=1)
    assert desk.step() == {"b0": 1, "a0": 1, "a1": 1}
    desk.leave_free(0)
    assert desk.step() == {"b0": 1}
    assert desk.waiting == "a"
    desk.scheduler.remove(b)
    desk.leave_free(100)
    assert [desk.step() for _ in range(3)] == [{"a0": 5, "a1": 1}, {"a1": 4}, {"a0": 1, "a1": 1}]


# Admission.


def test_nothing_overtakes_the_first_that_does_not_fit_unless_it_has_a_higher_priority():
    desk = Desk()
    desk.add("a", 2)
    desk.step()
    desk.leave_free(5)
    desk.add("b", 6), desk.add("c", 1)
    assert desk.step() == {"a0": 1}
    desk.add("d", 1, priority=1)
    assert desk.step() == {"a0": 1, "d0": 1}
    assert (desk.running, desk.waiting) == ("da", "bc")


@pytest.mark.parametrize("num_free, is_admitted", [(4, False), (5, True)])
def test_admission_needs_memory_for_what_is_missing_and_a_token_more_beside_this_steps_shares(num_free, is_admitted):
    desk = Desk()
    desk.add("a", 2)
    desk.step()
    desk.leave_free(num_free)
    desk.add("b", 3)
    assert desk.step() == {"a0": 1, **({"b0": 3} if is_admitted else {})}


@pytest.mark.parametrize("num_free, admitted", [(11, "ab"), (12, "abc")])
def test_what_is_needed_by_those_admitted_in_one_step_adds_up(num_free, admitted):
    desk = Desk()
    desk.leave_free(num_free)
    for name in "abc":
        desk.add(name, 3)
    assert desk.step() == {name + "0": 3 for name in admitted}
    assert desk.running == admitted


def test_where_nothing_runs_the_first_is_let_in_as_far_as_it_fits():
    desk = Desk()
    a, _ = desk.add("a", 9), desk.add("b", 1)
    desk.leave_free(5)  # and a was taken when there was more
    assert desk.step() == {"a0": 5}
    assert desk.waiting == "b"
    assert desk.engine.step().failed == [a]


def test_what_waits_behind_one_that_fails_is_admitted_in_the_same_step():
    desk = Desk()
    a, _ = desk.add("a", 9), desk.add("b", 3)
    desk.leave_free(5)
    desk.step()
    plan = desk.engine.step()
    assert plan.failed == [a]
    assert [(share.sequence.request.id, share.num_tokens) for share in plan.shares] == [("b", 3)]


def test_rows_are_counted_for_all_sequences_from_the_beginning():
    desk = Desk(max_rows=4)
    desk.add("a", 1, num_sequences=3), desk.add("b", 1, num_sequences=2), desk.add("c", 1)
    assert desk.step() == {"a0": 1}
    assert desk.step() == {"a0": 1, "a1": 1, "a2": 1}
    assert (desk.running, desk.waiting) == ("a", "bc")


def test_what_is_found_is_not_computed_and_given_back_where_the_rest_does_not_fit():
    desk = Desk(block_size=4, keeps_prefixes=True)
    desk.add("a", 9)
    desk.step()
    b = desk.add("b", 12)
    desk.leave_free(1)  # b misses four tokens and needs a block for the one after them
    assert desk.step() == {"a0": 1}
    assert b.sequences[0].num_cached == 0 and desk.memory.owners.total() == 3
    desk.leave_free(2)
    assert desk.step() == {"a0": 1, "b0": 4}
    assert b.num_found == 8


def test_what_is_found_is_not_counted_as_available_any_more():
    desk = Desk(block_size=4, keeps_prefixes=True)
    desk.scheduler.remove(desk.add("a", 1))
    first = desk.add("b", 9)
    desk.step()
    desk.engine.end(first, Status.CANCELLED)  # leaves two blocks to be found
    desk.add("c", 1)
    desk.step()
    desk.leave_free(1)
    desk.add("d", 12)
    assert desk.memory.available == 3
    assert desk.step() == {"c0": 1}  # two found, two missing, one free


def test_what_begins_like_a_prompt_under_way_waits_for_that():
    """And then computes the rest only; what comes after it waits in line."""
    desk = Desk(block_size=4, max_tokens=10, keeps_prefixes=True)
    desk.add("a", 14)
    desk.add("b", 13)
    desk.add("c", 2)
    assert desk.step() == {"a0": 10}
    assert desk.step() == {"a0": 4}, "b has been admitted too early"
    assert desk.step() == {"a0": 1, "b0": 1, "c0": 2}
    desk = Desk(block_size=4, max_tokens=20, keeps_prefixes=True)
    desk.add("a", 30)
    desk.step()
    desk.add("b", 30, priority=1)
    assert desk.step() == {"a0": 10, "b0": 10}, "who comes first waits for one that comes later"


def test_what_was_found_of_all_but_the_last_token_decodes_at_once():
    desk = Desk(keeps_prefixes=True)
    desk.add("a", 6, num_sequences=2)
    desk.step(), desk.step()
    [a] = desk.scheduler.running
    b = desk.add("b", 1, priority=1, salt="b")
    desk.step()
    desk.leave_free(0)
    assert desk.step() == {"b0": 1}
    desk.scheduler.remove(b)
    desk.leave_free(100)
    assert all(sequence.num_missing == len(sequence.tokens) for sequence in a.live)
    assert desk.step() == {"a0": 1, "a1": 1}


def test_what_was_refused_is_looked_up_again_when_there_is_more_memory_or_another_prompt_is_done():
    desk = Desk(block_size=4, max_tokens=10, keeps_prefixes=True)
    desk.add("a", 13)
    desk.step()
    desk.add("b", 13, priority=1)
    desk.leave_free(2)
    assert desk.step() == {"a0": 3}  # three more tokens, one block
    assert (desk.waiting, desk.memory.num_finds) == ("b", 2)
    assert desk.step() == {"a0": 1, "b0": 1}  # now all but one of its tokens are found
    desk.leave_free(100)
    desk.add("c", 30, salt="c")
    desk.leave_free(3)
    num_finds = desk.memory.num_finds
    for _ in range(3):
        desk.step()
    assert desk.memory.num_finds == num_finds + 1
    desk.leave_free(6)
    desk.step()
    assert desk.memory.num_finds == num_finds + 2


# What can never run; what is removed; what a scheduler can't be.


@pytest.mark.parametrize(
    "options, message",
    [
        (dict(num_tokens=21), "a never fits into the cache: 1 sequences of 21 prompt tokens and 0 new ones"),
        (dict(num_tokens=11, max_new_tokens=10), "1 sequences of 11 prompt tokens and 10 new ones"),
        (dict(num_tokens=5, max_new_tokens=2, num_sequences=3), "3 sequences of 5 prompt tokens and 2 new ones"),
        (dict(num_tokens=1, num_sequences=5), "a asks for 5 sequences; 4 can run at once"),
    ],
)
def test_what_can_never_run_fails_at_once_and_holds_up_nobody(options, message):
    desk = Desk(max_rows=4)
    desk.leave_free(20)
    request = desk.add("a", **options)
    assert request.status is Status.FAILED
    with pytest.raises(ValueError, match=message):
        raise request.error
    assert not desk.scheduler.has_work
    desk.scheduler.remove(request)
    assert desk.add("b", 10, max_new_tokens=10).status is Status.WAITING
    assert desk.step() == {"b0": 10}


def test_removed_requests_give_up_what_they_hold_whatever_they_were_doing():
    desk = Desk(max_tokens=10)
    decoding, prompt, waiting = desk.add("a", 2), desk.add("b", 20), desk.add("c", 1)
    desk.step()
    assert (desk.scheduler.num_running, desk.scheduler.num_waiting) == (2, 1)
    for request in (waiting, prompt, decoding):
        for _ in range(2):
            desk.scheduler.remove(request)
            desk.memory.check()
            assert request not in desk.scheduler.running + desk.scheduler.waiting
    assert not desk.scheduler.has_work and desk.memory.available == desk.memory.capacity


@pytest.mark.parametrize(
    "limits, message",
    [((4, 5), "max_rows is from 1 to max_tokens, 4"), ((4, 0), "max_rows"), ((4, 4, 0), "max_chunk is at least 1")],
)
def test_limits_that_would_leave_somebody_without_a_token_are_refused(limits, message):
    with pytest.raises(ValueError, match=message):
        Scheduler(ToyMemory(10, 1), *limits)


# Where it leads.


class Day:
    """Requests that arrive and are cancelled at certain steps, until all are over."""

    def __init__(self, memory, limits, requests, arrivals, cancels=(), goes_ahead=False, vocabulary=None):
        max_tokens, max_rows, _ = limits
        self.memory, self.requests = memory, requests
        self.scheduler = Scheduler(memory, *limits)
        self.engine = PlanFollower(memory, self.scheduler, max_tokens, max_rows, goes_ahead, vocabulary)
        self.arrivals, self.cancels = arrivals, cancels
        self.num_steps = 0
        self.most_steps = self.bound()

    def bound(self):
        """The most steps that this can take.

        In every step the first running request gets a token at least, or fails. While it is first nobody takes its
        memory: it stays so to its end, after no more steps than it has tokens in all - unless one before it is
        admitted, and it may have to begin again. For that one to have waited while it ran, it must have come later:
        whoever is preempted is so after all that come after it, and nobody after it is admitted before it. So each
        request before it interrupts it once at most. To this come the steps before the last arrival, and one for each
        text whose end is read a step late.
        """
        longest = self.memory.capacity * self.memory.block_size + 1
        tokens = {
            request: request.num_sequences * (len(request.prompt) + (request.max_new_tokens or longest))
            for request in self.requests
        }
        interruptions = {
            request: sum(
                before.priority > request.priority and self.arrivals[before.order] > self.arrivals[request.order]
                for before in self.requests
            )
            for request in self.requests
        }
        steps = sum((1 + interruptions[request]) * tokens[request] for request in self.requests)
        return max(self.arrivals) + steps + sum(request.num_sequences for request in self.requests)

    def run(self):
        while self.num_steps <= max(self.arrivals) or self.scheduler.has_work:
            assert self.num_steps <= self.most_steps
            for request in self.requests:
                if self.arrivals[request.order] == self.num_steps:
                    self.scheduler.add(request)
            for order, when in self.cancels:
                request = self.requests[order]
                if when == self.num_steps >= self.arrivals[order] and not request.is_over:
                    self.engine.end(request, Status.CANCELLED)
                    self.scheduler.remove(request)
                    self.memory.check()
            self.engine.step()
            self.num_steps += 1
        self.engine.read(0)
        assert not self.memory.held and self.memory.available == self.memory.capacity
        assert not self.scheduler.running and not self.scheduler.waiting


def assert_preempted_seldom(log, requests):
    """Between two times that a request gives way, one before it or one of its own texts has given up memory.

    What it needs to be admitted again is more than it held, and those before it have taken a part of that.
    """

    def place(request):
        return -request.priority, request.order

    for request in requests:
        times = [time for time, event in enumerate(log) if event == ("preempted", request)]
        assert len(times) == request.num_preempted
        for first, second in pairwise(times):
            between = [other for _, other in log[first + 1 : second] if place(other) <= place(request)]
            assert between, (request.id, log)


@st.composite
def days(draw):
    vocabulary = draw(st.integers(2, 12))
    requests = [
        Request(
            f"{order}",
            draw(st.lists(st.integers(1, 2), min_size=1, max_size=12)),
            max_new_tokens=draw(st.none() | st.integers(1, 9)),
            num_sequences=draw(st.sampled_from([1, 1, 2, 3])),
            priority=draw(st.sampled_from([0, 0, 1, 2])),
            order=order,
        )
        for order in range(draw(st.integers(1, 6)))
    ]
    block_size = draw(st.sampled_from([1, 4, 16]))
    units = max(math.ceil((len(each.prompt) + (each.max_new_tokens or 1)) / block_size) for each in requests)
    capacity = draw(st.integers(math.ceil(1.5 * units), 4 * units))
    max_rows = draw(st.integers(1, 6))
    limits = draw(st.integers(max_rows, 20)), max_rows, draw(st.none() | st.integers(1, 6))
    steps = st.integers(0, 12)
    memory = ToyMemory(capacity, block_size, keeps_prefixes=draw(st.booleans()))
    arrivals = draw(st.lists(steps, min_size=len(requests), max_size=len(requests)))
    cancels = draw(st.lists(st.tuples(st.integers(0, len(requests) - 1), st.integers(0, 30)), max_size=3))
    return Day(memory, limits, requests, sorted(arrivals), cancels, draw(st.booleans()), vocabulary)


@settings(max_examples=400, deadline=None)
@given(days())
def test_every_request_ends_with_its_own_text_after_so_many_steps(day):
    memory, max_rows = day.memory, day.engine.max_rows
    day.run()
    for request in day.requests:
        longest = len(request.prompt) + (request.max_new_tokens or 0)
        fits = request.num_sequences <= max_rows and memory.can_ever_hold(longest, request.num_sequences)
        assert (request.status is Status.FAILED and isinstance(request.error, ValueError)) == (not fits)
        if fits and request.max_new_tokens is not None:
            assert request.status in (Status.FINISHED, Status.CANCELLED)
        assert request.status in (Status.FINISHED, Status.CANCELLED, Status.FAILED)
        alone = said_alone(request, day.engine.vocabulary, memory.capacity * memory.block_size + 1)
        said = [sequence.new_tokens for sequence in request.sequences]
        if request.status is Status.FINISHED:
            assert said == alone
            if not memory.keeps_prefixes and request.num_preempted == 0 and not day.engine.goes_ahead:
                # Once each: the prompt, and what every sequence has said but its last token.
                assert day.engine.computed[request] == len(request.prompt) + sum(len(text) - 1 for text in said)
        else:
            assert all(text == whole[: len(text)] for text, whole in zip(said, alone))
    if not memory.keeps_prefixes and not day.engine.goes_ahead:
        assert_preempted_seldom(day.engine.log, day.requests)


@pytest.mark.parametrize("goes_ahead", [False, True])
@pytest.mark.parametrize("keeps_prefixes", [False, True])
@pytest.mark.parametrize("block_size", [1, 4, 16])
def test_six_requests_in_memory_for_one_and_a_half(block_size, keeps_prefixes, goes_ahead):
    requests = [Request(str(order), [1 + order % 2] * 33, max_new_tokens=31, order=order) for order in range(6)]
    memory = ToyMemory(96 // block_size, block_size, keeps_prefixes)
    day = Day(memory, (16, 6, None), requests, [0] * 6, goes_ahead=goes_ahead)
    day.run()
    assert [request.status for request in requests] == [Status.FINISHED] * 6
    assert [request.sequences[0].new_tokens for request in requests] == [[1] * 31] * 6
    assert sum(request.num_preempted for request in requests) >= 1
    # Once; and a few times more where most of what is taken is found again, so that little room is enough to come back.
    most = 4 if keeps_prefixes else 1
    assert all(request.num_preempted <= most for request in requests)
    assert requests[0].num_preempted == 0
