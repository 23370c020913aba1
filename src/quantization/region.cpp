#include "quantization/region.h"

#include <ATen/ops/clone.h>
#include <c10/core/GradMode.h>
#include <c10/core/InferenceMode.h>

#include <algorithm>

#include "kernel_ops/framework/memory.h"

namespace tandem {

namespace {

at::Tensor number_tensor(int64_t number) {
  const c10::InferenceMode no_inference(false);  // autograd nodes hold the tensor
  // No mode may intercept the allocation: a region may be entered under a mode that creates tensors
  // without memory, as exports do.
  at::Tensor tensor = kernel_ops::empty_cpu({1}, at::kLong);
  *tensor.mutable_data_ptr<int64_t>() = number;
  return tensor;
}

bool is_same(const ScalingState& a, const ScalingState& b) {
  return a.amax_history.is_same(b.amax_history);
}

}  // namespace

RecipeRegion::RecipeRegion(int64_t number)
    : number_(number), token_(number_tensor(number)), recompute_(number_tensor(-number)) {}

void RecipeRegion::note_forward(std::span<const PendingUpdate> states) {
  const std::lock_guard<std::mutex> lock(mutex_);
  for (const PendingUpdate& state : states) {
    const auto known = std::ranges::find_if(
        forward_, [&](const Forward& each) { return is_same(each.due.state, state.state); });
    if (known == forward_.end()) {
      forward_.push_back({state, {}});
    } else {
      known->due = state;
    }
  }
}

at::Tensor RecipeRegion::scale_in_forward(const ScalingState& state) const {
  const std::lock_guard<std::mutex> lock(mutex_);
  for (const Forward& each : forward_)
    if (is_same(each.due.state, state))
      return each.scale_in_forward.defined() ? each.scale_in_forward : state.scale;
  return {};
}

void RecipeRegion::enter() {
  const std::lock_guard<std::mutex> lock(mutex_);
  ++entries_;
}

void RecipeRegion::leave() {
  std::vector<PendingUpdate> due;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (--entries_ != 0) return;
    if (outstanding_ == 0) due.swap(backward_);
    for (Forward& each : forward_) {
      if (each.scale_in_forward.defined() || !c10::GradMode::is_enabled()) continue;
      each.scale_in_forward = each.due.state.scale.clone();
      due.push_back(each.due);
    }
  }
  kernel_ops::update_states(due);
}

RecipeRegion::Backward::Backward(std::shared_ptr<RecipeRegion> region)
    : region_(std::move(region)) {
  const std::lock_guard<std::mutex> lock(region_->mutex_);
  ++region_->outstanding_;
}

RecipeRegion::Backward::~Backward() {
  if (!is_outstanding_) return;
  const std::lock_guard<std::mutex> lock(region_->mutex_);
  --region_->outstanding_;
}

void RecipeRegion::Backward::note_run(std::span<const PendingUpdate> states) {
  if (!is_outstanding_) return;
  is_outstanding_ = false;
  std::vector<PendingUpdate> due;
  {
    const std::lock_guard<std::mutex> lock(region_->mutex_);
    for (const PendingUpdate& state : states)
      if (std::ranges::none_of(region_->backward_, [&](const PendingUpdate& each) {
            return is_same(each.state, state.state);
          }))
        region_->backward_.push_back(state);
    if (--region_->outstanding_ != 0 || region_->entries_ != 0) return;
    due.swap(region_->backward_);
  }
  kernel_ops::update_states(due);
}

}  // namespace tandem
