"""A runtime for each module: threads, and real processes of a local Ray.

A module may set `SILENCE_S`; a test of one of the two says
`@pytest.mark.parametrize("runtime", ["ray"], indirect=True)`.
"""

from collections.abc import Iterator

import pytest

from rallypoint.cluster import InlineRuntime, Runtime


@pytest.fixture(scope="module", params=["inline", "ray"])
def runtime(request, tmp_path_factory, loop) -> Iterator[Runtime]:
    logs, silence_s = tmp_path_factory.mktemp("logs"), getattr(request.module, "SILENCE_S", 60.0)
    if request.param == "ray":
        cluster = request.getfixturevalue("local_ray")
        from rallypoint.cluster.ray_runtime import RayRuntime

        runtime = RayRuntime(
            cluster, log_folder=logs, placement_timeout_s=120, silence_s=silence_s, preload=(), say=print
        )
    else:
        runtime = InlineRuntime(log_folder=logs, silence_s=silence_s, say=print)
    yield runtime
    loop.run_until_complete(runtime.shutdown())
