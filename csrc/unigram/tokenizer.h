// The tokenizer of XLM-R and its relatives: a character map, words after "▁", and a unigram model, as Hugging Face
// `tokenizers` runs them.
//
//     text -> cut out added tokens -> normalize -> cut out added tokens that match normalized text
//          -> split at whitespace and put "▁" in front -> most probable pieces -> ids
//
// Where normalization does not reach across a space, a text is taken apart there first, and what its words become is
// kept by thread (word_cache.h).
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "unigram/model.h"
#include "unigram/normalizer.h"
#include "unigram/word_cache.h"
#include "wordpiece/added_tokens.h"
#include "wordpiece/text_tokenizer.h"

namespace bert_fast::unigram {

using wordpiece::AddedToken;
using wordpiece::EncodeOptions;
using wordpiece::Scratch;
using wordpiece::TextView;
using wordpiece::Tokens;

enum class Prepend { kAlways, kFirst, kNever };

struct TokenizerOptions {
  ModelOptions model;
  std::string charsmap;  // bytes; empty: no step is kCharsmap
  std::vector<NormalizerStep> steps;
  bool whitespace_split = true;        // split at whitespace before anything else
  bool split_punctuation = false;      // each punctuation character is a word of its own
  char32_t replacement = 0x2581;       // takes the place of spaces
  Prepend prepend = Prepend::kAlways;  // whether it is put in front of words (of the first one of the text) without it
  bool split = true;                   // whether words start at each of them
  std::vector<AddedToken> added_tokens;
  bool whole_texts = false;  // never take texts apart first (for tests: both ways must agree)
};

class Tokenizer final : public wordpiece::TextTokenizer {
 public:
  // `vocab` and its strings (valid UTF-8) are needed during construction only. Throws std::invalid_argument.
  Tokenizer(const std::vector<std::string_view>& vocab, const std::vector<double>& scores, TokenizerOptions options);

  void encode(const TextView& text, const EncodeOptions& wanted, Scratch& scratch, Tokens& out,
              std::uint32_t first_source = 0) const override;
  bool can_cut(char32_t before, char32_t after) const override;
  bool cuts_texts(const EncodeOptions& wanted) const override;
  std::string normalize(std::string_view utf8) const override;
  std::vector<Word> split_words(std::string_view utf8) const override;

 private:
  class Sink;
  struct Memory;
  static Memory& memory();

  bool is_plain_letter(char32_t c) const;
  bool is_border(std::string_view text, std::size_t at) const;
  void encode_words(std::string_view text, std::uint32_t first_source, std::size_t max_tokens, Sink& sink) const;
  void encode_whole(std::string_view text, std::uint32_t first_source, Sink& sink, bool strips_left = true) const;
  void encode_normalized(const MappedText& text, std::size_t begin, std::size_t end, Sink& sink) const;
  template <typename Function>
  void for_each_word(const MappedText& text, std::size_t begin, std::size_t end, Function word) const;
  void encode_new_word(std::string_view word, std::uint32_t first_source, Memory& mine, Sink& sink) const;
  bool learn_word(std::string_view word, const WordKey& key, std::size_t place, Memory& mine) const;
  bool encode_plain_word(std::string_view text, std::uint32_t first_source, Memory& mine, Sink& sink) const;
  std::size_t find_word_end(std::string_view text, std::size_t from) const;

  TokenizerOptions options_;
  Normalizer normalizer_;
  Model model_;
  wordpiece::AddedTokenFinder raw_tokens_;
  wordpiece::AddedTokenFinder normalized_tokens_;
  std::string prefix_;          // the replacement as UTF-8
  bool plain_ascii_[128] = {};  // characters of words that stay what they are
  bool word_ascii_[128] = {};   // those of them that words are not split at, and no added token starts with
  bool spaces_[128] = {};       // whitespace in front of which texts may be cut, behind a character that stays
  bool can_cut_ = false;
  bool strips_start_ = false;  // of each text, before it is cut
  std::uint64_t serial_;       // of this tokenizer among all, for caches
};

}  // namespace bert_fast::unigram
