# SPDX-License-Identifier: Apache-2.0
"""The largest values of parameters: of options as in options.toml, of requests as in C++."""

from __future__ import annotations

from typing import Final

from paceline import _core
from paceline.option_schema import largest

_LIMITS: Final = _core.limits()

MAX_NUM_SEQS: Final = largest("max_num_seqs")
MAX_BLOCK_SIZE: Final = largest("block_size")
MAX_NUM_THREADS: Final = largest("num_threads")

MAX_SPECULATIVE_TOKENS: Final = largest("num_speculative_tokens")
MAX_DRAFT_PROPOSALS: Final = largest("draft_proposals")
DEFAULT_DRAFT_PROPOSALS: Final = _LIMITS["default_draft_proposals"]
MAX_PROMPT_LOOKUP: Final = largest("prompt_lookup_max")

MAX_SAMPLES: Final = _LIMITS["n"]
MAX_TEMPERATURE: Final = _LIMITS["temperature"]
MAX_LOGPROBS: Final = _LIMITS["logprobs"]
MAX_STOP_TOKEN_IDS: Final = _LIMITS["stop_token_ids"]
MAX_LOGIT_BIAS: Final = _LIMITS["logit_bias"]
MAX_BAD_WORDS: Final = _LIMITS["bad_words"]
MAX_BAD_WORD_TOKENS: Final = _LIMITS["bad_word_tokens"]
MAX_CACHE_SALT_BYTES: Final = _LIMITS["cache_salt_bytes"]

# Of an int32 and a uint64 of C++.
MAX_INT: Final = 2**31 - 1
MAX_SEED: Final = 2**64 - 1
