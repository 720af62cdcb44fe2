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

  paceline::Executor executor(folder.target, folder.draft, paceline::recommended_options(folder));

  paceline::Request request = {.sampling = paceline::recommended_sampling(folder)};
  for (int i = 3; i < argc; ++i) request.prompt.push_back(std::atoi(argv[i]));
  request.sampling.temperature = 0;
  request.sampling.max_tokens = std::atoi(argv[2]);
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
