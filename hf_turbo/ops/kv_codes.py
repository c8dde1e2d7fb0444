"""Keys and values to codes and back, in plain torch: the arithmetic that the kernels repeat step by step.

Every operation is one correctly rounded float32 operation, so that codes do not depend on where they were made.
"""

from __future__ import annotations

import torch

from .kv_format import E4M3_MAX, KEY_STEP, KEY_TRIES, LARGEST_KEY, KVFormat

_FP16_MAX = 65504.0
#: Times this, a number has its first four bits above a float32's last: T. J. Dekker, A floating-point technique for
#: extending the available precision, 1971.
UPPER_BITS = 2.0**20 + 1
#: Steps in which errors of float8, up to 16, are counted: whole ones, so that sums don't depend on the order. The
#: squares of 128 tokens fit into int32.
STEPS = 128.0


def quantize_keys(keys: torch.Tensor, fmt: KVFormat) -> torch.Tensor:
    """The bytes of whole blocks, uint8 `[..., key_bytes]`.

    Args:
        keys: `[..., block_size, dim]`, finite; `dim` is a multiple of `fmt.parts`.
    """
    x = keys.float() + 0.0  # no negative zeros: which of two zeros is the minimum would be anybody's guess
    x = x.unflatten(-2, (fmt.key_groups(x.shape[-2]), -1))
    low, high = x.amin(-2, keepdim=True), x.amax(-2, keepdim=True)
    if fmt.is_float:
        scale, zero = _float_scales(x, low, high)
    else:
        zero = _half(low)
        scale = _half_up((high - zero.float()).clamp(min=0) / (2**fmt.bits - 1))
    codes = _codes((x - zero.float()) / _not_zero(scale), fmt).flatten(-3, -2)
    parts = [_bytes(part) for part in (_pack(codes, fmt), scale.squeeze(-2), zero.squeeze(-2))]
    return _joined(parts, fmt.key_bytes(*keys.shape[-2:]))


def _float_scales(x: torch.Tensor, low: torch.Tensor, high: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Scales and zeros, fp16, of float8 keys: those of some tries that have the least squared error.

    Float8 is fine near its zero and has steps that double. Where it lies among as few keys as share a scale, and which
    of them meet one of its numbers, is worth a quarter of the squared error. Both ends of a channel's range always do:
    what attention returns to is often there.
    """
    numbers = torch.arange(KEY_TRIES, dtype=torch.int32, device=x.device).view(-1, *[1] * x.dim())
    scales, zeros = _tried_scales(numbers, low, high)
    steps = _not_zero(scales)
    sums = [_float_error(x - zero, to_float8) for zero, to_float8 in zip(zeros.float(), 1 / steps, strict=True)]
    errors = torch.stack(sums).float() * steps * steps
    return _tried_scales(numbers.where(errors == errors.amin(0), KEY_TRIES).amin(0), low, high)


def _tried_scales(number: torch.Tensor, low: torch.Tensor, high: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The scales and zeros, fp16, of the tries with these numbers."""
    nearer = LARGEST_KEY - (number + 1) // 2 * KEY_STEP
    above, below = torch.where(number % 2 == 1, LARGEST_KEY, nearer), torch.where(number % 2 == 1, nearer, LARGEST_KEY)
    zero = _half(low + (high * 0.5 - low * 0.5) / ((above + below) * 0.5) * below)
    return _half_up(torch.maximum((high - zero.float()) / above, (zero.float() - low) / below)), zero


def _float_error(x: torch.Tensor, to_float8: torch.Tensor) -> torch.Tensor:
    """What float8 takes from x: the sum of squares over tokens, int32 `[..., 1, dim]`, as if it had no subnormals."""
    scaled = (x * to_float8).clamp_(-E4M3_MAX, E4M3_MAX)
    upper = scaled * UPPER_BITS
    scaled -= upper - (upper - scaled)
    steps = scaled.mul_(STEPS).to(torch.int32)
    return steps.mul_(steps).sum(-2, keepdim=True, dtype=torch.int32)


def dequantize_keys(data: torch.Tensor, fmt: KVFormat, block_size: int, dim: int) -> torch.Tensor:
    """Float32 `[..., block_size, dim]` of `[..., key_bytes]`."""
    start = fmt.key_scales(block_size, dim)
    numbers = _unpack(_words(data, start).unflatten(-1, (block_size, -1)), fmt, -1)
    scales = _numbers(data[..., start:], 2 * fmt.key_groups(block_size) * dim)
    scale, zero = scales.unflatten(-1, (2, -1, 1, dim)).unbind(-4)
    numbers.unflatten(-2, (scale.shape[-3], -1)).mul_(scale).add_(zero)
    return numbers


def quantize_values(values: torch.Tensor, fmt: KVFormat) -> torch.Tensor:
    """The bytes of whole blocks, uint8 `[..., value_bytes]`.

    A scale and a zero count in units: a power of two, the block's. So they fit into fp16 whatever the values are.

    Args:
        values: `[..., block_size, dim]`, finite; `dim` is a multiple of `fmt.parts`.
    """
    unit = _power_of_two(values.float().abs().amax((-2, -1), keepdim=True))
    x = values.float() / unit + 0.0
    if fmt.zero_values:
        low, high = x.amin(-1, keepdim=True), x.amax(-1, keepdim=True)
        zero = _half(low)
        scale = _half_up((high - zero.float()).clamp(min=0) / (2**fmt.bits - 1))
        codes, tail = _codes((x - zero.float()) / _not_zero(scale), fmt), [scale, zero]
    else:
        scale = _half_up(x.abs().amax(-1, keepdim=True))
        codes, tail = _codes(x * largest_value_code(fmt) / _not_zero(scale), fmt, signed=True), [scale]
    parts = [_bytes(_pack(codes, fmt).transpose(-1, -2))]
    parts += [part.squeeze(-1).contiguous().view(torch.uint8) for part in tail]
    parts.append(unit.flatten(-2).view(torch.uint8))
    return _joined(parts, fmt.value_bytes(*values.shape[-2:]))


def dequantize_values(data: torch.Tensor, fmt: KVFormat, block_size: int, dim: int) -> torch.Tensor:
    """Float32 `[..., block_size, dim]` of `[..., value_bytes]`."""
    return dequantize_values_in_a_row(data.unsqueeze(-2), fmt, block_size, dim).transpose(-1, -2)


def dequantize_values_in_a_row(data: torch.Tensor, fmt: KVFormat, block_size: int, dim: int) -> torch.Tensor:
    """Float32 `[..., dim, blocks * block_size]`, as they lie in memory, of `[..., blocks, value_bytes]`."""
    start, end = fmt.value_scales(block_size, dim), fmt.value_unit(block_size, dim)
    words = _words(data, start).unflatten(-1, (-1, block_size)).transpose(-2, -3)
    numbers = _unpack(words, fmt, -3, signed=not fmt.zero_values)
    scale = _numbers(data[..., start:], block_size).unsqueeze(-3)
    unit = data[..., end : end + 4].contiguous().view(torch.float32).unsqueeze(-3)
    if fmt.zero_values:
        numbers.mul_(scale).add_(_numbers(data[..., start + 2 * block_size :], block_size).unsqueeze(-3))
    else:
        numbers.mul_(scale / largest_value_code(fmt))
    return numbers.mul_(unit).flatten(-2)


def largest_value_code(fmt: KVFormat) -> float:
    """What the largest value of a token becomes, where values have no zeros."""
    return E4M3_MAX if fmt.is_float else 127.0


def _codes(x: torch.Tensor, fmt: KVFormat, signed: bool = False) -> torch.Tensor:
    """Unsigned codes, uint8, of scaled numbers."""
    if fmt.is_float:
        return x.clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn).view(torch.uint8)
    if signed:
        return (x.round().clamp(-127, 127) + 128).to(torch.uint8)
    return x.round().clamp(0, 2**fmt.bits - 1).to(torch.uint8)


def _pack(codes: torch.Tensor, fmt: KVFormat) -> torch.Tensor:
    """`[..., dim]` -> words, int16 `[..., dim / fmt.parts]`."""
    parts = enumerate(codes.to(torch.int16).chunk(fmt.parts, -1))
    return torch.stack([part << (i * fmt.bits) for i, part in parts]).sum(0, dtype=torch.int16)


def _unpack(words: torch.Tensor, fmt: KVFormat, along: int, signed: bool = False) -> torch.Tensor:
    """The numbers that codes stand for: new, contiguous, float32. `along`: the head's dimension."""
    shape = list(words.shape)
    shape[along] *= fmt.parts
    numbers = torch.empty(shape, device=words.device)
    for i, part in enumerate(numbers.chunk(fmt.parts, along)):
        if fmt.is_float:
            part.copy_(_from_e4m3(words if i else words << 8))
        else:
            part.copy_((words >> i * fmt.bits) & 2**fmt.bits - 1)
    if fmt.is_float:
        return numbers.mul_(256)
    return numbers.sub_(128) if signed else numbers


def _from_e4m3(words: torch.Tensor) -> torch.Tensor:
    """fp16, 1/256 of the numbers that words' high bytes stand for: ten times as fast as torch's conversion on a CPU.

    Moved to where fp16 has them, their exponents count from 2 ** -15, not from 2 ** -7.
    """
    return (words >> 1).bitwise_and_(~0x407F).view(torch.float16)


def _words(data: torch.Tensor, num_bytes: int) -> torch.Tensor:
    """The codes of `[..., bytes]`, int16."""
    return data.view(torch.int16)[..., : num_bytes // 2]


def _bytes(words: torch.Tensor) -> torch.Tensor:
    return words.flatten(-2).contiguous().view(torch.uint8)


def _joined(parts: list[torch.Tensor], num_bytes: int) -> torch.Tensor:
    data = torch.cat(parts, -1)
    return torch.nn.functional.pad(data, (0, num_bytes - data.shape[-1]))


def _numbers(data: torch.Tensor, count: int) -> torch.Tensor:
    return data[..., : 2 * count].contiguous().view(torch.float16).float()


def _half(x: torch.Tensor) -> torch.Tensor:
    return x.clamp(-_FP16_MAX, _FP16_MAX).half()


def _half_up(x: torch.Tensor) -> torch.Tensor:
    """fp16, rounded up, of numbers from 0: what they scale keeps within the codes."""
    x = x.clamp(max=_FP16_MAX)
    half = x.half()
    return (half.view(torch.int16) + (half.float() < x)).view(torch.float16)


def _not_zero(scale: torch.Tensor) -> torch.Tensor:
    return torch.where(scale == 0, 1.0, scale.float())


def _power_of_two(x: torch.Tensor) -> torch.Tensor:
    """The smallest power of two that is not below x, float32; 1 where x is 0."""
    bits = (x.view(torch.int32) + 0x7FFFFF) & 0x7F800000
    return torch.where(x == 0, 1.0, bits.clamp(0x00800000, 0x7F000000).view(torch.float32))
