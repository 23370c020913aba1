// Gradients of weights that are computed later: what backward leaves for them in tensors of the
// caller, and the products themselves.
#pragma once

#include <string>

#include "core/call.h"
#include "tandem/export.h"

namespace tandem::ops {

/// How many tensors hold what the gradient of a product's weight is computed from: grad_y and x,
/// scale and amax of each where they are codes, and a text that says what they are.
inline constexpr size_t kDeferredProduct = 7;

/// Its version, which everybody sees who writes it in place.
int64_t version_of(const at::Tensor& tensor);

/// Throws c10::NotImplementedError where the step is traced: nobody could ask a graph later.
void check_can_leave(const Call& call, const char* op);

/// Makes the caller's tensor at `place` of what the step mutates this one. `of`: a tensor of the
/// caller whose memory it is, with its counter of versions: whoever writes it later is found out.
void leave(const Call& call, size_t place, const at::Tensor& tensor,
           const at::Tensor* of = nullptr);

/// The same of a text, in bytes.
void leave(const Call& call, size_t place, const std::string& text);

/// Leaves the operands of the gradient of a product's weight, which are numbers or codes. The
/// gradient is copied where it is numbers, as it may become the `grad` of a leaf, which is added
/// to; the text begins with the version of x.
void leave_product(const Call& call, size_t grad_y, size_t x);

/// Throws c10::Error where the memory that was left of what `name` says was written in place since
/// it had this version.
void check_unchanged(const char* name, const at::Tensor& left, int64_t version);

/// The text that was left behind the tensors of an entry.
std::string text_of(at::TensorList left);

/// The gradient that leave_product has left, in the dtype in which backward would have written it.
///
/// Throws: c10::Error where x was written in place since.
TANDEM_API at::Tensor left_grad_weight(at::TensorList left);
/// The same into `target`, or added to it: a main_grad [out_features, in_features].
///
/// Throws: as above; c10::ValueError where target has another shape or requires grad.
TANDEM_API void add_left_grad_weight(at::TensorList left, const at::Tensor& target,
                                     bool accumulate);

}  // namespace tandem::ops
