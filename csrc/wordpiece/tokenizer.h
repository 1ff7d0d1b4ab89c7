// BERT's tokenizer: BertNormalizer, BertPreTokenizer and WordPiece of Hugging Face `tokenizers`, in one pass.
//
//     text -> cut out added tokens -> normalize -> cut out added tokens that match normalized text
//          -> split at whitespace, around punctuation -> longest pieces first -> ids
//
// Two ways lead through this. The usual one (text_encoder.h) reads ASCII in blocks and looks other code points up in a
// table that holds the outcome of normalization and splitting; it never stores more than a few KB of normalized text.
// Tokenizers with `never_split` words or with added tokens that match normalized text take the other (tokenizer.cpp):
// stage by stage.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "wordpiece/added_tokens.h"
#include "wordpiece/char_table.h"
#include "wordpiece/kernels.h"
#include "wordpiece/normalizer.h"
#include "wordpiece/text_encoder.h"
#include "wordpiece/text_tokenizer.h"
#include "wordpiece/utf8.h"
#include "wordpiece/vocab.h"
#include "wordpiece/word_sink.h"

namespace bert_fast::wordpiece {

struct TokenizerOptions {
  NormalizerOptions normalizer;
  std::string unk_token = "[UNK]";
  std::string continuing_prefix = "##";
  std::size_t max_word_chars = 100;  // code points after normalization; longer words are unknown
  std::vector<AddedToken> added_tokens;
  // Words that are looked up as they are when they stand between whitespace in the cleaned text: neither lower-cased
  // nor stripped of accents nor split.
  std::vector<std::string> never_split;
  bool stage_by_stage = false;  // always take the slow way (for tests: both must agree)
};

// Immutable after construction; every method may be called from several threads at once.
class Tokenizer final : public TextTokenizer {
 public:
  // `vocab` and its strings (valid UTF-8) are needed during construction only. Throws std::invalid_argument.
  Tokenizer(const std::vector<std::string_view>& vocab, TokenizerOptions options);

  void encode(const TextView& text, const EncodeOptions& wanted, Scratch& scratch, Tokens& out,
              std::uint32_t first_source = 0) const override;

  // Behind whitespace, and between two ideographs.
  bool can_cut(char32_t before, char32_t after) const override;

  std::string normalize(std::string_view utf8) const override;

  // Splits at whitespace and around punctuation.
  std::vector<Word> split_words(std::string_view utf8) const override { return pre_tokenize(utf8); }
  static std::vector<Word> pre_tokenize(std::string_view utf8);

 private:
  template <bool kOffsets>
  void encode_form(const TextView& text, std::uint32_t first_source, const EncodeOptions& wanted, Scratch& scratch,
                   Tokens& out) const;
  template <typename Units, bool kOffsets>
  void encode_units(const TextView& text, std::uint32_t first_source, const EncodeOptions& wanted, Scratch& scratch,
                    Tokens& out) const;
  template <bool kOffsets>
  void encode_text(std::string_view text, std::uint32_t first_source, const EncodeOptions& wanted, Scratch& scratch,
                   Tokens& out) const;
  template <bool kOffsets>
  void encode_stages(std::string_view text, std::uint32_t first_source, WordSink<kOffsets>& sink) const;
  template <bool kOffsets>
  void encode_cleaned(const NormalizedText& cleaned, WordSink<kOffsets>& sink) const;
  template <bool kOffsets>
  void encode_normalized(const NormalizedText& text, WordSink<kOffsets>& sink) const;

  TokenizerOptions options_;
  std::int32_t unk_id_;
  Vocab vocab_;
  CharTable chars_;
  AsciiClasses ascii_;
  AddedTokenFinder raw_tokens_;
  AddedTokenFinder normalized_tokens_;
  std::unordered_map<std::string, std::int32_t> never_split_;
  bool can_cut_at_space_ = true;
  bool can_cut_at_cjk_ = true;
};

}  // namespace bert_fast::wordpiece
