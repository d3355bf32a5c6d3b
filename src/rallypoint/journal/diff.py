"""The first place in which two runs part, and what their configs and packages differ in.

Of a step, the parts of its batch come first, in the order in which they come to be (prompts, tokens, logprobs, scores,
advantages); then what the update says of itself (gradient norm, loss); then the weights that it published, and those
that were loaded; then the validation after it, and the weights of its checkpoint. Times and memory are not part of a
comparison.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping

from rallypoint.journal.events import RunBegan
from rallypoint.journal.state import RunState

_LEARNED = ("actor/grad_norm", "critic/grad_norm", "actor/loss", "critic/loss")
"""What an update says of its gradients: the same gradients, the same numbers."""


@dataclasses.dataclass(frozen=True, slots=True)
class Change:
    """A key of the config, a file, or a package that differs."""

    key: str
    of_a: object
    of_b: object


@dataclasses.dataclass(frozen=True, slots=True)
class Difference:
    """The first thing that differs."""

    step: int
    what: str
    """A part of the batch, a metric, `published weights`, `loaded weights`, or `weights` for those of a checkpoint."""
    of_a: object
    of_b: object


def changes(a: RunState, b: RunState) -> tuple[list[Change], list[Change], list[Change]]:
    """Return what differs in the configs of the newest starts, in the files that they read, and around them."""
    ours, theirs = a.began, b.began
    if ours is None or theirs is None:
        return [], [], []
    around = [
        *_changed(ours.software, theirs.software),
        *_changed({"machine": ours.machine}, {"machine": theirs.machine}),
    ]
    return config_changes(ours, theirs), list(_changed(_files(a), _files(b))), around


def config_changes(a: RunBegan, b: RunBegan) -> list[Change]:
    """Return the keys that differ in the configs of two starts."""
    return list(_changed(a.config, b.config))


def _files(state: RunState) -> dict[str, object]:
    """Return the digest of every file by key and name."""
    files = {} if state.inputs is None else state.inputs.files
    return {f"{key}, {name}": digest for key, named in files.items() for name, digest in named.items()}


def _changed(a: Mapping[str, object], b: Mapping[str, object]) -> Iterator[Change]:
    for key in dict.fromkeys((*a, *b)):
        if a.get(key) != b.get(key):
            yield Change(key, a.get(key), b.get(key))


def first_difference(a: RunState, b: RunState) -> Difference | None:
    """Return the first difference in the steps that both runs have done; None if there is none.

    A step that only one of them has reached is not a difference: a run may just be shorter.
    """
    return next(_differences(a, b), None)


def _differences(a: RunState, b: RunState) -> Iterator[Difference]:
    keys = [change.key for change in changes(a, b)[0]]
    are_cut_alike = not any(key.startswith(("actor.mesh.", "rollout.mesh.")) for key in keys)  # as digests of ranks are
    for step in range(1 + min(a.step, b.step)):
        ours, theirs = a.steps.get(step), b.steps.get(step)
        if ours is not None and theirs is not None:
            for name in dict.fromkeys((*ours.digests, *theirs.digests)):
                yield from _differ(step, name, ours.digests.get(name), theirs.digests.get(name))
            for name in _LEARNED:
                yield from _differ(step, name, ours.metrics.get(name), theirs.metrics.get(name))
        of_step = ("published weights", a.published, b.published), ("loaded weights", a.loaded, b.loaded)
        for what, weights, others in of_step if are_cut_alike else ():
            if step in weights and step in others:
                yield from _differ(step, what, weights[step].digest, others[step].digest)
        yield from _measured(step, a, b)
        saved, other = a.checkpoints.get(step), b.checkpoints.get(step)
        if saved is not None and other is not None:
            yield from _differ(step, "weights", saved.weights, other.weights)


def _measured(step: int, a: RunState, b: RunState) -> Iterator[Difference]:
    ours, theirs = a.validations.get(step), b.validations.get(step)
    if ours is None or theirs is None:
        return
    for name in sorted(ours.metrics.keys() & theirs.metrics.keys()):
        if name.startswith("validation/"):
            yield from _differ(step, name, ours.metrics[name], theirs.metrics[name])


def _differ(step: int, what: str, of_a: object, of_b: object) -> Iterator[Difference]:
    are_nan = all(isinstance(one, float) and math.isnan(one) for one in (of_a, of_b))
    if of_a != of_b and not are_nan:
        yield Difference(step, what, of_a, of_b)
