// Random texts, vocabularies and options: the fast way through the tokenizer against the stages and a naive matcher.
//
// As a test it runs a fixed number of random inputs. Compiled with -DBERT_FAST_LIBFUZZER -fsanitize=fuzzer it is a
// fuzz target: the first bytes of the input choose the options, the rest is the text.

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <map>
#include <random>
#include <string>
#include <string_view>
#include <vector>

#include "wordpiece/tokenizer.h"
#include "wordpiece/utf8.h"
#include "wordpiece_check.h"

namespace wp = bert_fast::wordpiece;
using wordpiece_test::encode;

namespace {

// Words in a normalized text as the definition says: cut the longest token off the front, again and again.
class NaiveMatcher {
 public:
  NaiveMatcher(const std::vector<std::string>& vocab, std::size_t max_word_chars) : max_word_chars_(max_word_chars) {
    for (std::size_t i = 0; i < vocab.size(); ++i) ids_[vocab[i]] = static_cast<std::int32_t>(i);
  }
  void match(std::string_view word, std::vector<std::int32_t>& ids) const {
    const std::size_t before = ids.size();
    if (wp::count_code_points(word) > max_word_chars_) return ids.push_back(0);
    for (std::size_t start = 0; start < word.size();) {
      std::size_t stop = word.size();
      auto found = ids_.end();
      for (; stop > start; --stop) {
        found = ids_.find((start > 0 ? "##" : "") + std::string(word.substr(start, stop - start)));
        if (found != ids_.end()) break;
      }
      if (stop == start) {
        ids.resize(before);
        return ids.push_back(0);
      }
      ids.push_back(found->second);
      start = stop;
    }
  }

 private:
  std::map<std::string, std::int32_t, std::less<>> ids_;
  std::size_t max_word_chars_;
};

struct Setting {
  std::vector<std::string> vocab;
  wp::TokenizerOptions options;

  wp::Tokenizer make(bool stage_by_stage) const {
    wp::TokenizerOptions chosen = options;
    chosen.stage_by_stage = stage_by_stage;
    return wp::Tokenizer(wordpiece_test::views(vocab), chosen);
  }
};

// Code points that something happens to: letters to be lower-cased or decomposed, marks of many classes (kept and
// stripped), controls, spaces, punctuation, CJK, Hangul, letters that expand, unassigned ones.
constexpr char32_t kInteresting[] = {
    U'a',   U'b',   U'A',    U'B',    U'c',    U' ',    U' ',    U',',    U'#',    U'[',    0,      9,
    0x0B,   0x85,   0xA0,    0xAD,    0xC0,    0xE9,    0xDF,    0x130,   0x1C4,   0x300,   0x301,  0x323,
    0x334,  0x344,  0x345,   0x34F,   0x37E,   0x3A3,   0x5B0,   0x64B,   0x94D,   0x903,   0xDDD,  0xE38,
    0xF73,  0x1E17, 0x1E9B,  0x1FEF,  0x200B,  0x200D,  0x2028,  0x2126,  0x2260,  0x302A,  0x302E, 0x3000,
    0x3002, 0x3042, 0x3099,  0x4E00,  0x4E2D,  0xAC00,  0xAC01,  0xD7A3,  0xF900,  0xFB1D,  0xFE0F, 0xFF21,
    0xFFFD, 0x8D3,  0x10900, 0x1D15E, 0x1D160, 0x1D165, 0x1D16D, 0x1F600, 0x2F800, 0x10FFFF};

char32_t random_char(std::mt19937_64& random) {
  const std::uint64_t r = random();
  const char32_t any = static_cast<char32_t>((r >> 32) % 0x110000);
  switch (r % 16) {
    case 0:
      return any >= 0xD800 && any <= 0xDFFF ? U'x' : any;
    case 1:
      return static_cast<char32_t>(r >> 32) % 0x500;
    case 2:
      return 0x300 + static_cast<char32_t>(r >> 32) % 0x70;
    case 3:
    case 4:
    case 5:
    case 6:
      return U'a' + static_cast<char32_t>(r >> 32) % 4;
    default:
      return kInteresting[(r >> 32) % (sizeof(kInteresting) / sizeof(kInteresting[0]))];
  }
}

std::string random_text(std::mt19937_64& random, std::size_t max_chars) {
  std::string text;
  const std::size_t size = random() % (max_chars + 1);
  const bool plain = random() % 4 == 0;
  for (std::size_t i = 0; i < size; ++i) {
    const std::uint64_t r = random();
    if (plain) {
      text += "abcABC  ,.#0"[r % 12];
    } else if (r % 64 == 0) {
      text += static_cast<char>(r >> 8);  // most likely invalid
    } else if (r % 64 == 1) {
      text += (r >> 8) % 2 ? "[MASK]" : "[MASK";
    } else {
      wp::append_utf8(random_char(random), text);
    }
  }
  return text;
}

Setting random_setting(std::mt19937_64& random) {
  Setting setting;
  const std::uint64_t r = random();
  setting.options.normalizer = {r % 8 != 0, (r >> 3) % 2 == 0, (r >> 4) % 2 == 0, (r >> 5) % 2 == 0};
  setting.options.max_word_chars = (r >> 6) % 8 == 0 ? (r >> 9) % 5 : 100;
  std::map<std::string, int> seen = {{"[UNK]", 0}};
  setting.vocab = {"[UNK]"};
  for (std::size_t i = 0, size = random() % 400; i < size; ++i) {
    std::string token = random() % 2 ? "##" : "";
    for (std::size_t k = 0, length = 1 + random() % 4; k < length; ++k) {
      wp::append_utf8(random() % 3 ? U'a' + static_cast<char32_t>(random() % 4) : random_char(random), token);
    }
    if (seen.emplace(token, 0).second) setting.vocab.push_back(token);
  }
  return setting;
}

void check_text(const Setting& setting, const wp::Tokenizer& fast, const wp::Tokenizer& stages, std::string_view text) {
  const wp::Tokens got = encode(fast, text), want = encode(stages, text);
  CHECK(got.ids == want.ids && got.offsets == want.offsets && got.word_ids == want.word_ids);
  wp::Scratch scratch;
  wp::Tokens ids_only;
  fast.encode(wordpiece_test::utf8_view(text), {false, false}, scratch, ids_only);
  CHECK(ids_only.ids == got.ids && ids_only.offsets.empty() && ids_only.word_ids.empty());
  if (!setting.options.added_tokens.empty()) return;
  std::string storage;
  const NaiveMatcher naive(setting.vocab, setting.options.max_word_chars);
  const std::string normalized = fast.normalize(wp::to_utf8(wordpiece_test::utf8_view(text), storage));
  std::vector<std::int32_t> ids;
  for (const wp::Tokenizer::Word& word : wp::Tokenizer::pre_tokenize(normalized)) naive.match(word.text, ids);
  CHECK(got.ids == ids);
}

}  // namespace

#ifdef BERT_FAST_LIBFUZZER
extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  if (size < 2) return 0;
  std::mt19937_64 random(data[0] * 256U + data[1]);
  const Setting setting = random_setting(random);
  const std::string_view text(reinterpret_cast<const char*>(data) + 2, size - 2);
  check_text(setting, setting.make(false), setting.make(true), text);
  if (wordpiece_test::failures() > 0) std::abort();
  return 0;
}
#else
int main(int argc, char** argv) {
  const int settings = argc > 1 ? std::atoi(argv[1]) : 100;
  constexpr int kTexts = 400;
  for (int s = 0; s < settings && wordpiece_test::failures() < 10; ++s) {
    std::mt19937_64 random(static_cast<std::uint64_t>(s));
    Setting setting = random_setting(random);
    if (s % 4 == 3) {
      setting.options.added_tokens = {{"[MASK]", 0, false, s % 3 == 0, s % 5 == 0, false},
                                      {"ab", 0, s % 2 == 0, false, false, false}};
    }
    const wp::Tokenizer fast = setting.make(false), stages = setting.make(true);
    for (int t = 0; t < kTexts; ++t) {
      const std::string text = random_text(random, t % 10 == 0 ? 300 : 40);
      const int before = wordpiece_test::failures();
      check_text(setting, fast, stages, text);
      if (wordpiece_test::failures() > before) {
        std::printf("setting %d, text %d:", s, t);
        for (const unsigned char c : text) std::printf(" %02x", c);
        std::printf("\n");
      }
    }
  }
  return wordpiece_test::report("wordpiece_fuzz");
}
#endif
