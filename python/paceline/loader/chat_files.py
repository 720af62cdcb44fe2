# SPDX-License-Identifier: Apache-2.0
"""The names of the files of a checkpoint that hold chat templates and special tokens."""

from __future__ import annotations

import re
from typing import Final

TOKENIZER_CONFIG_NAME: Final = "tokenizer_config.json"
SPECIAL_TOKENS_NAME: Final = "special_tokens_map.json"
TEMPLATE_NAME: Final = "chat_template.jinja"
OLD_TEMPLATE_NAME: Final = "chat_template.json"
CHAT_NAMES: Final = (
    TOKENIZER_CONFIG_NAME,
    SPECIAL_TOKENS_NAME,
    TEMPLATE_NAME,
    OLD_TEMPLATE_NAME,
)
# The folder of further chat templates.
MORE_TEMPLATES: Final = "additional_chat_templates"
_MORE_TEMPLATE: Final = re.compile(rf"{MORE_TEMPLATES}/\w[\w-]*\.jinja", re.ASCII)


def is_more_template(name: str) -> bool:
    """Returns whether a name, relative to the folder, is that of a further chat template."""
    return _MORE_TEMPLATE.fullmatch(name) is not None
