"""moto's S3 in this process, behind a door that lets requests fail: with 500, cut connections or slow answers."""

import contextlib
import dataclasses
import socket
import threading
import time
from collections.abc import Callable, Iterator

import pytest


@dataclasses.dataclass
class Door:
    """Stands before the server."""

    app: Callable
    fails: Callable[[str, str], str | None] = lambda method, path: None
    """Method and path of a request -> `500`, `cut`, `slow`, or None where it is let through."""
    asked: list[str] = dataclasses.field(default_factory=list)

    def __call__(self, environ, start_response):
        method, path = environ["REQUEST_METHOD"], environ["PATH_INFO"]
        self.asked.append(f"{method} {path}")
        how = self.fails(method, path)
        if how == "slow":
            time.sleep(0.5)
        if how == "500":
            start_response("500 Internal Server Error", [("Content-Length", "0")])
            return []
        if how == "cut":
            environ["werkzeug.socket"].shutdown(socket.SHUT_RDWR)
        return self.app(environ, start_response)


@contextlib.contextmanager
def served(patch: pytest.MonkeyPatch) -> Iterator[Door]:
    """Serve an empty bucket `lab` during a block, to which clients of this process and its children find."""
    s3fs = pytest.importorskip("s3fs", reason="needs s3fs")
    moto = pytest.importorskip("moto.server", reason="needs s3fs and moto")
    boto3 = pytest.importorskip("boto3", reason="needs s3fs and boto3")
    from werkzeug.serving import WSGIRequestHandler, make_server

    class Quiet(WSGIRequestHandler):
        def log(self, *_arguments):
            pass

    door = Door(moto.DomainDispatcherApplication(moto.create_backend_app))
    server = make_server("127.0.0.1", 0, door, threaded=True, request_handler=Quiet)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    variables = {
        "AWS_ENDPOINT_URL": f"http://127.0.0.1:{server.port}",
        "AWS_ACCESS_KEY_ID": "test",
        "AWS_SECRET_ACCESS_KEY": "test",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_MAX_ATTEMPTS": "1",  # of the client, which tries some times itself
        "no_proxy": "127.0.0.1",
    }
    for name, value in variables.items():
        patch.setenv(name, value)
    s3fs.S3FileSystem.clear_instance_cache()
    client = boto3.client("s3")
    client.create_bucket(Bucket="lab")
    try:
        yield door
    finally:
        for listed in client.get_paginator("list_objects_v2").paginate(Bucket="lab"):
            for one in listed.get("Contents", ()):
                client.delete_object(Bucket="lab", Key=one["Key"])
        server.shutdown()
        s3fs.S3FileSystem.clear_instance_cache()


def keys() -> dict[str, int]:
    """Return what is in the bucket, with sizes."""
    import boto3

    pages = boto3.client("s3").get_paginator("list_objects_v2").paginate(Bucket="lab")
    return {one["Key"]: one["Size"] for page in pages for one in page.get("Contents", ())}
