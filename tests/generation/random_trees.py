"""Token trees of any shape, for hypothesis."""

from hypothesis import strategies as st

from hf_turbo.cache.token_tree import TokenTree


@st.composite
def trees(draw, max_nodes=12):
    """A tree of up to four tokens ahead and four guesses for each, with gaps in the ranks."""
    paths = {()}
    for leaf in draw(st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=4), max_size=5)):
        for end in range(1, len(leaf) + 1):
            if len(paths) < max_nodes:
                paths.add(tuple(leaf[:end]))
    return TokenTree.of_paths(paths)
