// Padded matrices against a plain implementation that builds each row as a list: every option, lengths around the
// limits.

#include <algorithm>
#include <cstdint>
#include <memory>
#include <new>
#include <optional>
#include <random>
#include <string>
#include <vector>

#include "wordpiece/rows.h"
#include "wordpiece_check.h"

namespace wp = bert_fast::wordpiece;
using wp::Truncation;

namespace {

constexpr std::int32_t kCls = 101, kSep = 102, kPad = 103, kPadType = 7;

using List = std::vector<std::int64_t>;

struct Sample {
  std::string first;
  std::optional<std::string> second;
};

struct Matrices {
  List ids, types, mask;
  std::size_t width = 0;
};

List tokens_of(const wp::Tokenizer& tokenizer, const std::string& text) {
  const wp::Tokens tokens = wordpiece_test::encode(tokenizer, text);
  return List(tokens.ids.begin(), tokens.ids.end());
}

void cut_one(List& list, bool left) { list.erase(left ? list.begin() : list.end() - 1); }

// Token by token: the definition. False where the strategy cannot make the row short enough.
bool cut(List& first, List& second, bool has_pair, std::size_t room, const wp::RowOptions& options) {
  const std::size_t excess = first.size() + second.size() - std::min(first.size() + second.size(), room);
  if (excess == 0) return true;
  if (options.truncation != Truncation::kLongestFirst && room == 0) {
    first.clear();
    second.clear();
    return true;
  }
  if (options.truncation == Truncation::kOnlySecond && (!has_pair || second.size() <= excess)) return false;
  if (options.truncation == Truncation::kOnlyFirst && first.size() <= excess) return false;
  // Of two that end equally long, the one that was longer at first keeps the odd token; the second one of equals.
  const bool first_keeps = first.size() > second.size();
  while (first.size() + second.size() > room) {
    bool from_first = options.truncation == Truncation::kOnlyFirst || !has_pair;
    if (has_pair && options.truncation == Truncation::kLongestFirst) {
      from_first = first.size() > second.size() || (first.size() == second.size() && !first_keeps);
    }
    cut_one(from_first ? first : second, options.truncate_left);
  }
  return true;
}

std::optional<Matrices> by_definition(const wp::Tokenizer& tokenizer, const std::vector<Sample>& samples,
                                      const wp::RowOptions& options) {
  std::vector<List> ids, types;
  std::size_t longest = 0;
  for (const Sample& sample : samples) {
    const bool has_pair = sample.second.has_value();
    List first = tokens_of(tokenizer, sample.first);
    List second = has_pair ? tokens_of(tokenizer, *sample.second) : List();
    const std::size_t num_special = options.special ? 2 + has_pair : 0;
    if (options.max_length != 0 && !cut(first, second, has_pair, options.max_length - num_special, options)) return {};
    List row, type;
    const auto add = [&](const List& values, std::int64_t of_type) {
      row.insert(row.end(), values.begin(), values.end());
      type.insert(type.end(), values.size(), of_type);
    };
    if (options.special) add({kCls}, 0);
    add(first, 0);
    if (options.special) add({kSep}, 0);
    add(second, 1);
    if (options.special && has_pair) add({kSep}, 1);
    longest = std::max(longest, row.size());
    ids.push_back(row);
    types.push_back(type);
  }
  Matrices out;
  out.width = longest;
  while (options.multiple_of > 1 && out.width % options.multiple_of != 0) ++out.width;
  if (options.width != 0) out.width = options.width;
  if (options.width != 0 && longest > options.width) return {};
  if (samples.empty()) out.width = 0;
  for (std::size_t i = 0; i < samples.size(); ++i) {
    const std::size_t padding = out.width - ids[i].size();
    List mask(ids[i].size(), 1);
    const auto pad = [&](List& row, std::int64_t value) {
      row.insert(options.pad_left ? row.begin() : row.end(), padding, value);
    };
    pad(ids[i], kPad);
    pad(types[i], kPadType);
    pad(mask, 0);
    out.ids.insert(out.ids.end(), ids[i].begin(), ids[i].end());
    out.types.insert(out.types.end(), types[i].begin(), types[i].end());
    out.mask.insert(out.mask.end(), mask.begin(), mask.end());
  }
  return out;
}

// Rows of `samples` in `rows`, which may have been used before.
bool encode(const wp::Tokenizer& tokenizer, const std::vector<Sample>& samples, const wp::RowOptions& options,
            std::size_t num_threads, wp::Rows& rows) {
  std::vector<wp::TextView> texts;
  const std::unique_ptr<bool[]> has_pair(new bool[samples.size()]);
  bool any = false;
  for (std::size_t i = 0; i < samples.size(); ++i) {
    has_pair[i] = samples[i].second.has_value();
    any = any || has_pair[i];
    texts.push_back(wordpiece_test::utf8_view(samples[i].first));
    if (has_pair[i]) texts.push_back(wordpiece_test::utf8_view(*samples[i].second));
  }
  return wp::encode_rows(tokenizer, texts.data(), any ? has_pair.get() : nullptr, samples.size(), options, num_threads,
                         rows);
}

void check(const wp::Tokenizer& tokenizer, const std::vector<Sample>& samples, const wp::RowOptions& options,
           std::size_t num_threads, wp::Rows& rows) {
  const std::optional<Matrices> expected = by_definition(tokenizer, samples, options);
  const bool made = encode(tokenizer, samples, options, num_threads, rows);
  CHECK(made == expected.has_value());
  if (!made || !expected) return;
  CHECK(rows.num_rows == samples.size() && rows.width == expected->width);
  CHECK(rows.input_ids == expected->ids);
  CHECK(options.types ? rows.token_type_ids == expected->types : rows.token_type_ids.empty());
  CHECK(options.mask ? rows.attention_mask == expected->mask : rows.attention_mask.empty());
}

const std::vector<std::string> kVocab = {"[UNK]", "un", "##aff", "##able", "hello", ",", "!"};

std::string text_of(std::mt19937& random, std::size_t num_tokens) {
  std::string text;
  for (std::size_t i = 0; i < num_tokens; ++i) text += random() % 3 == 0 ? "hello " : random() % 2 == 0 ? "! " : ", ";
  return text;
}

wp::RowOptions random_options(std::mt19937& random) {
  const auto pick = [&](std::size_t count) { return random() % count; };
  wp::RowOptions options;
  options.cls = kCls;
  options.sep = kSep;
  options.pad = kPad;
  options.pad_type = kPadType;
  options.special = pick(4) != 0;
  options.max_length = pick(3) == 0 ? 0 : (options.special ? 3 : 1) + pick(14);
  const Truncation strategies[] = {Truncation::kLongestFirst, Truncation::kOnlyFirst, Truncation::kOnlySecond};
  options.truncation = strategies[pick(3)];
  options.truncate_left = pick(3) == 0;
  options.width = pick(3) == 0 ? 10 + pick(20) : 0;
  options.multiple_of = pick(3) == 0 ? 8 : pick(2);
  options.pad_left = pick(2) == 0;
  options.types = pick(3) != 0;
  options.mask = pick(3) != 0;
  return options;
}

void test_options() {
  const wp::Tokenizer tokenizer(wordpiece_test::views(kVocab), {});
  std::mt19937 random(1);
  wp::Rows rows;
  for (int round = 0; round < 4000; ++round) {
    std::vector<Sample> samples(random() % 5);
    for (Sample& sample : samples) {
      sample.first = text_of(random, random() % 14);
      if (random() % 2 == 0) sample.second = text_of(random, random() % 14);
    }
    check(tokenizer, samples, random_options(random), 1, rows);
  }
}

void test_threads() {  // many rows, and texts that are far longer than what is kept of them
  const wp::Tokenizer tokenizer(wordpiece_test::views(kVocab), {});
  std::mt19937 random(2);
  std::vector<Sample> samples(600);
  for (std::size_t i = 0; i < samples.size(); ++i) {
    samples[i].first = text_of(random, i % 50 == 0 ? 3000 + random() % 2 : random() % 80);
    if (i % 3 == 0) samples[i].second = text_of(random, i % 50 == 0 ? 3000 + random() % 2 : random() % 80);
  }
  wp::Rows rows;
  for (const std::size_t num_threads : {0, 1, 2, 5}) {
    for (const std::size_t max_length : {64, 65, 0}) {
      wp::RowOptions options = random_options(random);
      options.max_length = max_length;
      options.truncation = Truncation::kLongestFirst;
      options.width = 0;
      check(tokenizer, samples, options, num_threads, rows);
    }
  }
}

void test_by_hand() {
  const wp::Tokenizer tokenizer(wordpiece_test::views(kVocab), {});
  wp::RowOptions options;
  options.cls = kCls;
  options.sep = kSep;
  options.pad = kPad;
  wp::Rows rows;
  CHECK(encode(tokenizer, {{"hello, unaffable", {}}, {"hello", "!"}}, options, 1, rows));
  CHECK(rows.input_ids == List({kCls, 4, 5, 1, 2, 3, kSep, kCls, 4, kSep, 6, kSep, kPad, kPad}));
  CHECK(rows.token_type_ids == List({0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 0, 0}));
  CHECK(rows.attention_mask == List({1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 0, 0}));
  options.width = 6;
  CHECK(!encode(tokenizer, {{"hello, unaffable", {}}}, options, 1, rows));
  CHECK(encode(tokenizer, {}, options, 1, rows) && rows.width == 0 && rows.input_ids.empty());
}

void test_too_large() {
  const wp::Tokenizer tokenizer(wordpiece_test::views(kVocab), {});
  wp::RowOptions options;
  options.width = static_cast<std::size_t>(-1) / 8;
  wp::Rows rows;
  bool failed = false;
  try {
    encode(tokenizer, {{"hello", {}}, {"hello", {}}}, options, 1, rows);
  } catch (const std::bad_alloc&) {
    failed = true;
  }
  CHECK(failed);
}

}  // namespace

int main() {
  test_by_hand();
  test_options();
  test_threads();
  test_too_large();
  return wordpiece_test::report("wordpiece_rows");
}
