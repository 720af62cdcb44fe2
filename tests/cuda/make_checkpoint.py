# SPDX-License-Identifier: Apache-2.0
"""Writes a full-size checkpoint of a bench configuration with random weights, to measure loading.

    make_checkpoint.py qwen3-8b FOLDER

Weights are bfloat16, normal with standard deviation 0.02, in shards of about 4 GB. Needs torch and
a GPU.
"""

from __future__ import annotations

import json
import struct
import sys
from pathlib import Path

import torch

from paceline.loader.families import ARCHITECTURES, translate
from paceline.loader.hf_config import parse_hf_config

SHARD_BYTES = 4 << 30


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
    shards: list[list[tuple[str, tuple[int, ...]]]] = [[]]
    size = 0
    for tensor in family.tensors:
        prefix = "" if tensor.source in family.lm_head_names else family.prefixes[0]
        size += 2 * torch.Size(tensor.shape).numel()
        if size > SHARD_BYTES:
            shards.append([])
            size = 0
        shards[-1].append((prefix + tensor.source, tensor.shape))
    weight_map = {}
    for number, shard in enumerate(shards, 1):
        file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        header = {}
        end = 0
        for key, shape in shard:
            begin, end = end, end + 2 * torch.Size(shape).numel()
            header[key] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [begin, end]}
            weight_map[key] = file
        text = json.dumps(header).encode()
        with open(folder / file, "wb") as out:
            out.write(struct.pack("<Q", len(text)) + text)
            for _, shape in shard:
                values = torch.randn(shape, device="cuda", dtype=torch.bfloat16) * 0.02
                out.write(values.view(torch.uint8).cpu().numpy().tobytes())
    index = {"metadata": {}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit("usage: make_checkpoint.py CONFIGURATION FOLDER")
    main(sys.argv[1], Path(sys.argv[2]))
