// Runs steps of a plan when their values are needed.
#pragma once

#include <c10/util/Exception.h>

#include <algorithm>
#include <vector>

#include "autograd/session.h"

namespace tandem {

/// Values that exist are not computed a second time.
class OnDemand : public Session {
 public:
  OnDemand(const Plan& plan, const Arguments& arguments, Path path)
      : Session(plan, path, arguments), is_sized_(plan.types.size()) {}

  void set(Value value, const at::Tensor& tensor) {
    if (exists(value) && frame().type(value).format == Format::plain)
      frame().tensor(value) = tensor;
  }
  void set_sizes(Value value, const std::vector<c10::SymInt>& sizes) {
    frame().shape(value) = {sizes.begin(), sizes.end()};
    is_sized_[index_of(value)] = true;
  }

  bool has(Value value) {
    if (frame().type(value).format == Format::shape) return is_sized_[index_of(value)];
    return frame().tensor(value).defined();
  }

  /// Draws seeds on the device of this value if the input of a seed step is absent.
  void draw_like(Value value) { like_ = value; }

  /// Runs a step after the steps that write what it reads.
  void run(const Step& step) {
    Step keeping = step;
    if (step.kind == StepKind::seed && exists(like_) && !has(step.reads[0]))
      keeping.reads[0] = like_;
    for (const Value value : keeping.reads)
      if (exists(value)) provide(value);
    run_keeping(std::move(keeping));
    for (const Value value : step.writes)
      if (exists(value)) is_sized_[index_of(value)] = true;
  }

  /// Runs the step that writes a value, unless the value exists.
  void provide(Value value) {
    if (has(value)) return;
    const auto step = std::ranges::find_if(plan().forward,
                                           [&](const Step& other) { return writes(other, value); });
    TORCH_CHECK_VALUE(step != plan().forward.end(), "op_backward: expected ",
                      plan().types[index_of(value)].name,
                      " on the context, as backward reads it, got none. Save in forward what the "
                      "op's own forward saves.");
    run(*step);
  }

 private:
  std::vector<bool> is_sized_;
  Value like_ = Value::none;
};

}  // namespace tandem
