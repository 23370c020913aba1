// Quantizing a matrix while it is made: the bits of quantizing it where it is there, on every
// target.
#include "kernels/quantize_made.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstring>
#include <limits>
#include <map>
#include <mutex>
#include <thread>

#include "kernels/fp8_block.h"
#include "kernels/mxfp8.h"
#include "kernels/nvfp4.h"
#include "kernels/partial_sums.h"
#include "kernels/quantize.h"
#include "support/matrix.h"
#include "support/targets.h"
#include "support/thread_pool.h"

namespace tandem::testing::kernels_quantize_made {
namespace {

using kernels::ConstRows;
using kernels::Element;
using kernels::Fp8BlockOutput;
using kernels::Fp8BlockShape;
using kernels::Fp8Format;
using kernels::Fp8Output;
using kernels::MxDirection;
using kernels::Mxfp8Output;
using kernels::cpu::Band;
using kernels::cpu::Input;
using kernels::cpu::MadeRows;
using kernels::cpu::Seen;

constexpr uint8_t kUnwritten = 0xA5;

/// Makes the rows of a matrix by copying them.
MadeRows copies_of(const Matrix& x, Matrix* kept) {
  const ConstRows from = x.view();
  const size_t bytes = bytes_per_element(from.element) * from.cols;
  return {{kept == nullptr ? nullptr : kept->view().data, from.element, from.rows, from.cols,
           from.cols},
          [from, bytes](size_t first, size_t count, void* to) {
            for (size_t r = 0; r < count; ++r)
              std::memcpy(static_cast<std::byte*>(to) + r * bytes,
                          static_cast<const std::byte*>(from.data) +
                              (first + r) * from.stride * bytes_per_element(from.element),
                          bytes);
          },
          {from}};
}

/// Makes a matrix and has `take(band)` quantize each band, of a multiple of `together` rows;
/// returns what all of them have seen.
template <typename Take>
Seen in_bands(const MadeRows& copies, size_t together, const Take& take) {
  MadeRows made = copies;
  made.together = together;
  std::mutex lock;
  Seen all;
  made.make = [&](size_t first, size_t count, void* to) {
    const kernels::Rows& y = made.y;
    EXPECT_EQ(first % together, 0u);
    EXPECT_TRUE(count % together == 0 || first + count == y.rows) << first << " " << count;
    copies.make(first, count, to);
    const kernels::Rows rows{kernels::cpu::memory_beside(count * y.cols), y.element, count, y.cols,
                             y.cols};
    std::memcpy(rows.data, to, count * y.cols * bytes_per_element(y.element));
    const Seen seen = take(Band{rows, first, y.rows});
    const std::scoped_lock locked(lock);
    all = {std::max(all.amax, seen.amax), all.has_nan || seen.has_nan};
  };
  kernels::cpu::make_all(made);
  return all;
}

/// All that one of the functions writes.
struct Written {
  std::array<std::vector<uint8_t>, 2> codes;
  std::array<std::vector<uint8_t>, 2> scales;  // as bytes
  std::array<float, 3> numbers{-1.0f, -1.0f, -1.0f};

  template <typename T>
  T* scale(size_t i, size_t count) {
    scales[i].assign(count * sizeof(T), kUnwritten);
    return reinterpret_cast<T*>(scales[i].data());
  }
  uint8_t* code(size_t i, size_t count) {
    codes[i].assign(count, kUnwritten);
    return codes[i].data();
  }
  bool operator==(const Written& other) const {
    return codes == other.codes && scales == other.scales &&
           std::memcmp(&numbers, &other.numbers, sizeof numbers) == 0;
  }
};

/// Of rows, columns and squares: the first two, or the last alone.
std::array<Fp8BlockOutput, 3> block_outputs(ConstRows x, bool is_square, Written& to) {
  std::array<Fp8BlockOutput, 3> out;
  const auto add = [&](size_t place, Fp8BlockShape shape) {
    out[static_cast<size_t>(shape)] = {
        to.code(place, x.rows * x.cols),
        to.scale<float>(place, kernels::fp8_block_scales(shape, x.rows, x.cols).size())};
  };
  add(0, is_square ? Fp8BlockShape::square : Fp8BlockShape::row);
  if (!is_square) add(1, Fp8BlockShape::column);
  return out;
}

Mxfp8Output mx_output(ConstRows x, MxDirection direction, Written& to) {
  const auto place = static_cast<size_t>(direction);
  return {to.code(place, x.rows * x.cols),
          to.scale<uint8_t>(place, kernels::mx_scale_shape(direction, x.rows, x.cols).size())};
}

std::array<kernels::Fp4Output, 2> fp4_outputs(ConstRows x, Written& to) {
  std::array<kernels::Fp4Output, 2> out;
  for (const size_t i : {0u, 1u}) {
    const auto direction = static_cast<kernels::Fp4Direction>(i);
    out[i] = {to.code(i, kernels::fp4_code_shape(direction, x.rows, x.cols).size() + 1),
              to.scale<uint8_t>(i, kernels::fp4_scale_shape(direction, x.rows, x.cols).size()),
              &to.numbers[1 + i]};
  }
  return out;
}

/// Has `quantize(input, amax)` read the matrix, or, where it is made, what is made; or, where
/// `together` is not 0, bands of so many rows that are made beside another matrix. Returns the
/// amax.
template <typename Quantize>
float quantized(ConstRows x, const MadeRows* made, size_t together, const Quantize& quantize) {
  if (made != nullptr && together != 0)
    return in_bands(*made, together,
                    [&](const Band& band) {
                      Seen seen;
                      quantize(band, &seen.amax);
                      return seen;
                    })
        .amax;
  float amax = 0;
  quantize(made != nullptr ? Input(made) : Input(x), &amax);
  return amax;
}

class QuantizeMade : public OnEachTarget {
 protected:
  /// `run(x, made, written)` quantizes what is made, or, where `made` is null, the matrix itself.
  template <typename Run>
  void expect_same_bits(const Run& run) {
    for (const int threads : {1, 3}) {
      const ScopedThreadPool pool(threads);
      for (const Element element : kElements)
        for (const auto& [rows, cols] : {std::pair{0, 5}, std::pair{7, 0}, std::pair{1, 1},
                                         std::pair{129, 33}, std::pair{300, 700}}) {
          Matrix x =
              Matrix::random(element, static_cast<size_t>(rows), static_cast<size_t>(cols), 3, 11);
          if (rows == 300) {
            x.set(700 * 130 + 5, std::numeric_limits<float>::quiet_NaN());
            x.set(700 * 299 + 699, std::numeric_limits<float>::infinity());
          }
          Written expected;
          run(x.view(), nullptr, expected);
          Matrix kept(element, x.rows(), x.cols());
          for (Matrix* memory : {static_cast<Matrix*>(nullptr), &kept}) {
            MadeRows made = copies_of(x, memory);
            if (memory == nullptr) made.in_order = kernels::sum_block_rows(x.rows());
            Written got;
            run(x.view(), &made, got);
            EXPECT_TRUE(got == expected) << name_of(element) << " " << rows << "x" << cols
                                         << " kept " << (memory != nullptr);
          }
          EXPECT_EQ(kept.bits(), x.bits());
        }
    }
  }
};

TEST_P(QuantizeMade, WithAScaleThatIsGiven) {
  for (const size_t together : {0, 1, 128})
    expect_same_bits([=](ConstRows x, const MadeRows* made, Written& to) {
      uint8_t* const codes = to.code(0, x.rows * x.cols);
      const bool in_bands = made != nullptr && together != 0;
      if (in_bands)  // bands write no scale: a matrix of no rows does
        kernels::cpu::quantize_delayed({}, Fp8Format::e5m2, 3.0f,
                                       {codes, &to.numbers[0], &to.numbers[1]});
      to.numbers[1] = quantized(x, made, together, [&](const Input& input, float* amax) {
        kernels::cpu::quantize_delayed(input, Fp8Format::e5m2, 3.0f,
                                       {codes, in_bands ? nullptr : &to.numbers[0], amax});
      });
    });
}

TEST_P(QuantizeMade, InBlocksOf128) {
  for (const bool is_square : {false, true})
    for (const size_t together : {size_t{0}, kernels::kFp8Block}) {
      if (together != 0 && !kernels::cpu::takes_bands_of_blocks()) continue;
      expect_same_bits([=](ConstRows x, const MadeRows* made, Written& to) {
        const auto out = block_outputs(x, is_square, to);
        to.numbers[0] = quantized(x, made, together, [&](const Input& input, float* amax) {
          kernels::cpu::fp8_block_quantize(input, {}, out[0], out[1], out[2], amax);
        });
      });
    }
}

TEST_P(QuantizeMade, InMxBlocks) {
  for (const bool is_square : {false, true})
    for (const size_t together : {0, 32, 128}) {
      if (together != 0 && !kernels::cpu::takes_bands_of_blocks()) continue;
      const auto format = together == 0 ? Fp8Format::e4m3 : Fp8Format::e5m2;
      expect_same_bits([=](ConstRows x, const MadeRows* made, Written& to) {
        const Mxfp8Output row = mx_output(x, MxDirection::row, to),
                          column = mx_output(x, MxDirection::column, to);
        to.numbers[0] = quantized(x, made, together, [&](const Input& input, float* amax) {
          kernels::cpu::mxfp8_quantize(input, {format, {.square_blocks = is_square}}, row, column,
                                       amax);
        });
      });
    }
}

TEST_P(QuantizeMade, OnlyOneDirectionOrOnlyTheAmax) {
  expect_same_bits([](ConstRows x, const MadeRows* made, Written& to) {
    const Input input = made != nullptr ? Input(made) : Input(x);
    const Mxfp8Output column = mx_output(x, MxDirection::column, to);
    kernels::cpu::mxfp8_quantize(input, {}, {}, column, &to.numbers[0]);
    kernels::cpu::fp8_block_quantize(input, {}, {}, {}, {}, &to.numbers[1]);
  });
}

TEST_P(QuantizeMade, WithAScaleOfItsOwn) {
  const Matrix x = Matrix::random(Element::bfloat16, 300, 700, 0, 5);
  Written expected, got;
  kernels::cpu::quantize_current(
      x.view(), {Fp8Format::e4m3, {.power_of_two = true}},
      {expected.code(0, x.size()), &expected.numbers[0], &expected.numbers[1]});
  Matrix kept(Element::bfloat16, 300, 700);
  const MadeRows made = copies_of(x, &kept);
  kernels::cpu::quantize_current(&made, {Fp8Format::e4m3, {.power_of_two = true}},
                                 {got.code(0, x.size()), &got.numbers[0], &got.numbers[1]});
  EXPECT_TRUE(got == expected);
  EXPECT_EQ(kept.bits(), x.bits());
}

TEST_P(QuantizeMade, InFp4Blocks) {
  for (const kernels::Fp4Scaling& scaling :
       {kernels::Fp4Scaling{}, kernels::Fp4Scaling{.options = {.square_blocks = true}},
        kernels::Fp4Scaling{
            .options = {.hadamard = true, .stochastic_rounding = true}, .seed = 5, .offset = 2},
        kernels::Fp4Scaling{.options = {.four_over_six = kernels::FourOverSix::mse},
        .largest_scale = 256}})
    for (const Element element : kElements)
      for (const auto& [rows, cols] : {std::pair{0, 5}, std::pair{1, 1}, std::pair{300, 700}}) {
        const Matrix x =
            Matrix::random(element, static_cast<size_t>(rows), static_cast<size_t>(cols), 0, 11);
        Matrix kept(element, x.rows(), x.cols());
        const auto run = [&](Written& to, const Input& input) {
          const auto out = fp4_outputs(x.view(), to);
          kernels::cpu::nvfp4_quantize(input, scaling, out[0], out[1], &to.numbers[0]);
        };
        Written expected, got;
        const MadeRows made = copies_of(x, &kept);
        run(expected, x.view());
        run(got, &made);
        EXPECT_TRUE(got == expected) << name_of(element) << " " << rows << "x" << cols;
        EXPECT_EQ(kept.bits(), x.bits());
      }
}

TEST_P(QuantizeMade, OnceItsAmaxIsSeen) {
  const kernels::Fp8Scaling scaling{Fp8Format::e4m3, {.power_of_two = true}};
  expect_same_bits([=](ConstRows x, const MadeRows* made, Written& to) {
    const Fp8Output out{to.code(0, x.rows * x.cols), &to.numbers[0], &to.numbers[1]};
    if (made == nullptr) return kernels::cpu::quantize_current(x, scaling, out);
    const Seen seen = in_bands(*made, 1, kernels::cpu::seen_in);
    kernels::cpu::quantize_current_seen(x, seen, scaling, out);
  });
  expect_same_bits([=](ConstRows x, const MadeRows* made, Written& to) {
    const auto out = fp4_outputs(x, to);
    const kernels::Fp4Scaling four{.options = {.hadamard = true}};
    if (made == nullptr) {
      kernels::cpu::nvfp4_quantize(x, four, out[0], out[1], &to.numbers[0]);
    } else {
      const Seen seen = in_bands(*made, 1, kernels::cpu::seen_in);
      kernels::cpu::nvfp4_quantize_seen(x, seen, four, out[0], out[1], &to.numbers[0]);
    }
  });
}

TEST_P(QuantizeMade, RowsOfASumAreAskedForInOrderByOneThread) {
  const ScopedThreadPool pool(3);
  for (const auto& [rows, cols] :
       {std::pair{300, 5}, std::pair{1100, 700}, std::pair{1100, 3}, std::pair{5000, 70}}) {
    const Matrix x = Matrix::random(Element::bfloat16, static_cast<size_t>(rows),
                                    static_cast<size_t>(cols), 0, 3);
    Matrix kept(x.element(), x.rows(), x.cols());
    std::vector<uint8_t> codes(x.size());
    float numbers[2];
    for (const size_t kind : {0u, 1u, 2u, 3u, 4u, 5u}) {
      MadeRows made = copies_of(x, &kept);
      made.in_order = kernels::sum_block_rows(x.rows());
      if (kind == 5) made.together = 128;
      std::mutex lock;
      std::map<size_t, std::pair<std::thread::id, size_t>> next_of_block;
      made.make = [&, copy = made.make](size_t first, size_t count, void* to) {
        copy(first, count, to);
        const std::scoped_lock locked(lock);
        EXPECT_TRUE(first % made.together == 0 &&
                    (count % made.together == 0 || first + count == x.rows()));
        for (size_t r = first; r < first + count; ++r) {
          const auto [place, is_first] = next_of_block.try_emplace(
              r / made.in_order, std::this_thread::get_id(), r / made.in_order * made.in_order);
          EXPECT_EQ(place->second.first, std::this_thread::get_id()) << "row " << r;
          EXPECT_EQ(place->second.second++, r) << is_first;
        }
      };
      if (kind == 0) {
        kernels::cpu::mxfp8_quantize(&made, {}, {}, {}, numbers);
      } else if (kind == 1) {
        kernels::cpu::fp8_block_quantize(&made, {}, {}, {}, {}, numbers);
      } else if (kind == 2) {
        kernels::cpu::quantize_delayed(&made, Fp8Format::e4m3, 2.0f,
                                       {codes.data(), &numbers[0], &numbers[1]});
      } else if (kind == 3) {
        EXPECT_GT(kernels::cpu::seen_in(&made).amax, 0.0f);
      } else if (kind == 4) {
        kernels::cpu::make_all(made);
      } else {
        kernels::cpu::mxfp8_quantize(&made, {}, {}, {}, numbers);
      }
      EXPECT_EQ(next_of_block.size(), kernels::sum_blocks(x.rows())) << kind;
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Cpu, QuantizeMade, ::testing::ValuesIn(all_targets()), QuantizeMade::name);

}  // namespace
}  // namespace tandem::testing::kernels_quantize_made
