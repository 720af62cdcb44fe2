# SPDX-License-Identifier: Apache-2.0
"""The messages that docs/troubleshooting.md quotes are those that the code raises."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hostile_grammars import slow_schema
from hub_server import HubServer
from markdown_pages import blocks
from paceline import LLM, SamplingParams
from paceline.bench.models import named_config
from paceline.cli import build_parser
from paceline.demo import demo_paths
from paceline.loader import dummy_model

PAGE = Path("docs/troubleshooting.md")
QUOTED = {block.why: block.code for block in blocks(PAGE) if block.how == "message"}

TARGET, DRAFT = demo_paths("draft_model")
_, HEAD = demo_paths("eagle3")
GEMMA4, ASSISTANT = demo_paths("gemma4_mtp")


def llm(model: Path = TARGET, **arguments: Any) -> LLM:
    """A small engine."""
    return LLM(model, **{"max_num_seqs": 2, "max_model_len": 64, **arguments})


def drafted(draft: Path, **keys: Any) -> dict[str, Any]:
    """A `speculative_config`."""
    return {"model": str(draft), "num_speculative_tokens": 3, **keys}


def copy(model: Path, folder: Path, **values: Any) -> Path:
    """A copy of a checkpoint with other values in its configuration."""
    shutil.copytree(model, folder / "copy")
    config = folder / "copy" / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), **values}))
    return folder / "copy"


def damaged(folder: Path) -> None:
    model = copy(TARGET, folder)
    weights = (model / "model.safetensors").read_bytes()
    (model / "model.safetensors").write_bytes(weights[:1_000_000])
    llm(model)


def without_tokenizer(folder: Path) -> None:
    model = copy(TARGET, folder)
    (model / "tokenizer.json").unlink()
    with llm(model) as engine:
        engine.generate("def f():")


def other_tokens(folder: Path) -> None:
    file = copy(DRAFT, folder) / "tokenizer.json"
    tokenizer = json.loads(file.read_text())
    vocab = tokenizer["model"]["vocab"]
    one, other = list(vocab)[300:302]
    vocab[one], vocab[other] = vocab[other], vocab[one]
    file.write_text(json.dumps(tokenizer))
    llm(speculative_config=drafted(file.parent))


def pickled(folder: Path) -> None:
    head = copy(HEAD, folder)
    (head / "model.safetensors").rename(head / "pytorch_model.bin")
    llm(speculative_config=drafted(head))


def pickled_mask(folder: Path) -> None:
    head = copy(HEAD, folder)
    (head / "mask_embedding.pt").touch()
    llm(speculative_config=drafted(head))


def receipt_of_drafts() -> None:
    """Asks for a receipt of an output that depends on drafts."""
    config = {
        "method": "ngram",
        "num_speculative_tokens": 3,
        "rejection_sample_method": "standard",
    }
    with llm(speculative_config=config) as engine:
        engine.generate("x", SamplingParams(receipt=True))


def closed() -> None:
    engine = llm()
    engine.close()
    engine.generate("def f():")


def forked() -> None:
    """Raises in this process what `generate` raises in a forked child."""
    engine = llm()
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            engine.generate("def f():")
        except RuntimeError as error:
            os.write(writing, str(error).encode())
        os._exit(0)
    os.waitpid(child, 0)
    os.close(writing)
    with os.fdopen(reading) as pipe:
        raise RuntimeError(pipe.read())


def from_hub(model: str, *, offline: bool = False) -> None:
    """Loads a model of a hub that has none."""
    with HubServer({}) as hub, hub.used(offline=offline):
        LLM(model)


def without_template() -> None:
    with llm(DRAFT) as engine:
        engine.chat([{"role": "user", "content": "def f():"}])


def without_server_packages() -> None:
    args = build_parser().parse_args(["serve"])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(importlib.util, "find_spec", lambda name: None)
        args.run(args)


def with_llm(call: Callable[[LLM], object]) -> None:
    with llm() as engine:
        call(engine)


CASES: dict[str, Callable[[Path], object]] = {
    "architecture": lambda folder: llm(
        copy(TARGET, folder, architectures=["MixtralForCausalLM"], model_type="mixtral")
    ),
    "closed": lambda folder: closed(),
    "damaged": damaged,
    "few_rows": lambda folder: llm(
        max_num_seqs=64, max_num_batched_tokens=100, speculative_config=drafted(DRAFT)
    ),
    "forked": lambda folder: forked(),
    "grammar": lambda folder: with_llm(
        lambda engine: engine.generate(
            "x", SamplingParams(structured_outputs={"json": slow_schema(0)})
        )
    ),
    "head_as_target": lambda folder: llm(ASSISTANT),
    "hub_offline": lambda folder: from_hub("Qwen/Qwen3-8B", offline=True),
    "hub_unknown": lambda folder: from_hub("Qwen/Qwen3-8b-typo"),
    "large_weights": lambda folder: dummy_model(
        named_config("gemma3-101m") | {"vocab_size": 2**23, "hidden_size": 2**16}, "large"
    ),
    "logprobs": lambda folder: with_llm(
        lambda engine: engine.generate("x", SamplingParams(logprobs=30))
    ),
    "nested_key": lambda folder: llm(
        speculative_config={"method": "ngram", "num_speculative_tokens": 3, "draft_driver": "while"}
    ),
    "receipt": lambda folder: receipt_of_drafts(),
    "no_cuda": lambda folder: llm(device="cuda"),
    "no_k": lambda folder: llm(speculative_config={"model": str(DRAFT)}),
    "no_server": lambda folder: without_server_packages(),
    "no_template": lambda folder: without_template(),
    "no_tokenizer": without_tokenizer,
    "other_target": lambda folder: llm(GEMMA4, speculative_config=drafted(HEAD)),
    "pickle": pickled,
    "pickled_mask": pickled_mask,
    "quantised": lambda folder: llm(
        copy(TARGET, folder, quantization_config={"quant_method": "bitsandbytes"})
    ),
    "small_pool": lambda folder: llm(kv_cache_bytes=1000),
    "tensor_parallel": lambda folder: llm(tensor_parallel_size=3),
    "tokenizers": other_tokens,
    "too_long": lambda folder: with_llm(lambda engine: engine.generate([[1] * 64])),
    "unknown_parameter": lambda folder: SamplingParams(best_of=2),  # type: ignore[arg-type]
}


def matches(quoted: str, message: str) -> bool:
    """Whether a message is the quoted one, in which "..." stands for anything."""
    quoted, message = (" ".join(text.split()) for text in (quoted, message))
    pattern = ".*".join(re.escape(part) for part in quoted.split("..."))
    return re.fullmatch(pattern, message, re.DOTALL) is not None


def test_every_quoted_message_has_a_case() -> None:
    assert sorted(name for name in QUOTED if name) == sorted(CASES)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # newer versions of Python warn of forks
@pytest.mark.parametrize("name", sorted(CASES))
def test_quoted_message_is_raised(name: str, tmp_path: Path) -> None:
    with pytest.raises((ValueError, TypeError, RuntimeError, OSError, MemoryError)) as caught:
        CASES[name](tmp_path)
    assert matches(QUOTED[name], str(caught.value)), f"{caught.value}\n\nquoted: {QUOTED[name]}"


def test_dots_stand_for_anything_and_nothing_else() -> None:
    assert matches("a ... c\nd", "a b c d")
    assert not matches("a ... c", "a b c d")
    assert not matches("...: x.", "y: xz")
