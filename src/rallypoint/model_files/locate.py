"""The files of a model, in a folder, at a URL or on the Hugging Face hub: configs, and safetensors files.

Owns: the rules by which Hugging Face tools find them, and errors about what transformers cannot read. Must not know:
what is in the files, except configs and the index.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoConfig,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    GenerationConfig,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.utils import logging as transformers_logging
from transformers.utils.hub import cached_file

from rallypoint.data.hub import check_hub
from rallypoint.data.remote import here
from rallypoint.errors import ModelError
from rallypoint.families import FAMILIES
from rallypoint.model_files.mxfp4 import METHOD
from rallypoint.model_files.reader import TensorFiles

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"


def quiet_transformers() -> None:
    """Keep the progress bars and advice of transformers off the screen."""
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()


def read_config(path: str, trust_remote_code: bool, **changes: Any) -> PreTrainedConfig:
    """Read config.json, with changes.

    Raises:
        ModelError: it cannot be read, or describes a model that cannot be trained.
    """
    quiet_transformers()
    path = here(path)
    folder = Path(path).expanduser()
    if path.startswith(("/", ".", "~")) and not folder.is_dir():
        raise ModelError(f"{path}: there is no such folder")
    if folder.is_dir() and not (folder / "config.json").is_file():
        raise ModelError(f"{path}: not a Hugging Face model folder: expected config.json in it, and *.safetensors")
    if not folder.is_dir():
        check_hub(path)
    with explained(path):
        config = AutoConfig.from_pretrained(path, **_options(path, trust_remote_code), **changes)
    if quantization := getattr(config, "quantization_config", None):
        method = quantization.get("quant_method", "quantized")
        if method != METHOD:
            raise ModelError(
                f"{path}: its weights are quantized ({method}), which cannot be trained; use the original ones"
            )
        # They are read as ordinary numbers, and saved so.
        del config.quantization_config  # pyright: ignore[reportAttributeAccessIssue]
    return _language_model(config, changes)


def _language_model(config: PreTrainedConfig, changes: Mapping[str, Any]) -> PreTrainedConfig:
    """Return the config of the language model in one that sees as well, if we know that; what sees is left out."""
    text = config.get_text_config()
    family = FAMILIES.get(str(text.model_type))
    if text is config or family is None or family.within != config.model_type:
        return config
    tied = text.tie_word_embeddings or config.tie_word_embeddings
    kind = cast("type[PreTrainedModel]", MODEL_FOR_CAUSAL_LM_MAPPING[type(text)])
    text.update({"architectures": [kind.__name__], "tie_word_embeddings": tied})
    text.update(dict(changes))
    return text


def _options(path: str, trust_remote_code: bool) -> dict[str, Any]:
    return {"trust_remote_code": trust_remote_code, "local_files_only": Path(path).expanduser().is_dir()}


def read_generation_config(path: str, model: PreTrainedModel) -> None:
    """Read the folder's sampling defaults, which are saved with the model again."""
    path = here(path)
    folder = Path(path).expanduser()
    if not model.can_generate() or (folder.is_dir() and not (folder / "generation_config.json").is_file()):
        return
    with explained(path) if folder.is_dir() else contextlib.suppress(OSError):  # a repository need not have one
        model.generation_config = GenerationConfig.from_pretrained(folder if folder.is_dir() else path)


def open_weights(path: str) -> TensorFiles:
    """Open the weight files of a folder or a hub name, which is downloaded if it is not cached.

    Raises:
        ModelError: there are none, files that the index names are missing or have other tensors than it says, or one is
            damaged.
    """
    paths, index = _find_weights(path)
    files = TensorFiles(paths)
    misplaced = [
        f"{name} is not in {file}"
        for name, file in index.items()
        if name not in files.entries or files.entries[name].path.name != file
    ]
    if misplaced:
        files.close()
        shown = ", ".join(misplaced[:5]) + (f", and {len(misplaced) - 5} more" if len(misplaced) > 5 else "")
        raise ModelError(
            f"{paths[0].parent}: {INDEX} and its files do not belong together: {shown}; "
            "copy or download the folder again"
        )
    return files


def _find_weights(path: str) -> tuple[Sequence[Path], Mapping[str, str]]:
    """Return the weight files, and the index, tensor -> file name; it is empty for a single file."""
    path = here(path)
    folder = Path(path).expanduser()
    if not folder.is_dir():
        return _find_on_hub(path)
    if (folder / SINGLE).is_file():
        return [folder / SINGLE], {}
    if not (folder / INDEX).is_file():
        for name in (SINGLE, INDEX):
            if (folder / name).exists() or (folder / name).is_symlink():
                what = "a folder" if (folder / name).is_dir() else "a pipe, a device or a broken link"
                raise ModelError(f"{folder / name}: expected a file, found {what}; put the file there, or a link to it")
        pickled = sorted(file.name for pattern in ("*.bin", "*.pt", "*.pth") for file in folder.glob(pattern))
        what = f"found {', '.join(pickled[:3])}, but pickled weights are not loaded; " if pickled else ""
        raise ModelError(
            f"{path}: expected {SINGLE} or {INDEX}; {what}save the model again with save_pretrained of a current "
            "transformers, which writes safetensors"
        )
    index = _read_index(folder / INDEX)
    names = sorted(set(index.values()))
    if missing := [name for name in names if not (folder / name).is_file()]:
        raise ModelError(
            f"{path}: {INDEX} names {len(names)} files, of which {len(missing)} are missing: "
            f"{', '.join(missing[:10])}; copy or download them"
        )
    return [folder / name for name in names], index


def _find_on_hub(name: str) -> tuple[Sequence[Path], Mapping[str, str]]:
    """Resolve a repository as transformers does, with its cache, offline mode, revisions and tokens."""
    try:
        return [Path(str(cached_file(name, SINGLE)))], {}
    except OSError:
        with explained(name):
            index = _read_index(Path(str(cached_file(name, INDEX))))
            return [Path(str(cached_file(name, file))) for file in sorted(set(index.values()))], index


def _read_index(path: Path) -> dict[str, str]:
    try:
        index = json.loads(path.read_text(encoding="utf-8"))["weight_map"]
        wrong = [name for name in index.values() if Path(name).name != name or not name.endswith(".safetensors")]
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ModelError(
            f"{path}: cannot be read as the index of a model: {error}; copy or download it again"
        ) from error
    if wrong or not index:
        raise ModelError(f"{path}: expected names of safetensors files beside it, found {wrong[:3] or 'none'}")
    return index


@contextlib.contextmanager
def explained(path: str, config: PreTrainedConfig | None = None) -> Iterator[None]:
    """Turn errors of transformers about a folder or a hub name into a `ModelError` that names it.

    Args:
        path: the folder or name.
        config: its config, if that could be read.
    """
    try:
        yield
    except ModelError as error:
        if path in str(error):
            raise
        raise ModelError(f"{path}: {error}") from error
    except (
        OSError,
        ValueError,
        RuntimeError,
        KeyError,
        ImportError,
        SafetensorError,
        # Values in config.json that have the wrong type, or describe no model.
        StrictDataclassError,
        TypeError,
        AttributeError,
        ArithmeticError,
    ) as error:
        reason = None if config is None else _unknown_type(error, config) or _unknown_value(error, config)
        raise ModelError(f"{path}: {reason or f'transformers cannot load it: {error}'}") from error
    except AssertionError as error:
        # Raised by torch's embedding. Not checked earlier, because a model that ignores its padding may have any id.
        if config is None or not str(error).startswith("Padding_idx"):
            raise
        text = config.get_text_config()
        raise ModelError(
            f"{path}: config.json says pad_token_id={text.pad_token_id}, but vocab_size={text.vocab_size}: set "
            "pad_token_id to a token of the vocabulary there, or to null"
        ) from error


def _unknown_type(error: Exception, config: PreTrainedConfig) -> str | None:
    """Explain that transformers lacks a model class for a type; its own error lists all other types."""
    text = str(error)
    if not text.startswith("Unrecognized configuration class"):
        return None
    known = f"models of type {', '.join(FAMILIES)} are supported, and others that work alike"
    if AutoModelForTokenClassification.__name__ in text:
        return (
            f"transformers has no token classifier for models of type {config.model_type!r}, so that they cannot be a "
            f"critic; set critic.path to a model of another type with the same tokenizer, or recipe=grpo, which has no "
            f"critic; {known}"
        )
    if AutoModelForSequenceClassification.__name__ in text:
        return (
            f"transformers has no sequence classifier for models of type {config.model_type!r}, so that they cannot be "
            f"a reward model; set reward.path to a model of another type, or use a reward.function; {known}"
        )
    return (
        f"models of type {config.model_type!r} are not causal language models in transformers, and nothing else can be "
        f"a policy; {known}"
    )


def _unknown_value(error: Exception, config: PreTrainedConfig) -> str | None:
    """Name the keys of config.json whose values transformers did not find in a table."""
    if not isinstance(error, KeyError):
        return None
    found = [f"{key}={value!r}" for key, value in config.to_dict().items() if error.args == (value,)]
    return (
        f"config.json says {' and '.join(found)}, which transformers does not know; correct it, or: "
        "pip install --upgrade transformers"
        if found
        else None
    )
