"""The norms and linears of eight layers in one CUDA graph, and the search for the configurations that suit it.

What a kernel leaves in flight the next one meets, so the fastest alone is not the fastest here; here is where the
table's figures come from.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
import torch.nn.functional as F

from benchmarks.attention import graph_us
from benchmarks.linear_cases import DTYPE, LARGE, Problem, Shape, candidates, checked_error
from hf_turbo.ops import linear as ops
from hf_turbo.ops import norm as norm_ops
from hf_turbo.ops.attention_config import DeviceFacts, device_facts
from hf_turbo.ops.linear_config import LinearConfig
from hf_turbo.ops.norm_spec import RMSNorm

LAYERS = 8
SHAPES = LARGE[:4]  # q/k/v, o, gate/up, down
SWEEPS = 2
LEAST_GAIN = 0.002  # less is noise

Call = Callable[[int], torch.Tensor]


class Chain:
    """Each kernel reads what the one before it wrote; q stands in for the attention's output.

    Make it with the device as torch's default.
    """

    def __init__(self) -> None:
        self.layers = [[Problem(shape, copies=1) for shape in SHAPES] for _ in range(LAYERS)]
        self.norms = [[_make_norm(shape) for shape in SHAPES] for _ in range(LAYERS)]

    def bytes(self, rows: int) -> int:
        """Of the linears of one layer."""
        return sum(shape.bytes(rows) for shape in SHAPES)

    def ours(self, rows: int, configs: Sequence[LinearConfig]) -> Call:
        """One configuration a linear of a layer; the norms depend on the kernel before them as the linears do."""
        start = self.layers[0][0].x[:rows]
        norm_config = norm_ops.choose_config(start.shape[1], device_facts(start.device))
        norm_config = replace(norm_config, pdl=configs[0].pdl)

        def call(_: int) -> torch.Tensor:
            hidden = start
            for layer, norms in zip(self.layers, self.norms, strict=True):
                x = hidden
                for problem, norm, config in zip(layer, norms, configs, strict=True):
                    shape = problem.shape
                    if norm is not None:
                        x = norm_ops.rms_norm(x, norm, config=norm_config)
                    residual = hidden if shape.residual else None
                    x = ops.linear(
                        x[:, : shape.k],
                        problem.weights[0],
                        residual=residual,
                        activation=shape.activation,
                        config=config,
                    )
                    if shape.residual:
                        hidden = x
            return hidden

        return call

    def cublas(self, rows: int) -> Call:
        """The products alone: no norms, no activation, no residual."""
        start = self.layers[0][0].x[:rows]

        def call(_: int) -> torch.Tensor:
            x = start
            for layer in self.layers:
                for problem in layer:
                    x = F.linear(x[:, : problem.shape.k], problem.merged[0])
            return x

        return call

    def working(self, index: int, rows: int, configs: Sequence[LinearConfig]) -> list[LinearConfig]:
        """Those with which linear `index` of a layer runs and is right; the others are printed."""
        problem = self.layers[0][index]
        reference = problem.reference(rows)
        kept = []
        for config in configs:
            problem.out.fill_(torch.nan)
            try:
                checked_error(problem.ours(rows, config)(0), reference)
                kept.append(config)
            except Exception as failure:  # one bad configuration must not end the search
                torch.cuda.synchronize()
                print(f"{problem.shape.name}/m{rows} {config}: {failure!r}"[:400], flush=True)
        return kept


def _make_norm(shape: Shape) -> RMSNorm | None:
    return RMSNorm(torch.empty(shape.k, dtype=DTYPE).normal_(1, 0.1), 1e-5) if shape.norm else None


def layer_us(call: Call) -> float:
    """Microseconds a layer, in replays of a graph."""
    call(0)  # a kernel can't be compiled or loaded during a capture
    torch.cuda.synchronize()
    return graph_us(call, 1, replays=8) / LAYERS


def chain_candidates(shape: Shape, rows: int, facts: DeviceFacts) -> list[LinearConfig]:
    """The table's configuration, those to try, and other prefetches of the first on the tensor cores."""
    configs = candidates(shape, rows, facts)
    dots = [config for config in configs if config.dot]
    return configs + [replace(config, prefetch=columns) for config in dots[:1] for columns in (0, 1024)]


def tune(chain: Chain, rows: int, facts: DeviceFacts, expired: Callable[[], bool]) -> tuple[list[LinearConfig], float]:
    """The fastest configurations found and their microseconds a layer, by coordinate descent from the table's.

    One linear's configuration is changed at a time, and the change kept if the whole chain is faster with it.
    """
    choices = [chain.working(i, rows, chain_candidates(shape, rows, facts)) for i, shape in enumerate(SHAPES)]
    picked = [configs[0] for configs in choices]
    best = layer_us(chain.ours(rows, picked))
    for _ in range(SWEEPS):
        for index, configs in enumerate(choices):
            for config in configs:
                if expired():
                    return picked, best
                if config == picked[index]:
                    continue
                tried = [*picked[:index], config, *picked[index + 1 :]]
                us = layer_us(chain.ours(rows, tried))
                if us < best * (1 - LEAST_GAIN):
                    best, picked = us, tried
    return picked, best
