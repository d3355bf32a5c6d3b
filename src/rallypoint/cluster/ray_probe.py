"""Finds out whether this program can join a Ray cluster, and if not why: a script that a driver runs before it joins.

Owns the questions that are asked of a cluster that somebody else started. They are asked from a process of their own
because Ray's client aborts the whole process when it finds no token, prints its own lines to standard error, and
waits for forty seconds and more where nobody answers; a child can be listened to, and ended.

Prints one JSON object: `address` of the cluster, or `problem`, a text for the user.
"""

from __future__ import annotations

import json
import os
import platform
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from rallypoint.cluster.waiting import Wait
from rallypoint.errors import ClusterError

_REACH_TIMEOUT_S, _VOICE_EVERY_S = 5.0, 10.0


class ProblemError(Exception):
    """The cluster cannot be joined; the text says why and what to do."""


def ask(address: str, variables: Mapping[str, str | None], say: Callable[[str], None], timeout_s: float) -> str:
    """Probe a cluster in a child process, and return its address.

    Args:
        address: host:port, or "auto".
        variables: of the environment of the child, beside those of this process; None for those that it has not.
        say: called with a line about the wait.
        timeout_s: how long the cluster may take.

    Raises:
        ClusterError: it cannot be joined, or does not answer in time.
    """
    own = {name: value for name, value in {**os.environ, **variables}.items() if value is not None}
    probe = subprocess.Popen(
        [sys.executable, "-P", __file__, address],
        env=own,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    waiting = Wait(
        f"the Ray cluster at {address} to answer", timeout_s, say, every_s=min(_VOICE_EVERY_S, timeout_s / 3)
    )
    while True:
        try:
            said, complaints = probe.communicate(timeout=waiting.pause_s)
            break
        except subprocess.TimeoutExpired:
            waiting.look()
            if waiting.is_over:
                probe.kill()
                probe.communicate()
                raise ClusterError(
                    f"the Ray cluster at {address} has not answered for {waiting.waited_s:.0f} s: it hangs, "
                    "or another program has this port (use the address that `ray start` printed)"
                ) from None
            waiting.say_if_due()
    try:
        answer = json.loads(said.splitlines()[-1])
    except (IndexError, ValueError):
        ending = "\n".join(complaints.splitlines()[-20:])
        raise ClusterError(f"asking the Ray cluster at {address} failed:\n{ending}") from None
    if "problem" in answer:
        raise ClusterError(answer["problem"])
    return answer["address"]


class Versions(NamedTuple):
    """Versions of Ray and of Python, as in `Versions("2.60.0", "3.11.7")`."""

    ray: str
    python: str

    def __str__(self) -> str:
        return f"Ray {self.ray} and Python {self.python}"


def check_versions(cluster: Versions, own: Versions) -> None:
    """Compare as Ray does: objects and code cross between processes of the same versions only.

    Raises:
        ProblemError: they differ.
    """
    is_lenient = os.environ.get("RAY_DEFAULT_PYTHON_VERSION_MATCH_LEVEL") == "minor"
    length = 2 if is_lenient else 3
    if cluster.ray != own.ray or cluster.python.split(".")[:length] != own.python.split(".")[:length]:
        raise ProblemError(
            f"the cluster runs {cluster}, this program {own}; they must be equal: "
            f"pip install 'ray=={cluster.ray}' under Python {cluster.python}, or start the cluster with this program's"
        )


def resolve(address: str, *, named: str | None, recorded: str | None, running: Sequence[str]) -> str:
    """Return the host:port that an address means.

    Args:
        address: what the user gave; "auto" for what the rest says.
        named: RAY_ADDRESS of the environment.
        recorded: address that the last `ray start` on this machine wrote down.
        running: addresses of the clusters whose processes run on this machine.

    Raises:
        ProblemError: there is none, or which one is meant is not clear.

    >>> resolve("auto", named=None, recorded=None, running=["10.0.0.7:6379"])
    '10.0.0.7:6379'
    """
    if address != "auto":
        return address
    if named:
        return named
    if recorded and (recorded in running or not running):
        return recorded
    if len(running) == 1:
        return running[0]
    if not running:
        raise ProblemError(
            "cluster.address=auto, but no Ray runs on this machine and RAY_ADDRESS is not set: "
            "start one (ray start --head), or give its address (host:6379)"
        )
    raise ProblemError(
        f"cluster.address=auto, but several Ray clusters run on this machine: {', '.join(sorted(running))}; name one"
    )


def check_reachable(address: str) -> None:
    """See whether anything listens there.

    Raises:
        ProblemError: the address is not one, the host is unknown, or nothing listens at the port.
    """
    if "://" in address:
        raise ProblemError(
            f"the address {address} is that of a Ray client server or a dashboard; "
            "give the address of the cluster itself, which is host:6379 unless ray start was given another --port"
        )
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit():
        raise ProblemError(f"the address {address!r} is not host:port, as in 10.0.0.7:6379, and not auto")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=_REACH_TIMEOUT_S).close()
    except (OSError, OverflowError) as error:
        raise ProblemError(
            f"there is no Ray cluster at {address}: {error}; give the address that `ray start --head` printed, or "
            "leave cluster.address out, so that one is started here"
        ) from None


def check_cluster(address: str) -> None:
    """Ask the cluster who it is, then join and leave it.

    Raises:
        ProblemError: it refuses, is of other versions, or has no node on this machine.
    """
    import ray
    from ray._common.usage.usage_lib import get_cluster_metadata
    from ray._private.services import find_node_ids
    from ray._raylet import GcsClient  # pyright: ignore[reportAttributeAccessIssue] - compiled, without types
    from ray.exceptions import AuthenticationError, RpcError

    try:
        client = GcsClient(address=address)
        metadata = get_cluster_metadata(client)
        nodes = {node.node_id.hex() for node in client.get_all_node_info(timeout=_REACH_TIMEOUT_S).values()}
    except AuthenticationError:
        raise ProblemError(f"the cluster at {address} wants another token than {_token_in_use()}") from None
    except RpcError as error:
        raise ProblemError(f"what listens at {address} does not answer as a Ray cluster does: {error}") from None
    own = Versions(ray.__version__, platform.python_version())
    if metadata:  # a cluster that did not record them is let pass, as by Ray
        check_versions(Versions(metadata["ray_version"], metadata["python_version"]), own)
    if not nodes & set(find_node_ids()):
        raise ProblemError(
            f"this machine is not a node of the cluster at {address}, and a driver must run on one: "
            f"ray start --address={address} makes it one, or let ray job submit run the command there"
        )
    try:
        ray.init(address=address, log_to_driver=False)
    except (OSError, RuntimeError, ValueError) as error:
        raise ProblemError(f"cannot join the cluster at {address}: {error}") from error
    ray.shutdown()


def _token_in_use() -> str:
    if os.environ.get("RAY_AUTH_MODE") != "token":
        return "none: set RAY_AUTH_TOKEN, or RAY_AUTH_TOKEN_PATH to a file that holds it"
    if os.environ.get("RAY_AUTH_TOKEN"):
        return "that in RAY_AUTH_TOKEN"
    return f"that in {os.environ.get('RAY_AUTH_TOKEN_PATH') or '~/.ray/auth_token'}"


def main(address: str) -> None:
    """Print the cluster's address, or the problem."""
    from ray._private.services import find_bootstrap_address, find_gcs_addresses

    try:
        address = resolve(
            address,
            named=os.environ.get("RAY_ADDRESS"),
            recorded=find_bootstrap_address(None),
            running=sorted(find_gcs_addresses()),
        )
        check_reachable(address)
        check_cluster(address)
        print(json.dumps({"address": address}))
    except ProblemError as problem:
        print(json.dumps({"problem": str(problem)}))


if __name__ == "__main__":
    main(sys.argv[1])
