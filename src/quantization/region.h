// A region: one outermost `autocast`, as stateful recipes see it. The nodes of its calls hold it.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <mutex>
#include <span>
#include <vector>

#include "kernel_ops/quantize/delayed.h"
#include "tandem/export.h"

namespace tandem {

/// Updates the states of the calls in one region. Forward states are updated when the region is
/// left with gradients enabled. Backward states are updated when it has been left and the last
/// backward of its calls has run, on whatever thread. All other states (a backward never runs, or
/// runs a second time; compiled code; dispatched calls) are updated at their next use in another
/// region (kernel_ops/quantize/delayed.h). Either way a state is updated once, before its next use.
class TANDEM_API RecipeRegion : public std::enable_shared_from_this<RecipeRegion> {
 public:
  /// `number`: from kernel_ops::new_region.
  explicit RecipeRegion(int64_t number);

  int64_t number() const { return number_; }
  /// The region's number as a tensor that kernel ops read. `is_recompute`: the negative number,
  /// which says that backward recomputes a forward of the region.
  const at::Tensor& token(bool is_recompute) const { return is_recompute ? recompute_ : token_; }

  /// Notes the forward states of a call.
  void note_forward(std::span<const PendingUpdate> states);
  /// The scale that forward has used, if `state` is a forward state of this region; else undefined.
  at::Tensor scale_in_forward(const ScalingState& state) const;

  /// Enter it and leave it; the last exit ends the region. The caller must not hold the GIL.
  void enter();
  void leave();

  /// A call whose backward has not run. If it is destroyed before backward runs, the region does
  /// not wait for it.
  class TANDEM_API Backward {
   public:
    explicit Backward(std::shared_ptr<RecipeRegion> region);
    Backward(const Backward&) = delete;
    Backward& operator=(const Backward&) = delete;
    ~Backward();
    const std::shared_ptr<RecipeRegion>& region() const { return region_; }
    /// Notes that backward has run with these states. When a retained graph runs backward a second
    /// time, its states wait for their next use.
    void note_run(std::span<const PendingUpdate> states);

   private:
    std::shared_ptr<RecipeRegion> region_;
    bool is_outstanding_ = true;
  };

 private:
  struct Forward {
    PendingUpdate due;
    /// The scale that forward has used, once the update has overwritten it.
    at::Tensor scale_in_forward;
  };

  const int64_t number_;
  const at::Tensor token_, recompute_;
  mutable std::mutex mutex_;
  int64_t entries_ = 0, outstanding_ = 0;
  std::vector<Forward> forward_;
  std::vector<PendingUpdate> backward_;
};

}  // namespace tandem
