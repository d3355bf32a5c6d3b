"""A decoder that records which experts the tokens of its passes were sent to.

Must not know: which tokens these are. Whoever begins passes takes what was recorded when they have ended.
"""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import PreTrainedModel

from rallypoint.errors import ModelError
from rallypoint.families import MIXTURES
from rallypoint.generation.native.decoder import Decoder, DecoderRows
from rallypoint.models.kinds.experts import routers_of
from rallypoint.models.kinds.router_replay import recorded, written


class RecordingDecoder(Decoder):
    """See `Decoder`; its model is a mixture, which runs its own code."""

    def __init__(self, model: PreTrainedModel) -> None:
        """Take a mixture.

        Raises:
            ModelError: it is none, or its routers choose otherwise.
        """
        super().__init__(model)
        self._routers, self._passes = routers_of(model), list[Tensor]()
        if not self._routers:
            raise ModelError(
                f"{type(model).__name__} has no routers whose choices could be recorded (rollout.router_replay); "
                f"expected a mixture of type {', '.join(MIXTURES)}"
            )

    @property
    def may_be_captured(self) -> bool:
        """See `Decoder`: what routers choose is kept on the host."""
        return False

    def __call__(self, rows: DecoderRows) -> Tensor:
        """See `Decoder`."""
        with recorded(self._routers) as chosen:
            states = super().__call__(rows)
        self._passes.append(written(self._routers, chosen))
        return states

    def forget(self) -> None:
        """Drop what was recorded, as of a step that has failed."""
        self._passes.clear()

    def take(self, num_tokens: int) -> list[list[bytes]]:
        """Return the experts of the passes since the last call, step by step of so many tokens without padding.

        A step is as many passes as it takes for its tokens; only the last one of each is padded.
        """
        passes, self._passes = self._passes, []
        steps, num = list[list[Tensor]](), 0
        for one in passes:
            if num <= 0:
                steps.append([])
                num = num_tokens
            steps[-1].append(one)
            num -= len(one)
        lines = [torch.cat(step)[:num_tokens].cpu().numpy() for step in steps]
        return [[line.tobytes() for line in step] for step in lines]
