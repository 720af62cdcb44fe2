# SPDX-License-Identifier: Apache-2.0
"""What a server knows of its replicas' requests, and which replica it chooses; no processes."""

from __future__ import annotations

from typing import Any

import pytest

from paceline.limits import MAX_SEED
from paceline.replicas import placement
from paceline.replicas.ledger import MAX_RUNS, Ledger, Run
from paceline.replicas.messages import EngineEvent, EngineRequest
from paceline.replicas.prefixes import PrefixRouter, block_keys
from paceline.replicas.remote import summed, total_stats

BLOCK = 4


def opened(**sampling: Any) -> tuple[Ledger, Run]:
    ledger = Ledger()
    ledger.num_speculative_tokens = 2
    return ledger, ledger.add(
        EngineRequest([7, 8], **{"seed": MAX_SEED, "max_tokens": 9} | sampling)
    )


def emit(ledger: Ledger, run: Run, sample: int, *tokens: int, **more: Any) -> EngineEvent | None:
    return ledger.take(EngineEvent(run.id, sample, token_ids=list(tokens), **more))


def test_samples_that_have_begun_go_on_one_by_one() -> None:
    ledger, run = opened(num_samples=3, prompt_logprobs=1)
    emit(ledger, run, 0, 20, 21, num_drafted=2, num_accepted=1)
    emit(ledger, run, 2, 30)
    events, runs = ledger.lose([run.id])
    assert events == []
    assert [one.prompt for one in runs] == [[7, 8, 20, 21], [7, 8], [7, 8, 30]]
    rest = {"max_tokens": 9}
    assert [one.sampling for one in runs] == [
        rest | {"seed": MAX_SEED, "num_resumed_tokens": 2},
        rest | {"seed": 0},  # sample i has seed + i modulo 2**64
        rest | {"seed": 1, "num_resumed_tokens": 1},
    ]
    assert (ledger.num_resumed, ledger.num_retried) == (2, 1)
    # The old replica's last words count no more.
    assert emit(ledger, run, 0, 22) is None
    counters = {
        "num_iterations": 1,
        "num_draft_tokens": 2,
        "num_accepted_tokens": 0,
        "num_discarded_tokens": 1,
        "accepted_per_position": [0, 0],
        "drafted_per_position": [1, 1],
    }
    last = emit(ledger, runs[0], 0, 22, finish_reason="stop", counters=counters)
    assert last is not None
    assert (last.id, last.sample, last.token_ids) == (run.request.id, 0, [22])
    assert last.counters == {
        "num_iterations": 2,
        "num_draft_tokens": 4,
        "num_accepted_tokens": 1,
        "num_discarded_tokens": 1,
        "accepted_per_position": [1, 0],
        "drafted_per_position": [2, 2],
    }
    assert last.arrival_us <= last.first_token_us <= last.finish_us


def test_counters_are_as_long_as_the_windows_of_the_request() -> None:
    ledger, run = opened(num_speculative_tokens=1)
    emit(ledger, run, 0, 20, num_drafted=1, num_accepted=1)
    _, (rest,) = ledger.lose([run.id])
    assert rest.sampling["num_speculative_tokens"] == 1
    ledger.cancel(run.request.id, None)
    (event,) = ledger.end_cancelled(rest)
    assert event.counters["accepted_per_position"] == [1]


def test_what_cannot_be_sent_is_refused_by_name() -> None:
    with pytest.raises(NotImplementedError, match="constraints cannot be sent to a replica"):
        EngineRequest([1], constraints=[lambda: None])


def test_samples_without_tokens_begin_again_together() -> None:
    ledger, run = opened(num_samples=2, prompt_logprobs=1)
    (again,) = ledger.lose([run.id])[1]
    assert (again.prompt, again.sampling) == (run.prompt, run.sampling)
    assert (ledger.num_resumed, ledger.num_retried) == (0, 2)


def test_a_request_that_ends_replicas_is_given_up() -> None:
    ledger, run = opened()
    emit(ledger, run, 0, 20)
    for _ in range(MAX_RUNS - 1):
        events, (run,) = ledger.lose([run.id])
        assert events == []
    (event,), runs = ledger.lose([run.id])
    assert runs == []
    assert event.finish_reason == "error"
    assert f"have ended {MAX_RUNS} times" in event.error
    assert ledger.run(run.id) is None and not ledger._requests


def test_cancelled_samples_do_not_go_on() -> None:
    ledger, run = opened(num_samples=2)
    assert ledger.cancel(run.request.id, 1) == [(run, 1)]
    (event,), (rest,) = ledger.lose([run.id])
    assert (event.sample, event.finish_reason) == (1, "cancelled")
    assert [sample.index for sample in rest.samples] == [0]
    ledger.cancel(run.request.id, None)
    (event,) = ledger.end_cancelled(rest)
    assert (event.sample, event.finish_reason) == (0, "cancelled")
    assert not ledger._requests and ledger.run(rest.id) is None


def test_samples_that_ended_before_their_run_began_stay_ended() -> None:
    ledger, run = opened(num_samples=2)
    ledger.cancel(run.request.id, 1)
    assert len(ledger.end_cancelled(run)) == 1
    assert emit(ledger, run, 1, 20) is None  # a replica has begun with all samples
    event = emit(ledger, run, 0, 20)
    assert event is not None and event.sample == 0


def test_a_refused_run_ends_with_its_message() -> None:
    ledger, run = opened(num_samples=2)
    events = ledger.refuse(run.id, "too long")
    assert [(one.sample, one.error) for one in events] == [(0, "too long"), (1, "too long")]
    assert not any(one.is_refused for one in events)
    assert ledger.refuse(run.id, "again") == []


def keys(*tokens: int) -> list[int]:
    return block_keys(tokens, BLOCK)


def router() -> PrefixRouter:
    return PrefixRouter(block_size=BLOCK, max_blocks=6, max_num_seqs=8)


def test_blocks_are_named_by_all_tokens_before() -> None:
    first, second = keys(1, 2, 3, 4, 5, 6, 7, 8)
    assert keys(1, 2, 3, 4, 5, 6, 7, 9)[0] == first
    assert keys(1, 2, 3, 4, 5, 6, 7, 9)[1] != second
    assert second not in keys(9, 2, 3, 4, 5, 6, 7, 8)
    assert keys(1, 2, 3) == []
    salted = block_keys((1, 2, 3, 4, 5, 6, 7, 8), BLOCK, "a")
    assert len({first, second, *salted, *block_keys((1, 2, 3, 4), BLOCK, "b")}) == 5


def test_requests_follow_their_prefix_while_the_load_allows_it() -> None:
    chooser = router()
    prompt = keys(*range(8))
    idle = {0: 0, 1: 0}
    first = chooser.choose(prompt, idle)
    other = 1 - int(str(first))
    assert chooser.choose(keys(*range(8), 50, 51, 52, 53), idle) == first
    assert chooser.choose(keys(*range(60, 68)), idle) == other  # which was not chosen for longest
    assert chooser.choose(prompt, {first: 2, other: 0}) == first
    assert chooser.choose(prompt, {first: 3, other: 0}) == other  # more than the slack
    assert chooser.choose(keys(), {first: 1, other: 0}) == other
    chooser.forget(first)
    assert chooser.num_known(first, prompt) == 0


def test_the_blocks_used_least_recently_are_forgotten_from_their_end() -> None:
    chooser = router()
    chooser.note(0, keys(*range(16)))
    chooser.note(0, keys(*range(100, 116)))
    assert chooser.num_known(0, keys(*range(100, 116))) == 4
    assert chooser.num_known(0, keys(*range(16))) == 2


def test_choices_of_the_number_of_drafts_are_not_summed() -> None:
    choice = {"is_adaptive": True, "num_drafts": 1, "expected_acceptance": [0.9]}
    drafts = [{"num_drafts": 1, "num_iterations": 5}]
    engines = [
        {"num_iterations": n, "costs": [{"us": 7.0}] * n, "drafts": drafts, **choice}
        for n in (1, 2)
    ]
    assert total_stats(engines) == {"num_iterations": 3, "is_adaptive": False}


def test_statistics_are_summed() -> None:
    one = {"a": 1, "b": [1, 2], "c": [{"d": 3}]}
    assert summed([one, one]) == {"a": 2, "b": [2, 4], "c": [{"d": 6}]}


def test_replicas_divide_the_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(8)))
    arguments, environments = placement.place(3, {"device": "cpu", "show_progress": True}, {})
    assert [one["num_threads"] for one in arguments] == [2, 2, 2]
    assert [one["show_progress"] for one in arguments] == [True, False, False]
    assert environments == [{}, {}, {}]
    (own, _), _ = placement.place(2, {"device": "cpu", "num_threads": 5}, {})
    assert own["num_threads"] == 5


def test_each_replica_has_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paceline._core.build_info", lambda: {"has_cuda": True})
    visible = {"CUDA_VISIBLE_DEVICES": "3, GPU-4a,7"}
    arguments, environments = placement.place(2, {"device": "auto"}, visible)
    assert [one["CUDA_VISIBLE_DEVICES"] for one in environments] == ["3", "GPU-4a"]
    assert all("num_threads" not in one for one in arguments)
    with pytest.raises(
        ValueError, match=r"--replicas is 4; allowed: 1 to 3, since this machine has 3"
    ):
        placement.place(4, {"device": "cuda"}, visible)
    two = {"device": "cuda", "tensor_parallel_size": 2}
    with pytest.raises(ValueError, match=r"--replicas is 2; allowed: 1 to 1 for replicas of 2 GPU"):
        placement.place(2, two, visible)
    four = {"CUDA_VISIBLE_DEVICES": "3,GPU-4a,7,8"}
    _, environments = placement.place(2, two, four)
    assert [one["CUDA_VISIBLE_DEVICES"] for one in environments] == ["3,GPU-4a", "7,8"]
    with pytest.raises(ValueError, match=r"--devices is \[0, 1\] and --replicas is 2; .* leave it"):
        placement.place(2, two | {"devices": [0, 1]}, four)
    assert placement.place(4, {"device": "cpu"}, visible)[1] == [{}] * 4
