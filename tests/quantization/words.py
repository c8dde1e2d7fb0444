"""What a row of packed codes must be, by Python's whole numbers: independent of the code under test."""

import torch

SIGN = 1 << 31


def signed(word: int) -> int:
    """A word of 32 bits as int32 holds it."""
    word &= 0xFFFFFFFF
    return word - 2 * SIGN if word >= SIGN else word


def pack_row(codes, bits):
    """int32 words of one row: code j takes bits `bits * j` and up."""
    number = sum(int(code) << (bits * place) for place, code in enumerate(codes))
    return [signed(number >> (32 * word)) for word in range(-(-len(codes) * bits // 32))]


def pack(codes, bits):
    """int32 `[R, words]` of `[R, C]`."""
    return torch.tensor([pack_row(row, bits) for row in codes.tolist()], dtype=torch.int32)


def headers(tensors):
    from hf_turbo.quantization.formats import TensorHeader

    return {name: TensorHeader(tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()}


def same_bytes(one, other):
    """Whether tensors by name are the same in names, dtypes, shapes and every bit."""
    return one.keys() == other.keys() and all(
        (one[name].dtype, one[name].shape) == (other[name].dtype, other[name].shape)
        and one[name].reshape(-1).view(torch.uint8).equal(other[name].reshape(-1).view(torch.uint8))
        for name in one
    )
