// A list of steps under replacement.
#include "planner/step_list.h"

#include <gmock/gmock.h>

namespace tandem::testing::planner_step_list {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;

Step step(std::string name, Values reads, Values writes, uint32_t op, Values mutates = {}) {
  Step made;
  made.name = std::move(name);
  made.reads = std::move(reads);
  made.writes = std::move(writes);
  made.mutates = std::move(mutates);
  made.covers = {{op, 0}};
  return made;
}

constexpr Value v(uint32_t number) { return static_cast<Value>(number); }

TEST(StepList, KnowsWhoTouchesWhatBeforeAndAfterAReplacement) {
  StepList list({step("a", {v(0), v(0)}, {v(1)}, 0), step("b", {v(1), Value::none}, {v(2)}, 1),
                 step("c", {v(0), v(2)}, {v(3)}, 2, {v(0)})},
                4);
  EXPECT_THAT(list.readers(v(0)), ElementsAre(0, 2));
  EXPECT_THAT(list.writers(v(2)), ElementsAre(1));
  EXPECT_THAT(list.mutators(v(0)), ElementsAre(2));
  EXPECT_THAT(list.of_op(1), ElementsAre(1));
  EXPECT_THAT(list.readers(v(9)), IsEmpty());

  Step fused = step("ab", {v(0), v(5)}, {v(2)}, 0);
  fused.covers.push_back({1, 0});
  list.replace(StepList::Places{0, 1}, 1, std::move(fused));
  EXPECT_FALSE(list.has(0));
  EXPECT_THAT(list.readers(v(0)), ElementsAre(1, 2));
  EXPECT_THAT(list.readers(v(1)), IsEmpty()) << "the step at this place reads it no more";
  EXPECT_THAT(list.readers(v(5)), ElementsAre(1));
  EXPECT_THAT(list.writers(v(1)), IsEmpty());
  EXPECT_THAT(list.of_op(0), ElementsAre(1));
  const Steps taken = list.take();
  ASSERT_EQ(taken.size(), 2u);
  EXPECT_EQ(taken[0].name, "ab");
  EXPECT_EQ(taken[1].name, "c");
}

}  // namespace
}  // namespace tandem::testing::planner_step_list
