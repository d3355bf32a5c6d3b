"""Devices are what torch calls them: no vendor is named in the code, but for the places listed here."""

import re
from pathlib import Path

PACKAGE = Path(__file__).parents[2] / "src" / "rallypoint"
VENDORS = re.compile(
    r"cuda|(?<!asy)nccl|nvidia|xpu|xccl|rocm(?!ask)|rccl|\bhip\b|\bmps\b|\bhpu\b|\bnpu\b", re.IGNORECASE
)
"""Not the system call rt_sigprocmask, nor AsyncClient."""
RECIPES = ("gsm8k-grpo", "gsm8k-ppo", "math-dapo", "math-opd", "code", "games", "search")
EXCEPTIONS = {
    "cluster/pool.py": "the one table: torch's word for what Ray calls a GPU",
    "cluster/ray_process.py": "names of variables of the environment that go to the workers of a joined cluster",
    "config/check_placement.py": "one vendor's collectives refuse two ranks on one device; refused before they do",
    "config/translate/verl.py": "keys of another project's, as people have them in their scripts",
    "config/sections/places.py": "examples of what a user may write for cluster.device",
    "engine/determinism.py": "torch asks one vendor's library by a variable of the environment",
    "install/engines.py": "for which device each build of an engine is",
    "prepare/checkup.py": "one vendor's driver must be new enough for what torch is built for, and it is asked",
    "roles/server_ranks.py": "the variable by which processes see some devices of one vendor, as Ray sets it",
    "generation/vllm/server.py": "likewise, for a server that sees those of several processes",
    "roles/colocated.py": "torch records the allocations of one kind of device",
    "prepare/inventory.py": "asks one vendor's driver which devices lie idle, where torch may be a build for CPUs",
    "prepare/machine.py": "says which key uses devices that lie idle, and that a described machine has some",
    "weights/buffers.py": "torch's names for handles of device memory, and the rules that they come with",
    "generation/native/accelerator/graphs.py": "before torch 2.13 only one kind of device has graphs",
    "observability/devices.py": "one table of devices, with the names that drivers have for them",
    "models/kinds/delta_kernel.py": "the library that it calls has kernels for one kind of device",
    "models/kinds/experts.py": "grouped products need a certain generation of one kind of device",
    "models/varlen.py": "rows of any lengths are known to the flash attention of one kind of device",
    "models/kernels.py": "kernels are used on the kind of device on which they were measured",
    "models/fused.py": "the rules by which one vendor's kernels are chosen, and the limits of its grids",
} | {
    f"recipes/{name}.yaml": "a recipe for a real model says what it runs on; cluster.device changes it"
    for name in RECIPES
}
"""Files that name one -> why."""


def test_no_vendor_is_named_but_where_there_is_a_reason():
    files = [path for kind in ("*.py", "*.yaml") for path in PACKAGE.rglob(kind)]
    naming = {str(path.relative_to(PACKAGE)) for path in files if VENDORS.search(path.read_text(encoding="utf-8"))}
    assert naming == set(EXCEPTIONS)


def test_every_exception_is_small():
    named = {name: len(VENDORS.findall((PACKAGE / name).read_text(encoding="utf-8"))) for name in EXCEPTIONS}
    assert named["cluster/pool.py"] == 1
    assert all(named[f"recipes/{name}.yaml"] == 1 for name in RECIPES)
    assert named["config/sections/places.py"] == 2
    assert named["install/engines.py"] == 1
