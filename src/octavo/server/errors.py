"""Error answers: OpenAI's envelope, statuses and string codes, for every failure on every route.

{"error": {"message": str, "type": str, "param": str | null, "code": str | null}}

Knows the exceptions of `octavo.errors` and nothing of routes.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from enum import StrEnum

import msgspec

from octavo.errors import EngineDeadError, InvalidRequestError, OverloadedError, RequestFailedError
from octavo.server.asgi import JSON_TYPE, Response

logger = logging.getLogger("octavo.server")

MAX_MESSAGE = 1000
RETRY_WHEN_DEAD = 10  # seconds; whoever supervises this process needs about so long


class ErrorType(StrEnum):
    """Values of `error.type`."""

    INVALID_REQUEST = "invalid_request_error"
    AUTHENTICATION = "authentication_error"
    SERVER = "server_error"


class ErrorInfo(msgspec.Struct):
    message: str
    type: ErrorType
    param: str | None
    code: str | None


class ErrorBody(msgspec.Struct):
    error: ErrorInfo


class ApiError(Exception):
    """A refusal with its HTTP status. `headers` go out with it."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        type: ErrorType = ErrorType.INVALID_REQUEST,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[bytes, bytes] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.info = ErrorInfo(message[:MAX_MESSAGE], type, param, code)
        self.headers = dict(headers or {})


def invalid(message: str, param: str | None, code: str = "invalid_value") -> InvalidRequestError:
    """A 400 about one field of the request."""
    return InvalidRequestError(message, param, code)


def unavailable(message: str, retry_after: int, code: str = "overloaded") -> ApiError:
    """A 503 that tells the client when to come back."""
    return ApiError(
        503, message, type=ErrorType.SERVER, code=code, headers={b"retry-after": str(max(1, retry_after)).encode()}
    )


def to_api_error(exc: BaseException) -> ApiError:
    """Any exception as an answer. What nobody foresaw is logged with its traceback and answered without detail."""
    if isinstance(exc, ApiError):
        return exc
    if isinstance(exc, InvalidRequestError):
        return ApiError(400, exc.message, param=exc.param, code=exc.code)
    if isinstance(exc, OverloadedError):
        return unavailable(exc.message, exc.retry_after)
    if isinstance(exc, EngineDeadError):
        return unavailable("the engine has stopped; this server needs a restart", RETRY_WHEN_DEAD, "engine_dead")
    if isinstance(exc, RequestFailedError):
        logger.warning("request failed in the engine: %s", str(exc)[:200])
    else:
        logger.error("unexpected %s", type(exc).__name__, exc_info=exc)
    return ApiError(500, "the engine could not complete this request", type=ErrorType.SERVER, code="internal_error")


def encode_error(error: ApiError) -> bytes:
    """The JSON body."""
    return msgspec.json.encode(ErrorBody(error.info))


def to_response(exc: BaseException) -> Response:
    error = to_api_error(exc)
    return Response(encode_error(error), error.status, [JSON_TYPE, *error.headers.items()])
