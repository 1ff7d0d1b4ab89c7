// Where one long text can be cut, so that its parts can be encoded by themselves.
#pragma once

#include <cstddef>

#include "wordpiece/text_tokenizer.h"
#include "wordpiece/utf8.h"

namespace bert_fast::wordpiece {

constexpr std::size_t kNoCut = static_cast<std::size_t>(-1);

// The first place from `from` on and before `to` (units of the text's form, from >= 1) where TextTokenizer::can_cut
// allows a cut; kNoCut if there is none. Reads about to - from units. In UTF-8 a cut has a valid character on both
// sides, so the repair of invalid bytes finds the same parts on both sides of it.
std::size_t find_cut(const TextTokenizer& tokenizer, const TextView& text, std::size_t from, std::size_t to);

// The units [begin, end) of a text, as a text.
TextView slice(const TextView& text, std::size_t begin, std::size_t end);

}  // namespace bert_fast::wordpiece
