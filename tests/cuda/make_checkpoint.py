# SPDX-License-Identifier: Apache-2.0
"""Writes a full-size checkpoint of a bench configuration with random weights, to measure loading.

    make_checkpoint.py gpt-oss-20b FOLDER

Weights without scales are bfloat16, normal with standard deviation 0.02. Elements of fp8 and mxfp4
are random bits, with scales that give a similar spread. Shards have about 4 GB, and several are
written at the same time. Needs torch, and takes minutes without a GPU.
"""

from __future__ import annotations

import json
import struct
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from paceline.loader.families import ARCHITECTURES, translate
from paceline.loader.family import TensorSpec
from paceline.loader.hf_config import parse_hf_config

SHARD_BYTES = 4 << 30
#: Shards written at the same time: most of the time is copying, to the host and to files.
WRITERS = 8
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def dtype_of(tensor: TensorSpec) -> str:
    """The dtype that published checkpoints store it in."""
    if tensor.name.endswith(".scales") and "BF16" in tensor.dtypes:
        return "BF16"
    return tensor.dtypes[0]


def size_of(tensor: TensorSpec) -> int:
    """Its bytes in the file."""
    return torch.Size(tensor.shape).numel() * (2 if dtype_of(tensor) == "BF16" else 1)


def random_bytes(tensor: TensorSpec) -> memoryview:
    """Values for the file, of mean 0 and a standard deviation of about 0.02."""
    is_scale = tensor.name.endswith(".scales")
    if dtype_of(tensor) == "U8":
        # The elements of mxfp4 have a standard deviation of 3, so a scale is about 2^-7.
        low, high = (119, 122) if is_scale else (0, 256)
        values = torch.randint(low, high, tensor.shape, device=DEVICE, dtype=torch.uint8)
    elif dtype_of(tensor) == "F8_E4M3":
        values = torch.randn(tensor.shape, device=DEVICE, dtype=torch.bfloat16) * 100
        values = values.clamp(-448, 448).to(torch.float8_e4m3fn)
    else:
        values = torch.randn(tensor.shape, device=DEVICE, dtype=torch.bfloat16)
        values = values.abs() * 1e-4 + 1e-4 if is_scale else values * 0.02
    return memoryview(values.view(torch.uint8).cpu().numpy())


def write_shard(path: Path, shard: list[tuple[str, TensorSpec]]) -> None:
    """Writes tensors, under the names that come with them, to a safetensors file."""
    header = {}
    end = 0
    for key, tensor in shard:
        begin, end = end, end + size_of(tensor)
        header[key] = {
            "dtype": dtype_of(tensor),
            "shape": list(tensor.shape),
            "data_offsets": [begin, end],
        }
    text = json.dumps(header).encode()
    with open(path, "wb") as out:
        out.write(struct.pack("<Q", len(text)) + text)
        for _, tensor in shard:
            out.write(random_bytes(tensor))


def main(name: str, folder: Path) -> None:
    """Writes config.json, the shards and their index into `folder`."""
    import paceline.bench

    configs = Path(paceline.bench.__file__).parent / "configs"
    names = sorted(path.stem for path in configs.glob("*.json"))
    if name not in names:
        sys.exit(f"make_checkpoint.py: configuration is {name!r}; allowed: {', '.join(names)}")
    config = json.loads((configs / f"{name}.json").read_text())
    family = translate(parse_hf_config(config, name, ARCHITECTURES))
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    shards: list[list[tuple[str, TensorSpec]]] = [[]]
    size = 0
    for tensor in family.tensors:
        prefix = "" if tensor.source in family.lm_head_names else family.prefixes[0]
        size += size_of(tensor)
        if size > SHARD_BYTES:
            shards.append([])
            size = 0
        shards[-1].append((prefix + tensor.source, tensor))
    files = [f"model-{i:05d}-of-{len(shards):05d}.safetensors" for i in range(1, len(shards) + 1)]
    with ThreadPoolExecutor(WRITERS) as pool:
        list(pool.map(write_shard, [folder / file for file in files], shards))
    weight_map = {key: file for file, shard in zip(files, shards, strict=True) for key, _ in shard}
    index = {"metadata": {}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit("usage: make_checkpoint.py CONFIGURATION FOLDER")
    main(sys.argv[1], Path(sys.argv[2]))
