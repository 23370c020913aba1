// Frames: dead values go, and their memory with them, whoever else holds them.
#include "core/call.h"
#include "quantization/formats/quantizer.h"
#include "support/memory.h"
#include "support/tensors.h"

namespace tandem::testing::core_frame {
namespace {

class FrameMemory : public ::testing::Test {
 protected:
  Frame frame(Path path = Path::direct) { return {path, types_, slots_, 2}; }
  std::vector<Type> types_{Type{}, Type{}};
  std::vector<uint32_t> slots_{0, 1};
  at::Tensor like_ = random({1});
};

TEST_F(FrameMemory, OfADeadValueServesAgain) {
  const CachedMemory cached;
  constexpr int64_t kLarge = 1 << 20;
  Frame f = frame();
  f.tensor(Value{0}) = f.allocate({kLarge}, at::kFloat, like_);
  const void* memory = f.tensor(Value{0}).const_data_ptr();
  f.drop(Value{0});
  EXPECT_FALSE(f.tensor(Value{0}).defined());
  EXPECT_EQ(f.allocate({2, kLarge}, at::kBFloat16, like_).const_data_ptr(), memory);
}

TEST_F(FrameMemory, IsLikeTheTensorGiven) {
  for (const Path path : {Path::direct, Path::dispatch}) {
    const at::Tensor fresh = frame(path).allocate({2, 3}, at::kHalf, like_);
    EXPECT_EQ(fresh.sizes(), (std::vector<int64_t>{2, 3}));
    EXPECT_EQ(fresh.scalar_type(), at::kHalf);
    EXPECT_TRUE(fresh.is_contiguous());
  }
  EXPECT_TRUE(frame().allocate({2}, at::kFloat, like_.to(at::kMeta)).is_meta());
}

TEST_F(FrameMemory, AllPartsOfAGroupDie) {
  types_[0].format = Format::codes;
  types_[0].quantizer = &quantizer("fp8_e4m3");
  slots_ = {0, 2};
  Frame f(Path::direct, types_, slots_, 3);
  for (size_t part = 0; part < 2; ++part) f.tensor(Value{0}, part) = random({2});
  f.tensor(Value{1}) = random({3});
  f.drop(Value{0});
  for (size_t part = 0; part < 2; ++part) EXPECT_FALSE(f.tensor(Value{0}, part).defined());
  EXPECT_TRUE(f.tensor(Value{1}).defined());
}

}  // namespace
}  // namespace tandem::testing::core_frame
