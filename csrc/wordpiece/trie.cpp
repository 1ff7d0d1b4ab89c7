#include "wordpiece/trie.h"

#include <algorithm>

namespace bert_fast::wordpiece {

// A trie of linked lists, in which the tree is built before its nodes get their places in the double array.
struct Trie::Draft {
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
    by_depth = {kStartRoot, kContinueRoot};
    by_depth.reserve(items.size());
    for (std::size_t i = 0; i < by_depth.size(); ++i) {
      for (std::uint32_t c = items[by_depth[i]].first_child; c != kNone; c = items[c].next_sibling) {
        by_depth.push_back(c);
      }
    }
  }
};

namespace {

// Free places of the double array as a doubly linked list in ascending order. Grows as far as it is asked to look.
class FreePlaces {
 public:
  static constexpr std::uint32_t kEnd = 0xFFFFFFFF;

  explicit FreePlaces(std::uint32_t num_taken) : free_(num_taken, false), next_(num_taken, kEnd), previous_(next_) {
    grow(num_taken + 1024);
  }

  std::uint32_t head() const { return head_; }
  std::uint32_t next(std::uint32_t place) {
    if (next_[place] == kEnd) grow(size() + size() / 2);
    return next_[place];
  }
  bool is_free(std::uint32_t place) {
    if (place >= size()) grow(place + 1 + size() / 2);
    return free_[place];
  }
  void take(std::uint32_t place) {
    const std::uint32_t before = previous_[place], after = next(place);  // never the last one: next() grows the list
    free_[place] = false;
    (before == kEnd ? head_ : next_[before]) = after;
    previous_[after] = before;
  }

 private:
  std::uint32_t size() const { return static_cast<std::uint32_t>(free_.size()); }
  void grow(std::uint32_t new_size) {
    for (std::uint32_t place = size(); place < new_size; ++place) {
      (tail_ == kEnd ? head_ : next_[tail_]) = place;
      free_.push_back(true);
      next_.push_back(kEnd);
      previous_.push_back(tail_);
      tail_ = place;
    }
  }

  std::vector<bool> free_;
  std::vector<std::uint32_t> next_;
  std::vector<std::uint32_t> previous_;
  std::uint32_t head_ = kEnd;
  std::uint32_t tail_ = kEnd;
};

}  // namespace

Trie::Trie(const std::vector<Entry>& starting, const std::vector<Entry>& continuing) {
  Draft draft;
  draft.items.resize(2);
  draft.add_sorted(starting, kStartRoot);
  draft.add_sorted(continuing, kContinueRoot);
  draft.order_by_depth();
  std::vector<std::uint32_t> place_of(draft.items.size(), kNone);
  place_nodes(draft, place_of);
  link_nodes(draft, place_of);
}

void Trie::place_nodes(const Draft& draft, std::vector<std::uint32_t>& place_of) {
  FreePlaces places(2);
  nodes_.resize(2);
  place_of[kStartRoot] = kStartRoot;
  place_of[kContinueRoot] = kContinueRoot;
  std::vector<unsigned char> bytes;
  std::uint32_t search_from = places.head();  // where nodes with several children look first, see below
  for (const std::uint32_t item : draft.by_depth) {
    bytes.clear();
    for (std::uint32_t c = draft.items[item].first_child; c != kNone; c = draft.items[c].next_sibling) {
      bytes.push_back(draft.items[c].byte);  // descending, for siblings were pushed to the front
    }
    if (bytes.empty()) continue;
    // The lowest base with a free place for every child. An only child fits anywhere, so it takes the first gap; the
    // others give up on gaps that many nodes before them have tried in vain.
    constexpr int kPatience = 256;
    int tries = 0;
    std::uint32_t place = bytes.size() == 1 ? places.head() : search_from;
    const unsigned char lowest = bytes.back();
    const auto fits = [&](std::uint32_t first) {
      return first >= lowest && std::all_of(bytes.begin(), bytes.end(),
                                            [&](unsigned char b) { return places.is_free(first - lowest + b); });
    };
    while (!fits(place)) {
      place = places.next(place);
      if (++tries == kPatience && bytes.size() > 1) search_from = place;
    }
    const std::uint32_t base = place - lowest;
    nodes_[place_of[item]].base = base;
    if (nodes_.size() < base + 256) nodes_.resize(base + 256);
    for (std::uint32_t c = draft.items[item].first_child; c != kNone; c = draft.items[c].next_sibling) {
      const std::uint32_t taken = base + draft.items[c].byte;
      if (taken == search_from) search_from = places.next(taken);
      places.take(taken);
      nodes_[taken].parent = place_of[item];
      place_of[c] = taken;
    }
  }
  nodes_.resize(nodes_.size() + 256);
}

void Trie::link_nodes(const Draft& draft, const std::vector<std::uint32_t>& place_of) {
  pops_ = {0};  // the empty list
  Buffer<std::int32_t> pops;
  for (std::size_t i = 2; i < draft.by_depth.size(); ++i) {
    const Draft::Item& item = draft.items[draft.by_depth[i]];
    Node& node = nodes_[place_of[draft.by_depth[i]]];
    pops.clear();
    if (item.id >= 0) {  // a whole token: emit it and go on behind it
      node.link = kContinueRoot;
      pops.push_back(item.id);
    } else {  // as the parent would fail, and from there by this node's byte (the paper's algorithm 2)
      std::uint32_t from = node.parent;
      do {
        append_pops(from, pops);
        from = nodes_[from].link;
      } while (from != kNone && child(from, item.byte) == kNone);
      if (from == kNone) continue;
      node.link = child(from, item.byte);
    }
    if (pops.size() == 1) {
      node.pops = pops[0];
      continue;
    }
    node.pops = ~static_cast<std::int32_t>(pops_.size());
    pops_.push_back(static_cast<std::int32_t>(pops.size()));
    pops_.insert(pops_.end(), pops.begin(), pops.end());
  }
}

void Trie::append_pops(std::uint32_t node, Buffer<std::int32_t>& ids) const {
  const std::int32_t pops = nodes_[node].pops;
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
    const std::uint32_t link = nodes_[node].link;
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
    if (nodes_[node].link == kContinueRoot) {  // only whole tokens link to the root itself
      longest = i + 1;
      id = nodes_[node].pops;
    }
  }
  return longest;
}

}  // namespace bert_fast::wordpiece
