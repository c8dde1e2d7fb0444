"""What a quantized block holds, byte by byte.

A block of one layer and KV head is two runs of bytes. Codes are unsigned, 8 or 4 bits, and lie in words of 16: word `i`
holds, from its lowest bits on, those of the dimensions `i` and `i + dim / 2`, or with 4 bits of `i`, `i + dim / 4`, ...
So what a thread reads for a tensor core's fragment of 16-bit numbers becomes one fragment for each part of a head.
Each run is padded to a multiple of 16 bytes.

    keys    codes [block_size, dim / parts], scales fp16 [groups, dim], zeros fp16 [groups, dim]
    values  codes [dim / parts, block_size], scales fp16 [block_size], zeros fp16 [block_size] (int4), unit fp32

Keys have a scale and a zero for each channel, since a few channels are much larger than the others (KIVI,
arXiv:2402.02750): for all of a block's tokens, or with 4 bits for each group of 32. Values have theirs for each token,
and lie transposed, so that what a product sums over is what lies in a row of memory.
"""

from __future__ import annotations

from dataclasses import dataclass

#: Largest magnitude of float8 e4m3.
E4M3_MAX = 448.0

#: Of float8 keys, one end of a channel's range becomes this number, and the other one so many steps less: some are
#: tried, at both ends, from none to eight. All are numbers of float8; above 256 its steps would be 32.
LARGEST_KEY = 256.0
KEY_STEP = 16.0
KEY_TRIES = 17


@dataclass(frozen=True)
class KVFormat:
    """How keys and values become codes.

    Args:
        name: as in `TurboConfig.kv_cache_dtype`.
        bits: of a code.
        is_float: codes are float8 e4m3; otherwise whole numbers.
        zero_values: values have a zero for each token.
        key_tokens: so many of a block's tokens share the scales and zeros of their keys; None: all do.
    """

    name: str
    bits: int
    is_float: bool = False
    zero_values: bool = False
    key_tokens: int | None = None

    @property
    def parts(self) -> int:
        """Codes of a word, which are of as many parts of a head; head sizes are multiples of it."""
        return 16 // self.bits

    def row_bytes(self, dim: int) -> int:
        """Bytes of one token's codes."""
        return dim * self.bits // 8

    def key_groups(self, block_size: int) -> int:
        """Groups of a block's tokens whose keys have scales and zeros of their own."""
        return 1 if self.key_tokens is None else max(block_size // self.key_tokens, 1)

    def key_scales(self, block_size: int, dim: int) -> int:
        """Where the keys' scales begin; the zeros follow them."""
        return block_size * self.row_bytes(dim)

    def key_bytes(self, block_size: int, dim: int) -> int:
        """Bytes of one block's keys, one head."""
        return _padded(self.key_scales(block_size, dim) + 4 * dim * self.key_groups(block_size))

    def value_scales(self, block_size: int, dim: int) -> int:
        """Where the values' scales begin; zeros, if any, follow them."""
        return block_size * self.row_bytes(dim)

    def value_unit(self, block_size: int, dim: int) -> int:
        """Where the values' unit lies."""
        return self.value_scales(block_size, dim) + block_size * (4 if self.zero_values else 2)

    def value_bytes(self, block_size: int, dim: int) -> int:
        """Bytes of one block's values, one head."""
        return _padded(self.value_unit(block_size, dim) + 4)

    def bytes_per_token(self, block_size: int, k_dim: int, v_dim: int) -> float:
        """Of one KV head, scales included."""
        return (self.key_bytes(block_size, k_dim) + self.value_bytes(block_size, v_dim)) / block_size


KV_FORMATS = {
    "int8": KVFormat("int8", 8),
    "fp8": KVFormat("fp8", 8, is_float=True),
    "int4": KVFormat("int4", 4, zero_values=True, key_tokens=32),
}

#: Block sizes that quantized blocks can have.
KV_BLOCK_SIZES = (32, 64, 128)

#: Blocks before a token's own that it still sees wide.
WIDE_BEHIND = 1


def end_of_codes(length: int, block_size: int) -> int:
    """Blocks 1 to this one, not included, are read as codes by the last of `length` tokens; at least 1.

    A token sees the first block wide, for what attention returns to again and again (StreamingLLM, arXiv:2309.17453)
    is there, and its own and the one before, for most of what it attends to is. What it sees depends on its position
    alone, not on how a text was cut into forwards.
    """
    return max((length - 1) // block_size - WIDE_BEHIND, 1)


def _padded(num_bytes: int) -> int:
    return -(-num_bytes // 16) * 16
