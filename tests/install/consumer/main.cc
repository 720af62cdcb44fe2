// SPDX-License-Identifier: Apache-2.0
// A complete program that embeds the library: it loads a folder that `paceline convert` wrote,
// generates, and prints token ids.
//   consumer FOLDER MAX_TOKENS TOKEN_ID...
#include <cstdlib>
#include <iostream>

#include <paceline/error.h>
#include <paceline/executor.h>
#include <paceline/model.h>

int main(int argc, char** argv) try {
  if (argc < 4) {
    std::cerr << "usage: consumer FOLDER MAX_TOKENS TOKEN_ID...\n";
    return 2;
  }
  const paceline::ModelFolder folder = paceline::load_model_folder(argv[1]);

  paceline::ExecutorOptions options;
  options.max_model_len = 512;
  options.max_num_seqs = 4;
  options.kv_cache_bytes = 64 << 20;
  options.speculative.num_speculative_tokens = folder.num_speculative_tokens;
  paceline::Executor executor(folder.target, folder.draft, options);

  paceline::Request request;
  for (int i = 3; i < argc; ++i) request.prompt.push_back(std::atoi(argv[i]));
  request.sampling.temperature = 0;
  request.sampling.max_tokens = std::atoi(argv[2]);
  request.sampling.stop_token_ids = folder.stop_token_ids;
  if (!executor.add_request(request)) return 1;

  for (bool is_running = true; is_running;) {
    for (const paceline::RequestEvent& event : executor.poll(/*timeout_ms=*/1000)) {
      for (const int32_t token : event.token_ids) std::cout << token << ' ';
      is_running = event.finish_reason == paceline::FinishReason::kNone;
    }
  }
  std::cout << '\n';
  return 0;
} catch (const paceline::Error& error) {
  std::cerr << "error: " << error.what() << '\n';
  return 2;
}
