"""Feed-forward layers: gated (Shazeer 2020), plain, and a mixture of gated ones (Jiang et al. 2024)."""

from __future__ import annotations

from octavo import ops
from octavo.config import HFConfig
from octavo.errors import ConfigError
from octavo.layers.module import Linear, Module
from octavo.ops.batch import MoeSpec

GATED = {"silu": ops.silu_mul, "swish": ops.silu_mul, "gelu_pytorch_tanh": ops.gelu_mul, "gelu_new": ops.gelu_mul}
PLAIN = {"gelu_pytorch_tanh": ops.gelu, "gelu_new": ops.gelu, "gelu_fast": ops.gelu}


class GatedMLP(Module):
    """down(act(gate(x)) * up(x)).

    names: gate and up below `name`, or one matrix that holds both, gate first; then down. inner: the intermediate size unless given.
    """

    def __init__(
        self,
        name: str,
        hf: HFConfig,
        *,
        names: tuple[str, ...] = ("gate_proj", "up_proj", "down_proj"),
        inner: int = 0,
        bias: bool = False,
        act: str = "",
    ) -> None:
        width, inner = hf.size("hidden_size"), inner or hf.size("intermediate_size")
        act = act or hf.read("hidden_act", str, "silu")
        if act not in GATED:
            raise ConfigError(f"{hf.source}: hidden_act = {act!r}: supported are {', '.join(GATED)}")
        self.act = GATED[act]
        *both, down = names
        self.gate_up = Linear([f"{name}.{n}" for n in both], width, (inner, inner) if len(both) == 2 else 2 * inner, bias)
        self.down = Linear(f"{name}.{down}", inner, width, bias)

    def forward(self, x_TD: ops.Value) -> ops.Value:
        return self.down(self.act(self.gate_up(x_TD)))


class PlainMLP(Module):
    """down(act(up(x))). names: up and down below `name`."""

    def __init__(self, name: str, hf: HFConfig, *, names: tuple[str, str], act: str, bias: bool = True, transposed: bool = False) -> None:
        width, inner = hf.size("hidden_size"), hf.size("intermediate_size")
        if act not in PLAIN:
            raise ConfigError(f"{hf.source}: activation {act!r}: supported are {', '.join(PLAIN)}")
        self.act = PLAIN[act]
        self.up = Linear(f"{name}.{names[0]}", width, inner, bias, transposed)
        self.down = Linear(f"{name}.{names[1]}", inner, width, bias, transposed)

    def forward(self, x_TD: ops.Value) -> ops.Value:
        return self.down(self.act(self.up(x_TD)))


class MoE(Module):
    """Router and experts: each token goes through `top_k` of them. names: gate, up and down of an expert, below `name`.experts.N."""

    def __init__(
        self,
        name: str,
        hf: HFConfig,
        *,
        num_experts: int,
        spec: MoeSpec,
        inner: int,
        names: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj"),
    ) -> None:
        if not 1 <= spec.top_k <= num_experts:
            raise ConfigError(f"{hf.source}: {spec.top_k} experts per token of {num_experts} cannot be")
        self.spec = spec
        self.router = Linear(f"{name}.gate", hf.size("hidden_size"), num_experts)
        self.experts = [
            GatedMLP(f"{name}.experts.{i}", hf, names=names, inner=inner) for i in range(num_experts)
        ]

    def forward(self, x_TD: ops.Value) -> ops.Value:
        gate_up, down = [e.gate_up.weights for e in self.experts], [e.down.weights for e in self.experts]
        return ops.moe(x_TD, self.router(x_TD), gate_up, down, self.spec)
