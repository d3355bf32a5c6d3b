"""Chat templates: what a run adds to one, and what a probe of it shows.

Owns: that a template depends on messages alone. It is a program of the model's author; what is added to it is written
into its text, so that a checkpoint has it, and rendering it elsewhere gives what was trained on. Must not know: data
sets, models.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime
from typing import TYPE_CHECKING, cast

from rallypoint.data.files import suggestion
from rallypoint.errors import ModelError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

CLOCK = "strftime_now"
"""Function of templates that formats the time of the call; as an argument, the time that it formats instead."""
_GIVEN = ("messages", "add_generation_prompt", "tools", "documents")
"""Arguments that every template is given already."""
_CLOCK_CALL = re.compile(rf"\b{CLOCK}\s*\(\s*(?:(?P<quote>['\"])(?P<format>[^'\"]*)(?P=quote)\s*\))?")
_CODE, _TEXT = re.compile(r"\{[%{](.*?)[%}]\}", re.DOTALL), re.compile(r"'[^']*'|\"[^\"]*\"")
_AS_PARTS = (
    "{% set texts = namespace(messages=[]) %}{% for message in messages %}"
    "{% set parts = [{'type': 'text', 'text': message.content}] if message.content is string else message.content %}"
    "{% set texts.messages = texts.messages + [dict(message, content=parts)] %}{% endfor %}"
    "{% set messages = texts.messages %}\n"
)
"""What lets a template that reads lists of parts read text; trim_blocks takes the line break away again."""
_PROBE = "probe7"
MEND_TEMPLATE = "give a template of your own with model.tokenizer.chat_template=FILE"


@dataclasses.dataclass(frozen=True, slots=True)
class TemplateProbe:
    """What a chat template writes around messages."""

    ids: tuple[int, ...] = ()
    """Ids of what it writes."""
    end: int | None = None
    """Special token that follows what the assistant says; None if none does."""
    opened: str | None = None
    """Tag that the cue opens and leaves open, such as <think>: no response has it, each begins after it."""
    uncued: str = ""
    """Text that it writes before each answer, and not where one is asked for: it has no generation prompt."""

    @classmethod
    def of(cls, tokenizer: PreTrainedTokenizerBase) -> TemplateProbe:
        """Render a few messages; what the template refuses stays unknown."""
        if tokenizer.chat_template is None:
            return cls()
        asked, answered = [_message("user", _PROBE)], [_message("user", "0"), _message("assistant", _PROBE)]
        text, cued = _render(tokenizer, asked), _render(tokenizer, asked, cue=True)
        whole = _render(tokenizer, answered)
        special = special_ids(tokenizer)
        tail = whole.rpartition(_PROBE)[2] if whole is not None and _PROBE in whole else ""
        ids = cast("list[int]", tokenizer.encode(tail, add_special_tokens=False)) if tail else []
        cue = "" if text is None or cued is None else _behind(text, cued)
        before = _render(tokenizer, answered[:1]) if cued is not None and not cue else None
        uncued = "" if before is None else _behind(before, (whole or "").partition(_PROBE)[0])
        marks = {str(tokenizer.convert_ids_to_tokens(token)) for token in special}
        vocabulary = tokenizer.get_vocab()
        found = re.finditer(r"<([A-Za-z]\w*)>", cue)
        tags = [tag for tag in found if tag.group() not in marks or f"</{tag.group(1)}>" in vocabulary]
        # What a cue begins with is the mark of the assistant's role.
        opened = [tag.group() for tag in tags if cue[: tag.start()].strip() and f"</{tag.group(1)}>" not in cue]
        return cls(
            ids=tuple(cast("list[int]", tokenizer.encode((whole or "") + (cued or ""), add_special_tokens=False))),
            end=next((token for token in ids if token in special), None),
            opened=opened[-1] if opened else None,
            uncued=uncued if uncued.strip() else "",
        )


def special_ids(tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    """Return the ids that text is decoded without: those of named special tokens, and of others that are marked so."""
    marked = (token for token, added in tokenizer.added_tokens_decoder.items() if added.special)
    return frozenset((*tokenizer.all_special_ids, *marked))


def complete_template(tokenizer: PreTrainedTokenizerBase, where: str, arguments: Mapping[str, object]) -> None:
    """Write arguments into a tokenizer's chat template, as the defaults of its variables.

    Args:
        tokenizer: changed in place.
        where: folder or name of its model.
        arguments: by name; that of CLOCK is a time in ISO 8601, which the template's clock then shows.

    Raises:
        ModelError: the template does not read one of them, or shows a time in a way that cannot be held.
    """
    check_arguments(tokenizer, arguments, "data.template", f"the template of {where}")
    _change(tokenizer, lambda template: _completed(template, where, arguments))


def check_arguments(tokenizer: PreTrainedTokenizerBase, names: Iterable[str], key: str, which: str) -> None:
    """Refuse arguments that a chat template does not read, or is given anyway.

    Args:
        tokenizer: has the template.
        names: of the arguments.
        key: where they are given, for the error.
        which: the template, for the error.

    Raises:
        ModelError: one is so; the first one is named.
    """
    code = " ".join(_CODE.findall(str(tokenizer.get_chat_template())))
    words = list(dict.fromkeys(re.findall(r"[A-Za-z_]\w*", _TEXT.sub("", code))))
    for name in names:
        if name in _GIVEN:
            raise ModelError(f"{key}: {name!r} is given to every template already; leave it out")
        if name not in words:
            raise ModelError(f"{key}: {name!r} is nothing that {which} reads{suggestion(name, words)}")


def take_texts(tokenizer: PreTrainedTokenizerBase) -> None:
    """Let a chat template that reads messages as lists of parts read those that are texts, too."""
    as_parts = [{"role": "user", "content": [{"type": "text", "text": _PROBE}]}]
    text, parts = _render(tokenizer, [_message("user", _PROBE)]), _render(tokenizer, as_parts)
    if _PROBE not in (text or "") and _PROBE in (parts or ""):
        _change(tokenizer, lambda template: _AS_PARTS + template)


def check_template(tokenizer: PreTrainedTokenizerBase, where: str) -> None:
    """Refuse a template that is not a function of the messages.

    Raises:
        ModelError: what a user says is lost in it, or it writes the same messages differently each time.
    """
    text = _render(tokenizer, [_message("user", _PROBE)])
    if text is not None and _PROBE not in text:
        lost = f"leaves out what the user says ({text[:80]!r})"
        raise ModelError(f"{where}: the chat template {lost}; {MEND_TEMPLATE}")
    found = {_render(tokenizer, [_message("user", _PROBE)], cue=True) for _ in range(4)}
    if len(found) > 1 and not _CLOCK_CALL.search(str(tokenizer.chat_template)):
        raise ModelError(
            f"{where}: the chat template writes the same messages differently each time, so that a resumed run "
            f"would see other prompts; expected text that depends on the messages alone: {MEND_TEMPLATE}"
        )


def hold_clock(tokenizer: PreTrainedTokenizerBase, now: Callable[[], datetime] = datetime.now) -> str | None:
    """Let a chat template that shows the time show this one from now on, and return it; None if it shows none.

    Raises:
        ModelError: it shows the time in a way that cannot be held.
    """
    if not _CLOCK_CALL.search(str(tokenizer.chat_template)):
        return None
    moment = now().isoformat(timespec="seconds")
    complete_template(tokenizer, "the tokenizer", {CLOCK: moment})
    return moment


def template_errors() -> tuple[type[Exception], ...]:
    """Return what a chat template may raise, which is a program of the model's author."""
    from jinja2 import TemplateError

    return (TemplateError, ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError)


def _behind(text: str, longer: str) -> str:
    """Return what follows in a text on what it has in common with another."""
    return longer[
        sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(text, longer, strict=False))) :
    ]


def _message(role: str, content: str) -> dict[str, object]:
    return {"role": role, "content": content}


def _render(
    tokenizer: PreTrainedTokenizerBase, messages: Sequence[Mapping[str, object]], *, cue: bool = False
) -> str | None:
    """Return what the template writes; None if it refuses the messages."""
    try:
        return str(tokenizer.apply_chat_template(list(messages), add_generation_prompt=cue, tokenize=False))  # pyright: ignore[reportArgumentType]
    except template_errors():
        return None


def _change(tokenizer: PreTrainedTokenizerBase, change: Callable[[str], str]) -> None:
    found = cast("str | dict[str, str]", tokenizer.chat_template)
    tokenizer.chat_template = (  # pyright: ignore[reportAttributeAccessIssue]
        change(found) if isinstance(found, str) else {name: change(one) for name, one in found.items()}
    )


def _completed(template: str, where: str, arguments: Mapping[str, object]) -> str:
    if (given := arguments.get(CLOCK)) is not None:
        try:
            moment = datetime.fromisoformat(str(given))
        except ValueError:
            raise ModelError(
                f"data.template.{CLOCK}={given!r}: expected the time that the template shows, such as "
                "2026-01-31T12:00:00"
            ) from None

        def shown(call: re.Match[str]) -> str:
            if call["format"] is None:
                raise ModelError(
                    f"{where}: the chat template asks for the time with a format that is not a literal, so a "
                    f"resumed run would see other prompts; {MEND_TEMPLATE}"
                )
            return _literal(moment.strftime(call["format"]))

        template = _CLOCK_CALL.sub(shown, template)
    defaults = ((name, _literal(value)) for name, value in arguments.items() if name != CLOCK)
    prefix = "".join(f"{{% set {name} = {name} | default({value}) %}}" for name, value in defaults)
    return f"{prefix}\n{template}" if prefix else template


def _literal(value: object) -> str:
    """Return a value as Jinja writes it.

    >>> _literal({"a": [None, True, "b"]})
    '{"a": [none, true, "b"]}'
    """
    if isinstance(value, Mapping):
        items = cast("Mapping[str, object]", value).items()
        return "{" + ", ".join(f"{_literal(str(name))}: {_literal(one)}" for name, one in items) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(_literal, cast("Sequence[object]", value))) + "]"
    return "none" if value is None else json.dumps(value, ensure_ascii=False)
