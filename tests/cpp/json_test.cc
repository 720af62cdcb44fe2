// SPDX-License-Identifier: Apache-2.0
// The JSON reader: it accepts exactly the grammar, its messages name the position, and its time is
// proportional to the input.

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <paceline/error.h>

#include <array>
#include <cstdint>
#include <limits>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "base/check.h"
#include "base/json.h"
#include "support/errors.h"

namespace paceline {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using testing::message_of;

std::string parse_error(std::string_view text, JsonLimits limits = {}) {
  return message_of<InvalidArgument>([&] { JsonDocument(text, "x.json", limits); });
}

TEST(Json, ReadsEveryKindOfValue) {
  const std::string text =
      R"( {"a": [1, -2, 0, 1.5, 1e3, -0, 9223372036854775807, 9223372036854775808],
          "s": "p\"\\\/\b\f\n\r\t\u00e9\ud83d\udeb4é", "t": true, "f": false, "n": null,
          "o": {}, "l": [ ], "": {"k": [[]]}} )";
  const JsonDocument document(text, "x.json");
  const Json root = document.root();
  EXPECT_EQ(root.size(), 8);
  std::vector<double> numbers;
  for (const Json& number : root.at("a").elements()) numbers.push_back(number.as_double());
  EXPECT_THAT(numbers, ElementsAre(1, -2, 0, 1.5, 1000, 0, 0x1p63, 0x1p63));
  constexpr int64_t kMin = std::numeric_limits<int64_t>::min();
  constexpr int64_t kMax = std::numeric_limits<int64_t>::max();
  std::vector<int64_t> integers;
  for (const Json& number : root.at("a").elements()) {
    if (message_of<InvalidArgument>([&] { (void)number.as_int(kMin, kMax); }).empty()) {
      integers.push_back(number.as_int(kMin, kMax));
    }
  }
  EXPECT_THAT(integers, ElementsAre(1, -2, 0, 0, kMax));
  EXPECT_EQ(root.at("s").as_string(), "p\"\\/\b\f\n\r\té🚴é");
  EXPECT_TRUE(root.at("t").as_bool());
  EXPECT_FALSE(root.at("f").as_bool());
  EXPECT_EQ(root.at("n").kind(), JsonKind::kNull);
  EXPECT_EQ(root.at("o").size(), 0);
  EXPECT_EQ(root.at("l").size(), 0);
  EXPECT_FALSE(root.find("zz").has_value());
  EXPECT_EQ(root.at("").at("k").text(), "[[]]");
  EXPECT_EQ(root.at("").text(), R"({"k": [[]]})");
  EXPECT_EQ(root.at("s").text(), R"("p\"\\\/\b\f\n\r\t\u00e9\ud83d\udeb4é")");
  EXPECT_EQ(root.at("f").text(), "false");
  std::string keys;
  for (const auto& [key, value] : root.members()) keys += concat(key, ";");
  EXPECT_EQ(keys, "a;s;t;f;n;o;l;;");
}

TEST(Json, AcceptsWhatTheGrammarAllows) {
  const std::string deepest = std::string(64, '[') + std::string(64, ']');
  for (std::string_view text :
       {"0", "-0.0", "\"\"", "null", "[]", "\t\r\n {} \n", "1E+2", "1e-2", "\"\\u0000\"",
        "\"\\uD834\\uDD1E\"", "\"\x7f\"", "[1,[2,{\"a\":3}]]", "{\"a\":1,\"A\":1}",
        "\"\xf4\x8f\xbf\xbf\"", "\"\xed\x9f\xbf\"", "\"\xef\xbf\xbf\"", deepest.c_str()}) {
    EXPECT_EQ(parse_error(text), "") << text;
  }
}

TEST(Json, RoundsNumbersToTheNearestDouble) {
  const std::vector<std::pair<std::string, double>> table = {
      {"1e-320", 1e-320},
      {"4.9e-324", 4.9e-324},
      {"2.2250738585072011e-308", 2.2250738585072011e-308},
      {"1e-400", 0},
      {"-1e-400", 0},
      {"0.0000001e-320", 0},
      {"1e-99999999999999999999", 0},
      {"0.1e-9223372036854775808", 0},
      {"0." + std::string(5000, '0') + "1", 0},
      {"0." + std::string(5000, '0') + "1e5001", 1},
      {"1" + std::string(5000, '0') + "e-5000", 1},
      {"0e99999999999999999999", 0},
      {std::string(309, '1'), 1.1111111111111111e308},
  };
  for (const auto& [text, expected] : table) {
    EXPECT_EQ(JsonDocument(text, "x.json").root().as_double(), expected) << text.substr(0, 40);
  }
}

TEST(Json, ANumberThatNoDoubleHoldsIsNamedByItsKey) {
  const std::string nines(5000, '9');
  for (const std::string& number : {std::string("1e999"), std::string("-1e999"), nines, "-" + nines,
                                    nines + ".5", std::string("0.1e99999999999999999999")}) {
    const std::string text = "{\"a\": [0, " + number + "]}";
    const JsonDocument document(text, "x.json");
    const Json value = *++document.root().at("a").elements().begin();
    const std::string shown = number.size() <= 40 ? number : number.substr(0, 40) + "...";
    EXPECT_EQ(message_of<InvalidArgument>([&] { (void)value.as_double(); }),
              "x.json: a[1] is " + shown + "; allowed: a number that a double holds");
    EXPECT_EQ(message_of<InvalidArgument>([&] { (void)value.as_int(0, 9); }),
              "x.json: a[1] is " + shown + "; allowed: an integer from 0 to 9");
  }
}

TEST(Json, RefusesEverythingElse) {
  const std::string too_deep = std::string(65, '[') + std::string(65, ']');
  const std::string very_deep(1 << 20, '[');
  const std::string very_deep_objects = [] {
    std::string out;
    for (int i = 0; i < 100'000; ++i) out += "{\"a\":";
    return out;
  }();
  const std::vector<std::pair<std::string, std::string>> table = {
      {"", "byte 0"},
      {"  ", "byte 2"},
      {"{", "double quotes"},
      {"[", "byte 1"},
      {"[1", "',' or ']'"},
      {"[1,]", "byte 3"},
      {"[,1]", "byte 1"},
      {"[1 2]", "byte 3"},
      {"{\"a\"}", "':'"},
      {"{\"a\":}", "byte 5"},
      {"{\"a\":1,}", "double quotes"},
      {"{a:1}", "double quotes"},
      {"{1:1}", "double quotes"},
      {"{\"a\":1 \"b\":2}", "',' or '}'"},
      {"[1}", "',' or ']'"},
      {"1 1", "more text"},
      {"{}{}", "more text"},
      {"nul", "JSON value"},
      {"True", "JSON value"},
      {"tru", "JSON value"},
      {"NaN", "JSON value"},
      {"Infinity", "JSON value"},
      {"-Infinity", "digit"},
      {"+1", "JSON value"},
      {"-", "digit"},
      {"01", "more text"},
      {"-01", "more text"},
      {"1.", "digit"},
      {".5", "JSON value"},
      {"1e", "digit"},
      {"1e+", "digit"},
      {"0x10", "more text"},
      {"\"", "end of a string"},
      {"\"a", "end of a string"},
      {"\"\\", "after a backslash"},
      {"\"\\x\"", "after a backslash"},
      {"\"\\u12\"", "four hexadecimal"},
      {"\"\\u12g4\"", "four hexadecimal"},
      {"\"\\u+123\"", "four hexadecimal"},
      {"\"\\ud800\"", "surrogate"},
      {"\"\\ud800\\ud800\"", "surrogate"},
      {"\"\\udc00\"", "surrogate"},
      {"\"\n\"", "control character"},
      {std::string("\"\0\"", 3), "control character"},
      {"\"\x80\"", "UTF-8"},
      {"\"\xc0\xaf\"", "UTF-8"},
      {"\"\xe0\x80\x80\"", "UTF-8"},
      {"\"\xed\xa0\x80\"", "UTF-8"},
      {"\"\xf0\x80\x80\x80\"", "UTF-8"},
      {"\"\xf4\x90\x80\x80\"", "UTF-8"},
      {"\"\xff\"", "UTF-8"},
      {"\"\xe2\x82", "UTF-8"},
      {"\xef\xbb\xbf{}", "JSON value"},  // a byte order mark
      {"// note\n1", "JSON value"},
      {"'a'", "JSON value"},
      {too_deep, "byte 64: a deeper level; allowed: at most 64"},
      {very_deep, "deeper"},
      {very_deep_objects, "deeper"},
      {"{\"a\":1,\"b\":2,\"a\":3}", "byte 13: the key 'a' again"},
      {"{\"a\":1,\"\\u0061\":2}", "byte 7: the key 'a' again"},
      {"[{\"\":1,\"\":2}]", "byte 7: the key '' again"},
  };
  for (const auto& [text, expected] : table) {
    const std::string error = parse_error(text);
    EXPECT_THAT(error, HasSubstr(expected)) << text.substr(0, 40);
    EXPECT_THAT(error, HasSubstr("x.json: ")) << text.substr(0, 40);
    EXPECT_LT(error.size(), 400u);
  }
  EXPECT_THAT(parse_error("[1,2,3]", {.max_values = 3}), HasSubstr("more than 3"));
  EXPECT_THAT(parse_error("[1,2,3]", {.max_bytes = 6}), HasSubstr("7 bytes of JSON"));
}

TEST(Json, MessagesNamePathSeenAndAllowed) {
  const std::string text =
      R"({"layers": [{"a": 1}, {"a": {"b.c": "no", "w": 70000, "h": 1.0, "l": [1, 2]}}]})";
  const JsonDocument document(text, "x.json");
  const Json layers = document.root().at("layers");
  const Json a = (*++layers.elements().begin()).at("a");
  EXPECT_EQ(message_of<InvalidArgument>([&] { (void)a.at("w").as_int(1, 9); }),
            "x.json: layers[1].a.w is 70000; allowed: an integer from 1 to 9");
  EXPECT_EQ(message_of<InvalidArgument>([&] { (void)a.at("b.c").as_bool(); }),
            "x.json: layers[1].a['b.c'] is 'no'; allowed: true or false");
  EXPECT_THAT(message_of<InvalidArgument>([&] { (void)a.at("h").as_int(0, 9); }),
              HasSubstr("layers[1].a.h is 1.0; allowed: an integer"));
  EXPECT_THAT(message_of<InvalidArgument>([&] { (void)a.at("l").as_string(); }),
              HasSubstr("is a list of 2; allowed: a string"));
  EXPECT_EQ(message_of<InvalidArgument>([&] { (void)a.at("z"); }),
            "x.json: layers[1].a.z is missing");
  EXPECT_THAT(message_of<InvalidArgument>([&] { (void)document.root().as_double(); }),
              HasSubstr("the top level is an object of 1 keys"));
  constexpr std::array<std::string_view, 2> kKeys = {"w", "h"};
  EXPECT_EQ(message_of<InvalidArgument>([&] { a.check_keys(kKeys); }),
            "x.json: layers[1].a['b.c'] is an unknown key; allowed: w, h");
  EXPECT_EQ(quoted("a\nb\xff\xc3\xa9"), "'a\\x0ab\\xff\xc3\xa9'");
  EXPECT_EQ(quoted("abc\xc3\xa9", 4), "'abc...'");  // never half a character
}

TEST(Json, TakesTimeInProportionToTheInput) {
  // A million keys with a long common prefix, and as many values in one list.
  std::string text = "{";
  for (int i = 0; i < 300'000; ++i) text += concat("\"some.long.common.prefix.", i, "\":[],");
  text += "\"l\":[0";
  for (int i = 0; i < 1'000'000; ++i) text += ",0";
  text += "]}";
  const JsonDocument document(text, "x.json");
  EXPECT_EQ(document.root().size(), 300'001);
}

}  // namespace
}  // namespace paceline
