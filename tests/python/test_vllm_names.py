# SPDX-License-Identifier: Apache-2.0
"""Names that people know from vLLM: modules, methods and keywords that work, or say what to do."""

from __future__ import annotations

import importlib
import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from errors import raises
from paceline import LLM, AsyncLLM, ModelNotFoundError, SamplingParams
from paceline.demo import demo_paths
from paceline.metrics import Counter, Gauge, Metric, Vector
from paceline.server.metrics import RequestFigures, exposition
from paceline.vllm_names import ATTRIBUTES, MODULE_NAMES

GREEDY = SamplingParams(temperature=0, max_tokens=8)
PROMPT = "def quicksort(items):\n    return sorted(items) if len(items) else []\n" * 3


@pytest.fixture(scope="module")
def demo() -> Any:
    target, draft = demo_paths("draft_model")
    config = {"method": "draft_model", "model": str(draft), "num_speculative_tokens": 3}
    with LLM(target, speculative_config=config, max_model_len=256, max_num_seqs=4) as llm:
        yield llm


@pytest.mark.parametrize(
    ("module", "name"), [(module, name) for module in MODULE_NAMES for name in MODULE_NAMES[module]]
)
def test_a_name_of_a_module_is_refused_with_its_advice(module: str, name: str) -> None:
    advice = MODULE_NAMES[module][name].replace("`", "")
    with raises(ImportError, f"{module} has no {name}: {advice}"):
        exec(f"from {module} import {name}")  # as users write it
    with raises(ImportError, advice):
        getattr(importlib.import_module(module), name)


@pytest.mark.parametrize("module", MODULE_NAMES)
def test_other_names_are_missing_as_in_any_module(module: str) -> None:
    with raises(AttributeError, f"module '{module}' has no attribute 'no_such_name'"):
        getattr(importlib.import_module(module), "no_such_name")  # noqa: B009
    with raises(ImportError, "cannot import name 'no_such_name'"):
        exec(f"from {module} import no_such_name")


def test_attributes_are_refused_with_their_advice(llm: LLM) -> None:
    for owner, kind in ((llm, "LLM"), (AsyncLLM.from_llm(llm), "AsyncLLM")):
        for name, advice in ATTRIBUTES[kind].items():
            message = f"'{kind}' object has no attribute '{name}': {advice.replace('`', '')}"
            with raises(AttributeError, message):
                getattr(owner, name)
            assert not hasattr(owner, name)
        with raises(AttributeError, f"'{kind}' object has no attribute 'no_such_name'"):
            getattr(owner, "no_such_name")  # noqa: B009


def test_no_prompts_are_no_outputs(llm: LLM) -> None:
    assert llm.generate([]) == llm.generate(()) == llm.generate([], GREEDY) == []
    assert llm.generate(prompt_token_ids=[]) == []
    assert llm.chat([]) == llm.chat([], GREEDY) == []
    assert list(llm.stream([])) == []
    with raises(ValueError, "sampling_params has 1 entries for 0 prompts"):
        llm.generate([], [GREEDY])
    assert llm._executor.check_integrity() == ""


def test_prompt_token_ids(llm: LLM) -> None:
    prompts = [[1, 2, 3], [4, 5]]
    expected = [output.outputs for output in llm.generate(prompts, GREEDY)]
    found = llm.generate(prompt_token_ids=prompts, sampling_params=GREEDY)
    assert [output.outputs for output in found] == expected
    assert [output.prompt_token_ids for output in found] == prompts
    (one,) = llm.generate(prompt_token_ids=prompts[0], sampling_params=GREEDY)
    assert one.outputs == expected[0]
    with raises(ValueError, "prompts and prompt_token_ids are both given; allowed: one of them"):
        llm.generate("a", prompt_token_ids=[1])
    with raises(ValueError, "prompts is None"):
        llm.generate()
    wrong: Any
    for wrong in ("ab", ["ab"], [{"prompt": "ab"}]):
        with raises(ValueError, "prompt_token_ids is ", "strings and mappings are prompts"):
            llm.generate(prompt_token_ids=wrong)


def test_reset_prefix_cache(demo: LLM) -> None:
    assert demo.reset_prefix_cache() is True
    (first,) = demo.generate(PROMPT, GREEDY)
    (again,) = demo.generate(PROMPT, GREEDY)
    assert first.num_cached_tokens == 0 < again.num_cached_tokens
    long = SamplingParams(temperature=0, max_tokens=150, ignore_eos=True)
    with demo.stream("def f", long) as chunks:
        next(chunks)
        assert demo.reset_prefix_cache() is False
    assert demo.generate(PROMPT, GREEDY)[0].num_cached_tokens > 0
    assert demo.reset_prefix_cache() is True
    (anew,) = demo.generate(PROMPT, GREEDY)
    assert anew.num_cached_tokens == 0
    assert first.outputs == again.outputs == anew.outputs


def test_get_metrics(demo: LLM) -> None:
    demo.generate(PROMPT, GREEDY)
    found = {metric.name: metric for metric in demo.get_metrics()}
    stats = demo.stats()
    drafts = stats["speculative_decoding"]

    def count(name: str) -> int:
        metric = found[f"vllm:{name}"]
        assert isinstance(metric, Counter)
        return metric.value

    assert count("generation_tokens") == stats["num_output_tokens"] > 0
    whole = stats["num_prompt_tokens"] + stats["num_cached_tokens"]  # as vLLM counts prompts
    assert count("prompt_tokens") == whole
    assert count("prefix_cache_hits") == stats["prefix_cache"]["num_hit_tokens"]
    assert count("spec_decode_num_drafts") == drafts["num_spec_steps"] > 0
    assert count("spec_decode_num_draft_tokens") == drafts["num_draft_tokens"]
    assert count("spec_decode_num_accepted_tokens") == drafts["num_accepted_draft_tokens"] > 0
    by_position = found["vllm:spec_decode_num_accepted_tokens_per_pos"]
    assert isinstance(by_position, Vector) and len(by_position.values) == 3
    assert sum(by_position.values) == drafts["num_accepted_draft_tokens"]
    usage = found["vllm:kv_cache_usage_perc"]
    assert isinstance(usage, Gauge) and usage.value == stats["kv_cache_usage"]
    # The names are those of the server's metrics with --metrics-compat vllm.
    text = exposition(
        "m",
        [(None, demo._executor.stats())],
        demo.memory_report(),
        RequestFigures(),
        replicas=None,
        num_open=0,
        is_speculative=True,
        has_vllm_names=True,
    ).decode()
    assert [name for name in found if f"# TYPE {name}" not in text] == []


def test_metrics_without_a_drafter(target_dir: Path) -> None:
    with LLM(target_dir, max_num_seqs=1, max_model_len=32) as plain:
        metrics: list[Metric] = plain.get_metrics()
    assert metrics and not [metric for metric in metrics if "spec_decode" in metric.name]


# ---- tokenizers --------------------------------------------------------------------------------


@pytest.fixture
def other_tokenizer(tmp_path: Path) -> Path:
    """The demo's tokenizer with a chat template of its own, without a model."""
    target, _ = demo_paths("draft_model")
    shutil.copy(target / "tokenizer.json", tmp_path)
    settings = {"chat_template": "{{ messages[0].content }} # the other template"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    return tmp_path


def test_a_tokenizer_of_another_folder(other_tokenizer: Path, tmp_path: Path) -> None:
    target, draft = demo_paths("draft_model")
    bare = tmp_path / "bare"
    bare.mkdir()
    for name in ("config.json", "model.safetensors"):
        shutil.copy(target / name, bare)
    with LLM(target, max_model_len=128) as llm:
        (expected,) = llm.generate("class Stack:", GREEDY)
    config = {"model": str(draft), "num_speculative_tokens": 2}
    for tokenizer in (other_tokenizer, str(other_tokenizer / "tokenizer.json")):
        with LLM(bare, tokenizer=tokenizer, speculative_config=config, max_model_len=128) as llm:
            (output,) = llm.generate("class Stack:", GREEDY)
            assert output.outputs == expected.outputs and output.outputs[0].text
            (chat,) = llm.chat([{"role": "user", "content": "a = 1"}], GREEDY)
            assert chat.prompt == "a = 1 # the other template"
            assert llm.get_tokenizer().name_or_path == str(other_tokenizer)


def test_tokenizers_that_do_not_work(other_tokenizer: Path, target_dir: Path) -> None:
    target, draft = demo_paths("draft_model")
    wrong: Any
    for wrong, kind, parts in (
        (7, ValueError, ("tokenizer is 7 (int); allowed: a folder with tokenizer.json",)),
        (
            other_tokenizer / "none",
            ModelNotFoundError,
            (
                "tokenizer: ",
                "none/tokenizer.json does not exist; expected a folder with",
            ),
        ),
    ):
        with raises(kind, *parts):
            LLM(target, tokenizer=wrong)
    # A drafter has the ids of the target's own tokenizer.
    values = json.loads((other_tokenizer / "tokenizer.json").read_text())
    vocabulary = values["model"]["vocab"]
    first, second = list(vocabulary)[10:12]
    vocabulary[first], vocabulary[second] = vocabulary[second], vocabulary[first]
    (other_tokenizer / "tokenizer.json").write_text(json.dumps(values))
    config = {"model": str(draft), "num_speculative_tokens": 2}
    with raises(ValueError, "token"):
        LLM(target, tokenizer=other_tokenizer, speculative_config=config)
