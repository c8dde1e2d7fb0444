"""A cache and an engine in plain Python, to see where a scheduler's plans lead.

Blocks hold the tokens that were computed into them, and the next token follows from what a sequence's blocks hold. So a
plan that loses, repeats or mixes up tokens changes the text.
"""

from collections import Counter

from hf_turbo.engine.request import Request, Sequence, Status

END = 0


class ToyMemory:
    """Blocks with owners; blocks without, whose tokens may be found again, are evicted when others are needed."""

    def __init__(self, capacity, block_size, keeps_prefixes=False):
        self.capacity, self.block_size, self.keeps_prefixes = capacity, block_size, keeps_prefixes
        self.free = set(range(capacity))
        self.contents: dict[int, list[int]] = {}
        self.owners: Counter[int] = Counter()
        self.index: dict[tuple, int] = {}
        self.held: dict[Sequence, list[int]] = {}
        self.num_finds = 0

    # What the scheduler asks for.

    @property
    def available(self):
        return len(self.free) + len(self.evictable())

    def cost(self, sequence, num_tokens):
        held = self.held.get(sequence, [])
        end = sequence.num_cached + num_tokens
        return max(-(-end // self.block_size) - len(held), 0) + (num_tokens > 0 and self.must_copy(sequence))

    def costs(self, sequences):
        return [self.cost(sequence, 1) for sequence in sequences]

    def can_ever_hold(self, num_tokens, num_sequences):
        return -(-num_tokens // self.block_size) * num_sequences <= self.capacity

    def is_being_computed(self, request):
        for sequence in self.held if self.keeps_prefixes else ():
            other, end = sequence.request, (sequence.num_cached // self.block_size + 1) * self.block_size
            if other.salt != request.salt:
                continue
            begins_alike = end < len(request.prompt) and other.prompt[:end] == request.prompt[:end]
            if sequence.num_missing > 1 and begins_alike and other.priority >= request.priority:
                return True
        return False

    def find(self, request):
        self.num_finds += 1
        for sequence in request.live:
            self.held[sequence] = []
            for end in range(self.block_size, len(sequence.tokens), self.block_size):
                block = self.index.get((request.salt, *sequence.tokens[:end]))
                if block is None:
                    break
                self.owners[block] += 1
                self.held[sequence].append(block)
            sequence.num_cached = len(self.held[sequence]) * self.block_size
        return sum(sequence.num_cached for sequence in request.live)

    def release(self, request):
        for sequence in request.sequences:
            self.leave(sequence)

    # What the engine does.

    def leave(self, sequence):
        for block in self.held.pop(sequence, []):
            self.drop(block)
        sequence.num_cached = 0

    def fork(self, request):
        for other in request.sequences[1:]:
            self.held[other] = list(self.held[request.sequences[0]])
            self.owners.update(self.held[other])

    def write(self, sequence, tokens):
        """Computes tokens of a sequence: they are in its blocks afterwards."""
        held = self.held[sequence]
        if self.must_copy(sequence):
            shared = held.pop()
            held.append(self.take(self.contents[shared]))
            self.drop(shared)
        for token in tokens:
            if sequence.num_cached == len(held) * self.block_size:
                held.append(self.take([]))
            self.contents[held[-1]].append(token)
            sequence.num_cached += 1
            if self.keeps_prefixes and sequence.num_cached % self.block_size == 0:
                self.index.setdefault((sequence.request.salt, *self.read(sequence)), held[-1])

    def read(self, sequence):
        return [token for block in self.held[sequence] for token in self.contents[block]]

    # Its books.

    def evictable(self):
        return [block for block in self.index.values() if not self.owners[block]]

    def must_copy(self, sequence):
        """Whether its last block has room and is another's, too, who is not going to be the one that copies it."""
        if sequence.num_cached % self.block_size == 0:
            return False
        block = self.held[sequence][-1]
        owners = [other for other, held in self.held.items() if block in held and not other.is_done]
        return self.owners[block] > 1 and max(owners, key=lambda other: other.index) is not sequence

    def take(self, tokens):
        if not self.free:
            block = min(self.evictable())
            self.index = {key: kept for key, kept in self.index.items() if kept != block}
            self.free.add(block)
        block = min(self.free)
        self.free.remove(block)
        self.owners[block], self.contents[block] = 1, list(tokens)
        return block

    def drop(self, block):
        self.owners[block] -= 1
        assert self.owners[block] >= 0
        if not self.owners[block] and block not in self.index.values():
            self.free.add(block)
            self.contents[block] = []

    def check(self):
        """Every block is free, or kept, or has as many owners as hold it."""
        held = Counter(block for blocks in self.held.values() for block in blocks)
        assert +self.owners == held
        kept = set(self.evictable())
        assert len(self.free) + len(kept) + len(held) == self.capacity
        assert not self.free & kept and not self.free & set(held)


def say(tokens, index, vocabulary):
    """The token after these in a request's sequence `index`: anything, but always the same. 0 ends the text."""
    number = 17 * index + 1
    for token in tokens:
        number = (number * 31 + token + 7) % 1_000_003
    return number // 7 % vocabulary


def said_alone(request, vocabulary, limit):
    """What each of a request's sequences says with nobody else there; of endless ones, the first `limit` tokens."""
    texts = []
    for index in range(request.num_sequences):
        new = []
        while len(new) < (request.max_new_tokens or limit) and (not new or new[-1] != END):
            new.append(say(request.prompt + new, index, vocabulary))
        texts.append(new)
    return texts


class PlanFollower:
    """Follows plans, and checks of each what must be true of every plan.

    Args:
        goes_ahead: tokens are read one step after they have been chosen.
        vocabulary: of how many tokens one ends the text; None: none ever does.
    """

    def __init__(self, memory, scheduler, max_tokens, max_rows, goes_ahead=False, vocabulary=None):
        self.memory, self.scheduler = memory, scheduler
        self.max_tokens, self.max_rows = max_tokens, max_rows
        self.goes_ahead, self.vocabulary = goes_ahead, vocabulary
        self.texts: dict[Sequence, list[int]] = {}  # with the tokens that the host has not read yet
        self.computed: dict[Request, int] = Counter()
        self.unread: list[tuple[Sequence, int]] = []
        self.log: list[tuple[str, Request]] = []  # of memory that was given up

    def step(self):
        try:
            plan = self.scheduler.plan()
        except RuntimeError:
            assert self.unread
            self.read(0)
            plan = self.scheduler.plan()
        self.log += [("preempted", request) for request in plan.preempted]
        self.log += [("ended", request) for request in plan.failed]
        self.check(plan)
        assert plan.shares or plan.failed or self.unread or not self.scheduler.has_work
        for share in plan.shares:
            sequence, first = share.sequence, share.sequence.num_cached
            text = self.texts.setdefault(sequence, list(sequence.tokens))
            self.memory.write(sequence, text[first : first + share.num_tokens])
            self.computed[sequence.request] += share.num_tokens
        num_chosen = self.choose({share.sequence.request: None for share in plan.shares})
        self.read(num_chosen if self.goes_ahead else 0)
        self.memory.check()
        return plan

    def choose(self, requests):
        chosen = []
        for request in requests:
            if any(sequence.num_missing for sequence in request.live):
                continue
            if len(request.sequences) < request.num_sequences:
                request.fork()
                self.memory.fork(request)
                for sequence in request.sequences[1:]:
                    self.texts[sequence] = list(self.texts[request.sequences[0]])
            for sequence in request.live:
                read = self.memory.read(sequence)
                token = 1 if self.vocabulary is None else say(read, sequence.index, self.vocabulary)
                self.texts[sequence].append(token)
                sequence.num_unknown += 1
                chosen.append((sequence, token))
        self.unread += chosen
        return len(chosen)

    def read(self, num_stay):
        while len(self.unread) > num_stay:
            sequence, token = self.unread.pop(0)
            request = sequence.request
            sequence.num_unknown -= 1
            if sequence.is_done or request.is_over:
                continue
            sequence.tokens.append(token)
            sequence.is_done = token == END or len(sequence.new_tokens) == request.max_new_tokens
            if sequence.is_done:
                self.log.append(("ended", request))
                self.memory.leave(sequence)
            if all(each.is_done for each in request.sequences):
                self.end(request, Status.FINISHED)

    def end(self, request, status):
        self.log.append(("ended", request))
        request.status = status
        self.scheduler.remove(request)

    def check(self, plan):
        assert sum(share.num_tokens for share in plan.shares) <= self.max_tokens
        assert sum(request.num_sequences for request in self.scheduler.running) <= self.max_rows
        cost = sum(self.memory.cost(share.sequence, share.num_tokens) for share in plan.shares)
        assert cost <= self.memory.available
        sequences = [share.sequence for share in plan.shares]
        assert len(set(sequences)) == len(sequences)
        for share in plan.shares:
            request, live = share.sequence.request, share.sequence.request.live
            assert request.status is Status.RUNNING and share.sequence in live
            assert 1 <= share.num_tokens <= share.sequence.num_missing
            if share.num_tokens == share.sequence.num_missing:  # its next token is chosen: all of them, or none
                assert all(sequence.num_missing == 1 and sequence in sequences for sequence in live) or len(live) == 1
