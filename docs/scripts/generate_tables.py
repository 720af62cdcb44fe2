# SPDX-License-Identifier: Apache-2.0
"""Writes the generated tables of the pages: from the code, and from the data files in docs/data.

    PYTHONPATH=python python docs/scripts/generate_tables.py [--check]

A generated part of a page lies between two comments:

    <!-- generated: NAME -->
    <!-- end of generated -->

`--check` writes nothing, names the pages that are out of date, and then exits with 1.
"""

from __future__ import annotations

import argparse
import inspect
import json
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

import evidence_tables
import paceline
from evidence_tables import rows_of, table
from paceline.config import DEVICES, DTYPES
from paceline.loader import ARCHITECTURES
from paceline.loader.families import is_same_family
from paceline.loader.formats import PLAIN_DTYPES
from paceline.option_schema import KEYS
from paceline.speculative_fields import LATER_METHODS, METHODS
from paceline.vllm_arguments import ADVICE, FLAGS, LEAVE_OUT, Advice
from paceline.vllm_names import ATTRIBUTES, MODULE_NAMES

DOCS: Final = Path(__file__).resolve().parents[1]
ROOT: Final = DOCS.parent
PART: Final = re.compile(r"(<!-- generated: (\S+) -->\n).*?(<!-- end of generated -->)", re.DOTALL)

# Words for what the code names. A name without words is an error, and so are words without a name.
FAMILIES: Final = {
    "LlamaForCausalLM": "Llama 3",
    "Qwen3ForCausalLM": "Qwen3",
    "Gemma3ForCausalLM": "Gemma 3",
    "Gemma4ForCausalLM": "Gemma 4",
    "GptOssForCausalLM": "GPT-OSS",
    "Glm4MoeLiteForCausalLM": "GLM-4.7-Flash",
    "DeepseekV3ForCausalLM": "DeepSeek-V3",
    "DeepseekV4ForCausalLM": "DeepSeek-V4",
    "Qwen3MoeForCausalLM": "Qwen3-MoE",
    "Qwen3_5ForCausalLM": "Qwen3.5 to 3.8",
    "Qwen3_5MoeForCausalLM": "Qwen3.5 and 3.6 with experts",
    "Qwen3NextForCausalLM": "Qwen3-Next",
}
DRAFTERS: Final = {
    "draft_model": "draft model: a smaller model with the same token ids",
    "eagle": "EAGLE: a draft head made for the target",
    "eagle3": "EAGLE-3: a draft head made for the target (SafeAILab's or `speculators` layout)",
    "mtp": "MTP: the layer of a GLM-4.7-Flash, DeepSeek or Qwen3.5 model for one token more",
    "gemma4_mtp": "Gemma 4 MTP: an assistant made for a Gemma 4 target",
    "dflash": "DFlash: one pass over a block of mask tokens makes all drafts",
    "dflash2": "DFlash2: the same with convolutions, and each draft is one of a few candidates",
    "dspark": "DSpark: as DFlash, and each draft follows from the one before it",
    "ngram": "prompt lookup: the tokens that followed the same n-gram earlier; no model",
    "custom": "a Python function of the token history, for research; no model",
}
DEVICE_WORDS: Final = {
    "auto": "the GPU if it can be used, else the CPU; the default",
    "cpu": "Linux on x86-64",
    "cuda": "one NVIDIA GPU since sm_80 (A100, RTX 30 and later), driver for CUDA 13; only H100 "
    "and H200 have run it",
}
# The benches of the GPU evidence.
PAIRS: Final = {
    "qwen3-8b": "Qwen3-8B + EAGLE-3",
    "llama-3-8b": "Llama-3-8B + EAGLE",
    "gemma3-27b": "Gemma3-27B + 270M draft model",
}
# vLLM's arguments that exist here with another meaning or a narrower one.
DIFFERENCES: Final = {
    "LLM": {
        "block_size": "16 by default, 1 to 256",
        "enable_prefix_caching": "on by default, for all models and speculators "
        "([prefix-cache.md](prefix-cache.md))",
        "disable_log_stats": "False by default: figures are logged at level INFO",
        "dtype": '"float16" is refused: such checkpoints load as float32, which loses nothing',
        "gpu_memory_utilization": "no default (see the KV pool above); changes nothing on the CPU",
        "load_format": '"auto" or "dummy"',
        "max_logprobs": "0 to 64; -1 is refused",
        "max_model_len": "default: the model's own length, or the largest that fits the memory",
        "max_num_seqs": "64 by default",
        "seed": "every request without a seed gets its own, derived from this one",
        "tokenizer": "another folder or model of the hub, with the same token ids",
        "tensor_parallel_size": "1 to 8, of one host ([ranks](tensor-parallel.md))",
    },
    "speculative_config": {
        "method": "may be left out: the drafter's checkpoint tells it",
        "rejection_sample_method": 'default "coupled": a seed gives the tokens of plain decoding',
        "draft_sample_method": 'for "standard" and "block"; "probabilistic" is the default',
        "draft_tensor_parallel_size": (
            "1 or `tensor_parallel_size`; by default [bytes decide](tensor-parallel.md#drafters)"
        ),
    },
    "SamplingParams": {
        "max_tokens": "16 by default, as in vLLM",
        "min_p": "applied after top-k and top-p, in vLLM before them",
        "n": "output i is the output of a request with seed `seed` + i",
        "seed": "-1 is refused; None = a seed of its own",
        "structured_outputs": "without `structural_tag`; llguidance is the only backend "
        "([structured-output.md](structured-output.md))",
    },
}


def check_words(what: str, words: dict[str, str], names: Sequence[str]) -> None:
    """Checks that every name of the code has words here, and that no words are left over."""
    missing, unknown = set(names) - set(words), set(words) - set(names)
    if missing or unknown:
        raise SystemExit(
            f"generate_tables.py: {what}: no words for {sorted(missing)}, "
            f"words for unknown {sorted(unknown)}"
        )


def code(names: Sequence[str]) -> str:
    """Joins names as code."""
    return ", ".join(f"`{name}`" for name in names)


def families() -> dict[str, list[str]]:
    """The architectures of each family, by its words."""
    grouped: dict[str, list[str]] = {words: [] for words in FAMILIES.values()}
    for architecture in ARCHITECTURES:
        owners = [first for first in FAMILIES if is_same_family(architecture, first)]
        check_words("families", {architecture: ""}, [architecture] if owners else [])
        grouped[FAMILIES[owners[0]]].append(architecture)
    return grouped


def load(name: str) -> Any:
    """Reads a data file."""
    return json.loads((DOCS / "data" / name).read_text())


# ---- the tables ---------------------------------------------------------------------------------


def support() -> str:
    """Models, drafters, formats and devices: README's table."""
    check_words("drafters", DRAFTERS, METHODS)
    check_words("devices", DEVICE_WORDS, DEVICES)
    models = ", ".join(families())
    drafted = ", ".join(f"{DRAFTERS[name].partition(':')[0]} (`{name}`)" for name in METHODS)
    rows: list[tuple[str, str, str]] = [
        ("models", models, "[architectures](docs/loading.md#what-is-read)"),
        ("drafters", drafted, "[choosing a drafter](docs/choosing-a-drafter.md)"),
        (
            "weights",
            f"safetensors in {', '.join(PLAIN_DTYPES)}, fp8, int4, mxfp4 and nvfp4; "
            "folders of `paceline convert`; tensors in memory (DLPack)",
            "[loading](docs/loading.md)",
        ),
        (
            "runs in",
            " or ".join(dtype for dtype in DTYPES if dtype != "auto"),
            "[dtype](docs/loading.md#the-device-and-dtype-of-weights)",
        ),
        *(
            (
                f'`device="{device}"`',
                DEVICE_WORDS[device]
                + (f"; {evidence_tables.last_full_run()}" if device == "cuda" else ""),
                "[quickstart](docs/quickstart.md#devices)",
            )
            for device in DEVICES
            if device != "auto"
        ),
        (
            "not yet",
            "drafting with " + code(LATER_METHODS),
            "[what is missing](#what-it-does-not-do-yet)",
        ),
    ]
    return table(("", "supported", "more"), rows)


def drafters() -> str:
    """The methods of speculative_config."""
    check_words("drafters", DRAFTERS, METHODS)
    return table(("method", "drafter"), [(f"`{name}`", DRAFTERS[name]) for name in METHODS])


def comparison(target: str) -> Any:
    """The one comparison with vLLM that has a target."""
    (found,) = (p for p in load("vllm_comparison.json")["pairs"] if p["target"] == target)
    return found


def vllm_speed(pair: dict[str, Any]) -> str:
    """The figures of the chart, and plain decoding where it was measured."""
    plain = "paceline_plain_tokens_per_s"
    has_plain = plain in pair["rows"][0]
    rows = [
        (
            row["concurrency"],
            row["paceline_ms"],
            row["vllm_ms"],
            f"{row['vllm_ms'] / row['paceline_ms']:.2f}",
            f"{row['paceline_tokens_per_s']:,}",
            f"{row['vllm_tokens_per_s']:,}",
            *([f"{row[plain]:,}"] if has_plain else []),
        )
        for row in pair["rows"]
    ]
    head = ["c", "Paceline, ms per iteration", "vLLM, ms", "ratio"]
    head += ["Paceline, tokens/s", "vLLM, tokens/s"]
    head += ["Paceline without a drafter, tokens/s"] if has_plain else []
    return table(head, rows)


def vllm_first_token() -> str:
    """Times to the first token beside vLLM."""
    rows = [
        (f"{row['prompt_tokens']:,}", f"{row['paceline_ms']:,}", f"{row['vllm_ms']:,}")
        for row in comparison("Qwen3-8B")["time_to_first_token"]
    ]
    return table(("prompt tokens", "Paceline, ms", "vLLM, ms"), rows)


def vllm_commands(pair: dict[str, Any]) -> str:
    """The commands of a comparison; a long one has a line for each option."""
    shown = (c if len(c) <= 100 else c.replace(" --", " \\\n  --") for c in pair["commands"])
    return "<!-- test: parse needs a GPU -->\n```bash\n" + "\n".join(shown) + "\n```"


def break_even() -> str:
    """The acceptance length from which on each pair of the GPU evidence is faster than plain."""
    rows = []
    for bench, words in PAIRS.items():
        plain: dict[int, float] = {}
        cells: dict[int, str] = {}
        for row in rows_of(bench):
            c, speed = row["workload"]["concurrency"], row["output_tokens_per_s"]
            if row["configuration"] == "plain":
                plain[c] = speed
            elif row["draft_driver"] == "unrolled":
                cells[c] = f"{row['tokens_per_iteration'] * plain[c] / speed:.2f}"
        data = comparison("Qwen3-8B")
        last = data["rows"][-1]
        cells[last["concurrency"]] = ""
        if data["target"] in words:
            ratio = last["paceline_plain_tokens_per_s"] / last["paceline_tokens_per_s"]
            cells[last["concurrency"]] = f"{data['synthetic_acceptance_length'] * ratio:.2f}"
        rows.append((words, *(cells[c] for c in sorted(cells))))
    return table(("pair, k = 3, one H200", "c = 1", "16", "64", "256"), rows)


def draft_lengths() -> str:
    """Milliseconds per iteration by k."""
    rows = load("draft_lengths.json")["rows"]
    places = list(rows[0]["ms"])
    head = ("k", *(f"c = {c}, ms per iteration" for c in places))
    return table(head, [(row["k"], *(f"{row['ms'][c]:.2f}" for c in places)) for row in rows])


def mask_times() -> str:
    """What the masks of a verify window cost on the host."""
    data = load("mask_times.json")
    row, compiling = data["us_per_row"], data["compile_ms"]
    return table(
        ("on the host", "median", "p90", "p99", "most"),
        [
            ("masks, us for each row", row["p50"], row["p90"], row["p99"], row["most"]),
            ("compiling a schema, ms", compiling["p50"], "", "", compiling["most"]),
        ],
    )


def acceptance_of(demo: str, k: int) -> str:
    """The one acceptance length of a demo and a k."""
    (found,) = (
        entry
        for entry in load("demos.json")["acceptance"]
        if (entry["demo"], entry["k"]) == (demo, k)
    )
    return f"{found['acceptance_length']:.2f}"


def demo_acceptance() -> str:
    """Acceptance lengths of the demos."""
    rows = [
        (f"`{entry['demo']}`", entry["k"], f"{entry['acceptance_length']:.2f}")
        for entry in load("demos.json")["acceptance"]
    ]
    return table(("demo", "k", "acceptance length"), rows)


def demo_speed(place: str) -> str:
    """Speeds of the demos on one machine: a key of "speed" in demos.json."""
    rows = load("demos.json")["speed"][place]["rows"]
    has_share = "draft_share" in rows[0]
    head = ["demo", "k", "acceptance length", "plain tokens/s", "speculative tokens/s", "ratio"]
    if has_share:
        head.insert(3, "draft step / target, bytes")
    lines = []
    for row in rows:
        line = [
            f"`{row['demo']}`",
            row["k"],
            acceptance_of(row["demo"], row["k"]),
            row["plain"],
            row["speculative"],
            f"{row['speculative'] / row['plain']:.2f}",
        ]
        if has_share:
            line.insert(3, row["draft_share"])
        lines.append(line)
    return table(head, lines)


def demo_bars() -> str:
    """Acceptance lengths of the demos beside their bars and their training forms."""
    rows = [
        (
            f"`{entry['demo']}`",
            entry["k"],
            f"≥ {entry['bar']}",
            f"{entry['acceptance_length']:.2f}",
            f"{entry['reference']:.2f} ({entry['reference_engine']})",
        )
        for entry in load("demos.json")["acceptance"]
        if "bar" in entry
    ]
    return table(("drafter", "k", "bar", "in Paceline", "elsewhere"), rows)


def _named(function: Callable[..., Any]) -> list[str]:
    """The parameters of a function that have names."""
    parameters = inspect.signature(function).parameters.values()
    return [p.name for p in parameters if p.kind is not p.VAR_KEYWORD]


def _answer(advice: Advice) -> str:
    """What happens to an argument of vLLM. None, which is to leave it out, needs no words."""
    reason = advice.text.removeprefix(LEAVE_OUT)
    if advice.harmless == "all":
        return f"changes nothing: {reason}"
    values = [f"`{value!r}`" for value in advice.harmless if value is not None]
    unless = f" unless {' or '.join(values)}" if values else ""
    return f"refused{unless}: {reason}"


def _names_table(what: str, ours: Sequence[str]) -> str:
    names: list[str] = load("vllm_names.json")[what]
    different = DIFFERENCES[what]
    same = code([name for name in names if name in ours and name not in different])
    rows = [(f"`{name}`", different[name]) for name in names if name in ours and name in different]
    advice = ADVICE[what]
    missing = [name for name in names if name not in ours]
    missing += [name for name in advice if name not in names]  # of other versions of vLLM
    rows += [(f"`{name}`", _answer(advice[name])) for name in missing]
    parts = [f"The same as in vLLM: {same}.", table(("vLLM", "here"), rows)]
    own = [name for name in ours if name not in names]
    if own:
        # The keys under "x" are in the reference, which is made of the schema.
        is_config = what == "speculative_config"
        direct = code([name for name in own if not is_config or not KEYS[name].nested])
        under_x = ", and the keys under `x`" if is_config else ""
        parts.append(f"Only in Paceline: {direct}{under_x}.")
    return "\n\n".join(parts)


def vllm_llm() -> str:
    """vLLM's arguments of LLM."""
    return _names_table("LLM", _named(paceline.LLM))


def vllm_speculative() -> str:
    """vLLM's keys of speculative_config."""
    return _names_table("speculative_config", list(KEYS))


def vllm_sampling() -> str:
    """vLLM's sampling parameters."""
    return _names_table("SamplingParams", _named(paceline.SamplingParams))


def vllm_calls() -> str:
    """vLLM's arguments of generate and chat, and of structured outputs."""
    rows = [
        (f"`{owner}({name})`", _answer(advice))
        for owner in ("LLM.generate", "LLM.chat", "StructuredOutputsParams")
        for name, advice in ADVICE[owner].items()
    ]
    return table(("vLLM", "here"), rows)


def vllm_names() -> str:
    """vLLM's names in modules and of methods."""
    rows = [
        (f"`{module.replace('paceline', 'vllm')}.{name}`", advice)
        for module, names in MODULE_NAMES.items()
        for name, advice in names.items()
    ]
    rows += [
        (f"`{kind}.{name}`", advice)
        for kind, names in ATTRIBUTES.items()
        for name, advice in names.items()
    ]
    return table(("vLLM", "here"), rows)


def vllm_flags() -> str:
    """vLLM's flags of `vllm serve` that are no arguments of LLM."""
    rows = [(f"`--{name.replace('_', '-')}`", _answer(advice)) for name, advice in FLAGS.items()]
    return table(("vLLM", "here"), rows)


PARTS: Final[dict[str, Callable[[], str]]] = {
    "break-even": break_even,
    "demo-acceptance": demo_acceptance,
    "demo-bars": demo_bars,
    "demo-speed-cpu": lambda: demo_speed("cpu"),
    "demo-speed-h200": lambda: demo_speed("h200"),
    "draft-lengths": draft_lengths,
    "drafters": drafters,
    "gpu-tests": lambda: f"{evidence_tables.last_full_run()}.",
    "h200-drivers": evidence_tables.drivers,
    "h200-first-token": evidence_tables.first_token,
    "h200-kernels": evidence_tables.kernel_times,
    "h200-latency": evidence_tables.latency,
    "h200-pairs": evidence_tables.pairs,
    "h200-sampling": evidence_tables.sampling,
    "h200-summary": evidence_tables.summary,
    "support": support,
    "vllm-gpt-oss": lambda: vllm_speed(comparison("GPT-OSS-20B")),
    "vllm-gpt-oss-commands": lambda: vllm_commands(comparison("GPT-OSS-20B")),
    "vllm-qwen3": lambda: vllm_speed(comparison("Qwen3-8B")),
    "vllm-qwen3-commands": lambda: vllm_commands(comparison("Qwen3-8B")),
    "vllm-first-token": vllm_first_token,
    "vllm-calls": vllm_calls,
    "vllm-flags": vllm_flags,
    "vllm-llm": vllm_llm,
    "vllm-names": vllm_names,
    "mask-times": mask_times,
    "vllm-sampling": vllm_sampling,
    "vllm-speculative": vllm_speculative,
}


def pages() -> list[Path]:
    """The pages that may have generated parts."""
    return [
        *sorted(ROOT.glob("*.md")),
        *sorted(DOCS.glob("*.md")),
        ROOT / "python/training/README.md",
    ]


def renew(page: str) -> str:
    """Replaces the generated parts of a page.

    Raises:
        KeyError: A part has a name that does not exist.
    """
    return PART.sub(lambda part: f"{part[1]}{PARTS[part[2]]()}\n{part[3]}", page)


def outdated() -> list[Path]:
    """The pages whose generated parts differ from what the code and the data say."""
    return [page for page in pages() if renew(page.read_text()) != page.read_text()]


def main() -> int:
    """Renews or checks the pages."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--check", action="store_true", help="write nothing; fail if out of date")
    check = parser.parse_args().check
    stale = outdated()
    for page in stale:
        print(f"{page.relative_to(ROOT)}: {'out of date' if check else 'renewed'}")
        if not check:
            page.write_text(renew(page.read_text()))
    return 1 if check and stale else 0


if __name__ == "__main__":
    sys.exit(main())
