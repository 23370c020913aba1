// A list of steps that fusions change, with an index of who reads and writes what: a change costs
// what it touches, not the list.
#pragma once

#include <c10/util/SmallVector.h>

#include <map>
#include <span>
#include <vector>

#include "core/step.h"

namespace tandem {

/// Steps at places that keep their order. A replaced step leaves an empty place, or its place to
/// the step that replaces it.
class StepList {
 public:
  using Places = std::vector<size_t>;

  StepList(Steps steps, size_t value_count);

  size_t size() const { return steps_.size(); }
  bool has(size_t place) const { return is_there_[place]; }
  const Step& operator[](size_t place) const { return steps_[place]; }

  /// Places of the steps that read, write or mutate a value, and of those that cover a part of an
  /// op.
  Places readers(Value value) const;
  Places writers(Value value) const;
  Places mutators(Value value) const;
  Places of_op(size_t op) const;

  /// Puts a step at `place`, one of the members, in place of all of them.
  void replace(std::span<const size_t> members, size_t place, Step fused);
  /// The steps in order; the list is empty afterwards.
  Steps take();

 private:
  using Index = std::vector<c10::SmallVector<uint32_t, 2>>;

  void enter(size_t place);
  static void note(Index& index, size_t key, size_t place);
  template <typename Holds>
  Places those(const Index& index, size_t key, Holds&& holds) const;

  Steps steps_;
  std::vector<bool> is_there_;
  // Entries of replaced steps stay: whoever asks looks at the step.
  Index readers_, writers_, of_op_;
  std::map<Value, std::vector<size_t>> mutators_;
};

}  // namespace tandem
