// Order of steps and the last reader of each value.
#include "planner/schedule.h"

#include "planner/liveness.h"
#include "support/throws.h"

namespace tandem::testing::planner_schedule {
namespace {

using ::testing::ElementsAre;

Step step(std::string name, std::vector<int> reads, std::vector<int> writes,
          std::vector<int> mutates = {}) {
  const auto values = [](const std::vector<int>& numbers) {
    Values list;
    for (const int number : numbers) list.push_back(static_cast<Value>(number));
    return list;
  };
  Step made;
  made.name = std::move(name);
  made.reads = values(reads);
  made.writes = values(writes);
  made.mutates = values(mutates);
  return made;
}

std::vector<std::string> kinds(const Steps& steps) {
  std::vector<std::string> names;
  for (const Step& step : steps) names.push_back(step.name);
  return names;
}

std::vector<Type> types_with_gradients(const std::vector<size_t>& gradients) {
  std::vector<Type> types(32);
  for (const size_t gradient : gradients) types[gradient].origin = Origin::gradient;
  return types;
}

TEST(Schedule, WritersComeBeforeReadersElseTheOrderStays) {
  Steps steps{step("c", {2}, {3}), step("a", {0}, {1}), step("b", {1}, {2}), step("d", {0}, {4})};
  schedule(steps);
  EXPECT_THAT(kinds(steps), ElementsAre("a", "b", "c", "d"));
}

TEST(Schedule, MutationsOfOneValueKeepTheirOrder) {
  Steps steps{step("first", {2}, {3}, {9}), step("second", {0}, {1}, {9}), step("a", {0}, {2})};
  schedule(steps);
  EXPECT_THAT(kinds(steps), ElementsAre("a", "first", "second"));
}

TEST(Schedule, AMutationStaysBetweenTheReadersAroundIt) {
  Steps steps{step("before", {9, 2}, {3}), step("writes", {0}, {1}, {9}), step("after", {9}, {4}),
              step("a", {0}, {2})};
  schedule(steps);
  EXPECT_THAT(kinds(steps), ElementsAre("a", "before", "writes", "after"));
}

TEST(Schedule, AReadOfWhatNobodyWroteIsABrokenInvariant) {
  std::vector<Type> types(5);
  types[3].name = "3.bias.y";
  Steps steps{step("first", {0}, {1}), step("second", {1, 3}, {2})};
  EXPECT_ERROR(check_reads(steps, {true}, types), c10::Error,
               "step second reads 3.bias.y, which nothing has written");
  EXPECT_NO_THROW(check_reads(steps, {true, false, false, true}, types));
  steps[0].dead = {Value{0}};
  steps[1].reads = {Value{1}, Value{0}, Value::none};
  EXPECT_ERROR(check_reads(steps, {true}, types), c10::Error, "which nothing has written");
}

TEST(Schedule, ACircleIsABrokenInvariant) {
  Steps steps{step("a", {1}, {2}), step("b", {2}, {1})};
  EXPECT_ERROR(schedule(steps), c10::Error, "a plan's steps depend on each other in a circle");
}

TEST(Schedule, ValuesFromForwardAreThoseThatNoStepWrites) {
  const Steps steps{step("a", {0, 5}, {1}), step("b", {1, 0, 6}, {2})};
  EXPECT_THAT(values_from_forward(steps, {Value{5}}), ElementsAre(Value{0}, Value{6}));
}

TEST(Schedule, AValueDiesAtItsLastReaderUnlessItStays) {
  Steps steps{step("a", {0}, {1}), step("b", {1}, {2}), step("c", {1, 2}, {3}),
              step("d", {3}, {4})};
  std::vector<bool> stays(5);
  stays[4] = true;
  find_dead(steps, stays);
  EXPECT_THAT(steps[0].dead, ElementsAre(Value{0})) << "an argument";
  EXPECT_TRUE(steps[1].dead.empty());
  EXPECT_THAT(steps[2].dead, ElementsAre(Value{1}, Value{2}));
  EXPECT_THAT(steps[3].dead, ElementsAre(Value{3}));
}

TEST(Schedule, ReemissionNeedsAReaderThatIsNoAncestor) {
  const auto backward = [](std::vector<int> reader_reads) {
    // "writer" may write 7 again, behind gradient 10 that "before" writes.
    Steps steps{step("before", {20}, {10}), step("writer", {10, 1}, {11, 7}),
                step("reader", std::move(reader_reads), {12})};
    for (size_t s = 0; s < steps.size(); ++s) {
      steps[s].covers = {{static_cast<uint32_t>(s), 1}};
    }
    return steps;
  };
  const std::vector<bool> free(32);
  const std::vector<Type> types = types_with_gradients({10, 11, 12});
  Steps steps = backward({20, 7});
  choose_reemitted({}, steps, types, free, {}, {});
  EXPECT_EQ(steps[1].writes[1], Value{7});

  steps = backward({20});
  choose_reemitted({}, steps, types, free, {}, {});
  EXPECT_EQ(steps[1].writes[1], Value::none) << "nobody reads it";

  steps = backward({20, 7});
  steps[0].reads.push_back(Value{7});
  choose_reemitted({}, steps, types, free, {}, {});
  EXPECT_EQ(steps[1].writes[1], Value::none) << "an ancestor of the writer reads it";

  steps = backward({20, 7});
  std::vector<bool> argument(32);
  argument[7] = true;
  choose_reemitted({}, steps, types, argument, {}, {});
  EXPECT_EQ(steps[1].writes[1], Value::none) << "an argument costs nothing to keep";
}

TEST(Schedule, CodesAreMadeAgainWhereTheirSourceIsThere) {
  Steps forward{step("quantize", {7}, {8})};
  forward[0].kind = StepKind::quantize;
  const auto backward = [] {
    // "writer" may write 7 again; "reader" reads its codes.
    Steps steps{step("writer", {10}, {11, 7}), step("reader", {20, 8}, {12})};
    for (size_t s = 0; s < steps.size(); ++s) {
      steps[s].covers = {{static_cast<uint32_t>(s), 1}};
    }
    return steps;
  };
  const std::vector<bool> free(32);
  const std::vector<Type> types = types_with_gradients({10, 11, 12});
  Steps steps = backward();
  choose_reemitted(forward, steps, types, free, {}, {});
  schedule(steps);
  EXPECT_THAT(kinds(steps), ElementsAre("writer", "quantize", "reader"));
  EXPECT_EQ(steps[0].writes[1], Value{7}) << "for the quantize step alone";

  steps = backward();
  steps[0].reads.push_back(Value{8});
  choose_reemitted(forward, steps, types, free, {}, {});
  EXPECT_THAT(kinds(steps), ElementsAre("writer", "reader")) << "the writer needs the codes";

  steps = backward();
  std::vector<bool> argument(32);
  argument[7] = true;
  choose_reemitted(forward, steps, types, argument, {}, {});
  EXPECT_THAT(kinds(steps), ElementsAre("writer", "reader")) << "an argument may be freed earlier";

  steps = backward();
  choose_reemitted(forward, steps, types, argument, {}, {Value{7}});
  EXPECT_THAT(kinds(steps), ElementsAre("writer", "reader", "quantize")) << "it is asked for";
  steps = backward();

  steps[1].reads.push_back(Value{7});
  choose_reemitted(forward, steps, types, argument, {}, {});
  EXPECT_THAT(kinds(steps), ElementsAre("writer", "reader", "quantize")) << "it is kept anyway";
}

}  // namespace
}  // namespace tandem::testing::planner_schedule
