"""What `few` leaves to run by default."""

from itertools import combinations, product

from combinations import few


def test_each_value_and_each_pair():
    axes = [range(4), "abc", [True, False]]
    for together in (1, 2, 3):
        params = few(*axes, together=together)
        assert [param.values for param in params] == list(product(*axes))
        quick = [param.values for param in params if not param.marks]
        assert len(quick) == {1: 4, 2: 12, 3: 24}[together]
        for some in combinations(range(3), together):
            wanted = set(product(*(axes[i] for i in some)))
            assert {tuple(values[i] for i in some) for values in quick} == wanted
