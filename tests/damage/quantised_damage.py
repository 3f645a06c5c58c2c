"""Quantised checkpoints whose configuration and tensors are at odds, or whose tensors are with each other."""

from __future__ import annotations

import copy
from collections.abc import Iterator

import numpy as np
from cases import Case, Must
from quantised import AWQ, FORMS, FP8, GPTQ, W4A16, W8A8, Q, Tensors, files_of, nibbles

NAN, INFINITY = np.nan, np.inf


def cases() -> Iterator[Case]:
    for form, (quantization, make) in FORMS.items():
        yield from components(form, quantization, make())
        for other, (foreign, _) in FORMS.items():
            if other != form:
                yield case(form, f"says {other}", foreign, make())
        yield case(form, "says nothing", None, make())
    yield from at_odds()
    yield from orders()
    yield from beside()


def case(form: str, name: str, quantization: object, tensors: Tensors, *words: str, must: Must = Must.REFUSE) -> Case:
    return Case(f"{form}: {name}", form, files_of(quantization, tensors), "", must, words)


def components(form: str, quantization: object, tensors: Tensors) -> Iterator[Case]:
    """Each of the tensors that make up a matrix: missing, of another type, shape or size, or holding numbers that cannot be."""
    optional = ("g_idx", "weight_shape")
    for name in [name for name in tensors if name.startswith(f"{Q}.")]:
        part = name.removeprefix(f"{Q}.")
        dtype, array = tensors[name]
        must = Must.LOAD if part in optional else Must.REFUSE
        yield case(form, f"{part} is missing", quantization, {k: v for k, v in tensors.items() if k != name}, *(() if part in optional else (Q,)), must=must)
        yield case(form, f"{part} has a row more", quantization, tensors | {name: (dtype, np.concatenate([array, array[:1]]))}, name)
        yield case(form, f"{part} has a row less", quantization, tensors | {name: (dtype, np.ascontiguousarray(array[1:]))}, name)
        yield case(form, f"{part} is empty", quantization, tensors | {name: (dtype, array[:0])}, name)
        yield case(form, f"{part} is flat", quantization, tensors | {name: (dtype, array.reshape(1, -1, 1))}, name)
        if array.ndim == 2 and array.shape[0] != array.shape[1]:
            yield case(form, f"{part} is turned", quantization, tensors | {name: (dtype, np.ascontiguousarray(array.T))}, name)
        for wrong, numpy_type in {"I16": np.int16, "F64": np.float64, "U64": np.uint64, "BOOL": np.bool_, "F8_E5M2": np.uint8}.items():
            yield case(form, f"{part} is {wrong}", quantization, tensors | {name: (wrong, np.zeros(array.shape, numpy_type))}, name)
        if "scale" in part:
            for label, number in {"NaN": NAN, "infinite": INFINITY}.items():
                damaged = array.astype(np.float32) if dtype != "BF16" else np.ones(array.shape, np.float32)
                damaged[-1, -1] = number
                yield case(form, f"{part} is {label}", quantization, tensors | {name: ("F32", damaged)}, name)


def changed(config: dict[str, object], path: str, value: object) -> dict[str, object]:
    config = copy.deepcopy(config)
    place = config
    *outer, last = path.split(".")
    for key in outer:
        place = place[key]  # type: ignore[assignment]
    if value is Ellipsis:
        del place[last]
    else:
        place[last] = value
    return config


def at_odds() -> Iterator[Case]:
    """A configuration of the right method that says something else than the tensors."""
    weights = "config_groups.group_0.weights"
    changes: dict[str, tuple[dict[str, object], dict[str, tuple[object, ...]]]] = {
        "gptq": (GPTQ, {"bits": (8, 3, "4", 4.0, None, NAN), "group_size": (64, -1, 0, 31, "32", 2**40), "sym": ("yes",), "desc_act": ("yes",),
                        "checkpoint_format": ("gptq_v2", "marlin", 7), "modules_to_not_convert": (["q_proj"], "q_proj"), "pack_dtype": ("int16",)}),
        "awq": (AWQ, {"bits": (8, 3, "4"), "group_size": (64, -1, 0, 31), "zero_point": (False, "yes"), "version": ("gemv", 7),
                      "modules_to_not_convert": (["q_proj"], ["self_attn"])}),
        "w4a16": (W4A16, {f"{weights}.num_bits": (8, 3, "4", ...), f"{weights}.group_size": (64, 0, 31, "x"), f"{weights}.strategy": ("channel", "tensor", "no-such", 7),
                          f"{weights}.type": ("float", 7), "format": ("int-quantized", "no-such", 7, ...), "ignore": (["re:.*q_proj"], [f"{Q}"], "q_proj"),
                          "config_groups": ({}, [], ..., {"a": 7}), "config_groups.group_0.targets": (["no-such"], "Linear", ["re:("], [7], ...),
                          "quantization_status": ("frozen", 7), f"{weights}.symmetric": ("yes",)}),
        "w8a8": (W8A8, {f"{weights}.num_bits": (4, 16), f"{weights}.strategy": ("group", "block"), "format": ("pack-quantized", "float-quantized"),
                        "config_groups.group_0.input_activations": ({"num_bits": 4}, {"num_bits": 8, "type": "x"}, 7)}),
        "fp8": (FP8, {"weight_block_size": ([64, 64], [32], [0, 32], "x", [32, 2**40], [32.0, 32], ...), "fmt": ("e5m2", 7), "activation_scheme": ("no-such", 7),
                      "modules_to_not_convert": (["q_proj"],), "ignored_layers": (["q_proj"],)}),
    }  # fmt: skip
    for form, (config, values) in changes.items():
        tensors = FORMS[form][1]()
        for path, wrong in values.items():
            for value in wrong:
                label = "missing" if value is Ellipsis else repr(value)
                yield case(form, f"{path} {label}", changed(config, path, value), tensors)


def orders() -> Iterator[Case]:
    """GPTQ's groups of inputs and zero points."""
    tensors = FORMS["gptq"][1]()
    order = tensors[f"{Q}.g_idx"][1]
    wrong = {"beyond": order + 1, "negative": order - 1, "huge": np.where(order == 0, 2**31 - 1, order), "all one": np.zeros_like(order),
             "of other sizes": np.sort(np.where(np.arange(64) < 31, 0, 1)), "out of order": order[::-1]}  # fmt: skip
    for name, groups in wrong.items():
        yield case("gptq", f"groups {name}", GPTQ, tensors | {f"{Q}.g_idx": ("I32", np.ascontiguousarray(groups.astype(np.int32)))}, "g_idx")
    off = tensors | {f"{Q}.qzeros": ("I32", nibbles(np.full((2, 64), 6), 1))}
    yield case("gptq", "zero points off the middle", GPTQ, off, "qzeros")
    without = {name: entry for name, entry in tensors.items() if not name.endswith("g_idx")}
    yield case("gptq", "ordered, without an order", GPTQ | {"desc_act": True}, without, "g_idx")
    for value in ([63, 64], [64, 64, 1], [0, 0], [-64, 64]):
        shape = ("I64", np.array(value, np.int64))
        yield case("w4a16", f"weight_shape {value}", W4A16, FORMS["w4a16"][1]() | {f"{Q}.weight_shape": shape}, "weight_shape")
    codes = FORMS["fp8"][1]()[f"{Q}.weight"][1].copy()
    codes[5, 7] = 0x7F
    yield case("fp8", "a weight that is no number", FP8, FORMS["fp8"][1]() | {f"{Q}.weight": ("F8_E4M3", codes)}, Q)


def beside() -> Iterator[Case]:
    """Tensors too many: another format's parts, or the matrix a second time."""
    for form, (quantization, make) in FORMS.items():
        tensors = make()
        for part, entry in {"qweight_2": ("I32", np.zeros((8, 64), np.int32)), "bias": ("F16", np.zeros(64, np.float16)), "lora_A": ("F32", np.zeros((4, 64), np.float32))}.items():
            yield case(form, f"with {part}", quantization, tensors | {f"{Q}.{part}": entry}, Q)
        if f"{Q}.weight" not in tensors:
            plain = ("F16", np.zeros((64, 64), np.float16))
            yield case(form, "with the plain weight too", quantization, tensors | {f"{Q}.weight": plain}, Q)
