"""Which format a scheme is written in, and what a format must do."""

from __future__ import annotations

from typing import Any, Protocol

from octavo.compress.rounding import Grid, Quantised
from octavo.compress.settings import Settings
from octavo.compress.write_awq import AWQWriter
from octavo.compress.write_compressed import CompressedWriter
from octavo.compress.write_gptq import GPTQWriter
from octavo.quantization import StoredTensor


class Writer(Protocol):
    """A format. `group` is -1 for whole rows; `plain` are the names of matrices that stay as they are."""

    name: str

    @property
    def reads_transposed(self) -> bool:
        """Whether matrices that a plain checkpoint stores turned ([K, N]) have a place in the format."""
        ...

    def grid(self, group: int) -> Grid: ...

    def check(self, name: str, n: int, k: int) -> None:
        """ConfigError if a matrix of n outputs and k inputs has no place in the format."""
        ...

    def tensors(self, name: str, q: Quantised) -> list[StoredTensor]: ...

    def config(self, group: int, plain: list[str]) -> dict[str, Any]:
        """`quantization_config` of config.json."""
        ...

    def companions(self, group: int, plain: list[str]) -> dict[str, dict[str, Any]]:
        """Further JSON files."""
        ...


def writer_for(settings: Settings, dtype: str) -> Writer:
    """dtype: of the model's own numbers, in a file's word for it."""
    if settings.scheme == "w4":
        return AWQWriter(settings, dtype) if settings.method == "awq" else GPTQWriter(settings, dtype)
    return CompressedWriter(settings, dtype)
