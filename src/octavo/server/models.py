"""GET /v1/models: the one model of this server. Knows its name and length, never its path."""

from __future__ import annotations

import msgspec

from octavo.server.answers import ModelCard, ModelList
from octavo.server.asgi import Answer, Request, Response
from octavo.server.state import ServerState


def _card(state: ServerState) -> ModelCard:
    return ModelCard(
        id=state.model_name, root=state.model_name, created=state.started, max_model_len=state.client.max_model_len
    )


async def list_models(state: ServerState, _: Request) -> Answer:
    """All models."""
    return Response(msgspec.json.encode(ModelList(data=[_card(state)])))


async def show_model(state: ServerState, request: Request) -> Answer:
    """One model. Its name may hold slashes."""
    state.check_model(request.path_param)
    return Response(msgspec.json.encode(_card(state)))
