// A list of steps that fusions change. An index of readers and writers makes a change cost as much
// as the steps it touches, not as the list.
#pragma once

#include <c10/util/SmallVector.h>

#include <map>
#include <span>
#include <vector>

#include "core/step.h"

namespace tandem {

/// Steps at positions that keep their order. Replaced steps leave empty positions, but for the one
/// that the replacing step takes.
class StepList {
 public:
  using Places = std::vector<size_t>;

  StepList(Steps steps, size_t value_count);

  size_t size() const { return steps_.size(); }
  bool has(size_t place) const { return is_there_[place]; }
  const Step& operator[](size_t place) const { return steps_[place]; }

  /// Positions of the steps that read, write or mutate a value, and of the steps that cover a part
  /// of an op.
  Places readers(Value value) const;
  Places writers(Value value) const;
  Places mutators(Value value) const;
  Places of_op(size_t op) const;

  /// Replaces all members by one step at `place`, which is the position of a member.
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
  // Entries of replaced steps stay in the index; a look-up checks the step itself.
  Index readers_, writers_, of_op_;
  std::map<Value, std::vector<size_t>> mutators_;
};

}  // namespace tandem
