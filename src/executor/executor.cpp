#include "executor/executor.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/record_function.h>
#include <c10/core/GradMode.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <optional>
#include <string>
#include <vector>

#include "core/overlap.h"

namespace tandem {

namespace {

bool is_written(Frame& frame, Value value) {
  const Format format = frame.type(value).format;
  return format == Format::opaque || format == Format::shape || frame.tensor(value).defined();
}

/// The tensors that hold a value's elements.
at::TensorList memory_of(Frame& frame, Value value) {
  if (const auto* const parts = frame.parts(value)) return *parts;
  return frame.tensor(value);
}

/// Checks that an in-place write changes nothing but its target. Only values in the frame are
/// checked: a value that does not exist yet has no old contents.
void check_overwrite(Frame& frame, const Plan& plan, const Overwritten& overwritten) {
  const Step& step = plan.forward[overwritten.step];
  const Value target = plan.inputs[overwritten.input];
  const auto check = [&](Value value, const at::Tensor& tensor, const char* why) {
    TORCH_CHECK(!tensor.defined() || !overlap(tensor, frame.tensor(target)), "pipeline: expected ",
                plan.types[index_of(value)].name, " unchanged until the end of the call, as ", why,
                ", got an in-place write by an ",
                "op of the pipeline. Use in_place=False, or write into a copy.");
  };
  for (const Value value : overwritten.read_later) {
    const bool is_output =
        std::find(plan.outputs.begin(), plan.outputs.end(), value) != plan.outputs.end();
    for (const at::Tensor& tensor : memory_of(frame, value))
      check(value, tensor,
            plan.kept_at[index_of(value)] >= 0 ? "backward reads it"
            : is_output                        ? "it is an output"
                                               : "a later op reads it");
  }
  for (const Value value : plan.kept)
    if (frame.type(value).format == Format::opaque)
      for (const at::Tensor& tensor : frame.tensors(value))
        check(value, tensor, "backward reads it");
  for (const Value value : step.reads)
    if (exists(value) && value != target)
      for (const at::Tensor& tensor : memory_of(frame, value))
        if (tensor.defined() && !same_elements(tensor, frame.tensor(target)))
          check(value, tensor, "the op that writes reads it");
}

void run(Frame& frame, const Step& step) {
  at::RecordFunction range(at::RecordScope::FUNCTION);
  if (range.isActive()) {
    std::vector<c10::IValue> reads;
    if (range.needsInputs())
      for (const Value value : step.reads)
        if (exists(value))
          for (const at::Tensor& tensor : frame.tensors(value)) reads.emplace_back(tensor);
    range.before("tandem::" + step.name, &reads);
  }
  Call call(frame, step);
  step.run(call);
}

/// The versions of what backward will read, noted before a step of user code: the step must not
/// write it.
class KeptVersions {
 public:
  KeptVersions(Frame& frame, const Plan& plan) : plan_(plan) {
    for (const Value value : plan.kept)
      for (const at::Tensor& tensor : frame.tensors(value))
        if (tensor.defined()) noted_.push_back({tensor, version_of(tensor), value});
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
      below;  // once, unless a step must run above it
  if (frame.path() != Path::composite && !plan.runs_user_code) below.emplace();
  for (const Overwritten& overwritten : plan.overwritten)  // before anything is computed
    check_overwrite(frame, plan, overwritten);
  size_t next_write = 0;
  for (size_t s = 0; s < plan.forward.size(); ++s) {
    const Step& step = plan.forward[s];
    for (; next_write < plan.overwritten.size() && plan.overwritten[next_write].step == s;
         ++next_write)  // also against values computed meanwhile
      check_overwrite(frame, plan, plan.overwritten[next_write]);
    std::optional<KeptVersions> before;
    if (step.runs_user_code && plan.needs_backward && frame.path() != Path::composite)
      before.emplace(frame, plan);
    run_step(frame, step);
    if (before) before->check(step);
  }
}

}  // namespace tandem
