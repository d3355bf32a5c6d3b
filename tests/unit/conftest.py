"""Ranks as threads of one process, for everything that is computed by several."""

import itertools
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from rallypoint.cluster.rendezvous import open_rendezvous
from rallypoint.parallel import DeviceMesh


@pytest.fixture
def on_mesh():
    """Return a function that runs a call on every rank of a mesh, each in a thread."""
    names = itertools.count()
    with open_rendezvous("memory", "these tests", lease_s=20) as rendezvous:

        def run(call, **sizes):
            name, size = f"mesh {next(names)}", torch.tensor(list(sizes.values())).prod().item()
            meshes = []  # kept until all are done: a rank that went could not be connected to

            def on_rank(rank):
                meshes.append(mesh := DeviceMesh.connect(rendezvous, name, rank, sizes, timeout_s=60))
                return call(mesh)

            with ThreadPoolExecutor(size) as pool:
                return list(pool.map(on_rank, range(size)))

        yield run
