// Frames: memory of dead values serves again, anybody else's never does.
#include "core/call.h"
#include "support/tensors.h"

namespace tandem::testing {
namespace {

constexpr int64_t kLarge = 64 * 1024;  // elements of float32: above what is worth keeping

class FrameMemory : public ::testing::Test {
 protected:
  Frame frame(Path path = Path::direct) { return {path, true, types_, slots_, 2}; }
  std::vector<Type> types_{Type{}, Type{}};
  std::vector<uint16_t> slots_{0, 1};
  at::Tensor like_ = random({1});
};

TEST_F(FrameMemory, OfADeadValueServesAgain) {
  Frame f = frame();
  f.tensor(Value{0}) = f.allocate({kLarge}, at::kFloat, like_);
  const void* memory = f.tensor(Value{0}).const_data_ptr();
  f.retire(Value{0}, /*reusable=*/true);
  EXPECT_FALSE(f.tensor(Value{0}).defined());
  const at::Tensor again = f.allocate({2, kLarge / 2}, at::kFloat, like_);
  EXPECT_EQ(again.const_data_ptr(), memory);
  EXPECT_EQ(again.sizes(), (std::vector<int64_t>{2, kLarge / 2}));
  EXPECT_TRUE(again.is_contiguous());
  EXPECT_NE(f.allocate({kLarge}, at::kFloat, like_).const_data_ptr(), memory)
      << "it serves one value only";
}

TEST_F(FrameMemory, OfAValueThatOthersHoldDoesNot) {
  Frame f = frame();
  f.tensor(Value{0}) = f.allocate({kLarge}, at::kFloat, like_);
  const at::Tensor held = f.tensor(Value{0});
  f.retire(Value{0}, true);
  EXPECT_NE(f.allocate({kLarge}, at::kFloat, like_).const_data_ptr(), held.const_data_ptr());

  f.tensor(Value{1}) = f.allocate({kLarge}, at::kFloat, like_);
  const at::Tensor view = f.tensor(Value{1}).view({2, -1});
  f.retire(Value{1}, true);
  EXPECT_NE(f.allocate({kLarge}, at::kFloat, like_).const_data_ptr(), view.const_data_ptr());
}

TEST_F(FrameMemory, OfAnotherDtypeOrSizeDoesNot) {
  Frame f = frame();
  f.tensor(Value{0}) = f.allocate({kLarge}, at::kFloat, like_);
  const void* memory = f.tensor(Value{0}).const_data_ptr();
  f.retire(Value{0}, true);
  EXPECT_NE(f.allocate({kLarge}, at::kInt, like_).const_data_ptr(), memory);
  EXPECT_NE(f.allocate({kLarge + 1}, at::kFloat, like_).const_data_ptr(), memory) << "too small";
  EXPECT_NE(f.allocate({kLarge / 4}, at::kFloat, like_).const_data_ptr(), memory) << "too large";
  EXPECT_EQ(f.allocate({kLarge}, at::kFloat, like_).const_data_ptr(), memory);
}

TEST_F(FrameMemory, IsNotReusedWhereForbidden) {
  Frame f = frame();
  f.tensor(Value{0}) = f.allocate({kLarge}, at::kFloat, like_);
  c10::weak_intrusive_ptr<c10::TensorImpl> weak(f.tensor(Value{0}).getIntrusivePtr());
  f.retire(Value{0}, /*reusable=*/false);
  EXPECT_TRUE(weak.expired());
}

TEST_F(FrameMemory, IsNotReusedThroughTheDispatcher) {
  Frame f = frame(Path::dispatch);
  f.tensor(Value{0}) = f.allocate({kLarge}, at::kFloat, like_);
  c10::weak_intrusive_ptr<c10::TensorImpl> weak(f.tensor(Value{0}).getIntrusivePtr());
  f.retire(Value{0}, /*reusable=*/true);
  EXPECT_TRUE(weak.expired());
}

TEST_F(FrameMemory, AllPartsOfAGroupDie) {
  types_[0].format = Format::fp8_e4m3;
  slots_ = {0, 3};
  Frame f(Path::direct, true, types_, slots_, 4);
  for (size_t part = 0; part < 3; ++part) f.tensor(Value{0}, part) = random({2});
  f.tensor(Value{1}) = random({3});
  f.retire(Value{0}, true);
  for (size_t part = 0; part < 3; ++part) EXPECT_FALSE(f.tensor(Value{0}, part).defined());
  EXPECT_TRUE(f.tensor(Value{1}).defined());
}

}  // namespace
}  // namespace tandem::testing
