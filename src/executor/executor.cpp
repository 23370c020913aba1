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

}  // namespace

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
  for (const Step& step : plan.forward) run_step(frame, step);
}

}  // namespace tandem
