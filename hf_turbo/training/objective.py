"""What heads are trained for, and how good they are: cross entropy, and how often which guess is right."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from ..generation.medusa_heads import MedusaHeads, Projection
from .examples import NO_TARGET, Examples

#: Logits that exist at once; in fp32, with what their gradients need, some 2 GB.
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

    Logits exist for some positions at a time and are computed again for the gradients, so memory does not grow with the
    vocabulary times the batch. Products are in the dtype of the hidden states, sums and logarithms in fp32.

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
            sums = [
                checkpoint(self._part, part, wanted, use_reentrant=False, preserve_rng_state=False)
                for part, wanted in zip(features.split(self._rows), targets.split(self._rows), strict=True)
            ]
        counts = (targets != NO_TARGET).sum(0).clamp(min=1)
        losses, hits = (torch.stack(one).sum(0) / counts for one in zip(*sums, strict=True))
        return Outcome(losses, hits)

    def _part(self, features: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Sums over positions, `[num_heads]`: cross entropy, and right guesses."""
        logits = self.heads.project(features, self._project).float()
        losses = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=NO_TARGET, reduction="none")
        hits = logits.detach().argmax(-1) == targets
        return losses.view(targets.shape).sum(0), hits.sum(0).float()

    @torch.no_grad()
    def rank_accuracies(self, examples: Examples) -> list[list[float]]:
        """`[head][rank]`: how often the head's rank-th best guess is right; ten ranks, or as many as there are tokens.

        0 where no position has a target for a head.
        """
        ranks = min(_RANKS, self.heads.vocab_size)
        device = examples.targets.device
        hits = torch.zeros(self.heads.num_heads, ranks, device=device)
        counts = torch.zeros(self.heads.num_heads, 1, device=device)
        for hidden, targets in zip(examples.hidden.split(self._rows), examples.targets.split(self._rows), strict=True):
            with _products_in(hidden):
                logits = self.heads(hidden.to(device), self._project)
            wanted = targets.unsqueeze(-1)
            hits += (logits.topk(ranks, dim=-1).indices == wanted).sum(0)
            counts += (wanted != NO_TARGET).sum(0)
        found: list[list[float]] = (hits / counts.clamp(min=1)).tolist()
        return found


def _products_in(hidden: Tensor) -> torch.autocast:
    """bf16 products for hidden states in bf16 or fp16: the gradients of fp16 would need scaling."""
    return torch.autocast(hidden.device.type, torch.bfloat16, enabled=hidden.dtype != torch.float32)
