"""Steps of decoding on an accelerator, some in a row without a look of the host, and captured where that can be.

Owns: the memory that a step reads and writes, and what was captured. Must not know: what a step computes.

A step of a small model is hundreds of kernels, and to launch them takes the host longer than the device to run them. A
captured step is launched as a whole, and reads and writes the same memory every time. So all that differs from step to
step lies in tensors of fixed shapes, a `Board`; rows that run together take the board of earlier ones with as many
rows and blocks, filled up to a few numbers of both.

A captured step is never trusted unseen: two steps are made as usual, and its replays of both must draw the same tokens.
Where capturing fails, or that does, steps go on as usual, and the log says why.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from rallypoint.generation.native.accelerator.backend import PagedRows, Pages
from rallypoint.generation.sampler import Draws, Rules, draw

Capture: TypeAlias = Callable[[Callable[[], None]], Callable[[], None]]
"""Has what a function launches recorded, and returns what launches it again."""

_LOG = logging.getLogger(__name__)

_MOST_ROWS = 256
"""Of a captured step: with more, the device takes longer than the host."""
_MOST_GRAPHS = 32
"""That are kept; each takes some MiB."""
_SIZES_PER_OCTAVE = 4
"""Numbers of rows from a power of two to the next: up to a fifth of them is filler."""
_LARGEST_GAP = 0.05
"""Between logprobs of a step and of its replay, in nats: half precision rounds, and another kernel may be chosen."""


class Board(NamedTuple):
    """What B rows are computed from, and what they draw, filler included; [steps, B] has a line for each step."""

    pages: Pages
    rules: Rules
    sources: Tensor
    """[B] int64: the row whose tokens a row takes: its own, or the last one's."""
    numbers: Tensor
    """[steps, B] float64 in [0, 1)."""
    tokens: Tensor
    """[steps, B] int64."""
    logprobs: Tensor
    """[steps, B] float32."""
    sampled_logprobs: Tensor
    """[steps, B] float32; not written where they are `logprobs`."""

    @classmethod
    def of(cls, rows: PagedRows, rules: Rules) -> Board:
        """Make one for rows."""
        pages, num = rows.pages, rows.num_queries
        sources = torch.arange(len(pages.tokens), device=pages.tokens.device).clamp_(max=num - 1)
        numbers = torch.zeros(pages.places.shape, dtype=torch.float64, device=pages.tokens.device)
        rules = _filled_up(rules, num, sources)
        return cls(pages, rules, sources, numbers, torch.zeros_like(pages.places), numbers.float(), numbers.float())

    @property
    def is_drawn_as_it_is(self) -> bool:
        """Whether logprobs are those of what is drawn from."""
        return self.rules.filtered is None and self.rules.greedy is None

    @property
    def results(self) -> tuple[Tensor, ...]:
        """What is drawn, as the fields of `Draws`."""
        return self.tokens, self.logprobs, *(() if self.is_drawn_as_it_is else (self.sampled_logprobs,))

    @property
    def tensors(self) -> list[Tensor | None]:
        """All of them."""
        return [*self.pages, *self.rules, *self[2:]]

    @property
    def shape(self) -> Hashable:
        """What boards have in common that can take each other's place."""
        return tuple(None if tensor is None else (tensor.shape, tensor.dtype) for tensor in self.tensors)

    def take(self, other: Board) -> None:
        """Be what another one of the same shape is."""
        for mine, theirs in zip(self.tensors, other.tensors, strict=True):
            if mine is not None and theirs is not None:
                mine.copy_(theirs)

    @property
    def moving(self) -> list[Tensor]:
        """Tokens, positions and the step as they are now."""
        return [tensor.clone() for tensor in self.pages[:3]]

    def go_back(self, moving: list[Tensor]) -> None:
        """Have them be those again."""
        for mine, before in zip(self.pages[:3], moving, strict=True):
            mine.copy_(before)


class Steps:
    """Draws tokens of rows of one engine, without a look at them until some have been drawn."""

    def __init__(self, logits: Callable[[PagedRows], Tensor], capture: Capture | None) -> None:
        """Take what computes logits of rows, [B, V], and what captures a step; None: nothing is captured."""
        self._logits, self._capture = logits, capture
        self._captured: OrderedDict[Hashable, tuple[Board, Callable[[], None]]] = OrderedDict()
        self._too_large: set[Hashable] = set()
        """Shapes that there was no memory to capture."""
        self._addresses: Hashable = None
        self._current: tuple[PagedRows, Rules, Board, Callable[[], None] | None] | None = None

    @property
    def captures(self) -> bool:
        """Whether steps are captured, and rows better filled up."""
        return self._capture is not None

    @property
    def num_captured(self) -> int:
        """Steps that can be replayed."""
        return len(self._captured)

    def forget(self) -> None:
        """Let go of all memory."""
        self._captured.clear()
        self._too_large.clear()
        self._current = None

    @torch.no_grad()
    def draw(self, rows: PagedRows, rules: Rules, numbers: Tensor, addresses: Hashable) -> list[Draws]:
        """Draw the next tokens of rows, and return them in memory of the host.

        Args:
            rows: which have as many moves, the last token's not included.
            rules: of drawing, the same for all tokens of the rows.
            numbers: [steps, B] float64 in [0, 1).
            addresses: of all that is read beside the rows; what was captured with others is forgotten.
        """
        if addresses != self._addresses:
            self.forget()
            self._addresses = addresses
        if self._current is None or self._current[0] is not rows or self._current[1] is not rules:
            self._current = (rows, rules, *self._begin(rows, rules))
        _, _, board, replay = self._current
        start, num, num_rows = rows.num_moves, len(numbers), rows.num_queries
        lines = slice(start, start + num)
        board.numbers[lines] = numbers.index_select(1, board.sources)
        first = 0
        if replay is None and self._may_be_captured(rows, board):
            replay = self._try(rows, board, slice(start, start + 2))
            self._current = rows, rules, board, replay
            first = 1  # has been made
        for _ in range(first, num):
            if replay is None:
                self._step(rows, board)
            else:
                replay()
        rows.num_moves += num
        rows.forget()
        # All at once, so that the host waits once: a float64 has every token and every float32 as it is.
        tokens, *logprobs = torch.stack([result[lines, :num_rows].double() for result in board.results]).cpu()
        found = [tokens.long(), *(column.float() for column in logprobs)]
        return [Draws(*line, *([] if len(line) == 3 else line[1:])) for line in zip(*found, strict=True)]

    def _begin(self, rows: PagedRows, rules: Rules) -> tuple[Board, Callable[[], None] | None]:
        """Return a board for rows, and a step that was captured with it, if there is one."""
        if self._current is not None:  # those of before go on by themselves, if they do
            self._current[0].pages = Pages(*(tensor.clone() for tensor in self._current[0].pages))
        board = Board.of(rows, rules)
        shape = board.shape
        if shape not in self._captured:
            return board, None
        self._captured.move_to_end(shape)
        kept, replay = self._captured[shape]
        kept.take(board)
        rows.pages = kept.pages
        return kept, replay

    def _step(self, rows: PagedRows, board: Board) -> None:
        """Draw a token of every row, and have it be the one that is computed next."""
        rows.forget()  # nothing that was made outside of a captured step may be in it
        at = board.pages.step
        found = draw(self._logits(rows), board.rules, board.numbers.index_select(0, at).view(-1), None)
        for result, new in zip(board.results, found, strict=False):
            result.index_copy_(0, at, new.unsqueeze(0))
        rows.move(found[0].index_select(0, board.sources))

    def _may_be_captured(self, rows: PagedRows, board: Board) -> bool:
        """Say whether a step of these rows can be captured, and others will be like it; there is another one to try."""
        num = len(board.sources)
        is_for_all = all(len(at) == num for at in (board.rules.greedy, board.rules.filtered) if at is not None)
        is_small = rows.num_queries <= _MOST_ROWS and board.shape not in self._too_large
        return self.captures and is_small and is_for_all and rows.has_moves

    def _try(self, rows: PagedRows, board: Board, lines: slice) -> Callable[[], None] | None:
        """Make a step, and return it captured; None where that fails. The one behind it is made for comparison only."""
        capture = self._capture
        assert capture is not None, "`_may_be_captured` said so"
        before = board.moving
        self._step(rows, board)
        self._step(rows, board)
        usual = [result[lines].clone() for result in board.results]
        board.go_back(before)
        try:
            replay = capture(lambda: self._step(rows, board))
            board.go_back(before)
            replay()
            between = board.moving
            replay()
            gap = _gap(usual, [result[lines] for result in board.results])
            board.go_back(between)
            if gap <= _LARGEST_GAP:
                self._captured[board.shape] = board, replay
                if len(self._captured) > _MOST_GRAPHS:
                    self._captured.popitem(last=False)
                return replay
            reason = f"its logprobs are {gap:.2g} nats off"
        except torch.OutOfMemoryError:
            self._too_large.add(board.shape)
            reason = ""
        except Exception as error:  # noqa: BLE001 - of torch, the driver, and what a kernel is built with
            reason = f"{type(error).__name__}: {error}"
        if reason:
            _LOG.warning("steps of decoding are launched one by one from now on: a captured one failed: %s", reason)
            self._captured.clear()
            self._capture = None
        board.go_back(before)
        self._step(rows, board)
        return None


def captures_on(device: torch.device) -> Capture | None:
    """Return what captures work of a device; None, and a word in the log, where torch cannot."""
    if device.type == "cpu":
        return None
    try:
        from torch.accelerator import Graph
    except ImportError:
        _LOG.warning("torch %s captures nothing on any accelerator, 2.13 does: decoding is slower", torch.__version__)
        return None
    stream = torch.Stream(device)  # one, as libraries keep memory for each that they have worked on
    pools: list[tuple[int, int]] = []
    """The memory of all graphs: nothing in it is of use when a replay has ended, and there is one at a time."""

    def capture(step: Callable[[], None]) -> Callable[[], None]:
        # Other threads may do what they like meanwhile.
        graph = Graph(pool=pools[0] if pools else None, capture_error_mode="thread_local")
        with stream, graph:
            step()
        pools.append(graph.pool())
        return graph.replay

    return capture


def num_filled_up(num_rows: int) -> int:
    """Return how many rows a captured step should have that is needed for so many.

    >>> [num_filled_up(num) for num in (1, 2, 3, 5, 9, 17, 33, 100, 256)]
    [1, 2, 3, 5, 10, 20, 40, 112, 256]
    """
    quantum = max(1, (1 << num_rows.bit_length() - 1) // _SIZES_PER_OCTAVE)
    return -(-num_rows // quantum) * quantum


def _filled_up(rules: Rules, num_rows: int, sources: Tensor) -> Rules:
    """Return the rules of so many rows for these and filler, of which it does not matter how it is drawn."""

    def lines(column: Tensor) -> Tensor:
        return column.index_select(0, sources) if len(column) == num_rows > 1 else column.clone()

    def indices(chosen: Tensor | None) -> Tensor | None:
        if chosen is None or len(chosen) < num_rows:
            return chosen
        return torch.arange(len(sources), device=sources.device)

    is_cut = rules.filtered is not None and len(rules.filtered) == num_rows
    cuts = [lines(column) if is_cut else column.clone() for column in (rules.top_k, rules.top_p, rules.min_p)]
    temperature = None if rules.temperature is None else lines(rules.temperature)
    return Rules(temperature, indices(rules.greedy), indices(rules.filtered), *cuts)


def _gap(usual: list[Tensor], replayed: list[Tensor]) -> float:
    """Return how far two steps are apart, in nats: infinitely where more than a sixteenth of the tokens differ.

    A few may, where a last bit decides; their logprobs are not compared.
    """
    is_same = usual[0] == replayed[0]
    if int((~is_same).sum()) > is_same.numel() / 16:
        return float("inf")
    gaps = [
        torch.where((one == other) | (one.isnan() & other.isnan()) | ~is_same, 0.0, one - other).abs().max()
        for one, other in zip(usual[1:], replayed[1:], strict=True)
    ]
    return float(torch.stack(gaps).nan_to_num(float("inf")).max())
