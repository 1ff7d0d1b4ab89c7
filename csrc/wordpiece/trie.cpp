#include "wordpiece/trie.h"

#include <algorithm>
#include <stdexcept>

namespace bert_fast::wordpiece {

// A trie of linked lists, in which the tree is built before its nodes get their places in the double array.
struct Trie::Draft {
  static constexpr std::uint32_t kNone = 0xFFFFFFFF;
  static constexpr std::uint32_t kStart = 0;  // the roots
  static constexpr std::uint32_t kContinue = 1;

  struct Item {
    std::uint32_t parent = kNone;
    std::uint32_t first_child = kNone;
    std::uint32_t next_sibling = kNone;
    std::int32_t id = -1;  // of the token that ends here
    unsigned char byte = 0;
  };
  std::vector<Item> items;
  std::vector<std::uint32_t> by_depth;  // breadth first, both roots in front

  void add_sorted(const std::vector<Entry>& entries, std::uint32_t root) {
    std::vector<std::uint32_t> path = {root};  // of the previous entry; path[d] is its node at depth d
    std::string_view previous;
    for (const Entry& entry : entries) {
      const auto shared = std::mismatch(entry.text.begin(), entry.text.end(), previous.begin(), previous.end()).first;
      path.resize(static_cast<std::size_t>(shared - entry.text.begin()) + 1);
      for (std::size_t d = path.size() - 1; d < entry.text.size(); ++d) {
        const auto item = static_cast<std::uint32_t>(items.size());
        const std::uint32_t parent = path.back();
        items.push_back({parent, kNone, items[parent].first_child, -1, static_cast<unsigned char>(entry.text[d])});
        items[parent].first_child = item;
        path.push_back(item);
      }
      items[path.back()].id = entry.id;
      previous = entry.text;
    }
  }

  void order_by_depth() {
    by_depth = {kStart, kContinue};
    by_depth.reserve(items.size());
    for (std::size_t i = 0; i < by_depth.size(); ++i) {
      for (std::uint32_t c = items[by_depth[i]].first_child; c != kNone; c = items[c].next_sibling) {
        by_depth.push_back(c);
      }
    }
  }
};

namespace {

// Free places of the double array as a linked list in ascending order. Grows as far as it is asked to look.
class FreePlaces {
 public:
  static constexpr std::uint32_t kEnd = 0xFFFFFFFF;

  explicit FreePlaces(std::uint32_t num_taken) : next_(num_taken, kTaken), previous_(num_taken, kEnd) {
    grow(num_taken + 1024);
  }

  std::uint32_t head() const { return head_; }
  std::uint32_t next(std::uint32_t place) {
    if (next_[place] == kEnd) grow(size() + size() / 2);
    return next_[place];
  }
  bool is_free(std::uint32_t place) {
    if (place >= size()) grow(place + 1 + size() / 2);
    return next_[place] != kTaken;
  }
  void take(std::uint32_t place) {
    const std::uint32_t before = previous_[place], after = next(place);  // never the last one: next() grows the list
    next_[place] = kTaken;
    (before == kEnd ? head_ : next_[before]) = after;
    previous_[after] = before;
  }

 private:
  static constexpr std::uint32_t kTaken = 0xFFFFFFFE;

  std::uint32_t size() const { return static_cast<std::uint32_t>(next_.size()); }
  void grow(std::uint32_t new_size) {
    const std::uint32_t old_size = size();
    next_.resize(new_size);
    previous_.resize(new_size);
    for (std::uint32_t place = old_size; place < new_size; ++place) {
      next_[place] = place + 1;
      previous_[place] = place - 1;
    }
    next_[new_size - 1] = kEnd;
    previous_[old_size] = tail_;
    (tail_ == kEnd ? head_ : next_[tail_]) = old_size;
    tail_ = new_size - 1;
  }

  std::vector<std::uint32_t> next_;  // kTaken: not free
  std::vector<std::uint32_t> previous_;
  std::uint32_t head_ = kEnd;
  std::uint32_t tail_ = kEnd;
};

}  // namespace

Trie::Trie(const std::vector<Entry>& starting, const std::vector<Entry>& continuing) {
  Draft draft;
  draft.items.resize(2);
  draft.add_sorted(starting, Draft::kStart);
  draft.add_sorted(continuing, Draft::kContinue);
  draft.order_by_depth();
  std::vector<std::uint32_t> place_of(draft.items.size(), kNone);
  place_nodes(draft, place_of);
  link_nodes(draft, place_of);
}

void Trie::place_nodes(const Draft& draft, std::vector<std::uint32_t>& place_of) {
  constexpr std::uint32_t kFirstPlace = 512;  // behind the free block of base 0 and the roots
  FreePlaces places(kFirstPlace);
  std::vector<bool> is_base(kFirstPlace, false);
  units_.assign(kFirstPlace, kNoLabel);
  place_of[Draft::kStart] = kStartRoot;
  place_of[Draft::kContinue] = kContinueRoot;
  std::vector<unsigned char> bytes;
  std::uint32_t search_from = places.head();  // where nodes with several children look first, see below
  for (const std::uint32_t item : draft.by_depth) {
    bytes.clear();
    for (std::uint32_t c = draft.items[item].first_child; c != Draft::kNone; c = draft.items[c].next_sibling) {
      bytes.push_back(draft.items[c].byte);  // descending, for siblings were pushed to the front
    }
    if (bytes.empty()) continue;
    // The lowest unused base with a free place for every child. An only child fits anywhere, so it takes the first gap;
    // the others give up on gaps that many nodes before them have tried in vain.
    constexpr int kPatience = 64;
    int tries = 0;
    std::uint32_t place = bytes.size() == 1 ? places.head() : search_from;
    const unsigned char lowest = bytes.back();
    const auto fits = [&](std::uint32_t first) {
      const std::uint32_t base = first - lowest;
      if (base < is_base.size() && is_base[base]) return false;
      return std::all_of(bytes.begin(), bytes.end(), [&](unsigned char b) { return places.is_free(base + b); });
    };
    while (!fits(place)) {
      place = places.next(place);
      if (++tries == kPatience && bytes.size() > 1) search_from = place;
    }
    const std::uint32_t base = place - lowest;
    if (base >> 24 != 0) throw std::invalid_argument("vocab: its tokens need more than 16 million trie nodes");
    if (units_.size() < base + 256) {
      units_.resize(base + 256 + units_.size() / 2, kNoLabel);
      is_base.resize(units_.size(), false);
    }
    is_base[base] = true;
    units_[place_of[item]] = base << 8 | (units_[place_of[item]] & 0xFF);
    for (std::uint32_t c = draft.items[item].first_child; c != Draft::kNone; c = draft.items[c].next_sibling) {
      const std::uint32_t taken = base + draft.items[c].byte;
      if (taken == search_from) search_from = places.next(taken);
      places.take(taken);
      units_[taken] = draft.items[c].byte;
      place_of[c] = taken;
    }
  }
  std::size_t used = units_.size();
  while (used > kFirstPlace && units_[used - 1] == kNoLabel) --used;
  units_.resize(used + 256, kNoLabel);
  units_.shrink_to_fit();
}

void Trie::link_nodes(const Draft& draft, const std::vector<std::uint32_t>& place_of) {
  failures_.resize(units_.size() - 256);
  pops_ = {0};  // the empty list
  Buffer<std::int32_t> pops;
  for (std::size_t i = 2; i < draft.by_depth.size(); ++i) {
    const Draft::Item& item = draft.items[draft.by_depth[i]];
    Failure& failure = failures_[place_of[draft.by_depth[i]]];
    pops.clear();
    if (item.id >= 0) {  // a whole token: emit it and go on behind it
      failure.link = kContinueRoot;
      pops.push_back(item.id);
    } else {  // as the parent would fail, and from there by this node's byte (the paper's algorithm 2)
      std::uint32_t from = place_of[item.parent];
      do {
        append_pops(from, pops);
        from = failures_[from].link;
      } while (from != kNone && child(from, item.byte) == kNone);
      if (from == kNone) continue;
      failure.link = child(from, item.byte);
    }
    if (pops.size() == 1) {
      failure.pops = pops[0];
      continue;
    }
    failure.pops = ~static_cast<std::int32_t>(pops_.size());
    pops_.push_back(static_cast<std::int32_t>(pops.size()));
    pops_.insert(pops_.end(), pops.begin(), pops.end());
  }
}

void Trie::append_pops(std::uint32_t node, Buffer<std::int32_t>& ids) const {
  const std::int32_t pops = failures_[node].pops;
  if (pops >= 0) {
    ids.push_back(pops);
    return;
  }
  const std::int32_t* list = pops_.data() + ~pops;
  for (std::int32_t i = 1; i <= *list; ++i) ids.push_back(list[i]);
}

bool Trie::match_word(std::string_view word, Buffer<std::int32_t>& ids) const {
  const std::size_t size_before = ids.size();
  std::uint32_t node = kStartRoot;
  const auto fail = [&] {
    const std::uint32_t link = failures_[node].link;
    if (link == kNone) {
      ids.truncate(size_before);
      return false;
    }
    append_pops(node, ids);
    node = link;
    return true;
  };
  for (const char c : word) {
    std::uint32_t next;
    while ((next = child(node, static_cast<unsigned char>(c))) == kNone) {
      if (!fail()) return false;
    }
    node = next;
  }
  while (node != kContinueRoot) {
    if (!fail()) return false;
  }
  return true;
}

std::size_t Trie::longest_prefix(std::string_view text, std::int32_t& id) const {
  std::size_t longest = 0;
  std::uint32_t node = kStartRoot;
  for (std::size_t i = 0; i < text.size(); ++i) {
    node = child(node, static_cast<unsigned char>(text[i]));
    if (node == kNone) break;
    if (failures_[node].link == kContinueRoot) {  // only whole tokens link to the root itself
      longest = i + 1;
      id = failures_[node].pops;
    }
  }
  return longest;
}

}  // namespace bert_fast::wordpiece
