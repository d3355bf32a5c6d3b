"""The endpoint: OpenAI's API in front of any engine that samples. Needs the extra `serve`.

Must not know: which engine answers, where its weights come from.
"""

from rallypoint.serving.app import Access, make_app, numbers_route, with_errors
from rallypoint.serving.bridge import Bridge
from rallypoint.serving.codec import Codec
from rallypoint.serving.connections import Deadlines
from rallypoint.serving.handlers import Model
from rallypoint.serving.server import LOOPBACK, Server, bind, check_keys, is_loopback
from rallypoint.serving.sessions import Served, Session, Sessions, make_sessions_app

__all__ = [
    "LOOPBACK",
    "Access",
    "Bridge",
    "Codec",
    "Deadlines",
    "Model",
    "Served",
    "Server",
    "Session",
    "Sessions",
    "bind",
    "check_keys",
    "is_loopback",
    "make_app",
    "make_sessions_app",
    "numbers_route",
    "with_errors",
]
