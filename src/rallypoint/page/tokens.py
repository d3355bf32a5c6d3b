"""One rollout token by token: its text, what was trained of it and why not, and the numbers of each token.

Owns: why a token is not trained, and how ids become text. Must not know: HTTP, how it is drawn.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from rallypoint.algorithms import CORRECTIONS, Correction, correct
from rallypoint.algorithms.policy_losses import PolicyTokens
from rallypoint.errors import RunFolderError
from rallypoint.page.rollout_tables import LIGHT, MOST_TEXT, TOKENS, file_of, read
from rallypoint.page.run_reader import Snapshot
from rallypoint.page.timing import JSON
from rallypoint.run.rollouts import ROWS_PER_GROUP, Kind

if TYPE_CHECKING:
    from tokenizers import Tokenizer


@functools.lru_cache(maxsize=4)
def _group_of_rows(file: Path, changed: float, number: int) -> Any:
    """Return all columns of the rows that stand together in a file, of which several are looked at one by one."""
    del changed
    return read(file, part=number)


def rollout(run: Snapshot, step: int, place: int, kind: Kind = "step") -> JSON:
    """Return a rollout token by token: texts, what was trained and why not, and numbers of each token.

    Raises:
        RunFolderError: there is none, or its file is damaged.
    """
    file = file_of(run, step, kind)
    table = _group_of_rows(file, file.stat().st_mtime, place // ROWS_PER_GROUP)
    if not 0 <= place % ROWS_PER_GROUP < table.num_rows:
        raise RunFolderError(f"{kind} {step} has no rollout {place}")
    row: JSON = table.slice(place % ROWS_PER_GROUP, 1).to_pylist(maps_as_pydicts="strict")[0]
    ids = (row["response_ids"] or [])[:MOST_TEXT]
    size = len(ids)
    old, sampled = _known(row["old_logprobs"]), row["rollout_logprobs"]
    gaps = [a - b for a, b in zip(old, sampled, strict=True)] if old is not None and sampled is not None else None
    why, reasons = _why_not_trained(run, row, step, kind)
    is_known = gaps is not None or run.config is None or not run.config.correction
    note = "" if is_known else "what corrections masked is not known: this step has no logprobs of the trainer"
    if kind == "step" and 0 in why and not any(row["advantages"] or [math.nan]):
        note = "its advantages are 0: it is trained by the KL, or the entropy bonus, alone"
    return {
        **{name: row.get(name) for name in LIGHT if name not in {"prompt", "response"}},
        "place": place,
        "prompt": row["prompt"][:MOST_TEXT],
        "response": row["response"][:MOST_TEXT],
        "extras": row["reward_extras"],
        "metrics": row.get("metrics"),
        "turns": _shown_turns(row.get("turns")),
        "pieces": _shown_end(pieces(tokenizer_of(run), ids), row),
        "ids": ids,
        "why": why[:size],
        "reasons": reasons,
        "note": note,
        "advantages": _rounded(row["advantages"], size),
        "ratio": _rounded(None if gaps is None else [math.exp(max(-20.0, min(gap, 20.0))) for gap in gaps], size),
        "surprise": _rounded(None if sampled is None else [-one for one in sampled], size),
        "difference": _rounded(None if gaps is None else [abs(gap) for gap in gaps], size),
        "entropy": _rounded(_known(row.get("entropies")), size),
        "unrecorded": _left_out(run, row, step, kind) or "the version of rallypoint that trained here wrote none",
        "versions": (row.get("token_versions") or [])[:size],
        "num_tokens": len(row["response_ids"] or []),
    }


def _known(values: Sequence[float] | None) -> Sequence[float] | None:
    """Return numbers of tokens, or None if nothing computed them."""
    return values if values is not None and any(map(math.isfinite, values)) else None


def _rounded(values: Sequence[float] | None, size: int) -> list[float] | None:
    return None if values is None else [float(f"{value:.5g}") for value in values[:size]]


def _shown_turns(turns: Sequence[JSON] | None) -> list[JSON]:
    most = MOST_TEXT // 10
    return [
        {
            **turn,
            "response": (turn["response"] or "")[:most],
            "said": [{"role": one["role"], "text": (one["text"] or "")[:most]} for one in turn["said"] or ()],
        }
        for turn in turns or ()
    ]


def _left_out(run: Snapshot, row: JSON, step: int, kind: Kind) -> str | None:
    """Return why nothing was learned from a whole rollout."""
    if kind == "validation":
        return "validation: nothing is learned from it"
    if row["failure"] is not None:
        return f"left out: {row['failure']}"
    if run.config is not None and step <= run.config.num_frozen_steps:
        return "the critic warms up: the policy does not learn yet"
    return row.get("untrained")


def _why_not_trained(run: Snapshot, row: JSON, step: int, kind: Kind) -> tuple[list[int], list[str]]:
    """Return for each token of a response the place of a reason in a list, 0 for one that is trained, and the list."""
    mask = [bool(value) for value in row["loss_mask"] or ()]
    reasons = ["trained", "context: the episode or the template put it there"]
    if whole := _left_out(run, row, step, kind):
        return [2 if sampled else 1 for sampled in mask], [*reasons, whole]
    why = [0 if sampled else 1 for sampled in mask]
    for name, dropped in _dropped(run, row, mask):
        reasons.append(f"masked by correction {name}: sampler and trainer disagree")
        last = len(reasons) - 1
        why = [last if gone and not before else before for gone, before in zip(dropped, why, strict=True)]
    return why, reasons


def _dropped(run: Snapshot, row: JSON, mask: Sequence[bool]) -> Iterator[tuple[str, list[bool]]]:
    """Yield the corrections of a run with the tokens to which they give a weight of 0, of those that files can tell."""
    if run.config is None or any(row[name] is None for name in TOKENS):
        return
    old = torch.tensor(row["old_logprobs"])
    tokens = PolicyTokens(
        logprobs=old,
        old_logprobs=old,
        rollout_logprobs=torch.tensor(row["rollout_logprobs"]),
        advantages=torch.tensor(row["advantages"]),
        loss_mask=torch.tensor(mask),
        rows=torch.zeros(len(mask), dtype=torch.int64),
        num_rows=1,
    )
    for section in run.config.correction:
        values = {name: value for name, value in section.model_dump().items() if name != "name"}
        correction: Correction = CORRECTIONS[section.name](**values)
        weights, _ = correct([correction], tokens)
        yield section.name, [bool(weight == 0) and trained for weight, trained in zip(weights, mask, strict=True)]


def tokenizer_of(run: Snapshot) -> Tokenizer | None:
    """Return the tokenizer of a run from its folder or its model's; None if there is no file of one on this machine."""
    model = run.config.model.path if run.config is not None else None
    places = [*sorted(run.folder.checkpoints.glob("step_*"), reverse=True), run.folder.model]
    places += [Path(model).expanduser()] if model else []
    files = (place / "tokenizer.json" for place in places)
    file = next((file for file in files if file.is_file()), None)
    return None if file is None else _loaded(file, file.stat().st_size)


@functools.lru_cache(maxsize=8)
def _loaded(file: Path, size: int) -> Tokenizer | None:
    from tokenizers import Tokenizer as Loaded

    del size
    try:
        return Loaded.from_file(str(file))
    except Exception:  # noqa: BLE001 - what the library raises has no type of its own; ids are shown instead
        return None


def _shown_end(found: list[str], row: JSON) -> list[str]:
    """Return pieces with the token that ended the response as such, if its text has it not: no tokenizer tells."""
    is_end = row["finish_reason"] == "stop" and "".join(found[-1:]).strip() and "".join(found[:-1]) == row["response"]
    return [*found[:-1], "⟨end of text⟩"] if is_end else found


_REPLACEMENT, _MOST_OPEN = "\ufffd", 8


def pieces(tokenizer: Tokenizer | None, ids: Sequence[int]) -> list[str]:
    """Return the text that each token adds; of a character of several tokens, all at the last of them.

    A token is decoded with the one before it, since some decoders treat the first in their own way. What never becomes
    a character is shown as replacements after some tokens; a character has four at most.
    """
    if tokenizer is None:
        return [f"⟨{token}⟩" for token in ids]
    found, begin, shown = [""] * len(ids), 0, 0

    def decoded(end: int) -> str:
        return tokenizer.decode(list(ids[begin:end]), skip_special_tokens=False)

    for end in range(1, len(ids) + 1):
        is_cut = end < len(ids) and decoded(end).endswith(_REPLACEMENT)
        if is_cut and end - shown <= _MOST_OPEN:
            continue
        last = end - 3 if is_cut else end
        found[last - 1] = decoded(last)[len(decoded(shown)) :]
        begin, shown = (last if is_cut else shown), last
    return found
