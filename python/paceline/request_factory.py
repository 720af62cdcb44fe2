# SPDX-License-Identifier: Apache-2.0
"""`RequestFactory`: checks and encodes the requests of an `LLM`, and numbers their outputs."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, TypeVar

from paceline.default_params import default_params
from paceline.detokenizer import IncrementalDetokenizer
from paceline.engine_sampling import (
    check_num_speculative_tokens,
    check_speculative_method,
    engine_arguments,
)
from paceline.grammar import Grammars
from paceline.limits import MAX_SEED
from paceline.logprobs import LogprobReader, check_logprobs
from paceline.prompts import Prompts, cache_salt_of, encode, list_params, list_prompts
from paceline.request import Request

if TYPE_CHECKING:
    from paceline.capture import Capture
    from paceline.grammar import CompiledGrammar
    from paceline.loader import LoadedModel
    from paceline.loader.tokenizer import TokenizerInfo
    from paceline.receipts.maker import Receipts
    from paceline.sampling import SamplingParams

_Queued = TypeVar("_Queued")


class RequestFactory:
    """Makes the requests of an `LLM`. Thread-safe.

    Outputs are numbered in the order in which their requests are queued. The numbers determine the
    seeds of requests without one.
    """

    def __init__(
        self,
        target: LoadedModel,
        *,
        max_model_len: int,
        max_logprobs: int,
        num_speculative_tokens: int,
        seed: int,
        methods: tuple[str, ...] = (),
        receipts: Receipts,
    ) -> None:
        """Starts with number 0.

        Args:
            target: The model that runs the requests.
            max_model_len: Largest number of tokens of a request.
            max_logprobs: Largest number of logprobs of a request.
            num_speculative_tokens: k; 0 without a drafter.
            seed: Base seed for requests without a seed.
            methods: The methods that draft, the model's first; see `SpeculativeConfig.methods`.
            receipts: Makes the receipts.
        """
        self.capture: Capture | None = None  # of the requests that are prepared from now on
        self._target = target
        self._max_model_len = max_model_len
        self._max_logprobs = max_logprobs
        self._num_speculative_tokens = num_speculative_tokens
        self._seed = seed
        self._methods = methods
        self.receipts = receipts
        self.grammars = Grammars(target)
        self._numbering = threading.Lock()
        self._num_outputs = 0  # of the requests so far

    def set_drafter(self, methods: tuple[str, ...], k: int) -> None:
        """Sets what later requests draft with: the methods, and k."""
        self._methods = methods
        self._num_speculative_tokens = k

    def prepare(
        self,
        prompts: Prompts,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
        grammar: CompiledGrammar | None = None,
    ) -> list[Request]:
        """Checks and encodes the requests of a call, without numbering or queueing them.

        Args:
            prompts: As for `LLM.generate`.
            sampling_params: As for `LLM.generate`.
            grammar: That of all parameters with structured_outputs; None = it is compiled here.

        Returns:
            The samples of all prompts. Those of one prompt are adjacent and in order.

        Raises:
            ValueError: A prompt or a parameter is not allowed. The message says which.
        """
        listed = list_prompts(prompts)
        if sampling_params is None:
            sampling_params = default_params(self._target)
        params = list_params(sampling_params, len(listed))
        checked = []
        for index, (prompt, param) in enumerate(zip(listed, params, strict=True)):
            name = f"prompts[{index}]" if len(listed) > 1 else "prompt"
            text, token_ids = encode(
                prompt, name, self._target, max_model_len=self._max_model_len, spare=1
            )
            check_logprobs(param, self._max_logprobs)
            check_num_speculative_tokens(param, self._num_speculative_tokens)
            check_speculative_method(param, self._methods)
            arguments = engine_arguments(param, self._target)
            if salt := cache_salt_of(prompt):
                arguments["cache_salt"] = salt
            compiled = None
            if param.structured_outputs is not None:
                compiled = grammar or self.grammars.compile(param.structured_outputs)
                arguments["grammar"] = compiled.text
            receipt = self.receipts.form(param, arguments, token_ids) if param.receipt else None
            checked.append((text, token_ids, param, arguments, compiled, receipt))
        # Shared by all requests of the call, so that a token is decoded once.
        logprobs = LogprobReader(self._target.tokenizer)
        return [
            Request(
                index,
                text,
                token_ids,
                param,
                sampling=sampling,
                detokenizer=make_detokenizer(self._target.tokenizer, token_ids, param),
                logprobs=logprobs if param.detokenize else None,
                grammars=self.grammars,
                max_model_len=self._max_model_len,
                grammar=compiled,
                receipt=receipt,
                sample=sample,
                drafter=param.speculative_method or next(iter(self._methods), None),
                capture=self.capture,
            )
            for index, (text, token_ids, param, sampling, compiled, receipt) in enumerate(checked)
            for sample in range(param.n)
        ]

    def queue(self, requests: Sequence[Request], start: Callable[[], _Queued]) -> _Queued:
        """Numbers the outputs of requests and queues them; a refused call uses up no numbers.

        Args:
            requests: The result of `prepare`.
            start: Queues all of them, or raises and queues none.

        Returns:
            What `start` returns.
        """
        with self._numbering:
            self.set_seeds(requests, self._num_outputs)
            queued = start()
            self._num_outputs += len(requests)
        return queued

    def reserve_numbers(self, num_outputs: int) -> int:
        """Takes numbers for outputs whose requests are queued later; returns the first."""
        with self._numbering:
            first = self._num_outputs
            self._num_outputs += num_outputs
        return first

    def set_seeds(self, requests: Sequence[Request], first_number: int) -> None:
        """Gives requests without a seed the seeds that their numbers determine."""
        seed = 0
        for number, request in enumerate(requests, first_number):
            if request.sample == 0:
                given = request.params.seed
                seed = (self._seed * 2**32 + number) & MAX_SEED if given is None else given
                request.sampling = {**request.sampling, "seed": seed}
            request.seed = (seed + request.sample) & MAX_SEED


def make_detokenizer(
    tokenizer: TokenizerInfo | None, prompt_token_ids: Sequence[int], params: SamplingParams
) -> IncrementalDetokenizer | None:
    """Makes what converts an output to text.

    Args:
        tokenizer: The model's tokenizer; None without one.
        prompt_token_ids: The prompt.
        params: Say which tokens have text.

    Returns:
        The detokenizer; None if the output has no text.
    """
    if tokenizer is None or not params.detokenize:
        return None
    skips = params.skip_special_tokens
    return IncrementalDetokenizer(
        tokenizer.decode if skips else tokenizer.decode_all,
        prompt_token_ids,
        silent=tokenizer.silent(skip_special_tokens=skips),
        joined=None if skips or params.spaces_between_special_tokens else tokenizer.added_tokens,
    )
