"""Files of a run that cannot be written."""

import contextlib
import errno
import json
import sys
from pathlib import Path

import pytest
from full_disks import files_end_at
from safetensors import SafetensorError

from rallypoint.disk import naming, naming_tensors
from rallypoint.errors import DiskError
from rallypoint.journal import RunBegan, StepDone
from rallypoint.journal.log import Entry
from rallypoint.run import MetricsLog


def test_what_keeps_a_file_from_being_written_names_it_and_asks_for_room_where_there_is_none(tmp_path):
    file, lost = tmp_path / "a.txt", tmp_path / "nowhere" / "a.txt"
    full = r"/a\.txt cannot be written: No space left on device \(.* are free\); make room on its disk$"
    with pytest.raises(DiskError, match=full), naming(file):
        raise OSError(errno.ENOSPC, "No space left on device")
    with pytest.raises(DiskError, match=r"nowhere/a\.txt cannot be written: No such file or directory$"), naming(lost):
        lost.write_text("")
    with naming(file):
        file.write_text("")


def test_safetensors_errors_are_told_in_the_same_words(tmp_path):
    file = tmp_path / "model.safetensors"
    full = r"/model\.safetensors cannot be written: No space left on device \(.* are free\); make room on its disk$"
    with pytest.raises(DiskError, match=full), naming(tmp_path), naming_tensors(file):
        raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")
    with pytest.raises(DiskError, match=r"/model\.safetensors cannot be written: InvalidHeader$"), naming_tensors(file):
        raise SafetensorError("InvalidHeader")


@pytest.mark.skipif(sys.platform == "win32", reason="has no limits of this kind")
def test_metrics_that_the_disk_does_not_take_name_their_file_and_keep_their_whole_lines(tmp_path):
    path = tmp_path / "metrics.jsonl"

    def write():
        with contextlib.closing(MetricsLog(path, Path("/dev/null"))) as log:
            log.take(Entry(1, 0.0, RunBegan(first=0, config={}, software={}, machine="")))
            for step in range(100):
                log.take(Entry(step, 1.0, StepDone(step=step, metrics={"reward/mean": 0.5}, digests={})))

    with pytest.raises(DiskError) as caught, files_end_at(500):
        write()
    assert str(caught.value) == f"{path} cannot be written: File too large"
    assert path.stat().st_size <= 500
    *whole, _ = path.read_text().split("\n")
    assert [json.loads(line)["step"] for line in whole] == list(range(len(whole)))
