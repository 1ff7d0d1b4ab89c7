// Trie, vocabulary and tokenizer: small vocabularies whose results can be worked out by hand.

#include <algorithm>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "wordpiece/dispatch.h"
#include "wordpiece/tokenizer.h"
#include "wordpiece/trie.h"
#include "wordpiece/vocab.h"
#include "wordpiece_check.h"

namespace wp = bert_fast::wordpiece;
using wordpiece_test::encode;
using wordpiece_test::views;

namespace {

using Ids = std::vector<std::int32_t>;

// The pieces of a word, by every instruction set.
Ids match(const wp::Trie& trie, std::string_view word, bool expected) {
  const wp::UnsplitWord whole = {0, static_cast<std::uint32_t>(word.size())};
  Ids ids;
  for (const wp::Kernels* kernels : wp::available_kernels()) {
    std::vector<std::int32_t> piece_ids(word.size() + 1, -7);
    std::vector<std::uint32_t> sizes(word.size() + 1, 0);
    kernels->words().split(trie.view(), word.data(), &whole, 1, {piece_ids.data(), sizes.data()});
    CHECK((piece_ids[0] != wp::PieceSpans::kUnknown) == expected);
    ids.clear();
    for (std::size_t p = 0; expected && p < word.size(); p += sizes[p]) ids.push_back(piece_ids[p]);
  }
  return ids;
}

void test_trie() {
  const std::vector<wp::Trie::Entry> starting = {{"a", 0}, {"abcdx", 1}};
  const std::vector<wp::Trie::Entry> continuing = {{"b", 2}, {"c", 3}, {"cdy", 4}, {"dz", 5}};
  const wp::Trie trie(starting, continuing);
  CHECK(match(trie, "abcdx", true) == Ids({1}));
  CHECK(match(trie, "abcdz", true) == Ids({0, 2, 3, 5}));  // the example of the header
  CHECK(match(trie, "abcdy", true) == Ids({0, 2, 4}));
  CHECK(match(trie, "abcdxb", true) == Ids({1, 2}));
  CHECK(match(trie, "abcd", false).empty());  // ##d is missing
  CHECK(match(trie, "b", false).empty());     // only continues words
  CHECK(match(trie, "abcdxq", false).empty());
  CHECK(match(trie, "z", false).empty());
  std::int32_t id = -1;
  CHECK(trie.longest_prefix("abcdxyz", id) == 5 && id == 1);
  CHECK(trie.longest_prefix("abcdz", id) == 1 && id == 0);
  CHECK(trie.longest_prefix("b", id) == 0);
  CHECK(trie.longest_prefix("", id) == 0);
}

void test_empty_trie() {
  const wp::Trie trie(std::vector<wp::Trie::Entry>{}, {});
  CHECK(match(trie, "a", false).empty());
}

void test_wide_trie() {  // every byte as an edge of every root, and long chains
  std::vector<std::string> strings;
  for (int a = 0; a < 255; ++a) {  // but 255, which UTF-8 does not have
    strings.emplace_back(1, static_cast<char>(a));
    for (int b = 0; b < 255; b += 5) strings.push_back({static_cast<char>(a), static_cast<char>(b)});
  }
  strings.emplace_back(2000, 'q');
  std::sort(strings.begin(), strings.end());
  std::vector<wp::Trie::Entry> starting;
  for (std::size_t i = 0; i < strings.size(); ++i) starting.push_back({strings[i], static_cast<std::int32_t>(i)});
  const wp::Trie trie(starting, {});
  for (std::size_t i = 0; i < strings.size(); ++i) {
    CHECK(match(trie, strings[i], true) == Ids({static_cast<std::int32_t>(i)}));
  }
}

std::string error_of(const std::vector<std::string>& vocab, const wp::TokenizerOptions& options) {
  try {
    const wp::Tokenizer tokenizer(views(vocab), options);
  } catch (const std::invalid_argument& error) {
    return error.what();
  }
  return "";
}

void test_bad_vocabularies() {
  CHECK(error_of({"[UNK]", "a", "b", "a"}, {}) == "vocab: expected distinct tokens, got 'a' at positions 1 and 3");
  CHECK(error_of({"a"}, {}) == "unk_token: expected a token of the vocabulary, got '[UNK]'");
  CHECK(error_of({}, {}) == "unk_token: expected a token of the vocabulary, got '[UNK]'");
  CHECK(error_of({"[UNK]", "", "\xE2\x80\xA8"}, {}).empty());  // an empty entry and U+2028 are entries like others
}

const std::vector<std::string> kVocab = {"[UNK]", "[MASK]",       "un", "##aff", "##able", "hello",    "##s", ",", "!",
                                         "e",     "\xE4\xB8\xAD", "i",  "##i",   "Hello",  "\xC3\xA9", "##"};

struct Case {
  std::string text;
  Ids ids, offsets, word_ids;
};

void check_cases(const wp::TokenizerOptions& options, const std::vector<Case>& cases) {
  for (const bool stage_by_stage : {false, true}) {
    wp::TokenizerOptions both = options;
    both.stage_by_stage = stage_by_stage;
    const wp::Tokenizer tokenizer(views(kVocab), both);
    for (const Case& c : cases) {
      const wp::Tokens tokens = encode(tokenizer, c.text);
      CHECK(tokens.ids == c.ids);
      CHECK(tokens.offsets == c.offsets);
      CHECK(tokens.word_ids == c.word_ids);
    }
  }
}

void test_uncased() {
  wp::TokenizerOptions options;
  options.added_tokens = {{"[MASK]", 1, false, false, false, false}};
  check_cases(options,
              {{"", {}, {}, {}},
               {" \t\n", {}, {}, {}},
               {"unaffable", {2, 3, 4}, {0, 2, 2, 5, 5, 9}, {0, 0, 0}},
               {"UNAFFABLE hello, hellos!",
                {2, 3, 4, 5, 7, 5, 6, 8},
                {0, 2, 2, 5, 5, 9, 10, 15, 15, 16, 17, 22, 22, 23, 23, 24},
                {0, 0, 0, 1, 2, 3, 3, 4}},
               {"helloz", {0}, {0, 6}, {0}},
               {"a hello that was longer than sixteen bytes",
                {0, 5, 0, 0, 0, 0, 0, 0},
                {0, 1, 2, 7, 8, 12, 13, 16, 17, 23, 24, 28, 29, 36, 37, 42},
                {0, 1, 2, 3, 4, 5, 6, 7}},
               {"\xC3\x89 e\xCC\x81!", {9, 9, 8}, {0, 1, 2, 3, 4, 5}, {0, 1, 2}},
               {"hel\xE2\x80\x8Blo", {5}, {0, 6}, {0}},  // a zero-width space inside is removed
               {"i\xE4\xB8\xADi", {11, 10, 11}, {0, 1, 1, 2, 2, 3}, {0, 1, 2}},
               {"hello[MASK]hello", {5, 1, 5}, {0, 5, 5, 11, 11, 16}, {0, 1, 2}},
               {"\xC3\xA9 [MASK]\xCC\x81!", {9, 1, 8}, {0, 1, 2, 8, 9, 10}, {0, 1, 2}},
               {"hello\xFFs", {5, 6}, {0, 5, 6, 7}, {0, 0}}});  // the invalid byte counts as one, then vanishes
}

void test_other_options() {
  wp::TokenizerOptions cased;
  cased.normalizer = {true, true, false, false};
  check_cases(cased,
              {{"Hello hello \xC3\xA9", {13, 5, 14}, {0, 5, 6, 11, 12, 13}, {0, 1, 2}}, {"HELLO", {0}, {0, 5}, {0}}});
  wp::TokenizerOptions no_cjk;
  no_cjk.normalizer.handle_chinese_chars = false;
  check_cases(no_cjk, {{"\xE4\xB8\xADi", {10, 12}, {0, 1, 1, 2}, {0, 0}}});
  wp::TokenizerOptions other_prefix;  // '##able' is not special any more, and '#' is punctuation
  other_prefix.continuing_prefix = "u";
  check_cases(other_prefix, {{"in", {11, 2}, {0, 1, 1, 2}, {0, 0}}, {"##", {0, 0}, {0, 1, 1, 2}, {0, 1}}});
}

void test_word_limit() {
  wp::TokenizerOptions options;
  Ids ones(100, 12);
  ones[0] = 11;
  for (const bool stage_by_stage : {false, true}) {
    options.stage_by_stage = stage_by_stage;
    const wp::Tokenizer tokenizer(views(kVocab), options);
    CHECK(encode(tokenizer, std::string(100, 'I')).ids == ones);
    CHECK(encode(tokenizer, std::string(101, 'i')).ids == Ids({0}));
    CHECK(encode(tokenizer, std::string(101, 'i')).offsets == Ids({0, 101}));
    std::string accents = std::string(100, 'i');  // marks do not count
    for (int k = 0; k < 50; ++k) accents += "\xCC\x81";
    CHECK(encode(tokenizer, accents).ids == ones);
    CHECK(encode(tokenizer, std::string(1000000, 'i') + " i").offsets == Ids({0, 1000000, 1000001, 1000002}));
    wp::TokenizerOptions zero = options;
    zero.max_word_chars = 0;
    CHECK(encode(wp::Tokenizer(views(kVocab), zero), "hello, \xE4\xB8\xAD").ids == Ids({0, 0, 0}));
  }
}

void test_normalized_added_tokens() {
  wp::TokenizerOptions options;
  options.added_tokens = {{"H\xC3\x89", 20, false, false, false, true}, {"llo", 21, false, true, true, true}};
  const wp::Tokenizer tokenizer(views(kVocab), options);
  const wp::Tokens tokens = encode(tokenizer, "HE\xCC\x81 LLO  !");
  CHECK(tokens.ids == Ids({20, 21, 8}));
  CHECK(tokens.offsets == Ids({0, 2, 3, 9, 9, 10}));
  CHECK(tokens.word_ids == Ids({0, 1, 2}));
}

void test_never_split() {
  wp::TokenizerOptions options;
  options.never_split = {"Hello", "[MASK]", "a-b"};
  const wp::Tokenizer tokenizer(views(kVocab), options);
  const wp::Tokens tokens = encode(tokenizer, "Hello HELLO  [MASK] Hello! a-b hello");
  CHECK(tokens.ids == Ids({13, 5, 1, 5, 8, 0, 5}));
  CHECK(tokens.offsets == Ids({0, 5, 6, 11, 13, 19, 20, 25, 25, 26, 27, 30, 31, 36}));
  CHECK(tokens.word_ids == Ids({0, 1, 2, 3, 4, 5, 6}));
}

void test_pre_tokenize() {
  const std::string text = " a,\xE3\x80\x82 bc";
  const auto words = wp::Tokenizer::pre_tokenize(text);
  CHECK(words.size() == 4);
  CHECK(words[0].text == "a" && words[0].start == 1 && words[0].stop == 2);
  CHECK(words[2].text == "\xE3\x80\x82" && words[2].start == 3 && words[2].stop == 4);
  CHECK(words[3].text == "bc" && words[3].start == 5 && words[3].stop == 7);
}

}  // namespace

int main() {
  test_trie();
  test_empty_trie();
  test_wide_trie();
  test_bad_vocabularies();
  test_uncased();
  test_other_options();
  test_word_limit();
  test_normalized_added_tokens();
  test_never_split();
  test_pre_tokenize();
  return wordpiece_test::report("wordpiece_tokens");
}
