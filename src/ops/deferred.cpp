#include "ops/deferred.h"

#include <ATen/ops/empty.h>
#include <c10/util/Exception.h>

#include <cstring>
#include <sstream>

#include "core/overlap.h"
#include "kernel_ops/framework/memory.h"
#include "kernel_ops/grouped/grouped.h"

namespace tandem::ops {

using at::Tensor;

namespace {

enum Left : size_t { kGradY, kX, kGradScale, kGradAmax, kXScale, kXAmax, kText };

/// The operands that the text describes. Its lines are: the version of x, the dtype and both
/// directions; the quantizer of grad_y; the quantizer of x. A line is empty without a quantizer.
struct Operands {
  CodedMatrix grad_y, x;
  at::ScalarType dtype = at::kFloat;
};

Operands read(at::TensorList left) {
  std::istringstream lines(text_of(left));
  int64_t version = 0;
  int dtype = 0, of_grad = 0, of_x = 0;
  std::string grad_quantizer, x_quantizer;
  lines >> version >> dtype >> of_grad >> of_x >> std::ws;
  std::getline(lines, grad_quantizer);
  std::getline(lines, x_quantizer);
  check_unchanged("x", left[kX], version);
  const auto matrix = [&](size_t codes, size_t scale, int direction,
                          const std::string& text) -> CodedMatrix {
    if (text.empty()) return left[codes];
    const Quantizer& by = quantizer(text);
    return {left[codes], &by, static_cast<Direction>(direction), &left[scale],
            by.format->layout.has_amax ? &left[scale + 1] : nullptr};
  };
  return {matrix(kGradY, kGradScale, of_grad, grad_quantizer),
          matrix(kX, kXScale, of_x, x_quantizer), static_cast<at::ScalarType>(dtype)};
}

}  // namespace

int64_t version_of(const Tensor& tensor) {
  return tensor.is_inference() ? 0 : static_cast<int64_t>(tensor._version());
}

void check_can_leave(const Call& call, const char* op) {
  TORCH_CHECK_NOT_IMPLEMENTED(
      call.path() == Path::direct, op,
      ": expected delay_wgrad_compute=False where the call is traced, got True: ",
      "nobody could ask a graph for gradients later. Build the op without, or call it eagerly.");
}

void leave(const Call& call, size_t place, const Tensor& tensor, const Tensor* of) {
  at::TensorImpl* impl = call.mutated(place).unsafeGetTensorImpl();
  impl->shallow_copy_from(tensor.getIntrusivePtr());
  if (of != nullptr && !of->is_inference())
    impl->set_version_counter(of->unsafeGetTensorImpl()->version_counter());
}

void leave(const Call& call, size_t place, const std::string& text) {
  const Tensor bytes = at::empty({static_cast<int64_t>(text.size())}, at::kByte);
  std::memcpy(bytes.mutable_data_ptr(), text.data(), text.size());
  leave(call, place, bytes);
}

void leave_product(const Call& call, size_t grad_y, size_t x) {
  check_can_leave(call, "basic_linear");
  std::ostringstream text;
  const bool is_coded = call.format(x) == Format::codes;
  const auto direction = [&](size_t read) { return static_cast<int>(call.type(read).direction); };
  text << version_of(call.in(x)) << " " << static_cast<int>(call.type(x).dtype) << " "
       << direction(grad_y) << " " << direction(x);
  leave(call, kGradY, is_coded ? call.in(grad_y) : call.in(grad_y).clone());
  leave(call, kX, call.in(x), &call.in(x));
  for (const auto& [read, scale] : {std::pair(grad_y, kGradScale), std::pair(x, kXScale)}) {
    text << "\n";
    if (!is_coded) continue;
    const CodedMatrix codes = call.operand(read);
    text << codes.quantizer->text;
    leave(call, scale, *codes.dequant_scale);
    if (codes.amax != nullptr) leave(call, scale + 1, *codes.amax);
  }
  leave(call, kText, text.str());
}

void check_unchanged(const char* name, const Tensor& left, int64_t version) {
  TORCH_CHECK(version_of(left) == version, "backward_dw: expected ", name,
              " unchanged since backward, as gradients of weights are computed from it, got an ",
              "in-place write. Call backward_dw() before it, or write into a copy.");
}

std::string text_of(at::TensorList left) {
  const Tensor& text = left.back();
  return {static_cast<const char*>(text.const_data_ptr()), static_cast<size_t>(text.numel())};
}

Tensor left_grad_weight(at::TensorList left) {
  const Operands operands = read(left);
  const Tensor target = kernel_ops::empty_beside(
      left[kX], {left[kGradY].size(-1), left[kX].size(-1)}, operands.dtype);
  kernel_ops::grad_weight_of_codes(operands.grad_y, operands.x, target, /*accumulate=*/false);
  return target;
}

void add_left_grad_weight(at::TensorList left, const Tensor& target, bool accumulate) {
  const Operands operands = read(left);
  const int64_t sizes[] = {left[kGradY].size(-1), left[kX].size(-1)};
  TORCH_CHECK_VALUE(target.sizes() == at::IntArrayRef(sizes) && !target.requires_grad(),
                    "backward_dw: expected main_grad of the weight's shape ",
                    at::IntArrayRef(sizes), " without a gradient of its own, got ", target.sizes(),
                    ", requires_grad=", target.requires_grad(), ". Allocate it with torch.zeros.");
  TORCH_CHECK_VALUE(!overlap(target, left[kX]),
                    "backward_dw: expected memory of its own for main_grad, got that of x, which ",
                    "is read while it is written. Allocate it by itself.");
  kernel_ops::grad_weight_of_codes(operands.grad_y, operands.x, target, accumulate);
}

}  // namespace tandem::ops
