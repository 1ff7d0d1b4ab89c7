// Canonical composition (Unicode standard, section 3.11) as Hugging Face `tokenizers` does it: the tables of its NFC.
#pragma once

namespace bert_fast::unigram {

// The character that takes the place of two side by side; 0: there is none.
char32_t compose(char32_t first, char32_t second);

// Whether NFC leaves the character as it is, whatever stands in front of it, and behind it where no character without
// this property does.
bool stays_composed(char32_t c);

}  // namespace bert_fast::unigram
