# SPDX-License-Identifier: Apache-2.0
"""Drafters that change while requests run: outputs are those of plain decoding, none is lost, and
whatever is refused leaves the old drafter."""

from __future__ import annotations

import asyncio
import os
import resource
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import eagle_pair
from paceline import LLM, AsyncLLM, BusyError, SamplingParams
from paceline.loader import load_drafter
from time_limits import HANG_LIMIT_S
from tiny_models import TinySpec, load_tensors, make, perturbed_copy

SEED = int(os.environ.get("PACELINE_SEED", "20261128"))
ENGINE: dict[str, Any] = {
    "max_num_seqs": 6, "max_model_len": 160, "kv_cache_bytes": 16 << 20, "device": "cpu",
    "show_progress": False, "block_size": 4,
}  # fmt: skip
PROMPTS = [[3 + i, 14, 15, 92 - i, 6] * (1 + i % 3) for i in range(10)]
PARAMS = [
    SamplingParams(temperature=i % 2, seed=SEED + i, max_tokens=60, ignore_eos=True, n=1 + i % 2)
    for i in range(10)
]
FIXED = {"x": {"adaptive": False}}


def tokens(llm: LLM) -> list[list[list[int]]]:
    outputs = llm.generate(PROMPTS, PARAMS)
    assert all(output.finished and output.error is None for output in outputs)
    return [[one.token_ids for one in output.outputs] for output in outputs]


@pytest.fixture(scope="module")
def target() -> Path:
    return make(eagle_pair.TARGET)


@pytest.fixture(scope="module")
def expected(target: Path) -> list[list[list[int]]]:
    with LLM(target, **ENGINE) as plain:
        return tokens(plain)


@pytest.fixture
def configs(
    target: Path, tmp_path: Path, pair_of: Callable[[str], tuple[Path, Path]]
) -> dict[str, dict[str, Any] | None]:
    """Four drafters: a model, an EAGLE-3 head, prompt lookup and none."""
    draft = perturbed_copy(target, tmp_path / "small", noise=0.02)
    return {
        "draft_model": {"model": str(draft), "num_speculative_tokens": 3, **FIXED},
        "eagle3": {"model": str(pair_of("eagle3")[1]), "num_speculative_tokens": 4, **FIXED},
        "ngram": {"method": "ngram", "num_speculative_tokens": 5, **FIXED},
        "none": None,
    }


@pytest.fixture
def llm(target: Path, configs: dict[str, Any]) -> Iterator[LLM]:
    with LLM(target, speculative_config=configs["draft_model"], **ENGINE) as llm:
        yield llm
        if not llm._dispatcher.is_closed:
            assert llm._executor.check_integrity() == ""


class Load:
    """Requests that run, batch after batch, until the `with` block ends; each is compared."""

    def __init__(self, llm: LLM, expected: list[list[list[int]]]) -> None:
        self._llm, self._expected = llm, expected
        self._is_over = False
        self.num_batches = 0
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run)

    def _run(self) -> None:
        try:
            while not self._is_over or self.num_batches == 0:
                assert tokens(self._llm) == self._expected
                self.num_batches += 1
        except BaseException as error:
            self._error = error

    def __enter__(self) -> Load:
        self._thread.start()
        while self._llm.stats()["num_running"] == 0 and self._thread.is_alive():
            pass
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over = True
        self._thread.join(HANG_LIMIT_S)
        assert not self._thread.is_alive()
        if self._error is not None:
            raise self._error


def resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize()


def test_200_switches_between_four_drafters(
    llm: LLM, configs: dict[str, Any], expected: list[list[list[int]]]
) -> None:
    names = ["eagle3", "ngram", "none", "draft_model"]
    report = llm.memory_report()
    sizes: list[int] = []
    with Load(llm, expected) as load:
        for i in range(200):
            llm.set_drafter(configs[names[i % 4]], show_progress=False)
            sizes.append(resident_bytes())
    assert load.num_batches >= 2
    after = llm.memory_report()
    for one in (report, after):
        one.pop("kv_free_slabs")
        for group in one["groups"]:
            group.pop("held_blocks"), group.pop("quarantined_blocks")
    assert after == report
    assert llm.speculative_config is not None and llm.speculative_config.method == "draft_model"
    # Python and malloc keep some pages; a leak of one drafter's buffers in each switch would be
    # many times as much.
    per_switch = (max(sizes[150:]) - max(sizes[:50])) / 100
    assert per_switch < report["workspace_bytes"] / 8
    stats = llm.stats()
    assert stats["num_finished"] == load.num_batches * sum(param.n for param in PARAMS)
    assert stats["num_failed"] == stats["num_cancelled"] == 0


def test_the_new_drafter_drafts_and_is_reported(
    llm: LLM, configs: dict[str, Any], expected: list[list[list[int]]]
) -> None:
    for name, k in (("eagle3", 4), ("none", None), ("ngram", 5), ("draft_model", 3)):
        llm.set_drafter(configs[name], show_progress=False)
        outputs = llm.generate(PROMPTS, PARAMS)
        assert [[one.token_ids for one in output.outputs] for output in outputs] == expected
        found = [output.metrics.speculative_decoding for output in outputs]
        method = llm.capabilities()["configured"]["method"]
        groups = {group["owner"] for group in llm.stats()["kv_groups"]}
        if k is None:
            assert found == [None] * len(found) and method is None and groups == {"target"}
            assert llm.stats()["speculative_decoding"] is None
            continue
        assert method == name and {one["num_spec_tokens"] for one in found if one} == {k}
        assert all(one is not None and len(one["acceptance_per_position"]) == k for one in found)
        assert name == "ngram" or sum(one["num_draft_tokens"] for one in found if one) > 0
        assert ("draft" in groups) == (name != "ngram")
        own = SamplingParams(max_tokens=4, num_speculative_tokens=k)
        llm.generate([PROMPTS[0]], own)
        with pytest.raises(ValueError, match=f"allowed: 0 to {k}"):
            llm.generate([PROMPTS[0]], SamplingParams(num_speculative_tokens=k + 1))


def test_a_loaded_drafter_and_back(
    llm: LLM, configs: dict[str, Any], expected: list[list[list[int]]]
) -> None:
    head = load_drafter(configs["eagle3"]["model"], llm.target, progress=False)
    with Load(llm, expected):
        llm.set_drafter({"num_speculative_tokens": 2, **FIXED}, draft=head)
        assert llm.draft is head and llm.speculative_config is not None
        assert llm.speculative_config.method == "eagle3"
        llm.set_drafter('{"method": null}')
        assert llm.draft is None and llm.speculative_config is None


def test_what_is_refused_leaves_the_old_drafter(
    llm: LLM, configs: dict[str, Any], expected: list[list[list[int]]], tmp_path: Path
) -> None:
    other = make(TinySpec("llama", seed=9, vocab_size=96))
    other = Path(shutil.copytree(other, tmp_path / "other"))
    (other / "tokenizer.json").unlink()
    damaged = tmp_path / "damaged"
    shutil.copytree(configs["eagle3"]["model"], damaged)
    (damaged / "model.safetensors").write_bytes(b"\x08\0\0\0\0\0\0\0{}")
    k = {"num_speculative_tokens": 3}
    cases: list[tuple[Any, Any, str]] = [
        ({"model": str(other), **k}, ValueError, "draft 96"),
        ({"model": str(tmp_path / "missing"), **k}, Exception, "missing"),
        ({"model": str(damaged), **k}, Exception, "damaged"),
        ({"method": "ngram", "num_speculative_tokens": 17}, ValueError, "17"),
        (
            {**configs["eagle3"], "rejection_sample_method": "standard"},
            ValueError,
            '"coupled"',
        ),
        (
            {"method": "custom", **k, "drafter": lambda ids: []},
            NotImplementedError,
            "custom",
        ),
        ({"methd": "ngram"}, ValueError, "methd"),
    ]
    before, config, draft = llm.memory_report()["workspace"], llm.speculative_config, llm.draft
    with Load(llm, expected):
        for given, kind, text in cases:
            with pytest.raises(kind, match=text):
                llm.set_drafter(given, show_progress=False)
            assert llm.speculative_config is config and llm.draft is draft
    assert llm.memory_report()["workspace"] == before
    llm.set_drafter(configs["ngram"])


def test_two_switches_at_once(
    llm: LLM,
    configs: dict[str, Any],
    expected: list[list[list[int]]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    loading, goes_on = threading.Event(), threading.Event()

    def slow(*arguments: Any, **options: Any) -> Any:
        loading.set()
        assert goes_on.wait(HANG_LIMIT_S)
        return load_drafter(*arguments, **options)

    monkeypatch.setattr("paceline.drafter_changes.load_drafter", slow)
    with Load(llm, expected):
        first = threading.Thread(target=llm.set_drafter, args=(configs["eagle3"],))
        first.start()
        assert loading.wait(HANG_LIMIT_S)
        for change in (
            lambda: llm.set_drafter(None),
            lambda: llm.update_drafter({}),
            lambda: llm.update_weights({}),
        ):
            with pytest.raises(BusyError, match="another change of the drafter"):
                change()
        goes_on.set()
        first.join(HANG_LIMIT_S)
    assert llm.speculative_config is not None and llm.speculative_config.method == "eagle3"


def test_asyncio(llm: LLM, configs: dict[str, Any], expected: list[list[list[int]]]) -> None:
    async def all_of(allm: AsyncLLM) -> list[list[list[int]]]:
        async def one(i: int) -> list[list[int]]:
            async for output in allm.generate(PROMPTS[i], PARAMS[i]):
                last = output
            return [one.token_ids for one in last.outputs]

        tasks = [asyncio.create_task(one(i)) for i in range(len(PROMPTS))]
        for name in ("none", "eagle3", "ngram"):
            await allm.set_drafter(configs[name], show_progress=False)
        return list(await asyncio.gather(*tasks))

    allm = AsyncLLM.from_llm(llm)
    assert asyncio.run(all_of(allm)) == expected
    allm.close()


def test_closing_during_a_switch(
    llm: LLM, configs: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    failures: list[BaseException] = []

    def call(function: Callable[[], object]) -> None:
        try:
            while True:
                function()
        except RuntimeError as error:
            failures.append(error)

    names = ["none", "ngram"]
    threads = [
        threading.Thread(target=call, args=(lambda: llm.set_drafter(configs[names.pop(0)]),)),
        threading.Thread(target=call, args=(lambda: tokens(llm),)),
    ]
    names *= 1000
    for thread in threads:
        thread.start()
    while llm.stats()["num_running"] == 0:
        pass
    llm.close()
    for thread in threads:
        thread.join(HANG_LIMIT_S)
        assert not thread.is_alive()
    assert len(failures) == 2 and all("closed" in str(error) for error in failures)


def test_the_process_ends_during_a_switch(target: Path) -> None:
    code = f"""
import threading
from paceline import LLM, SamplingParams
llm = LLM({str(target)!r}, **{ENGINE!r})
ngram = {{"method": "ngram", "num_speculative_tokens": 3}}
def switch():
    while True:
        llm.set_drafter(ngram)
        llm.set_drafter(None)
threading.Thread(target=switch, daemon=True).start()
llm.generate([[1, 2, 3]] * 4, SamplingParams(max_tokens=50, ignore_eos=True))
print("done")
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=HANG_LIMIT_S
    )
    assert done.returncode == 0 and done.stdout == "done\n", done.stderr


# ---- new weights of the drafter ------------------------------------------------------------------


def test_new_weights_of_the_drafter_while_requests_run(
    llm: LLM, target: Path, configs: dict[str, Any], expected: list[list[list[int]]]
) -> None:
    old = load_tensors(Path(configs["draft_model"]["model"]))
    perfect = load_tensors(target)
    bad = {name: torch.randn_like(tensor) for name, tensor in old.items()}

    def rate() -> float:
        outputs = llm.generate(PROMPTS, PARAMS)
        assert [[one.token_ids for one in output.outputs] for output in outputs] == expected
        found = [output.metrics.speculative_decoding for output in outputs]
        drafted = sum(one["num_draft_tokens"] for one in found if one)
        return sum(one["num_accepted_draft_tokens"] for one in found if one) / drafted

    arena = llm.draft and llm.draft.model.arena()
    first = rate()
    assert 0 < first < 1
    with Load(llm, expected):
        for weights in (bad, perfect) * 10:
            llm.update_drafter(weights)
    # Nothing that ran with earlier weights is left: every draft is accepted.
    assert rate() == 1.0
    llm.update_drafter(old)
    assert rate() == first
    assert llm.draft is not None and llm.draft.model.arena() == arena


def test_after_new_weights_drafts_are_those_of_a_new_engine(
    target: Path, configs: dict[str, Any], expected: list[list[list[int]]]
) -> None:
    config = configs["eagle3"]
    old = load_tensors(Path(config["model"]))
    generator = torch.Generator().manual_seed(SEED)
    other = {
        name: tensor + 0.02 * torch.randn(tensor.shape, generator=generator)
        if tensor.is_floating_point()
        else tensor
        for name, tensor in old.items()
    }

    def figures(llm: LLM) -> list[Any]:
        outputs = llm.generate(PROMPTS, PARAMS)
        assert [[one.token_ids for one in output.outputs] for output in outputs] == expected
        return [output.metrics.speculative_decoding for output in outputs]

    with LLM(target, speculative_config=config, **ENGINE) as new:
        new.update_drafter(other)
        wanted = figures(new)
    with LLM(target, speculative_config=config, **ENGINE) as llm:
        assert figures(llm) != wanted
        for _ in range(3):
            with Load(llm, expected):
                for weights in (other, old) * 5 + (other,):
                    llm.update_drafter(weights)
            assert figures(llm) == wanted
        assert llm.stats()["prefix_cache"]["num_hit_tokens"] > 0


def test_refused_weights_change_nothing(llm: LLM, configs: dict[str, Any]) -> None:
    tensors = load_tensors(Path(configs["draft_model"]["model"]))
    assert llm.draft is not None
    arena = llm.draft.model.arena()
    name = next(iter(tensors))
    with pytest.raises(Exception, match="missing"):
        llm.update_drafter({key: value for key, value in tensors.items() if key != name})
    with pytest.raises(Exception, match="shape"):
        llm.update_drafter(tensors | {name: tensors[name][:-1]})
    assert llm.draft.model.arena() == arena
    llm.set_drafter(configs["ngram"])
    with pytest.raises(ValueError, match="no drafter with weights"):
        llm.update_drafter(tensors)
