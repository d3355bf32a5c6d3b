"""Which code a run folder may run on this machine: only code that this user has named.

A config names code: a function for the reward, the loss or the advantage, a model folder with Python in it, a cluster
that exchanges pickles. A user who types a key, or passes a YAML file, has named the code. A run folder may come from
anybody. So a run that is started here signs the code that it names with a key that only this user can read, and a
folder is trusted if the signature is right. The key is made when it is first needed; nothing is sent anywhere.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import json
import os
import secrets
from collections.abc import Mapping
from pathlib import Path

from rallypoint.config import RunConfig
from rallypoint.environments.reward import SHIPPED
from rallypoint.environments.shipped.tools import SHIPPED_TOOLS

_NUM_BYTES = 32


def code_named(config: RunConfig) -> dict[str, str]:
    """Return the keys that make a config run code from outside of the package, and what each names."""
    found: dict[str, str] = {}
    found |= {key: spec for key, spec in config.reward.named_functions.items() if spec not in SHIPPED}
    rewards = ((f"reward.{one.name}", one.parameters) for one in config.reward.all_functions)
    tools = ((f"rollout.episode.tools[{at}]", one.parameters) for at, one in enumerate(config.rollout.tools))
    for name, parameters in (*rewards, *tools):  # what is asked elsewhere, or started: responses leave this process
        found |= {f"{name}.{how}": str(parameters[how]) for how in ("url", "command") if how in parameters}
    found |= {key: path for key, path in config.teachers.named.items() if path in config.teachers.urls}
    found |= {f"{section}.function": own.function for section, own in config.own_functions.items()}
    found |= {key: spec for key, spec in config.rollout.named_functions.items() if spec not in SHIPPED_TOOLS}
    if config.model.trust_remote_code:
        found["model.trust_remote_code"] = " ".join(config.named_models.values())
    if config.cluster.address not in (None, "auto"):  # auto is the cluster that this user is in
        found["cluster.address"] = str(config.cluster.address)
    if "://" in config.cluster.rendezvous:
        found["cluster.rendezvous"] = config.cluster.rendezvous
    return found


def sign(config: RunConfig) -> dict[str, str]:
    """Return a signature for each key of `code_named`; none if this user cannot store a key."""
    named = code_named(config)
    key = _key(make=True) if named else None
    return {} if key is None else {name: _signature(key, name, what) for name, what in named.items()}


def unsigned(config: RunConfig, signatures: Mapping[str, str]) -> dict[str, str]:
    """Return the entries of `code_named` that this user has not signed."""
    key = _key(make=False)
    return {
        name: what
        for name, what in code_named(config).items()
        if key is None or not hmac.compare_digest(_signature(key, name, what), str(signatures.get(name, "")))
    }


def _signature(key: bytes, name: str, what: str) -> str:
    return hmac.new(key, json.dumps([name, what]).encode(), hashlib.sha256).hexdigest()


def _key(*, make: bool) -> bytes | None:
    """Return this user's key; None if there is none and none can be made."""
    state = os.environ.get("XDG_STATE_HOME") or Path("~/.local/state").expanduser()
    path = Path(state) / "rallypoint" / "key"
    try:
        if make and not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            own = path.with_name(f".key.{os.getpid()}")
            own.touch(0o600)
            own.write_bytes(secrets.token_bytes(_NUM_BYTES))
            with contextlib.suppress(FileExistsError):
                os.link(own, path)  # of two processes at once, the first one wins
            own.unlink()
        key = path.read_bytes()
    except (OSError, RuntimeError):
        return None
    return key if len(key) == _NUM_BYTES else None
