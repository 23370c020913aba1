// FP8 in blocks of 128, NVFP4 and casts against the vectors of tests/data/README.md, byte by byte.
#include <gtest/gtest.h>

#include <bit>
#include <cmath>

#include "kernels/cast.h"
#include "kernels/fp8_block.h"
#include "kernels/nvfp4.h"
#include "support/matrix.h"
#include "support/safetensors.h"
#include "support/targets.h"
#include "support/ulp.h"

namespace tandem::testing::kernels_golden_blocks {
namespace {

using kernels::CastFormat;
using kernels::Element;
using kernels::Fp4Direction;
using kernels::Fp8BlockShape;

const Safetensors& golden(const char* file = "golden_blocks") {
  static std::map<std::string, Safetensors> files;
  const std::string path = std::string(TANDEM_SOURCE_DIR "/tests/data/") + file + ".safetensors";
  return files.try_emplace(path, path).first->second;
}

std::vector<uint32_t> bits_of(const std::vector<float>& values) {
  std::vector<uint32_t> bits;
  for (const float value : values)
    bits.push_back(std::isnan(value) ? 0x7FC00000u : std::bit_cast<uint32_t>(value));
  return bits;
}

/// Of a [rows, cols] matrix.
template <typename T>
std::vector<T> transposed(const std::vector<T>& x, size_t rows, size_t cols) {
  std::vector<T> result(x.size());
  for (size_t r = 0; r < rows; ++r)
    for (size_t c = 0; c < cols; ++c) result[c * rows + r] = x[r * cols + c];
  return result;
}

/// The matrix x of a case.
struct Source {
  explicit Source(const std::string& name, const nlohmann::json& options)
      : rows(golden().shape(name + "/x").at(0)), cols(golden().shape(name + "/x").at(1)) {
    if (options.at("dtype") == "fp32") {
      wide = golden().read<uint32_t>(name + "/x");
    } else {
      narrow = golden().read<uint16_t>(name + "/x");
    }
  }
  kernels::ConstRows view() const {
    if (!wide.empty()) return {wide.data(), Element::float32, rows, cols, cols};
    return {narrow.data(), Element::bfloat16, rows, cols, cols};
  }
  size_t rows, cols;
  std::vector<uint32_t> wide;
  std::vector<uint16_t> narrow;
};

/// Calls `body(name, options, x)` for every case whose name has `part` in it; returns how many
/// there are.
template <typename Body>
int for_each_case(const std::string& part, Body&& body) {
  int cases = 0;
  for (const auto& [name, text] : golden().metadata().items()) {
    if (name.find(part) == std::string::npos) continue;
    SCOPED_TRACE(name);
    ++cases;
    const auto options = nlohmann::json::parse(text.template get<std::string>());
    body(name, options, Source(name, options));
  }
  return cases;
}

class GoldenBlocks : public ::testing::TestWithParam<int64_t> {};
INSTANTIATE_TEST_SUITE_P(Cpu, GoldenBlocks, ::testing::ValuesIn(all_targets()),
                         [](const auto& info) { return target_name(info.param); });

// The vectors of columns are transposed; codes here are not.
TEST_P(GoldenBlocks, Fp8CodesScalesAndValues) {
  const ScopedTarget target(GetParam());
  const int cases = for_each_case("_block_e4m3_", [](const auto& name, const auto& options,
                                                     const Source& x) {
    const bool is_square = options.at("dim") == 2;
    const kernels::Fp8BlockScaling scaling{kernels::Fp8Format::e4m3,
                                           options.at("eps").template get<float>(),
                                           options.at("pow2").template get<bool>()};
    for (const Fp8BlockShape shape :
         {Fp8BlockShape::row, Fp8BlockShape::column, Fp8BlockShape::square}) {
      if (is_square != (shape == Fp8BlockShape::square)) continue;
      const auto scale_shape = kernels::fp8_block_scales(shape, x.rows, x.cols);
      std::vector<uint8_t> codes(x.rows * x.cols, 0xA5);
      std::vector<float> scales(scale_shape.size(), -1.0f);
      kernels::Fp8BlockOutput outputs[3];
      outputs[static_cast<size_t>(shape)] = {codes.data(), scales.data()};
      kernels::cpu::fp8_block_quantize(x.view(), scaling, outputs[0], outputs[1], outputs[2],
                                       nullptr);
      Matrix y(Element::float32, x.rows, x.cols);
      kernels::cpu::fp8_block_dequantize(codes.data(), scales.data(), scaling.format, shape,
                                         y.view());
      const auto numbers = bits_of(y.values());
      const auto check = [&](const std::string& prefix, const auto& got_codes, const auto& got) {
        EXPECT_TRUE(same_bits<uint8_t>(got_codes, golden().read<uint8_t>(prefix + "data")));
        EXPECT_TRUE(same_bits<uint32_t>(got, golden().read<uint32_t>(prefix + "dequant")));
      };
      if (shape != Fp8BlockShape::column) check(name + "/row_", codes, numbers);
      if (shape != Fp8BlockShape::row)
        check(name + "/col_", transposed(codes, x.rows, x.cols),
              transposed(numbers, x.rows, x.cols));
      const std::string scale =
          name + (shape == Fp8BlockShape::column ? "/col_scale" : "/row_scale");
      EXPECT_EQ(golden().shape(scale), (std::vector<size_t>{scale_shape.rows, scale_shape.cols}));
      EXPECT_TRUE(same_bits<uint32_t>(bits_of(scales), golden().read<uint32_t>(scale)));
    }
  });
  EXPECT_EQ(cases, 10);
}

TEST_P(GoldenBlocks, Nvfp4CodesScalesAndValues) {
  const ScopedTarget target(GetParam());
  const int cases = for_each_case("_nvfp4_", [](const auto& name, const auto& options,
                                                const Source& x) {
    const kernels::Fp4Scaling scaling{.square_blocks = options.value("two_d", false),
                                      .rotates_columns = options.value("rht", false),
                                      .stochastic = options.value("sr", false),
                                      .seed = options.value("seed", uint64_t{0}),
                                      .offset = options.value("offset", uint32_t{0})};
    std::vector<uint8_t> codes[2], scales[2];
    float amaxes[2] = {-1, -1}, amax = -1;
    kernels::Fp4Output outputs[2];
    for (const size_t i : {0, 1}) {
      const auto direction = static_cast<Fp4Direction>(i);
      codes[i].assign(kernels::fp4_code_shape(direction, x.rows, x.cols).size(), 0xA5);
      scales[i].assign(kernels::fp4_scale_shape(direction, x.rows, x.cols).size(), 0xA5);
      outputs[i] = {codes[i].data(), scales[i].data(), &amaxes[i]};
    }
    kernels::cpu::nvfp4_quantize(x.view(), scaling, outputs[0], outputs[1], &amax);
    for (const size_t i : {0, 1}) {
      const auto direction = static_cast<Fp4Direction>(i);
      const std::string prefix = name + (i == 0 ? "/row_" : "/col_");
      SCOPED_TRACE(prefix);
      const auto like_vectors = [&](const auto& values, size_t rows, size_t cols) {
        return i == 0 ? values : transposed(values, rows, cols);
      };
      const auto code_shape = kernels::fp4_code_shape(direction, x.rows, x.cols),
                 scale_shape = kernels::fp4_scale_shape(direction, x.rows, x.cols);
      EXPECT_TRUE(same_bits<uint8_t>(like_vectors(codes[i], code_shape.rows, code_shape.cols),
                                     golden().read<uint8_t>(prefix + "data")));
      EXPECT_TRUE(same_bits<uint8_t>(like_vectors(scales[i], scale_shape.rows, scale_shape.cols),
                                     golden().read<uint8_t>(prefix + "scale")));
      EXPECT_TRUE(
          same_bits<uint32_t>(bits_of({amaxes[i]}), golden().read<uint32_t>(prefix + "amax")));
      const auto wanted = golden().shape(prefix + "dequant");
      const size_t rows = wanted.at(i), cols = wanted.at(1 - i);
      Matrix y(Element::float32, rows, cols);
      kernels::cpu::nvfp4_dequantize(codes[i].data(), scales[i].data(), amaxes[i],
                                     scaling.largest_scale, direction, y.view());
      EXPECT_TRUE(same_bits<uint32_t>(like_vectors(bits_of(y.values()), rows, cols),
                                      golden().read<uint32_t>(prefix + "dequant")));
    }
  });
  EXPECT_EQ(cases, 19);
}

TEST_P(GoldenBlocks, Casts) {
  const ScopedTarget target(GetParam());
  std::vector<uint16_t> all(65536);
  for (size_t i = 0; i < all.size(); ++i) all[i] = static_cast<uint16_t>(i);
  const std::pair<const char*, CastFormat> formats[] = {
      {"e4m3", CastFormat::e4m3}, {"e5m2", CastFormat::e5m2}, {"e2m1", CastFormat::e2m1}};
  for (const auto& [format, cast_format] : formats) {
    SCOPED_TRACE(format);
    const bool is_four = cast_format == CastFormat::e2m1;
    const Safetensors& file = golden(is_four ? "golden_blocks" : "golden_fp8");
    std::vector<uint8_t> codes(65536);
    kernels::cpu::cast_to_codes({all.data(), Element::bfloat16, 256, 256, 256}, {cast_format},
                                codes.data());
    EXPECT_TRUE(same_bits<uint8_t>(
        codes, file.read<uint8_t>(std::string("cast_bf16_all_") + format + "/data")));
    for (const bool saturates : {true, false}) {
      if (is_four && !saturates) continue;
      const std::string name =
          std::string("cast_fp32_edges_") + format + (saturates ? "" : "_nosat");
      const auto edges = file.read<uint32_t>(name + "/x");
      codes.resize(edges.size());
      kernels::cpu::cast_to_codes({edges.data(), Element::float32, 1, edges.size(), edges.size()},
                                  {cast_format, saturates}, codes.data());
      EXPECT_TRUE(same_bits<uint8_t>(codes, file.read<uint8_t>(name + "/data"))) << name;
    }
    const auto values = file.read<uint32_t>(std::string("decode/") + format);
    codes.resize(values.size());
    for (size_t i = 0; i < codes.size(); ++i) codes[i] = static_cast<uint8_t>(i);
    Matrix y(Element::float32, 1, codes.size());
    kernels::cpu::cast_from_codes(codes.data(), cast_format, y.view());
    EXPECT_TRUE(same_bits<uint32_t>(bits_of(y.values()), values));
  }
  const Safetensors& scales = golden("golden_formats");
  const auto x = scales.read<uint32_t>("cast_e8m0/x");
  std::vector<uint8_t> codes(x.size());
  kernels::cpu::cast_to_codes({x.data(), Element::float32, 1, x.size(), x.size()},
                              {CastFormat::e8m0}, codes.data());
  EXPECT_TRUE(same_bits<uint8_t>(codes, scales.read<uint8_t>("cast_e8m0/data")));
}

}  // namespace
}  // namespace tandem::testing::kernels_golden_blocks
