// Batches against texts encoded one by one: special tokens, int64 ids, long texts cut into parts, limits, failures.

#include <algorithm>
#include <cstdint>
#include <limits>
#include <random>
#include <stdexcept>
#include <string>
#include <vector>

#include "wordpiece/batch.h"
#include "wordpiece/cuts.h"
#include "wordpiece/pool.h"
#include "wordpiece/units.h"
#include "wordpiece_check.h"

namespace wp = bert_fast::wordpiece;
using Form = wp::TextView::Form;

namespace {

constexpr std::int32_t kCls = 101, kSep = 102;

const std::vector<std::string> kVocab = {"[UNK]", "[MASK]", "un", "##aff",        "##able",       "hello", "##s",
                                         ",",     "!",      "e",  "\xE4\xB8\xAD", "\xE6\x96\x87", "i",     "##i"};

const std::vector<std::string> kWords = {
    "unaffable",         "hello",  "hellos,", " ",  "\xC3\xA9", "e\xCC\x81", "\xE4\xB8\xAD", "\xE6\x96\x87",
    "\xE3\x80\x80",      "[MASK]", "!",       "\t", "i",        "iii",       "\xE2\x80\x8B", "\xF0\x9F\x98\x80",
    "e\xCC\x81 \xCC\x82"};

std::string make_text(std::mt19937& random, std::size_t num_words, bool spaced) {
  std::string text;
  for (std::size_t k = 0; k < num_words; ++k) {
    text += kWords[random() % kWords.size()];
    if (spaced && random() % 2 == 0) text += ' ';
  }
  return text;
}

wp::TokenizerOptions with_mask() {
  wp::TokenizerOptions options;
  options.added_tokens = {{"[MASK]", 1, false, false, false, false}};
  return options;
}

struct Expected {
  std::vector<std::int32_t> ids, offsets, word_ids;
  std::vector<std::int64_t> cu_seqlens = {0};
};

// What a batch is by definition: its texts one after the other.
Expected one_by_one(const wp::Tokenizer& tokenizer, const std::vector<wp::TextView>& texts,
                    const wp::BatchOptions& options) {
  Expected expected;
  const auto special = [&](std::int32_t id) {
    if (!options.around.on) return;
    expected.ids.push_back(id);
    expected.offsets.insert(expected.offsets.end(), 2, 0);
    expected.word_ids.push_back(-1);
  };
  for (const wp::TextView& text : texts) {
    wp::Scratch scratch;
    wp::Tokens tokens;
    tokenizer.encode(text, {true, true}, scratch, tokens);
    const std::size_t kept = std::min(tokens.ids.size(), options.encode.max_tokens);
    special(options.around.cls);
    expected.ids.insert(expected.ids.end(), tokens.ids.begin(), tokens.ids.begin() + kept);
    expected.offsets.insert(expected.offsets.end(), tokens.offsets.begin(), tokens.offsets.begin() + 2 * kept);
    expected.word_ids.insert(expected.word_ids.end(), tokens.word_ids.begin(), tokens.word_ids.begin() + kept);
    special(options.around.sep);
    expected.cu_seqlens.push_back(static_cast<std::int64_t>(expected.ids.size()));
  }
  return expected;
}

void check_batch(const wp::Batch& batch, const Expected& expected, const wp::BatchOptions& options) {
  if (options.wide_ids) {
    CHECK(batch.wide_ids == expected.ids && batch.tokens.ids.empty());
  } else {
    CHECK(batch.tokens.ids == expected.ids && batch.wide_ids.empty());
  }
  CHECK(batch.cu_seqlens == expected.cu_seqlens);
  CHECK(options.encode.offsets ? batch.tokens.offsets == expected.offsets : batch.tokens.offsets.empty());
  CHECK(options.encode.word_ids ? batch.tokens.word_ids == expected.word_ids : batch.tokens.word_ids.empty());
}

// Combinations of outputs (1: offsets, 2: word ids, 4: wide ids), on several numbers of threads, into one Batch that is
// used again.
void check_all(const wp::Tokenizer& tokenizer, const std::vector<wp::TextView>& texts, std::size_t max_tokens,
               const std::vector<int>& all_outputs = {3, 4}) {
  wp::Batch batch;
  for (const bool around : {false, true}) {
    wp::BatchOptions options;
    options.encode.max_tokens = max_tokens;
    options.around = {around, kCls, kSep};
    const Expected expected = one_by_one(tokenizer, texts, options);
    for (const std::size_t threads : {1, 3}) {
      for (const int outputs : all_outputs) {
        options.num_threads = threads;
        options.encode.offsets = (outputs & 1) != 0;
        options.encode.word_ids = (outputs & 2) != 0;
        options.wide_ids = (outputs & 4) != 0;
        wp::encode_batch(tokenizer, texts.data(), texts.size(), options, batch);
        check_batch(batch, expected, options);
      }
    }
  }
}

std::vector<wp::TextView> views_of(const std::vector<std::string>& texts) {
  std::vector<wp::TextView> views;
  for (const std::string& text : texts) views.push_back(wordpiece_test::utf8_view(text));
  return views;
}

// A limit on all tokens: the texts up to it, whole, one at least; on any number of threads, whatever else is asked for.
void check_limits(const wp::Tokenizer& tokenizer, const std::vector<wp::TextView>& texts,
                  const std::vector<std::size_t>& limits) {
  wp::Batch batch;
  wp::BatchOptions options;
  options.around = {true, kCls, kSep};
  const Expected all = one_by_one(tokenizer, texts, options);
  for (const std::size_t limit : limits) {
    std::size_t count = 0;
    while (count < texts.size() && (count == 0 || static_cast<std::size_t>(all.cu_seqlens[count + 1]) <= limit))
      ++count;
    const auto size = static_cast<std::ptrdiff_t>(all.cu_seqlens[count]);
    Expected expected;
    expected.ids.assign(all.ids.begin(), all.ids.begin() + size);
    expected.offsets.assign(all.offsets.begin(), all.offsets.begin() + 2 * size);
    expected.word_ids.assign(all.word_ids.begin(), all.word_ids.begin() + size);
    expected.cu_seqlens.assign(all.cu_seqlens.begin(), all.cu_seqlens.begin() + static_cast<std::ptrdiff_t>(count) + 1);
    options.max_batch_tokens = limit;
    for (const std::size_t threads : {1, 3}) {
      for (const int outputs : {0, 3, 4, 7}) {
        options.num_threads = threads;
        options.encode.offsets = (outputs & 1) != 0;
        options.encode.word_ids = (outputs & 2) != 0;
        options.wide_ids = (outputs & 4) != 0;
        wp::encode_batch(tokenizer, texts.data(), texts.size(), options, batch);
        check_batch(batch, expected, options);
      }
    }
  }
}

void test_limits() {
  const wp::Tokenizer tokenizer(wordpiece_test::views(kVocab), with_mask());
  std::mt19937 random(9);
  std::vector<std::string> texts;
  for (std::size_t i = 0; i < 2000; ++i) texts.push_back(make_text(random, random() % 40, true));
  std::vector<std::size_t> limits = {0, 1, 2, 50, 51, 1000, 20000, 1000000, static_cast<std::size_t>(-2)};
  for (int i = 0; i < 4; ++i) limits.push_back(random() % 60000);
  check_limits(tokenizer, views_of(texts), limits);
  check_limits(tokenizer, {}, {0, 5});
  // A text that is cut into parts, first, last and in between: it is whole, or not there.
  const std::string giant = make_text(random, 20000, true);
  for (const std::size_t place : {std::size_t{0}, std::size_t{100}, std::size_t{299}}) {
    std::vector<std::string> some(texts.begin(), texts.begin() + 300);
    some[place] = giant;
    check_limits(tokenizer, views_of(some), {1, 2000, 20000, 70000});
  }
}

void test_short_texts() {
  const wp::Tokenizer tokenizer(wordpiece_test::views(kVocab), with_mask());
  std::mt19937 random(1);
  std::vector<std::string> texts;
  for (int i = 0; i < 1000; ++i) texts.push_back(make_text(random, random() % 30, true));
  for (const std::size_t max_tokens : {static_cast<std::size_t>(-1), std::size_t{7}, std::size_t{0}}) {
    check_all(tokenizer, views_of(texts), max_tokens, {0, 1, 2, 3, 4, 5, 6, 7});
  }
  check_all(tokenizer, {}, static_cast<std::size_t>(-1));
  check_all(tokenizer, std::vector<wp::TextView>(3000), static_cast<std::size_t>(-1));
}

void test_long_texts() {  // in parts, between short ones; with broken bytes; without a place to cut
  std::mt19937 random(2);
  std::string broken = make_text(random, 8000, true);
  for (std::size_t i = 0; i < broken.size(); i += 97) broken[i] = static_cast<char>(0x80 + random() % 128);
  const std::vector<std::string> texts = {"hello",
                                          make_text(random, 40000, true),
                                          "",
                                          make_text(random, 10000, false),
                                          broken,
                                          std::string(100000, 'i'),
                                          make_text(random, 10, true),
                                          std::string(70000, ' '),
                                          "hello" + std::string(140000, ' ') + "hello"};
  for (const bool cuttable : {true, false}) {
    wp::TokenizerOptions options = with_mask();
    if (!cuttable) options.never_split = {"hello"};
    const wp::Tokenizer tokenizer(wordpiece_test::views(kVocab), options);
    const auto all = views_of(texts);
    check_all(tokenizer, all, static_cast<std::size_t>(-1));
    if (!cuttable) continue;
    check_all(tokenizer, all, 1000);
    check_all(tokenizer, {all[1]}, static_cast<std::size_t>(-1));
    check_all(tokenizer, {all[7]}, static_cast<std::size_t>(-1));
  }
}

template <typename Units>
wp::TextView view_of(const Units& units, Form form) {
  return {units.data(), units.size(), form};
}

void test_forms() {  // each form in parts; lone surrogates where a form can have them
  const wp::Tokenizer tokenizer(wordpiece_test::views(kVocab), with_mask());
  std::mt19937 random(3);
  const std::u32string chars = U"hello \u00E9, e\u0301\u4E2D\u6587\u4E2D !\u3000i\u200B\U0001F600 \xD800 ";
  std::u32string ucs4;
  for (int i = 0; i < 40000; ++i) ucs4 += chars[random() % chars.size()];
  std::u16string ucs2;
  std::string ucs1, ascii;
  for (const char32_t c : ucs4) {
    ucs2 += static_cast<char16_t>(c < 0x10000 ? c : U'i');
    ucs1 += static_cast<char>(c < 0x100 ? c : U'i');
    ascii += static_cast<char>(c < 0x80 ? c : U'i');
  }
  check_all(tokenizer,
            {view_of(ucs4, Form::kUcs4), view_of(ucs2, Form::kUcs2), view_of(ucs1, Form::kUcs1),
             view_of(ascii, Form::kAscii)},
            static_cast<std::size_t>(-1));
}

void test_cuts() {
  const wp::Tokenizer tokenizer(wordpiece_test::views(kVocab), with_mask());
  const auto find = [&](const std::string& text, std::size_t from, std::size_t to) {
    return wp::find_cut(tokenizer, wordpiece_test::utf8_view(text), from, to);
  };
  CHECK(find("ab cd", 1, 5) == 3);
  CHECK(find("ab cd", 3, 5) == 3);
  CHECK(find("ab cd", 1, 3) == wp::kNoCut);
  CHECK(find("ab cd", 4, 5) == wp::kNoCut);
  CHECK(find("ab ", 1, 3) == wp::kNoCut);              // the end is no cut
  CHECK(find("\xE4\xB8\xAD\xE6\x96\x87", 1, 6) == 3);  // from within a character
  CHECK(find("\xE4\xB8\xAD\xE6\x96\x87", 3, 6) == 3);  // between two ideographs
  CHECK(find("\xE3\x80\x80"
             "a",
             2, 4) == 3);                        // behind a wide space
  CHECK(find(" \xE4\xB8", 1, 3) == wp::kNoCut);  // an invalid part behind it
  CHECK(find("a \x80 b", 1, 5) == 4);
  CHECK(find("a \xCC\x81 b", 1, 6) == 5);  // not between a space and a mark
  CHECK(find(std::string(1000, 'a'), 1, 1000) == wp::kNoCut);
  CHECK(find("", 1, 1) == wp::kNoCut);
  const std::u16string wide = u"ab\u4E2D\u6587 \xD800 c";
  const wp::TextView view = view_of(wide, Form::kUcs2);
  CHECK(wp::find_cut(tokenizer, view, 1, 8) == 3);
  CHECK(wp::find_cut(tokenizer, view, 4, 8) == 7);  // a surrogate is removed: nothing is cut beside it
  const wp::TextView part = wp::slice(view, 2, 4);
  CHECK(part.length == 2 && static_cast<const char16_t*>(part.data)[0] == u'\u4E2D' && part.form == Form::kUcs2);
}

// A text that offsets cannot count: its length alone is looked at.
void test_failures() {
  const wp::Tokenizer tokenizer(wordpiece_test::views(kVocab), with_mask());
  const std::string text(20000, 'i');
  std::vector<wp::TextView> texts(50, wordpiece_test::utf8_view(text));
  texts[33].length = std::size_t{1} << 31;
  wp::BatchOptions options;
  options.encode.offsets = true;
  for (const std::size_t threads : {1, 2, 8}) {
    options.num_threads = threads;
    wp::Batch batch;
    bool failed = false;
    try {
      wp::encode_batch(tokenizer, texts.data(), texts.size(), options, batch);
    } catch (const std::length_error&) {
      failed = true;
    }
    CHECK(failed);
    wp::encode_batch(tokenizer, texts.data(), 33, options, batch);  // and afterwards all is well
    check_batch(batch, one_by_one(tokenizer, {texts.begin(), texts.begin() + 33}, options), options);
  }
}

void test_plan() {
  CHECK(wp::plan_work(1000, 0).num_threads == 1);  // not worth a thread
  CHECK(wp::plan_work(1000, 4).num_threads == 1);
  CHECK(wp::plan_work(std::size_t{1} << 40, 3).num_threads == 3);
  CHECK(wp::plan_work(std::size_t{1} << 40, 0).num_threads == wp::available_processors());
  CHECK(wp::plan_work(std::size_t{1} << 40, 100000).num_threads == wp::kMaxThreads);
  const std::string text(100000, ' ');
  const wp::TextView view = wordpiece_test::utf8_view(text);
  CHECK(wp::total_cost(&view, 1, static_cast<std::size_t>(-1)) >= text.size());
  CHECK(wp::total_cost(&view, 1, 10) < 1000);  // little is read of it
}

}  // namespace

int main() {
  test_limits();
  test_short_texts();
  test_long_texts();
  test_forms();
  test_cuts();
  test_failures();
  test_plan();
  return wordpiece_test::report("wordpiece_batch");
}
