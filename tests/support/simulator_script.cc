// SPDX-License-Identifier: Apache-2.0
// Scripts of the simulator: made from a seed, printed, and shrunk.

#include <algorithm>
#include <initializer_list>
#include <random>
#include <sstream>
#include <utility>

#include "kv/slab_pool.h"
#include "support/simulated_device.h"
#include "support/simulator.h"

namespace paceline::testing {
namespace {

class Random {
 public:
  explicit Random(uint64_t seed) : engine_(seed) {}

  int32_t between(int32_t low, int32_t high) {
    return low + static_cast<int32_t>(engine_() % static_cast<uint64_t>(high - low + 1));
  }
  bool percent(int32_t probability) { return between(1, 100) <= probability; }
  template <class T>
  T pick(std::initializer_list<T> values) {
    return *(values.begin() + between(0, static_cast<int32_t>(values.size()) - 1));
  }
  uint64_t bits() { return engine_(); }

 private:
  std::mt19937_64 engine_;
};

KvLayerShape make_layer(Random& random) {
  // Head sizes of different groups make blocks of different bytes, of which slabs hold 1 to 15.
  const int32_t head_dim = random.pick({8, 16, 24, 40});
  if (random.percent(50)) {
    if (head_dim == 24) return {LatentKv{head_dim - 8}, 1, head_dim};
    if (head_dim == 8) return {CompressedKv{random.pick({2, 3, 4, 16}), 8}, 1, head_dim};
    return {FullKv{}, 1, head_dim};
  }
  const int32_t window = random.between(1, 24);
  if (head_dim == 24) return {TailKv{window}, 1, head_dim};
  if (head_dim == 16) return {WindowEntryKv{window}, 1, head_dim};
  return {SlidingKv{window}, 1, head_dim};
}

// Gives the models of a quarter of the scripts a recurrent layer.
void add_recurrent_layers(SimulationScript& script) {
  const uint64_t random = mix(script.seed + 81);
  if (random % 4 != 0) return;
  const auto add = [&](std::vector<KvLayerShape>& layers) {
    layers.push_back({.kind = StateKv{}, .num_kv_heads = 2, .head_dim = 64});
    layers.push_back({.kind = RecordKv{.num_taps = std::min(script.block_size + 1, 4)},
                      .num_kv_heads = 1,
                      .head_dim = 12});
  };
  if (random / 4 % 3 != 0) add(script.target);
  if (script.first_rows == FirstRows::kNewest && random / 12 % 2 == 0) add(script.draft);
  script.options.state_interval = script.block_size * (1 + static_cast<int32_t>(random / 24 % 4));
}

SchedulerOptions make_options(Random& random) {
  SchedulerOptions options;
  options.num_draft_tokens = random.between(0, 4);
  options.max_in_flight = random.between(2, 4);
  options.max_num_seqs = random.between(1, 8);
  const int32_t width = options.num_draft_tokens + 1;
  options.max_num_batched_tokens = options.max_num_seqs * width + random.pick({0, 3, 16, 64});
  options.prefill_chunk_size =
      std::min(random.pick({1, 3, 8, 16, 100}), options.max_num_batched_tokens);
  options.max_score_rows = random.pick({1, 4, 16, 64});
  options.enable_prefix_caching = random.percent(75);
  return options;
}

// A long request among short ones: where the pool has just what it needs, the short ones leave its
// blocks scattered.
void make_one_long(Random& random, SimulationScript& script) {
  for (std::vector<KvLayerShape>* const layers : {&script.target, &script.draft}) {
    for (KvLayerShape& layer : *layers) {
      if (!hands_on(layer.kind)) layer = {FullKv{}, 1, layer.head_dim};
    }
  }
  for (SimulatedRequest& request : script.requests) {
    request.prompt_len = random.between(1, 12);
    request.max_tokens = random.between(1, 10);
  }
  SimulatedRequest& longest = script.requests[static_cast<size_t>(random.between(0, 2))];
  longest = {.arrival = longest.arrival,
             .prompt_len = random.between(1, 30),
             .max_tokens = random.between(20, 50),
             .max_drafts = longest.max_drafts,
             .acceptance = longest.acceptance,
             .salt = longest.salt,
             .cache_salt = longest.cache_salt};
}

std::vector<SimulatedRequest> make_requests(Random& random, int32_t num_draft_tokens) {
  std::vector<SimulatedRequest> requests(static_cast<size_t>(random.between(3, 30)));
  const int32_t spread = random.pick({0, 30, 200});
  const bool has_long_prompts = random.percent(30);
  const int32_t most_tokens = random.pick({4, 16, 30});
  for (SimulatedRequest& request : requests) {
    request.arrival = random.between(0, spread);
    request.prompt_len = random.between(1, has_long_prompts && random.percent(20) ? 90 : 24);
    request.max_tokens = random.between(1, most_tokens);
    request.is_score = random.percent(8);
    if (!request.is_score) {
      if (random.percent(30)) request.num_samples = random.between(2, 5);
      request.has_prompt_logprobs = random.percent(10);
      request.can_stop = random.percent(40);
    }
    if (random.percent(15)) {
      request.cancel_tick = request.arrival + random.between(0, 60);
      if (random.percent(50)) request.cancelled_sample = random.between(0, request.num_samples - 1);
    }
    request.acceptance = random.pick({0, 30, 60, 90, 100});
    request.salt = random.bits();
    const uint64_t drafts = mix(request.salt);
    const auto width = static_cast<uint64_t>(num_draft_tokens + 1);
    request.max_drafts =
        drafts % 5 < 3 ? num_draft_tokens : static_cast<int32_t>(drafts / 5 % width);
  }
  std::stable_sort(requests.begin(), requests.end(),
                   [](const auto& a, const auto& b) { return a.arrival < b.arrival; });
  return requests;
}

// Lets k' change from iteration to iteration in half of the scripts.
void vary_drafts(SimulationScript& script) {
  SchedulerOptions& options = script.options;
  options.drafter_falls_behind = script.first_rows != FirstRows::kNone;
  const bool has_windows =
      std::any_of(script.draft.begin(), script.draft.end(),
                  [](const KvLayerShape& layer) { return kv_window(layer.kind) > 0; });
  options.may_miss_prompts = script.first_rows == FirstRows::kNewest && !has_windows;
  const uint64_t random = mix(script.seed + 77);
  if (options.num_draft_tokens == 0 || random % 2 == 0) return;
  script.draft_schedule_seed = random;
  options.draft_lengths = {0};
  for (int32_t length = 1; length < options.num_draft_tokens; length *= 2) {
    options.draft_lengths.push_back(length);
  }
  options.draft_lengths.push_back(options.num_draft_tokens);
  if (has_windows) options.max_missed = 1 + static_cast<int32_t>(random / 2 % 12);
  // The hidden states of as many tokens and one more are kept for a draft head.
  if (script.first_rows == FirstRows::kWindow) {
    options.max_exact_missed = static_cast<int32_t>(random / 24 % 8);
    options.may_miss_prompts = !has_windows;
  }
}

// Lets prompts begin with the tokens of earlier requests, with or without their output.
void share_prefixes(Random& random, std::vector<SimulatedRequest>& requests) {
  const bool is_much = random.percent(50);
  for (size_t i = 1; i < requests.size(); ++i) {
    if (!random.percent(is_much ? 90 : 40)) continue;
    const size_t other_index = static_cast<size_t>(random.between(0, static_cast<int32_t>(i) - 1));
    const SimulatedRequest& other = requests[other_index];
    SimulatedRequest& request = requests[i];
    if (random.percent(30)) request.prompt_len = other.limit();
    std::vector<SimulatedSegment> segments = other.segments;
    std::erase_if(segments, [&](const auto& s) { return s.end > other.prompt_len; });
    segments.push_back({.end = other.prompt_len, .salt = mix(other.salt)});
    const auto sample = static_cast<uint64_t>(random.between(0, other.num_samples - 1));
    segments.push_back({.end = other.limit(), .salt = mix(other.salt + sample + 1)});
    const int32_t end = random.between(1, other.limit() + 8);
    for (SimulatedSegment& segment : segments) segment.end = std::min(segment.end, end);
    request.segments = segments;
  }
}

// Gives the requests of a third of the scripts salts of the prefix cache, or none.
void salt_requests(uint64_t seed, std::vector<SimulatedRequest>& requests) {
  if (mix(seed + 80) % 3 != 0) return;
  for (SimulatedRequest& request : requests) {
    request.cache_salt = static_cast<int32_t>(mix(request.salt + 80) % 3);
  }
}

// The fewest slabs with which every request fits alone.
int64_t fewest_slabs(SimulationScript script) {
  for (script.num_slabs = 2;; ++script.num_slabs) {
    SlabPool pool(script.layout());
    const Scheduler scheduler(script.options, pool);
    if (std::all_of(script.requests.begin(), script.requests.end(),
                    [&](const SimulatedRequest& request) {
                      return scheduler.fits_alone(request.prompt_len, request.limit());
                    })) {
      return script.num_slabs;
    }
  }
}

// Smaller scripts to try instead of `script`, those with the fewest requests first.
std::vector<SimulationScript> smaller(const SimulationScript& script) {
  std::vector<SimulationScript> all;
  const size_t count = script.requests.size();
  for (size_t size = count / 2; size > 0; size /= 2) {
    for (size_t begin = 0; begin + size <= count; begin += size) {
      SimulationScript& one = all.emplace_back(script);
      const auto first = one.requests.begin() + static_cast<std::ptrdiff_t>(begin);
      one.requests.erase(first, first + static_cast<std::ptrdiff_t>(size));
    }
  }
  for (size_t i = 0; i < count; ++i) {
    const auto change = [&](const auto& edit) {
      SimulationScript one = script;
      edit(one.requests[i]);
      all.push_back(std::move(one));
    };
    const SimulatedRequest& request = script.requests[i];
    if (request.num_samples > 1) {
      change([](SimulatedRequest& r) { --r.num_samples; });
    }
    if (request.cancel_tick >= 0) {
      change([](SimulatedRequest& r) { r.cancel_tick = r.cancelled_sample = -1; });
    }
    if (request.can_stop) change([](SimulatedRequest& r) { r.can_stop = false; });
    if (request.has_prompt_logprobs) {
      change([](SimulatedRequest& r) { r.has_prompt_logprobs = false; });
    }
    if (request.prompt_len > 1) {
      change([](SimulatedRequest& r) { r.prompt_len = (r.prompt_len + 1) / 2; });
      change([](SimulatedRequest& r) { --r.prompt_len; });
    }
    if (request.cache_salt != 0) change([](SimulatedRequest& r) { r.cache_salt = 0; });
    if (!request.segments.empty()) change([](SimulatedRequest& r) { r.segments.clear(); });
    if (request.max_tokens > 1) {
      change([](SimulatedRequest& r) { r.max_tokens = (r.max_tokens + 1) / 2; });
      change([](SimulatedRequest& r) { --r.max_tokens; });
    }
    if (request.max_drafts < script.options.num_draft_tokens) {
      change([&](SimulatedRequest& r) { r.max_drafts = script.options.num_draft_tokens; });
    }
    if (request.acceptance > 0) change([](SimulatedRequest& r) { r.acceptance = 0; });
    const int64_t earlier = i == 0 ? 0 : script.requests[i - 1].arrival;
    if (request.arrival > earlier) change([&](SimulatedRequest& r) { r.arrival = earlier; });
  }
  if (script.draft_schedule_seed > 0) all.emplace_back(script).draft_schedule_seed = 0;
  if (script.least_prompt_rows > 0) all.emplace_back(script).least_prompt_rows = 0;
  if (script.percent_early > 0) all.emplace_back(script).percent_early = 0;
  return all;
}

}  // namespace

KvLayout SimulationScript::layout() const {
  KvLayout layout = plan_kv_layout(target, draft, block_size, DType::kFloat32, 16 << 20);
  layout.num_slabs = num_slabs;
  layout.pool_bytes = num_slabs * layout.slab_bytes;
  return layout;
}

std::string SimulationScript::text() const {
  std::ostringstream out;
  out << "PACELINE_SEED=" << seed << ": max_num_seqs " << options.max_num_seqs
      << ", max_num_batched_tokens " << options.max_num_batched_tokens << ", prefill_chunk_size "
      << options.prefill_chunk_size << ", max_score_rows " << options.max_score_rows
      << ", num_draft_tokens " << options.num_draft_tokens << ", max_in_flight "
      << options.max_in_flight << ", first_rows " << static_cast<int32_t>(first_rows)
      << (follows_windows ? " (follows windows)" : "") << ", prefix cache "
      << options.enable_prefix_caching << ", max_adopted_tokens " << options.max_adopted_tokens
      << ", block_size " << block_size << ", num_slabs " << num_slabs << ", percent_early "
      << percent_early << ", draft_schedule_seed " << draft_schedule_seed << ", least_prompt_rows "
      << least_prompt_rows << ", max_missed " << options.max_missed << ", may_miss_prompts "
      << options.may_miss_prompts << ", max_exact_missed " << options.max_exact_missed << "\n";
  const KvLayout planned = layout();
  for (size_t g = 0; g < planned.groups.size(); ++g) {
    const KvGroup& group = planned.groups[g];
    out << "  group " << g << ": " << kv_owner_name(group.owner) << ", " << kv_kind_name(group.kind)
        << ", window " << kv_window(group.kind) << ", "
        << planned.blocks_per_slab(static_cast<GroupId>(g)) << " blocks a slab\n";
  }
  for (size_t i = 0; i < requests.size(); ++i) {
    const SimulatedRequest& r = requests[i];
    out << "  request " << i << ": tick " << r.arrival << ", prompt " << r.prompt_len << ", ";
    if (r.is_score) {
      out << "scored";
    } else {
      out << "max_tokens " << r.max_tokens << ", samples " << r.num_samples << ", drafts "
          << r.max_drafts << ", acceptance " << r.acceptance << " %";
    }
    if (r.cache_salt != 0) out << ", cache salt " << r.cache_salt;
    if (r.has_prompt_logprobs) out << ", prompt logprobs";
    if (r.can_stop) out << ", stops";
    for (const SimulatedSegment& s : r.segments) out << ", to " << s.end << " as " << s.salt % 1000;
    if (r.cancel_tick >= 0) {
      out << ", sample " << r.cancelled_sample << " cancelled at tick " << r.cancel_tick;
    }
    out << "\n";
  }
  return out.str();
}

SimulationScript make_script(uint64_t seed) {
  Random random(seed);
  SimulationScript script;
  script.seed = seed;
  script.options = make_options(random);
  script.block_size = random.pick({1, 2, 4, 5});
  script.target.resize(static_cast<size_t>(random.between(1, 3)));
  for (KvLayerShape& layer : script.target) layer = make_layer(random);
  if (script.options.num_draft_tokens > 0) {
    script.first_rows = random.pick({FirstRows::kNone, FirstRows::kNewest, FirstRows::kWindow});
  }
  if (script.first_rows != FirstRows::kNone) {
    script.draft.resize(static_cast<size_t>(random.between(1, 2)));
    for (KvLayerShape& layer : script.draft) layer = make_layer(random);
  }
  add_recurrent_layers(script);
  script.percent_early = random.pick({0, 0, 20, 60});
  script.requests = make_requests(random, script.options.num_draft_tokens);
  const bool scatters = random.percent(25);
  if (scatters) make_one_long(random, script);
  share_prefixes(random, script.requests);
  salt_requests(seed, script.requests);
  vary_drafts(script);
  const uint64_t rows = mix(seed + 78);
  if (rows % 3 == 0) script.least_prompt_rows = 1 + static_cast<int32_t>(rows / 3 % 12);
  script.follows_windows = script.first_rows == FirstRows::kNewest && mix(seed + 83) % 2 == 0;
  // A draft head, or a block drafter, whose KV does not depend on the next token.
  script.options.follows_hidden = script.first_rows == FirstRows::kWindow;
  script.options.kv_lookahead = script.options.follows_hidden && mix(seed + 79) % 3 > 0 ? 1 : 0;
  int32_t longest = 0;
  for (const SimulatedRequest& request : script.requests) {
    longest = std::max(longest, request.limit());
  }
  script.options.max_adopted_tokens = longest + random.pick({0, 5, 100});
  script.num_slabs = fewest_slabs(script);
  if (!scatters && random.percent(60)) {
    script.num_slabs += random.between(1, static_cast<int32_t>(script.num_slabs));
  }
  return script;
}

SimulationScript shrink(SimulationScript script, SimulatedFault fault) {
  for (bool has_shrunk = true; has_shrunk;) {
    has_shrunk = false;
    for (SimulationScript& candidate : smaller(script)) {
      if (simulate(candidate, fault).violation.empty()) continue;
      script = std::move(candidate);
      has_shrunk = true;
      break;
    }
  }
  return script;
}

}  // namespace paceline::testing
