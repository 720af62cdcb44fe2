# SPDX-License-Identifier: Apache-2.0
"""Checks a CUDA build on a machine that may have no GPU and no driver.

The build must import, report whether the GPU is usable, run on the CPU, and refuse device "cuda"
with the reason if the GPU is not usable. Run it with the CUDA build's module on PYTHONPATH.
"""

from paceline import LLM, SamplingParams, _core
from paceline.demo import demo_paths

status = _core.cuda_status()
assert status["is_built"], "the module on PYTHONPATH is not a CUDA build"
assert _core.build_info()["has_cuda"]
assert "90a" in status["architectures"].split(","), status
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
    assert status["reason"], "the GPU is unusable, but cuda_status() gives no reason"
    try:
        LLM(target, device="cuda", show_progress=False)
    except NotImplementedError as error:
        assert status["reason"] in str(error), error
    else:
        raise AssertionError("device 'cuda' was accepted without a GPU")
print(f"the CUDA build runs on the CPU; GPU: {status['name'] or status['reason']}")
