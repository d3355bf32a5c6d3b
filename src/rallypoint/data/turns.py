"""A conversation in the chat template, as text.

Owns: where in it the turns of the assistant are. Must not know: tokenizers, tensors.
"""

from __future__ import annotations

import dataclasses

from rallypoint.data.conversations import Conversation


@dataclasses.dataclass(frozen=True, slots=True)
class Turns:
    """A conversation in the template, and where in its text the turns to train begin and end."""

    row: Conversation
    text: str
    spans: tuple[tuple[int, int], ...]
    cues: tuple[int, ...]
    """Where in the text the cue of each turn to train ends, behind which a model that is asked for it begins."""

    @property
    def trained(self) -> list[int]:
        """Indices of the messages to train."""
        enumerated = enumerate(self.row.messages)
        return [index for index, one in enumerated if one.role == "assistant" and index >= self.row.first_trained]

    @property
    def num_shortened(self) -> int:
        """Number of turns to train that are not whole in the text, whatever blanks it has."""
        said = [self.row.messages[index].content for index in self.trained]
        texts = [self.text[start:stop] for start, stop in self.spans]
        if len(texts) != len(said):  # marks need not be one for each turn
            texts = [self.text] * len(said)
        return sum(
            one.strip() not in text and _dense(one) not in _dense(text) for one, text in zip(said, texts, strict=True)
        )


def _dense(text: str) -> str:
    return "".join(text.split())
