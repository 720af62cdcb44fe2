# SPDX-License-Identifier: Apache-2.0
"""Runs one request with the C library through ctypes, without the Python package.

    python generate.py LIBRARY FOLDER MAX_TOKENS TEMPERATURE SEED TOKEN_ID...

LIBRARY is libpaceline.so, and FOLDER was written by `paceline convert`. Prints the token ids and
the share of accepted drafts.
"""

import sys
from ctypes import (
    CDLL,
    Structure,
    byref,
    c_char_p,
    c_double,
    c_int,
    c_int32,
    c_int64,
    c_size_t,
    c_uint64,
    c_void_p,
    sizeof,
)

OK, NO_EVENT = 0, 8  # paceline_status
FINISH_NONE, FINISH_ERROR = 0, 4  # paceline_finish_reason


# The first fields of the structures of paceline/paceline.h. `size` tells the library how many
# there are; the others have their defaults.
class Sampling(Structure):
    _fields_ = (
        ("size", c_size_t),
        ("temperature", c_double),
        ("seed", c_uint64),
        ("max_tokens", c_int32),
        ("min_tokens", c_int32),
    )


class Event(Structure):
    _fields_ = (
        ("size", c_size_t),
        ("request_id", c_int64),
        ("sample", c_int32),
        ("finish_reason", c_int),
        ("num_tokens", c_int32),
        ("token_ids", c_int32 * 32),
        ("error", c_char_p),
        ("num_draft_tokens", c_int32),
        ("num_accepted_tokens", c_int32),
        ("total_iterations", c_int64),
        ("total_draft_tokens", c_int64),
        ("total_accepted_tokens", c_int64),
    )


def main() -> None:
    if len(sys.argv) < 7:
        sys.exit(__doc__)
    library = CDLL(sys.argv[1])
    library.paceline_last_error.restype = c_char_p
    library.paceline_close.restype = None

    def check(status: int) -> None:
        if status != OK:
            sys.exit(f"error: {library.paceline_last_error().decode()}")

    engine = c_void_p()
    check(library.paceline_open(sys.argv[2].encode(), None, byref(engine)))

    sampling = Sampling()
    check(library.paceline_sampling_init(byref(sampling), c_size_t(sizeof(sampling))))
    sampling.max_tokens = int(sys.argv[3])
    sampling.temperature = float(sys.argv[4])
    sampling.seed = int(sys.argv[5])
    ids = [int(text) for text in sys.argv[6:]]
    prompt = (c_int32 * len(ids))(*ids)
    request = c_int64()
    check(library.paceline_add(engine, prompt, c_size_t(len(ids)), byref(sampling), byref(request)))

    event = Event(size=sizeof(Event))
    while event.finish_reason == FINISH_NONE:
        status = library.paceline_poll(engine, 1000, byref(event))
        if status == NO_EVENT:
            continue
        check(status)
        print(*event.token_ids[: event.num_tokens], end=" ", flush=True)
    if event.finish_reason == FINISH_ERROR:
        sys.exit(f"error: {event.error.decode()}")
    accepted, drafted = event.total_accepted_tokens, event.total_draft_tokens
    print(f"\n{accepted} of {drafted} drafts were accepted")
    library.paceline_close(engine)


if __name__ == "__main__":
    main()
