// Texts with the tokens that Hugging Face `tokenizers` makes of them, from a file, for the tests of any tokenizer: ids,
// offsets and word ids must be the same from eight threads that share one tokenizer, in every form of the text, from
// its parts, with every limit on the tokens, and in batches.
//
// Under the thread sanitizer, where one thread's work is checked ten times as slowly, a part of each block is taken,
// and most texts in one way only: what threads do to each other does not depend on the text or its form.
#pragma once

#include <algorithm>
#include <csignal>
#include <cstdint>
#include <fstream>
#include <functional>
#include <memory>
#include <mutex>
#include <random>
#include <stdexcept>
#include <string>
#include <string_view>
#include <thread>
#include <utility>
#include <vector>

#include "wordpiece/added_tokens.h"
#include "wordpiece/text_tokenizer.h"
#include "wordpiece_check.h"

namespace identity {

namespace wp = bert_fast::wordpiece;
using wordpiece_test::AllForms;
using wordpiece_test::encode;
using wordpiece_test::equal;
using wordpiece_test::GuardedMemory;
using wordpiece_test::name_of;
using wordpiece_test::show;

constexpr std::size_t kThreads = 8;
#ifdef __SANITIZE_THREAD__
constexpr std::size_t kAllWaysEvery = 64;  // texts
constexpr std::size_t kShare = 8;          // of the texts of a block, one in this many, the first
#else
constexpr std::size_t kAllWaysEvery = 4;
constexpr std::size_t kShare = 1;
#endif

// Strings side by side in one piece of memory: there are millions, and sanitizers make allocations slow.
struct Strings {
  std::string all;
  std::vector<std::uint32_t> ends;

  std::size_t size() const { return ends.size(); }
  std::string_view operator[](std::size_t i) const {
    const std::size_t start = i == 0 ? 0 : ends[i - 1];
    return std::string_view(all).substr(start, ends[i] - start);
  }
  std::vector<std::string_view> views() const {
    std::vector<std::string_view> all;
    for (std::size_t i = 0; i < size(); ++i) all.push_back((*this)[i]);
    return all;
  }
  void push_back(std::string_view string) {
    all += string;
    ends.push_back(static_cast<std::uint32_t>(all.size()));
  }
};

// A tokenizer by what makes it, and texts with their tokens.
struct Block {
  std::string name;
  std::string shown_options;
  Strings vocab, texts;
  std::vector<std::uint32_t> ends, ids, offsets, word_ids;
  // slow: with no short cut.
  std::function<std::unique_ptr<wp::TextTokenizer>(bool slow)> make;

  std::size_t start_of(std::size_t text) const { return text == 0 ? 0 : ends[text - 1]; }
  std::size_t num_tokens(std::size_t text) const { return ends[text] - start_of(text); }
  // The first max_tokens of one text.
  wp::Tokens expected(std::size_t text, std::size_t max_tokens) const {
    wp::Tokens tokens;
    for (std::size_t i = start_of(text); i < ends[text] && tokens.ids.size() < max_tokens; ++i) {
      tokens.ids.push_back(static_cast<std::int32_t>(ids[i]));
      tokens.offsets.push_back(static_cast<std::int32_t>(offsets[2 * i]));
      tokens.offsets.push_back(static_cast<std::int32_t>(offsets[2 * i + 1]));
      tokens.word_ids.push_back(static_cast<std::int32_t>(word_ids[i]));
    }
    return tokens;
  }
};

template <typename T>
T read_number(std::istream& file) {
  T value{};
  file.read(reinterpret_cast<char*>(&value), sizeof(value));
  return value;
}

inline std::string read_string(std::istream& file) {
  std::string value(read_number<std::uint32_t>(file), '\0');
  file.read(value.data(), static_cast<std::streamsize>(value.size()));
  return value;
}

inline std::vector<std::uint32_t> read_array(std::istream& file) {
  const auto count = read_number<std::uint64_t>(file);
  const auto width = read_number<std::uint8_t>(file);
  std::vector<std::uint32_t> values(count);
  if (width == 4) {
    file.read(reinterpret_cast<char*>(values.data()), static_cast<std::streamsize>(count * 4));
  } else {
    std::vector<std::uint16_t> narrow(count);
    file.read(reinterpret_cast<char*>(narrow.data()), static_cast<std::streamsize>(count * 2));
    values.assign(narrow.begin(), narrow.end());
  }
  return values;
}

inline Strings read_strings(std::istream& file) {
  Strings strings;
  strings.ends = read_array(file);
  strings.all = read_string(file);
  return strings;
}

inline std::vector<wp::AddedToken> read_added_tokens(std::istream& file) {
  std::vector<wp::AddedToken> tokens;
  for (std::uint32_t n = read_array(file).at(0); n > 0; --n) {
    wp::AddedToken token;
    token.content = read_string(file);
    const std::vector<std::uint32_t> numbers = read_array(file);
    token.id = static_cast<std::int32_t>(numbers.at(0));
    token.single_word = numbers.at(1) != 0;
    token.lstrip = numbers.at(2) != 0;
    token.rstrip = numbers.at(3) != 0;
    token.normalized = numbers.at(4) != 0;
    tokens.push_back(token);
  }
  return tokens;
}

// What follows the settings of a block.
inline void read_texts(std::istream& file, Block& block) {
  block.texts = read_strings(file);
  block.ends = read_array(file);
  block.ids = read_array(file);
  block.offsets = read_array(file);
  block.word_ids = read_array(file);
  const std::size_t num_tokens = block.ids.size();
  if (!file || block.ends.size() != block.texts.size() || block.word_ids.size() != num_tokens ||
      block.offsets.size() != 2 * num_tokens || (num_tokens > 0 && block.ends.back() != num_tokens)) {
    throw std::runtime_error("the file is cut off or not in this format");
  }
}

// The text that a thread is working on: a fault must say which.
inline thread_local std::string_view current_text;
inline struct sigaction action_before;

inline void on_fault(int signal, siginfo_t*, void*) {
  if (!current_text.empty()) {
    const std::string line = "fault in the text " + wordpiece_test::literal(current_text) + "\n";
    if (write(2, line.data(), line.size()) < 0) _exit(1);
  }
  sigaction(signal, &action_before, nullptr);  // the instruction runs again, and what was there before takes over
}

constexpr std::size_t kAll = static_cast<std::size_t>(-1);

class Checker {
 public:
  explicit Checker(const Block& block)
      : block_(block), num_texts_((block.texts.size() + kShare - 1) / kShare), tokenizer_(block.make(false)) {
    // Large vocabularies take long to load, and the small ones see the same code.
    if (block.vocab.size() < 5000) stages_ = block.make(true);
  }

  std::size_t num_texts() const { return num_texts_; }

  void check() {
    std::vector<std::thread> threads;
    for (std::size_t i = 0; i < kThreads; ++i) threads.emplace_back([&] { work(); });
    for (std::thread& thread : threads) thread.join();
    check_batch();
  }

 private:
  // The tokens are the first max_tokens of that text (with offsets and word ids where there are any).
  void expect(const wp::Tokens& got, std::size_t text, const char* what, std::size_t max_tokens = kAll) {
    const std::size_t first = block_.start_of(text), size = std::min(block_.num_tokens(text), max_tokens);
    const auto same = [](const wp::Buffer<std::int32_t>& values, const std::vector<std::uint32_t>& all,
                         std::size_t start, std::size_t count) {
      if (values.size() != count) return false;
      for (std::size_t i = 0; i < count; ++i) {
        if (static_cast<std::uint32_t>(values[i]) != all[start + i]) return false;
      }
      return true;
    };
    if (same(got.ids, block_.ids, first, size) &&
        (got.offsets.empty() || same(got.offsets, block_.offsets, 2 * first, 2 * size)) &&
        (got.word_ids.empty() || same(got.word_ids, block_.word_ids, first, size))) {
      return;
    }
    fail(what, std::string(block_.texts[text]), got, block_.expected(text, max_tokens));
  }

  void fail(const char* what, const std::string& text, const wp::Tokens& got, const wp::Tokens& want) {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (++wordpiece_test::failures() > 5) return;
    if (!stages_) stages_ = block_.make(true);
    const auto differs = [&](std::string_view part) {
      const wp::Tokens right = encode(*stages_, part);
      const AllForms forms(part);
      for (const wp::TextView& form : forms.views()) {
        if (!equal(encode(*tokenizer_, form), right)) return true;
      }
      return false;
    };
    std::printf("%s, %s (%s)\n", block_.name.c_str(), what, block_.shown_options.c_str());
    if (!differs(text)) {
      std::printf("  text     %s\n  got      %s\n  expected %s\n", wordpiece_test::literal(text).c_str(),
                  show(got).c_str(), show(want).c_str());
      return;
    }
    const std::string small = wordpiece_test::shrink(text, differs);
    std::printf("  text     %s\n", wordpiece_test::literal(small).c_str());
    const AllForms forms(small);
    for (const wp::TextView& form : forms.views()) {
      std::printf("  %s    %s\n", name_of(form.form), show(encode(*tokenizer_, form)).c_str());
    }
    std::printf("  stages   %s\n", show(encode(*stages_, small)).c_str());
  }

  // One text in several ways; `scratch`, `memory` and `got` have served other texts before.
  void check_text(std::size_t index, wp::Scratch& scratch, GuardedMemory& memory, wp::Tokens& got) {
    const std::string_view text = block_.texts[index];
    current_text = text;
    const auto run = [&](const wp::TextView& view, const wp::EncodeOptions& wanted) {
      got.ids.clear();
      got.offsets.clear();
      got.word_ids.clear();
      tokenizer_->encode(memory.place(view, index % 4 != 0), wanted, scratch, got);
    };
    run(wordpiece_test::utf8_view(text), {index % 2 == 0, index % 4 == 0});
    expect(got, index, "UTF-8");
    if (kAllWaysEvery > 4 && index % kAllWaysEvery != 0) return;
    const AllForms forms(text);
    const wp::TextView& narrow = forms.views().front();
    run(narrow, {index % 2 == 1, index % 8 < 4});
    expect(got, index, name_of(narrow.form));
    if (index % kAllWaysEvery != 0) return;

    const wp::TextView& other = forms.views()[index / kAllWaysEvery % forms.views().size()];
    run(other, {true, true});
    expect(got, index, name_of(other.form));
    const std::size_t limit = index / kAllWaysEvery % (block_.num_tokens(index) + 2);
    run(narrow, {true, true, limit});
    expect(got, index, "max_tokens", limit);
    if (index % 16 == 0 && stages_) expect(encode(*stages_, text), index, "stages");
    check_parts(index, forms, scratch);
  }

  // The text cut wherever it may be: the tokens of the parts are those of the whole.
  void check_parts(std::size_t index, const AllForms& forms, wp::Scratch& scratch) {
    const std::vector<char32_t>& chars = forms.code_points();
    wp::Tokens joined;
    std::int32_t num_words = 0;
    const bool with_offsets = tokenizer_->cuts_texts({true, true});
    for (std::size_t start = 0, stop = 1; stop <= chars.size(); ++stop) {
      if (stop < chars.size() && !tokenizer_->can_cut(chars[stop - 1], chars[stop])) continue;
      const std::size_t before = joined.ids.size();
      tokenizer_->encode({chars.data() + start, stop - start, wp::TextView::Form::kUcs4}, {with_offsets, true}, scratch,
                         joined, static_cast<std::uint32_t>(start));
      for (std::size_t i = before; i < joined.ids.size(); ++i) joined.word_ids[i] += num_words;
      if (!joined.word_ids.empty()) num_words = joined.word_ids.back() + 1;
      start = stop;
    }
    expect(joined, index, "in parts");
  }

  void work() {
    wp::Scratch scratch;
    wp::Tokens tokens;
    GuardedMemory memory;
    constexpr std::size_t kStep = 64;
    for (std::size_t first; (first = next_text_.fetch_add(kStep)) < num_texts_;) {
      for (std::size_t i = first; i < std::min(first + kStep, num_texts_); ++i) {
        check_text(i, scratch, memory, tokens);
      }
    }
    current_text = {};
  }

  // A part of the block as one batch, and its texts joined to a long one that is cut for the threads.
  void check_batch() {
    const std::size_t count = std::min<std::size_t>(num_texts_, 3000);
    std::vector<wp::TextView> views;
    for (std::size_t i = 0; i < count; ++i) views.push_back(wordpiece_test::utf8_view(block_.texts[i]));
    wp::Batch batch;
    wordpiece_test::encode_all(*tokenizer_, views, {true, true}, kThreads, batch);
    wp::Tokens got;
    for (std::size_t i = 0; i < count; ++i) {
      const auto start = static_cast<std::size_t>(batch.cu_seqlens[i]);
      const auto size = static_cast<std::size_t>(batch.cu_seqlens[i + 1]) - start;
      got.ids.clear();
      got.offsets.clear();
      got.word_ids.clear();
      got.ids.append(batch.tokens.ids.data() + start, size);
      got.offsets.append(batch.tokens.offsets.data() + 2 * start, 2 * size);
      got.word_ids.append(batch.tokens.word_ids.data() + start, size);
      expect(got, i, "in a batch");
    }
    std::string all;
    for (std::size_t i = 0; i < count && all.size() < 300000; ++i) (all += block_.texts[i]) += '\n';
    const wp::TextView view = wordpiece_test::utf8_view(all);
    wordpiece_test::encode_all(*tokenizer_, {view}, {true, true}, kThreads, batch);
    const wp::Tokens one = encode(*tokenizer_, view);
    if (!equal(batch.tokens, one)) fail_long(all, batch.tokens, one);
  }

  // Says where the tokens of several threads part from those of one.
  void fail_long(const std::string& text, const wp::Tokens& several, const wp::Tokens& one) {
    std::size_t i = 0;
    const std::size_t size = std::min(several.ids.size(), one.ids.size());
    const auto same = [&](std::size_t k) {
      return several.ids[k] == one.ids[k] && several.offsets[2 * k] == one.offsets[2 * k] &&
             several.offsets[2 * k + 1] == one.offsets[2 * k + 1] && several.word_ids[k] == one.word_ids[k];
    };
    while (i < size && same(i)) ++i;
    const auto at = static_cast<std::size_t>(i < one.ids.size() ? one.offsets[2 * i] : 0);
    std::string near;
    const AllForms forms(text);
    const std::vector<char32_t>& chars = forms.code_points();
    for (std::size_t k = at - std::min<std::size_t>(at, 20); k < std::min(at + 20, chars.size()); ++k) {
      wp::append_utf8(chars[k], near);
    }
    if (++wordpiece_test::failures() > 5) return;
    std::printf(
        "%s: a text of %zu bytes (the first of the block, joined by line feeds) has other tokens from %zu "
        "threads than from one (%s)\n  from token %zu, code point %zu: %s\n",
        block_.name.c_str(), text.size(), kThreads, block_.shown_options.c_str(), i, at,
        wordpiece_test::literal(near).c_str());
    if (i < size) {
      std::printf("  several: id %d at %d, word %d; one: id %d at %d, word %d\n", several.ids[i],
                  several.offsets[2 * i], several.word_ids[i], one.ids[i], one.offsets[2 * i], one.word_ids[i]);
    }
    const wp::Tokens right = encode(*block_.make(true), text);
    if (!equal(one, right)) fail("a long text", text, one, right);
  }

  const Block& block_;
  const std::size_t num_texts_;
  const std::unique_ptr<const wp::TextTokenizer> tokenizer_;
  std::unique_ptr<const wp::TextTokenizer> stages_;
  std::mutex mutex_;
  std::atomic<std::size_t> next_text_{0};
};

// Enters texts made of these parts at random, with the tokens that the slow tokenizer makes of them.
inline void make_up_texts(const std::vector<std::string>& parts, unsigned seed, Block& block) {
  std::mt19937 random(seed);
  const std::unique_ptr<const wp::TextTokenizer> stages = block.make(true);
  for (int i = 0; i < 4000; ++i) {
    std::string text;
    for (auto size = random() % (i % 100 == 0 ? 2000 : 30); size > 0; --size) text += parts[random() % parts.size()];
    const wp::Tokens tokens = encode(*stages, text);
    block.texts.push_back(text);
    block.ids.insert(block.ids.end(), tokens.ids.begin(), tokens.ids.end());
    block.offsets.insert(block.offsets.end(), tokens.offsets.begin(), tokens.offsets.end());
    block.word_ids.insert(block.word_ids.end(), tokens.word_ids.begin(), tokens.word_ids.end());
    block.ends.push_back(static_cast<std::uint32_t>(block.ids.size()));
  }
}

// The checks of a test program: of blocks made up here, or of those of a file.
inline int run(int argc, char** argv, const char* name, std::string_view magic, Block (*read_block)(std::istream&),
               Block (*make_block)(unsigned)) {
  struct sigaction action = {};
  action.sa_sigaction = on_fault;
  action.sa_flags = SA_SIGINFO;
  sigaction(SIGSEGV, &action, &action_before);
  if (argc < 2) {
    for (const unsigned seed : {0U, 1U}) {
      const Block block = make_block(seed);
      Checker(block).check();
    }
    return wordpiece_test::report(name);
  }
  std::ifstream file(argv[1], std::ios::binary);
  std::string start(magic.size(), '\0');
  if (!file.read(start.data(), static_cast<std::streamsize>(start.size())) || start != magic) {
    std::printf("%s: expected a file that starts with %s", argv[1], std::string(magic).c_str());
    return 1;
  }
  read_string(file);  // what made it
  std::size_t num_texts = 0;
  while (file.peek() != std::istream::traits_type::eof() && wordpiece_test::failures() < 5) {
    const Block block = read_block(file);
    if (std::any_of(argv + 2, argv + argc, [&](const char* p) { return block.name.rfind(p, 0) == 0; })) continue;
    Checker checker(block);
    checker.check();
    num_texts += checker.num_texts();
  }
  std::printf("%zu texts\n", num_texts);
  if (num_texts == 0) return 1;
  return wordpiece_test::report(name);
}

}  // namespace identity
