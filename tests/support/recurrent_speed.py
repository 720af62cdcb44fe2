# SPDX-License-Identifier: Apache-2.0
"""Times tiny recurrent models against attention models of the same bytes, on the CPU, by turns.

    PYTHONPATH=python:tests/support python tests/support/recurrent_speed.py [--rounds N]

All models have 8 layers and dummy weights; there is a pair that is 512 wide and one that is 128
wide. The recurrent ones are Qwen3.5: six delta nets with the proportions of the 9B model and two
layers with full attention. The others are Qwen3 whose attention has as many parameters as a delta
net. Each round runs both, one after the other, in turns, with two threads: prompts, and output for
one and for eight requests. The table has the median of the rounds in CPU time of the process, which
other programs on the machine change less than its wall time, and the ratio of the two.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from paceline import LLM, SamplingParams
from tiny_configs import TinyDelta, TinySpec, hf_config
from tiny_models import write_json


def models_of(width: int) -> dict[str, TinySpec]:
    """The recurrent model and the one with attention."""
    dim = width // 8 if width > 256 else width // 4
    common: dict[str, Any] = {
        "vocab_size": 2048, "hidden_size": width, "intermediate_size": 3 * width, "num_layers": 8,
        "head_dim": dim, "kv_heads": 2, "max_position": 2048,
    }  # fmt: skip
    heads = width // dim
    delta = TinyDelta(key_heads=heads // 2, value_heads=heads, key_dim=dim, value_dim=dim)
    return {
        "recurrent": TinySpec("qwen3_5", heads=heads, delta=delta, **common),
        "attention": TinySpec("qwen3", heads=14 if width > 256 else 6, **common),
    }


# Prompt tokens, output tokens and requests at the same time.
WORK = {
    "prompts of 512 tokens": (512, 1, 4),
    "1 request": (16, 96, 1),
    "8 requests": (16, 96, 8),
    "1 request after 1,000 tokens": (1000, 96, 1),
}


def open_model(spec: TinySpec, folder: Path, block_size: int) -> LLM:
    """A model with dummy weights, and two threads."""
    path = folder / spec.family
    path.mkdir()
    values = hf_config(spec).to_dict()
    architecture = {"qwen3_5": "Qwen3_5ForCausalLM", "qwen3": "Qwen3ForCausalLM"}[spec.family]
    write_json(path / "config.json", values | {"architectures": [architecture], "dtype": "float32"})
    return LLM(
        path,
        load_format="dummy",
        device="cpu",
        num_threads=2,
        block_size=block_size,
        max_num_seqs=8,
        max_model_len=1536,
        kv_cache_bytes=256 << 20,
        enable_prefix_caching=False,
        show_progress=False,
    )


def cpu_seconds(llm: LLM, prompt: int, output: int, requests: int, seed: int) -> float:
    """The CPU time of a piece of work."""
    prompts = [[(7 * i + 13 * r + seed) % 2000 for i in range(prompt)] for r in range(requests)]
    params = SamplingParams(temperature=0.0, max_tokens=output, ignore_eos=True)
    begin = time.process_time()
    llm.generate([{"prompt_token_ids": ids} for ids in prompts], params, use_tqdm=False)
    return time.process_time() - begin


def measure(width: int, rounds: int, block_size: int) -> Mapping[str, Mapping[str, float]]:
    """Milliseconds of CPU time for a token, by work and model; bytes of weights as work, too."""
    seconds: dict[tuple[str, str], list[float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        models = {
            name: open_model(spec, Path(folder), block_size)
            for name, spec in models_of(width).items()
        }
        megabytes = {
            name: llm.memory_report()["target_weight_bytes"] / 2**20 for name, llm in models.items()
        }
        for turn in range(rounds + 1):
            for work, (prompt, output, requests) in WORK.items():
                for name in sorted(models, reverse=turn % 2 == 1):
                    spent = cpu_seconds(models[name], prompt, output, requests, turn)
                    if turn > 0:  # the first one warms up
                        tokens = requests * (output if output > 1 else prompt)
                        seconds.setdefault((work, name), []).append(spent / tokens)
        for llm in models.values():
            llm.close()
    times = {
        work: {name: 1e3 * statistics.median(seconds[work, name]) for name in models}
        for work in WORK
    }
    return {"MiB of weights": megabytes, **times}


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--block-size", type=int, default=16)
    args = parser.parse_args()
    for width in (512, 128):
        print(f"{f'{width} wide, CPU ms a token':32}{'recurrent':>12}{'attention':>12}{'ratio':>8}")
        for work, times in measure(width, args.rounds, args.block_size).items():
            ratio = times["recurrent"] / times["attention"]
            print(f"{work:32}{times['recurrent']:12.3f}{times['attention']:12.3f}{ratio:8.2f}")


if __name__ == "__main__":
    main()
