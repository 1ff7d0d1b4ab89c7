// Texts laid out around the ends of blocks and chunks, in every form, between pages that cannot be touched: the fast
// way through the tokenizer against the stages. Also what stands beside a text in memory, every limit on the number of
// tokens, and parts that start at every place where a text may be cut.

#include <algorithm>
#include <cstdint>
#include <iterator>
#include <memory>
#include <random>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "wordpiece/tokenizer.h"
#include "wordpiece_check.h"

namespace wp = bert_fast::wordpiece;
using wordpiece_test::AllForms;
using wordpiece_test::encode;
using wordpiece_test::equal;
using wordpiece_test::Form;
using wordpiece_test::GuardedMemory;
using wordpiece_test::name_of;
using wordpiece_test::show;

namespace {

std::string repeat(std::string_view part, std::size_t count) {
  std::string text;
  for (; count > 0; --count) text += part;
  return text;
}

std::string letters(std::size_t count) {
  std::string word;
  for (std::size_t i = 0; i < count; ++i) word += static_cast<char>('a' + i % 26);
  return word;
}

// Words and pieces of every length around those of keys and registers, many with the same first 16 bytes.
std::vector<std::string> make_vocab() {
  std::vector<std::string> vocab = {"[UNK]",
                                    "!",
                                    ",",
                                    "\xC3\xA9",
                                    "##\xC3\xA9",
                                    "\xE4\xB8\xAD",
                                    "##\xE4\xB8\xAD",
                                    "\xF0\x9F\x98\x80",
                                    "##\xF0\x9F\x98\x80",
                                    "##" + letters(17),
                                    "##" + letters(33)};
  for (const std::size_t n : {2, 3, 7, 8, 9, 14, 15, 16, 17, 31, 32, 33, 64, 99, 100, 101}) vocab.push_back(letters(n));
  for (const char* end : {"x", "y", "xx", "\xC3\xA9"}) {
    vocab.push_back(letters(15) + end);
    vocab.push_back(letters(16) + end);
  }
  for (char c = 'a'; c <= 'z'; ++c) {
    vocab.emplace_back(1, c);
    vocab.push_back(std::string("##") + c);
  }
  vocab.push_back(repeat("\xC3\xA9", 8));
  vocab.push_back(repeat("\xE4\xB8\xAD", 5));
  return vocab;
}

struct Tokenizers {
  wp::TokenizerOptions options;
  wp::Tokenizer fast, stages;

  static wp::Tokenizer make(wp::TokenizerOptions options, bool stage_by_stage) {
    static const std::vector<std::string> vocab = make_vocab();
    options.stage_by_stage = stage_by_stage;
    return wp::Tokenizer(wordpiece_test::views(vocab), std::move(options));
  }
  explicit Tokenizers(const wp::TokenizerOptions& o) : options(o), fast(make(o, false)), stages(make(o, true)) {}
};

std::vector<Tokenizers> make_tokenizers() {
  wp::TokenizerOptions cased, unclean, unsplit, no_words, letters_only;
  cased.normalizer = {true, true, false, false};
  unclean.normalizer = {false, true, true, true};
  unsplit.normalizer = {true, false, false, true};
  unsplit.max_word_chars = 17;
  unsplit.added_tokens = {{"b!", 1, false, true, true, false}};
  no_words.max_word_chars = 0;
  letters_only.max_word_chars = 1;
  std::vector<Tokenizers> all;
  for (const wp::TokenizerOptions& options :
       {wp::TokenizerOptions{}, cased, unclean, unsplit, no_words, letters_only}) {
    all.emplace_back(options);
  }
  return all;
}

class Checker {
 public:
  explicit Checker(const Tokenizers& tokenizers) : t_(tokenizers) {}

  // The text in one of its forms (each call takes the next), at an end of its memory.
  void check(const std::string& text) {
    const AllForms forms(text);
    check_form(text, forms.views()[next_ % forms.views().size()]);
  }
  void check_all_forms(const std::string& text) {
    const AllForms forms(text);
    for (const wp::TextView& form : forms.views()) check_form(text, form);
  }

 private:
  void check_form(const std::string& text, const wp::TextView& form) {
    ++next_;
    const wp::TextView placed = memory_.place(form, next_ % 4 != 0);
    const wp::Tokens got = encode(t_.fast, placed), want = encode(t_.stages, text);
    const wp::Tokens ids = encode(t_.fast, placed, {false, false});
    if (equal(got, want) && ids.ids == want.ids) return;
    if (++wordpiece_test::failures() > 5) return;
    const auto differs = [&](std::string_view part) {
      const AllForms forms(part);
      const wp::Tokens right = encode(t_.stages, part);
      for (const wp::TextView& view : forms.views()) {
        if (view.form != form.form) continue;
        const wp::TextView again = memory_.place(view);
        if (!equal(encode(t_.fast, again), right)) return true;
        if (!(encode(t_.fast, again, {false, false}).ids == right.ids)) return true;
      }
      return false;
    };
    const std::string small = differs(text) ? wordpiece_test::shrink(text, differs) : text;
    const AllForms forms(small);
    std::printf("a text of %zu bytes (%s)\n  text     %s\n", small.size(), show(t_.options).c_str(),
                wordpiece_test::literal(small).substr(0, 3000).c_str());
    for (const wp::TextView& view : forms.views()) {
      std::printf("  %s    %s\n", name_of(view.form), show(encode(t_.fast, view)).substr(0, 2000).c_str());
    }
    std::printf("  stages   %s\n", show(encode(t_.stages, small)).substr(0, 2000).c_str());
  }

  const Tokenizers& t_;
  GuardedMemory memory_;
  std::size_t next_ = 0;
};

// What to put across the end of a block: characters of every length and kind, words of every length.
std::vector<std::string> make_features() {
  const std::string acute = "\xCC\x81", han = "\xE4\xB8\xAD", invisible = "\xE2\x80\x8B";
  std::vector<std::string> features = {"\xC3\xA9",
                                       "\xC3\x89",
                                       han,
                                       "\xF0\x9F\x98\x80",
                                       acute,
                                       "e" + acute,
                                       "e" + acute + "\xCC\xA3" + "b",
                                       invisible,
                                       "a" + invisible + acute + "b",
                                       "\xEA\xB0\x81",
                                       "\xF0\x9D\x85\x9E\xCC\xB4x",
                                       "\xC4\xB0",
                                       "\xC2\xA0",
                                       "\xE3\x80\x80",
                                       "\xE3\x80\x82",
                                       "\xE2\x80\xA8",
                                       "\xC2\x85",
                                       "\xC2\xAD",
                                       "\xF0\xAF\xA0\x80",
                                       "\xEF\xBF\xBD",
                                       std::string(1, '\0'),
                                       std::string("a\0b", 3),
                                       "\x7F",
                                       "\x1F",
                                       "!",
                                       "a!b",
                                       "b!",
                                       " b! ",
                                       "[UNK]",
                                       han + "a" + han,
                                       "a" + han + han + "b",
                                       "\xC3\xA9" + han + "\xF0\x9F\x98\x80!",
                                       "\xC4",
                                       "\xE4\xB8",
                                       "\xF0\x9F\x98",
                                       "\xED\xA0\x80",
                                       "a\xC3",
                                       "\xFF"};
  for (std::size_t n = 1; n <= 19; ++n) features.push_back(letters(n));
  for (const std::size_t n : {31, 32, 33, 48, 63, 64, 65, 99, 100, 101, 127, 128, 129}) features.push_back(letters(n));
  for (const std::size_t n : {15, 16, 17, 18}) features.push_back(" " + letters(n) + " ");
  for (const char* end : {"x", "xx", "xxx", "y", "z", "\xC3\xA9", "\xC3\x89", "Q", "\xCC\x81", "\xE2\x80\x8B"}) {
    for (const std::size_t n : {14, 15, 16}) features.push_back(" " + letters(n) + end + "!");
  }
  for (const char* part : {" ", "!", "\xC3\xA9", "\xE4\xB8\xAD", "\xCC\x81", "\xE2\x80\x8B", "\x01", "a "}) {
    for (const std::size_t n : {2, 15, 16, 17, 63, 64, 65, 100, 101}) features.push_back(repeat(part, n));
  }
  return features;
}

// Each feature at every distance from the end of the first blocks of 64 bytes, and of what is read at once.
void test_blocks(const std::vector<Tokenizers>& tokenizers) {
  const std::vector<std::string> features = make_features();
  const std::string fillers[] = {"a", " ", "ab ", "\xC3\xA9", "\xE4\xB8\xAD", "Ab! "};
  std::size_t turn = 0;
  std::vector<std::unique_ptr<Checker>> checkers;
  for (const Tokenizers& t : tokenizers) checkers.push_back(std::make_unique<Checker>(t));
  for (const std::string& feature : features) {
    for (std::size_t start = 0; start <= 130; ++start, ++turn) {
      const std::string& filler = fillers[turn % std::size(fillers)];
      std::string text = repeat(filler, start / filler.size());
      text += std::string(start - text.size(), ' ') + feature;
      if (turn % 3 != 0) text += repeat(fillers[turn / 7 % std::size(fillers)], turn % 67);
      checkers[turn / 2 % checkers.size()]->check(text);
    }
  }
}

// Each feature across the ends of larger pieces that a tokenizer may work in.
void test_chunks(const std::vector<Tokenizers>& tokenizers) {
  const std::vector<std::string> features = make_features();
  const std::string fillers[] = {"ab, ", "\xC3\xA9 ", "a", "\xE4\xB8\xAD", "The quick brown fox! ", " "};
  std::size_t turn = 0;
  std::vector<std::unique_ptr<Checker>> checkers;
  for (const Tokenizers& t : tokenizers) checkers.push_back(std::make_unique<Checker>(t));
  for (const std::size_t chunk : {1024, 2048, 4096, 8192}) {
    for (const std::string& feature : features) {
      for (std::size_t k = 0; k < 2; ++k, ++turn) {
        const std::size_t before = (turn * 7) % (feature.size() + 2);  // bytes of it in front of the end
        const std::string& filler = fillers[turn % std::size(fillers)];
        const std::size_t start = chunk - std::min(chunk, before);
        std::string text = repeat(filler, start / filler.size());
        text += std::string(start - text.size(), ' ') + feature + repeat(fillers[turn / 5 % 3], turn % 40);
        checkers[turn % checkers.size()]->check(text);
      }
    }
  }
}

// Long texts of everything: whatever the size of a chunk, many things stand across its end.
void test_long_texts(const std::vector<Tokenizers>& tokenizers) {
  const std::vector<std::string> features = make_features();
  std::mt19937_64 random(3);
  for (const Tokenizers& t : tokenizers) {
    Checker checker(t);
    for (int i = 0; i < 12; ++i) {
      std::string text;
      while (text.size() < 20000 + 4099 * static_cast<std::size_t>(i)) {
        text += features[random() % (i % 2 == 0 ? features.size() : 60)];
        if (random() % 2 == 0) text += ' ';
      }
      checker.check(text);
    }
    // One word, one space, one row of marks longer than any chunk.
    for (const char* part : {"a", " ", "\xC3\xA9", "\xCC\x81", "\xE2\x80\x8B", "\xE4\xB8\xAD", "!", "\x01"}) {
      checker.check("b" + repeat(part, 20000) + "b");
    }
  }
}

// Letters and parts of characters stand in front of and behind the text in memory: nothing of them comes in.
void test_surroundings(const Tokenizers& t) {
  const std::string texts[] = {"",         "a",        letters(15),        letters(16),       letters(64),
                               "ab ",      "\xC3\xA9", "\xF0\x9F\x98\x80", "ab \xE4\xB8\xAD", "abc\xC3",
                               "e\xCC\x81"};
  for (const std::string& text : texts) {
    const wp::Tokens want = encode(t.stages, text);
    for (const char* beside :
         {"abcdefghijklmnopqrstuvwxyz", "\xCC\x81\xCC\x81\xCC\x81\xCC\x81", "\xA9\xA9\xA9\xA9\xA9"}) {
      const std::string around = repeat(beside, 10);
      const std::string all = around + text + around;
      CHECK(equal(encode(t.fast, wordpiece_test::utf8_view(std::string_view(all).substr(around.size(), text.size()))),
                  want));
      std::u16string wide(100, u'b');
      for (const char c : text) wide += static_cast<char16_t>(c & 0x7F);
      const wp::Tokens part = encode(t.fast, wp::TextView{wide.data() + 100, text.size(), Form::kUcs2});
      wide.append(100, u'\u0301');
      CHECK(equal(encode(t.fast, wp::TextView{wide.data() + 100, text.size(), Form::kUcs2}), part));
    }
  }
}

// Every limit on the number of tokens: the first ones of the text, behind what the caller has already.
void test_token_limits(const Tokenizers& t) {
  for (const std::string& text :
       {letters(40) + "z " + repeat("ab, \xC3\xA9 ", 60) + letters(130), repeat("qq ", 90), repeat("\xE4\xB8\xAD", 130),
        std::string(300, ' ') + "a", repeat("a", 100), repeat("xyzzy! [UNK] ", 400)}) {
    const wp::Tokens all = encode(t.stages, text);
    const AllForms forms(text);
    wp::Scratch scratch;
    for (std::size_t limit = 0; limit <= std::min<std::size_t>(all.ids.size() + 2, 700); ++limit) {
      const wp::TextView& form = forms.views()[limit % forms.views().size()];
      for (const bool offsets : {false, true}) {
        wp::Tokens got;
        got.ids.push_back(-5);
        if (offsets) got.offsets.append(2, -5);
        got.word_ids.push_back(-5);
        t.fast.encode(form, {offsets, true, limit}, scratch, got);
        const std::size_t size = std::min(limit, all.ids.size());
        bool same = got.ids.size() == size + 1 && got.word_ids.size() == size + 1 && got.ids[0] == -5 &&
                    got.word_ids[0] == -5 && got.offsets.size() == (offsets ? 2 * size + 2 : 0);
        for (std::size_t i = 0; same && i < size; ++i) {
          same = got.ids[i + 1] == all.ids[i] && got.word_ids[i + 1] == all.word_ids[i] &&
                 (!offsets ||
                  (got.offsets[2 * i + 2] == all.offsets[2 * i] && got.offsets[2 * i + 3] == all.offsets[2 * i + 1]));
        }
        CHECK(same);
        if (wordpiece_test::failures() > 5) return;
      }
    }
  }
}

// Surrogates stand for themselves in the wide forms: each counts as one U+FFFD.
void test_surrogates(const Tokenizers& t) {
  for (std::size_t place = 0; place < 70; ++place) {
    std::u16string two(80, u'a');
    two[place] = static_cast<char16_t>(0xD800 + place * 29);
    two[place / 2] = u' ';
    std::string replaced;
    for (const char16_t c : two) wp::append_utf8(c >= 0xD800 && c < 0xE000 ? wp::kReplacement : c, replaced);
    const std::u32string four(two.begin(), two.end());
    const wp::Tokens want = encode(t.stages, replaced);
    CHECK(equal(encode(t.fast, wp::TextView{two.data(), two.size(), Form::kUcs2}), want));
    CHECK(equal(encode(t.fast, wp::TextView{four.data(), four.size(), Form::kUcs4}), want));
  }
}

// Every pair of characters that may be cut apart: the parts give what the whole does, from any first source.
void test_cuts(const Tokenizers& t) {
  std::vector<char32_t> chars;
  for (const std::string& feature : make_features()) {
    const AllForms forms(feature);
    if (forms.code_points().size() < 4)
      chars.insert(chars.end(), forms.code_points().begin(), forms.code_points().end());
  }
  std::sort(chars.begin(), chars.end());
  chars.erase(std::unique(chars.begin(), chars.end()), chars.end());
  wp::Scratch scratch;
  int num_cuts = 0;
  for (const char32_t before : chars) {
    for (const char32_t after : chars) {
      if (!t.fast.can_cut(before, after)) continue;
      ++num_cuts;
      const char32_t text[] = {U'a', U'b', U' ', U'e', before, after, 0x301, U'b', U'!'};
      const wp::Tokens whole = encode(t.stages, wp::TextView{text, 9, Form::kUcs4}, {true, true}, 77);
      wp::Tokens parts;
      t.fast.encode({text, 5, Form::kUcs4}, {true, false}, scratch, parts, 77);
      t.fast.encode({text + 5, 4, Form::kUcs4}, {true, false}, scratch, parts, 82);
      CHECK(parts.ids == whole.ids && parts.offsets == whole.offsets);
      if (wordpiece_test::failures() > 5) return;
    }
  }
  CHECK(num_cuts > 10 || !t.options.added_tokens.empty());  // allowing no cuts would pass otherwise
}

}  // namespace

int main() {
  const std::vector<Tokenizers> tokenizers = make_tokenizers();
  test_blocks(tokenizers);
  test_chunks(tokenizers);
  test_long_texts(tokenizers);
  for (const Tokenizers& t : tokenizers) {
    test_surroundings(t);
    test_token_limits(t);
    test_surrogates(t);
    test_cuts(t);
  }
  Checker checker(tokenizers[0]);
  for (const std::string& feature : make_features()) checker.check_all_forms(feature);
  return wordpiece_test::report("wordpiece_seams");
}
