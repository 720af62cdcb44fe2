# SPDX-License-Identifier: Apache-2.0
"""`paceline convert`: writes a checkpoint as a folder that the C++ library reads without Python."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final

from paceline.limits import MAX_SPECULATIVE_TOKENS
from paceline.progress import progress_bar

from .binding import BoundTensor
from .block_kinds import block_subfolders, num_block_drafts, own_block_kind
from .checkpoint import Checkpoint, OpenedModel, open_checkpoint
from .converted import FOLDER_FORMAT, FOLDER_NAME
from .drafter_checkpoint import (
    DrafterCheckpoint,
    open_any_drafter,
    open_drafter,
    stated_num_drafts,
)
from .drafters import BLOCK_KINDS, MTP
from .families import check_dtype
from .files import CHAT_NAMES, MORE_TEMPLATES, is_more_template
from .folder import GENERATION_NAME, TOKENIZER_NAME, CheckpointFolder
from .pickles import add_mask_row, convert_pickle, read_pickle
from .safetensors_writer import NewTensor, float_bytes, write_safetensors
from .tokenizer import TokenizerInfo, check_tokenizers

# The default of drafters other than block drafters.
_DEFAULT_NUM_DRAFTS: Final = 4


def convert(
    model_dir: str | os.PathLike[str],
    out_dir: str | os.PathLike[str],
    draft_dir: str | os.PathLike[str] | None = None,
    num_speculative_tokens: int | None = None,
    dtype: str = "auto",
    *,
    method: str | None = None,
    allow_pickle: bool = False,
    progress: bool = True,
) -> Path:
    """Writes the canonical folder of `docs/model-format.md`.

    There is one exception. An EAGLE draft head whose weights are a pickle, given alone and with
    `allow_pickle`, is rewritten as a checkpoint in Hugging Face layout, which loads as a drafter.

    A block drafter whose folder has an embedding for mask tokens of its own, a pickle, gets a copy
    of the target's embeddings with it.

    Tensors keep the bytes of the checkpoint and only change their names. The library converts them
    when it reads the folder, exactly as it does when Python loads the checkpoint. The target's
    `tokenizer.json`, `generation_config.json`, special tokens and chat templates are copied. After
    an error nothing is left behind.

    Args:
        model_dir: The target's checkpoint.
        out_dir: The folder to write; must be absent or empty.
        draft_dir: The checkpoint of the drafter, if there is one: a draft model, a draft head, a
            block drafter or an assistant of Gemma 4.
        num_speculative_tokens: The folder's default number of drafts, 1 to 16. None = the number
            that a block drafter's folder states, 4 for other drafters.
        dtype: The dtype of matrices once the folder is read: "float32", "bfloat16" or "auto".
        method: "mtp": the target's MTP layer is the drafter. "dflash", "dflash2" or "dspark"
            without a `draft_dir`: the drafter is the target's subfolder of that name or, with
            "dspark", the stages in the target's files. Otherwise that of the drafter in
            `draft_dir`, as for `load_drafter`. None without a `draft_dir`: only the target is
            written.
        allow_pickle: Read the weights of an EAGLE draft head from a `pytorch_model.bin`, and the
            embedding of a block drafter's mask tokens from a `mask_embedding.pt`: tensors and
            numbers only, with torch, which must be installed.
        progress: Show a progress bar where standard error is a terminal.

    Returns:
        The folder.

    Raises:
        ModelFileError: A checkpoint is damaged or incomplete.
        NotImplementedError: A model is not supported.
        ValueError: An argument is wrong, the tokenizers differ, or `out_dir` is not empty.
        OSError: The folder cannot be written.
    """
    check_options(out_dir, num_speculative_tokens, dtype)
    out = Path(out_dir)
    folder = CheckpointFolder(model_dir)
    if draft_dir is None and method in block_subfolders(folder.path):
        draft_dir = folder.path / method
    is_own = method == MTP or (draft_dir is None and _names_own_drafter(folder, method))
    if method is not None and (draft_dir is None) != is_own:
        raise ValueError(
            f"method is {method!r:.80} and draft_dir {str(draft_dir)!r:.80}; allowed: {MTP!r} "
            "without a draft_dir, or 'dflash', 'dflash2' or 'dspark' where the target has such a "
            "drafter in a subfolder of that name or in its own files, or the method of a drafter "
            "in draft_dir"
        )
    if draft_dir is None and folder.has_only_pickle:
        if not allow_pickle:
            folder.check_no_pickle()
        return _fill(out, lambda partial: convert_pickle(folder, partial))

    target = open_checkpoint(folder, dtype)
    tokenizer = folder.tokenizer
    with ExitStack() as stack:
        draft: OpenedModel | None = None
        source = folder
        if draft_dir is not None:
            source = CheckpointFolder(draft_dir)
            mask_pickle = source.mask_pickle
            if allow_pickle and source.has_only_pickle:
                source = read_pickle(source)
            if allow_pickle and mask_pickle is not None:
                # As large as the target's table: not in memory, where some systems keep /tmp.
                beside = next(parent for parent in out.absolute().parents if parent.is_dir())
                staged = tempfile.TemporaryDirectory(prefix=".paceline-", dir=beside)
                folder_of_table = Path(stack.enter_context(staged))
                source = add_mask_row(source, mask_pickle, target.as_target(), folder_of_table)
            draft = _open_draft(source, target, tokenizer, dtype, method)
        elif is_own:
            draft = open_drafter(folder, target.as_target(), method)
        k = num_speculative_tokens or _DEFAULT_NUM_DRAFTS
        if isinstance(draft, DrafterCheckpoint) and draft.kind in BLOCK_KINDS:
            k = num_speculative_tokens or stated_num_drafts(source) or k
            _check_block(draft, k)
        settings = _read_settings(folder)
        return _fill(
            out, lambda partial: _write_folder(partial, target, draft, settings, k, progress)
        )


def _check_block(draft: DrafterCheckpoint, num_speculative_tokens: int) -> None:
    """Refuses more drafts than a block makes, which no engine would run."""
    most = num_block_drafts(draft.config)
    if num_speculative_tokens > most:
        size = draft.config["drafter"]["block"]["size"]
        raise ValueError(
            f"num_speculative_tokens is {num_speculative_tokens}, but the drafter {draft.path} was "
            f"trained for blocks of {size} tokens; allowed: 1 to {most}"
        )


def _names_own_drafter(folder: CheckpointFolder, method: str | None) -> bool:
    """Returns whether `method` is that of the block drafter in the target's own files."""
    if method not in BLOCK_KINDS or folder.has_only_pickle:
        return False
    return own_block_kind(folder.config) == method


def check_options(
    out_dir: str | os.PathLike[str], num_speculative_tokens: int | None, dtype: str
) -> None:
    """Checks what `convert` can check before it looks at a model.

    Raises:
        ValueError: As for `convert`.
    """
    check_dtype(dtype)
    if num_speculative_tokens is not None and (
        isinstance(num_speculative_tokens, bool)
        or not isinstance(num_speculative_tokens, int)
        or not 1 <= num_speculative_tokens <= MAX_SPECULATIVE_TOKENS
    ):
        raise ValueError(
            f"num_speculative_tokens is {num_speculative_tokens!r}; allowed: an integer from 1 to "
            f"{MAX_SPECULATIVE_TOKENS}"
        )
    _check_out_dir(Path(out_dir))


def _open_draft(
    source: CheckpointFolder,
    target: Checkpoint,
    tokenizer: TokenizerInfo | None,
    dtype: str,
    method: str | None,
) -> OpenedModel:
    """Opens a drafter of any kind and checks that it fits the target."""
    draft = open_any_drafter(source, target.as_target(), method=method, dtype=dtype)
    if isinstance(draft, DrafterCheckpoint) and (tokenizer is None or source.tokenizer is None):
        return draft
    check_tokenizers(
        target.path,
        tokenizer,
        target.family.config["vocab_size"],
        draft.path,
        source.tokenizer,
        draft.family.config["vocab_size"],
    )
    return draft


def _fill(out: Path, write: Callable[[Path], object]) -> Path:
    """Fills a folder with `write` and moves it into place; after an error nothing is left."""
    created = not out.exists()
    out.mkdir(parents=True, exist_ok=True)
    # Inside `out`, because a rename to another file system fails and `out` may be a mount point.
    partial = out / ".partial"
    moved: list[Path] = []
    try:
        partial.mkdir()
        write(partial)
        # The description last: without it the folder is no model.
        for entry in sorted(partial.iterdir(), key=lambda entry: entry.name == FOLDER_NAME):
            moved.append(entry.rename(out / entry.name))
        partial.rmdir()
    except BaseException as error:
        shutil.rmtree(partial, ignore_errors=True)
        for path in moved:
            shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
        if created:
            with contextlib.suppress(OSError):
                out.rmdir()
        # A full disk: `write` fails without the name of its file.
        if isinstance(error, OSError) and error.errno is not None and error.filename is None:
            raise OSError(error.errno, error.strerror, str(out)) from error
        raise
    return out


def _check_out_dir(out: Path) -> None:
    if out.is_dir():
        entries = sorted(entry.name for entry in out.iterdir())
        if entries:
            raise ValueError(
                f"{out}: the folder is not empty (it has {entries[0]!r}); expected an empty one or "
                "a new name"
            )
    elif out.exists() or out.is_symlink():
        raise ValueError(f"{out}: not a folder; expected an empty folder or a new name")


def _read_settings(folder: CheckpointFolder) -> dict[str, bytes]:
    """The files that are copied, by their names in the folder."""
    contents = {
        TOKENIZER_NAME: folder.tokenizer_contents,
        GENERATION_NAME: folder.generation_contents,
    }
    more = [f"{MORE_TEMPLATES}/{path.name}" for path in (folder.path / MORE_TEMPLATES).glob("*")]
    for name in (*CHAT_NAMES, *filter(is_more_template, sorted(more))):
        contents[name] = folder.read_if_there(name, "settings for chats")
    return {name: data for name, data in contents.items() if data is not None}


def _write_folder(
    folder: Path,
    target: Checkpoint,
    draft: OpenedModel | None,
    settings: dict[str, bytes],
    num_speculative_tokens: int,
    progress: bool,
) -> None:
    contents: dict[str, Any] = {"format": FOLDER_FORMAT}
    parts: list[tuple[str, OpenedModel]] = [("target", target)]
    if draft is not None:
        parts.append(("draft", draft))
    total = sum(checkpoint.nbytes for _, checkpoint in parts)
    with progress_bar(total, "Writing weights", "B", is_shown=progress, is_scaled=True) as bar:
        for role, checkpoint in parts:
            weights = f"{role}.safetensors"
            _write_weights(folder / weights, checkpoint, bar)
            contents[role] = {
                "weights": weights,
                "dtype": checkpoint.weight_dtype,
                "config": checkpoint.config,
                "architecture": checkpoint.family.architecture,
            }
    if draft is not None:
        contents["num_speculative_tokens"] = num_speculative_tokens
    contents["stop_token_ids"] = list(target.eos_token_ids)
    bos = target.bos_token_id
    if bos is not None and bos < target.config["vocab_size"]:
        contents["bos_token_id"] = bos
    (folder / FOLDER_NAME).write_text(json.dumps(contents, indent=1) + "\n", encoding="utf-8")
    for name, data in settings.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(data)


def _write_weights(path: Path, checkpoint: OpenedModel, bar: Any) -> None:
    """Writes a safetensors file with the bytes of the source files."""
    new: list[NewTensor] = []
    for name, ids in checkpoint.ids.items():
        data = ids.astype("<i4").tobytes()
        new.append(NewTensor(name, "I32", ids.shape, functools.partial(iter, (data,))))
    for tensor in checkpoint.tensors:
        is_narrowed = checkpoint.is_narrowed(tensor)
        new.append(
            NewTensor(
                tensor.spec.name,
                "BF16" if is_narrowed else tensor.dtype,
                tensor.spec.shape,
                functools.partial(_chunks, tensor, is_narrowed, bar),
            )
        )
    write_safetensors(path, new, {"format": "paceline"})


def _chunks(tensor: BoundTensor, is_narrowed: bool, bar: Any) -> Iterator[bytes]:
    for part in tensor.chunks():
        yield _half_to_bfloat16(part) if is_narrowed else part
        bar.update(len(part))


def _half_to_bfloat16(data: bytes) -> bytes:
    """Rounds F16 to BF16."""
    import numpy as np

    return float_bytes(np.array(np.frombuffer(data, np.float16), np.float32), "BF16")
