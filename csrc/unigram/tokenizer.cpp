#include "unigram/tokenizer.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <limits>
#include <stdexcept>
#include <utility>

#include "unigram/graphemes.h"
#include "unigram/word_cache.h"
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

constexpr std::size_t kKeptWordBytes = 1 << 16;  // what longer words need is not kept
constexpr std::size_t kAhead = 16;               // words that are looked for before the first of them is looked up

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

// Whether no step looks at both sides of a border between a character that stays what it is and a space behind it.
bool is_local(const TokenizerOptions& options, const std::string& prefix) {
  for (const NormalizerStep& step : options.steps) {
    switch (step.kind) {
      case NormalizerStep::Kind::kCharsmap:
        break;
      case NormalizerStep::Kind::kStrip:
        if (step.left && !options.whitespace_split) return false;
        break;
      case NormalizerStep::Kind::kReplaceText:
        return false;
      case NormalizerStep::Kind::kReplaceSpaces:
        // At the end of a text it leaves a word of its own; elsewhere both go before the next word.
        if (step.least < 2) return false;
        if (step.content != " " && step.content != prefix) return false;
        break;
    }
  }
  return true;
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

// What a thread keeps from text to text.
struct Tokenizer::Memory {
  Model::Lattice lattice;
  std::string word;
  std::vector<std::uint32_t> places;  // of each byte of a word: the character that it belongs to
  Tokens found;
  WordCache cache;

  void forget_words() {
    lattice = {};
    word = {};
    places = {};
  }
};

Tokenizer::Memory& Tokenizer::memory() {
  thread_local Memory mine;
  return mine;
}

// Where tokens are written to.
class Tokenizer::Sink {
 public:
  Sink(const EncodeOptions& wanted, Tokens& out) : wanted_(wanted), out_(out) {}

  bool wants_places() const { return wanted_.offsets || wanted_.word_ids; }
  bool wants_offsets() const { return wanted_.offsets; }
  std::size_t num_tokens() const { return out_.ids.size(); }
  std::int32_t num_words() const { return word_; }
  Tokens& out() { return out_; }

  void token(std::int32_t id, std::uint32_t start, std::uint32_t stop) {
    out_.ids.push_back(id);
    if (wanted_.offsets) {
      std::int32_t* places = out_.offsets.room(2);
      places[0] = static_cast<std::int32_t>(start);
      places[1] = static_cast<std::int32_t>(stop);
      out_.offsets.commit(2);
    }
    if (wanted_.word_ids) out_.word_ids.push_back(word_);
  }
  void finish_word() { ++word_; }
  // What is kept of a word that starts at this code point.
  void known_word(const WordCache::Entry& entry, const WordCache::Places& places, std::uint32_t start) {
    if (!wants_places()) {
      std::memcpy(out_.ids.room(WordCache::kMostTokens), entry.ids, sizeof(entry.ids));
      out_.ids.commit(entry.num_tokens);
      return;
    }
    const std::int32_t first_word = word_;
    for (std::size_t i = 0; i < entry.num_tokens; ++i) {
      word_ = first_word + places.words[i];
      token(entry.ids[i], start + places.starts[i], start + places.stops[i]);
    }
    word_ = first_word + entry.num_words;
  }

 private:
  const EncodeOptions& wanted_;
  Tokens& out_;
  std::int32_t word_ = 0;
};

Tokenizer::Tokenizer(const std::vector<std::string_view>& vocab, const std::vector<double>& scores,
                     TokenizerOptions options)
    : options_(std::move(options)),
      normalizer_(options_.charsmap.empty() ? Charsmap() : Charsmap(options_.charsmap), options_.steps),
      model_(vocab, scores, options_.model),
      raw_tokens_(raw_ones(options_.added_tokens)),
      normalized_tokens_(normalized_ones(options_.added_tokens, normalizer_)),
      serial_(next_serial()) {
  wordpiece::append_utf8(options_.replacement, prefix_);
  for (unsigned char c = 0x21; c < 0x7F; ++c) plain_ascii_[c] = normalizer_.is_plain(c);
  can_cut_ = options_.prepend == Prepend::kAlways && options_.split && is_local(options_, prefix_) &&
             normalized_tokens_.empty();
  // A cut must not go through an added token, nor through the whitespace that one takes along from behind.
  for (const AddedToken& token : options_.added_tokens) {
    const auto has_space = [](std::string_view content) {
      for (const char *p = content.data(), *end = p + content.size(); p < end;) {
        if (wordpiece::is_whitespace(wordpiece::decode_utf8(p))) return true;
      }
      return false;
    };
    if (token.rstrip || has_space(token.content)) can_cut_ = false;
  }
  // In front of a space, and of whitespace that becomes one or separates words itself.
  for (unsigned char c = 0; can_cut_ && c < 0x80; ++c) {
    if (c != ' ' && !(wordpiece::is_whitespace(c) && breaks_clusters(c))) continue;
    const auto becomes = normalizer_.replacement_of(c);
    spaces_[c] = becomes ? *becomes == " " : !normalizer_.joins(c) && (c == ' ' || options_.whitespace_split);
  }
}

bool Tokenizer::is_plain_letter(char32_t c) const { return normalizer_.is_plain(c) && !wordpiece::is_whitespace(c); }

bool Tokenizer::can_cut(char32_t before, char32_t after) const {
  return can_cut_ && after < 0x80 && spaces_[after] && is_plain_letter(before);
}

// What is removed in front of a text shifts all its offsets, behind cuts as well.
bool Tokenizer::cuts_texts(const EncodeOptions& wanted) const {
  return can_cut_ && !(wanted.offsets && normalizer_.removes());
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

// Whether a text may be cut in front of this byte, which is not the first one.
bool Tokenizer::is_border(std::string_view text, std::size_t at) const {
  const auto byte = static_cast<unsigned char>(text[at]);
  if (byte >= 0x80 || !spaces_[byte]) return false;
  const auto before = static_cast<unsigned char>(text[at - 1]);
  if (before < 0x80) return plain_ascii_[before];
  std::size_t start = at - 1;
  while ((static_cast<unsigned char>(text[start]) & 0xC0) == 0x80) --start;
  const char* p = text.data() + start;
  return is_plain_letter(wordpiece::decode_utf8(p));
}

// The next place from `from` on (which is at least 1) where the text may be cut.
std::size_t Tokenizer::find_word_end(std::string_view text, std::size_t from) const {
  constexpr std::uint64_t kOnes = 0x0101010101010101;
  std::size_t i = from;
  while (i + 8 <= text.size()) {
    std::uint64_t bytes;
    std::memcpy(&bytes, text.data() + i, 8);
    // The highest bit of the bytes up to a space; above the lowest of them it may be set for others, too.
    const std::uint64_t low = (bytes - 0x21 * kOnes) & ~bytes & (0x80 * kOnes);
    if (low == 0) {
      i += 8;
      continue;
    }
    i += static_cast<std::size_t>(__builtin_ctzll(low)) / 8;
    if (is_border(text, i)) return i;
    ++i;
  }
  while (i < text.size() && !is_border(text, i)) ++i;
  return i;
}

// A text without added tokens, word by word, each with what stands in front of it.
void Tokenizer::encode_words(std::string_view text, std::uint32_t first_source, std::size_t max_tokens,
                             Sink& sink) const {
  if (sink.wants_offsets() && normalizer_.removes() && !text.empty()) {
    const char* p = text.data();
    if (!normalizer_.is_plain(wordpiece::decode_utf8(p))) return encode_whole(text, first_source, sink);
  }
  Memory& mine = memory();
  WordCache& cache = mine.cache;
  const auto serial = static_cast<std::uint32_t>(serial_);
  struct Ahead {
    std::string_view word;
    WordKey key;
    std::size_t place = 0;
  };
  Ahead ahead[kAhead];  // words whose places in the cache are on their way
  for (std::size_t at = 0; at < text.size() && sink.num_tokens() < max_tokens;) {
    std::size_t count = 0;
    for (; count < kAhead && at < text.size(); ++count) {
      Ahead& next = ahead[count];
      const std::size_t end = find_word_end(text, at + 1);
      next.word = text.substr(at, end - at);
      if (next.word.size() <= WordKey::kMostBytes) {
        next.key =
            at + sizeof(WordKey) <= text.size() ? WordKey(text.data() + at, next.word.size()) : WordKey(next.word);
        next.place = WordCache::place_of(next.key, serial);
        cache.prefetch(next.place);
      }
      at = end;
    }
    for (std::size_t i = 0; i < count; ++i) {
      const auto& [word, key, place] = ahead[i];
      if (word.size() > WordKey::kMostBytes) {
        encode_new_word(word, first_source, sink);
        if (word.size() > kKeptWordBytes) mine.forget_words();
      } else if (cache.holds(place, key, serial) || learn_word(word, key, place, mine)) {
        sink.known_word(cache.entry(place), cache.places(place), first_source);
      } else {
        encode_new_word(word, first_source, sink);
      }
      if (sink.wants_offsets()) first_source += static_cast<std::uint32_t>(wordpiece::count_code_points(word));
    }
  }
}

void Tokenizer::encode_new_word(std::string_view word, std::uint32_t first_source, Sink& sink) const {
  if (!encode_plain_word(word, first_source, sink)) encode_whole(word, first_source, sink);
}

// Enters a word that is not at the first of its places there; false if it has too many tokens.
bool Tokenizer::learn_word(std::string_view word, const WordKey& key, std::size_t place, Memory& mine) const {
  if (mine.cache.holds(place + 1, key, static_cast<std::uint32_t>(serial_))) {
    mine.cache.swap(place);
    return true;
  }
  Tokens& found = mine.found;
  found.ids.clear();
  found.offsets.clear();
  found.word_ids.clear();
  constexpr EncodeOptions kAll = {true, true};
  Sink sink(kAll, found);
  encode_new_word(word, 0, sink);
  const std::size_t size = found.ids.size();
  if (size > WordCache::kMostTokens) return false;
  mine.cache.push_back(place);
  WordCache::Entry& entry = mine.cache.entry(place);
  WordCache::Places& places = mine.cache.places(place);
  entry.key = key;
  entry.serial = static_cast<std::uint32_t>(serial_);
  entry.num_tokens = static_cast<std::uint8_t>(size);
  entry.num_words = static_cast<std::uint8_t>(sink.num_words());
  for (std::size_t i = 0; i < size; ++i) {
    entry.ids[i] = found.ids[i];
    places.starts[i] = static_cast<std::uint8_t>(found.offsets[2 * i]);
    places.stops[i] = static_cast<std::uint8_t>(found.offsets[2 * i + 1]);
    places.words[i] = static_cast<std::uint8_t>(found.word_ids[i]);
  }
  return true;
}

// A word of characters that normalization leaves as they are, behind at most one space; false if it is something else.
bool Tokenizer::encode_plain_word(std::string_view text, std::uint32_t first_source, Sink& sink) const {
  const auto first = static_cast<unsigned char>(text[0]);
  const std::size_t begin = first < 0x80 && spaces_[first] ? 1 : 0;
  if (begin == text.size()) return false;
  bool is_ascii = true;
  for (const char *p = text.data() + begin, *end = text.data() + text.size(); p < end;) {
    const auto byte = static_cast<unsigned char>(*p);
    if (byte < 0x80) {
      if (!plain_ascii_[byte] || byte == options_.replacement) return false;
      ++p;
    } else {
      const char32_t c = wordpiece::decode_utf8(p);
      if (!is_plain_letter(c) || c == options_.replacement) return false;
      is_ascii = false;
    }
  }
  Memory& mine = memory();
  mine.word = prefix_;
  mine.word += text.substr(begin);
  model_.split(mine.word, mine.lattice);
  // The prefix stands for the space where that is kept, else for the first letter.
  const std::size_t prefix_place = begin == 1 && !options_.whitespace_split ? 0 : begin;
  const auto count = [&](std::size_t from, std::size_t to) {
    return is_ascii ? to - from : wordpiece::count_code_points(std::string_view(mine.word).substr(from, to - from));
  };
  std::size_t byte = prefix_.size(), chars = begin;  // as far as characters were counted
  for (const Model::Piece& piece : mine.lattice.pieces) {
    std::size_t start = prefix_place, stop = prefix_place + 1;
    if (piece.start >= prefix_.size()) {
      chars += count(byte, piece.start);
      byte = piece.start;
      start = chars;
    }
    if (piece.stop > prefix_.size()) stop = chars + count(byte, piece.stop);
    sink.token(piece.id, first_source + static_cast<std::uint32_t>(start),
               first_source + static_cast<std::uint32_t>(stop));
  }
  sink.finish_word();
  return true;
}

void Tokenizer::encode_whole(std::string_view text, std::uint32_t first_source, Sink& sink) const {
  MappedText mapped = map_text(text, first_source);
  normalizer_.apply(mapped, first_source);
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

void Tokenizer::encode_normalized(const MappedText& text, std::size_t begin, std::size_t end, Sink& sink) const {
  if (!options_.whitespace_split) return encode_word(text, begin, end, sink);
  for (std::size_t start = begin, stop; start < end; start = stop + 1) {
    for (stop = start; stop < end && !wordpiece::is_whitespace(text.chars[stop]);) ++stop;
    encode_word(text, start, stop, sink);
  }
}

// What stands between whitespace (or a whole text): spaces become the replacement, one is put in front, and each of
// them starts a word.
void Tokenizer::encode_word(const MappedText& text, std::size_t begin, std::size_t end, Sink& sink) const {
  if (begin == end) return;
  const auto is_mark = [&](char32_t c) { return c == ' ' || c == options_.replacement; };
  const bool wants_prefix =
      options_.prepend == Prepend::kAlways || (options_.prepend == Prepend::kFirst && text.starts[begin] == 0);
  bool has_prefix = wants_prefix && !is_mark(text.chars[begin]);
  Memory& mine = memory();
  for (std::size_t start = begin, stop; start < end; start = stop) {
    stop = start + 1;
    while (stop < end && !(options_.split && is_mark(text.chars[stop]))) ++stop;
    mine.word.clear();
    mine.places.clear();
    if (has_prefix) {
      mine.word = prefix_;
      mine.places.assign(prefix_.size(), static_cast<std::uint32_t>(start));
      has_prefix = false;
    }
    for (std::size_t i = start; i < stop; ++i) {
      wordpiece::append_utf8(text.chars[i] == ' ' ? options_.replacement : text.chars[i], mine.word);
      mine.places.resize(mine.word.size(), static_cast<std::uint32_t>(i));
    }
    model_.split(mine.word, mine.lattice);
    for (const Model::Piece& piece : mine.lattice.pieces) {
      sink.token(piece.id, text.starts[mine.places[piece.start]], text.stops[mine.places[piece.stop - 1]]);
    }
    sink.finish_word();
  }
}

std::string Tokenizer::normalize(std::string_view utf8) const {
  MappedText text = map_text(utf8, 0);
  normalizer_.apply(text, 0);
  return to_utf8(text, 0, text.size());
}

std::vector<Tokenizer::Word> Tokenizer::split_words(std::string_view utf8) const {
  const MappedText text = map_text(utf8, 0);
  std::vector<Word> words;
  const auto add = [&](std::size_t begin, std::size_t end) {
    const auto is_mark = [&](std::size_t i) { return text.chars[i] == ' ' || text.chars[i] == options_.replacement; };
    for (std::size_t start = begin, stop; start < end; start = stop) {
      for (stop = start + 1; stop < end && !(options_.split && is_mark(stop));) ++stop;
      Word word{"", start, stop};
      const bool wants_prefix =
          options_.prepend == Prepend::kAlways || (options_.prepend == Prepend::kFirst && start == 0);
      if (start == begin && wants_prefix && !is_mark(start)) word.text = prefix_;
      for (std::size_t i = start; i < stop; ++i) {
        wordpiece::append_utf8(text.chars[i] == ' ' ? options_.replacement : text.chars[i], word.text);
      }
      words.push_back(std::move(word));
    }
  };
  if (!options_.whitespace_split) {
    add(0, text.size());
    return words;
  }
  for (std::size_t start = 0, stop; start < text.size(); start = stop + 1) {
    for (stop = start; stop < text.size() && !wordpiece::is_whitespace(text.chars[stop]);) ++stop;
    add(start, stop);
  }
  return words;
}

}  // namespace bert_fast::unigram
