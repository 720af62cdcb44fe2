# SPDX-License-Identifier: Apache-2.0
"""Models of the Hugging Face Hub: which strings name one, and the folder that its files are in.

huggingface_hub does the downloading, and its cache and environment variables hold (`HF_HOME`,
`HF_TOKEN`, `HF_ENDPOINT`, `HF_HUB_OFFLINE`, ...). It is imported when a name is looked up. Only the
files that the loader reads are fetched; `wanted_files` chooses them from the repository's listing.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NoReturn

from paceline._core import ModelFileError, ModelNotFoundError
from paceline.checks import shorten
from paceline.loader.converted import FOLDER_NAME
from paceline.loader.files import CHAT_NAMES, exists, find, is_more_template
from paceline.loader.folder import (
    CONFIG_NAME,
    GENERATION_NAME,
    MASK_NAME,
    PICKLE_NAME,
    TOKENIZER_NAME,
    CheckpointFolder,
)
from paceline.loader.messages import name_some
from paceline.loader.section import MAX_CONFIG_BYTES
from paceline.loader.tokenizer import MAX_TOKENIZER_BYTES
from paceline.loader.weight_files import INDEX_NAME, WEIGHTS_NAME, shard_names

_logger = logging.getLogger("paceline")

_SETTINGS: Final = (CONFIG_NAME, GENERATION_NAME, TOKENIZER_NAME, *CHAT_NAMES)
# How often a listing is read again because the repository has changed since.
_NUM_LISTINGS: Final = 3
_MAX_REASON: Final = 200
_NO_HUB: Final = "it does not answer like a hub (check HF_ENDPOINT and the proxy)"


@dataclass(frozen=True)
class HubModel:
    """A model on the hub.

    Attributes:
        id: "name" or "organization/name".
        revision: A branch, a tag or a commit; None: the default branch.
        cache_dir: The hub's cache; None: huggingface_hub's own.
    """

    id: str
    revision: str | None = None
    cache_dir: Path | None = None

    def __str__(self) -> str:
        return self.id if self.revision is None else f"{self.id} (revision {self.revision!r})"


def find_folder(
    model: str | os.PathLike[str],
    *,
    revision: str | None = None,
    cache_dir: str | os.PathLike[str] | None = None,
    needs_weights: bool = True,
    progress: bool = True,
    argument: str = "model",
) -> Path:
    """Returns the folder of a model, and downloads the model if its name is one of the hub's.

    Args:
        model: A folder, or a model of the hub: "name" or "organization/name". A folder of that name
            wins. Path-like objects and strings such as "./name", "/name", "name/" and "a/b/c" are
            always folders.
        revision: For a model of the hub: a branch, a tag or a commit. None = the default branch.
        cache_dir: The hub's cache. None = huggingface_hub's own.
        needs_weights: Download the weights as well.
        progress: Show progress bars where standard error is a terminal.
        argument: The name of `model` in messages.

    Returns:
        The folder. A folder of the user's may be missing; the loader says so.

    Raises:
        ValueError: `revision` is given for a folder.
        ModelNotFoundError: There is no such model, revision or file, or access to it is refused; or
            it is not in the cache and the hub is switched off.
        ModelFileError: A file is larger than the loader would read.
        ConnectionError: The hub cannot be reached, or fails; and the model is not in the cache.
        OSError: The cache cannot be written.
    """
    if not isinstance(model, str) or find(Path(model)) is not None or not is_hub_id(model):
        if revision is not None:
            raise ValueError(
                f"the revision of {argument} is {shorten(revision)}, but {shorten(str(model))} is "
                "a folder; allowed: a revision of a model on the hub"
            )
        _check_no_mistake(model)
        return Path(model)
    return fetch(
        model,
        revision=revision,
        cache_dir=cache_dir,
        needs_weights=needs_weights,
        progress=progress,
    )


def _check_no_mistake(model: str | os.PathLike[str]) -> None:
    """Refuses an address, and a home folder that no shell has put in; neither is a folder."""
    if not isinstance(model, str) or find(Path(model)) is not None:
        return
    advice = ""
    if "://" in model:
        advice = "give the name of a model on the hub without an address, such as organization/name"
    elif model.startswith("~"):
        advice = "~ means the home folder in a shell only; give the whole path"
    if advice:
        raise ModelNotFoundError(f"{shorten(model)}: no such folder; {advice}")


def is_hub_id(name: str) -> bool:
    """Returns whether a string can be the name of a model on the hub; sends no request."""
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id

    try:
        validate_repo_id(name)
    except HFValidationError:
        return False
    return True


def fetch(
    id: str,
    *,
    revision: str | None = None,
    cache_dir: str | os.PathLike[str] | None = None,
    needs_weights: bool = True,
    progress: bool = True,
) -> Path:
    """Brings the files of a model into the hub's cache, except those that are there already.

    The newest commit of the revision is looked up. If that fails, a copy in the cache is used, with
    a warning.

    Args:
        id: "name" or "organization/name".
        revision: As for `find_folder`, like all others.
        cache_dir: The hub's cache.
        needs_weights: Download the weights as well.
        progress: Show progress bars.

    Returns:
        The folder of the commit in the cache; its files are links to the cache's blobs.

    Raises:
        Exception: As for `find_folder`.
    """
    from huggingface_hub.errors import RevisionNotFoundError

    model = HubModel(id, revision, None if cache_dir is None else Path(cache_dir))
    with _progress_bars(is_shown=progress):
        try:
            return _download(model, needs_weights)
        except ModelFileError:
            raise
        except RevisionNotFoundError as error:
            _raise_named(model, error)
        except _hub_errors() as error:
            folder = _cached_folder(model)
            missing = [CONFIG_NAME]
            if folder is not None:
                missing = _missing_weights(folder) if needs_weights else []
            if folder is None or missing or _is_local(error):
                _raise_named(model, error, missing)
            log = _logger.info if _is_offline(error) else _logger.warning
            log("%s: from the cache, %s, because %s", model, folder, _reason(error))
            return folder


def wanted_files(names: Mapping[str, int | None], *, needs_weights: bool) -> list[str]:
    """Chooses the files that the loader reads from a listing.

    Args:
        names: The names of all files of a repository, with their sizes where known.
        needs_weights: Choose the weights as well.

    Returns:
        The names, `config.json` or `paceline.json` first. `named_weights` are wanted too.
    """
    wanted = [name for name in _SETTINGS if name in names]
    wanted += sorted(name for name in names if is_more_template(name))
    if CONFIG_NAME not in names and FOLDER_NAME in names:
        return [FOLDER_NAME, *wanted]
    if needs_weights:
        wanted += [name for name in (WEIGHTS_NAME, INDEX_NAME) if name in names][:1]
    return wanted


def named_weights(folder: Path) -> tuple[str, list[str]]:
    """The weight files that a file in a folder names, except `model.safetensors`.

    Returns:
        The name of the file, and the names in it.

    Raises:
        ModelFileError: The file is damaged, or a name is not the plain name of a safetensors file.
    """
    checkpoint = CheckpointFolder(folder)
    if checkpoint.is_converted:
        return FOLDER_NAME, [part.weights for part in checkpoint.converted.parts()]
    if exists(folder / INDEX_NAME) and not exists(folder / WEIGHTS_NAME):
        return INDEX_NAME, shard_names(folder / INDEX_NAME)
    return CONFIG_NAME, []


# ---- downloading -------------------------------------------------------------------------------


def _download(model: HubModel, needs_weights: bool) -> Path:
    """Looks the commit of the revision up and fetches what is missing of it.

    The first file is fetched by the name of the revision, so that the cache knows its commit and
    finds it offline; the others by the commit, so that all are of the same one.
    """
    for _ in range(_NUM_LISTINGS):
        commit, sizes = _list_files(model)
        wanted = wanted_files(sizes, needs_weights=needs_weights)
        _check_listing(model, sizes, wanted, needs_weights)
        folder = _fetch_file(model, wanted[0], model.revision).parent
        if folder.name == commit:
            break
    else:
        raise ConnectionError("the repository changes faster than its files can be listed")
    for name in wanted[1:]:
        _fetch_file(model, name, commit)
    source, weights = named_weights(folder) if needs_weights else ("", [])
    for name in weights:
        if name not in sizes:
            raise ModelNotFoundError(
                f"{model}: {source} names {name!r}, but the repository has no such file"
            )
        wanted.append(name)
        _fetch_file(model, name, commit)
    _logger.info(
        "%s: %d files, %.1f MB, of commit %s in %s",
        model,
        len(wanted),
        sum(sizes[name] or 0 for name in wanted) / 1e6,
        commit[:12],
        folder,
    )
    return folder


def _list_files(model: HubModel) -> tuple[str, dict[str, int | None]]:
    """The commit of the revision, and the files in it with their sizes."""
    from huggingface_hub import HfApi, constants

    try:
        info = HfApi().model_info(
            model.id,
            revision=model.revision,
            files_metadata=True,
            timeout=constants.HF_HUB_ETAG_TIMEOUT,
        )
        sizes = {file.rfilename: file.size for file in info.siblings or []}
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        if isinstance(error, _hub_errors()):
            raise
        raise ConnectionError(_NO_HUB) from error
    if not info.sha:
        raise ConnectionError(_NO_HUB)
    return info.sha, sizes


def _fetch_file(model: HubModel, name: str, revision: str | None) -> Path:
    from huggingface_hub import hf_hub_download

    path = hf_hub_download(model.id, name, revision=revision, cache_dir=model.cache_dir)
    return Path(path)


def _check_listing(
    model: HubModel, sizes: Mapping[str, int | None], wanted: list[str], needs_weights: bool
) -> None:
    """Refuses a repository before anything is downloaded.

    Raises:
        ModelNotFoundError: Required files are missing.
        ModelFileError: A file that is read whole is too large.
    """
    if not {CONFIG_NAME, FOLDER_NAME} & set(wanted):
        there = f"it has {name_some(sorted(sizes))}" if sizes else "it is empty"
        raise ModelNotFoundError(
            f"{model}: the repository has no {CONFIG_NAME}; expected a checkpoint in Hugging Face "
            f"layout, or a folder that `paceline convert` wrote; {there}"
        )
    if needs_weights and FOLDER_NAME not in wanted:
        _check_has_weights(model, sizes)
    for name in wanted:
        limit = MAX_TOKENIZER_BYTES if name == TOKENIZER_NAME else MAX_CONFIG_BYTES
        size = sizes[name] or 0
        if name != WEIGHTS_NAME and size > limit:
            raise ModelFileError(
                f"{model}: {name} has {size} bytes; it may have at most {limit} bytes (it was not "
                "downloaded)"
            )


def _check_has_weights(model: HubModel, sizes: Mapping[str, int | None]) -> None:
    if MASK_NAME in sizes:
        raise ModelFileError(
            f"{model}: the embedding of mask tokens is a pickle, {MASK_NAME}, which may run code "
            "when it is read. The drafter is converted once with its target, tensors only: hf "
            f"download {model.id} --local-dir DIR, then paceline convert --allow-pickle TARGET OUT "
            "--draft DIR"
        )
    if WEIGHTS_NAME in sizes or INDEX_NAME in sizes:
        return
    if PICKLE_NAME in sizes:
        raise ModelFileError(
            f"{model}: the weights are a pickle, {PICKLE_NAME}, which may run code when it is "
            f"read; expected {WEIGHTS_NAME}. An EAGLE draft head is converted once, weights only: "
            f"hf download {model.id} --local-dir DIR, then paceline convert --allow-pickle DIR OUT"
        )
    others = [name for name in sizes if name.endswith((".safetensors", ".bin", ".pth", ".gguf"))]
    hint = f"; it has {name_some(sorted(others))}" if others else ""
    raise ModelNotFoundError(
        f"{model}: the repository has neither {WEIGHTS_NAME} nor {INDEX_NAME}{hint}"
    )


# ---- the cache ---------------------------------------------------------------------------------


def _cached_folder(model: HubModel) -> Path | None:
    """The folder of the revision in the cache, complete or not."""
    from huggingface_hub import try_to_load_from_cache

    for name in (CONFIG_NAME, FOLDER_NAME):
        path = try_to_load_from_cache(
            model.id, name, cache_dir=model.cache_dir, revision=model.revision
        )
        if isinstance(path, str):
            return Path(path).parent
    return None


def _missing_weights(folder: Path) -> list[str]:
    """The weight files that a folder of the cache lacks, e.g. after an interrupted download."""
    _, named = named_weights(folder)
    return [name for name in named or [WEIGHTS_NAME] if not exists(folder / name)]


# ---- errors ------------------------------------------------------------------------------------


def _hub_errors() -> tuple[type[BaseException], ...]:
    """Returns what huggingface_hub raises when a request fails.

    The bases of its own error are those of the HTTP client, which differs between its versions.
    """
    from huggingface_hub.errors import EntryNotFoundError, HfHubHTTPError

    return (OSError, EntryNotFoundError, *HfHubHTTPError.__bases__)


def _raise_named(model: HubModel, error: BaseException, missing: Iterable[str] = ()) -> NoReturn:
    """Raises an error of huggingface_hub as one that names the model and the cure.

    Args:
        model: The model.
        error: The error.
        missing: The files that the cache lacks.
    """
    from huggingface_hub import constants
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    if _is_local(error):
        raise error
    page = f"{constants.ENDPOINT}/{model.id}"
    login = "set HF_TOKEN to an access token, or run `hf auth login`"
    response = error.response if isinstance(error, HfHubHTTPError) else None
    status = None if response is None else response.status_code
    if _is_offline(error):
        cache = model.cache_dir or constants.HF_HUB_CACHE
        message = (
            f"{model}: no such folder, and {name_some(missing)} of it is not in the hub's cache "
            f"{cache}; {_reason(error)}: unset it to download the model, or {_elsewhere(model)}"
        )
    elif isinstance(error, RevisionNotFoundError):
        message = (
            f"{model.id}: the hub has no revision {model.revision!r} of it; expected a branch, a "
            f"tag or a commit, see {page}"
        )
    elif isinstance(error, GatedRepoError):
        message = f"{model}: access is restricted; ask for it at {page}, then {login}"
    elif isinstance(error, RepositoryNotFoundError) or status in (401, 403, 404):
        # To a user without a token, the hub answers 401 for a model that does not exist.
        message = (
            f"{model}: no such folder, and {constants.ENDPOINT} has no such model, or does not "
            f"show it to this user ({status}); check the name, and for a private model {login}"
        )
    else:
        # The causes are a dozen frames of the HTTP client, which say nothing more.
        _logger.debug("%s: not downloaded", model, exc_info=error)
        raise ConnectionError(
            f"{model}: no such folder, and not downloaded because {_reason(error)}; try again, or "
            f"{_elsewhere(model)}"
        ) from None
    _logger.debug("%s: not downloaded", model, exc_info=error)
    raise ModelNotFoundError(message) from None


def _elsewhere(model: HubModel) -> str:
    """Where a model can come from without a connection, as the end of a sentence."""
    revision = "" if model.revision is None else f" --revision {model.revision}"
    return (
        "name a folder or, as cache_dir, a hub's cache that has the model; where there is a "
        f"connection, `hf download {model.id}{revision} --local-dir DIR` writes such a folder"
    )


def _reason(error: BaseException) -> str:
    """Why a request failed, as the end of a sentence."""
    from huggingface_hub import constants

    if _is_offline(error):
        return "HF_HUB_OFFLINE is set"
    # An error of the cache comes from one of the connection.
    while error.__cause__ is not None and isinstance(error, FileNotFoundError):
        error = error.__cause__
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    text = lines[0] if lines else "no message"
    if len(text) > _MAX_REASON:
        text = f"{text[:_MAX_REASON]}..."
    kind = "" if type(error) is ConnectionError else f"{type(error).__name__}: "
    return f"{constants.ENDPOINT} failed: {kind}{text}"


def _is_offline(error: BaseException) -> bool:
    from huggingface_hub.errors import OfflineModeIsEnabled

    return isinstance(error, OfflineModeIsEnabled) or isinstance(
        error.__cause__, OfflineModeIsEnabled
    )


def _is_local(error: BaseException) -> bool:
    """Returns whether the cache cannot be written, e.g. because the disk is full."""
    is_connection = isinstance(error, ConnectionError | TimeoutError)
    return isinstance(error, OSError) and error.errno is not None and not is_connection


@contextlib.contextmanager
def _progress_bars(*, is_shown: bool) -> Iterator[None]:
    """Hides huggingface_hub's bars, which it shows by itself where standard error is a terminal."""
    from huggingface_hub import constants
    from huggingface_hub.utils import (
        are_progress_bars_disabled,
        disable_progress_bars,
        enable_progress_bars,
    )

    group = "huggingface_hub"
    is_forced = constants.HF_HUB_DISABLE_PROGRESS_BARS is not None
    if is_shown or is_forced or are_progress_bars_disabled(group):
        yield
        return
    disable_progress_bars(group)
    try:
        yield
    finally:
        enable_progress_bars(group)
