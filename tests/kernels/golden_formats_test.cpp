// E8M0, MXFP8 and delayed scaling against the vectors of tests/data/README.md, byte by byte.
#include <gtest/gtest.h>

#include <bit>
#include <cmath>

#include "kernels/delayed.h"
#include "kernels/mxfp8.h"
#include "kernels/quantize.h"
#include "support/matrix.h"
#include "support/safetensors.h"
#include "support/targets.h"
#include "support/ulp.h"

namespace tandem::testing::kernels_golden_formats {
namespace {

using kernels::Element;
using kernels::Fp8Format;
using kernels::MxDirection;

const Safetensors& golden() {
  static const Safetensors file(TANDEM_SOURCE_DIR "/tests/data/golden_formats.safetensors");
  return file;
}

uint32_t bits_of(float value) {
  return std::isnan(value) ? 0x7FC00000u : std::bit_cast<uint32_t>(value);
}

std::vector<uint32_t> bits_of(const std::vector<float>& values) {
  std::vector<uint32_t> bits;
  for (const float value : values) bits.push_back(bits_of(value));
  return bits;
}

Fp8Format format_of(const nlohmann::json& options) {
  return options.at("fmt") == "e4m3" ? Fp8Format::e4m3 : Fp8Format::e5m2;
}

/// Calls `body(name, options)` for every case whose name has `part` in it; returns how many there
/// are.
template <typename Body>
int for_each_case(const std::string& part, Body&& body) {
  int cases = 0;
  for (const auto& [name, text] : golden().metadata().items()) {
    if (name.find(part) == std::string::npos) continue;
    SCOPED_TRACE(name);
    ++cases;
    body(name, nlohmann::json::parse(text.template get<std::string>()));
  }
  return cases;
}

TEST(GoldenE8m0, CodeOfEveryEdgeAndValueOfEveryCode) {
  std::vector<uint8_t> codes;
  for (const uint32_t bits : golden().read<uint32_t>("cast_e8m0/x"))
    codes.push_back(kernels::e8m0_from_float(std::bit_cast<float>(bits)));
  EXPECT_TRUE(same_bits<uint8_t>(codes, golden().read<uint8_t>("cast_e8m0/data")));
  std::vector<uint32_t> values;
  for (int code = 0; code < 256; ++code)
    values.push_back(bits_of(kernels::float_from_e8m0(static_cast<uint8_t>(code))));
  EXPECT_TRUE(same_bits<uint32_t>(values, golden().read<uint32_t>("decode/e8m0")));
}

class GoldenMxfp8 : public ::testing::TestWithParam<int64_t> {};

TEST_P(GoldenMxfp8, CodesScalesAndValues) {
  const ScopedTarget target(GetParam());
  const int cases = for_each_case("_mxfp8_", [&](const std::string& name, const auto& options) {
    const std::vector<size_t> shape = golden().shape(name + "/x");
    const size_t rows = shape.at(0), cols = shape.at(1);
    const bool wide = options.at("dtype") == "fp32";
    const auto x32 = wide ? golden().read<uint32_t>(name + "/x") : std::vector<uint32_t>();
    const auto x16 = wide ? std::vector<uint16_t>() : golden().read<uint16_t>(name + "/x");
    const void* data = wide ? static_cast<const void*>(x32.data()) : x16.data();
    const kernels::ConstRows x{data, wide ? Element::float32 : Element::bfloat16, rows, cols, cols};
    const kernels::Mxfp8Scaling scaling{format_of(options), options.value("two_d", false)};

    std::vector<uint8_t> codes[2], scales[2];
    for (const MxDirection direction : {MxDirection::row, MxDirection::column}) {
      const auto i = static_cast<size_t>(direction);
      codes[i].assign(rows * cols, 0xA5);
      scales[i].assign(kernels::mx_scale_shape(direction, rows, cols).size(), 0xA5);
    }
    kernels::cpu::mxfp8_quantize(x, scaling, {codes[0].data(), scales[0].data()},
                                 {codes[1].data(), scales[1].data()}, nullptr);
    for (const MxDirection direction : {MxDirection::row, MxDirection::column}) {
      const auto i = static_cast<size_t>(direction);
      const std::string prefix = name + (i == 0 ? "/row_" : "/col_");
      SCOPED_TRACE(prefix);
      const auto scale_shape = kernels::mx_scale_shape(direction, rows, cols);
      EXPECT_EQ(golden().shape(prefix + "scale"),
                (std::vector<size_t>{scale_shape.rows, scale_shape.cols}));
      EXPECT_TRUE(same_bits<uint8_t>(codes[i], golden().read<uint8_t>(prefix + "data")));
      EXPECT_TRUE(same_bits<uint8_t>(scales[i], golden().read<uint8_t>(prefix + "scale")));
      Matrix y(Element::float32, rows, cols);
      kernels::cpu::mxfp8_dequantize(codes[i].data(), scales[i].data(), scaling.format, direction,
                                     y.view());
      EXPECT_TRUE(
          same_bits<uint32_t>(bits_of(y.values()), golden().read<uint32_t>(prefix + "dequant")));
    }
  });
  EXPECT_EQ(cases, 13);
}

TEST_P(GoldenMxfp8, DelayedRun) {
  const ScopedTarget target(GetParam());
  const int cases = for_each_case("delayed_run_", [&](const std::string& name,
                                                      const auto& options) {
    const std::vector<size_t> shape = golden().shape(name + "/x");
    const size_t steps = shape.at(0), rows = shape.at(1), cols = shape.at(2),
                 length = options.at("len").template get<size_t>();
    const auto x = golden().read<uint16_t>(name + "/x");
    std::vector<float> history(length, 0.0f), scale(1, 1.0f);
    std::vector<uint8_t> codes(rows * cols), all_codes;
    std::vector<uint32_t> scale_inv, scale_after, hist_after;
    for (size_t step = 0; step < steps; ++step) {
      float dequant_scale = 0, amax = 0;
      const kernels::ConstRows of_step{x.data() + step * rows * cols, Element::bfloat16, rows, cols,
                                       cols};
      kernels::cpu::quantize_delayed(of_step, format_of(options), scale[0],
                                     {codes.data(), &dequant_scale, &amax});
      history[0] = std::max(history[0], amax);
      all_codes.insert(all_codes.end(), codes.begin(), codes.end());
      scale_inv.push_back(bits_of(dequant_scale));
      kernels::update_delayed({history.data(), scale.data(), length, 1}, {format_of(options)});
      scale_after.push_back(bits_of(scale[0]));
      for (const uint32_t bits : bits_of(history)) hist_after.push_back(bits);
    }
    EXPECT_TRUE(same_bits<uint8_t>(all_codes, golden().read<uint8_t>(name + "/data")));
    EXPECT_TRUE(same_bits<uint32_t>(scale_inv, golden().read<uint32_t>(name + "/scale_inv")));
    EXPECT_TRUE(same_bits<uint32_t>(scale_after, golden().read<uint32_t>(name + "/scale_after")));
    EXPECT_TRUE(same_bits<uint32_t>(hist_after, golden().read<uint32_t>(name + "/hist_after")));
  });
  EXPECT_EQ(cases, 1);
}

INSTANTIATE_TEST_SUITE_P(Cpu, GoldenMxfp8, ::testing::ValuesIn(all_targets()),
                         [](const auto& info) { return target_name(info.param); });

TEST(GoldenDelayed, Updates) {
  const int cases =
      for_each_case("delayed_update_", [&](const std::string& name, const auto& options) {
        const std::vector<size_t> shape = golden().shape(name + "/hist");
        const size_t steps = shape.at(0), length = shape.at(1), slots = shape.at(2);
        const auto amax = golden().read<uint32_t>(name + "/amax");
        const kernels::DelayedScaling scaling{
            format_of(options), options.at("margin").template get<int>(),
            options.at("algo") == "max" ? kernels::AmaxAlgorithm::max
                                        : kernels::AmaxAlgorithm::most_recent};
        std::vector<float> history(length * slots, 0.0f), scale(slots, 1.0f);
        std::vector<uint32_t> histories, scales;
        for (size_t step = 0; step < steps; ++step) {
          for (size_t slot = 0; slot < slots; ++slot)
            history[slot] = std::bit_cast<float>(amax[step * slots + slot]);
          kernels::update_delayed({history.data(), scale.data(), length, slots}, scaling);
          for (const uint32_t bits : bits_of(history)) histories.push_back(bits);
          for (const uint32_t bits : bits_of(scale)) scales.push_back(bits);
        }
        EXPECT_TRUE(same_bits<uint32_t>(histories, golden().read<uint32_t>(name + "/hist")));
        EXPECT_TRUE(same_bits<uint32_t>(scales, golden().read<uint32_t>(name + "/scale")));
      });
  EXPECT_EQ(cases, 3);
}

}  // namespace
}  // namespace tandem::testing::kernels_golden_formats
