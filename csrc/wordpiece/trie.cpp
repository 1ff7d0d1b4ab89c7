#include "wordpiece/trie.h"

#include <algorithm>
#include <array>
#include <stdexcept>
#include <utility>

namespace bert_fast::wordpiece {
namespace {

// In ascending order of their bytes: by the first eight, a byte at a time from the last; then the few that share these.
void sort_entries(std::vector<Trie::Entry>& entries) {
  struct Item {
    std::uint64_t head;  // the first eight bytes as a number
    std::uint32_t position;
  };
  std::vector<Item> items(entries.size()), next(entries.size());
  for (std::size_t i = 0; i < entries.size(); ++i) {
    const std::string_view text = entries[i].text;
    std::uint64_t head = 0;
    for (std::size_t k = 0; k < 8; ++k) head = head << 8 | (k < text.size() ? static_cast<unsigned char>(text[k]) : 0U);
    items[i] = {head, static_cast<std::uint32_t>(i)};
  }
  for (int shift = 0; shift < 64; shift += 8) {
    std::array<std::size_t, 257> starts{};
    for (const Item& item : items) ++starts[(item.head >> shift & 0xFF) + 1];
    for (std::size_t b = 1; b < starts.size(); ++b) starts[b] += starts[b - 1];
    for (const Item& item : items) next[starts[item.head >> shift & 0xFF]++] = item;
    items.swap(next);
  }
  std::vector<Trie::Entry> sorted;
  sorted.reserve(entries.size());
  for (const Item& item : items) sorted.push_back(entries[item.position]);
  for (std::size_t first = 0, last; first < items.size(); first = last) {
    for (last = first + 1; last < items.size() && items[last].head == items[first].head;) ++last;
    std::sort(sorted.begin() + static_cast<std::ptrdiff_t>(first), sorted.begin() + static_cast<std::ptrdiff_t>(last),
              [](const Trie::Entry& a, const Trie::Entry& b) { return a.text < b.text; });
  }
  entries.swap(sorted);
}

}  // namespace

// A trie of linked lists, in which the tree is built before its nodes get their places in the double array.
struct Trie::Draft {
  static constexpr std::uint32_t kNone = 0xFFFFFFFF;
  static constexpr std::uint32_t kStart = 0;  // the roots
  static constexpr std::uint32_t kContinue = 1;

  struct Item {
    std::uint32_t first_child = kNone;
    std::uint32_t next_sibling = kNone;
    std::int32_t id = -1;  // of the token that ends here
    unsigned char byte = 0;
  };
  std::vector<Item> items;

  void add_sorted(const std::vector<Entry>& entries, std::uint32_t root) {
    std::vector<std::uint32_t> path = {root};  // of the previous entry; path[d] is its node at depth d
    std::string_view previous;
    for (const Entry& entry : entries) {
      const auto shared = std::mismatch(entry.text.begin(), entry.text.end(), previous.begin(), previous.end()).first;
      path.resize(static_cast<std::size_t>(shared - entry.text.begin()) + 1);
      for (std::size_t d = path.size() - 1; d < entry.text.size(); ++d) {
        const auto item = static_cast<std::uint32_t>(items.size());
        const std::uint32_t parent = path.back();
        items.push_back({kNone, items[parent].first_child, -1, static_cast<unsigned char>(entry.text[d])});
        items[parent].first_child = item;
        path.push_back(item);
      }
      std::int32_t& id = items[path.back()].id;
      if (id >= 0) throw Duplicate{std::min(id, entry.id), std::max(id, entry.id)};
      id = entry.id;
      previous = entry.text;
    }
  }
};

namespace {

// The double array while it is filled: which places are free, and which bases no node has yet. A bit each, so that 64
// bases are tried at a time.
class FreePlaces {
 public:
  static constexpr std::uint32_t kFirst = 512;  // behind the free block of base 0 and the roots

  FreePlaces() { grow(1 << 16); }

  // A base that no node has, behind which the places of all bytes (in descending order) are free; takes both.
  std::uint32_t take(const unsigned char* bytes, std::size_t count) {
    // Looks from where the array is not so full that many nodes before have looked in vain. An only child fits nearly
    // anywhere and fills the gaps.
    constexpr int kPatience = 2;
    std::uint32_t& search_from = search_from_[count == 1];
    std::uint32_t base = search_from;
    for (int tries = 0;; base += 64) {
      if (base + 512 > size()) grow(2 * size());
      std::uint64_t fits = window(unused_, base);
      for (std::size_t i = 0; i < count && fits != 0; ++i) fits &= window(free_, base + bytes[i]);
      if (fits != 0) {
        base += static_cast<std::uint32_t>(__builtin_ctzll(fits));
        break;
      }
      if (++tries == kPatience) search_from += 64;
    }
    clear(unused_, base);
    for (std::size_t i = 0; i < count; ++i) clear(free_, base + bytes[i]);
    return base;
  }

 private:
  using Bits = std::vector<std::uint64_t>;
  std::uint32_t size() const { return static_cast<std::uint32_t>(64 * (free_.size() - 1)); }
  void grow(std::uint32_t size) {
    const bool is_new = free_.empty();
    free_.resize(size / 64 + 1, ~std::uint64_t{0});
    unused_.resize(size / 64 + 1, ~std::uint64_t{0});
    if (is_new) std::fill_n(free_.begin(), kFirst / 64, 0);
  }
  static void clear(Bits& bits, std::uint32_t place) { bits[place / 64] &= ~(std::uint64_t{1} << place % 64); }
  static std::uint64_t window(const Bits& bits, std::uint32_t place) {
    const std::uint64_t low = bits[place / 64] >> place % 64;
    return place % 64 == 0 ? low : low | bits[place / 64 + 1] << (64 - place % 64);
  }

  Bits free_;
  Bits unused_;
  std::uint32_t search_from_[2] = {kFirst, kFirst};  // of nodes with several children, with one
};

}  // namespace

Trie::Trie(std::vector<Entry> starting, std::vector<Entry> continuing) {
  Draft draft;
  draft.items.resize(2);
  sort_entries(starting);
  sort_entries(continuing);
  draft.add_sorted(starting, Draft::kStart);
  draft.add_sorted(continuing, Draft::kContinue);
  place_nodes(draft);
}

void Trie::place_nodes(const Draft& draft) {
  constexpr TrieNode kFree = {TrieNode::kNoLabel};
  constexpr std::uint32_t kNearDepth = 4;
  FreePlaces places;
  nodes_.assign(FreePlaces::kFirst, kFree);
  struct Placed {
    std::uint32_t item;
    std::uint32_t place;
    std::uint32_t depth;
  };
  // Breadth first near the roots, so that what is read most often lies together; below, one branch after the other, so
  // that the rest of a walk lies together, too.
  std::vector<Placed> near = {{Draft::kStart, TrieView::kStartRoot, 0}, {Draft::kContinue, TrieView::kContinueRoot, 0}};
  std::vector<Placed> branch;
  std::size_t used = FreePlaces::kFirst;
  for (std::size_t i = 0; i < near.size() || !branch.empty();) {
    const Placed parent = branch.empty() ? near[i++] : branch.back();
    if (!branch.empty()) branch.pop_back();
    unsigned char bytes[256];
    std::size_t num_children = 0;
    for (std::uint32_t c = draft.items[parent.item].first_child; c != Draft::kNone; c = draft.items[c].next_sibling) {
      bytes[num_children++] = draft.items[c].byte;  // descending, for siblings were pushed to the front
    }
    if (num_children == 0) continue;
    const std::uint32_t base = places.take(bytes, num_children);
    if (base >> 23 != 0) throw std::invalid_argument("vocab: its tokens need more than 8 million trie nodes");
    used = std::max<std::size_t>(used, base + 256);
    if (nodes_.size() < used) {
      nodes_.resize(2 * used, kFree);
      ids_.resize(2 * used, -1);
    }
    nodes_[parent.place].bits |= base << 9;
    for (std::uint32_t c = draft.items[parent.item].first_child; c != Draft::kNone; c = draft.items[c].next_sibling) {
      const std::uint32_t place = base + draft.items[c].byte;
      const std::int32_t id = draft.items[c].id;
      nodes_[place] = {(id >= 0 ? 0x100U : 0U) | draft.items[c].byte};
      ids_[place] = id;
      (parent.depth < kNearDepth ? near : branch).push_back({c, place, parent.depth + 1});
    }
  }
  nodes_.resize(used, kFree);  // a node's children lie within 256 places of its base
  nodes_.shrink_to_fit();
  ids_.resize(used, -1);
  ids_.shrink_to_fit();
}

std::vector<std::int32_t> Trie::number_by_place() {
  std::vector<std::int32_t> ids;
  for (std::int32_t& id : ids_) {
    if (id < 0) continue;
    ids.push_back(id);
    id = static_cast<std::int32_t>(ids.size()) - 1;
  }
  return ids;
}

std::size_t Trie::longest_prefix(std::string_view text, std::int32_t& id) const {
  std::size_t longest = 0;
  TrieNode node = nodes_[TrieView::kStartRoot];
  for (std::size_t i = 0; i < text.size(); ++i) {
    const auto byte = static_cast<unsigned char>(text[i]);
    const std::uint32_t child = node.base() + byte;
    node = nodes_[child];
    if (!node.has_label(byte)) break;
    if (!node.ends_token()) continue;
    longest = i + 1;
    id = ids_[child];
  }
  return longest;
}

}  // namespace bert_fast::wordpiece
