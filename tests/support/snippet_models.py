# SPDX-License-Identifier: Apache-2.0
"""The models that the pages name, as the demo checkpoints behind a stand-in of the hub."""

from __future__ import annotations

import json
from pathlib import Path

from paceline.demo import demo_paths

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
    config = made["RedHatAI/Qwen3-8B-speculator.eagle3"] / "config.json"
    values = json.loads(config.read_text())
    values["speculators_config"]["verifier"]["name_or_path"] = "Qwen/Qwen3-8B"
    config.unlink()
    config.write_text(json.dumps(values))
    return made
