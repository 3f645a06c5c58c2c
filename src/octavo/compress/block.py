"""One block of a model: from its weights and what comes into it, to its quantised matrices and what goes out. Knows no files.

# T = tokens of a sequence, D = hidden size, N, K = outputs and inputs of a product
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from octavo.compress.awq import clipping, scaling_factors
from octavo.compress.capture import Inputs, Observer, f32_weight, run_block
from octavo.compress.folding import Fold, Stored, matrix_of, norm_folds, row_folds
from octavo.compress.gptq import Order, gptq
from octavo.compress.rounding import Grid, Quantised, to_nearest
from octavo.compress.settings import Settings
from octavo.compress.smooth import smoothing_factors
from octavo.layers import Attention, Linear, Module, MoE, Vector

F32 = NDArray[np.float32]
ROWS = 512  # tokens, of all sequences together, that AWQ measures its errors on
FEWEST_OUTPUTS = 8  # a product of fewer, such as a gate, is not worth rounding


@dataclass(slots=True)
class Compressed:
    """What became of a block: matrices by name, vectors that changed by full name, and the results [T, D] for each sequence."""

    matrices: dict[str, Quantised] = field(default_factory=dict)
    vectors: dict[str, F32] = field(default_factory=dict)
    hidden: list[F32] = field(default_factory=list)


def quantisable(block: Module) -> list[Linear]:
    """The products that are rounded: all but routers and gates, whose few numbers decide much."""
    routers = {module.router for module in block.walk() if isinstance(module, MoE)}
    return [linear for linear in block.linears() if linear not in routers and linear.n >= FEWEST_OUTPUTS]


class BlockCompressor:
    """Compresses the blocks of one model, one after the other. longest: tokens of the longest sequence; stored: rounds a vector as its file does."""

    def __init__(self, settings: Settings, grid: Grid, width: int, longest: int, stored: Stored) -> None:
        self.settings, self.grid, self.width, self.longest, self.stored = settings, grid, width, longest, stored

    def compress(self, block: Module, hidden: Sequence[F32]) -> Compressed:
        """The block's weights are float32 afterwards, those of the rounded matrices. hidden: [T, D] of each sequence, none for method rtn.

        Raises ValueError with a matrix's name if the numbers do not allow it.
        """
        for linear in block.linears():
            linear.weights = f32_weight(np.concatenate([weight.dequantize() for weight in linear.weights]))
        linears = quantisable(block)
        for linear in linears:
            if not np.isfinite(matrix_of(linear)).all():
                raise ValueError(f"{linear.names[0]}: holds numbers that are not finite")
        result = Compressed()
        seen = self._observe(block, linears, hidden)
        if self.settings.method == "awq":
            self._fold_awq(block, linears, seen, result)
        elif self.settings.method == "smoothquant":
            self._fold_smooth(block, linears, seen, result)
        for linear in linears:
            self._round(block, linear, seen.get(linear), result)
        if hidden:
            result.hidden = run_block(block, hidden, self.longest)
        return result

    def _observe(self, block: Module, linears: list[Linear], hidden: Sequence[F32]) -> dict[Linear, Inputs]:
        if not hidden:
            return {}
        per_sequence = -(-ROWS // len(hidden)) if self.settings.method == "awq" else 0
        observer = Observer(linears, per_sequence, self.settings.method == "gptq")
        run_block(block, hidden, self.longest, observer.note)
        return observer.seen

    def _fold_awq(self, block: Module, linears: list[Linear], seen: dict[Linear, Inputs], result: Compressed) -> None:
        for fold in norm_folds(block, linears, self.width, self.stored) + row_folds(block, linears, self.stored):
            inputs = seen.get(fold.readers[0])
            if inputs is None:
                continue
            x_TK = np.concatenate(inputs.rows)
            mean_K = (inputs.sums_K / inputs.count).astype(np.float32)
            factors_K = scaling_factors(x_TK, mean_K, [matrix_of(linear) for linear in fold.readers], self.grid)
            self._divide(fold, factors_K, result)
            for linear in fold.readers:
                seen[linear].rows = [rows / factors_K for rows in seen[linear].rows]

    def _fold_smooth(self, block: Module, linears: list[Linear], seen: dict[Linear, Inputs], result: Compressed) -> None:
        for fold in norm_folds(block, linears, self.width, self.stored):
            most_w_K = np.max([np.abs(matrix_of(linear)).max(axis=0) for linear in fold.readers], axis=0)
            if fold.readers[0] in seen:
                self._divide(fold, smoothing_factors(seen[fold.readers[0]].most_K, most_w_K), result)

    def _divide(self, fold: Fold, factors_K: F32, result: Compressed) -> None:
        for changed in fold.divide(factors_K):
            if isinstance(changed, Vector):
                result.vectors[changed.name] = changed.value
            elif changed.bias is not None and changed.bias_names is not None:
                parts = np.split(changed.bias, np.cumsum(changed.n_each)[:-1])
                result.vectors |= dict(zip(changed.bias_names, parts, strict=True))

    def _round(self, block: Module, linear: Linear, inputs: Inputs | None, result: Compressed) -> None:
        w_NK = matrix_of(linear)
        if self.settings.method == "gptq" and inputs is not None and inputs.products_KK is not None:
            order = Order.GROUPED if self.settings.act_order else Order.IMPORTANT
            try:
                rounded = gptq(w_NK, inputs.products_KK, self.grid, order, self.settings.damping)
            except ValueError as e:
                raise ValueError(f"{linear.names[0]}: {e}") from None
        elif self.settings.method == "awq" and inputs is not None:
            keep_NG = clipping(np.concatenate(inputs.rows), w_NK, self.grid)
            keep_NG[: scored_rows(block, linear)] = 1
            rounded = to_nearest(w_NK, self.grid, keep_NG)
        else:
            rounded = to_nearest(w_NK, self.grid)
        linear.weights = f32_weight(rounded.dequantize())
        start = 0
        for name, n in zip(linear.names, linear.n_each, strict=True):
            result.matrices[name] = rounded.rows(start, start + n)
            start += n


def scored_rows(block: Module, linear: Linear) -> int:
    """How many of a product's first output channels are q and k: their errors meet in the scores, which an error of each alone does not show."""
    for module in block.walk():
        if isinstance(module, Attention) and module.qkv is linear:
            return module.widths[0] + module.widths[1]
    return 0
