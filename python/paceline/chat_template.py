# SPDX-License-Identifier: Apache-2.0
"""Chat templates: read from a checkpoint, and rendered to the prompts of conversations.

The strings are those of transformers' `apply_chat_template`. `chat_process` renders them.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from paceline import chat_process
from paceline._core import ModelFileError
from paceline.chat_content import form_of, with_form
from paceline.chat_messages import (
    Conversation,
    PartsAsText,
    list_conversations,
    list_tools,
    plain_data,
)
from paceline.checks import check_bool, check_path, check_text, parse_json, quoted, shorten
from paceline.loader.files import (
    MORE_TEMPLATES,
    OLD_TEMPLATE_NAME,
    SPECIAL_TOKENS_NAME,
    TEMPLATE_NAME,
    TOKENIZER_CONFIG_NAME,
    exists,
    read_file,
)
from paceline.loader.section import MAX_CONFIG_BYTES

if TYPE_CHECKING:
    from paceline.loader import LoadedModel

MAX_TEMPLATE_BYTES: Final = 256 << 10

_DEFAULT: Final = "default"
_TOOL_USE: Final = "tool_use"
_SPECIAL_TOKENS: Final = (
    "bos_token",
    "eos_token",
    "unk_token",
    "sep_token",
    "pad_token",
    "cls_token",
    "mask_token",
)
# Set by the arguments of the call.
_RESERVED: Final = (
    "messages",
    "conversation",
    "tools",
    "add_generation_prompt",
    "continue_final_message",
    "chat_template",
    "tokenize",
)
# Marks the end of the message that the model continues. The space shows whether a template strips
# the message.
_MARK: Final = "PACELINE_CONTINUES_THIS_MESSAGE "


class ChatTemplates:
    """The chat templates of a checkpoint, and the special tokens that they refer to.

    The files are read when the first conversation is rendered. Thread-safe.
    """

    def __init__(
        self,
        folder: Path,
        default: str | None = None,
        settings: Mapping[str, Any] | None = None,
    ) -> None:
        """Stores what is used later.

        Args:
            folder: The folder of the checkpoint.
            default: The text of the template that takes the place of the checkpoint's own.
            settings: The keys of `tokenizer_config.json` for a tokenizer in memory, which has no
                folder. None = the files in the folder.
        """
        self.folder = folder
        self._default = default
        self._settings = settings

    @classmethod
    def of_model(
        cls, target: LoadedModel, default: str | os.PathLike[str] | None = None
    ) -> ChatTemplates:
        """The templates beside a model's tokenizer; for `default` see `read_given_template`."""
        text = None if default is None else str(default)
        if target.tokenizer is None:
            return cls(target.path, text)
        return cls(target.tokenizer.path.parent, text, target.tokenizer.settings)

    def render(
        self,
        messages: Conversation | Sequence[Conversation],
        *,
        chat_template: str | os.PathLike[str] | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[str]:
        """Renders conversations; for the arguments and errors see `LLM.chat`.

        Returns:
            One prompt per conversation.
        """
        conversations = list_conversations(messages)
        tool_list = list_tools(tools)
        check_bool("add_generation_prompt", add_generation_prompt)
        check_bool("continue_final_message", continue_final_message)
        if add_generation_prompt and continue_final_message:
            raise ValueError(
                "add_generation_prompt and continue_final_message are both True; allowed: one of "
                "them, because the model either starts a message or continues the last one"
            )
        variables = _check_kwargs(chat_template_kwargs)
        source, text = self._choose(chat_template, has_tools=tools is not None)
        template = _Template(source, text, self.special_tokens)
        variables = {
            "documents": None,
            **self.special_tokens,
            **variables,
            "tools": tool_list,
            "add_generation_prompt": add_generation_prompt,
        }
        return [
            template.render(conversation, variables, is_continued=continue_final_message)
            for conversation in conversations
        ]

    def find_text(self, *, has_tools: bool = False) -> str | None:
        """Returns the text of the template that `render` uses; None if there is none."""
        try:
            return self._choose(None, has_tools=has_tools)[1]
        except ValueError:
            return None

    def find_variables(self, *, has_tools: bool = False) -> set[str]:
        """Returns the names of the variables that the template of `render` reads; none without a
        template, or with one that is not valid."""
        from paceline.chat_sandbox import find_variables

        try:
            return find_variables(self._choose(None, has_tools=has_tools)[1])
        except Exception:  # of any kind: `render` tells it
            return set()

    # ---- files ---------------------------------------------------------------------------------

    def _choose(self, given: str | os.PathLike[str] | None, *, has_tools: bool) -> tuple[str, str]:
        """The name of a template, for messages, and its text."""
        if isinstance(given, str) and given in self._own:
            return self._own[given]
        if given is not None:
            return "chat_template", read_given_template(given)
        if self._default is not None:
            return "chat_template", self._default
        for name in (_TOOL_USE, _DEFAULT) if has_tools else (_DEFAULT,):
            if name in self._own:
                return self._own[name]
        if self._own:
            raise ValueError(
                f"{self.folder} has several chat templates and none is called 'default'; "
                f"chat_template= names one of them: {quoted(sorted(self._own))}"
            )
        if self._settings is not None:
            raise ValueError(
                "the tokenizer in memory has no chat template; chat_template= gives one, as the "
                "text or the file of a Jinja template; a tokenizer of transformers brings its own"
            )
        raise ValueError(
            f"{self.folder} has no chat template: looked for {TEMPLATE_NAME}, 'chat_template' in "
            f"{TOKENIZER_CONFIG_NAME} and {OLD_TEMPLATE_NAME}; chat_template= (--chat-template) "
            "gives one, as the text or the file of a Jinja template"
        )

    @functools.cached_property
    def _config(self) -> dict[str, Any]:
        return (
            self._read_json(TOKENIZER_CONFIG_NAME)
            if self._settings is None
            else dict(self._settings)
        )

    @functools.cached_property
    def _own(self) -> dict[str, tuple[str, str]]:
        """The checkpoint's templates by name: the file of each, and its text."""
        found: dict[str, tuple[str, str]] = {}
        if self._settings is not None:
            return _named_templates(self.folder, self._settings.get("chat_template"))
        path = self.folder / TEMPLATE_NAME
        if exists(path):
            found[_DEFAULT] = str(path), _read_template(path)
        more = self.folder / MORE_TEMPLATES
        if exists(more):
            for extra in sorted(more.glob("*.jinja")):
                found[extra.stem] = str(extra), _read_template(extra)
        if found:
            return found
        for name in (TOKENIZER_CONFIG_NAME, OLD_TEMPLATE_NAME):
            config = self._config if name == TOKENIZER_CONFIG_NAME else self._read_json(name)
            named = _named_templates(self.folder / name, config.get("chat_template"))
            if named:
                return named
        return found

    @functools.cached_property
    def special_tokens(self) -> dict[str, str]:
        """The variables `bos_token`, `eos_token` and so on, as transformers passes them."""
        config = dict(self._config)
        # With that key, transformers does not read the other file.
        if self._settings is None and "added_tokens_decoder" not in config:
            config |= self._read_json(SPECIAL_TOKENS_NAME)
        named = {
            key: value
            for key, value in config.items()
            if key in _SPECIAL_TOKENS or key.endswith("_token")
        }
        for key in ("extra_special_tokens", "model_specific_special_tokens"):
            if isinstance(config.get(key), dict):
                named |= config[key]
        contents = {
            key: value.get("content") if isinstance(value, dict) else value
            for key, value in named.items()
        }
        return {key: value for key, value in contents.items() if isinstance(value, str)}

    def _read_json(self, name: str) -> dict[str, Any]:
        path = self.folder / name
        if not exists(path):
            return {}
        contents = read_file(path, "settings of the tokenizer", max_bytes=MAX_CONFIG_BYTES)
        try:
            parsed = parse_json(str(path), contents.decode())
        except ValueError as error:
            raise ModelFileError(f"{path}: {error}") from None
        if not isinstance(parsed, dict):
            raise ModelFileError(f"{path}: {shorten(parsed)} is not a JSON object")
        return parsed


def read_given_template(value: str | os.PathLike[str]) -> str:
    """The text of a template that a user gives.

    Args:
        value: A path, or the text itself: a string with a brace or a line break.

    Raises:
        ValueError: It is neither, or too large.
        paceline.ModelFileError: The file cannot be read.
    """
    if isinstance(value, str):
        check_text("chat_template", value, "the text or the path of a Jinja template")
        if "{" in value or "\n" in value:
            return _check_size("chat_template", value)
    path = Path(check_path("chat_template", value, "the text or the path of a Jinja template"))
    if not exists(path):
        raise ValueError(
            f"chat_template is {shorten(str(value))}, which is neither a file nor a template; "
            "allowed: the path of a Jinja template, or its text, which has braces"
        )
    return _read_template(path)


def _read_template(path: Path) -> str:
    contents = read_file(path, "a chat template", max_bytes=MAX_TEMPLATE_BYTES)
    try:
        return contents.decode()
    except UnicodeDecodeError as error:
        raise ModelFileError(f"{path}: not a chat template: {error}") from None


def _named_templates(path: Path, value: Any) -> dict[str, tuple[str, str]]:
    """The templates of a JSON file: a string, or a list of {"name": ..., "template": ...}."""
    if value is None:
        return {}
    entries = [{"name": _DEFAULT, "template": value}] if isinstance(value, str) else value
    if isinstance(entries, dict):  # as a tokenizer holds them
        entries = [{"name": name, "template": text} for name, text in entries.items()]
    named = {}
    for entry in entries if isinstance(entries, list) else [entries]:
        name, text = (
            (entry.get("name"), entry.get("template")) if isinstance(entry, dict) else (None, None)
        )
        if not isinstance(name, str) or not isinstance(text, str):
            raise ModelFileError(
                f"{path}: chat_template is {shorten(value)}; expected a string or a list of "
                '{"name": ..., "template": ...}'
            )
        named[name] = str(path), _check_size(f"{path}: chat_template", text)
    return named


def _check_size(name: str, text: str) -> str:
    if len(text.encode()) > MAX_TEMPLATE_BYTES:
        raise ValueError(
            f"{name} has {len(text.encode())} bytes; allowed: at most {MAX_TEMPLATE_BYTES}"
        )
    return text


def _check_kwargs(given: Mapping[str, Any] | None) -> dict[str, Any]:
    if given is None:
        return {}
    if not isinstance(given, Mapping) or not all(isinstance(key, str) for key in given):
        raise ValueError(
            f"chat_template_kwargs is {shorten(given)} ({type(given).__name__}); allowed: a dict "
            "from names to values"
        )
    for key in given:
        if key in _RESERVED:
            raise ValueError(
                f"chat_template_kwargs has {key!r}; allowed: variables of the template that are "
                "not arguments of the call"
            )
    return dict(plain_data("chat_template_kwargs", given))


# ---- rendering -----------------------------------------------------------------------------------


class _Template:
    """A template with its name."""

    def __init__(self, source: str, text: str, special_tokens: Mapping[str, str]) -> None:
        self._source = source
        self._text = text
        self._special_tokens = tuple(sorted(special_tokens.items()))

    def render(
        self, conversation: list[Any], variables: Mapping[str, Any], *, is_continued: bool
    ) -> str:
        """Renders one conversation, whose text gets the form that the template reads.

        Raises:
            ValueError: The template refuses the messages, fails, or exceeds a limit.
        """
        roles = {message["role"] for message in conversation}
        forms = {role: form_of(self._text, role, self._special_tokens) for role in roles}
        given = [with_form(message, forms[message["role"]]) for message in conversation]
        try:
            return self._render_form(given, variables, is_continued=is_continued)
        except PartsAsText:
            # It reads parts in some places only. Where it reads no strings they would be lost.
            given = [
                message if forms[message["role"]] == "parts" else with_form(message, "string")
                for message in given
            ]
        try:
            return self._render_form(given, variables, is_continued=is_continued)
        except PartsAsText:
            raise ValueError(
                f"{self._source} writes content as a string in one place and reads only parts in "
                "another; allowed: templates that read one form everywhere"
            ) from None

    def _render_form(
        self, conversation: list[Any], variables: Mapping[str, Any], *, is_continued: bool
    ) -> str:
        final = ""
        if is_continued:
            last, final = self._mark_end(conversation[-1])
            conversation = [*conversation[:-1], last]
        text = self._render({**variables, "messages": conversation})
        if not is_continued:
            return text
        mark = _MARK.strip()
        if final.strip() not in text or mark not in text:
            raise ValueError(
                "continue_final_message is True, but the last message does not appear unchanged in "
                f"the output of {self._source}: {shorten(final)}"
            )
        end = text.rindex(mark)
        head = text[:end]
        return head if text[end : end + len(_MARK)] == _MARK else head.rstrip()

    def _mark_end(self, message: dict[str, Any]) -> tuple[dict[str, Any], str]:
        """Marks the end of a message; returns it and its last text."""
        content = message.get("content")
        if "content" not in self._text:
            raise ValueError(
                f"continue_final_message is True, but {self._source} does not read 'content'"
            )
        if isinstance(content, str):
            return message | {"content": content + _MARK}, content
        parts = content if isinstance(content, list | tuple) else []
        for index, part in reversed(list(enumerate(parts))):
            if isinstance(part, dict) and "text" in part:
                text = str(part["text"])
                marked = [*parts[:index], part | {"text": text + _MARK}, *parts[index + 1 :]]
                return message | {"content": type(parts)(marked)}, text
        raise ValueError(
            f"continue_final_message is True, but the last message is {shorten(message)}; allowed: "
            "one with text"
        )

    def _render(self, variables: Mapping[str, Any]) -> str:
        try:
            return chat_process.render(self._text, variables)
        except chat_process.TemplateError as error:
            raise ValueError(f"{self._source} {error}") from None
