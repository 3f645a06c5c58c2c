"""What all routes of one server share: the engine's client, the options, the books.

Knows nothing of HTTP.
"""

from __future__ import annotations

import hashlib
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from octavo.config import AsyncEngineArgs, ServerArgs
from octavo.server.auth import KeyRing
from octavo.server.errors import ApiError
from octavo.server.metrics import Metrics
from octavo.tokenizer.chat_template import ChatTemplate

if TYPE_CHECKING:
    from octavo.client.client import EngineClient
    from octavo.server.exchange import Exchange


@dataclass(slots=True)
class ServerState:
    """`default_sampling`: SamplingParams fields that the model's own files suggest, below what a request says."""

    client: EngineClient
    engine_args: AsyncEngineArgs
    server_args: ServerArgs
    metrics: Metrics
    keys: KeyRing
    version: str
    fingerprint: str
    default_sampling: dict[str, Any]
    chat_template: ChatTemplate | None
    started: int = field(default_factory=lambda: int(time.time()))  # Unix seconds
    draining: bool = False
    active: set[Exchange] = field(default_factory=set)  # generating requests

    @property
    def model_name(self) -> str:
        return self.engine_args.served_name

    def check_model(self, name: str) -> None:
        """Raises ApiError(404) for any name but the served one. Names are only ever compared, never opened."""
        if name != self.model_name:
            raise ApiError(
                404, f"the model {name[:100]!r} does not exist; this server has {self.model_name!r}",
                param="model", code="model_not_found",
            )  # fmt: skip


def fingerprint(args: AsyncEngineArgs, program_version: str) -> str:
    """`system_fingerprint`: changes when the program or what decides the numbers of this model changes."""
    told = "|".join(
        map(str, (args.model, args.revision, args.dtype, args.quantization, args.kv_cache_dtype, args.backend))
    )
    return f"octavo-{program_version}-{hashlib.sha256(told.encode()).hexdigest()[:8]}"
