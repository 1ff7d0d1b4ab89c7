// A harness of a few lines for the tests of csrc/wordpiece: counts failures and says where they are.
#pragma once

#include <cstdio>
#include <cstdlib>
#include <string>
#include <string_view>
#include <vector>

#include "wordpiece/tokenizer.h"

namespace wordpiece_test {

inline int& failures() {
  static int count = 0;
  return count;
}

#define CHECK(condition)                                                        \
  do {                                                                          \
    if (!(condition)) {                                                         \
      std::printf("%s:%d: CHECK(%s) failed\n", __FILE__, __LINE__, #condition); \
      ++wordpiece_test::failures();                                             \
    }                                                                           \
  } while (false)

inline int report(const char* name) {
  std::printf("%s: %s\n", name, failures() == 0 ? "passed" : "FAILED");
  return failures() == 0 ? 0 : 1;
}

inline std::vector<std::string_view> views(const std::vector<std::string>& strings) {
  return {strings.begin(), strings.end()};
}

inline bert_fast::wordpiece::TextView utf8_view(std::string_view text) {
  return {text.data(), text.size(), bert_fast::wordpiece::TextView::Form::kUtf8};
}

inline bert_fast::wordpiece::Tokens encode(const bert_fast::wordpiece::Tokenizer& tokenizer, std::string_view text) {
  bert_fast::wordpiece::Scratch scratch;
  bert_fast::wordpiece::Tokens tokens;
  tokenizer.encode(utf8_view(text), {true, true}, scratch, tokens);
  return tokens;
}

}  // namespace wordpiece_test
