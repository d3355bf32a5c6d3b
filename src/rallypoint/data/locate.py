"""Which files a data set has: a file, a folder, a URL of fsspec, a name on the Hugging Face hub; or a generator.

Owns: what a path names, and which files of a folder are a split. Must not know: what is in a file.

Files are those of a split where the split's name is a word of their path, as Hugging Face's `datasets` finds them:

    train.jsonl    data/train-00000-of-00002.parquet    main/train/0000.parquet    train/data-00000-of-00001.arrow

A folder without any such word is the split `train`. Of a file in several formats the first of FORMATS is read; other
files of other formats are an error, except on the hub, where nobody can name a file.
"""

from __future__ import annotations

import dataclasses
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path, PurePosixPath

from rallypoint.data.files import FORMATS, Problems, as_os_errors, is_url, suggestion
from rallypoint.data.generators import Generator, check_generator, is_generator
from rallypoint.data.hub import unreachable
from rallypoint.data.remote import check_url
from rallypoint.errors import DataError

_WORDS = {
    "train": ("train", "training"),
    "validation": ("validation", "valid", "val", "dev"),
    "test": ("test", "testing", "eval", "evaluation"),
}
"""Words by which files are of a split; any other split is its own word."""
_DEPTH = 4
"""Folders that are looked into, one inside another."""


@dataclasses.dataclass(frozen=True, slots=True)
class DataSet:
    """Where rows come from, and what their columns are called there."""

    path: str
    subset: str | None = None
    """Folder of the files inside `path`, for data sets that have several."""
    splits: tuple[str, ...] = ("train",)
    """Splits of a folder, of which the first that is there is read."""
    columns: Mapping[str, str] = dataclasses.field(default_factory=dict[str, str])
    """Our name of a column -> its name in the files; others are called as here."""
    columns_key: str = "data.columns"
    """Config key that says so, for errors."""
    data_source: str | None = None
    """What the rows are called that do not say it themselves; None: the name of file, folder or repository."""
    drops_bad_rows: bool = False
    """Whether conversations and pairs that cannot be used are left out instead of being refused."""
    generator: Generator = dataclasses.field(default_factory=Generator)
    """How its entries are made, where `path` names a generator."""

    @property
    def name(self) -> str:
        """What its rows are called that do not say it themselves: `data_source`, or the name of file or folder."""
        if self.data_source is not None or is_hub_name(self.path) or is_generator(self.path):
            return self.data_source or self.path
        last = PurePosixPath(self.path.rstrip("/")).name
        return last.removesuffix(next((suffix for suffix in FORMATS if last.endswith(suffix)), ""))

    @classmethod
    def of(cls, path: str | Path | DataSet) -> DataSet:
        """Return the data set that a path stands for."""
        return path if isinstance(path, DataSet) else cls(str(path))


def is_hub_name(path: str) -> bool:
    """Whether a path can only name a data set on the hub.

    >>> is_hub_name("openai/gsm8k"), is_hub_name("./gsm8k"), is_hub_name("openai/gsm8k.jsonl")
    (True, False, False)
    """
    if path.count("/") != 1 or is_url(path) or path.startswith((".", "/", "~")) or Path(path).suffix in FORMATS:
        return False
    return not Path(path).exists() and not Path(path).parent.exists()


def is_local(path: str) -> bool:
    """Whether a path names a file or a folder of this machine."""
    return not (is_url(path) or is_hub_name(path) or is_generator(path))


_INSTEAD = {".json": " (write one JSON object per line)"} | dict.fromkeys(
    (".gz", ".zst", ".bz2", ".xz", ".zip"), " (decompress it first)"
)
"""What to do with files of other kinds."""


def check_dataset_path(path: str | Path) -> str | None:
    """Return what is wrong with a path, before anything is read or asked over a network; None if nothing is."""
    name, file = str(path), Path(path).expanduser()
    if is_generator(name):
        return check_generator(name)
    if not is_local(name):
        return check_url(name) if is_url(name) else None
    if file.is_dir():
        listed = any(_is_data(one) for one in _local_files(file))
        return None if listed else f"{path} is a folder that holds no {_formats()} file"
    if not file.exists():
        return _missing(path, file)
    if file.suffix not in FORMATS:
        hint = _INSTEAD.get(file.suffix, "")
        return f"{path}: expected a file that ends in {_formats()}{hint}, found {file.suffix or 'no ending'}"
    return f"{path} is empty (0 bytes)" if file.stat().st_size == 0 else None


def _missing(path: str | Path, file: Path) -> str:
    if file.is_symlink():
        return f"{path} is a link to {file.readlink()}, which does not exist"
    siblings = [entry.name for entry in file.parent.iterdir()] if file.parent.is_dir() else []
    missing = "file" if file.parent.is_dir() else f"folder {file.parent}"
    return f"{path} does not exist (no such {missing}){suggestion(file.name, siblings)}"


def files_of(dataset: DataSet) -> list[str]:
    """Return the files of a data set in order; those of the hub are downloaded.

    Raises:
        DataError: there are none, or it cannot be said which.
    """
    path = dataset.path
    if is_generator(path):
        return [path]
    if is_url(path):
        return _remote_files(dataset)
    if is_hub_name(path):
        return _hub_files(dataset)
    if (problem := check_dataset_path(path)) is not None:
        raise DataError(problem)
    folder = Path(path).expanduser()
    if not folder.is_dir():
        return [path]
    return [str(folder / name) for name in choose(_local_files(folder), dataset)]


def labelled(paths: Sequence[str | Path | DataSet], problems: Problems) -> Iterator[tuple[int, DataSet, str, str]]:
    """Yield every file with its data set, the place of this one, and what to call the file in errors.

    That is its last part, or all of it where two distinct files share that.
    """
    files: list[tuple[int, DataSet, str]] = []
    for part, dataset in enumerate(map(DataSet.of, paths)):
        try:
            files += [(part, dataset, file) for file in files_of(dataset)]
        except DataError as error:
            problems.add(str(error))
    shared = Counter(Path(file).name for file in {file for _, _, file in files})
    for part, dataset, file in files:
        yield part, dataset, file, file if shared[Path(file).name] > 1 else Path(file).name


def choose(names: Iterable[str], dataset: DataSet) -> list[str]:
    """Return the files of a split, by their paths inside a folder.

    >>> files = ["README.md", "main/test-0.parquet", "main/train-1.parquet", "main/train-0.parquet", "old/train.csv"]
    >>> choose(files, DataSet("folder", subset="main"))
    ['main/train-0.parquet', 'main/train-1.parquet']

    Raises:
        DataError: there are none, or several subsets.
    """
    found = sorted(name for name in names if _is_data(name))
    if dataset.subset is not None:
        inside = [name for name in found if dataset.subset in PurePosixPath(name).parts[:-1]]
        if not inside:
            raise DataError(f"{dataset.path} has no subset {dataset.subset!r}; it has {_listed(found)}")
        found = inside
    split = next((split for split in dataset.splits if any(_is_of(name, split) for name in found)), None)
    if split is not None:
        found = [name for name in found if _is_of(name, split)]
    elif "train" not in dataset.splits or any(_is_of(name, other) for name in found for other in _WORDS):
        raise DataError(f"{dataset.path} has no split {' or '.join(dataset.splits)}; it has {_listed(found)}")
    formats = [suffix for suffix in FORMATS if any(name.endswith(suffix) for name in found)]
    others = [name for name in found if not name.endswith(formats[0])] if formats else []
    found = [name for name in found if name not in others]
    twins = {str(PurePosixPath(name).with_suffix("")) for name in found}
    alone = [name for name in others if str(PurePosixPath(name).with_suffix("")) not in twins]
    if alone and not is_hub_name(dataset.path):
        raise DataError(
            f"{dataset.path} holds files of several formats, of which only {formats[0]} would be read: "
            f"{_listed([found[0], *alone])}; name the files in data.train, or leave only those of one format there"
        )
    if not found:
        raise DataError(f"{dataset.path} holds no {_formats()} file")
    subsets = sorted({_subset(name) for name in found})
    if len(subsets) > 1:
        shown = ", ".join(subset or "files beside them" for subset in subsets)
        raise DataError(f"{dataset.path} has several subsets: {shown}; choose one, with path and subset in data.train")
    return found


def _is_data(name: str) -> bool:
    file = PurePosixPath(name)
    return file.suffix in FORMATS and not file.name.startswith((".", "cache-"))


def _is_of(name: str, split: str) -> bool:
    words = "|".join(map(re.escape, _WORDS.get(split, (split,))))
    return re.search(rf"(?<![a-z0-9])({words})(?![a-z0-9])", name, re.IGNORECASE) is not None


def _subset(name: str) -> str:
    """Return the folder of a file, without those that only say `data` or name the split."""
    parts = PurePosixPath(name).parts[:-1]
    words = {word for names in _WORDS.values() for word in names}
    return "/".join(part for part in parts if part.lower() not in words | {"data", "default"})


def _local_files(folder: Path) -> list[str]:
    return [
        path.relative_to(folder).as_posix()
        for path in folder.rglob("*")
        if path.is_file() and len(path.relative_to(folder).parts) <= _DEPTH
    ]


def _remote_files(dataset: DataSet) -> list[str]:
    import fsspec

    if problem := check_url(dataset.path):
        raise DataError(problem)
    try:
        with as_os_errors(dataset.path):
            system, root = fsspec.core.url_to_fs(dataset.path)
            if not system.isdir(root):
                return [dataset.path]
            found = system.find(root, maxdepth=_DEPTH)
        names = {str(name).removeprefix(root).lstrip("/"): str(name) for name in found}
        return [str(system.unstrip_protocol(names[name])) for name in choose(names, dataset)]
    except (OSError, ImportError) as error:
        raise DataError(f"{dataset.path} cannot be read: {error}") from error


def _hub_files(dataset: DataSet) -> list[str]:
    """Return files of the hub's cache; those that are not in it are downloaded."""
    from huggingface_hub import HfApi, constants, hf_hub_download, snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    name = dataset.path
    problem = "HF_HUB_OFFLINE is set" if constants.is_offline_mode() else unreachable(f"{constants.ENDPOINT}/api")
    try:
        if problem is None:
            listed = HfApi().list_repo_files(name, repo_type="dataset")
            return [hf_hub_download(name, file, repo_type="dataset") for file in choose(listed, dataset)]
        folder = Path(snapshot_download(name, repo_type="dataset", local_files_only=True))
    except LocalEntryNotFoundError as error:
        raise DataError(
            f"{name}: there is no such file or folder here, and the hub cannot be reached ({problem}); where there is "
            f"a network: hf download {name} --repo-type dataset --local-dir FOLDER, and give FOLDER instead of the name"
        ) from error
    except (HfHubHTTPError, OSError) as error:
        raise DataError(f"{name}: no such file or folder is here, and the hub does not give it: {error}") from error
    return [str(folder / file) for file in choose(_local_files(folder), dataset)]


def _formats() -> str:
    return f"{', '.join(FORMATS[:-1])} or {FORMATS[-1]}"


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names[:5]) + (" ..." if len(names) > 5 else "") if names else f"no {_formats()} file"
