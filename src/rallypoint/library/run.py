"""A run as a value: its numbers, its rollouts, its picture, its model. Everything is read from its folder."""

from __future__ import annotations

import dataclasses
import importlib
import math
import tempfile
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from rallypoint import checkpoint
from rallypoint.config import RunConfig, TrainerConfig, load_config
from rallypoint.data.files import is_url
from rallypoint.display import save_curve
from rallypoint.errors import ModelError, RunFolderError, first_line
from rallypoint.extras import find_unusable
from rallypoint.journal import STEP
from rallypoint.model_files import is_adapter
from rallypoint.page import RunReader, write_report
from rallypoint.recipes.use import find_trained
from rallypoint.run import why_no_plot
from rallypoint.run.copies import borrow
from rallypoint.run.folder import RunFolder, named_run
from rallypoint.run.reports import REWARD, VALIDATION
from rallypoint.run.rollouts import read_rollouts
from rallypoint.sampling.traces import trace_of

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


@dataclasses.dataclass(frozen=True, slots=True)
class Best:
    """The step after which a run was best."""

    step: int
    score: float
    """Validation score; in a run without validation the mean reward of the step."""
    checkpoint: Path | None
    """Its checkpoint, if there is one (`checkpoint.keep_best`)."""


@dataclasses.dataclass(frozen=True, slots=True)
class Picture:
    """A file with a picture; a notebook shows it."""

    path: Path

    def _repr_png_(self) -> bytes:
        return self.path.read_bytes()


class Rows(list[dict[str, Any]]):
    """Rows, each with its columns by name."""

    def to_pandas(self) -> Any:
        """Return them as a `pandas.DataFrame`; a column that a row lacks is NaN there.

        Raises:
            RunFolderError: pandas is missing.
        """
        if (problem := find_unusable("pandas", "pandas")) is not None:
            raise RunFolderError(f"no DataFrame: it {problem}")
        return importlib.import_module("pandas").DataFrame(self)


@dataclasses.dataclass(frozen=True, slots=True)
class Page:
    """The page of runs, whole; a notebook shows it in a frame, where it can touch nothing of the notebook."""

    html: str = dataclasses.field(repr=False)

    def _repr_html_(self) -> str:
        style = "width:100%;height:760px;border:0"
        return f'<iframe sandbox="allow-scripts" style="{style}" srcdoc="{escape(self.html)}"></iframe>'


@dataclasses.dataclass(frozen=True, slots=True)
class Run:
    """The folder of a run, whether it has ended, was stopped, or goes on."""

    folder: Path

    @property
    def config(self) -> RunConfig:
        """Every key with its value."""
        return load_config(str(self.folder)).config

    @property
    def metrics(self) -> Rows:
        """The numbers of each step, that of step 0 first; `run.metrics.to_pandas()` is a table of them."""
        steps: dict[int, dict[str, float]] = {}
        for record in self._records():
            steps.setdefault(int(record[STEP]), {}).update(record)
        return Rows(steps[step] for step in sorted(steps))

    @property
    def num_steps(self) -> int:
        """Steps done."""
        return max((int(record[STEP]) for record in self._records()), default=0)

    @property
    def finished(self) -> bool:
        """Whether all steps are done, and the last checkpoint is written."""
        return self.config.trainer.num_steps in self.checkpoints

    @property
    def checkpoints(self) -> dict[int, Path]:
        """The checkpoints by their step, oldest first; each is a folder of Hugging Face's."""
        folder = RunFolder(self.folder).checkpoints
        return {step: folder / checkpoint.checkpoint_name(step) for step in checkpoint.steps(folder)}

    @property
    def best(self) -> Best:
        """The best step by validation score, or else by mean reward; the first of equals, and none that is not finite.

        Raises:
            RunFolderError: no step has a score yet.
        """
        for name in (VALIDATION, REWARD):
            records = [record for record in self._records() if math.isfinite(record.get(name, math.nan))]
            scores = {int(record[STEP]): record[name] for record in records}
            if scores:
                step = max(scores, key=scores.__getitem__)
                return Best(step, scores[step], self.checkpoints.get(step))
        how = "" if self.config.data.validation else "; with data.validation each validation gives one"
        raise RunFolderError(f"{self.folder}: no step has a score yet{how}")

    def rollouts(self, step: int | None = None, *, validation: bool = False) -> Rows:
        """Return the rollouts of a step, by default of the newest, each with the columns of docs/tracking.md by name.

        Args:
            step: that they were trained on in.
            validation: whether to return those of the validation after the step instead.

        Raises:
            RunFolderError: there are none of that step (`tracking.rollouts_gib`).
        """
        return Rows(read_rollouts(self.folder, step, "validation" if validation else "step"))

    def traces(self, step: int | None = None, *, validation: bool = False) -> list[dict[str, Any]]:
        """Return the same rollouts as training traces of OpenEnv (version 1), which other trainers read.

        Args:
            step: as of `rollouts`.
            validation: likewise.

        Raises:
            RunFolderError: see `rollouts`.
        """
        return [trace_of(row) for row in self.rollouts(step, validation=validation)]

    def curve(self) -> Picture:
        """Draw reward and validation score.

        Raises:
            RunFolderError: matplotlib is missing.
        """
        drawn = save_curve(RunFolder(self.folder))
        if drawn is None:
            raise RunFolderError(f"no picture: {why_no_plot()}")
        return Picture(drawn)

    def view(self, *others: Run) -> Page:
        """Show the page of the run in a notebook, from one file; beside those of other runs.

        The page is that of the moment. `rally view` shows a run that goes on.
        """
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "page.html"
            write_report(RunReader.several([self.folder, *(other.folder for other in others)]), file)
            return Page(file.read_text(encoding="utf-8"))

    def load(self, step: int | None = None) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
        """Return a trained model and its tokenizer, as transformers loads them.

        With LoRA the model is PEFT's, which passes on what a model of transformers has.

        Args:
            step: of a checkpoint; None for the newest.

        Raises:
            ModelError: there is no such checkpoint, or PEFT is missing.
            CheckpointError: it is damaged.
        """
        if step is not None and step not in self.checkpoints:
            there = ", ".join(map(str, self.checkpoints)) or "none"
            raise ModelError(f"{self.folder} has no checkpoint of step {step}; there are those of {there}")
        return load_pair(str(self.folder if step is None else self.checkpoints[step]))

    def _records(self) -> list[dict[str, float]]:
        return RunFolder(self.folder).state().records

    def __repr__(self) -> str:
        scores = [record[VALIDATION] for record in self._records() if VALIDATION in record]
        score = f", validation {scores[-1]:.3f}" if scores else ""
        return f"Run({str(self.folder)!r}: {self.num_steps} of {self.config.trainer.num_steps} steps{score})"


def load_run(folder: str | Path) -> Run:
    """Return the run of a folder or a URL, or of that name in `runs`; of a URL a copy, without checkpoints.

    Raises:
        RunFolderError: it is not the folder of a run.
    """
    path = borrow(str(folder)) if is_url(str(folder)) else Path(folder).expanduser().absolute()
    if not path.is_dir() and (named := named_run(str(folder), Path(TrainerConfig().runs_dir))) is not None:
        return Run(named.absolute())
    if not path.is_dir():
        raise RunFolderError(f"{folder}: no such folder (looked in {Path.cwd()}); expected the folder of a run")
    if not (path / "config.yaml").is_file():
        raise RunFolderError(f"{folder} is not the folder of a run: config.yaml is missing in it")
    return Run(path)


def load_pair(name: str) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Return model and tokenizer of what `find_trained` finds, as other tools load them."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from rallypoint.models import MAKING

    trained = find_trained(name)
    tokenizer = AutoTokenizer.from_pretrained(trained.tokenizer_path)
    if not is_adapter(trained.path):
        with MAKING:
            return AutoModelForCausalLM.from_pretrained(trained.path, dtype="auto"), tokenizer
    try:
        from peft import PeftModel
    except ImportError as error:
        said = "" if isinstance(error, ModuleNotFoundError) and error.name == "peft" else f" ({first_line(error)})"
        raise ModelError(
            f"{trained.path} is an adapter, which peft loads{said}: pip install peft, or merge it with `rally export`"
        ) from None
    with MAKING:
        base = AutoModelForCausalLM.from_pretrained(trained.model_path, dtype="auto")
        return cast("PreTrainedModel", PeftModel.from_pretrained(base, trained.path)), tokenizer
