// Whether the buffers and numbers of one call fit each other, checked before any of them is read.
//
// Python checks every QArray that enters, so a failure here is a mistake of ours, or a call of the FFI target by other means.
// Either way the answer is an error that names the number, and no byte beyond a buffer is read.
#pragma once

#include <cstdint>
#include <initializer_list>
#include <string>

#include "xla/ffi/api/ffi.h"

namespace fewbit {

using Dimensions = xla::ffi::Span<const int64_t>;

// What a number is, in two parts that are joined only when it is wrong: a token checks some thousand numbers.
struct Name {
  const char *what, *of;
  Name(const char* what, const char* of = "") : what(what), of(of) {}
};

class Checks {
 public:
  explicit Checks(const char* call) : call_(call) {}

  bool failed() const { return !text_.empty(); }
  xla::ffi::Error error() const { return xla::ffi::Error::InvalidArgument(text_); }

  // The first failure is kept. Each returns whether all checks so far have passed, so that what follows may rely on them.
  bool That(bool fits, const char* expected) {
    if (!fits && !failed()) text_ = std::string(call_) + ": " + expected;
    return !failed();
  }
  bool Equal(Name name, int64_t found, int64_t expected) {
    if (found != expected) Fail(name, found, std::to_string(expected));
    return !failed();
  }
  bool OneOf(Name name, int64_t found, std::initializer_list<int64_t> expected) {
    for (const int64_t number : expected) {
      if (found == number) return !failed();
    }
    std::string list;
    for (const int64_t number : expected) list += (list.empty() ? "" : " or ") + std::to_string(number);
    Fail(name, found, list);
    return false;
  }
  bool Within(Name name, int64_t found, int64_t low, int64_t high) {
    if (found < low || found > high) Fail(name, found, std::to_string(low) + " to " + std::to_string(high));
    return !failed();
  }
  bool AtLeast(Name name, int64_t found, int64_t low) {
    if (found < low) Fail(name, found, "at least " + std::to_string(low));
    return !failed();
  }

 private:
  void Fail(Name name, int64_t found, const std::string& expected) {
    if (!failed()) text_ = std::string(call_) + ": " + name.what + name.of + " is " + std::to_string(found) + ", expected " + expected;
  }

  const char* call_;
  std::string text_;
};

// How many tiles cover a length; for a tile of at least 1.
inline int64_t TilesOf(int64_t length, int64_t tile) { return length == 0 ? 0 : (length - 1) / tile + 1; }

// How many bytes hold codes; without overflow for any length that a buffer can have.
inline int64_t BytesOf(int64_t codes, int64_t bits) { return codes / 8 * bits + (codes % 8 * bits + 7) / 8; }

}  // namespace fewbit
