#include "engine/sequence.h"

#include <algorithm>

namespace k3 {
namespace {

// Generated tokens for which room is reserved at once; longer answers grow by doubling.
constexpr int32_t kReservedTokens = 4096;

}  // namespace

void Sequence::Begin(const std::vector<int32_t>& eos, int32_t vocab_size, int64_t pool_tokens) {
  if (!tokens.empty()) return;
  const Request& submitted = *request->request;
  const SamplingParams& params = submitted.sampling;
  prompt_length = static_cast<int32_t>(submitted.prompt_tokens.size());
  tokens.reserve(static_cast<size_t>(prompt_length + std::min(params.max_new_tokens, kReservedTokens)));
  tokens.assign(submitted.prompt_tokens.begin(), submitted.prompt_tokens.end());
  // The last token needs no line in a page, because nothing follows it.
  length_limit =
      static_cast<int32_t>(std::min<int64_t>(int64_t{prompt_length} + params.max_new_tokens, pool_tokens + 1));
  sampler.Begin(params, choice, submitted.prompt_tokens, eos, vocab_size);
  repetition.Begin(params.repetition_max_period, params.repetition_count, params.max_new_tokens);
  streams_prompt_scores = params.prompt_logprobs && choice == request->source;
}

void Sequence::ExtendHashes(int32_t page_size) {
  const size_t full = static_cast<size_t>(known() / page_size);
  if (page_hashes.size() >= full) return;
  uint64_t hash = page_hashes.empty() ? ChainRoot(request->request->cache_salt) : page_hashes.back();
  for (size_t i = page_hashes.size(); i < full; ++i) {
    hash =
        ChainHash(hash, std::span(tokens).subspan(i * static_cast<size_t>(page_size), static_cast<size_t>(page_size)));
    page_hashes.push_back(hash);
  }
}

void Sequence::ReservePages(int32_t page_size) {
  const size_t pages = tokens.capacity() / static_cast<size_t>(page_size) + 1;
  lease.pages.reserve(pages);
  page_hashes.reserve(pages);
}

PrefixKey Sequence::Key() const { return {tokens, page_hashes, request->request->cache_salt, request->epoch.number}; }

}  // namespace k3
