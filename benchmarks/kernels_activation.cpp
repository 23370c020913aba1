// Activation kernels against what bounds them: moving the same bytes, and the exponential alone.
//
//   kernels_activation [rows cols]
//
// Prints per kernel the time per element of y, GB/s of the least bytes and the shares of both
// bounds, on two pinned threads. Operands rotate through more memory than a last-level cache holds;
// each figure is the minimum over alternating rounds.
#include <algorithm>
#include <bit>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <vector>

#include "kernels/activation.h"
#include "kernels/cpu/targets.h"
#include "kernels/parallel.h"
#include "tests/support/thread_pool.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "benchmarks/kernels_activation.cpp"
#include "hwy/foreach_target.h"
// Behind foreach_target.h, which includes this file once per target.
#include "hwy/highway.h"
#include "kernels/cpu/math-inl.h"

HWY_BEFORE_NAMESPACE();
namespace tandem::kernels::cpu::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

/// exp of `count` floats, in blocks that stay in L1.
void exp_alone_target(float* block, size_t block_size, size_t count) {
  const size_t step = kPackVectors * hn::Lanes(hn::ScalableTag<float>());
  for (size_t done = 0; done < count; done += block_size) {
    for (size_t i = 0; i < block_size; i += step) {
      store_pack(Float32{}, exp_negated(load_pack<kPackVectors>(Float32{}, block + i, Whole{})),
                 block + block_size + i, Whole{});
    }
  }
}

template <size_t kReads, size_t kWrites>
void move_streams(const uint8_t* const* from, uint8_t* const* to, size_t bytes) {
  const hn::ScalableTag<uint8_t> d;
  for (size_t i = 0; i < bytes; i += hn::Lanes(d)) {
    auto v = hn::LoadU(d, from[0] + i);
    for (size_t s = 1; s < kReads; ++s) v = hn::Or(v, hn::LoadU(d, from[s] + i));
    for (size_t s = 0; s < kWrites; ++s) hn::StoreU(v, d, to[s] + i);
  }
}

/// The least work on memory: `bytes` of each stream, from one to three read and written.
void move_alone_target(const uint8_t* const* from, size_t reads, uint8_t* const* to, size_t writes,
                       size_t bytes) {
  using Move = void (*)(const uint8_t* const*, uint8_t* const*, size_t);
  constexpr Move kMoves[3][3] = {{&move_streams<1, 1>, &move_streams<1, 2>, &move_streams<1, 3>},
                                 {&move_streams<2, 1>, &move_streams<2, 2>, &move_streams<2, 3>},
                                 {&move_streams<3, 1>, &move_streams<3, 2>, &move_streams<3, 3>}};
  kMoves[reads - 1][writes - 1](from, to, bytes);
}

}  // namespace tandem::kernels::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace tandem::kernels::cpu {
namespace {

HWY_EXPORT(exp_alone_target);
HWY_EXPORT(move_alone_target);

/// Calls `task(0)` and `task(1)`, each on its own thread.
void on_both_threads(const std::function<void(int)>& task) {
  parallel_for(0, 2, 1, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) task(static_cast<int>(i));
  });
}

double microseconds(const std::function<void()>& work) {
  const auto start = std::chrono::steady_clock::now();
  work();
  return std::chrono::duration<double, std::micro>(std::chrono::steady_clock::now() - start)
      .count();
}

struct Operands {
  std::vector<uint8_t> grad_y, z, grad_z, y;
};

std::vector<uint8_t> random_elements(Element element, size_t count, unsigned seed) {
  std::vector<uint8_t> bytes(count * bytes_per_element(element));
  uint32_t state = seed * 2654435761u + 1;
  for (size_t i = 0; i < count; ++i) {
    float value = 0;
    for (int k = 0; k < 3; ++k) {
      state = state * 1664525u + 1013904223u;
      value += static_cast<float>(state >> 8) * 0x1p-23f - 1.0f;
    }
    const uint32_t bits = std::bit_cast<uint32_t>(value);
    if (element == Element::float32) {
      std::copy_n(reinterpret_cast<const uint8_t*>(&bits), 4, bytes.data() + i * 4);
    } else {
      const uint16_t half = static_cast<uint16_t>(bits >> 16);
      std::copy_n(reinterpret_cast<const uint8_t*>(&half), 2, bytes.data() + i * 2);
    }
  }
  return bytes;
}

void measure(size_t rows, size_t cols, Element element, bool gated, Activation activation,
             const char* name) {
  const size_t wide = gated ? 2 * cols : cols, size = bytes_per_element(element);
  constexpr size_t kSetBytes = size_t{160} << 20;
  const size_t sets = std::clamp<size_t>(kSetBytes / (rows * cols * size * (gated ? 6 : 4)), 1, 64);
  std::vector<Operands> operands;
  for (size_t i = 0; i < sets; ++i) {
    operands.push_back({random_elements(element, rows * cols, 2 * i + 1),
                        random_elements(element, rows * wide, 2 * i + 2),
                        std::vector<uint8_t>(rows * wide * size),
                        std::vector<uint8_t>(rows * cols * size)});
  }
  const std::vector<uint8_t> bias_bytes = random_elements(element, wide, 7);
  std::vector<uint8_t> grad_bias_bytes(wide * size);
  const ConstVector bias = {gated ? nullptr : bias_bytes.data(), element, wide};
  const Vector grad_bias = {gated ? nullptr : grad_bias_bytes.data(), element, wide};
  alignas(64) static float blocks[2][2 * 2048];
  for (auto& block : blocks) {
    for (size_t i = 0; i < 2048; ++i) block[i] = static_cast<float>(i % 80) * 0.1f - 4.0f;
  }

  size_t turn = 0;
  const auto narrow_view = [&](auto& bytes) {
    return Rows{bytes.data(), element, rows, cols, cols};
  };
  const auto wide_view = [&](auto& bytes) { return Rows{bytes.data(), element, rows, wide, wide}; };
  const auto forward = [&] {
    Operands& o = operands[turn++ % sets];
    activation_forward({activation, gated}, wide_view(o.z), bias, element, {}, narrow_view(o.y));
  };
  const auto backward = [&](bool with_y) {
    Operands& o = operands[turn++ % sets];
    activation_backward({activation, gated}, narrow_view(o.grad_y), wide_view(o.z),
                        wide_view(o.grad_z), grad_bias, with_y ? narrow_view(o.y) : Rows{});
  };
  // Streams of equal length: a gated z counts as two.
  const auto move = [&](bool reads_grad, bool writes_grad, bool writes_y) {
    Operands& o = operands[turn++ % sets];
    const size_t stream = rows * cols * size;
    on_both_threads([&](int thread) {
      const size_t bytes = stream / 2 / 64 * 64, at = thread * bytes;
      const uint8_t* from[3] = {o.z.data() + at};
      uint8_t* to[3];
      size_t reads = 1, writes = 0;
      if (gated) from[reads++] = o.z.data() + stream + at;
      if (reads_grad) from[reads++] = o.grad_y.data() + at;
      if (writes_grad) to[writes++] = o.grad_z.data() + at;
      if (writes_grad && gated) to[writes++] = o.grad_z.data() + stream + at;
      if (writes_y) to[writes++] = o.y.data() + at;
      HWY_DYNAMIC_DISPATCH(move_alone_target)(from, reads, to, writes, bytes);
    });
  };
  const auto exponentials = [&] {
    on_both_threads([&](int thread) {
      HWY_DYNAMIC_DISPATCH(exp_alone_target)(blocks[thread], 2048, rows * cols / 2);
    });
  };

  struct Line {
    const char* what;
    std::function<void()> kernel, limit;
    size_t streams;
    double kernel_us = 1e30, limit_us = 1e30, exp_us = 1e30;
  };
  const size_t half = gated ? 2 : 1;
  Line lines[] = {
      {"forward", forward, [&] { move(false, false, true); }, half + 1},
      {"backward", [&] { backward(false); }, [&] { move(true, true, false); }, 1 + 2 * half},
      {"backward with y", [&] { backward(true); }, [&] { move(true, true, true); }, 2 + 2 * half},
  };
  const int rounds = rows * cols > 1u << 18 ? 24 : 400;
  for (int round = 0; round < rounds; ++round) {
    for (Line& line : lines) {
      line.kernel_us = std::min(line.kernel_us, microseconds(line.kernel));
      line.limit_us = std::min(line.limit_us, microseconds(line.limit));
      line.exp_us = std::min(line.exp_us, microseconds(exponentials));
    }
  }
  for (const Line& line : lines) {
    std::printf(
        "%-10s %-8s %-16s %9.2f us %7.3f ns/el %6.1f GB/s  limit %8.2f us (share %.2f)  exp %8.2f "
        "us (share %.2f)\n",
        name, element == Element::float32 ? "float32" : "bfloat16", line.what, line.kernel_us,
        line.kernel_us * 1e3 / (rows * cols),
        line.streams * rows * cols * size / line.kernel_us * 1e-3, line.limit_us,
        line.limit_us / line.kernel_us, line.exp_us, line.exp_us / line.kernel_us);
  }
}

}  // namespace
}  // namespace tandem::kernels::cpu

int main(int argc, char** argv) {
  using namespace tandem::kernels;
  const tandem::testing::ScopedThreadPool pool(2);
  const size_t rows = argc > 2 ? std::strtoul(argv[1], nullptr, 10) : 4096;
  const size_t cols = argc > 2 ? std::strtoul(argv[2], nullptr, 10) : 1024;
  for (const Element element : {Element::float32, Element::bfloat16}) {
    cpu::measure(rows, cols, element, true, Activation::silu, "swiglu");
    cpu::measure(rows, cols, element, false, Activation::gelu, "bias+gelu");
    cpu::measure(rows, cols, element, false, Activation::relu, "bias+relu");
  }
}
#endif  // HWY_ONCE
