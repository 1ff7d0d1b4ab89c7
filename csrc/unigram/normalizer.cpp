#include "unigram/normalizer.h"

#include <algorithm>
#include <utility>

#include "unigram/composition.h"
#include "unigram/graphemes.h"
#include "wordpiece/unicode.h"
#include "wordpiece/utf8.h"

namespace bert_fast::unigram {
namespace {

constexpr std::size_t kMostClusterBytes = 5;  // what is looked up as a whole

std::vector<char32_t> decode(std::string_view utf8) {
  std::vector<char32_t> chars;
  for (const char *p = utf8.data(), *end = p + utf8.size(); p < end;) chars.push_back(wordpiece::decode_utf8(p));
  return chars;
}

std::size_t utf8_size(char32_t c) { return c < 0x80 ? 1 : c < 0x800 ? 2 : c < 0x10000 ? 3 : 4; }

// A character of the new text: how many characters of the old one it takes along is 1 - change (change 1: none).
struct Change {
  char32_t c;
  std::ptrdiff_t change;
};

// Enters the replacement of `old_count` characters.
void add_replacement(std::string_view replacement, std::size_t old_count, std::vector<Change>& changes) {
  const std::size_t before = changes.size();
  for (const char *p = replacement.data(), *end = p + replacement.size(); p < end;) {
    changes.push_back({wordpiece::decode_utf8(p), 0});
  }
  const std::size_t new_count = changes.size() - before;
  if (new_count > old_count) {
    for (std::size_t i = changes.size() - (new_count - old_count); i < changes.size(); ++i) changes[i].change = 1;
  } else if (new_count < old_count && !changes.empty()) {
    changes.back().change -= static_cast<std::ptrdiff_t>(old_count - new_count);
  }
}

MappedText apply_changes(const MappedText& text, const std::vector<Change>& changes, std::uint32_t first) {
  MappedText out;
  std::size_t at = 0;  // in the old text
  for (const Change& each : changes) {
    if (each.change > 0) {
      out.push(each.c, at == 0 ? first : text.starts[at - 1], at == 0 ? first : text.stops[at - 1]);
      continue;
    }
    out.push(each.c, text.starts[at], text.stops[at]);
    at += static_cast<std::size_t>(1 - each.change);
  }
  return out;
}

MappedText replace_spaces(const MappedText& text, const std::vector<char32_t>& content, std::size_t least) {
  MappedText out;
  for (std::size_t i = 0, stop; i < text.size(); i = stop) {
    for (stop = i; stop < text.size() && text.chars[stop] == ' ';) ++stop;
    if (stop - i >= least) {
      for (const char32_t c : content) out.push(c, text.starts[stop - 1], text.stops[stop - 1]);
      continue;
    }
    stop = std::max(stop, i + 1);
    for (std::size_t k = i; k < stop; ++k) out.push(text.chars[k], text.starts[k], text.stops[k]);
  }
  return out;
}

MappedText replace_whitespace(const MappedText& text, const std::vector<char32_t>& content) {
  MappedText out;
  for (std::size_t i = 0, stop; i < text.size(); i = stop) {
    const char32_t c = text.chars[i];
    for (stop = i; stop < text.size() && wordpiece::is_whitespace(text.chars[stop]);) ++stop;
    if (stop - i >= 2 || c == '\n' || c == '\r' || c == '\t') {
      for (const char32_t each : content) out.push(each, text.starts[stop - 1], text.stops[stop - 1]);
      continue;
    }
    stop = i + 1;
    out.push(c, text.starts[i], text.stops[i]);
  }
  return out;
}

MappedText lower(const MappedText& text) {
  MappedText out;
  for (std::size_t i = 0; i < text.size(); ++i) {
    const wordpiece::Mapping lowered = wordpiece::to_lower(text.chars[i]);
    for (std::size_t k = 0; k < lowered.size; ++k) out.push(lowered.chars[k], text.starts[i], text.stops[i]);
  }
  return out;
}

// The characters decomposed, marks behind a starter in the order of their combining classes.
std::vector<Change> decompose(const std::vector<char32_t>& chars) {
  std::vector<Change> parts;
  parts.reserve(chars.size());
  std::size_t marks = 0;  // where the marks that end the parts begin
  const auto sort_marks = [&] {
    std::stable_sort(parts.begin() + static_cast<std::ptrdiff_t>(marks), parts.end(),
                     [](const Change& a, const Change& b) {
                       return wordpiece::combining_class(a.c) < wordpiece::combining_class(b.c);
                     });
  };
  for (const char32_t c : chars) {
    const wordpiece::Mapping mapping = wordpiece::decompose(c);
    for (std::size_t k = 0; k < mapping.size; ++k) {
      if (wordpiece::combining_class(mapping.chars[k]) != 0) {
        parts.push_back({mapping.chars[k], k == 0 ? 0 : 1});
        continue;
      }
      sort_marks();
      parts.push_back({mapping.chars[k], k == 0 ? 0 : 1});
      marks = parts.size();
    }
  }
  sort_marks();
  return parts;
}

// Puts characters together with the starter in front of them, where no mark of their class or a higher one is between.
void compose_all(std::vector<Change>& parts) {
  constexpr auto kNone = static_cast<std::size_t>(-1);
  std::size_t starter = kNone, size = 0;
  int last_class = -1;  // of what stands behind the starter; -1: nothing does
  for (const Change& part : parts) {
    const int its_class = wordpiece::combining_class(part.c);
    if (starter != kNone && last_class < its_class) {
      if (const char32_t composed = compose(parts[starter].c, part.c); composed != 0) {
        parts[starter].c = composed;
        parts[starter].change += part.change - 1;
        continue;
      }
    }
    if (its_class == 0) starter = size;
    last_class = its_class == 0 ? -1 : its_class;
    parts[size++] = part;
  }
  parts.resize(size);
}

void compose_text(MappedText& text, std::uint32_t first) {
  if (std::all_of(text.chars.begin(), text.chars.end(), stays_composed)) return;
  std::vector<Change> parts = decompose(text.chars);
  compose_all(parts);
  text = apply_changes(text, parts, first);
}

MappedText replace_text(const MappedText& text, const std::vector<char32_t>& pattern,
                        const std::vector<char32_t>& content) {
  MappedText out;
  for (std::size_t i = 0; i < text.size();) {
    if (text.size() - i >= pattern.size() &&
        std::equal(pattern.begin(), pattern.end(), text.chars.begin() + static_cast<std::ptrdiff_t>(i))) {
      i += pattern.size();
      for (const char32_t c : content) out.push(c, text.starts[i - 1], text.stops[i - 1]);
    } else {
      out.push(text.chars[i], text.starts[i], text.stops[i]);
      ++i;
    }
  }
  return out;
}

bool is_lower(char32_t c) {
  const wordpiece::Mapping lowered = wordpiece::to_lower(c);
  return lowered.size == 1 && lowered.chars[0] == c;
}

void strip(bool left, bool right, MappedText& text) {
  std::size_t begin = 0, end = text.size();
  while (left && begin < end && wordpiece::is_whitespace(text.chars[begin])) ++begin;
  while (right && end > begin && wordpiece::is_whitespace(text.chars[end - 1])) --end;
  text.keep(begin, end);
}

}  // namespace

void MappedText::clear() {
  chars.clear();
  starts.clear();
  stops.clear();
}

void MappedText::push(char32_t c, std::uint32_t start, std::uint32_t stop) {
  chars.push_back(c);
  starts.push_back(start);
  stops.push_back(stop);
}

void MappedText::keep(std::size_t begin, std::size_t end) {
  const auto cut = [&](auto& values) {
    values.resize(end);
    values.erase(values.begin(), values.begin() + static_cast<std::ptrdiff_t>(begin));
  };
  cut(chars);
  cut(starts);
  cut(stops);
}

Normalizer::Normalizer(Charsmap charsmap, std::vector<NormalizerStep> steps)
    : charsmap_(std::move(charsmap)), steps_(std::move(steps)), plain_(0x110000 / 64) {
  const auto has = [&](NormalizerStep::Kind kind) {
    return std::any_of(steps_.begin(), steps_.end(), [&](const NormalizerStep& step) { return step.kind == kind; });
  };
  const bool maps = has(NormalizerStep::Kind::kCharsmap), lowers = has(NormalizerStep::Kind::kLowercase),
             composes = has(NormalizerStep::Kind::kCompose);
  for (char32_t c = 0; c < 0x110000; ++c) {
    if (c >= 0xD800 && c < 0xE000) continue;
    if (maps && (replacement_of(c) || !unigram::is_plain(c))) continue;
    if (composes && !stays_composed(c)) continue;
    if (lowers && !is_lower(c)) continue;
    plain_[c / 64] |= std::uint64_t{1} << c % 64;
  }
  removes_ = charsmap_.removes();
}

std::optional<std::string_view> Normalizer::replacement_of(char32_t c) const {
  char bytes[4];
  return charsmap_.find({bytes, wordpiece::encode_utf8(c, bytes)});
}

bool Normalizer::joins(char32_t c) const {
  std::string bytes;
  for (char32_t next = 0; next < 0x110000; ++next) {
    if (!continues_cluster(next) && !(c == '\r' && next == '\n')) continue;
    bytes.clear();
    wordpiece::append_utf8(c, bytes);
    wordpiece::append_utf8(next, bytes);
    if (charsmap_.find(bytes)) return true;
  }
  return false;
}

void Normalizer::apply(MappedText& text, std::uint32_t first, bool strips_left) const {
  for (const NormalizerStep& step : steps_) {
    switch (step.kind) {
      case NormalizerStep::Kind::kCharsmap:
        replace_by_map(text, first);
        break;
      case NormalizerStep::Kind::kStrip:
        strip(strips_left && step.left, step.right, text);
        break;
      case NormalizerStep::Kind::kReplaceText:
        text = replace_text(text, decode(step.pattern), decode(step.content));
        break;
      case NormalizerStep::Kind::kReplaceSpaces:
        text = replace_spaces(text, decode(step.content), step.least);
        break;
      case NormalizerStep::Kind::kReplaceWhitespace:
        text = replace_whitespace(text, decode(step.content));
        break;
      case NormalizerStep::Kind::kLowercase:
        text = lower(text);
        break;
      case NormalizerStep::Kind::kCompose:
        compose_text(text, first);
        break;
    }
  }
}

// Clusters of a few bytes as a whole; other ones, and those that the map does not know, one character at a time.
void Normalizer::replace_by_map(MappedText& text, std::uint32_t first) const {
  std::vector<Change> changes;
  changes.reserve(text.size());
  bool is_changed = false;
  const auto replace = [&](std::string_view bytes, std::size_t count) {
    const auto replacement = charsmap_.find(bytes);
    if (!replacement) return false;
    add_replacement(*replacement, count, changes);
    is_changed = true;
    return true;
  };
  std::string bytes;
  for (std::size_t i = 0, stop; i < text.size(); i = stop) {
    stop = i + 1;
    if (is_plain(text.chars[i]) && (stop == text.size() || !continues_cluster(text.chars[stop]))) {
      changes.push_back({text.chars[i], 0});
      continue;
    }
    stop = i + cluster_size(text.chars.data() + i, text.size() - i);
    std::size_t num_bytes = 0;
    for (std::size_t k = i; k < stop && num_bytes <= kMostClusterBytes; ++k) num_bytes += utf8_size(text.chars[k]);
    if (stop - i > 1 && num_bytes <= kMostClusterBytes) {
      bytes.clear();
      for (std::size_t k = i; k < stop; ++k) wordpiece::append_utf8(text.chars[k], bytes);
      if (replace(bytes, stop - i)) continue;
    }
    for (std::size_t k = i; k < stop; ++k) {
      bytes.clear();
      wordpiece::append_utf8(text.chars[k], bytes);
      if (!replace(bytes, 1)) changes.push_back({text.chars[k], 0});
    }
  }
  if (is_changed) text = apply_changes(text, changes, first);
}

MappedText map_text(std::string_view utf8, std::uint32_t first) {
  MappedText text;
  for (const char *p = utf8.data(), *end = p + utf8.size(); p < end; ++first) {
    text.push(wordpiece::decode_utf8(p), first, first + 1);
  }
  return text;
}

std::string to_utf8(const MappedText& text, std::size_t begin, std::size_t end) {
  std::string utf8;
  for (std::size_t i = begin; i < end; ++i) wordpiece::append_utf8(text.chars[i], utf8);
  return utf8;
}

}  // namespace bert_fast::unigram
