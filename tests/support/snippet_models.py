# SPDX-License-Identifier: Apache-2.0
"""The models that the pages name, behind a stand-in of the hub.

They are the demo checkpoints, and tiny random ones of families that have no demo.
"""

from __future__ import annotations

import json
from pathlib import Path

import eagle_models
import mtp_models
import tiny_models
from paceline.demo import demo_paths
from tiny_models import TinySpec

# What a page names, and the demo that stands in for it: the target of a demo, or its drafter.
TARGETS = {
    "Qwen/Qwen3-8B": "eagle3",
    "google/gemma-3-27b-it": "draft_model",
    "google/gemma-4-E4B-it": "gemma4_mtp",
}
DRAFTERS = {
    "RedHatAI/Qwen3-8B-speculator.eagle3": "eagle3",
    "google/gemma-3-270m-it": "draft_model",
    "google/gemma-4-E4B-it-assistant": "gemma4_mtp",
}
_TEMPLATE = "{% for message in messages %}{{ message.content }}{% endfor %}"


def make_models(folder: Path) -> dict[str, Path]:
    """Makes the models in a folder.

    Args:
        folder: An empty folder.

    Returns:
        The folder of each model by its id, as `HubServer` takes them.
    """
    made = {}
    for index, names in enumerate((TARGETS, DRAFTERS)):  # demo_paths: the target, the drafter
        for name, demo in names.items():
            source = demo_paths(demo)[index]
            model = folder / name
            model.mkdir(parents=True)
            for file in source.iterdir():
                (model / file.name).symlink_to(file)
            made[name] = model
    # A draft head in the speculators layout names its verifier, so that it can be loaded alone.
    _name_verifier(made["RedHatAI/Qwen3-8B-speculator.eagle3"], "Qwen/Qwen3-8B")
    return made | _make_gpt_oss(folder) | _make_glm(folder)


def _name_verifier(draft_head: Path, name: str) -> None:
    config = draft_head / "config.json"
    values = json.loads(config.read_text())
    values["speculators_config"]["verifier"]["name_or_path"] = name
    config.unlink()
    config.write_text(json.dumps(values))


def _make_glm(folder: Path) -> dict[str, Path]:
    """A tiny GLM-4.7-Flash with its MTP layer."""
    name = "zai-org/GLM-4.7-Flash"
    (folder / name).parent.mkdir(parents=True, exist_ok=True)
    path = mtp_models.write(TinySpec("glm4_moe_lite"), folder / name)
    (path / "chat_template.jinja").write_text(_TEMPLATE)
    return {name: path}


def _make_gpt_oss(folder: Path) -> dict[str, Path]:
    """Tiny GPT-OSS models with mxfp4 experts, and the draft head of the smaller one."""
    names = {
        "openai/gpt-oss-20b": TinySpec("gpt_oss", num_layers=8, quantization="mxfp4"),
        "openai/gpt-oss-120b": TinySpec("gpt_oss", num_experts=16, quantization="mxfp4"),
    }
    made = {}
    for name, spec in names.items():
        made[name] = folder / name
        tiny_models.write(spec, made[name])
        (made[name] / "chat_template.jinja").write_text(_TEMPLATE)
    head = "RedHatAI/gpt-oss-20b-speculator.eagle3"
    made[head] = folder / head
    eagle_models.write(
        eagle_models.EagleSpec("speculators", norm_before_fc=True, norm_before_residual=True),
        made["openai/gpt-oss-20b"],
        made[head],
    )
    _name_verifier(made[head], "openai/gpt-oss-20b")
    return made
