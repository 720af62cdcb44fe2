# SPDX-License-Identifier: Apache-2.0
"""Makes the receipts of an LLM's requests."""

from __future__ import annotations

import copy
import dataclasses
import hashlib
import threading
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from paceline import _core
from paceline.receipts.digests import digest, weights_digest
from paceline.receipts.receipt import SAMPLING, VERSION, VERSION_KEY, Receipt, chain_of
from paceline.sampling import WITH_TEXT

if TYPE_CHECKING:
    from paceline.chat_template import ChatTemplates
    from paceline.loader import LoadedModel
    from paceline.sampling import SamplingParams
    from paceline.speculative_config import SpeculativeConfig

# Engine arguments that are shown only with text as they are.
_HIDDEN: Final = ("bad_words", "allowed_token_ids")
# Parameters that decide which text a stop string is looked for in.
_TEXT_PARAMS: Final = ("skip_special_tokens", "spaces_between_special_tokens")


class Receipts:
    """Makes the receipts of one LLM. Thread-safe.

    The first receipt computes the digests of the model, which takes as long as reading its files,
    unless the cache has them.
    """

    def __init__(
        self,
        target: LoadedModel,
        templates: ChatTemplates,
        speculative: SpeculativeConfig | None,
        *,
        max_model_len: int,
        device: str | None = None,
    ) -> None:
        """Computes nothing yet.

        Args:
            target: The model.
            templates: Its chat templates.
            speculative: How the LLM drafts; None without drafts.
            max_model_len: The largest number of tokens of a request.
            device: The class of the device, if the engines run in other processes.
        """
        self._target = target
        self._templates = templates
        self._method = "coupled" if speculative is None else speculative.rejection_sample_method
        self._max_model_len = max_model_len
        self._device = device
        self._lock = threading.Lock()
        # The facts, and the update of the weights that they describe.
        self._known: tuple[dict[str, Any], int] | None = None

    @property
    def num_updates(self) -> int:
        """How often the weights have changed; see `WeightOrigin`."""
        return self._target.weights.num_updates

    def facts(self) -> dict[str, Any]:
        """Returns what all receipts of the LLM begin with; computed once for each update of the
        weights.

        Raises:
            ModelFileError: A file of the weights cannot be read, or is not the one that was loaded.
            NotImplementedError: The digest needs weights that this process does not have.
        """
        return self._current()[0]

    def _current(self) -> tuple[dict[str, Any], int]:
        with self._lock:
            num_updates = self.num_updates
            if self._known is None or self._known[1] != num_updates:
                self._known = self._compute(), num_updates
            return self._known

    def _compute(self) -> dict[str, Any]:
        target = self._target
        template = self._templates.find_text()
        if self._device is None:
            self._device = _core.device_class(target.model.device)
        return {
            VERSION_KEY: VERSION,
            "runtime": _core.version(),
            "model": {
                "weights": weights_digest(target),
                "config": digest(target.config),
                "dtype": target.weight_dtype,
                "tokenizer": None if target.tokenizer is None else target.tokenizer.digest.hex(),
                "template": None
                if template is None
                else hashlib.sha256(template.encode()).hexdigest(),
            },
            "device": self._device,
            "max_model_len": self._max_model_len,
        }

    def form(
        self, params: SamplingParams, sampling: Mapping[str, Any], prompt_token_ids: Sequence[int]
    ) -> ReceiptForm:
        """Makes the part of a receipt that is known before the request runs.

        Args:
            params: The sampling parameters, with `receipt`.
            sampling: The same as `engine_arguments` returns them.
            prompt_token_ids: The prompt.

        Raises:
            ValueError: The output depends on more than a replay would know.
            Exception: As for `facts`.
        """
        if self._method == "synthetic" or (self._method != "coupled" and params.temperature > 0):
            raise ValueError(
                f"receipt is {params.receipt!r}, but rejection_sample_method is {self._method!r}, "
                f"whose output at temperature {params.temperature:g} depends on the drafts, so it "
                "cannot be replayed; allowed: rejection_sample_method 'coupled'"
                + ("" if self._method == "synthetic" else ", or temperature 0")
            )
        facts, num_updates = self._current()
        inputs: dict[str, Any] = {"prompt": list(prompt_token_ids)}
        if params.structured_outputs is not None:
            inputs["grammar"] = {
                name: value
                for name, value in dataclasses.asdict(params.structured_outputs).items()
                if value is not None and value is not False
            }
        if params.stop:
            inputs["stop"] = list(params.stop)
        inputs |= {name: sampling[name] for name in _HIDDEN if name in sampling}
        if params.logit_bias:
            inputs["logit_bias"] = [list(pair) for pair in params.logit_bias]
        values = {name: sampling[name] for name in SAMPLING if name in sampling}
        values["max_tokens"] = params.max_tokens
        if params.stop:
            values |= {name: getattr(params, name) for name in _TEXT_PARAMS}
        header = {
            **facts,
            "num_prompt_tokens": len(prompt_token_ids),
            "digests": {name: digest(value) for name, value in inputs.items()},
            "sampling": values,
        }
        shown = inputs if params.receipt == WITH_TEXT else None
        return ReceiptForm(self, header, shown, num_updates)


class ReceiptForm:
    """The receipts of the samples of one request, without their outputs."""

    def __init__(
        self,
        receipts: Receipts,
        header: dict[str, Any],
        inputs: dict[str, Any] | None,
        num_updates: int,
    ) -> None:
        """Stores the parts.

        Args:
            receipts: Knows whether the weights have changed.
            header: The header without the seed.
            inputs: The inputs; None = they are not shown.
            num_updates: The update of the weights that the header describes.
        """
        self._receipts = receipts
        self._header = header
        self._inputs = inputs
        self._num_updates = num_updates

    def fill(self, seed: int, token_ids: Sequence[int], finish_reason: str) -> Receipt | None:
        """Makes the receipt of one sample.

        Args:
            seed: Of the sample.
            token_ids: The output.
            finish_reason: How it ended.

        Returns:
            The receipt as plain JSON types; None if other weights have taken the place of those
            that the header describes.
        """
        if self._receipts.num_updates != self._num_updates:
            return None
        # Copies, because receipts belong to the caller, and these are those of other receipts, too.
        receipt = {
            **{key: copy.copy(value) for key, value in self._header.items()},
            "seed": str(seed),
            "tokens": list(token_ids),
            "finish_reason": finish_reason,
        }
        receipt["chain"] = chain_of(receipt)
        if self._inputs is not None:
            receipt["inputs"] = {name: copy.copy(value) for name, value in self._inputs.items()}
        return receipt
