#include "wordpiece/normalizer.h"

#include <algorithm>
#include <array>

#include "wordpiece/utf8.h"

namespace bert_fast::wordpiece {
namespace {

NormalizedText decompose_text(const NormalizedText& text) {
  NormalizedText out;
  MarkRun run;
  std::uint32_t last_source = 0;
  const auto append = [&](char32_t c, std::uint32_t source) {
    out.append(c, source);
    last_source = source;
  };
  for (std::size_t i = 0; i < text.size(); ++i) {
    const Mapping parts = decompose(text.chars[i]);
    for (std::size_t k = 0; k < parts.size; ++k) {
      if (combining_class(parts.chars[k]) != 0) {
        run.add(parts.chars[k], k == 0, text.sources[i]);
      } else {
        run.finish(last_source, append);
        append(parts.chars[k], text.sources[i]);
      }
    }
  }
  run.finish(last_source, append);
  return out;
}

}  // namespace

std::string NormalizedText::to_utf8() const {
  std::string out;
  out.reserve(chars.size());
  for (const char32_t c : chars) append_utf8(c, out);
  return out;
}

NormalizedText decode(std::string_view utf8, std::uint32_t first_source) {
  NormalizedText text;
  const char* p = utf8.data();
  const char* end = p + utf8.size();
  while (p < end) text.append(decode_utf8(p), first_source++);
  return text;
}

NormalizedText clean(const NormalizedText& text, const NormalizerOptions& options) {
  NormalizedText out;
  for (std::size_t i = 0; i < text.size(); ++i) {
    char32_t c = text.chars[i];
    if (options.clean_text) {
      if (is_control(c)) continue;
      if (is_whitespace(c)) c = U' ';
    }
    const bool spaced = options.handle_chinese_chars && is_cjk(c);
    if (spaced) out.append(U' ', text.sources[i]);
    out.append(c, text.sources[i]);
    if (spaced) out.append(U' ', text.sources[i]);
  }
  return out;
}

NormalizedText fold(const NormalizedText& text, const NormalizerOptions& options) {
  const NormalizedText decomposed = options.strip_accents ? decompose_text(text) : text;
  NormalizedText out;
  for (std::size_t i = 0; i < decomposed.size(); ++i) {
    const char32_t c = decomposed.chars[i];
    if (options.strip_accents && is_mark(c)) continue;
    if (!options.lowercase) {
      out.append(c, decomposed.sources[i]);
      continue;
    }
    const Mapping lowered = to_lower(c);
    for (std::size_t k = 0; k < lowered.size; ++k) out.append(lowered.chars[k], decomposed.sources[i]);
  }
  return out;
}

void MarkRun::add(char32_t mark, bool first, std::uint32_t source) {
  marks_.push_back({mark, combining_class(mark), first});
  if (first) sources_.push_back(source);
}

void MarkRun::clear() {
  marks_.clear();
  sources_.clear();
}

void MarkRun::sort() {
  const auto by_class = [](const Mark& a, const Mark& b) { return a.combining_class < b.combining_class; };
  if (std::is_sorted(marks_.begin(), marks_.end(), by_class)) return;
  // Counting sort: texts can hold a million marks in one run.
  std::array<std::size_t, 257> starts{};
  for (const Mark& mark : marks_) ++starts[mark.combining_class + 1U];
  for (std::size_t i = 1; i < starts.size(); ++i) starts[i] += starts[i - 1];
  sorted_.resize(marks_.size());
  for (const Mark& mark : marks_) sorted_[starts[mark.combining_class]++] = mark;
  marks_.swap(sorted_);
}

}  // namespace bert_fast::wordpiece
