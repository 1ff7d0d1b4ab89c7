// The quick way of a tokenizer: a text is taken apart at its spaces, and what became of a word is looked up.

#include <cstdint>
#include <cstring>
#include <string_view>

#include "unigram/sink.h"
#include "unigram/tokenizer.h"
#include "wordpiece/utf8.h"

namespace bert_fast::unigram {
namespace {

constexpr std::size_t kKeptWordBytes = 1 << 16;  // what longer words need is not kept
constexpr std::size_t kAhead = 16;               // words that are looked for before the first of them is looked up

}  // namespace

Tokenizer::Memory& Tokenizer::memory() {
  thread_local Memory mine;
  return mine;
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
  while (strips_start_ && !text.empty()) {
    const char* p = text.data();
    if (!wordpiece::is_whitespace(wordpiece::decode_utf8(p))) break;
    text.remove_prefix(static_cast<std::size_t>(p - text.data()));
    ++first_source;
  }
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
        next.place = WordCache::place_of(next.key);
        cache.prefetch(next.place);
      }
      at = end;
    }
    for (std::size_t i = 0; i < count; ++i) {
      const auto& [word, key, place] = ahead[i];
      if (word.size() > WordKey::kMostBytes) {
        encode_new_word(word, first_source, mine, sink);
        if (word.size() > kKeptWordBytes) mine.forget_words();
      } else if (cache.holds(place, key, serial) || learn_word(word, key, place, mine)) {
        sink.known_word(cache.entry(place), cache.places(place), first_source);
      } else {
        encode_new_word(word, first_source, mine, sink);
      }
      if (sink.wants_offsets()) first_source += static_cast<std::uint32_t>(wordpiece::count_code_points(word));
    }
  }
}

void Tokenizer::encode_new_word(std::string_view word, std::uint32_t first_source, Memory& mine, Sink& sink) const {
  if (!encode_plain_word(word, first_source, mine, sink)) encode_whole(word, first_source, sink, false);
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
  encode_new_word(word, 0, mine, sink);
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

// A word of characters that normalization leaves as they are and that nothing is cut out of, behind at most one space;
// false if it is something else.
bool Tokenizer::encode_plain_word(std::string_view text, std::uint32_t first_source, Memory& mine, Sink& sink) const {
  const auto first = static_cast<unsigned char>(text[0]);
  const std::size_t begin = first < 0x80 && spaces_[first] ? 1 : 0;
  if (begin == text.size()) return false;
  bool is_ascii = true;
  for (const char *p = text.data() + begin, *end = text.data() + text.size(); p < end;) {
    const auto byte = static_cast<unsigned char>(*p);
    if (byte < 0x80) {
      if (!word_ascii_[byte]) return false;
      ++p;
    } else {
      const char32_t c = wordpiece::decode_utf8(p);
      if (!is_plain_letter(c) || c == options_.replacement) return false;
      if (options_.split_punctuation && wordpiece::is_punctuation(c)) return false;
      is_ascii = false;
    }
  }
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

}  // namespace bert_fast::unigram
