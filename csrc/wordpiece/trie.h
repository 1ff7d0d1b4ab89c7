// The pieces of the vocabulary as a trie over the bytes of UTF-8, with two roots: below the first stand the tokens that
// can start a word, below the second those that can continue one, without their prefix.
//
// It is a double array (Aoe 1989) of four bytes a node, and the ids apart: they are read once a piece. The child of a
// node by byte b is node base + b if that one's label is b. The bases of nodes with children differ, so no other node
// can have a child there. Free places have a label that UTF-8 does not use; nodes without children have base 0, behind
// which all places are free.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string_view>
#include <vector>

#include "wordpiece/kernels.h"

namespace bert_fast::wordpiece {

class Trie {
 public:
  struct Entry {
    std::string_view text;  // UTF-8, not empty; needed during construction only
    std::int32_t id;
  };

  // Two entries of a list with the same text.
  struct Duplicate {
    std::int32_t first_id;
    std::int32_t second_id;
  };

  // Throws Duplicate; std::invalid_argument if the entries need more than 8 million nodes.
  Trie(std::vector<Entry> starting, std::vector<Entry> continuing);

  TrieView view() const { return {nodes_.data(), ids_.data()}; }

  // Replaces every id by the number of its token in the order of places, and returns the ids by these numbers: what
  // else is known of tokens can then lie as near together as their nodes do.
  std::vector<std::int32_t> number_by_place();

  // The longest starting entry that `text` begins with: its length, and its id in `id`; 0 if there is none.
  std::size_t longest_prefix(std::string_view text, std::int32_t& id) const;

 private:
  struct Draft;
  void place_nodes(const Draft& draft);

  std::vector<TrieNode> nodes_;  // 256 behind every base: look-ups need no bounds check
  std::vector<std::int32_t> ids_;
};

}  // namespace bert_fast::wordpiece
