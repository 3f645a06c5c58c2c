"""Needs Python only. GPTQ, AWQ, compressed-tensors and FP8: what is read equals what was written, number by number; and what is refused."""

from __future__ import annotations

import numpy as np
import pytest
from quantised_tensors import Matrix, Store, e4m3, put_awq, put_compressed, put_gptq, random_e4m3, random_matrix

from octavo.config import HFConfig
from octavo.errors import ConfigError, ModelFileError
from octavo.loader.checkpoint import FileCheckpoint
from octavo.ops.packed import PackedWeight, WeightKind, merge
from octavo.quantization import Format, choose_format

NAME = "model.layers.0.self_attn.q_proj"


def opened(config: dict, store: Store, asked: str | None = None) -> Format:
    return choose_format(HFConfig({"quantization_config": config}, "config.json"), store, "auto", asked)[1]


def same(weight: PackedWeight, m: Matrix) -> None:
    assert (weight.n, weight.k) == m.codes.shape
    assert np.array_equal(weight.dequantize(), m.numbers.astype(np.float32))


def gptq(**changes: object) -> dict:
    return {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False, "sym": True, **changes}


class TestGPTQ:
    @pytest.mark.parametrize("bits", [4, 8])
    @pytest.mark.parametrize("group", [32, 64, 128, -1])
    @pytest.mark.parametrize("sym", [True, False])
    @pytest.mark.parametrize("layout", ["gptq", "gptq_v2"])
    def test_numbers(self, bits: int, group: int, sym: bool, layout: str) -> None:
        m, store = random_matrix(bits, 24, 256, group, sym=sym), Store()
        put_gptq(store, NAME, m, version=1 if layout == "gptq" else 2)
        read = opened(gptq(bits=bits, group_size=group, sym=sym, checkpoint_format=layout), store)
        weight = read.pack(NAME, 24, 256)
        same(weight, m)
        assert weight.group == (256 if group == -1 else group)
        assert weight.has_zeros is not sym
        assert set(read.uses(NAME)) == set(store.names())

    @pytest.mark.parametrize("bits", [4, 8])
    @pytest.mark.parametrize("group", [32, 128])
    @pytest.mark.parametrize("sym", [True, False])
    def test_columns_in_order_of_activation(self, bits: int, group: int, sym: bool) -> None:
        m, store = random_matrix(bits, 16, 256, group, sym=sym, ordered=True), Store()
        put_gptq(store, NAME, m)
        weight = opened(gptq(bits=bits, group_size=group, sym=sym, desc_act=True), store).pack(NAME, 16, 256)
        same(weight, m)
        assert weight.columns is not None
        # q, k and v share their inputs, and so their order: they stay one matrix. Another order is another matrix.
        assert len(merge([weight, weight])) == 1
        turned = PackedWeight(weight.kind, weight.n, weight.k, weight.parts, weight.columns[::-1])
        assert len(merge([weight, turned])) == 2

    def test_a_last_group_that_is_shorter(self) -> None:
        m, store = random_matrix(4, 16, 576, 128, sym=False), Store()
        put_gptq(store, NAME, m)
        weight = opened(gptq(group_size=128, sym=False), store).pack(NAME, 16, 576)
        same(weight, m)
        assert weight.group == 64

    @pytest.mark.parametrize(("group", "sym", "share"), [(128, True, 0.26), (128, False, 0.27), (64, False, 0.285), (32, True, 0.285)])
    def test_memory(self, group: int, sym: bool, share: float) -> None:
        m, store = random_matrix(4, 64, 512, group, sym=sym), Store()
        put_gptq(store, NAME, m)
        assert opened(gptq(group_size=group, sym=sym), store).pack(NAME, 64, 512).nbytes <= share * 2 * 64 * 512

    def test_what_is_not_quantised(self) -> None:
        store = Store()
        store.put("lm_head.weight", np.ones((8, 32), np.float32))
        with pytest.raises(ModelFileError, match="no tensor is quantised, though quantization_config says quant_method = 'gptq'"):
            opened(gptq(), store)
        store.put("other.qweight", np.zeros((4, 8), np.int32))
        read = opened(gptq(dynamic={"-:.*lm_head": {}}), store)
        assert read.pack("lm_head", 8, 32).kind is WeightKind.F32
        assert read.uses("lm_head") == ("lm_head.weight",)

    @pytest.mark.parametrize(("changes", "match"), [
        ({"bits": 3}, "bits = 3"), ({"bits": "4"}, "bits"), ({"bits": None}, "bits"), ({"group_size": 48}, "group_size = 48"),
        ({"group_size": 0}, "group_size = 0"), ({"checkpoint_format": "marlin"}, "marlin"), ({"dynamic": {"-:.*gate": {}, "+:.*down": {"bits": 8}}}, "dynamic.*down"),
        ({"rotation": "hadamard"}, "rotation"), ({"adapter": {"name": "lora"}}, "adapter"), ({"is_marlin_format": True}, "is_marlin_format"),
        ({"pack_dtype": "int64"}, "pack_dtype"), ({"sym": "yes"}, "sym"),
    ])  # fmt: skip
    def test_configurations_that_are_refused(self, changes: dict, match: str) -> None:
        with pytest.raises(ConfigError, match=f"config.json: quantization_config.*{match}"):
            opened(gptq(**changes), Store())

    @pytest.mark.parametrize(("changes", "tensor"), [
        ({"bits": 8}, "qweight"), ({"group_size": 64}, "scales"), ({"sym": True}, "qzeros"), ({"desc_act": True}, "g_idx"),
        ({"modules_to_not_convert": ["self_attn"]}, "qweight"),
    ])  # fmt: skip
    def test_configurations_at_odds_with_the_tensors(self, changes: dict, tensor: str) -> None:
        store = Store()
        put_gptq(store, NAME, random_matrix(4, 24, 256, 32, sym=False), g_idx=False)
        with pytest.raises(ModelFileError, match=rf"'{NAME}\.{tensor}'"):
            opened(gptq(**{"sym": False, **changes}), store).pack(NAME, 24, 256)

    @pytest.mark.parametrize("tensor", ["qweight", "qzeros", "scales"])
    def test_missing_tensors_are_named(self, tensor: str) -> None:
        store = Store()
        put_gptq(store, NAME, random_matrix(4, 24, 256, 32, sym=True))
        del store.tensors[f"{NAME}.{tensor}"]
        with pytest.raises(ModelFileError, match=rf"'{NAME}\.(weight|{tensor})' is missing"):
            read = opened(gptq(), store)
            [store.get(name) for name in read.uses(NAME)]
            read.pack(NAME, 24, 256)

    @pytest.mark.parametrize(("tensor", "array", "match"), [
        ("qweight", np.zeros((32, 24), np.int64), "dtype I64"), ("qweight", np.zeros((32, 16), np.int32), "shape"),
        ("qzeros", np.zeros((8, 4), np.int32), "shape"), ("scales", np.full((8, 24), np.nan, np.float16), "finite"),
        ("scales", np.zeros((8, 24), np.int32), "dtype"), ("g_idx", np.full(256, 8, np.int32), "names group 8"),
        ("g_idx", np.full(256, -1, np.int32), "names group -1"), ("g_idx", np.zeros(256, np.int32), "inputs"),
        ("g_idx", np.arange(256, dtype=np.int32)[::-1] // 32, "out of order"), ("g_idx", np.zeros(255, np.int32), "shape"),
    ])  # fmt: skip
    def test_tensors_that_cannot_be(self, tensor: str, array: np.ndarray, match: str) -> None:
        store = Store()
        put_gptq(store, NAME, random_matrix(4, 24, 256, 32, sym=True))
        store.put(f"{NAME}.{tensor}", np.ascontiguousarray(array))
        with pytest.raises(ModelFileError, match=rf"'{NAME}\.{tensor}'.*{match}"):
            opened(gptq(), store).pack(NAME, 24, 256)


def awq(**changes: object) -> dict:
    return {"quant_method": "awq", "bits": 4, "group_size": 64, "zero_point": True, "version": "gemm", **changes}


class TestAWQ:
    @pytest.mark.parametrize("group", [32, 64, 128, -1])
    @pytest.mark.parametrize("k", [256, 576])
    def test_numbers(self, group: int, k: int) -> None:
        m, store = random_matrix(4, 40, k, group, sym=False), Store()
        put_awq(store, NAME, m)
        read = opened(awq(group_size=group), store)
        same(read.pack(NAME, 40, k), m)
        assert set(read.uses(NAME)) == set(store.names())

    def test_older_keys(self) -> None:
        m, store = random_matrix(4, 16, 128, 64, sym=False), Store()
        put_awq(store, NAME, m)
        config = {"quant_method": "awq", "w_bit": 4, "q_group_size": 64, "zero_point": True, "version": "GEMM"}
        same(opened(config, store).pack(NAME, 16, 128), m)

    @pytest.mark.parametrize(("changes", "match"), [
        ({"bits": 8}, "bits = 8"), ({"version": "gemv"}, "gemv"), ({"zero_point": "no"}, "zero_point"), ({"group_size": 20}, "group_size"),
    ])  # fmt: skip
    def test_configurations_that_are_refused(self, changes: dict, match: str) -> None:
        with pytest.raises(ConfigError, match=match):
            opened(awq(**changes), Store())

    def test_symmetric(self) -> None:
        m, store = random_matrix(4, 16, 128, 64, sym=True), Store()
        put_awq(store, NAME, m)
        same(opened(awq(zero_point=False), store).pack(NAME, 16, 128), m)

    @pytest.mark.parametrize(("changes", "tensor"), [
        ({"group_size": 128}, "qzeros"), ({"modules_to_not_convert": ["q_proj"]}, "qweight"), ({"zero_point": False}, "qzeros"),
    ])  # fmt: skip
    def test_configurations_at_odds_with_the_tensors(self, changes: dict, tensor: str) -> None:
        store = Store()
        put_awq(store, NAME, random_matrix(4, 16, 256, 64, sym=False))
        with pytest.raises(ModelFileError, match=rf"'{NAME}\.{tensor}'"):
            opened(awq(**changes), store).pack(NAME, 16, 256)
        with pytest.raises(ModelFileError, match=rf"'{NAME}\.qweight'"):
            opened(awq(), store).pack(NAME, 256, 16)  # stored the other way round


WEIGHTS = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 64, "dynamic": False}


def compressed(layout: str, weights: dict, inputs: dict | None = None, **changes: object) -> dict:
    group = {"targets": ["Linear"], "weights": {**WEIGHTS, **weights}, "input_activations": inputs, "output_activations": None}
    whole = {"config_groups": {"group_0": group}, "ignore": ["lm_head"], "kv_cache_scheme": None, "quantization_status": "compressed"}
    return {"quant_method": "compressed-tensors", "format": layout, **whole, **changes}


STATIC = {"num_bits": 8, "type": "int", "symmetric": False, "strategy": "tensor", "dynamic": False}
CHANNEL = {"num_bits": 8, "strategy": "channel", "group_size": None}


class TestCompressedTensors:
    @pytest.mark.parametrize("bits", [4, 8])
    @pytest.mark.parametrize("group", [32, 128, -1])
    @pytest.mark.parametrize("sym", [True, False])
    @pytest.mark.parametrize("ordered", [True, False])
    def test_packed_integers(self, bits: int, group: int, sym: bool, ordered: bool) -> None:
        m, store = random_matrix(bits, 20, 256, group, sym=sym, ordered=ordered and group > 0, scale_dtype=np.float32), Store()
        put_compressed(store, NAME, m, packed=True, sym=sym, ordered=ordered)
        weights = {"num_bits": bits, "group_size": group, "symmetric": sym, "actorder": "group" if ordered else None}
        read = opened(compressed("pack-quantized", weights), store)
        same(read.pack(NAME, 20, 256), m)
        assert set(read.uses(NAME)) == set(store.names())

    @pytest.mark.parametrize("strategy", ["channel", "tensor", "group"])
    @pytest.mark.parametrize("sym", [True, False])
    @pytest.mark.parametrize("static", [True, False])
    def test_plain_integers_and_activations(self, strategy: str, sym: bool, static: bool) -> None:
        m, store = random_matrix(8, 20, 256, 64 if strategy == "group" else -1, sym=sym, scale_dtype=np.float32), Store()
        if strategy == "tensor":
            m.scales[:], m.zeros[:] = m.scales[0], m.zeros[0]
        put_compressed(store, NAME, m, packed=False, sym=sym)
        if strategy == "tensor":
            store.put(f"{NAME}.weight_scale", m.scales[0])
            if not sym:
                store.put(f"{NAME}.weight_zero_point", (m.zeros[0] - 128).astype(np.int8))
        if static:
            store.put(f"{NAME}.input_scale", np.ones(1, np.float32))
            store.put(f"{NAME}.input_zero_point", np.zeros(1, np.int8))
        weights = {"num_bits": 8, "strategy": strategy, "group_size": 64 if strategy == "group" else None, "symmetric": sym}
        read = opened(compressed("int-quantized", weights, STATIC if static else {**STATIC, "strategy": "token", "dynamic": True}), store)
        same(read.pack(NAME, 20, 256), m)
        assert set(read.uses(NAME)) == set(store.names())

    @pytest.mark.parametrize("strategy", ["channel", "tensor", "block"])
    def test_floats(self, strategy: str) -> None:
        codes, store, rng = random_e4m3(40, 288), Store(), np.random.default_rng(1)
        shape = {"channel": (40, 1), "tensor": (1,), "block": (2, 3)}[strategy]
        scales = rng.uniform(0.001, 0.1, shape).astype(np.float32)
        store.put(f"{NAME}.weight", codes, "F8_E4M3")
        store.put(f"{NAME}.weight_scale", scales)
        weights = {"num_bits": 8, "type": "float", "strategy": strategy, "group_size": None, "block_structure": [32, 128]}
        weight = opened(compressed("float-quantized", weights), store).pack(NAME, 40, 288)
        full = scales if strategy != "block" else np.repeat(np.repeat(scales, 32, 0), 128, 1)[:40, :288]
        assert weight.kind is WeightKind.F8
        assert np.array_equal(weight.dequantize(), (e4m3(codes) * full).astype(np.float32))

    def test_groups_by_target(self) -> None:
        store = Store()
        four, eight = random_matrix(4, 16, 128, 64, sym=True), random_matrix(8, 16, 128, 64, sym=True)
        put_compressed(store, NAME, four, packed=True, sym=True)
        put_compressed(store, "model.layers.0.mlp.down_proj", eight, packed=True, sym=True)
        config = compressed("pack-quantized", {})
        config["config_groups"]["group_1"] = {"targets": ["re:.*down_proj$"], "weights": {**WEIGHTS, "num_bits": 8}}
        read = opened(config, store)
        same(read.pack(NAME, 16, 128), four)
        same(read.pack("model.layers.0.mlp.down_proj", 16, 128), eight)

    @pytest.mark.parametrize(("config", "match"), [
        (compressed("pack-quantized", {"num_bits": 2}), "num_bits = 2"),
        (compressed("pack-quantized", {"type": "float"}), "type 'float'"),
        (compressed("nvfp4-pack-quantized", {}), "nvfp4"),
        (compressed("int-quantized", CHANNEL, {**STATIC, "num_bits": 4}), "input_activations"),
        (compressed("pack-quantized", {"strategy": "tensor_group"}), "tensor_group"),
        (compressed("pack-quantized", {"group_size": 10}), "group_size = 10"),
        (compressed("pack-quantized", {"dynamic": True}), "dynamic"),
        (compressed("pack-quantized", {}, kv_cache_scheme={"num_bits": 8}), "kv_cache_scheme"),
        (compressed("pack-quantized", {}, transform_config={"config_groups": {}}), "transform_config"),
        (compressed("pack-quantized", {}, sparsity_config={"format": "sparse-24-bitmask"}), "sparsity_config"),
        (compressed("pack-quantized", {}, quantization_status="frozen"), "frozen"),
        (compressed("pack-quantized", {}, config_groups={}), "no group"),
        (compressed("pack-quantized", {}, config_groups={"g": {"targets": ["re:(a+)+b"], "weights": WEIGHTS}}), "patterns"),
        (compressed("float-quantized", {**CHANNEL, "type": "float", "strategy": "block"}), "block_structure"),
    ])  # fmt: skip
    def test_configurations_that_are_refused(self, config: dict, match: str) -> None:
        with pytest.raises(ConfigError, match=match):
            opened(config, Store())

    @pytest.mark.parametrize(("layout", "weights", "changes", "tensor"), [
        ("pack-quantized", {"num_bits": 8}, {}, "weight_packed"),
        ("pack-quantized", {"group_size": 32}, {}, "weight_scale"),
        ("pack-quantized", {"symmetric": False}, {}, "weight_zero_point"),
        ("pack-quantized", {"actorder": "group"}, {}, "weight_g_idx"),
        ("pack-quantized", {}, {"ignore": ["re:.*q_proj"]}, "weight_packed"),
        ("int-quantized", CHANNEL, {}, "weight_packed"),
    ])  # fmt: skip
    def test_configurations_at_odds_with_the_tensors(self, layout: str, weights: dict, changes: dict, tensor: str) -> None:
        store = Store()
        put_compressed(store, NAME, random_matrix(4, 20, 256, 64, sym=True), packed=True, sym=True)
        with pytest.raises(ModelFileError, match=rf"'{NAME}\.{tensor}'"):
            opened(compressed(layout, weights, **changes), store).pack(NAME, 20, 256)

    @pytest.mark.parametrize(("tensor", "array", "match"), [
        ("weight_shape", np.array([20, 250]), "says"), ("weight_packed", np.zeros((20, 31), np.int32), "shape"),
        ("weight_scale", np.zeros((20, 4), np.int8), "dtype"), ("weight_zero_point", np.ones((20, 4), np.int8), "symmetric"),
        ("weight_g_idx", np.full(256, 4, np.int32), "names group 4"), ("input_scale", np.ones(2, np.float32), "one number"),
    ])  # fmt: skip
    def test_tensors_that_cannot_be(self, tensor: str, array: np.ndarray, match: str) -> None:
        store = Store()
        put_compressed(store, NAME, random_matrix(4, 20, 256, 64, sym=True), packed=True, sym=True)
        store.put(f"{NAME}.{tensor}", array)
        with pytest.raises(ModelFileError, match=rf"'{NAME}\.{tensor}'.*{match}"):
            opened(compressed("pack-quantized", {}), store).pack(NAME, 20, 256)

    def test_no_scheme_for_a_module(self) -> None:
        store = Store()
        put_compressed(store, NAME, random_matrix(4, 20, 256, 64, sym=True), packed=True, sym=True)
        config = compressed("pack-quantized", {})
        config["config_groups"]["group_0"]["targets"] = ["re:.*k_proj"]
        with pytest.raises(ConfigError, match="no group has"):
            opened(config, store).pack(NAME, 20, 256)


class TestFP8:
    @pytest.mark.parametrize(("n", "k"), [(128, 256), (200, 352)])
    def test_blocks(self, n: int, k: int) -> None:
        codes, store = random_e4m3(n, k), Store()
        scales = np.random.default_rng(1).uniform(1e-4, 1e-2, (-(-n // 128), -(-k // 128))).astype(np.float32)
        store.put(f"{NAME}.weight", codes, "F8_E4M3")
        store.put(f"{NAME}.weight_scale_inv", scales)
        read = opened({"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3", "weight_block_size": [128, 128]}, store)
        weight = read.pack(NAME, n, k)
        full = np.repeat(np.repeat(scales, 128, 0), 128, 1)[:n, :k]
        assert np.array_equal(weight.dequantize(), (e4m3(codes) * full).astype(np.float32))
        assert weight.nbytes < 1.13 * n * k
        assert set(read.uses(NAME)) == set(store.names())

    @pytest.mark.parametrize("shape", [(), (1,), (16, 1), (16,)])
    @pytest.mark.parametrize("static", [True, False])
    def test_one_scale_and_channels(self, shape: tuple[int, ...], static: bool) -> None:
        codes, store = random_e4m3(16, 64), Store()
        scales = np.random.default_rng(1).uniform(0.01, 0.1, shape)
        scales = np.asarray(scales, np.float32)
        store.put(f"{NAME}.weight", codes, "F8_E4M3")
        store.put(f"{NAME}.weight_scale", scales)
        if static:
            store.put(f"{NAME}.input_scale", np.ones((), np.float32))
        read = opened({"quant_method": "fp8", "activation_scheme": "static" if static else "dynamic"}, store)
        full = scales.reshape(-1, 1) if scales.size > 1 else scales.reshape(())
        assert np.array_equal(read.pack(NAME, 16, 64).dequantize(), (e4m3(codes) * full).astype(np.float32))
        assert set(read.uses(NAME)) == set(store.names())

    @pytest.mark.parametrize(("changes", "match"), [
        ({"fmt": "e5m2"}, "e5m2"), ({"activation_scheme": "tensor"}, "activation_scheme"), ({"weight_block_size": [128]}, "weight_block_size"),
        ({"weight_block_size": [128, -1]}, "weight_block_size"), ({"weight_block_size": [True, 128]}, "weight_block_size"),
    ])  # fmt: skip
    def test_configurations_that_are_refused(self, changes: dict, match: str) -> None:
        with pytest.raises(ConfigError, match=match):
            opened({"quant_method": "fp8", **changes}, Store())

    def test_tensors_that_cannot_be(self) -> None:
        config, store = {"quant_method": "fp8", "weight_block_size": [128, 128]}, Store()
        store.put(f"{NAME}.weight", random_e4m3(16, 64), "F8_E4M3")
        with pytest.raises(ModelFileError, match=rf"'{NAME}\.weight_scale_inv' is missing"):
            opened(config, store).pack(NAME, 16, 64)
        store.put(f"{NAME}.weight_scale_inv", np.ones((1, 2), np.float32))
        with pytest.raises(ModelFileError, match=r"weight_scale_inv.*shape"):
            opened(config, store).pack(NAME, 16, 64)
        store.put(f"{NAME}.weight_scale_inv", np.ones((1, 1), np.float32))
        opened(config, store).pack(NAME, 16, 64)
        with pytest.raises(ModelFileError, match=r"weight'.*shape"):
            opened(config, store).pack(NAME, 16, 96)
        with pytest.raises(ModelFileError, match="leaves out"):
            opened({**config, "modules_to_not_convert": [NAME]}, store).pack(NAME, 16, 64)
        store.put(f"{NAME}.weight", np.full((16, 64), 0xFF, np.uint8), "F8_E4M3")
        with pytest.raises(ModelFileError, match="NaN"):
            opened(config, store).pack(NAME, 16, 64)


class TestEmbeddings:
    """4-bit checkpoints hold embedding and head plain."""

    @staticmethod
    def store() -> Store:
        store = Store()
        put_gptq(store, NAME, random_matrix(4, 24, 256, 32, sym=True))
        store.put("lm_head.weight", np.random.default_rng(5).normal(0, 0.1, (40, 256)).astype(np.float16))
        store.put("model.layers.7.mlp.gate.weight", np.ones((8, 256), np.float16))
        return store

    @pytest.mark.parametrize("rounds", [True, False])
    def test_are_rounded_where_asked(self, rounds: bool) -> None:
        store = self.store()
        read = choose_format(HFConfig({"quantization_config": gptq()}, "config.json"), store, "auto", None, rounds)[1]
        head = read.pack("lm_head", 40, 256)
        assert head.kind is (WeightKind.W8 if rounds else WeightKind.F16)
        assert read.pack("model.layers.7.mlp.gate", 8, 256).kind is WeightKind.F16
        assert read.pack(NAME, 24, 256).kind is WeightKind.W4
        exact = store.tensors["lm_head.weight"].data.view(np.float16).astype(np.float64).reshape(40, 8, 32)
        off = np.abs(head.dequantize().reshape(exact.shape) - exact)
        assert (off <= (np.abs(exact).max(axis=-1, keepdims=True) / 127 * 0.52 if rounds else 0)).all()

    def test_of_eight_bits_are_left(self) -> None:
        store = self.store()
        config = HFConfig({"quantization_config": gptq(bits=8)}, "config.json")
        assert choose_format(config, store, "auto", None, True)[1].pack("lm_head", 40, 256).kind is WeightKind.F16

    def test_shape_is_checked(self) -> None:
        read = choose_format(HFConfig({"quantization_config": gptq()}, "config.json"), self.store(), "auto", None, True)[1]
        with pytest.raises(ModelFileError, match="'lm_head.weight'.*shape"):
            read.pack("lm_head", 41, 256)


class TestOnLoad:
    def plain(self, n: int, k: int) -> tuple[Store, np.ndarray]:
        store, values = Store(), np.random.default_rng(0).standard_normal((n, k)).astype(np.float32)
        values[0, :32] = 0.25  # a group without any spread
        store.put(f"{NAME}.weight", values)
        return store, values

    def rounded(self, store: Store, scheme: str, n: int, k: int) -> PackedWeight:
        name, read = choose_format(HFConfig({}, "config.json"), store, "auto", scheme)
        assert name == scheme
        return read.pack(NAME, n, k)

    @pytest.mark.parametrize("k", [64, 288, 32])
    def test_every_number_moves_by_half_a_step_at_most(self, k: int) -> None:
        store, values = self.plain(40, k)
        for scheme, steps in (("w4", 15), ("w8", 254)):
            weight = self.rounded(store, scheme, 40, k)
            grouped = values.reshape(40, -1, weight.group)
            spread = grouped.max(-1) - grouped.min(-1) if scheme == "w4" else 2 * np.abs(grouped).max(-1)
            off = np.abs(weight.dequantize().reshape(grouped.shape) - grouped)
            # half a step, and the rounding to fp16 of scale and minimum
            bound = spread / steps / 2 + np.abs(grouped).max(-1) * 2.0**-10 + 1e-7
            if scheme == "w8":
                assert (off.max(-1) <= bound).all()
            assert ((off**2).sum(-1) <= weight.group * bound**2).all()

    def test_scales_are_fitted_where_that_is_nearer(self) -> None:
        store, values = self.plain(40, 256)
        weight = self.rounded(store, "w4", 40, 256)
        grouped = values.reshape(40, -1, 64)
        low, high = grouped.min(-1, keepdims=True), grouped.max(-1, keepdims=True)
        extremes = np.rint((grouped - low) / (high - low) * 15) / 15 * (high - low) + low
        fitted = ((weight.dequantize().reshape(grouped.shape) - grouped) ** 2).sum()
        assert fitted < 0.95 * ((extremes - grouped) ** 2).sum()

    def test_a_matrix_stored_the_other_way_round(self) -> None:
        store, values = self.plain(40, 64)
        read = choose_format(HFConfig({}, "config.json"), store, "auto", "w4")[1]
        store.put("model.layers.0.t.weight", np.ascontiguousarray(values.T))
        weight = FileCheckpoint(store, read, "w4").packed("model.layers.0.t", 40, 64, transposed=True)
        assert np.array_equal(weight.dequantize(), self.rounded(store, "w4", 40, 64).dequantize())

    def test_memory(self) -> None:
        store, values = self.plain(64, 512)
        assert self.rounded(store, "w4", 64, 512).nbytes <= 0.3 * 2 * values.size
        assert self.rounded(store, "w8", 64, 512).nbytes <= 0.54 * 2 * values.size

    def test_only_plain_checkpoints_are_rounded(self) -> None:
        store = Store()
        put_gptq(store, NAME, random_matrix(4, 24, 256, 32, sym=True))
        with pytest.raises(ConfigError, match="say 'gptq'"):
            opened(gptq(), store, "w4")
        assert opened(gptq(), store, "gptq")

    def test_numbers_that_are_not_finite_are_refused(self) -> None:
        store, values = self.plain(8, 64)
        values[3, 5] = np.inf
        store.put(f"{NAME}.weight", values)
        for scheme in ("w4", "w8"):
            with pytest.raises(ModelFileError, match="finite"):
                self.rounded(store, scheme, 8, 64)


JUNK = [None, -1, 0, 3, 1 << 70, 1e308, float("nan"), True, "", "x" * 5000, "re:(a*)*b", [], [None], [[]], {}, {"a": {"b": None}}, "4"]


def places(config: dict, path: tuple = ()) -> list[tuple]:
    """Every key of a configuration, and of the objects in it."""
    found = []
    for key, value in config.items():
        found.append((*path, key))
        if isinstance(value, dict):
            found += places(value, (*path, key))
    return found


def with_value(config: dict, path: tuple, value: object) -> dict:
    copy = {**config}
    copy[path[0]] = value if len(path) == 1 else with_value(config[path[0]], path[1:], value)
    return copy


FUZZED = {
    "gptq": gptq(checkpoint_format="gptq", dynamic={}, modules_to_not_convert=[], pack_dtype="int32"),
    "awq": awq(modules_to_not_convert=[]),
    "compressed": compressed("pack-quantized", {"block_structure": None, "actorder": None}, STATIC),
    "fp8": {"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3", "weight_block_size": [128, 128], "ignored_layers": [], "modules_to_not_convert": []},
}  # fmt: skip


@pytest.mark.parametrize("which", FUZZED)
def test_any_value_of_any_key_loads_the_same_or_is_refused_in_one_line(which: str) -> None:
    """Never a crash, and never other numbers."""
    config, store = FUZZED[which], Store()
    m = random_matrix(4, 16, 256, 64 if which != "gptq" else 32, sym=which != "awq")
    if which == "fp8":
        store.put(f"{NAME}.weight", random_e4m3(16, 256), "F8_E4M3")
        store.put(f"{NAME}.weight_scale_inv", np.full((1, 2), 0.01, np.float32))
    elif which == "compressed":
        put_compressed(store, NAME, m, packed=True, sym=True)
    else:
        {"gptq": put_gptq, "awq": put_awq}[which](store, NAME, m)
    wanted = opened(config, store).pack(NAME, 16, 256).dequantize()
    refused = 0
    for path in places(config):
        for value in JUNK:
            try:
                read = opened(with_value(config, path, value), store)
                assert np.array_equal(read.pack(NAME, 16, 256).dequantize(), wanted), (path, value)
            except (ConfigError, ModelFileError) as e:
                refused += 1
                assert "\n" not in str(e)
                assert len(str(e)) < 600
    assert refused > 20


def test_unknown_methods_are_named() -> None:
    for method in ("bitsandbytes", "exl2", ""):
        with pytest.raises(ConfigError, match=f"quant_method = {method!r}.*gptq, awq, compressed_tensors, fp8"):
            opened({"quant_method": method}, Store())
    with pytest.raises(ConfigError, match="quant_method"):
        opened({}, Store())
