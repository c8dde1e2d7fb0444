"""Token trees of any shape, for hypothesis."""

from hypothesis import strategies as st

from hf_turbo.cache.token_tree import TokenTree


@st.composite
def trees(draw, max_nodes=12):
    """A tree of up to four tokens ahead and four guesses for each, with gaps in the ranks, in any order."""
    paths = {()}
    for leaf in draw(st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=4), max_size=5)):
        for end in range(1, len(leaf) + 1):
            if len(paths) < max_nodes:
                paths.add(tuple(leaf[:end]))
    if draw(st.booleans()):
        return TokenTree.of_paths(paths)
    left, ordered = sorted(path for path in paths if path), []
    while left:
        # What may come next: after its beginning, and after its siblings of lower rank.
        ready = [p for p in left if p[:-1] not in left and not any(q[:-1] == p[:-1] and q < p for q in left)]
        ordered.append(draw(st.sampled_from(ready)))
        left.remove(ordered[-1])
    return TokenTree.of_paths(ordered, as_given=True)
