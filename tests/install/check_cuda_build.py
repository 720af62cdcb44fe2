# SPDX-License-Identifier: Apache-2.0
"""A CUDA build where there may be no GPU, and not even a driver: imports, says so, runs on the CPU.

Usage: check_cuda_build.py, with the CUDA build's module on PYTHONPATH.
"""

from paceline import LLM, SamplingParams, _core
from paceline.demo import demo_paths

status = _core.cuda_status()
assert status["is_built"], "this is no CUDA build"
assert _core.build_info()["has_cuda"]
target, draft = demo_paths("draft_model")
with LLM(
    target,
    device="cpu",
    speculative_config={"model": str(draft), "num_speculative_tokens": 3},
    max_model_len=256,
    show_progress=False,
) as llm:
    text = llm.generate(["def read_lines(path):"], SamplingParams(temperature=0, max_tokens=16))
    assert len(text[0].outputs[0].token_ids) == 16
if not status["is_usable"]:
    assert status["reason"], "unusable, but no reason given"
    try:
        LLM(target, device="cuda", show_progress=False)
    except NotImplementedError as error:
        assert status["reason"] in str(error), error
    else:
        raise AssertionError("device 'cuda' was accepted without a GPU")
print(f"CUDA build: runs on the CPU; GPU: {status['name'] or status['reason']}")
