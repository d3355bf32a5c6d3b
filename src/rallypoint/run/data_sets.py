"""The data sets that a config names, as they are read and compared."""

from __future__ import annotations

from rallypoint.config import RunConfig
from rallypoint.config.sections.material import DataSetConfig
from rallypoint.data import DataSet, Generator, is_generator

_SPLITS = {"data.train": ("train",), "data.validation": ("validation", "test")}
"""Splits that each key reads of a folder that has several, the first that is there."""
_SEEDS = {"data.train": 0, "data.validation": 2**31}
"""What each key adds to the seed of a generator, so that no row is in both."""


def data_sets(config: RunConfig, key: str) -> list[DataSet]:
    """Return the data sets of `data.train` or `data.validation`."""
    found = config.data.train if key == "data.train" else config.data.validation
    return [_data_set(config, key, DataSetConfig(path=one) if isinstance(one, str) else one) for one in found]


def _data_set(config: RunConfig, key: str, one: DataSetConfig) -> DataSet:
    columns = None if is_generator(one.path) else one.columns or config.data.columns
    return DataSet(
        path=one.path,
        subset=one.subset,
        splits=_SPLITS[key] if one.split is None else (one.split,),
        columns=columns.named if columns else {},
        columns_key="data.columns" if one.columns is None else f"the columns of {one.path} in {key}",
        data_source=one.data_source,
        drops_bad_rows=one.on_bad_row == "drop",
        generator=Generator(config.seed + _SEEDS[key], one.parameters or {}),
    )
