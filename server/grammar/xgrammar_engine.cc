#include <algorithm>
#include <chrono>
#include <exception>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <variant>
#include <vector>

#include "absl/status/status.h"
#include "server/grammar/grammar_engine.h"
#include "server/grammar/json_names.h"
#include "server/grammar/length_limits.h"
#include "server/grammar/mask_workers.h"
#include "server/grammar/xgrammar_answer.h"
#include "server/grammar/xgrammar_deadline.h"
#include "server/grammar/xgrammar_format.h"
#include "server/text/json_value.h"
#include "server/text/json_writer.h"
#include "xgrammar/xgrammar.h"

// The grammar library's side: trees become its structural tags, its matchers become token constraints.
namespace k3 {
namespace {

constexpr int kProbeSteps = 48;

// Makes the mask for the next token as soon as the last one is known, on the workers.
class XgrammarConstraint final : public TokenConstraint {
 public:
  XgrammarConstraint(std::shared_ptr<const AnswerRules> rules, std::string begun, std::shared_ptr<MaskWorkers> workers)
      : rules_(std::move(rules)),
        begun_(std::move(begun)),
        workers_(std::move(workers)),
        state_(std::make_shared<AnswerState>(rules_, begun_)) {
    if (state_->fits()) Prepare();
  }
  ~XgrammarConstraint() override { Settle(); }

  bool fits() const { return state_->fits(); }

  bool FillMask(std::span<uint32_t> mask) override {
    if (!Settle() || ready_->mask.size() != mask.size()) return state_->FillMask(mask);
    if (ready_->restricts) std::copy(ready_->mask.begin(), ready_->mask.end(), mask.begin());
    return ready_->restricts;
  }

  bool Accept(int32_t token) override {
    Settle();
    ready_.reset();
    job_.reset();
    if (!state_->Accept(token)) return false;
    Prepare();
    return true;
  }

  std::unique_ptr<TokenConstraint> Fork() const override {
    return std::make_unique<XgrammarConstraint>(rules_, begun_, workers_);
  }

 private:
  struct Ready {
    std::vector<uint32_t> mask;
    bool restricts = true;
  };

  void Prepare() {
    if (state_->over() || state_->given_up()) return;
    ready_ = std::make_shared<Ready>();
    job_ = std::make_shared<MaskWorkers::Job>([state = state_, ready = ready_, size = rules_->mask_words()] {
      ready->mask.assign(size, ~0u);
      ready->restricts = state->FillMask(ready->mask);
    });
    workers_->Post(job_);
  }

  // Whether the mask has been made. Nobody else touches the state after it.
  bool Settle() { return job_ != nullptr && workers_->Take(*job_); }

  const std::shared_ptr<const AnswerRules> rules_;
  const std::string begun_;
  const std::shared_ptr<MaskWorkers> workers_;
  const std::shared_ptr<AnswerState> state_;
  std::shared_ptr<Ready> ready_;
  std::shared_ptr<MaskWorkers::Job> job_;  // null: nothing was prepared
};

class XgrammarGrammar final : public CompiledGrammar {
 public:
  XgrammarGrammar(std::shared_ptr<const AnswerRules> rules, std::shared_ptr<MaskWorkers> workers)
      : rules_(std::move(rules)), workers_(std::move(workers)), bytes_(rules_->grammar.MemorySizeBytes()) {}

  std::unique_ptr<TokenConstraint> NewConstraint(const std::string& begun) const override {
    auto constraint = std::make_unique<XgrammarConstraint>(rules_, begun, workers_);
    if (!constraint->fits()) return nullptr;
    return constraint;
  }
  size_t bytes() const override { return bytes_; }

 private:
  const std::shared_ptr<const AnswerRules> rules_;
  const std::shared_ptr<MaskWorkers> workers_;
  const size_t bytes_;
};

// Half of the processors, but few: the work of a step is small.
int WorkerCount() { return std::clamp(static_cast<int>(std::thread::hardware_concurrency()) / 2, 1, 4); }

// Whether the answer may hold JSON objects, or elements, with names of its own.
bool HasNames(const GrammarNode& node) {
  if (node.kind == GrammarNode::Kind::kJsonSchema) return true;
  if (node.kind == GrammarNode::Kind::kEbnf && !node.foreign) return true;
  return std::any_of(node.children.begin(), node.children.end(), HasNames);
}

// The library's messages begin with the time and a line of its source.
std::string WithoutPlace(const std::string& message) {
  const size_t file = message.rfind(".cc:");
  const size_t end = file == std::string::npos ? file : message.find(": ", file);
  return end == std::string::npos ? message : message.substr(end + 2);
}

// Follows the grammar for a while, choosing tokens in an arbitrary fixed way, to find out whether steps take long.
absl::Status Probe(const std::shared_ptr<const AnswerRules>& rules, int32_t vocab_size) {
  const std::vector<int32_t>& stop_ids = rules->stop_ids;
  AnswerState state(rules, "");
  std::vector<uint32_t> mask(static_cast<size_t>(vocab_size + 31) / 32);
  std::vector<int32_t> allowed;
  uint32_t random = 12345;
  for (int step = 0; step < kProbeSteps; ++step) {
    std::fill(mask.begin(), mask.end(), ~0u);
    state.FillMask(mask);
    if (state.given_up()) {
      return absl::InvalidArgumentError("is too ambiguous: following it would take too long");
    }
    allowed.clear();
    for (int32_t id = 0; id < vocab_size; ++id) {
      if ((mask[static_cast<size_t>(id) / 32] >> (id % 32) & 1) != 0) allowed.push_back(id);
    }
    if (allowed.empty()) {
      if (step == 0) return absl::InvalidArgumentError("no text fits");
      return absl::OkStatus();
    }
    random = random * 1664525u + 1013904223u;
    const int32_t token = allowed[(random >> 8) % allowed.size()];
    const bool accepted = state.Accept(token);
    if (state.given_up()) {
      return absl::InvalidArgumentError("is too ambiguous: following it would take too long");
    }
    if (!accepted) return absl::OkStatus();
    if (std::find(stop_ids.begin(), stop_ids.end(), token) != stop_ids.end()) return absl::OkStatus();
  }
  return absl::OkStatus();
}

class XgrammarEngine final : public GrammarEngine {
 public:
  XgrammarEngine(xgrammar::TokenizerInfo info, const Tokenizer& tokenizer, int32_t vocab_size,
                 std::vector<int32_t> stop_ids)
      : info_(std::move(info)),
        lengths_(std::make_shared<const TokenLengths>(tokenizer, vocab_size)),
        names_(std::make_shared<const NameTokens>(tokenizer, vocab_size)),
        workers_(std::make_shared<MaskWorkers>(WorkerCount())),
        vocab_size_(vocab_size),
        stop_ids_(std::move(stop_ids)) {}

  absl::StatusOr<std::shared_ptr<const CompiledGrammar>> Compile(const GrammarNode& root,
                                                                 std::chrono::milliseconds time_limit) const override {
    try {
      const xgrammar::ScopedDeadline deadline(std::chrono::duration<double>(time_limit).count());
      JsonValue tag = JsonValue::Object();
      tag.Set("type", JsonValue::String("structural_tag"));
      tag.Set("format", ToXgrammarFormat(root));
      const auto grammar = xgrammar::Grammar::FromStructuralTag(WriteJson(tag, {.number_as_written = true}), info_);
      if (const auto* error = std::get_if<xgrammar::StructuralTagError>(&grammar)) {
        return std::visit([](const auto& e) { return absl::InvalidArgumentError(WithoutPlace(e.what())); }, *error);
      }
      // One thread and no cache of its own: the pool has both.
      xgrammar::GrammarCompiler compiler(info_, /*max_threads=*/1, /*cache_enabled=*/false);
      auto compiled = std::make_shared<const AnswerRules>(compiler.CompileGrammar(std::get<xgrammar::Grammar>(grammar)),
                                                          stop_ids_, lengths_, HasNames(root) ? names_ : nullptr);
      const absl::Status status = Probe(compiled, vocab_size_);
      if (!status.ok()) return status;
      return std::make_shared<XgrammarGrammar>(std::move(compiled), workers_);
    } catch (const xgrammar::DeadlinePassed&) {
      return absl::DeadlineExceededError("takes too long to compile");
    } catch (const std::exception& error) {
      return absl::InvalidArgumentError(WithoutPlace(error.what()));
    }
  }

 private:
  const xgrammar::TokenizerInfo info_;
  const std::shared_ptr<const TokenLengths> lengths_;
  const std::shared_ptr<const NameTokens> names_;
  const std::shared_ptr<MaskWorkers> workers_;
  const int32_t vocab_size_;
  const std::vector<int32_t> stop_ids_;
};

}  // namespace

std::unique_ptr<GrammarEngine> MakeGrammarEngine(const Tokenizer& tokenizer, int32_t vocab_size,
                                                 std::vector<int32_t> stop_ids) {
  std::vector<std::string> vocabulary;
  const int32_t known = std::min(vocab_size, tokenizer.vocab_size());
  vocabulary.reserve(static_cast<size_t>(known));
  for (int32_t id = 0; id < known; ++id) {
    const std::string bytes(tokenizer.TokenBytes(id));
    vocabulary.push_back(tokenizer.IsSpecial(id) ? kControlByte + bytes : bytes);
  }
  xgrammar::TokenizerInfo info(vocabulary, xgrammar::VocabType::RAW, vocab_size, stop_ids);
  return std::make_unique<XgrammarEngine>(std::move(info), tokenizer, vocab_size, std::move(stop_ids));
}

}  // namespace k3
