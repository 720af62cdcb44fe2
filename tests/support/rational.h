// SPDX-License-Identifier: Apache-2.0
#pragma once

// Exact fractions, for distributions that must be equal, not close.

#include <cstdint>
#include <ostream>
#include <stdexcept>
#include <string>

namespace paceline::testing {

// Throws std::overflow_error where 127 bits do not hold a numerator or denominator.
class Rational {
 public:
  Rational() = default;
  explicit Rational(int64_t whole) : numerator_(whole) {}
  Rational(int64_t numerator, int64_t denominator)
      : numerator_(numerator), denominator_(denominator) {
    reduce();
  }

  friend Rational operator+(const Rational& a, const Rational& b) {
    // With the greatest common divisor taken out first, numbers stay as small as they can.
    const Int common = divisor(a.denominator_, b.denominator_);
    const Int of_a = b.denominator_ / common;
    const Int of_b = a.denominator_ / common;
    return {add(multiply(a.numerator_, of_a), multiply(b.numerator_, of_b)),
            multiply(a.denominator_, of_a), Reduced{}};
  }
  friend Rational operator-(const Rational& a, const Rational& b) {
    return a + Rational(-b.numerator_, b.denominator_, Reduced{});
  }
  friend Rational operator*(const Rational& a, const Rational& b) {
    const Int across = divisor(a.numerator_, b.denominator_);
    const Int back = divisor(b.numerator_, a.denominator_);
    return {multiply(a.numerator_ / across, b.numerator_ / back),
            multiply(a.denominator_ / back, b.denominator_ / across), Reduced{}};
  }
  friend Rational operator/(const Rational& a, const Rational& b) {
    if (b.numerator_ == 0) throw std::domain_error("division by zero");
    const bool is_negative = b.numerator_ < 0;
    return a * Rational(is_negative ? -b.denominator_ : b.denominator_,
                        is_negative ? -b.numerator_ : b.numerator_, Reduced{});
  }
  Rational& operator+=(const Rational& other) { return *this = *this + other; }
  friend bool operator<(const Rational& a, const Rational& b) { return (a - b).numerator_ < 0; }
  friend bool operator==(const Rational& a, const Rational& b) = default;

  friend std::ostream& operator<<(std::ostream& out, const Rational& r) {
    return out << text(r.numerator_) << "/" << text(r.denominator_);
  }

 private:
  __extension__ using Int = __int128;
  struct Reduced {};  // but for what an addition leaves

  Rational(Int numerator, Int denominator, Reduced /*unused*/)
      : numerator_(numerator), denominator_(denominator) {
    reduce();
  }
  static Int divisor(Int a, Int b) {
    if (a < 0) a = -a;
    while (b != 0) {
      const Int rest = a % b;
      a = b;
      b = rest;
    }
    return a == 0 ? 1 : a;
  }
  static Int add(Int a, Int b) {
    Int sum;
    if (__builtin_add_overflow(a, b, &sum)) throw std::overflow_error("Rational +");
    return sum;
  }
  static Int multiply(Int a, Int b) {
    Int product;
    if (__builtin_mul_overflow(a, b, &product)) throw std::overflow_error("Rational *");
    return product;
  }
  void reduce() {
    const Int common = divisor(numerator_, denominator_);
    numerator_ /= common;
    denominator_ /= common;
  }
  static std::string text(Int value) {
    if (value < 0) return "-" + text(-value);
    const std::string last(1, static_cast<char>('0' + static_cast<int>(value % 10)));
    return value < 10 ? last : text(value / 10) + last;
  }

  Int numerator_ = 0;
  Int denominator_ = 1;  // > 0
};

}  // namespace paceline::testing
