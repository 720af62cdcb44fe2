# SPDX-License-Identifier: Apache-2.0
"""Models for benchmarks: checkpoints, or dummy weights of a given shape.

Dummy weights are normal with standard deviation 0.02, never zeros: zeros run faster than real data
on some machines.
"""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypedDict, Unpack

from paceline import _core
from paceline.bench.costs import MatrixCosts, matrix_costs
from paceline.checks import shorten
from paceline.console import tell
from paceline.hub import find_folder

if TYPE_CHECKING:
    from paceline.loader import LoadedModel

# Keys of configurations with an entry for each layer.
_PER_LAYER_KEYS: Final = ("layer_types", "mlp_layer_types", "compress_ratios")
#: The layers whose output a drafter in the target's own files reads.
_TAPS_KEY: Final = "dspark_target_layer_ids"
_CONFIG_DIR: Final = Path(__file__).parent / "configs"


@dataclass(frozen=True)
class BenchModel:
    """A model to measure.

    Attributes:
        name: Name in tables.
        loaded: The loaded model.
    """

    name: str
    loaded: LoadedModel

    @property
    def model(self) -> _core.Model:
        """The weights."""
        return self.loaded.model

    @property
    def config(self) -> dict[str, Any]:
        """The canonical description."""
        return self.loaded.config

    @functools.cached_property
    def costs(self) -> MatrixCosts:
        """Returns what the matrices cost that a pass reads and computes with."""
        return matrix_costs(self.config, self.model.weight_dtype, self.model.device)

    @property
    def item_bytes(self) -> int:
        """Bytes per element of plain matrices; of the target also those of the KV cache."""
        return 4 if self.model.weight_dtype == "float32" else 2


def config_names() -> list[str]:
    """Names of configurations that ship with the package; their weights are always dummies.

    "gemma3-101m" exceeds the cache of any core, and "gemma3-10m" is a tenth of it.
    """
    return sorted(path.stem for path in _CONFIG_DIR.glob("*.json"))


def is_config_name(source: str) -> bool:
    """Returns whether this is the name of a configuration rather than a folder."""
    return source in config_names()


class Loading(TypedDict, total=False):
    """How a model is loaded.

    Attributes:
        dtype: "auto", "float32" or "bfloat16"; a draft head takes the target's.
        device: Device of the weights: "cpu" or "cuda".
        gpus: The GPU of each rank, as for `paceline.loader.load_checkpoint`.
        show_progress: Say that dummy weights are made; show a bar while weights are read, if
            standard error is a terminal.
        revision: As for `LLM`.
        cache_dir: As for `LLM`.
        num_layers: Keep the first layers only, this many; None: all. Needs dummy weights. The MTP
            layer of a target, which lies behind those layers, is always kept.
    """

    dtype: str
    device: str
    gpus: Sequence[int]
    show_progress: bool
    revision: str | None
    cache_dir: str | os.PathLike[str] | None
    num_layers: int | None


def load(source: str, *, dummy: bool, **how: Unpack[Loading]) -> BenchModel:
    """Makes a model ready to measure.

    Args:
        source: A name of `config_names()`, a folder in Hugging Face layout, or a model of the hub.
        dummy: Read only the folder's `config.json` and use dummy weights. Named configurations
            always have dummy weights.
        how: How to load it.

    Returns:
        The model.

    Raises:
        ValueError: Neither a known name nor a folder, and not the name of a model on the hub; or
            the model has fewer layers than `num_layers`.
        paceline.ModelFileError: A file is damaged or incomplete.
        Exception: As for `paceline.hub.find_folder`.
    """
    from paceline.loader import dummy_model, load_checkpoint, load_dummy

    found = _find(source, dummy, how)
    is_shown, placed = how.get("show_progress", True), _placed(how)
    if is_shown and (dummy or not isinstance(found, Path)):
        tell(f"making dummy weights of {source} ...")  # which may take minutes
    if not isinstance(found, Path):
        loaded = dummy_model(found, source, **placed)
    elif dummy:
        loaded = load_dummy(found, **placed)
    else:
        loaded = load_checkpoint(found, progress=is_shown, **placed)
    return _bench_model(source, loaded)


def load_draft(
    source: str,
    target: BenchModel,
    *,
    method: str | None,
    draft_feedback: str | None = None,
    draft_tensor_parallel_size: int | None = None,
    dummy: bool,
    **how: Unpack[Loading],
) -> BenchModel:
    """Makes a drafter ready to measure: a draft model or a draft head.

    Args:
        source: As for `load`; the target itself for its MTP layer.
        target: Its target.
        method: A method of `SpeculativeConfig` with a model; None = that of its configuration.
        draft_feedback: Of an MTP layer, as in `SpeculativeConfig`.
        draft_tensor_parallel_size: As in `SpeculativeConfig`.
        dummy: As for `load`.
        how: How to load it.

    Returns:
        The drafter.

    Raises:
        ValueError: As for `load`; or the drafter has another method or another target.
        paceline.ModelFileError: A file is damaged or incomplete.
        Exception: As for `load`.
    """
    from paceline.loader import dummy_drafter, dummy_model, load_drafter, load_dummy_drafter

    found = _find(source, dummy, how)
    placed = {**_placed(how), "draft_tensor_parallel_size": draft_tensor_parallel_size}
    kind: dict[str, Any] = {"method": method, "draft_feedback": draft_feedback}
    if not isinstance(found, Path):
        dtype = placed.pop("dtype")
        drafter = dummy_drafter(found, target.loaded, source, **kind, **placed)
        if drafter is None:  # a model of its own
            found = named_config(source)
            drafter = dummy_model(found, source, dtype=dtype, is_drafter=True, **placed)
        loaded = drafter
    elif dummy:
        loaded = load_dummy_drafter(found, target.loaded, **kind, **placed)
    else:
        progress = how.get("show_progress", True)
        loaded = load_drafter(found, target.loaded, progress=progress, **kind, **placed)
    return _bench_model(source, loaded)


def first_layers(config: Mapping[str, Any], num_layers: int | None, source: str) -> dict[str, Any]:
    """The configuration of a model with its first layers only.

    Args:
        config: The object in a `config.json`.
        num_layers: How many layers to keep; None: all.
        source: The model, for messages.

    Raises:
        ValueError: The model has fewer layers, or does not say how many it has.
    """
    if num_layers is None:
        return dict(config)
    nested = config.get("text_config")
    text: Mapping[str, Any] = nested if isinstance(nested, dict) else config
    count = text.get("num_hidden_layers")
    if not isinstance(count, int) or not 1 <= num_layers <= count:
        raise ValueError(
            f"--num-layers is {num_layers}, but {source} has {count} layers "
            f'("num_hidden_layers"); allowed: 1 to {count}'
        )
    # Lists with an entry for each layer may go on with those of MTP layers.
    cut = {
        key: [*value[:num_layers], *value[count:]]
        if key in _PER_LAYER_KEYS and isinstance(value, list)
        else value
        for key, value in text.items()
    }
    cut["num_hidden_layers"] = num_layers
    taps = cut.get(_TAPS_KEY)
    if isinstance(taps, list):
        # The stages of such a drafter read the last layers, one each.
        if len(taps) > num_layers:
            raise ValueError(
                f"--num-layers is {num_layers}, but the drafter of {source} reads {len(taps)} "
                f"layers; allowed: {len(taps)} to {count}"
            )
        cut[_TAPS_KEY] = list(range(num_layers - len(taps), num_layers))
    return cut if text is config else {**config, "text_config": cut}


def _placed(how: Loading) -> dict[str, Any]:
    return {
        "dtype": how.get("dtype", "auto"),
        "device": how.get("device", "cpu"),
        "gpus": how.get("gpus", ()),
    }


def _find(source: str, dummy: bool, how: Loading) -> Path | dict[str, Any]:
    """The folder of a model, downloaded if need be; or the configuration, if it is that of a name
    or some layers are left out.

    Raises:
        ValueError: It is no folder, and neither the name of a configuration nor that of a model.
    """
    num_layers = how.get("num_layers")
    if is_config_name(source):
        _check_no_revision(source, how.get("revision"))
        return first_layers(named_config(source), num_layers, source)
    # Old models of the hub have names without a slash, which would be mistyped configurations.
    if dummy and not Path(source).is_dir() and "/" not in source:
        raise ValueError(
            f"model is {shorten(source)}; allowed: a folder, a model of the Hugging Face Hub such "
            f"as organization/name, or one of {', '.join(config_names())} (dummy weights)"
        )
    folder = find_folder(
        source,
        revision=how.get("revision"),
        cache_dir=how.get("cache_dir"),
        needs_weights=not dummy,
        progress=how.get("show_progress", True),
    )
    if num_layers is None:
        return folder
    from paceline.loader import CheckpointFolder

    return first_layers(CheckpointFolder(folder).config.values, num_layers, source)


def _check_no_revision(name: str, revision: str | None) -> None:
    if revision is not None:
        raise ValueError(
            f"the revision is {shorten(revision)}, but {name} is a configuration that ships with "
            "the package; allowed: a revision of a model on the hub"
        )


def _bench_model(source: str, loaded: LoadedModel) -> BenchModel:
    name = Path(source).name + (" (dummy)" if loaded.is_dummy else "")
    return BenchModel(name, loaded)


def named_config(name: str) -> dict[str, Any]:
    """The configuration of a name of `config_names()`."""
    config: dict[str, Any] = json.loads((_CONFIG_DIR / f"{name}.json").read_text("utf-8"))
    return config
