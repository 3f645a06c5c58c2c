"""Octavo: an engine that serves large language models. Its public names are imported when they are first used."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from octavo.async_llm import AsyncLLMEngine
    from octavo.client.intake import PromptType, TextPrompt, TokensPrompt
    from octavo.client.outputs import CompletionOutput, RequestOutput
    from octavo.config import AsyncEngineArgs, EngineArgs
    from octavo.llm import LLM
    from octavo.sampling_params import RequestOutputKind, SamplingParams

__version__ = "0.1.0"

__all__ = [
    "LLM",
    "AsyncEngineArgs",
    "AsyncLLMEngine",
    "CompletionOutput",
    "EngineArgs",
    "PromptType",
    "RequestOutput",
    "RequestOutputKind",
    "SamplingParams",
    "TextPrompt",
    "TokensPrompt",
    "__version__",
]

_HOMES = {
    "LLM": "octavo.llm",
    "AsyncEngineArgs": "octavo.config",
    "AsyncLLMEngine": "octavo.async_llm",
    "CompletionOutput": "octavo.client.outputs",
    "EngineArgs": "octavo.config",
    "PromptType": "octavo.client.intake",
    "RequestOutput": "octavo.client.outputs",
    "RequestOutputKind": "octavo.sampling_params",
    "SamplingParams": "octavo.sampling_params",
    "TextPrompt": "octavo.client.intake",
    "TokensPrompt": "octavo.client.intake",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(importlib.import_module(_HOMES[name]), name)
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
