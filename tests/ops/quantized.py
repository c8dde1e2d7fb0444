"""Random quantized weights, and the numbers that they mean in float64. Independent of the code under test."""

import torch


def random_weight(
    rows, columns, group_size=32, bits=4, zeros=False, perm=False, dtype=torch.float16, *, pack, device="cpu"
):
    """What `pack` makes of codes, scales (of either sign), zero points and an order of columns; and the numbers.

    Zero points reach 16, which old GPTQ files can mean.
    """
    groups = -(-columns // group_size)
    codes = torch.randint(0, 1 << bits, (rows, columns), dtype=torch.uint8)
    scales = ((torch.rand(groups, rows) + 0.1) / columns**0.5 / (1 << bits - 2)).to(dtype)
    scales *= torch.randint(0, 2, scales.shape) * 2 - 1
    points = torch.randint(0, (1 << bits) + (bits == 4), (groups, rows), dtype=torch.uint8) if zeros else None
    order = torch.randperm(columns).int() if perm else None
    group = torch.arange(columns) // group_size
    offset = 1 << bits - 1 if points is None else points.double()[group].t()
    values = scales.double()[group].t() * (codes.double() - offset)
    if order is not None:
        values = torch.empty_like(values).index_copy_(1, order.long(), values)
    tensors = [None if t is None else t.to(device) for t in (codes, scales, points, order)]
    return pack(*tensors, bits, group_size), values.to(device)
