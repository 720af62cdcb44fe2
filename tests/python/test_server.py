# SPDX-License-Identifier: Apache-2.0
"""The server gives what the engine gives: token for token, whole and streamed."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

import paceline
from paceline import LLM, RequestOutput, SamplingParams
from running_server import RunningServer, open_demo

PROMPT = "def read_lines(path):"
COMPLETIONS, CHATS = "/v1/completions", "/v1/chat/completions"
MESSAGES = [{"role": "user", "content": "class Stack:"}]
# Greek letters of two bytes each: many of their tokens are halves of a character.
HALVES = "αβγδ"


@pytest.fixture(scope="module")
def demo_llm() -> Iterator[LLM]:
    with open_demo(max_model_len=512) as llm:
        yield llm


@pytest.fixture(scope="module")
def server(demo_llm: LLM) -> Iterator[RunningServer]:
    with RunningServer(demo_llm) as server:
        yield server
        server.wait_until_idle()


def halves(llm: LLM) -> list[int]:
    return llm.get_tokenizer().encode(HALVES, add_special_tokens=False)


BODIES: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0, "max_tokens": 24},
    "sampled": {"seed": 5, "max_tokens": 24, "n": 3},
    "shaped": {
        "seed": 6,
        "max_tokens": 24,
        "top_k": 40,
        "top_p": 0.9,
        "min_p": 0.01,
        "presence_penalty": 0.5,
        "frequency_penalty": 0.25,
        "repetition_penalty": 1.1,
        "logit_bias": {"199": -5, "259": 2.5},
        "min_tokens": 3,
        "ignore_eos": True,
    },
    "stopped": {"temperature": 0, "max_tokens": 64, "stop": ["\n\n", "return"]},
    "stopped, kept": {
        "seed": 2,
        "n": 2,
        "max_tokens": 64,
        "stop": "\n",
        "include_stop_str_in_output": True,
    },
    "stop token": {"temperature": 0, "max_tokens": 64, "stop_token_ids": [199]},
    "logprobs": {"seed": 1, "max_tokens": 12, "logprobs": 2},
    "halves": {"seed": 3, "max_tokens": 40, "temperature": 1.5},
}


def body_of(name: str, llm: LLM) -> dict[str, Any]:
    extra = {"allowed_token_ids": halves(llm)} if name == "halves" else {}
    return BODIES[name] | extra


def params_of(body: dict[str, Any]) -> SamplingParams:
    biases = {int(token): bias for token, bias in body.get("logit_bias", {}).items()}
    return SamplingParams(**body | {"logit_bias": biases})


def same_choices(answer: dict[str, Any], output: RequestOutput) -> None:
    assert len(answer["choices"]) == len(output.outputs)
    for choice, one in zip(answer["choices"], output.outputs, strict=True):
        assert choice["index"] == one.index
        assert choice["text"] == one.text
        assert choice["token_ids"] == one.token_ids
        assert choice["finish_reason"] == one.finish_reason
        assert choice["stop_reason"] == one.stop_reason


@pytest.mark.parametrize("name", BODIES)
def test_completions_are_those_of_the_engine(
    name: str, server: RunningServer, demo_llm: LLM
) -> None:
    body = body_of(name, demo_llm)
    (output,) = demo_llm.generate(PROMPT, params_of(body), use_tqdm=False)
    sent = body | {"prompt": PROMPT, "return_token_ids": True}
    answer = server.result(COMPLETIONS, sent)
    same_choices(answer, output)
    assert answer["prompt_token_ids"] == output.prompt_token_ids
    num_output = sum(len(one.token_ids) for one in output.outputs)
    assert answer["usage"] == {
        "prompt_tokens": len(output.prompt_token_ids),
        "completion_tokens": num_output,
        "total_tokens": len(output.prompt_token_ids) + num_output,
        "prompt_tokens_details": {"cached_tokens": output.num_cached_tokens},
    }
    counted = answer["metrics"]["speculative_decoding"]
    assert counted["num_spec_tokens"] == 4
    assert len(counted["acceptance_histogram"]) == 5
    assert sum(counted["acceptance_histogram"]) == counted["num_spec_steps"]

    # A stream has one chunk for each iteration and output, and they add up to the same.
    pieces = {one.index: [] for one in output.outputs}
    for event in server.events(COMPLETIONS, sent):
        (choice,) = event["choices"]
        pieces[choice["index"]].append(choice)
    for one, whole in zip(output.outputs, answer["choices"], strict=True):
        parts = pieces[one.index]
        assert "".join(part["text"] for part in parts) == one.text
        assert [token for part in parts for token in part["token_ids"]] == one.token_ids
        assert [part["finish_reason"] for part in parts[:-1]] == [None] * (len(parts) - 1)
        assert parts[-1]["finish_reason"] == one.finish_reason
        assert parts[-1]["stop_reason"] == one.stop_reason
        assert all(len(part["token_ids"]) <= 5 for part in parts)
        if body.get("logprobs") is not None:
            for key in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
                joined = [item for part in parts for item in part["logprobs"][key]]
                assert joined == whole["logprobs"][key]
            starts = whole["logprobs"]["text_offset"] + [len(one.text)]
            texts = [one.text[a:b] for a, b in itertools.pairwise(starts)]
            assert texts == whole["logprobs"]["tokens"]
            best = [dict(position) for position in one.logprobs or []]
            assert whole["logprobs"]["token_logprobs"] == [
                position[token].logprob for position, token in zip(best, one.token_ids, strict=True)
            ]


def test_logprobs_of_the_prompt(server: RunningServer, demo_llm: LLM) -> None:
    """As evaluations ask for them: the prompt echoed, with logprobs; or in vLLM's own field."""
    params = SamplingParams(temperature=0, max_tokens=1, logprobs=1, prompt_logprobs=1)
    (output,) = demo_llm.generate(PROMPT, params, use_tqdm=False)
    assert output.prompt_logprobs is not None
    known = [
        position[token].logprob
        for token, position in zip(
            output.prompt_token_ids[1:], output.prompt_logprobs[1:], strict=True
        )
        if position is not None
    ]
    (one,) = output.outputs
    assert one.logprobs is not None
    for prompt in (PROMPT, output.prompt_token_ids):
        body = {"prompt": prompt, "temperature": 0, "max_tokens": 1, "logprobs": 1, "echo": True}
        (choice,) = server.result(COMPLETIONS, body)["choices"]
        text = PROMPT + one.text
        assert choice["text"] == text
        logprobs = choice["logprobs"]
        last = one.logprobs[0][one.token_ids[0]].logprob
        assert logprobs["token_logprobs"] == [None, *known, last]
        assert logprobs["top_logprobs"][0] is None
        starts = [*logprobs["text_offset"], len(text)]
        assert [text[a:b] for a, b in itertools.pairwise(starts)] == logprobs["tokens"]

    body = {"prompt": PROMPT, "temperature": 0, "max_tokens": 1, "prompt_logprobs": 1}
    (choice,) = server.result(COMPLETIONS, body)["choices"]
    expected = [
        None
        if position is None
        else {str(token): dataclasses.asdict(entry) for token, entry in position.items()}
        for position in output.prompt_logprobs
    ]
    assert choice["prompt_logprobs"] == expected and choice["text"] == one.text
    chat = server.result(CHATS, {"messages": MESSAGES, "prompt_logprobs": 0, "max_tokens": 1})
    assert len(chat["prompt_logprobs"]) == chat["usage"]["prompt_tokens"]
    assert chat["prompt_logprobs"][0] is None


def test_a_character_is_never_split(server: RunningServer, demo_llm: LLM) -> None:
    body = body_of("halves", demo_llm) | {"prompt": "a", "return_token_ids": True}
    events = server.events(COMPLETIONS, body)
    texts = [event["choices"][0]["text"] for event in events]
    # Some chunks have tokens and no text yet: their bytes are halves of characters.
    assert any(
        not text and event["choices"][0]["token_ids"]
        for text, event in zip(texts, events, strict=True)
    )
    ids = [token for event in events for token in event["choices"][0]["token_ids"]]
    whole = demo_llm.get_tokenizer().decode(ids)
    assert "".join(texts) == whole
    assert set(whole) & set(HALVES)


def test_a_chunk_is_an_iteration(server: RunningServer, demo_llm: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=40)
    expected = [chunk.token_ids for chunk in demo_llm.stream(PROMPT, params)]
    events = server.events(
        COMPLETIONS,
        {"prompt": PROMPT, "temperature": 0, "max_tokens": 40, "return_token_ids": True},
    )
    assert [event["choices"][0]["token_ids"] for event in events] == expected
    assert max(map(len, expected)) > 1


@pytest.mark.parametrize("streams", [False, True])
def test_several_prompts_of_text_or_tokens(
    streams: bool, server: RunningServer, demo_llm: LLM
) -> None:
    texts = [PROMPT, "import ", "class A"]
    params = SamplingParams(seed=9, max_tokens=10, n=2)
    outputs = [one for o in demo_llm.generate(texts, params, use_tqdm=False) for one in o.outputs]
    ids = [demo_llm.get_tokenizer().encode(text) for text in texts]
    for prompt in (texts, ids):
        body = {"prompt": prompt, "seed": 9, "max_tokens": 10, "n": 2}
        if streams:
            found = dict.fromkeys(range(6), "")
            for event in server.events(COMPLETIONS, body):
                found[event["choices"][0]["index"]] += event["choices"][0]["text"]
            assert list(found.values()) == [one.text for one in outputs]
        else:
            answer = server.result(COMPLETIONS, body)
            assert [choice["text"] for choice in answer["choices"]] == [o.text for o in outputs]
            assert [choice["index"] for choice in answer["choices"]] == list(range(6))
            assert answer["metrics"] is None
    assert (
        server.result(COMPLETIONS, {"prompt": ids[0], "seed": 9, "max_tokens": 10})["choices"][0][
            "text"
        ]
        == outputs[0].text
    )


def test_chats_are_those_of_the_engine(server: RunningServer, demo_llm: LLM) -> None:
    params = SamplingParams(seed=4, max_tokens=20, n=2, logprobs=1)
    (output,) = demo_llm.chat(MESSAGES, params, use_tqdm=False)
    body = {
        "messages": MESSAGES,
        "seed": 4,
        "max_completion_tokens": 20,
        "n": 2,
        "logprobs": True,
        "top_logprobs": 1,
        "return_token_ids": True,
    }
    answer = server.result(CHATS, body)
    assert answer["object"] == "chat.completion" and answer["id"].startswith("chatcmpl-")
    assert answer["prompt_token_ids"] == output.prompt_token_ids
    for choice, one in zip(answer["choices"], output.outputs, strict=True):
        assert choice["message"] == {"role": "assistant", "content": one.text}
        assert choice["token_ids"] == one.token_ids
        entries = choice["logprobs"]["content"]
        assert "".join(entry["token"] for entry in entries) == one.text
        assert [entry["bytes"] for entry in entries] == [list(e["token"].encode()) for e in entries]
        assert all(len(entry["top_logprobs"]) == 1 for entry in entries)
        assert all(e["top_logprobs"][0]["logprob"] >= e["logprob"] for e in entries)

    body["stream_options"] = {"include_usage": True, "continuous_usage_stats": True}
    *events, end = server.events(CHATS, body)
    assert end["choices"] == [] and end["usage"] == answer["usage"]
    assert end["metrics"]["speculative_decoding"]["num_spec_steps"] > 0
    counts = [event["usage"]["completion_tokens"] for event in events]
    assert counts == sorted(counts) and counts[-1] == answer["usage"]["completion_tokens"]
    for choice in answer["choices"]:
        parts = [e["choices"][0] for e in events if e["choices"][0]["index"] == choice["index"]]
        assert [part["delta"].get("role") for part in parts] == ["assistant"] + [None] * (
            len(parts) - 1
        )
        assert "".join(p["delta"]["content"] for p in parts) == choice["message"]["content"]
        joined = [entry for part in parts for entry in part["logprobs"]["content"]]
        assert joined == choice["logprobs"]["content"]


@pytest.mark.parametrize("path", [COMPLETIONS, CHATS, "/v1/responses"])
def test_a_request_may_have_fewer_drafts(path: str, server: RunningServer) -> None:
    body: dict[str, Any] = {
        COMPLETIONS: {"prompt": PROMPT, "max_tokens": 24},
        CHATS: {"messages": MESSAGES, "max_tokens": 24},
        "/v1/responses": {"input": "class Stack:", "max_output_tokens": 24},
    }[path] | {"temperature": 1.0, "seed": 3}

    def text_and_drafts(**given: Any) -> tuple[Any, Any]:
        answer = server.result(path, body | given)
        counted = answer["metrics"]["speculative_decoding"]
        if path == "/v1/responses":
            text = answer["output"][0]["content"][0]["text"]
        else:
            text = {key: answer["choices"][0].get(key) for key in ("text", "message")}
        return text, counted and (counted["num_spec_tokens"], counted["num_draft_tokens"])

    text, counted = text_and_drafts()
    assert counted[0] == 4 and counted[1] > 0
    for given in ({"enabled": False, "num_speculative_tokens": 3}, {"num_speculative_tokens": 0}):
        assert text_and_drafts(speculative=given) == (text, None)
    for k in (1, 3):
        same, (own, num_drafted) = text_and_drafts(speculative={"num_speculative_tokens": k})
        assert same == text and own == k and 0 < num_drafted <= k * 24
    for given in ({"enabled": True}, {"method": "draft_model"}):
        assert text_and_drafts(speculative=given) == (text, counted)
    for given, message in (
        ({"num_speculative_tokens": 5}, "num_speculative_tokens is 5; allowed: 0 to 4"),
        (
            {"num_speculative_tokens": "2"},
            "num_speculative_tokens is '2' (str); allowed: an integer",
        ),
        ({"enabled": 1}, "enabled is 1; allowed: true or false"),
        ({"k": 1}, "unknown field 'k'; allowed: enabled, method, num_speculative_tokens"),
        ({"method": "magic"}, "method is 'magic'; allowed: one of 'draft_model', 'eagle',"),
        ({"method": ["ngram"]}, "method is ['ngram']; allowed: one of 'draft_model',"),
        (
            {"method": "ngram"},
            "speculative_method is 'ngram', which is not a method of this LLM; allowed: "
            "'draft_model', or None for all",
        ),
        (False, "speculative is False; allowed: an object"),
    ):
        status, answer = server.ask(path, body | {"speculative": given})
        assert status == 400 and answer["error"]["param"] == "speculative"
        said = answer["error"]["message"].removeprefix("speculative: ")
        assert said.startswith(message), answer


@pytest.mark.parametrize("path", [COMPLETIONS, CHATS])
def test_how_each_token_came(path: str, server: RunningServer, demo_llm: LLM) -> None:
    body = {
        COMPLETIONS: {"prompt": PROMPT},
        CHATS: {"messages": MESSAGES},
    }[path] | {"seed": 3, "max_tokens": 40, "return_token_sources": True, "return_token_ids": True}
    (whole,) = server.result(path, body)["choices"]
    events = server.events(path, body)
    for key in ("token_ids", "token_sources", "text_offsets"):
        joined = [one for event in events for one in event["choices"][0][key]]
        assert joined == whole[key] and len(joined) == 40
    assert {"accepted", "corrected", "bonus"} <= set(whole["token_sources"])
    text = whole["text"] if path == COMPLETIONS else whole["message"]["content"]
    decode = demo_llm.get_tokenizer().decode
    ends = [*whole["text_offsets"][1:], len(text)]
    pieces = zip(whole["token_ids"], whole["text_offsets"], ends, strict=True)
    assert all(decode([token]) == text[start:end] for token, start, end in pieces)
    status, answer = server.ask(path, body | {"return_token_sources": 1})
    assert status == 400 and answer["error"]["param"] == "return_token_sources"


def test_a_final_message_is_continued(server: RunningServer, demo_llm: LLM) -> None:
    messages = [*MESSAGES, {"role": "assistant", "content": "    def push"}]
    (output,) = demo_llm.chat(
        messages,
        SamplingParams(temperature=0, max_tokens=8),
        add_generation_prompt=False,
        continue_final_message=True,
        use_tqdm=False,
    )
    body = {"messages": messages, "temperature": 0, "max_tokens": 8, "continue_final_message": True}
    answer = server.result(CHATS, body)
    assert answer["choices"][0]["message"]["content"] == output.outputs[0].text


def test_a_chat_without_max_tokens_goes_on_to_the_model_length(server: RunningServer) -> None:
    answer = server.result(CHATS, {"messages": MESSAGES, "temperature": 0, "ignore_eos": True})
    assert answer["usage"]["total_tokens"] == 512
    assert answer["choices"][0]["finish_reason"] == "length"


def test_many_clients_at_once_get_what_one_gets(server: RunningServer, demo_llm: LLM) -> None:
    prompts = [f"def f{i}(x):" for i in range(12)]
    params = [SamplingParams(seed=i, max_tokens=8 + i) for i in range(12)]
    outputs = demo_llm.generate(prompts, params, use_tqdm=False)

    def ask(i: int) -> str:
        body = {"prompt": prompts[i], "seed": i, "max_tokens": 8 + i}
        if i % 2:
            return "".join(e["choices"][0]["text"] for e in server.events(COMPLETIONS, body))
        return str(server.result(COMPLETIONS, body)["choices"][0]["text"])

    with ThreadPoolExecutor(12) as pool:
        assert list(pool.map(ask, range(12))) == [o.outputs[0].text for o in outputs]


def test_facts(server: RunningServer, demo_llm: LLM) -> None:
    assert server.result("/health") is None and server.result("/ping") is None
    assert server.result("/version") == {"version": paceline.__version__}
    cards = server.result("/v1/models")["data"]
    assert [card["id"] for card in cards] == ["served", "alias"]
    assert all(card["max_model_len"] == 512 for card in cards)
    assert server.result("/v1/models/alias") == cards[1]
    assert server.ask("/v1/models/other")[0] == 404
    facts = server.result("/v1/capabilities")
    assert facts["configured"] == demo_llm.capabilities()["configured"]
    assert "top_k" in facts["server"]["fields"][COMPLETIONS]


def test_tokens(server: RunningServer, demo_llm: LLM) -> None:
    tokenizer = demo_llm.get_tokenizer()
    answer = server.result("/tokenize", {"prompt": PROMPT, "return_token_strs": True})
    assert answer["tokens"] == tokenizer.encode(PROMPT)
    assert answer["token_strs"] == tokenizer.convert_ids_to_tokens(answer["tokens"])
    assert answer["count"] == len(answer["tokens"]) and answer["max_model_len"] == 512
    assert server.result("/detokenize", {"tokens": answer["tokens"]}) == {
        "prompt": tokenizer.decode(answer["tokens"])
    }
    chat = server.result("/tokenize", {"messages": MESSAGES, "model": "alias"})
    (output,) = demo_llm.chat(MESSAGES, SamplingParams(max_tokens=1), use_tqdm=False)
    assert chat["tokens"] == output.prompt_token_ids


def test_parameters_of_the_checkpoint_hold_unless_given(
    server: RunningServer, demo_llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    default = dataclasses.replace(demo_llm.get_default_sampling_params(), top_k=1)
    monkeypatch.setattr(server.service, "completion_params", default)
    (greedy,) = demo_llm.generate(PROMPT, SamplingParams(temperature=0), use_tqdm=False)
    answer = server.result(COMPLETIONS, {"prompt": PROMPT})
    assert answer["choices"][0]["text"] == greedy.outputs[0].text
