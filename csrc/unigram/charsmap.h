// The character map of a SentencePiece model: which short sequences of characters are replaced by what.
//
// Format: the size of a trie in bytes (32 bits, little-endian); the trie, a double array of 32-bit units as the
// darts-clone library keeps it; the replacements, each ended by a zero byte. A unit holds a byte (the label), the way
// to its children, and whether a key ends there; the child by byte c stands at base ^ c, the value at base ^ 0.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace bert_fast::unigram {

class Charsmap {
 public:
  Charsmap() = default;  // replaces nothing

  // Throws std::invalid_argument.
  explicit Charsmap(std::string_view bytes);

  // Whether a key may be replaced by nothing.
  bool removes() const { return removes_; }

  // What takes the place of the whole text if it begins with a key: the replacement of the shortest one. (This is what
  // Hugging Face `tokenizers` does; SentencePiece replaces the longest key and goes on behind it.) Valid UTF-8.
  std::optional<std::string_view> find(std::string_view text) const;

 private:
  std::vector<std::uint32_t> units_;
  std::string replacements_;
  bool removes_ = false;
};

}  // namespace bert_fast::unigram
