// A set of a plan's values.
#pragma once

#include <vector>

#include "core/value.h"

namespace tandem {

class ValueSet {
 public:
  explicit ValueSet(size_t count) : flags_(count) {}
  ValueSet(size_t count, std::initializer_list<const Values*> lists) : flags_(count) {
    for (const Values* list : lists) add(*list);
  }
  void add(Value value) {
    if (exists(value)) flags_[index_of(value)] = true;
  }
  void add(const Values& values) {
    for (const Value value : values) add(value);
  }
  bool operator()(Value value) const {
    return index_of(value) < flags_.size() && flags_[index_of(value)];
  }
  const std::vector<bool>& flags() const { return flags_; }

 private:
  std::vector<bool> flags_;
};

}  // namespace tandem
