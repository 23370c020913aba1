// How backward can get each forward value that it reads: kept, re-emitted by a backward step, or
// recomputed by a forward step; and what each choice costs.
#pragma once

#include <algorithm>
#include <map>
#include <vector>

#include "planner/draft.h"
#include "planner/sizes.h"
#include "planner/value_set.h"

namespace tandem {

/// Backward without its optional re-emits, and the steps that could do them.
struct BackwardBase {
  struct Writer {
    /// Index in the whole backward.
    size_t step = npos;
    /// Whether the step does nothing but re-emit.
    bool is_apart = false;
    /// What the step reads only in order to re-emit.
    Values reads;
  };
  /// The steps that run in any case, and their indices in the whole backward.
  Steps steps;
  std::vector<size_t> places;
  std::map<Value, Writer> writers;
  /// The keys of `writers`, in the order in which backward decides about them.
  Values candidates;

  /// `never_again`: values that must not be re-emitted.
  BackwardBase(const Steps& whole, const Draft& draft, const ValueSet& never_again);
};

/// A value of forward that backward may read, and how backward can get it.
struct Item {
  Value value = Value::none;
  double bytes = 0;
  /// Whether a forward step writes it into memory that may be kept.
  bool can_be_kept = false;
  /// The forward step that could recompute it; npos: none.
  size_t step = npos;
  /// The step among BackwardBase::steps that could re-emit it; npos: none, also if a step apart
  /// re-emits it.
  size_t writer = npos;
  bool has_writer_apart = false;
  /// Items that the writer reads only in order to re-emit this one.
  std::vector<size_t> writer_reads;
  /// Steps of the base that read it.
  std::vector<size_t> readers;
  /// Whether there is no choice: it takes no memory, or only one way exists.
  bool is_fixed = false;
};

/// A forward step that backward could run a second time.
struct Rerun {
  /// Indices of items.
  std::vector<size_t> reads, writes;
  /// What it costs to run the step, whichever of its results are needed.
  double cost = 0, bytes = 0, flops = 0;
  bool is_view = false;
};

enum class Way : uint8_t { unneeded, kept, written_again, written_apart, run_again };

struct Outcome {
  bool is_possible = false;
  double bytes = 0, cost = 0;
  /// The way chosen for each item.
  std::vector<Way> ways;
};

/// All choices for what backward reads, given a fused forward. Refers to its arguments.
class Ways {
 public:
  Ways(const BackwardBase& base, const Draft& draft, const PerRow& per_row, double flops_per_byte);

  const std::vector<Item>& items() const { return items_; }
  const Rerun& rerun(size_t step) const { return reruns_[step]; }
  /// Whether a backward step that runs in any case reads the item.
  bool is_needed(size_t item) const { return std::ranges::binary_search(needed_, item); }

  /// The outcome if those of the items with a choice are kept for which `keep` is set. Use from one
  /// thread at a time.
  Outcome outcome(const std::vector<bool>& keep) const;

 private:
  size_t item_for(Value value);
  bool can_run_again(const Step& step) const;
  void complete(size_t index);
  void add_rerun(size_t index, size_t step);
  void find_successors();
  bool spread(const std::vector<bool>& keep, const std::vector<bool>& never, Outcome& found) const;
  bool is_in_order(const Outcome& found, std::vector<bool>& never) const;
  bool waits_for_reader(size_t index, const Outcome& found) const;
  Outcome weighed(Outcome found) const;

  const BackwardBase& base_;
  const Draft& draft_;
  const PerRow& per_row_;
  double flops_per_byte_;
  std::vector<size_t> item_of_;  // by value
  std::vector<Item> items_;
  std::vector<Rerun> reruns_;  // by step of forward
  ValueSet is_overwritten_, is_of_backward_;
  std::vector<size_t> writer_;      // by value: the forward step that writes it
  std::vector<size_t> needed_;      // items that steps of backward read
  std::vector<size_t> candidates_;  // items that may be re-emitted, in the order of deciding
  std::vector<std::vector<size_t>> successors_, writes_again_;  // by base step
  std::vector<std::vector<size_t>> rerun_readers_;              // by item
  mutable std::vector<bool> is_run_, is_accepted_;
};

}  // namespace tandem
