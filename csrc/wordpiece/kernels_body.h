// Loops over characters, by the operations of one instruction set: included by the files that define `Isa`, inside
// their anonymous namespace. Isa has
//     Block load_block(const char* p), load_block(p, size)  64 bytes; `size` < 64 bytes, then zeros (no more are read)
//     ClassMasks classify(classes, Block, char* out)             the classes of the bytes; lower-cased bytes to `out`
//     void positions(mask, base, std::uint32_t* out)        base + i for every bit i; 64 values may be written

// Takes the bytes of a block in front of the first that has no class; returns how many these are.
inline std::uint32_t scan_block(const AsciiClasses& classes, const Isa::Block& block, WordSpans& spans,
                                std::uint64_t& in_word) {
  const ClassMasks masks = Isa::classify(classes, block, spans.text + spans.size);
  const std::uint64_t unknown = ~(masks.word | masks.punctuation | masks.space);
  const std::uint32_t taken = unknown == 0 ? 64 : static_cast<std::uint32_t>(__builtin_ctzll(unknown));
  if (taken == 0) return 0;
  const std::uint64_t keep = ~std::uint64_t{0} >> (64 - taken);
  const std::uint64_t word = masks.word & keep, punctuation = masks.punctuation & keep;
  // A word that ended with the block before.
  spans.lasts[spans.num_lasts] = spans.size - 1;
  spans.num_lasts += static_cast<std::uint32_t>(in_word & ~word & 1);
  const std::uint64_t starts = (word & ~(word << 1 | in_word)) | punctuation;
  // Whether the last character taken ends its word is not known before the next one is read.
  const std::uint64_t lasts = (word & ~(word >> 1) & (keep >> 1)) | punctuation;
  Isa::positions(starts, spans.size, spans.starts + spans.num_starts);
  Isa::positions(lasts, spans.size, spans.lasts + spans.num_lasts);
  spans.num_starts += static_cast<std::uint32_t>(__builtin_popcountll(starts));
  spans.num_lasts += static_cast<std::uint32_t>(__builtin_popcountll(lasts));
  spans.size += taken;
  in_word = word >> (taken - 1) & 1;
  return taken;
}

std::size_t scan(const AsciiClasses& classes, const char* text, std::size_t size, WordSpans& result) {
  WordSpans spans = result;  // in registers
  std::uint64_t in_word = spans.is_open() ? 1 : 0;
  std::size_t done = 0;
  std::uint32_t taken = 64;
  while (size - done >= 64 && taken == 64) {
    taken = scan_block(classes, Isa::load_block(text + done), spans, in_word);
    done += taken;
  }
  // NUL has no class, so nothing is taken behind the end.
  if (taken == 64 && done < size) {
    done += scan_block(classes, Isa::load_block(text + done, size - done), spans, in_word);
  }
  result = spans;
  return done;
}

template <typename Unit>
std::size_t narrow(const Unit* text, std::size_t size, char* out) {
  constexpr std::size_t kStep = 16;
  std::size_t i = 0;
  for (; i + kStep <= size; i += kStep) {
    Unit all = 0;
    for (std::size_t k = 0; k < kStep; ++k) all = static_cast<Unit>(all | text[i + k]);
    if (all >= 0x80) break;
    for (std::size_t k = 0; k < kStep; ++k) out[i + k] = static_cast<char>(text[i + k]);
  }
  for (; i < size && text[i] < 0x80; ++i) out[i] = static_cast<char>(text[i]);
  return i;
}

std::size_t narrow16(const std::uint16_t* text, std::size_t size, char* out) { return narrow(text, size, out); }
std::size_t narrow32(const std::uint32_t* text, std::size_t size, char* out) { return narrow(text, size, out); }

void widen(const std::int32_t* ids, std::size_t size, std::int64_t* out) {
  // Without a sign, half the instructions where there is no AVX2.
  for (std::size_t i = 0; i < size; ++i) out[i] = static_cast<std::uint32_t>(ids[i]);
}
