// Ops that move values instead of computing them. Most are renames and cost nothing in a plan.
#pragma once

#include <ATen/core/Tensor.h>

#include "core/call.h"
#include "core/op_def.h"

namespace tandem::ops {

/// y = x.
extern const OpDef kIdentity;

/// y = x.reshape(shape): a view where the layout of x allows one. `shape` may have one -1.
extern const OpDef kReshape;

/// y = x * factor, in the dtype of x.
extern const OpDef kConstantScale;

/// In training y = keep ? x / (1 - p) : 0, with a mask from a seed that each call draws; in
/// evaluation y = x. Backward keeps the seed, not the mask.
extern const OpDef kDropout;

/// Under a recipe y is x rounded to the recipe's format of inputs (`forward`), and the gradient is
/// rounded to its format of gradients (`backward`). Products that follow multiply the codes.
/// Without a recipe y = x.
extern const OpDef kQuantize;

/// y = x + extra. With `in_place` the sum is written into the caller's tensor, unless this holds
/// codes.
///
/// Shapes:  x and extra broadcast, as in torch; with `in_place` y has the sizes of extra. Where the
///          gradient of a smaller operand is required, the caller must pass this operand, because
///          only autograd sums the gradient to its sizes.
/// Dtypes:  y has the dtype to which torch promotes x and extra.
/// Throws:  c10::ValueError where the shapes differ otherwise, and where `in_place` would overwrite
///          a tensor that autograd needs.
extern const OpDef kAddExtraInput;

/// Whether the caller passes this read as an extra input. The pipeline's x is none: it reaches a
/// sum through a channel, and the pipeline itself sums its gradient.
bool is_callers(const Call& call, size_t read);

/// Returns the sizes of the sum of an x of `sizes` and the extra input, which is read `read`: the
/// sizes to which both broadcast where gradients allow it, else `sizes`.
c10::SymDimVector sizes_of_sum(const Call& call, size_t read, c10::SymIntArrayRef sizes);

/// Replaces the options of a sum with `in_place` where the plan is traced. The result is then a
/// tensor of its own, but the caller's tensor must still be able to hold it.
const Options& caller_holds_sum();

/// Returns the extra input of a sum, which is read `read`. A tensor of the caller is expanded to
/// `sizes`; other tensors stay as they are, and the kernel checks them. Throws c10::ValueError
/// where the caller's tensor must hold the sum and cannot.
at::Tensor extra_of(const Call& call, size_t read, c10::SymIntArrayRef sizes);

/// Returns x, or a larger copy of it.
at::Tensor broadcast_to(const at::Tensor& x, c10::SymIntArrayRef sizes);

/// Returns x, broadcast to `sizes`, plus the extra input.
at::Tensor sum_of_sizes(Call& call, const at::Tensor& x, size_t extra, c10::SymIntArrayRef sizes);

/// Throws c10::ValueError where the caller's tensor cannot hold its sum with x.
void check_target(const Call& call, const at::Tensor& target, const at::Tensor& x);

/// y and the extra output are x. Backward adds their gradients.
extern const OpDef kMakeExtraOutput;

}  // namespace tandem::ops
