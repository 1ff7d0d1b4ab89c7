// Texts as units of work of similar size, for several threads: short texts together, long ones in parts.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <vector>

#include "wordpiece/text_tokenizer.h"

namespace bert_fast::wordpiece {

// Special tokens around each text.
struct Around {
  bool on = false;
  std::int32_t cls = 0;
  std::int32_t sep = 0;
};

struct Unit {
  std::size_t first_text = 0;
  std::size_t last_text = 0;  // exclusive
  bool is_part = false;       // of the one text, namely [begin, end) of it in units of its form
  std::size_t begin = 0;
  std::size_t end = 0;
  bool ends_text = true;

  // Where its tokens are: in the arena of the worker that encoded it.
  std::size_t worker = 0;
  std::size_t first_token = 0;
  std::size_t num_tokens = 0;
  // Of a part: what the next part's offsets and word ids start behind.
  std::size_t num_chars = 0;
  std::size_t num_words = 0;

  // Where its tokens go, and what is added to the offsets and word ids of a part.
  std::size_t place = 0;
  std::int32_t chars_before = 0;
  std::int32_t words_before = 0;
};

// Cuts texts into units, in order, a few at a time. Which units there are depends on unit_bytes; what they are joined
// to does not.
class UnitPlanner {
 public:
  // cut_long: whether texts may be cut.
  UnitPlanner(const TextTokenizer& tokenizer, const TextView* texts, std::size_t num_texts, const EncodeOptions& wanted,
              std::size_t unit_bytes, bool cut_long);

  // Replaces `units` by the next ones, at most max_units; none: that was all.
  void next(std::size_t max_units, std::vector<Unit>& units);

 private:
  bool is_cut(const TextView& text) const;
  void plan_parts(std::size_t max_units, std::vector<Unit>& units);

  const TextTokenizer& tokenizer_;
  const TextView* texts_;
  std::size_t num_texts_;
  EncodeOptions wanted_;
  std::size_t unit_bytes_;
  bool cut_long_;
  std::size_t text_ = 0;   // the next one
  std::size_t begin_ = 0;  // of its next part
};

// About how many bytes are read of the texts if each has at most max_tokens tokens, and all of them at most
// max_batch_tokens, and a few more for every text.
std::size_t total_cost(const TextView* texts, std::size_t num_texts, std::size_t max_tokens,
                       std::size_t max_batch_tokens = static_cast<std::size_t>(-1));

// Threads for texts of that total_cost, and bytes for a unit. num_threads: 0 means as many as the calling thread has
// processors and the work pays. is_limited: there may be more texts than are wanted, so that units are small for one
// thread, too.
struct WorkPlan {
  std::size_t num_threads;
  std::size_t unit_bytes;
};
WorkPlan plan_work(std::size_t num_bytes, std::size_t num_threads, bool is_limited = false);

// Memory of one worker; apart from the others' by more than a cache line.
struct alignas(128) Arena {
  Tokens tokens;
  Scratch scratch;
  std::vector<std::size_t> units;         // whose tokens these are: indices
  std::atomic<std::size_t> next_unit{0};  // the first of them that nobody has taken to copy it

  void clear() {
    tokens.ids.clear();
    tokens.offsets.clear();
    tokens.word_ids.clear();
    units.clear();
    next_unit = 0;
  }
};

// Memory of one calling thread and the threads that help it, kept from call to call as long as it is small.
class Workspace {
 public:
  // The calling thread's own. A lease ends with its scope, an exception's as well.
  class Lease {
   public:
    explicit Lease(std::size_t num_arenas);
    ~Lease();
    Lease(const Lease&) = delete;
    Lease& operator=(const Lease&) = delete;
    Workspace& operator*() const { return workspace_; }

   private:
    Workspace& workspace_;
  };

  std::deque<Arena> arenas;
  std::vector<Unit> units;
};

// Appends the tokens of a unit to `out`; offsets and word ids of a part count from its own start. ends[i + 1] becomes
// the number of tokens of the unit up to the end of text i, for each text that ends in it.
void encode_unit(const TextTokenizer& tokenizer, const TextView* texts, const EncodeOptions& wanted,
                 const Around& around, Arena& arena, Tokens& out, Unit& unit, std::int64_t* ends);

}  // namespace bert_fast::wordpiece
