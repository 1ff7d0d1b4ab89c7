// Loops over words, in general registers: included in an anonymous namespace by files that are compiled for different
// instruction sets.

// Branches on what the words happen to be are mispredicted every other time, so there are none: conditions become
// masks.
inline std::uint32_t mask_of(bool condition) { return 0U - static_cast<std::uint32_t>(condition); }
inline std::uint32_t select(std::uint32_t mask, std::uint32_t yes, std::uint32_t no) {
  return no ^ ((yes ^ no) & mask);
}

// Up to 64 words, none of them a literal. Returns the set of those that are not in the table.
inline std::uint64_t find_block(const WordTableView& table, const char* text, const std::uint32_t* starts,
                                const std::uint32_t* lasts, std::size_t count, std::int32_t* ids) {
  // In two passes: the look-ups of one word depend on one another, and more words than the CPU could look ahead in a
  // single pass are on their way at the same time.
  WordKey keys[64];
  std::uint32_t slots[64];
  for (std::size_t i = 0; i < count; ++i) {
    keys[i] = load_word(text + starts[i], lasts[i] - starts[i] + 1);
    slots[i] = find_slot(table, keys[i]);
    __builtin_prefetch(table.slots + slots[i]);
  }
  for (std::size_t i = 0; i < count; ++i) {
    const std::uint32_t id = table.slots[slots[i]];
    ids[i] = static_cast<std::int32_t>(id);
    __builtin_prefetch(table.keys + id);
  }
  std::uint64_t missing = 0;
  for (std::size_t i = 0; i < count; ++i) {
    const WordKey& found = table.keys[ids[i]];
    const std::uint64_t differs =
        (keys[i].low ^ found.low) | (keys[i].high ^ found.high) | ((lasts[i] - starts[i]) >> 4);
    missing |= static_cast<std::uint64_t>(differs != 0) << i;
  }
  return missing;
}

// The same where literals may be among the words.
inline std::uint64_t find_mixed(const WordTableView& table, const char* text, const std::uint32_t* starts,
                                const std::uint32_t* lasts, std::size_t count, std::int32_t* ids) {
  std::uint64_t missing = 0;
  for (std::size_t i = 0; i < count; ++i) {
    if (starts[i] >= WordSpans::kLiteral) {
      ids[i] = static_cast<std::int32_t>(starts[i] & ~WordSpans::kLiteral);
      continue;
    }
    const WordKey key = load_word(text + starts[i], lasts[i] - starts[i] + 1);
    const std::uint32_t id = table.slots[find_slot(table, key)];
    const WordKey& found = table.keys[id];
    ids[i] = static_cast<std::int32_t>(id);
    const std::uint64_t differs = (key.low ^ found.low) | (key.high ^ found.high) | ((lasts[i] - starts[i]) >> 4);
    missing |= static_cast<std::uint64_t>(differs != 0) << i;
  }
  return missing;
}

std::size_t find(const WordTableView& view, const WordSpans& spans, std::size_t count, std::int32_t* ids,
                 std::uint32_t* misses) {
  const WordTableView table = view;
  std::size_t num_misses = 0;
  for (std::size_t first = 0; first < count; first += 64) {
    const std::size_t size = count - first < 64 ? count - first : 64;
    std::uint64_t missing = (spans.num_literals == 0 ? find_block : find_mixed)(table, spans.text, spans.starts + first,
                                                                                spans.lasts + first, size, ids + first);
    for (; missing != 0; missing &= missing - 1) {
      misses[num_misses++] = static_cast<std::uint32_t>(first) + static_cast<std::uint32_t>(__builtin_ctzll(missing));
    }
  }
  return num_misses;
}

void split(const TrieView& trie, const char* text, const UnsplitWord* words, std::size_t count,
           const PieceSpans& spans) {
  const TrieNode* const nodes = trie.nodes;
  const PieceSpans pieces = spans;
  for (std::size_t i = 0; i < count; ++i) {
    const std::uint32_t end = words[i].end;
    TrieNode node = nodes[TrieView::kStartRoot];
    for (std::uint32_t start = words[i].start; start < end; node = nodes[TrieView::kContinueRoot]) {
      std::uint32_t accepted = start;  // where the longest token so far ends
      std::uint32_t token = 0;         // ... and its node
      for (std::uint32_t p = start; p < end; ++p) {
        const auto byte = static_cast<std::uint32_t>(static_cast<unsigned char>(text[p]));
        const std::uint32_t child = node.base() + byte;
        node = nodes[child];
        if (!node.has_label(byte)) break;
        const std::uint32_t ends_token = mask_of(node.ends_token());
        accepted = select(ends_token, p + 1, accepted);
        token = select(ends_token, child, token);
      }
      if (accepted == start) {
        pieces.ids[words[i].start] = PieceSpans::kUnknown;
        break;
      }
      pieces.ids[start] = trie.ids[token];
      pieces.sizes[start] = accepted - start;
      start = accepted;
    }
  }
}
