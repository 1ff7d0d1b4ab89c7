#include "wordpiece/tokenizer.h"

#include <algorithm>
#include <limits>
#include <stdexcept>
#include <utility>

#include "wordpiece/dispatch.h"
#include "wordpiece/text_encoder.h"
#include "wordpiece/text_units.h"

namespace bert_fast::wordpiece {
namespace {

std::int32_t find_unk(const std::vector<std::string_view>& vocab, const TokenizerOptions& options) {
  if (vocab.size() > static_cast<std::size_t>(kMaxTokenId)) {
    throw std::invalid_argument("vocab: expected at most " + std::to_string(kMaxTokenId) + " tokens, got " +
                                std::to_string(vocab.size()));
  }
  const std::int32_t id = Vocab::find_token(vocab, options.unk_token);
  if (id >= 0) return id;
  for (const AddedToken& token : options.added_tokens) {
    if (token.content == options.unk_token) return token.id;
  }
  throw std::invalid_argument("unk_token: expected a token of the vocabulary, got '" + options.unk_token + "'");
}

std::vector<AddedToken> raw_ones(const std::vector<AddedToken>& tokens) {
  std::vector<AddedToken> raw;
  std::copy_if(tokens.begin(), tokens.end(), std::back_inserter(raw), [](const auto& t) { return !t.normalized; });
  return raw;
}

NormalizedText normalize_stages(std::string_view text, std::uint32_t first_source, const NormalizerOptions& options) {
  return fold(clean(decode(text, first_source), options), options);
}

std::vector<AddedToken> normalized_ones(const TokenizerOptions& options) {
  std::vector<AddedToken> normalized;
  for (AddedToken token : options.added_tokens) {
    if (!token.normalized) continue;
    token.content = normalize_stages(token.content, 0, options.normalizer).to_utf8();
    normalized.push_back(std::move(token));
  }
  return normalized;
}

std::vector<CharToken> char_tokens(const std::vector<std::string_view>& vocab, std::size_t max_word_chars) {
  std::vector<CharToken> tokens;
  for (std::size_t id = 0; id < vocab.size() && max_word_chars > 0; ++id) {
    const std::string_view token = vocab[id];
    if (token.empty() || token.size() != utf8_length(static_cast<unsigned char>(token[0]))) continue;
    const char* p = token.data();
    tokens.push_back({decode_utf8(p), static_cast<std::int32_t>(id)});
  }
  return tokens;
}

AsciiClasses ascii_classes(const CharTable& chars) {
  AsciiClasses classes;
  for (unsigned char c = 1; c < 0x80; ++c) {  // not NUL, see AsciiClasses
    const CharEntry entry = chars[c];
    const bool is_upper = c >= 'A' && c <= 'Z';
    const bool is_lowered = entry.action() == CharAction::kSubstitute && is_upper && entry.value() == c + 0x20U;
    if (is_lowered || entry.action() == CharAction::kCopy) classes.word.add(c);
    if (entry.action() == CharAction::kIsolate) classes.punctuation.add(c);
    if (entry.action() == CharAction::kSpace) classes.space.add(c);
    classes.lowercase = classes.lowercase || is_lowered;
  }
  return classes;
}

// How many tokens are in `out` when the present text has as many as are wanted.
std::size_t token_limit(const Tokens& out, const EncodeOptions& wanted) {
  const std::size_t most = static_cast<std::size_t>(-1) - out.ids.size();
  return out.ids.size() + std::min(wanted.max_tokens, most);
}

NormalizedText slice(const NormalizedText& text, std::size_t start, std::size_t stop) {
  NormalizedText part;
  const auto at = [](std::size_t i) { return static_cast<std::ptrdiff_t>(i); };
  part.chars.assign(text.chars.begin() + at(start), text.chars.begin() + at(stop));
  part.sources.assign(text.sources.begin() + at(start), text.sources.begin() + at(stop));
  return part;
}

// A place in a text, in bytes and in code points.
struct Place {
  std::size_t bytes = 0;
  std::size_t chars = 0;

  // Costs as much as the way is long.
  void move(std::string_view text, std::size_t to) {
    const std::size_t from = bytes;
    bytes = to;
    if (to >= from) {
      chars += count_code_points(text.substr(from, to - from));
    } else {
      chars -= count_code_points(text.substr(to, from - to));
    }
  }
};

// Where a piece starts and stops. Pieces follow one another, except that whitespace may be in several: moving each end
// from where it was takes linear time even then.
struct PiecePlaces {
  Place start, stop;

  void move(std::string_view text, const AddedTokenFinder::Piece& piece) {
    if (piece.start >= stop.bytes) start = stop;
    start.move(text, piece.start);
    stop.move(text, piece.stop);
  }
};

// Calls word(start, stop) for each word of the code points: split at whitespace, around punctuation.
template <typename Function>
void for_each_word(const std::vector<char32_t>& chars, std::size_t start, std::size_t stop, Function word) {
  std::size_t begin = start;
  for (std::size_t i = start; i < stop; ++i) {
    const CharClass type = classify(chars[i]);
    if (type == CharClass::kWord) continue;
    if (begin < i) word(begin, i);
    if (type == CharClass::kPunctuation) word(i, i + 1);
    begin = i + 1;
  }
  if (begin < stop) word(begin, stop);
}

}  // namespace

Tokenizer::Tokenizer(const std::vector<std::string_view>& vocab, TokenizerOptions options)
    : options_(std::move(options)),
      unk_id_(find_unk(vocab, options_)),
      vocab_(vocab, options_.continuing_prefix, options_.max_word_chars),
      chars_(options_.normalizer, char_tokens(vocab, options_.max_word_chars), unk_id_),
      ascii_(ascii_classes(chars_)),
      raw_tokens_(raw_ones(options_.added_tokens)),
      normalized_tokens_(normalized_ones(options_)) {
  for (const std::string& word : options_.never_split) {
    const std::int32_t id = Vocab::find_token(vocab, word);
    never_split_.emplace(word, id >= 0 ? id : unk_id_);
  }
  // A cut must not go through an added token, nor through the whitespace that one takes along.
  for (const AddedToken& token : options_.added_tokens) {
    const NormalizedText content = decode(token.content, 0);
    const auto any = [&](auto&& test) { return std::any_of(content.chars.begin(), content.chars.end(), test); };
    if (token.normalized || token.lstrip || token.rstrip || any(is_whitespace)) can_cut_at_space_ = false;
    if (token.normalized || any([](char32_t c) { return c >= 0x80; })) can_cut_at_cjk_ = false;
  }
  if (!never_split_.empty()) can_cut_at_space_ = can_cut_at_cjk_ = false;
}

bool Tokenizer::can_cut(char32_t before, char32_t after) const {
  const CharEntry left = chars_[before], right = chars_[after];
  if (left.has(CharEntry::kEndsWithMark | CharEntry::kInvisible)) return false;
  if (right.has(CharEntry::kStartsWithMark | CharEntry::kInvisible)) return false;
  if (left.action() == CharAction::kSpace) return can_cut_at_space_;
  return can_cut_at_cjk_ && options_.normalizer.handle_chinese_chars && is_cjk(before) && is_cjk(after);
}

void Tokenizer::encode(const TextView& text, const EncodeOptions& wanted, Scratch& scratch, Tokens& out,
                       std::uint32_t first_source) const {
  if (wanted.offsets && text.length > static_cast<std::size_t>(std::numeric_limits<std::int32_t>::max())) {
    throw std::length_error("texts: expected at most 2147483647 characters in a text with offsets, got " +
                            std::to_string(text.length));
  }
  const std::size_t first = out.ids.size();
  if (wanted.offsets) {
    encode_form<true>(text, first_source, wanted, scratch, out);
  } else {
    encode_form<false>(text, first_source, wanted, scratch, out);
  }
  if (out.ids.size() - first <= wanted.max_tokens) return;
  out.ids.truncate(first + wanted.max_tokens);
  out.offsets.truncate(2 * out.ids.size());
  out.word_ids.truncate(out.ids.size());
}

template <bool kOffsets>
void Tokenizer::encode_form(const TextView& text, std::uint32_t first_source, const EncodeOptions& wanted,
                            Scratch& scratch, Tokens& out) const {
  const bool in_stages = options_.stage_by_stage || !normalized_tokens_.empty() || !never_split_.empty();
  const auto is_plain = [&](const auto* units) { return !in_stages && !raw_tokens_.may_occur(units, text.length); };
  switch (text.form) {
    case TextView::Form::kUcs1:
      if (!is_plain(static_cast<const std::uint8_t*>(text.data))) break;
      return encode_units<Latin1Units, kOffsets>(text, first_source, wanted, scratch, out);
    case TextView::Form::kUcs2:
      if (!is_plain(static_cast<const std::uint16_t*>(text.data))) break;
      return encode_units<Ucs2Units, kOffsets>(text, first_source, wanted, scratch, out);
    case TextView::Form::kUcs4:
      if (!is_plain(static_cast<const std::uint32_t*>(text.data))) break;
      return encode_units<Ucs4Units, kOffsets>(text, first_source, wanted, scratch, out);
    case TextView::Form::kAscii:
    case TextView::Form::kUtf8:
      break;
  }
  encode_text<kOffsets>(to_utf8(text, scratch.utf8), first_source, wanted, scratch, out);
}

// A text in which no added token occurs.
template <typename Units, bool kOffsets>
void Tokenizer::encode_units(const TextView& text, std::uint32_t first_source, const EncodeOptions& wanted,
                             Scratch& scratch, Tokens& out) const {
  WordSink<kOffsets> sink(vocab_, unk_id_, options_.max_word_chars, wanted.word_ids, out);
  const TextRules rules = {chars_, ascii_, options_.normalizer, kernels(), options_.max_word_chars};
  TextEncoder<Units, kOffsets>(rules, scratch.area, scratch.marks, sink)
      .encode(static_cast<const typename Units::Unit*>(text.data), text.length, first_source, token_limit(out, wanted));
}

template <bool kOffsets>
void Tokenizer::encode_text(std::string_view text, std::uint32_t first_source, const EncodeOptions& wanted,
                            Scratch& scratch, Tokens& out) const {
  WordSink<kOffsets> sink(vocab_, unk_id_, options_.max_word_chars, wanted.word_ids, out);
  const TextRules rules = {chars_, ascii_, options_.normalizer, kernels(), options_.max_word_chars};
  const std::size_t max_tokens = token_limit(out, wanted);
  const bool in_stages = options_.stage_by_stage || !normalized_tokens_.empty() || !never_split_.empty();
  PiecePlaces places;  // moved only for those who ask
  raw_tokens_.split(text, [&](const AddedTokenFinder::Piece& piece) {
    const std::string_view part = text.substr(piece.start, piece.stop - piece.start);
    if (kOffsets) places.move(text, piece);
    const std::uint32_t source = first_source + static_cast<std::uint32_t>(places.start.chars);
    if (piece.id >= 0) {
      sink.token(piece.id, source, first_source + static_cast<std::uint32_t>(places.stop.chars) - 1);
    } else if (in_stages) {
      encode_stages(part, source, sink);
    } else {
      TextEncoder<Utf8Units, kOffsets>(rules, scratch.area, scratch.marks, sink)
          .encode(reinterpret_cast<const unsigned char*>(part.data()), part.size(), source, max_tokens);
    }
  });
}

template <bool kOffsets>
void Tokenizer::encode_stages(std::string_view text, std::uint32_t first_source, WordSink<kOffsets>& sink) const {
  const NormalizedText cleaned = clean(decode(text, first_source), options_.normalizer);
  if (never_split_.empty()) return encode_cleaned(cleaned, sink);
  std::size_t done = 0;
  for (std::size_t start = 0, stop; start < cleaned.size(); start = stop + 1) {
    for (stop = start; stop < cleaned.size() && !is_whitespace(cleaned.chars[stop]);) ++stop;
    if (start == stop) continue;
    const auto kept = never_split_.find(slice(cleaned, start, stop).to_utf8());
    if (kept == never_split_.end()) continue;
    encode_cleaned(slice(cleaned, done, start), sink);
    sink.token(kept->second, cleaned.sources[start], cleaned.sources[stop - 1]);
    done = stop;
  }
  encode_cleaned(slice(cleaned, done, cleaned.size()), sink);
}

template <bool kOffsets>
void Tokenizer::encode_cleaned(const NormalizedText& cleaned, WordSink<kOffsets>& sink) const {
  const NormalizedText text = fold(cleaned, options_.normalizer);
  if (normalized_tokens_.empty()) return encode_normalized(text, sink);
  const std::string utf8 = text.to_utf8();
  PiecePlaces places;
  normalized_tokens_.split(utf8, [&](const AddedTokenFinder::Piece& piece) {
    places.move(utf8, piece);
    const std::size_t start = places.start.chars, stop = places.stop.chars;
    if (piece.id >= 0) {
      sink.token(piece.id, text.sources[start], text.sources[stop - 1]);
    } else {
      encode_normalized(slice(text, start, stop), sink);
    }
  });
}

template <bool kOffsets>
void Tokenizer::encode_normalized(const NormalizedText& text, WordSink<kOffsets>& sink) const {
  std::string word;
  std::vector<std::uint32_t> sources;
  FoundWords found;
  for_each_word(text.chars, 0, text.size(), [&](std::size_t start, std::size_t stop) {
    word.clear();
    sources.clear();
    for (std::size_t i = start; i < stop; ++i) {
      append_utf8(text.chars[i], word);
      if (text.chars[i] == 0) word.back() = kNulByte;
      sources.resize(word.size(), text.sources[i]);
    }
    sink.word(kernels(), word, sources.data(), found);
  });
}

std::string Tokenizer::normalize(std::string_view utf8) const {
  return normalize_stages(utf8, 0, options_.normalizer).to_utf8();
}

std::vector<Tokenizer::Word> Tokenizer::pre_tokenize(std::string_view utf8) {
  std::vector<char32_t> chars;
  std::vector<std::size_t> starts;  // in bytes, of each code point and of the end
  for (const char *p = utf8.data(), *end = p + utf8.size(); p < end;) {
    starts.push_back(static_cast<std::size_t>(p - utf8.data()));
    chars.push_back(decode_utf8(p));
  }
  starts.push_back(utf8.size());
  std::vector<Word> words;
  for_each_word(chars, 0, chars.size(), [&](std::size_t start, std::size_t stop) {
    words.push_back({std::string(utf8.substr(starts[start], starts[stop] - starts[start])), start, stop});
  });
  return words;
}

}  // namespace bert_fast::wordpiece
