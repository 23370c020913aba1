// FP8 against the vectors of tests/data/README.md, byte by byte.
#include <gtest/gtest.h>

#include <bit>
#include <cfloat>
#include <cmath>

#include "kernels/quantize.h"
#include "support/matrix.h"
#include "support/safetensors.h"
#include "support/targets.h"
#include "support/ulp.h"

namespace tandem::testing::kernels_golden {
namespace {

using kernels::Element;
using kernels::Fp8Format;

constexpr uint32_t kNan = 0x7FC00000;

const Safetensors& golden() {
  static const Safetensors file(TANDEM_SOURCE_DIR "/tests/data/golden_fp8.safetensors");
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
        got.push_back(bits_of(kernels::scale_from_amax(std::bit_cast<float>(bits), GetParam(), 0.0f,
                                                       power_of_two, big)));
      }
      EXPECT_TRUE(same_bits<uint32_t>(got, golden().read<uint32_t>(name))) << name;
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Cpu, GoldenFormat, ::testing::Values(Fp8Format::e4m3, Fp8Format::e5m2),
                         [](const auto& info) { return std::string(name_of(info.param)); });

class GoldenTarget : public ::testing::TestWithParam<int64_t> {};

TEST_P(GoldenTarget, CurrentScaling) {
  const ScopedTarget target(GetParam());
  int cases = 0;
  for (const auto& [name, text] : golden().metadata().items()) {
    if (name.find("_current_") == std::string::npos) continue;
    ++cases;
    SCOPED_TRACE(name);
    const auto options = nlohmann::json::parse(text.get<std::string>());
    const kernels::CurrentScaling scaling{
        options.at("fmt") == "e4m3" ? Fp8Format::e4m3 : Fp8Format::e5m2,
        options.at("eps").get<float>(), options.at("pow2").get<bool>()};
    const std::vector<size_t> shape = golden().shape(name + "/x");
    const size_t rows = shape.at(0), cols = shape.at(1);
    const bool wide = options.at("dtype") == "fp32";
    const auto x32 = wide ? golden().read<uint32_t>(name + "/x") : std::vector<uint32_t>();
    const auto x16 = wide ? std::vector<uint16_t>() : golden().read<uint16_t>(name + "/x");
    const void* data = wide ? static_cast<const void*>(x32.data()) : x16.data();
    const kernels::ConstRows x{data, wide ? Element::float32 : Element::bfloat16, rows, cols, cols};

    std::vector<uint8_t> codes(rows * cols);
    float dequant_scale = 0, amax = 0;
    kernels::cpu::quantize_current(x, scaling, {codes.data(), &dequant_scale, &amax});
    EXPECT_TRUE(same_bits<uint8_t>(codes, golden().read<uint8_t>(name + "/row_data")));
    EXPECT_EQ(bits_of(dequant_scale), golden().read<uint32_t>(name + "/scale_inv").at(0));
    EXPECT_EQ(bits_of(amax), golden().read<uint32_t>(name + "/amax").at(0));
    EXPECT_EQ(bits_of(kernels::scale_from_amax(amax, scaling.format, scaling.eps,
                                               scaling.power_of_two, FLT_MAX)),
              golden().read<uint32_t>(name + "/scale").at(0));

    Matrix y(Element::float32, rows, cols);
    kernels::cpu::dequantize(codes.data(), scaling.format, dequant_scale, y.view());
    std::vector<uint32_t> got;
    for (size_t i = 0; i < y.size(); ++i) got.push_back(bits_of(y.at(i)));
    EXPECT_TRUE(same_bits<uint32_t>(got, golden().read<uint32_t>(name + "/row_dequant")));
  }
  EXPECT_EQ(cases, 12);
}

INSTANTIATE_TEST_SUITE_P(Cpu, GoldenTarget, ::testing::ValuesIn(all_targets()),
                         [](const auto& info) { return target_name(info.param); });

}  // namespace
}  // namespace tandem::testing::kernels_golden
