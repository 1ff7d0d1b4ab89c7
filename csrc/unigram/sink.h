// What the ways of a tokenizer have in common: where tokens are written to, and what a thread keeps from text to text.
#pragma once

#include <cstdint>
#include <cstring>
#include <string>
#include <vector>

#include "unigram/tokenizer.h"

namespace bert_fast::unigram {

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

// Where tokens are written to.
class Tokenizer::Sink {
 public:
  Sink(const EncodeOptions& wanted, Tokens& out) : wanted_(wanted), out_(out) {}

  bool wants_places() const { return wanted_.offsets || wanted_.word_ids; }
  bool wants_offsets() const { return wanted_.offsets; }
  std::size_t num_tokens() const { return out_.ids.size(); }
  std::int32_t num_words() const { return word_; }

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

}  // namespace bert_fast::unigram
