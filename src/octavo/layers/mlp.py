"""The gated feed-forward layer: down(silu(gate(x)) * up(x)) (Shazeer 2020)."""

from __future__ import annotations

from octavo import ops
from octavo.config import HFConfig
from octavo.errors import ConfigError
from octavo.layers.module import Linear, Module


class GatedMLP(Module):
    def __init__(self, name: str, hf: HFConfig, *, bias: bool = False) -> None:
        width, inner = hf.size("hidden_size"), hf.size("intermediate_size")
        act = hf.read("hidden_act", str, "silu")
        if act not in ("silu", "swish"):
            raise ConfigError(f"{hf.source}: hidden_act = {act!r}: supported is silu")
        self.gate_up = Linear([f"{name}.gate_proj", f"{name}.up_proj"], width, (inner, inner), bias)
        self.down = Linear(f"{name}.down_proj", inner, width, bias)

    def forward(self, x_TD: ops.Value) -> ops.Value:
        return self.down(ops.silu_mul(self.gate_up(x_TD)))
