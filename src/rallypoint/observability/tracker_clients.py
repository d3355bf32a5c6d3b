"""The clients of trackers: TensorBoard, Weights & Biases, MLflow, trackio, SwanLab; and verl's names for our metrics.

Owns: what each client is called with. Must not know: threads, and what a metric means. Each is given a run (`Tracked`),
and continues that of an earlier start if the run was resumed.

A resumed run does the steps after its checkpoint again. TensorBoard drops the old ones; the others would have them
twice, so they are told nothing that an earlier start has told them (`Once`).
"""

from __future__ import annotations

import importlib
import json
import math
import os
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rallypoint.config.other_projects import other_projects
from rallypoint.journal import Ending, Journal
from rallypoint.observability.trackers import CLOSE_S, Open, Row, Tracked, Trackers

_ROLLOUTS, _CURVE = "rollouts", "curve"
"""Names of the table and of the picture."""
_TABLE_TAG, _MAX_TABLES = "mlflow.loggedArtifacts", 20
"""The tag by which MLflow's page finds tables, and how many of the newest it names: a tag has a bound."""
_MAX_PARAMS = 100
"""Params that MLflow takes at once."""
_MLFLOW_STATUS: dict[Ending, str] = {"finished": "FINISHED", "stopped": "KILLED", "failed": "FAILED"}
_WANDB_EXIT: dict[Ending, int] = {"finished": 0, "stopped": 255, "failed": 1}
"""255 is wandb's own for a run that was ended by Ctrl-C."""
_SWANLAB_STATE: dict[Ending, str] = {"finished": "success", "stopped": "aborted", "failed": "crashed"}


class TensorBoard:
    """Event files in the run's folder, below `tensorboard/`; the table is a page of text."""

    def __init__(self, run: Tracked) -> None:
        from torch.utils.tensorboard import SummaryWriter

        first = run.first_step + 1 if run.first_step else 0  # a run that begins again does step 0 again, too
        self._writer = SummaryWriter(str(run.folder / "tensorboard"), purge_step=first)
        self._writer.add_text("config", "\n".join(f"    {key}: {value}" for key, value in run.config.items()), 0)

    def log(self, step: int, scalars: Mapping[str, float]) -> None:
        """See `Tracker`, as for the other methods."""
        for name, value in scalars.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def table(self, step: int, rows: Sequence[Row]) -> None:
        """Write a table in Markdown."""
        self._writer.add_text(_ROLLOUTS, as_markdown(rows), step)

    def picture(self, step: int, png: Path) -> None:
        """Read the picture with what has drawn it."""
        from matplotlib import image

        self._writer.add_image(_CURVE, image.imread(png), step, dataformats="HWC")

    def close(self, ending: Ending) -> None:  # noqa: ARG002 - event files have no status
        """Flush."""
        self._writer.close()


class _Logs:
    """A client whose run takes what it is told as a dictionary."""

    _client: Any
    _run: Any

    def log(self, step: int, scalars: Mapping[str, float]) -> None:
        """See `Tracker`, as for the other methods."""
        self._run.log(dict(scalars), step=step)

    def picture(self, step: int, png: Path) -> None:
        """An image of the client's."""
        self._run.log({_CURVE: self._client.Image(str(png))}, step=step)


class WeightsAndBiases(_Logs):
    """A run of wandb, which a resumed run goes on with; WANDB_MODE=offline keeps it on this machine."""

    def __init__(self, run: Tracked, client: Any = None) -> None:
        self._client = client or importlib.import_module("wandb")
        self._run = self._client.init(
            project=run.project,
            name=run.folder.name,
            id=kept_id(run, "wandb", lambda: f"{run.folder.name}-{os.urandom(4).hex()}"),
            resume="allow",
            dir=str(run.folder),
            config=dict(run.config),
        )

    def table(self, step: int, rows: Sequence[Row]) -> None:
        """A table of wandb's."""
        columns = list(rows[0])
        table = self._client.Table(columns=columns, data=[[row[name] for name in columns] for row in rows])
        self._run.log({_ROLLOUTS: table}, step=step)

    def close(self, ending: Ending) -> None:
        """Wait until all is written or sent."""
        self._run.finish(exit_code=_WANDB_EXIT[ending])


class MLflow:
    """A run of MLflow, at MLFLOW_TRACKING_URI; a resumed run goes on with it."""

    def __init__(self, run: Tracked, mlflow: Any = None) -> None:
        mlflow = mlflow or importlib.import_module("mlflow")
        self._client, self._entities = mlflow.MlflowClient(), mlflow.entities
        found = self._client.get_experiment_by_name(run.project)
        experiment = found.experiment_id if found else self._client.create_experiment(run.project)

        def begin() -> str:
            return str(self._client.create_run(experiment, run_name=run.folder.name).info.run_id)

        self._id = kept_id(run, "mlflow", begin)
        self._tables: list[dict[str, str]] = []
        if run.first_step == 0:
            params = [self._entities.Param(key, str(value)[:500]) for key, value in run.config.items()]
            for begin_at in range(0, len(params), _MAX_PARAMS):
                self._client.log_batch(self._id, params=params[begin_at : begin_at + _MAX_PARAMS])
        else:
            self._client.update_run(self._id, status="RUNNING")

    def log(self, step: int, scalars: Mapping[str, float]) -> None:
        """Tell a line in one call, without values that are not finite: stores differ in what they do with those."""
        now_ms = time.time_ns() // 1_000_000
        finite = {name.replace("@", "_at_"): float(value) for name, value in scalars.items() if math.isfinite(value)}
        metrics = [self._entities.Metric(name, value, now_ms, step) for name, value in finite.items()]
        self._client.log_batch(self._id, metrics=metrics)

    def table(self, step: int, rows: Sequence[Row]) -> None:
        """Write what MLflow's own `log_table` writes, which needs pandas."""
        file, columns = f"{_ROLLOUTS}/step_{step:06d}.json", list(rows[0])
        split = {"columns": columns, "data": [[row[name] for name in columns] for row in rows]}
        self._client.log_text(self._id, json.dumps(split, ensure_ascii=False), file)
        self._tables = [*self._tables, {"path": file, "type": "table"}][-_MAX_TABLES:]
        self._client.set_tag(self._id, _TABLE_TAG, json.dumps(self._tables))

    def picture(self, step: int, png: Path) -> None:  # noqa: ARG002 - an artifact has no step
        """Copy the file."""
        self._client.log_artifact(self._id, str(png))

    def close(self, ending: Ending) -> None:
        """Give the run its status."""
        self._client.set_terminated(self._id, status=_MLFLOW_STATUS[ending])


class Trackio(_Logs):
    """A run of trackio, in TRACKIO_DIR on this machine, or where TRACKIO_SPACE_ID and the like say."""

    def __init__(self, run: Tracked, client: Any = None) -> None:
        self._client = client or importlib.import_module("trackio")
        self._run = self._client.init(
            project=run.project,
            name=run.folder.name,
            config={key: _plain(value) for key, value in run.config.items()},
            resume="allow" if run.first_step else "never",
            embed=False,
        )

    def table(self, step: int, rows: Sequence[Row]) -> None:
        """A table of trackio's."""
        self._run.log({_ROLLOUTS: self._client.Table(data=[dict(row) for row in rows])}, step=step)

    def close(self, ending: Ending) -> None:  # noqa: ARG002 - its runs have no status
        """Wait until all is written or sent."""
        self._run.finish()


class SwanLab(_Logs):
    """A run of SwanLab, below `swanlog/` in the run's folder; SWANLAB_MODE=offline keeps it on this machine."""

    def __init__(self, run: Tracked, client: Any = None) -> None:
        self._client = client or importlib.import_module("swanlab")
        self._run = self._client.init(
            project=run.project,
            name=run.folder.name,
            id=kept_id(run, "swanlab", lambda: os.urandom(10).hex()),
            resume="allow",
            log_dir=str(run.folder / "swanlog"),
            config={key: _plain(value) for key, value in run.config.items()},
        )

    def log(self, step: int, scalars: Mapping[str, float]) -> None:
        """Leave out a value that is not finite."""
        self._run.log({name: float(value) for name, value in scalars.items() if math.isfinite(value)}, step=step)

    def table(self, step: int, rows: Sequence[Row]) -> None:
        """A table of ECharts, which SwanLab shows."""
        columns = list(rows[0])
        table = self._client.echarts.Table()
        table.add(columns, [[row[name] for name in columns] for row in rows])
        self._run.log({_ROLLOUTS: table}, step=step)

    def close(self, ending: Ending) -> None:
        """Wait until all is written or sent."""
        error = "see logs/train.log in the run's folder" if ending == "failed" else None
        self._run.finish(state=_SWANLAB_STATE[ending], error=error)


def kept_id(run: Tracked, tracker: str, begin: Callable[[], str]) -> str:
    """Return the id that a tracker knows the run by: that of its first start, which its folder keeps."""
    file = run.folder / f"{tracker}.id"
    if run.first_step and file.is_file():
        return file.read_text(encoding="utf-8").strip()
    found = begin()
    file.write_text(found + "\n", encoding="utf-8")
    return found


class Once:
    """A tracker of a run that may have been resumed: what an earlier start has told it is not told again.

    The run's folder keeps the last step that each metric was told of. A line that is under way when the process is
    killed may still come twice.
    """

    def __init__(self, run: Tracked, name: str, open_it: Open) -> None:
        self._file = run.folder / f"{name}.told.json"
        if run.first_step == 0:
            self._file.unlink(missing_ok=True)
        is_kept = self._file.is_file()
        self._before: dict[str, int] = json.loads(self._file.read_text(encoding="utf-8")) if is_kept else {}
        self._last = dict(self._before)
        self._tracker = open_it(run)

    def log(self, step: int, scalars: Mapping[str, float]) -> None:
        """Tell what is new, and remember it."""
        new = {name: value for name, value in scalars.items() if self._is_new(name, step)}
        if new:
            self._tracker.log(step, new)
            self._remember(step, new)

    def table(self, step: int, rows: Sequence[Row]) -> None:
        """Likewise."""
        if self._is_new(_ROLLOUTS, step):
            self._tracker.table(step, rows)
            self._remember(step, [_ROLLOUTS])

    def picture(self, step: int, png: Path) -> None:
        """Pass on: the curve of a run that went on is another."""
        self._tracker.picture(step, png)

    def close(self, ending: Ending) -> None:
        """Pass on."""
        self._tracker.close(ending)

    def _is_new(self, name: str, step: int) -> bool:
        return step > self._before.get(name, -1)

    def _remember(self, step: int, names: Iterable[str]) -> None:
        self._last |= {name: max(step, self._last.get(name, step)) for name in names}
        part = self._file.with_suffix(".part")
        part.write_text(json.dumps(self._last), encoding="utf-8")
        part.replace(self._file)


def as_markdown(rows: Sequence[Row]) -> str:
    r"""Write a table.

    >>> print(as_markdown([{"prompt": "a|b", "score": 0.5}]))
    | prompt | score |
    |---|---|
    | a\|b | 0.5 |
    """
    columns = list(rows[0])
    lines = [columns, ["---"] * len(columns), *([_in_cell(row[name]) for name in columns] for row in rows)]
    head, rule, *others = (f"| {' | '.join(line)} |" for line in lines)
    return "\n".join([head, rule.replace(" ", ""), *others])


def _in_cell(value: object) -> str:
    return str(value).replace("|", "\\|").replace("\n", "<br>")


def _plain(value: object) -> object:
    """Return a value of a config as clients that write JSON take it."""
    return value if isinstance(value, str | int | float | bool | None) else str(value)


OPENS: dict[str, Open] = {
    "tensorboard": TensorBoard,
    "wandb": WeightsAndBiases,
    "mlflow": MLflow,
    "trackio": Trackio,
    "swanlab": SwanLab,
}


def open_trackers(
    names: Sequence[str],
    run: Tracked,
    journal: Journal,
    *,
    rename: Callable[[Mapping[str, float]], dict[str, float]] = dict,
    close_s: float = CLOSE_S,
) -> Trackers:
    """Return the trackers of these names; see `Trackers`."""
    return Trackers({name: _opens(name) for name in names}, run, journal, rename=rename, close_s=close_s)


def _opens(name: str) -> Open:
    open_it = OPENS[name]
    return open_it if open_it is TensorBoard else lambda run: Once(run, name, open_it)


_OF_VALIDATION = {"mean": "reward/mean@{k}", "best": "reward/best@{k}/mean", "majority": "reward/maj@{k}/mean"}
_KEPT, _REWARD = "reward/kept_mean", "reward/mean"


def as_in_verl(scalars: Mapping[str, float]) -> dict[str, float]:
    """Return the metrics of a line by verl's names; one that verl does not have keeps its name.

    The mean score of the groups that were trained on has two names there, before and after what is added to scores,
    where nothing is added to them. It is `reward/mean` if no group was replaced. What means something else keeps our
    name; docs/tracking.md says where the two differ.

    >>> as_in_verl({"actor/policy_loss": 0.5, "rollout/idle": 0.25})
    {'actor/pg_loss': 0.5, 'rollout/idle': 0.25}
    >>> as_in_verl({"reward/mean": 0.5})
    {'critic/score/mean': 0.5, 'critic/rewards/mean': 0.5}
    >>> as_in_verl({"reward/mean": 0.5, "reward/kept_mean": 0.25})
    {'reward/mean': 0.5, 'critic/score/mean': 0.25, 'critic/rewards/mean': 0.25}
    >>> for name in as_in_verl({f"validation/{name}/gsm8k": 0.5 for name in ("mean@8", "pass@1", "pass@4", "pass@8")}):
    ...     print(name)
    val-core/gsm8k/reward/mean@8
    val-core/gsm8k/acc/mean@8
    val-aux/gsm8k/acc/best@4/mean
    val-core/gsm8k/acc/best@8/mean
    """
    if _REWARD in scalars and _KEPT not in scalars:
        scalars = {_KEPT if name == _REWARD else name: value for name, value in scalars.items()}
    sizes = {source: k for kind, k, source in _validations(scalars) if kind == "mean"}
    found = {_in_verl(name, sizes): value for name, value in scalars.items()}
    is_penalised = "kl/reference_mean" in scalars and "actor/reference_kl" not in scalars
    if _KEPT in scalars and not is_penalised and "reward/overlong_penalty" not in scalars:
        found["critic/rewards/mean"] = scalars[_KEPT]
    return found


def _validations(names: Iterable[str]) -> Iterator[tuple[str, int, str]]:
    """Yield kind, k and source of each metric of a validation."""
    for name in names:
        if found := re.fullmatch(r"validation/(mean|best|majority|pass)@(\d+)/(.+)", name):
            yield found[1], int(found[2]), found[3]


def _in_verl(name: str, sizes: Mapping[str, int]) -> str:
    """Return the name of one; `sizes` has the number of responses to a prompt, by source."""
    for kind, k, source in _validations([name]):
        size = sizes.get(source, k)
        if kind == "pass":
            what, is_core = (f"acc/mean@{size}", True) if k == 1 else (f"acc/best@{k}/mean", k == size)
        else:
            what, is_core = _OF_VALIDATION[kind].format(k=k), k == size
        return f"val-{'core' if is_core else 'aux'}/{source}/{what}"
    return other_projects().verl.metrics.get(name, name)
