"""Prompt lookup: the longest end of a text that was there before, most recently, and what followed it then.

A text's suffix automaton (Blumer et al., 1985) has a state for each set of strings that end at the same places. A
state's suffix link leads to shorter ends of its strings, so these links form a tree, and the ends of the text are the
states from the text's own state up to the root. The parent of the text's own state holds the longest end that has been
there before.

When a token comes, the text ends anew with the strings of all the states on that way up, which may be as many as there
are tokens. They are not visited one by one: states that were on one way up, and on none since, are one *stretch*, known
by where the text ended then. A stretch only ever loses states from its upper end, so it is described by the one state
just above it, and a new token takes over the upper part of every stretch that it meets. That is `access` of link-cut
trees (Sleator and Tarjan, 1983), by which a way meets O(log n) stretches, amortised.
"""

from __future__ import annotations

from collections.abc import Iterable


class SuffixIndex:
    """The text of one row, to which tokens are appended one after another.

    Appending costs O(log n) amortised, `match` and `propose` no more than their results and the stretches that the last
    token met. Memory is linear: at most two states a token and three transitions.

    Args:
        tokens: the beginning of the text.
    """

    def __init__(self, tokens: Iterable[int] = ()) -> None:
        self._tokens: list[int] = []
        # By state; 0 is the root, the empty string. Transitions, suffix link, length of the longest string.
        self._next: list[dict[int, int]] = [{}]
        self._link = [-1]
        self._length = [0]
        #: An end of the text at which the state's strings ended, not always the last.
        self._seen = [0]
        # By end of the text, in tokens: the state just above what is left of its stretch.
        self._above = [0]
        self._last = 0
        # The stretches above the text's own state as they were before the last token: (length of the longest string
        # that is too short for it, its end), from long to short.
        self._stretches: list[tuple[int, int]] = []
        self.extend(tokens)

    def __len__(self) -> int:
        return len(self._tokens)

    def append(self, token: int) -> None:
        """Adds the token that the text goes on with."""
        self._tokens.append(token)
        self._grow(token)
        self._take_over()

    def extend(self, tokens: Iterable[int]) -> None:
        """Adds tokens in their order."""
        for token in tokens:
            self.append(token)

    def match(self, max_length: int | None = None) -> tuple[int, int]:
        """The longest end of the text that has been there before, and where it was last.

        Args:
            max_length: look at no more than so many tokens of the end; None: at all.

        Returns:
            Its length and the number of tokens up to and with its last earlier occurrence, which may overlap the end:
            `tokens[position - length : position]`, followed by `tokens[position]`. `(0, 0)` where there is none.
        """
        longest = self._length[max(self._link[self._last], 0)]
        length = longest if max_length is None else min(longest, max_length)
        if length < 1:
            return 0, 0
        return length, next(end for too_short, end in self._stretches if length > too_short)

    def propose(self, num_tokens: int, min_match: int = 1) -> list[int]:
        """What followed the last time that the text ended like this, going round where that runs into the end.

        Args:
            num_tokens: how many tokens are wanted.
            min_match: the fewest tokens that must be alike.

        Returns:
            So many tokens; none where less than `min_match` is alike.
        """
        length, position = self.match()
        if length < max(min_match, 1):
            return []
        period = len(self._tokens) - position
        if num_tokens <= period:
            return self._tokens[position : position + num_tokens]
        return [self._tokens[position + i % period] for i in range(num_tokens)]

    def _grow(self, token: int) -> None:
        """The automaton of the text with one more token."""
        new, state = self._new_state({}, len(self._tokens), len(self._tokens)), self._last
        while state >= 0:
            target = self._next[state].setdefault(token, new)
            if target != new:
                if self._length[target] != self._length[state] + 1:
                    target = self._split(state, token, target)
                self._link[new] = target
                break
            state = self._link[state]
        self._last = new

    def _split(self, state: int, token: int, target: int) -> int:
        """A state for those strings of `target` that end with `state`'s: they now end where the others do not."""
        length = self._length[state] + 1
        split = self._new_state(self._next[target].copy(), length, self._seen[target])
        self._link[split] = self._link[target]
        self._link[target] = split
        while state >= 0 and self._next[state].get(token) == target:
            self._next[state][token] = split
            state = self._link[state]
        return split

    def _new_state(self, transitions: dict[int, int], length: int, seen: int) -> int:
        self._next.append(transitions)
        self._link.append(0)
        self._length.append(length)
        self._seen.append(seen)
        return len(self._link) - 1

    def _take_over(self) -> None:
        """Makes the way from the text's own state to the root one stretch, that of the new end."""
        above, length, end = self._above, self._length, len(self._tokens)
        above.append(0)
        stretches = []
        state = self._link[self._last]
        while state > 0:
            met = self._stretch_of(state)
            next_state = above[met]
            stretches.append((length[next_state], met))
            above[met] = state
            self._seen[state] = end
            state = next_state
        self._stretches = stretches

    def _stretch_of(self, state: int) -> int:
        """The last end of the text with a state's strings.

        Where the stretch in which it was seen has lost it, a later one has it: that of the state which took it over, or
        a yet later one. Each look shortens the way for the next.
        """
        above, seen, length = self._above, self._seen, self._length
        end = seen[state]
        while length[state] <= length[above[end]]:
            taker = above[end]
            later = above[seen[taker]]
            if length[taker] <= length[later]:
                seen[taker] = seen[later]
            end = seen[taker]
        seen[state] = end
        return end
