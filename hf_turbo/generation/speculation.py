"""The loop for drafted text: a drafter proposes, one forward verifies, what the model agrees with is kept.

The text is the model's own: every token is what the model chooses after the tokens before it, or a draw from its
probabilities. Rows of a batch keep different numbers of tokens; those that have ended are computed no more.
"""

from __future__ import annotations

import time
from typing import Any

import torch
from transformers import LogitsProcessorList, StoppingCriteriaList
from transformers.generation import GenerateDecoderOnlyOutput

from ..cache.paged_cache import DraftsUnsuited, PagedCache
from ..cache.token_tree import MAX_NODES, TokenTree
from ..compat import CACHE_NAME
from ..modeling.head_input import HeadInput
from .acceptance import Accepted
from .drafts import Drafter, DraftContext, DraftSession
from .known import ProcessorKinds, criteria_are_known
from .loop import can_sample
from .node_choice import NodeChoice
from .pace import Pace
from .stopping import StopRules, TokenStops
from .texts import Texts
from .tree_steps import TreeSteps

_ROOT = TokenTree.chain(0)


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
    if len(input_ids) == 1:
        return None
    if not ProcessorKinds.of(processors).by_row:
        return "a logits processor must see all rows of the batch at once"
    if not criteria_are_known(criteria):
        return "a stopping criterion must see all rows of the batch at once"
    rules = StopRules(criteria, input_ids.device)
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
            chosen, no random number drawn; `model_kwargs` are as the prompt's forward left them.
    """
    cache: PagedCache = model_kwargs[CACHE_NAME]
    watch = cache.head_input = HeadInput(model) if drafter.reads_hidden else None
    keeps_cache = generation_config.return_dict_in_generate or cache.is_given
    rows = _Rows(model, input_ids, processors, criteria, generation_config, streamer, keeps_cache)
    try:
        outputs = model._prefill(input_ids, generation_config, model_kwargs, is_first_iteration=True)
        model_kwargs = model._update_model_kwargs_for_generation(outputs, model_kwargs, is_encoder_decoder=False)
        with model._optimize_model_for_decode():
            return rows.run(outputs.logits[:, -1:], model_kwargs, drafter, pace, watch)
    finally:
        cache.head_input = None


class _Rows:
    """The rows of one call, and the rounds that they go through.

    Args:
        input_ids: the prompt, int64 `[rows, columns]`.
    """

    def __init__(
        self,
        model: Any,
        input_ids: torch.Tensor,
        processors: LogitsProcessorList,
        criteria: StoppingCriteriaList,
        generation_config: Any,
        streamer: Any,
        keeps_cache: bool,
    ) -> None:
        kinds, device = ProcessorKinds.of(processors), input_ids.device
        self._model, self._config = model, generation_config
        self._streamer, self._keeps_cache = streamer, keeps_cache
        self._prompt = input_ids
        self._draws = kinds.by_row
        self._alone = kinds.known and criteria_are_known(criteria) and streamer is None
        self._texts = Texts(input_ids, processors)
        waits = device.type == "cpu" or not kinds.known
        self._choice = NodeChoice(self._texts, generation_config, bool(processors), device, waits)
        self._stops = TokenStops(criteria)
        self._reminder = StopRules(criteria, device)
        #: Which row of the call each row at work is, and the new tokens of all.
        self._origins = list(range(len(input_ids)))
        self._new: list[list[int]] = [[] for _ in self._origins]
        self._done = [False] * len(input_ids)
        self._num_streamed = 0

    def run(
        self,
        first: torch.Tensor,
        model_kwargs: dict[str, Any],
        drafter: Drafter,
        pace: Pace,
        watch: HeadInput | None,
    ) -> GenerateDecoderOnlyOutput | torch.Tensor:
        """The rounds, after the prompt's last logits `[rows, 1, vocabulary]`."""
        mask = model_kwargs.get("attention_mask")
        limit = self._stops.max_length
        samples = bool(self._config.do_sample)
        context = DraftContext(self._model, self._texts, mask, samples, self._draws, watch, limit)
        if mask is not None:  # it has grown by the token that comes
            context = DraftContext(self._model, self._texts, mask[:, :-1], samples, self._draws, watch, limit)
        steps = TreeSteps(self._model, model_kwargs, self._prompt.new_zeros(len(self._prompt), 1), limit, self._alone)
        self._probe(steps, watch)
        session = drafter.begin(context)
        try:
            self._take(self._choice(_ROOT, None, first.new_zeros(len(first), 1, dtype=torch.int64), first))
            pace.new_text()
            while not all(self._done):
                self._round(steps, session, pace)
            if self._keeps_cache:
                self._even_out(steps)
        finally:
            session.close()
            steps.close()
        if self._streamer is not None:
            self._streamer.end()
        return self._result(steps.cache)

    def _probe(self, steps: TreeSteps, watch: HeadInput | None) -> None:
        """Sees once whether drafts can be verified with this model, while nothing of the text has been said."""
        handle = self._model._hf_turbo
        if handle.drafts_work:
            return
        hidden = None if watch is None else watch.value
        try:
            steps.forward(TokenTree((-1, 0, 0)), self._prompt.new_zeros(len(self._prompt), 3))
        except DraftsUnsuited as error:
            handle.no_drafts = str(error)
            raise
        finally:
            steps.keep([0] * len(self._prompt))
        if watch is not None:
            watch.value = hidden
        handle.drafts_work = True

    def _round(self, steps: TreeSteps, session: DraftSession, pace: Pace) -> None:
        """One draft, or a plain step; one forward; one look at what has been accepted."""
        began = time.perf_counter()
        self._drop_done(steps, session)
        size = pace.choose()
        draft = session.propose(size, self._texts) if size else None
        tree = _ROOT if draft is None else draft.tree
        tokens = self._texts.last.unsqueeze(1) if draft is None else draft.tokens
        logits = steps.forward(tree, tokens)
        accepted = self._choice(tree, draft, tokens, logits)
        session.learn(accepted, tree.num_nodes)
        if not tree.is_chain:
            steps.cache.move_accepted(accepted.path, accepted.counts + 1)
        num_open = self._done.count(False)
        added, num_accepted = self._take(accepted)
        steps.keep(added)
        drafted = 0 if draft is None else min(draft.num_drafted, size * num_open)
        # Without a match a lookup has not cost anything: as good as a plain step.
        pace.note(size if drafted else 0, drafted, min(num_accepted, drafted), time.perf_counter() - began, num_open)

    def _take(self, accepted: Accepted) -> tuple[list[int], int]:
        """Reads what was accepted; the answer is how many tokens each row has got, and how many drafts were accepted.
        """
        numbers = torch.cat([accepted.tokens, accepted.counts.unsqueeze(1)], dim=1).tolist()
        new: list[list[int]] = []
        num_accepted = 0
        for row, (*tokens, count) in enumerate(numbers):
            if self._done[row]:
                new.append([])
                continue
            num_accepted += count
            length = self._texts.lengths[row]
            kept, self._done[row] = self._stops.cut(
                tokens[: count + 1],
                length,
                lambda end, row=row: self._texts.row(row, end),  # type: ignore[misc]
                lambda n, row=row: self._choice.scores_with(row, n),  # type: ignore[misc]
            )
            new.append(kept)
            self._new[self._origins[row]] += kept
            for end in range(length + 1, length + len(kept) + 1):
                self._reminder.remind(end)
        self._choice.take([len(tokens) for tokens in new])
        self._texts.append(new)
        self._stream()
        return list(map(len, new)), num_accepted

    def _drop_done(self, steps: TreeSteps, session: DraftSession) -> None:
        """Rows that have ended leave, unless somebody wants to see what is cached of them."""
        if self._keeps_cache or not any(self._done):
            return
        rows = [row for row, done in enumerate(self._done) if not done]
        for part in (steps, session, self._texts, self._choice):
            part.select(rows)
        self._origins = [self._origins[row] for row in rows]
        self._done = [False] * len(rows)

    def _even_out(self, steps: TreeSteps) -> None:
        """Brings the cache to what it is after as many plain steps: rows that ended earlier go on with padding."""
        num_new = max(map(len, self._new))
        missing = [num_new - len(new) for new in self._new]
        rows = [[new[-1]] + [self._padding] * count for new, count in zip(self._new, missing, strict=True)]
        while any(missing):
            length = min(max(missing), MAX_NODES)
            tokens = torch.tensor([(row + [-1] * length)[:length] for row in rows], device=self._prompt.device)
            steps.forward(TokenTree.chain(length - 1), tokens)
            steps.keep([min(count, length) for count in missing])
            rows = [row[length:] for row in rows]
            missing = [max(count - length, 0) for count in missing]

    def _stream(self) -> None:
        """Hands on the columns that are known of all rows, those of rows that have ended being padding."""
        if self._streamer is None:
            return
        ended = [True] * len(self._new)
        for row, done in zip(self._origins, self._done, strict=True):
            ended[row] = done
        open_rows = [len(new) for new, done in zip(self._new, ended, strict=True) if not done]
        known = min(open_rows) if open_rows else max(map(len, self._new))
        for column in range(self._num_streamed, known):
            tokens = [new[column] if column < len(new) else self._padding for new in self._new]
            self._streamer.put(torch.tensor(tokens))
        self._num_streamed = max(self._num_streamed, known)

    def _result(self, cache: PagedCache) -> GenerateDecoderOnlyOutput | torch.Tensor:
        num_new = max(map(len, self._new))
        rows = [new + [self._padding] * (num_new - len(new)) for new in self._new]
        new_tokens = torch.tensor(rows, dtype=self._prompt.dtype).to(self._prompt.device)
        sequences = torch.cat([self._prompt, new_tokens], dim=1)
        if not self._config.return_dict_in_generate:
            return sequences
        fields: dict[str, Any] = {
            "sequences": sequences,
            "scores": self._choice.kept("scores"),
            "logits": self._choice.kept("logits"),
            CACHE_NAME: cache,
        }
        return GenerateDecoderOnlyOutput(**fields)

    @property
    def _padding(self) -> int:
        padding = self._config._pad_token_tensor
        return 0 if padding is None else int(padding)
