// Where grapheme clusters end, as far as that decides what a character map replaces: see charsmap.h.
#pragma once

#include <cstddef>

namespace bert_fast::unigram {

// How many of the characters, at least one, make the first cluster. Flags of two letters are not joined: each of them
// is longer than what maps look up as a whole.
std::size_t cluster_size(const char32_t* chars, std::size_t size);

// Whether the character never shares a cluster with one in front of it, and only with one that continues clusters
// behind it.
bool is_plain(char32_t c);
// Whether the character shares a cluster with a plain one in front of it.
bool continues_cluster(char32_t c);

// Whether the character shares a cluster with nothing (but "\r" with "\n").
bool breaks_clusters(char32_t c);

}  // namespace bert_fast::unigram
