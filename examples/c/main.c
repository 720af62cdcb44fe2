// SPDX-License-Identifier: Apache-2.0
// Runs one request with the C library and prints its token ids and the share of accepted drafts.
//   cc main.c -o generate $(pkg-config --cflags --libs paceline)
//   ./generate FOLDER MAX_TOKENS TEMPERATURE SEED TOKEN_ID...
// FOLDER was written by `paceline convert`.
#include <paceline/paceline.h>
#include <stdio.h>
#include <stdlib.h>

static int fail(const char* what) {
  fprintf(stderr, "%s: %s\n", what, paceline_last_error());
  return 1;
}

int main(int argc, char** argv) {
  if (argc < 6) {
    fprintf(stderr, "usage: generate FOLDER MAX_TOKENS TEMPERATURE SEED TOKEN_ID...\n");
    return 2;
  }
  const size_t num_tokens = (size_t)(argc - 5);
  int32_t* prompt = malloc(num_tokens * sizeof *prompt);
  if (prompt == NULL) return 1;
  for (size_t i = 0; i < num_tokens; ++i) prompt[i] = (int32_t)atoi(argv[5 + i]);

  paceline_engine* engine = NULL;
  if (paceline_open(argv[1], NULL, &engine) != PACELINE_OK) return fail("open");

  paceline_sampling sampling;
  if (paceline_sampling_init(&sampling, sizeof sampling) != PACELINE_OK) return fail("sampling");
  sampling.max_tokens = atoi(argv[2]);
  sampling.temperature = atof(argv[3]);
  sampling.seed = strtoull(argv[4], NULL, 10);
  int64_t request_id = 0;
  if (paceline_add(engine, prompt, num_tokens, &sampling, &request_id) != PACELINE_OK) {
    return fail("add");
  }
  free(prompt);

  paceline_event event = {.size = sizeof event};
  do {
    const paceline_status status = paceline_poll(engine, 1000, &event);
    if (status == PACELINE_NO_EVENT) continue;
    if (status != PACELINE_OK) return fail("poll");
    for (int32_t i = 0; i < event.num_tokens; ++i) printf("%d ", (int)event.token_ids[i]);
    fflush(stdout);
  } while (event.finish_reason == PACELINE_FINISH_NONE);
  if (event.finish_reason == PACELINE_FINISH_ERROR) return fail("request");

  printf("\n%lld of %lld drafts were accepted\n", (long long)event.total_accepted_tokens,
         (long long)event.total_draft_tokens);
  paceline_close(engine);
  return 0;
}
