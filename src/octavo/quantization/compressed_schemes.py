"""The quantisation configuration of compressed-tensors, read and checked: which scheme a module is stored in. Knows no tensors."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from octavo.config import HFConfig
from octavo.errors import ConfigError
from octavo.gguf_file import shown
from octavo.quantization.modules import PATTERN, is_simple, matches, refuse_set

PACKED, PLAIN_INT, PLAIN_FLOAT, NAIVE = "pack-quantized", "int-quantized", "float-quantized", "naive-quantized"
# The layout -> kinds of numbers that it may hold, with their bits.
LAYOUTS = {PACKED: {("int", 4), ("int", 8)}, PLAIN_INT: {("int", 8)}, PLAIN_FLOAT: {("float", 8)}, NAIVE: {("int", 8), ("float", 8)}}
STRATEGIES = ("tensor", "channel", "group", "block")
ACTIVATIONS = {("int", 8), ("float", 8)}
CLASS = "Linear"


@dataclass(frozen=True, slots=True)
class Scheme:
    """How some modules are stored. kind: int or float; group: inputs per scale (strategy group); block: rows and columns (strategy block)."""

    layout: str
    kind: str
    bits: int
    symmetric: bool
    strategy: str
    group: int
    block: tuple[int, int]
    ordered: bool
    targets: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Schemes:
    """All schemes of a checkpoint; `ignore` lists the modules that are not quantised."""

    source: str
    groups: tuple[Scheme, ...]
    ignore: tuple[object, ...]

    def of(self, name: str) -> Scheme:
        """The scheme of a module: one that names it, else the one for all linear layers. ConfigError if there is none."""
        for scheme in self.groups:
            if any(target != CLASS and matches(target, name) for target in scheme.targets):
                return scheme
        for scheme in self.groups:
            if CLASS in scheme.targets:
                return scheme
        raise ConfigError(f"{self.source}: config_groups: no group has {shown(name)} as a target, though it is stored quantised")


def read_schemes(config: HFConfig) -> Schemes:
    """Raises ConfigError naming the field for everything that is not supported."""
    refuse_set(config, "kv_cache_scheme", "sparsity_config", "transform_config")
    status = config.read("quantization_status", str, "compressed")
    if status != "compressed":
        raise ConfigError(f"{config.source}: quantization_status = {shown(status)}: supported is compressed")
    groups = HFConfig(config.read("config_groups", dict), f"{config.source}: config_groups")
    layout = config.read("format", str, "")
    if not groups.raw:
        raise ConfigError(f"{groups.source}: has no group")
    return Schemes(
        config.source,
        tuple(read_scheme(HFConfig(groups.read(name, dict), f"{groups.source}: {name}"), layout) for name in groups.raw),
        tuple(config.read("ignore", list, [])),
    )


def read_scheme(group: HFConfig, layout: str) -> Scheme:
    refuse_set(group, "output_activations")
    layout = group.read("format", str, layout)
    if layout not in LAYOUTS:
        raise ConfigError(f"{group.source}: format = {shown(layout)}: supported are {', '.join(LAYOUTS)}")
    weights = HFConfig(group.read("weights", dict), f"{group.source}: weights")
    refuse_set(weights, "dynamic")
    kind, bits = weights.read("type", str, "int"), weights.read("num_bits", int)
    if (kind, bits) not in LAYOUTS[layout]:
        choices = ", ".join(f"{b}-bit {t}" for t, b in sorted(LAYOUTS[layout]))
        raise ConfigError(f"{weights.source}: num_bits = {bits} of type {shown(kind)}: {layout} is supported for {choices}")
    check_activations(group)
    strategy = weights.read("strategy", str, "group" if weights.raw.get("group_size") else "tensor")
    size = weights.read("group_size", int, 0)
    if strategy == "group" and size == -1:
        strategy = "channel"
    if strategy not in STRATEGIES:
        raise ConfigError(f"{weights.source}: strategy = {shown(strategy)}: supported are {', '.join(STRATEGIES)}")
    if strategy == "group" and (size <= 0 or size % 32):
        raise ConfigError(f"{weights.source}: group_size = {size}: must be a multiple of 32")
    return Scheme(
        layout, kind, bits, weights.read("symmetric", bool, True), strategy, size, read_block(weights, strategy),
        weights.raw.get("actorder") in ("group", True), read_targets(group),
    )  # fmt: skip


def read_targets(group: HFConfig) -> tuple[str, ...]:
    targets = group.read("targets", list)
    for target in targets:
        if not isinstance(target, str) or (target.startswith(PATTERN) and not is_simple(target[len(PATTERN) :])):
            raise ConfigError(f"{group.source}: targets: {shown(str(target))}: only names and simple patterns are supported")
    return tuple(targets)


def read_block(weights: HFConfig, strategy: str) -> tuple[int, int]:
    if strategy != "block":
        return 1, 1
    value: Any = weights.raw.get("block_structure")
    if not isinstance(value, list) or len(value) != 2 or not all(isinstance(size, int) and 0 < size < 1 << 24 for size in value):
        raise ConfigError(f"{weights.source}: block_structure = {shown(str(value))}: must be two sizes")
    return value[0], value[1]


def check_activations(group: HFConfig) -> None:
    """Ours are rounded to 8 bits in groups of 32, or to bf16: finer than any 8-bit scheme, so that its parameters have no use here."""
    if group.raw.get("input_activations") is None:
        return
    inputs = HFConfig(group.read("input_activations", dict), f"{group.source}: input_activations")
    kind, bits = inputs.read("type", str, "int"), inputs.read("num_bits", int)
    if (kind, bits) not in ACTIVATIONS:
        raise ConfigError(f"{inputs.source}: num_bits = {bits} of type {shown(kind)}: supported are 8 bits")
