# SPDX-License-Identifier: Apache-2.0
"""Tiny random checkpoints in Hugging Face layout, for tests.

    path = make(TinySpec("gemma3", seed=1, kv_heads=1))    # written once a session
    reference_logits(path, [1, 2, 3])                      # the logits of transformers
    plain_copy(path)                                       # without scales: the same values

Every parameter is random, norms and biases included, because parameters at their neutral values
would hide errors. The last norm is larger than usual, so that logits are peaked and rounding does
not change the largest one.

torch and transformers are imported when they are first used.
"""

from __future__ import annotations

import atexit
import functools
import json
import shutil
import tempfile
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quantized_models import dequantize, quantization_config, quantize
from tiny_configs import FAMILIES as FAMILIES
from tiny_configs import FULL as FULL
from tiny_configs import LINEAR as LINEAR
from tiny_configs import QWEN3_5 as QWEN3_5
from tiny_configs import SLIDING as SLIDING
from tiny_configs import TinyDelta as TinyDelta
from tiny_configs import TinyLatent as TinyLatent
from tiny_configs import TinySpec, classes, hf_config, is_tied, to_old_spelling

if TYPE_CHECKING:
    import numpy as np
    import torch


# The end of the name of what a sigmoid router adds to scores; published files have it in float32.
_CORRECTION = "e_score_correction_bias"
# Ends of names of tensors that are float32 in published files.
_FLOATS = (_CORRECTION, "linear_attn.A_log", "linear_attn.norm.weight")
# The router of mixtures whose experts have tensors of their own in files.
_ROUTER = ".mlp.gate.weight"


def make(spec: TinySpec) -> Path:
    """The folder of a checkpoint; written on first use and kept until the process ends.

    Treat it as read-only; copy it with `copy_checkpoint` to change it.
    """
    return _make_cached(spec)


@functools.cache
def _make_cached(spec: TinySpec) -> Path:
    names = [spec.family, f"seed{spec.seed}", f"{zlib.crc32(repr(spec).encode()):08x}"]
    path = _session_dir() / "-".join(names)
    write(spec, path)
    return path


@functools.cache
def _session_dir() -> Path:
    path = Path(tempfile.mkdtemp(prefix="paceline-tiny-"))
    atexit.register(shutil.rmtree, path, ignore_errors=True)
    return path


def write(spec: TinySpec, directory: Path) -> None:
    """Writes a checkpoint into a new folder."""
    import torch

    directory.mkdir(parents=True)
    model = _random_model(spec)
    dtype = getattr(torch, spec.dtype)
    tensors = {
        _file_name(name, spec.prefix): tensor.to(
            torch.float32 if name.endswith(_FLOATS) else dtype
        ).contiguous()
        for name, tensor in split_experts(
            model.state_dict(), is_joined=spec.family in QWEN3_5 and spec.quantization is None
        ).items()
        if not (name == "lm_head.weight" and is_tied(spec))
    }
    config = _config_json(model, spec)
    if spec.quantization is not None:
        tensors = quantize(tensors, spec.quantization, exact_scales=spec.exact_scales)
        names = tensors if spec.family in QWEN3_5 else ()
        config["quantization_config"] = quantization_config(spec.quantization, names)
    save_tensors(directory, tensors, spec.shards)
    write_json(directory / "config.json", config)
    if spec.tokenizer_size:
        write_tokenizer(directory / "tokenizer.json", spec.tokenizer_size)


def split_experts(
    tensors: Mapping[str, torch.Tensor], *, is_joined: bool = False
) -> dict[str, torch.Tensor]:
    """The tensors of each expert apart where files have them so, unlike models in memory.

    Args:
        tensors: Of a model in memory.
        is_joined: Files have them as the model has, such as those of Qwen3.5 without scales.
    """
    split: dict[str, torch.Tensor] = {}
    is_split = not is_joined and any(name.endswith(_ROUTER) for name in tensors)
    for name, tensor in tensors.items():
        if not (is_split and ".experts." in name):
            split[name] = tensor
            continue
        base, which = name.rsplit(".", 1)
        for i, matrix in enumerate(tensor):
            parts = {"down_proj": matrix}
            if which == "gate_up_proj":
                gate, up = matrix.chunk(2)
                parts = {"gate_proj": gate, "up_proj": up}
            split |= {f"{base}.{i}.{part}.weight": value for part, value in parts.items()}
    return split


def _random_model(spec: TinySpec) -> Any:
    """A model of the configuration, every parameter random."""
    import torch
    import transformers

    config = hf_config(spec)
    model = getattr(transformers, classes(spec)[1])(config).eval().float()
    is_gemma = spec.family.startswith("gemma")
    has_offset = spec.family == "gemma3" or spec.family in QWEN3_5
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            generator = torch.Generator().manual_seed(zlib.crc32(f"{spec.seed} {name}".encode()))
            noise = torch.randn(parameter.shape, generator=generator)
            center = 0.0 if has_offset and "linear_attn" not in name else 1.0
            # Gemma multiplies embeddings by the root of the width, so that a tied lm_head favours
            # the input token. Small embeddings, large second norms (which set how much a layer
            # adds) and a large last norm keep the model from repeating one token.
            if name == "model.norm.weight":
                parameter.copy_(center + (6.0 if is_gemma else 2.0) + 0.2 * noise)
            elif parameter.ndim == 1 and "norm" in name:
                is_second = is_gemma and ("post_attention" in name or "post_feedforward" in name)
                parameter.copy_(center + (6.0 if is_second else 0.0) + 0.1 * noise)
            elif name in ("model.embed_tokens.weight", "lm_head.weight"):
                parameter.copy_((0.08 if is_gemma else 0.2) * noise)
            elif name.endswith("sinks"):
                parameter.copy_(1.0 + noise)
            elif name.endswith("A_log"):
                parameter.copy_(0.7 * noise - 0.5)  # decay rates between slow and fast
            elif name.endswith(("dt_bias", "conv1d.weight")):
                parameter.copy_(0.5 * noise)
            elif name.endswith(("router.scale", "router.per_expert_scale")):
                parameter.copy_(1.0 + 0.3 * noise)
            else:
                parameter.copy_(0.2 * noise)
        for name, buffer in model.named_buffers():
            if name.endswith("layer_scalar"):
                generator = torch.Generator().manual_seed(
                    zlib.crc32(f"{spec.seed} {name}".encode())
                )
                buffer.copy_(0.8 + 0.15 * torch.randn(buffer.shape, generator=generator))
            if name.endswith(_CORRECTION):
                generator = torch.Generator().manual_seed(
                    zlib.crc32(f"{spec.seed} {name}".encode())
                )
                buffer.copy_(0.2 * torch.randn(buffer.shape, generator=generator))
    return model


def _file_name(name: str, prefix: str) -> str:
    return prefix + name.removeprefix("model.") if name.startswith("model.") else name


def _config_json(model: Any, spec: TinySpec) -> dict[str, Any]:
    values = json.loads(model.config.to_json_string(use_diff=False))
    kept = {key: value for key, value in values.items() if not key.startswith("_")}
    kept |= {"architectures": [type(model).__name__], "dtype": spec.dtype}
    for key in ("eos_token_id", "bos_token_id", "pad_token_id"):
        kept[key] = spec.eos_token_id if key == "eos_token_id" else None
    return to_old_spelling(kept) if spec.old_spelling else kept


def write_json(path: Path, values: Any) -> None:
    """Writes JSON."""
    path.write_text(json.dumps(values, indent=1) + "\n", encoding="utf-8")


def read_json(path: Path) -> Any:
    """Reads JSON."""
    return json.loads(path.read_text(encoding="utf-8"))


def edit_config(directory: Path, **changes: Any) -> None:
    """Changes keys of `config.json`; a value of `...` removes the key."""
    path = directory / "config.json"
    values = read_json(path) | changes
    write_json(path, {key: value for key, value in values.items() if value is not ...})


def edit_section(directory: Path, section: str, **changes: Any) -> None:
    """Changes keys of a section of `config.json`, as `edit_config` does."""
    values = read_json(directory / "config.json")[section] | changes
    values = {key: value for key, value in values.items() if value is not ...}
    edit_config(directory, **{section: values})


def save_tensors(directory: Path, tensors: Mapping[str, torch.Tensor], shards: int = 1) -> None:
    """Writes tensors as `model.safetensors`, or spread over files with an index."""
    from safetensors.torch import save_file

    for path in directory.glob("model*.safetensors*"):
        path.unlink()
    if shards == 1:
        save_file(dict(tensors), directory / "model.safetensors", metadata={"format": "pt"})
        return
    names = list(tensors)
    weight_map: dict[str, str] = {}
    for i in range(shards):
        file = f"model-{i + 1:05}-of-{shards:05}.safetensors"
        part = {name: tensors[name] for name in names[i::shards]}
        save_file(part, directory / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(part, file)
    total = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
    write_json(
        directory / "model.safetensors.index.json",
        {"metadata": {"total_size": total}, "weight_map": weight_map},
    )


def load_tensors(directory: Path) -> dict[str, torch.Tensor]:
    """Every tensor of a checkpoint."""
    from safetensors.torch import load_file

    tensors: dict[str, torch.Tensor] = {}
    for path in sorted(directory.glob("model*.safetensors")):
        tensors |= load_file(path)
    return tensors


def edit_tensors(directory: Path, change: Callable[[dict[str, Any]], Any], shards: int = 1) -> None:
    """Changes the tensors of a checkpoint and the number of its files."""
    tensors = load_tensors(directory)
    change(tensors)
    save_tensors(directory, tensors, shards)


def replace_tensor(name: str, change: Callable[[Any], Any]) -> Callable[[dict[str, Any]], None]:
    """What `edit_tensors` takes to change one tensor."""

    def edit(tensors: dict[str, Any]) -> None:
        tensors[name] = change(tensors[name]).contiguous()

    return edit


def copy_checkpoint(directory: Path, out: Path) -> Path:
    """Copies a checkpoint, e.g. for a drafter that is the target itself."""
    shutil.copytree(directory, out)
    return out


def perturbed_copy(directory: Path, out: Path, noise: float, seed: int = 0) -> Path:
    """A copy with slightly different weights: a drafter that often agrees.

    At temperature 0 and four drafts about 0.9 of them are accepted with a noise of 0.01, 0.5 to 0.7
    with 0.03 and 0.1 to 0.3 with 0.1.

    Args:
        directory: The checkpoint.
        out: The folder to write.
        noise: Standard deviation of what is added, over that of each tensor.
        seed: Of the noise.
    """
    import torch

    copy_checkpoint(directory, out)
    tensors = load_tensors(directory)
    for name, tensor in tensors.items():
        if not tensor.is_floating_point():  # a table of experts
            continue
        generator = torch.Generator().manual_seed(zlib.crc32(f"{seed} {name}".encode()))
        values = tensor.float()
        spread = float(values.std()) if values.numel() > 1 else 0.0
        added = noise * spread * torch.randn(values.shape, generator=generator)
        tensors[name] = (values + added).to(tensor.dtype)
    save_tensors(out, tensors)
    return out


def with_fixed_routing(directory: Path, out: Path, experts: Sequence[int]) -> Path:
    """A copy of a mixture in which every row of every layer chooses the same experts.

    Args:
        directory: The checkpoint.
        out: The folder to write.
        experts: As many as a row chooses.
    """
    copy_checkpoint(directory, out)

    def change(tensors: dict[str, torch.Tensor]) -> None:
        for name, tensor in tensors.items():
            if name.endswith("router.bias"):
                tensor.zero_()
                tensor[list(experts)] = 1e4

    edit_tensors(out, change)
    return out


def write_tokenizer(
    path: Path, size: int = 128, *, rename: Mapping[int, str] | None = None
) -> None:
    """Writes a `tokenizer.json` with `size` entries.

    Up to 259 entries it goes by characters: `<eos>`, `<unk>`, printable ASCII, newline and tab,
    then `<extra_n>`. From 260 on it goes by bytes and knows every text.

    Args:
        path: The file.
        size: Entries, at least 100.
        rename: Other tokens for some ids, to make a tokenizer that differs.
    """
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    by_bytes = size >= 260
    tokens = ["<eos>", "<unk>"]
    if by_bytes:
        tokens += sorted(pre_tokenizers.ByteLevel.alphabet())
    else:
        tokens += [chr(code) for code in range(32, 127)] + ["\n", "\t"]
    if size < len(tokens):
        raise ValueError(f"size is {size}; allowed: from {len(tokens)}")
    tokens += [f"<extra_{i}>" for i in range(size - len(tokens))]
    for index, token in (rename or {}).items():
        tokens[index] = token
    vocabulary = {token: index for index, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token=tokens[1]))
    tokenizer.add_special_tokens([AddedToken(tokens[0], special=True, normalized=False)])
    if by_bytes:
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
    else:
        tokenizer.decoder = decoders.Fuse()
    tokenizer.save(str(path))


@functools.cache
def plain_copy(directory: Path, dtype: str = "float32") -> Path:
    """A checkpoint without scales: with the values that the matrices of another one stand for.

    Args:
        directory: The checkpoint, from `make`.
        dtype: "float32", or "bfloat16", which holds the values of exact scales.
    """
    import torch

    path = copy_checkpoint(directory, _session_dir() / f"{directory.name}-plain-{dtype}")
    edit_config(path, quantization_config=..., dtype=dtype)
    config = read_json(directory / "config.json").get("quantization_config")
    plain = dequantize(load_tensors(directory), config)
    save_tensors(path, {name: value.to(getattr(torch, dtype)) for name, value in plain.items()})
    return path


@functools.cache
def _reference_model(directory: Path, dtype: str = "float32") -> Any:
    import torch
    from transformers import AutoModelForCausalLM

    if "quantization_config" in read_json(directory / "config.json"):
        directory = plain_copy(directory)
    # The grouped products that transformers prefers for experts have no float64.
    options = {"experts_implementation": "eager"} if dtype == "float64" else {}
    model: Any = AutoModelForCausalLM.from_pretrained(
        directory, dtype=getattr(torch, dtype), attn_implementation="eager", **options
    )
    return model.eval()


def reference_logits(
    directory: Path, token_ids: Sequence[int], dtype: str = "float32"
) -> np.ndarray[Any, Any]:
    """The logits of transformers, from the stored weights.

    Args:
        directory: The checkpoint; read once.
        token_ids: The prompt.
        dtype: In which transformers computes: "float32", or "float64" where its own rounding
            would take a good part of the tolerance.

    Returns:
        float32 [len(token_ids), vocab_size].
    """
    import torch

    with torch.no_grad():
        logits = _reference_model(directory, dtype)(torch.tensor([list(token_ids)])).logits
    values: np.ndarray[Any, Any] = logits[0].float().numpy()
    return values


def describe(spec: TinySpec) -> str:
    """The fields that are not at their default, for test ids."""
    default = asdict(TinySpec(spec.family))
    parts = [f"{key}={value}" for key, value in asdict(spec).items() if value != default[key]]
    return "-".join([spec.family, *parts])
