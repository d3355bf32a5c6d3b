"""The sandboxes of this machine, of each kind the first that holds what the probe tries in it."""

import pytest

from rallypoint.environments.sandbox.choose import local_tiers, probe
from rallypoint.environments.sandbox.local import Bubblewrap, Landlock

KINDS = {
    "Bubblewrap": lambda tier: isinstance(tier, Bubblewrap),
    "Landlock, another user": lambda tier: isinstance(tier, Landlock) and tier.user is not None,
    "Landlock, this user": lambda tier: isinstance(tier, Landlock) and tier.user is None,
}


@pytest.fixture(scope="package", params=KINDS)
def sandbox(request):
    problems = []
    for tier in filter(KINDS[request.param], local_tiers()):
        problem = probe(tier)
        if problem is None:
            return tier
        problems.append(problem)
    pytest.skip(f"{request.param} does not work here: {problems or 'there is none'}")
