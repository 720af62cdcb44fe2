// SPDX-License-Identifier: Apache-2.0
#include "graph/cpu_graph.h"

#include "base/check.h"

#include "device/cpu_context.h"

namespace paceline {
namespace {

Program record(CpuContext& ctx, const CpuGraph::Enqueue& enqueue) {
  Program program;
  ctx.capturing = &program;
  enqueue();
  ctx.capturing = nullptr;
  return program;
}

}  // namespace

CpuGraph CpuGraph::capture(CpuContext& ctx, const Enqueue& enqueue) {
  CpuGraph graph;
  graph.before_ = record(ctx, enqueue);
  return graph;
}

CpuGraph CpuGraph::capture_while(CpuContext& ctx, const Enqueue& before, const Enqueue& body,
                                 const Enqueue& after, const int32_t* keep_going) {
  CpuGraph graph;
  graph.before_ = record(ctx, before);
  graph.body_ = record(ctx, body);
  graph.after_ = record(ctx, after);
  graph.keep_going_ = keep_going;
  return graph;
}

void CpuGraph::launch(CpuContext& ctx) const {
  PACELINE_CHECK(before_.num_nodes() > 0 || keep_going_ != nullptr, "nothing was captured");
  before_.replay(ctx);
  if (keep_going_ == nullptr) return;
  while (*keep_going_ != 0) body_.replay(ctx);
  after_.replay(ctx);
}

}  // namespace paceline
