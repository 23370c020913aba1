// Every quantizer that tests go through: a row in the table of formats is tested without being
// named.
#pragma once

#include <ATen/ops/scalar_tensor.h>
#include <ATen/ops/tensor.h>

#include <algorithm>
#include <optional>
#include <string>
#include <vector>

#include "kernel_ops/framework/memory.h"
#include "kernels/nvfp4.h"
#include "quantization/formats/format.h"
#include "support/kernel_ops.h"

namespace tandem::testing {

/// Each format with each kind of scale that needs no state, and each of its options.
inline std::vector<std::string> quantizer_texts() {
  std::vector<std::string> texts;
  for (const FormatDef& format : formats())
    for (const ScalingDef* scaling : format.scalings) {
      if (scaling->takes_scale) continue;
      Quantizer options;
      options.format = &format;
      options.scaling = scaling;
      const auto add = [&] { texts.push_back(quantizer(options).text); };
      add();
      if (scaling->has_epsilon) {
        options.amax_epsilon = 0.5;
        add();
      }
      if (scaling->has_power_of_two) {
        options.power_of_two = true;
        add();
        options.amax_epsilon = 0;
        add();
      }
      if (scaling->has_square_blocks) {
        options.square_blocks = true;
        add();
        options.square_blocks = false;
      }
      if (scaling->has_hadamard) {
        options.hadamard = true;
        add();
      }
      if (scaling->has_stochastic_rounding) {
        options.stochastic_rounding = true;
        add();
        options.hadamard = false;
        add();
        options.stochastic_rounding = false;
      }
      if (scaling->has_four_over_six) {
        options.four_over_six = kernels::FourOverSix::mae;
        add();
        options.hadamard = true;
        add();
        options.hadamard = false;
        options.square_blocks = true;
        options.four_over_six = kernels::FourOverSix::mse;
        add();
      }
    }
  return texts;
}

inline std::vector<const Quantizer*> quantizers() {
  std::vector<const Quantizer*> all;
  for (const std::string& text : quantizer_texts()) all.push_back(&quantizer(text));
  return all;
}

/// These, and those whose scale the caller keeps.
inline std::vector<const Quantizer*> quantizers_and_delayed() {
  std::vector<const Quantizer*> all = quantizers();
  for (const char* text : {"fp8_e4m3:delayed", "fp8_e5m2:delayed"}) all.push_back(&quantizer(text));
  return all;
}

/// What one of them is given beside x: a seed and an offset, a scale, or nothing.
inline std::optional<at::Tensor> given_for(const Quantizer& quantizer) {
  if (quantizer.scaling->takes_scale) return at::scalar_tensor(3.0f, device());
  if (given_to(quantizer) != Given::seed) return std::nullopt;
  return at::tensor({int64_t{0x0123456789ABCDEF}, int64_t{3}}, at::kLong).to(device());
}

/// Calls `check(quantizer, x)`: each quantizer meets a seventh of the cases of `for_every_case`,
/// which has every pair of dtype, layout, row count and width in it; every case meets some of them.
/// Under AddressSanitizer a fifth of that.
template <typename Check>
void for_every_quantizer(const std::vector<const Quantizer*>& all, int64_t width_step,
                         Check&& check) {
  // No count of dtypes, layouts, row counts or widths has a factor of it.
  constexpr size_t kShare = kernel_ops::kSanitized ? 35 : 7;
  size_t index = 0;
  for_every_case(width_step, [&](const at::Tensor& x) {
    for (size_t q = index++ % kShare; q < all.size(); q += kShare) {
      SCOPED_TRACE(all[q]->text);
      check(*all[q], x);
    }
  });
}

/// As the name of a test.
inline std::string word_of(std::string text) {
  std::ranges::replace_if(
      text, [](unsigned char c) { return std::isalnum(c) == 0; }, '_');
  return text;
}

}  // namespace tandem::testing
