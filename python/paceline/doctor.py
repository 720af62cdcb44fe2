# SPDX-License-Identifier: Apache-2.0
"""`paceline doctor`: reports the installation and checks that it works."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import sys
from typing import Any, Final

from paceline import _core
from paceline.device import CUBLASLT_NAME, CUBLASLT_VARIABLE, find_cublaslt, usable_devices

_REQUIRED: Final = ("huggingface_hub", "jinja2", "numpy", "tokenizers", "tqdm")
# Packages of the extras, and the extra that installs each.
_EXTRAS: Final = {"torch": "torch", "matplotlib": "bench", "llguidance": "structured"}
_PROMPT: Final = "def read_lines(path):"
_NUM_SPECULATIVE_TOKENS: Final = 4
_NUM_TOKENS: Final = 48


def examine() -> dict[str, Any]:
    """Describes the installation and runs the self-check.

    Returns:
        A dict of plain JSON types; `["self_check"]["is_ok"]` is the result of the check.
    """
    build = _core.build_info()
    return {
        "version": _core.version(),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "build": dict(build),
        "devices": [device for device in usable_devices() if device != "auto"],
        "cuda": _describe_cuda(),
        "cublaslt": find_cublaslt(),
        "num_cores": build["num_cores"],
        "num_affinity_cores": len(os.sched_getaffinity(0))
        if hasattr(os, "sched_getaffinity")
        else None,
        "packages": {name: _version_of(name) for name in (*_REQUIRED, *_EXTRAS)},
        "hub": describe_hub(),
        "location": os.path.dirname(os.path.abspath(__file__)),
        "self_check": check_self_draft(),
    }


def _describe_cuda() -> dict[str, Any]:
    """The status of the GPU with its free memory; a GPU that is full or broken is not usable."""
    status = dict(_core.cuda_status()) | {"free_bytes": 0}
    if status["is_usable"]:
        try:
            status["free_bytes"] = _core.cuda_free_bytes()
        except (RuntimeError, MemoryError) as error:
            status |= {"is_usable": False, "reason": f"GPU 0 cannot be used: {error}"}
    return status


def describe_hub() -> dict[str, Any] | None:
    """Where models of the Hugging Face Hub come from; sends no request.

    Returns:
        A dict with "endpoint", "cache_dir", "is_offline" (whether HF_HUB_OFFLINE switches the
        hub off) and "has_token"; None without huggingface_hub.
    """
    try:
        from huggingface_hub import constants, get_token
    except ImportError:
        return None
    return {
        "endpoint": constants.ENDPOINT,
        "cache_dir": constants.HF_HUB_CACHE,
        "is_offline": constants.HF_HUB_OFFLINE,
        "has_token": get_token() is not None,
    }


def check_self_draft() -> dict[str, Any]:
    """Runs the demo model with itself as drafter on every device; all drafts must be accepted.

    Returns:
        A dict with "is_ok", and either "runs" (one dict per device and temperature) or "error".
    """
    from paceline.demo import find_demo
    from paceline.llm import LLM
    from paceline.sampling import SamplingParams

    try:
        demo = find_demo("draft_model")
        runs = []
        for device in usable_devices():
            if device == "auto":
                continue
            # The demo's drafter is faster, but its heads are too small for the GPU kernels.
            folder = str(demo.draft if device == "cpu" else demo.target)
            config = {
                "method": "draft_model",
                "model": folder,
                "num_speculative_tokens": _NUM_SPECULATIVE_TOKENS,
                "x": {"adaptive": False},
            }
            with LLM(
                folder, speculative_config=config, device=device, max_num_seqs=2,
                max_model_len=128, show_progress=False,
            ) as llm:  # fmt: skip
                for temperature in (0.0, 1.0):
                    params = SamplingParams(
                        temperature=temperature, max_tokens=_NUM_TOKENS, seed=0, ignore_eos=True
                    )
                    metrics = llm.generate(_PROMPT, params)[0].metrics
                    speculative = metrics.speculative_decoding
                    assert speculative is not None
                    runs.append(
                        {
                            "device": device,
                            "temperature": temperature,
                            "draft_acceptance_rate": speculative["draft_acceptance_rate"],
                            "num_draft_tokens": speculative["num_draft_tokens"],
                            "tokens_per_second": metrics.tokens_per_second,
                        }
                    )
    except Exception as error:
        # The doctor reports every error and does not fail itself.
        return {"is_ok": False, "error": f"{type(error).__name__}: {error}"}
    return {"is_ok": all(run["draft_acceptance_rate"] == 1.0 for run in runs), "runs": runs}


def report_text(report: dict[str, Any]) -> str:
    """Formats the result of `examine`.

    Args:
        report: The result of `examine`.

    Returns:
        Lines of text, without a final line end.
    """
    build = report["build"]
    rows = [
        ("paceline", f"{report['version']} in {report['location']}"),
        ("python", f"{report['python']} ({sys.implementation.name}), {report['platform']}"),
        ("compiler", build["compiler"]),
        ("cpu", build["cpu_features"] or "no vector extensions that the kernels use"),
        ("cuda", _cuda_text(report["cuda"])),
        *_kernel_rows(report["cuda"]),
        ("cublaslt", _cublaslt_text(report)),
        ("devices", ", ".join(report["devices"])),
        ("cores", f"{report['num_cores']}; ops use all cores unless num_threads is set"),
    ]
    for name, version in report["packages"].items():
        absent = "MISSING"
        if name in _EXTRAS:
            absent = f"not installed; optional: pip install 'paceline[{_EXTRAS[name]}]'"
        rows.append((name, version or absent))
    rows += _hub_rows(report["hub"])
    lines = [f"{name:<18}{value}" for name, value in rows]
    check = report["self_check"]
    if "error" in check:
        lines.append(f"{'self-check':<18}FAILED: {check['error']}")
        return "\n".join(lines)
    for run in check["runs"]:
        rate = run["draft_acceptance_rate"]
        verdict = "ok" if rate == 1.0 else "FAILED"
        share = "no drafts" if rate is None else f"{100 * rate:.1f} % of {run['num_draft_tokens']}"
        lines.append(
            f"{'self-check':<18}{verdict}: the demo model as its own drafter on {run['device']} at "
            f"temperature {run['temperature']:g}: {share} drafts accepted"
        )
    return "\n".join(lines)


def _hub_rows(hub: dict[str, Any] | None) -> list[tuple[str, str]]:
    if hub is None:
        return [("hub", "not usable: huggingface_hub is missing")]
    token = "with" if hub["has_token"] else "without"
    access = (
        "offline (HF_HUB_OFFLINE): only models in the cache load"
        if hub["is_offline"]
        else f"{hub['endpoint']}, {token} a token; not contacted now"
    )
    return [("hub", access), ("hub cache", hub["cache_dir"])]


def _cuda_text(status: dict[str, Any]) -> str:
    if not status["is_usable"]:
        return str(status["reason"])
    others = status["num_gpus"] - 1
    return (
        f"{status['name']}, sm_{status['compute_capability']}, {status['num_sms']} SMs, "
        f"{status['free_bytes'] / 2**30:.1f} of {status['total_bytes'] / 2**30:.1f} GiB free"
        + (f"; {others} more for tensor_parallel_size, devices or replicas" if others > 0 else "")
    )


def _kernel_rows(status: dict[str, Any]) -> list[tuple[str, str]]:
    if not status["is_built"]:
        return []
    built = ", ".join(f"sm_{one}" for one in status["architectures"].split(","))
    rows = [("cuda build", f"kernels for {built}")]
    if status["is_usable"]:
        tested = (
            "tests have run on such a GPU"
            if status["has_been_run"]
            else "compiled and emulated, but not run on such a GPU yet (H100 and H200 were)"
        )
        limits = (
            f"{status['block_shared_bytes'] >> 10} KB of shared memory a block, "
            f"{status['sm_shared_bytes'] >> 10} KB a multiprocessor"
        )
        rows.append(("cuda kernels", f"{status['kernels']}; {limits}; {tested}"))
    return rows


def _cublaslt_text(report: dict[str, Any]) -> str:
    if report["cublaslt"] is not None:
        return str(report["cublaslt"])
    if not report["cuda"]["is_usable"]:
        return "not searched: no usable GPU"
    return (
        f"no {CUBLASLT_NAME} in Python packages; the system's library folders are searched, and "
        f"{CUBLASLT_VARIABLE} can name a file or folder"
    )


def _version_of(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
