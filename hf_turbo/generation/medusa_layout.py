"""How Medusa heads lie in a checkpoint: names of tensors to the tensors of all heads, and back.

Two layouts of names are published. H is the hidden size, V the vocabulary's, n the number of blocks of a head:

- `{head}.{block}.linear.weight` and `.bias`, and, where heads have projections of their own, `{head}.{n}.weight`;
- `blocks.{head}.layers.{block}.weight`, perhaps `.bias`, and `lm_heads.{head}.weight`, as vLLM has them.

Both also with `medusa_head.` or `medusa_heads.` before them.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

_PREFIX = r"(?:medusa_heads?\.)?"
_PUBLISHED_BLOCK = re.compile(_PREFIX + r"(\d+)\.(\d+)\.linear\.(weight|bias)")
_PUBLISHED_PROJECTION = re.compile(_PREFIX + r"(\d+)\.(\d+)\.weight")
_VLLM_BLOCK = re.compile(_PREFIX + r"blocks\.(\d+)\.layers\.(\d+)\.(weight|bias)")
_VLLM_PROJECTION = re.compile(_PREFIX + r"lm_heads\.(\d+)\.weight")


@dataclass(frozen=True)
class HeadTensors:
    """The tensors of all heads, equal parts stacked.

    Attributes:
        weights: a `[num_heads, H, H]` for each block.
        biases: a `[num_heads, H]` for each block.
        projections: `[num_heads, V, H]`, or None.
    """

    weights: Sequence[Tensor]
    biases: Sequence[Tensor]
    projections: Tensor | None


class _Part(NamedTuple):
    """Which part of which head a tensor is; the projection has no block."""

    head: int
    block: int | None
    kind: str


def arrange(tensors: Mapping[str, Tensor], config: Mapping[str, Any], source: str) -> HeadTensors:
    """Sorts a checkpoint's tensors by head and block, and stacks them.

    Args:
        config: of the checkpoint. Where it tells of more heads or blocks than there are, these count as missing; where
            it tells of fewer, the tensors are believed: configs of published heads do that.
        source: names the checkpoint in errors.

    Raises:
        ValueError: keys are missing or unknown, or shapes do not fit together. All of them are listed.
    """
    parts, unknown = _sort(tensors)
    blocks = {part.block for part in parts if part.block is not None}
    num_heads = max([config.get("medusa_num_heads") or 0, *(part.head + 1 for part in parts)])
    num_layers = max([config.get("medusa_num_layers") or 0, *(block + 1 for block in blocks)])
    has_projections = any(part.kind == "projection" for part in parts)
    has_biases = any(part.kind == "bias" for part in parts) or not _is_vllm(tensors)
    if not blocks:
        raise ValueError(f"{source} holds no Medusa heads; its keys: {_listed(tensors)}")
    expected = list(_expected(num_heads, num_layers, has_projections, has_biases))
    missing = [_written(part, num_layers, _is_vllm(tensors)) for part in expected if part not in parts]
    if missing or unknown:
        told = [f"{what} keys: {_listed(keys)}" for what, keys in (("missing", missing), ("unknown", unknown)) if keys]
        raise ValueError(f"{source} is not a checkpoint of {num_heads} Medusa heads; {'; '.join(told)}")
    _check_shapes(parts, config, source)

    def stack(block: int | None, kind: str) -> Tensor:
        return torch.stack([parts[_Part(head, block, kind)] for head in range(num_heads)])

    weights = [stack(block, "weight") for block in range(num_layers)]
    if has_biases:
        biases = [stack(block, "bias") for block in range(num_layers)]
    else:
        biases = [weight.new_zeros(weight.shape[:2]) for weight in weights]
    return HeadTensors(weights, biases, stack(None, "projection") if has_projections else None)


def published_names(tensors: HeadTensors) -> dict[str, Tensor]:
    """The tensors by the names of the first layout, each with memory of its own."""
    num_layers = len(tensors.weights)
    named = {}
    for head in range(len(tensors.weights[0])):
        for block in range(num_layers):
            named[f"{head}.{block}.linear.weight"] = tensors.weights[block][head].clone()
            named[f"{head}.{block}.linear.bias"] = tensors.biases[block][head].clone()
        if tensors.projections is not None:
            named[f"{head}.{num_layers}.weight"] = tensors.projections[head].clone()
    return named


def _sort(tensors: Mapping[str, Tensor]) -> tuple[dict[_Part, Tensor], list[str]]:
    """The tensors by what they are, and the keys that say nothing."""
    num_layers = max([int(m[2]) + 1 for name in tensors if (m := _PUBLISHED_BLOCK.fullmatch(name))], default=0)
    parts: dict[_Part, Tensor] = {}
    unknown = []
    for name, tensor in tensors.items():
        part = _part(name, num_layers)
        if part is None or part in parts:
            unknown.append(name)
        else:
            parts[part] = tensor
    return parts, unknown


def _part(name: str, num_layers: int) -> _Part | None:
    for pattern in (_PUBLISHED_BLOCK, _VLLM_BLOCK):
        if found := pattern.fullmatch(name):
            return _Part(int(found[1]), int(found[2]), found[3])
    if found := _VLLM_PROJECTION.fullmatch(name):
        return _Part(int(found[1]), None, "projection")
    found = _PUBLISHED_PROJECTION.fullmatch(name)
    if found and int(found[2]) == num_layers:
        return _Part(int(found[1]), None, "projection")
    return None


def _is_vllm(tensors: Mapping[str, Tensor]) -> bool:
    return any(_VLLM_BLOCK.fullmatch(name) for name in tensors)


def _expected(num_heads: int, num_layers: int, projections: bool, biases: bool) -> Iterator[_Part]:
    for head in range(num_heads):
        for block in range(num_layers):
            yield _Part(head, block, "weight")
            if biases:
                yield _Part(head, block, "bias")
        if projections:
            yield _Part(head, None, "projection")


def _written(part: _Part, num_layers: int, vllm: bool) -> str:
    """The name that a part has in a file, without prefix."""
    if part.block is None:
        return f"lm_heads.{part.head}.weight" if vllm else f"{part.head}.{num_layers}.weight"
    if vllm:
        return f"blocks.{part.head}.layers.{part.block}.{part.kind}"
    return f"{part.head}.{part.block}.linear.{part.kind}"


def _check_shapes(parts: Mapping[_Part, Tensor], config: Mapping[str, Any], source: str) -> None:
    hidden_size = config.get("hidden_size") or parts[_Part(0, 0, "weight")].shape[-1]
    projection = parts.get(_Part(0, None, "projection"))
    vocab_size = None if projection is None else projection.shape[0]
    wanted = {"weight": (hidden_size, hidden_size), "bias": (hidden_size,), "projection": (vocab_size, hidden_size)}
    wrong = [
        f"{part.kind} of head {part.head}{'' if part.block is None else f', block {part.block}'}: {list(tensor.shape)}"
        for part, tensor in parts.items()
        if tuple(tensor.shape) != wanted[part.kind]
    ]
    if wrong:
        raise ValueError(f"{source}: shapes do not fit a hidden size of {hidden_size}: {'; '.join(wrong)}")


def _listed(names: Mapping[str, Tensor] | Sequence[str]) -> str:
    return ", ".join(sorted(names)) or "none"
