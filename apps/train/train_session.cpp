#include "train_session.h"

#include <ATen/Parallel.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <numeric>
#include <utility>

#include "checkpoint.h"
#include "program/errors.h"
#include "program/files.h"
#include "program/memory.h"
#include "program/progress.h"
#include "program/strings.h"

namespace tandem::apps {

namespace {

using nlohmann::json;
namespace fs = std::filesystem;

constexpr int64_t kSampleBytes = 240;

volatile std::sig_atomic_t interrupted = 0;

/// The first Ctrl-C or SIGTERM stops at the next step; a second one ends the process at once. A
/// closing terminal may send SIGHUP twice, directly and through the shell, and means one stop;
/// under nohup SIGHUP is ignored.
void catch_interrupts() {
  struct sigaction action {
  }, before{};
  action.sa_handler = [](int) { interrupted = 1; };
  action.sa_flags = SA_RESTART;
  ::sigaction(SIGHUP, nullptr, &before);
  if (before.sa_handler != SIG_IGN) ::sigaction(SIGHUP, &action, nullptr);
  action.sa_flags = static_cast<int>(SA_RESTART | SA_RESETHAND);
  ::sigaction(SIGINT, &action, nullptr);
  ::sigaction(SIGTERM, &action, nullptr);
}

constexpr const char *kMetricsName = "metrics.jsonl", *kReportName = "report.html";

std::string model_name(const std::string& run) { return "model-" + run + ".safetensors"; }

/// The last row of a run in metrics.jsonl.
json final_row(const RunResult& result) {
  json row = result;
  row["final"] = true;
  return row;
}

/// `make run` passes the time at which it began, in seconds since 1970, so that the time from a
/// clone to its first step can be printed.
void print_time_since_make() {
  const char* const started = std::getenv("TANDEM_STARTED");
  if (started == nullptr) return;
  const std::chrono::duration<double> now = std::chrono::system_clock::now().time_since_epoch();
  std::fprintf(stderr, "first training step: %.1f s after make began\n",
               now.count() - std::atof(started));
}

}  // namespace

TrainSession::TrainSession(const TrainOptions& options, bool quiet)
    : options_(resolved(options)),
      runs_(options_.run_names()),
      quiet_(quiet),
      text_(options_.text, options_.context),
      text_checksum_(text_.checksum()) {
  at::set_num_threads(static_cast<int>(options_.threads));
}

std::vector<std::string> TrainSession::file_names() const {
  std::vector<std::string> names{kMetricsName, kReportName, kCheckpointName};
  for (const std::string& run : runs_) names.push_back(model_name(run));
  return names;
}

/// Checks that rows are as log_step writes them, run after run.
void TrainSession::check_log() const {
  for (const json& row : log_) {
    const auto run = std::find(runs_.begin(), runs_.end(), row.at("run").get<std::string>());
    const bool fits = run != runs_.end() &&
                      run - runs_.begin() <= static_cast<std::ptrdiff_t>(run_index_) &&
                      row.at("step").is_number_integer() && row.at("bits_per_byte").is_number();
    if (!fits)
      throw json::other_error::create(0, "a row of its log is none: " + row.dump(), nullptr);
  }
}

void TrainSession::resume(const OutFolder& out, const json& state) try {
  const std::string checksum = state.at("text").at("fnv1a64");
  if (checksum != text_checksum_) {
    throw UserError("expected the text that the checkpoint was trained on (checksum " + checksum +
                    "), got " + options_.text + " (" + text_checksum_ +
                    "). Pass that text with --text, or start again without --resume.");
  }
  for (const char* counter : {"run_index", "step"})  // get_to() would convert a fraction, or 1e300
    if (!state.at(counter).is_number_integer())
      throw json::other_error::create(0, std::string(counter) + " is no integer", nullptr);
  state.at("run_index").get_to(run_index_);
  state.at("step").get_to(step_);
  state.at("results").get_to(results_);
  state.at("losses").get_to(losses_);
  state.at("step_seconds").get_to(step_seconds_);
  state.at("plan_svg").get_to(plan_svg_);
  inspection_.set_rows(state.value("inspection", json::array()));
  log_ = state.at("log");
  const auto is_of_its_run = [&](const RunResult& result) {
    return result.run == runs_[static_cast<size_t>(&result - results_.data())];
  };
  const bool fits = run_index_ < runs_.size() && results_.size() == run_index_ &&
                    std::all_of(results_.begin(), results_.end(), is_of_its_run) && step_ >= 0 &&
                    step_ <= options_.steps && losses_.size() == static_cast<size_t>(step_) &&
                    step_seconds_.size() == losses_.size() && log_.is_array();
  if (!fits) throw json::other_error::create(0, "run_index, step and losses disagree", nullptr);
  check_log();
  restored_ = load_checkpoint_tensors(out.path(), state);
  Training(options_, runs_[run_index_], text_).restore(restored_, step_);  // throws if unfit
} catch (const json::exception& error) {
  throw UserError("expected the state of a training in " + (out.path() / kCheckpointName).string() +
                  ", got a document without it (" + error.what() +
                  "). Restore the file from a copy, or start again without --resume.");
}

void TrainSession::save(OutFolder& out, const std::string& run, const Training& training) const {
  const json state{{"configuration", configuration_of(options_)},
                   {"text", {{"bytes", text_.bytes()}, {"fnv1a64", text_checksum_}}},
                   {"run", run},
                   {"run_index", run_index_},
                   {"step", step_},
                   {"results", results_},
                   {"log", log_},
                   {"losses", losses_},
                   {"step_seconds", step_seconds_},
                   {"plan_svg", plan_svg_},
                   {"inspection", inspection_.rows()}};
  save_checkpoint(out, run + "-" + std::to_string(step_), state, training.state());
}

/// Starts metrics.jsonl with the rows known so far, in their order: none, or those of the
/// checkpoint.
void TrainSession::begin_metrics(OutFolder& out) const {
  std::string lines;
  for (size_t i = 0; i < runs_.size(); ++i) {
    for (const json& row : log_) {
      if (row.at("run") == runs_[i]) lines += row.dump() + "\n";
    }
    if (i < results_.size()) lines += final_row(results_[i]).dump() + "\n";
  }
  AtomicFile file = out.begin(kMetricsName);
  file.write(lines);
  out.commit(file);
}

void TrainSession::append(OutFolder& out, const json& row) const {
  out.append(kMetricsName, row.dump() + "\n");
}

void TrainSession::log_step(OutFolder& out, const std::string& run, int64_t step,
                            const StepMetrics& metrics) {
  losses_.push_back(metrics.bits_per_byte);
  step_seconds_.push_back(metrics.seconds);
  if ((step + 1) % options_.log_every != 0 && step + 1 != options_.steps) return;
  const auto rows =
      std::min<std::ptrdiff_t>(options_.log_every, static_cast<std::ptrdiff_t>(losses_.size()));
  const double mean =
      std::accumulate(losses_.end() - rows, losses_.end(), 0.0) / static_cast<double>(rows);
  log_.push_back(
      {{"run", run},
       {"step", step + 1},
       {"bits_per_byte", mean},
       {"learning_rate", metrics.learning_rate},
       {"gradient_norm", metrics.gradient_norm},
       {"tokens_per_second", static_cast<double>(options_.step_tokens()) / metrics.seconds}});
  append(out, log_.back());
}

void TrainSession::finish_one(OutFolder& out, const std::string& run, Training& training,
                              int64_t peak_memory_bytes) {
  RunResult result;
  result.run = run;
  const double seconds = median(step_seconds_);
  result.tokens_per_second =
      seconds > 0 ? static_cast<double>(options_.step_tokens()) / seconds : 0;
  result.peak_memory_bytes = static_cast<double>(peak_memory_bytes);
  result.saved_bytes_per_token = training.saved_bytes_per_token();
  if (std::string svg = training.plan_svg(); !svg.empty()) plan_svg_ = std::move(svg);
  result.validation_bits_per_byte = training.validation_bits_per_byte();
  results_.push_back(result);
  append(out, final_row(result));
  AtomicFile model = out.begin(model_name(run));
  write_safetensors(model, training.parameters());
  out.commit(model);
  if (run_index_ + 1 == runs_.size()) sample_ = printable(training.sample(kSampleBytes));
}

bool TrainSession::train_one(OutFolder& out, const std::string& run) {
  Training(options_, run, text_).step(0);  // buffers that libraries keep count for no run
  PeakMemory memory;
  memory.start();
  Training training(options_, run, text_);
  if (!restored_.empty()) training.restore(std::exchange(restored_, {}), step_);
  const auto steps_before = static_cast<int64_t>(run_index_) * options_.steps;
  const int64_t all_steps = static_cast<int64_t>(runs_.size()) * options_.steps;
  Progress progress(!quiet_, options_.steps);
  Pace pace;
  while (step_ < options_.steps) {
    if (interrupted) {
      progress.finish();
      save(out, run, training);
      return false;
    }
    const bool is_logged =
        (step_ + 1) % options_.log_every == 0 || step_ + 1 == options_.steps || step_ == 0;
    const bool is_inspected = options_.inspect && is_logged;
    if (options_.inspect) training.model().watch(is_inspected);
    const StepMetrics metrics = training.step(step_);
    if (is_inspected)
      inspection_.take(run, step_ + 1, quiet_, [&](int64_t pipeline, size_t op) {
        return training.model().product_at(pipeline, op);
      });
    if (!std::isfinite(metrics.bits_per_byte)) {
      progress.finish();
      throw UserError("expected a finite loss, got " + format("%g", metrics.bits_per_byte) +
                      " at step " + std::to_string(step_ + 1) + " of run " + run +
                      ". Pass a smaller --learning-rate or --clip.");
    }
    log_step(out, run, step_, metrics);
    if (step_ == 0 && run_index_ == 0 && !quiet_) print_time_since_make();
    ++step_;
    pace.add(metrics.seconds);
    progress.show(
        format("%-6s", run.c_str()), step_,
        format("%.3f bits/byte  %.0f tokens/s  ETA %s", metrics.bits_per_byte,
               static_cast<double>(options_.step_tokens()) / pace.step_seconds(),
               duration_text(pace.remaining_seconds(all_steps - steps_before - step_)).c_str()));
    const bool due = options_.checkpoint_every > 0 &&
                     (step_ % options_.checkpoint_every == 0 || step_ == options_.steps);
    if (due) save(out, run, training);
  }
  progress.finish();
  finish_one(out, run, training, memory.bytes());
  return true;
}

bool TrainSession::run(OutFolder& out) {
  catch_interrupts();
  begin_metrics(out);
  for (; run_index_ < runs_.size(); ++run_index_) {
    if (!train_one(out, runs_[run_index_])) return false;
    step_ = 0;
    losses_.clear();
    step_seconds_.clear();
  }
  AtomicFile report = out.begin(kReportName);
  report.write(report_html({title(), results_, &log_, plan_svg_, sample_,
                            options_.inspect ? inspection_svg(inspection_.rows()) : ""}));
  out.commit(report);
  return true;
}

json TrainSession::document(bool finished) const {
  json document{{"command", "train"},
                {"finished", finished},
                {"configuration", configuration_of(options_)},
                {"results", results_},
                {"log", log_},
                {"inspection", inspection_.rows()},
                {"metrics", (fs::path(options_.out) / kMetricsName).string()}};
  if (finished) {
    document["sample"] = sample_;
    document["report"] = (fs::path(options_.out) / kReportName).string();
  } else {
    document["stopped"] = {{"run", runs_[run_index_]}, {"step", step_}};
    document["resume"] = resume_command();
  }
  return document;
}

std::string TrainSession::summary() const {
  return results_table(results_) + "\nText drawn from the last model:\n" + sample_ +
         "\n\nCurves and plan: " + (fs::path(options_.out) / kReportName).string() +
         "\nNumbers:         " + (fs::path(options_.out) / kMetricsName).string() + "\n";
}

std::string TrainSession::resume_command() const {
  return options_.out == TrainOptions().out ? "tandem train --resume"
                                            : "tandem train --resume --out " + options_.out;
}

std::string TrainSession::title() const {
  return format(
      "GPT with %lld layers, hidden %lld, %lld heads, context %lld; %s; %lld steps of %lld x %lld "
      "bytes; %s; threads: %lld",
      static_cast<long long>(options_.layers), static_cast<long long>(options_.hidden),
      static_cast<long long>(options_.heads), static_cast<long long>(options_.context),
      options_.dtype.c_str(), static_cast<long long>(options_.steps),
      static_cast<long long>(options_.batch), static_cast<long long>(options_.context),
      fs::path(options_.text).filename().c_str(), static_cast<long long>(options_.threads));
}

}  // namespace tandem::apps
