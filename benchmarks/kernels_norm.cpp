// Norms and quantization on arrays that do not fit the last-level cache: bytes, GB/s and the
// share of a loop that only moves them.
//
//   kernels_norm [rows hidden threads]        default 4096 1024 2
#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "kernels/fp8_block.h"
#include "kernels/mxfp8.h"
#include "kernels/norm.h"
#include "kernels/nvfp4.h"
#include "kernels/parallel.h"
#include "kernels/quantize.h"
#include "support/thread_pool.h"

namespace tandem {
namespace {

using kernels::ConstRows;
using kernels::ConstVector;
using kernels::Element;
using kernels::Rows;
using kernels::Vector;
using Buffer = std::vector<uint8_t>;

constexpr size_t kRotatedBytes = size_t{160} << 20;
constexpr int kRounds = 30;

struct Timing {
  double best, median;
};

Timing measure(size_t sets, const std::function<void(size_t set)>& run) {
  std::vector<double> seconds;
  for (size_t set = 0; set < sets; ++set) run(set);
  for (int round = 0; round < kRounds; ++round) {
    const auto start = std::chrono::steady_clock::now();
    run(static_cast<size_t>(round) % sets);
    seconds.push_back(
        std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count());
  }
  std::sort(seconds.begin(), seconds.end());
  return {seconds.front(), seconds[seconds.size() / 2]};
}

/// Arrays of one call, `inputs` read and `outputs` written, each of rows * hidden elements; fp8
/// outputs have one byte per element.
struct Set {
  std::vector<Buffer> arrays;
};

/// out[i] ^= nothing but the inputs: the bytes a kernel has to move, by the plainest loop that the
/// compiler turns into vectors.
void move_bytes(const std::vector<const uint64_t*>& inputs, size_t words, uint64_t* output,
                size_t output_words) {
  kernels::parallel_for(0, static_cast<int64_t>(output_words / 512), 1,
                        [&](int64_t first, int64_t last) {
                          const size_t ratio = words / output_words;
                          for (size_t i = static_cast<size_t>(first) * 512;
                               i < static_cast<size_t>(last) * 512; i += 512) {
                            const uint64_t* a = inputs[0] + i * ratio;
                            const uint64_t* b = inputs.size() > 1 ? inputs[1] + i * ratio : nullptr;
                            const uint64_t* c = inputs.size() > 2 ? inputs[2] + i * ratio : nullptr;
                            uint64_t* __restrict to = output + i;
                            if (ratio > 1) {
                              for (size_t k = 0; k < 512; ++k) {
                                uint64_t sum = 0;
                                for (size_t part = 0; part < ratio; ++part)
                                  sum ^= a[k + part * 512];
                                to[k] = sum;
                              }
                            } else if (c != nullptr) {
                              for (size_t k = 0; k < 512; ++k) to[k] = a[k] ^ b[k] ^ c[k];
                            } else if (b != nullptr) {
                              for (size_t k = 0; k < 512; ++k) to[k] = a[k] ^ b[k];
                            } else {
                              for (size_t k = 0; k < 512; ++k) to[k] = a[k];
                            }
                          }
                        });
}

struct Bench {
  size_t rows, hidden;
  Element element;

  size_t bytes() const { return rows * hidden * bytes_per_element(element); }

  void report(
      const char* name, size_t input_count, size_t output_bytes,
      const std::function<void(const std::vector<ConstRows>& inputs, void* output)>& kernel) const {
    const size_t per_call = input_count * bytes() + output_bytes;
    const size_t sets = std::max<size_t>(2, kRotatedBytes / per_call + 1);
    std::vector<Set> rotated(sets);
    for (Set& set : rotated) {
      for (size_t i = 0; i < input_count; ++i) set.arrays.push_back(random_values(i));
      set.arrays.emplace_back(output_bytes);
    }
    const Timing limit = measure(sets, [&](size_t s) {
      std::vector<const uint64_t*> inputs;
      for (size_t i = 0; i < input_count; ++i)
        inputs.push_back(reinterpret_cast<uint64_t*>(rotated[s].arrays[i].data()));
      move_bytes(inputs, bytes() / 8, reinterpret_cast<uint64_t*>(rotated[s].arrays.back().data()),
                 output_bytes / 8);
    });
    const Timing time = measure(sets, [&](size_t s) {
      std::vector<ConstRows> inputs;
      for (size_t i = 0; i < input_count; ++i)
        inputs.push_back({rotated[s].arrays[i].data(), element, rows, hidden, hidden});
      kernel(inputs, rotated[s].arrays.back().data());
    });
    const double megabytes = static_cast<double>(per_call) / 1e6;
    std::printf(
        "%-30s %-9s %7.1f MB  best %7.0f us %6.1f GB/s  median %7.0f us %6.1f GB/s  of limit: best "
        "%4.2f median %4.2f\n",
        name,
        element == Element::float32    ? "float32"
        : element == Element::bfloat16 ? "bfloat16"
                                       : "float16",
        megabytes, time.best * 1e6, megabytes / 1e3 / time.best, time.median * 1e6,
        megabytes / 1e3 / time.median, limit.best / time.best, limit.median / time.median);
  }

  Buffer random_values(size_t seed) const {
    Buffer buffer(bytes());
    uint32_t state = static_cast<uint32_t>(seed) * 2654435761u + 12345u;
    for (size_t i = 0; i < rows * hidden; ++i) {
      state = state * 1664525u + 1013904223u;
      // Signed values from 2^-4 to 2: any mantissa, an exponent of a few, in either width.
      const uint32_t bits =
          (state & 0x80000000u) | ((123u + ((state >> 28) & 3u)) << 23) | (state & 0x7FFFFFu);
      if (element == Element::float32) {
        reinterpret_cast<uint32_t*>(buffer.data())[i] = bits;
      } else if (element == Element::bfloat16) {
        reinterpret_cast<uint16_t*>(buffer.data())[i] = static_cast<uint16_t>(bits >> 16);
      } else {
        const uint32_t half =
            ((bits >> 16) & 0x8000u) | ((11u + ((state >> 28) & 3u)) << 10) | (state & 0x3FFu);
        reinterpret_cast<uint16_t*>(buffer.data())[i] = static_cast<uint16_t>(half);
      }
    }
    return buffer;
  }
};

void run_all(const Bench& bench) {
  using namespace kernels;
  const size_t rows = bench.rows, hidden = bench.hidden, bytes = bench.bytes();
  const Element element = bench.element;
  std::vector<float> gamma(hidden, 1.25f), beta(hidden, 0.5f), mean(rows), inv(rows),
      grad_gamma(hidden), grad_beta(hidden);
  const ConstVector weight{gamma.data(), Element::float32, hidden},
      bias{beta.data(), Element::float32, hidden};
  const Vector grad_weight{grad_gamma.data(), Element::float32, hidden},
      grad_bias{grad_beta.data(), Element::float32, hidden};
  const auto rows_of = [&](void* data) { return Rows{data, element, rows, hidden, hidden}; };

  const auto forward = [&](const ConstRows& x, void* out, bool centered) {
    cpu::norm_forward({.x = x,
                       .weight = weight,
                       .bias = bias,
                       .y = rows_of(out),
                       .mean = centered ? mean.data() : nullptr,
                       .inv_norm = inv.data()});
  };
  const auto backward = [&](const std::vector<ConstRows>& in, void* out, bool centered) {
    cpu::norm_backward({.grad_y = in[0],
                        .x = in[1],
                        .weight = weight,
                        .bias = bias,
                        .mean = centered ? mean.data() : nullptr,
                        .inv_norm = inv.data(),
                        .grad_residual = in.size() > 2 ? in[2] : ConstRows(),
                        .grad_x = rows_of(out)},
                       grad_weight, centered ? grad_bias : Vector());
  };
  for (const bool centered : {false, true}) {
    const std::string name = centered ? "layer_norm" : "rms_norm";
    bench.report(
        (name + "_forward").c_str(), 1, bytes,
        [&](const std::vector<ConstRows>& in, void* out) { forward(in[0], out, centered); });
    for (const int operands : {2, 3})
      bench.report(
          (name + "_backward" + (operands == 3 ? " + residual" : "")).c_str(), operands, bytes,
          [&](const std::vector<ConstRows>& in, void* out) { backward(in, out, centered); });
  }
  float dequant_scale = 0.0f, amax = 0.0f;
  bench.report(
      "quantize_current", 1, rows * hidden, [&](const std::vector<ConstRows>& in, void* out) {
        cpu::quantize_current(in[0], {}, {static_cast<uint8_t*>(out), &dequant_scale, &amax});
      });
  bench.report("quantize_delayed", 1, rows * hidden,
               [&](const std::vector<ConstRows>& in, void* out) {
                 cpu::quantize_delayed(in[0], Fp8Format::e4m3, 200.0f,
                                       {static_cast<uint8_t*>(out), &dequant_scale, &amax});
               });
  // The scales, 1/32 of the codes, are not counted.
  std::vector<uint8_t> row_scales(mx_scale_shape(MxDirection::row, rows, hidden).size()),
      column_scales(mx_scale_shape(MxDirection::column, rows, hidden).size());
  bench.report(
      "mxfp8_quantize, by row", 1, rows * hidden, [&](const std::vector<ConstRows>& in, void* out) {
        cpu::mxfp8_quantize(in[0], {}, {static_cast<uint8_t*>(out), row_scales.data()}, {}, &amax);
      });
  bench.report("mxfp8_quantize, by column", 1, rows * hidden,
               [&](const std::vector<ConstRows>& in, void* out) {
                 cpu::mxfp8_quantize(in[0], {}, {},
                                     {static_cast<uint8_t*>(out), column_scales.data()}, &amax);
               });
  bench.report("mxfp8_quantize, both ways", 1, 2 * rows * hidden,
               [&](const std::vector<ConstRows>& in, void* out) {
                 auto* codes = static_cast<uint8_t*>(out);
                 cpu::mxfp8_quantize(in[0], {}, {codes, row_scales.data()},
                                     {codes + rows * hidden, column_scales.data()}, &amax);
               });
  std::vector<float> block_scales(fp8_block_scales(Fp8BlockShape::row, rows, hidden).size() +
                                  fp8_block_scales(Fp8BlockShape::column, rows, hidden).size());
  float* const column_block_scales =
      block_scales.data() + fp8_block_scales(Fp8BlockShape::row, rows, hidden).size();
  const Fp8Scaling by_powers{.options = {.power_of_two = true}};
  bench.report("fp8_block_quantize, by row", 1, rows * hidden,
               [&](const std::vector<ConstRows>& in, void* out) {
                 cpu::fp8_block_quantize(in[0], by_powers,
                                         {static_cast<uint8_t*>(out), block_scales.data()}, {}, {},
                                         &amax);
               });
  bench.report("fp8_block_quantize, both ways", 1, 2 * rows * hidden,
               [&](const std::vector<ConstRows>& in, void* out) {
                 auto* codes = static_cast<uint8_t*>(out);
                 cpu::fp8_block_quantize(in[0], by_powers, {codes, block_scales.data()},
                                         {codes + rows * hidden, column_block_scales}, {}, &amax);
               });
  bench.report("fp8_block_quantize, squares", 1, rows * hidden,
               [&](const std::vector<ConstRows>& in, void* out) {
                 cpu::fp8_block_quantize(in[0], by_powers, {}, {},
                                         {static_cast<uint8_t*>(out), block_scales.data()}, &amax);
               });
  std::vector<uint8_t> fp4_scales(2 * rows * hidden);  // more than there are
  float amaxes[2];
  const auto nvfp4 = [&](const char* name, const Fp4Scaling& scaling, bool by_column) {
    const size_t codes = fp4_code_shape(Fp4Direction::row, rows, hidden).size();
    bench.report(
        name, 1, (by_column ? 2 : 1) * codes, [&](const std::vector<ConstRows>& in, void* out) {
          auto* to = static_cast<uint8_t*>(out);
          Fp4Output column;
          if (by_column) column = {to + codes, &fp4_scales[rows * hidden], &amaxes[1]};
          cpu::nvfp4_quantize(in[0], scaling, {to, fp4_scales.data(), &amaxes[0]}, column, &amax);
        });
  };
  nvfp4("nvfp4_quantize, by row", {}, false);
  nvfp4("nvfp4_quantize, both ways", {}, true);
  nvfp4("nvfp4_quantize, squares, both ways", {.options = {.square_blocks = true}}, true);
  nvfp4("nvfp4_quantize, rotated", {.options = {.hadamard = true}}, true);
  nvfp4("nvfp4_quantize, rotated, by chance",
        {.options = {.hadamard = true, .stochastic_rounding = true}}, true);
  const auto made_by_norm = [&](const ConstRows& x) -> cpu::MadeRows {
    return {{nullptr, element, rows, hidden, hidden}, [&, x](size_t first, size_t count, void* to) {
              const auto* from = static_cast<const std::byte*>(x.data) +
                                 first * x.stride * bytes_per_element(x.element);
              cpu::norm_forward({.x = {from, x.element, count, hidden, x.stride},
                                 .weight = weight,
                                 .y = {to, element, count, hidden, hidden},
                                 .inv_norm = inv.data() + first});
            }};
  };
  bench.report(
      "rms_norm, mxfp8_quantize, by row", 1, rows * hidden,
      [&](const std::vector<ConstRows>& in, void* out) {
        const cpu::MadeRows made = made_by_norm(in[0]);
        cpu::mxfp8_quantize(&made, {}, {static_cast<uint8_t*>(out), row_scales.data()}, {}, &amax);
      });
}

}  // namespace
}  // namespace tandem

int main(int argc, char** argv) {
  const auto argument = [&](int i, size_t otherwise) {
    return argc > i ? static_cast<size_t>(std::strtoull(argv[i], nullptr, 10)) : otherwise;
  };
  const size_t rows = argument(1, 4096), hidden = argument(2, 1024), threads = argument(3, 2);
  std::printf("%zu x %zu, %zu threads\n", rows, hidden, threads);
  const tandem::testing::ScopedThreadPool pool(static_cast<int>(threads));
  for (const auto element : {tandem::kernels::Element::float32, tandem::kernels::Element::bfloat16,
                             tandem::kernels::Element::float16}) {
    tandem::run_all({rows, hidden, element});
  }
}
