// SPDX-License-Identifier: Apache-2.0
// SHA-256 and the canonical form of JSON, of which receipts have digests.

#include "base/sha256.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstddef>
#include <iostream>
#include <random>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/canonical_json.h"
#include "base/json.h"
#include "support/seed.h"

namespace paceline {
namespace {

using testing::seed_from_env;

TEST(Sha256, HasTheDigestsOfTheStandard) {
  EXPECT_EQ(sha256_hex(""), "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855");
  EXPECT_EQ(sha256_hex("abc"), "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad");
  EXPECT_EQ(sha256_hex("abcdbcdecdefdefgefghfghighijhijkijkljklmklmnlmnomnopnopq"),
            "248d6a61d20638b8e5c026930c3e6039a33ce45964ff2167f6ecedd419db06c1");
  EXPECT_EQ(sha256_hex(std::string(1'000'000, 'a')),
            "cdc76e5c9914fb9281a1c7e284d73e67f1809a48a497200e046d39ccc7112cd0");
}

TEST(Sha256, TheInstructionsAndTheParts) {
  const uint64_t seed = seed_from_env(20261128);
  std::cout << "PACELINE_SEED=" << seed << "\n";
  std::mt19937_64 random(seed);
  for (size_t length = 0; length < 400; ++length) {
    std::vector<std::byte> bytes(length);
    std::ranges::generate(bytes, [&] { return static_cast<std::byte>(random()); });
    Sha256 portable(/*uses_instructions=*/false);
    portable.add(bytes);
    const Sha256::Digest expected = portable.finish();
    Sha256 parts;
    for (std::span<const std::byte> left = bytes; !left.empty();) {
      const auto part = left.first(std::min<size_t>(1 + random() % 90, left.size()));
      parts.add(part);
      left = left.subspan(part.size());
    }
    ASSERT_EQ(hex(parts.finish()), hex(expected)) << length << " bytes";
    parts.add(bytes);  // it starts anew
    ASSERT_EQ(parts.finish(), expected);
  }
}

TEST(CanonicalJson, HasOneFormForEachValue) {
  const auto canonical = [](std::string_view text) {
    const JsonDocument document(text, "test");
    return canonical_json(document.root());
  };
  EXPECT_EQ(canonical(R"( { "b" : [ 1.0, 2, -0, -0.0, true, null ], "a":"\u00e9", "B":{} } )"),
            R"({"B":{},"a":"\u00e9","b":[1,2,0,0,true,null]})");
  EXPECT_EQ(
      canonical(R"([0.1, 1e-5, 1.5e-7, 0.0001, 123456.789, 1e3, 1e22, 12345678901234567890])"),
      "[0.1,1e-05,1.5e-07,0.0001,123456.789,1000,10000000000000000000000,"
      "12345678901234567890]");
  EXPECT_EQ(canonical(R"(["\u0001\n\t\"\\/\u007f", "😀 ß", ""])"),
            R"(["\u0001\n\t\"\\/\u007f","\ud83d\ude00 \u00df",""])");
  EXPECT_EQ(canonical("[]"), "[]");
}

}  // namespace
}  // namespace paceline
