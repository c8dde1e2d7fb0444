"""Compares what variants wrote with what the unpatched model writes, and asks it how much it minds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from .cases import Case, Variant
from .measure import generate, new_text
from .promise import Difference, differences, first_steps, rounding, worst

_REFERENCE = Variant("reference")


def judge(
    model: Any, ids: torch.Tensor, case: Case, texts: Mapping[str, Sequence[torch.Tensor]]
) -> dict[str, Difference | None]:
    """Per variant, the worst difference of its texts from those of a run of the unpatched model; None: no difference.

    Args:
        texts: of each variant, every text it wrote, `[rows, new]`.
    """
    find = _greedy_judge(model, ids, case) if case.beams == 1 else _beam_judge(model, ids, case)
    return {name: worst([d for text in written for d in find(text)]) for name, written in texts.items()}


def _greedy_judge(model: Any, ids: torch.Tensor, case: Case) -> Any:
    out = generate(model, ids, case, _REFERENCE, return_dict_in_generate=True, output_logits=True)
    reference = new_text(out.sequences, ids)
    return lambda text: differences(text, reference, out.logits, model.dtype)


def _beam_judge(model: Any, ids: torch.Tensor, case: Case) -> Any:
    """Texts that differ are scored by the unpatched model: it must like its own better by no more than rounding."""
    reference = new_text(generate(model, ids, case, _REFERENCE), ids)

    def find(text: torch.Tensor) -> list[Difference]:
        found = []
        for row, step in first_steps(text, reference):
            own, limit = _score(model, ids[row], reference[row])
            other, _ = _score(model, ids[row], text[row])
            found.append(Difference(row, step, own - other, limit))
        return found

    return find


@torch.no_grad()
def _score(model: Any, prompt: torch.Tensor, text: torch.Tensor) -> tuple[float, float]:
    """The mean log-probability of a text after a prompt, and what rounding may do to it."""
    text = text.to(prompt.device)
    ids = torch.cat([prompt, text])[None]
    logits = model(ids, use_cache=False, logits_to_keep=len(text) + 1).logits[0, :-1]
    scores = logits.float().log_softmax(-1).gather(1, text[:, None])
    return scores.mean().item(), rounding(logits, model.dtype)
