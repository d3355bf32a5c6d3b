"""What both have in common: one key of theirs after the other by the table of names, and what is said in the end."""

from __future__ import annotations

import dataclasses
import re
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, cast

import yaml

from rallypoint.config.fields import named_sections, nested
from rallypoint.config.other_projects import Alias, aliases_for, by_name, other_projects
from rallypoint.config.source import to_yaml
from rallypoint.config.suggest import alias_of, assignments_of
from rallypoint.config.translate.reading import Keys
from rallypoint.config.translate.shell import ShellScript
from rallypoint.config.tree import RunConfig
from rallypoint.config.unread import unread_sections, why_unread

_WIDTH = 76
"""Columns for what stands in a comment."""
_TRACKERS = ("tensorboard", "wandb", "mlflow", "trackio", "swanlab")
_WHOLE = ("engine_kwargs", "override_transformer_config", "profiler", "profile", "global_profiler", "hydra")
"""Sections of which one thing is said, whatever they hold."""
_PLACES = (
    "engine. actor.mesh. critic.mesh. reference.mesh. cluster. rollout.engine rollout.cache_tokens tracking "
    "checkpoint. trainer. validation. data.columns reward.function model.dtype"
)
"""Keys of ours, or their beginnings, that do not change what is learned, or that are asked for in any case."""


@dataclasses.dataclass(slots=True)
class Translation:
    """What their keys are here."""

    keys: dict[str, object] = dataclasses.field(default_factory=dict[str, object])
    """Ours, dotted."""
    usual: list[str] = dataclasses.field(default_factory=list[str])
    """Their keys that are not given, with their default values."""
    differs: dict[str, str] = dataclasses.field(default_factory=dict[str, str])
    """Their keys, as written, that mean something we lack, and what is computed instead; shown first."""
    open: dict[str, str] = dataclasses.field(default_factory=dict[str, str])
    """Their keys, as written, and why each needs no key here, or one that depends on more than its value."""
    unknown: list[str] = dataclasses.field(default_factory=list[str])
    """Their keys, as written, that are not known."""
    num_given: int = 0

    @property
    def num_known(self) -> int:
        """Keys of theirs that were understood."""
        return self.num_given - len(self.unknown)

    def forget(self, key: str) -> None:
        """Leave out a key that is not given, and that nothing is made of."""
        self.usual[:] = [one for one in self.usual if one.partition("=")[0] != key]

    def as_yaml(self) -> str:
        """Return a config file with its sections in the order of ours; comments tell what became of the other keys."""
        tree = nested(self.keys)
        tree.pop("recipe", None)
        tree = {section: tree[section] for section in RunConfig.model_fields if section in tree}
        lines = [f"# {self.num_known} of {self.num_given} keys are known."]
        lines += _comment("Not computed as theirs", _by_reason(self.differs))
        lines += _comment("Without a counterpart", self.unknown)
        lines += _comment("Still to be set", [f"{key}: {what}" for key, what in self.missing().items()])
        lines += [f"base: {self.keys.get('recipe', 'ppo')}", *([to_yaml(tree).rstrip()] if tree else [])]
        lines += _comment("Not given, and so set to their defaults", self.usual)
        lines += _comment("Not set here, because", _by_reason(self.open))
        return "\n".join(lines) + "\n"

    def missing(self) -> dict[str, str]:
        """Return further keys that a run of this recipe needs, and what each is."""
        recipe = self.keys.get("recipe")
        needed = {"model.path": "a name or a folder", "data.train": "a file, or the name of a data set"}
        if recipe in {"ppo", "grpo"} and not self.keys.keys() & {"reward.functions", "reward.path"}:
            needed["reward.function"] = "file.py:name, which scores a response"
        if recipe == "opd":
            needed["teacher.path"] = "a name or a folder"
        needed["cluster.device"] = "an accelerator; it is cpu unless it is set"
        return {key: what for key, what in needed.items() if key not in self.keys}


def _comment(title: str, said: Sequence[str]) -> list[str]:
    return [f"# {title}:", *(f"#   {line}" for line in said)] if said else []


def _by_reason(said: Mapping[str, str]) -> list[str]:
    """Return lines for a terminal; what is said of several keys stands once, above them.

    >>> _by_reason({"a=1": "it is so", "b=2": "it is so", "c=3": "it is not"})
    ['it is so:', '  a=1', '  b=2', 'it is not:', '  c=3']
    """
    lines: list[str] = []
    for why in dict.fromkeys(said.values()):
        lines += textwrap.wrap(f"{why}:", _WIDTH, break_long_words=False)
        lines += [f"  {key}" for key, other in said.items() if other == why]
    return lines


class Ends:
    """Their keys, looked up by their ends."""

    def __init__(self, theirs: Keys, taken: Iterable[str] = ()) -> None:
        self._theirs = theirs
        self.taken = set(taken)
        """Keys that were looked up and found."""

    def get(self, end: str, usual: object = None) -> Any:
        """Return the value of a key, which is taken by that."""
        for key in self._ending(end):
            self.taken.add(key)
            return self._theirs[key]
        return usual

    def peek(self, end: str, usual: object = None) -> Any:
        """Return the value of a key, which is left to the table."""
        return next((self._theirs[key] for key in self._ending(end)), usual)

    def has(self, end: str) -> bool:
        """Whether there is such a key."""
        return any(self._ending(end))

    def section(self, end: str) -> Keys:
        """Return what a section holds, which is taken by that; the section's name may have others before it."""
        inside: Keys = {}
        for key, value in self._theirs.items():
            _, here, name = f".{key}".partition(f".{end}.")
            if here:
                self.taken.add(key)
                inside[name] = value
        return inside

    def _ending(self, end: str) -> Iterator[str]:
        return (key for key in self._theirs if f".{key}".endswith(f".{end}"))


def with_usual(theirs: Keys, usual: Mapping[str, object], given: Keys, found: Translation) -> Keys:
    """Return their keys with those that are not given, which are noted."""

    def is_given(key: str) -> bool:
        return any(f".{key}".endswith(f".{own}") or f".{own}".endswith(f".{key}") for own in given)

    added = {key: value for key, value in usual.items() if not is_given(key)}
    found.usual += [f"{key}={value}" for key, value in added.items()]
    return theirs | added


def take_unresolved(given: Keys, found: Translation) -> Keys:
    """Return the keys whose values are known; name those that only their shell knows, and those that hydra removes."""
    lost = {key: _why_lost(value) for key, value in given.items()}
    found.unknown += [f"{key}={given[key]} ({why})" for key, why in lost.items() if why]
    found.unknown += [f"{key} (nothing is taken away here)" for key in given if key.startswith("~")]
    return {key: value for key, value in given.items() if not lost[key] and not key.startswith("~")}


def name_doubtful(script: ShellScript, found: Translation) -> None:
    """Name the variables of a script whose value depends on a branch."""
    for name in sorted(script.doubtful & script.used):
        found.differs[f"{name}={script.variables[name]}"] = (
            "the script has others of it in branches; the first is taken"
        )


def by_table(theirs: Keys, found: Translation, ambiguous: Mapping[str, frozenset[str]]) -> Translation:
    """Translate keys one by one.

    Args:
        theirs: keys that are not translated yet.
        found: what is translated already; it is added to.
        ambiguous: sections that have words in common with others and mean something else, each with the words of which
            one must be in a name of the table, so that it is about this section.
    """
    setter, usual = _Setter(found), set(found.usual)
    known = {**by_name(other_projects().whole_configs), **aliases_for(str(found.keys["recipe"]))}
    for key, value in sorted(theirs.items(), key=lambda item: f"{item[0]}={item[1]}" in usual):  # theirs go before
        written, parts = f"{key}={value}", key.split(".")
        alias = _alias(parts, known, ambiguous)
        if alias is None:
            found.unknown.append(written)
            continue
        assignments = assignments_of(alias, parts, value)
        whole = [one.partition("=") for one in assignments if "=" in one]
        if not whole:
            see = [f"see {', '.join(assignments)}"] if assignments else []
            said = found.differs if see and _decides(assignments, value) else found.open
            said[written] = "; ".join([*see, *([alias.note] if alias.note else [])])
            found.usual[:] = [one for one in found.usual if one != written]
        for dotted, _, text in whole:
            ours = yaml.safe_load(text)
            if isinstance(ours, str) and str(value) == text:  # such as 1e-6, which is text for plain YAML
                ours = value
            setter.set(dotted, ours, written, len(whole))
    setter.drop_unread()
    return found


def count_of(value: object) -> int | None:
    """Return a count; None where it is off, as with -1, or is none."""
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else None


def set_warmup(found: Translation, role: str, num_warmup: int, num_steps: int) -> None:
    """Set a warmup that they count in steps."""
    found.keys[f"{role}.optimizer.warmup_ratio"] = round(min(0.9, num_warmup / num_steps), 6)


def set_trackers(theirs: object, found: Translation) -> None:
    """Both have one name or several, and names of what is written in any case."""
    names = cast("list[object]", theirs) if isinstance(theirs, list) else [theirs]
    ours = [name for name in names if name in _TRACKERS]
    if ours:
        found.keys["tracking.to"] = ours


class _Setter:
    """Sets our keys; one that two of theirs set to different values keeps the first, and the other one is named."""

    def __init__(self, found: Translation) -> None:
        self._found = found
        self._by: dict[str, tuple[str, int]] = {}
        """Our key -> what set it, and how many keys that set at once."""

    def set(self, dotted: str, value: object, written: str, num_keys: int) -> None:
        """Set a key, unless it is set; what sets one key alone, as clip_ratio_low, goes before what sets several."""
        keys = self._found.keys
        if dotted not in keys:
            keys[dotted], self._by[dotted] = value, (written, num_keys)
            return
        before, num_before = self._by.get(dotted, ("what other keys say together", 1))
        if written in self._found.usual:
            self._forget(written)
        elif num_keys < num_before:
            keys[dotted], self._by[dotted] = value, (written, num_keys)
        elif num_keys == num_before and keys[dotted] != value:
            self._found.differs[written] = f"{dotted} is {keys[dotted]} by {before}; it is one key here"

    def drop_unread(self) -> None:
        """Name the keys that nothing reads, given the others: of another loss, of a critic, of a KL that is off."""
        keys, recipe = self._found.keys, str(self._found.keys["recipe"])
        loss = str(keys.get("loss.name", "clip"))
        read = named_sections(RunConfig.model_fields["loss"])[loss].model_fields
        unread = unread_sections(RunConfig.model_validate({"recipe": recipe}))
        for dotted in list(keys):
            if dotted.startswith("loss.") and dotted.removeprefix("loss.") not in read:
                self._drop(dotted, f"loss.name={loss} has no such key")
            elif recipe != "ppo" and dotted.startswith(("critic.", "advantage.gae_lambda")):
                self._drop(dotted, f"{recipe} has no critic")
            elif dotted.startswith("kl.") and keys.get("kl", recipe) is None:
                self._drop(dotted, "the KL is off")
            elif (why_unread(unread, dotted) or "").startswith("recipe="):
                self._drop(dotted, f"{recipe} does not read it")

    def _drop(self, dotted: str, why: str) -> None:
        value, (written, _) = self._found.keys.pop(dotted), self._by.pop(dotted, ("", 1))
        if written in self._found.usual:
            self._forget(written)
        else:
            self._found.open[f"{dotted}={value}"] = why

    def _forget(self, written: str) -> None:
        """A usual value that nothing is made of need not be named."""
        if written in self._found.usual and all(by != written for by, _ in self._by.values()):
            self._found.usual.remove(written)


def _alias(parts: Sequence[str], known: Mapping[str, Alias], ambiguous: Mapping[str, frozenset[str]]) -> Alias | None:
    around = next((parts[: place + 1] for place, part in enumerate(parts) if part in _WHOLE), parts)
    for name in (parts, around):
        alias, num_words = alias_of(name, known)
        words = set(name[len(name) - num_words :])
        if alias is not None and all(words & ambiguous[part] for part in parts[:-1] if part in ambiguous):
            return alias
    return None


def _decides(assignments: Sequence[str], value: object) -> bool:
    """Whether a value that could not be translated would change what is learned, and is not off.

    >>> [_decides(keys, "x") for keys in (["aggregation"], ["engine.activations"], ["reward.function"])]
    [True, False, False]
    """
    return value not in (None, False) and not all(one.startswith(tuple(_PLACES.split())) for one in assignments)


def _why_lost(value: object) -> str:
    value = str(value)
    if re.search(r"\$\{[^{}]*[.:]", value):
        return "it refers to what their config does not have"
    return "a value that only a shell knows" if re.search(r"\$(\{|\(|[A-Za-z_])", value) else ""
