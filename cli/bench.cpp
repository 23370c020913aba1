#include <algorithm>
#include <chrono>
#include <functional>
#include <memory>
#include <nlohmann/json.hpp>

#include "bench_quantizers.h"
#include "commands.h"
#include "errors.h"
#include "output.h"
#include "pipeline_syntax.h"
#include "plain_pipeline.h"
#include "progress.h"
#include "saved_bytes.h"
#include "text.h"

namespace tandem::cli {

namespace {

constexpr const char* kBenchExamples =
    "\nPlain is the same ops as libtorch's own functions, on the same parameters. Both take turns, "
    "so that what else the\n"
    "machine does hits both; times are medians over rounds.\n\n"
    "Examples:\n"
    "  tandem bench rms_norm:256 linear:256:1408 swiglu linear:704:256 --rows 1024\n"
    "  tandem bench swiglu --width 2816 --rows 4096 --dtype bfloat16\n"
    "  tandem bench quantizers --rows 4096 --width 1024   every quantizer of every recipe, codes "
    "of\n"
    "                                                      both directions, against a copy";

constexpr double kRoundSeconds = 2e-3;  // a call shorter than this is repeated within a round
constexpr const char* kQuantizers = "quantizers";  // instead of a pipeline
constexpr int64_t kQuantizedWidth = 1024;          // without --width
constexpr double kTwice = 3;  // forward, grad_input and grad_weight: three products

struct BenchArguments {
  PipelineArguments pipeline;
  int64_t rounds = 50;
  bool json = false;
};

using Call = std::function<void()>;

double seconds_of(const Call& call, int64_t repeats) {
  const auto begin = std::chrono::steady_clock::now();
  for (int64_t i = 0; i < repeats; ++i) call();
  const std::chrono::duration<double> taken = std::chrono::steady_clock::now() - begin;
  return taken.count() / static_cast<double>(repeats);
}

/// Median seconds of each call; the calls take turns in every round.
std::vector<double> measure(const std::vector<Call>& calls, int64_t rounds, Progress& progress) {
  std::vector<int64_t> repeats;
  for (const Call& call : calls) {
    seconds_of(call, 2);  // plans, caches, pages
    repeats.push_back(
        std::clamp<int64_t>(static_cast<int64_t>(kRoundSeconds / seconds_of(call, 1)), 1, 10000));
  }
  std::vector<std::vector<double>> seconds(calls.size());
  for (int64_t round = 0; round < rounds; ++round) {
    for (size_t i = 0; i < calls.size(); ++i)
      seconds[i].push_back(seconds_of(calls[i], repeats[i]));
    progress.show("bench", round + 1, "rounds");
  }
  progress.finish();
  std::vector<double> medians;
  for (auto& values : seconds) medians.push_back(median(std::move(values)));
  return medians;
}

/// One row of the result: what was timed, both times, and how much work that is.
struct Timing {
  std::string name;
  double plain_seconds, tandem_seconds;
  /// floating-point operations, or bytes that must move.
  double work;
  /// "GFLOP/s" or "GB/s".
  const char* work_unit;
};

void to_json(nlohmann::json& to, const Timing& from) {
  to = {{"plain_seconds", from.plain_seconds},
        {"tandem_seconds", from.tandem_seconds},
        {"tandem_per_plain", from.tandem_seconds / from.plain_seconds},
        {"unit", from.work_unit},
        {"plain_rate", from.work / from.plain_seconds * 1e-9},
        {"tandem_rate", from.work / from.tandem_seconds * 1e-9}};
}

std::string microseconds(double seconds) { return format("%.1f us", seconds * 1e6); }

std::string table(const std::vector<Timing>& timings, double plain_saved, double tandem_saved) {
  std::string text = format("%-20s %14s %14s %14s %12s\n", "", "plain", "tandem", "tandem/plain",
                            timings.front().work_unit);
  for (const Timing& t : timings) {
    text += format("%-20s %14s %14s %14.2f %12.1f\n", t.name.c_str(),
                   microseconds(t.plain_seconds).c_str(), microseconds(t.tandem_seconds).c_str(),
                   t.tandem_seconds / t.plain_seconds, t.work / t.tandem_seconds * 1e-9);
  }
  return text + format("%-20s %14s %14s %14.2f\n", "kept for backward",
                       bytes_text(plain_saved).c_str(), bytes_text(tandem_saved).c_str(),
                       tandem_saved / std::max(plain_saved, 1.0));
}

int bench(const BenchArguments& arguments) {
  if (arguments.pipeline.words == std::vector<std::string>{kQuantizers}) {
    const int64_t width = arguments.pipeline.width > 0 ? arguments.pipeline.width : kQuantizedWidth;
    print(bench_quantizers(arguments.pipeline.rows, width, arguments.pipeline.scalar_type(),
                           arguments.json, [&](const std::vector<Call>& calls) {
                             Progress progress(!arguments.json, arguments.rounds);
                             return measure(calls, arguments.rounds, progress);
                           }));
    return kExitOk;
  }
  Workload workload = make_workload(arguments.pipeline);
  const PlainPipeline plain(workload);
  const auto functional_forward = [&] { return plain.forward(workload.x, workload.extra_inputs); };
  const auto tandem_forward = [&] { return workload.forward(); };
  const std::vector<Call> calls{[&] { functional_forward(); }, [&] { tandem_forward(); },
                                [&] { backward(functional_forward()); },
                                [&] { backward(tandem_forward()); }};

  std::vector<at::Tensor> parameters = workload.pipeline->parameters(), kept_alive;
  const auto is_parameter = [&](const void* storage) {
    return std::any_of(parameters.begin(), parameters.end(), [&](const at::Tensor& p) {
      return p.storage().unsafeGetStorageImpl() == storage;
    });
  };
  const auto plain_saved = static_cast<double>(
      saved_for_backward_bytes([&] { kept_alive = functional_forward(); }, is_parameter));
  const auto tandem_saved = static_cast<double>(
      saved_for_backward_bytes([&] { kept_alive = tandem_forward(); }, is_parameter));

  const bool products = workload.parsed.product_flops > 0;
  const double moved = total_bytes(kept_alive) + total_bytes(parameters) +
                       total_bytes(workload.extra_inputs) +
                       static_cast<double>(workload.x.nbytes());
  const double forward_work = products ? workload.parsed.product_flops : moved;
  const double both_work = products ? kTwice * workload.parsed.product_flops : 2 * moved;
  const char* unit = products ? "GFLOP/s" : "GB/s";

  Progress progress(!arguments.json, arguments.rounds);
  const std::vector<double> seconds = measure(calls, arguments.rounds, progress);
  const std::vector<Timing> timings{
      {"forward", seconds[0], seconds[1], forward_work, unit},
      {"forward + backward", seconds[2], seconds[3], both_work, unit}};
  if (arguments.json) {
    const nlohmann::json document{{"command", "bench"},
                                  {"pipeline", arguments.pipeline.words},
                                  {"rows", arguments.pipeline.rows},
                                  {"dtype", arguments.pipeline.dtype},
                                  {"recipe", arguments.pipeline.recipe},
                                  {"rounds", arguments.rounds},
                                  {"forward", timings[0]},
                                  {"forward_backward", timings[1]},
                                  {"plain_saved_bytes", plain_saved},
                                  {"tandem_saved_bytes", tandem_saved}};
    print(document.dump(1) + "\n");
  } else {
    print(table(timings, plain_saved, tandem_saved));
  }
  return kExitOk;
}

}  // namespace

void add_bench(CLI::App& tandem, Action& action) {
  const auto arguments = std::make_shared<BenchArguments>();
  CLI::App& app = add_command(
      tandem, "bench", "Time a pipeline against the same ops as libtorch's own functions.",
      op_list_help() + kBenchExamples, action, [arguments] { return bench(*arguments); });
  add_pipeline_options(app, arguments->pipeline);
  add_option(app, "--rounds", arguments->rounds, Whole{1, 1'000'000},
             "rounds to take the median of");
  add_flag(app, "--json", arguments->json, "print one JSON document");
}

}  // namespace tandem::cli
