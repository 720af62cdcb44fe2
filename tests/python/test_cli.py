# SPDX-License-Identifier: Apache-2.0
"""The command line: its output and its exit codes."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import paceline
from paceline import LLM, ModelNotFoundError, SamplingParams, _core, cli, demo, doctor
from paceline.commands import generate as generate_command
from paceline.commands import options
from paceline.device import find_cublaslt
from paceline.outputs import RequestOutput

PROMPT = "x = "


@pytest.fixture
def generate(target_dir: Path, speculative_config: dict[str, Any]) -> list[str]:
    """Arguments of `paceline generate` with a drafter."""
    config = json.dumps(speculative_config)
    return ["generate", PROMPT, "--model", str(target_dir), "--speculative-config", config]


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        cli.main(["--version"])
    assert stop.value.code == 0
    assert capsys.readouterr().out == f"paceline {paceline.__version__}\n"


@pytest.mark.parametrize(
    "module", [["-m", "paceline"], ["-c", "from paceline.cli import main; main()"]]
)
def test_runs_as_a_program(module: list[str]) -> None:
    result = subprocess.run(
        [sys.executable, *module, "--help"], capture_output=True, text=True, check=True
    )
    for command in ("generate", "convert", "doctor"):
        assert command in result.stdout


@pytest.mark.parametrize(
    "argv",
    [
        ["nonesuch"],
        ["generate", "a", "--max-tokens", "x"],
        ["--nonesuch"],
        ["generate", "a", "--stop-token-ids", "1,x"],
    ],
)
def test_usage_errors(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        cli.main(argv)
    assert stop.value.code == 2
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.count("\n") == 1
    assert captured.err.startswith("paceline") and captured.err.endswith(" --help\n")


@pytest.mark.parametrize("command", [[], ["bench"]])
def test_without_a_command_there_is_help(
    command: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        cli.main([*command, "--help"])
    asked = capsys.readouterr().out
    assert cli.main(command) == cli.EXIT_USAGE
    assert capsys.readouterr() == ("", asked)


@pytest.mark.parametrize(
    ("argv", "parts"),
    [
        (["generat", "x"], ["no 'generat'; did you mean generate?; allowed: generate, chat, "]),
        (["bench", "latncy"], ["no 'latncy'; did you mean latency?", "see paceline bench --help"]),
        (["generate", "x", "--color", "alway"], ["--color: there is no 'alway'; did you mean"]),
        (["zzz"], ["no 'zzz'; allowed: generate"]),
    ],
)
def test_an_unknown_command_or_choice_gets_a_suggestion(
    argv: list[str], parts: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stop:
        cli.main(argv)
    assert stop.value.code == cli.EXIT_USAGE
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and all(part in error for part in parts), error


def test_an_unknown_option_is_refused_by_its_command(capsys: pytest.CaptureFixture[str]) -> None:
    commands = {
        ("generate", "a", "--temprature", "1"): "temprature 1; did you mean --temperature?",
        ("bench", "latency", "--xyzzy=3"): "xyzzy=3",
        ("doctor", "--model=m"): "model=m",
    }
    for argv, end in commands.items():
        with pytest.raises(SystemExit):
            cli.main(argv)
        command = "paceline " + " ".join(argv[: 1 + (argv[0] == "bench")])
        expected = f"{command}: error: unrecognized arguments: --{end}; see {command} --help\n"
        assert capsys.readouterr().err == expected


def test_generate(generate: list[str], llm: LLM, capsys: pytest.CaptureFixture[str]) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=64)
    expected = llm.generate(PROMPT, params)[0].outputs[0].text
    assert cli.main(generate) == 0
    streamed = capsys.readouterr()
    first = streamed.err.splitlines()[0]
    assert re.fullmatch(
        r"paceline: \S+ on the CPU, \w+ with 4 drafts an iteration, [\d,]+ MiB", first
    ), first
    text, _, report = streamed.out.rpartition(f"\n{'-' * 50}\n")
    assert text == PROMPT + expected
    assert "64 tokens in" in report and "tokens/s" in report
    assert "acceptance length" in report and "draft position 1 to 4" in report
    assert cli.main([*generate, "--no-stream"]) == 0
    assert capsys.readouterr().out.startswith(PROMPT + expected + "\n")
    assert cli.main([*generate, "--quiet"]) == 0
    assert capsys.readouterr() == (expected + "\n", "")


def test_few_tokens_have_no_rate(capsys: pytest.CaptureFixture[str]) -> None:
    for num_tokens, is_measured in ((2, False), (40, True)):
        assert cli.main(["generate", PROMPT, "--max-tokens", str(num_tokens), "--ignore-eos"]) == 0
        out = capsys.readouterr().out
        assert ("\n- tokens/s after the first token" not in out) == is_measured


def test_generate_as_json(generate: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([*generate, "--json", "--compare", "--max-tokens", "30"]) == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    report = json.loads(captured.out)
    assert report["prompt"] == PROMPT
    assert len(report["token_ids"]) == 30
    assert report["finish_reason"] == "length"
    assert report["metrics"]["speculative_decoding"]["num_spec_tokens"] == 4
    assert report["plain"]["is_same"] is True
    assert "speculative_decoding" not in report["plain"]["metrics"]
    assert report["configured"]["num_speculative_tokens"] == 4


def test_generate_with_logprobs(generate: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["--max-tokens", "9", "--logprobs", "3", "--prompt-logprobs", "0"]
    assert cli.main([*generate, "--json", "--compare", *asked]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["plain"]["is_same"] is True
    assert report["configured"]["max_logprobs"] == 3
    assert [entries[0]["token_id"] for entries in report["logprobs"]] == report["token_ids"]
    # At temperature 0 every token is the most likely one.
    assert all([entry["rank"] for entry in entries] == [1, 2, 3] for entries in report["logprobs"])
    total = sum(entries[0]["logprob"] for entries in report["logprobs"])
    assert report["cumulative_logprob"] == pytest.approx(total)
    assert report["prompt_logprobs"][0] is None
    assert [entries[0]["token_id"] for entries in report["prompt_logprobs"][1:]] == (
        report["prompt_token_ids"][1:]
    )
    assert cli.main([*generate, *asked]) == 0
    lines = capsys.readouterr().out.splitlines()
    heading = lines.index("logprobs (token, logprob, rank | most probable tokens):")
    assert len([line for line in lines[heading + 1 :] if line.startswith("  ")]) == 9
    assert lines[heading + 10] == f"cumulative logprob {total:.4f}"
    assert lines[heading - 1 - len(report["prompt_logprobs"][1:])].startswith("logprobs of the pr")
    # Without logprobs no memory is allocated for them.
    assert cli.main([*generate, "--json", "--max-tokens", "2"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["configured"]["max_logprobs"] == 0
    assert not {"logprobs", "prompt_logprobs", "cumulative_logprob"} & set(report)


def test_every_sampling_parameter_has_an_option() -> None:
    argv = [
        "generate", "a", "--temperature", "0.7", "--top-k", "5", "--top-p", "0.9", "--min-p", "0.1",
        "--repetition-penalty", "1.1", "--presence-penalty", "-0.5", "--frequency-penalty", "0.5",
        "--logit-bias", '{"7": -3, "5": 1.5}', "--bad-words", "x", "--bad-words", "y z",
        "--allowed-token-ids", "1,2", "--max-tokens", "9", "--min-tokens", "2",
        "--stop", "a", "--stop", "\n", "--include-stop-str-in-output", "--stop-token-ids", "3",
        "--ignore-eos", "--seed", "4", "--logprobs", "5", "--prompt-logprobs", "0", "--n", "3",
        "--no-skip-special-tokens",
    ]  # fmt: skip
    params = options.sampling_params(cli.build_parser().parse_args(argv))
    assert params == SamplingParams(
        temperature=0.7,
        top_k=5,
        top_p=0.9,
        min_p=0.1,
        repetition_penalty=1.1,
        presence_penalty=-0.5,
        frequency_penalty=0.5,
        logit_bias={7: -3, 5: 1.5},
        bad_words=["x", "y z"],
        allowed_token_ids=[1, 2],
        max_tokens=9,
        min_tokens=2,
        stop=["a", "\n"],
        include_stop_str_in_output=True,
        stop_token_ids=[3],
        ignore_eos=True,
        seed=4,
        logprobs=5,
        prompt_logprobs=0,
        n=3,
        skip_special_tokens=False,
    )
    default = SamplingParams()
    same = {name for name in vars(default) if getattr(params, name) == getattr(default, name)}
    assert same == {
        *("detokenize", "spaces_between_special_tokens", "structured_outputs"),  # for programs
        "num_speculative_tokens",  # the option of this name is that of the engine
        "speculative_method",  # --speculative-config chooses those of the engine
        "return_token_sources",  # --color shows them
        "receipt",  # --receipts
    }
    args = cli.build_parser().parse_args(["generate", "a"])
    assert options.sampling_params(args) == SamplingParams(temperature=0.0, max_tokens=64, seed=0)


def test_a_stop_string_ends_the_text(
    generate: list[str], llm: LLM, capsys: pytest.CaptureFixture[str]
) -> None:
    text = llm.generate(PROMPT, SamplingParams(temperature=0.0, max_tokens=64))[0].outputs[0].text
    stop = text[20:23]
    cut = text.index(stop)
    assert cli.main([*generate, "--compare", "--stop", stop]) == 0
    captured = capsys.readouterr()
    assert captured.out.startswith(f"{PROMPT}{text[:cut]}\n{'-' * 50}\n")
    assert f"ended by stop ({stop!r})" in captured.out
    assert cli.main([*generate, "--json", "--stop", stop, "--include-stop-str-in-output"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["text"], report["stop_reason"]) == (text[: cut + 3], stop)


def test_generate_without_a_drafter(target_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["generate", PROMPT, "-m", str(target_dir), "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["draft_model"] is None
    assert "speculative_decoding" not in report["metrics"]


@pytest.mark.parametrize("temperature", ["0", "1.0"])
def test_compare(generate: list[str], temperature: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([*generate, "--compare", "--temperature", temperature]) == 0
    out = capsys.readouterr().out
    assert "plain decoding:" in out and "the same output" in out and "times as fast" in out


def test_compare_notices_a_difference(
    generate: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    generate_outputs = generate_command._run

    def run(
        llm: LLM, args: Any, prompts: Any, params: SamplingParams, *, is_shown: bool
    ) -> list[RequestOutput]:
        if llm.draft is None:  # plain decoding gives another output
            params = replace(params, max_tokens=10)
        return generate_outputs(llm, args, prompts, params, is_shown=is_shown)

    monkeypatch.setattr(generate_command, "_run", run)
    assert cli.main([*generate, "--compare"]) == cli.EXIT_SELF_CHECK
    captured = capsys.readouterr()
    assert "DIFFERENT" in captured.out and "different tokens" in captured.err


SYNTHETIC = {"rejection_sample_method": "synthetic", "synthetic_acceptance_length": 2}


@pytest.mark.parametrize(
    ("changes", "temperature", "messages"),
    [
        ({"rejection_sample_method": "standard"}, "0.5", ["'standard'", "temperature is 0.5"]),
        ({"rejection_sample_method": "block"}, "1", ["'block'", "temperature 0, or no"]),
        (SYNTHETIC, "0", ["'synthetic'", "artificial"]),
        (SYNTHETIC, "1", ["'synthetic'", "artificial"]),
    ],
)
def test_compare_refuses_methods_that_differ_by_design(
    generate: list[str],
    speculative_config: dict[str, Any],
    changes: dict[str, Any],
    temperature: str,
    messages: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.delattr("paceline.llm.load_pair")  # nothing is loaded
    argv = [*generate[:-1], json.dumps(speculative_config | changes), "--temperature", temperature]
    assert cli.main([*argv, "--compare"]) == cli.EXIT_USAGE
    captured = capsys.readouterr()
    assert captured.out == ""
    for message in (*messages, "--compare", "allowed: rejection_sample_method 'coupled'"):
        assert message in captured.err


def test_compare_with_standard_and_block_at_temperature_0(
    generate: list[str], speculative_config: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    exact = json.dumps(speculative_config | {"rejection_sample_method": "block"})
    assert cli.main([*generate[:-1], exact, "--compare"]) == 0
    assert "the same output" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("extra", "code", "message"),
    [
        (["--temperature", "nan"], 2, "temperature is nan"),
        (["--max-tokens", "0"], 2, "--max-tokens is 0"),
        (["--seed", "-1"], 2, "seed is -1"),
        (["--top-k", "-2"], 2, "--top-k is -2"),
        (["--top-p", "0"], 2, "--top-p is 0.0"),
        (["--min-tokens", "65"], 2, "--min-tokens is 65"),
        (["--stop", ""], 2, "stop[0] has 0 characters"),
        (["--bad-words", " "], 2, "--bad-words[0] is ' '"),
        (["--allowed-token-ids", "-1"], 2, "--allowed-token-ids[0] is -1"),
        (["--logit-bias", "{"], 2, "--logit-bias is not valid JSON"),
        (["--logit-bias", "[[1, 2]]"], 2, "a JSON object from token ids to numbers"),
        (["--logit-bias", '{"a": 1}'], 2, "a JSON object from token ids to numbers"),
        (["--logit-bias", '{"1": 1, "1": 2}'], 2, "token 1 twice"),
        (["--logit-bias", '{"1": "2"}'], 2, "--logit-bias[1] is '2'"),
        pytest.param(
            ["--device", "cuda"],
            2,
            "no CUDA",
            marks=pytest.mark.skipif(_core.build_info()["has_cuda"], reason="a build with CUDA"),
        ),
        (["--device", "cuda:1"], 2, "CUDA_VISIBLE_DEVICES"),
        (["--block-size", "0"], 2, "--block-size is 0"),
        (["--kv-cache-bytes", "1000"], 2, "--kv-cache-bytes"),
        (["--demo", "draft_model"], 2, "--demo"),
        (["--num-speculative-tokens", "2"], 2, "--num-speculative-tokens"),
        (["--speculative-config", "{"], 2, "not valid JSON"),
        (["--speculative-config", '{"method": "suffix"}'], 2, "'suffix' is not supported yet"),
        (["--model", "no/such/folder"], 3, "no/such/folder"),
        (
            ["--speculative-config", '{"model": "no/such", "num_speculative_tokens": 1}'],
            3,
            "no/such",
        ),
    ],
)
def test_errors(
    generate: list[str],
    extra: list[str],
    code: int,
    message: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert cli.main([*generate, *extra]) == code
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("paceline: error: ") and message in captured.err
    assert captured.err.count("\n") == 1


def test_other_errors_of_generate(
    target_dir: Path, speculative_config: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    model = ["--model", str(target_dir)]
    assert cli.main(["generate", *model]) == 2
    assert "there is no prompt" in capsys.readouterr().err
    assert cli.main(["generate", "", *model]) == 2
    assert "prompt is empty" in capsys.readouterr().err
    assert cli.main(["generate", "a", *model, "--compare"]) == 2
    assert "--compare needs a drafter" in capsys.readouterr().err
    config = json.dumps(speculative_config)
    assert cli.main(["generate", "a", "--speculative-config", config]) == 2
    assert "--speculative-config needs --model" in capsys.readouterr().err
    assert cli.main(["generate", "a", "--demo", "nonesuch"]) == 2
    assert "'nonesuch'; allowed: 'draft_model'" in capsys.readouterr().err


def test_a_missing_demo_is_a_missing_model(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    gone = demo.Demo("draft_model", tmp_path / "a", tmp_path / "b", 4)
    monkeypatch.setitem(demo._DEMOS, "draft_model", gone)
    with pytest.raises(ModelNotFoundError, match="demo checkpoint is not in this installation"):
        demo.find_demo("draft_model")
    assert cli.main(["generate", "a"]) == cli.EXIT_MODEL


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (paceline.OutOfMemoryError("x"), 5),
        (paceline.DeviceError("x"), 4),
        (paceline.InternalError("x"), 1),
        (paceline.RequestError("x", []), 1),
        (PermissionError("x"), 3),
        (KeyboardInterrupt(), 130),
    ],
)
def test_exit_codes(
    generate: list[str],
    monkeypatch: pytest.MonkeyPatch,
    error: BaseException,
    code: int,
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise error

    monkeypatch.setattr("paceline.llm.load_pair", fail)
    assert cli.main(generate) == code


def test_an_internal_error_is_not_hidden(
    generate: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr("paceline.llm.load_pair")
    with pytest.raises(NameError):
        cli.main(generate)


def test_a_reader_that_closes_the_pipe(generate: list[str]) -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "paceline", *generate, "--max-tokens", "1900"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert process.stdout is not None and process.stderr is not None
    process.stdout.read(1)
    process.stdout.close()
    errors = process.stderr.read()
    process.stderr.close()
    assert process.wait() == cli.EXIT_BROKEN_PIPE
    assert b"Traceback" not in errors and b"Exception" not in errors


def test_convert(
    target_dir: Path, draft_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "folder"
    argv = ["convert", str(target_dir), str(out), "--draft", str(draft_dir)]
    assert cli.main([*argv, "--num-speculative-tokens", "3"]) == 0
    assert str(out) in capsys.readouterr().out
    assert json.loads((out / "paceline.json").read_text())["num_speculative_tokens"] == 3
    texts = []
    for model in (target_dir, out):
        argv_of_model = ["generate", PROMPT, "--model", str(model), "-q", "--max-tokens", "9"]
        assert cli.main(argv_of_model) == 0
        texts.append(capsys.readouterr().out)
    assert texts[0] == texts[1]
    # The folder brings its drafter.
    compared = ["generate", PROMPT, "--model", str(out), "--max-tokens", "9", "--compare"]
    assert cli.main(compared) == 0
    text = capsys.readouterr().out
    assert "of at most 4" in text and "the same output" in text
    assert cli.main(argv) == 2
    assert "not empty" in capsys.readouterr().err
    assert cli.main(["convert", "no/such", str(tmp_path / "other")]) == 3


# ---- the demo ----------------------------------------------------------------------------------


def test_demo_generates_code(capsys: pytest.CaptureFixture[str]) -> None:
    prompt = "def read_lines(path):"
    assert cli.main(["generate", prompt, "--compare", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["plain"]["is_same"] is True
    assert report["metrics"]["speculative_decoding"]["mean_acceptance_length"] > 1.5
    argv = ["generate", prompt, "--demo", "draft_model", "--num-speculative-tokens", "0"]
    assert cli.main([*argv, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["text"] == report["text"]


def test_doctor(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["doctor", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["version"] == paceline.__version__
    assert report["num_cores"] >= 1
    assert report["packages"]["numpy"] and report["packages"]["huggingface_hub"]
    runs = report["self_check"]["runs"]
    assert [run["device"] for run in runs][:2] == ["cpu", "cpu"] and len(runs) % 2 == 0
    assert {run["draft_acceptance_rate"] for run in runs} == {1.0}
    assert report["cuda"] == _core.cuda_status() | {"free_bytes": report["cuda"]["free_bytes"]}
    assert (report["cuda"]["free_bytes"] > 0) == report["cuda"]["is_usable"]
    assert ("cuda" in report["devices"]) == report["cuda"]["is_usable"]
    assert cli.main(["doctor"]) == 0
    out = capsys.readouterr().out
    assert "100.0 %" in out and "cublaslt" in out
    assert (report["cuda"]["name"] or report["cuda"]["reason"]) in out


def test_doctor_shows_extras_and_the_hub(tmp_path: Path) -> None:
    given = {"HF_HUB_CACHE": str(tmp_path), "HF_HUB_OFFLINE": "1", "HF_TOKEN": "secret-token"}
    code = "import json; from paceline import doctor; print(json.dumps(doctor.describe_hub()))"
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, env=os.environ | given, capture_output=True, check=True)
    hub = json.loads(done.stdout)
    assert (hub["cache_dir"], hub["is_offline"], hub["has_token"]) == (str(tmp_path), True, True)
    packages = {"huggingface_hub": "1.0", "jinja2": None, "torch": None, "matplotlib": "3.9"}
    report = doctor.examine() | {"hub": hub, "packages": packages}
    lines = doctor.report_text(report).splitlines()
    assert f"{'hub cache':<18}{tmp_path}" in lines
    assert f"{'hub':<18}offline (HF_HUB_OFFLINE): only models in the cache load" in lines
    assert f"{'jinja2':<18}MISSING" in lines
    assert f"{'torch':<18}not installed; optional: pip install 'paceline[torch]'" in lines
    assert f"{'matplotlib':<18}3.9" in lines
    online = doctor.report_text(report | {"hub": hub | {"is_offline": False}})
    assert (
        f"{hub['endpoint']}, with a token; not contacted now" in online and "secret" not in online
    )
    assert "huggingface_hub is missing" in doctor.report_text(report | {"hub": None})


def test_doctor_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    usable = {
        "is_built": True, "is_usable": True, "reason": "", "num_gpus": 2, "name": "NVIDIA H200",
        "compute_capability": 90, "num_sms": 132, "total_bytes": 140 << 30, "free_bytes": 70 << 30,
        "block_shared_bytes": 227 << 10, "sm_shared_bytes": 228 << 10, "architectures": "80,90a",
        "kernels": "sm_90a", "has_been_run": True,
    }  # fmt: skip
    report = doctor.examine()
    monkeypatch.setenv("PACELINE_CUBLASLT", "/opt/lib")
    report |= {"cuda": usable, "cublaslt": find_cublaslt()}
    text = doctor.report_text(report)
    assert "NVIDIA H200, sm_90, 132 SMs, 70.0 of 140.0 GiB free; 1 more for tensor_par" in text
    assert "/opt/lib" in text
    assert f"{'cuda build':<18}kernels for sm_80, sm_90a" in text
    assert "sm_90a; 227 KB of shared memory a block, 228 KB a multiprocessor; tests have" in text
    usable |= {"kernels": "portable", "has_been_run": False}
    assert "portable; 227 KB" in doctor.report_text(report)
    assert "compiled and emulated, but not run on such a GPU yet" in doctor.report_text(report)
    report["cublaslt"] = None
    assert "PACELINE_CUBLASLT" in doctor.report_text(report)


def test_doctor_reports_failures(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    gone = demo.Demo("draft_model", tmp_path / "a", tmp_path / "b", 4)
    monkeypatch.setitem(demo._DEMOS, "draft_model", gone)
    assert cli.main(["doctor"]) == cli.EXIT_SELF_CHECK
    out = capsys.readouterr().out
    assert "FAILED: ModelNotFoundError" in out and "numpy" in out
