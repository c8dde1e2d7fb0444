"""Looks at a model that do not wait for the device see what those see that do, later."""

import subprocess
import sys

import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from hf_turbo.modeling import model_version
from hf_turbo.modeling.model_version import ModelVersion


class OnItsWay:
    """Says when elements that were sent for have come; reading them before that would be a wait."""

    def __init__(self, monkeypatch):
        self.has_come = False
        read = model_version._Elements.read
        monkeypatch.setattr(model_version._Elements, "are_there", property(lambda elements: self.has_come))

        def read_without_a_wait(elements):
            assert self.has_come, "the host waits for the device"
            return read(elements)

        self.forbid = lambda: monkeypatch.setattr(model_version._Elements, "read", read_without_a_wait)


def number(version, model, waits=False):
    return version.of(model, waits)[0]


def write(model, value):
    """Unseen by torch's count of writes, to the middle, which is looked at."""
    model[0].weight.data[2, 2] = value


@pytest.fixture
def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4))


def test_elements_are_compared_once_they_have_come(model, monkeypatch):
    way, version = OnItsWay(monkeypatch), ModelVersion()
    first = number(version, model, waits=True)
    way.forbid()
    assert number(version, model) == first and version.is_looking
    write(model, 5.0)
    way.has_come = True
    assert number(version, model) == first and not version.is_looking, "they are those of before"
    way.has_come = False
    assert number(version, model) == first and version.is_looking
    assert number(version, model) == first and version.is_looking
    way.has_come = True
    assert number(version, model) > first and not version.is_looking


def test_what_the_host_can_see_is_seen_at_once(model, monkeypatch):
    way, version = OnItsWay(monkeypatch), ModelVersion()
    first = number(version, model, waits=True)
    with torch.no_grad():
        model[0].weight.mul_(2)  # counted
    second = number(version, model)
    assert second > first and not version.is_looking
    assert number(version, model) == second and version.is_looking
    model[0].weight = nn.Parameter(torch.zeros(4, 4))
    way.has_come = True
    assert number(version, model) == second and not version.is_looking
    assert number(version, model) > second


def test_a_look_that_waits_ends_one_that_does_not(model, monkeypatch):
    way, version = OnItsWay(monkeypatch), ModelVersion()
    first = number(version, model, waits=True)
    assert number(version, model) == first and version.is_looking
    write(model, 5.0)
    second = number(version, model, waits=True)
    assert second > first and not version.is_looking, "what is on its way would be compared with a newer model's"
    way.has_come = True
    assert number(version, model) == second


def test_elements_hold_no_weight():
    weight = torch.randn(8, 8)
    storage = StorageWeakRef(weight.untyped_storage())
    elements = model_version._Elements([weight])
    [middle] = weight[4, 4:5].tolist()
    del weight
    assert storage.expired()
    assert elements.are_there and elements.read() == [[middle]]


TF32 = {
    "matmul": "torch.backends.cuda.matmul.fp32_precision = 'tf32'",
    "allowed": "torch.backends.cuda.matmul.allow_tf32 = True",
    "precision": "torch.set_float32_matmul_precision('high')",
    "everywhere": "torch.backends.fp32_precision = 'tf32'",
}


@pytest.mark.parametrize("way", TF32)
def test_every_way_of_allowing_tf32_is_seen(way):
    """In a process of its own: torch raises where one way is asked about after another was taken."""
    code = (
        "import torch\nfrom hf_turbo.modeling.model_state import settings\n"
        f"before = settings()\n{TF32[way]}\nassert settings() != before\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
