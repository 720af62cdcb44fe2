// SPDX-License-Identifier: Apache-2.0
// Runs one request with the C++ library and prints its token ids and the share of accepted drafts.
//   generate FOLDER MAX_TOKENS TEMPERATURE SEED TOKEN_ID...
// FOLDER was written by `paceline convert`.
#include <cstdlib>
#include <iostream>
#include <string_view>

#include <paceline/error.h>
#include <paceline/executor.h>
#include <paceline/log.h>
#include <paceline/model.h>

int main(int argc, char** argv) try {
  if (argc < 6) {
    std::cerr << "usage: generate FOLDER MAX_TOKENS TEMPERATURE SEED TOKEN_ID...\n";
    return 2;
  }
  paceline::set_log_sink(
      [](paceline::LogLevel, std::string_view line) { std::clog << line << '\n'; });

  const paceline::ModelFolder folder = paceline::load_model_folder(argv[1]);
  paceline::Executor executor(folder.target, folder.draft, paceline::recommended_options(folder));

  paceline::Request request = {.sampling = paceline::recommended_sampling(folder)};
  for (int i = 5; i < argc; ++i) request.prompt.push_back(std::atoi(argv[i]));
  request.sampling.max_tokens = std::atoi(argv[2]);
  request.sampling.temperature = std::atof(argv[3]);
  request.sampling.seed = std::strtoull(argv[4], nullptr, 10);
  if (!executor.add_request(request)) return 1;  // the queue is full

  for (bool is_running = true; is_running;) {
    for (const paceline::RequestEvent& event : executor.poll(/*timeout_ms=*/1000)) {
      for (const int32_t token : event.token_ids) std::cout << token << ' ' << std::flush;
      if (event.finish_reason == paceline::FinishReason::kNone) continue;
      is_running = false;
      if (event.finish_reason == paceline::FinishReason::kError) {
        std::cerr << "error: " << event.error << '\n';
        return 1;
      }
      std::cout << '\n'
                << event.counters.num_accepted_tokens << " of " << event.counters.num_draft_tokens
                << " drafts were accepted\n";
    }
  }
  return 0;
} catch (const paceline::Error& error) {
  std::cerr << "error: " << error.what() << '\n';
  return 1;
}
