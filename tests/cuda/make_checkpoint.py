# SPDX-License-Identifier: Apache-2.0
"""Writes a full-size checkpoint of a bench configuration with random weights, as published.

    make_checkpoint.py gpt-oss-20b FOLDER

Weights without scales are bfloat16, normal with standard deviation 0.02; those of norms have a mean
of 1, so that a router sees states of ordinary size and spreads tokens over the experts. Elements of
fp8 and mxfp4 are random bits, with scales that give a similar spread. A target that has an MTP
layer or the stages of a block drafter gets these, too. Shards have about 4 GB, and several are
written at the same time. Needs torch, and takes minutes without a GPU.
"""

from __future__ import annotations

import json
import math
import struct
import sys
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import torch

if TYPE_CHECKING:
    from paceline.loader.family import Family

SHARD_BYTES: Final = 4 << 30
#: Shards written at the same time: most of the time is copying, to the host and to files.
WRITERS: Final = 8
DEVICE: Final = "cuda" if torch.cuda.is_available() else "cpu"
#: Bytes of an element, by its name in files.
ITEM_BYTES: Final = {"BF16": 2, "F8_E4M3": 1, "F8_E8M0": 1, "U8": 1, "I8": 1, "BOOL": 1, "I64": 8}
#: The exponents of scales, plus 127, by the dtype of their elements: two elements of four bits with
#: a standard deviation of 3, or one of eight bits with 100.
EXPONENTS: Final = {"U8": (119, 122), "I8": (119, 122), "F8_E4M3": (114, 117)}
#: The standard deviation of weights, and the mean of those of norms.
SPREAD: Final = 0.02
NORM_MEAN: Final = 1.0


@dataclass(frozen=True)
class Entry:
    """A tensor of a file, which is made when it is written.

    Attributes:
        name: Its name in the file.
        dtype: A key of `ITEM_BYTES`.
        shape: Its shape.
        make: Returns its values.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    make: Callable[[], torch.Tensor]

    @property
    def nbytes(self) -> int:
        """Its bytes in the file."""
        return math.prod(self.shape) * ITEM_BYTES[self.dtype]


def random_entry(
    name: str, dtype: str, shape: tuple[int, ...], elements: str = "U8", num_experts: int = 0
) -> Entry:
    """A tensor with random values; its name tells scales and norms.

    Args:
        name: Its name in the file.
        dtype: A key of `ITEM_BYTES`.
        shape: Its shape.
        elements: Of scales: the dtype of the elements that they scale.
        num_experts: Of numbers of experts: how many there are. A row has no number twice.
    """
    make = partial(_random_values, name, dtype, shape, elements, num_experts)
    return Entry(name, dtype, shape, make)


def _random_values(
    name: str, dtype: str, shape: tuple[int, ...], elements: str, num_experts: int
) -> torch.Tensor:
    is_scale = name.endswith(("scales", "scale", "scale_inv"))
    if dtype == "I64":
        order = torch.rand(shape[0], num_experts, device=DEVICE).argsort(dim=1)
        return order[:, : shape[1]]
    if dtype in ("U8", "I8", "F8_E8M0"):
        low, high = EXPONENTS[elements] if is_scale else (0, 256)
        return torch.randint(low, high, shape, device=DEVICE, dtype=torch.uint8)
    values = torch.randn(shape, device=DEVICE, dtype=torch.bfloat16)
    if dtype == "F8_E4M3":
        return (values * 100).clamp(-448, 448).to(torch.float8_e4m3fn)
    if is_scale:
        return values.abs() * 1e-4 + 1e-4
    values *= SPREAD
    return values + NORM_MEAN if name.endswith("norm.weight") else values


def write_file(path: Path, entries: Sequence[Entry]) -> None:
    """Writes a safetensors file. Its data begins at a multiple of 8 bytes, as readers like it."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for entry in entries:
        begin, end = end, end + entry.nbytes
        header[entry.name] = {
            "dtype": entry.dtype,
            "shape": list(entry.shape),
            "data_offsets": [begin, end],
        }
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as out:
        out.write(struct.pack("<Q", len(text)) + text)
        for entry in entries:
            out.write(memoryview(entry.make().contiguous().view(torch.uint8).cpu().numpy()))


def published_entries(config: Mapping[str, Any], name: str) -> list[Entry]:
    """The tensors of a target, under their published names and in their published dtypes.

    Args:
        config: The object in its `config.json`.
        name: Of the configuration, for messages.

    Raises:
        NotImplementedError: They have a dtype that is not written.
    """
    from paceline.loader.families import ARCHITECTURES, translate
    from paceline.loader.hf_config import parse_hf_config

    family = translate(parse_hf_config(dict(config), name, ARCHITECTURES))
    return [
        entry
        for each in (family, *own_drafter(family, config, name))
        for entry in _entries_of(each, name)
    ]


def own_drafter(family: Family, config: Mapping[str, Any], name: str) -> list[Family]:
    """The drafter that the files of a target have beside it.

    Args:
        family: The target.
        config: The object in its `config.json`.
        name: Of the configuration, for messages.

    Returns:
        Its MTP layer, or its block drafter; nothing if it has neither.
    """
    from paceline.loader.block_kinds import own_block_kind
    from paceline.loader.deepseek_v4_dspark import translate_stages
    from paceline.loader.drafters import Target
    from paceline.loader.families import ARCHITECTURES
    from paceline.loader.hf_config import parse_hf_config
    from paceline.loader.mtp import translate_mtp
    from paceline.loader.section import Section

    hf = parse_hf_config(dict(config), name, ARCHITECTURES)
    top = Section(dict(config), name)
    target = Target(Path(name), family.architecture, family.config, "bfloat16")
    if own_block_kind(top) is not None:
        return [translate_stages(top, target, None)[0]]
    keys = ("num_nextn_predict_layers", "num_mtp_layers", "mtp_num_hidden_layers")
    if any(hf.text.has(key) and hf.text.integer(key, low=0) == 1 for key in keys):
        return [translate_mtp(top, target, None)[0]]
    return []


def _entries_of(family: Family, name: str) -> list[Entry]:
    """The tensors of a family; raises NotImplementedError as `published_entries` does."""
    by_name = {tensor.name: tensor for tensor in family.tensors}
    entries = []
    for tensor in family.tensors:
        prefix = "" if tensor.source in family.lm_head_names else family.prefixes[0]
        stem, _, last = tensor.name.rpartition(".")
        dtype = "BF16" if last == "scales" and "BF16" in tensor.dtypes else tensor.dtypes[0]
        if dtype not in ITEM_BYTES:
            raise NotImplementedError(
                f"{name} has tensors in {dtype}; allowed: {', '.join(ITEM_BYTES)}"
            )
        weight = by_name.get(f"{stem}.weight")
        scaled = weight is not None and last == "scales" and weight.dtypes[0] in EXPONENTS
        entries.append(
            random_entry(
                prefix + tensor.source, dtype, tensor.shape,
                weight.dtypes[0] if weight is not None and scaled else "U8",
                weight.shape[0] if weight is not None and last == "token_experts" else 0,
            )
        )  # fmt: skip
    return entries


def write_target(config: Mapping[str, Any], name: str, folder: Path) -> None:
    """Writes config.json, the shards and their index into `folder`; arguments as above."""
    shards: list[list[Entry]] = [[]]
    size = total = 0
    for entry in published_entries(config, name):
        size += entry.nbytes
        total += entry.nbytes
        if size > SHARD_BYTES:
            shards.append([])
            size = entry.nbytes
        shards[-1].append(entry)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    files = [f"model-{i:05d}-of-{len(shards):05d}.safetensors" for i in range(1, len(shards) + 1)]
    with ThreadPoolExecutor(WRITERS) as pool:
        list(pool.map(write_file, [folder / file for file in files], shards))
    names = {entry.name: file for file, of in zip(files, shards, strict=True) for entry in of}
    index = {"metadata": {"total_size": total}, "weight_map": names}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def named_config(name: str) -> dict[str, Any]:
    """Returns a configuration that ships with the bench.

    Raises:
        ValueError: There is none of this name; lists those that exist.
    """
    import paceline.bench

    configs = Path(paceline.bench.__file__).parent / "configs"
    names = sorted(path.stem for path in configs.glob("*.json"))
    if name not in names:
        raise ValueError(f"configuration is {name!r}; allowed: {', '.join(names)}")
    config: dict[str, Any] = json.loads((configs / f"{name}.json").read_text())
    return config


def main() -> None:
    """Reads the command line and writes the checkpoint."""
    if len(sys.argv) != 3:
        sys.exit("usage: make_checkpoint.py CONFIGURATION FOLDER")
    try:
        write_target(named_config(sys.argv[1]), sys.argv[1], Path(sys.argv[2]))
    except (ValueError, NotImplementedError) as error:
        sys.exit(f"make_checkpoint.py: {error}")


if __name__ == "__main__":
    main()
