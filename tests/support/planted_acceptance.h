// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <functional>
#include <memory>
#include <utility>

#include "engine/engine.h"
#include "model/description/kv_shapes.h"
#include "runner/cpu_runner.h"
#include "support/acceptance.h"
#include "wire/batch_shape.h"

namespace paceline::testing {

// The acceptance rate of a draft head with 4 drafts, after a change of its recorded programs. The
// vocabulary has 64 tokens.
inline double planted_acceptance(const std::shared_ptr<const Model>& target,
                                 const std::shared_ptr<const Model>& head, double temperature,
                                 const std::function<void(CpuRunner&, Program&)>& plant) {
  const KvLayout layout = plan_kv_layout(kv_layer_shapes(target->config),
                                         draft_kv_layer_shapes(head->config, target->config), 8,
                                         DType::kFloat32, 8 << 20);
  const BatchShape shape{.max_seqs = 8,
                         .max_verify_rows = 256,
                         .max_logit_rows = 256,
                         .num_draft_tokens = 4,
                         .first_rows = traits_for(&head->config, {}).first_rows};
  auto runner = std::make_unique<CpuRunner>(
      target, head, layout,
      CpuRunnerOptions{.runner = {.iteration = {.shape = shape, .max_model_len = 256}}});
  for (Program* const program : runner->programs()) plant(*runner, *program);
  Engine engine({.shape = shape,
                 .scheduler = {.max_num_seqs = 8,
                               .max_num_batched_tokens = 256,
                               .prefill_chunk_size = 256,
                               .max_score_rows = 16,
                               .num_draft_tokens = 4,
                               .max_in_flight = 2},
                 .max_model_len = 256,
                 .vocab_size = 64},
                layout, std::move(runner));
  return acceptance_rate(engine, temperature);
}

}  // namespace paceline::testing
