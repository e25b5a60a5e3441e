#include "server/openai/batch_prompts.h"

#include <cstdint>
#include <utility>

#include "server/request_prompt.h"
#include "server/request_validation.h"

namespace k3 {

absl::Status PrepareBatch(const ServedModel& model, const GenerationRequest& common, bool vendor_strict,
                          std::vector<GenerationRequest::Input>* prompts, size_t* bad) {
  *bad = 0;
  const EngineLimits limits = model.engine->Limits();
  absl::StatusOr<EffectiveSampling> effective =
      ResolveSampling(common, model, limits, {.vendor_strict = vendor_strict});
  if (!effective.ok()) return effective.status();
  GenerationRequest request;  // what the length of an answer depends on
  request.stopping = common.stopping;
  request.output = common.output;
  for (size_t i = 0; i < prompts->size(); ++i) {
    *bad = i;
    request.input = std::move((*prompts)[i]);
    const absl::StatusOr<RequestPrompt> prompt = PromptOf(model, request, {});
    if (!prompt.ok()) return prompt.status();
    const absl::Status status = ResolveLength(request, static_cast<int64_t>(prompt->ids.size()), limits, &*effective);
    if (!status.ok()) return status;
    (*prompts)[i] = std::vector<uint32_t>(prompt->ids.begin(), prompt->ids.end());
  }
  return absl::OkStatus();
}

}  // namespace k3
