#include "kernel_ops/made.h"

#include "kernel_ops/memory.h"
#include "kernels/elementwise.h"

namespace tandem::kernel_ops {

namespace {

at::ScalarType dtype_of(kernels::Element element) {
  switch (element) {
    case kernels::Element::bfloat16:
      return at::kBFloat16;
    case kernels::Element::float16:
      return at::kHalf;
    case kernels::Element::float32:
      break;
  }
  return at::kFloat;
}

}  // namespace

SumsOfMade::SumsOfMade(size_t rows, size_t cols) : rows_(rows) {
  if (cols == 0) return;
  const auto count = static_cast<int64_t>(kernels::sum_blocks(rows) * cols);
  memory_ = empty_cpu({count}, at::kFloat);
  part_ = {memory_.data_ptr<float>(), cols, kernels::sum_block_rows(rows)};
}

void SumsOfMade::finish(kernels::Vector totals) const {
  if (part_) kernels::cpu::add_partial_sums(part_, rows_, totals);
}

void make_and_quantize(kernels::cpu::MadeRows made, const Tensor& y, c10::SymIntArrayRef sizes,
                       const std::optional<Tensor>& given, const Quantizer& quantizer,
                       Group group) {
  if (y.defined()) made.y.data = const_cast<void*>(y.const_data_ptr());  // `make` alone writes
  const bool has_codes = group[row_codes].defined() || group[column_codes].defined();
  // Codes of a column lie along the last dimension but one, which a row may go beyond.
  const bool is_matrix = sizes.empty() || sizes.back() == static_cast<int64_t>(made.y.cols);
  if (has_codes && is_matrix && quantizer.scaling->quantize_made != nullptr)
    return quantizer.scaling->quantize_made(made, given, quantizer, group);
  const Tensor all =
      y.defined() ? y : empty_cpu(C10_AS_INTARRAYREF_SLOW(sizes), dtype_of(made.y.element));
  made.make(0, made.y.rows, const_cast<void*>(all.const_data_ptr()));
  quantizer.scaling->quantize(all, given, quantizer, group);
}

MadeInMemory::MadeInMemory(kernels::cpu::MadeRows made) : made_(std::move(made)) {
  if (made_.y) return;
  memory_ = empty_cpu({static_cast<int64_t>(made_.y.rows), static_cast<int64_t>(made_.y.cols)},
                      dtype_of(made_.y.element));
  made_.y.data = memory_.data_ptr();
}

}  // namespace tandem::kernel_ops
