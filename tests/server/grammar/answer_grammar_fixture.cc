#include "tests/server/grammar/answer_grammar_fixture.h"

#include <algorithm>
#include <cstdint>
#include <vector>

namespace k3 {

AnswerGrammarTest::Answer AnswerGrammarTest::Walk(const CompiledGrammar& grammar,
                                                  std::shared_ptr<const Tokenizer> tokenizer, ChatFormat format,
                                                  OpenChannel open, int limit, std::string_view favourites) {
  const auto constraint = grammar.NewConstraint();
  const auto parser = MakeOutputParser(tokenizer, format, open, 0);
  const int32_t vocab_size = tokenizer->vocab_size() + 64;
  std::vector<uint32_t> mask(static_cast<size_t>(vocab_size + 31) / 32);
  std::vector<OutputEvent> events;
  Answer answer;
  for (int step = 0; step < limit && !answer.finished; ++step) {
    std::fill(mask.begin(), mask.end(), ~0u);
    constraint->FillMask(mask);
    std::vector<int32_t> allowed, ending;
    for (int32_t id = 0; id < vocab_size; ++id) {
      if ((mask[static_cast<size_t>(id) / 32] >> (id % 32) & 1) == 0) continue;
      if (id >= tokenizer->vocab_size()) {
        ADD_FAILURE() << "padding is allowed";
        return answer;
      }
      allowed.push_back(id);
      const std::string_view bytes = tokenizer->TokenBytes(id);
      const bool ends = tokenizer->IsSpecial(id) || bytes.find_first_of("\"}],") != std::string_view::npos;
      const bool liked = tokenizer->IsSpecial(id) || bytes.find_first_not_of(favourites) == std::string_view::npos;
      if (favourites.empty() ? ends : liked) ending.push_back(id);
    }
    if (allowed.empty()) {
      ADD_FAILURE() << "a dead end after " << answer.text;
      return answer;
    }
    const auto& from = !ending.empty() && (!favourites.empty() || random_() % 2 == 0) ? ending : allowed;
    const int32_t id = from[random_() % from.size()];
    EXPECT_TRUE(constraint->Accept(id));
    answer.text += tokenizer->TokenBytes(id);
    const auto& stops = tokenizer->stop_ids();
    answer.finished = std::find(stops.begin(), stops.end(), id) != stops.end();
    parser->Append(id, &events);
  }
  parser->Finish(&events, nullptr);
  for (const OutputEvent& event : events) answer.output.Add(event);
  return answer;
}

}  // namespace k3
