"""Medusa heads: small networks that guess the tokens after the next one from the model's last hidden state.

Head i, counted from 0, guesses the token i + 2 places after the one whose hidden state it reads; the model itself says
the one before these. Method: Cai et al., Medusa (arXiv:2401.10774), section 2.1.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ..ops.dispatch import head_block
from ..ops.reference_heads import head_by_head
from .medusa_files import find_heads, read_config, read_tensors, replace_file, weights_name
from .medusa_layout import HeadTensors, arrange, published_names

Projection = Callable[[Tensor], Tensor]


class MedusaHeads(nn.Module):
    """Each head is `num_layers` blocks `x + SiLU(Linear(x))`, then a projection to the vocabulary: one of its own, or
    the model's.

    Equal parts of all heads lie in one tensor, so that a step with few rows takes few products. Weights begin as zeros:
    a head without training says what its projection makes of the hidden state. Method: arXiv:2401.10774, section 2.1.

    Args:
        num_heads: at least 1.
        num_layers: blocks of a head, at least 1.
        hidden_size: size of what the model's output embedding reads, H.
        vocab_size: V.
        own_projection: each head has a `[V, H]` of its own, to be filled by `copy_projection`; else the model's is
            applied to what each head's blocks give.
        dtype, device: of the parameters.

    Attributes:
        weights, biases: a list each, an entry a block: `[num_heads, H, H]` and `[num_heads, H]`.
        projections: `[num_heads, V, H]`, or None where the model's is shared.
        accuracies: measured, `[head][rank]`: how often a head's rank-th best guess was right. None where unknown.
        base_model_name_or_path: the model that the heads were trained for, if known.

    Raises:
        ValueError: a size is less than 1.
    """

    projections: nn.Parameter | None

    def __init__(
        self,
        num_heads: int,
        num_layers: int,
        hidden_size: int,
        vocab_size: int,
        *,
        own_projection: bool = False,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        sizes = dict(num_heads=num_heads, num_layers=num_layers, hidden_size=hidden_size, vocab_size=vocab_size)
        if small := [f"{name}={size}" for name, size in sizes.items() if size < 1]:
            raise ValueError(f"Medusa heads need sizes of at least 1, not {', '.join(small)}")
        self.num_heads, self.num_layers = num_heads, num_layers
        self.hidden_size, self.vocab_size = hidden_size, vocab_size
        self.accuracies: list[list[float]] | None = None
        self.base_model_name_or_path: str | None = None

        def zeros(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.zeros(num_heads, *shape, dtype=dtype, device=device))

        self.weights = nn.ParameterList([zeros(hidden_size, hidden_size) for _ in range(num_layers)])
        self.biases = nn.ParameterList([zeros(hidden_size) for _ in range(num_layers)])
        self.projections = zeros(vocab_size, hidden_size) if own_projection else None

    @classmethod
    def from_pretrained(cls, path: str | Path, base_model: PreTrainedModel | None = None) -> MedusaHeads:
        """Heads from a folder, a file or an id of the Hugging Face Hub, ready to be used: frozen, in eval mode.

        Reads the layouts that are published (`docs/medusa.md`), from safetensors or, without running any code of the
        file, from a pickle. How many heads and blocks there are is what the tensors say.

        Args:
            path: a folder with the weights and perhaps a config.json, the weights' file itself, or an id of the Hub.
            base_model: the model that the heads are for. They get its dtype and device. Without it they stay in the
                file's dtype on the CPU until `fit_to`.

        Raises:
            ValueError: nothing of the kind is there; keys are missing or unknown (all are listed); sizes do not fit
                together, the config or the model.
        """
        found = find_heads(path)
        config = read_config(found)
        arranged = arrange(read_tensors(found), config, str(found))
        heads = cls._from_tensors(arranged, config, base_model, str(found))
        return heads.fit_to(base_model) if base_model is not None else heads

    @classmethod
    def _from_tensors(
        cls, tensors: HeadTensors, config: Mapping[str, Any], base_model: PreTrainedModel | None, source: str
    ) -> MedusaHeads:
        num_heads, hidden_size = tensors.biases[0].shape
        if tensors.projections is not None:
            vocab_size = tensors.projections.shape[1]
        elif base_model is not None:
            vocab_size = projection_sizes(base_model)[1]
        elif "vocab_size" in config:
            vocab_size = config["vocab_size"]
        else:
            raise ValueError(f"{source} does not say how large the vocabulary is: give the heads' model, too")
        with torch.device("meta"):
            own = tensors.projections is not None
            heads = cls(num_heads, len(tensors.weights), hidden_size, vocab_size, own_projection=own)
        heads.weights = nn.ParameterList(tensors.weights)
        heads.biases = nn.ParameterList(tensors.biases)
        if tensors.projections is not None:
            heads.projections = nn.Parameter(tensors.projections)
        heads.accuracies = config.get("medusa_accuracies")
        heads.base_model_name_or_path = config.get("base_model_name_or_path")
        return heads.requires_grad_(False).eval()

    def fit_to(self, base_model: PreTrainedModel) -> MedusaHeads:
        """Moves the heads to the dtype and device in which a model's output embedding computes.

        Raises:
            ValueError: the model's hidden size or vocabulary is of another size, or it has no output embedding.
        """
        hidden_size, vocab_size = projection_sizes(base_model)
        if self.hidden_size != hidden_size:
            raise ValueError(f"the heads' hidden size is {self.hidden_size}, the model's {hidden_size}")
        if self.vocab_size != vocab_size:
            raise ValueError(f"the heads' vocabulary has {self.vocab_size} tokens, the model's {vocab_size}")
        return self.to(device=projection_device(base_model), dtype=base_model.dtype)

    def copy_projection(self, weight: Tensor) -> None:
        """Gives every head a copy of a projection `[V, H]`, the published way to begin training own ones.

        Raises:
            ValueError: the heads share the model's projection, or the sizes differ.
        """
        if self.projections is None:
            raise ValueError("these heads share the model's projection; make them with own_projection=True")
        if weight.shape != self.projections.shape[1:]:
            raise ValueError(f"a projection of {list(self.projections.shape[1:])} is needed, not {list(weight.shape)}")
        with torch.no_grad():
            self.projections.copy_(weight.expand_as(self.projections))

    def forward(self, hidden: Tensor, project: Projection | None = None) -> Tensor:
        """The guesses of all heads.

        Args:
            hidden: `[..., H]`, what the model's output embedding reads, in the parameters' dtype.
            project: the model's output embedding, `[..., H]` to `[..., V]`; unused where heads have their own.

        Returns:
            Logits `[..., num_heads, V]`.

        Raises:
            ValueError: the heads share the model's projection and `project` is missing.
        """
        return self.project(self.features(hidden), project)

    def features(self, hidden: Tensor, num_heads: int | None = None) -> Tensor:
        """What each head's blocks give: `[..., H]` to `[..., num_heads, H]`.

        Args:
            num_heads: only of the first so many; None: of all.
        """
        x = hidden.reshape(-1, self.hidden_size)
        for weight, bias in zip(self.weights, self.biases, strict=True):
            x = head_block(x, weight[:num_heads], bias[:num_heads])
        return x.reshape(*hidden.shape[:-1], *x.shape[1:])

    def project(self, features: Tensor, project: Projection | None = None) -> Tensor:
        """Logits `[..., num_heads, V]` of what `features` gave; `project` as in `forward`."""
        if self.projections is not None:
            rows = features.reshape(-1, self.num_heads, self.hidden_size)
            return head_by_head(rows, self.projections).reshape(*features.shape[:-1], self.vocab_size)
        if project is None:
            raise ValueError("these heads share the model's projection: give it as `project`")
        return project(features)

    def save_pretrained(self, path: str | Path) -> None:
        """Writes `medusa_lm_head.safetensors` and `config.json`, as published, into a folder.

        Each file is there as a whole or not at all. `medusa_accuracies` in the config is ours; other readers pass it
        over.
        """
        from safetensors.torch import save_file

        folder = Path(path)
        folder.mkdir(parents=True, exist_ok=True)
        tensors = {name: tensor.detach().cpu() for name, tensor in published_names(self._tensors()).items()}
        with replace_file(folder / weights_name()) as target:
            save_file(tensors, target, metadata={"format": "pt"})
        with replace_file(folder / "config.json") as target:
            target.write_text(json.dumps(self._config(), indent=2) + "\n")

    def _tensors(self) -> HeadTensors:
        return HeadTensors(list(self.weights), list(self.biases), self.projections)

    def _config(self) -> dict[str, Any]:
        known = {
            "model_type": "medusa",
            "medusa_num_heads": self.num_heads,
            "medusa_num_layers": self.num_layers,
            "hidden_size": self.hidden_size,
            "vocab_size": self.vocab_size,
            "base_model_name_or_path": self.base_model_name_or_path,
            "medusa_accuracies": self.accuracies,
        }
        return {key: value for key, value in known.items() if value is not None}


def output_projection(model: PreTrainedModel) -> nn.Module:
    """The module that turns a model's last hidden states into logits.

    Raises:
        ValueError: the model has none.
    """
    head = model.get_output_embeddings()
    if head is None:
        raise ValueError(f"{type(model).__name__} has no output embedding, so it can't have Medusa heads")
    return head


def is_plain_linear(module: nn.Module, device: torch.device) -> bool:
    """Whether a module is torch's linear with nothing around it, its weight a tensor of the usual kind on a device."""
    kind = getattr(type(module), "_hf_turbo_original_class", type(module))  # what a watched head was
    if kind is not nn.Linear or "forward" in vars(module) or module._forward_hooks or module._forward_pre_hooks:
        return False
    return type(module.weight) is nn.Parameter and module.weight.device == device


def projection_sizes(model: PreTrainedModel) -> tuple[int, int]:
    """The hidden size and the vocabulary's size of a model's output embedding, quantized or not."""
    head = output_projection(model)
    if hasattr(head, "in_features"):
        return head.in_features, head.out_features  # type: ignore[return-value]
    vocab_size, hidden_size = head.weight.shape  # type: ignore[misc]
    return hidden_size, vocab_size


def projection_device(model: PreTrainedModel) -> torch.device:
    """Where a model's output embedding lies."""
    head = output_projection(model)
    tensors: Sequence[Tensor] = [*head.parameters(), *head.buffers()]
    return tensors[0].device
