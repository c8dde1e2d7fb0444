"""Stand-ins for the quantized linears of other libraries."""

import copy

import torch
from quantized_models import grouped, spec_of
from torch import nn
from torch.nn import functional

from hf_turbo.quantization.formats import decode, encode, gptq_spec

N, K = 64, 128


class ForeignLinear(nn.Module):
    """Holds a file's tensors as they are, and says what gptqmodel's layers say of themselves."""

    def __init__(self, tensors, spec, bias=None, dtype=torch.float16, group_size=None):
        super().__init__()
        self.in_features, self.out_features = spec.in_features, spec.out_features
        self.bits, self.group_size = spec.bits, group_size or spec.group_size
        self.spec, self.dtype = spec, dtype
        for name, tensor in tensors.items():
            self.register_buffer(name, tensor)
        self.bias = bias

    def weight_now(self):
        tensors = {name: tensor for name, tensor in self._buffers.items() if name != "bias"}
        return decode(tensors, self.spec).dequantize(torch.float32)

    def forward(self, x):
        if x.dtype != self.dtype:
            raise RuntimeError(f"only {self.dtype}")
        bias = None if self.bias is None else self.bias.float()
        return functional.linear(x.float(), self.weight_now(), bias).to(x.dtype)


def foreign(layout="gptq", v2=True, act_order=False, **kwargs):
    weight = grouped(torch.randn(N, K), group_size=32)
    if act_order:
        weight = copy.copy(weight)
        object.__setattr__(weight, "perm", torch.randperm(K, dtype=torch.int32))
    spec = gptq_spec((N, K), 4, 32, v2=v2) if layout == "gptq" else spec_of(weight, layout)
    return ForeignLinear(encode(weight, spec), spec, **kwargs)


def with_foreign_linears(model, act_order=False):
    """Puts stand-ins in the place of the linears in a model's layers, groups of 16."""
    for name, linear in list(model.named_modules()):
        if type(linear) is nn.Linear and "layers" in name and not (linear.in_features | linear.out_features) % 8:
            weight = grouped(linear.weight.detach())
            if act_order:
                object.__setattr__(weight, "perm", torch.randperm(linear.in_features, dtype=torch.int32))
            spec = gptq_spec(tuple(linear.weight.shape), 4, 16, v2=True)
            parent, _, leaf = name.rpartition(".")
            made = ForeignLinear(encode(weight, spec), spec, linear.bias, dtype=torch.float32)
            setattr(model.get_submodule(parent), leaf, made)
    return model.eval()
