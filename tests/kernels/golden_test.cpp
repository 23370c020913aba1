// The scalar conversions and scales against the vectors of tests/data/README.md, byte by byte.
// tests/kernel_ops/golden_quantize_test.cpp compares the quantizers with theirs.
#include <gtest/gtest.h>

#include <bit>
#include <cfloat>
#include <cmath>

#include "kernels/delayed.h"
#include "kernels/mxfp8.h"
#include "kernels/quantize.h"
#include "support/safetensors.h"
#include "support/ulp.h"

namespace tandem::testing::kernels_golden {
namespace {

using kernels::Fp8Format;

constexpr uint32_t kNan = 0x7FC00000;

const Safetensors& golden() {
  static const Safetensors file(TANDEM_SOURCE_DIR "/tests/data/golden_fp8.safetensors");
  return file;
}

/// Of E8M0 and of delayed scaling.
const Safetensors& golden_formats() {
  static const Safetensors file(TANDEM_SOURCE_DIR "/tests/data/golden_formats.safetensors");
  return file;
}

const char* name_of(Fp8Format format) { return kernels::traits_of(format).name; }

uint32_t bits_of(float value) { return std::isnan(value) ? kNan : std::bit_cast<uint32_t>(value); }

class GoldenFormat : public ::testing::TestWithParam<Fp8Format> {};

TEST_P(GoldenFormat, ScalarCastOfEveryBfloat16) {
  const auto expected =
      golden().read<uint8_t>(std::string("cast_bf16_all_") + name_of(GetParam()) + "/data");
  ASSERT_EQ(expected.size(), 65536u);
  std::vector<uint8_t> got;
  for (uint32_t i = 0; i < 65536; ++i)
    got.push_back(kernels::fp8_from_float(std::bit_cast<float>(i << 16), GetParam()));
  EXPECT_TRUE(same_bits<uint8_t>(got, expected));
}

TEST_P(GoldenFormat, ScalarCastOfEveryEdge) {
  const std::string name = std::string("cast_fp32_edges_") + name_of(GetParam());
  std::vector<uint8_t> got;
  for (const uint32_t bits : golden().read<uint32_t>(name + "/x"))
    got.push_back(kernels::fp8_from_float(std::bit_cast<float>(bits), GetParam()));
  EXPECT_TRUE(same_bits<uint8_t>(got, golden().read<uint8_t>(name + "/data")));
}

TEST_P(GoldenFormat, ValueOfEveryCode) {
  std::vector<uint32_t> got;
  for (int code = 0; code < 256; ++code)
    got.push_back(bits_of(kernels::float_from_fp8(static_cast<uint8_t>(code), GetParam())));
  EXPECT_TRUE(same_bits<uint32_t>(
      got, golden().read<uint32_t>(std::string("decode/") + name_of(GetParam()))));
}

TEST_P(GoldenFormat, ScaleFromAmax) {
  const auto amax = golden().read<uint32_t>("scale_from_amax/amax");
  ASSERT_FALSE(amax.empty());
  const std::pair<const char*, float> inputs[] = {
      {"fp32", FLT_MAX}, {"bf16", std::bit_cast<float>(0x7F7F0000u)}, {"fp16", 65504.0f}};
  for (const auto& [input, big] : inputs) {
    for (const bool power_of_two : {false, true}) {
      const std::string name = std::string("scale_from_amax/") + input + "_" + name_of(GetParam()) +
                               (power_of_two ? "_pow2" : "_any");
      std::vector<uint32_t> got;
      for (const uint32_t bits : amax) {
        got.push_back(bits_of(kernels::scale_from_amax(
            std::bit_cast<float>(bits), {GetParam(), {.power_of_two = power_of_two}}, big)));
      }
      EXPECT_TRUE(same_bits<uint32_t>(got, golden().read<uint32_t>(name))) << name;
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Cpu, GoldenFormat, ::testing::Values(Fp8Format::e4m3, Fp8Format::e5m2),
                         [](const auto& info) { return std::string(name_of(info.param)); });

TEST(GoldenE8m0, CodeOfEveryEdgeAndValueOfEveryCode) {
  std::vector<uint8_t> codes;
  for (const uint32_t bits : golden_formats().read<uint32_t>("cast_e8m0/x"))
    codes.push_back(kernels::e8m0_from_float(std::bit_cast<float>(bits)));
  EXPECT_TRUE(same_bits<uint8_t>(codes, golden_formats().read<uint8_t>("cast_e8m0/data")));
  std::vector<uint32_t> values;
  for (int code = 0; code < 256; ++code)
    values.push_back(bits_of(kernels::float_from_e8m0(static_cast<uint8_t>(code))));
  EXPECT_TRUE(same_bits<uint32_t>(values, golden_formats().read<uint32_t>("decode/e8m0")));
}

TEST(GoldenDelayed, Updates) {
  int cases = 0;
  for (const auto& [name, text] : golden_formats().metadata().items()) {
    if (name.find("delayed_update_") == std::string::npos) continue;
    SCOPED_TRACE(name);
    ++cases;
    const auto options = nlohmann::json::parse(text.get<std::string>());
    const std::vector<size_t> shape = golden_formats().shape(name + "/hist");
    const size_t steps = shape.at(0), length = shape.at(1), slots = shape.at(2);
    const auto amax = golden_formats().read<uint32_t>(name + "/amax");
    const kernels::DelayedScaling scaling{
        options.at("fmt") == "e4m3" ? Fp8Format::e4m3 : Fp8Format::e5m2,
        options.at("margin").get<int>(),
        options.at("algo") == "max" ? kernels::AmaxAlgorithm::max
                                    : kernels::AmaxAlgorithm::most_recent};
    std::vector<float> history(length * slots, 0.0f), scale(slots, 1.0f);
    std::vector<uint32_t> histories, scales;
    for (size_t step = 0; step < steps; ++step) {
      for (size_t slot = 0; slot < slots; ++slot)
        history[slot] = std::bit_cast<float>(amax[step * slots + slot]);
      kernels::update_delayed({history.data(), scale.data(), length, slots}, scaling);
      for (const float value : history) histories.push_back(bits_of(value));
      for (const float value : scale) scales.push_back(bits_of(value));
    }
    EXPECT_TRUE(same_bits<uint32_t>(histories, golden_formats().read<uint32_t>(name + "/hist")));
    EXPECT_TRUE(same_bits<uint32_t>(scales, golden_formats().read<uint32_t>(name + "/scale")));
  }
  EXPECT_EQ(cases, 3);
}

}  // namespace
}  // namespace tandem::testing::kernels_golden
