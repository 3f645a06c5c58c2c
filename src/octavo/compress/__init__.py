"""Quantises checkpoints: plain safetensors in, a folder of 4-bit or 8-bit ones out, in the formats that other programs read too.

Works layer by layer on the numpy definition of the ops, so that whatever family can be served can be quantised.
"""

from octavo.compress.run import Result, quantize
from octavo.compress.settings import Settings

__all__ = ["Result", "Settings", "quantize"]
