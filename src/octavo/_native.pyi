# The C++ extension (csrc/bind.cpp). Only octavo.ops.cpu imports it, and gives its functions types and contracts.
from typing import Any

def __getattr__(name: str) -> Any: ...
