"""Files of a run that cannot be written."""

import errno
import sys

import pytest
from full_disks import files_end_at
from safetensors import SafetensorError

from rallypoint.disk import naming, naming_tensors
from rallypoint.errors import DiskError
from rallypoint.run import MetricsLog, read_metrics


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
        with MetricsLog(path) as log:
            for step in range(100):
                log.write(step, {"reward/mean": 0.5})

    with pytest.raises(DiskError) as caught, files_end_at(500):
        write()
    assert str(caught.value) == f"{path} cannot be written: File too large"
    assert path.stat().st_size <= 500
    assert [record["step"] for record in read_metrics(path)] == list(range(len(read_metrics(path))))
