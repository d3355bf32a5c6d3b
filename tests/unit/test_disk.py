"""Files of a run that cannot be written."""

import errno
import subprocess
import sys

import pytest
from safetensors import SafetensorError

from rallypoint.disk import naming, naming_tensors
from rallypoint.errors import DiskError
from rallypoint.run import read_metrics


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


TOO_LARGE = """
import resource, signal, sys
from rallypoint.run import MetricsLog
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (500, 500))
with MetricsLog(sys.argv[1]) as log:
    for step in range(100):
        log.write(step, {"reward/mean": 0.5})
"""


@pytest.mark.skipif(sys.platform == "win32", reason="has no limits of this kind")
def test_metrics_that_the_disk_does_not_take_name_their_file_and_keep_their_whole_lines(tmp_path):
    path = tmp_path / "metrics.jsonl"
    done = subprocess.run([sys.executable, "-c", TOO_LARGE, str(path)], check=False, capture_output=True, text=True)
    assert done.stderr.splitlines()[-1] == f"rallypoint.errors.DiskError: {path} cannot be written: File too large"
    assert path.stat().st_size <= 500
    assert [record["step"] for record in read_metrics(path)] == list(range(len(read_metrics(path))))
