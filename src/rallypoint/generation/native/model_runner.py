"""How tokens go through the model of an engine: many of a prompt, or one of each row that runs.

Owns: in which parts they go, over which code. Must not know: requests, or who runs.

In the mode `fast` what is computed together has any shape, or one of few (`models.sizes`). In the mode `exact` every
product has the same one: 32 tokens go through the model together, in one thread, so that the bits of each do not depend
on the others.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import PreTrainedModel

from rallypoint.cpu.forms import computes_in_pieces
from rallypoint.cpu.onednn import filled_up
from rallypoint.generation.native.accelerator.backend import PagedRows, is_right
from rallypoint.generation.native.accelerator.graphs import Capture, Steps, captures_on, num_filled_up
from rallypoint.generation.native.accelerator.kernel import PageKernel, find_kernel
from rallypoint.generation.native.block_manager import Block, BlockPool
from rallypoint.generation.native.block_tables import Queries
from rallypoint.generation.native.cpu.ahead import draw_ahead
from rallypoint.generation.native.cpu.backend import QueryRows
from rallypoint.generation.native.decoder import (
    Backbone,
    PlainDecoder,
    RowsWithIds,
    ShapeProbe,
    check_decoder,
    is_plain,
)
from rallypoint.generation.native.kv_cache import CacheRoom
from rallypoint.generation.native.plain import Linear, Network
from rallypoint.generation.native.prefill import Stretch, StretchRows
from rallypoint.generation.sampler import Draws, Rules
from rallypoint.generation.script import without_python
from rallypoint.models import lm_head
from rallypoint.models.head import logit_softcap, soft_capped

_TILE = 32
"""Tokens that go through the model together in the mode `exact`."""
_NUMBERS_OF_A_LANE = 4_000
"""Of hidden states, at least, of rows that are computed beside others; with fewer, to hand work to another thread costs
what it saves. At 1M, where hidden states have 128 numbers, 64 rows gain a twentieth and 128 a third."""
_WIDTH_OF_SEVERAL_THREADS = 1024
"""Of hidden states, at least, for operations on few rows to be cut over threads: up to 50M, one thread is faster."""
_STEPS_AT_ONCE = 8
"""Tokens of each row that are drawn without a look at them, of models below that width: their steps are short, so that
nobody waits long, and what Python does between two of them counts. Of all models on accelerators, which wait while the
host looks."""

_WASTE, _WIDTH_OF_WASTE = 1 / 16, 128
"""Of a step's rows, see `waste_that_pays`. To make cohorts takes about as long for any model. At 1M it is worth as many
rows as a step has; the model's own code takes longer for each row."""


class Passes:
    """The ways through one model."""

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        is_exact: bool,
        in_pages: bool | None = None,
        capture: Capture | None = None,
    ) -> None:
        """Take a model whose weights may change, and move, but are parameters of the same modules for good.

        Args:
            model: through which tokens go.
            is_exact: see the module.
            in_pages: see `native.accelerator.backend`; None: as the model's device is, and the mode.
            capture: captures steps of decoding; None: as torch does on the model's device.
        """
        self._model, self._is_exact = model, is_exact
        self.is_in_pages = (not computes_in_pieces(model.device) and not is_exact) if in_pages is None else in_pages
        """Whether rows that run are laid out as accelerators like it."""
        self._capture = capture
        self._steps: Steps | None = None
        self._kernel: PageKernel | None = None
        self._weights: list[Tensor] = []
        self._network: Network | None = None
        self._own_code = Backbone(model)
        self._plain: PlainDecoder | None = None
        self._heads = 0

    def parts(self, num_rows: int, num_lanes: int) -> tuple[int, int | None]:
        """Say into how many parts to cut rows, or prompts of so many tokens, and how many threads each may use.

        None is its share. The model's own code is one part, as it may keep a state, and ranks that compute together
        need one order.
        """
        if self.is_in_pages:
            return 1, None
        if self._is_exact:  # in several threads, a product might round in another way
            return (min(num_lanes, -(-num_rows // _TILE)) if self._is_plain else 1), 1
        size = self._size
        if self._is_plain and num_rows * size >= num_lanes * _NUMBERS_OF_A_LANE:
            return min(num_lanes, num_rows), None
        return 1, None if size >= _WIDTH_OF_SEVERAL_THREADS or not self._is_plain else 1

    @property
    def _is_plain(self) -> bool:
        return self._plain is not None

    @property
    def _decode(self) -> Callable[[RowsWithIds], Tensor]:
        return self._plain or self._own_code

    @property
    def _size(self) -> int:
        return int(self._model.config.get_text_config().hidden_size)

    @property
    def max_steps_at_once(self) -> int:
        """How many tokens of each row `draw_ahead` should draw at most."""
        if self.is_in_pages:
            return _STEPS_AT_ONCE
        is_short = self._is_plain and not self._is_exact and self._size < _WIDTH_OF_SEVERAL_THREADS
        return _STEPS_AT_ONCE if is_short and computes_in_pieces(self._model.device) and is_plain(self._head) else 1

    def forget(self) -> None:
        """Let go of memory of a pool that is no longer used, and of steps that were captured with it."""
        if self._steps is not None:
            self._steps.forget()

    @property
    def waste_that_pays(self) -> float:
        """How many rows, as a part of those of a step, may be computed or wait in vain until new cohorts are made."""
        return min(1.0, _WIDTH_OF_WASTE / self._size) if self._is_plain else _WASTE

    @property
    def _head(self) -> nn.Module:
        return lm_head(self._model)

    def make_pool(self, room: CacheRoom, block_tokens: int) -> BlockPool:
        """Ask the model for the shapes of its layers, and reserve memory for their keys and values.

        Raises:
            CacheError: there is not enough.
            ModelError: see `check_decoder`.
        """
        if PlainDecoder.fits(self._model) and not self._is_plain:
            decoder = PlainDecoder(self._model)
            check_decoder(self._model, decoder)
            self._plain = decoder
        probe = ShapeProbe()
        tokens = torch.zeros(1, 1, dtype=torch.int64, device=self._model.device)
        self._model.base_model(input_ids=tokens, position_ids=tokens, use_cache=False, rows=probe)
        (self._heads, kv_heads, head_dim, like), *others = probe.layers
        assert all(other[:3] == (self._heads, kv_heads, head_dim) for other in others), "layers are alike"
        self._prepare_pages(like)
        token_bytes = 2 * len(probe.layers) * kv_heads * head_dim * like.element_size()
        num_blocks = -(-room.num_tokens(token_bytes, like.device) // block_tokens)
        return BlockPool(num_blocks, block_tokens, len(probe.layers), kv_heads, head_dim, like)

    def _prepare_pages(self, like: Tensor) -> None:
        """Find out once what there is for rows in pages: a kernel, and whether steps can be captured."""
        if not self.is_in_pages or self._steps is not None:
            return
        heads, kv_heads, head_dim = self._heads, like.shape[-2], like.shape[-1]
        self._kernel = find_kernel(
            like.device, like.dtype, lambda kernel: is_right(kernel, heads, kv_heads, head_dim, like)
        )
        # Only of what launches the same kernels in every step: a model's own code may look at numbers.
        may_capture = self._is_plain and is_plain(self._head)
        self._steps = Steps(self._logits, (self._capture or captures_on(like.device)) if may_capture else None)
        self._weights = [*self._model.parameters(), *self._model.buffers()]

    def lay_out(self, pool: BlockPool, queries: Queries, num_steps: int = 1) -> Sequence[QueryRows | PagedRows]:
        """Return layouts for some tokens of a clean pool, in parts that go through the model together."""
        if self.is_in_pages:
            tile = num_slots = 1
            if self._steps is not None and self._steps.captures:
                tile = num_filled_up(len(queries.tokens))
                num_slots = 1 << (int(queries.num_blocks.max()) - 1).bit_length()
            options = {"tile": tile, "num_slots": num_slots, "num_steps": num_steps}
            return [PagedRows(pool, queries, kernel=self._kernel, **options)]
        tile = _TILE if self._is_exact else self._filled_up(len(queries.tokens))
        return [QueryRows(pool, part, self._heads, tile=tile, num_steps=num_steps) for part in queries.parts(tile)]

    def _filled_up(self, num_tokens: int) -> int:
        return filled_up(num_tokens, self._model.dtype, self._model.device)

    def decode(self, layouts: Sequence[QueryRows | PagedRows]) -> Tensor:
        """Send the tokens of layouts through the model: their last hidden states, [B, E]."""
        states = [self._decode(layout)[: layout.num_queries] for layout in layouts]
        return states[0] if len(states) == 1 else torch.cat(states)

    def draw_ahead(self, layouts: Sequence[QueryRows | PagedRows], rules: Rules, numbers: Tensor) -> list[Draws]:
        """Draw the next tokens of all rows of a layout, given the random numbers of each: [steps, B]."""
        (layout,), head = layouts, cast("nn.Linear", self._head)
        if isinstance(layout, PagedRows):
            assert self._steps is not None, "it lies in a pool"
            # Kept, as what it has made itself has an address too, and another one's may be the same later.
            network = self._network = None if self._plain is None else self._plain.network
            addresses = id(network), layout.pool.keys.data_ptr(), *(weight.data_ptr() for weight in self._weights)
            return self._steps.draw(layout, rules, numbers, addresses)
        assert self._plain is not None, "`max_steps_at_once` said so"
        last = Linear([head.weight], [] if head.bias is None else [head.bias])
        draw = without_python(draw_ahead, head.weight.device)
        found = draw(self._plain.network, last, layout.bags, layout.moves, layout.num_moves, rules, numbers)
        layout.num_moves = min(layout.num_moves + len(numbers), len(layout.moves.distances[0]))
        return [Draws(*draws) for draws in zip(*found, strict=True)]

    def prefill(self, pool: BlockPool, stretches: Sequence[Stretch]) -> Tensor:
        """Compute keys and values of stretches, those without a past first; return the last state of each, [R, E]."""
        if self._is_exact:
            return self._in_tiles(pool, stretches)
        rows = StretchRows(pool, stretches, self._filled_up(sum(len(stretch.tokens) for stretch in stretches)))
        return self._decode(rows).index_select(0, rows.ends.to(rows.tokens.device))

    def _in_tiles(self, pool: BlockPool, stretches: Sequence[Stretch]) -> Tensor:
        """Do the same in products of one shape."""
        queries: list[tuple[int, int, Sequence[Block]]] = []
        ends: list[int] = []
        for stretch in stretches:
            blocks = list(stretch.past)
            for position, (token, (block, _)) in enumerate(
                zip(stretch.tokens, stretch.into, strict=True), stretch.num_past
            ):
                if not blocks or blocks[-1] is not block:
                    blocks = [*blocks, block]
                queries.append((token, position, blocks))
            ends.append(len(queries) - 1)
        return self.decode(self.lay_out(pool, Queries.of(queries, pool.block_tokens)))[ends]

    def _logits(self, rows: PagedRows) -> Tensor:
        """Return the logits of all rows, filler included: [B, V]."""
        return soft_capped(self._head(self._decode(rows)), logit_softcap(self._model.config))

    def logits(self, states: Tensor) -> Tensor:
        """[B, E] -> [B, V]."""
        head, softcap = self._head, logit_softcap(self._model.config)
        if not self._is_exact:
            num_filler = self._filled_up(len(states)) - len(states)
            return soft_capped(head(functional.pad(states, (0, 0, 0, num_filler))), softcap)[: len(states)]
        tiles = functional.pad(states, (0, 0, 0, -len(states) % _TILE)).split(_TILE)
        return soft_capped(torch.cat([head(tile) for tile in tiles]), softcap)[: len(states)]
