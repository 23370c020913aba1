#include "executor/executor.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/record_function.h>
#include <c10/core/GradMode.h>
#include <c10/util/Exception.h>

#include <optional>

namespace tandem {

namespace {

bool is_written(Frame& frame, Value value) {
  const Format format = frame.type(value).format;
  return format == Format::opaque || format == Format::shape || frame.tensor(value).defined();
}

void run(Frame& frame, const Step& step) {
  RECORD_FUNCTION(step.name.c_str(), c10::ArrayRef<const c10::IValue>{});
  Call call(frame, step);
  step.run(call);
}

/// What backward will read and is there before a step of user code: the step may not write it.
class KeptVersions {
 public:
  KeptVersions(Frame& frame, const Plan& plan) : plan_(plan) {
    for (const Kept& kept : plan.kept) note(frame.tensor(kept.value, kept.part), kept.value);
    for (const Value value : plan.kept_opaque)
      if (frame.type(value).format == Format::opaque)
        for (const at::Tensor& tensor : frame.opaque(value).tensors) note(tensor, value);
  }
  void check(const Step& step) const {
    for (const auto& [tensor, version, value] : noted_)
      TORCH_CHECK(version == version_of(tensor), step.name, ": expected ",
                  plan_.types[index_of(value)].name,
                  " unchanged, as backward reads it, got an in-place write by this op. Write into "
                  "a copy.");
  }

 private:
  struct Noted {
    at::Tensor tensor;
    int64_t version;
    Value value;
  };
  void note(const at::Tensor& tensor, Value value) {
    if (tensor.defined()) noted_.push_back({tensor, version_of(tensor), value});
  }
  const Plan& plan_;
  std::vector<Noted> noted_;
};

}  // namespace

int64_t version_of(const at::Tensor& tensor) {
  return tensor.is_inference() ? 0 : static_cast<int64_t>(tensor._version());
}

void run_step(Frame& frame, const Step& step) {
  if (frame.path() == Path::composite) {
    run(frame, step);
  } else if (step.runs_user_code) {
    c10::AutoGradMode no_grad(false);
    run(frame, step);
  } else {
    at::AutoDispatchBelowADInplaceOrView below;
    run(frame, step);
  }
  for (const Value value : step.writes)
    if (exists(value))
      TORCH_INTERNAL_ASSERT(is_written(frame, value), step.name, " did not write ",
                            frame.type(value).name);
  for (const Value value : step.dead) frame.drop(value);
}

void run_forward(Frame& frame, const Plan& plan) {
  const NoAutocast no_autocast;
  std::optional<at::AutoDispatchBelowADInplaceOrView>
      below;  // once, where no step needs to be above it
  if (frame.path() != Path::composite && !plan.runs_user_code) below.emplace();
  for (const Step& step : plan.forward) {
    std::optional<KeptVersions> before;
    if (step.runs_user_code && plan.needs_backward && frame.path() != Path::composite)
      before.emplace(frame, plan);
    run_step(frame, step);
    if (before) before->check(step);
  }
}

}  // namespace tandem
