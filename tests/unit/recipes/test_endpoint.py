"""The port of a run's endpoint while roles are started again."""

import asyncio
import socket

from rallypoint.journal import Journal, read_journal
from rallypoint.recipes.endpoint import Endpoint
from rallypoint.run.folder import RunFolder


def test_a_run_whose_port_is_taken_while_roles_start_again_goes_on_without_and_takes_it_back_when_it_can(tmp_path):
    endpoint = Endpoint(0, RunFolder(tmp_path), Journal(tmp_path / "journal.jsonl"))
    port = endpoint._socket.getsockname()[1]

    async def scenario():
        endpoint._socket.close()
        with socket.create_server(("127.0.0.1", port)):
            await endpoint.reopen()
            await endpoint.open(None, None, None)  # does nothing
        await endpoint.reopen()
        assert endpoint._socket.getsockname()[1] == port, "clients need not be told another one"
        await endpoint.close()

    asyncio.run(scenario())
    (said,) = [entry.event.text for entry in read_journal(tmp_path / "journal.jsonl")]
    assert said.startswith("no endpoint, the run goes on without: ")
    assert str(port) in said
