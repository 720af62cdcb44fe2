// SPDX-License-Identifier: Apache-2.0
//
// Collective calls of the lanes of a warp.

#include <algorithm>
#include <sstream>

#include "machine.h"

namespace paceline::emulator {
namespace {

uint32_t source_lane(const Thread& thread) {
  const uint32_t lane = thread.number % kWarpSize;
  const uint32_t first = lane & ~(thread.width - 1);
  const uint32_t last = first + thread.width - 1;
  uint32_t from = lane;
  switch (thread.collective) {
    case Collective::kShuffle:
      return first + (thread.argument & (thread.width - 1));
    case Collective::kShuffleUp:
      from = lane - thread.argument;
      return from > lane || from < first ? lane : from;
    case Collective::kShuffleDown:
      from = lane + thread.argument;
      return from > last ? lane : from;
    case Collective::kShuffleXor:
      from = lane ^ thread.argument;
      return from > last ? lane : from;
    default:
      return lane;
  }
}

uint64_t combine(Collective collective, uint64_t a, uint64_t b) {
  const auto low_a = static_cast<uint32_t>(a);
  const auto low_b = static_cast<uint32_t>(b);
  const auto signed_a = static_cast<int32_t>(low_a);
  const auto signed_b = static_cast<int32_t>(low_b);
  switch (collective) {
    case Collective::kAdd:
      return low_a + low_b;
    case Collective::kMin:
      return std::min(low_a, low_b);
    case Collective::kMax:
      return std::max(low_a, low_b);
    case Collective::kMinSigned:
      return static_cast<uint32_t>(std::min(signed_a, signed_b));
    case Collective::kMaxSigned:
      return static_cast<uint32_t>(std::max(signed_a, signed_b));
    case Collective::kAnd:
      return low_a & low_b;
    case Collective::kOr:
      return low_a | low_b;
    default:
      return low_a ^ low_b;
  }
}

// Sets the result of each lane of a collective call. `lanes` has null for those that do not take
// part.
void give_results(Thread* const (&lanes)[kWarpSize], Collective collective) {
  uint32_t votes = 0;
  uint32_t voters = 0;
  uint64_t sum = 0;
  for (uint32_t i = 0; i < kWarpSize; ++i) {
    if (lanes[i] == nullptr) continue;
    sum = voters == 0 ? lanes[i]->value : combine(collective, sum, lanes[i]->value);
    voters |= 1u << i;
    if (lanes[i]->value != 0) votes |= 1u << i;
  }
  for (Thread* const lane : lanes) {
    if (lane == nullptr) continue;
    switch (collective) {
      case Collective::kSync:
        break;
      case Collective::kShuffle:
      case Collective::kShuffleUp:
      case Collective::kShuffleDown:
      case Collective::kShuffleXor: {
        const Thread* const from = lanes[source_lane(*lane)];
        lane->result = from == nullptr ? kUndefined : from->value;
        break;
      }
      case Collective::kBallot:
        lane->result = votes;
        break;
      case Collective::kAny:
        lane->result = votes != 0;
        break;
      case Collective::kAll:
        lane->result = votes == voters;
        break;
      case Collective::kMatchAny: {
        uint32_t equal = 0;
        for (uint32_t i = 0; i < kWarpSize; ++i) {
          if (lanes[i] != nullptr && lanes[i]->value == lane->value) equal |= 1u << i;
        }
        lane->result = equal;
        break;
      }
      default:
        lane->result = sum;
    }
  }
}

void compute_results(Thread* const (&lanes)[kWarpSize], const Thread& one) {
  void* arguments[kWarpSize];
  for (uint32_t i = 0; i < kWarpSize; ++i) {
    if (lanes[i] == nullptr) {
      machine().error = "a lane of the warp of " + text_of(one) + " has ended before the call at " +
                        text_of(one.place);
      return;
    }
    arguments[i] = lanes[i]->compute_argument;
  }
  one.compute(arguments);
}

}  // namespace

bool complete_collective(Thread& one, bool is_caller) {
  Machine& m = machine();
  const uint32_t first = one.number / kWarpSize * kWarpSize;
  Thread* lanes[kWarpSize] = {};
  for (uint32_t i = 0; i < kWarpSize && first + i < m.num_threads; ++i) {
    if ((one.mask >> i & 1) == 0) continue;
    Thread& other = m.blocks[one.block].threads[first + i];
    if (other.wait == Wait::kEnded) continue;
    if (other.wait != Wait::kWarp || other.mask != one.mask) return false;
    if (other.collective != one.collective || !is_same(other.place, one.place)) {
      m.current = &one;
      fail("is in a call of its warp at " + text_of(one.place) + ", and thread " +
           std::to_string(other.number) + " is in another one at " + text_of(other.place));
    }
    lanes[i] = &other;
  }
  if (one.collective == Collective::kCompute) {
    compute_results(lanes, one);
  } else {
    give_results(lanes, one.collective);
  }
  for (Thread* const lane : lanes) {
    if (lane == nullptr) continue;
    if (lane == &one && is_caller) {
      lane->wait = Wait::kNone;
    } else {
      wake(*lane);
    }
  }
  return true;
}

uint64_t run_collective(Collective collective, uint32_t mask, uint64_t value, uint32_t argument,
                        uint32_t width, const Place& place) {
  Thread& self = *machine().current;
  if ((mask >> self.number % kWarpSize & 1) == 0) {
    std::ostringstream text;
    text << "is not among the lanes 0x" << std::hex << mask << " of its call at " << text_of(place);
    fail(text.str());
  }
  self.collective = collective;
  self.mask = mask;
  self.value = value;
  self.argument = argument;
  self.width = width;
  self.place = place;
  self.wait = Wait::kWarp;
  if (!complete_collective(self, true)) yield();
  return self.result;
}

void compute_together(void* argument, void (*compute)(LaneArguments& lanes), const Place& place) {
  Thread& self = *machine().current;
  self.compute_argument = argument;
  self.compute = compute;
  run_collective(Collective::kCompute, 0xffffffffu, 0, 0, kWarpSize, place);
}

}  // namespace paceline::emulator
