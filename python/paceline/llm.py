# SPDX-License-Identifier: Apache-2.0
"""`LLM`: a target model, an optional drafter, and the engine that runs them."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from typing import Any, Self, Unpack

from paceline import lifetime
from paceline._core import ModelNotFoundError
from paceline.checks import (
    MODEL,
    check_choice,
    check_keywords,
    check_path,
    check_revision,
    check_unknown,
    shorten,
)
from paceline.config import LOAD_FORMATS, EngineConfig
from paceline.device import chosen_gpus, resolve_device
from paceline.engine_options import EngineArguments
from paceline.loader import LoadedModel, StateDict, load_pair
from paceline.model_sources import find_models, find_tokenizer
from paceline.option_schema import ARGUMENTS, lists_options, split_unknown
from paceline.running_llm import RunningLLM
from paceline.speculative_config import SpeculativeConfig, ignored_keys
from paceline.startup import check_before_loading
from paceline.weights import from_mappings, from_modules, load_state_dicts


class LLM(RunningLLM):
    """A loaded model that generates, with or without speculative decoding.

    All methods are thread-safe. Requests from several threads run in the same batch.

    Close an LLM with `close()` or a `with` block to free its memory at once; otherwise it is freed
    when the object is collected or the interpreter exits. An LLM cannot be pickled, and it cannot
    be used in a forked child process: build it there, or use multiprocessing's "spawn" method.

    Example:
        >>> llm = LLM("path/to/model", speculative_config={"method": "draft_model",
        ...           "model": "path/to/draft", "num_speculative_tokens": 4})
        >>> llm.generate("def quicksort(", SamplingParams(temperature=0.0))[0].outputs[0].text

    The methods that generate are those of `RunningLLM`, its attributes and reports those of
    `RunningEngine`.
    """

    @lists_options
    def __init__(
        self,
        model: str | os.PathLike[str],
        *,
        speculative_config: SpeculativeConfig | Mapping[str, Any] | str | None = None,
        tokenizer: str | os.PathLike[str] | None = None,
        load_format: str = "auto",
        revision: str | None = None,
        cache_dir: str | os.PathLike[str] | None = None,
        show_progress: bool = True,
        **engine: Unpack[EngineArguments],
    ) -> None:
        """Loads the models and starts the engine.

        Args:
            model: The target: a folder with a checkpoint in Hugging Face layout, or a model of the
                Hugging Face Hub, "name" or "organization/name", which is downloaded to the hub's
                cache. A folder of that name wins, and strings such as "./name" are always folders.
                A drafter in the layout of the `speculators` package is allowed as well: the target
                that it names is loaded, and it drafts. So is a folder of `paceline convert`, with
                its drafter.
                If the model has no `tokenizer.json`, prompts must be token ids and outputs have no
                text.
            speculative_config: How to draft, as a mapping or JSON with vLLM's keys; see
                `SpeculativeConfig`. None = the drafter that the model's folder brings, else plain
                decoding; `{"method": None}` switches drafting off.
            tokenizer: Another folder with a `tokenizer.json`, that file itself, or another model of
                the hub, whose tokenizer and chat template take the place of the model's own. Its
                token ids must mean the same. None = the model's own.
            load_format: "auto" reads the weights from the checkpoint. "dummy" makes random weights
                (normal, standard deviation 0.02) for target and drafter, and needs only their
                `config.json`.
            revision: For a target on the hub: a branch, a tag or a commit. None = the default
                branch. (`speculative_config` has a key of that name for the drafter.)
            cache_dir: The hub's cache, for target and drafter. None = that of huggingface_hub,
                whose environment variables hold: HF_HOME, HF_TOKEN, HF_HUB_OFFLINE, ...
            **engine: options.toml describes each.
            show_progress: Show progress bars while models are downloaded and loaded, and while CUDA
                graphs are captured, if standard error is a terminal. (The logger "paceline" reports
                the use of memory at level INFO.)

        Raises:
            TypeError: An argument does not exist. The message lists those that do. Arguments of
                vLLM are accepted where they change nothing, and the logger "paceline" lists them.
            ValueError: An argument is not allowed, or the drafter does not fit the target.
            NotImplementedError: A method, model or device is not supported yet.
            paceline.ModelNotFoundError: A folder or file does not exist; or the hub has no such
                model or revision, or refuses access.
            paceline.ModelFileError: A file is damaged or lacks required content.
            paceline.OutOfMemoryError: There is not enough memory for weights, KV pool or workspace.
            paceline.DeviceError: The GPU or its driver failed, or the system refused a
                thread.
            ConnectionError: The hub cannot be reached, or fails, and the model is not in its cache.
            RuntimeError: The Python interpreter is exiting.
        """
        options, unknown = split_unknown(engine)
        check_unknown("LLM", LLM.__init__, unknown, options)
        check_path("model", model, MODEL)
        check_revision("revision", revision)
        if cache_dir is not None:
            check_path("cache_dir", cache_dir, "the folder of the hub's cache")
        check_choice("load_format", load_format, LOAD_FORMATS)
        config = EngineConfig(**options)
        speculative = None
        if speculative_config is not None:
            speculative = SpeculativeConfig.parse(speculative_config)
        check_before_loading(config, speculative)
        resolved = resolve_device(config.device)
        tokenizer_info = None
        try:
            sources = find_models(
                model,
                speculative,
                revision=revision,
                cache_dir=cache_dir,
                load_format=load_format,
                progress=show_progress,
            )
            if tokenizer is not None:
                tokenizer_info = find_tokenizer(
                    tokenizer, cache_dir=cache_dir, progress=show_progress
                )
        except (ModelNotFoundError, ConnectionError) as error:
            # The message says it all, and a traceback through the search would hide it.
            raise error.with_traceback(None) from None
        speculative = sources.speculative
        check_before_loading(config, speculative)
        gpus = chosen_gpus(resolved, config.tensor_parallel_size, config.devices)
        with lifetime.delayed_exit():
            target, draft = load_pair(
                sources.target,
                sources.draft,
                method=None if speculative is None else speculative.method,
                draft_feedback=None if speculative is None else speculative.draft_feedback,
                dtype=config.dtype,
                device=resolved,
                gpus=gpus,
                draft_tensor_parallel_size=(
                    None if speculative is None else speculative.draft_tensor_parallel_size
                ),
                load_format=load_format,
                progress=show_progress,
            )
            lifetime.check_not_exiting()
            if tokenizer_info is not None:
                target = dataclasses.replace(target, tokenizer=tokenizer_info)
            ignored = unknown | ignored_keys(speculative_config)
            self._start(
                target, draft, config, speculative, show_progress=show_progress, ignored=ignored
            )

    @classmethod
    def from_loaded(
        cls,
        target: LoadedModel,
        draft: LoadedModel | None = None,
        *,
        speculative_config: SpeculativeConfig | Mapping[str, Any] | str | None = None,
        show_progress: bool = True,
        **engine: Unpack[EngineArguments],
    ) -> Self:
        """Starts an engine on models that are already loaded. Several engines may share models.

        Args:
            target: The result of `paceline.loader.load_checkpoint`.
            draft: The drafter: the result of `load_checkpoint` or `load_drafter`. Required if
                speculative_config has a method with a model, and not allowed otherwise.
            speculative_config: As for `LLM`. Its `model` is only a name here.
            show_progress: As for `LLM`.
            **engine: Fields of `EngineConfig`. The engine runs on the device that the models are
                on; a `device` other than "auto" must be that device.

        Returns:
            The LLM.

        Raises:
            ValueError: As for `LLM`.
        """
        check_keywords("EngineConfig", engine, list(ARGUMENTS))
        config = EngineConfig(**engine)
        speculative = None
        if speculative_config is not None:
            speculative = SpeculativeConfig.parse(speculative_config).completed("from_loaded")
        needs_draft = speculative is not None and speculative.has_model
        if needs_draft != (draft is not None):
            raise ValueError(
                f"draft is {shorten(draft)} and speculative_config is "
                f"{shorten(speculative_config)}; allowed: both or neither, except that methods "
                "'ngram' and 'custom' have no draft"
            )
        if config.device not in ("auto", target.model.device):
            raise ValueError(
                f"device is {config.device!r}, but the target is on {target.model.device!r}; "
                f"allowed: 'auto' or {target.model.device!r}, or a target that is loaded to "
                f"{config.device!r}"
            )
        resolve_device(target.model.device)
        llm = cls.__new__(cls)
        with lifetime.delayed_exit():
            llm._start(target, draft, config, speculative, show_progress=show_progress)
        return llm

    @classmethod
    def from_state_dict(
        cls,
        config: object,
        state_dict: Mapping[str, Any],
        *,
        tokenizer: object = None,
        generation_config: object = None,
        draft_config: object = None,
        draft_state_dict: Mapping[str, Any] | None = None,
        speculative_config: SpeculativeConfig | Mapping[str, Any] | str | None = None,
        show_progress: bool = True,
        **engine: Unpack[EngineArguments],
    ) -> Self:
        """Starts an engine on weights in memory, which are copied and converted once.

        The names of tensors are those of Hugging Face checkpoints, and the checks are those for
        files. Tensors are read through DLPack: those of torch, numpy, jax, cupy and others, on the
        CPU or the GPU, with any strides.

        Args:
            config: What `config.json` holds, as a mapping or an object with `to_dict()`.
            state_dict: The tensors by name: float32, bfloat16 or float16.
            tokenizer: None (prompts are token ids and outputs have no text), the path of a
                `tokenizer.json` or of its folder, a `tokenizers.Tokenizer`, or a fast tokenizer of
                transformers, whose chat template and special tokens are used too. It is also the
                drafter's.
            generation_config: What `generation_config.json` holds, such as end-of-sequence ids;
                None = those of `config`.
            draft_config: As `config`, for a drafter of any kind.
            draft_state_dict: As `state_dict`, for the drafter.
            speculative_config: As for `LLM`, without `model`. Required with a drafter.
            show_progress: As for `LLM`.
            **engine: Fields of `EngineConfig`, such as `device` and `dtype`.

        Returns:
            The LLM. Its weights equal those of a folder with the same tensors, bit for bit.

        Raises:
            paceline.ModelFileError: A tensor is missing, unknown, misshapen or cannot be read, or
                the configuration is wrong; names it.
            Exception: As for `LLM`.
        """
        pair = from_mappings(
            config, state_dict, tokenizer, generation_config, draft_config, draft_state_dict
        )
        return cls._from_memory(*pair, speculative_config, show_progress, engine)

    @classmethod
    def from_module(
        cls,
        module: Any,
        *,
        tokenizer: object = None,
        draft_module: Any = None,
        speculative_config: SpeculativeConfig | Mapping[str, Any] | str | None = None,
        show_progress: bool = True,
        **engine: Unpack[EngineArguments],
    ) -> Self:
        """Starts an engine on a copy of the weights of a model of transformers.

        Args:
            module: The model. Its `config`, `generation_config` and `state_dict()` are read.
            tokenizer: As for `from_state_dict`.
            draft_module: A draft model, or a Gemma 4 assistant.
            speculative_config: As for `from_state_dict`.
            show_progress: As for `LLM`.
            **engine: As for `from_state_dict`.

        Returns:
            The LLM.

        Raises:
            ValueError: A module has no `config` or no `state_dict()`.
            Exception: As for `from_state_dict`.
        """
        pair = from_modules(module, tokenizer, draft_module)
        return cls._from_memory(*pair, speculative_config, show_progress, engine)

    @classmethod
    def _from_memory(
        cls,
        target: StateDict,
        draft: StateDict | None,
        speculative_config: SpeculativeConfig | Mapping[str, Any] | str | None,
        show_progress: bool,
        engine: EngineArguments,
    ) -> Self:
        check_keywords("EngineConfig", engine, list(ARGUMENTS))
        config = EngineConfig(**engine)  # checked before the weights are read
        with lifetime.delayed_exit():
            loaded, drafter, speculative = load_state_dicts(
                target,
                draft,
                speculative_config,
                config=config,
                progress=show_progress,
            )
            return cls.from_loaded(
                loaded,
                drafter,
                speculative_config=speculative,
                show_progress=show_progress,
                **engine | {"device": loaded.model.device},
            )
