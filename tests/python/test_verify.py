# SPDX-License-Identifier: Apache-2.0
"""Receipts from outside: what is refused, what an edit shows, and `paceline verify`."""

from __future__ import annotations

import copy
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from errors import raises
from paceline import LLM, cli
from paceline.console import EXIT_DIFFERENT, EXIT_OK, EXIT_UNVERIFIED, EXIT_USAGE
from paceline.receipts.receipt import Receipt, ReceiptError, chain_of, read_receipts, shown
from paceline.receipts.replay import Inputs
from receipt_jobs import PARAMS, PROMPT, receipt_of, target_dir, verdict_of

pytestmark = pytest.mark.usefixtures("digest_cache")


def edited(receipt: Receipt, *path: str, value: Any = ...) -> Receipt:
    """A copy with another value at a path of keys; `...` removes it."""
    made = copy.deepcopy(receipt)
    inner = made
    for key in path[:-1]:
        inner = inner[key]
    if value is ...:
        del inner[path[-1]]
    else:
        inner[path[-1]] = value
    return made


def nested(depth: int) -> list[Any]:
    """Lists in lists."""
    made: list[Any] = []
    for _ in range(depth):
        made = [made]
    return made


BAD: dict[str, tuple[tuple[str, ...], Any, str]] = {
    "another version": (("paceline_receipt",), 2, "is 2; this version of Paceline reads 1"),
    "no version": (("paceline_receipt",), True, "is True; this version"),
    "unknown key": (("seeds",), "1", "no key 'seeds'; did you mean seed?"),
    "cut off": (("tokens",), ..., "tokens is missing; the receipt was cut off"),
    "no tokens": (("tokens",), "5,6", "tokens is '5,6'"),
    "negative token": (("tokens",), [-1], "tokens is [-1]"),
    "float token": (("tokens",), [1.5], "tokens is [1.5]"),
    "reason": (("finish_reason",), "error", "finish_reason is 'error'"),
    "chain": (("chain", "last"), "0" * 63, "chain is"),
    "seed": (("seed",), 7, "seed is 7"),
    "large seed": (("seed",), str(2**64), "seed is '18446744073709551616'"),
    "weights": (("model", "weights"), "sha1:0", "weights is 'sha1:0'; allowed: a digest after"),
    "dtype": (("model", "dtype"), "float8", "dtype is 'float8'"),
    "model": (("model",), [], "model is []; allowed: an object with 'weights'"),
    "digest": (("digests", "prompt"), None, "digests is"),
    "no prompt": (("digests", "prompt"), ..., "digests is"),
    "sampling": (("sampling", "beam_width"), 4, "sampling is"),
    "max_tokens": (("sampling", "max_tokens"), 0, "max_tokens is 0"),
    "temperature": (("sampling", "temperature"), -1, "temperature is -1"),
    "not a number": (
        ("sampling", "temperature"),
        float("nan"),
        "is infinite or none",
    ),
    "depth": (("sampling", "top_k"), nested(700), "nested too deeply"),
    "stop tokens": (("sampling", "stop_token_ids"), [0] * 9, "stop_token_ids has 9"),
    "length": (("max_model_len",), 0, "max_model_len is 0"),
    "runtime": (("runtime",), "x" * 256, "runtime is"),
    "prompt": (("inputs", "prompt"), [], "prompt of inputs is []"),
    "input": (("inputs", "text"), "a", "inputs is"),
    "token beyond": (("inputs", "prompt"), [10**6], "1000000"),
    "too long": (("inputs", "prompt"), [5] * 5000, "max_model_len"),
    "another config": (
        ("model", "config"),
        "0" * 64,
        "another model: its digest of the configuration",
    ),
    "tokenizer": (("model", "tokenizer"), None, "another model: its digest of the tokenizer"),
    "another dtype": (("model", "dtype"), "bfloat16", "give --dtype bfloat16"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_receipts_are_refused_with_one_error(receipt_llm: LLM, name: str) -> None:
    path, value, expected = BAD[name]
    verdict = verdict_of(receipt_llm, edited(receipt_of(receipt_llm), *path, value=value))
    assert verdict.verdict == "refused"
    assert expected in str(verdict.error) and "\n" not in str(verdict)


def test_edits_of_inputs_and_digests_show(receipt_llm: LLM) -> None:
    receipt = receipt_of(receipt_llm)
    verdict = verdict_of(receipt_llm, edited(receipt, "inputs", "prompt", value=[5, 6, 7, 9]))
    assert (verdict.verdict, verdict.edited) == ("different", "inputs")
    verdict = verdict_of(receipt_llm, edited(receipt, "device", value="cpu none"))
    assert (verdict.verdict, verdict.edited) == ("edited", "header")
    assert "device class (cpu none" in verdict.notes[0]
    # A receipt of another device is replayed with a note.
    other = edited(receipt, "device", value="cuda sm_90")
    other["chain"] = chain_of(other)
    verdict = verdict_of(receipt_llm, other)
    assert verdict.verdict == "equal" and "cuda sm_90" in str(verdict)
    assert (
        verdict_of(receipt_llm, edited(other, "chain", value=receipt["chain"])).edited == "header"
    )
    # What ended the output is in the chain, and in the replay.
    other = edited(receipt, "finish_reason", value="stop")
    verdict = verdict_of(receipt_llm, other)
    assert (verdict.position, verdict.edited) == (12, "tokens")
    assert "ends there for another reason" in str(verdict)


def test_the_margin_is_that_of_the_logits(receipt_llm: LLM) -> None:
    receipt = receipt_of(receipt_llm)
    tokens = receipt["tokens"]
    other = edited(receipt, "tokens", value=[*tokens[:3], tokens[3] ^ 1, *tokens[4:]])
    logits = receipt_llm.logits([*PROMPT, *tokens[:3]])[-1]
    verdict = verdict_of(receipt_llm, other)
    assert (verdict.position, verdict.receipt_token, verdict.replay_token) == (
        3,
        tokens[3] ^ 1,
        tokens[3],
    )
    assert verdict.margin == pytest.approx(logits[tokens[3]] - logits[tokens[3] ^ 1], abs=1e-4)
    other["tokens"][3] = 10**6
    verdict = verdict_of(receipt_llm, other)
    assert verdict.position == 3 and verdict.margin is None


def test_inputs_are_found_by_digest(receipt_llm: LLM) -> None:
    params = replace(PARAMS, receipt=True, bad_words=[[9], [8, 7]], allowed_token_ids=range(4, 200))
    receipt = receipt_of(receipt_llm, params)
    whole = receipt_of(receipt_llm, replace(params, receipt="with_text"))
    verdict = verdict_of(receipt_llm, receipt)
    assert verdict.verdict == "refused"
    assert "prompt, bad_words, allowed_token_ids are not given" in str(verdict.error)
    inputs = Inputs([{"prompt": PROMPT}, {"bad_words": [[9], [8, 7]]}])
    assert "allowed_token_ids is not given" in str(
        verdict_of(receipt_llm, receipt, inputs=inputs).error
    )
    # Those of another request do not pass for missing ones.
    inputs = Inputs([{"prompt": [5, 6], "bad_words": [[9], [8, 7]], "allowed_token_ids": [4]}])
    error = str(verdict_of(receipt_llm, receipt, inputs=inputs).error)
    assert "of another prompt and another allowed_token_ids than the one that is given" in error
    assert verdict_of(receipt_llm, receipt, inputs=Inputs([whole["inputs"]])).verdict == "equal"
    with raises(ReceiptError, "inputs is", "allowed: an object"):
        Inputs([[1, 2]])


def test_receipts_are_found_in_files(receipt_llm: LLM) -> None:
    receipt = shown(receipt_of(receipt_llm))
    found = list(read_receipts("a", receipt))
    assert found == [("a", json.loads(receipt))]
    lines = f"{receipt}\n\n{receipt}\n"
    assert [name for name, _ in read_receipts("a", lines)] == ["a:1", "a:3"]
    pretty = json.dumps([json.loads(receipt)] * 2, indent=1)
    assert [name for name, _ in read_receipts("a", pretty)] == ["a[0]", "a[1]"]
    response = {"choices": [{"x_receipt": 1}, {}, {"x_receipt": 2}]}
    assert list(read_receipts("a", json.dumps(response))) == [("a choice 0", 1), ("a choice 2", 2)]
    assert list(read_receipts("a", '{"x_receipt": 3}')) == [("a", 3)]
    assert [name for name, _ in read_receipts("a.jsonl", f"\n{receipt}")] == ["a.jsonl:2"]
    assert list(read_receipts("a", "[]")) == [("a", [])]
    ((name, error),) = read_receipts("a.jsonl", "\n")
    assert name == "a.jsonl" and isinstance(error, ReceiptError)
    for text in (receipt[:-9], "", "{", "[" * 100_000, "1" * 5000):
        ((_, error),) = read_receipts("a", text)
        assert isinstance(error, ReceiptError) and "cut off" in str(error)


def test_a_huge_receipt_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paceline.receipts.receipt.MAX_RECEIPT_BYTES", 100)
    ((_, error),) = read_receipts("a", "[" + "1," * 100)
    assert isinstance(error, ReceiptError)
    assert "a has 201 bytes; allowed: at most 100" in str(error)


def test_generate_and_verify(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder, path = str(target_dir()), tmp_path / "receipts.jsonl"
    generate = ["generate", "--model", folder, "-q", "--max-tokens", "9", "--temperature", "0.8"]
    generate += ["--n", "2", "first", "second", "--receipts", str(path)]
    verifying = ["verify", str(path), "--model", folder]
    assert cli.main([*generate, "--with-text"]) == EXIT_OK
    capsys.readouterr()
    assert cli.main(verifying) == EXIT_OK
    printed = capsys.readouterr().out.splitlines()
    assert printed == [*(f"{path}:{n}: equal, 9 tokens" for n in (1, 2, 3, 4)), "4 equal"]
    whole = [json.loads(line) for line in path.read_text().splitlines()]
    # Without text.
    assert cli.main(generate) == EXIT_OK
    capsys.readouterr()
    assert cli.main(verifying) == EXIT_UNVERIFIED
    assert "prompt is not given" in capsys.readouterr().out
    beside = tmp_path / "inputs.jsonl"
    beside.write_text("".join(f"{json.dumps(one)}\n" for one in whole[2:]))
    assert cli.main([*verifying, "--prompt", "first", "--inputs", str(beside)]) == EXIT_OK
    # Edited, and one that is cut off.
    whole[1]["tokens"][4] ^= 1
    path.write_text("".join(f"{shown(one)}\n" for one in whole) + shown(whole[0])[:50])
    capsys.readouterr()
    assert cli.main([*verifying, "--json", "-q"]) == EXIT_DIFFERENT
    verdicts = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    kinds = [one["verdict"] for one in verdicts]
    assert kinds == ["equal", "different", "equal", "equal", "refused"]
    assert (verdicts[1]["position"], verdicts[1]["edited"]) == (4, "tokens")
    assert verdicts[4]["name"] == f"{path}:5" and "cut off" in verdicts[4]["error"]
    assert cli.main([*verifying, "-q"]) == EXIT_DIFFERENT
    assert len(capsys.readouterr().out.splitlines()) == 2


def test_a_bar_counts_the_receipts(
    receipt_llm: LLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bars: list[tuple[int, bool, list[int]]] = []

    class Bar:
        def __init__(self, total: int, *_: str, is_shown: bool) -> None:
            self.updates: list[int] = []
            bars.append((total, is_shown, self.updates))

        def __enter__(self) -> Bar:
            return self

        def __exit__(self, *_: object) -> None:
            pass

        def update(self, count: int) -> None:
            self.updates.append(count)

    monkeypatch.setattr("paceline.commands.verify.progress_bar", Bar)
    line = shown(receipt_of(receipt_llm))
    path = tmp_path / "receipts.jsonl"
    # One in ten is cut off: the bar counts what is refused, too.
    path.write_text("".join(f"{line[:90] if i % 10 == 0 else line}\n" for i in range(300)))
    verifying = ["verify", str(path), "--model", str(target_dir())]
    assert cli.main(verifying) == EXIT_UNVERIFIED
    assert cli.main([*verifying, "--quiet"]) == EXIT_UNVERIFIED
    assert [(total, is_shown, sum(updates)) for total, is_shown, updates in bars] == [
        (300, True, 300),
        (300, False, 300),
    ]


def test_verify_reads_standard_input(receipt_llm: LLM) -> None:
    command = [sys.executable, "-m", "paceline", "verify", "-", "--model", str(target_dir())]
    receipt = shown(receipt_of(receipt_llm))
    done = subprocess.run(command, input=receipt, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (EXIT_OK, "standard input: equal, 12 tokens\n")
    done = subprocess.run(command, input="", capture_output=True, text=True, check=False)
    assert done.returncode == EXIT_UNVERIFIED and "standard input: refused" in done.stdout
    with open("/dev/zero") as endless:
        done = subprocess.run(command, stdin=endless, capture_output=True, text=True, check=False)
    assert done.returncode == EXIT_USAGE and "/dev/stdin is a device" in done.stderr


def test_verify_refuses_bad_arguments(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = str(target_dir())
    assert cli.main(["generate", "--model", folder, "a", "--with-text"]) == EXIT_USAGE
    assert "--with-text needs --receipts" in capsys.readouterr().err
    assert cli.main(["verify", str(tmp_path / "none.json"), "--model", folder]) == cli.EXIT_MODEL
    binary = tmp_path / "binary"
    binary.write_bytes(b"\xff\xfe")
    assert cli.main(["verify", str(binary), "--model", folder]) == EXIT_UNVERIFIED
    assert "not UTF-8 at byte 0" in capsys.readouterr().out
    binary.write_text('{"prompts": 1}')
    assert cli.main(["verify", folder + "/config.json", "--inputs", str(binary)]) == EXIT_USAGE
    assert "inputs is" in capsys.readouterr().err
    assert cli.main(["verify", folder + "/config.json", "--model", folder]) == EXIT_UNVERIFIED
    assert "there is no receipt" in capsys.readouterr().out
