// What the batch, the padded rows and the bindings need of a tokenizer, whatever its model is.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "wordpiece/normalizer.h"
#include "wordpiece/text_encoder.h"
#include "wordpiece/utf8.h"
#include "wordpiece/word_sink.h"

namespace bert_fast::wordpiece {

struct EncodeOptions {
  bool offsets = false;
  bool word_ids = false;
  std::size_t max_tokens = static_cast<std::size_t>(-1);  // of each text; what follows them is left out, often unread
};

// Memory that is reused from text to text; one per thread.
struct Scratch {
  std::string utf8;  // the text, where its own units do not serve
  WorkArea area;
  MarkRun marks;
};

// Immutable after construction; every method may be called from several threads at once.
class TextTokenizer {
 public:
  struct Word {
    std::string text;
    std::size_t start;  // code points
    std::size_t stop;
  };

  virtual ~TextTokenizer() = default;

  // Appends the tokens of one text. Adds no special tokens. Offsets count from first_source (for a part of a longer
  // text), word ids from 0. Throws std::length_error if the text has more units than an offset can count.
  virtual void encode(const TextView& text, const EncodeOptions& wanted, Scratch& scratch, Tokens& out,
                      std::uint32_t first_source = 0) const = 0;

  // Whether a text may be cut between these two code points, wherever they stand side by side, and its parts be encoded
  // apart with the same result.
  virtual bool can_cut(char32_t before, char32_t after) const = 0;

  // Whether can_cut holds for what is wanted.
  virtual bool cuts_texts(const EncodeOptions& /*wanted*/) const { return true; }

  // The text as the vocabulary is matched against it.
  virtual std::string normalize(std::string_view utf8) const = 0;

  // The words of a text that is not normalized first, and where they stand.
  virtual std::vector<Word> split_words(std::string_view utf8) const = 0;
};

}  // namespace bert_fast::wordpiece
