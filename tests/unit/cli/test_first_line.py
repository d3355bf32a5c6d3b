"""What `rally train` shows first comes before whatever takes seconds to import."""

import json
import subprocess
import sys

import pytest

PROGRAM = """
import io, json, os, sys

class First(io.StringIO):
    def write(self, text):
        heavy = "torch ray transformers numpy pyarrow huggingface_hub matplotlib rallypoint.config rallypoint.cluster"
        found = [name for name in heavy.split() if name in sys.modules]
        if text.strip():
            os.write(1, json.dumps([text, found]).encode())
            os._exit(0)
        return len(text)

    def isatty(self):
        return "terminal" in sys.argv

sys.stdout = sys.stderr = First()
from rallypoint.cli.main import app
app(["train", "digits", "trainer.num_steps=1"])
"""


@pytest.mark.parametrize(
    ("where", "line", "imported"),
    [
        ("terminal", "reading the config ...", []),
        ("file", "reading model and data ...", ["rallypoint.config", "rallypoint.cluster"]),
    ],
)
def test_the_first_line_is_shown_before_anything_heavy_is_imported(tmp_path, where, line, imported):
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, where], capture_output=True, text=True, cwd=tmp_path, check=False
    )
    shown, found = json.loads(done.stdout)
    assert (shown.strip(), found) == (line, imported), done.stderr
