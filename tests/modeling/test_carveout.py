"""Which division of memory a captured step gets: by made-up clocks and a made-up driver, as graphs are a GPU's."""

from types import SimpleNamespace
from typing import ClassVar

import pytest
import torch

from hf_turbo.modeling import carveout
from hf_turbo.modeling.carveout import PERCENTS, fastest, tune
from hf_turbo.ops.deferred import DeferredMode

FIRST, LAST = PERCENTS[0], PERCENTS[-1]
KERNEL, COPY = "kernel", "copy"


class Graph:
    """What the driver has of a graph (what each node asks for), and what an instance of it was made with."""

    def __init__(self):
        self.handle = {"a": [KERNEL, None], "b": [COPY, None], "c": [KERNEL, None]}
        self.instance = None

    def raw_cuda_graph(self):
        return self.handle

    def instantiate(self):
        self.instance = asked(self.handle)

    def replay(self):
        Driver.replayed.append(self.instance)


def asked(handle):
    """What the kernels ask for, which is the same for all; None: nothing."""
    [percent] = {percent for kind, percent in handle.values() if kind == KERNEL}
    assert all(percent is None for kind, percent in handle.values() if kind == COPY)
    return percent


class Driver:
    """The calls that are needed, with the bindings' ways: an error code first, numbers by reference."""

    CUgraphNodeType = SimpleNamespace(CU_GRAPH_NODE_TYPE_KERNEL=KERNEL)
    CUkernelNodeAttrID = SimpleNamespace(CU_LAUNCH_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT="carveout")
    CUkernelNodeAttrValue = SimpleNamespace
    replayed: ClassVar[list] = []
    alive = 0
    fails_at = ""

    def __init__(self):
        Driver.replayed, Driver.alive, Driver.fails_at = [], 0, ""

    def CUgraph(self, handle):
        return handle

    def cuGraphClone(self, handle):
        Driver.alive += 1
        return 0, {name: [*node] for name, node in handle.items()}

    def cuGraphInstantiate(self, handle, flags):
        if Driver.fails_at == "instantiate":
            return 2, None
        Driver.alive += 1
        return 0, SimpleNamespace(percent=asked(handle))

    def cuGraphLaunch(self, instance, stream):
        Driver.replayed.append(instance.percent)
        return (1 if Driver.fails_at == "launch" else 0,)

    def cuGraphExecDestroy(self, instance):
        Driver.alive -= 1
        return (0,)

    cuGraphDestroy = cuGraphExecDestroy

    def cuGraphGetNodes(self, handle, count=0):
        return 0, [(handle, name) for name in handle][:count], len(handle)

    def cuGraphNodeGetType(self, node):
        handle, name = node
        return 0, handle[name][0]

    def cuGraphKernelNodeSetAttribute(self, node, attribute, value):
        handle, name = node
        handle[name][1] = value.sharedMemCarveout
        return (0,)


@pytest.fixture
def driver(monkeypatch):
    driver = Driver()
    monkeypatch.setattr(carveout, "_driver", lambda: driver)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: SimpleNamespace(cuda_stream=7))
    return driver


def clocked(monkeypatch, seconds):
    """Replays take as many seconds as are given for what their instance asks for."""

    def sample(replay, replays):
        for _ in range(replays):
            replay()
        return seconds[Driver.replayed[-1]]

    monkeypatch.setattr(carveout, "_sample", sample)


@pytest.mark.parametrize("best", [None, *PERCENTS])
def test_the_fastest_is_what_is_replayed(driver, monkeypatch, best):
    clocked(monkeypatch, dict.fromkeys([None, *PERCENTS], 4e-4) | {best: 3e-4})
    graph = Graph()
    assert tune(graph, is_repeatable=True, num_seqs=2) == best
    assert graph.instance == asked(graph.handle) == best
    assert set(Driver.replayed) == {None, *PERCENTS}  # each was timed
    assert Driver.alive == 0


def test_what_must_not_be_replayed_is_only_made_ready(driver, monkeypatch):
    graph = Graph()
    graph.instance = "none"
    assert tune(graph, is_repeatable=False, num_seqs=1) is None
    assert (graph.instance, Driver.replayed) == (None, [])


def test_steps_of_many_sequences_are_left_alone(driver):
    """Their attention may need more programs a multiprocessor than short texts show."""
    graph = Graph()
    graph.instance = "none"
    assert tune(graph, is_repeatable=True, num_seqs=3) is None
    assert (graph.instance, Driver.replayed) == (None, [])


def test_what_is_timed_first_is_timed_again(driver, monkeypatch):
    """Clocks may rise meanwhile."""
    times = iter([5e-4] * 4 + [4e-4] * 99)
    monkeypatch.setattr(carveout, "_sample", lambda replay, replays: next(times))
    assert tune(Graph(), is_repeatable=True, num_seqs=1) is None


def test_long_steps_are_left_alone(driver, monkeypatch):
    clocked(monkeypatch, {None: 6e-3})
    graph = Graph()
    assert tune(graph, is_repeatable=True, num_seqs=2) is None
    assert Driver.replayed == [None, None]  # the first, and the one that was timed


@pytest.mark.parametrize("place", ["instantiate", "launch"])
def test_a_driver_that_refuses_leaves_things_as_they_are(driver, monkeypatch, place):
    clocked(monkeypatch, {None: 4e-4, FIRST: 3e-4, LAST: 3e-4})
    Driver.fails_at = place
    graph = Graph()
    assert tune(graph, is_repeatable=True, num_seqs=2) is None
    assert (graph.instance, asked(graph.handle), Driver.alive) == (None, None, 0)


@pytest.mark.parametrize("error", [ImportError, AttributeError, TypeError])
def test_where_it_cannot_be_set_the_driver_chooses(monkeypatch, error):
    """As with other versions of the bindings; the graph is there all the same."""

    def fails():
        raise error

    clocked(monkeypatch, {None: 4e-4})
    monkeypatch.setattr(carveout, "_driver", fails)
    graph = Graph()
    graph.instance = "none"
    assert tune(graph, is_repeatable=True, num_seqs=2) is None
    assert graph.instance is None


@pytest.mark.parametrize(
    ("seconds", "expected"), [((1.0, 0.99, 0.99), None), ((1.0, 0.98, 0.97), LAST), ((1.0, 0.9, 1.1), FIRST)]
)
def test_little_is_not_worth_a_change(seconds, expected):
    assert fastest(dict(zip([None, *PERCENTS], seconds, strict=True))) == expected


def test_operations_that_write_are_counted():
    """Their step is not replayed but to be taken."""
    counter = torch.zeros(2)
    with DeferredMode([], torch.device("cpu")) as mode:
        mode.tensor(counter * 2 + 1)
        assert mode.num_writes == 0
        counter.add_(1)
        assert mode.num_writes == 1
