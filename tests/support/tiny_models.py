# SPDX-License-Identifier: Apache-2.0
"""Tiny random checkpoints in Hugging Face layout, for tests.

    path = make(TinySpec("gemma3", seed=1, kv_heads=1))    # written once a session
    reference_logits(path, [1, 2, 3])                      # the logits of transformers

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
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np
    import torch

FULL, SLIDING = "full_attention", "sliding_attention"
FAMILIES = ("llama", "qwen3", "gemma3", "gemma4")

_CLASSES = {
    "llama": ("LlamaConfig", "LlamaForCausalLM"),
    "qwen3": ("Qwen3Config", "Qwen3ForCausalLM"),
    "gemma3": ("Gemma3TextConfig", "Gemma3ForCausalLM"),
    "gemma4": ("Gemma4TextConfig", "Gemma4ForCausalLM"),
    "gemma4_unified": ("Gemma4UnifiedTextConfig", "Gemma4UnifiedForCausalLM"),
}
_THETA = {"llama": 500_000.0, "qwen3": 1_000_000.0, "gemma3": 1_000_000.0, "gemma4": 1_000_000.0}
_EPS = {"llama": 1e-5, "qwen3": 1e-6, "gemma3": 1e-6, "gemma4": 1e-6}


@dataclass(frozen=True)
class TinySpec:
    """A tiny checkpoint.

    Attributes:
        family: One of `FAMILIES`.
        seed: The seed of the weights.
        vocab_size: Rows of the embedding table; more than `tokenizer_size` makes padding rows.
        hidden_size: Width.
        intermediate_size: Width of the MLP.
        num_layers: Layers; None: 2, 3 for Gemma 3 and 6 for Gemma 4.
        heads: Query heads.
        kv_heads: Key and value heads; divides `heads`.
        head_dim: Elements of a head.
        layer_types: Gemma only; None: sliding, but every third layer full.
        window: Gemma only: keys a sliding layer sees.
        query_pre_attn_scalar: Gemma 3 only; None: one that is not `head_dim`.
        tied: Whether the embedding table is the lm_head; None: as the family usually does.
        attention_bias: Biases on q, k, v and o.
        mlp_bias: Llama only: biases on gate, up and down.
        rope: "default", "linear" or "llama3"; for Gemma 3 it is that of the full layers, whose own
            default Gemma 4 always has.
        logit_soft_cap: Gemma only: the soft cap on logits; 0: none.
        full_head_dim: Gemma 4 only, as all below: elements of a full layer's head; None: twice
            `head_dim`.
        full_kv_heads: With `k_eq_v`, key and value heads of a full layer; None: 1.
        k_eq_v: Full layers have no v projection.
        shared_layers: Last layers that read the KV of earlier ones; None: half of them.
        wide_mlp: The MLPs of those layers are twice as wide.
        per_layer_size: Of a layer's own input; 0: none.
        partial_rotary: The rotated part of a full layer's head.
        unified: The architecture of the 12B model; `per_layer_size` counts as 0.
        max_position: The number of positions.
        dtype: The dtype of the stored tensors: "float32", "float16" or "bfloat16".
        shards: Files to spread the tensors over; 1: `model.safetensors`.
        old_spelling: Write `config.json` with the keys of transformers 4.
        prefix: The prefix of the decoder's tensors.
        eos_token_id: The end-of-sequence id; None: there is none.
        tokenizer_size: Entries of `tokenizer.json`; 0: write none.
    """

    family: str = "llama"
    seed: int = 0
    vocab_size: int = 128
    hidden_size: int = 64
    intermediate_size: int = 96
    num_layers: int | None = None
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 16
    layer_types: tuple[str, ...] | None = None
    window: int = 8
    query_pre_attn_scalar: int | None = None
    tied: bool | None = None
    attention_bias: bool = False
    mlp_bias: bool = False
    rope: str = "default"
    logit_soft_cap: float = 0.0
    full_head_dim: int | None = None
    full_kv_heads: int | None = None
    k_eq_v: bool = False
    shared_layers: int | None = None
    wide_mlp: bool = True
    per_layer_size: int = 8
    partial_rotary: float = 0.25
    unified: bool = False
    max_position: int = 2048
    dtype: str = "float32"
    shards: int = 1
    old_spelling: bool = False
    prefix: str = "model."
    eos_token_id: int | None = None
    tokenizer_size: int = 128


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
        _file_name(name, spec.prefix): tensor.to(dtype).contiguous()
        for name, tensor in model.state_dict().items()
        if not (name == "lm_head.weight" and is_tied(spec))
    }
    save_tensors(directory, tensors, spec.shards)
    write_json(directory / "config.json", _config_json(model, spec))
    if spec.tokenizer_size:
        write_tokenizer(directory / "tokenizer.json", spec.tokenizer_size)


def is_tied(spec: TinySpec) -> bool:
    """Whether the embedding table is the lm_head."""
    return spec.family.startswith("gemma") if spec.tied is None else spec.tied


def hf_config(spec: TinySpec) -> Any:
    """The transformers configuration of a checkpoint."""
    import transformers

    values: dict[str, Any] = {
        "vocab_size": spec.vocab_size,
        "hidden_size": spec.hidden_size,
        "intermediate_size": spec.intermediate_size,
        "num_attention_heads": spec.heads,
        "num_key_value_heads": spec.kv_heads,
        "head_dim": spec.head_dim,
        "max_position_embeddings": spec.max_position,
        "rms_norm_eps": _EPS[spec.family],
        "tie_word_embeddings": is_tied(spec),
        "attention_bias": spec.attention_bias,
        "bos_token_id": None,
        "eos_token_id": spec.eos_token_id,
        "pad_token_id": None,
    }
    rope = {"rope_type": spec.rope, "rope_theta": _THETA[spec.family], **_rope_scaling(spec)}
    if spec.family.startswith("gemma"):
        layer_types = _layer_types(spec)
        values |= {
            "num_hidden_layers": len(layer_types),
            "layer_types": list(layer_types),
            "sliding_window": spec.window,
            "final_logit_softcapping": spec.logit_soft_cap or None,
            "rope_parameters": {
                SLIDING: {"rope_type": "default", "rope_theta": 10_000.0},
                FULL: rope,
            },
        }
        if spec.family == "gemma4":
            values |= _gemma4_values(spec, len(layer_types))
        else:
            values["query_pre_attn_scalar"] = spec.query_pre_attn_scalar or spec.head_dim * 3 // 2
    else:
        values |= {"num_hidden_layers": spec.num_layers or 2, "rope_parameters": rope}
        if spec.family == "llama":
            values["mlp_bias"] = spec.mlp_bias
    return getattr(transformers, _classes(spec)[0])(**values)


def _classes(spec: TinySpec) -> tuple[str, str]:
    return _CLASSES["gemma4_unified" if spec.unified else spec.family]


def _layer_types(spec: TinySpec) -> tuple[str, ...]:
    if spec.layer_types is not None:
        return spec.layer_types
    count = spec.num_layers or (6 if spec.family == "gemma4" else 3)
    # The last layer of Gemma 4 is always a full one.
    is_last_full = spec.family == "gemma4"
    return tuple(
        FULL if (i + 1) % 3 == 0 or (is_last_full and i + 1 == count) else SLIDING
        for i in range(count)
    )


def _gemma4_values(spec: TinySpec, num_layers: int) -> dict[str, Any]:
    values: dict[str, Any] = {
        "global_head_dim": spec.full_head_dim or 2 * spec.head_dim,
        "attention_k_eq_v": spec.k_eq_v,
        "num_global_key_value_heads": (spec.full_kv_heads or 1) if spec.k_eq_v else None,
        "num_kv_shared_layers": (
            num_layers // 2 if spec.shared_layers is None else spec.shared_layers
        ),
        "use_double_wide_mlp": spec.wide_mlp,
        "rope_parameters": {
            SLIDING: {"rope_type": "default", "rope_theta": 10_000.0},
            FULL: {
                "rope_type": "proportional",
                "partial_rotary_factor": spec.partial_rotary,
                "rope_theta": _THETA["gemma4"],
            },
        },
    }
    if not spec.unified:
        values |= {
            "hidden_size_per_layer_input": spec.per_layer_size,
            "vocab_size_per_layer_input": spec.vocab_size,
        }
    return values


def _rope_scaling(spec: TinySpec) -> dict[str, Any]:
    if spec.rope == "linear":
        return {"factor": 4.0}
    if spec.rope == "llama3":
        # The wavelengths of tiny heads are below, between and above these limits.
        return {
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        }
    return {}


def _random_model(spec: TinySpec) -> Any:
    """A model of the configuration, every parameter random."""
    import torch
    import transformers

    config = hf_config(spec)
    model = getattr(transformers, _classes(spec)[1])(config).eval().float()
    is_gemma = spec.family.startswith("gemma")
    center = 0.0 if spec.family == "gemma3" else 1.0
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            generator = torch.Generator().manual_seed(zlib.crc32(f"{spec.seed} {name}".encode()))
            noise = torch.randn(parameter.shape, generator=generator)
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
            else:
                parameter.copy_(0.2 * noise)
        for name, buffer in model.named_buffers():
            if name.endswith("layer_scalar"):
                generator = torch.Generator().manual_seed(
                    zlib.crc32(f"{spec.seed} {name}".encode())
                )
                buffer.copy_(0.8 + 0.15 * torch.randn(buffer.shape, generator=generator))
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


def to_old_spelling(config: Mapping[str, Any]) -> dict[str, Any]:
    """Rewrites a `config.json` with the keys that transformers 4 wrote.

    For Gemma 4, which transformers 4 did not know: with those of the published files.
    """
    old = dict(config)
    if "dtype" in old:
        old["torch_dtype"] = old.pop("dtype")
    by_layer = old.pop("per_layer_config", None)
    if by_layer is not None:
        (full,) = {tuple(sorted(overrides.items())) for overrides in by_layer.values()}
        old["global_head_dim"] = dict(full)["head_dim"]
        old["num_global_key_value_heads"] = dict(full).get("num_key_value_heads")
        return old
    rope = old.pop("rope_parameters", None)
    if rope is not None:
        whole = dict(rope.get(FULL, rope))
        if SLIDING in rope:
            old["rope_local_base_freq"] = rope[SLIDING]["rope_theta"]
        old["rope_theta"] = whole.pop("rope_theta")
        old["rope_scaling"] = None if whole.get("rope_type", "default") == "default" else whole
        # transformers 5 ignores "type" in a Gemma 3 file; published files have "rope_type".
        if whole.get("rope_type") == "linear" and SLIDING not in rope:
            old["rope_scaling"] = {"type": "linear", "factor": whole["factor"]}
    layer_types = old.pop("layer_types", None)
    if layer_types is not None and SLIDING in layer_types:
        pattern = layer_types.index(FULL) + 1
        expected = [FULL if (i + 1) % pattern == 0 else SLIDING for i in range(len(layer_types))]
        if layer_types != expected:
            raise ValueError(f"layer types {layer_types} have no sliding_window_pattern")
        old["sliding_window_pattern"] = pattern
    return old


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
        generator = torch.Generator().manual_seed(zlib.crc32(f"{seed} {name}".encode()))
        values = tensor.float()
        spread = float(values.std()) if values.numel() > 1 else 0.0
        added = noise * spread * torch.randn(values.shape, generator=generator)
        tensors[name] = (values + added).to(tensor.dtype)
    save_tensors(out, tensors)
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
def _reference_model(directory: Path) -> Any:
    import torch
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(
        directory, dtype=torch.float32, attn_implementation="eager"
    )
    return model.eval()


def reference_logits(directory: Path, token_ids: Sequence[int]) -> np.ndarray[Any, Any]:
    """The logits of transformers in float32, from the stored weights.

    Args:
        directory: The checkpoint; read once.
        token_ids: The prompt.

    Returns:
        float32 [len(token_ids), vocab_size].
    """
    import torch

    with torch.no_grad():
        logits = _reference_model(directory)(torch.tensor([list(token_ids)])).logits
    values: np.ndarray[Any, Any] = logits[0].float().numpy()
    return values


def describe(spec: TinySpec) -> str:
    """The fields that are not at their default, for test ids."""
    default = asdict(TinySpec(spec.family))
    parts = [f"{key}={value}" for key, value in asdict(spec).items() if value != default[key]]
    return "-".join([spec.family, *parts])
