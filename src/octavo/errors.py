"""The errors that reach a user. Each says what was wrong, where, and what is allowed.

Knows nothing of HTTP: the server maps these to statuses and bodies, the command line to exit codes.

    OctavoError
    |- ConfigError              an option or a value of a model's configuration; exit code 2
    |- ModelFileError           a checkpoint that is damaged, hostile or unsupported; exit code 2
    |- InvalidRequestError      one request's fault; ends that request only
    |  `- ContextLengthError    it cannot fit the context or the KV memory, ever
    |- OverloadedError          the queue is full, or the engine is starting, draining or restarting; try again later
    |- RequestFailedError       the engine failed on this request
    `- EngineDeadError          the engine is gone and will not come back
"""

from __future__ import annotations


class OctavoError(Exception):
    """Base of all errors that Octavo raises on purpose."""


class ConfigError(OctavoError, ValueError):
    """An option has a value that cannot work. The message names the option, the value and what is allowed."""


class ModelFileError(OctavoError, ValueError):
    """A model's file is damaged, inconsistent or of an unsupported kind. The message names the file and the tensor or key."""


class InvalidRequestError(OctavoError, ValueError):
    """A request asks for something that is not allowed.

    `param` is the request's field; `code` is OpenAI's word for the kind of fault (`invalid_value`, `invalid_type`,
    `integer_above_max_value`, ...).
    """

    def __init__(self, message: str, param: str | None = None, code: str | None = "invalid_value") -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.code = code


class ContextLengthError(InvalidRequestError):
    """The prompt, or the prompt with what it asks for, exceeds what the model or the KV memory can ever hold."""

    def __init__(self, message: str, param: str | None = "prompt") -> None:
        super().__init__(message, param, "context_length_exceeded")


class OverloadedError(OctavoError):
    """No room for the request now; `retry_after` is in seconds."""

    def __init__(self, message: str, retry_after: int = 1) -> None:
        super().__init__(message)
        self.message = message
        self.retry_after = retry_after


class RequestFailedError(OctavoError):
    """The engine could not go on with this request (for example NaN logits); others are not affected."""


class EngineDeadError(OctavoError):
    """The engine process ended and could not be restarted."""
