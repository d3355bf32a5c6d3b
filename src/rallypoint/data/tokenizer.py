"""Tokenizers: loading one, making the one of the digits tasks, and the text of each token.

Owns: what a usable tokenizer is. Must not know: models, tensors. transformers is imported only when a tokenizer is
needed.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, cast

from rallypoint.data.files import suggestion
from rallypoint.data.hub import check_hub
from rallypoint.data.remote import here
from rallypoint.data.template import (
    TemplateProbe,
    check_template,
    complete_template,
    special_ids,
    take_texts,
    template_errors,
)
from rallypoint.errors import ModelError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

    from rallypoint.config.sections.material import TokenizerConfig

_EOS = "<eos>"
_PLAIN_NAMES = ("<unk>", "<system>", "<user>", "<assistant>")
_CHARACTERS = "0123456789+-= ,"
_CHAT_TEMPLATE = """\
{%- for message in messages -%}
    {%- if message.role not in ["system", "user", "assistant"] -%}
        {{- raise_exception("the digits tokenizer knows no role " + message.role) -}}
    {%- endif -%}
    {{- "<" + message.role + ">" + message.content -}}
    {%- if message.role == "assistant" -%}{{- eos_token -}}{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- "<assistant>" -}}{%- endif -%}
"""
_NUM_TRIED = 32
"""Words that are tried for whether a tokenizer encodes anything."""
_UNFINISHED = "\ufffd"
"""What a tokenizer writes for a part of a character."""
_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer.model",
    "vocab.json",
    "vocab.txt",
    "spiece.model",
    "tekken.json",
    "*.tiktoken",
)


def make_digits_tokenizer() -> PreTrainedTokenizerFast:
    """Return the tokenizer of the digits tasks: one token a character, 20 ids in all.

    `<eos>` is its only special token, and stands in for padding as well. The names of the roles are ordinary
    tokens, so that `decode(skip_special_tokens=True)` shows them where an untrained policy samples one: the
    text of a response then still has one symbol for each of its tokens, which `score_digits` relies on.

    >>> tokenizer = make_digits_tokenizer()
    >>> prompt = tokenizer.apply_chat_template([{"role": "user", "content": "31"}], add_generation_prompt=True)
    >>> tokenizer.convert_ids_to_tokens(prompt["input_ids"])
    ['<user>', '3', '1', '<assistant>']
    """
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    tokens = [_EOS, *_PLAIN_NAMES, *_CHARACTERS]
    backend = Tokenizer(models.WordLevel({token: number for number, token in enumerate(tokens)}, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    backend.decoder = decoders.Fuse()
    backend.add_tokens([AddedToken(name, special=False, normalized=False) for name in _PLAIN_NAMES])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token=_EOS, pad_token=_EOS, clean_up_tokenization_spaces=False
    )
    tokenizer.chat_template = _CHAT_TEMPLATE
    return tokenizer


def load_tokenizer(
    folder: str | Path,
    *,
    trust_remote_code: bool = False,
    for_chat: bool = True,
    changes: TokenizerConfig | None = None,
    template: Mapping[str, object] | None = None,
) -> PreTrainedTokenizerBase:
    """Load the tokenizer of a model folder, or of a model on the Hugging Face hub when no such folder exists.

    Args:
        folder: path or name.
        trust_remote_code: whether Python code in the folder may run.
        for_chat: whether a chat template is needed.
        changes: what the config changes in it.
        template: arguments of its chat template, by name.

    Returns:
        The tokenizer, which decodes what was sampled as it is, and whose chat template has its arguments.

    Raises:
        ModelError: it cannot be loaded or changed, encodes nothing, or lacks a chat template that fits or an
            end-of-sequence token.
    """
    folder = here(folder) if isinstance(folder, str) else folder
    path = Path(folder).expanduser()
    is_local = path.exists()
    if is_local:
        _check_folder(path)
    elif isinstance(folder, Path) or _looks_like_path(folder):
        raise ModelError(f"model folder {folder} does not exist")
    else:
        check_hub(str(folder))
    where = str(path) if is_local else str(folder)
    tokenizer = _read(where, is_local, trust_remote_code)
    config_file = f"{where}/tokenizer_config.json"
    if len(tokenizer) == 0 or set(tokenizer.get_vocab()) <= set(tokenizer.all_special_tokens):
        raise ModelError(f"{where}: the tokenizer has no vocabulary; save the model's own with save_pretrained")
    _check_encodes(tokenizer, where)
    _keep_blanks(tokenizer)
    if changes is not None:
        _change(tokenizer, changes, where)
    if for_chat and tokenizer.chat_template is None:
        raise ModelError(
            f"{where}: the tokenizer has no chat template, as is usual for base models; for training set "
            "model.tokenizer.chat_template=FILE, a template in Jinja; elsewhere put it beside tokenizer.json as "
            "chat_template.jinja"
        )
    if tokenizer.eos_token_id is None:
        raise ModelError(
            f"{where}: the tokenizer has no end-of-sequence token, so that no response could end; for training set "
            f"model.tokenizer.eos_token=TOKEN; elsewhere name it with the key 'eos_token' in {config_file}"
        )
    if tokenizer.chat_template is not None:
        if template:
            complete_template(tokenizer, where, template)
        take_texts(tokenizer)
        if for_chat:
            check_template(tokenizer, where)
    return tokenizer


def _read(where: str, is_local: bool, trust_remote_code: bool) -> PreTrainedTokenizerBase:
    from transformers import AutoTokenizer

    try:
        return cast(
            "PreTrainedTokenizerBase",
            AutoTokenizer.from_pretrained(where, local_files_only=is_local, trust_remote_code=trust_remote_code),
        )
    except Exception as error:  # the tokenizers library raises bare `Exception` for a file it cannot read
        raise ModelError(_explain_load_failure(where, is_local, error)) from error


def _check_encodes(tokenizer: PreTrainedTokenizerBase, where: str) -> None:
    """Refuse a tokenizer that makes nothing of its own words.

    Raises:
        ModelError: so it is; the class that transformers has chosen is named.
    """
    special = special_ids(tokenizer)
    words = itertools.islice(
        (word for word in sorted(tokenizer.get_vocab().values()) if word not in special), _NUM_TRIED
    )
    texts = [text for word in words if (text := str(tokenizer.decode([word]))).strip() and _UNFINISHED not in text]
    if not texts or any(tokenizer.encode(text, add_special_tokens=False) for text in texts):
        return
    try:
        named = json.loads((Path(where) / "tokenizer_config.json").read_text(encoding="utf-8")).get("tokenizer_class")
    except (OSError, ValueError, AttributeError):
        named = None
    raise ModelError(
        f"{where}: the tokenizer makes no token of {texts[0]!r}, nor of any other word of its own: transformers has "
        f"loaded it as {type(tokenizer).__name__}, for the model_type in config.json comes before the class in "
        f"tokenizer_config.json ({named}); expected a tokenizer.json of the kind that this class reads, as "
        "that of a published model of this type"
    )


def _keep_blanks(tokenizer: PreTrainedTokenizerBase) -> None:
    """Have text decoded as it was sampled, also where the tokenizer would take blanks before punctuation away."""
    tokenizer.clean_up_tokenization_spaces = False
    if tokenizer.is_fast:
        from tokenizers import decoders
        from transformers import PreTrainedTokenizerFast

        assert isinstance(tokenizer, PreTrainedTokenizerFast)
        decoder = tokenizer.backend_tokenizer.decoder
        if isinstance(decoder, decoders.WordPiece | decoders.CTC):
            decoder.cleanup = False


def _change(tokenizer: PreTrainedTokenizerBase, changes: TokenizerConfig, where: str) -> None:
    """Give a tokenizer the chat template and the end token that a config names.

    Raises:
        ModelError: the template cannot be read, or is none; or the token is not in the vocabulary.
    """
    from jinja2 import TemplateSyntaxError

    if (end := changes.eos_token) is not None:
        vocabulary = tokenizer.get_vocab()
        if end not in vocabulary:
            hint = suggestion(end, list(vocabulary)) or f"; special ones are {', '.join(tokenizer.all_special_tokens)}"
            raise ModelError(f"model.tokenizer.eos_token={end!r} is not a token of {where}{hint}")
        tokenizer.eos_token = end
    if changes.chat_template is None:
        return
    file = Path(changes.chat_template).expanduser()
    try:
        tokenizer.chat_template = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else f"it is not text: {error}"
        raise ModelError(f"model.tokenizer.chat_template={file} cannot be read: {reason}") from error
    try:
        tokenizer.apply_chat_template([{"role": "user", "content": ""}], tokenize=False)
    except TemplateSyntaxError as error:
        raise ModelError(
            f"model.tokenizer.chat_template={file}, line {error.lineno}: no template in Jinja: {error.message}"
        ) from error
    except template_errors():  # of a message that it does not like; the rows of the run will tell
        return


def save_tokenizer(tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    """Write a tokenizer into a model folder, and what ends a turn into generation_config.json there, if that lacks it.

    Raises:
        OSError: the disk is full or not writable.
    """
    try:
        tokenizer.save_pretrained(folder)
    except OSError:
        raise
    except Exception as error:  # the tokenizers library raises bare `Exception` for a disk that is full
        raise OSError(f"{folder}: the tokenizer cannot be written: {error}") from error
    file, own = folder / "generation_config.json", (tokenizer.eos_token_id, TemplateProbe.of(tokenizer).end)
    if not file.is_file():
        return
    values = cast("dict[str, object]", json.loads(file.read_text(encoding="utf-8")))
    named = values.get("eos_token_id")
    ends = cast("list[object]", named) if isinstance(named, list) else [] if named is None else [named]
    if new := [end for end in dict.fromkeys(own) if end is not None and end not in ends]:
        ends = [*new, *ends]
        values["eos_token_id"] = ends if len(ends) > 1 else ends[0]
        file.write_text(json.dumps(values, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def decoder(tokenizer: PreTrainedTokenizerBase) -> Callable[[Sequence[int]], str]:
    """Return what turns token ids into text, without special tokens."""
    return lambda tokens: str(tokenizer.decode(list(tokens), skip_special_tokens=True))


def _looks_like_path(name: str) -> bool:
    """Say whether a name cannot be a hub id, which is `name` or `organisation/name`."""
    return name.startswith(("/", ".", "~")) or name.count("/") > 1


def _check_folder(path: Path) -> None:
    if not path.is_dir():
        raise ModelError(f"{path} is a file, expected a model folder with config.json and tokenizer.json")
    if not any(any(path.glob(pattern)) for pattern in _TOKENIZER_FILES):
        raise ModelError(
            f"{path} has no tokenizer (no tokenizer.json, tokenizer.model or vocab.json); "
            "copy it from the model this one was made from, with tokenizer.save_pretrained"
        )


def _explain_load_failure(where: str, is_local: bool, error: Exception) -> str:
    reason = f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0]}"
    if "trust_remote_code" in str(error):
        return (
            f"{where}: its tokenizer is code of its own; if you trust its author, set model.trust_remote_code=true for "
            "a run, or give --trust-remote-code to another command"
        )
    if is_local:
        files = "tokenizer.json, tokenizer_config.json or config.json"
        return f"{where}: its tokenizer cannot be read; {files} is damaged: {reason}"
    return (
        f"{where!r} is neither a folder here ({Path(where).absolute()} does not exist) "
        f"nor a model that the Hugging Face hub could give us: {reason}"
    )


class TokenTexts:
    """The text of each token of a response, so that the texts joined are the whole text.

    A single token has no text of its own in every tokenizer: it may be part of a character, or lose its leading space.
    So a token's text is what it adds to the text before it. The text of a character made of several tokens belongs to
    the last of them; those before it have none. The text of a special token is its name.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        self._alone: dict[int, str] = {}
        """The texts of single tokens, which mostly are the right ones."""

    def __call__(self, token_ids: Sequence[int]) -> list[str]:
        """Return a text for each token."""
        new = list(dict.fromkeys(token for token in token_ids if token not in self._alone))
        self._alone.update((token, self._decode([token])) for token in new)
        texts = [self._alone[token] for token in token_ids]
        return texts if "".join(texts) == self._decode(token_ids) else self._one_by_one(token_ids)

    def _one_by_one(self, token_ids: Sequence[int]) -> list[str]:
        """Decode ever longer pieces; a piece begins at the token before the last one that finished a character."""
        texts: list[str] = []
        first, told = 0, 0
        for end in range(1, len(token_ids) + 1):
            before, now = self._decode(token_ids[first:told]), self._decode(token_ids[first:end])
            is_whole = not now.endswith(_UNFINISHED) or end == len(token_ids)
            texts.append(now[len(before) :] if is_whole else "")
            if is_whole:
                first, told = told, end
        return texts

    def _decode(self, token_ids: Sequence[int]) -> str:
        return str(
            self._tokenizer.decode(list(token_ids), skip_special_tokens=False, clean_up_tokenization_spaces=False)
        )
