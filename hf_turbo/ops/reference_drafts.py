"""What follows a verified draft, in plain torch: the oracle of the kernels' tests, and what a CPU runs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch

#: Nodes of a tree of which the kernel sees at once which agree: one bit each.
MAX_NODES = 64
#: The most columns of a row that `top_ranks` finds.
MAX_RANKS = 16
#: The most tokens of a text's end that `repeat_text` compares.
MAX_MATCH = 16


class Verdict(NamedTuple):
    """What a verified draft adds to each of B rows; N nodes, D the tree's greatest depth."""

    #: int64 `[B, D + 2]`: the accepted tokens, at their number the model's own next token, -1 beyond, and in the last
    #: column the number of accepted tokens.
    outcome: torch.Tensor
    #: int32 `[B, D + 1]`: the accepted node at each depth, beginning with the root; k beyond.
    path: torch.Tensor
    #: int32 `[B]`: nodes that stay in the cache: the accepted tokens and the root.
    counts: torch.Tensor
    #: int64 `[B]`: the last accepted node; 0, the root, where no token is accepted.
    last: torch.Tensor
    #: int64 `[B]`: the model's own next token, the next draft's root.
    roots: torch.Tensor
    #: int64 `[B]`: tokens that stay in the cache.
    lengths: torch.Tensor


def accept_drafts(
    tokens: torch.Tensor,
    chosen: torch.Tensor,
    seq_lens: torch.Tensor,
    parents: torch.Tensor,
    ancestors: torch.Tensor,
    paths: torch.Tensor,
    depths: torch.Tensor,
    preference: torch.Tensor,
) -> Verdict:
    """Keeps the longest path of a drafted tree on which each token is what the model chose at its parent.

    Args:
        tokens: of the nodes, int64 `[B, N]`; the root's is not compared.
        chosen: the model's token after each node, int64 `[B, N]`.
        seq_lens: tokens in the cache, all nodes included, int32 `[B]`.
        parents: of each node, int64 `[N]`; the root is its own.
        ancestors: the node at each depth on the way to each node, int64 `[N, D + 1]`; the root beyond.
        paths: the same, but k beyond.
        depths: of each node, int64 `[N]`.
        preference: int64 `[N]`, positive and all different: of the nodes to which all agrees, that of the highest is
            the last.

    Raises:
        ValueError: for other shapes or dtypes, a tensor that is not contiguous, or more than 64 nodes.
    """
    check_drafts(tokens, chosen, seq_lens, parents, ancestors, paths, depths, preference)
    agrees = tokens == chosen[:, parents]
    agrees[:, 0] = True
    reached = agrees[:, ancestors].all(dim=-1)
    last = torch.where(reached, preference, 0).argmax(dim=1)
    path, accepted, roots = paths[last], depths[last].unsqueeze(1), chosen.gather(1, last.unsqueeze(1))
    outcome = torch.cat([tokens.gather(1, path[:, 1:]), roots, accepted], dim=1)
    column = torch.arange(path.shape[1], device=path.device)
    outcome[:, :-1].masked_fill_(column > accepted, -1)
    outcome.scatter_(1, accepted, roots)
    counts = accepted[:, 0] + 1
    return Verdict(
        outcome, path.to(torch.int32), counts.to(torch.int32), last, roots[:, 0], seq_lens - tokens.shape[1] + counts
    )


def check_drafts(
    tokens: torch.Tensor,
    chosen: torch.Tensor,
    seq_lens: torch.Tensor,
    parents: torch.Tensor,
    ancestors: torch.Tensor,
    paths: torch.Tensor,
    depths: torch.Tensor,
    preference: torch.Tensor,
) -> None:
    """Refuses what `accept_drafts` does not take."""
    if tokens.dim() != 2 or not 1 <= tokens.shape[1] <= MAX_NODES:
        raise ValueError(f"tokens must be [rows, nodes] of 1 to {MAX_NODES} nodes, got {list(tokens.shape)}")
    if paths.dim() != 2 or not 1 <= paths.shape[1] <= tokens.shape[1]:
        raise ValueError(f"paths must be [{tokens.shape[1]}, 1 to {tokens.shape[1]} steps], got {list(paths.shape)}")
    rows, num_nodes = tokens.shape
    wanted = {
        "tokens": (tokens, (rows, num_nodes), torch.int64),
        "chosen": (chosen, (rows, num_nodes), torch.int64),
        "seq_lens": (seq_lens, (rows,), torch.int32),
        "parents": (parents, (num_nodes,), torch.int64),
        "ancestors": (ancestors, (num_nodes, paths.shape[1]), torch.int64),
        "paths": (paths, (num_nodes, paths.shape[1]), torch.int64),
        "depths": (depths, (num_nodes,), torch.int64),
        "preference": (preference, (num_nodes,), torch.int64),
    }
    for name, (x, shape, dtype) in wanted.items():
        if x.shape != shape or x.dtype != dtype or not x.is_contiguous() or x.device != tokens.device:
            raise ValueError(
                f"{name} must be contiguous {list(shape)} of {dtype} on {tokens.device}, got {list(x.shape)} of "
                f"{x.dtype} on {x.device} with strides {x.stride()}"
            )


def top_ranks(x: torch.Tensor, num: int) -> torch.Tensor:
    """The columns of each row's largest values, the largest first, of equals the lowest column; int64 `[rows, num]`.

    NaN counts as larger than all numbers.

    Args:
        x: `[rows, columns]`, bf16, fp16 or fp32; the last stride 1.
        num: 1 to 16, and no more than the columns.

    Raises:
        ValueError: for other shapes, strides, dtypes or numbers.
    """
    check_ranks(x, num)
    return x.sort(dim=-1, descending=True, stable=True).indices[:, :num].contiguous()


def check_ranks(x: torch.Tensor, num: int) -> None:
    """Refuses what `top_ranks` does not take."""
    if x.dim() != 2 or x.stride(1) != 1:
        raise ValueError(f"x must be [rows, columns] with a last stride of 1, got {list(x.shape)}, {x.stride()}")
    if x.dtype not in (torch.bfloat16, torch.float16, torch.float32):
        raise ValueError(f"x must be bf16, fp16 or fp32, got {x.dtype}")
    if not 1 <= num <= min(MAX_RANKS, x.shape[1]):
        raise ValueError(f"num must be 1 to {min(MAX_RANKS, x.shape[1])} of {x.shape[1]} columns, got {num}")


def repeat_text(
    text: torch.Tensor,
    outcome: torch.Tensor,
    lengths: torch.Tensor,
    num_tokens: int,
    min_match: int = 1,
    out: Sequence[torch.Tensor] = (),
) -> torch.Tensor:
    """Appends new tokens to texts, and finds what followed the last time that they ended as they do now.

    That is what followed the longest piece that is also the text's end, of up to `MAX_MATCH` tokens, the most recent
    one of several; going round where it runs into the end.

    Args:
        text: int32 `[B, room]`, each row from its first token on; written to. What is beyond a text is not read.
        outcome: int64 `[B, D + 2]`, as of `Verdict`: the new tokens, one more than the last column says.
        lengths: int64 `[B]`: tokens of each row, all but the last of the new ones. A row that has no room for them
            finds nothing.
        num_tokens: wanted, 1 to 63.
        min_match: tokens that a repeated piece has at least, 1 to `MAX_MATCH`.
        out: up to two tensors to leave the result in: all of it, the last stride 1, and as many of its first columns
            as the second has, at most `num_tokens + 1`.

    Returns:
        int64 `[B, num_tokens + 2]`: the newest token; what followed, or the newest token again where nothing is found;
        in the last column, tokens of the piece, 0 where there is none.

    Raises:
        ValueError: for other shapes, dtypes or numbers, or a tensor that is not contiguous.
    """
    check_repeat(text, outcome, lengths, num_tokens, min_match, out)
    rows = []
    for newest, known in _append(text, outcome, lengths):
        match, place = _last_match(known)
        found = [newest] * num_tokens
        if match >= min_match:
            found = [known[place + i % (len(known) - place)] for i in range(num_tokens)]
        rows.append([newest, *found, match if match >= min_match else 0])
    result = torch.tensor(rows, dtype=torch.int64, device=text.device).view(len(text), num_tokens + 2)
    for x in out:
        x.copy_(result[:, : x.shape[1]])
    return out[0] if out else result


def lay_repeats(
    text: torch.Tensor,
    outcome: torch.Tensor,
    lengths: torch.Tensor,
    columns: torch.Tensor,
    min_match: int,
    drafts: Sequence[torch.Tensor],
) -> None:
    """Appends new tokens to texts, and lays over drafts what followed the last time, where `repeat_text` finds it.

    Args:
        text, outcome, lengths, min_match: as of `repeat_text`.
        columns: int64 `[D]`, 0 to 63 of them: where in a draft the tokens belong that followed, from the first on.
        drafts: up to two of int64 `[B, nodes]`, the last stride 1. Columns that one has not are left out.

    Raises:
        ValueError: for other shapes, dtypes or numbers, or a tensor that is not contiguous.
    """
    check_lay(text, outcome, lengths, columns, min_match, drafts)
    places = columns.tolist()
    for row, (_, known) in enumerate(_append(text, outcome, lengths)):
        match, place = _last_match(known) if places and drafts else (0, 0)
        if match >= min_match:
            for i, column in enumerate(places):
                for draft in drafts:
                    if column < draft.shape[1]:
                        draft[row, column] = known[place + i % (len(known) - place)]


def _append(
    text: torch.Tensor, outcome: torch.Tensor, lengths: torch.Tensor
) -> Iterator[tuple[int, list[int]]]:
    """Writes each row's new tokens to its text; the newest one, and all of the text, which is empty without room."""
    for line, (*tokens, accepted), length in zip(text, outcome.tolist(), lengths.tolist(), strict=True):
        new, end = tokens[: accepted + 1], length + 1
        start = end - len(new)
        for place in range(max(start, 0), min(end, text.shape[1])):
            line[place] = new[place - start]
        yield new[-1], line[: max(end, 0)].tolist() if end <= text.shape[1] else []


def _last_match(tokens: list[int]) -> tuple[int, int]:
    """The longest piece of up to `MAX_MATCH` tokens that is also the end, and where the last of them ends."""
    best = (0, 0)
    for end in range(1, len(tokens)):
        length = 0
        while length < min(end, MAX_MATCH) and tokens[end - 1 - length] == tokens[-1 - length]:
            length += 1
        best = max(best, (length, end))
    return best


def check_repeat(
    text: torch.Tensor,
    outcome: torch.Tensor,
    lengths: torch.Tensor,
    num_tokens: int,
    min_match: int,
    out: Sequence[torch.Tensor],
) -> None:
    """Refuses what `repeat_text` does not take."""
    _check_texts(text, outcome, lengths, min_match)
    if not 1 <= num_tokens < MAX_NODES:
        raise ValueError(f"num_tokens must be 1 to {MAX_NODES - 1}, got {num_tokens}")
    rows = len(text)
    for i, x in enumerate(out):
        columns = range(1, num_tokens + 2) if i else (num_tokens + 2,)
        fits = i < 2 and x.dim() == 2 and len(x) == rows and x.shape[1] in columns and x.stride(1) == 1
        if not fits or x.dtype != torch.int64 or x.device != text.device or not (x.is_contiguous() or i == 0):
            raise ValueError(
                f"out must be one or two tensors of int64 on {text.device}: [{rows}, {num_tokens + 2}] with a last "
                f"stride of 1, and a contiguous one of {rows} rows and up to {num_tokens + 1} columns"
            )


def check_lay(
    text: torch.Tensor,
    outcome: torch.Tensor,
    lengths: torch.Tensor,
    columns: torch.Tensor,
    min_match: int,
    drafts: Sequence[torch.Tensor],
) -> None:
    """Refuses what `lay_repeats` does not take."""
    _check_texts(text, outcome, lengths, min_match)
    is_list = columns.dim() == 1 and len(columns) < MAX_NODES and columns.is_contiguous()
    if not is_list or columns.dtype != torch.int64 or columns.device != text.device:
        raise ValueError(f"columns must be contiguous, int64 [0 to {MAX_NODES - 1}], on {text.device}")
    fit = (x.dim() == 2 and len(x) == len(text) and x.stride(1) == 1 and x.device == text.device for x in drafts)
    if len(drafts) > 2 or not all(fit) or any(x.dtype != torch.int64 for x in drafts):
        raise ValueError(
            f"drafts must be up to two, int64 [{len(text)}, nodes], with a last stride of 1, on {text.device}"
        )


def _check_texts(text: torch.Tensor, outcome: torch.Tensor, lengths: torch.Tensor, min_match: int) -> None:
    rows = len(text) if text.dim() else 0
    for name, x, dims, dtype in (
        ("text", text, 2, torch.int32), ("outcome", outcome, 2, torch.int64), ("lengths", lengths, 1, torch.int64),
    ):  # fmt: skip
        if x.dim() != dims or len(x) != rows or x.dtype != dtype or not x.is_contiguous() or x.device != text.device:
            raise ValueError(
                f"{name} must be contiguous, {dtype}, on {text.device}, with {dims} dimensions and {rows} rows, got "
                f"{list(x.shape)} of {x.dtype} on {x.device} with strides {x.stride()}"
            )
    if not 2 <= outcome.shape[1] <= MAX_NODES + 1:
        raise ValueError(f"outcome must have 2 to {MAX_NODES + 1} columns, got {outcome.shape[1]}")
    if not 1 <= min_match <= MAX_MATCH:
        raise ValueError(f"min_match must be 1 to {MAX_MATCH}, got {min_match}")
