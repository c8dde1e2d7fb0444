"""What heads are trained for, and how good they are: cross entropy, and how often which guess is right."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..generation.medusa_heads import MedusaHeads, Projection
from .examples import NO_TARGET, Examples

#: Logits that exist at once; with their gradients 4 bytes each in bf16, 8 in fp32: 0.5 or 1 GiB.
_MAX_LOGITS = 1 << 27
_RANKS = 10


class Outcome(NamedTuple):
    """Of a batch, each `[num_heads]` fp32.

    Attributes:
        loss: mean cross entropy over the positions that have a target, 0 where none has.
        accuracy: the fraction of them at which the best guess is right.
    """

    loss: Tensor
    accuracy: Tensor


class Objective(nn.Module):
    """Heads, and how far they are from what they should say.

    Logits exist for some positions at a time, and their gradients are taken while they do: memory does not grow with
    the vocabulary times the batch, and nothing is computed twice. Products are in the dtype of the hidden states, sums
    and logarithms in fp32; probabilities are rounded to the logits' dtype, as their gradients are: in bf16 by 0.4%.

    Args:
        heads: in fp32.
        project: the model's output embedding, frozen.
        max_logits: how many exist at once.
    """

    def __init__(self, heads: MedusaHeads, project: Projection, max_logits: int = _MAX_LOGITS) -> None:
        super().__init__()
        self.heads = heads
        self._project = lambda features: project(features)  # a module would become a part of this one
        self._rows = max(1, max_logits // (heads.num_heads * heads.vocab_size))

    def forward(self, hidden: Tensor, targets: Tensor) -> Outcome:
        """`[R, H]` and `[R, num_heads]`, as in `Examples`."""
        with _products_in(hidden):
            features = self.heads.features(hidden)
            losses, hits = _SummedLoss.apply(features, self.heads.projections, targets, self)
        counts = (targets != NO_TARGET).sum(0).clamp(min=1)
        return Outcome(losses / counts, hits / counts)

    def logits(self, features: Tensor) -> Tensor:
        """`[R, num_heads, H]` to `[R, num_heads, V]`."""
        return self.heads.project(features, self._project)

    def parts(self, rows: Tensor, targets: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Rows and targets of as many positions at a time as may have logits."""
        return zip(rows.split(self._rows), targets.split(self._rows), strict=True)

    @torch.no_grad()
    def rank_accuracies(self, examples: Examples) -> list[list[float]]:
        """`[head][rank]`: how often the head's rank-th best guess is right; ten ranks, or as many as there are tokens.

        0 where no position has a target for a head.
        """
        ranks = min(_RANKS, self.heads.vocab_size)
        device = examples.targets.device
        hits = torch.zeros(self.heads.num_heads, ranks, device=device)
        counts = torch.zeros(self.heads.num_heads, 1, device=device)
        for hidden, targets in self.parts(examples.hidden, examples.targets):
            with _products_in(hidden):
                logits = self.logits(self.heads.features(hidden.to(device)))
            wanted = targets.unsqueeze(-1)
            hits += (logits.topk(ranks, dim=-1).indices == wanted).sum(0)
            counts += (wanted != NO_TARGET).sum(0)
        found: list[list[float]] = (hits / counts.clamp(min=1)).tolist()
        return found


class _SummedLoss(torch.autograd.Function):
    """Sums over positions, each `[num_heads]`: cross entropy, and right guesses.

    A head's loss depends on its own features and projection alone. So what the forward takes, the gradients of the sum
    over heads, holds those of each head's loss, and the backward only weighs them.
    """

    @staticmethod
    def forward(
        ctx: Any, features: Tensor, projections: Tensor | None, targets: Tensor, objective: Objective
    ) -> tuple[Tensor, Tensor]:
        """`[R, num_heads, H]`, the heads' own `[num_heads, V, H]` or None, `[R, num_heads]`."""
        own = [] if projections is None else [projections]
        losses = torch.zeros(targets.shape[1], device=targets.device)
        hits, of_features, of_own = torch.zeros_like(losses), [], [torch.zeros_like(each) for each in own]
        for part, wanted in objective.parts(features.detach(), targets):
            known = wanted != NO_TARGET
            with torch.enable_grad():
                part.requires_grad_()
                logits = objective.logits(part * known.unsqueeze(-1))  # so no gradient comes from the others
            probabilities = logits.detach().softmax(-1, dtype=logits.dtype)  # autocast would make it fp32
            places = wanted.clamp(min=0).unsqueeze(-1)
            likelihood = probabilities.gather(-1, places).float()
            losses -= (likelihood.clamp(min=torch.finfo(torch.float32).tiny).log().squeeze(-1) * known).sum(0)
            hits += (logits.detach().argmax(-1) == wanted).sum(0)
            gradients = probabilities.scatter_(-1, places, (likelihood - 1).to(logits.dtype))
            taken = torch.autograd.grad(logits, [part, *own], gradients)
            of_features.append(taken[0])
            for total, gradient in zip(of_own, taken[1:], strict=True):
                total += gradient
        ctx.save_for_backward(torch.cat(of_features), *of_own)
        ctx.mark_non_differentiable(hits)
        return losses, hits

    @staticmethod
    def backward(ctx: Any, of_losses: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        of_features, *of_own = ctx.saved_tensors
        weighed = of_features * of_losses.to(of_features.dtype).unsqueeze(-1)
        return weighed, (of_own[0] * of_losses[:, None, None] if of_own else None), None, None


def _products_in(hidden: Tensor) -> torch.autocast:
    """bf16 products for hidden states in bf16 or fp16: the gradients of fp16 would need scaling."""
    return torch.autocast(hidden.device.type, torch.bfloat16, enabled=hidden.dtype != torch.float32)
