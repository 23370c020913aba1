#include "quantization/formats/made.h"

#include "kernel_ops/framework/memory.h"
#include "kernel_ops/framework/operands.h"
#include "kernels/elementwise.h"
#include "kernels/quantize.h"
#include "quantization/formats/cpu_scaling.h"

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

namespace {

/// Whether a row of y is a row of the last dimension: column codes lie along the last dimension but
/// one, and a row of y may cover more.
bool is_matrix(c10::SymIntArrayRef sizes, const kernels::Rows& y) {
  return sizes.empty() || sizes.back() == static_cast<int64_t>(y.cols);
}

bool has_codes(const Group& group) {
  return group[row_codes].defined() || group[column_codes].defined();
}

}  // namespace

void make_and_quantize(kernels::cpu::MadeRows made, const Tensor& y, c10::SymIntArrayRef sizes,
                       const RequestedCodes& requested, Group group) {
  const bool is_quantized_meanwhile = requested && has_codes(group) && is_matrix(sizes, made.y);
  Tensor memory = y;
  if (!y.defined() && requested &&
      !(is_quantized_meanwhile && requested.quantizer->scaling->cpu->band_rows != 0))
    memory = empty_cpu(C10_AS_INTARRAYREF_SLOW(sizes), dtype_of(made.y.element));
  if (memory.defined())  // only `make` writes
    made.y.data = const_cast<void*>(memory.const_data_ptr());
  if (is_quantized_meanwhile)
    return quantize_on_cpu(&made, requested.given, *requested.quantizer, group);
  kernels::cpu::make_all(made);
  if (requested) quantize_on_cpu(RowsIn(memory), requested.given, *requested.quantizer, group);
}

CodesBeside::CodesBeside(kernels::Rows y, const Tensor& memory, c10::SymIntArrayRef sizes,
                         const RequestedCodes& requested, Group group)
    : y_(y),
      sizes_(sizes.begin(), sizes.end()),
      requested_(requested),
      group_(std::move(group)),
      way_(way()),
      memory_(memory) {
  if (!memory_.defined() && (way_ == Way::once_seen || way_ == Way::at_the_end))
    memory_ = empty_cpu(C10_AS_INTARRAYREF_SLOW(sizes_), dtype_of(y.element));
  y_.data = memory_.defined() ? const_cast<void*>(memory_.const_data_ptr()) : nullptr;
}

CodesBeside::Way CodesBeside::way() const {
  if (!requested_) return Way::nowhere;
  const CpuScaling& scaling = *requested_.quantizer->scaling->cpu;
  if (!has_codes(group_) || !is_matrix(sizes_, y_)) return Way::at_the_end;
  if (scaling.band_rows == 0) return Way::once_seen;
  const bool is_of_blocks = scaling.band_rows != 1;
  return is_of_blocks && !kernels::cpu::takes_bands_of_blocks() ? Way::at_the_end : Way::in_bands;
}

size_t CodesBeside::together() const {
  return way_ == Way::in_bands ? requested_.quantizer->scaling->cpu->band_rows : 1;
}

kernels::Rows CodesBeside::rows(size_t first, size_t count) const {
  if (y_ || way_ == Way::nowhere) return rows_from(y_, first, count);
  return rows_at(kernels::cpu::memory_beside(count * y_.cols), y_, count);
}

void CodesBeside::take(kernels::ConstRows rows, size_t first) const {
  if (way_ != Way::in_bands && way_ != Way::once_seen) return;
  const kernels::cpu::Band band{rows, first, y_.rows};
  const kernels::cpu::Seen seen = way_ == Way::once_seen
                                      ? kernels::cpu::seen_in(band)
                                      : requested_.quantizer->scaling->cpu->quantize(
                                            band, requested_.given, *requested_.quantizer, group_);
  float known = amax_.load();
  while (known < seen.amax && !amax_.compare_exchange_weak(known, seen.amax)) {
  }
  if (seen.has_nan) has_nan_ = true;
}

void CodesBeside::finish() const {
  if (way_ == Way::nowhere) return;
  if (way_ == Way::at_the_end)
    return quantize_on_cpu(RowsIn(memory_), requested_.given, *requested_.quantizer, group_);
  const CpuScaling& scaling = *requested_.quantizer->scaling->cpu;
  if (scaling.quantize_seen != nullptr)
    scaling.quantize_seen(y_, {amax_.load(), has_nan_.load()}, requested_.given,
                          *requested_.quantizer, group_);
  if (group_[group_amax].defined()) *group_[group_amax].data_ptr<float>() = amax_.load();
}

}  // namespace tandem::kernel_ops
