#include "wordpiece/rows.h"

#include <algorithm>
#include <cstring>
#include <new>
#include <vector>

#include "wordpiece/dispatch.h"
#include "wordpiece/pool.h"
#include "wordpiece/units.h"

namespace bert_fast::wordpiece {
namespace {

constexpr std::size_t kMinCellsPerUnit = 16 * 1024;  // of a matrix: 128 KB, some 10 microseconds

struct Piece {
  const std::int32_t* ids = nullptr;
  std::size_t size = 0;
};

struct Row {
  Piece first;
  Piece second;
  bool has_pair = false;
  bool first_is_longer = false;

  std::size_t num_text_tokens() const { return first.size + second.size; }
};

std::size_t num_special(const RowOptions& options, bool has_pair) {
  return !options.special ? 0 : has_pair ? 2 + options.pair_separators : 2;
}

// How many tokens of a text are looked at: one more than any row can hold tells that the text is too long.
std::size_t tokens_needed(const RowOptions& options) {
  if (options.max_length == 0 || options.truncate_left) return static_cast<std::size_t>(-1);
  return options.max_length - num_special(options, false) + 1;
}

// Makes the row fit; false if the strategy cannot.
bool truncate(const RowOptions& options, Row& row) {
  const std::size_t room = options.max_length - num_special(options, row.has_pair);
  std::size_t first = row.first.size, second = row.second.size;
  if (first + second <= room) return true;
  if (!row.has_pair && options.truncation == Truncation::kLongestFirst) {
    first = room;
  } else if (options.truncation == Truncation::kLongestFirst) {
    std::size_t shorter = std::min(first, second);
    std::size_t longer = std::max(shorter, room - std::min(room, shorter));
    if (shorter + longer > room) {
      shorter = room / 2;
      longer = room - room / 2;
    }
    first = row.first_is_longer ? longer : shorter;
    second = row.first_is_longer ? shorter : longer;
  } else if (room == 0) {
    first = second = 0;
  } else if (options.truncation == Truncation::kOnlyFirst) {
    if (second >= room) return false;
    first = room - second;
  } else {
    if (!row.has_pair || first >= room) return false;
    second = room - first;
  }
  const auto cut = [&](Piece& piece, std::size_t kept) {
    if (options.truncate_left) piece.ids += piece.size - kept;
    piece.size = kept;
  };
  cut(row.first, first);
  cut(row.second, second);
  return true;
}

// One row of the matrices, written from left to right.
class RowWriter {
 public:
  RowWriter(const RowOptions& options, std::size_t row, Rows& out)
      : ids_(out.input_ids.data() + row * out.width),
        types_(options.types ? out.token_type_ids.data() + row * out.width : nullptr),
        mask_(options.mask ? out.attention_mask.data() + row * out.width : nullptr),
        widen_(kernels().widen) {}

  void text(const Piece& piece, std::int64_t type) {
    widen_(piece.ids, piece.size, ids_);
    advance(piece.size, type, 1);
  }
  void special(std::int32_t id, std::int64_t type) {
    *ids_ = id;
    advance(1, type, 1);
  }
  void padding(std::size_t count, const RowOptions& options) {
    std::fill_n(ids_, count, options.pad);
    advance(count, options.pad_type, 0);
  }

 private:
  void advance(std::size_t count, std::int64_t type, std::int64_t mask) {
    ids_ += count;
    if (types_ != nullptr) types_ = std::fill_n(types_, count, type);
    if (mask_ != nullptr) mask_ = std::fill_n(mask_, count, mask);
  }

  std::int64_t* ids_;
  std::int64_t* types_;
  std::int64_t* mask_;
  void (*widen_)(const std::int32_t*, std::size_t, std::int64_t*);
};

void write_row(const Row& row, const RowOptions& options, std::size_t index, Rows& out) {
  const std::size_t length = row.num_text_tokens() + num_special(options, row.has_pair);
  RowWriter writer(options, index, out);
  if (options.pad_left) writer.padding(out.width - length, options);
  if (options.special) writer.special(options.cls, 0);
  writer.text(row.first, 0);
  const std::size_t separators = row.has_pair ? options.pair_separators : 1;
  for (std::size_t i = 0; options.special && i < separators; ++i) writer.special(options.sep, 0);
  writer.text(row.second, options.pair_type);
  if (options.special && row.has_pair) writer.special(options.sep, options.pair_type);
  if (!options.pad_left) writer.padding(out.width - length, options);
}

void allocate(const RowOptions& options, Rows& out) {
  if (out.width != 0 && out.num_rows > static_cast<std::size_t>(-1) / 16 / out.width) throw std::bad_alloc();
  const std::size_t cells = out.num_rows * out.width;
  const auto take = [&](Buffer<std::int64_t>& matrix, bool wanted) {
    matrix.clear();
    matrix.room(wanted ? cells : 0);
    matrix.commit(wanted ? cells : 0);
  };
  take(out.input_ids, true);
  take(out.token_type_ids, options.types);
  take(out.attention_mask, options.mask);
}

// All texts' tokens, in the arenas; ends[i + 1]: where text i ends within its unit.
void encode_texts(const TextTokenizer& tokenizer, const TextView* texts, std::size_t num_texts,
                  const EncodeOptions& wanted, const WorkPlan& plan, Workspace& workspace, Buffer<std::int64_t>& ends) {
  std::vector<Unit>& units = workspace.units;
  UnitPlanner(tokenizer, texts, num_texts, wanted, plan.unit_bytes, false).next(static_cast<std::size_t>(-1), units);
  ends.append(num_texts + 1, 0);
  parallel_for(units.size(), plan.num_threads, [&](std::size_t index, std::size_t worker) {
    Arena& arena = workspace.arenas[worker];
    units[index].worker = worker;
    encode_unit(tokenizer, texts, wanted, {}, arena, arena.tokens, units[index], ends.data());
  });
}

// Calls piece(Piece) for every text in order.
template <typename Function>
void for_each_text(const Workspace& workspace, const Buffer<std::int64_t>& ends, Function piece) {
  for (const Unit& unit : workspace.units) {
    const std::int32_t* ids = workspace.arenas[unit.worker].tokens.ids.data() + unit.first_token;
    std::size_t start = 0;
    for (std::size_t i = unit.first_text; i < unit.last_text; ++i) {
      const auto end = static_cast<std::size_t>(ends[i + 1]);
      piece(Piece{ids + start, end - start});
      start = end;
    }
  }
}

// Sets first_is_longer. Of texts that were both read as far as needed only, lengths are found by reading them whole;
// such pairs are rare.
void compare_lengths(const TextTokenizer& tokenizer, const TextView* texts, const EncodeOptions& wanted,
                     std::size_t num_threads, std::vector<Row>& rows) {
  struct Limited {
    Row* row;
    const TextView* texts;
  };
  std::vector<Limited> limited;
  const TextView* text = texts;
  for (Row& row : rows) {
    row.first_is_longer = row.first.size > row.second.size;
    if (row.has_pair && std::min(row.first.size, row.second.size) == wanted.max_tokens) limited.push_back({&row, text});
    text += row.has_pair ? 2 : 1;
  }
  parallel_for(limited.size(), num_threads, [&](std::size_t index, std::size_t) {
    Scratch scratch;
    Tokens first, second;
    tokenizer.encode(limited[index].texts[0], {}, scratch, first);
    tokenizer.encode(limited[index].texts[1], {}, scratch, second);
    limited[index].row->first_is_longer = first.ids.size() > second.ids.size();
  });
}

}  // namespace

bool encode_rows(const TextTokenizer& tokenizer, const TextView* texts, const bool* has_pair, std::size_t num_rows,
                 const RowOptions& options, std::size_t num_threads, Rows& out) {
  std::vector<Row> rows(num_rows);
  std::size_t num_texts = num_rows;
  for (std::size_t i = 0; has_pair != nullptr && i < num_rows; ++i) {
    rows[i].has_pair = has_pair[i];
    num_texts += has_pair[i] ? 1 : 0;
  }
  EncodeOptions wanted;
  wanted.max_tokens = tokens_needed(options);
  const WorkPlan plan = plan_work(total_cost(texts, num_texts, wanted.max_tokens), num_threads);
  const Workspace::Lease workspace(plan.num_threads);
  Buffer<std::int64_t> ends;
  encode_texts(tokenizer, texts, num_texts, wanted, plan, *workspace, ends);

  std::size_t row = 0;
  bool is_second = false;
  for_each_text(*workspace, ends, [&](const Piece& piece) {
    (is_second ? rows[row].second : rows[row].first) = piece;
    is_second = !is_second && rows[row].has_pair;
    if (!is_second) ++row;
  });
  if (options.truncation == Truncation::kLongestFirst) {
    compare_lengths(tokenizer, texts, wanted, plan.num_threads, rows);
  }
  std::size_t longest = 0;
  for (Row& each : rows) {
    if (options.max_length != 0 && !truncate(options, each)) return false;
    longest = std::max(longest, each.num_text_tokens() + num_special(options, each.has_pair));
  }
  if (options.width != 0 && longest > options.width) return false;

  const std::size_t multiple = std::max<std::size_t>(options.multiple_of, 1);
  out.num_rows = num_rows;
  out.width = options.width != 0 ? options.width : (longest + multiple - 1) / multiple * multiple;
  if (num_rows == 0) out.width = 0;
  allocate(options, out);
  const std::size_t rows_per_unit = std::max<std::size_t>(1, kMinCellsPerUnit / std::max<std::size_t>(out.width, 1));
  parallel_for((num_rows + rows_per_unit - 1) / rows_per_unit, plan.num_threads, [&](std::size_t unit, std::size_t) {
    const std::size_t end = std::min(num_rows, (unit + 1) * rows_per_unit);
    for (std::size_t i = unit * rows_per_unit; i < end; ++i) write_row(rows[i], options, i, out);
  });
  return true;
}

}  // namespace bert_fast::wordpiece
