"""The endpoint: OpenAI's API in front of any engine that samples. Needs the extra `serve`.

Must not know: which engine answers, where its weights come from.
"""

from rallypoint.serving.app import (
    Access as Access,
    make_app as make_app,
    numbers_route as numbers_route,
    with_errors as with_errors,
)
from rallypoint.serving.bridge import Bridge as Bridge
from rallypoint.serving.codec import Codec as Codec
from rallypoint.serving.connections import Deadlines as Deadlines
from rallypoint.serving.handlers import Model as Model
from rallypoint.serving.server import LOOPBACK as LOOPBACK, Server as Server, bind as bind, check_keys as check_keys
from rallypoint.serving.sessions import Served as Served, Sessions as Sessions, make_sessions_app as make_sessions_app
