// Delayed gradients of weights: the operands that backward leaves in tensors of the caller, and the
// products that compute the gradients from them.
#pragma once

#include <string>

#include "core/call.h"
#include "tandem/export.h"

namespace tandem::ops {

/// The number of tensors that hold the operands of one product's delayed gradient: grad_y and x; a
/// scale and an amax of each, where it has codes; a text that describes the operands.
inline constexpr size_t kDeferredProduct = 7;

/// Returns the version of a tensor, which every write in place increases.
int64_t version_of(const at::Tensor& tensor);

/// Throws c10::NotImplementedError where the step is traced, because a graph cannot compute
/// gradients after its end.
void check_can_leave(const Call& call, const char* op);

/// Makes the caller's tensor at index `place` of the step's mutations an alias of `tensor`. `of` is
/// the tensor of the caller that owns the memory; the alias shares its version counter, so that
/// later writes are detected.
void leave(const Call& call, size_t place, const at::Tensor& tensor,
           const at::Tensor* of = nullptr);

/// Stores the bytes of a text in the caller's tensor at index `place` of the step's mutations.
void leave(const Call& call, size_t place, const std::string& text);

/// Leaves the operands of the gradient of a product's weight, which are numbers or codes. A
/// gradient in numbers is copied, because it may become the `grad` of a leaf, to which later
/// gradients are added. The text begins with the version of x.
void leave_product(const Call& call, size_t grad_y, size_t x);

/// Throws c10::Error where the memory of `left` was written in place since it had this version. The
/// message names it by `name`.
void check_unchanged(const char* name, const at::Tensor& left, int64_t version);

/// Returns the text in the last tensor of an entry.
std::string text_of(at::TensorList left);

/// Computes the gradient from the operands that leave_product left, in the dtype in which backward
/// would have written it.
///
/// Shapes:  [out_features, in_features].
/// Throws:  c10::Error where x was written in place since.
TANDEM_API at::Tensor left_grad_weight(at::TensorList left);
/// Computes the gradient into `target`, which is a main_grad, or adds it to `target`.
///
/// Shapes:  target [out_features, in_features].
/// Throws:  c10::Error where x was written in place since; c10::ValueError where target has another
///          shape or requires grad.
TANDEM_API void add_left_grad_weight(at::TensorList left, const at::Tensor& target,
                                     bool accumulate);

}  // namespace tandem::ops
