# SPDX-License-Identifier: Apache-2.0
"""LLM: forked children, the interpreter's exit, pickling."""

from __future__ import annotations

import copy
import os
import pickle
import signal
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

import paceline
from paceline import LLM, RequestError, RequestOutput, SamplingParams
from time_limits import HANG_LIMIT_S

# The beginning of every script below. `waited` kills a child that does not end.
_PROLOGUE = f"""
import gc, os, signal, sys, threading, time, warnings
from paceline import LLM, SamplingParams

GREEDY = SamplingParams(temperature=0.0, max_tokens=8)
LONG = SamplingParams(temperature=1.0, max_tokens=400, seed=0)

# Newer versions of Python warn of every fork of a process with threads.
warnings.simplefilter("ignore", DeprecationWarning)

def build():
    return LLM(sys.argv[1], max_num_seqs=2, show_progress=False, device="cpu")

# Below the limit of the script, so that what hangs is named.
HANG_LIMIT_S = {HANG_LIMIT_S / 2}

def waited(pid, timeout_s=HANG_LIMIT_S):
    end = time.monotonic() + timeout_s
    while time.monotonic() < end:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.01)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    return "hung"
"""


def run_script(code: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    package = Path(paceline.__file__).parents[1]
    command = [sys.executable, "-c", _PROLOGUE + textwrap.dedent(code), *map(str, arguments)]
    environment = os.environ | {"PYTHONPATH": str(package)}
    with subprocess.Popen(
        command,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as process:
        try:
            output, errors = process.communicate(timeout=HANG_LIMIT_S)
        except BaseException:
            os.killpg(process.pid, signal.SIGKILL)  # forked children too
            raise
    return subprocess.CompletedProcess(command, process.returncode, output, errors)


def assert_succeeds(code: str, *arguments: object) -> str:
    result = run_script(code, *arguments)
    assert (result.returncode, result.stderr) == (0, "")
    return result.stdout


# ---- fork ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "ending",
    [
        "sys.exit(7)",  # runs finalizers and exit handlers
        "os._exit(7)",
        "llm.close(); stream.close(); sys.exit(7)",
        "del llm, stream; gc.collect(); sys.exit(7)",
        "raise SystemExit(7)",
    ],
)
def test_a_forked_child_refuses_its_parents_llm_and_exits(target_dir: Path, ending: str) -> None:
    output = assert_succeeds(
        f"""
        llm = build()
        expected = llm.generate("a", GREEDY)[0].outputs
        whole = llm.generate("b", LONG)[0].outputs[0].token_ids
        stream = llm.stream("b", LONG)
        token_ids = next(stream).token_ids
        pid = os.fork()
        if pid == 0:
            for call in (
                lambda: llm.generate("a", GREEDY),
                lambda: llm.stream("a", GREEDY),
                lambda: llm.logits("a"),
                lambda: next(stream),
                llm.memory_report,
                llm.capabilities,
            ):
                try:
                    call()
                except RuntimeError as error:
                    print(error)
            print(repr(llm), flush=True)
            {ending}
        print(waited(pid), flush=True)
        for chunk in stream:
            token_ids += chunk.token_ids
        assert token_ids == whole
        assert llm.generate("a", GREEDY)[0].outputs == expected
        """,
        target_dir,
    )
    *refusals, shown, code = output.splitlines()
    assert len(refusals) == 6
    for refusal in refusals:
        assert "this LLM was built in process" in refusal and "forked" in refusal
        assert "Build the LLM in the child process" in refusal and '"spawn"' in refusal
    assert "unusable in this forked process" in shown
    assert code == "7"


def test_a_fork_while_other_threads_hold_the_locks(target_dir: Path) -> None:
    output = assert_succeeds(
        """
        llm = build()
        stream = llm.stream("b", LONG)
        threading.Thread(target=list, args=(stream,)).start()
        release = threading.Event()

        def hold():
            with llm._dispatcher.lock:
                held.set()
                release.wait()

        held = threading.Event()
        threading.Thread(target=hold).start()
        held.wait()
        pid = os.fork()
        if pid == 0:
            try:
                next(stream)
            except RuntimeError:
                stream.close()
                llm.close()
                print("refused", flush=True)
            os._exit(0)
        print(waited(pid))
        release.set()
        """,
        target_dir,
    )
    assert output.split() == ["refused", "0"]


def test_a_forked_child_builds_another_llm(target_dir: Path) -> None:
    output = assert_succeeds(
        """
        llm = build()
        expected = llm.generate("a", GREEDY)[0].outputs
        pid = os.fork()
        if pid == 0:
            with build() as own:
                assert own.generate("a", GREEDY)[0].outputs == expected
                # A child of the child.
                pid = os.fork()
                if pid == 0:
                    for other in (llm, own):
                        try:
                            other.generate("a", GREEDY)
                        except RuntimeError as error:
                            print(error)
                    sys.exit(3)
                print(waited(pid))
                assert own.generate("a", GREEDY)[0].outputs == expected
            sys.exit(4)
        print(waited(pid))
        """,
        target_dir,
    )
    *refusals, inner, outer = output.splitlines()
    assert len(refusals) == 2 and all("this LLM was built in process" in r for r in refusals)
    assert (inner, outer) == ("3", "4")


def test_a_forked_child_leaves_a_bare_executor_alone(target_dir: Path) -> None:
    output = assert_succeeds(
        """
        from paceline import _core
        from paceline.loader import load_checkpoint

        options = {"max_model_len": 64, "kv_cache_bytes": 8 << 20}
        executor = _core.Executor(load_checkpoint(sys.argv[1]).model, None, options)
        poller = threading.Thread(target=executor.poll, args=(300,))
        poller.start()
        pid = os.fork()
        if pid == 0:
            for call in (executor.poll, executor.stats):
                try:
                    call()
                except RuntimeError as error:
                    print(error)
            print(repr(executor), flush=True)
            executor.close()
            del executor
            sys.exit(0)
        print(waited(pid))
        poller.join()
        assert executor.poll() == []
        """,
        target_dir,
    )
    *refusals, shown, code = output.splitlines()
    assert len(refusals) == 2 and all("was forked from" in refusal for refusal in refusals)
    assert "closed" in shown and code == "0"


def test_a_pool_of_forked_workers_refuses_and_ends(target_dir: Path) -> None:
    output = assert_succeeds(
        """
        import multiprocessing

        llm = build()

        def use(prompt):
            return llm.generate(prompt, GREEDY)

        expected = use("a")[0].outputs
        with multiprocessing.get_context("fork").Pool(2) as pool:
            assert pool.map(len, ["a", "bc"]) == [1, 2]
            try:
                pool.apply_async(use, ("a",)).get(timeout=HANG_LIMIT_S)
            except RuntimeError as error:
                print(error)
            pool.close()
            pool.join()
        assert use("a")[0].outputs == expected
        """,
        target_dir,
    )
    assert "this LLM was built in process" in output


# ---- the interpreter's exit ----------------------------------------------------------------------


@pytest.mark.parametrize("delay_ms", [0, 2, 5, 11])
def test_a_daemon_thread_that_builds_llms_does_not_abort_the_exit(
    target_dir: Path, delay_ms: int
) -> None:
    result = run_script(
        """
        started = threading.Event()

        def build_again_and_again():
            while True:
                try:
                    with build() as llm:
                        started.set()
                        llm.memory_report()
                except RuntimeError as error:  # the exit has begun
                    refusals.append(error)
                    return

        refusals = []
        threading.Thread(target=build_again_and_again, daemon=True).start()
        started.wait()
        time.sleep(float(sys.argv[2]) / 1e3)
        """,
        target_dir,
        delay_ms,
    )
    assert (result.returncode, result.stderr) == (0, "")


def test_a_daemon_thread_that_generates_does_not_abort_the_exit(target_dir: Path) -> None:
    # A thread that the exit overtakes ends without a traceback, wherever it is.
    assert_succeeds(
        """
        llm = build()
        started = threading.Event()

        def generate_again_and_again():
            while True:
                llm.generate("a", GREEDY)
                llm.memory_report()
                started.set()

        for _ in range(4):
            threading.Thread(target=generate_again_and_again, daemon=True).start()
        started.wait()
        """,
        target_dir,
    )


def test_closing_while_another_thread_calls_says_so(target_dir: Path) -> None:
    with LLM(target_dir, max_model_len=64) as llm:

        def call(executor: Any) -> Any:
            llm.close()  # as another thread would, after this one has checked
            return executor.stats()

        with pytest.raises(RuntimeError, match=r"^this LLM is closed$"):
            llm._dispatcher.call(call)


def test_a_daemon_thread_in_native_code_does_not_abort_the_exit() -> None:
    assert_succeeds(
        """
        from paceline import _core

        started = threading.Event()

        def call_again_and_again():
            while True:
                _core.cuda_status()
                started.set()

        for _ in range(4):
            threading.Thread(target=call_again_and_again, daemon=True).start()
        started.wait()
        """
    )


def test_an_llm_works_in_exit_handlers_that_were_registered_after_the_import(
    target_dir: Path,
) -> None:
    output = assert_succeeds(
        """
        import atexit

        llm = build()
        atexit.register(lambda: print(len(llm.generate("a", GREEDY)[0].outputs[0].token_ids)))
        """,
        target_dir,
    )
    assert output.strip() == "8"


# ---- pickling ------------------------------------------------------------------------------------


def exception_classes() -> list[type[Exception]]:
    exported = [getattr(paceline, name) for name in paceline.__all__]
    return [kind for kind in exported if isinstance(kind, type) and issubclass(kind, Exception)]


def test_all_exceptions_are_found() -> None:
    assert {kind.__name__ for kind in exception_classes()} == {
        "BusyError",
        "DeviceError",
        "InternalError",
        "ModelFileError",
        "ModelNotFoundError",
        "OutOfMemoryError",
        "RequestError",
    }


@pytest.mark.parametrize("kind", exception_classes())
@pytest.mark.parametrize("duplicate", [copy.copy, lambda e: pickle.loads(pickle.dumps(e))])
def test_exceptions_survive_pickling(kind: type[Exception], duplicate: Any) -> None:
    error = kind("what happened", []) if kind is RequestError else kind("what happened")
    error.add_note("while testing")
    other = duplicate(error)
    assert type(other) is kind
    assert (str(other), other.args) == (str(error), error.args)
    assert other.__notes__ == ["while testing"]


def test_a_request_error_keeps_its_outputs_when_pickled(llm: LLM) -> None:
    params = SamplingParams(max_tokens=4, seed=0, logprobs=2, prompt_logprobs=1)
    outputs: list[RequestOutput] = llm.generate(["a", "b"], params)
    error = pickle.loads(pickle.dumps(RequestError("prompt 1: broke", outputs)))
    assert str(error) == "prompt 1: broke"
    assert error.outputs == outputs


def test_an_llm_is_not_pickled(llm: LLM) -> None:
    for duplicate in (pickle.dumps, copy.copy, copy.deepcopy):
        with pytest.raises(TypeError, match="an LLM cannot be pickled or copied"):
            duplicate(llm)
