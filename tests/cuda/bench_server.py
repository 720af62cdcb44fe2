# SPDX-License-Identifier: Apache-2.0
"""Measures `paceline serve` beside the engine alone, with a bench configuration and random weights.

    bench_server.py [--target qwen3-8b] [--draft qwen3-8b-eagle3] [--device cuda] [--json FILE]
    bench_server.py --tiny --device cpu

First `paceline bench latency`, then `paceline bench serve` against a server in a process of its
own: the same lengths and concurrency, Poisson arrivals at 70 % of the throughput found, requests
that share a long prefix, and requests of one token. Tokens have 6 letters, so that text costs what
it costs with a real tokenizer. --tiny takes a target of one layer: then the server is what costs.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import paceline.bench

CONFIGS = Path(paceline.bench.__file__).parent / "configs"
ACCEPTANCE_LENGTH = 2.34


TINY_SIZES = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 1024,
}


def write_config(name: str, folder: Path, *, is_tiny: bool) -> Path:
    """Writes config.json into a folder of its own; no weights."""
    path = folder / name
    path.mkdir()
    config = json.loads((CONFIGS / f"{name}.json").read_text())
    if is_tiny:
        config |= TINY_SIZES | {"num_hidden_layers": 1, "bos_token_id": 1, "eos_token_id": 2}
    (path / "config.json").write_text(json.dumps(config))
    return path


def write_tokenizer(path: Path) -> None:
    """Adds a tokenizer with every id of the model."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    num_ids = json.loads((path / "config.json").read_text())["vocab_size"]
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {letter: i for i, letter in enumerate(letters)}
    vocabulary |= {f"\u0120{i:05x}": i for i in range(len(letters), num_ids)}
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(path / "tokenizer.json"))


def paceline_command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "paceline", *arguments]


class Server:
    """A server in a process of its own, from `with` on until it ends."""

    def __init__(self, target: Path, speculative: list[str], args: argparse.Namespace):
        self.url = f"http://127.0.0.1:{args.port}"
        most_tokens = max(args.prefix_len, args.input_len) + args.output_len + 128
        self._process = subprocess.Popen(
            paceline_command(
                "serve", str(target), "--load-format", "dummy", "--device", args.device,
                "--port", str(args.port), "--max-num-seqs", str(max(args.concurrency)),
                "--max-model-len", str(most_tokens), *speculative, "--quiet",
            )
        )  # fmt: skip

    def __enter__(self) -> Server:
        deadline = time.monotonic() + 120
        while time.monotonic() < deadline and self._process.poll() is None:
            try:
                urllib.request.urlopen(f"{self.url}/health").close()
                return self
            except (urllib.error.URLError, ConnectionError):
                time.sleep(0.2)
        self._process.kill()
        raise RuntimeError("the server did not start")

    def __exit__(self, *exception: object) -> None:
        self._process.terminate()
        self._process.wait()

    def cpu_seconds(self) -> tuple[float, float]:
        """CPU time of the thread that speaks HTTP, and of all others."""
        process = self._process.pid

        def seconds(stat: Path) -> float:
            user, system = stat.read_text().rpartition(")")[2].split()[11:13]
            return float(int(user) + int(system)) / float(os.sysconf("SC_CLK_TCK"))

        loop = seconds(Path(f"/proc/{process}/task/{process}/stat"))
        return loop, seconds(Path(f"/proc/{process}/stat")) - loop

    def bench(self, folder: Path, *arguments: str) -> Any:
        """Runs `bench serve` against it; returns the JSON, with the CPU time of a chunk."""
        out = folder / "serve.json"
        before = self.cpu_seconds()
        subprocess.run(
            paceline_command(
                "bench", "serve", "--base-url", self.url, "--ignore-eos", "--temperature", "0",
                "--quiet", "--save-detailed", "--json", str(out), *arguments,
            ),
            check=True, stdout=subprocess.DEVNULL,
        )  # fmt: skip
        found = json.loads(out.read_text())
        chunks = sum(len(times) + 1 for times in found.pop("itls"))
        after = self.cpu_seconds()
        loop, others = after[0] - before[0], after[1] - before[1]
        for key in ("ttfts", "generated_texts", "input_lens", "output_lens", "errors"):
            found.pop(key, None)
        return found | {
            "loop_us_per_chunk": 1e6 * loop / chunks,
            "others_us_per_chunk": 1e6 * others / chunks,
        }


def bench_engine(args: argparse.Namespace, config: str, spec: list[str], folder: Path) -> list[Any]:
    """The engine alone, a row for each concurrency."""
    out = folder / "latency.json"
    subprocess.run(
        paceline_command(
            "bench", "latency", "--config", config, "--device", args.device, "--rounds", "1",
            "--concurrency", ",".join(map(str, args.concurrency)), "--input-len",
            str(args.input_len), "--output-len", str(args.output_len), *spec, "--json", str(out),
        ),
        check=True, stdout=subprocess.DEVNULL,
    )  # fmt: skip
    rows = json.loads(out.read_text())["rows"]
    return [row for row in rows if (row["configuration"] == "plain") == (not spec)]


def whole_throughput(row: dict[str, Any], concurrency: int, output_len: int) -> float:
    """Tokens per second from queueing on; the bench counts from the first token of a request on."""
    decoding_s = concurrency * (output_len - 1) / row["output_tokens_per_s"]
    return concurrency * output_len / (row["time_to_first_token_ms"] / 1000 + decoding_s)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--target", default="qwen3-8b")
    parser.add_argument("--draft", default="qwen3-8b-eagle3")
    parser.add_argument("--tiny", action="store_true", help="one layer, no drafter")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--port", type=int, default=8917)
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 16, 64])
    parser.add_argument("--input-len", type=int, default=256)
    parser.add_argument("--output-len", type=int, default=128)
    parser.add_argument("--prefix-len", type=int, default=8000)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()

    report: dict[str, Any] = {"cores": os.cpu_count(), "rows": []}
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        target = write_config(args.target, folder, is_tiny=args.tiny)
        write_tokenizer(target)
        for_engine, for_server = [], []
        if not args.tiny:
            draft = write_config(args.draft, folder, is_tiny=False)
            speculative = {
                "method": "eagle3",
                "num_speculative_tokens": 3,
                "rejection_sample_method": "synthetic",
                "synthetic_acceptance_length": ACCEPTANCE_LENGTH,
            }
            for_engine, for_server = (
                ["--speculative-config", json.dumps(speculative | {"model": model})]
                for model in (args.draft, str(draft))
            )
        config = str(target) if args.tiny else args.target
        engine = bench_engine(args, config, for_engine, folder)
        with Server(target, for_server, args) as server:
            lengths = ["--output-len", str(args.output_len)]
            same = ["--input-len", str(args.input_len), *lengths]
            for row, c in zip(engine, args.concurrency, strict=True):
                found = server.bench(
                    folder, *same, "--max-concurrency", str(c), "--num-prompts", str(8 * c)
                )  # fmt: skip
                alone = whole_throughput(row, c, args.output_len)
                served = found["output_throughput"]
                print(
                    f"c={c}: engine {alone:.0f} tokens/s, served {served:.0f}"
                    f" ({served / alone:.3f}); decoding alone {row['output_tokens_per_s']:.0f} and"
                    f" {1000 * c / found['mean_tpot_ms']:.0f}; TTFT {found['median_ttft_ms']:.1f}"
                    f" ms, ITL median {found['median_itl_ms']:.2f}, p99"
                    f" {found['p99_itl_ms']:.2f} ms; {found['loop_us_per_chunk']:.0f} us of the"
                    " event loop a chunk",
                    flush=True,
                )
                report["rows"].append({"concurrency": c, "engine": alone, "served": found})
            rate = 0.7 * found["request_throughput"]
            found = server.bench(
                folder, *same, "--request-rate", f"{rate:.2f}", "--num-prompts", "256"
            )  # fmt: skip
            print(
                f"Poisson, {rate:.1f} requests/s: ITL median {found['median_itl_ms']:.2f}, p99"
                f" {found['p99_itl_ms']:.2f} ms, TTFT p99 {found['p99_ttft_ms']:.1f} ms",
                flush=True,
            )
            report["poisson"] = found
            found = server.bench(
                folder, "--dataset-name", "prefix_repetition", "--prefix-len",
                str(args.prefix_len), "--num-prefixes", "1", "--input-len", "16", "--output-len",
                "8", "--max-concurrency", "1", "--num-prompts", "16", "--num-warmups", "1",
            )  # fmt: skip
            print(
                f"prefix of {args.prefix_len} tokens, known: TTFT median"
                f" {found['median_ttft_ms']:.1f}, p99 {found['p99_ttft_ms']:.1f} ms"
            )
            report["prefix"] = found
            found = server.bench(
                folder, "--input-len", "8", "--output-len", "1", "--max-concurrency",
                str(max(args.concurrency)), "--num-prompts", "2000",
            )  # fmt: skip
            print(
                f"short requests: {found['request_throughput']:.0f} a second,"
                f" {found['loop_us_per_chunk']:.0f} us of the event loop each,"
                f" {found['others_us_per_chunk']:.0f} of all other threads"
            )
            report["short"] = found
    if args.json:
        args.json.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
