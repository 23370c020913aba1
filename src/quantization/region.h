// A region: what one outermost autocast is to recipes with a state. The nodes of its calls hold it.
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

/// Forward states of its calls are updated when the region is left with gradients enabled;
/// backward states when it has been left and the last backward of its calls has run, on whatever
/// thread. What is not updated by then (a backward that never runs, or runs again; compiled code;
/// tensors that go through the dispatcher) is updated when it is next used in another region
/// (kernel_ops/quantize/delayed.h): either way once, before its next use.
class TANDEM_API RecipeRegion : public std::enable_shared_from_this<RecipeRegion> {
 public:
  /// `number`: as kernel_ops::new_region gives it.
  explicit RecipeRegion(int64_t number);

  int64_t number() const { return number_; }
  /// The number as kernel ops read it, that of a recompute where backward runs a forward of the
  /// region again.
  const at::Tensor& token(bool is_recompute) const { return is_recompute ? recompute_ : token_; }

  /// The forward states of a call.
  void note_forward(std::span<const PendingUpdate> states);
  /// The scale that forward has used, of a state that a forward of this region has been noted with;
  /// undefined for others.
  at::Tensor scale_in_forward(const ScalingState& state) const;

  /// One more entry into it; and one less: the last one ends it. The GIL must not be held.
  void enter();
  void leave();

  /// A call whose backward is to come: noted when it has run; one that dies first is not waited
  /// for.
  class TANDEM_API Backward {
   public:
    explicit Backward(std::shared_ptr<RecipeRegion> region);
    Backward(const Backward&) = delete;
    Backward& operator=(const Backward&) = delete;
    ~Backward();
    const std::shared_ptr<RecipeRegion>& region() const { return region_; }
    /// Backward has run, with these states; the second time, of a retained graph, they wait for
    /// their next use.
    void note_run(std::span<const PendingUpdate> states);

   private:
    std::shared_ptr<RecipeRegion> region_;
    bool is_outstanding_ = true;
  };

 private:
  struct Forward {
    PendingUpdate due;
    /// Once the update has overwritten it.
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
