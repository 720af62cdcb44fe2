# SPDX-License-Identifier: Apache-2.0
"""Receipts: what they say, what is refused, and `paceline verify`."""

from __future__ import annotations

import asyncio
import copy
import hashlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import tiny_models
from errors import raises
from paceline import LLM, AsyncLLM, ModelFileError, RequestOutput, SamplingParams, cli
from paceline.console import EXIT_DIFFERENT, EXIT_OK, EXIT_UNVERIFIED, EXIT_USAGE
from paceline.loader import load_dummy
from paceline.loader.weight_files import FileStamp
from paceline.receipts import digests
from paceline.receipts.receipt import Receipt, ReceiptError, chain_of, read_receipts, shown
from paceline.receipts.replay import Inputs, Verdict, verify
from receipt_jobs import TARGET, target_dir
from running_server import RunningServer
from tiny_models import TinySpec

PROMPT = [5, 6, 7, 8]
PARAMS = SamplingParams(max_tokens=12, seed=7, receipt="with_text")


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Keeps digests in a folder of the tests."""
    folder = tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(folder))
        yield folder / "paceline" / "digests"


@pytest.fixture(scope="module")
def small() -> Iterator[LLM]:
    with LLM(target_dir(), max_num_seqs=8, device="cpu") as llm:
        yield llm


def receipt_of(llm: LLM, params: SamplingParams = PARAMS, prompt: Any = PROMPT) -> Receipt:
    receipt = llm.generate(prompt, params)[0].outputs[0].receipt
    assert receipt is not None
    return receipt


def verdict_of(llm: LLM, receipt: Any, **options: Any) -> Verdict:
    (verdict,) = verify(llm, [("r", receipt)], **options)
    return verdict


# ---- what a receipt says -----------------------------------------------------------------------


def test_a_receipt_says_what_the_request_was(small: LLM) -> None:
    params = replace(
        PARAMS, receipt=True, temperature=0.5, top_k=40, stop=["zq"], logit_bias={9: 1.0, 4: -2.5}
    )
    receipt = receipt_of(small, params)
    file = target_dir() / "model.safetensors"
    of_file = hashlib.sha256(file.read_bytes()).hexdigest()
    assert receipt["paceline_receipt"] == 1
    of_files = hashlib.sha256(json.dumps([of_file]).encode()).hexdigest()
    assert receipt["model"]["weights"] == f"files:{of_files}"
    tokenizer = (target_dir() / "tokenizer.json").read_bytes()
    assert receipt["model"]["tokenizer"] == hashlib.sha256(tokenizer).hexdigest()
    assert receipt["model"]["template"] is None
    assert receipt["model"]["dtype"] == "float32"
    assert receipt["device"].startswith("cpu ")
    assert receipt["sampling"] == {
        "temperature": 0.5,
        "top_k": 40,
        "max_tokens": 12,
        "stop_token_ids": [0],
        "skip_special_tokens": True,
        "spaces_between_special_tokens": True,
    }
    assert receipt["seed"] == "7"
    values = {"prompt": "[5,6,7,8]", "stop": '["zq"]', "logit_bias": "[[4,-2.5],[9,1]]"}
    assert receipt["digests"] == {
        name: hashlib.sha256(text.encode()).hexdigest() for name, text in values.items()
    }
    # Nothing of the prompt and the texts is in it.
    assert "inputs" not in receipt and "zq" not in shown(receipt)
    assert receipt_of(small, replace(params, receipt="with_text")) == receipt | {
        "inputs": {"prompt": PROMPT, "stop": ["zq"], "logit_bias": [[4, -2.5], [9, 1.0]]}
    }


def test_the_chain_is_that_of_the_page(small: LLM) -> None:
    receipt = receipt_of(small)
    behind = ("tokens", "finish_reason", "chain", "inputs")
    header = {key: value for key, value in receipt.items() if key not in behind}
    text = json.dumps(header, sort_keys=True, separators=(",", ":")).replace('e":1.0', 'e":1')
    link = hashlib.sha256(text.encode()).digest()
    first = link.hex()
    for token in receipt["tokens"]:
        link = hashlib.sha256(link + token.to_bytes(8, "little")).digest()
    last = hashlib.sha256(link + b"length").hexdigest()
    assert receipt["chain"] == {"first": first, "last": last}


def test_numbers_have_one_form() -> None:
    values = {"b": [1.0, 2, 0.1, True, None], "a": "\u00e9", "c": (3, 4)}
    text = b'{"a":"\\u00e9","b":[1,2,0.1,true,null],"c":[3,4]}'
    assert digests.canonical(values) == text
    assert digests.canonical(json.loads(text)) == text
    with pytest.raises(ValueError):
        digests.canonical(float("nan"))


def test_each_sample_has_the_seed_with_which_it_is_replayed(small: LLM) -> None:
    params = replace(PARAMS, n=3, seed=2**64 - 2)
    (output,) = small.generate([PROMPT], params)
    receipts = [one.receipt for one in output.outputs]
    assert [one["seed"] for one in receipts if one] == [str(2**64 - 2), str(2**64 - 1), "0"]
    assert {verdict_of(small, one).verdict for one in receipts} == {"equal"}
    # A request without a seed gets one of the LLM.
    receipts = [
        one.outputs[0].receipt for one in small.generate([PROMPT] * 2, replace(PARAMS, seed=None))
    ]
    assert receipts[0] and receipts[1] and receipts[0]["seed"] != receipts[1]["seed"]
    assert {verdict_of(small, one).verdict for one in receipts} == {"equal"}


def test_receipts_share_nothing(small: LLM) -> None:
    outputs = small.generate(PROMPT, replace(PARAMS, n=2))[0].outputs
    one, other = (output.receipt for output in outputs)
    assert one is not None
    before = copy.deepcopy(other)
    for key in ("model", "digests", "sampling", "inputs"):
        one[key].clear()
    assert other == before and receipt_of(small)["model"] == other["model"]


def test_streams_have_receipts_in_the_last_chunk(small: LLM) -> None:
    whole = receipt_of(small)
    chunks = list(small.stream(PROMPT, PARAMS))
    assert [chunk.receipt for chunk in chunks] == [None] * (len(chunks) - 1) + [whole]

    async def run() -> list[RequestOutput]:
        allm = AsyncLLM.from_llm(small)
        outputs = [output async for output in allm.generate(PROMPT, PARAMS)]
        allm.close()
        return outputs

    *others, last = asyncio.run(run())
    assert last.outputs[0].receipt == whole
    assert all(output.outputs[0].receipt is None for output in others)
    assert small.generate(PROMPT, replace(PARAMS, receipt=False))[0].outputs[0].receipt is None


def test_an_aborted_output_is_compared_until_its_end(small: LLM) -> None:
    async def run() -> RequestOutput:
        allm = AsyncLLM.from_llm(small)
        last = None
        async for output in allm.generate(
            PROMPT, replace(PARAMS, max_tokens=400, ignore_eos=True), "a"
        ):
            last = output
            await allm.abort("a")
        allm.close()
        assert last is not None
        return last

    receipt = asyncio.run(run()).outputs[0].receipt
    assert receipt is not None and receipt["finish_reason"] == "abort"
    verdict = verdict_of(small, receipt)
    assert verdict.verdict == "equal" and "only the tokens until then" in verdict.notes[0]
    receipt["tokens"][-1] ^= 1
    assert verdict_of(small, receipt).position == len(receipt["tokens"]) - 1
    # It may have ended before its first token.
    receipt["tokens"] = []
    receipt["chain"] = chain_of(receipt)
    verdict = verdict_of(small, receipt)
    assert (verdict.verdict, verdict.num_tokens) == ("equal", 0)


# ---- digests of weights ------------------------------------------------------------------------


def test_digests_of_files_are_cached(
    cache: Path, copy_of: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = copy_of(TARGET)
    read: list[Any] = []
    digest = hashlib.file_digest

    def count(file: Any, name: Any) -> Any:
        read.append(file.name)
        return digest(file, name)

    monkeypatch.setattr(hashlib, "file_digest", count)
    stamp = FileStamp.of(folder / "model.safetensors")
    expected = hashlib.sha256(stamp.path.read_bytes()).hexdigest()
    assert digests.file_digests([stamp]) == digests.file_digests([stamp]) == [expected]
    assert len(read) == 1
    # An entry that is damaged, of another file, or cannot be written costs time only.
    entry = digests._entry_of(stamp)
    assert entry.parent == cache
    values = json.loads(entry.read_text())
    for text in ("", "[]", "{", json.dumps(values | {"size": 1}), '{"sha256": 4}'):
        entry.write_text(text)
        assert digests.file_digests([stamp]) == [expected]
    assert len(read) == 6
    monkeypatch.setenv("XDG_CACHE_HOME", "/proc/none")
    assert digests.file_digests([stamp]) == [expected]
    # A file whose time was set back is another one all the same.
    contents = bytearray(stamp.path.read_bytes())
    contents[-1] ^= 1
    stamp.path.write_bytes(contents)
    os.utime(stamp.path, ns=(stamp.mtime_ns, stamp.mtime_ns))
    assert digests._read_entry(entry, FileStamp.of(stamp.path)) is None


def test_a_file_that_changed_since_it_was_loaded_is_refused(copy_of: Callable[..., Path]) -> None:
    folder = copy_of(TARGET)
    path = folder / "model.safetensors"
    with LLM(folder, device="cpu") as llm:
        contents = path.read_bytes()
        path.unlink()
        with raises(ModelFileError, path, "No such file", "receipt"):
            llm.generate(PROMPT, PARAMS)
        path.write_bytes(contents)
        with raises(ModelFileError, path, "has changed since", "load the model again"):
            llm.generate(PROMPT, PARAMS)


def test_shards_and_converted_folders_have_digests(tmp_path: Path) -> None:
    folder = tiny_models.copy_checkpoint(target_dir(), tmp_path / "shards")
    tiny_models.edit_tensors(folder, lambda tensors: None, shards=2)
    assert cli.main(["convert", str(folder), str(tmp_path / "out"), "-q"]) == EXIT_OK
    with LLM(folder, device="cpu") as sharded, LLM(tmp_path / "out", device="cpu") as converted:
        assert len(sharded.target.weights.files) == 2
        assert [one.path.name for one in converted.target.weights.files] == ["target.safetensors"]
        receipt = receipt_of(sharded)
        assert verdict_of(sharded, receipt).verdict == "equal"
        # The same weights in other files: the tokens are equal, the digests are not.
        verdict = verdict_of(converted, receipt)
        assert verdict.verdict == "refused" and "its weights is" in str(verdict.error)
        verdict = verdict_of(converted, receipt, any_model=True)
        assert verdict.verdict == "equal" and "weights differs" in verdict.notes[0]


def test_weights_in_memory_have_digests_and_updates_change_them(small: LLM) -> None:
    folder = target_dir()
    tensors = tiny_models.load_tensors(folder)
    config = tiny_models.read_json(folder / "config.json")
    with LLM.from_state_dict(config, tensors, tokenizer=folder, device="cpu") as llm:
        receipt = receipt_of(llm)
        assert receipt["model"]["weights"].startswith("memory:")
        # Its weights are those of the folder, whose files were not read for it.
        assert verdict_of(small, receipt).verdict == "equal"
        verdict = verdict_of(llm, receipt_of(small))
        assert verdict.verdict == "refused" and "not from files" in str(verdict.error)
        changed = {name: tensor * 1.5 for name, tensor in tensors.items()}
        llm.update_weights(changed)
        other = receipt_of(llm)
        assert other["model"]["weights"] not in (receipt["model"]["weights"], "")
        assert verdict_of(llm, other).verdict == "equal"
        assert verdict_of(llm, receipt).verdict == "refused"
    with LLM(folder, device="cpu") as llm:
        before = receipt_of(llm)
        (prepared,) = llm._requests.prepare([PROMPT], PARAMS)
        llm.update_weights(changed)
        # From files no more.
        assert receipt_of(llm) == other
        assert verdict_of(llm, before).verdict == "refused"
        # A request that was made before the update does not say that it ran on the former weights.
        chunks = list(llm._run([prepared]))
        assert chunks[-1].finished and chunks[-1].receipt is None


def test_weights_elsewhere_are_refused(small: LLM) -> None:
    target = load_dummy(target_dir())
    assert digests.weights_digest(target).startswith("memory:")

    class Stub:
        device = "cpu"

    stub: Any = Stub()
    with raises(NotImplementedError, "digest of its weights", "in other processes", "allowed"):
        digests.weights_digest(replace(target, model=stub))


@pytest.mark.parametrize("method", ["standard", "block", "synthetic"])
def test_outputs_that_depend_on_drafts_have_no_receipts(small: LLM, method: str) -> None:
    config: dict[str, Any] = {
        "method": "ngram",
        "num_speculative_tokens": 2,
        "rejection_sample_method": method,
    }
    if method == "synthetic":
        config["synthetic_acceptance_length"] = 2.0
    greedy = replace(PARAMS, temperature=0)
    with LLM(target_dir(), speculative_config=config, device="cpu") as llm:
        with raises(ValueError, "receipt is 'with_text'", f"is '{method}'", "allowed", "'coupled'"):
            llm.generate(PROMPT, PARAMS)
        if method == "synthetic":
            with raises(ValueError, "synthetic"):
                llm.generate(PROMPT, greedy)
        else:
            assert verdict_of(small, receipt_of(llm, greedy)).verdict == "equal"


@pytest.mark.parametrize("value", [1, "yes", None, b"with_text"])
def test_other_values_are_refused(value: Any) -> None:
    with raises(ValueError, "receipt is", repr(value), "allowed: True, False or 'with_text'"):
        SamplingParams(receipt=value)


# ---- receipts from outside ---------------------------------------------------------------------


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
    "another config": (("model", "config"), "0" * 64, "another model: its config"),
    "tokenizer": (("model", "tokenizer"), None, "another model: its tokenizer"),
    "another dtype": (("model", "dtype"), "bfloat16", "give --dtype bfloat16"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_receipts_are_refused_with_one_error(small: LLM, name: str) -> None:
    path, value, expected = BAD[name]
    verdict = verdict_of(small, edited(receipt_of(small), *path, value=value))
    assert verdict.verdict == "refused"
    assert expected in str(verdict.error) and "\n" not in str(verdict)


def test_edits_of_inputs_and_digests_show(small: LLM) -> None:
    receipt = receipt_of(small)
    verdict = verdict_of(small, edited(receipt, "inputs", "prompt", value=[5, 6, 7, 9]))
    assert (verdict.verdict, verdict.edited) == ("different", "inputs")
    verdict = verdict_of(small, edited(receipt, "device", value="cpu none"))
    assert (verdict.verdict, verdict.edited) == ("edited", "header")
    assert "device class (cpu none" in verdict.notes[0]
    # A receipt of another device is replayed with a note.
    other = edited(receipt, "device", value="cuda sm_90")
    other["chain"] = chain_of(other)
    verdict = verdict_of(small, other)
    assert verdict.verdict == "equal" and "cuda sm_90" in str(verdict)
    assert verdict_of(small, edited(other, "chain", value=receipt["chain"])).edited == "header"
    # What ended the output is in the chain, and in the replay.
    other = edited(receipt, "finish_reason", value="stop")
    verdict = verdict_of(small, other)
    assert (verdict.position, verdict.edited) == (12, "tokens")
    assert "ends there for another reason" in str(verdict)


def test_the_margin_is_that_of_the_logits(small: LLM) -> None:
    receipt = receipt_of(small)
    tokens = receipt["tokens"]
    other = edited(receipt, "tokens", value=[*tokens[:3], tokens[3] ^ 1, *tokens[4:]])
    logits = small.logits([*PROMPT, *tokens[:3]])[-1]
    verdict = verdict_of(small, other)
    assert (verdict.position, verdict.receipt_token, verdict.replay_token) == (
        3,
        tokens[3] ^ 1,
        tokens[3],
    )
    assert verdict.margin == pytest.approx(logits[tokens[3]] - logits[tokens[3] ^ 1], abs=1e-4)
    other["tokens"][3] = 10**6
    verdict = verdict_of(small, other)
    assert verdict.position == 3 and verdict.margin is None


def test_inputs_are_found_by_digest(small: LLM) -> None:
    params = replace(PARAMS, receipt=True, bad_words=[[9], [8, 7]], allowed_token_ids=range(4, 200))
    receipt = receipt_of(small, params)
    whole = receipt_of(small, replace(params, receipt="with_text"))
    verdict = verdict_of(small, receipt)
    assert verdict.verdict == "refused"
    assert "prompt, bad_words, allowed_token_ids are not given" in str(verdict.error)
    inputs = Inputs([{"prompt": PROMPT}, {"bad_words": [[9], [8, 7]]}])
    assert "allowed_token_ids is not given" in str(verdict_of(small, receipt, inputs=inputs).error)
    assert verdict_of(small, receipt, inputs=Inputs([whole["inputs"]])).verdict == "equal"
    with raises(ReceiptError, "inputs is", "allowed: an object"):
        Inputs([[1, 2]])


def test_receipts_are_found_in_files(small: LLM) -> None:
    receipt = shown(receipt_of(small))
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


# ---- the command line --------------------------------------------------------------------------


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


def test_verify_reads_standard_input(small: LLM) -> None:
    command = [sys.executable, "-m", "paceline", "verify", "-", "--model", str(target_dir())]
    receipt = shown(receipt_of(small))
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


# ---- the server --------------------------------------------------------------------------------


def events_of(server: RunningServer, path: str, body: dict[str, Any]) -> list[Any]:
    """The data of all events of a stream, named or not."""
    with server.send(path, body | {"stream": True}) as response:
        assert response.status == 200
        lines = response.read().decode().splitlines()
    data = [line.removeprefix("data: ") for line in lines if line.startswith("data: ")]
    return [json.loads(text) for text in data if text != "[DONE]"]


def test_the_server_returns_receipts_on_every_route(small: LLM) -> None:
    messages = [{"role": "user", "content": "abc"}]
    template = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    common = {"temperature": 0.7, "seed": 3, "x_receipt": "with_text"}
    with (
        LLM(target_dir(), chat_template=template, max_num_seqs=8, device="cpu") as llm,
        RunningServer(llm) as server,
    ):
        bodies: dict[str, dict[str, Any]] = {
            "/v1/completions": {"prompt": "abc", "max_tokens": 9, "n": 2},
            "/v1/chat/completions": {"messages": messages, "max_tokens": 9, "n": 2},
            "/v1/responses": {"input": "abc", "max_output_tokens": 9},
            "/v1/messages": {"messages": messages, "max_tokens": 9},
        }
        for path, body in bodies.items():
            whole = server.result(path, body | common)
            receipts = [receipt for _, receipt in read_receipts(path, json.dumps(whole))]
            assert len(receipts) == body.get("n", 1)
            named = [(path, receipt) for receipt in receipts]
            assert {one.verdict for one in verify(small, named)} == {"equal"}
            # The same in a stream, at the end of each output.
            streamed = []
            for event in events_of(server, path, body | common):
                found = event.get("response", event)
                streamed += [
                    one for one in (found, *found.get("choices", ())) if "x_receipt" in one
                ]
            streamed.sort(key=lambda one: int(one["x_receipt"]["seed"]))
            assert [one["x_receipt"] for one in streamed] == receipts
            bare = server.result(path, body | common | {"x_receipt": True})
            ((_, receipt), *_) = read_receipts(path, json.dumps(bare))
            assert receipts[0] == receipt | {"inputs": receipts[0]["inputs"]}
            assert "x_receipt" not in json.dumps(server.result(path, body))
            status, answer = server.ask(path, body | {"x_receipt": "text"})
            assert status == 400 and "true, false or 'with_text'" in answer["error"]["message"]


def test_digests_are_computed_beside_other_requests(
    copy_of: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """While a large model's files are read, requests without receipts go on."""
    may_end = threading.Event()
    begun = threading.Semaphore(0)
    compute = digests.weights_digest

    def wait(*arguments: Any) -> str:
        begun.release()
        assert may_end.wait(60)
        return compute(*arguments)

    monkeypatch.setattr("paceline.receipts.maker.weights_digest", wait)

    async def run(llm: LLM) -> None:
        async with AsyncLLM.from_llm(llm) as allm:

            async def one(params: SamplingParams) -> Any:
                return [output async for output in allm.generate(PROMPT, params)][-1].outputs[0]

            waiting = [asyncio.create_task(one(PARAMS)) for _ in range(4)]
            await asyncio.to_thread(begun.acquire)
            assert (await one(replace(PARAMS, receipt=False))).receipt is None
            assert not any(task.done() for task in waiting)
            may_end.set()
            assert None not in [one.receipt for one in await asyncio.gather(*waiting)]

    with LLM(copy_of(TinySpec("llama", seed=3)), device="cpu") as llm:
        asyncio.run(run(llm))
