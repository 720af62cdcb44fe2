# SPDX-License-Identifier: Apache-2.0
"""From `LLM(...)` to the engine, each condition on `speculative_config` is checked in one place."""

from __future__ import annotations

import ast
import re
import traceback
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

import paceline
from paceline import LLM, SpeculativeConfig, _core, running_engine
from paceline.loader import LoadedModel, load_checkpoint
from paceline.option_schema import KEYS, Option
from paceline.speculative_fields import METHODS

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "python/paceline"
#: Where it runs from, which may be an installed copy.
INSTALLED = Path(paceline.__file__).parent
# The modules that a configuration passes on its way.
WALK = [
    *(f"speculative_{part}.py" for part in ("config", "fields", "checks")),
    *("llm.py", "model_sources.py", "weights.py", "startup.py", "running_engine.py"),
    *(f"loader/{path.name}" for path in sorted((PACKAGE / "loader").glob("*.py"))),
]

SCHEMA, CONDITIONS = "option_schema.check", "speculative_checks._check_conditions"
DRAFT: dict[str, Any] = {"method": "draft_model", "model": "draft", "num_speculative_tokens": 4}
LOOKUP: dict[str, Any] = {"method": "ngram", "num_speculative_tokens": 4}
CUSTOM: dict[str, Any] = {"method": "custom", "drafter": len, "num_speculative_tokens": 4}
BLOCK = {"rejection_sample_method": "block"}

# What is refused between keys and by what only Python sees, by the function that refuses it.
OF_PYTHON: list[tuple[dict[str, Any], str, str]] = [
    (LOOKUP | {"model": "draft"}, "model", "option_schema.check_method"),
    (LOOKUP | {"revision": "main"}, "revision", "option_schema.check_method"),
    (DRAFT | {"x": {"draft_feedback": "raw"}}, "draft_feedback", "option_schema.check_method"),
    (DRAFT | {"model": 7}, "model", "checks.check_path"),
    (DRAFT | {"revision": ".."}, "revision", "checks.check_revision"),
    ({"num_speculative_tokens": 1, "revision": "a"}, "revision", "speculative_checks._check_model"),
    (CUSTOM | {"drafter": None}, "drafter", "speculative_checks._check_drafter_is_given"),
    (LOOKUP | {"num_speculative_tokens": None}, "num_speculative_tokens",
     "speculative_checks.check_all"),
]  # fmt: skip
BETWEEN_KEYS: list[tuple[dict[str, Any], str]] = [
    (DRAFT | {"drafter": len}, "drafter"),
    (CUSTOM | {"prompt_lookup_min": 2}, "prompt_lookup_min"),
    (CUSTOM | {"prompt_lookup_max": 2}, "prompt_lookup_max"),
    (LOOKUP | {"prompt_lookup_min": 4, "prompt_lookup_max": 3}, "prompt_lookup_min"),
    (DRAFT | {"synthetic_acceptance_length": 2}, "synthetic_acceptance_length"),
    (
        DRAFT | {"rejection_sample_method": "synthetic", "synthetic_acceptance_length": 6},
        "synthetic_acceptance_length",
    ),
    (DRAFT | {"draft_sample_method": "greedy"}, "draft_sample_method"),
    (LOOKUP | BLOCK | {"draft_sample_method": "probabilistic"}, "draft_sample_method"),
    (CUSTOM | BLOCK | {"draft_sample_method": "probabilistic"}, "draft_sample_method"),
    (DRAFT | {"x": {"draft_proposals": 8}}, "draft_proposals"),
    (LOOKUP | BLOCK | {"x": {"draft_proposals": 8}}, "draft_proposals"),
    (DRAFT | {"x": {"draft_stop_threshold": 0.5}}, "draft_stop_threshold"),
    (LOOKUP | {"x": {"draft_stop_threshold": 0.5}}, "draft_stop_threshold"),
    (DRAFT | {"x": {"draft_position": "last"}}, "draft_position"),
    (CUSTOM | {"x": {"adaptive": True}}, "adaptive"),
]


def refusal(run: Callable[[], Any]) -> tuple[str, str]:
    """The function of the package that raises, and its message."""
    with pytest.raises((ValueError, NotImplementedError)) as error:
        run()
    frames = [
        f"{Path(frame.filename).stem}.{frame.name}"
        for frame in traceback.extract_tb(error.value.__traceback__)
        if Path(frame.filename).is_relative_to(INSTALLED)
    ]
    # The helpers of checks.py are those of the schema, if that calls them.
    site = SCHEMA if SCHEMA in frames else frames[-1]
    return site, str(error.value)


def start(config: Mapping[str, Any], target: LoadedModel, draft: LoadedModel) -> None:
    """Walks on to the engine, with models that are loaded already."""
    needs_draft = config["method"] not in ("ngram", "custom")
    LLM.from_loaded(
        target, draft if needs_draft else None, speculative_config=config, max_model_len=64
    ).close()


@pytest.fixture(scope="module")
def models(target_dir: Path, draft_dir: Path) -> tuple[LoadedModel, LoadedModel]:
    return load_checkpoint(target_dir), load_checkpoint(draft_dir)


def wrong_values(option: Option) -> list[Any]:
    """Values of a wrong type and out of range."""
    if option.choices:
        return ["nonesuch", 1]
    values: list[Any] = ["a"]
    if option.kind in ("int", "float"):
        values += [float("nan"), True]
        values += [] if option.low is None else [option.low - 1]
        values += [] if option.high is None else [option.high + 1]
        values += [] if option.below is None else [option.below]
    return values


@pytest.mark.parametrize("key", [name for name in KEYS if name not in ("model", "revision")])
def test_types_and_ranges_are_those_of_the_schema(key: str) -> None:
    for value in wrong_values(KEYS[key]):
        own = {"x": {key: value}} if KEYS[key].nested else {key: value}
        site, message = refusal(lambda own=own: SpeculativeConfig.parse(DRAFT | own))
        assert site == SCHEMA
        assert message.startswith(f"{KEYS[key].key} ")


@pytest.mark.parametrize(("config", "key", "site"), OF_PYTHON)
def test_what_only_python_sees_is_checked_in_python(
    config: dict[str, Any], key: str, site: str
) -> None:
    found, message = refusal(lambda: SpeculativeConfig.parse(config))
    assert (found, key in message) == (site, True)


@pytest.mark.parametrize(("config", "key"), BETWEEN_KEYS)
def test_conditions_between_keys_are_those_of_cpp(
    config: dict[str, Any],
    key: str,
    models: tuple[LoadedModel, LoadedModel],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    site, early = refusal(lambda: SpeculativeConfig.parse(config))
    assert site == CONDITIONS
    assert early.startswith(f"{KEYS[key].key} is ")
    # Without the early call nothing refuses it until the engine calls the same function.
    monkeypatch.setattr(_core, "check_options", lambda *_: None)
    site, late = refusal(lambda: start(config, *models))
    assert site == "running_engine._start"
    assert early.partition(";")[2].lower() == late.partition(";")[2].lower()


def test_a_second_check_is_found(
    models: tuple[LoadedModel, LoadedModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = DRAFT | {"x": {"draft_stop_threshold": 0.5}}
    monkeypatch.setattr(_core, "check_options", lambda *_: None)

    def check(*_: Any) -> None:
        raise ValueError("draft_stop_threshold is 0.5")

    monkeypatch.setattr(running_engine, "check_max_model_len", check)
    with pytest.raises(ValueError, match="draft_stop_threshold is") as error:
        start(config, *models)
    assert error.traceback[-1].name == "check"


def test_cpp_knows_the_methods_of_the_schema() -> None:
    for method in METHODS:
        _core.check_options({}, method)
    for option in KEYS.values():
        assert set(option.methods) <= {*METHODS}, option.name
    with pytest.raises(ValueError, match="method is 'nonesuch'"):
        _core.check_options({}, "nonesuch")


def test_python_and_cpp_refuse_a_method_with_the_same_words() -> None:
    for option in KEYS.values():
        if not option.methods or option.kind == "str":
            continue
        other = next(method for method in METHODS if method not in option.methods)
        value = {"int": 2, "float": 0.5}.get(option.kind, len)
        with pytest.raises(ValueError, match="but method is") as by_cpp:
            _core.check_options({option.name: value}, other)
        with pytest.raises(ValueError, match="but method is") as by_python:
            option.check_method(value, other)
        end = str(by_python.value).partition(", but ")[2]
        assert end.replace("leave it out", "") in str(by_cpp.value).replace("0 (off)", "").replace(
            "leave it out", ""
        )


# ---- the sources ---------------------------------------------------------------------------------


def refused_keys(source: str) -> Iterator[tuple[str, frozenset[str]]]:
    """The functions of a module that raise, and the keys that the conditions of a `raise` read."""
    for function in ast.walk(ast.parse(source)):
        if isinstance(function, ast.FunctionDef):
            yield from ((function.name, keys) for keys in _raises(function.body, frozenset()))


def _raises(body: list[ast.stmt], outer: frozenset[str]) -> Iterator[frozenset[str]]:
    for node in body:
        if isinstance(node, ast.Raise):
            if outer:
                yield outer
            continue
        inner = outer
        if isinstance(node, ast.If):
            read = {one.attr for one in ast.walk(node.test) if isinstance(one, ast.Attribute)}
            read |= {one.id for one in ast.walk(node.test) if isinstance(one, ast.Name)}
            inner = outer | (read & OWN_NAMES)
        for name in ("body", "orelse", "handlers", "finalbody"):
            nested = getattr(node, name, [])
            if not isinstance(node, ast.FunctionDef | ast.ClassDef):
                yield from _raises([*nested], inner)


#: Keys whose names are not those of anything else in the package.
OWN_NAMES = {name for name in KEYS if "_" in name or name == "adaptive"}


def sites(sources: Mapping[str, str]) -> dict[frozenset[str], set[str]]:
    """The functions with a `raise`, by the keys that its conditions read."""
    found: dict[frozenset[str], set[str]] = {}
    for module, source in sources.items():
        for function, keys in refused_keys(source):
            found.setdefault(keys, set()).add(f"{module}: {function}")
    return found


def sources_of_the_walk() -> dict[str, str]:
    # `paceline convert` has options of its own.
    names = [name for name in WALK if name != "loader/convert.py"]
    return {name: (PACKAGE / name).read_text("utf-8") for name in names}


def test_python_repeats_no_condition_of_cpp() -> None:
    # C++ cannot see that k is missing: at first it may be that of the drafter's folder.
    assert sites(sources_of_the_walk()) == {
        frozenset({"num_speculative_tokens"}): {
            "speculative_checks.py: check_all",
            "speculative_config.py: k",
        }
    }


PLANTED = """
def executor_options(config, speculative):
    if speculative.draft_stop_threshold > 0 and speculative.draft_driver != "while":
        raise ValueError("draft_stop_threshold needs 'while'")
"""


def test_a_planted_condition_is_found() -> None:
    before = sites(sources_of_the_walk())
    after = sites(sources_of_the_walk() | {"planted.py": PLANTED})
    keys = frozenset({"draft_stop_threshold", "draft_driver"})
    assert keys not in before and after[keys] == {"planted.py: executor_options"}


def refused_in_cpp(sources: Mapping[str, str]) -> dict[str, set[str]]:
    """The files that throw a message which begins with the name of a key, by key."""
    found: dict[str, set[str]] = {}
    for name, source in sources.items():
        for throw in re.findall(r"throw InvalidArgument\(.*?\);", source, re.DOTALL):
            first = re.search(r'"(\w+) is ', throw)
            if first is not None and first[1] in {*KEYS} - {"model"}:
                found.setdefault(first[1], set()).add(name)
    return found


def test_cpp_has_the_conditions_in_one_file() -> None:
    # A request has a number of drafts of its own.
    paths = [*(ROOT / "cpp/src").rglob("*.cc"), *(ROOT / "python/bindings").glob("*.cc")]
    sources = {
        path.name: path.read_text("utf-8") for path in paths if path.name != "request_checks.cc"
    }
    found = refused_in_cpp(sources)
    assert {"draft_proposals", "draft_stop_threshold", "adaptive"} <= set(found)
    assert set().union(*found.values()) == {"option_checks.cc"}
    planted = 'if (k == 0) throw InvalidArgument(concat("adaptive is true"));'
    assert refused_in_cpp(sources | {"setup.cc": planted})["adaptive"] == {
        "option_checks.cc",
        "setup.cc",
    }


def test_the_schema_is_asked_by_one_function() -> None:
    """Each key's `check` is called once for a configuration."""
    calls: list[str] = []
    original = Option.check

    def counted(option: Option, value: Any) -> Any:
        calls.append(option.name)
        return original(option, value)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Option, "check", counted)
        SpeculativeConfig.parse(DRAFT)
    assert calls == [*KEYS]
