"""GET /health (alive), /ready (would work on a request now), /ping, /version, /metrics.

Alive says only that this process answers and its engine is not gone for good. Ready follows the engine's own pulse: a step that
was finished, or an idle heartbeat, a moment ago. Open to all but /version and /metrics.
"""

from __future__ import annotations

import msgspec

from octavo.server.asgi import Answer, Request, Response
from octavo.server.errors import RETRY_WHEN_DEAD, unavailable
from octavo.server.metrics import CONTENT_TYPE
from octavo.server.state import ServerState

RETRY = 1  # seconds


async def health(state: ServerState, _: Request) -> Answer:
    """503 only when the engine will not come back."""
    if state.client.errored:
        raise unavailable("the engine has stopped; this server needs a restart", RETRY_WHEN_DEAD, "engine_dead")
    return Response(b'{"status":"ok"}')


async def ready(state: ServerState, _: Request) -> Answer:
    """503 while starting, restarting, wedged or draining."""
    if state.draining:
        raise unavailable("the server is shutting down", RETRY, "draining")
    if state.client.errored:
        raise unavailable("the engine has stopped; this server needs a restart", RETRY_WHEN_DEAD, "engine_dead")
    if not state.client.is_ready():
        raise unavailable("the engine is not ready", RETRY, "not_ready")
    return Response(b'{"status":"ready"}')


async def version(state: ServerState, _: Request) -> Answer:
    return Response(msgspec.json.encode({"version": state.version}))


async def metrics(state: ServerState, _: Request) -> Answer:
    return Response(state.metrics.render(), headers=[(b"content-type", CONTENT_TYPE)])
