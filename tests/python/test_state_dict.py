# SPDX-License-Identifier: Apache-2.0
"""Weights from memory: equal to those of a folder bit for bit, and the same refusals.

The reference is the loader of folders, which other tests compare with transformers.
"""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import assistant_pair
import dlpack_tensors
from dlpack_tensors import RawTensor
from paceline import LLM, ModelFileError, SamplingParams
from paceline.loader import load_pair
from tiny_models import TinySpec, load_tensors, make, read_json

FAMILIES = {
    "llama": TinySpec("llama", attention_bias=True, mlp_bias=True),
    "qwen3": TinySpec("qwen3"),
    "gemma3": TinySpec("gemma3"),
    "gemma4": TinySpec("gemma4"),
    "gemma4_dense": TinySpec("gemma4", k_eq_v=True, shared_layers=0, per_layer_size=0),
    "gpt_oss": TinySpec("gpt_oss"),
    "glm4_moe_lite": TinySpec("glm4_moe_lite"),
    "qwen3_5_moe": TinySpec("qwen3_5_moe"),
    "qwen3_next": TinySpec("qwen3_next"),
    "qwen3_moe": TinySpec("qwen3_moe", num_layers=3, dense_layers=(1,)),
    "gemma4_experts": TinySpec("gemma4", has_experts=True),
}
# With scales: as the tensors of files, not as modules of transformers.
SCALED = {
    "mxfp4": TinySpec("gpt_oss", quantization="mxfp4"),
    "fp8_block": TinySpec("qwen3", quantization="fp8_block", dtype="bfloat16"),
    "fp8_row": TinySpec("llama", quantization="fp8_row"),
    "fp8_experts": TinySpec("qwen3_moe", quantization="fp8_block", expert_size=32),
    "fp8_tensor": TinySpec("gemma3", quantization="fp8_tensor", dtype="bfloat16"),
}
ENGINE: dict[str, Any] = {
    "device": "cpu", "max_num_seqs": 2, "max_model_len": 64, "kv_cache_bytes": 8 << 20,
    "show_progress": False,
}  # fmt: skip
DTYPES = ("float32", "bfloat16")


def of_folder(path: Path) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """The configuration and the tensors of a checkpoint."""
    return read_json(path / "config.json"), load_tensors(path)


def llama() -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    return of_folder(make(FAMILIES["llama"]))


def cast(tensors: Mapping[str, torch.Tensor], dtype: str) -> dict[str, torch.Tensor]:
    """The tensors of weights in another dtype; token ids stay."""
    return {
        name: tensor.to(getattr(torch, dtype)) if tensor.is_floating_point() else tensor
        for name, tensor in tensors.items()
    }


def write_as(source: Path, out: Path, dtype: str) -> Path:
    """A copy of a checkpoint in another dtype."""
    from safetensors.torch import save_file

    out.mkdir()
    save_file(cast(load_tensors(source), dtype), out / "model.safetensors")
    (out / "config.json").write_bytes((source / "config.json").read_bytes())
    return out


# ---- equal to the folder -----------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("family", FAMILIES)
def test_module_equals_its_folder(family: str, dtype: str, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    path = write_as(make(FAMILIES[family]), tmp_path / "model", dtype)
    module = AutoModelForCausalLM.from_pretrained(path, dtype=getattr(torch, dtype))
    expected, _ = load_pair(path, progress=False)
    with LLM.from_module(module, **ENGINE) as llm:
        loaded = llm.target
        assert loaded.model.arena() == expected.model.arena()
        assert without_split(loaded.config) == without_split(expected.config)
        assert loaded.weight_dtype == expected.weight_dtype == dtype


def without_split(config: dict[str, Any]) -> dict[str, Any]:
    """A description, whether or not each expert has tensors of its own; in memory none does."""
    layers = [
        {**layer, "mlp": {key: value for key, value in layer["mlp"].items() if key != "per_expert"}}
        for layer in config["layers"]
    ]
    return {**config, "layers": layers}


@pytest.mark.parametrize("format", SCALED)
def test_formats_with_scales_equal_their_folders(format: str) -> None:
    path = make(SCALED[format])
    expected, _ = load_pair(path, progress=False)
    with LLM.from_state_dict(*of_folder(path), **ENGINE) as llm:
        arena = llm.target.model.arena()
        assert arena == expected.model.arena()
        assert llm.target.config == expected.config
        # Other weights in the same format, and back again.
        other = load_tensors(make(dataclasses.replace(SCALED[format], seed=1)))
        llm.update_weights(other)
        renewed, _ = load_pair(make(dataclasses.replace(SCALED[format], seed=1)), progress=False)
        assert llm.target.model.arena() == renewed.model.arena() != arena
        llm.update_weights(load_tensors(path))
        assert llm.target.model.arena() == arena


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "kind",
    ["draft_model", "eagle", "eagle3", "speculators", "gemma4_mtp", "dflash", "dspark"],
)
def test_drafters_equal_their_folders(
    kind: str,
    dtype: str,
    tmp_path: Path,
    pair_of: Callable[[str], tuple[Path, Path]],
) -> None:
    target, drafter = pair_of(kind)
    target_path = write_as(target, tmp_path / "target-as", dtype)
    draft_path = write_as(drafter, tmp_path / "draft-as", dtype)
    expected, expected_draft = load_pair(target_path, draft_path, progress=False)
    assert expected_draft is not None
    config, tensors = of_folder(target_path)
    draft_config, draft_tensors = of_folder(draft_path)
    with LLM.from_state_dict(
        config, tensors, draft_config=draft_config, draft_state_dict=draft_tensors,
        speculative_config={"num_speculative_tokens": 3}, **ENGINE,
    ) as llm:  # fmt: skip
        assert llm.draft is not None and llm.speculative_config is not None
        assert llm.target.model.arena() == expected.model.arena()
        assert llm.draft.model.arena() == expected_draft.model.arena()
        assert llm.speculative_config.method == expected_draft.method
        prompt = [5, 6, 7]
        greedy = SamplingParams(temperature=0.0, max_tokens=12)
        tokens = llm.generate(prompt, greedy)[0].outputs[0].token_ids
    with LLM.from_loaded(
        expected, expected_draft, speculative_config={
            "model": str(draft_path), "num_speculative_tokens": 3,
        }, **{**ENGINE, "device": "auto"},
    ) as llm:  # fmt: skip
        assert llm.generate(prompt, greedy)[0].outputs[0].token_ids == tokens


def test_assistant_module() -> None:
    """Names as the class of transformers has them in memory."""
    import assistant_models

    spec = assistant_pair.TARGET
    module = assistant_models._random_model(assistant_pair.CLUSTERS, make(spec))
    target, _ = of_folder(make(spec)), None
    with LLM.from_state_dict(*target, **ENGINE) as plain:
        expected = plain.target.model.arena()
    from transformers import AutoModelForCausalLM

    verifier = AutoModelForCausalLM.from_pretrained(make(spec), dtype=torch.float32)
    with LLM.from_module(
        verifier, draft_module=module, speculative_config={"num_speculative_tokens": 2}, **ENGINE
    ) as llm:
        assert llm.draft is not None and llm.draft.method == "gemma4_mtp"
        assert llm.target.model.arena() == expected


def test_dtype_is_asked_for() -> None:
    config, tensors = llama()
    with LLM.from_state_dict(config, tensors, dtype="bfloat16", **ENGINE) as llm:
        rounded = llm.target.model.arena()
    with LLM.from_state_dict(config, cast(tensors, "bfloat16"), **ENGINE) as llm:
        # Norms and biases are float32 in memory, so only those differ.
        assert llm.target.weight_dtype == "bfloat16"
        assert len(llm.target.model.arena()) == len(rounded)
    with LLM.from_state_dict(config, cast(tensors, "float16"), **ENGINE) as llm:
        assert llm.target.weight_dtype == "float32"
    with pytest.raises(ValueError, match=r"of state_dict is stored as F16"):
        LLM.from_state_dict(config, cast(tensors, "float16"), dtype="bfloat16", **ENGINE)


def test_views_are_read_by_their_strides() -> None:
    config, tensors = llama()
    with LLM.from_state_dict(config, tensors, **ENGINE) as llm:
        expected = llm.target.model.arena()

    def view(name: str, tensor: torch.Tensor) -> Any:
        if tensor.ndim == 1:
            wide = torch.zeros(3 * len(tensor))
            wide[1::3] = tensor
            return wide[1::3]
        if "q_proj" in name:
            return tensor.t().contiguous().t()
        if "mlp" in name:
            padded = torch.full((tensor.shape[0] + 2, tensor.shape[1] + 5), 9.0)
            padded[1:-1, 2:-3] = tensor
            return padded[1:-1, 2:-3]
        # numpy has negative strides, torch has not.
        return np.ascontiguousarray(tensor.numpy()[::-1, ::-1])[::-1, ::-1]

    views = {name: view(name, tensor) for name, tensor in tensors.items()}
    assert not views["model.layers.0.self_attn.q_proj.weight"].is_contiguous()
    assert views["model.embed_tokens.weight"].strides[0] < 0
    with LLM.from_state_dict(config, views, **ENGINE) as llm:
        assert llm.target.model.arena() == expected


def test_parameters_that_require_gradients() -> None:
    config, tensors = llama()
    parameters = {name: torch.nn.Parameter(tensor) for name, tensor in tensors.items()}
    with LLM.from_state_dict(config, tensors, **ENGINE) as llm:
        expected = llm.target.model.arena()
    with LLM.from_state_dict(config, parameters, **ENGINE) as llm:
        assert llm.target.model.arena() == expected


def test_tokenizer_and_end_ids(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import tokenizers

    path = make(FAMILIES["llama"])
    config, tensors = of_folder(path)
    with LLM(path, **ENGINE) as llm:
        expected = llm.generate("ab", SamplingParams(temperature=0.0, max_tokens=8))[0].outputs[0]
    given = tokenizers.Tokenizer.from_file(str(path / "tokenizer.json"))
    # Settings in the working folder have nothing to do with a tokenizer in memory.
    (tmp_path / "tokenizer_config.json").write_text('{"pad_token": "<eos>"}')
    monkeypatch.chdir(tmp_path)
    for tokenizer in (path, str(path / "tokenizer.json"), given):
        with LLM.from_state_dict(config, tensors, tokenizer=tokenizer, **ENGINE) as llm:
            assert llm.get_tokenizer().pad_token is None
            output = llm.generate("ab", SamplingParams(temperature=0.0, max_tokens=8))[0].outputs[0]
            assert (output.text, output.token_ids) == (expected.text, expected.token_ids)
    stop = {"eos_token_id": [expected.token_ids[2]]}
    with LLM.from_state_dict(config, tensors, generation_config=stop, **ENGINE) as llm:
        assert llm.target.eos_token_ids == (expected.token_ids[2],)
        with pytest.raises(ValueError, match="tokenizer"):
            llm.generate("ab")
    with pytest.raises(ValueError, match=r"^tokenizer is 3 \(int\); allowed: None, the path"):
        LLM.from_state_dict(config, tensors, tokenizer=3, **ENGINE)


def test_a_drafter_in_memory_has_the_tokenizer_of_its_target(recwarn: Any) -> None:
    target, draft = (make(TinySpec(vocab_size=size, tokenizer_size=100)) for size in (128, 112))
    config, tensors = of_folder(target)
    draft_config, draft_tensors = of_folder(draft)
    params = SamplingParams(temperature=0.0, max_tokens=6)
    with LLM.from_state_dict(
        config, tensors, tokenizer=target, draft_config=draft_config,
        draft_state_dict=draft_tensors, speculative_config={"num_speculative_tokens": 2}, **ENGINE,
    ) as llm, LLM(target, **ENGINE) as plain:  # fmt: skip
        tokens = [one.generate("ab", params)[0].outputs[0].token_ids for one in (llm, plain)]
    assert tokens[0] == tokens[1]
    assert not [warning for warning in recwarn if "tokenizer.json" in str(warning.message)]


def test_a_tokenizer_of_transformers_brings_its_chat_templates() -> None:
    from transformers import PreTrainedTokenizerFast

    path = make(FAMILIES["llama"])
    talk = [{"role": "user", "content": "ab"}]
    given = PreTrainedTokenizerFast(
        tokenizer_file=str(path / "tokenizer.json"), bos_token="a", eos_token="b", pad_token="c"
    )
    own = "{{ bos_token }}{{ messages[0].content }}{{ eos_token }}{{ pad_token }}"
    with LLM.from_state_dict(*of_folder(path), tokenizer=given, **ENGINE) as llm:
        tokenizer = llm.get_tokenizer()
        assert (tokenizer.bos_token, tokenizer.eos_token, tokenizer.pad_token) == ("a", "b", "c")
        with pytest.raises(ValueError, match=r"^the tokenizer in memory has no chat template"):
            llm.chat(talk)
    for template in (own, {"default": own, "tool_use": "{{ tools }}"}):
        given.chat_template = template
        expected = given.apply_chat_template(talk, tokenize=False)
        assert expected == "aabbc"
        with LLM.from_state_dict(*of_folder(path), tokenizer=given, **ENGINE) as llm:
            (output,) = llm.chat(talk, SamplingParams(temperature=0.0, max_tokens=2))
            assert output.prompt == expected
            assert output.prompt_token_ids == given.encode(expected, add_special_tokens=False)


# ---- capsules ----------------------------------------------------------------------------------


@pytest.mark.parametrize("version", [None, (1, 0), (1, 9)])
def test_capsules_of_both_versions(version: tuple[int, int] | None) -> None:
    config, tensors = llama()
    with LLM.from_state_dict(config, tensors, **ENGINE) as llm:
        expected = llm.target.model.arena()
    name = "model.embed_tokens.weight"
    array = tensors[name].numpy()
    padded = np.zeros(array.size + 3, np.float32)
    padded[3:] = array.ravel()
    raws = [
        dlpack_tensors.of_numpy(array, version=version, flags=1),
        # Without strides, after an offset.
        RawTensor(
            padded.ctypes.data, array.shape, byte_offset=12, version=version, keep=padded,
        ),
    ]  # fmt: skip
    for raw in raws:
        with LLM.from_state_dict(config, {**tensors, name: raw}, **ENGINE) as llm:
            assert llm.target.model.arena() == expected
        assert raw.num_deleted == 1, "the capsule's memory was not given back"


REFUSED = {
    "rocm": ({"device": (10, 0)}, r"is on a device of the kind ROCm; expected a tensor on the CPU"),
    "unheard_of": (
        {"device": (77, 0)},
        r"is on a device of the kind unknown \(DLPack device type 77\)",
    ),
    "second_gpu": ({"device": (2, 1)}, r"is on CUDA device 1; expected device 0"),
    "lanes": ({"dtype": (2, 32, 4)}, r"has elements of 4 lanes; expected single numbers"),
    "version": ({"version": (2, 0)}, r"comes as DLPack 2\.0; expected version 1 or 0"),
    "float64": ({"dtype": (2, 64, 1)}, r"is stored as F64, which Paceline does not support"),
    "float8": ({"dtype": (10, 8, 1)}, r"is stored as F8_E4M3, which Paceline does not support"),
    "float4": ({"dtype": (17, 4, 1)}, r"is stored as DLPack type 17 of 4 bits"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused_capsules(case: str) -> None:
    changes, message = REFUSED[case]
    config, tensors = llama()
    name = "model.norm.weight"
    raw = dlpack_tensors.of_numpy(np.ones(64, np.float32), **changes)
    with pytest.raises(
        (ModelFileError, NotImplementedError), match=rf"^state_dict: tensor '{name}' {message}"
    ):
        LLM.from_state_dict(config, {**tensors, name: raw}, **ENGINE)
    assert raw.num_deleted <= 1


def test_gpu_tensor_without_a_gpu() -> None:
    from paceline import _core

    if _core.cuda_status()["is_usable"]:
        return  # test_cuda_torch.py reads one there
    config, tensors = llama()
    raw = dlpack_tensors.of_numpy(np.ones(64, np.float32), device=(2, 0))
    with pytest.raises(NotImplementedError, match=r"tensor 'model.norm.weight' is on a CUDA dev"):
        LLM.from_state_dict(config, {**tensors, "model.norm.weight": raw}, **ENGINE)


# ---- refused mappings --------------------------------------------------------------------------


def changed(edit: Callable[[dict[str, Any]], object]) -> dict[str, Any]:
    tensors: dict[str, Any] = dict(llama()[1])
    edit(tensors)
    return tensors


NORM = "model.norm.weight"
BAD_MAPPINGS: dict[str, tuple[Callable[[dict[str, Any]], object], str]] = {
    "missing": (lambda t: t.pop(NORM), r"state_dict: 1 tensor is missing: 'model.norm.weight'"),
    "unknown": (
        lambda t: t.update({"model.extra": torch.zeros(2)}),
        r"state_dict: 1 tensor is not part of LlamaForCausalLM as config .*'model.extra'",
    ),
    "misshapen": (
        lambda t: t.update({NORM: torch.zeros(63)}),
        r"state_dict: tensor 'model.norm.weight' has shape \[63\]; expected \[64\] \(hidden_size",
    ),
    "empty": (lambda t: t.update({NORM: torch.zeros(0)}), r"has shape \[0\]; expected \[64\]"),
    "scalar": (lambda t: t.update({NORM: torch.tensor(1.0)}), r"has shape \[\]; expected \[64\]"),
    "no_tensor": (
        lambda t: t.update({NORM: [1.0]}),
        r"state_dict: tensor 'model.norm.weight' is \[1.0\] \(list\); expected a tensor with __dlp",
    ),
    "meta": (
        lambda t: t.update({NORM: torch.zeros(64, device="meta")}),
        r"state_dict: tensor 'model.norm.weight' cannot be read through DLPack: ",
    ),
    "sparse": (
        lambda t: t.update({NORM: torch.zeros(64).to_sparse()}),
        r"state_dict: tensor 'model.norm.weight' cannot be read through DLPack: ",
    ),
}


@pytest.mark.parametrize("case", BAD_MAPPINGS)
def test_refused_mappings(case: str) -> None:
    edit, message = BAD_MAPPINGS[case]
    with pytest.raises(ModelFileError, match=message):
        LLM.from_state_dict(llama()[0], changed(edit), **ENGINE)


def test_tied_copy() -> None:
    config, tensors = of_folder(make(FAMILIES["gemma3"]))
    table = tensors["model.embed_tokens.weight"]
    with LLM.from_state_dict(config, tensors, **ENGINE) as llm:
        expected = llm.target.model.arena()
    for copy in (table, table.clone(), table.t().contiguous().t()):
        with LLM.from_state_dict(config, {**tensors, "lm_head.weight": copy}, **ENGINE) as llm:
            assert llm.target.model.arena() == expected
    other = table.clone()
    other[-1, -1] += 1
    with pytest.raises(ModelFileError, match=r"state_dict: tensor 'lm_head.weight' differs from"):
        LLM.from_state_dict(config, {**tensors, "lm_head.weight": other}, **ENGINE)


def test_refused_arguments() -> None:
    config, tensors = llama()
    for arguments, message in (
        ((config, [1]), r"^state_dict is \[1\] \(list\); expected a mapping"),
        ((config, {1: tensors[NORM]}), r"^state_dict has the key 1 \(int\)"),
        (("llama", tensors), r"^config is 'llama' \(str\); expected a mapping as in config.json"),
        (({**config, "x": {1, 2}}, tensors), r"^config: a value is not one of JSON"),
        (({**config, "hidden_size": "64"}, tensors), r'^config: key "hidden_size"'),
    ):
        with pytest.raises(ValueError, match=message):
            LLM.from_state_dict(*arguments, **ENGINE)
    with pytest.raises(ValueError, match=r"^draft_state_dict is None; allowed: both"):
        LLM.from_state_dict(config, tensors, draft_config=config, **ENGINE)
    with pytest.raises(ValueError, match=r"^speculative_config is None and there is a drafter"):
        LLM.from_state_dict(
            config, tensors, draft_config=config, draft_state_dict=tensors, **ENGINE
        )
    with pytest.raises(ValueError, match=r"and there is no drafter; allowed: both"):
        LLM.from_state_dict(
            config, tensors, speculative_config={"num_speculative_tokens": 2, "model": "x"},
            **ENGINE,
        )  # fmt: skip
    with pytest.raises(ValueError, match=r"^module is Linear.* \(Linear\); expected a model of"):
        LLM.from_module(torch.nn.Linear(2, 2), **ENGINE)
    with pytest.raises(ValueError, match=r"the model itself: module\._orig_mod$"):
        LLM.from_module(torch.compile(torch.nn.Linear(2, 2)), **ENGINE)
    with pytest.raises(ValueError, match=r"^state_dict is [^\n]* \(Sequential\); expected"):
        LLM.from_state_dict(config, torch.nn.Sequential(torch.nn.Linear(2, 2)), **ENGINE)
    with pytest.raises(ModelFileError, match=r"; there are no tensors$"):
        LLM.from_state_dict(config, {}, **ENGINE)
    with pytest.raises(TypeError, match="max_seqs"):
        LLM.from_state_dict(config, tensors, max_seqs=3, **ENGINE)


# ---- without torch -----------------------------------------------------------------------------

NO_TORCH = """
import json, sys
for name in ("torch", "transformers", "safetensors"):
    sys.modules[name] = None  # importing it raises
import numpy as np
from paceline import LLM, SamplingParams

config = json.load(open(sys.argv[1]))
tensors = dict(np.load(sys.argv[2]))
with LLM.from_state_dict(config, tensors, device="cpu", max_num_seqs=1, max_model_len=64,
                         kv_cache_bytes=4 << 20, show_progress=False) as llm:
    params = SamplingParams(temperature=0.0, max_tokens=8)
    print(json.dumps(llm.generate([1, 2, 3], params)[0].outputs[0].token_ids))
"""


def test_torch_is_not_needed(tmp_path: Path) -> None:
    path = make(FAMILIES["llama"])
    _, tensors = of_folder(path)
    arrays = {name: tensor.numpy() for name, tensor in tensors.items()}
    np.savez(tmp_path / "tensors.npz", **arrays)
    done = subprocess.run(
        [sys.executable, "-c", NO_TORCH, path / "config.json", tmp_path / "tensors.npz"],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    with LLM(path, **ENGINE) as llm:
        params = SamplingParams(temperature=0.0, max_tokens=8)
        assert json.loads(done.stdout) == llm.generate([1, 2, 3], params)[0].outputs[0].token_ids
