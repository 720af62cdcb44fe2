# SPDX-License-Identifier: Apache-2.0
"""The tokenizer of a model, with the names that scripts know from transformers."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, overload

from paceline.chat_messages import Conversation
from paceline.chat_template import ChatTemplates
from paceline.checks import check_bool, check_int, check_text, wrong_type
from paceline.limits import MAX_INT

if TYPE_CHECKING:
    import tokenizers

    from paceline.loader import LoadedModel
    from paceline.loader.tokenizer import TokenizerInfo


class Encoding(dict[str, Any]):
    """The result of calling a `Tokenizer`: a dict whose entries are attributes too.

    Attributes:
        input_ids: The token ids of the text, or a list of them for each text.
        attention_mask: As many ones.
    """

    input_ids: Any
    attention_mask: Any

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(
                f"an Encoding has no {name!r}; it has: {', '.join(self)}"
            ) from None


class Tokenizer:
    """Converts text to token ids and back. `LLM.get_tokenizer` returns it.

    Methods and attributes have the names and meanings of transformers. What is not here is in
    `backend_tokenizer`, the `tokenizers.Tokenizer`. Thread-safe.

    Attributes:
        name_or_path: The folder of `tokenizer.json`.
    """

    def __init__(
        self,
        info: TokenizerInfo,
        *,
        eos_token_id: int | None = None,
        bos_token_id: int | None = None,
        chat_templates: ChatTemplates | None = None,
    ) -> None:
        """Wraps a `tokenizer.json`.

        Args:
            info: The file.
            eos_token_id: The end-of-sequence id, unless `tokenizer_config.json` names one.
            bos_token_id: The id that starts a prompt, unless that file names one.
            chat_templates: The chat templates of the checkpoint. None = those beside the file.
        """
        self._info = info
        self.name_or_path = str(info.path.parent)
        self._eos_token_id = eos_token_id
        self._bos_token_id = bos_token_id
        self._chat_templates = chat_templates or ChatTemplates(
            info.path.parent, settings=info.settings
        )

    @property
    def backend_tokenizer(self) -> tokenizers.Tokenizer:
        """The `tokenizers.Tokenizer`. Changing it changes how the LLM reads prompts."""
        return self._info.tokenizer

    def __call__(self, text: str | Sequence[str], *, add_special_tokens: bool = True) -> Encoding:
        """Converts a text or several to token ids.

        Args:
            text: The text or texts.
            add_special_tokens: As for `encode`.

        Returns:
            A dict with "input_ids" and "attention_mask": one list for a string, otherwise a list
            of lists.

        Raises:
            ValueError: A text is not a string of valid Unicode.
        """
        if isinstance(text, str):
            ids: Any = self.encode(text, add_special_tokens=add_special_tokens)
            return Encoding(input_ids=ids, attention_mask=[1] * len(ids))
        ids = [self.encode(one, add_special_tokens=add_special_tokens) for one in text]
        return Encoding(input_ids=ids, attention_mask=[[1] * len(one) for one in ids])

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Converts a text to token ids.

        Args:
            text: The text.
            add_special_tokens: Add the special tokens that surround a prompt, as `LLM.generate`
                does.

        Returns:
            The token ids.

        Raises:
            ValueError: The text is not a string of valid Unicode.
            paceline.ModelFileError: The tokenizer fails on it.
        """
        check_bool("add_special_tokens", add_special_tokens)
        return self._info.encode(check_text("text", text), add_special_tokens=add_special_tokens)

    def decode(self, token_ids: int | Sequence[int], *, skip_special_tokens: bool = False) -> str:
        """Converts token ids to text.

        Args:
            token_ids: One id or several. Ids without a token have no text.
            skip_special_tokens: Leave special tokens out. (The default is that of transformers, not
                that of `SamplingParams`.)

        Returns:
            The text.

        Raises:
            ValueError: An id is not an integer from 0 to 2**31 - 1.
            paceline.ModelFileError: The tokenizer fails on them.
        """
        check_bool("skip_special_tokens", skip_special_tokens)
        return self._info.decode(_ids(token_ids), skip_special_tokens=skip_special_tokens)

    def batch_decode(
        self, sequences: Sequence[Sequence[int]], *, skip_special_tokens: bool = False
    ) -> list[str]:
        """Converts several sequences of token ids to texts; see `decode`."""
        return [self.decode(ids, skip_special_tokens=skip_special_tokens) for ids in sequences]

    def apply_chat_template(
        self,
        conversation: Conversation | Sequence[Conversation],
        tools: Sequence[Mapping[str, Any]] | None = None,
        *,
        chat_template: str | os.PathLike[str] | None = None,
        add_generation_prompt: bool = False,
        continue_final_message: bool = False,
        tokenize: bool = True,
        return_dict: bool = True,
        **variables: Any,
    ) -> Any:
        """Makes prompts of conversations, as `LLM.chat` does.

        Args:
            conversation: A conversation or a list of them; see `LLM.chat`.
            tools: See `LLM.chat`.
            chat_template: See `LLM.chat`.
            add_generation_prompt: See `LLM.chat`. (The default is that of transformers.)
            continue_final_message: See `LLM.chat`.
            tokenize: Return token ids instead of text.
            return_dict: Return token ids as `__call__` does instead of as a list.
            **variables: More variables for the template.

        Returns:
            The text, the token ids or the dict; a list of texts, a list of token ids, or a dict of
            lists for a list of conversations.

        Raises:
            ValueError: As for `LLM.chat`.
            NotImplementedError: As for `LLM.chat`.
        """
        check_bool("tokenize", tokenize)
        check_bool("return_dict", return_dict)
        texts = self._chat_templates.render(
            conversation,
            tools=tools,
            chat_template=chat_template,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            chat_template_kwargs=variables,
        )
        result: Any = texts if isinstance(conversation[0], list | tuple) else texts[0]
        if not tokenize:
            return result
        encoding = self(result, add_special_tokens=False)
        return encoding if return_dict else encoding.input_ids

    @overload
    def convert_ids_to_tokens(self, ids: int) -> str | None: ...
    @overload
    def convert_ids_to_tokens(self, ids: Sequence[int]) -> list[str | None]: ...
    def convert_ids_to_tokens(self, ids: int | Sequence[int]) -> str | list[str | None] | None:
        """Returns the token, or tokens, with these ids; None for an id that no token has."""
        tokens = [self._info.tokenizer.id_to_token(index) for index in _ids(ids)]
        return tokens if hasattr(ids, "__len__") else tokens[0]

    @overload
    def convert_tokens_to_ids(self, tokens: str) -> int | None: ...  # type: ignore[overload-overlap]
    @overload
    def convert_tokens_to_ids(self, tokens: Sequence[str]) -> list[int | None]: ...
    def convert_tokens_to_ids(self, tokens: str | Sequence[str]) -> int | list[int | None] | None:
        """Returns the id, or ids, of these tokens; None for a string that is not one token."""
        if isinstance(tokens, str):
            return self._info.tokenizer.token_to_id(check_text("tokens", tokens))
        return [self._info.tokenizer.token_to_id(check_text("tokens", one)) for one in tokens]

    def tokenize(self, text: str, *, add_special_tokens: bool = False) -> list[str | None]:
        """Returns the tokens of a text as strings; see `encode`."""
        return self.convert_ids_to_tokens(self.encode(text, add_special_tokens=add_special_tokens))

    def get_vocab(self) -> dict[str, int]:
        """Returns a new dict from all tokens to their ids, added tokens included."""
        return dict(self._info.tokenizer.get_vocab(with_added_tokens=True))

    @property
    def vocab_size(self) -> int:
        """The number of tokens without added tokens; `len()` counts those too."""
        return int(self._info.tokenizer.get_vocab_size(with_added_tokens=False))

    def __len__(self) -> int:
        return int(self._info.tokenizer.get_vocab_size(with_added_tokens=True))

    @property
    def eos_token_id(self) -> int | None:
        """The id of `eos_token` in `tokenizer_config.json`, else the checkpoint's first
        end-of-sequence id; None without one. An output also ends at the checkpoint's other ones."""
        return self._special_id("eos_token", self._eos_token_id)

    @property
    def eos_token(self) -> str | None:
        """The token of `eos_token_id`."""
        return self._token(self.eos_token_id)

    @property
    def bos_token_id(self) -> int | None:
        """The id of `bos_token` in `tokenizer_config.json`, else the one that the checkpoint's
        other files name; None without one."""
        return self._special_id("bos_token", self._bos_token_id)

    @property
    def bos_token(self) -> str | None:
        """The token of `bos_token_id`."""
        return self._token(self.bos_token_id)

    @property
    def pad_token_id(self) -> int | None:
        """The id of `pad_token` in `tokenizer_config.json`; None without one."""
        return self._special_id("pad_token", None)

    @property
    def pad_token(self) -> str | None:
        """The token of `pad_token_id`."""
        return self._token(self.pad_token_id)

    @property
    def all_special_ids(self) -> list[int]:
        """The ids of all special tokens, in order."""
        return sorted(self._info.special_ids)

    @property
    def all_special_tokens(self) -> list[str]:
        """All special tokens, in order of their ids."""
        return [self._info.added_tokens[index] for index in self.all_special_ids]

    def num_special_tokens_to_add(self) -> int:
        """Returns the number of special tokens that surround a prompt."""
        return int(self._info.tokenizer.num_special_tokens_to_add(is_pair=False))

    def __repr__(self) -> str:
        return f"<Tokenizer {self.name_or_path!r}, {len(self)} tokens>"

    def _special_id(self, name: str, fallback: int | None) -> int | None:
        text = self._chat_templates.special_tokens.get(name)
        index = None if text is None else self._info.tokenizer.token_to_id(text)
        return fallback if index is None else index

    def _token(self, index: int | None) -> str | None:
        return None if index is None else self._info.tokenizer.id_to_token(index)


def model_tokenizer(target: LoadedModel, chat_templates: ChatTemplates | None = None) -> Tokenizer:
    """Returns the tokenizer of a model.

    Args:
        target: The model.
        chat_templates: As for `Tokenizer`.

    Raises:
        ValueError: The model has none.
    """
    if target.tokenizer is None:
        raise ValueError(
            f"{target.path} has no tokenizer.json; allowed: a checkpoint with a tokenizer"
        )
    return Tokenizer(
        target.tokenizer,
        eos_token_id=next(iter(target.eos_token_ids), None),
        bos_token_id=target.bos_token_id,
        chat_templates=chat_templates,
    )


def _ids(token_ids: int | Sequence[int]) -> list[int]:
    if isinstance(token_ids, int):
        return [check_int("token_ids", token_ids, 0, MAX_INT)]
    if hasattr(token_ids, "__len__") and not isinstance(token_ids, str | bytes | Mapping):
        return [check_int(f"token_ids[{i}]", one, 0, MAX_INT) for i, one in enumerate(token_ids)]
    raise wrong_type("token_ids", token_ids, "a token id or a sequence of token ids")
