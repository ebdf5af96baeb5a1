"""Rows through a causal LM: per trained token its log probability and entropy, or the hidden state it was sampled from.

What actor, critic and reference share. Tokens that rows begin with alike are computed once (`training.packing`), of
their attention only what is seen where that pays (`training.layers`), and only the places whose distributions are
needed go through the head, by chunks where all their logits at once would be large. Whether a model allows
each is tried when a `Forward` is made, both ways on a few tokens; one that does not goes the plain way, with the same
results.
"""

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from itertools import chain
from typing import Any, Final, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from lightning_rl.rl.logits import rows_at, token_log_probs, top_log_probs
from lightning_rl.training.batch import TrainingSequence, micro_batches
from lightning_rl.training.layers import flex
from lightning_rl.training.layers.attention import TreeMask, pairs, seen_pairs
from lightning_rl.training.layers.output_layer import Around, OutputLayer, output_layer
from lightning_rl.training.model_traits import (
    apart,
    attention_window,
    evaluating,
    grouped_heads,
    output_embeddings,
    probe_rows,
    refusal_of,
    text_config,
    tolerance,
)
from lightning_rl.training.packing import Layout, Line, alone, cost, cut, lay_out, shared_lines, sizes, stacked
from lightning_rl.vision import ModelVision, PlacedFeatures, showing

GAIN: Final = 0.95  # rows are packed where that costs at most so much of the plain way: building a mask costs a little
_FAILURES: Final = (TypeError, ValueError, RuntimeError, LookupError, AttributeError)  # of a model asked too much
T = TypeVar("T")
_log = logging.getLogger(__name__)


class Sizes(NamedTuple):
    """Tokens of a micro-batch: in its rows; computed, without padding; computed, with padding."""

    rows: int
    distinct: int
    computed: int


class Outputs(NamedTuple):
    """What an update reads of the K trained tokens of a micro-batch, in its order.

    Float [K]: `log_probs` (nats, each at its temperature) and `entropies` of their distributions; [K, C] `candidates`,
    the log probabilities of other tokens in these, where they are asked for; [K, D] `hidden`, the states that they were
    sampled from, where these are.
    """

    log_probs: Tensor
    entropies: Tensor
    candidates: Tensor | None
    hidden: Tensor | None


@dataclass(frozen=True)
class _Plan:
    """A micro-batch before its arrays are made."""

    lines: list[Line]
    masked: bool
    sizes: Sizes
    cost: float
    segments: bool = False


class Forward:
    """The forward pass of `model` over training sequences.

    The model stays as it is, wrappers too; what is tried is tried in evaluation mode and without gradient.

    Args:
        model: a causal LM of transformers, or one wrapped by `peft`; for `hidden` a bare trunk (`AutoModel`) will do.
        pad_id: what fills rows up; never seen by a trained token.
        packed: tokens that rows begin with alike are computed once, where the model allows it and it saves time.
        autocast: the number format in which matrices are multiplied; None: that of the parameters.
        vision: how the model sees images, which rows are computed alone with; None: it reads text.

    Attributes:
        packed: whether the model allows it; `unpacked_because` says why not, or that it was not asked for.
        by_segments: whether attention over packed rows may leave out what is hidden; only where that is faster it does.
        by_flex: whether it does so by one kernel of a GPU (`layers.flex`), always, so that nothing of T x T is made.
        whole_logits_because: why logits are whole also where they are large; None: they are not (`output_layer`).
    """

    def __init__(
        self,
        model: nn.Module,
        pad_id: int,
        *,
        packed: bool = False,
        autocast: torch.dtype | None = None,
        vision: ModelVision | None = None,
    ) -> None:
        self.model: Any = model
        self._vision = vision
        self.device = next(model.parameters()).device
        self._pad_id = pad_id
        self._autocast = autocast
        self._dtype = next(model.parameters()).dtype if autocast is None else autocast
        self._config = text_config(model)
        self._attention = 1 / (6 * getattr(self._config, "hidden_size", 1024))  # 4 T D for 2 x 12 D^2 of other work
        self._longest = attention_window(self._config)
        self._head = output_embeddings(model)
        self.by_flex = flex.usable(self.device, self._dtype)
        by_groups = self.by_flex or self.device.type == "cpu"
        self._groups = grouped_heads(self._config) if by_groups else 1  # others repeat keys behind a mask
        self._narrow = False
        self.by_segments = False
        self._output_layer: OutputLayer | None = None
        self.whole_logits_because: str | None = None
        self.unpacked_because: str | None = None
        self._try(packed=packed)
        self.packed = self.unpacked_because is None

    def _try(self, *, packed: bool) -> None:
        """Find out what the model allows."""
        with evaluating(self.model), torch.no_grad():  # not inference mode: what it keeps must stay good for training
            if self._head is not None:
                self._narrow = self._head_is_narrowable()
            layer_or_reason = self._output_layer_or_reason()
            self.unpacked_because = self._refusal() if packed else "it was not asked for"
        if isinstance(layer_or_reason, str):
            self.whole_logits_because = layer_or_reason
        else:
            self._output_layer = layer_or_reason

    def micro_batches(
        self, sequences: Sequence[TrainingSequence], *, rows: int | None, tokens: int | None
    ) -> Iterator[list[TrainingSequence]]:
        """Parts of `sequences` that are computed at once: at most `rows` rows, or `tokens` computed tokens, padding
        included (None: no bound); a single row that is longer stands alone. Rows that share much stay together."""
        if not self.packed:
            return micro_batches(list(sequences), rows=rows, tokens=tokens)
        text = [s for s in sequences if not s.images]  # rows with images are not packed
        shown = micro_batches([s for s in sequences if s.images], rows=rows, tokens=tokens)
        return chain(self._of_text(text, rows, tokens), shown)

    def _of_text(
        self, sequences: Sequence[TrainingSequence], rows: int | None, tokens: int | None
    ) -> Iterator[list[TrainingSequence]]:
        """`micro_batches` of rows of text alone, packed where that costs less."""
        plain = list(micro_batches(list(sequences), rows=rows, tokens=tokens))
        if len(sequences) < 2:
            return iter(plain)
        ways = [list(self._packed_micro_batches(sequences, rows, tokens, weight)) for weight in self._weights()]
        return iter(min([plain, *ways], key=lambda parts: sum(self._plan(part).cost for part in parts)))

    def gathered(self, sequences: Sequence[TrainingSequence], by_id: Mapping[int, T]) -> list[T]:
        """What was found of the sequences of `micro_batches` (by their `id`), in the order of `sequences`."""
        return [by_id[id(sequence)] for sequence in sequences]

    def of_part(self, sequence: TrainingSequence, values: Mapping[int, Tensor]) -> Tensor:
        """Of the values [K] of sequences (by their `id`) those of the trained tokens of one of `micro_batches`."""
        return values[id(sequence)]

    def total(self, sums: Mapping[str, float]) -> dict[str, float]:
        """Sums over the sequences of `micro_batches`, as sums over all that it was given."""
        return dict(sums)

    def without_gradient(self) -> AbstractContextManager[Any]:
        """The mode for passes that nothing is learned from."""
        return torch.inference_mode()

    def sizes(self, micro: Sequence[TrainingSequence]) -> Sizes:
        """How many tokens the rows of `micro` have, and how many are computed."""
        return self._plan(micro).sizes

    def computed(self, micro: Sequence[TrainingSequence]) -> int:
        """Tokens that are computed for `micro`, padding included."""
        return self.sizes(micro).computed

    def log_probs(self, micro: Sequence[TrainingSequence], *, with_entropy: bool = False) -> tuple[Tensor, Tensor]:
        """Log probabilities (nats) of the K trained tokens, in the order of `micro`, [K], each at its temperature; and
        the entropies of their distributions [K], where asked for (else the log probabilities again)."""
        log_probs, entropies, _ = self._of_tokens(self._layout(micro), with_entropy=with_entropy)
        return log_probs, log_probs if entropies is None else entropies

    def outputs(
        self, micro: Sequence[TrainingSequence], *, candidates: Tensor | None = None, with_hidden: bool = False
    ) -> Outputs:
        """Log probabilities and entropies of the trained tokens, those of other tokens in the same distributions
        (`candidates`, int64 [K, C]), and the hidden states, in one pass."""
        layout = self._layout(micro)
        states: list[Tensor] | None = [] if with_hidden else None
        of_tokens = self._of_tokens(layout, with_entropy=True, candidates=candidates, hidden_states=states)
        log_probs, entropies, of_candidates = of_tokens
        assert entropies is not None
        hidden = None if states is None else rows_at(states[0], self._tensor(layout.which))
        return Outputs(log_probs, entropies, of_candidates, hidden)

    def top_log_probs(
        self, micro: Sequence[TrainingSequence], top: int, vocabulary: int | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Log probabilities [K] of the trained tokens, and of each distribution its `top` most likely tokens among the
        first `vocabulary` (None: all), int64 [K, top], with their log probabilities [K, top]; without gradient."""
        layout = self._layout(micro)
        if (layer := self._layer_by_chunks(layout)) is not None:
            targets, temperature = self._tensor(layout.targets), self._tensor(layout.temperature)
            return layer.top_log_probs(self._around(layout), targets, temperature, top, vocabulary)
        return top_log_probs(*self._arguments_of(layout, self._logits(layout)), top, vocabulary=vocabulary)

    def _of_tokens(
        self,
        layout: Layout,
        *,
        with_entropy: bool,
        candidates: Tensor | None = None,
        hidden_states: list[Tensor] | None = None,
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """As `token_log_probs`, of the K trained tokens; those states at `layout.at` [U, D] go into `hidden_states`."""
        if (layer := self._layer_by_chunks(layout)) is not None:
            targets, temperature = self._tensor(layout.targets), self._tensor(layout.temperature)
            around = self._around(layout, hidden_states)
            return layer.token_log_probs(around, targets, temperature, with_entropy=with_entropy, candidates=candidates)
        arguments = self._arguments_of(layout, self._logits(layout, hidden_states))
        return token_log_probs(*arguments, with_entropy=with_entropy, candidates=candidates)

    def _layer_by_chunks(self, layout: Layout) -> OutputLayer | None:
        """The output layer, where it is worth running by chunks: all logits at once would be more than one chunk."""
        layer = self._output_layer
        return layer if layer is not None and layer.is_large(len(layout.at)) else None

    def _around(self, layout: Layout, hidden_states: list[Tensor] | None = None) -> Around:
        """The forward pass over a layout, and what of the output layer's input is of the K trained tokens."""

        def states(inputs: Tensor) -> Tensor:
            at = inputs.flatten(0, 1)[self._tensor(layout.at)]
            if hidden_states is not None:
                hidden_states.append(at)
            return rows_at(at, self._tensor(layout.which))

        return Around(lambda: self._run(layout).logits, states)

    def _arguments_of(self, layout: Layout, logits: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """What `rl.logits` is asked: the logits, and of the K trained tokens their rows in them, ids, temperatures."""
        return logits, self._tensor(layout.which), self._tensor(layout.targets), self._tensor(layout.temperature)

    def hidden(self, micro: Sequence[TrainingSequence]) -> Tensor:
        """The last hidden states from which the K trained tokens were sampled (those of the tokens before them), in
        the order of `micro`, [K, D]."""
        return self._states(self._layout(micro))

    def _plan(self, micro: Sequence[TrainingSequence]) -> _Plan:
        """The rows as they are, or packed where that costs less."""
        length = max(map(len, micro))
        tokens = sum(map(len, micro))
        plain = _Plan(
            alone(micro),
            False,
            Sizes(tokens, tokens, len(micro) * length),
            cost(len(micro), length, self._attention / 2),  # causal attention is half of the square
        )
        # Equal tokens may stand for other images, and positions then hang on more than the depth.
        if not self.packed or any(s.images for s in micro) or (self._longest is not None and length > self._longest):
            return plain
        lines = [shared_lines(micro, weight) for weight in self._weights()]
        ways = [self._packed(micro, tokens, own) for own in lines if own is lines[0] or own != lines[0]]
        best = min(ways, key=lambda plan: plan.cost)
        return best if best.cost < GAIN * plain.cost else plain

    def _packed(self, micro: Sequence[TrainingSequence], tokens: int, lines: list[Line]) -> _Plan:
        """The rows in `lines`, by mask or by segments, whichever costs less."""
        width, longest = len(stacked(lines)), max(line.tokens for line in lines)
        counts = Sizes(tokens, sum(line.tokens for line in lines), width * longest)
        masked = cost(width, longest, self._attention)
        if not self.by_segments:
            return _Plan(lines, True, counts, masked)
        parts = [size for line in lines for size in sizes(micro, line)]
        if self.by_flex:
            return _Plan(lines, True, counts, counts.computed + self._attention * seen_pairs(parts), True)
        visible_pairs = pairs(parts, self.device.type)
        by_segments = counts.computed + self._attention * visible_pairs
        return _Plan(lines, True, counts, min(masked, by_segments), by_segments < masked)

    def _weights(self) -> tuple[float, ...]:
        """What attention to a whole line is thought to cost when rows are put in lines: by segments also nothing."""
        return (self._attention, 0.0) if self.by_segments else (self._attention,)

    def _packed_micro_batches(
        self, sequences: Sequence[TrainingSequence], rows: int | None, tokens: int | None, weight: float
    ) -> Iterator[list[TrainingSequence]]:
        def fits(part: list[int]) -> bool:
            return tokens is None or self.computed([sequences[n] for n in part]) <= tokens

        lines = shared_lines(sequences, weight, max_rows=rows, max_tokens=tokens)
        for part in cut(lines, rows=rows, tokens=tokens, fits=fits):
            chosen = [sequences[n] for n in part]
            yield from [chosen] if fits(part) else micro_batches(chosen, rows=rows, tokens=tokens)

    def _layout(self, micro: Sequence[TrainingSequence]) -> Layout:
        plan = self._plan(micro)
        return lay_out(micro, plan.lines, self._pad_id, masked=plan.masked, segments=plan.segments)

    def _logits(self, layout: Layout, hidden_states: list[Tensor] | None = None) -> Tensor:
        """Logits [U, V] at `layout.at`; those states there [U, D] go into `hidden_states`, where it is given."""
        at = self._tensor(layout.at)

        def narrowed(states: Tensor) -> Tensor:
            chosen = states.flatten(0, 1)[None, at]
            if hidden_states is not None:
                hidden_states.append(chosen[0])
            return chosen

        if not self._narrow:
            options: dict[str, Any] = {} if hidden_states is None else {"output_hidden_states": True}
            whole = self._run(layout, **options)
            if hidden_states is not None:
                hidden_states.append(whole.hidden_states[-1].flatten(0, 1)[at])
            logits: Tensor = whole.logits
            return logits.flatten(0, 1)[at]
        with self._head_sees(narrowed):
            few: Tensor = self._run(layout).logits
        return few[0]

    def _states(self, layout: Layout, inputs: dict[str, Any] | None = None) -> Tensor:
        """Of the K trained tokens, in their order, the hidden states [K, D] before them."""
        if self._narrow:
            states = self._before_head(layout, inputs)
        elif self._head is not None:
            states = self._run(layout, inputs, output_hidden_states=True).hidden_states[-1]
        else:
            states = self._run(layout, inputs).last_hidden_state
        return rows_at(states.flatten(0, 1), self._tensor(layout.at[layout.which]))

    def _before_head(self, layout: Layout, inputs: dict[str, Any] | None) -> Tensor:
        """What the head is given [B, T, D]; it computes one place, since its own result is not needed."""
        head_inputs: list[Tensor] = []

        def keep(states: Tensor) -> Tensor:
            head_inputs.append(states)
            return states[:1, :1]

        with self._head_sees(keep):
            self._run(layout, inputs)
        return head_inputs[0]

    def _run(self, layout: Layout, inputs: dict[str, Any] | None = None, **options: Any) -> Any:
        """The model's output for a layout, whose `inputs` are made where they are not given. No pass goes another way:
        here it sees the rows' images."""
        inputs = self._inputs(layout) if inputs is None else inputs
        shown = list[PlacedFeatures]()
        if any(layout.images):  # each row alone, its first token in the first column
            assert not layout.masked
            positions, shown = self._vision_of(layout).rows(layout.token_ids.shape[1], layout.images)
            inputs["position_ids"] = positions.to(self.device)
        with self._precision(), self._showing(shown):
            return self.model(**inputs, **options)

    def _inputs(self, layout: Layout) -> dict[str, Any]:
        inputs = {"input_ids": self._tensor(layout.token_ids), "use_cache": False}
        if layout.masked:
            inputs["position_ids"] = self._tensor(layout.position_ids)
            inputs["attention_mask"] = self._mask(layout)
        return inputs

    def _showing(self, shown: list[PlacedFeatures]) -> AbstractContextManager[Any]:
        """Inside, the model sees these features; there may be none."""
        return showing(self.model, shown) if shown else nullcontext()

    def _vision_of(self, layout: Layout) -> ModelVision:
        if self._vision is None:
            raise ValueError(
                f"{sum(map(bool, layout.images))} rows show images, and nothing is known of how this model sees them "
                "(`Forward(vision=...)`)"
            )
        return self._vision

    def _mask(self, layout: Layout) -> Tensor:
        end = self._tensor(layout.end)
        if not layout.segments:
            return additive_mask(end, self._dtype)
        return TreeMask(
            layout.end.shape,
            layout.segments,
            self._dtype,
            self.device,
            lambda: additive_mask(end, self._dtype),
            groups=self._groups,
            blocks=flex.block_mask(layout.end, self.device) if self.by_flex else None,
        )

    @contextmanager
    def _head_sees(self, chosen: Callable[[Tensor], Tensor]) -> Iterator[None]:
        """The head gets `chosen` of its input; all that the model does before and after stays the model's own."""
        assert self._head is not None
        handle = self._head.register_forward_pre_hook(lambda _, args: (chosen(args[0]), *args[1:]))
        try:
            yield
        finally:
            handle.remove()

    def _head_is_narrowable(self) -> bool:
        """Whether the head, given some places alone, gives the logits of these places."""
        rows = probe_rows(self._config)
        layout = lay_out(rows, alone(rows), self._pad_id, masked=False)
        whole = self._logits(layout)
        self._narrow = True
        try:
            narrow = self._logits(layout)
        except _FAILURES:
            return False
        finally:
            self._narrow = False
        return narrow.shape == whole.shape and apart(narrow, whole) <= tolerance(self._dtype) * apart(whole)

    def _output_layer_or_reason(self) -> OutputLayer | str | None:
        """The output layer, or why logits must be whole; None where the model has none."""
        if self._head is None:
            return None
        if not self._narrow:
            return "its output layer needs all places"
        rows = probe_rows(self._config)
        layout = lay_out(rows, alone(rows), self._pad_id, masked=False)
        return output_layer(self.model, self._head, self._config, lambda: self._logits(layout), self._autocast)

    def _refusal(self) -> str | None:
        """Why the model cannot compute packed rows; None: it can.

        Compared are hidden states, both ways. How large an error would be is measured too: by what happens to them
        when rows see each other.
        """
        rows = probe_rows(self._config)
        reason = refusal_of(self._config)
        if reason is not None:
            return reason
        if self._longest is not None and self._longest < max(map(len, rows)):
            return f"its attention reaches back {self._longest} tokens only"
        lines = shared_lines(rows, attention=0)
        right = self._states(lay_out(rows, alone(rows), self._pad_id, masked=False))
        try:
            packed_states = self._states(lay_out(rows, lines, self._pad_id, masked=True))
        except _FAILURES as error:
            return f"it takes no mask and positions of ours: {type(error).__name__}: {str(error)[:200]}"
        wrong = self._states(lay_out(rows, lines, self._pad_id, masked=False))
        most = tolerance(self._dtype) * apart(wrong, right)
        if apart(packed_states, right) > most:
            return "packed rows gave other hidden states than rows alone"
        cut = lay_out(rows, lines, self._pad_id, masked=True, segments=True)
        self.by_segments = self._allows_segments(cut, right, most)
        if self.by_flex and not self.by_segments:
            _log.warning("flex_attention gives no right results for this model here: attention goes by segments")
            self.by_flex = False
            self.by_segments = self._allows_segments(cut, right, most)
        return None

    def _allows_segments(self, layout: Layout, right: Tensor, most: float) -> bool:
        """Whether the model leaves attention to a mask that knows its tree, and the states are `right`."""
        inputs = self._inputs(layout)
        try:
            states = self._states(layout, inputs)
        except _FAILURES:
            return False
        return inputs["attention_mask"].used > 0 and apart(states, right) <= most

    def _tensor(self, values: np.ndarray[Any, Any]) -> Tensor:
        return torch.from_numpy(values).to(self.device, non_blocking=True)

    def _precision(self) -> AbstractContextManager[Any]:
        return torch.autocast(self.device.type, self._autocast) if self._autocast is not None else nullcontext()


def additive_mask(end: Tensor, dtype: torch.dtype) -> Tensor:
    """What is added to attention scores [B, 1, T, T]: 0 where token i may attend to token j, else the least number.

    `end` int64 [B, T]: i sees j exactly where j <= i < end[j].
    """
    place = torch.arange(end.shape[-1], device=end.device)
    hidden = (place[:, None] < place) | (place[:, None] >= end[:, None, None, :])
    return torch.zeros(hidden.shape, dtype=dtype, device=end.device).masked_fill_(hidden, torch.finfo(dtype).min)
