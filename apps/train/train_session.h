#pragma once

#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "inspection.h"
#include "out_folder.h"
#include "report.h"
#include "safetensors.h"
#include "text_data.h"
#include "train_options.h"
#include "training.h"

namespace tandem::apps {

/// The runs of one `tandem train`, one after the other, and the files that they write.
///
/// Writes into the --out folder: metrics.jsonl continuously; checkpoint.json with its tensors;
/// model-<run>.safetensors and report.html at the end. Nothing is written before all arguments have
/// been checked, and only names that the folder permits are written.
class TrainSession {
 public:
  /// Throws: UserError if the options or the text are not usable.
  TrainSession(const TrainOptions& options, bool quiet);

  const std::string& out() const { return options_.out; }
  /// The files that it writes under names known beforehand.
  std::vector<std::string> file_names() const;

  /// Continues from the checkpoint in `out`. Throws: UserError if it does not fit; nothing is
  /// overwritten then.
  void resume(const OutFolder& out, const nlohmann::json& state);

  /// Trains until done (returns true), or until SIGINT, SIGTERM or SIGHUP and saves (returns
  /// false).
  bool run(OutFolder& out);

  /// All results as one document.
  nlohmann::json document(bool finished) const;
  /// The table, the sample and the names of the written files, for the terminal.
  std::string summary() const;
  std::string resume_command() const;
  std::string title() const;

 private:
  bool train_one(OutFolder& out, const std::string& run);
  void log_step(OutFolder& out, const std::string& run, int64_t step, const StepMetrics& metrics);
  void finish_one(OutFolder& out, const std::string& run, Training& training,
                  int64_t peak_memory_bytes);
  void save(OutFolder& out, const std::string& run, const Training& training) const;
  void append(OutFolder& out, const nlohmann::json& row) const;
  void begin_metrics(OutFolder& out) const;
  void check_log() const;

  const TrainOptions options_;
  const std::vector<std::string> runs_;
  const bool quiet_;
  const TextData text_;
  const std::string text_checksum_;

  // what a checkpoint holds
  size_t run_index_ = 0;
  int64_t step_ = 0;
  nlohmann::json log_ = nlohmann::json::array();
  std::vector<RunResult> results_;
  /// The current run, by step.
  std::vector<double> losses_, step_seconds_;
  std::string plan_svg_;
  Inspection inspection_;

  /// The tensors of a checkpoint, until its run continues.
  NamedTensors restored_;
  std::string sample_;
};

}  // namespace tandem::apps
