"""What a run of the quantiser is asked for, checked before anything is read. Knows no model and no file."""

from __future__ import annotations

from dataclasses import dataclass
from types import MappingProxyType

from octavo.errors import ConfigError

SCHEMES = ("w4", "w8", "w8a8")
METHODS = MappingProxyType({"w4": ("rtn", "gptq", "awq"), "w8": ("rtn", "gptq"), "w8a8": ("rtn", "smoothquant", "gptq")})
WITH_CALIBRATION = MappingProxyType({"w4": "gptq", "w8": "gptq", "w8a8": "smoothquant"})
GROUPS = (128, 64, 32)  # of w4, where none is asked for: the first that divides the inputs of every matrix


@dataclass(frozen=True, slots=True)
class Settings:
    """scheme: bits of weights (w4, w8) and of activations (a8). method: how weights are rounded; empty for the default, which depends on whether
    there are calibration texts. group_size: inputs per scale, -1 for a whole row, None for the scheme's default. symmetric: None for the
    format's default. act_order: GPTQ groups columns in order of importance, which costs readers a permutation.
    samples, sample_len: calibration texts, and tokens of each at most. damping: of GPTQ, relative to the mean of the Hessian's diagonal.
    """

    scheme: str
    method: str = ""
    calibrated: bool = False
    group_size: int | None = None
    symmetric: bool | None = None
    act_order: bool = False
    samples: int = 64
    sample_len: int = 512
    damping: float = 0.01

    def checked(self) -> Settings:
        """These with defaults filled in. Raises ConfigError naming the option."""
        if self.scheme not in SCHEMES:
            raise ConfigError(f"scheme = {self.scheme!r}: must be one of {', '.join(SCHEMES)}")
        method = self.method or (WITH_CALIBRATION[self.scheme] if self.calibrated else "rtn")
        if method not in METHODS[self.scheme]:
            raise ConfigError(f"method = {method!r}: scheme {self.scheme} has {', '.join(METHODS[self.scheme])}")
        if method != "rtn" and not self.calibrated:
            raise ConfigError(f"method = {method!r}: needs texts; give --calibration FILE")
        if method == "rtn" and self.calibrated:
            raise ConfigError("calibration: method rtn rounds each number alone and takes no texts")
        if self.act_order and (self.scheme, method) != ("w4", "gptq"):
            raise ConfigError(f"act_order: is of scheme w4 with method gptq, not of {self.scheme} with {method}")
        if self.symmetric and method == "awq":
            raise ConfigError("symmetric: the AWQ format has zero points")
        if self.symmetric is False and self.scheme != "w4":
            raise ConfigError(f"symmetric: scheme {self.scheme} is symmetric in the formats that it is written in")
        for name, value, low, high in (("samples", self.samples, 1, 1 << 16), ("sample_len", self.sample_len, 8, 1 << 16)):
            if not low <= value <= high:
                raise ConfigError(f"{name} = {value}: must be in {low}..{high}")
        symmetric = method != "awq" if self.symmetric is None else self.symmetric
        return Settings(
            self.scheme, method, self.calibrated, self._group(), symmetric, self.act_order, self.samples, self.sample_len, self.damping
        )

    def _group(self) -> int | None:
        """None is settled by the model's matrices."""
        if self.group_size is None:
            return None if self.scheme == "w4" else -1
        if self.group_size != -1 and (self.group_size < 32 or self.group_size % 32 or self.group_size > 1 << 20):
            raise ConfigError(f"group_size = {self.group_size}: must be -1 (a whole row) or a multiple of 32")
        if self.scheme == "w8a8" and self.group_size != -1:
            raise ConfigError(f"group_size = {self.group_size}: scheme w8a8 has one scale per output channel")
        return self.group_size

    @property
    def bits(self) -> int:
        return 4 if self.scheme == "w4" else 8

    def group_for(self, widths: set[int]) -> int:
        """Inputs per scale for matrices of these numbers of inputs, -1 for whole rows. Raises ConfigError if the asked one does not divide them."""
        if self.group_size is None:
            fitting = [group for group in GROUPS if not any(width % group for width in widths)]
            if not fitting:
                odd = min(width for width in widths if width % GROUPS[-1])
                raise ConfigError(f"matrices of {odd} inputs have no groups of {GROUPS[-1]}; give --group-size -1")
            return fitting[0]
        if self.group_size > 0 and any(width % self.group_size for width in widths):
            odd = min(width for width in widths if width % self.group_size)
            raise ConfigError(f"group_size = {self.group_size}: does not divide the {odd} inputs of some matrices")
        return self.group_size
