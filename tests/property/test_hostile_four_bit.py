# SPDX-License-Identifier: Apache-2.0
"""Damaged checkpoints of four bits: each is refused with one clear error.

A case takes a good tiny checkpoint, damages it once and loads it in one of the ways there are. The
error must be of a documented type and name the file, the tensor or key, and what is expected.
Nothing of the model may be left: no thread, no file, and no change of an engine that runs.

200 cases walk through all damages in turn; PACELINE_TEST_LEVEL=2 takes 2,000. What else a case
chooses follows from PACELINE_SEED, and failures print both.
"""

from __future__ import annotations

import copy
import itertools
import os
import random
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from int4_models import INT4_METHODS
from paceline import LLM, loader
from paceline._core import ModelFileError
from paceline.loader.convert import convert
from quantized_models import FP4_METHODS, NVFP4_METHODS
from tiny_models import (
    TinySpec,
    copy_checkpoint,
    load_tensors,
    make,
    read_json,
    save_tensors,
    write_json,
)

SEED = int(os.environ.get("PACELINE_SEED", "20261128"))
NUM_CASES = 200 if int(os.environ.get("PACELINE_TEST_LEVEL", "1")) == 1 else 2000

SIZES: dict[str, Any] = {"hidden_size": 128, "intermediate_size": 256, "head_dim": 32}
METHODS = (*INT4_METHODS, *FP4_METHODS)
KEY = "quantization_config"
# No message is longer, including the paths of a test.
MAX_MESSAGE = 1200
# What an error says before the cure.
CURES = ("expected", "supported:", "allowed:", "have to leave out")


@dataclass
class Model:
    """A checkpoint that a case damages.

    Attributes:
        method: How it is stored.
        tensors: By name.
        config: The object of `config.json`.
        random: What chooses.
        file: Edits the weight file once it is written.
    """

    method: str
    tensors: dict[str, Any]
    config: dict[str, Any]
    random: random.Random
    file: Callable[[Path], None] | None = None
    modules: list[str] = field(init=False)

    def __post_init__(self) -> None:
        # Of modelopt the elements are called as plain matrices are.
        self.modules = [
            name.rpartition(".")[0]
            for name, tensor in self.tensors.items()
            if name.endswith((".qweight", ".weight_packed", ".weight")) and not is_float(tensor)
        ]

    @property
    def is_int4(self) -> bool:
        return self.method in INT4_METHODS

    @property
    def layout(self) -> str:
        return INT4_METHODS[self.method].layout if self.is_int4 else "fp4"

    @property
    def is_nvfp4(self) -> bool:
        return self.method in NVFP4_METHODS

    @property
    def has_order(self) -> bool:
        return self.is_int4 and INT4_METHODS[self.method].has_order

    @property
    def is_symmetric(self) -> bool:
        return not self.is_int4 or INT4_METHODS[self.method].is_symmetric

    @property
    def quantization(self) -> dict[str, Any]:
        """The object of the key."""
        found: dict[str, Any] = self.config[KEY]
        return found

    @property
    def weights(self) -> dict[str, Any]:
        """The object that has the size of groups."""
        if "config_groups" not in self.quantization:
            return self.quantization
        found: dict[str, Any] = self.quantization["config_groups"]["group_0"]["weights"]
        return found

    def module(self, *ends: str) -> str:
        """One of the modules, or of those whose names end so."""
        return self.random.choice([m for m in self.modules if m.endswith(ends or ("",))])

    def tensor(self, *suffixes: str, ends: tuple[str, ...] = ("",)) -> str:
        """A tensor of a module: one of these, or any."""
        module = self.module(*ends)
        names = [n for n in self.tensors if n.rpartition(".")[0] == module]
        return self.random.choice(
            [n for n in names if not suffixes or n.rpartition(".")[2] in suffixes]
        )


def is_float(tensor: Any) -> bool:
    """Whether it is of floats, in a dtype of more than a byte."""
    return bool(tensor.dtype.is_floating_point) and tensor.dtype.itemsize > 1


# A damage returns what the error must name, of which one is enough; or None where the checkpoint
# has nothing that it could damage.
Damage = Callable[[Model], "list[str] | None"]
DAMAGES: dict[str, Damage] = {}
SCALES = ("scales", "weight_scale")
ZEROS = ("qzeros", "weight_zero_point")
ORDERS = ("g_idx", "weight_g_idx")
CODES = ("qweight", "weight_packed", "weight")
FACTORS = ("weight_global_scale", "weight_scale_2")


def damage(function: Damage) -> Damage:
    """Adds a damage to the list."""
    DAMAGES[function.__name__] = function
    return function


# ---- tensors ------------------------------------------------------------------------------------


@damage
def a_tensor_is_missing(model: Model) -> list[str] | None:
    needed = [*CODES, *SCALES, *FACTORS]
    if not model.is_symmetric:
        needed += ZEROS
    if model.has_order:
        needed += ORDERS
    name = model.tensor(*needed)
    del model.tensors[name]
    return [name]


@damage
def a_module_is_missing(model: Model) -> list[str] | None:
    module = model.module()
    for name in [n for n in model.tensors if n.rpartition(".")[0] == module]:
        del model.tensors[name]
    return [module]


@damage
def a_tensor_too_many(model: Model) -> list[str] | None:
    import torch

    names = [f"{model.module()}.{end}" for end in ("weight_scale_2", "bias", "perm", "weight")]
    name = model.random.choice([name for name in names if name not in model.tensors])
    model.tensors[name] = torch.zeros(4)
    return [name]


@damage
def a_tensor_is_cut(model: Model) -> list[str] | None:
    name = model.tensor()
    tensor = model.tensors[name]
    if tensor.ndim == 0:
        return None
    axis = model.random.randrange(tensor.ndim)
    model.tensors[name] = tensor.narrow(axis, 0, model.random.randrange(tensor.shape[axis]))
    return [name]


@damage
def a_tensor_is_longer(model: Model) -> list[str] | None:
    import torch

    name = model.tensor()
    tensor = model.tensors[name]
    if tensor.ndim == 0:
        return None
    axis = model.random.randrange(tensor.ndim)
    more = model.random.choice([1, tensor.shape[axis]])
    index = torch.tensor([*range(tensor.shape[axis]), *range(more)])
    bits = tensor.view(torch.uint8) if tensor.dtype.itemsize == 1 else tensor
    model.tensors[name] = bits.index_select(axis, index).view(tensor.dtype)
    return [name]


@damage
def a_tensor_has_other_axes(model: Model) -> list[str] | None:
    name = model.tensor()
    tensor = model.tensors[name]
    # One number may have an axis or none.
    changed = [tensor[None, None], tensor[None, ..., None]] if tensor.numel() == 1 else []
    changed += [] if changed else [tensor.unsqueeze(0), tensor.unsqueeze(-1)]
    if tensor.ndim == 2:
        changed.append(tensor.flatten())
        if tensor.shape[0] != tensor.shape[1]:
            changed.append(tensor.T)
    model.tensors[name] = model.random.choice(changed)
    return [name]


@damage
def a_tensor_has_another_dtype(model: Model) -> list[str] | None:
    import torch

    name = model.tensor()
    tensor = model.tensors[name]
    others = [torch.int8, torch.int16, torch.float32, torch.float64, torch.bool]
    model.tensors[name] = tensor.to(model.random.choice([t for t in others if t != tensor.dtype]))
    return [name]


@damage
def a_matrix_is_plain(model: Model) -> list[str] | None:
    """A part of a matrix in memory, or all of it, has no scales, and the lists do not say so."""
    import torch

    module = model.module()
    for name in [n for n in model.tensors if n.rpartition(".")[0] == module]:
        del model.tensors[name]
    model.tensors[f"{module}.weight"] = torch.zeros(model.random.choice([(256, 128), (128, 128)]))
    return [module]


@damage
def a_matrix_has_another_method(model: Model) -> list[str] | None:
    """The tensors of a part of a matrix in memory are those of another method."""
    module = model.module("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")
    before = {n: t for n, t in model.tensors.items() if n.rpartition(".")[0] == module}
    other = model.random.choice([m for m in METHODS if m != model.method])
    stored = load_tensors(make(spec_of(other)))
    after = {n: t for n, t in stored.items() if n.rpartition(".")[0] == module}
    if set(before) <= set(after) and all(
        (before[n].shape, before[n].dtype) == (after[n].shape, after[n].dtype) for n in before
    ):
        return None
    for name in before:
        del model.tensors[name]
    model.tensors |= after
    sibling = {"q": "k", "k": "q", "v": "q", "gate": "up", "up": "gate"}
    which = module.rpartition(".")[2].removesuffix("_proj")
    return [module, module.replace(f"{which}_proj", f"{sibling[which]}_proj")]


# ---- values -------------------------------------------------------------------------------------


@damage
def a_scale_is_no_number(model: Model) -> list[str] | None:
    import torch

    name = model.tensor(*SCALES)
    scales = model.tensors[name].contiguous().view(-1)
    index = model.random.randrange(len(scales))
    if model.is_nvfp4:
        scales.view(torch.uint8)[index] = model.random.choice([0x7F, 0xFF])
    elif model.is_int4:
        bad = ["nan", "inf", "-inf"] + (["1e-40"] if scales.dtype.itemsize == 2 else [])
        if scales.dtype.is_floating_point and str(scales.dtype) == "torch.float16":
            bad.remove("1e-40")  # zero in float16
        scales[index] = float(model.random.choice(bad))
    else:
        scales[index] = 255
    model.tensors[name] = scales.view(model.tensors[name].shape)
    return [name]


@damage
def a_factor_is_none(model: Model) -> list[str] | None:
    """Such as those of experts that no calibration reached, or one under which scales overflow."""
    if not model.is_nvfp4:
        return None
    name = model.tensor(*FACTORS)
    out_of_range = 1e-38 if name.endswith("weight_global_scale") else 3e38
    bad = [float("inf"), float("nan"), 0.0, -1.0, out_of_range]
    model.tensors[name].fill_(model.random.choice(bad))
    return [name, f"{name.rpartition('.')[0]}.weight_scale"]


@damage
def scales_have_two_dtypes(model: Model) -> list[str] | None:
    """Within a matrix in memory."""
    import torch

    if not model.is_int4:
        return None
    name = model.tensor(*SCALES, ends=("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"))
    is_half = model.tensors[name].dtype == torch.float16
    model.tensors[name] = model.tensors[name].to(torch.bfloat16 if is_half else torch.float16)
    return [name.rpartition(".")[0].rpartition(".")[0]]


@damage
def zeros_of_a_symmetric_file(model: Model) -> list[str] | None:
    if model.layout not in ("gptq", "gptq_v2") or not model.is_symmetric:
        return None
    name = model.tensor(*ZEROS)
    zeros = model.tensors[name].view(-1)
    zeros[model.random.randrange(len(zeros))] ^= 1 << model.random.randrange(31)
    return [name]


@damage
def the_shape_of_a_matrix_is_another(model: Model) -> list[str] | None:
    if model.layout != "pack-quantized":
        return None
    name = model.tensor("weight_shape")
    axis = model.random.randrange(2)
    model.tensors[name][axis] = model.random.choice([0, -1, 2**40, 127, 255])
    return [name]


@damage
def an_order_is_none(model: Model) -> list[str] | None:
    """Groups out of range, of several sizes, or of other columns than the configuration says."""
    name = model.tensor()
    module = name.rpartition(".")[0]
    names = [f"{module}.{end}" for end in ORDERS if f"{module}.{end}" in model.tensors]
    if not names:
        return None
    groups = model.tensors[names[0]]
    count = int(groups.max()) + 1
    index = model.random.randrange(len(groups))
    outside = [-1, count, 2**31 - 1, -(2**31)]
    groups[index] = model.random.choice([*outside, *([(int(groups[index]) + 1) % count] * 2)])
    if count == 1:
        groups[index] = model.random.choice(outside)
    return names


@damage
def orders_differ_within_a_matrix(model: Model) -> list[str] | None:
    if not model.has_order:
        return None
    module = model.module("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")
    (name,) = [f"{module}.{end}" for end in ORDERS if f"{module}.{end}" in model.tensors]
    groups = model.tensors[name]
    model.tensors[name] = groups.roll(1)
    return [name, module.rpartition(".")[0]]


# ---- configurations -----------------------------------------------------------------------------


@damage
def a_group_does_not_fit(model: Model) -> list[str] | None:
    sizes = [0, -2, 1, 48, 96, 512, 2**31, 2**70, 32.5, "32", [32], True]
    if not model.is_nvfp4:
        sizes.append(16)
    model.weights["group_size"] = model.random.choice(sizes)
    if "strategy" in model.weights and not model.is_nvfp4:
        model.weights["strategy"] = "group"
    return ["group_size"]


@damage
def another_group_than_that_of_the_tensors(model: Model) -> list[str] | None:
    if not model.is_int4:
        return None
    method = INT4_METHODS[model.method]
    model.weights["group_size"] = model.random.choice(
        [g for g in (32, 64, 128) if g != method.group]
    )
    if method.group == 0 and "strategy" in model.weights:
        model.weights["strategy"] = "group"
    if method.group == 0 and model.weights["group_size"] == 128:
        model.weights["group_size"] = 64  # a row of some matrices has 128 columns
    return ["group_size", *SCALES, *ZEROS, *ORDERS]


@damage
def another_number_of_bits(model: Model) -> list[str] | None:
    bits = "num_bits" if "num_bits" in model.weights else "bits"
    model.weights[bits] = model.random.choice([2, 3, 8, 16, -4, 4.5, "4", None, [4], True])
    return [bits]


@damage
def another_symmetry(model: Model) -> list[str] | None:
    if model.layout == "awq":
        model.quantization["zero_point"] = False
        return ["zero_point"]
    if "config_groups" in model.quantization:
        if "symmetric" not in model.weights:
            return None
        model.weights["symmetric"] = not model.weights["symmetric"]
        return ["symmetric", *ZEROS]
    if model.is_symmetric:
        return None  # its zero points are 8, which is as good
    model.quantization["sym"] = True
    return ["qzeros"]


@damage
def another_order(model: Model) -> list[str] | None:
    if not model.is_int4 or model.layout == "awq":
        return None
    if "desc_act" in model.quantization:
        if not model.has_order:
            return None  # the order of the columns is one, too
        model.quantization["desc_act"] = False
        return ["g_idx"]
    if INT4_METHODS[model.method].group == 0:
        return None
    model.weights["actorder"] = None if model.has_order else model.random.choice(["group", True])
    return ["weight_g_idx"]


@damage
def another_method(model: Model) -> list[str] | None:
    names = ["gptq", "awq", "compressed-tensors", "fp8", "mxfp4", "bitsandbytes", "", None, 4, []]
    seen = model.quantization["quant_method"]
    model.quantization["quant_method"] = model.random.choice([n for n in names if n != seen])
    return [KEY, *CODES, "layers.0."]


@damage
def another_format(model: Model) -> list[str] | None:
    """A known one, whose tensors are others, or one that is not."""
    key = {"gptq": "checkpoint_format", "gptq_v2": "checkpoint_format", "awq": "version"}.get(
        model.layout, "quant_algo" if model.method == "modelopt" else "format"
    )
    seen = model.quantization[key]
    formats = ["gemv", "marlin", "nvfp4", "float-quantized", "pack-quantized", "dense", 1, ["gptq"]]
    formats += ["mxfp4-pack-quantized", "nvfp4-pack-quantized"]
    model.quantization[key] = model.random.choice([f for f in formats if f != seen])
    return [key, "weights", *CODES]


@damage
def a_part_of_a_matrix_is_left_out(model: Model) -> list[str] | None:
    layer, which = model.random.randrange(2), model.random.choice(["k_proj", "gate_proj"])
    unit = "self_attn" if which == "k_proj" else "mlp"
    path = f"model.layers.{layer}.{unit}.{which}"
    if model.layout == "awq":
        model.quantization["modules_to_not_convert"] = [path]
        return ["modules_to_not_convert"]
    if "config_groups" in model.quantization:
        model.quantization["ignore"].append(path)
        return ["ignore"]
    model.quantization["dynamic"] = {f"-:{re.escape(path)}": {}}
    return ["dynamic"]


@damage
def modules_that_are_left_out_have_scales(model: Model) -> list[str] | None:
    path = f"model.layers.{model.random.randrange(2)}.mlp.down_proj"
    if model.layout == "awq":
        model.quantization["modules_to_not_convert"] = [path]
    elif "config_groups" in model.quantization:
        model.quantization["ignore"].append(path)
    else:
        model.quantization["dynamic"] = {f"-:{re.escape(path)}": {}}
    return [path]


@damage
def a_section_is_none(model: Model) -> list[str] | None:
    value = model.random.choice([[], "int4", 4, True, [{}]])
    if "config_groups" in model.quantization and model.random.random() < 0.7:
        group = model.quantization["config_groups"]["group_0"]
        which = model.random.randrange(4)
        if which == 0:
            # modelopt need not have it.
            absent = [] if model.method == "modelopt" else [None]
            model.quantization["config_groups"] = model.random.choice([value, {}, *absent])
        elif which == 1:
            model.quantization["config_groups"]["group_0"] = model.random.choice([value, None])
        elif which == 2:
            model.quantization["config_groups"]["group_1"] = copy.deepcopy(group)
        else:
            group["weights"] = model.random.choice([value, None])
        return ["config_groups"]
    model.config[KEY] = value
    return [KEY]


@damage
def a_list_is_none(model: Model) -> list[str] | None:
    key = {"awq": "modules_to_not_convert", "gptq": "dynamic", "gptq_v2": "dynamic"}.get(
        model.layout, "ignore"
    )
    model.quantization[key] = model.random.choice([4, "lm_head", [4], {"+:x": {}}, ["re:("]])
    if model.layout == "awq" and model.quantization[key] == ["re:("]:
        model.quantization[key] = [None]  # names are no expressions
    return [key]


@damage
def scales_that_the_configuration_does_not_name(model: Model) -> list[str] | None:
    del model.config[KEY]
    return ["layers.0."]


@damage
def sizes_of_another_model(model: Model) -> list[str] | None:
    key, values = model.random.choice(
        [
            ("hidden_size", (64, 96, 256)),
            ("intermediate_size", (128, 224, 512)),
            ("num_hidden_layers", (1, 3)),
            ("head_dim", (16, 64)),
            ("num_attention_heads", (2, 8)),
        ]
    )
    seen = model.config[key]
    model.config[key] = model.random.choice([v for v in values if v != seen])
    return [key, "layers."]


# ---- files --------------------------------------------------------------------------------------


@damage
def the_file_is_cut(model: Model) -> list[str] | None:
    share = model.random.random()

    def cut(path: Path) -> None:
        os.truncate(path, int(path.stat().st_size * share))

    model.file = cut
    return ["model.safetensors"]


# ---- the test -----------------------------------------------------------------------------------


def spec_of(method: str) -> TinySpec:
    return TinySpec("qwen3", quantization=method, **SIZES)


def draw(index: int) -> tuple[str, Model, list[str]]:
    """The name of a damage, a model that has it, and what its error names."""
    for attempt in itertools.count():
        chosen = random.Random(f"{SEED} {index} {attempt}")
        name = list(DAMAGES)[index % len(DAMAGES)]
        path = make(spec_of(chosen.choice(METHODS)))
        method = next(m for m in METHODS if make(spec_of(m)) == path)
        model = Model(method, load_tensors(path), read_json(path / "config.json"), chosen)
        names = DAMAGES[name](model)
        if names is not None:
            return name, model, names
    raise AssertionError


def write(model: Model, path: Path) -> Path:
    copy_checkpoint(make(spec_of(model.method)), path)
    tensors = {name: tensor.contiguous() for name, tensor in model.tensors.items()}
    save_tensors(path, tensors)
    write_json(path / "config.json", model.config)
    if model.file is not None:
        model.file(path / "model.safetensors")
    return path


def open_llm(path: Path) -> LLM:
    return LLM(path, device="cpu", max_num_seqs=2, kv_cache_bytes=8 << 20, show_progress=False)


@pytest.fixture(autouse=True, scope="module")
def threads_of_packages() -> None:
    """Starts what torch and tqdm keep once they are used."""
    loader.load_checkpoint(make(spec_of("gptq")), progress=False)
    load_tensors(make(spec_of("gptq")))


@contextmanager
def nothing_is_left() -> Iterator[None]:
    """Expects no thread that was not there before, of Python or of the library."""
    before = (threading.active_count(), len(os.listdir("/proc/self/task")))
    yield
    assert (threading.active_count(), len(os.listdir("/proc/self/task"))) == before


def refusal(load: Callable[[], Any]) -> str:
    """The message of the documented error of a call."""
    try:
        load()
    except (ModelFileError, NotImplementedError) as error:
        assert error.__cause__ is None, "one error, not a chain of them"
        return str(error)
    pytest.fail("the damage was not seen")


def check_message(message: str, where: str, names: list[str]) -> None:
    assert where in message
    assert any(name in message for name in names), names
    assert any(cure in message for cure in CURES)
    assert "\n" not in message
    assert len(message) <= MAX_MESSAGE


@pytest.mark.parametrize("index", range(NUM_CASES))
def test_a_damaged_checkpoint_is_refused(index: int, tmp_path: Path) -> None:
    name, model, names = draw(index)
    case = f"case {index} of seed {SEED}: {name}, {model.method}"
    print(case)
    path = write(model, tmp_path / "model")
    where = str(path)
    way = model.random.choice(["load", "llm", "convert"])
    print(way)
    with nothing_is_left():
        if way == "load":
            message = refusal(lambda: loader.load_checkpoint(path, progress=False))
        elif way == "llm":
            message = refusal(lambda: open_llm(path))
        else:
            out = tmp_path / "out"
            message = refusal(
                lambda: loader.load_checkpoint(convert(path, out, progress=False), progress=False)
            )
            if out.exists():
                # Values are copied as they are, and loading sees them, under canonical names.
                where, names = str(out), ["layers."]
                assert not (out / ".partial").exists()
            else:
                assert os.listdir(tmp_path) == ["model"]
    print(message)
    check_message(message, where, names)


# Damages that tensors in memory can have, too.
OF_TENSORS = [
    name for i, name in enumerate(DAMAGES) if i < list(DAMAGES).index("a_group_does_not_fit")
]


@pytest.mark.parametrize("method", METHODS)
def test_an_engine_keeps_its_weights(method: str) -> None:
    """An update with damaged tensors changes nothing of the engine that runs."""
    path = make(spec_of(method))
    with open_llm(path) as llm:
        want = llm.target.model.arena()
        for index, name in enumerate(OF_TENSORS):
            chosen = random.Random(f"{SEED} {method} {index}")
            tensors = load_tensors(make(TinySpec("qwen3", quantization=method, seed=9, **SIZES)))
            model = Model(method, tensors, read_json(path / "config.json"), chosen)
            names = DAMAGES[name](model)
            if names is None:
                continue
            print(f"{name} of seed {SEED}")
            message = refusal(lambda model=model: llm.update_weights(model.tensors))
            print(message)
            check_message(message, "state_dict", names)
            assert llm.target.model.arena() == want
        llm.generate({"prompt_token_ids": [1, 2, 3]})
