#include "unigram/tokenizer.h"

#include <algorithm>
#include <atomic>
#include <limits>
#include <stdexcept>
#include <utility>

#include "unigram/graphemes.h"
#include "unigram/sink.h"
#include "wordpiece/unicode.h"
#include "wordpiece/utf8.h"

namespace bert_fast::unigram {
namespace {

std::uint32_t next_serial() {
  static std::atomic<std::uint32_t> last{0};
  std::uint32_t serial = ++last;
  while (serial == 0) serial = ++last;
  return serial;
}

std::vector<AddedToken> raw_ones(const std::vector<AddedToken>& tokens) {
  std::vector<AddedToken> raw;
  std::copy_if(tokens.begin(), tokens.end(), std::back_inserter(raw), [](const auto& t) { return !t.normalized; });
  return raw;
}

std::vector<AddedToken> normalized_ones(const std::vector<AddedToken>& tokens, const Normalizer& normalizer) {
  std::vector<AddedToken> normalized;
  for (AddedToken token : tokens) {
    if (!token.normalized) continue;
    MappedText content = map_text(token.content, 0);
    normalizer.apply(content, 0);
    token.content = to_utf8(content, 0, content.size());
    normalized.push_back(std::move(token));
  }
  return normalized;
}

bool has_step(const TokenizerOptions& options, NormalizerStep::Kind kind) {
  return std::any_of(options.steps.begin(), options.steps.end(), [&](const auto& step) { return step.kind == kind; });
}

// Whether whitespace at the start of a text is stripped once, and before any step that could tell.
bool strips_first(const TokenizerOptions& options) {
  const auto strips = [](const auto& step) { return step.kind == NormalizerStep::Kind::kStrip && step.left; };
  const auto first = std::find_if(options.steps.begin(), options.steps.end(),
                                  [](const auto& step) { return step.kind != NormalizerStep::Kind::kLowercase; });
  return first != options.steps.end() && strips(*first) &&
         std::count_if(options.steps.begin(), options.steps.end(), strips) == 1;
}

// Whether no step looks at both sides of a border between a character that stays what it is and a space behind it.
bool is_local(const TokenizerOptions& options, const std::string& prefix) {
  for (const NormalizerStep& step : options.steps) {
    switch (step.kind) {
      case NormalizerStep::Kind::kCharsmap:
      case NormalizerStep::Kind::kLowercase:
      case NormalizerStep::Kind::kCompose:
        break;
      case NormalizerStep::Kind::kStrip:
        if (step.left && !strips_first(options)) return false;
        break;
      case NormalizerStep::Kind::kReplaceText:
        return false;
      case NormalizerStep::Kind::kReplaceSpaces:
        // At the end of a text it leaves a word of its own; elsewhere both go before the next word.
        if (step.least < 2) return false;
        if (step.content != " " && step.content != prefix) return false;
        break;
      case NormalizerStep::Kind::kReplaceWhitespace:
        // A map may turn the space into something else.
        if (step.content != " " || has_step(options, NormalizerStep::Kind::kCharsmap)) return false;
        break;
    }
  }
  return true;
}

bool has_space(std::string_view content) {
  for (const char *p = content.data(), *end = p + content.size(); p < end;) {
    if (wordpiece::is_whitespace(wordpiece::decode_utf8(p))) return true;
  }
  return false;
}

// Whether a token that is looked for in normalized text can be found in each word by itself, by its first byte.
bool is_within_words(std::string_view content, std::string_view mark) {
  return static_cast<unsigned char>(content[0]) < 0x80 && !has_space(content) &&
         content.find(mark) == std::string_view::npos;
}

// A place in a text, in bytes and in code points.
struct Place {
  std::size_t bytes = 0;
  std::size_t chars = 0;

  void move(std::string_view text, std::size_t to) {
    if (to >= bytes) {
      chars += wordpiece::count_code_points(text.substr(bytes, to - bytes));
    } else {
      chars -= wordpiece::count_code_points(text.substr(to, bytes - to));
    }
    bytes = to;
  }
};

}  // namespace

Tokenizer::Tokenizer(const std::vector<std::string_view>& vocab, const std::vector<double>& scores,
                     TokenizerOptions options)
    : options_(std::move(options)),
      normalizer_(options_.charsmap.empty() ? Charsmap() : Charsmap(options_.charsmap), options_.steps),
      model_(vocab, scores, options_.model),
      raw_tokens_(raw_ones(options_.added_tokens)),
      normalized_tokens_(normalized_ones(options_.added_tokens, normalizer_)),
      serial_(next_serial()) {
  wordpiece::append_utf8(options_.replacement, prefix_);
  for (unsigned char c = 0x21; c < 0x7F; ++c) {
    plain_ascii_[c] = normalizer_.is_plain(c);
    const bool is_split = options_.split_punctuation && wordpiece::is_punctuation(c);
    word_ascii_[c] = plain_ascii_[c] && !is_split && c != options_.replacement;
  }
  can_cut_ = options_.prepend == Prepend::kAlways && options_.split && is_local(options_, prefix_);
  // A cut must not go through an added token, nor through the whitespace that one takes along from behind.
  for (const AddedToken& token : options_.added_tokens) {
    if (token.rstrip || has_space(token.content)) can_cut_ = false;
  }
  for (const AddedToken& token : normalized_ones(options_.added_tokens, normalizer_)) {
    if (token.content.empty()) continue;
    if (!is_within_words(token.content, prefix_)) can_cut_ = false;
    word_ascii_[static_cast<unsigned char>(token.content[0]) & 0x7F] = false;
  }
  strips_start_ = can_cut_ && strips_first(options_);
  // In front of a space, and of whitespace that becomes one or separates words itself.
  const bool replaces_lines = has_step(options_, NormalizerStep::Kind::kReplaceWhitespace);
  for (unsigned char c = 0; can_cut_ && c < 0x80; ++c) {
    if (c != ' ' && !(wordpiece::is_whitespace(c) && breaks_clusters(c))) continue;
    const auto becomes = normalizer_.replacement_of(c);
    const bool is_border =
        c == ' ' || options_.whitespace_split || (replaces_lines && (c == '\n' || c == '\r' || c == '\t'));
    spaces_[c] = becomes ? *becomes == " " : is_border && !normalizer_.joins(c);
  }
}

bool Tokenizer::is_plain_letter(char32_t c) const { return normalizer_.is_plain(c) && !wordpiece::is_whitespace(c); }

// A part does not tell whether it is at the start of a text, where whitespace is stripped.
bool Tokenizer::can_cut(char32_t before, char32_t after) const {
  return can_cut_ && !strips_start_ && after < 0x80 && spaces_[after] && is_plain_letter(before);
}

// What is removed in front of a text shifts all its offsets, behind cuts as well.
bool Tokenizer::cuts_texts(const EncodeOptions& wanted) const {
  return can_cut_ && !strips_start_ && !(wanted.offsets && normalizer_.removes());
}

void Tokenizer::encode(const TextView& text, const EncodeOptions& wanted, Scratch& scratch, Tokens& out,
                       std::uint32_t first_source) const {
  if (wanted.offsets && text.length > static_cast<std::size_t>(std::numeric_limits<std::int32_t>::max())) {
    throw std::length_error("texts: expected at most 2147483647 characters in a text with offsets, got " +
                            std::to_string(text.length));
  }
  const std::size_t first = out.ids.size();
  const std::size_t max_tokens = first + std::min(wanted.max_tokens, static_cast<std::size_t>(-1) - first);
  const std::string_view utf8 = wordpiece::to_utf8(text, scratch.utf8);
  Sink sink(wanted, out);
  Place start, stop;  // moved only for those who ask
  raw_tokens_.split(utf8, [&](const wordpiece::AddedTokenFinder::Piece& piece) {
    if (sink.num_tokens() >= max_tokens) return;
    if (wanted.offsets || options_.prepend == Prepend::kFirst) {
      if (piece.start >= stop.bytes) start = stop;
      start.move(utf8, piece.start);
      stop.move(utf8, piece.stop);
    }
    const auto source = first_source + static_cast<std::uint32_t>(start.chars);
    if (piece.id >= 0) {
      sink.token(piece.id, source, first_source + static_cast<std::uint32_t>(stop.chars));
      sink.finish_word();
      return;
    }
    const std::string_view part = utf8.substr(piece.start, piece.stop - piece.start);
    if (can_cut_ && !options_.whole_texts) {
      encode_words(part, source, max_tokens, sink);
    } else {
      encode_whole(part, source, sink);
    }
  });
  if (out.ids.size() <= max_tokens) return;
  out.ids.truncate(max_tokens);
  out.offsets.truncate(2 * out.ids.size());
  out.word_ids.truncate(out.ids.size());
}

void Tokenizer::encode_whole(std::string_view text, std::uint32_t first_source, Sink& sink, bool strips_left) const {
  MappedText mapped = map_text(text, first_source);
  normalizer_.apply(mapped, first_source, strips_left);
  if (normalized_tokens_.empty()) return encode_normalized(mapped, 0, mapped.size(), sink);
  const std::string utf8 = to_utf8(mapped, 0, mapped.size());
  Place start, stop;
  normalized_tokens_.split(utf8, [&](const wordpiece::AddedTokenFinder::Piece& piece) {
    if (piece.start >= stop.bytes) start = stop;
    start.move(utf8, piece.start);
    stop.move(utf8, piece.stop);
    if (piece.id < 0) return encode_normalized(mapped, start.chars, stop.chars, sink);
    sink.token(piece.id, mapped.starts[start.chars], mapped.stops[stop.chars - 1]);
    sink.finish_word();
  });
}

// Calls word(start, stop, has_prefix) for each word of the characters: between whitespace or punctuation (or all of
// them) words start at spaces and marks; the first one gets a mark in front if it has none.
template <typename Function>
void Tokenizer::for_each_word(const MappedText& text, std::size_t begin, std::size_t end, Function word) const {
  const auto is_mark = [&](std::size_t i) { return text.chars[i] == ' ' || text.chars[i] == options_.replacement; };
  const auto split_at_marks = [&](std::size_t first, std::size_t last) {
    if (first == last) return;
    const bool wants_prefix =
        options_.prepend == Prepend::kAlways || (options_.prepend == Prepend::kFirst && text.starts[first] == 0);
    for (std::size_t start = first, stop; start < last; start = stop) {
      for (stop = start + 1; stop < last && !(options_.split && is_mark(stop));) ++stop;
      word(start, stop, start == first && wants_prefix && !is_mark(start));
    }
  };
  if (options_.split_punctuation) {
    std::size_t start = begin;
    for (std::size_t i = begin; i < end; ++i) {
      if (!wordpiece::is_punctuation(text.chars[i])) continue;
      split_at_marks(start, i);
      split_at_marks(i, i + 1);
      start = i + 1;
    }
    return split_at_marks(start, end);
  }
  if (!options_.whitespace_split) return split_at_marks(begin, end);
  for (std::size_t start = begin, stop; start < end; start = stop + 1) {
    for (stop = start; stop < end && !wordpiece::is_whitespace(text.chars[stop]);) ++stop;
    split_at_marks(start, stop);
  }
}

void Tokenizer::encode_normalized(const MappedText& text, std::size_t begin, std::size_t end, Sink& sink) const {
  Memory& mine = memory();
  for_each_word(text, begin, end, [&](std::size_t start, std::size_t stop, bool has_prefix) {
    mine.word.assign(prefix_, 0, has_prefix ? prefix_.size() : 0);
    mine.places.assign(mine.word.size(), static_cast<std::uint32_t>(start));
    for (std::size_t i = start; i < stop; ++i) {
      wordpiece::append_utf8(text.chars[i] == ' ' ? options_.replacement : text.chars[i], mine.word);
      mine.places.resize(mine.word.size(), static_cast<std::uint32_t>(i));
    }
    model_.split(mine.word, mine.lattice);
    for (const Model::Piece& piece : mine.lattice.pieces) {
      sink.token(piece.id, text.starts[mine.places[piece.start]], text.stops[mine.places[piece.stop - 1]]);
    }
    sink.finish_word();
  });
}

std::string Tokenizer::normalize(std::string_view utf8) const {
  MappedText text = map_text(utf8, 0);
  normalizer_.apply(text, 0);
  return to_utf8(text, 0, text.size());
}

std::vector<Tokenizer::Word> Tokenizer::split_words(std::string_view utf8) const {
  const MappedText text = map_text(utf8, 0);
  std::vector<Word> words;
  for_each_word(text, 0, text.size(), [&](std::size_t start, std::size_t stop, bool has_prefix) {
    Word word{has_prefix ? prefix_ : std::string(), start, stop};
    for (std::size_t i = start; i < stop; ++i) {
      wordpiece::append_utf8(text.chars[i] == ' ' ? options_.replacement : text.chars[i], word.text);
    }
    words.push_back(std::move(word));
  });
  return words;
}

}  // namespace bert_fast::unigram
