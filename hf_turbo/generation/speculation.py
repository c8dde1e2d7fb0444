"""The loop for drafted text: a drafter proposes, one forward verifies, what the model agrees with is kept.

The text is the model's own: every token is what the model chooses after the tokens before it, or a draw from its
probabilities. Rows of a batch keep different numbers of tokens; those that have ended are computed no more.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Any

import torch
from transformers import LogitsProcessorList, StoppingCriteriaList
from transformers.generation import GenerateDecoderOnlyOutput

from ..cache.forward_plan import DraftsUnsuited
from ..cache.paged_cache import PagedCache
from ..cache.token_tree import MAX_NODES, TokenTree
from ..compat import CACHE_NAME
from ..modeling.head_input import HeadInput
from .ahead_rounds import AheadRounds
from .device_texts import DeviceTexts
from .drafts import Draft, DraftContext, Drafter
from .known import ProcessorKinds, criteria_are_known
from .lookup_ahead import LookupAhead
from .loop import can_sample, runs_ahead
from .pace import Pace
from .prefix import keep_text
from .readback import Letter
from .rows import Rows
from .stopping import StopRules
from .tree_steps import TreeSteps

_ROOT = TokenTree.chain(0)


class ModelUnsuited(DraftsUnsuited):
    """Drafts can't be verified with this model, with any call that has the same kinds of arguments."""


def why_not_speculate(
    model: Any,
    input_ids: torch.Tensor,
    processors: LogitsProcessorList,
    criteria: StoppingCriteriaList,
    generation_config: Any,
    synced_gpus: bool,
    model_kwargs: dict[str, Any],
) -> str | None:
    """Why `speculate` can't give what Transformers' own loop would; None if it can. Arguments as of `_sample`."""
    if not can_sample(model, input_ids, criteria, generation_config, synced_gpus, model_kwargs):
        return "this call's steps are the model's own"
    kinds, rules = ProcessorKinds.of(processors), StopRules(criteria, input_ids.device)
    if len(input_ids) == 1:
        if not kinds.known and rules.reads_sequences:
            return "whether a token is the last must be known before a logits processor is asked for another"
        return None
    if not kinds.by_row:
        return "a logits processor must see all rows of the batch at once"
    if not criteria_are_known(criteria):
        return "a stopping criterion must see all rows of the batch at once"
    if rules.reads_sequences and not rules.pads:
        return "without an eos token, rows that have ended go on until all have"
    return None


def speculate(
    model: Any,
    input_ids: torch.Tensor,
    processors: LogitsProcessorList,
    criteria: StoppingCriteriaList,
    generation_config: Any,
    streamer: Any,
    model_kwargs: dict[str, Any],
    drafter: Drafter,
    pace: Pace,
) -> GenerateDecoderOnlyOutput | torch.Tensor:
    """Greedy or sampled text, where nothing speaks against it (`why_not_speculate`). Results as of `_sample`.

    Args:
        drafter: what proposes.
        pace: how much of it is asked for.

    Raises:
        DraftsUnsuited: drafts can't be verified with this model or call. The prompt is in the cache, no token has been
            chosen, no random number drawn.
    """
    cache: PagedCache = model_kwargs[CACHE_NAME]
    keeps_cache = generation_config.return_dict_in_generate or cache.is_given
    rows = Rows(input_ids, processors, criteria, generation_config, streamer, keeps_cache)
    watch = cache.head_input = HeadInput() if drafter.reads_hidden else None
    try:
        outputs = model._prefill(input_ids, generation_config, model_kwargs, is_first_iteration=True)
        model_kwargs = model._update_model_kwargs_for_generation(outputs, model_kwargs, is_encoder_decoder=False)
        first = outputs.logits[:, -1:]
        del outputs  # the logits of a prompt may be large
        with model._optimize_model_for_decode():
            column = input_ids.new_zeros(len(input_ids), 1)
            steps = TreeSteps(model, model_kwargs, column, rows.max_new, rows.is_alone)
            _probe(model, steps, drafter)
            rounds = _Rounds(model, rows, steps, drafter, pace, model_kwargs.get("attention_mask"), watch)
            return rounds.run(first)
    finally:
        cache.head_input = None


def _probe(model: Any, steps: TreeSteps, drafter: Drafter) -> None:
    """Sees once whether drafts can be verified with this model, while nothing of the text has been said."""
    handle, num_rows = model._hf_turbo, len(steps.lengths)
    if handle.drafts_work:
        return
    tree = drafter.tree_of(drafter.sizes[0])
    watch = steps.cache.head_input
    hidden = None if watch is None else watch.value
    try:
        steps.forward(tree, torch.zeros(num_rows, tree.num_nodes, dtype=torch.int64, device=model.device))
    except DraftsUnsuited as error:
        raise ModelUnsuited(str(error)) from error
    finally:
        if watch is not None:
            watch.value = hidden
        steps.keep([0] * num_rows)
    handle.drafts_work = True


class _Rounds:
    """A draft, a forward, a look at what has been accepted; and again.

    Args:
        mask: as the prompt's forward has left it: of the prompt and the token that comes.
    """

    def __init__(
        self,
        model: Any,
        rows: Rows,
        steps: TreeSteps,
        drafter: Drafter,
        pace: Pace,
        mask: torch.Tensor | None,
        watch: HeadInput | None,
    ) -> None:
        self._rows, self._steps, self._pace = rows, steps, pace
        samples = bool(rows.config.do_sample)
        mask = None if mask is None else mask[:, :-1]
        captures = model._hf_turbo.config.cuda_graphs
        self._goes_ahead = rows.is_plain and captures and runs_ahead(rows.prompt.device)
        context = DraftContext(
            model, rows.texts, mask, samples, rows.draws, watch, rows.max_new, pace, steps.lengths, self._goes_ahead
        )
        self._drafter, self._session = drafter, drafter.begin(context)
        #: When the last outcome was known: all time since is what the next one took. None: it began before that.
        self._since: float | None = None

    def run(self, first: torch.Tensor) -> GenerateDecoderOnlyOutput | torch.Tensor:
        """All of them, after the prompt's last logits `[rows, 1, vocabulary]`."""
        rows = self._rows
        try:
            self._pace.new_text()
            ahead = self._take_first(first)
            if ahead is None:
                self._since = time.perf_counter()
            else:
                self._go_on_ahead(ahead)
            while not all(rows.done):
                self._drop_done()
                size = 0 if self._session.is_stale else self._pace.choose()
                draft = self._session.propose(size, rows.texts) if size else None
                # A session that has missed what was accepted learns from a round of which the host sees all.
                if not (self._goes_ahead and not self._session.is_stale and self._run_ahead(draft)):
                    self._run_one(draft)
            self._keep_texts(range(len(rows.done)))
            if rows.keeps_cache:
                self._even_out()
        finally:
            self._session.close()
            self._steps.close()
        return rows.result(self._steps.cache)

    def _take_first(self, first: torch.Tensor) -> AheadRounds | None:
        """Takes each row's first token; a plain step may be under way behind the prompt then, which is returned."""
        rows = self._rows
        no_token = rows.prompt.new_zeros(len(rows.prompt), 1)  # a prompt of embeddings has no last one
        accepted = rows.choice(Draft(_ROOT, no_token, 0), first)
        if not self._goes_ahead or rows.max_new == 1:
            rows.take(accepted)
            return None
        letter = Letter().send(rows.numbers_of(accepted))
        guesses = self._session.begin_ahead(accepted.tokens[:, 0])
        ahead = None if guesses is None else AheadRounds(self._steps, guesses)
        # What follows that step makes the first draft: the host would wait for the token, and the device for the host.
        root = Draft(_ROOT, accepted.tokens, 0)
        is_under_way = ahead is not None and ahead.launch(root, drafts=self._pace.choose() > 0)
        [numbers] = letter.open()
        if numbers is None:
            raise RuntimeError("the first tokens came home without their numbers")
        rows.take_written(numbers.tolist())
        return ahead if is_under_way else None

    def _run_one(self, draft: Draft | None) -> None:
        """One round, from a draft to its outcome."""
        rows = self._rows
        draft = draft or self._root()
        tree = draft.tree
        logits = self._steps.forward(tree, draft.tokens)
        accepted = rows.choice(draft, logits)
        self._session.learn(accepted, tree.num_nodes)
        if not tree.is_chain:
            self._steps.cache.move_accepted(accepted.path, accepted.counts + 1)
        num_open = rows.done.count(False)
        added, num_accepted = rows.take(accepted)
        self._steps.keep(added)
        self._note(tree, draft.num_drafted, num_accepted, num_open)

    def _run_ahead(self, draft: Draft | None) -> bool:
        """Rounds with the host one behind, until something must be changed; False: not even the first could be."""
        guesses = self._session.begin_ahead()
        ahead = AheadRounds(self._steps, guesses)
        if not ahead.launch(draft or self._root(), drafts=draft is not None or isinstance(guesses, DeviceTexts)):
            return False
        self._go_on_ahead(ahead)
        return True

    def _go_on_ahead(self, ahead: AheadRounds) -> None:
        """One round after another behind the one under way."""
        while ahead.num_under_way:
            while self._launch_next(ahead):
                pass
            self._receive(ahead)
        self._steps.keep([0] * len(self._rows.done))
        self._session.miss()

    def _launch_next(self, ahead: AheadRounds) -> bool:
        """Begins one more round; False: not now."""
        num_under_way, session = ahead.num_under_way, self._session
        if num_under_way == 2 or self._must_drop() or ahead.is_closing or self._are_enough(num_under_way):
            return False
        if session.is_stale:
            return False
        size = self._pace.choose()
        if isinstance(session, LookupAhead):
            return ahead.launch_guess(self._drafter.tree_of(session.choose(size)))
        if size:
            return ahead.has_guesses and ahead.launch_guess(self._drafter.tree_of(size))
        return (ahead.has_guesses or ahead.only_plain_under_way) and ahead.launch_root()

    def _receive(self, ahead: AheadRounds) -> None:
        """Takes in the oldest round's outcome."""
        outcome, one = ahead.receive()
        session, num_open, num_drafted = self._session, self._rows.done.count(False), one.num_drafted
        added, num_accepted = self._rows.take_numbers(outcome.numbers)
        if not self._rows.keeps_cache:  # the device goes on with rows that have ended
            added = [accepted + 1 for *_, accepted in outcome.numbers]
        self._steps.note(added)
        if isinstance(session, LookupAhead):
            if num_drafted is None:
                num_drafted = one.tree.max_depth * session.num_found
            session.hear(outcome.following, self._rows.done)
        self._note(one.tree, num_drafted or 0, num_accepted, num_open)

    def _are_enough(self, num_under_way: int) -> bool:
        """Whether the rounds under way bring all rows to their limit."""
        limit, rows = self._rows.stops.max_length, self._rows
        lengths = (length for length, done in zip(rows.texts.lengths, rows.done, strict=True) if not done)
        return limit is not None and min(lengths) + num_under_way >= limit

    def _must_drop(self) -> bool:
        """Whether rows that have ended must not be computed any more: to begin anew takes longer than a few of them."""
        num_done, num_rows = self._rows.done.count(True), len(self._rows.done)
        return num_done > 0 if self._rows.keeps_cache else 2 * num_done >= num_rows

    def _root(self) -> Draft:
        """No draft: a plain step."""
        return Draft(_ROOT, self._rows.texts.last.unsqueeze(1), 0)

    def _note(self, tree: TokenTree, num_drafted: int, num_accepted: int, num_open: int) -> None:
        """Tells the pace of a round whose outcome is known now."""
        size = tree.num_nodes - 1
        now = time.perf_counter()
        seconds, self._since = None if self._since is None else now - self._since, now
        drafted = min(num_drafted, size * num_open)  # rows that have ended don't count
        self._pace.note(size if num_open else 0, drafted, min(num_accepted, drafted), seconds, max(num_open, 1))

    def _drop_done(self) -> None:
        """Rows that have ended leave, unless somebody wants to see what is cached of them."""
        rows = [row for row, done in enumerate(self._rows.done) if not done]
        if not self._rows.keeps_cache and len(rows) < len(self._rows.done):
            self._keep_texts([row for row, done in enumerate(self._rows.done) if done])
            for part in (self._steps, self._session, self._rows):
                part.select(rows)

    def _keep_texts(self, rows: Iterable[int]) -> None:
        """Has the blocks of rows that have ended kept for texts that begin alike."""
        if self._steps.cache.prefix_domain is not None:
            for row in rows:
                keep_text(self._steps.cache, row, self._rows.texts.row(row)[0].tolist())

    def _even_out(self) -> None:
        """Brings the cache to what it is after as many plain steps: rows that ended earlier go on with padding."""
        new, padding = self._rows.new, self._rows.padding
        num_new = max(map(len, new))
        missing = [num_new - len(row) for row in new]
        rows = [[row[-1]] + [padding] * count for row, count in zip(new, missing, strict=True)]
        while any(missing):
            length = min(max(missing), MAX_NODES)
            tokens = [(row + [padding] * length)[:length] for row in rows]
            self._steps.forward(TokenTree.chain(length - 1), torch.tensor(tokens, device=self._rows.prompt.device))
            self._steps.keep([min(count, length) for count in missing])
            rows = [row[length:] for row in rows]
            missing = [max(count - length, 0) for count in missing]
