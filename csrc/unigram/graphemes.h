// Where grapheme clusters end, as far as that decides what a character map replaces: see charsmap.h.
#pragma once

#include <cstddef>

namespace bert_fast::unigram {

// How many of the characters, at least one, make the first cluster. Flags of two letters are not joined: each of them is
// longer than what maps look up as a whole.
std::size_t cluster_size(const char32_t* chars, std::size_t size);

// Whether a cluster may go on across the border between these two characters, whatever stands around them.
bool may_join(char32_t before, char32_t after);

}  // namespace bert_fast::unigram
