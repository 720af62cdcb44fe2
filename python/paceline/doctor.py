# SPDX-License-Identifier: Apache-2.0
"""`paceline doctor`: what is installed, and does it work."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import sys
from typing import Any, Final

from paceline import _core

_REQUIRED: Final = ("numpy", "tokenizers", "tqdm")
_OPTIONAL: Final = ("torch", "transformers")
_PROMPT: Final = "def read_lines(path):"
_NUM_SPECULATIVE_TOKENS: Final = 4
_NUM_TOKENS: Final = 48


def examine() -> dict[str, Any]:
    """Collects facts and runs the self-check.

    Returns:
        A dict of plain JSON types; `["self_check"]["is_ok"]` is the verdict.
    """
    build = _core.build_info()
    return {
        "version": _core.version(),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "build": dict(build),
        "devices": ["cpu"],
        "num_cores": build["num_cores"],
        "num_affinity_cores": len(os.sched_getaffinity(0))
        if hasattr(os, "sched_getaffinity")
        else None,
        "packages": {name: _version_of(name) for name in (*_REQUIRED, *_OPTIONAL)},
        "location": os.path.dirname(os.path.abspath(__file__)),
        "self_check": check_self_draft(),
    }


def check_self_draft() -> dict[str, Any]:
    """Lets the demo's drafter draft for itself: every draft must be accepted.

    Returns:
        "is_ok", and either "runs" (one dict per temperature) or "error".
    """
    from paceline.demo import find_demo
    from paceline.llm import LLM
    from paceline.loader import load_checkpoint
    from paceline.sampling import SamplingParams

    try:
        folder = find_demo("draft_model").draft
        model = load_checkpoint(folder, progress=False)
        config = {
            "method": "draft_model",
            "model": str(folder),
            "num_speculative_tokens": _NUM_SPECULATIVE_TOKENS,
        }
        runs = []
        with LLM.from_loaded(
            model, model, speculative_config=config, max_num_seqs=2, max_model_len=128
        ) as llm:
            for temperature in (0.0, 1.0):
                params = SamplingParams(
                    temperature=temperature, max_tokens=_NUM_TOKENS, seed=0, ignore_eos=True
                )
                metrics = llm.generate(_PROMPT, params)[0].metrics
                assert metrics.speculative_decoding is not None
                runs.append(
                    {
                        "temperature": temperature,
                        "draft_acceptance_rate": metrics.speculative_decoding[
                            "draft_acceptance_rate"
                        ],
                        "num_draft_tokens": metrics.speculative_decoding["num_draft_tokens"],
                        "tokens_per_second": metrics.tokens_per_second,
                    }
                )
    except Exception as error:
        # The doctor reports whatever is wrong instead of failing from it.
        return {"is_ok": False, "error": f"{type(error).__name__}: {error}"}
    return {"is_ok": all(run["draft_acceptance_rate"] == 1.0 for run in runs), "runs": runs}


def report_text(report: dict[str, Any]) -> str:
    """Puts what `examine` found in lines for people.

    Args:
        report: What `examine` returned.

    Returns:
        The text, without a final line end.
    """
    build = report["build"]
    rows = [
        ("paceline", f"{report['version']} in {report['location']}"),
        ("python", f"{report['python']} ({sys.implementation.name}), {report['platform']}"),
        ("compiler", build["compiler"]),
        ("cpu", build["cpu_features"] or "no vector extension that the kernels use"),
        ("cuda", "in this build" if build["has_cuda"] else "not in this build"),
        ("devices", ", ".join(report["devices"])),
        ("cores", f"{report['num_cores']} usable; threads of the ops: as many unless num_threads"),
    ]
    for name, version in report["packages"].items():
        absent = "MISSING" if name in _REQUIRED else "not installed (optional)"
        rows.append((name, version or absent))
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
            f"{'self-check':<18}{verdict}: the demo drafts for itself at temperature "
            f"{run['temperature']:g}, {share} drafts accepted"
        )
    return "\n".join(lines)


def _version_of(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
