"""Which tests CI may leave out, and why."""

import os
import re

ALLOWED_SKIPS = re.compile(
    "needs an accelerator|this torch captures nothing"  # tests/gpu
    "|no weights are stored for this machine"  # of golden bits, which other machines have
    r"|rallypoint\[(wandb|mlflow|trackio|swanlab)\]|needs s3fs"  # large clients
    "|reasoning.gym|etcd|hadolint|trl|(openenv|verifiers|openai-harmony) is not installed"  # what CI installs if it can
    "|kuhn-poker is not installed"  # in no package index
    "|needs Chromium"  # 300 MB of packages of the system
    "|a rendezvous in memory has no other processes"
    "|does not work here|is not here|no sandbox|bubblewrap|cannot mount|does not let py-spy"  # by the machine
    "|no libgomp|descriptors only|machine code for x86_64"
)
"""Reasons for which a test may be skipped in CI; any other is a failure there, for CI could run the test."""


def refuse_skip(report):
    """Make a failure of a skip that is not on the list."""
    if os.environ.get("CI") == "true" and report.skipped and not hasattr(report, "wasxfail"):
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
        if not ALLOWED_SKIPS.search(reason):
            report.outcome, report.longrepr = "failed", f"{reason}: CI could run this; see ALLOWED_SKIPS in {__file__}"
