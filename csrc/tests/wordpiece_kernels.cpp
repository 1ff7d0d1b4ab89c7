// Every instruction set against naive loops, and the table of whole words.

#include <algorithm>
#include <limits>
#include <random>
#include <string>
#include <unordered_map>
#include <vector>

#include "wordpiece/dispatch.h"
#include "wordpiece/word_table.h"
#include "wordpiece_check.h"

namespace wp = bert_fast::wordpiece;

namespace {

using Random = std::mt19937_64;

// A work area of its own, filled with what must not matter.
struct Area {
  explicit Area(std::size_t capacity)
      : text(capacity + wp::WordSpans::kSlack, '#'),
        starts(capacity + wp::WordSpans::kSlack, 7),
        lasts(capacity + wp::WordSpans::kSlack, 7) {
    spans.text = text.data();
    spans.starts = starts.data();
    spans.lasts = lasts.data();
  }
  std::string text;
  std::vector<std::uint32_t> starts, lasts;
  wp::WordSpans spans;

  bool operator==(const Area& other) const {
    const auto& a = spans;
    const auto& b = other.spans;
    return a.size == b.size && a.num_starts == b.num_starts && a.num_lasts == b.num_lasts &&
           std::equal(text.begin(), text.begin() + a.size, other.text.begin()) &&
           std::equal(starts.begin(), starts.begin() + a.num_starts, other.starts.begin()) &&
           std::equal(lasts.begin(), lasts.begin() + a.num_lasts, other.lasts.begin());
  }
};

bool contains(const wp::AsciiSet& set, unsigned char c) { return c < 0x80 && (set.rows[c & 15] >> (c >> 4) & 1) != 0; }

std::size_t scan_naively(const wp::AsciiClasses& classes, const char* text, std::size_t size, wp::WordSpans& spans) {
  std::size_t i = 0;
  for (; i < size; ++i) {
    const auto c = static_cast<unsigned char>(text[i]);
    const bool word = contains(classes.word, c), mark = contains(classes.punctuation, c);
    if (!word && !mark && !contains(classes.space, c)) break;
    if (!word && spans.is_open()) spans.lasts[spans.num_lasts++] = spans.size - 1;
    if (mark || (word && !spans.is_open())) spans.starts[spans.num_starts++] = spans.size;
    if (mark) spans.lasts[spans.num_lasts++] = spans.size;
    spans.text[spans.size++] = static_cast<char>(classes.lowercase && c >= 'A' && c <= 'Z' ? c + 32 : c);
  }
  return i;
}

wp::AsciiClasses english(bool lowercase) {
  wp::AsciiClasses classes;
  classes.lowercase = lowercase;
  for (unsigned char c = 1; c < 0x80; ++c) {
    const bool letter = (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9');
    if (letter) classes.word.add(c);
    if (c > ' ' && c < 0x7F && !letter) classes.punctuation.add(c);
    if (c == ' ' || c == '\t' || c == '\n' || c == '\r') classes.space.add(c);
  }
  return classes;
}

void test_scan() {
  Random random(1);
  for (int round = 0; round < 4000; ++round) {
    const wp::AsciiClasses classes = english(round % 2 == 0);
    // Mostly letters in some rounds, mostly anything in others; the string ends where its memory does.
    const unsigned odd = 2 + static_cast<unsigned>(random() % 40);
    std::string text(random() % 300, 'x');
    for (char& c : text) {
      if (random() % odd == 0) {
        c = static_cast<char>(random() % 5 == 0 ? random() % 256 : " ,.\n-A"[random() % 6]);
      } else {
        c = "aZ09zAbQ"[random() % 8];
      }
    }
    // In two pieces: the second continues what the first left open.
    const std::size_t cut = text.empty() ? 0 : random() % text.size();
    const std::string first = text.substr(0, cut), second = text.substr(cut);
    Area want(600);
    const std::size_t want_first = scan_naively(classes, first.data(), first.size(), want.spans);
    const std::size_t want_second = scan_naively(classes, second.data(), second.size(), want.spans);
    for (const wp::Kernels* kernels : wp::available_kernels()) {
      Area got(600);
      CHECK(kernels->scan(classes, first.data(), first.size(), got.spans) == want_first);
      CHECK(kernels->scan(classes, second.data(), second.size(), got.spans) == want_second);
      CHECK(got == want);
    }
  }
}

// Every character in every place of a block.
void test_classes() {
  const wp::AsciiClasses classes = english(true);
  for (std::size_t place = 0; place < 64; ++place) {
    for (int byte = 0; byte < 256; ++byte) {
      std::string text(64, 'a');
      text[place] = static_cast<char>(byte);
      Area want(100);
      const std::size_t taken = scan_naively(classes, text.data(), 64, want.spans);
      for (const wp::Kernels* kernels : wp::available_kernels()) {
        Area got(100);
        CHECK(kernels->scan(classes, text.data(), 64, got.spans) == taken);
        CHECK(got == want);
      }
    }
  }
}

std::string random_word(Random& random, std::size_t max_bytes) {
  std::string word(1 + random() % max_bytes, 'a');
  for (char& c : word) c = static_cast<char>('a' + random() % 3);
  return word;
}

void test_words() {
  Random random(2);
  for (const std::size_t count : {0U, 1U, 5U, 1000U, 40000U}) {
    std::unordered_map<std::string, std::uint32_t> ids;
    while (ids.size() < count) ids.emplace(random_word(random, 20), static_cast<std::uint32_t>(3 * ids.size() + 1));
    std::vector<wp::WordTable::Entry> entries;
    for (const auto& [word, id] : ids) {
      if (word.size() <= wp::WordKey::kMaxBytes) entries.push_back({word, id});
    }
    const wp::WordTable table(entries, 3 * count + 2);
    Area area(60000);
    std::vector<std::int32_t> want;
    const auto ask = [&](const std::string& word) {
      const auto found = ids.find(word);
      want.push_back(found == ids.end() || word.size() > wp::WordKey::kMaxBytes ? -1 : static_cast<int>(found->second));
      wp::WordSpans& spans = area.spans;
      std::copy(word.begin(), word.end(), spans.text + spans.size);
      spans.starts[spans.num_starts++] = spans.size;
      spans.size += static_cast<std::uint32_t>(word.size());
      spans.lasts[spans.num_lasts++] = spans.size - 1;
    };
    for (const auto& [word, id] : ids) {
      if (area.spans.size > 20000) break;
      ask(word);
    }
    for (int i = 0; i < 2000; ++i) ask(random_word(random, 24));
    const auto check = [&](const wp::Kernels* kernels) {
      std::vector<std::int32_t> got(want.size() + 1);
      std::vector<std::uint32_t> misses(want.size() + 1);
      const std::size_t num_misses =
          kernels->words().find(table.view(), area.spans, want.size(), got.data(), misses.data());
      for (std::size_t i = 0; i < num_misses; ++i) got[misses[i]] = -1;
      got.pop_back();
      CHECK(got == want);
    };
    for (const wp::Kernels* kernels : wp::available_kernels()) check(kernels);
    area.spans.starts[area.spans.num_starts++] = 77 | wp::WordSpans::kLiteral;
    area.spans.lasts[area.spans.num_lasts++] = area.spans.size;
    ++area.spans.num_literals;
    want.push_back(77);
    for (const wp::Kernels* kernels : wp::available_kernels()) check(kernels);
  }
}

template <typename Unit>
void check_narrow(Random& random, std::size_t (*narrow)(const Unit*, std::size_t, char*)) {
  for (std::size_t size = 0; size <= 70; ++size) {
    std::vector<Unit> text(size);
    for (Unit& unit : text) unit = static_cast<Unit>(random() % 128);
    for (std::size_t stop = 0; stop <= size; ++stop) {
      std::vector<Unit> stopped = text;
      if (stop < size) stopped[stop] = static_cast<Unit>(random() % 2 == 0 ? 0x80 : 0x4E41);
      std::string out(size, '?');
      CHECK(narrow(stopped.data(), size, out.data()) == stop);
      CHECK(std::equal(out.begin(), out.begin() + static_cast<std::ptrdiff_t>(stop), text.begin()));
    }
  }
}

void test_widen() {
  Random random(4);
  for (std::size_t size = 0; size <= 70; ++size) {
    std::vector<std::int32_t> ids(size);
    for (std::int32_t& id : ids) id = static_cast<std::int32_t>(random() % (1U << 31));
    if (size > 0) ids[random() % size] = std::numeric_limits<std::int32_t>::max();
    const std::vector<std::int64_t> want(ids.begin(), ids.end());
    for (const wp::Kernels* kernels : wp::available_kernels()) {
      std::vector<std::int64_t> got(size, -1);
      kernels->widen(ids.data(), size, got.data());
      CHECK(got == want);
    }
  }
}

}  // namespace

int main() {
  test_scan();
  test_classes();
  test_words();
  Random random(3);
  for (const wp::Kernels* kernels : wp::available_kernels()) {
    check_narrow<std::uint16_t>(random, kernels->narrow16);
    check_narrow<std::uint32_t>(random, kernels->narrow32);
  }
  test_widen();
  return wordpiece_test::report("wordpiece_kernels");
}
