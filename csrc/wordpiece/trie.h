// Longest-match-first word pieces in one pass over the word (LinMaxMatch: Song et al. 2021, arXiv:2012.15524).
//
// One trie over the bytes of UTF-8 with two roots: below the first stand the tokens that can start a word, below the
// second those that can continue one, without their prefix. A node is reached after reading some bytes since the start
// of the present piece. Where the next byte has no edge, the greedy algorithm would step back to the longest token on
// the way, emit it and read the bytes behind it again. What it would emit and where it would then stand depends on the
// node alone, so both are computed beforehand: the node's failure pops (token ids) and failure link (a node below the
// second root). Matching thus reads every byte once. Bytes are as good as code points, for no token starts or ends
// inside one.
//
// Traced: tokens a, abcdx, ##b, ##c, ##cdy, ##dz; word "abcdz" (the paper's example).
//     read a, b, c, d  -> node "abcd"; no edge z: pops of "abcd" = {a, ##b}, link = "##cd"
//     still no edge z  -> pops of "##cd" = {##c}, link = "##d"; edge z -> "##dz"
//     end of the word  -> pops of "##dz" = {##dz}, link = second root: done.       a ##b ##c ##dz
#pragma once

#include <cstddef>
#include <cstdint>
#include <string_view>
#include <vector>

#include "wordpiece/buffer.h"

namespace bert_fast::wordpiece {

class Trie {
 public:
  struct Entry {
    std::string_view text;  // valid UTF-8, not empty; needed during construction only
    std::int32_t id;
  };

  // Entries of each list in strictly ascending order of their bytes (as unsigned numbers). Throws std::invalid_argument
  // if they need more than 16 million nodes.
  Trie(const std::vector<Entry>& starting, const std::vector<Entry>& continuing);

  // Appends the ids of the word's pieces to `ids`; returns false and appends nothing if it has none. O(word.size()).
  // `word` is valid UTF-8.
  bool match_word(std::string_view word, Buffer<std::int32_t>& ids) const;

  // The longest starting entry that `text` begins with: its length, and its id in `id`; 0 if there is none.
  std::size_t longest_prefix(std::string_view text, std::int32_t& id) const;

 private:
  // A double array of four bytes a node. The child of a node by byte b is node base + b if that one's label is b: the
  // bases of nodes with children differ, so no other node can have a child there. Free places have a label that UTF-8
  // does not use; nodes without children have base 0, behind which all places are free.
  using Unit = std::uint32_t;  // base << 8 | label
  static constexpr Unit kNoLabel = 0xFF;
  // What happens where a node has no edge.
  struct Failure {
    std::uint32_t link = kNone;   // where to go on; kNone: the word has no pieces
    std::int32_t pops = kNoPops;  // ids before that: one, or ~i with a list at pops_[i]
  };
  struct Draft;
  static constexpr std::uint32_t kNone = 0xFFFFFFFF;
  static constexpr std::int32_t kNoPops = ~0;  // an empty list stands at pops_[0]
  static constexpr std::uint32_t kStartRoot = 256;
  static constexpr std::uint32_t kContinueRoot = 257;

  std::uint32_t child(std::uint32_t node, unsigned char byte) const {
    const std::uint32_t target = (units_[node] >> 8) + byte;
    return (units_[target] & 0xFF) == byte ? target : kNone;
  }
  void place_nodes(const Draft& draft, std::vector<std::uint32_t>& place_of);
  void link_nodes(const Draft& draft, const std::vector<std::uint32_t>& place_of);
  void append_pops(std::uint32_t node, Buffer<std::int32_t>& ids) const;

  std::vector<Unit> units_;  // 256 free ones at the end: child() needs no bounds check
  std::vector<Failure> failures_;
  std::vector<std::int32_t> pops_;  // lists: their length, then the ids
};

}  // namespace bert_fast::wordpiece
