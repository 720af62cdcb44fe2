// SPDX-License-Identifier: Apache-2.0
#include "device/host_bytes.h"

#include <algorithm>
#include <array>
#include <fstream>
#include <string>

#include "base/check.h"

namespace paceline {
namespace {

std::optional<int64_t> read_number(const char* path) {
  std::ifstream file(path);
  int64_t number = 0;
  if (!(file >> number)) return std::nullopt;  // no such file, or "max"
  return number;
}

}  // namespace

std::optional<int64_t> HostBytes::room() const {
  if (!group_limit || !group_use) return available;
  const int64_t group_room = std::max(*group_limit - *group_use, int64_t{0});
  return available ? std::min(*available, group_room) : group_room;
}

HostBytes host_bytes() {
  HostBytes host;
  std::ifstream meminfo("/proc/meminfo");
  for (std::string line; std::getline(meminfo, line);) {
    const auto bytes = [&](std::string_view key) -> std::optional<int64_t> {
      if (!line.starts_with(key)) return std::nullopt;
      return std::stoll(line.substr(key.size())) * 1024;
    };
    if (const auto found = bytes("MemAvailable:")) host.available = found;
    if (const auto found = bytes("SwapFree:")) host.swap = *found;
  }
  constexpr std::array<std::array<const char*, 2>, 2> kControlGroups = {
      {{"/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"},
       {"/sys/fs/cgroup/memory/memory.limit_in_bytes",
        "/sys/fs/cgroup/memory/memory.usage_in_bytes"}}};
  for (const auto& [limit_path, use_path] : kControlGroups) {
    const std::optional<int64_t> limit = read_number(limit_path);
    const std::optional<int64_t> use = read_number(use_path);
    if (!limit || !use) continue;
    host.group_limit = limit;
    host.group_use = use;
  }
  return host;
}

void check_fits(int64_t bytes, std::string_view purpose, const HostBytes& host) {
  const auto refuse = [&](int64_t room, std::string_view owner) {
    throw OutOfMemory(concat("out of memory: ", bytes >> 20, " MiB for ", purpose, ", but ", owner,
                             " ", room >> 20,
                             " MiB; free memory, or use a smaller model or a larger machine"));
  };
  if (host.available && bytes > *host.available + host.swap) {
    refuse(*host.available + host.swap, "this machine has");
  }
  // Cached files make room, so the use of the group does not count.
  if (host.group_limit && bytes > *host.group_limit) {
    refuse(*host.group_limit, "the control group of this process is limited to");
  }
}

}  // namespace paceline
